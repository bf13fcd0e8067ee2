"""The spinning lidar: 32 beams, one ray per beam and azimuth step, against the ground plane and all boxes.

Sensor frame: x right, y forward, z up (as LIDAR_TOP). A sweep is taken at one instant.
"""
from __future__ import annotations

from typing import Tuple

import numpy as np

from .. import catalog
from ..ground import INTENSITY, Ground
from ..world import Boxes
from .slab import intersect

BEAMS = 32
ELEVATION = (-30.67, 10.67)  # degrees, lowest and highest beam of an HDL-32E
RANGE = (1.5, 95.0)  # m
RANGE_NOISE = 0.015  # m, standard deviation
DROPOUT = 0.02


def scan(ground: Ground, boxes: Boxes, pose: Tuple[np.ndarray, np.ndarray], steps: int,
         rng: np.random.Generator) -> Tuple[np.ndarray, np.ndarray]:
    """One sweep.

    Args:
        ground: the painted map.
        boxes: the world at the sweep's instant.
        pose: global_from_lidar as rotation (3, 3) and translation (3,).
        steps: azimuth steps per turn.
        rng: noise.

    Returns:
        points (L, 5) float32: x, y, z in metres in the sensor frame, intensity 0 to 255, ring 0 (lowest) to 31; and owner
        (L,) of each point (index into ``boxes``' owners, -1 for the ground). Ordered by azimuth step, then ring.
    """
    turn, origin = pose
    elevation = np.deg2rad(np.linspace(*ELEVATION, BEAMS))
    azimuth = np.arange(steps) * (2 * np.pi / steps) - np.pi
    local = np.stack([np.cos(elevation)[None, :] * np.cos(azimuth)[:, None],
                      np.cos(elevation)[None, :] * np.sin(azimuth)[:, None],
                      np.broadcast_to(np.sin(elevation)[None, :], (steps, BEAMS))], axis=-1)
    rays = local @ turn.T
    down = rays[..., 2]
    distance = np.where(down < -1e-6, -origin[2] / np.where(down < -1e-6, down, -1.0), np.inf)
    part = np.full(distance.shape, -1, np.int64)
    face = np.full(distance.shape, 2, np.int8)
    solid = boxes.pattern != catalog.SHADOW
    heading = np.arctan2(turn[1, 0], turn[0, 0])
    offset = boxes.hull_centre[:, :2] - origin[:2]
    reach = np.hypot(offset[:, 0], offset[:, 1])
    radius = np.hypot(boxes.hull_half[:, 0], boxes.hull_half[:, 1])
    for index in np.flatnonzero(reach - radius < RANGE[1]):
        columns = _columns(np.arctan2(offset[index, 1], offset[index, 0]) - heading, reach[index], radius[index], steps)
        members = np.arange(boxes.starts[index], boxes.starts[index + 1])
        members = members[solid[members]]
        if not len(members):
            continue
        hit, axis = intersect(origin, rays[columns], boxes.centre[members], boxes.half[members], boxes.yaw[members])
        winner = hit.argmin(axis=0)
        nearest = np.take_along_axis(hit, winner[None], 0)[0]
        before = distance[columns]
        closer = nearest < before
        if closer.any():
            distance[columns] = np.where(closer, nearest, before)
            part[columns] = np.where(closer, members[winner], part[columns])
            face[columns] = np.where(closer, np.take_along_axis(axis, winner[None], 0)[0], face[columns])
    intensity = _reflect(ground, boxes, origin, rays, distance, part, face)
    noisy = distance + rng.normal(0.0, RANGE_NOISE, distance.shape)
    intensity = np.clip(intensity * rng.normal(1.0, 0.12, distance.shape) + rng.normal(0.0, 1.5, distance.shape), 0, 255)
    # Weak returns from far away get lost.
    lost = rng.random(distance.shape) < DROPOUT + np.clip((distance / RANGE[1]) ** 2 * np.exp(-intensity / 18.0), 0, 0.9)
    kept = np.isfinite(distance) & (distance > RANGE[0]) & (distance < RANGE[1]) & ~lost
    rings = np.broadcast_to(np.arange(BEAMS), distance.shape)
    points = np.concatenate([(local * np.where(kept, noisy, 0.0)[..., None])[kept], np.round(intensity[kept])[:, None],
                             rings[kept][:, None]], axis=1)
    owner = np.full(distance.shape, -1, np.int64)
    owner[part >= 0] = boxes.owner[part[part >= 0]]
    return points.astype(np.float32), owner[kept]


def _columns(azimuth: float, reach: float, radius: float, steps: int) -> np.ndarray:
    """The azimuth steps that can meet a circle of ``radius`` at ``azimuth`` and distance ``reach``."""
    if reach < radius * 1.05 + 0.3:
        return np.arange(steps)
    # A tilt of the sensor moves directions by less than a step's margin of two steps.
    half = np.arcsin(min(1.0, radius / reach)) + 0.02
    width = 2 * np.pi / steps
    first = int(np.floor((azimuth - half + np.pi) / width)) - 1
    last = int(np.ceil((azimuth + half + np.pi) / width)) + 1
    return np.arange(first, last + 1) % steps if last - first < steps else np.arange(steps)


def _reflect(ground: Ground, boxes: Boxes, origin, rays, distance, part, face) -> np.ndarray:
    """Intensities before noise: the material's value, weaker at grazing angles."""
    finite = np.where(np.isfinite(distance), distance, 0.0)
    xy = origin[:2] + rays[..., :2] * finite[..., None]
    on_ground = INTENSITY[ground.material_at(xy)] * (0.55 + 0.45 * np.sqrt(np.clip(-rays[..., 2], 0.0, 1.0)))
    hit = part >= 0
    chosen, side, ray = part[hit], face[hit], rays[hit]
    yaw = boxes.yaw[chosen] + np.where(side == 1, np.pi / 2, 0.0)
    incidence = np.where(side == 2, np.abs(ray[:, 2]), np.abs(np.cos(yaw) * ray[:, 0] + np.sin(yaw) * ray[:, 1]))
    on_ground[hit] = boxes.intensity[chosen] * (0.4 + 0.6 * incidence)
    return on_ground
