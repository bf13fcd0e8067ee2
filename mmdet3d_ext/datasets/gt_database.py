"""The ground-truth database for paste augmentation: one point file per annotated object.

``<tag>_gt_database/<token>_<class>_<i>.bin`` holds float32 rows (x, y, z, intensity, time lag in s), the object's points from
the key frame and its sweeps, relative to the box's **bottom centre**. ``<tag>_dbinfos_train.pkl`` is ``{class: [entry, ...]}``;
an entry holds ``name, path`` (relative to the folder of the pickle), ``image_idx`` (token), ``gt_idx``, ``box3d_lidar`` (9,)
float32 (x, y, z bottom, l, w, h, yaw, vx, vy; NaN velocity = unknown), ``num_points_in_gt``, ``difficulty``, ``group_id``,
``box_convention``.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

import numpy as np

from . import restricted_pickle
from .info_files import InfoFileError, check_fields, load_info_file
from .nuscenes_schema import BOX_CONVENTION, OBJECT_CLASSES
from .part_files import Parts, run_parts
from .pipelines.loading_points import far_enough, read_points
from .restricted_pickle import PathLike

POINT_COLUMNS = 5

_WORK: Dict[str, Any] = {}


def create_gt_database(info_file: PathLike, root_path: PathLike, out_dir: PathLike, extra_tag: str = 'nuscenes',
                       max_sweeps: int = 10, workers: int = 0, force: bool = False) -> Path:
    """Write ``<out_dir>/<extra_tag>_gt_database/`` and ``<extra_tag>_dbinfos_train.pkl``; returns the latter's path.

    Objects of the ten classes with ``valid_flag`` and at least one point enter. Parallel and resumable like
    :func:`.nuscenes_converter.create_infos`.
    """
    out_dir, folder = Path(out_dir), Path(out_dir) / f'{extra_tag}_gt_database'
    folder.mkdir(parents=True, exist_ok=True)
    loaded = load_info_file(info_file)
    check_fields(loaded.infos, ('gt_boxes', 'gt_names', 'gt_velocity', 'valid_flag', 'sweeps', 'lidar_path'), info_file)
    groups: Dict[str, List[Dict[str, Any]]] = {}
    for i, info in enumerate(loaded.infos):
        groups.setdefault(str(info.get('scene_name', f'block {i // 40:05d}')), []).append(info)
    settings = {'source': [str(Path(info_file).resolve()), Path(info_file).stat().st_mtime_ns], 'max_sweeps': max_sweeps}
    parts = Parts(out_dir / f'.{extra_tag}_dbinfos_parts', settings, force=force)
    _WORK.update(groups=groups, root=Path(root_path), folder=folder, max_sweeps=max_sweeps)
    try:
        run_parts(parts, sorted(groups), _work_group, workers, 'ground-truth database', 'scene')
    finally:
        _WORK.clear()
    entries: Dict[str, List[Dict[str, Any]]] = {name: [] for name in OBJECT_CLASSES}
    for name in sorted(groups):
        for entry in parts.load(name):
            entries[entry['name']].append(dict(entry, group_id=sum(map(len, entries.values()))))
    path = out_dir / f'{extra_tag}_dbinfos_train.pkl'
    restricted_pickle.save(entries, path)
    parts.remove()
    print(f'{path}: ' + ', '.join(f'{len(found)} {name}' for name, found in entries.items()), flush=True)
    return path


def _work_group(name: str) -> List[Dict[str, Any]]:
    return [entry for info in _WORK['groups'][name]
            for entry in _write_objects(info, _WORK['root'], _WORK['folder'], _WORK['max_sweeps'])]


def _write_objects(info: Mapping[str, Any], root: Path, folder: Path, max_sweeps: int) -> List[Dict[str, Any]]:
    boxes = np.asarray(info['gt_boxes'], dtype=np.float64)
    chosen = [i for i in range(len(boxes)) if info['valid_flag'][i] and info['gt_names'][i] in OBJECT_CLASSES]
    if not chosen:
        return []
    points = load_points_with_sweeps(info, root, max_sweeps)
    entries = []
    for i in chosen:
        inside = points[points_in_box(points[:, :3], boxes[i])]
        if not len(inside):
            continue
        box = np.concatenate([boxes[i], np.asarray(info['gt_velocity'][i], dtype=np.float64)]).astype(np.float32)
        box[2] = boxes[i, 2] - boxes[i, 5] / 2
        inside[:, :3] -= box[:3]
        path = folder / f'{info["token"]}_{info["gt_names"][i]}_{i}.bin'
        try:
            path.write_bytes(inside.astype(np.float32).tobytes())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        entries.append({'name': str(info['gt_names'][i]), 'path': f'{folder.name}/{path.name}', 'image_idx': info['token'],
                        'gt_idx': i, 'box3d_lidar': box, 'num_points_in_gt': len(inside), 'difficulty': 0,
                        'box_convention': BOX_CONVENTION})
    return entries


def points_in_box(points: np.ndarray, box: np.ndarray) -> np.ndarray:
    """(P,) bool: which of (P, 3) points lie in a box (x, y, z of the centre, l, w, h, yaw), its faces included."""
    # Most of the cloud is far away: leave it out in single precision, with a margin, before anything exact.
    reach = np.float32(np.hypot(box[3], box[4]) / 2 + 1e-2)
    near = np.flatnonzero(np.abs(points[:, 0] - np.float32(box[0])) <= reach)
    near = near[np.abs(points[near, 1] - np.float32(box[1])) <= reach]
    relative = points[near].astype(np.float64) - box[:3]
    cos, sin = np.cos(box[6]), np.sin(box[6])
    along = relative[:, 0] * cos + relative[:, 1] * sin
    across = -relative[:, 0] * sin + relative[:, 1] * cos
    inside = (np.abs(along) <= box[3] / 2) & (np.abs(across) <= box[4] / 2) & (np.abs(relative[:, 2]) <= box[5] / 2)
    mask = np.zeros(len(points), dtype=bool)
    mask[near[inside]] = True
    return mask


def load_points_with_sweeps(info: Mapping[str, Any], root: Path, max_sweeps: int) -> np.ndarray:
    """(P, 5) float32: the key frame (time lag 0) and up to ``max_sweeps`` sweeps in its lidar frame, near points removed."""
    clouds = [_lagged(_far_points(root / info['lidar_path']), 0.0)]
    for sweep in info['sweeps'][:max_sweeps]:
        cloud = _lagged(_far_points(root / sweep['data_path']), (info['timestamp'] - sweep['timestamp']) * 1e-6)
        cloud[:, :3] = cloud[:, :3] @ np.asarray(sweep['sensor2lidar_rotation']).T + sweep['sensor2lidar_translation']
        clouds.append(cloud)
    return np.concatenate(clouds)


def _lagged(cloud: np.ndarray, seconds: float) -> np.ndarray:
    cloud = cloud.copy()
    cloud[:, 4] = seconds
    return cloud


def _far_points(path: Path) -> np.ndarray:
    """(P, 5) points of a file without the car's own returns."""
    cloud = read_points(str(path), POINT_COLUMNS)
    return cloud[far_enough(cloud)]


