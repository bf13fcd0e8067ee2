"""One sensor's BEV map on the grid that the sensors are fused on. Letters: B batch, C channels, X/Y cells."""
from __future__ import annotations

import torch
from torch import nn

from ...geometry.grid import BevGrid
from ...geometry.resample import apply_weights, cell_weights


class BEVResample(nn.Module):
    """A map over ``source`` on the cells of ``target``: interpolated to finer cells, averaged to coarser ones.

    A constant map stays constant where the source reaches; outside it is zero. Equal grids pass the map on untouched. No
    parameters and no state in checkpoints.

    Args:
        source, target: the two grids, in metres of the lidar frame.
        name: what to call the map in an error.
    """

    def __init__(self, source: BevGrid, target: BevGrid, name: str = 'BEV map'):
        super().__init__()
        self.source, self.target, self.name = source, target, name
        self.same = source.shape == target.shape and source.same_scope(target)
        if not self.same:
            for axis in 'xy':
                weights = cell_weights(getattr(source, axis), getattr(target, axis))
                self.register_buffer(f'weight_{axis}', weights.float(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, X, Y) of ``source`` -> (B, C, X, Y) of ``target``.

        Raises:
            ValueError: if the map does not have the source's cells.
        """
        if tuple(x.shape[-2:]) != self.source.shape:
            raise ValueError(f'{self.name}: has {x.shape[-2]}x{x.shape[-1]} cells, its grid is {self.source}')
        return x if self.same else apply_weights(x, self.weight_x, self.weight_y)

    def extra_repr(self) -> str:
        return f'{self.name}: ' + ('passed on' if self.same else f'{self.source} -> {self.target}')
