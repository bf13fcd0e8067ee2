"""mmdet3d >= 1.1 info files (``metainfo``, ``data_list``) turned into our form.

In that form matrices are 4x4 lists, times are seconds, and image and point paths are bare file names that mmdet3d joins
with a ``data_prefix``. Boxes are ``(x, y, z, dx, dy, dz, yaw)`` in the lidar frame with the gravity **centre** as z
(tested on a real key frame: points are counted inside the boxes).
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

import numpy as np

from .nuscenes_schema import CAMERAS

UNKNOWN_CLASS = 'other'
REMEDY = 'Make the file anew with tools/create_data.py nuscenes'


def convert_data_list(data: Mapping[str, Any], path: Path) -> Tuple[List[Dict[str, Any]], Dict[str, Any]]:
    """``(infos, metadata)`` of a loaded ``{metainfo, data_list}`` pickle.

    Radars and, unless they were filled in, map locations are absent from that form. An instance with label -1 gets the name
    ``'other'``.

    Raises:
        InfoFileError: naming the file, the sample and the key that is missing or malformed.
    """
    from .info_files import InfoFileError
    metainfo = dict(data['metainfo'])
    categories = metainfo.get('categories') or {name: i for i, name in enumerate(metainfo.get('classes', ()))}
    if not categories:
        raise InfoFileError(f'info file {path}: metainfo holds neither categories nor classes, so labels have no names. '
                            f'{REMEDY}')
    names = {int(label): name for name, label in categories.items() if int(label) >= 0}
    infos = []
    for index, sample in enumerate(data['data_list']):
        where = f'info file {path}: data_list[{index}]'
        if isinstance(sample, Mapping):
            where += f' (token {sample.get("token", "?")})'
        try:
            infos.append(_convert_sample(_Part(sample, ''), names))
        except (TypeError, ValueError, IndexError) as error:
            raise InfoFileError(f'{where}: {error}. {REMEDY}') from error
    return infos, metainfo


class _Part:
    """A mapping of the file that knows its place in the sample, so that errors name the whole key.

    Raises:
        ValueError: if it is no mapping; from its methods, for a key that is missing or malformed.
    """

    def __init__(self, content: Any, place: str):
        if not isinstance(content, Mapping):
            raise ValueError(f'{place.rstrip(".") or "the sample"} is a {type(content).__name__}, expected a mapping')
        self.content, self.place = content, place

    def __contains__(self, key: str) -> bool:
        return self.content.get(key) is not None

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise ValueError(f'{self.place}{key} is missing')
        return self.content[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.content[key] if key in self else default

    def part(self, key: str) -> '_Part':
        return _Part(self[key], f'{self.place}{key}.')

    def parts(self, key: str) -> List['_Part']:
        """The mappings in the list ``key``; none if it is absent."""
        return [_Part(item, f'{self.place}{key}[{index}].') for index, item in enumerate(self.get(key, ()))]

    def numbers(self, key: str, *shape: int) -> np.ndarray:
        """An array whose sides are at least ``shape``, cut to it."""
        value = np.asarray(self[key], dtype=np.float64)
        if value.ndim != len(shape) or any(n < least for n, least in zip(value.shape, shape)):
            raise ValueError(f'{self.place}{key} must be {" x ".join(map(str, shape))} numbers, its shape is {value.shape}')
        return value[tuple(slice(side) for side in shape)]

    def rigid(self, key: str) -> np.ndarray:
        """(4, 4); the rotation, stored in float32, is brought back to the nearest exact one."""
        matrix = self.numbers(key, 4, 4)
        if not np.isfinite(matrix).all():
            raise ValueError(f'{self.place}{key} holds values that are not finite')
        u, _, vt = np.linalg.svd(matrix[:3, :3])
        rotation = u @ vt
        if np.abs(rotation - matrix[:3, :3]).max() > 1e-3 or np.linalg.det(rotation) < 0:
            raise ValueError(f'{self.place}{key}: the upper left 3x3 part is not a rotation')
        out = np.eye(4)
        out[:3, :3], out[:3, 3] = rotation, matrix[:3, 3]
        return out

    def microseconds(self, key: str) -> int:
        """mmdet3d >= 1.1 divides by 1e6; a value that is still in microseconds is kept."""
        value = float(self[key])
        return int(value) if value > 1e14 else int(round(value * 1e6))


def _convert_sample(sample: _Part, names: Mapping[int, str]) -> Dict[str, Any]:
    lidar = sample.part('lidar_points')
    lidar_ego, ego_global = lidar.rigid('lidar2ego'), sample.rigid('ego2global')
    info: Dict[str, Any] = {
        'token': sample['token'],
        'lidar_path': lidar['lidar_path'],
        'timestamp': sample.microseconds('timestamp'),
        'sweeps': [_convert_sweep(sweep, lidar_ego, ego_global) for sweep in sample.parts('lidar_sweeps')],
        **_pose('lidar2ego', lidar_ego),
        **_pose('ego2global', ego_global),
    }
    for key in ('location', 'scene_token', 'prev_token'):
        if key in sample:
            info[key] = sample[key]
    if 'images' in sample:
        images = sample.part('images')
        order = [*[c for c in CAMERAS if c in images], *[c for c in images.content if c not in CAMERAS]]
        info['cams'] = {camera: _convert_camera(camera, images.part(camera)) for camera in order}
    if 'instances' in sample:
        info.update(_convert_instances(sample.parts('instances'), names))
    return info


def _convert_camera(camera: str, image: _Part) -> Dict[str, Any]:
    lidar_from_camera = np.linalg.inv(image.rigid('lidar2cam'))
    return {
        'data_path': image['img_path'],
        'type': camera,
        'sample_data_token': image.get('sample_data_token', ''),
        'timestamp': image.microseconds('timestamp') if 'timestamp' in image else 0,
        'sensor2lidar_rotation': lidar_from_camera[:3, :3],
        'sensor2lidar_translation': lidar_from_camera[:3, 3],
        'cam_intrinsic': image.numbers('cam2img', 3, 3),
        **_pose('sensor2ego', image.rigid('cam2ego')),
    }


def _convert_sweep(sweep: _Part, lidar_ego: np.ndarray, ego_global: np.ndarray) -> Dict[str, Any]:
    points = sweep.part('lidar_points')
    out = {
        'data_path': points['lidar_path'],
        'type': 'lidar',
        'sample_data_token': sweep.get('sample_data_token', ''),
        'timestamp': sweep.microseconds('timestamp'),
    }
    if 'lidar2ego' in points and 'ego2global' in sweep:
        # The poses say it without doubt; the stored product has been written with two meanings over mmdet3d's versions.
        sweep_ego, sweep_global = points.rigid('lidar2ego'), sweep.rigid('ego2global')
        lidar_from_sweep = np.linalg.inv(ego_global @ lidar_ego) @ sweep_global @ sweep_ego
        out.update(_pose('sensor2ego', sweep_ego))
        out.update(_pose('ego2global', sweep_global))
    else:
        lidar_from_sweep = np.linalg.inv(points.rigid('lidar2sensor'))
    out['sensor2lidar_rotation'] = lidar_from_sweep[:3, :3]
    out['sensor2lidar_translation'] = lidar_from_sweep[:3, 3]
    return out


def _convert_instances(instances: List[_Part], names: Mapping[int, str]) -> Dict[str, Any]:
    labels = [int(instance.get('bbox_label_3d', instance.get('bbox_label', -1))) for instance in instances]
    velocity = [instance.get('velocity', (np.nan, np.nan)) for instance in instances]
    lidar_points = np.array([int(instance.get('num_lidar_pts', 0)) for instance in instances], dtype=np.int64)
    radar_points = np.array([int(instance.get('num_radar_pts', 0)) for instance in instances], dtype=np.int64)
    valid = [bool(instance.get('bbox_3d_isvalid', lidar_points[i] + radar_points[i] > 0))
             for i, instance in enumerate(instances)]
    return {
        'gt_boxes': np.array([instance.numbers('bbox_3d', 7) for instance in instances]).reshape(-1, 7),
        'gt_names': np.array([names.get(label, UNKNOWN_CLASS) for label in labels], dtype=np.str_),
        'gt_velocity': np.array(velocity, dtype=np.float64).reshape(-1, 2),
        'num_lidar_pts': lidar_points,
        'num_radar_pts': radar_points,
        'valid_flag': np.array(valid, dtype=bool),
    }


def _pose(prefix: str, matrix: np.ndarray) -> Dict[str, List[float]]:
    from pyquaternion import Quaternion
    rotation = Quaternion(matrix=matrix[:3, :3], rtol=1e-5, atol=1e-6)
    return {f'{prefix}_translation': matrix[:3, 3].tolist(), f'{prefix}_rotation': rotation.elements.tolist()}
