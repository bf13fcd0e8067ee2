"""The one place that turns ranges and steps into cell counts.

Labels, head outputs, camera grids and voxel grids all come from :class:`BevGrid` / :func:`cell_count`, so they can never
disagree about how many cells 100 m at 0.167 m are (598 by truncation, 599 by counting samples, 600 meant).

Letters: X, Y = number of cells along lidar x and lidar y. All lengths are metres in the lidar frame.
BEV arrays are indexed ``[..., x, y]``; cell ``i`` covers ``[lo + i * step, lo + (i + 1) * step)`` and its centre is
``lo + (i + 0.5) * step``.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping, Sequence, Tuple, Union

# A step may differ from the exact one by float rounding only: the accumulated error over the whole range must stay below
# this fraction of one cell. 1/6 written as 0.16666667 passes (600 cells x 3e-9 / 0.167), 0.1667 (0.12 cells) does not.
TOLERANCE_CELLS = 1e-3

AxisSpec = Union['Axis', Sequence[float], Mapping[str, object]]


class GridError(ValueError):
    """A range and a step that do not make a whole number of cells, or a malformed grid."""


def cell_count(lo: float, hi: float, step: float, name: str = 'grid') -> int:
    """Number of cells of ``step`` metres between ``lo`` and ``hi``, by rounding with a tolerance.

    Args:
        lo, hi: bounds in metres (``hi > lo``).
        step: cell size in metres (``> 0``).
        name: what to call this grid in an error, e.g. the configuration key.

    Raises:
        GridError: if a bound is not finite, ``hi <= lo``, ``step <= 0``, or the step does not divide the range. The
            message holds the exact step and the cell count to write instead.
    """
    for label, value in (('lower bound', lo), ('upper bound', hi), ('step', step)):
        if isinstance(value, (str, bool)) or not math.isfinite(value):
            raise GridError(f'{name}: the {label} must be a finite number of metres, got {value!r}')
    if hi <= lo:
        raise GridError(f'{name}: the upper bound must be greater than the lower bound, got [{lo}, {hi}]')
    if step <= 0:
        raise GridError(f'{name}: the step must be positive, got {step}')
    exact = (hi - lo) / step
    cells = int(round(exact))
    if cells < 1 or abs(exact - cells) > TOLERANCE_CELLS:
        # Who rounds a step by hand means the rounder count: 0.167 over 100 m is 598.8 cells, and 600 is meant.
        meant = likely_count(exact)
        raise GridError(
            f'{name}: a step of {step} m does not divide the range [{lo}, {hi}] ({exact:.4f} cells). Write the step '
            f'{(hi - lo) / meant!r}, or the cell count {meant} (as {{range: [{lo}, {hi}], cells: {meant}}})')
    return cells


def likely_count(exact: float) -> int:
    """The round number of cells nearest to ``exact`` within 0.5%; otherwise the nearest whole number."""
    for base in (100, 50, 20, 10, 8, 4, 2):
        candidate = base * round(exact / base)
        if candidate >= 1 and abs(candidate - exact) / exact <= 5e-3:
            return int(candidate)
    return max(1, int(round(exact)))


@dataclass(frozen=True)
class Axis:
    """One axis of a grid: ``cells`` equal cells between ``lo`` and ``hi`` metres."""

    lo: float
    hi: float
    cells: int

    def __post_init__(self):
        if isinstance(self.cells, bool) or int(self.cells) != self.cells or self.cells < 1:
            raise GridError(f'a grid axis needs a whole, positive number of cells, got {self.cells!r}')
        if not (math.isfinite(self.lo) and math.isfinite(self.hi)) or self.hi <= self.lo:
            raise GridError(f'a grid axis needs finite bounds with hi > lo, got [{self.lo}, {self.hi}]')

    @property
    def step(self) -> float:
        """Cell size in metres."""
        return (self.hi - self.lo) / self.cells

    @property
    def length(self) -> float:
        """Extent in metres."""
        return self.hi - self.lo

    @classmethod
    def parse(cls, spec: AxisSpec, name: str = 'grid') -> 'Axis':
        """An axis from ``[lo, hi, step]`` (the reference's form) or ``{range: [lo, hi], cells: n}``."""
        if isinstance(spec, Axis):
            return spec
        if isinstance(spec, Mapping):
            unknown = set(spec) - {'range', 'cells', 'step'}
            if unknown or 'range' not in spec or ('cells' in spec) == ('step' in spec):
                raise GridError(f'{name}: write {{range: [lo, hi], cells: n}} or {{range: [lo, hi], step: m}}, '
                                f'got {dict(spec)!r}')
            lo, hi = (float(v) for v in spec['range'])
            if 'cells' in spec:
                return cls(lo, hi, spec['cells'])
            return cls(lo, hi, cell_count(lo, hi, float(spec['step']), name))
        values = list(spec)
        if len(values) != 3:
            raise GridError(f'{name}: write [lo, hi, step] in metres, got {values!r}')
        lo, hi, step = values
        return cls(float(lo), float(hi), cell_count(lo, hi, step, name))

    def as_bound(self) -> Tuple[float, float, float]:
        """``(lo, hi, step)``."""
        return (self.lo, self.hi, self.step)


@dataclass(frozen=True)
class BevGrid:
    """A bird's-eye-view grid: an :class:`Axis` along lidar x and one along lidar y."""

    x: Axis
    y: Axis

    @classmethod
    def parse(cls, x: AxisSpec, y: AxisSpec, name: str = 'grid') -> 'BevGrid':
        """From two axis specifications (see :meth:`Axis.parse`); ``name`` is used in errors."""
        return cls(Axis.parse(x, f'{name} (x)'), Axis.parse(y, f'{name} (y)'))

    @property
    def shape(self) -> Tuple[int, int]:
        """``(X, Y)`` cell counts."""
        return (self.x.cells, self.y.cells)

    @property
    def step(self) -> Tuple[float, float]:
        """Cell sizes in metres along x and y."""
        return (self.x.step, self.y.step)

    @property
    def extent(self) -> Tuple[float, float, float, float]:
        """``(x_lo, y_lo, x_hi, y_hi)`` in metres."""
        return (self.x.lo, self.y.lo, self.x.hi, self.y.hi)

    def downsample(self, factor: int, name: str = 'grid') -> 'BevGrid':
        """The grid after a stride of ``factor``: same extent, ``cells / factor`` cells.

        Raises:
            GridError: if ``factor`` does not divide both cell counts.
        """
        for label, axis in (('x', self.x), ('y', self.y)):
            if axis.cells % factor:
                raise GridError(f'{name} ({label}): {axis.cells} cells cannot be divided by {factor}')
        return BevGrid(Axis(self.x.lo, self.x.hi, self.x.cells // factor),
                       Axis(self.y.lo, self.y.hi, self.y.cells // factor))

    def same_scope(self, other: 'BevGrid', tolerance: float = 1e-3) -> bool:
        """Whether both grids cover the same metres (``tolerance`` in metres), whatever their cells."""
        return all(abs(a - b) <= tolerance for a, b in zip(self.extent, other.extent))

    def __str__(self) -> str:
        return (f'{self.x.cells}x{self.y.cells} cells, x [{self.x.lo:g}, {self.x.hi:g}] m step {self.x.step:.6g}, '
                f'y [{self.y.lo:g}, {self.y.hi:g}] m step {self.y.step:.6g}')


def parse_scope(scope: Sequence[AxisSpec], name: str) -> BevGrid:
    """A grid from ``[x axis, y axis]``, each ``[lo, hi, step]`` or ``{range: [lo, hi], cells: n}``; a BevGrid passes."""
    if isinstance(scope, BevGrid):
        return scope
    if isinstance(scope, (str, bytes)) or not isinstance(scope, Sequence) or len(scope) != 2:
        raise ValueError(f'{name}: write [[x lo, x hi, x step], [y lo, y hi, y step]] in metres, got {scope!r}')
    return BevGrid.parse(scope[0], scope[1], name)
