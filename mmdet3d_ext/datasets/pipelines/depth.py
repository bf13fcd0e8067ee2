"""Depth targets for the camera branch, from the LiDAR points."""
from __future__ import annotations

from typing import Any, Dict, Optional

import numpy as np
import torch
from mmcv.parallel import DataContainer
from mmdet3d.core.points import BasePoints

from ...geometry.transforms import project_points, transform_points
from ...registry import PIPELINES
from .common import as_rgb_array, check_compat


def depth_maps(points: np.ndarray, image_from_lidar: np.ndarray, augmented_from_image: np.ndarray,
               augmented_from_lidar: np.ndarray, height: int, width: int, last_wins: bool = False) -> np.ndarray:
    """``(N, H, W)`` float32 camera depths in metres, 0 where no point falls.

    Args:
        points: (P, >= 3) in the augmented lidar frame.
        image_from_lidar, augmented_from_image: (N, 4, 4). augmented_from_lidar: (4, 4).
        height, width: of the augmented images, pixels.
        last_wins: which of several points in a pixel stays: the last one in order, instead of the nearest. It also keeps
            points behind the camera (as the reference does; they are nearly always off the image).
    """
    original = transform_points(np.linalg.inv(augmented_from_lidar.astype(np.float64)).astype(np.float32), points[:, :3])
    depths = np.zeros((len(image_from_lidar), height, width), np.float32)
    for depth, projection, augmentation in zip(depths, image_from_lidar, augmented_from_image):
        pixels, distance = project_points(projection, original)
        if last_wins:
            distance = np.clip(distance, 1e-5, 1e5)
            seen = np.ones(len(distance), bool)
        else:
            seen = distance > 1e-3
        pixels = pixels @ augmentation[:2, :2].T + augmentation[:2, 3]
        seen &= (pixels[:, 0] >= 0) & (pixels[:, 0] < width) & (pixels[:, 1] >= 0) & (pixels[:, 1] < height)
        u, v = pixels[seen].astype(np.int64).T
        distance = distance[seen]
        if not last_wins:
            order = np.argsort(-distance, kind='stable')  # the nearest is written last
            u, v, distance = u[order], v[order], distance[order]
        depth[v, u] = distance
    return depths


@PIPELINES.register_module()
class GTDepth:
    """Add ``depths`` (N, H, W) float32, the camera depth in metres of the nearest LiDAR point in each pixel, 0 = unknown.

    May stand before DefaultFormatBundle3D (then list ``depths`` in Collect3D's keys) or after Collect3D, as the reference's
    configurations have it. Without images or points nothing is added. The points are not changed.

    Args:
        keyframe_only: use only points of time lag 0 (column 4): moving objects of older sweeps are elsewhere by now.
        compat: ``'reference'``: of several points in a pixel the last one in order wins.
    """

    def __init__(self, keyframe_only: bool = False, compat: Optional[str] = None):
        self.keyframe_only = keyframe_only
        self.compat = check_compat(compat, self)

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        formatted = isinstance(data.get('points'), DataContainer)
        value = {key: item.data if isinstance(item, DataContainer) else item for key, item in data.items()}
        if value.get('img') is None or value.get('points') is None or not len(value['img']):
            return data
        points = value['points'].tensor if isinstance(value['points'], BasePoints) else value['points']
        points = points.numpy()
        if self.keyframe_only:
            if points.shape[1] <= 4:
                raise ValueError(f'GTDepth: keyframe_only needs the time lag in column 4, points have '
                                 f'{points.shape[1]} columns')
            points = points[points[:, 4] == 0]
        first = value['img'][0]
        height, width = first.shape[-2:] if isinstance(first, torch.Tensor) else as_rgb_array(first).shape[:2]
        matrices = {}
        for key in ('lidar2image', 'img_aug_matrix', 'lidar_aug_matrix'):
            if value.get(key) is None:
                if key == 'lidar2image':
                    raise KeyError(f'GTDepth: no {key!r}; after Collect3D it must be among its meta_keys')
                identity = np.eye(4, dtype=np.float32)
                value[key] = identity if key == 'lidar_aug_matrix' else [identity] * len(value['img'])
            matrices[key] = np.asarray(value[key], dtype=np.float32)
        depths = depth_maps(points, matrices['lidar2image'], matrices['img_aug_matrix'], matrices['lidar_aug_matrix'],
                            height, width, last_wins=self.compat == 'reference')
        data['depths'] = depths
        if formatted:
            data['depths'] = DataContainer(torch.from_numpy(depths), stack=True, pad_dims=None)
        return data
