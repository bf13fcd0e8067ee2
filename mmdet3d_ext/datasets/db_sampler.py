"""Objects from the ground-truth database, chosen so that they do not stand in each other's way."""
from __future__ import annotations

import logging
import os
from typing import Any, Dict, List, Mapping, Optional, Sequence

import numpy as np
import torch

from .. import registry
from . import restricted_pickle
from .gt_database import POINT_COLUMNS, entry_convention
from .info_files import InfoFileError
from .pipelines.loading_points import read_points

logger = logging.getLogger('mmdet3d_ext')


def draw_different(size: int, count: int) -> np.ndarray:
    """``min(count, size)`` different indices below ``size``, by numpy's global generator as the pipeline steps.

    Every draw stands for itself (no order is kept from sample to sample), so that a sample's objects depend on its own random
    numbers only. The time does not grow with ``size``.
    """
    generator = np.random.default_rng(np.random.randint(2 ** 31, size=2))
    return generator.choice(size, min(count, size), replace=False)


class DataBaseSampler:
    """Chooses objects to paste into a sample.

    Args:
        info_path: ``<tag>_dbinfos_train.pkl``.
        data_root, dataset_root: folder of the point files' paths (either name).
        rate: share of what is missing of ``sample_groups`` that is drawn.
        prepare: ``{filter_by_difficulty: [difficulties to remove], filter_by_min_points: {class: points}}``.
        sample_groups: class -> number of objects that a sample is filled up to.
        classes: names in label order.
        points_loader: a pipeline step's configuration that reads ``lidar_path`` into ``points``; by default five float32
            columns are read.
        compat: ``'reference'`` gives boxes whose bottom is the centre's z, like the data set's under that profile.

    Raises:
        InfoFileError, FileNotFoundError: for a database that is missing or in the older box convention.
    """

    def __init__(self, info_path: str, data_root: Optional[str] = None, rate: float = 1.0,
                 prepare: Optional[Mapping[str, Any]] = None, sample_groups: Optional[Mapping[str, int]] = None,
                 classes: Optional[Sequence[str]] = None, points_loader: Optional[Mapping[str, Any]] = None,
                 dataset_root: Optional[str] = None, compat: Optional[str] = None):
        if not classes:
            raise ValueError('db_sampler: classes (names in label order) must be given')
        self.data_root = data_root if data_root is not None else dataset_root
        self.rate = float(rate)
        self.classes = tuple(classes)
        self.compat = compat if compat is not None else registry._PROFILE.get()  # built by a step, not by a registry
        self.sample_groups = {name: int(count) for name, count in (sample_groups or {}).items()}
        for name in self.sample_groups:
            if name not in self.classes:
                raise ValueError(f'db_sampler: sample_groups names {name!r}, which is not among the classes {self.classes}')
        self.points_loader = None
        if points_loader is not None:
            self.points_loader = registry.PIPELINES.build(points_loader)
        self.db_infos = _prepared(_load_entries(info_path), dict(prepare or {}), info_path)
        for name in self.sample_groups:
            if not self.db_infos.get(name):
                logger.warning('db_sampler: %s holds no usable %r, none will be pasted', info_path, name)

    def sample_all(self, gt_boxes: Any, gt_labels: np.ndarray, img: Any = None) -> Optional[Dict[str, np.ndarray]]:
        """Objects to add to a sample; neither argument is changed.

        Args:
            gt_boxes: (n, 7 or 9) boxes (x, y, z bottom, l, w, h, yaw[, vx, vy]) in the lidar frame before augmentation, as an
                array or LiDARInstance3DBoxes.
            gt_labels: (n,) labels.

        Returns:
            ``None`` if nothing is added, else ``gt_bboxes_3d`` (m, same columns) float32, ``gt_labels_3d`` (m,) int64,
            ``points`` (P, 5) float32 in the lidar frame, ``group_ids`` (m,), ``point_counts`` (m,). No box overlaps another
            one in the ground plane.
        """
        if hasattr(gt_boxes, 'tensor'):
            gt_boxes = gt_boxes.tensor.detach().cpu().numpy()
        gt_boxes = np.asarray(gt_boxes, dtype=np.float32)
        columns = gt_boxes.shape[1] if gt_boxes.ndim == 2 and gt_boxes.shape[1] >= 7 else 9
        gt_boxes = gt_boxes.reshape(-1, columns)
        gt_labels = np.asarray(gt_labels)
        candidates: List[Mapping[str, Any]] = []
        for name, wanted in self.sample_groups.items():
            present = int((gt_labels == self.classes.index(name)).sum())
            count = int(np.round(self.rate * (wanted - present)))
            entries = self.db_infos.get(name)
            if count <= 0 or not entries:
                continue
            candidates += [entries[i] for i in draw_different(len(entries), count)]
        chosen = _fitting(candidates, gt_boxes[:, :7])
        if not chosen:
            return None
        clouds = [self._points(entry) for entry in chosen]
        boxes = np.full((len(chosen), columns), np.nan, dtype=np.float32)
        for row, entry in zip(boxes, chosen):
            box = np.asarray(entry['box3d_lidar'], dtype=np.float32)[:columns]
            row[:len(box)] = box
        if self.compat == 'reference':
            boxes[:, 2] += boxes[:, 5] / 2
            boxes[:, 7:][np.isnan(boxes[:, 7:])] = 0.0
        return {
            'gt_bboxes_3d': boxes,
            'gt_labels_3d': np.array([self.classes.index(entry['name']) for entry in chosen], dtype=np.int64),
            'points': np.concatenate(clouds),
            'group_ids': np.arange(len(gt_boxes), len(gt_boxes) + len(chosen)),
            'point_counts': np.array([len(cloud) for cloud in clouds], dtype=np.int64),
        }

    def _points(self, entry: Mapping[str, Any]) -> np.ndarray:
        path = os.path.join(self.data_root, entry['path']) if self.data_root else entry['path']
        if self.points_loader is None:
            points = read_points(path, POINT_COLUMNS)
        else:
            loaded = self.points_loader({'lidar_path': path, 'pts_filename': path})['points']
            tensor = getattr(loaded, 'tensor', loaded)
            points = np.array(tensor.numpy() if isinstance(tensor, torch.Tensor) else tensor, dtype=np.float32)
        points[:, :3] += np.asarray(entry['box3d_lidar'], dtype=np.float32)[:3]
        return points

    def __repr__(self) -> str:
        held = ', '.join(f'{len(self.db_infos.get(name, ()))} {name}' for name in self.sample_groups)
        return f'DataBaseSampler({held})'


