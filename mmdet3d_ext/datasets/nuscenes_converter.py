"""nuScenes tables -> info files.

Each info (one key frame) holds:

``token, scene_token, scene_name, prev, prev_token, next_token, timestamp`` (us), ``location`` (map name), ``lidar_path``,
``lidar2ego_translation/rotation``, ``ego2global_translation/rotation`` (metres; quaternion w, x, y, z),
``sweeps`` (newest first, without the key frame), ``cams`` (six, fixed order, each with ``cam_intrinsic`` 3x3),
``radars`` (five; a list of sweeps each, newest first, the key frame's own first), and for annotated splits
``gt_boxes`` (n, 7) ``gt_names`` ``gt_categories`` (a list) ``gt_velocity`` (n, 2; NaN = unknown) ``num_lidar_pts num_radar_pts
valid_flag``.

A sensor entry holds ``data_path, type, sample_data_token, timestamp, sensor2ego_*``, ``ego2global_*`` (at the sensor's own
time) and ``sensor2lidar_rotation`` (3, 3), ``sensor2lidar_translation`` (3,): ``p_lidar = R p_sensor + t``, with the ego motion
between both times. Paths are relative to the data root. ``gt_boxes`` follow the ``mmdet3d-1.0`` convention of
:mod:`.info_files`; ``gt_velocity`` is in the lidar frame.
"""
from __future__ import annotations

import gc
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

import numpy as np

from . import restricted_pickle
from .info_files import FORMAT_VERSION
from .nuscenes_schema import BOX_CONVENTION, CAMERAS, CATEGORY_TO_CLASS, LIDAR, RADARS, SPLITS, TABLES
from .part_files import Parts, run_parts
from .restricted_pickle import PathLike

MAX_RADAR_SWEEPS = 6


class DataRootError(FileNotFoundError):
    """Something of the nuScenes folder is not there; the message names it and where it comes from."""


def create_infos(root_path: PathLike, out_dir: PathLike, extra_tag: str = 'nuscenes', version: str = 'v1.0-trainval',
                 max_sweeps: int = 10, workers: int = 0, force: bool = False) -> Dict[str, Path]:
    """Write ``<out_dir>/<extra_tag>_infos_{train,val}.pkl`` (``_test`` for v1.0-test).

    Works scene by scene in ``workers`` processes (0: in this one). A finished scene is kept in a part file, so that a
    killed run goes on where it stopped; the part files are removed at the end.

    Args:
        max_sweeps: lidar sweeps before the key frame that are listed, at most.
        force: ignore part files of an earlier run.

    Returns:
        split -> the written file.

    Raises:
        DataRootError: naming the missing table, folder or sensor files.
    """
    root, out_dir = Path(root_path), Path(out_dir)
    check_data_root(root, version)
    nusc = _load_tables(root, version)
    split_of = _split_of_scenes(version)
    scenes = [scene for scene in nusc.scene if scene['name'] in split_of]
    unknown = len(nusc.scene) - len(scenes)
    if not scenes:
        raise DataRootError(f'{root / version}: none of its {unknown} scenes belongs to a split of {version}')
    present, absent = _present_scenes(nusc, scenes)
    for message in _scene_report(root, scenes, present, absent, unknown):
        print(message, flush=True)

    # Tables that were written anew (a synthetic set with other options) make parts of the old ones worthless.
    source = [str(root.resolve()), *((root / version / f'{name}.json').stat().st_mtime_ns for name in TABLES)]
    settings = {'version': version, 'max_sweeps': max_sweeps, 'info_format': FORMAT_VERSION, 'source': source}
    parts = Parts(out_dir / f'.{extra_tag}_infos_parts_{version}', settings, force=force)
    _WORK.update(nusc=nusc, max_sweeps=max_sweeps, annotated=version != 'v1.0-test')
    gc.collect()
    gc.freeze()  # forked workers then do not copy the tables page by page while counting references
    try:
        run_parts(parts, [scene['name'] for scene in present], _convert_scene, workers, f'{version} scenes', 'scene')
    finally:
        _WORK.clear()
        gc.unfreeze()

    written = {}
    for split in SPLITS[version]:
        infos: List[Dict[str, Any]] = []
        for scene in present:
            if split_of[scene['name']] == split:
                infos += parts.load(scene['name'])
        infos.sort(key=lambda info: info['timestamp'])
        written[split] = out_dir / f'{extra_tag}_infos_{split}.pkl'
        restricted_pickle.save({'infos': infos, 'metadata': metadata_of(version, max_sweeps)}, written[split])
        print(f'{written[split]}: {len(infos)} samples', flush=True)
    parts.remove()
    return written


