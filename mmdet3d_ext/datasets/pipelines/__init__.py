"""Pipeline steps from a data set's sample description to a training sample. Importing registers all of them.

A step is a callable ``dict -> dict``. It may add keys and replace values, but never changes an array, box or image in place
that another step or the data set still holds. Random numbers come from numpy's global generator, which the engine seeds per
worker. Steps that depend on the epoch have ``set_epoch(epoch)``.
"""
from .bev_aug import GlobalRotScaleTrans, RandomFlip3D
from .depth import GTDepth
from .filters import ObjectNameFilter, ObjectRangeFilter, PointShuffle, PointsRangeFilter
from .formatting import Collect3D, DefaultFormatBundle3D
from .image_aug import GridMask, ImageAug3D, ImageNormalize
from .loading import LoadAnnotations3D, LoadMultiViewImageFromFiles
from .loading_map import LoadBEVSegmentation
from .loading_points import LoadPointsFromFile, LoadPointsFromMultiSweeps
from .loading_radar import LoadRadarPointsMultiSweeps, RadarPoints
from .paste import ObjectPaste

__all__ = [
    'Collect3D', 'DefaultFormatBundle3D', 'GTDepth', 'GlobalRotScaleTrans', 'GridMask', 'ImageAug3D', 'ImageNormalize',
    'LoadAnnotations3D', 'LoadBEVSegmentation', 'LoadMultiViewImageFromFiles', 'LoadPointsFromFile',
    'LoadPointsFromMultiSweeps', 'LoadRadarPointsMultiSweeps', 'ObjectNameFilter', 'ObjectPaste', 'ObjectRangeFilter',
    'PointShuffle', 'PointsRangeFilter', 'RadarPoints', 'RandomFlip3D'
]
