"""3-D detection heads: TransFusion (queries from a heatmap) and CenterPoint, with their coders, matching and
suppression."""
from .assigner import BBoxBEVL1Cost, HungarianAssigner3D, IoU3DCost
from .centerpoint import CenterHead
from .coders import CenterPointBBoxCoder, TransFusionBBoxCoder
from .legacy import BOX_ROWS, STATE_VERSION, swap_box_convention, swap_head_convention
from .separate_head import SeparateHead
from .transfusion import TransFusionHead

__all__ = ['BBoxBEVL1Cost', 'BOX_ROWS', 'CenterHead', 'CenterPointBBoxCoder', 'HungarianAssigner3D', 'IoU3DCost',
           'STATE_VERSION', 'SeparateHead', 'TransFusionBBoxCoder', 'TransFusionHead', 'swap_box_convention', 'swap_head_convention']
