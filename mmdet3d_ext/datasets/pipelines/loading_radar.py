"""Loading of the five radars of a nuScenes car."""
from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from mmdet3d.core.points import LiDARPoints

from ...registry import PIPELINES
from .common import CREATE_DATA, require

FIELDS = ('x', 'y', 'z', 'dyn_prop', 'id', 'rcs', 'vx', 'vy', 'vx_comp', 'vy_comp', 'is_quality_valid', 'ambig_state', 'x_rms',
          'y_rms', 'invalid_state', 'pdh0', 'vx_rms', 'vy_rms')
DYN_PROP, AMBIG_STATE, INVALID_STATE, PDH0 = 3, 11, 14, 15
VELOCITY, VELOCITY_COMP = (6, 7), (8, 9)
TIME_LAG = len(FIELDS)  # column 18
# Encoded columns after the time lag: one-hot dyn_prop (8), ambig_state (5), invalid_state (18), ordinal pdh0 (7), and
# whether the devkit's default filter would keep the point (1).
ENCODED = 8 + 5 + 18 + 7 + 1
# The devkit's default filter: valid clusters, any known motion class, unambiguous Doppler.
FILTERS = {'default': {INVALID_STATE: (0,), DYN_PROP: tuple(range(7)), AMBIG_STATE: (3,)}, 'none': {}}

_PCD_TYPES = {'F': 'f', 'I': 'i', 'U': 'u'}


