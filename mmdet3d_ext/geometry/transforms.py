"""Named transforms: every matrix is called ``dst_from_src``, so that a product chains by eye.

``lidar_from_camera @ camera_from_lidar`` is the identity; ``image_from_lidar = image_from_camera @ camera_from_lidar``.
All matrices are 4x4 (or ``(..., 4, 4)``) and act on column vectors ``(x, y, z, 1)``, lengths in metres.

Frames: *lidar* x right, y forward, z up; *camera* x right, y down, z forward; *image* (u, v) in pixels with the origin at the
**corner** of the first pixel, so pixel ``i`` covers ``[i, i + 1)`` and its centre is ``i + 0.5``. ``augmented`` is the frame
after data augmentation.

Functions take numpy arrays or torch tensors unless they say otherwise and never change their input.
"""
from __future__ import annotations

from typing import Optional, Sequence, Tuple, Union

import numpy as np
import torch

Array = Union[np.ndarray, torch.Tensor]


def homogeneous(rotation: Optional[np.ndarray] = None, translation: Optional[np.ndarray] = None) -> np.ndarray:
    """A 4x4 float64 matrix from a 3x3 ``rotation`` (default identity) and a 3-vector ``translation`` (default zero)."""
    matrix = np.eye(4)
    if rotation is not None:
        rotation = np.asarray(rotation, dtype=np.float64)
        if rotation.shape != (3, 3):
            raise ValueError(f'rotation: expected a 3x3 matrix, got shape {rotation.shape}')
        matrix[:3, :3] = rotation
    if translation is not None:
        translation = np.asarray(translation, dtype=np.float64)
        if translation.shape != (3,):
            raise ValueError(f'translation: expected 3 values (metres), got shape {translation.shape}')
        matrix[:3, 3] = translation
    return matrix


def transform_points(dst_from_src: Array, points: Array) -> Array:
    """``(..., 3)`` points in the ``src`` frame to the ``dst`` frame by one 4x4 matrix."""
    return points @ dst_from_src[:3, :3].swapaxes(0, 1) + dst_from_src[:3, 3]


def project_points(image_from_lidar: Array, points: Array, min_depth: float = 1e-5) -> Tuple[Array, Array]:
    """Lidar points ``(P, 3)`` through a projection ``(4, 4)`` to pixels ``(P, 2)`` as (u, v) and depths ``(P,)`` in metres.

    The division uses ``max(depth, min_depth)``; points with ``depth <= 0`` are behind the camera and their pixel is
    meaningless, so callers must test the depth.
    """
    projected = transform_points(image_from_lidar, points)
    depth = projected[..., 2]
    divisor = depth.clamp(min=min_depth) if isinstance(depth, torch.Tensor) else np.maximum(depth, min_depth)
    return projected[..., :2] / divisor[..., None], depth


def image_augmentation(scale: Tuple[float, float], crop: Tuple[float, float], size: Tuple[int, int], flip: bool = False,
                       degrees: float = 0.0) -> np.ndarray:
    """``augmented_from_image``: resize, crop, left-right flip, rotate about the centre; 4x4 float64 on (u, v, depth, 1).

    Args:
        scale: (horizontal, vertical) factors: new size / old size.
        crop: (left, top) corner of the crop in the resized image; may be negative (padding).
        size: (H, W) of the crop in pixels.
        flip: left-right flip of the crop (``u -> W - u``).
        degrees: turn counter-clockwise as seen by the viewer (Pillow's sense; image v points down).
    """
    height, width = size
    matrix = np.eye(4)
    matrix[0, 0], matrix[1, 1] = scale
    matrix[0, 3], matrix[1, 3] = -crop[0], -crop[1]
    if flip:
        mirror = np.eye(4)
        mirror[0, 0], mirror[0, 3] = -1.0, width
        matrix = mirror @ matrix
    if degrees:
        cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
        turn = np.eye(4)
        turn[:2, :2] = [[cos, sin], [-sin, cos]]
        centre = np.array([width / 2, height / 2])
        turn[:2, 3] = centre - turn[:2, :2] @ centre
        matrix = turn @ matrix
    return matrix


def bev_rotation_scale_translation(angle: float, scale: float, translation: Sequence[float]) -> np.ndarray:
    """``augmented_from_lidar`` (4x4 float64) of one global augmentation: turn **clockwise**, translate, then scale.

    Clockwise (seen from above) and in this order, so the translation is scaled too: the order that trained checkpoints know.

    Args:
        angle: radians. scale: factor > 0. translation: (x, y, z) in metres before scaling.
    """
    if not scale > 0:
        raise ValueError(f'scale: must be positive, got {scale}')
    cos, sin = np.cos(angle), np.sin(angle)
    rotation = np.array([[cos, sin, 0.0], [-sin, cos, 0.0], [0.0, 0.0, 1.0]])
    return homogeneous(scale * rotation, scale * np.asarray(translation, dtype=np.float64))


def bev_flip(horizontal: bool, vertical: bool) -> np.ndarray:
    """``augmented_from_lidar`` for flips: horizontal negates y, vertical negates x (mmdet3d's names); 4x4 float64."""
    return np.diag([-1.0 if vertical else 1.0, -1.0 if horizontal else 1.0, 1.0, 1.0])


def bev_affine(bev_from_world: np.ndarray, ground_z: float = 0.0) -> np.ndarray:
    """The 2-D part ``(2, 3)`` of a 3-D transform for world points that lie on the plane ``z = ground_z`` (metres).

    ``bev_xy = A[:, :2] @ world_xy + A[:, 2]``: how a flat map appears in the BEV of a frame that may roll and pitch.
    """
    matrix = np.asarray(bev_from_world, dtype=np.float64)
    return np.concatenate([matrix[:2, :2], matrix[:2, 2:3] * ground_z + matrix[:2, 3:4]], axis=1)
