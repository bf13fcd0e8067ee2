"""3-D detection heads: TransFusion (queries from a heatmap) and CenterPoint, with their coders, matching and
suppression."""
from .assigner import BBoxBEVL1Cost, HungarianAssigner3D, IoU3DCost
from .centerpoint import CenterHead
from .coders import CenterPointBBoxCoder, TransFusionBBoxCoder
from .legacy import swap_box_convention, swap_head_convention
from .separate_head import SeparateHead
from .transfusion import TransFusionHead

__all__ = ['BBoxBEVL1Cost', 'CenterHead', 'CenterPointBBoxCoder', 'HungarianAssigner3D', 'IoU3DCost', 'SeparateHead',
           'TransFusionBBoxCoder', 'TransFusionHead', 'swap_box_convention', 'swap_head_convention']
