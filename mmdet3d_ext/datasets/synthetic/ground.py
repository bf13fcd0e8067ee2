"""The ground: what each square decimetre of a map is made of, its colour, and how it reflects the lidar.

Rasters are indexed [row, column] with row = y / CELL and column = x / CELL (map coordinates; row 0 is the southern edge).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, Tuple

import cv2
import numpy as np
from shapely.geometry import LineString, Polygon
from shapely.ops import unary_union

from .maps import BAY, CityMap, polygons_of

CELL = 0.1  # m; also the resolution at which the devkit reads the semantic-prior images
SHIFT = 4  # fractional bits of OpenCV's fixed-point coordinates

# Material: (mean colour RGB, noise of the colour, lidar intensity 0-255 at normal incidence). Paint is retro-reflective.
MATERIALS = {
    'grass': ((98, 112, 70), 14, 22.0),
    'asphalt': ((74, 75, 80), 6, 7.0),
    'carpark': ((126, 84, 76), 7, 15.0),
    'walkway': ((164, 158, 150), 7, 36.0),
    'kerb': ((196, 194, 188), 5, 48.0),
    'line': ((226, 226, 220), 6, 110.0),
    'centre': ((214, 176, 60), 6, 110.0),
    'zebra': ((232, 232, 230), 6, 95.0),
    'zebra_gap': ((88, 88, 92), 6, 55.0),
    'stop': ((236, 224, 206), 6, 140.0),
}
NAMES = tuple(MATERIALS)
INDEX = {name: i for i, name in enumerate(NAMES)}
COLOUR = np.array([MATERIALS[name][0] for name in NAMES], np.float32)
GRAIN = np.array([MATERIALS[name][1] for name in NAMES], np.float32)
INTENSITY = np.array([MATERIALS[name][2] for name in NAMES], np.float32)


@dataclass
class Ground:
    """``material`` (rows, columns) uint8 index into NAMES; ``levels``: RGB uint8 images at CELL * 4**i metres per pixel."""
    material: np.ndarray
    levels: List[np.ndarray]

    def material_at(self, xy: np.ndarray) -> np.ndarray:
        """Material index at map coordinates (..., 2); grass outside of the map."""
        column = np.floor(xy[..., 0] / CELL).astype(np.int64)
        row = np.floor(xy[..., 1] / CELL).astype(np.int64)
        rows, columns = self.material.shape
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        found = self.material[np.where(inside, row, 0), np.where(inside, column, 0)]
        return np.where(inside, found, INDEX['grass'])


def _fill(canvas: np.ndarray, polygon: Polygon, value: int) -> None:
    """Fill a polygon with its holes left out; pixel (i, j) has its centre at ((j + 0.5) * CELL, (i + 0.5) * CELL)."""
    rings = [np.asarray(ring.coords)[:-1, :2] for ring in [polygon.exterior, *polygon.interiors]]
    scaled = [np.round((ring / CELL - 0.5) * 2 ** SHIFT).astype(np.int32) for ring in rings]
    cv2.fillPoly(canvas, scaled, int(value), lineType=cv2.LINE_8, shift=SHIFT)


def _stripe(canvas: np.ndarray, points: np.ndarray, width: float, value: int) -> None:
    for part in polygons_of(LineString(points).buffer(width / 2, cap_style='flat')):
        _fill(canvas, part, value)


def _shifted(points: np.ndarray, lateral: float) -> np.ndarray:
    """The line moved ``lateral`` metres to its left.

    By the vertices' own normals: GEOS cuts the result of its parallel offset in several parts in some versions, and the
    lines here bend little over the offset of 0.25 m.
    """
    along = np.gradient(points, axis=0)
    along /= np.linalg.norm(along, axis=1, keepdims=True)
    return points + lateral * np.stack([-along[:, 1], along[:, 0]], axis=1)


def _dashes(points: np.ndarray, dash: float, gap: float) -> List[np.ndarray]:
    line = LineString(points)
    stations = np.arange(0.0, line.length, dash + gap)
    return [np.array([line.interpolate(s).coords[0], line.interpolate(min(s + dash, line.length)).coords[0]])
            for s in stations if line.length - s > 0.5]


def _shape(city: CityMap) -> Tuple[int, int]:
    return int(round(city.canvas[1] / CELL)), int(round(city.canvas[0] / CELL))


def paint(city: CityMap) -> np.ndarray:
    """The material raster of a map."""
    canvas = np.full(_shape(city), INDEX['grass'], np.uint8)
    for polygon in city.walkways:
        _fill(canvas, polygon, INDEX['walkway'])
    for polygon in city.drivable:
        for part in polygons_of(polygon.buffer(0.25)):
            _fill(canvas, part, INDEX['kerb'])
    for polygon in city.drivable:
        _fill(canvas, polygon, INDEX['asphalt'])
    streets = unary_union(city.road_polygons + city.junction_polygons)
    for carpark in city.carparks:
        for part in polygons_of(carpark.polygon.difference(streets)):
            _fill(canvas, part, INDEX['carpark'])
        for side in (0.3, carpark.size[1] - 0.3 - BAY[1]):
            for i in range(int((carpark.size[0] - 1.0) // BAY[0]) + 1):
                start = carpark.origin + carpark.u * (0.5 + i * BAY[0]) + carpark.v * max(side, 0.6)
                _stripe(canvas, np.array([start, start + carpark.v * (BAY[1] - 0.3)]), 0.15, INDEX['line'])
    for divider in city.dividers:
        if divider.kind == 'lane':
            for dash in _dashes(divider.points, 4.0, 2.0):
                _stripe(canvas, dash, 0.25, INDEX['line'])
        elif divider.style.startswith('DOUBLE'):
            for lateral in (-0.25, 0.25):
                _stripe(canvas, _shifted(divider.points, lateral), 0.2, INDEX['centre'])
        else:
            _stripe(canvas, divider.points, 0.3, INDEX['centre'])
    for crossing in city.crossings:
        _fill(canvas, crossing.polygon, INDEX['zebra_gap'])
        road = city.network.roads[crossing.road]
        for lateral in np.arange(-road.half_width + 0.3, road.half_width - 0.7, 1.1):
            _fill(canvas, Polygon(road.strip(crossing.start, crossing.end, lateral, lateral + 0.6)), INDEX['zebra'])
    for stop in city.stop_lines:
        _fill(canvas, stop.polygon, INDEX['stop'])
    return canvas


def texture(material: np.ndarray, rng: np.random.Generator) -> List[np.ndarray]:
    """Colour pyramid of a material raster: grain, blotches of a few metres, and averaged coarser levels."""
    rows, columns = material.shape
    blotch = cv2.resize(rng.normal(0.0, 0.05, (rows // 40 + 2, columns // 40 + 2)).astype(np.float32), (columns, rows),
                        interpolation=cv2.INTER_CUBIC) + 1.0
    # The grain repeats every 51.2 m, which nobody sees.
    tile = rng.standard_normal((512, 512), dtype=np.float32)
    tile = 0.5 * tile + 2.0 * cv2.GaussianBlur(tile, (0, 0), 1.2, borderType=cv2.BORDER_REFLECT)
    grain = np.tile(tile, (rows // 512 + 1, columns // 512 + 1))[:rows, :columns] * GRAIN[material]
    base = np.empty((rows, columns, 3), np.uint8)
    for channel in range(3):
        lookup = np.zeros(256, np.uint8)
        lookup[:len(COLOUR)] = COLOUR[:, channel]
        plane = cv2.LUT(material, lookup).astype(np.float32)
        plane *= blotch
        plane += grain
        base[..., channel] = np.clip(plane, 0, 255, out=plane)
    levels = [base]
    for _ in range(2):
        previous = levels[-1]
        size: Tuple[int, int] = (previous.shape[1] // 4, previous.shape[0] // 4)
        levels.append(cv2.resize(previous[:size[1] * 4, :size[0] * 4], size, interpolation=cv2.INTER_AREA))
    return levels


def build_ground(city: CityMap, material: np.ndarray, seed: int) -> Ground:
    """Give a painted map its colours; the same arguments give the same arrays."""
    return Ground(material, texture(material, np.random.default_rng([seed, 12, sum(city.name.encode())])))


def semantic_prior(city: CityMap) -> np.ndarray:
    """The image behind the devkit's ``MapMask``: 255 on drivable surface and walkways, north up, 0.1 m per pixel."""
    canvas = np.zeros(_shape(city), np.uint8)
    for polygon in [*city.walkways, *city.drivable]:
        _fill(canvas, polygon, 255)
    return canvas[::-1]


def basemap(material: np.ndarray) -> np.ndarray:
    """A grey picture of the map, north up, 0.5 m per pixel (``maps/basemap``), bright as the lidar sees it."""
    lookup = np.zeros(256, np.uint8)
    lookup[:len(INTENSITY)] = np.clip(INTENSITY * 1.7, 0, 255)
    return cv2.LUT(np.ascontiguousarray(material[::-5, ::5]), lookup)
