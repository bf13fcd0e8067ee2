"""Points to voxels: coordinates only (:func:`dynamic_voxelize`) or a fixed number of points per voxel (:func:`voxelize`).

Letters: P points, F columns of a point, V voxels, M points per voxel. Lengths are metres in the lidar frame; coordinates are
``floor((p - lower) / size)`` along x, y, z, computed in float32 whatever autocast says.
"""

from __future__ import annotations

from typing import Sequence, Tuple

import torch

from ._checks import check, check_tensor, grid_from_range
from ._library import fake, require


@fake('voxel_coords')
def _(points, lower, step, cells):
    return points.new_empty((points.shape[0], 3), dtype=torch.int32)


@fake('hard_voxelize')
def _(points, lower, step, cells, max_num_points, max_voxels):
    voxels = torch.library.get_ctx().new_dynamic_size()
    return (
        points.new_empty((voxels, max_num_points, points.shape[1])),
        points.new_empty((voxels, 3), dtype=torch.int32),
        points.new_empty((voxels,), dtype=torch.int32),
    )


def _check_points(op: str, points: torch.Tensor) -> None:
    check_tensor(points, op, 'points', '(P, F >= 3) with x, y, z first', 2)
    check(points.shape[1] >= 3, op, 'points', '(P, F >= 3) with x, y, z first', f'shape {tuple(points.shape)}')
    check(
        points.dtype in (torch.float32, torch.float64),
        op,
        'points',
        'float32 or float64 (half precision moves points by centimetres; keep the cloud out of autocast)',
        points.dtype,
    )
    require(points)


def dynamic_voxelize(points: torch.Tensor, voxel_size: Sequence[float], point_cloud_range: Sequence[float]) -> torch.Tensor:
    """The voxel of every point.

    Args:
        points: (P, F), x, y, z in the first three columns; float32 or float64.
        voxel_size: (x, y, z).
        point_cloud_range: (x_lo, y_lo, z_lo, x_hi, y_hi, z_hi); the size must divide it.

    Returns:
        (P, 3) int32, in the order x, y, z; -1 -1 -1 for a point outside the range, or not a number.

    Raises:
        ValueError: for a wrong shape, type or grid.
    """
    _check_points('dynamic_voxelize', points)
    return torch.ops.mmdet3d_ext.voxel_coords(
        points.detach(), *grid_from_range('dynamic_voxelize', voxel_size, point_cloud_range)
    )


def voxelize(
    points: torch.Tensor,
    voxel_size: Sequence[float],
    point_cloud_range: Sequence[float],
    max_num_points: int,
    max_voxels: int,
    deterministic: bool = True,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hard voxelisation: at most ``max_voxels`` voxels of at most ``max_num_points`` points.

    Voxels are numbered by their first point; each keeps its first points in their order. Once there are ``max_voxels``, points
    of further voxels are dropped, while those of known voxels still enter. No gradient flows to the points.

    Args:
        points, voxel_size, point_cloud_range: as in :func:`dynamic_voxelize`.
        max_num_points: M, at least 1.
        max_voxels: at least 0, or -1 for no limit.
        deterministic: accepted for compatibility; the result is always the deterministic one.

    Returns:
        voxels (V, M, F), unused rows zero; coordinates (V, 3) int32 in the order x, y, z; number of points (V,) int32.

    Raises:
        ValueError: for a wrong shape, type, grid or limit.
    """
    _check_points('voxelize', points)
    check(
        int(max_num_points) == max_num_points and max_num_points >= 1,
        'voxelize',
        'max_num_points',
        'at least 1',
        max_num_points,
    )
    check(
        int(max_voxels) == max_voxels and max_voxels >= -1,
        'voxelize',
        'max_voxels',
        'at least 0, or -1 for no limit',
        max_voxels,
    )
    grid = grid_from_range('voxelize', voxel_size, point_cloud_range)
    return torch.ops.mmdet3d_ext.hard_voxelize(points.detach(), *grid, int(max_num_points), int(max_voxels))
