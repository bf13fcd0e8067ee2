"""Pinhole cameras: the ground and the boxes are cast ray by ray into one depth buffer, so that occlusion is exact.

Pixel (row i, column j) looks along the ray through image coordinates (j + 0.5, i + 0.5). The ray parameter is the depth along
the camera's axis (rays are not normalised).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

import cv2
import numpy as np

from .. import catalog
from ..ground import CELL, Ground
from ..world import Boxes, Scene
from .slab import intersect

NEAR, FAR = 0.3, 260.0  # m, nearest and farthest box
CHUNK = 400_000  # rays x boxes in one numpy operation, which bounds the memory


@dataclass
class Picture:
    """``image`` (H, W, 3) uint8 RGB; ``seen`` and ``whole`` (actors,): pixels that show an actor, and those it would fill
    if nothing stood before it."""
    image: np.ndarray
    seen: np.ndarray
    whole: np.ndarray


def render(scene: Scene, ground: Ground, boxes: Boxes, pose: Tuple[np.ndarray, np.ndarray], intrinsic: np.ndarray,
           size: Tuple[int, int], rng: np.random.Generator) -> Picture:
    """One image.

    Args:
        scene: gives light and haze.
        ground: the painted map.
        boxes: the world at the shutter's instant.
        pose: global_from_camera as rotation (3, 3) and translation (3,).
        intrinsic: (3, 3) in pixels of this ``size``.
        size: (width, height).
        rng: sensor noise.
    """
    width, height = size
    turn, origin = pose
    u, v = np.meshgrid((np.arange(width) + 0.5 - intrinsic[0, 2]) / intrinsic[0, 0],
                       (np.arange(height) + 0.5 - intrinsic[1, 2]) / intrinsic[1, 1])
    rays = (np.stack([u, v, np.ones_like(u)], axis=-1) @ turn.T).astype(np.float32)
    image = np.empty((height, width, 3), np.float32)
    depth = np.full((height, width), np.inf, np.float32)
    owner = np.full((height, width), -1, np.int32)
    sun = np.array([np.cos(scene.sun), np.sin(scene.sun)])
    _paint_sky_and_ground(ground, rays, origin, image, depth)
    whole = np.zeros(boxes.actors, np.int64)
    camera_from_global = turn.T
    for index in _candidates(boxes, camera_from_global, origin, intrinsic, size):
        rect = _rectangle(boxes, index, camera_from_global, origin, intrinsic, size)
        if rect is None:
            continue
        pixels = _paint_object(boxes, index, rays, origin, rect, image, depth, owner, sun)
        if index < boxes.actors:
            whole[index] = pixels
    fade = 1.0 - np.exp(-scene.haze * np.minimum(depth, 4000.0))[..., None]
    image += fade * (np.array([196, 206, 218], np.float32) - image)
    image *= (scene.light * scene.tint).astype(np.float32)
    image += rng.normal(0.0, 2.5, image.shape).astype(np.float32)
    seen = np.bincount(owner[(owner >= 0) & (owner < boxes.actors)], minlength=boxes.actors)
    return Picture(np.clip(image, 0, 255).astype(np.uint8), seen[:boxes.actors], whole)


def _paint_sky_and_ground(ground: Ground, rays, origin, image, depth) -> None:
    down = rays[..., 2]
    low = down < -1e-4
    up = np.clip(down / np.maximum(np.hypot(rays[..., 0], rays[..., 1]), 1e-6), 0, 1.0)[..., None]
    image[:] = np.array([214, 222, 230], np.float32) * (1 - up) + np.array([96, 142, 206], np.float32) * up
    scale = np.where(low, -origin[2] / np.where(low, down, -1.0), np.inf).astype(np.float32)
    with np.errstate(invalid='ignore'):
        x, y = origin[0] + scale * rays[..., 0], origin[1] + scale * rays[..., 1]
    rows, columns = ground.material.shape
    low &= (x > 0) & (y > 0) & (x < columns * CELL) & (y < rows * CELL)
    x, y = np.where(low, x, 0).astype(np.float32), np.where(low, y, 0).astype(np.float32)
    # Finer textures nearby, averaged ones far away where one pixel covers metres of road.
    picked = np.digitize(scale, (22.0, 70.0))
    for level, texture in enumerate(ground.levels):
        cell = CELL * 4 ** level
        chosen = low & (picked == level)
        if not chosen.any():
            continue
        rows_here = np.flatnonzero(chosen.any(axis=1))
        span = slice(rows_here[0], rows_here[-1] + 1)
        sampled = cv2.remap(texture, x[span] / cell - 0.5, y[span] / cell - 0.5, cv2.INTER_LINEAR,
                            borderMode=cv2.BORDER_REPLICATE)
        image[span][chosen[span]] = sampled[chosen[span]]
    beyond = (down < -1e-4) & ~low
    image[beyond] = (98, 112, 70)
    depth[:] = np.where(down < -1e-4, scale, np.inf)


def _candidates(boxes: Boxes, camera_from_global, origin, intrinsic, size) -> np.ndarray:
    """Owners whose bounding sphere may be in the picture, nearest first (which saves painting what is hidden)."""
    local = (boxes.hull_centre - origin) @ camera_from_global.T
    radius = 1.1 * np.linalg.norm(boxes.hull_half, axis=1) + 0.1
    slope = max(intrinsic[0, 2], size[0] - intrinsic[0, 2]) / intrinsic[0, 0]
    # The side planes of the view: |x| = slope * z, moved outwards by the radius.
    inside = np.abs(local[:, 0]) - slope * local[:, 2] < radius * np.hypot(1.0, slope)
    distance = np.linalg.norm(local, axis=1)
    found = np.flatnonzero(inside & (local[:, 2] > -radius) & (distance < FAR))
    return found[np.argsort(distance[found], kind='stable')]


def _rectangle(boxes: Boxes, index: int, camera_from_global, origin, intrinsic, size):
    """Pixel bounds (top, bottom, left, right) of an owner's box, or None if it is not in the picture."""
    offset = boxes.hull_centre[index] - origin
    half = boxes.hull_half[index]
    c, s = np.cos(boxes.hull_yaw[index]), np.sin(boxes.hull_yaw[index])
    corners = _CORNERS * (half * 1.09 + 0.01)
    world = np.stack([c * corners[:, 0] - s * corners[:, 1], s * corners[:, 0] + c * corners[:, 1], corners[:, 2]], axis=1)
    points = (world + offset) @ camera_from_global.T
    front = points[:, 2] > NEAR
    if not front.any():
        return None
    if not front.all():
        # Cut the edges that pass the near plane.
        a, b = points[_EDGES[:, 0]], points[_EDGES[:, 1]]
        crossing = (a[:, 2] > NEAR) != (b[:, 2] > NEAR)
        t = (NEAR - a[crossing, 2]) / (b[crossing, 2] - a[crossing, 2])
        cut = a[crossing] + t[:, None] * (b[crossing] - a[crossing])
        points = np.concatenate([points[front], cut])
    x = points[:, 0] / points[:, 2] * intrinsic[0, 0] + intrinsic[0, 2]
    y = points[:, 1] / points[:, 2] * intrinsic[1, 1] + intrinsic[1, 2]
    left, right = int(max(0, np.floor(x.min() - 0.5))), int(min(size[0], np.ceil(x.max() + 0.5)))
    top, bottom = int(max(0, np.floor(y.min() - 0.5))), int(min(size[1], np.ceil(y.max() + 0.5)))
    return None if left >= right or top >= bottom else (top, bottom, left, right)


_CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], float)
_EDGES = np.array([(i, j) for i in range(8) for j in range(i + 1, 8) if bin(i ^ j).count('1') == 1])


def _paint_object(boxes: Boxes, index: int, rays, origin, rect, image, depth, owner, sun) -> int:
    """Draw one owner's parts into the buffers; returns how many pixels it would fill without occlusion."""
    top, bottom, left, right = rect
    window = rays[top:bottom, left:right]
    first, last = boxes.starts[index], boxes.starts[index + 1]
    step = max(1, int(CHUNK // max(1, window.shape[0] * window.shape[1])))
    best = np.full(window.shape[:2], np.inf, np.float32)
    part = np.zeros(window.shape[:2], np.int64)
    face = np.zeros(window.shape[:2], np.int8)
    for begin in range(first, last, step):
        span = slice(begin, min(begin + step, last))
        hit, axis = intersect(origin, window, boxes.centre[span], boxes.half[span], boxes.yaw[span])
        winner = hit.argmin(axis=0)
        nearest = np.take_along_axis(hit, winner[None], 0)[0]
        closer = nearest < best
        best[closer] = nearest[closer]
        part[closer] = winner[closer] + begin
        face[closer] = np.take_along_axis(axis, winner[None], 0)[0][closer]
    solid = np.isfinite(best)
    shadow = solid & (boxes.pattern[part] == catalog.SHADOW)
    show = solid & (best < depth[top:bottom, left:right])
    if show.any():
        chosen = part[show]
        colour = boxes.colour[chosen].copy()
        _shade(boxes, chosen, face[show], window[show], best[show], origin, sun, colour)
        image[top:bottom, left:right][show] = colour
        depth[top:bottom, left:right][show] = best[show]
        # A shadow is not the object.
        owner[top:bottom, left:right][show & ~shadow] = index
    return int((solid & ~shadow).sum())


def _shade(boxes: Boxes, part, face, rays, depth, origin, sun, colour) -> None:
    """Light by face, and the surface patterns; changes ``colour`` (S, 3) in place."""
    yaw = boxes.yaw[part]
    c, s = np.cos(yaw), np.sin(yaw)
    point = origin + rays * depth[:, None] - boxes.centre[part]
    local = np.stack([c * point[:, 0] + s * point[:, 1], -s * point[:, 0] + c * point[:, 1], point[:, 2]], axis=1)
    side = np.take_along_axis(local, face[:, None].astype(np.int64), axis=1)[:, 0] > 0
    direction = np.where(face == 0, yaw, yaw + np.pi / 2) + np.where(side, 0.0, np.pi)
    lit = 0.74 + 0.2 * (np.cos(direction) * sun[0] + np.sin(direction) * sun[1])
    lit = np.where(face == 2, np.where(side, 1.05, 0.4), lit)
    pattern = boxes.pattern[part]
    wall = np.where(face == 0, local[:, 1], local[:, 0])
    windows = (pattern == catalog.WINDOWS) & (face != 2) & (np.mod(wall, 2.6) > 1.1) & \
        (np.mod(local[:, 2] + boxes.half[part][:, 2], 3.0) > 1.3)
    colour[windows] = colour[windows] * 0.3 + np.array([20, 26, 34], np.float32)
    stripes = (pattern == catalog.STRIPES) & (np.mod(local[:, 1] + 0.4 * local[:, 2], 0.6) > 0.3)
    colour[stripes] = (240, 240, 240)
    leaves = pattern == catalog.LEAVES
    speckle = np.sin(9.1 * local[:, 0]) * np.sin(8.3 * local[:, 1] + 1.0) * np.sin(7.7 * local[:, 2] + 2.0)
    lit = np.where(leaves, lit * (1.0 + 0.5 * speckle), lit)
    lit = np.where(pattern == catalog.SHADOW, 1.0, lit)
    colour *= lit[:, None].astype(np.float32)
