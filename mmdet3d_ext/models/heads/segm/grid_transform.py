"""From the trunk's BEV grid to the map head's: a bilinear resampler between two metric scopes.

The result equals bilinear sampling with zeros outside the input; how is said in :mod:`mmdet3d_ext.geometry.resample`.
"""
from __future__ import annotations

import warnings
from typing import Optional, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ....geometry.grid import AxisSpec, parse_scope
from ....geometry.resample import apply_weights, bilinear_weights
from ....registry import MODELS

INPUT_KEY = 'model.heads.map.grid_transform.input_scope'
OUTPUT_KEY = 'model.heads.map.grid_transform.output_scope'


def _resize_weights(cells: int, factor: float) -> torch.Tensor:
    """Weights (new cells, cells) in float64 of the bilinear resize by ``factor`` (half-pixel centres, border repeated)."""
    eye = torch.eye(cells, dtype=torch.float64)[None]                                            # (1, signal, cell)
    return F.interpolate(eye, scale_factor=factor, mode='linear', align_corners=False)[0].t()    # (new cells, cells)


@MODELS.register_module()
class BEVGridTransform(nn.Module):
    """Resample a BEV map (B, C, X, Y) from ``input_scope`` to ``output_scope``.

    Args:
        input_scope: ``[x axis, y axis]`` that the input covers, in metres of the lidar frame; each axis is
            ``[lo, hi, step]`` or ``{range: [lo, hi], cells: n}``.
        output_scope: the same for the output.
        prescale_factor: bilinear resize of the input before resampling (1 = none).
        compat: with ``'reference'``, an input whose number of cells contradicts ``input_scope`` is only warned about
            (its extent is used, as in the reference); by default it is an error, because then the map is scaled wrongly.

    Output cell i is sampled at its centre, ``lo + (i + 0.5) * step``; outside the input is zero. No parameters and no state
    in checkpoints.
    """

    def __init__(self, input_scope: Sequence[AxisSpec], output_scope: Sequence[AxisSpec], prescale_factor: float = 1,
                 compat: Optional[str] = None):
        super().__init__()
        if isinstance(prescale_factor, (str, bool)) or not prescale_factor > 0:
            raise ValueError(f'grid_transform.prescale_factor must be a positive number, got {prescale_factor!r}')
        self.input_grid = parse_scope(input_scope, INPUT_KEY)
        self.output_grid = parse_scope(output_scope, OUTPUT_KEY)
        self.prescale_factor = prescale_factor
        self.compat = compat
        cells = self.input_grid.shape
        # The scope's cells are those after the prescale, if they can be.
        if prescale_factor != 1 and all((n / prescale_factor).is_integer() for n in cells):
            cells = tuple(int(n / prescale_factor) for n in cells)
        self.input_shape = cells
        self._make_buffers(cells)

    def _make_buffers(self, cells: Sequence[int]) -> None:
        for name, axis, target, count in (('weight_x', self.input_grid.x, self.output_grid.x, cells[0]),
                                          ('weight_y', self.input_grid.y, self.output_grid.y, cells[1])):
            if self.prescale_factor == 1:
                weights = bilinear_weights(axis, count, target)
            else:
                resize = _resize_weights(count, self.prescale_factor)
                weights = bilinear_weights(axis, resize.shape[0], target) @ resize
            old = getattr(self, name, None)
            self.register_buffer(name, weights.to(old if old is not None else torch.float32), persistent=False)

    @property
    def output_shape(self) -> tuple:
        """``(X, Y)`` cells of the output."""
        return self.output_grid.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, X_in, Y_in) -> (B, C, X_out, Y_out), channels-last if x is, else contiguous.

        Raises:
            ValueError: if the input's cells are not those of ``input_scope``.
        """
        if tuple(x.shape[-2:]) != (self.weight_x.shape[1], self.weight_y.shape[1]):
            self._adapt(tuple(x.shape[-2:]))
        return apply_weights(x, self.weight_x, self.weight_y)

    def _adapt(self, shape: tuple) -> None:
        message = (f'the BEV map that reaches the map head has {shape[0]}x{shape[1]} cells, but {INPUT_KEY} describes '
                   f'{self.input_grid} (prescale_factor {self.prescale_factor}). Its metres must be those of the trunk '
                   f'(point_cloud_range) and its step the trunk\'s cell')
        if shape != self.input_grid.shape:  # an input that has the scope's cells already, before a prescale, is fine
            if self.compat != 'reference':
                raise ValueError(message)
            warnings.warn(message, stacklevel=3)
        self._make_buffers(shape)
