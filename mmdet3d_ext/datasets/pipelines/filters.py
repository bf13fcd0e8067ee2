"""Filters by range and by class, and the shuffling of points. All of them pass empty inputs and absent sensors through."""
from __future__ import annotations

from typing import Any, Dict, Sequence

import numpy as np
import torch

from ...registry import PIPELINES
from .common import rows


def _check_range(point_cloud_range: Sequence[float], owner: object) -> np.ndarray:
    bounds = np.asarray(point_cloud_range, dtype=np.float32)
    if bounds.shape != (6,) or not (bounds[:3] < bounds[3:]).all():
        raise ValueError(f'{type(owner).__name__}: point_cloud_range is [x_lo, y_lo, z_lo, x_hi, y_hi, z_hi] in metres with '
                         f'lo < hi, got {list(point_cloud_range)}')
    return bounds


@PIPELINES.register_module()
class PointsRangeFilter:
    """Keep lidar and radar points strictly inside ``point_cloud_range`` (metres, lidar frame; both sides exclusive)."""

    def __init__(self, point_cloud_range: Sequence[float]):
        self.bounds = _check_range(point_cloud_range, self)

    def _inside(self, points: np.ndarray) -> np.ndarray:
        mask = np.ones(len(points), dtype=bool)
        for axis in range(3):
            mask &= points[:, axis] > self.bounds[axis]
            mask &= points[:, axis] < self.bounds[axis + 3]
        return mask

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        for key in ('points', 'radar'):
            if data.get(key) is not None:
                tensor = data[key].tensor
                data[key] = data[key].new_point(rows(tensor, self._inside(tensor.numpy())))
        return data


@PIPELINES.register_module()
class ObjectRangeFilter:
    """Keep boxes whose centre (x, y) is strictly inside the range, and wrap their yaw to [-pi, pi)."""

    def __init__(self, point_cloud_range: Sequence[float]):
        self.bounds = _check_range(point_cloud_range, self)

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        boxes = data.get('gt_bboxes_3d')
        if boxes is None:
            return data
        centre = boxes.tensor[:, :2]
        low, high = torch.from_numpy(self.bounds[:2]), torch.from_numpy(self.bounds[3:5])
        keep = ((centre > low) & (centre < high)).all(dim=1)
        boxes = boxes[keep].clone()
        boxes.limit_yaw(offset=0.5, period=2 * np.pi)
        data['gt_bboxes_3d'] = boxes
        if data.get('gt_labels_3d') is not None:
            data['gt_labels_3d'] = data['gt_labels_3d'][keep.numpy()]
        return data


@PIPELINES.register_module()
class ObjectNameFilter:
    """Keep boxes whose label indexes one of ``classes`` (label -1, "not trained", is dropped)."""

    def __init__(self, classes: Sequence[str]):
        self.classes = tuple(classes)

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        if data.get('gt_labels_3d') is None:
            return data
        labels = np.asarray(data['gt_labels_3d'])
        keep = (labels >= 0) & (labels < len(self.classes))
        data['gt_labels_3d'] = labels[keep]
        if data.get('gt_bboxes_3d') is not None:
            data['gt_bboxes_3d'] = data['gt_bboxes_3d'][torch.from_numpy(keep)]
        return data


@PIPELINES.register_module()
class PointShuffle:
    """Points in random order (numpy's global generator), so that voxel limits do not always favour the same sweep."""

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        if data.get('points') is not None:
            points = data['points']
            # torch's generator permutes several times faster than numpy's; its seed is numpy's, as of every other draw.
            draw = torch.Generator().manual_seed(int(np.random.randint(2 ** 31)))
            data['points'] = points.new_point(rows(points.tensor, torch.randperm(len(points), generator=draw).numpy()))
        return data
