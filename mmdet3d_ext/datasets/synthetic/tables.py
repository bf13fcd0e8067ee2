"""The thirteen tables of the nuScenes v1.0 schema, from what was rendered."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List

import numpy as np
from pyquaternion import Quaternion

from . import schema
from .config import GeneratorConfig
from .frames import Shot
from .map_json import token
from .sensors.rig import Calibration
from .world import Scene

TABLES = ('category', 'attribute', 'visibility', 'instance', 'sensor', 'calibrated_sensor', 'ego_pose', 'log', 'scene',
          'sample', 'sample_data', 'sample_annotation', 'map')


@dataclass
class SceneRecord:
    """Everything about one rendered scene: ``shots[k]`` and ``frames[k]`` belong to key frame ``k``."""
    scene: Scene
    location: str
    log: str
    date: str
    calibration: Dict[str, Calibration]
    shots: List[List[Shot]]
    frames: List[dict]


def build_tables(config: GeneratorConfig, scenes: List[SceneRecord]) -> Dict[str, List[dict]]:
    """Table name -> records; tokens depend on the seed, the version and names only."""

    def name(table: str, *key) -> str:
        return token(config.version, config.seed, table, *key)

    tables: Dict[str, List[dict]] = {table: [] for table in TABLES}
    tables['category'] = [{'token': name('category', c), 'name': c, 'description': d} for c, d in schema.CATEGORIES.items()]
    tables['attribute'] = [{'token': name('attribute', a), 'name': a, 'description': d}
                           for a, d in schema.ATTRIBUTES.items()]
    tables['visibility'] = [{'token': key, 'level': level, 'description': f'{level[1:]} % of the object is visible.'}
                            for key, (level, _) in schema.VISIBILITY.items()]
    tables['sensor'] = [{'token': name('sensor', channel), 'channel': channel, 'modality': mount.modality}
                        for channel, mount in schema.RIG.items()]
    tables['map'] = [{'token': name('map', location), 'category': 'semantic_prior',
                      'filename': f'maps/{schema.SEMANTIC_PRIOR[location]}.png',
                      'log_tokens': [name('log', s.log) for s in scenes if s.location == location]}
                     for location in schema.LOCATIONS]
    for record in scenes:
        _add_scene(tables, record, config, name)
    return tables


def _add_scene(tables, record: SceneRecord, config: GeneratorConfig, name) -> None:
    scene = record.scene
    samples = [name('sample', scene.name, k) for k in range(len(record.shots))]
    tables['log'].append({'token': name('log', record.log), 'logfile': record.log, 'vehicle': record.log.split('-')[0],
                          'date_captured': record.date, 'location': record.location})
    tables['scene'].append({'token': name('scene', scene.name), 'log_token': name('log', record.log),
                            'nbr_samples': len(samples), 'first_sample_token': samples[0], 'last_sample_token': samples[-1],
                            'name': scene.name, 'description': 'Synthetic drive through generated streets'})
    for channel, mount in schema.RIG.items():
        calibration = record.calibration[channel]
        intrinsic = [] if calibration.intrinsic is None else calibration.intrinsic.tolist()
        tables['calibrated_sensor'].append({
            'token': name('calibrated_sensor', scene.name, channel), 'sensor_token': name('sensor', channel),
            'translation': calibration.translation.tolist(), 'rotation': calibration.quaternion.tolist(),
            'camera_intrinsic': intrinsic})
        _add_readings(tables, record, config, name, samples, channel, mount.modality)
    key_stamps = [next(s.timestamp for s in shots if s.key and s.channel == 'LIDAR_TOP') for shots in record.shots]
    for k, sample in enumerate(samples):
        tables['sample'].append({'token': sample, 'timestamp': key_stamps[k], 'prev': samples[k - 1] if k else '',
                                 'next': samples[k + 1] if k + 1 < len(samples) else '',
                                 'scene_token': name('scene', scene.name)})
    _add_annotations(tables, record, name, samples)


def _add_readings(tables, record: SceneRecord, config: GeneratorConfig, name, samples, channel: str, modality: str) -> None:
    readings = [(k, shot) for k, shots in enumerate(record.shots) for shot in shots if shot.channel == channel]
    tokens = [name('sample_data', record.scene.name, channel, shot.timestamp) for _, shot in readings]
    width, height = config.image_size if modality == 'camera' else (0, 0)
    for i, (k, shot) in enumerate(readings):
        turn, place = record.scene.ego_pose(shot.time)
        # As in the real tables, each reading has its own ego pose with the same token.
        tables['ego_pose'].append({'token': tokens[i], 'timestamp': shot.timestamp,
                                   'rotation': Quaternion(matrix=turn, rtol=1e-4, atol=1e-6).normalised.elements.tolist(),
                                   'translation': place.tolist()})
        tables['sample_data'].append({
            'token': tokens[i], 'sample_token': samples[k], 'ego_pose_token': tokens[i],
            'calibrated_sensor_token': name('calibrated_sensor', record.scene.name, channel), 'timestamp': shot.timestamp,
            'fileformat': {'camera': 'jpg', 'lidar': 'pcd', 'radar': 'pcd'}[modality], 'is_key_frame': shot.key,
            'height': height, 'width': width, 'filename': shot.filename, 'prev': tokens[i - 1] if i else '',
            'next': tokens[i + 1] if i + 1 < len(tokens) else ''})


def _add_annotations(tables, record: SceneRecord, name, samples: List[str]) -> None:
    """An actor is annotated from the first to the last key frame in which lidar or radar hit it, as in nuScenes."""
    scene = record.scene
    levels = [(fraction, key) for key, (_, fraction) in schema.VISIBILITY.items()]
    attribute_tokens = {a['name']: a['token'] for a in tables['attribute']}
    for index, actor in enumerate(scene.actors):
        found = [(k, row) for k, frame in enumerate(record.frames) for row in frame['annotations'] if row['actor'] == index]
        # Leaving and coming back makes a second instance: chains have no gaps.
        for part, run in enumerate(_runs(found)):
            hit = [i for i, (_, row) in enumerate(run) if row['num_lidar_pts'] + row['num_radar_pts'] > 0]
            if not hit:
                continue
            run = run[hit[0]:hit[-1] + 1]
            instance = name('instance', scene.name, index, part)
            tokens = [name('sample_annotation', scene.name, index, k) for k, _ in run]
            tables['instance'].append({
                'token': instance, 'category_token': name('category', actor.category), 'nbr_annotations': len(run),
                'first_annotation_token': tokens[0], 'last_annotation_token': tokens[-1]})
            for i, (k, row) in enumerate(run):
                attribute = actor.attribute(row['speed'])
                length, width, height = (float(v) for v in actor.size)
                tables['sample_annotation'].append({
                    'token': tokens[i], 'sample_token': samples[k], 'instance_token': instance,
                    'visibility_token': max(level for level in levels if row['visibility'] >= level[0])[1],
                    'attribute_tokens': [] if attribute is None else [attribute_tokens[attribute]],
                    'translation': row['translation'], 'size': [width, length, height],
                    'rotation': [float(np.cos(row['yaw'] / 2)), 0.0, 0.0, float(np.sin(row['yaw'] / 2))],
                    'prev': tokens[i - 1] if i else '', 'next': tokens[i + 1] if i + 1 < len(tokens) else '',
                    'num_lidar_pts': row['num_lidar_pts'], 'num_radar_pts': row['num_radar_pts']})


def _runs(found):
    """Split (key frame, row) pairs into stretches of consecutive key frames."""
    runs = []
    for k, row in found:
        if runs and runs[-1][-1][0] == k - 1:
            runs[-1].append((k, row))
        else:
            runs.append([(k, row)])
    return runs
