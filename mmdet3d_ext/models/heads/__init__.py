"""Task heads: ``bbox`` (3-D detection) and ``segm`` (BEV map segmentation)."""
from . import bbox, segm

__all__ = ['bbox', 'segm']
