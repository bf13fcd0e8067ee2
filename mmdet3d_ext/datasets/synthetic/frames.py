"""Renders one key frame with its sweeps: the unit of work of a process. Files are written, what the tables need is returned."""
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Tuple

import cv2
import numpy as np

from . import schema
from .config import GeneratorConfig
from .ground import Ground
from .sensors import cameras, lidar, radar
from .sensors.rig import Calibration, sensor_pose
from .world import Boxes, Scene

VISIBLE = 75.0  # m, how far annotations reach
EXTENSION = {'camera': 'jpg', 'lidar': 'pcd.bin', 'radar': 'pcd'}


@dataclass(frozen=True)
class Shot:
    """One sensor reading: ``time`` in seconds since the scene's start."""
    channel: str
    time: float
    key: bool
    filename: str
    timestamp: int


def shots(config: GeneratorConfig, log: str, start: int, sample: int) -> List[Shot]:
    """The readings that belong to one key frame: its own and the sweeps before it, oldest first for each sensor.

    Args:
        log: name of the log, the first part of the file names.
        start: microseconds of the scene's first lidar key frame.
        sample: number of the key frame within the scene.
    """
    found = []
    plan = {'camera': (config.camera_sweeps, schema.CAMERA_INTERVAL), 'lidar': (config.sweeps, schema.SWEEP_INTERVAL),
            'radar': (config.radar_sweeps, schema.RADAR_INTERVAL)}
    for channel, mount in schema.RIG.items():
        count, interval = plan[mount.modality]
        # Like a real scene, ours begins with a key frame: nothing comes before it.
        for back in range(count if sample else 0, -1, -1):
            time = sample * schema.KEY_INTERVAL - mount.lag - back * interval
            stamp = start + int(round(time * 1e6))
            folder = 'sweeps' if back else 'samples'
            name = f'{folder}/{channel}/{log}__{channel}__{stamp}.{EXTENSION[mount.modality]}'
            found.append(Shot(channel, time, back == 0, name, stamp))
    return found


def render(root: Path, config: GeneratorConfig, scene: Scene, ground: Ground, calibration: Dict[str, Calibration],
           readings: List[Shot], sample: int) -> dict:
    """Write the files of one key frame and count what its annotations need.

    Returns:
        dict of 'annotations': for each actor within 75 m its index, box, speed, numbers of points and visible fraction
        (see :func:`_annotations`).
    """
    seed = [config.seed, 15, *scene.name.encode(), sample]
    centre_time = sample * schema.KEY_INTERVAL
    boxes = scene.boxes(centre_time)
    key_points, radar_points = None, []
    seen, whole = np.zeros(boxes.actors, np.int64), np.zeros(boxes.actors, np.int64)
    for number, shot in enumerate(readings):
        rng = np.random.default_rng([*seed, number])
        pose = sensor_pose(scene.ego_pose(shot.time), calibration[shot.channel])
        world = scene.boxes(shot.time)
        modality = schema.RIG[shot.channel].modality
        if modality == 'camera':
            picture = cameras.render(scene, ground, world, pose, calibration[shot.channel].intrinsic, config.image_size, rng)
            content = cv2.imencode('.jpg', picture.image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, config.jpeg_quality])[1]
            content = content.tobytes()
            if shot.key:
                seen += picture.seen
                whole += picture.whole
        elif modality == 'lidar':
            points, _ = lidar.scan(ground, world, pose, config.lidar_azimuth_steps, rng)
            content = points.tobytes()
            if shot.key:
                key_points = points[:, :3].astype(np.float64) @ pose[0].T + pose[1]
        else:
            returns = radar.scan(scene, world, shot.time, pose, ego_velocity(scene, shot.time), rng)
            content = radar.encode(returns)
            if shot.key:
                valid = returns[returns['invalid_state'] == 0]
                local = np.stack([valid['x'], valid['y'], valid['z']], axis=1).astype(np.float64)
                radar_points.append(local @ pose[0].T + pose[1])
        write_atomic(root / shot.filename, content)
    ego = scene.ego_place(centre_time)
    return {'annotations': _annotations(scene, boxes, centre_time, ego, key_points, np.concatenate(radar_points), seen, whole)}


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that it either is there in full or not at all."""
    partial = path.with_name(path.name + '.part')
    partial.write_bytes(content)
    os.replace(partial, path)


def ego_velocity(scene: Scene, time: float) -> np.ndarray:
    """(2,) m/s in global axes."""
    before, after = scene.ego_place(time - 0.05), scene.ego_place(time + 0.05)
    return np.array([after[0] - before[0], after[1] - before[1]]) / 0.1


def count_inside(points: np.ndarray, centre: np.ndarray, half: np.ndarray, yaw: float) -> int:
    """How many of the points (L, 3) lie in a box (faces included)."""
    near = points[(np.abs(points[:, :2] - centre[:2]) <= np.hypot(half[0], half[1])).all(axis=1)] - centre
    c, s = np.cos(yaw), np.sin(yaw)
    inside = (np.abs(c * near[:, 0] + s * near[:, 1]) <= half[0]) & (np.abs(c * near[:, 1] - s * near[:, 0]) <= half[1]) \
        & (np.abs(near[:, 2]) <= half[2])
    return int(inside.sum())


def _annotations(scene: Scene, boxes: Boxes, time: float, ego: Tuple[float, float, float], lidar_points: np.ndarray,
                 radar_points: np.ndarray, seen: np.ndarray, whole: np.ndarray) -> List[dict]:
    found = []
    for index, actor in enumerate(scene.actors):
        centre, half, yaw = boxes.hull_centre[index], boxes.hull_half[index], float(boxes.hull_yaw[index])
        if np.hypot(centre[0] - ego[0], centre[1] - ego[1]) > VISIBLE:
            continue
        # Counted in the very box that the table holds, which has millimetres.
        centre = np.round(centre, 3)
        found.append({
            'actor': index, 'translation': centre.tolist(), 'yaw': yaw,
            'speed': actor.pose(time)[3],
            'num_lidar_pts': count_inside(lidar_points, centre, half, yaw),
            'num_radar_pts': count_inside(radar_points, centre, half, yaw),
            'visibility': float(seen[index] / whole[index]) if whole[index] else 0.0})
    return found
