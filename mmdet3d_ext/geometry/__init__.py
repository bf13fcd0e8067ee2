"""Geometry shared by every stage: grids (``grid``) and named rigid/affine transforms (``transforms``)."""
from .grid import Axis, BevGrid, GridError, cell_count

__all__ = ['Axis', 'BevGrid', 'GridError', 'cell_count']
