"""Geometry shared by every stage: grids (``grid``), maps from grid to grid (``resample``), rigid/affine transforms (``transforms``)."""
from .grid import Axis, BevGrid, GridError, cell_count

__all__ = ['Axis', 'BevGrid', 'GridError', 'cell_count']
