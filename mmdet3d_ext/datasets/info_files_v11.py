"""mmdet3d >= 1.1 info files (``metainfo``, ``data_list``) turned into our form.

In that form matrices are 4x4 lists, times are seconds, and image and point paths are bare file names that mmdet3d joins
with a ``data_prefix``. Boxes are ``(x, y, z, dx, dy, dz, yaw)`` in the lidar frame with the gravity **centre** as z
(tested on a real key frame: points are counted inside the boxes).
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

import numpy as np

from .nuscenes_schema import CAMERAS, LIDAR

UNKNOWN_CLASS = 'other'


def convert_data_list(data: Mapping[str, Any], path: Path) -> Tuple[List[Dict[str, Any]], Dict[str, Any]]:
    """``(infos, metadata)`` of a loaded ``{metainfo, data_list}`` pickle.

    Radars and, unless they were filled in, map locations are absent from that form. An instance with label -1 gets the name
    ``'other'``.

    Raises:
        InfoFileError: naming the sample and the key that is missing or malformed.
    """
    from .info_files import InfoFileError
    metainfo = dict(data['metainfo'])
    categories = metainfo.get('categories') or {name: i for i, name in enumerate(metainfo.get('classes', ()))}
    if not categories:
        raise InfoFileError(f'info file {path}: metainfo holds neither categories nor classes, so labels have no names. '
                            'Make it anew with tools/create_data.py')
    names = {int(label): name for name, label in categories.items() if int(label) >= 0}
    infos = []
    for index, sample in enumerate(data['data_list']):
        try:
            infos.append(_convert_sample(sample, names))
        except (KeyError, TypeError, ValueError) as error:
            raise InfoFileError(f'info file {path}: data_list[{index}] (token {sample.get("token", "?")}): '
                                f'{type(error).__name__} {error}') from error
    return infos, metainfo


def _convert_sample(sample: Mapping[str, Any], names: Mapping[int, str]) -> Dict[str, Any]:
    lidar = sample['lidar_points']
    lidar_ego, ego_global = _matrix(lidar['lidar2ego']), _matrix(sample['ego2global'])
    info: Dict[str, Any] = {
        'token': sample['token'],
        'lidar_path': lidar['lidar_path'],
        'timestamp': _microseconds(sample['timestamp']),
        'sweeps': [_convert_sweep(sweep, lidar_ego, ego_global) for sweep in sample.get('lidar_sweeps', ())],
        'cams': {},
        **_pose('lidar2ego', lidar_ego),
        **_pose('ego2global', ego_global),
    }
    for key in ('location', 'scene_token', 'prev_token'):
        if key in sample:
            info[key] = sample[key]
    images = sample.get('images', {})
    for camera in [*[c for c in CAMERAS if c in images], *[c for c in images if c not in CAMERAS]]:
        info['cams'][camera] = _convert_camera(camera, images[camera])
    if not info['cams']:
        del info['cams']
    if 'instances' in sample:
        info.update(_convert_instances(sample['instances'], names))
    return info


def _convert_camera(camera: str, image: Mapping[str, Any]) -> Dict[str, Any]:
    lidar_from_camera = np.linalg.inv(_matrix(image['lidar2cam']))
    return {
        'data_path': image['img_path'],
        'type': camera,
        'sample_data_token': image.get('sample_data_token', ''),
        'timestamp': _microseconds(image['timestamp']) if 'timestamp' in image else 0,
        'sensor2lidar_rotation': lidar_from_camera[:3, :3],
        'sensor2lidar_translation': lidar_from_camera[:3, 3],
        'cam_intrinsic': np.asarray(image['cam2img'], dtype=np.float64)[:3, :3],
        **_pose('sensor2ego', _matrix(image['cam2ego'])),
    }


def _convert_sweep(sweep: Mapping[str, Any], lidar_ego: np.ndarray, ego_global: np.ndarray) -> Dict[str, Any]:
    points = sweep['lidar_points']
    out = {
        'data_path': points['lidar_path'],
        'type': 'lidar',
        'sample_data_token': sweep.get('sample_data_token', ''),
        'timestamp': _microseconds(sweep['timestamp']),
    }
    if 'lidar2ego' in points and 'ego2global' in sweep:
        # The poses say it without doubt; the stored product has been written with two meanings over mmdet3d's versions.
        sweep_ego, sweep_global = _matrix(points['lidar2ego']), _matrix(sweep['ego2global'])
        lidar_from_sweep = np.linalg.inv(ego_global @ lidar_ego) @ sweep_global @ sweep_ego
        out.update(_pose('sensor2ego', sweep_ego))
        out.update(_pose('ego2global', sweep_global))
    else:
        lidar_from_sweep = np.linalg.inv(_matrix(points['lidar2sensor']))
    out['sensor2lidar_rotation'] = lidar_from_sweep[:3, :3]
    out['sensor2lidar_translation'] = lidar_from_sweep[:3, 3]
    return out


def _convert_instances(instances: List[Mapping[str, Any]], names: Mapping[int, str]) -> Dict[str, Any]:
    labels = [int(instance.get('bbox_label_3d', instance.get('bbox_label', -1))) for instance in instances]
    velocity = [instance.get('velocity', (np.nan, np.nan)) for instance in instances]
    lidar_points = np.array([int(instance.get('num_lidar_pts', 0)) for instance in instances], dtype=np.int64)
    radar_points = np.array([int(instance.get('num_radar_pts', 0)) for instance in instances], dtype=np.int64)
    valid = [bool(instance.get('bbox_3d_isvalid', lidar_points[i] + radar_points[i] > 0))
             for i, instance in enumerate(instances)]
    return {
        'gt_boxes': np.array([instance['bbox_3d'][:7] for instance in instances], dtype=np.float64).reshape(-1, 7),
        'gt_names': np.array([names.get(label, UNKNOWN_CLASS) for label in labels], dtype=np.str_),
        'gt_velocity': np.array(velocity, dtype=np.float64).reshape(-1, 2),
        'num_lidar_pts': lidar_points,
        'num_radar_pts': radar_points,
        'valid_flag': np.array(valid, dtype=bool),
    }


def _matrix(value: Any) -> np.ndarray:
    """A 4x4 rigid transform; its rotation, stored in float32, is brought back to the nearest exact rotation."""
    matrix = np.asarray(value, dtype=np.float64)
    if matrix.shape != (4, 4):
        raise ValueError(f'expected a 4x4 matrix, got shape {matrix.shape}')
    u, _, vt = np.linalg.svd(matrix[:3, :3])
    rotation = u @ vt
    if np.abs(rotation - matrix[:3, :3]).max() > 1e-3 or np.linalg.det(rotation) < 0:
        raise ValueError('the upper left 3x3 part is not a rotation')
    out = np.eye(4)
    out[:3, :3], out[:3, 3] = rotation, matrix[:3, 3]
    return out


def _pose(prefix: str, matrix: np.ndarray) -> Dict[str, List[float]]:
    from pyquaternion import Quaternion
    rotation = Quaternion(matrix=matrix[:3, :3], rtol=1e-5, atol=1e-6)
    return {f'{prefix}_translation': matrix[:3, 3].tolist(), f'{prefix}_rotation': rotation.elements.tolist()}


def _microseconds(seconds: float) -> int:
    """mmdet3d >= 1.1 divides by 1e6; a value that is still in microseconds is kept."""
    value = float(seconds)
    return int(value) if value > 1e14 else int(round(value * 1e6))


def channel_of(entry_type: str) -> str:
    """Sensor folder of a point or image entry (``LIDAR_TOP`` for a lidar sweep)."""
    return LIDAR if entry_type == 'lidar' else entry_type
