"""Pasting of database objects into the scene ("ground-truth sampling", Yan et al., SECOND, 2018)."""
from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Union

import numpy as np
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes

from ...registry import PIPELINES
from .common import check_compat, require, warn_once


def points_in_boxes(points: np.ndarray, boxes: LiDARInstance3DBoxes) -> np.ndarray:
    """Mask ``(P,)``: inside (or on the surface of) at least one of the boxes.

    Args:
        points: (P, >= 3) in the lidar frame, metres.
        boxes: bottom-centre boxes (x, y, z_bottom, dx, dy, dz, yaw counter-clockwise).
    """
    inside = np.zeros(len(points), dtype=bool)
    found = boxes.tensor[:, :7].numpy().astype(np.float64)
    found = found[np.isfinite(found).all(axis=1)]  # others hold nothing
    if not len(found):
        return inside
    reach = np.hypot(found[:, 3], found[:, 4]) / 2 + 1e-3
    candidates = _in_squares(np.asarray(points), found[:, :2] - reach[:, None], found[:, :2] + reach[:, None])
    xyz = np.asarray(points)[candidates, :3].astype(np.float64)
    for (x, y, z, dx, dy, dz, yaw), radius in zip(found, reach):
        near = np.flatnonzero((np.abs(xyz[:, 0] - x) <= radius) & (np.abs(xyz[:, 1] - y) <= radius))
        offset = xyz[near] - (x, y, z)
        along = offset[:, 0] * np.cos(yaw) + offset[:, 1] * np.sin(yaw)
        across = -offset[:, 0] * np.sin(yaw) + offset[:, 1] * np.cos(yaw)
        inside[candidates[near]] |= ((np.abs(along) <= dx / 2) & (np.abs(across) <= dy / 2) & (offset[:, 2] >= 0)
                                     & (offset[:, 2] <= dz))
    return inside


def _in_squares(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Indices of the points that may lie in one of the squares ``low``, ``high`` (n, 2), metres; some others are among them.

    The squares are drawn into a coarse picture and each point looks its cell up, so the time hardly grows with their number.
    """
    origin, far = low.min(axis=0), high.max(axis=0)
    step = max(1.0, float((far - origin).max()) / 512)
    first = np.floor((low - origin) / step - 1e-2).astype(np.int64).clip(0)  # cells of a point are told in single precision
    last = np.floor((high - origin) / step + 1e-2).astype(np.int64)
    picture = np.zeros(last.max(axis=0) + 3, dtype=bool)  # with an empty border, to which everything outside goes
    for (i, j), (k, m) in zip(first, last):
        picture[i + 1:k + 2, j + 1:m + 2] = True
    cells = []
    for axis in range(2):
        cell = (points[:, axis] - np.float32(origin[axis] - step)) * np.float32(1 / step)
        cells.append(np.fmin(np.fmax(cell, 0), picture.shape[axis] - 1).astype(np.int32))  # NaN becomes 0
    return np.flatnonzero(picture.reshape(-1)[cells[0] * np.int32(picture.shape[1]) + cells[1]])


@PIPELINES.register_module()
class ObjectPaste:
    """Paste objects of the ground-truth database: their points come first, scene points inside their boxes are removed.

    Active in epochs 0 .. ``stop_epoch - 1``: paste *until* that epoch, then fine-tune on unaltered scenes. Images are not
    changed, so a camera cannot see a pasted object; without points there is nothing to paste, and the step passes the sample
    on with a warning.

    Args:
        db_sampler: configuration of :class:`mmdet3d_ext.datasets.db_sampler.DataBaseSampler` (``type`` may be left out), or an
            object with ``sample_all(gt_boxes, gt_labels) -> None or dict(gt_bboxes_3d, gt_labels_3d, points)``.
        sample_2d: pasting of image patches; not supported.
        stop_epoch: first epoch without pasting; ``None``: never stop; 0 or below: never paste.
        compat: handed to the sampler.
    """

    def __init__(self, db_sampler: Union[Mapping[str, Any], Any], sample_2d: bool = False, stop_epoch: Optional[int] = None,
                 compat: Optional[str] = None):
        if sample_2d:
            raise ValueError('ObjectPaste: sample_2d=True is not supported')
        check_compat(compat, self)
        self.stop_epoch = stop_epoch
        self.epoch = 0
        # A disabled step must not need the database on disk.
        self.db_sampler = None if stop_epoch is not None and stop_epoch <= 0 else _build_sampler(db_sampler, compat)

    def set_epoch(self, epoch: int) -> None:
        """Tell the step the epoch (from 0)."""
        self.epoch = epoch

    @property
    def active(self) -> bool:
        """Whether this epoch pastes."""
        return self.db_sampler is not None and (self.stop_epoch is None or self.epoch < self.stop_epoch)

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        if not self.active:
            return data
        if data.get('points') is None:
            warn_once('ObjectPaste: the pipeline loads no points, so no object is pasted (a camera would not see it)')
            return data
        boxes = require(data, 'gt_bboxes_3d', self, 'put LoadAnnotations3D before ObjectPaste')
        labels = np.asarray(require(data, 'gt_labels_3d', self, 'put LoadAnnotations3D before ObjectPaste'), dtype=np.int64)
        sampled = self.db_sampler.sample_all(boxes, labels)
        if sampled is None or not len(sampled['gt_labels_3d']):
            return data
        pasted = sampled['gt_bboxes_3d']
        if not isinstance(pasted, LiDARInstance3DBoxes):
            pasted = boxes.new_box(np.asarray(pasted, dtype=np.float32))
        if pasted.tensor.shape[1] != boxes.tensor.shape[1]:
            raise ValueError(f'ObjectPaste: the database has boxes of {pasted.tensor.shape[1]} values, the sample of '
                             f'{boxes.tensor.shape[1]} (velocity on one side only); make both with the same create_data run')
        points = data['points']
        new_points = sampled['points']
        new_points = new_points.tensor if hasattr(new_points, 'tensor') else torch.as_tensor(new_points, dtype=torch.float32)
        if new_points.shape[1] != points.tensor.shape[1]:
            raise ValueError(f'ObjectPaste: database points have {new_points.shape[1]} columns, the scene has '
                             f'{points.tensor.shape[1]}; set points_loader.use_dim to match')
        scene = points.tensor.numpy()
        outside = ~points_in_boxes(scene, pasted)
        joined = np.empty((len(new_points) + int(outside.sum()), scene.shape[1]), np.float32)
        joined[:len(new_points)] = new_points
        np.compress(outside, scene, axis=0, out=joined[len(new_points):])
        data['points'] = points.new_point(torch.from_numpy(joined))
        data['gt_bboxes_3d'] = boxes.new_box(torch.cat([boxes.tensor, pasted.tensor]))
        data['gt_labels_3d'] = np.concatenate([labels, np.asarray(sampled['gt_labels_3d'], dtype=np.int64)])
        return data


def _build_sampler(config: Any, compat: Optional[str]) -> Any:
    if not isinstance(config, Mapping):
        if not hasattr(config, 'sample_all'):
            raise TypeError(f'ObjectPaste: db_sampler must be a mapping or have sample_all(), got {type(config).__name__}')
        return config
    args = {'compat': compat, **config}
    kind = args.pop('type', 'DataBaseSampler')
    if kind != 'DataBaseSampler':
        raise KeyError(f"ObjectPaste: unknown db_sampler type {kind!r}, expected 'DataBaseSampler'")
    from ..db_sampler import DataBaseSampler  # late: it builds its points_loader from this package's registry
    return DataBaseSampler(**args)
