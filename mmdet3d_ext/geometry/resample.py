"""BEV maps from one grid to another as two small matrices, one per axis.

Both axes are resampled independently, so a resampling is two matrix products. They run in the features' own type under AMP,
where sampling by coordinates would force full-size float32 maps or half-precision coordinates.

Letters: B batch, C channels, X/Y cells along lidar x and lidar y; ``in`` and ``out`` for source and target grid.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F

from .grid import Axis


def bilinear_weights(source: Axis, source_cells: int, target: Axis) -> torch.Tensor:
    """Weights (target cells, source cells), as float64, of linear interpolation between cell centres.

    Row i holds the two source cells around the centre of target cell i; what falls outside the source counts as zero, so
    rows at the border sum to less than one. Positions go through float32 in [-1, 1] as sampling by coordinates does: about
    1e-5 of a cell less exact, but outputs of published checkpoints are reproduced to 1e-5.
    """
    centres = target.lo + (torch.arange(target.cells, dtype=torch.float64) + 0.5) * target.step
    normalised = (centres.float() - source.lo) / source.length * 2 - 1
    position = (((normalised + 1) * source_cells - 1) / 2).double()
    left = position.floor()
    share = position - left
    weights = torch.zeros(target.cells, source_cells, dtype=torch.float64)
    rows = torch.arange(target.cells)
    for column, weight in ((left.long(), 1 - share), (left.long() + 1, share)):
        inside = (column >= 0) & (column < source_cells)
        weights[rows[inside], column[inside]] += weight[inside]
    return weights


def cell_weights(source: Axis, target: Axis) -> torch.Tensor:
    """Weights (target cells, source cells), as float64, that take a map's values to cells of another size.

    Between source centres values run linearly; beyond the outermost centres the border cell's value goes on to the source's
    edge. To finer cells that curve is read at the target's centres; to coarser ones it is averaged over each target cell, so that
    nothing falls between two samples. Where the source does not reach, zero. Inside it a constant map stays constant, and
    a ramp (away from the border) keeps its place in metres.
    """
    edges = (target.lo - source.lo + torch.arange(target.cells + 1, dtype=torch.float64) * target.step) / source.step
    columns = torch.arange(source.cells, dtype=torch.float64)
    if target.step > source.step * (1 + 1e-6):
        sums = _hat_sums(edges.clamp(0, source.cells)[:, None] - 0.5, columns)
        return (sums[1:] - sums[:-1]) * (source.step / target.step)
    centres = (edges[1:] + edges[:-1]) / 2
    position = (centres - 0.5).clamp(0, source.cells - 1)
    weights = (1 - (position[:, None] - columns).abs()).clamp(min=0)
    return weights * ((centres >= 0) & (centres <= source.cells))[:, None]


def _hat_sums(position: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Integral, up to ``position`` (n, 1; in cells, 0 being the first centre), of each column's hat: 1 at its centre, 0 at its
    neighbours', and 1 on the outer side of the first and of the last column."""
    t = position - columns
    sums = torch.where(t <= 0, (t.clamp(min=-1) + 1) ** 2 / 2, 1 - (1 - t.clamp(max=1)) ** 2 / 2)
    sums[:, :1] = torch.where(t[:, :1] <= 0, t[:, :1] + 0.5, sums[:, :1])
    sums[:, -1:] = torch.where(t[:, -1:] > 0, t[:, -1:] + 0.5, sums[:, -1:])
    return sums


def apply_weights(x: torch.Tensor, weight_x: torch.Tensor, weight_y: torch.Tensor) -> torch.Tensor:
    """(B, C, X_in, Y_in) by weights (X_out, X_in) and (Y_out, Y_in) -> (B, C, X_out, Y_out), channels-last if x is, else contiguous.

    Both products read and write their operands as they lie in memory.
    """
    batch, channels, *cells = x.shape
    to = weight_x.shape[0], weight_y.shape[0]
    if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        rows = _from_left(weight_x, x.permute(0, 2, 3, 1).reshape(batch, cells[0], cells[1] * channels))  # (B, X_out, Y_in * C)
        out = _from_left(weight_y, rows.view(batch * to[0], cells[1], channels))                 # (B * X_out, Y_out, C)
        return out.view(batch, *to, channels).permute(0, 3, 1, 2)
    rows = _from_left(weight_x, x.reshape(batch * channels, *cells))                             # (B * C, X_out, Y_in)
    return F.linear(rows, weight_y.to(rows.dtype)).view(batch, channels, *to)


def _from_left(weight: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """(out, in) times each of (n, in, columns) -> (n, out, columns)."""
    return torch.bmm(weight.to(maps.dtype).expand(len(maps), -1, -1), maps)
