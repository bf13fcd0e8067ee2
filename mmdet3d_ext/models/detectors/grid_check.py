"""Checks at build time that the sensors' BEV grids agree, so that a mismatch is named before data is read."""
from __future__ import annotations

import warnings
from typing import Mapping, NamedTuple, Optional, Tuple

from torch import nn

from ...geometry.grid import BevGrid


class SensorGrid(NamedTuple):
    """Where one sensor's BEV map lies: its metres (``grid``, input resolution) and its final cells, None if unknown."""

    grid: BevGrid
    shape: Optional[Tuple[int, int]]
    keys: str

    def __str__(self) -> str:
        cells = 'unknown cells' if self.shape is None else f'{self.shape[0]}x{self.shape[1]} cells'
        x, y = self.grid.x, self.grid.y
        return f'{cells} over x [{x.lo:g}, {x.hi:g}] m, y [{y.lo:g}, {y.hi:g}] m (from {self.keys})'


def sensor_grid(sensor: str, encoder: nn.ModuleDict) -> SensorGrid:
    """The BEV grid that an encoder ends on."""
    base = f'model.encoders.{sensor}'
    if sensor == 'camera':
        transform = encoder['vtransform']
        return SensorGrid(transform.bev_grid, transform.bev_shape, f'{base}.vtransform.xbound/ybound/downsample')
    keys = f'{base}.voxelize.point_cloud_range/voxel_size and the stride of {base}.backbone'
    return SensorGrid(encoder['voxelize'].grid, getattr(encoder['backbone'], 'bev_shape', None), keys)


def check_voxel_grid(sensor: str, encoder: nn.ModuleDict) -> None:
    """Raise ValueError if the backbone's canvas does not hold the voxel grid."""
    grid, backbone = encoder['voxelize'].grid_shape, encoder['backbone']
    base = f'model.encoders.{sensor}'
    canvas, key = getattr(backbone, 'sparse_shape', None), 'backbone.sparse_shape'
    if canvas is None:
        scatter = getattr(backbone, 'pts_middle_encoder', None)
        canvas, key = getattr(scatter, 'output_shape', None), 'backbone.pts_middle_encoder.output_shape'
    if canvas is None:
        return
    canvas = tuple(canvas)
    if canvas[:2] != grid[:2] or (len(canvas) > 2 and canvas[2] < grid[2]):
        wanted = list(grid[:2]) if len(canvas) == 2 else [*grid[:2], grid[2] + 1]
        raise ValueError(f'{base}.{key} is {list(canvas)}, but {base}.voxelize.voxel_size and point_cloud_range make '
                         f'{grid[0]}x{grid[1]}x{grid[2]} voxels (x, y, z): write {wanted}')


def check_same_grid(encoders: Mapping[str, nn.ModuleDict], compat: Optional[str] = None) -> None:
    """Raise ValueError unless all sensors end on the same cells of the same metres.

    Under the ``'reference'`` profile different metres are only warned about, because models were trained that way.
    """
    grids = {sensor: sensor_grid(sensor, encoder) for sensor, encoder in encoders.items()}
    names = list(grids)
    for other in names[1:]:
        a, b = grids[names[0]], grids[other]
        both = f'{names[0]}: {a}; {other}: {b}. Align these keys'
        if a.shape is not None and b.shape is not None and a.shape != b.shape:
            raise ValueError(f'the BEV maps of the sensors cannot be fused, their cells differ. {both}')
        if not a.grid.same_scope(b.grid):
            message = f'the BEV maps of the sensors cover different metres. {both}'
            if compat != 'reference':
                raise ValueError(message)
            warnings.warn(message, stacklevel=2)
