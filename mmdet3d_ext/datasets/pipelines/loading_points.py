"""Loading of LiDAR points: the key frame and the sweeps before it."""
from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Sequence, Union

import numpy as np
import torch
from mmdet3d.core.points import BasePoints, get_points_type

from ...geometry.transforms import homogeneous
from ...registry import PIPELINES
from .common import CREATE_DATA, check_compat, move, require, warn_once

RING, TIME = 4, 4  # the fifth value of a nuScenes point is the ring on disk and the time lag once loaded
NUM_BEAMS = 32  # beams of the car's Velodyne HDL-32E


def read_points(path: str, load_dim: int) -> np.ndarray:
    """``(P, load_dim)`` float32 points of a raw float32 file (``.bin``, ``.pcd.bin``) or an ``.npy`` file; a writable array.

    Rows that hold a NaN or an infinity are removed, and one warning per file says how many. An empty file is an empty cloud.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file's size is not a whole number of points (a copy that was cut off, or another ``load_dim``).
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f'point cloud {path!r} does not exist; check dataset_root and that all blobs are unpacked')
    if path.endswith('.npy'):
        try:
            values = np.load(path, allow_pickle=False).astype(np.float32).reshape(-1)
        except (ValueError, EOFError) as error:
            raise ValueError(f'point cloud {path!r} is damaged or no .npy file: {error}') from error
    else:
        size = os.path.getsize(path)
        if size % (4 * load_dim):
            raise ValueError(f'point cloud {path!r} is damaged or cut off: {size} bytes is not a whole number of points of '
                             f'{load_dim} float32 values ({4 * load_dim} bytes); copy the file again (or correct load_dim)')
        if size == 0:
            warn_once(f'point cloud {path!r} is empty (0 bytes): taken as a cloud without points; copy the file again if the '
                      'original is not')
        values = np.fromfile(path, dtype=np.float32)
    if values.size % load_dim:
        raise ValueError(f'point cloud {path!r} holds {values.size} values, not a multiple of load_dim={load_dim}')
    points = values.reshape(-1, load_dim)
    # A sum is finite only if every value is (0 * NaN = NaN): one cheap pass, and the row test only where needed.
    if not np.isfinite(np.dot(values, np.zeros_like(values))):
        finite = np.isfinite(points).all(axis=1)
        warn_once(f'point cloud {path!r}: removed {int((~finite).sum())} of {len(points)} points with NaN or infinite values')
        points = points[finite]
    return points


def keep_beams(points: np.ndarray, beams: Optional[int]) -> np.ndarray:
    """Every (32 / ``beams``)-th ring of a raw nuScenes cloud (ring index in column 4), simulating a cheaper LiDAR.

    ``None`` or 32 keeps all.
    """
    if beams is None or beams >= NUM_BEAMS:
        return points
    return points[points[:, RING].astype(np.int64) % (NUM_BEAMS // beams) == 0]


def far_enough(points: np.ndarray, radius: float = 1.0) -> np.ndarray:
    """Mask ``(P,)`` of points that are not on the car itself: not (|x| < radius and |y| < radius), metres, sensor frame."""
    return (np.abs(points[:, 0]) >= radius) | (np.abs(points[:, 1]) >= radius)


def _columns(use_dim: Union[int, Sequence[int]], load_dim: int, owner: str) -> List[int]:
    columns = list(range(use_dim)) if isinstance(use_dim, int) else [int(c) for c in use_dim]
    if not columns or min(columns) < 0 or max(columns) >= load_dim:
        raise ValueError(f'{owner}: use_dim must name columns below load_dim={load_dim}, got {use_dim!r}')
    return columns


def _picked(points: np.ndarray, columns: List[int]) -> np.ndarray:
    """``points[:, columns]``; the points themselves where that is all of them in order."""
    return points if columns == list(range(points.shape[1])) else points[:, columns]


def _check_options(owner: str, load_dim: int, load_augmented: Optional[str], reduce_beams: Optional[int]) -> None:
    if load_augmented is not None:
        raise ValueError(f'{owner}: load_augmented={load_augmented!r} (painted or virtual points) is not supported; write null')
    if reduce_beams is not None and reduce_beams < NUM_BEAMS:
        if reduce_beams < 1 or NUM_BEAMS % reduce_beams:
            raise ValueError(f'{owner}: reduce_beams must divide {NUM_BEAMS}, got {reduce_beams}')
        if load_dim <= RING:
            raise ValueError(f'{owner}: reduce_beams needs the ring index in column {RING}, but load_dim is {load_dim}')


@PIPELINES.register_module()
class LoadPointsFromFile:
    """The key frame's cloud ``lidar_path`` as ``points`` (P, len(use_dim)) in the lidar frame.

    Column 4 holds the ring until :class:`LoadPointsFromMultiSweeps` replaces it by the time lag (0 s for the key frame).

    Args:
        coord_type: ``'LIDAR'`` (the frame of the files).
        load_dim: float32 values per point in the file (nuScenes: 5).
        use_dim: columns to keep, or how many of the first.
        shift_height, use_color, load_augmented: options of other data sets, refused if on.
        reduce_beams: keep this many of the 32 beams (every n-th ring); ``None`` or 32 for all.
    """

    def __init__(self, coord_type: str = 'LIDAR', load_dim: int = 6, use_dim: Union[int, Sequence[int]] = (0, 1, 2),
                 shift_height: bool = False, use_color: bool = False, load_augmented: Optional[str] = None,
                 reduce_beams: Optional[int] = None):
        if coord_type != 'LIDAR':
            raise ValueError(f"LoadPointsFromFile: coord_type must be 'LIDAR', got {coord_type!r}")
        if shift_height or use_color:
            raise ValueError('LoadPointsFromFile: shift_height and use_color are for indoor data sets and not supported')
        _check_options('LoadPointsFromFile', load_dim, load_augmented, reduce_beams)
        self.load_dim = load_dim
        self.use_dim = _columns(use_dim, load_dim, 'LoadPointsFromFile')
        self.reduce_beams = reduce_beams
        self.points_class = get_points_type(coord_type)

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        path = require(data, 'lidar_path', self, f'the info file is incomplete; make it with: {CREATE_DATA}')
        points = keep_beams(read_points(path, self.load_dim), self.reduce_beams)
        points = _picked(points, self.use_dim)
        data['points'] = self.points_class(points, points_dim=points.shape[1])
        return data


@PIPELINES.register_module()
class LoadPointsFromMultiSweeps:
    """Append earlier sweeps, moved to the key frame's lidar frame, and write the time lag (s, >= 0) into column 4.

    The key frame comes first. All sweeps are used if there are at most ``sweeps_num``; otherwise ``sweeps_num`` of them at
    random (numpy's generator) in training, and the nearest in time (the first ones) in test mode.

    Args:
        sweeps_num: number of sweeps besides the key frame; 0 keeps the key frame only (column 4 still becomes 0).
        load_dim: values per point in the sweep files; the key frame must have been loaded with all of them.
        use_dim: columns of the result, or how many of the first.
        pad_empty_sweeps: repeat the key frame ``sweeps_num`` times for a sample without sweeps, so that the number of
            points does not drop at the start of a scene.
        remove_close: remove returns from the car itself (|x| < 1 m and |y| < 1 m in each sweep's own frame).
        test_mode: no randomness. ``None`` (default): what the data set says (``data['test_mode']``), else training. With
            ``compat='reference'`` ``None`` means training, as in the reference, whose evaluation was therefore random.
        load_augmented: refused unless ``None``.
        reduce_beams: see :class:`LoadPointsFromFile`.
        remove_close_key_frame: apply ``remove_close`` to the key frame as well. ``None`` (default): the same as
            ``remove_close``, because the key frame holds the same returns; with ``compat='reference'``: never.
        compat: ``'reference'`` for the two behaviours above.
    """

    def __init__(self, sweeps_num: int = 10, load_dim: int = 5, use_dim: Union[int, Sequence[int]] = (0, 1, 2, 4),
                 pad_empty_sweeps: bool = False, remove_close: bool = False, test_mode: Optional[bool] = None,
                 load_augmented: Optional[str] = None, reduce_beams: Optional[int] = None,
                 remove_close_key_frame: Optional[bool] = None, compat: Optional[str] = None):
        self.compat = check_compat(compat, self)
        _check_options('LoadPointsFromMultiSweeps', load_dim, load_augmented, reduce_beams)
        if sweeps_num < 0:
            raise ValueError(f'LoadPointsFromMultiSweeps: sweeps_num must not be negative, got {sweeps_num}')
        if load_dim <= TIME:
            raise ValueError(f'LoadPointsFromMultiSweeps: load_dim must be at least {TIME + 1}, got {load_dim}')
        self.sweeps_num = sweeps_num
        self.load_dim = load_dim
        self.use_dim = _columns(use_dim, load_dim, 'LoadPointsFromMultiSweeps')
        self.pad_empty_sweeps = pad_empty_sweeps
        self.remove_close = remove_close
        self.test_mode = test_mode
        self.reduce_beams = reduce_beams
        if remove_close_key_frame is None:
            remove_close_key_frame = remove_close and compat != 'reference'
        self.remove_close_key_frame = remove_close_key_frame

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        key_frame: Optional[BasePoints] = data.get('points')
        if key_frame is None:
            raise KeyError('LoadPointsFromMultiSweeps: no points yet; put LoadPointsFromFile before it')
        if key_frame.tensor.shape[1] != self.load_dim:
            raise ValueError(f'LoadPointsFromMultiSweeps: the key frame has {key_frame.tensor.shape[1]} columns, load_dim is '
                             f'{self.load_dim}; load it with use_dim: {self.load_dim}')
        key_points = key_frame.tensor.numpy()
        sweeps = require(data, 'sweeps', self, f'the info file is incomplete; make it with: {CREATE_DATA}')
        chosen = [sweeps[i] for i in self._choose(len(sweeps), data)]
        repeats = self.sweeps_num if self.pad_empty_sweeps and not len(sweeps) else 0
        clouds = [keep_beams(read_points(sweep['data_path'], self.load_dim), self.reduce_beams) for sweep in chosen]
        # One array for all, filled cloud by cloud while each is in the processor's cache.
        points = np.empty((len(key_points) * (1 + repeats) + sum(map(len, clouds)), self.load_dim), np.float32)
        end = 0

        def append(cloud: np.ndarray, remove_close: bool, lag: float) -> np.ndarray:
            nonlocal end
            if remove_close:
                cloud = np.compress(far_enough(cloud), cloud, axis=0)
            begin, end = end, end + len(cloud)
            points[begin:end] = cloud
            points[begin:end, TIME] = lag
            return points[begin:end]

        append(key_points, self.remove_close_key_frame, 0.0)
        for _ in range(repeats):
            append(key_points, self.remove_close, 0.0)
        if chosen:
            key_time = require(data, 'timestamp', self, f'make the info file with: {CREATE_DATA}') / 1e6
        for sweep, cloud in zip(chosen, clouds):
            placed = append(cloud, self.remove_close, key_time - sweep['timestamp'] / 1e6)
            move(torch.from_numpy(placed), homogeneous(sweep['sensor2lidar_rotation'], sweep['sensor2lidar_translation']))
        points = _picked(points[:end], self.use_dim)
        data['points'] = type(key_frame)(points, points_dim=points.shape[1])
        return data

    def _choose(self, available: int, data: Dict[str, Any]) -> np.ndarray:
        if available <= self.sweeps_num:
            return np.arange(available)
        test_mode = self.test_mode
        if test_mode is None:
            test_mode = self.compat != 'reference' and bool(data.get('test_mode', False))
        if test_mode:
            return np.arange(self.sweeps_num)
        return np.random.choice(available, self.sweeps_num, replace=False)