def metadata_of(version: str, max_sweeps: int) -> Dict[str, Any]:
    """What an info file says about itself."""
    from mmdet3d_ext import __version__
    return {'version': version, 'box_convention': BOX_CONVENTION, 'info_format': FORMAT_VERSION,
            'generator': f'mmdet3d_ext {__version__}', 'max_sweeps': max_sweeps, 'paths': 'relative to the data root'}


# --------------------------------------------------------------------------------------------------- looking at the root

def check_data_root(root: PathLike, version: str) -> None:
    """Folders and tables that the conversion needs are there.

    Raises:
        DataRootError: naming everything that is missing, at once.
    """
    root = Path(root)
    if version not in SPLITS:
        raise ValueError(f'--version {version!r}: expected one of {", ".join(SPLITS)}')
    if not root.is_dir():
        raise DataRootError(f'data root {root} does not exist (the folder that holds samples/, sweeps/ and {version}/)')
    if not (root / version).is_dir():
        found = sorted(path.name for path in root.glob('v1.0-*') if path.is_dir())
        raise DataRootError(f'{root / version} missing: unpack the metadata archive of {version} there '
                            f'(found in {root}: {", ".join(found) or "no v1.0-* folder"})')
    missing = [f'{version}/{name}.json' for name in TABLES if not (root / version / f'{name}.json').is_file()]
    missing += [f'{name}/' for name in ('samples',) if not (root / name).is_dir()]
    if (root / version / 'map.json').is_file():  # the devkit opens no data set without its base maps
        with open(root / version / 'map.json', encoding='utf-8') as file:
            missing += [record['filename'] for record in json.load(file) if not (root / record['filename']).is_file()]
    if missing:
        raise DataRootError(f'{root}: missing {", ".join(missing)}')


def check_map_expansion(root: PathLike, locations: Sequence[str]) -> List[str]:
    """What is wrong with the map expansion that BEV labels need (empty: nothing). One message per problem."""
    root = Path(root)
    folder = root / 'maps' / 'expansion'
    problems = []
    if not folder.is_dir():
        near = [path for path in (root / 'maps', root / 'expansion', root) if list(path.glob('*-*.json'))]
        hint = f'; map JSON files lie in {near[0]}, move them there' if near else ''
        return [f'maps/expansion missing: unpack nuScenes-map-expansion-v1.3 into {root / "maps"}{hint}']
    for location in sorted(set(locations)):
        path = folder / f'{location}.json'
        if not path.is_file():
            problems.append(f'maps/expansion/{location}.json missing: unpack nuScenes-map-expansion-v1.3 into {root / "maps"}')
            continue
        stated = _map_version(path)
        if stated is None or _version_tuple(stated) < (1, 3):
            problems.append(f'maps/expansion/{location}.json has version {stated}: version 1.3 or newer is needed '
                            f'(nuScenes-map-expansion-v1.3)')
    return problems


def _version_tuple(text: str) -> tuple:
    return tuple(int(part) for part in text.split('.') if part.isdigit())


def _map_version(path: Path) -> Optional[str]:
    with open(path, encoding='utf-8') as file:
        return json.load(file).get('version')


def _load_tables(root: Path, version: str) -> Any:
    from nuscenes.nuscenes import NuScenes
    print(f'loading the tables of {root / version} ...', flush=True)
    return NuScenes(version=version, dataroot=str(root), verbose=False)


def _split_of_scenes(version: str) -> Dict[str, str]:
    """Scene name -> split of the info file."""
    from nuscenes.utils.splits import create_splits_scenes
    official = create_splits_scenes()
    return {scene: split for split, name in SPLITS[version].items() for scene in official[name]}


def _present_scenes(nusc: Any, scenes: Sequence[Mapping[str, Any]]) -> tuple:
    """Scenes whose first lidar file is there, and those whose is not (archives that were not downloaded)."""
    present, absent = [], []
    for scene in scenes:
        sample = nusc.get('sample', scene['first_sample_token'])
        first = nusc.get('sample_data', sample['data'][LIDAR])['filename']
        (present if (Path(nusc.dataroot) / first).is_file() else absent).append(scene)
    return present, absent


def _scene_report(root: Path, scenes: Sequence, present: Sequence, absent: Sequence, unknown: int) -> List[str]:
    if not present:
        raise DataRootError(f'{root}: no lidar file of any of the {len(scenes)} scenes is there (looked for the first key '
                            f'frame of each under samples/{LIDAR}/): unpack the sensor archives, or correct --root-path')
    messages = [f'{len(present)} scenes']
    if absent:
        names = ', '.join(scene['name'] for scene in absent[:5])
        messages.append(f'WARNING: {len(absent)} of {len(scenes)} scenes have no sensor files here and are left out ({names}'
                        f'{", ..." if len(absent) > 5 else ""}): unpack their archives for the full data set')
    if unknown:
        messages.append(f'WARNING: {unknown} scenes belong to no official split and are left out')
    return messages


