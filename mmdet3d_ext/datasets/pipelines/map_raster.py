"""Drawing of map layers into BEV grids.

:func:`fill` is ours: a cell belongs to a layer if its **centre** is inside a polygon (holes excluded). :func:`devkit_mask`
draws as the nuScenes devkit does (corners rounded to cells, touched border cells included, lines two cells wide), for numbers
that were made with it.
"""
from __future__ import annotations

from typing import Optional, Tuple

import cv2
import numpy as np
from shapely import affinity
from shapely.geometry import MultiPolygon, Polygon, box
from shapely.geometry.base import BaseGeometry

from ...geometry.grid import BevGrid
from .map_layers import Edges, MapLayer


def fill(edges: Edges, bev_from_world: np.ndarray, grid: BevGrid, out: Optional[np.ndarray] = None) -> np.ndarray:
    """``(X, Y)`` bool: cells whose centre lies inside at least one polygon of ``edges``.

    Args:
        edges: oriented edges in world coordinates.
        bev_from_world: (2, 3) affine map to the grid's frame, metres (see ``geometry.transforms.bev_affine``).
        grid: the grid to fill.
        out: (X, Y) bool to write to.

    For every row of cell centres (constant x) the edges that cross it add +1 or -1 to the first cell behind the crossing; the
    running sum along y is the winding number. Mirroring changes its sign only, so "not zero" is inside.
    """
    cells_x, cells_y = grid.shape
    out = np.empty((cells_x, cells_y), dtype=bool) if out is None else out
    start, end = edges.near(_world_box(bev_from_world, grid))
    if not len(start):
        out[:] = False
        return out
    scale = np.array(grid.step)
    lower = np.array([grid.x.lo, grid.y.lo])
    linear, shift = bev_from_world[:, :2], bev_from_world[:, 2]
    # In units of cells, with cell centres at whole numbers.
    a = (start @ linear.T + shift - lower) / scale - 0.5
    b = (end @ linear.T + shift - lower) / scale - 0.5
    low, high = np.minimum(a[:, 0], b[:, 0]), np.maximum(a[:, 0], b[:, 0])
    # Rows low <= i < high: half open, so a corner on a row is counted once.
    row_from = np.clip(np.ceil(low), 0, cells_x).astype(np.int64)
    row_to = np.clip(np.ceil(high), 0, cells_x).astype(np.int64)
    crossing = np.flatnonzero((row_from < row_to) & (np.minimum(a[:, 1], b[:, 1]) < cells_y))
    counts = row_to[crossing] - row_from[crossing]
    edge = np.repeat(crossing, counts)
    row = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts) + row_from[edge]
    slope = (b[edge, 1] - a[edge, 1]) / (b[edge, 0] - a[edge, 0])
    column = np.clip(np.ceil(a[edge, 1] + (row - a[edge, 0]) * slope), 0, cells_y).astype(np.int64)
    sign = np.where(b[edge, 0] > a[edge, 0], np.int32(1), np.int32(-1))
    winding = np.zeros((cells_x, cells_y + 1), np.int32)  # of narrower integers numpy's sum takes five times as long
    np.add.at(winding.reshape(-1), row * (cells_y + 1) + column, sign)
    np.cumsum(winding, axis=1, out=winding)
    return np.not_equal(winding[:, :cells_y], 0, out=out)


def _world_box(bev_from_world: np.ndarray, grid: BevGrid) -> Tuple[float, float, float, float]:
    """Bounding box of the grid in world coordinates."""
    x_lo, y_lo, x_hi, y_hi = grid.extent
    corners = np.array([[x_lo, y_lo], [x_lo, y_hi], [x_hi, y_lo], [x_hi, y_hi]])
    world = np.linalg.solve(bev_from_world[:, :2], (corners - bev_from_world[:, 2]).T).T
    return (*world.min(axis=0), *world.max(axis=0))


def devkit_mask(layer: MapLayer, centre: Tuple[float, float], degrees: float, grid: BevGrid) -> np.ndarray:
    """``(X, Y)`` bool as the devkit's ``get_map_mask`` would draw it, transposed to our axes.

    Args:
        layer: polygons or lines in world coordinates.
        centre: world position (metres) of the grid's centre.
        degrees: turn of the grid's x axis from the world's x axis, counter-clockwise.
        grid: gives the extent and the cell counts.
    """
    size_x, size_y = grid.x.length, grid.y.length
    canvas = np.zeros((grid.y.cells, grid.x.cells), np.uint8)  # rows along y, as an image
    local = box(-size_x / 2, -size_y / 2, size_x / 2, size_y / 2)
    patch = affinity.rotate(affinity.translate(local, *centre), degrees, origin=centre)
    for geometry in layer.near(patch.bounds):
        if isinstance(geometry, Polygon) and not geometry.is_valid:
            if layer.name != 'drivable_area':
                continue  # the devkit leaves these out
            geometry = geometry.buffer(0)
        seen = geometry.intersection(patch)
        if seen.is_empty:
            continue
        seen = affinity.translate(affinity.rotate(seen, -degrees, origin=centre), -centre[0], -centre[1]).intersection(local)
        if seen.is_empty:
            continue
        seen = affinity.translate(seen, size_x / 2, size_y / 2)
        seen = affinity.scale(seen, grid.x.cells / size_x, grid.y.cells / size_y, origin=(0, 0))
        _draw(seen, layer.is_line, canvas)
    return canvas.T.astype(bool)


def _draw(geometry: BaseGeometry, is_line: bool, canvas: np.ndarray) -> None:
    parts = list(getattr(geometry, 'geoms', [geometry]))
    if is_line:
        for part in parts:
            cv2.polylines(canvas, [np.asarray(part.coords, np.float64).astype(np.int32)], False, 1, 2)
        return
    polygons = [part for part in parts if isinstance(part, (Polygon, MultiPolygon)) and not part.is_empty]
    rounded = [np.asarray(p.exterior.coords).round().astype(np.int32) for p in polygons]
    holes = [np.asarray(ring.coords).round().astype(np.int32) for p in polygons for ring in p.interiors]
    cv2.fillPoly(canvas, rounded, 1)
    cv2.fillPoly(canvas, holes, 0)
