"""The five radars: a few returns from each thing in view, with radial velocities, as nuScenes' binary .pcd files.

Sensor frame: x forward, y left. Radars do not measure height: z is 0.
"""
from __future__ import annotations

from typing import Tuple

import numpy as np

from ..world import Boxes, Scene

FIELDS = np.dtype([('x', '<f4'), ('y', '<f4'), ('z', '<f4'), ('dyn_prop', 'i1'), ('id', '<i2'), ('rcs', '<f4'), ('vx', '<f4'),
                   ('vy', '<f4'), ('vx_comp', '<f4'), ('vy_comp', '<f4'), ('is_quality_valid', 'i1'), ('ambig_state', 'i1'),
                   ('x_rms', 'i1'), ('y_rms', 'i1'), ('invalid_state', 'i1'), ('pdh0', 'i1'), ('vx_rms', 'i1'),
                   ('vy_rms', 'i1')])
MAX_POINTS = 125
RANGE = 100.0  # m
# (range in m, half field of view in radians): a long-range sensor sees far ahead and less far to the sides.
FIELD_OF_VIEW = ((20.0, np.deg2rad(60)), (70.0, np.deg2rad(40)), (RANGE, np.deg2rad(9)))


def scan(scene: Scene, boxes: Boxes, time: float, pose: Tuple[np.ndarray, np.ndarray], ego_velocity: np.ndarray,
         rng: np.random.Generator) -> np.ndarray:
    """One scan: (R,) array of :data:`FIELDS`, at least one row (a real file is never empty).

    Args:
        scene: gives the actors' speeds.
        boxes: the world at the scan's instant.
        time: seconds since the scene's start.
        pose: global_from_radar as rotation (3, 3) and translation (3,).
        ego_velocity: (2,) m/s in global axes, by which the compensated velocities are corrected.
        rng: noise.
    """
    turn, origin = pose
    offset = boxes.hull_centre - origin
    local = offset @ turn
    distance, bearing = np.hypot(local[:, 0], local[:, 1]), np.arctan2(local[:, 1], local[:, 0])
    rows = []
    for index in np.argsort(distance):
        limit = next((reach for reach, half in FIELD_OF_VIEW[::-1] if abs(bearing[index]) < half), 0.0)
        if not 0.5 < distance[index] < limit or rng.random() < 0.15 + 0.25 * distance[index] / RANGE:
            continue
        if _hidden(boxes, index, distance, bearing):
            continue
        speed = scene.actors[index].pose(time)[3] if index < boxes.actors else 0.0
        yaw = boxes.hull_yaw[index]
        velocity = speed * np.array([np.cos(yaw), np.sin(yaw)])
        area = boxes.hull_half[index, 0] * boxes.hull_half[index, 2]
        count = 1 + int(rng.integers(0, 3)) * int(area > 1.0)
        for _ in range(count):
            point = _surface_point(boxes, index, origin, rng) - origin[:2]
            xy = (np.array([*point, 0.0]) @ turn)[:2] + rng.normal(0.0, 0.08, 2)
            radial = np.array([np.cos(np.arctan2(xy[1], xy[0])), np.sin(np.arctan2(xy[1], xy[0]))])
            absolute = ((np.array([*velocity, 0.0]) @ turn)[:2] @ radial) * radial
            own = ((np.array([*ego_velocity, 0.0]) @ turn)[:2] @ radial) * radial
            moving = abs(speed) > 0.3
            rows.append((*xy, 0.0, 0 if moving else 1, len(rows), float(np.clip(6 * np.log10(area + 0.1) + 5
                         + rng.normal(0, 3), -5, 40)), *(absolute - own), *absolute, 1, 3, 19, 19, 0, 1, 16, 3))
    # False echoes; a part of them is marked invalid, as in the real files.
    for _ in range(int(rng.integers(1, 6))):
        reach, angle = rng.uniform(3, 60), rng.uniform(-0.9, 0.9)
        rows.append((reach * np.cos(angle), reach * np.sin(angle), 0.0, int(rng.integers(0, 7)), len(rows),
                     float(rng.uniform(-5, 5)), *rng.normal(0, 1, 2), *rng.normal(0, 1, 2), 1, int(rng.integers(1, 5)), 20,
                     20, int((0, 4, 8, 17)[int(rng.integers(4))]), 3, 16, 3))
    return np.array(rows[:MAX_POINTS], dtype=FIELDS)


def _hidden(boxes: Boxes, index: int, distance: np.ndarray, bearing: np.ndarray) -> bool:
    """Whether something large and nearer covers the middle of this object."""
    width = np.arctan2(np.minimum(boxes.hull_half[:, 0], boxes.hull_half[:, 1]), np.maximum(distance, 0.1))
    turn = np.abs((bearing - bearing[index] + np.pi) % (2 * np.pi) - np.pi)
    blocking = (distance < distance[index] - 1.0) & (turn < width) & (boxes.hull_half[:, 2] > 0.7)
    return bool(blocking.any())


def _surface_point(boxes: Boxes, index: int, origin: np.ndarray, rng) -> np.ndarray:
    """A point (2,) just inside the outline of an object, on the side that faces the sensor."""
    yaw, half = boxes.hull_yaw[index], boxes.hull_half[index, :2]
    c, s = np.cos(yaw), np.sin(yaw)
    offset = origin[:2] - boxes.hull_centre[index, :2]
    toward = np.array([c * offset[0] + s * offset[1], -s * offset[0] + c * offset[1]])
    local = rng.uniform(-0.85, 0.85, 2) * half
    axis = int(abs(toward[1]) / half[1] > abs(toward[0]) / half[0])
    local[axis] = np.sign(toward[axis]) * half[axis] * 0.85
    return boxes.hull_centre[index, :2] + np.array([c * local[0] - s * local[1], s * local[0] + c * local[1]])


def encode(points: np.ndarray) -> bytes:
    """The bytes of a .pcd file (version 0.7, binary) with the header lines that the devkit's reader expects."""
    sizes = [str(FIELDS.fields[name][0].itemsize) for name in FIELDS.names]
    types = ['F' if FIELDS.fields[name][0].kind == 'f' else 'I' for name in FIELDS.names]
    header = ['# .PCD v0.7 - Point Cloud Data file format', 'VERSION 0.7', 'FIELDS ' + ' '.join(FIELDS.names),
              'SIZE ' + ' '.join(sizes), 'TYPE ' + ' '.join(types), 'COUNT ' + ' '.join(['1'] * len(sizes)),
              f'WIDTH {len(points)}', 'HEIGHT 1', 'VIEWPOINT 0 0 0 1 0 0 0', f'POINTS {len(points)}', 'DATA binary']
    # The reader wants at least one byte after the last point; the real files end with a line break too.
    return ('\n'.join(header) + '\n').encode() + points.tobytes() + b'\n'