# ------------------------------------------------------------------------------------------------------------- one scene

_WORK: Dict[str, Any] = {}  # what forked workers inherit: the loaded tables are too large to be sent


def _convert_scene(name: str) -> List[Dict[str, Any]]:
    nusc = _WORK['nusc']
    scene = next(scene for scene in nusc.scene if scene['name'] == name)
    infos = []
    token = scene['first_sample_token']
    while token:
        sample = nusc.get('sample', token)
        infos.append(sample_info(nusc, sample, scene, _WORK['max_sweeps'], _WORK['annotated']))
        token = sample['next']
    _check_sensor_files(Path(nusc.dataroot), name, infos)
    return infos


def sample_info(nusc: Any, sample: Mapping[str, Any], scene: Mapping[str, Any], max_sweeps: int,
                annotated: bool) -> Dict[str, Any]:
    """The info of one key frame (fields: see the module)."""
    lidar = nusc.get('sample_data', sample['data'][LIDAR])
    calibration = nusc.get('calibrated_sensor', lidar['calibrated_sensor_token'])
    pose = nusc.get('ego_pose', lidar['ego_pose_token'])
    global_from_lidar = _transform(pose) @ _transform(calibration)
    lidar_from_global = np.linalg.inv(global_from_lidar)
    info = {
        'token': sample['token'],
        'scene_token': scene['token'],
        'scene_name': scene['name'],
        'prev': sample['prev'],
        'prev_token': sample['prev'],
        'next_token': sample['next'],
        'timestamp': int(sample['timestamp']),
        'location': nusc.get('log', scene['log_token'])['location'],
        'lidar_path': lidar['filename'],
        'lidar2ego_translation': list(calibration['translation']),
        'lidar2ego_rotation': list(calibration['rotation']),
        'ego2global_translation': list(pose['translation']),
        'ego2global_rotation': list(pose['rotation']),
        'sweeps': _history(nusc, lidar['prev'], 'lidar', lidar_from_global, max_sweeps),
        'cams': {},
        'radars': {},
    }
    for camera in CAMERAS:
        record = nusc.get('sample_data', sample['data'][camera])
        entry = _sensor_entry(nusc, record, camera, lidar_from_global)
        intrinsic = nusc.get('calibrated_sensor', record['calibrated_sensor_token'])['camera_intrinsic']
        entry['cam_intrinsic'] = np.array(intrinsic, dtype=np.float64)
        info['cams'][camera] = entry
    for radar in RADARS:
        if radar in sample['data']:
            info['radars'][radar] = _history(nusc, sample['data'][radar], radar, lidar_from_global, MAX_RADAR_SWEEPS)
    if annotated:
        info.update(_annotations(nusc, sample, lidar_from_global))
    return info


def _history(nusc: Any, token: str, kind: str, lidar_from_global: np.ndarray, limit: int) -> List[Dict[str, Any]]:
    """Up to ``limit`` entries from ``token`` backwards in time."""
    entries: List[Dict[str, Any]] = []
    while token and len(entries) < limit:
        record = nusc.get('sample_data', token)
        entries.append(_sensor_entry(nusc, record, kind, lidar_from_global))
        token = record['prev']
    return entries


def _sensor_entry(nusc: Any, record: Mapping[str, Any], kind: str, lidar_from_global: np.ndarray) -> Dict[str, Any]:
    calibration = nusc.get('calibrated_sensor', record['calibrated_sensor_token'])
    pose = nusc.get('ego_pose', record['ego_pose_token'])
    lidar_from_sensor = lidar_from_global @ _transform(pose) @ _transform(calibration)
    return {
        'data_path': record['filename'],
        'type': kind,
        'sample_data_token': record['token'],
        'sensor2ego_translation': list(calibration['translation']),
        'sensor2ego_rotation': list(calibration['rotation']),
        'ego2global_translation': list(pose['translation']),
        'ego2global_rotation': list(pose['rotation']),
        'timestamp': int(record['timestamp']),
        'sensor2lidar_rotation': lidar_from_sensor[:3, :3],
        'sensor2lidar_translation': lidar_from_sensor[:3, 3],
    }


