"""A nuScenes folder written by hand: two official mini scenes, known geometry, a few kilobytes.

The car drives along global +x at 5 m/s, heading east (yaw 0). The lidar is turned by -90 degrees on it (its y is the car's x,
as on the real car). Every object is a box filled with lidar points, in every cloud.
"""
from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Dict, List

import numpy as np
from pyquaternion import Quaternion

CAMERAS = {'CAM_FRONT': 0, 'CAM_FRONT_RIGHT': -55, 'CAM_FRONT_LEFT': 55, 'CAM_BACK': 180, 'CAM_BACK_LEFT': 110,
           'CAM_BACK_RIGHT': -110}
RADARS = ('RADAR_FRONT', 'RADAR_FRONT_LEFT', 'RADAR_FRONT_RIGHT', 'RADAR_BACK_LEFT', 'RADAR_BACK_RIGHT')
SPEED = 5.0
START = np.array([400.0, 1000.0, 0.0])
LIDAR_EGO = np.array([0.94, 0.0, 1.84])
LIDAR_TURN = Quaternion(axis=[0, 0, 1], degrees=-90)
SAMPLES, STEP, SWEEPS = 3, 0.5, 2  # per scene, seconds, sweeps between key frames

# name, category, attribute, start x, y relative to the car's start, (w, l, h), yaw in degrees, speed along the heading
OBJECTS = (
    ('car0', 'vehicle.car', 'vehicle.moving', 12.0, 3.0, (1.9, 4.6, 1.6), 0.0, 8.0),
    ('car1', 'vehicle.car', 'vehicle.parked', 15.0, -6.0, (1.9, 4.4, 1.5), 90.0, 0.0),
    ('truck', 'vehicle.truck', 'vehicle.parked', -14.0, 5.0, (2.8, 9.0, 3.4), 30.0, 0.0),
    ('man', 'human.pedestrian.adult', 'pedestrian.moving', 6.0, -8.0, (0.6, 0.7, 1.8), -60.0, 1.2),
    ('cone', 'movable_object.trafficcone', '', 8.0, 6.0, (0.4, 0.5, 0.9), 10.0, 0.0),
    ('cat', 'animal', '', 5.0, 5.0, (0.2, 0.4, 0.3), 0.0, 0.0),
)
SCENES = (('scene-0061', 'singapore-onenorth'), ('scene-0103', 'boston-seaport'))


def car_pose(time: float) -> np.ndarray:
    """Global position of the car's origin at a time in seconds."""
    return START + np.array([SPEED * time, 0.0, 0.0])


def object_centre(row, time: float) -> np.ndarray:
    yaw = np.radians(row[6])
    base = START + np.array([row[3], row[4], row[5][2] / 2])
    return base + row[7] * time * np.array([np.cos(yaw), np.sin(yaw), 0.0])


def lidar_points(time: float, per_object: int = 60) -> np.ndarray:
    """(P, 5) points on and around the objects in the lidar frame at ``time``, and ten of the car itself."""
    rng = np.random.default_rng(int(time * 1000))
    clouds = [np.column_stack([rng.uniform(-0.9, 0.9, (10, 2)), rng.uniform(-1.8, 0, 10)])]
    for row in OBJECTS:
        w, l, h = row[5]
        local = rng.uniform(-0.5, 0.5, (per_object, 3)) * 0.98 * [l, w, h]
        turn = Quaternion(axis=[0, 0, 1], degrees=row[6]).rotation_matrix
        clouds.append(to_lidar(local @ turn.T + object_centre(row, time), time))
    xyz = np.concatenate(clouds)
    return np.column_stack([xyz, np.full(len(xyz), 7.0), np.arange(len(xyz)) % 32]).astype(np.float32)


def to_lidar(points: np.ndarray, time: float) -> np.ndarray:
    """Global points in the lidar frame at ``time``."""
    return (points - car_pose(time) - LIDAR_EGO) @ LIDAR_TURN.rotation_matrix


