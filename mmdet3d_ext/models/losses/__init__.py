"""Losses shared by the heads."""
from .focal import FocalLoss
from .segmentation import SegmentationLoss, cross_entropy_loss, focal_dice_loss, resample_targets

__all__ = ['FocalLoss', 'SegmentationLoss', 'cross_entropy_loss', 'focal_dice_loss', 'resample_targets']
