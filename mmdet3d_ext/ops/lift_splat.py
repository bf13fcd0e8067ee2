"""Lift-splat pooling: features of pixels, spread along their rays by a depth distribution, summed into BEV cells.

For every cell, ``sum over its points p of depth[p] * context[pixel of p]``. The product (B, N, D, H, W, C) is never
formed: points are ordered by cell once (a *plan*), then each cell adds up its own. No atomics: results repeat bit by bit.

Letters: B batch, N cameras, D depth bins, C channels, H, W image features, P points, X, Y, Z cells. BEV is (B, C, X, Y), x
before y; height bins are laid out in channels, bin 0's C channels first.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from mmdet3d_ext.geometry.grid import AxisSpec

from ._checks import GridArguments, check, check_same_device, check_tensor, grid_from_bounds
from ._library import fake, require

TILE_X, TILE_Y = 2, 16  # csrc/lift_splat/lift_splat.h


class SplatPlan(NamedTuple):
    """The cell of every point and the order of points by cell, for one geometry and grid; opaque."""

    cell: torch.Tensor  # (P,) int32: cell in (B, Z, X, Y), -1 outside
    order: torch.Tensor  # (P,) int32: points by tile, cell, index; those outside last
    sorted_key: torch.Tensor  # (P,) int32: position of the cell in the order of tiles
    tile_starts: torch.Tensor  # (tiles + 1,) int32
    batch: int
    cells: Tuple[int, int, int]  # X, Y, Z

    @property
    def tensors(self) -> Tuple[torch.Tensor, ...]:
        return self.cell, self.order, self.sorted_key, self.tile_starts


def _fake_plan(like, points, batch, cells):
    tiles = batch * cells[2] * ((cells[0] + TILE_X - 1) // TILE_X) * ((cells[1] + TILE_Y - 1) // TILE_Y)
    return (*(like.new_empty((points,), dtype=torch.int32) for _ in range(3)), like.new_empty((tiles + 1,), dtype=torch.int32))


@fake('splat_plan')
def _(geometry, lower, step, cells, truncate):
    return _fake_plan(geometry, geometry.numel() // 3, geometry.shape[0], cells)


@fake('splat_plan_from_coords')
def _(coords, batch, cells):
    return _fake_plan(coords, coords.shape[0], batch, cells)


@fake('lift_splat')
def _(depth, context, cell, order, sorted_key, tile_starts, cells):
    return context.new_empty((context.shape[0], context.shape[2] * cells[2], cells[0], cells[1]))


@fake('lift_splat_backward')
def _(grad, depth, context, cell, cells):
    batch, cameras, channels, height, width = context.shape
    # Channels last in memory: the order in which the kernel adds them up.
    grad_context = context.new_empty((batch, cameras, height, width, channels)).permute(0, 1, 4, 2, 3)
    return depth.new_empty(depth.shape), grad_context


@fake('bev_pool')
def _(feats, cell, order, sorted_key, tile_starts, batch, cells):
    return feats.new_empty((batch, feats.shape[1] * cells[2], cells[0], cells[1]))


@fake('bev_pool_backward')
def _(grad, cell, cells):
    return grad.new_empty((cell.shape[0], grad.shape[1] // cells[2]))


def _grid(op: str, bounds: Sequence[AxisSpec], compat: Optional[str]) -> Tuple[GridArguments, bool]:
    check(compat in (None, 'reference'), op, 'compat', "None or 'reference'", repr(compat))
    lower, step, cells = grid_from_bounds(op, bounds)
    if compat is None:
        return (lower, step, cells), False
    # The reference keeps the centre of the first cell in float32 and goes back half a cell from it, then truncates.
    step32 = np.asarray(step, dtype=np.float32)
    centre = (np.asarray(lower) + np.asarray(step) / 2).astype(np.float32)
    return ([float(v) for v in centre - step32 / np.float32(2)], [float(v) for v in step32], cells), True


def prepare_lift_splat(geometry: torch.Tensor, bounds: Sequence[AxisSpec], compat: Optional[str] = None) -> SplatPlan:
    """The plan of one geometry: reuse it as long as the geometry stays the same.

    Args:
        geometry: (B, N, D, H, W, 3) float32, lidar-frame metres of every point. Not differentiated.
        bounds: three axes (x, y, z), each ``[lo, hi, step]`` or what :meth:`Axis.parse` takes.
        compat: 'reference' truncates toward zero as the reference does, so that points up to one cell below the lower bounds
            count as inside; by default cells are floors.

    Raises:
        ValueError: for a wrong shape or type. GridError: for a step that does not divide its range.
    """
    check_tensor(geometry, 'lift_splat', 'geometry', '(B, N, D, H, W, 3)', 6)
    check(geometry.shape[-1] == 3, 'lift_splat', 'geometry', '(B, N, D, H, W, 3)', f'shape {tuple(geometry.shape)}')
    check(geometry.dtype == torch.float32, 'lift_splat', 'geometry', 'float32 (keep it out of autocast)', geometry.dtype)
    require(geometry)
    grid, truncate = _grid('lift_splat', bounds, compat)
    parts = torch.ops.mmdet3d_ext.splat_plan(geometry.detach(), *grid, truncate)
    return SplatPlan(*parts, geometry.shape[0], tuple(grid[2]))


def lift_splat(
    depth: torch.Tensor,
    context: torch.Tensor,
    geometry: Union[torch.Tensor, SplatPlan],
    bounds: Optional[Sequence[AxisSpec]] = None,
    compat: Optional[str] = None,
) -> torch.Tensor:
    """Pool ``depth`` x ``context`` into BEV cells.

    Args:
        depth: (B, N, D, H, W) floating, the weight of each depth bin; may be float32 beside a half-precision context.
        context: (B, N, C, H, W) floating.
        geometry: (B, N, D, H, W, 3) float32 lidar-frame metres, or a plan from :func:`prepare_lift_splat` (then ``bounds``
            and ``compat`` are not used).
        bounds: three axes (x, y, z), see :func:`prepare_lift_splat`.
        compat: see :func:`prepare_lift_splat`.

    Returns:
        (B, C * Z, X, Y), type of ``context``, summed in float32 (float64 for float64). Cells without points are 0.

    Raises:
        ValueError: for wrong shapes, types or devices. GridError: for a malformed grid.
    """
    op = 'lift_splat'
    check_tensor(depth, op, 'depth', '(B, N, D, H, W)', 5)
    check_tensor(context, op, 'context', '(B, N, C, H, W)', 5)
    batch, cameras, _, height, width = depth.shape
    check(
        context.shape[:2] == depth.shape[:2] and context.shape[3:] == depth.shape[3:],
        op,
        'context',
        f'(B, N, C, H, W) = ({batch}, {cameras}, C, {height}, {width}) as depth',
        f'shape {tuple(context.shape)}',
    )
    check_same_device(op, depth=depth, context=context)
    if isinstance(geometry, SplatPlan):
        plan = geometry
        check(
            plan.batch == batch and plan.cell.shape[0] == depth.numel(),
            op,
            'geometry',
            f'a plan for {depth.numel()} points in {batch} samples',
            f'one for {plan.cell.shape[0]} in {plan.batch}',
        )
    else:
        check_tensor(geometry, op, 'geometry', '(B, N, D, H, W, 3)', 6)
        check(
            geometry.shape[:5] == depth.shape,
            op,
            'geometry',
            f'{tuple(depth.shape)} + (3,) as depth',
            f'shape {tuple(geometry.shape)}',
        )
        check(bounds is not None, op, 'bounds', 'three axes (x, y, z), each [lo, hi, step]', bounds)
        plan = prepare_lift_splat(geometry, bounds, compat)
    check_same_device(op, depth=depth, geometry=plan.cell)
    require(depth)
    if depth.dtype != context.dtype and depth.dtype != torch.float32:
        depth = depth.to(context.dtype)
    if context.dtype == torch.float64:
        depth = depth.double()
    return torch.ops.mmdet3d_ext.lift_splat(
        depth, context, plan.cell, plan.order, plan.sorted_key, plan.tile_starts, list(plan.cells)
    )


def prepare_bev_pool(coords: torch.Tensor, B: int, nz: int, nx: int, ny: int) -> SplatPlan:
    """The plan of :func:`bev_pool` for these coordinates: reuse it as long as they stay the same.

    Args:
        coords: (P, 4) int64: cell along x, y, z, then sample. Points outside the grid are dropped.
        B, nz, nx, ny: samples and cells.

    Raises:
        ValueError: for a wrong shape or type.
    """
    check_tensor(coords, 'bev_pool', 'coords', '(P, 4)', 2)
    check(coords.shape[1] == 4, 'bev_pool', 'coords', '(P, 4)', f'shape {tuple(coords.shape)}')
    check(coords.dtype in (torch.int32, torch.int64), 'bev_pool', 'coords', 'int64', coords.dtype)
    require(coords)
    cells = [int(nx), int(ny), int(nz)]
    return SplatPlan(*torch.ops.mmdet3d_ext.splat_plan_from_coords(coords.long(), int(B), cells), int(B), tuple(cells))


def bev_pool(
    feats: torch.Tensor,
    coords: Union[torch.Tensor, SplatPlan],
    B: Optional[int] = None,
    nz: Optional[int] = None,
    nx: Optional[int] = None,
    ny: Optional[int] = None,
) -> torch.Tensor:
    """Sum the features of points into the cells of a batch of grids.

    Args:
        feats: (P, C) floating.
        coords, B, nz, nx, ny: as :func:`prepare_bev_pool` takes them; or ``coords`` alone is its plan.

    Returns:
        (B, C, nz, nx, ny).

    Raises:
        ValueError: for wrong shapes, types or devices.
    """
    check_tensor(feats, 'bev_pool', 'feats', '(P, C)', 2)
    if isinstance(coords, SplatPlan):
        plan = coords
    else:
        check_tensor(coords, 'bev_pool', 'coords', '(P, 4)', 2)
        check_same_device('bev_pool', feats=feats, coords=coords)
        check(
            coords.shape == (feats.shape[0], 4),
            'bev_pool',
            'coords',
            f'({feats.shape[0]}, 4) as feats',
            f'shape {tuple(coords.shape)}',
        )
        check(None not in (B, nz, nx, ny), 'bev_pool', 'B, nz, nx, ny', 'given beside coordinates', (B, nz, nx, ny))
        plan = prepare_bev_pool(coords, B, nz, nx, ny)
    check(
        plan.cell.shape[0] == feats.shape[0], 'bev_pool', 'coords', f'a plan for {feats.shape[0]} points', plan.cell.shape[0]
    )
    check_same_device('bev_pool', feats=feats, coords=plan.cell)
    require(feats)
    nx, ny, nz = plan.cells
    parts = plan.cell, plan.order, plan.sorted_key, plan.tile_starts  # by name: torch.compile cannot unpack a property
    pooled = torch.ops.mmdet3d_ext.bev_pool(feats, *parts, plan.batch, list(plan.cells))
    return pooled.view(plan.batch, nz, feats.shape[1], nx, ny).transpose(1, 2)
