"""Rays against upright boxes by the slab method (Kay and Kajiya 1986)."""
from __future__ import annotations

from typing import Tuple

import numpy as np


def intersect(origin: np.ndarray, directions: np.ndarray, centre: np.ndarray, half: np.ndarray,
              yaw: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Where rays enter boxes.

    Args:
        origin: (3,) common origin of the rays.
        directions: (..., 3) directions of any length, float32 or float64.
        centre, half, yaw: (P, 3), (P, 3) and (P,): boxes turned about the vertical axis.

    Returns:
        Ray parameters (P, ...) of the entry points, inf where a ray misses the box or starts inside of it; and the axis
        (0 x, 1 y, 2 z of the box) of the face that was entered.
    """
    c, s = np.cos(yaw), np.sin(yaw)
    offset = origin[None] - centre
    local_o = np.stack([c * offset[:, 0] + s * offset[:, 1], -s * offset[:, 0] + c * offset[:, 1], offset[:, 2]], axis=1)
    shape = (len(yaw),) + (1,) * (directions.ndim - 1)
    c, s = (v.reshape(shape).astype(directions.dtype) for v in (c, s))
    dx, dy, dz = directions[..., 0], directions[..., 1], directions[..., 2]
    near = far = axis = None
    for k, direction in enumerate((c * dx + s * dy, c * dy - s * dx, dz[None])):
        # A ray parallel to a pair of faces is between them all along or never: a tiny slope says so without 0 * inf.
        inverse = 1.0 / np.where(direction == 0.0, directions.dtype.type(1e-20), direction)
        middle = -local_o[:, k].reshape(shape).astype(directions.dtype) * inverse
        reach = half[:, k].reshape(shape).astype(directions.dtype) * np.abs(inverse)
        low, high = middle - reach, middle + reach
        if near is None:
            near, far = low, high
            axis = np.zeros(low.shape, np.int8)
        else:
            later = low > near
            axis = np.where(later, np.int8(k), axis)
            near, far = np.where(later, low, near), np.minimum(far, high)
    return np.where((near < far) & (near > 0), near, np.inf), np.broadcast_to(axis, near.shape)
