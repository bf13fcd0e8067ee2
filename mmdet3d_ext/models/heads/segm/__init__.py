"""BEV map segmentation heads."""
from .enhanced import EnhancedBEVSegmentationHead
from .grid_transform import BEVGridTransform
from .vanilla import BEVSegmentationHead

__all__ = ['BEVGridTransform', 'BEVSegmentationHead', 'EnhancedBEVSegmentationHead']
