"""Points -> voxels for a whole batch, in float32 and without gradients.

Letters: B batch, P points, F point features (x, y, z first), V voxels, M point slots per voxel. Coordinates are
(batch, x, y, z) cells, floor((p - lower) / size); points outside the range or with a NaN position belong to no voxel.
"""
from __future__ import annotations

from typing import List, Sequence, Tuple, Union

import torch
from torch import nn

from ... import ops
from ...geometry.grid import Axis, BevGrid

Voxels = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Voxelizer(nn.Module):
    """The grid, and the checks of a batch; subclasses voxelise it."""

    def __init__(self, voxel_size: Sequence[float], point_cloud_range: Sequence[float], name: str):
        super().__init__()
        if len(voxel_size) != 3 or len(point_cloud_range) != 6:
            raise ValueError(f'{name}: voxel_size needs 3 and point_cloud_range 6 numbers, got {list(voxel_size)!r} and '
                             f'{list(point_cloud_range)!r}')
        self.voxel_size = tuple(float(v) for v in voxel_size)
        self.point_cloud_range = tuple(float(v) for v in point_cloud_range)
        lo, hi = self.point_cloud_range[:3], self.point_cloud_range[3:]
        axes = [Axis.parse([lo[i], hi[i], self.voxel_size[i]], f'{name}.voxel_size ({"xyz"[i]})') for i in range(3)]
        self.grid = BevGrid(axes[0], axes[1])
        self.grid_shape = tuple(axis.cells for axis in axes)

    def batch(self, clouds: List[torch.Tensor]) -> Voxels:
        """What :meth:`forward` returns, from float32 clouds that were checked."""
        raise NotImplementedError

    @torch.no_grad()
    def forward(self, clouds: List[torch.Tensor]) -> Voxels:
        """Voxelise each sample.

        Args:
            clouds: B tensors (P_b, F); any may be empty.

        Returns:
            features ((V, M, F) slots, or (V, F) if already averaged), coords (V, 4) int32 (batch, x, y, z), and points
            per voxel (V,).
        """
        for index, points in enumerate(clouds):
            if points.dim() != 2 or points.shape[1] < 3:
                raise ValueError(f'points of sample {index} must be (P, >= 3), got {tuple(points.shape)}')
            if points.dtype in (torch.float16, torch.bfloat16):
                raise ValueError(f'points of sample {index} are {points.dtype}: half precision moves them by centimetres, keep '
                                 'the cloud in float32')
        with torch.autocast(clouds[0].device.type, enabled=False):
            return self.batch([points.float() for points in clouds])


class HardVoxelizer(_Voxelizer):
    """At most ``max_num_points`` points per voxel (first come) and ``max_voxels`` voxels (numbered by first point).

    Args:
        max_num_points: M.
        point_cloud_range: (x, y, z) lower, then upper bounds in metres.
        voxel_size: metres along x, y, z; must divide the range.
        max_voxels: limit per sample, or a pair for (training, evaluation); -1 for no limit.
        reduce: average the points of each voxel: features (V, F) instead of (V, M, F).
        deterministic: the same voxels in every run, also on a GPU.
    """

    def __init__(self, max_num_points: int, point_cloud_range: Sequence[float], voxel_size: Sequence[float],
                 max_voxels: Union[int, Sequence[int]] = 20000, reduce: bool = True, deterministic: bool = True,
                 name: str = 'voxelize'):
        super().__init__(voxel_size, point_cloud_range, name)
        self.max_num_points = int(max_num_points)
        limits = [max_voxels] * 2 if isinstance(max_voxels, int) else list(max_voxels)
        if len(limits) != 2:
            raise ValueError(f'{name}.max_voxels must be one number or (training, evaluation), got {max_voxels!r}')
        self.max_voxels = tuple(int(n) for n in limits)
        self.reduce = reduce
        self.deterministic = deterministic

    def batch(self, clouds: List[torch.Tensor]) -> Voxels:
        features, coords, counts = [], [], []
        for index, points in enumerate(clouds):
            slots, cells, sizes = ops.voxelize(points, self.voxel_size, self.point_cloud_range, self.max_num_points,
                                               self.max_voxels[0 if self.training else 1], self.deterministic)
            if self.reduce:  # empty slots are zero
                slots = slots.sum(1) / sizes.to(slots.dtype).clamp(min=1)[:, None]
            features.append(slots)
            coords.append(torch.cat([cells.new_full((len(cells), 1), index), cells], 1))
            counts.append(sizes)
        return torch.cat(features), torch.cat(coords), torch.cat(counts)


class DynamicVoxelizer(_Voxelizer):
    """Every point counts: the average (or maximum) of all points in each voxel, without limits.

    Args:
        point_cloud_range, voxel_size: as in :class:`HardVoxelizer`.
        reduce: ``mean`` or ``max``.
    """

    def __init__(self, point_cloud_range: Sequence[float], voxel_size: Sequence[float], reduce: str = 'mean',
                 name: str = 'voxelize'):
        super().__init__(voxel_size, point_cloud_range, name)
        self.reduce = reduce

    def batch(self, clouds: List[torch.Tensor]) -> Voxels:
        """One call for the whole batch: the device is waited for once, not once per sample."""
        points = torch.cat(clouds)
        cells = ops.dynamic_voxelize(points, self.voxel_size, self.point_cloud_range)
        samples = torch.cat([cells.new_full((len(cloud), 1), index) for index, cloud in enumerate(clouds)])
        features, coords, _, counts = ops.dynamic_point_to_voxel(points, torch.cat([samples, cells], 1), self.reduce)
        return features, coords, counts


def build_voxelizer(cfg: dict, reduce: bool = True, name: str = 'voxelize') -> _Voxelizer:
    """From the ``voxelize`` section of an encoder: hard voxels if ``max_num_points`` is positive, dynamic ones if not.

    Args:
        cfg: ``max_num_points, point_cloud_range, voxel_size, max_voxels, deterministic`` for hard voxels;
            ``point_cloud_range, voxel_size, average_points`` for dynamic ones.
        reduce: average the points of each hard voxel (``voxelize_reduce`` of the encoder).
        name: the configuration key, for errors.
    """
    args = dict(cfg)
    for key in ('point_cloud_range', 'voxel_size'):
        if key not in args:
            raise ValueError(f'{name}: the key {key!r} is missing')
    hard = args.get('max_num_points') is not None and args['max_num_points'] > 0
    known = {'max_num_points', 'point_cloud_range', 'voxel_size'}
    known |= {'max_voxels', 'deterministic'} if hard else {'average_points', 'max_voxels'}
    unknown = sorted(set(args) - known)
    if unknown:
        raise ValueError(f'{name}: unknown key {unknown[0]!r}, expected some of {sorted(known)}')
    if hard:
        return HardVoxelizer(**args, reduce=reduce, name=name)
    return DynamicVoxelizer(args['point_cloud_range'], args['voxel_size'],
                            'mean' if args.get('average_points', True) else 'max', name=name)