DbSampler = DataBaseSampler


def _fitting(candidates: List[Mapping[str, Any]], present: np.ndarray) -> List[Mapping[str, Any]]:
    """The candidates, in order, that overlap neither a box of ``present`` (n, 7) nor a candidate that was taken before."""
    if not candidates:
        return []
    boxes = np.stack([entry['box3d_lidar'][:7] for entry in candidates]).astype(np.float32)
    blocked = overlaps_bev(boxes, present).any(axis=1)
    among = overlaps_bev(boxes, boxes)
    taken: List[int] = []
    for k in np.flatnonzero(~blocked):
        if not among[k, taken].any():
            taken.append(int(k))
    return [candidates[k] for k in taken]


def _load_entries(path: str) -> Dict[str, List[Dict[str, Any]]]:
    if not os.path.isfile(path):
        raise FileNotFoundError(f'db_sampler: {path} does not exist. Make it with tools/create_data.py nuscenes, or remove the '
                                f'ObjectPaste step from the pipeline')
    try:
        entries = restricted_pickle.load(path)
    except ValueError as error:
        raise InfoFileError(f'db_sampler: {error}') from error
    if not isinstance(entries, dict) or not all(isinstance(found, list) for found in entries.values()):
        raise InfoFileError(f'db_sampler: {path} is not a database file ({{class: [entry, ...]}})')
    entry_convention(entries, path)
    return entries


def _prepared(entries: Dict[str, List[Dict[str, Any]]], prepare: Dict[str, Any], path: str) -> Dict[str, List[Dict[str, Any]]]:
    """The entries that pass ``prepare``; new lists, the entries themselves are shared."""
    removed = set(prepare.pop('filter_by_difficulty', ()) or ())
    least = dict(prepare.pop('filter_by_min_points', {}) or {})
    if prepare:
        raise ValueError(f'db_sampler: prepare has the unknown key {next(iter(prepare))!r}, known are filter_by_difficulty and '
                         f'filter_by_min_points')
    out = {}
    for name, found in entries.items():
        out[name] = [entry for entry in found if entry.get('difficulty', 0) not in removed
                     and entry['num_points_in_gt'] >= int(least.get(name, 0))]
    logger.info('db_sampler: %s: %s', path, ', '.join(f'{len(out[n])} of {len(entries[n])} {n}' for n in out))
    return out


def corners_bev(boxes: np.ndarray) -> np.ndarray:
    """(n, 4, 2) ground-plane corners of (n, 7+) boxes, in order around each box."""
    signs = np.array([[0.5, 0.5], [-0.5, 0.5], [-0.5, -0.5], [0.5, -0.5]])
    local = signs[None] * boxes[:, None, 3:5]
    cos, sin = np.cos(boxes[:, 6]), np.sin(boxes[:, 6])
    rotation = np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)
    return np.einsum('nij,nkj->nki', rotation, local) + boxes[:, None, :2]


def overlaps_bev(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(n, m) bool: whether box i of ``a`` (n, 7+) and box j of ``b`` (m, 7+) overlap in the ground plane.

    Separating axes: two rectangles are apart if and only if their projections onto one of the four edge directions are.
    Boxes that only touch do not overlap.
    """
    corners_a, corners_b = corners_bev(np.asarray(a, np.float64)), corners_bev(np.asarray(b, np.float64))
    apart = np.zeros((len(a), len(b)), dtype=bool)
    for yaws, first in ((np.asarray(a, np.float64)[:, 6], True), (np.asarray(b, np.float64)[:, 6], False)):
        for turn in (0.0, np.pi / 2):
            axis = np.stack([np.cos(yaws + turn), np.sin(yaws + turn)], -1)
            if first:
                pa = np.einsum('nkd,nd->nk', corners_a, axis)[:, None]
                pb = np.einsum('mkd,nd->nmk', corners_b, axis)
            else:
                pa = np.einsum('nkd,md->nmk', corners_a, axis)
                pb = np.einsum('mkd,md->mk', corners_b, axis)[None]
            apart |= (pa.max(-1) <= pb.min(-1)) | (pb.max(-1) <= pa.min(-1))
    return ~apart
