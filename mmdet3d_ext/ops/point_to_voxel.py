"""Features of points that share a voxel to one: sum, mean or max (:func:`dynamic_point_to_voxel`, :class:`DynamicScatter`).

Letters: P points, K coordinate columns, C channels, V voxels.

Voxels come out sorted by their coordinate columns, first column first, on every device and in every run: by batch, z, y, x for
mmdet3d's (batch, z, y, x) rows. Rows with a negative entry are dropped.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence, Tuple

import torch
from torch import nn

from ._checks import check, check_same_device, check_tensor
from ._library import fake, require

REDUCTIONS = ('sum', 'mean', 'max')


class PointGroups(NamedTuple):
    """Which points share a voxel; made once by :func:`group_points`, used for any number of features."""

    voxel_coords: torch.Tensor  # (V, K), type of the coordinates
    point2voxel: torch.Tensor  # (P,) int32, -1 if the point was dropped
    counts: torch.Tensor  # (V,) int32: points per voxel
    order: torch.Tensor  # (P,) int32: points by voxel, then by index; -1 behind the last of them
    starts: torch.Tensor  # (V + 1,) int32: voxel v holds order[starts[v]:starts[v + 1]]
    has_long: torch.Tensor  # bool, on the CPU: some voxel is so full that several thread groups share it


@fake('point_groups')
def _(coords):
    voxels = torch.library.get_ctx().new_dynamic_size()
    points = coords.shape[0]
    return (
        coords.new_empty((voxels, coords.shape[1])),
        coords.new_empty((points,), dtype=torch.int32),
        coords.new_empty((voxels,), dtype=torch.int32),
        coords.new_empty((points,), dtype=torch.int32),
        coords.new_empty((voxels + 1,), dtype=torch.int32),
        torch.empty((), dtype=torch.bool, device='cpu'),
    )


@fake('group_reduce')
def _(feats, point2voxel, counts, order, starts, has_long, reduce):
    shape = (counts.shape[0], feats.shape[1])
    return feats.new_empty(shape), feats.new_empty(shape if reduce == 2 else (0,), dtype=torch.int32)


@fake('dynamic_point_to_voxel')
def _(feats, coords, reduce):
    voxels = torch.library.get_ctx().new_dynamic_size()
    shape = (voxels, feats.shape[1])
    return (
        feats.new_empty(shape),
        coords.new_empty((voxels, coords.shape[1])),
        coords.new_empty((coords.shape[0],), dtype=torch.int32),
        coords.new_empty((voxels,), dtype=torch.int32),
        feats.new_empty(shape if reduce == 2 else (0,), dtype=torch.int32),
    )


@fake('group_reduce_backward')
def _(grad, point2voxel, counts, arg, reduce):
    return grad.new_empty((point2voxel.shape[0], grad.shape[1]))


def group_points(coords: torch.Tensor) -> PointGroups:
    """Find the points that share a voxel.

    Args:
        coords: (P, K) int32 or int64, e.g. (batch, z, y, x); a row with a negative entry is dropped.

    Raises:
        ValueError: for a wrong shape or type.
    """
    check_tensor(coords, 'group_points', 'coords', '(P, K)', 2)
    check(coords.dtype in (torch.int32, torch.int64), 'group_points', 'coords', 'int32 or int64', coords.dtype)
    check(coords.shape[1] >= 1, 'group_points', 'coords', '(P, K) with K >= 1', f'shape {tuple(coords.shape)}')
    require(coords)
    return PointGroups(*torch.ops.mmdet3d_ext.point_groups(coords))


def reduce_points(feats: torch.Tensor, groups: PointGroups, reduce: str = 'mean') -> torch.Tensor:
    """One feature per voxel, (V, C), from those of its points.

    Sums are taken in float32 for half precision. ``max`` sends the gradient to the first point that holds the maximum; NaN wins
    over every number and stays in its own voxel and channel.

    Args:
        feats: (P, C) floating.
        groups: of the same points.
        reduce: 'sum', 'mean' or 'max'.

    Raises:
        ValueError: for a wrong shape, type or reduction.
    """
    code = _check_feats('reduce_points', feats, groups.order, reduce)
    return torch.ops.mmdet3d_ext.group_reduce(feats, *groups[1:], code)[0]


def _check_feats(op: str, feats: torch.Tensor, coords: torch.Tensor, reduce: str) -> int:
    """The number of the reduction, once the features fit the points."""
    check_tensor(feats, op, 'feats', '(P, C)', 2)
    if reduce not in REDUCTIONS:
        check(False, op, 'reduce', f'one of {REDUCTIONS}', repr(reduce))
    check(feats.is_floating_point(), op, 'feats', 'floating', feats.dtype)
    if feats.shape[0] != coords.shape[0]:
        check(False, op, 'feats', f'of as many points as coords ({coords.shape[0]})', feats.shape[0])
    check_same_device(op, coords=coords, feats=feats)
    return REDUCTIONS.index(reduce)


def dynamic_point_to_voxel(
    feats: torch.Tensor, coords: torch.Tensor, reduce: str = 'mean'
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reduce the features of points that share a voxel; one call for a whole batch.

    Args:
        feats: (P, C) floating.
        coords: (P, 3) or (P, 4), int32 or int64; with four columns the first is the sample of the batch.
        reduce: 'sum', 'mean' or 'max'; see :func:`reduce_points`.

    Returns:
        voxel features (V, C); voxel coordinates (V, K), sorted; voxel of each point (P,) int32, -1 if dropped; points per
        voxel (V,) int32.

    Raises:
        ValueError: for a wrong shape, type or reduction.
    """
    op = 'dynamic_point_to_voxel'
    check_tensor(coords, op, 'coords', '(P, 3) or (P, 4)', 2)
    if coords.shape[1] not in (3, 4):
        check(False, op, 'coords', '(P, 3) or (P, 4)', f'shape {tuple(coords.shape)}')
    check(coords.dtype in (torch.int32, torch.int64), op, 'coords', 'int32 or int64', coords.dtype)
    require(coords)
    return torch.ops.mmdet3d_ext.dynamic_point_to_voxel(feats, coords, _check_feats(op, feats, coords, reduce))[:4]


class DynamicScatter(nn.Module):
    """Drop-in for ``mmcv.ops.DynamicScatter``: voxel features and coordinates from those of points.

    Args:
        voxel_size, point_cloud_range: kept for reading; the coordinates decide.
        average_points: mean if true, else max.
    """

    def __init__(self, voxel_size: Sequence[float], point_cloud_range: Sequence[float], average_points: bool):
        super().__init__()
        self.voxel_size, self.point_cloud_range, self.average_points = voxel_size, point_cloud_range, average_points

    def forward(self, points: torch.Tensor, coors: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """(P, C) features and (P, 3 or 4) coordinates -> (V, C) features and (V, 3 or 4) coordinates."""
        return dynamic_point_to_voxel(points.contiguous(), coors, 'mean' if self.average_points else 'max')[:2]

    def extra_repr(self) -> str:
        return f'voxel_size={self.voxel_size}, point_cloud_range={self.point_cloud_range}, average_points={self.average_points}'
