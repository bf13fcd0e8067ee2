"""Losses shared by the heads."""
from .segmentation import SegmentationLoss, cross_entropy_loss, focal_dice_loss, resample_targets

__all__ = ['SegmentationLoss', 'cross_entropy_loss', 'focal_dice_loss', 'resample_targets']