def entry_convention(entries: Mapping[str, List[Mapping[str, Any]]], path: PathLike) -> Tuple[str, str]:
    """The box convention of a database and the evidence; a database in the older convention is refused.

    The reference cuts objects out with boxes that stand half a height too high (it takes the centre for the bottom), so its
    point files lack the lower halves: they cannot be converted.

    Raises:
        InfoFileError: for the older convention, or if it cannot be told.
    """
    from .info_files import length_first_votes
    stated = {entry.get('box_convention') for found in entries.values() for entry in found[:50]}
    if stated == {BOX_CONVENTION}:
        return BOX_CONVENTION, 'stated'
    names, dims = [], []
    for name, found in entries.items():
        for entry in found[:500]:
            names.append(name)
            dims.append(np.asarray(entry['box3d_lidar'])[3:6])
    if not names:
        return BOX_CONVENTION, 'no objects, so no box convention'
    longer, total = length_first_votes(names, np.array(dims).reshape(-1, 3))
    evidence = f'{longer} of {total} cars, trucks and buses are longer along the first box dimension'
    if total >= 5 and longer >= 0.9 * total:
        return BOX_CONVENTION, evidence
    reason = ('its boxes follow the convention before mmdet3d 1.0, and such databases were cut out half a height too high'
              if total >= 5 and longer <= 0.1 * total else 'its box convention cannot be told')
    raise InfoFileError(f'database {path}: {reason} ({evidence}). Make it anew with tools/create_data.py nuscenes')