def read_radar(path: str) -> np.ndarray:
    """``(P, 18)`` float32 returns of a nuScenes radar ``.pcd`` (binary), columns as ``FIELDS``, in the sensor's frame.

    The sensor writes one row of NaN for "no return"; such rows are removed.

    Raises:
        FileNotFoundError, ValueError: no such file; not a nuScenes radar file, or cut off.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f'radar file {path!r} does not exist; check dataset_root and that all blobs are unpacked')
    with open(path, 'rb') as file:
        content = file.read()
    header: Dict[str, List[str]] = {}
    offset = 0
    while 'DATA' not in header:
        end = content.find(b'\n', offset)
        if end < 0:
            raise ValueError(f'radar file {path!r}: the header has no DATA line; the file is damaged or not a .pcd')
        words = content[offset:end].decode('ascii', 'replace').split()
        if words and not words[0].startswith('#'):
            header[words[0]] = words[1:]
        offset = end + 1
    if tuple(header.get('FIELDS', ())) != FIELDS or header['DATA'] != ['binary']:
        raise ValueError(f'radar file {path!r}: expected a binary .pcd with the fields {FIELDS}, got {header.get("FIELDS")} '
                         f'({header["DATA"]})')
    dtype = np.dtype([(name, f'<{_PCD_TYPES[kind]}{size}')
                      for name, kind, size in zip(FIELDS, header['TYPE'], header['SIZE'])])
    count = int(header['WIDTH'][0]) * int(header.get('HEIGHT', ['1'])[0])
    if len(content) - offset < count * dtype.itemsize:
        raise ValueError(f'radar file {path!r} is cut off: {count} points of {dtype.itemsize} bytes promised, '
                         f'{len(content) - offset} bytes found')
    rows = np.frombuffer(content, dtype=dtype, count=count, offset=offset)
    points = np.stack([rows[name].astype(np.float32) for name in FIELDS], axis=1) if count else np.zeros((0, len(FIELDS)), 'f4')
    return points[np.isfinite(points).all(axis=1)]


class RadarPoints(LiDARPoints):
    """Radar returns; ``attribute_dims`` names the columns that turn with the scene (``velocity``, ``velocity_comp``)."""

    def __init__(self, tensor, points_dim=3, attribute_dims=None):
        super().__init__(tensor, points_dim=points_dim, attribute_dims=attribute_dims)


@PIPELINES.register_module()
class LoadRadarPointsMultiSweeps:
    """All radars' sweeps (newest first) in the lidar frame as ``radar`` (P, len(use_dim)).

    Reads ``data['radar']``, a mapping radar name -> list of sweeps. Columns that ``use_dim`` may name: 0-17 the file's fields
    (positions and both velocities turned to the lidar frame), 18 the time lag in s, 19-57 encodings: one-hot dyn_prop (8),
    ambig_state (5), invalid_state (18), ordinal false-alarm class (7), kept by the devkit's filter (1).
    A sample without ``radar`` (no radar in use) passes unchanged.

    Args:
        load_dim: values per return (18).
        use_dim: columns to keep; the first three must be 0, 1, 2.
        sweeps_num: sweeps per radar, the newest ones.
        max_num: at most this many returns (random in training, the first ones if ``data['test_mode']``); ``None``: all.
        pc_range: accepted for old configurations; use PointsRangeFilter.
        compensate_velocity: move returns of older sweeps by their compensated velocity times the time lag.
        filtering: ``'default'`` (the devkit's) or ``'none'``.
        normalize, normalize_dims: scale kept columns to [0, 1] by (column among those of ``use_dim``, low, high).
        test_mode, file_client_args: accepted for old configurations, without effect.
    """

    def __init__(self, load_dim: int = 18, use_dim: Sequence[int] = (0, 1, 2, 3, 4), sweeps_num: int = 3,
                 file_client_args: Optional[dict] = None, max_num: Optional[int] = None,
                 pc_range: Optional[Sequence[float]] = None, compensate_velocity: bool = False,
                 normalize_dims: Sequence[Tuple[int, float, float]] = ((3, 0, 50), (4, -100, 100), (5, -100, 100)),
                 filtering: str = 'default', normalize: bool = False, test_mode: bool = False):
        if load_dim != len(FIELDS):
            raise ValueError(f'LoadRadarPointsMultiSweeps: nuScenes radar files have {len(FIELDS)} fields, '
                             f'load_dim is {load_dim}')
        columns = list(range(use_dim)) if isinstance(use_dim, int) else [int(c) for c in use_dim]
        if columns[:3] != [0, 1, 2] or min(columns) < 0 or max(columns) >= TIME_LAG + 1 + ENCODED:
            raise ValueError(f'LoadRadarPointsMultiSweeps: use_dim must start with 0, 1, 2 and stay below '
                             f'{TIME_LAG + 1 + ENCODED}, got {use_dim!r}')
        if filtering not in FILTERS:
            raise ValueError(f'LoadRadarPointsMultiSweeps: filtering must be one of {sorted(FILTERS)}, got {filtering!r}')
        for column, low, high in normalize_dims if normalize else ():
            if not (0 <= column < len(columns) and low < high):
                raise ValueError(f'LoadRadarPointsMultiSweeps: normalize_dims are (column, low, high) with low < high and a column below '
                                 f'{len(columns)} (those of use_dim, counted from 0), got {(column, low, high)}')
        self.use_dim = columns
        self.sweeps_num = sweeps_num
        self.max_num = max_num
        self.compensate_velocity = compensate_velocity
        self.filtering = filtering
        self.normalize_dims = tuple(normalize_dims) if normalize else ()

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        radars = data.get('radar')
        if radars is None:
            return data
        key_time = require(data, 'timestamp', self, f'make the info file with: {CREATE_DATA}') / 1e6
        clouds = [self._load_sweep(sweep, key_time) for sweeps in radars.values() for sweep in sweeps[:self.sweeps_num]]
        points = np.concatenate(clouds) if clouds else np.zeros((0, TIME_LAG + 1), np.float32)
        points = np.concatenate([points, _encode(points)], axis=1)[:, self.use_dim]
        if self.max_num is not None and len(points) > self.max_num:
            chosen = (np.arange(self.max_num) if data.get('test_mode')
                      else np.sort(np.random.choice(len(points), self.max_num, replace=False)))
            points = points[chosen]
        for column, low, high in self.normalize_dims:
            points[:, column] = (points[:, column] - low) / (high - low)
        attributes = {}
        for name, pair in (('velocity', VELOCITY), ('velocity_comp', VELOCITY_COMP)):
            if all(c in self.use_dim for c in pair):
                attributes[name] = [self.use_dim.index(c) for c in pair]
        data['radar'] = RadarPoints(torch.from_numpy(np.ascontiguousarray(points, dtype=np.float32)),
                                    points_dim=len(self.use_dim), attribute_dims=attributes or None)
        return data

    def _load_sweep(self, sweep: Dict[str, Any], key_time: float) -> np.ndarray:
        points = read_radar(sweep['data_path'])
        for column, kept in FILTERS[self.filtering].items():
            points = points[np.isin(points[:, column], kept)]
        lag = np.float32(key_time - sweep['timestamp'] / 1e6)
        lidar_from_radar = np.asarray(sweep['sensor2lidar_rotation'], dtype=np.float64)
        points[:, :3] = points[:, :3] @ lidar_from_radar.T + np.asarray(sweep['sensor2lidar_translation'], dtype=np.float64)
        for pair in (VELOCITY, VELOCITY_COMP):  # radar measures in its own plane: vz = 0 there
            points[:, list(pair)] = points[:, list(pair)] @ lidar_from_radar[:2, :2].T
        if self.compensate_velocity:
            points[:, :2] += points[:, list(VELOCITY_COMP)] * lag
        return np.concatenate([points, np.full((len(points), 1), lag, np.float32)], axis=1)


def _encode(points: np.ndarray) -> np.ndarray:
    """``(P, 39)`` encodings of the state columns (see :class:`LoadRadarPointsMultiSweeps`)."""
    parts = []
    for column, states in ((DYN_PROP, 8), (AMBIG_STATE, 5), (INVALID_STATE, 18)):
        parts.append(np.rint(points[:, column:column + 1]) == np.arange(states))
    parts.append(np.rint(points[:, PDH0:PDH0 + 1]) > np.arange(7))
    parts.append(((points[:, INVALID_STATE] == 0) & (points[:, DYN_PROP] < 7) & (points[:, AMBIG_STATE] == 3))[:, None])
    return np.concatenate(parts, axis=1).astype(np.float32)