def _annotations(nusc: Any, sample: Mapping[str, Any], lidar_from_global: np.ndarray) -> Dict[str, np.ndarray]:
    """Boxes of one key frame in the lidar frame (n may be 0)."""
    records = [nusc.get('sample_annotation', token) for token in sample['anns']]
    n = len(records)
    rotation = lidar_from_global[:3, :3]
    boxes, velocity = np.zeros((n, 7)), np.zeros((n, 2))
    for i, record in enumerate(records):
        boxes[i, :3] = rotation @ record['translation'] + lidar_from_global[:3, 3]
        width, length, height = record['size']
        boxes[i, 3:6] = length, width, height
        heading = rotation @ rotation_matrix(record['rotation'])[:, 0]  # the box's x axis, seen from above
        boxes[i, 6] = np.arctan2(heading[1], heading[0])
        speed = nusc.box_velocity(record['token'])
        velocity[i] = (rotation @ np.array([speed[0], speed[1], 0.0]))[:2]
    categories = [record['category_name'] for record in records]
    lidar_points = np.array([record['num_lidar_pts'] for record in records], dtype=np.int64)
    radar_points = np.array([record['num_radar_pts'] for record in records], dtype=np.int64)
    return {
        'gt_boxes': boxes,
        'gt_names': np.array([CATEGORY_TO_CLASS.get(name, name) for name in categories], dtype=np.str_),
        'gt_categories': [sys.intern(name) for name in categories],  # a file stores each name once
        'gt_velocity': velocity,
        'num_lidar_pts': lidar_points,
        'num_radar_pts': radar_points,
        'valid_flag': lidar_points + radar_points > 0,
    }


def _check_sensor_files(root: Path, scene: str, infos: Sequence[Mapping[str, Any]]) -> None:
    """All files that the infos name are there (a cut-off download is found here, not in the middle of training)."""
    by_kind: Dict[str, set] = defaultdict(set)
    for info in infos:
        by_kind[LIDAR].add(info['lidar_path'])
        for entry in info['sweeps']:
            by_kind[f'{LIDAR} sweeps'].add(entry['data_path'])
        for camera, entry in info['cams'].items():
            by_kind[camera].add(entry['data_path'])
        for radar, entries in info['radars'].items():
            by_kind[radar].update(entry['data_path'] for entry in entries)
    problems = []
    for kind, paths in by_kind.items():
        missing = sorted(path for path in paths if not os.path.isfile(root / path))
        if missing:
            problems.append(f'{kind}: {len(missing)} of {len(paths)} (first: {missing[0]})')
    if problems:
        raise DataRootError(f'scene {scene}: files missing under {root}: {"; ".join(problems)}')


def rotation_matrix(quaternion: Sequence[float]) -> np.ndarray:
    """(3, 3) rotation of a quaternion (w, x, y, z), normalised first."""
    w, x, y, z = np.asarray(quaternion, dtype=np.float64) / np.linalg.norm(quaternion)
    return np.array([
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ])


def _transform(record: Mapping[str, Any]) -> np.ndarray:
    """4x4 matrix of a table record with ``rotation`` and ``translation``: parent_from_child."""
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = rotation_matrix(record['rotation']), record['translation']
    return matrix


# ----------------------------------------------------------------------------------------------------- filling one field

def fill_location(info_file: PathLike, root_path: PathLike, version: Optional[str] = None) -> int:
    """Add ``location`` (the map's name) to every info of a file of any form, from the tables; returns how many were added.

    The file is replaced in one step; everything else in it stays as it is.

    Args:
        version: the tables' folder; by default what the file's metadata says.

    Raises:
        DataRootError: if a table is missing.
        InfoFileError: if a sample of the file is not in the tables.
    """
    from .info_files import InfoFileError
    data = restricted_pickle.load(info_file)
    if not isinstance(data, dict) or not ({'infos', 'data_list'} & set(data)):
        raise InfoFileError(f'info file {info_file}: expected {{infos, metadata}} or {{data_list, metainfo}}')
    samples = data['infos'] if 'infos' in data else data['data_list']
    header = data.get('metadata') or data.get('metainfo') or {}
    version = version or header.get('version')
    if version is None:
        raise InfoFileError(f'info file {info_file}: it does not say its version; pass --version')
    tables = {}
    for name in ('sample', 'scene', 'log'):
        path = Path(root_path) / version / f'{name}.json'
        if not path.is_file():
            raise DataRootError(f'{path} missing: the tables of {version} are needed to fill the location')
        with open(path, encoding='utf-8') as file:
            tables[name] = {record['token']: record for record in json.load(file)}
    added = 0
    for sample in samples:
        record = tables['sample'].get(sample['token'])
        if record is None:
            raise InfoFileError(f'info file {info_file}: the sample {sample["token"]} is not in {Path(root_path) / version}; '
                                f'the file belongs to another data set or version')
        location = tables['log'][tables['scene'][record['scene_token']]['log_token']]['location']
        added += sample.get('location') != location
        sample['location'] = location
    restricted_pickle.save(data, info_file)
    return added
