"""Scores: nuScenes detection by the devkit, map IoU summed while running, exact over ranks."""
from .bev_iou import BevMapIoU
from .gather import gather_results, on_rank_zero
from .nuscenes_detection import NuScenesDetectionMetric

__all__ = ['BevMapIoU', 'NuScenesDetectionMetric', 'gather_results', 'on_rank_zero']
