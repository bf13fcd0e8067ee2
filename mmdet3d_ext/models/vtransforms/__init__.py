"""View transforms: camera features -> BEV map in the lidar frame."""
from .base import BaseDepthTransform, BaseTransform
from .bevdepth import AwareBEVDepth, AwareDBEVDepth
from .lss import DepthLSSTransform, LSSTransform

__all__ = ['AwareBEVDepth', 'AwareDBEVDepth', 'BaseDepthTransform', 'BaseTransform', 'DepthLSSTransform', 'LSSTransform']