def write_radar(path: Path) -> None:
    fields = ('x y z dyn_prop id rcs vx vy vx_comp vy_comp is_quality_valid ambig_state x_rms y_rms invalid_state pdh0 '
              'vx_rms vy_rms')
    types = 'F F F I I F F F F F I I I I I I I I'
    sizes = '4 4 4 1 2 4 4 4 4 4 1 1 1 1 1 1 1 1'
    header = (f'# .PCD v0.7 - Point Cloud Data file format\nVERSION 0.7\nFIELDS {fields}\nSIZE {sizes}\nTYPE {types}\n'
              f'COUNT {" ".join("1" * 18)}\nWIDTH 1\nHEIGHT 1\nVIEWPOINT 0 0 0 1 0 0 0\nPOINTS 1\nDATA binary\n')
    row = struct.pack('<fffbhfffff8b', 10, 1, 0, 0, 0, 5, 1, 0, 1, 0, 1, 3, 0, 0, 0, 0, 0, 0)
    path.write_bytes(header.encode() + row)


def write(root: Path, version: str = 'v1.0-mini') -> Path:
    """Write the folder; returns ``root``."""
    tables: Dict[str, List[dict]] = {name: [] for name in (
        'attribute', 'calibrated_sensor', 'category', 'ego_pose', 'instance', 'log', 'map', 'sample', 'sample_annotation',
        'sample_data', 'scene', 'sensor', 'visibility')}
    for name in sorted({row[2] for row in OBJECTS} - {''}):
        tables['attribute'].append({'token': f'attr-{name}', 'name': name, 'description': ''})
    for name in sorted({row[1] for row in OBJECTS}):
        tables['category'].append({'token': f'cat-{name}', 'name': name, 'description': ''})
    tables['visibility'].append({'token': '4', 'level': 'v80-100', 'description': ''})
    mount = {'LIDAR_TOP': (LIDAR_EGO.tolist(), LIDAR_TURN.elements.tolist(), [])}
    optical = Quaternion(matrix=np.array([[0, 0, 1], [-1, 0, 0], [0, -1, 0]], dtype=float))  # of a camera that looks ahead
    for name, degrees in CAMERAS.items():
        turned = Quaternion(axis=[0, 0, 1], degrees=degrees) * optical
        mount[name] = ([1.5, 0.1, 1.5], turned.elements.tolist(), [[1266.0, 0, 816.0], [0, 1266.0, 491.0], [0, 0, 1]])
    for name in RADARS:
        mount[name] = ([3.4, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0], [])
    for channel, (translation, rotation, intrinsic) in mount.items():
        kind = {'L': 'lidar', 'C': 'camera', 'R': 'radar'}[channel[0]]
        tables['sensor'].append({'token': f'sensor-{channel}', 'channel': channel, 'modality': kind})
        tables['calibrated_sensor'].append({'token': f'calib-{channel}', 'sensor_token': f'sensor-{channel}',
                                            'translation': translation, 'rotation': rotation, 'camera_intrinsic': intrinsic})
        for folder in ('samples', 'sweeps'):
            (root / folder / channel).mkdir(parents=True, exist_ok=True)
    (root / 'maps').mkdir(exist_ok=True)
    for number, (scene, location) in enumerate(SCENES):
        _write_scene(root, tables, number, scene, location, list(mount))
    (root / version).mkdir(exist_ok=True)
    for name, records in tables.items():
        (root / version / f'{name}.json').write_text(json.dumps(records))
    return root


def _write_scene(root: Path, tables: Dict[str, List[dict]], number: int, scene: str, location: str,
                 channels: List[str]) -> None:
    tables['log'].append({'token': f'log{number}', 'logfile': f'n00{number}', 'vehicle': '', 'date_captured': '',
                          'location': location})
    (root / 'maps' / f'{location}.png').write_bytes(b'')  # the devkit only looks whether it is there
    tables['map'].append({'token': f'map{number}', 'log_tokens': [f'log{number}'], 'category': 'semantic_prior',
                          'filename': f'maps/{location}.png'})
    samples = [f'{scene}-sample{i}' for i in range(SAMPLES)]
    tables['scene'].append({'token': f'{scene}-token', 'log_token': f'log{number}', 'nbr_samples': SAMPLES, 'name': scene,
                            'description': '', 'first_sample_token': samples[0], 'last_sample_token': samples[-1]})
    epoch = 1_532_000_000_000_000 + number * 10**9
    for i, token in enumerate(samples):
        tables['sample'].append({'token': token, 'timestamp': epoch + int(i * STEP * 1e6), 'scene_token': f'{scene}-token',
                                 'prev': samples[i - 1] if i else '', 'next': samples[i + 1] if i + 1 < SAMPLES else ''})
        for row in OBJECTS:
            turn = Quaternion(axis=[0, 0, 1], degrees=row[6])
            name = f'{scene}-{row[0]}-{{}}'
            tables['sample_annotation'].append({
                'token': name.format(i), 'sample_token': token, 'instance_token': f'{scene}-{row[0]}', 'visibility_token': '4',
                'attribute_tokens': [f'attr-{row[2]}'] if row[2] else [], 'translation': object_centre(row, i * STEP).tolist(),
                'size': list(row[5]), 'rotation': turn.elements.tolist(), 'prev': name.format(i - 1) if i else '',
                'next': name.format(i + 1) if i + 1 < SAMPLES else '',
                # one object without any return: not valid
                'num_lidar_pts': 0 if row[0] == 'cone' and i == 1 else 60, 'num_radar_pts': 0})
            if i == 0:
                tables['instance'].append({'token': f'{scene}-{row[0]}', 'category_token': f'cat-{row[1]}',
                                           'nbr_annotations': SAMPLES, 'first_annotation_token': name.format(0),
                                           'last_annotation_token': name.format(SAMPLES - 1)})
    for channel in channels:
        kind = {'L': 'lidar', 'C': 'camera', 'R': 'radar'}[channel[0]]
        suffix = {'lidar': '.pcd.bin', 'camera': '.jpg', 'radar': '.pcd'}[kind]
        offset = {'lidar': 0.0, 'camera': -0.03, 'radar': 0.02}[kind]
        times = []
        for i in range(SAMPLES):
            if i and kind != 'camera':
                times += [((i - 1 + (k + 1) / (SWEEPS + 1)) * STEP, False, i) for k in range(SWEEPS)]
            times.append((i * STEP, True, i))
        tokens = [f'{scene}-{channel}-{k}' for k in range(len(times))]
        for k, (time, key, i) in enumerate(times):
            stamp = epoch + int(round((time + offset) * 1e6))
            file = f'{"samples" if key else "sweeps"}/{channel}/{scene}__{channel}__{stamp}{suffix}'
            pose = f'pose-{tokens[k]}'
            tables['ego_pose'].append({'token': pose, 'timestamp': stamp, 'rotation': [1.0, 0.0, 0.0, 0.0],
                                       'translation': car_pose(time + offset).tolist()})
            tables['sample_data'].append({
                'token': tokens[k], 'sample_token': f'{scene}-sample{i}', 'ego_pose_token': pose,
                'calibrated_sensor_token': f'calib-{channel}', 'timestamp': stamp, 'fileformat': suffix[1:],
                'is_key_frame': key, 'height': 900 if kind == 'camera' else 0,
                'width': 1600 if kind == 'camera' else 0, 'filename': file,
                'prev': tokens[k - 1] if k else '', 'next': tokens[k + 1] if k + 1 < len(times) else ''})
            if kind == 'lidar':
                lidar_points(time).tofile(root / file)
            elif kind == 'radar':
                write_radar(root / file)
            else:
                (root / file).write_bytes(b'\xff\xd8\xff\xd9')
