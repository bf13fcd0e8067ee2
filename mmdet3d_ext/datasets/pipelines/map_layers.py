"""Map-expansion geometry (nuScenes map v1.3 JSON) as flat arrays, read once per process and location.

The devkit's ``NuScenesMap`` builds every layer, lane graphs included, and intersects shapely polygons at each call. Labels
need a few layers and only "is this cell's centre inside", so :class:`MapLayer` holds edges that a scanline
fill can use directly (see ``map_raster``). World coordinates: metres, x east, y north, in the map's own frame
(nuScenes "global").
"""
from __future__ import annotations

import json
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import shapely
from shapely.geometry import LineString, Polygon
from shapely.geometry.base import BaseGeometry

POLYGON_LAYERS = ('drivable_area', 'road_segment', 'road_block', 'lane', 'ped_crossing', 'walkway', 'stop_line', 'carpark_area')
LINE_LAYERS = ('road_divider', 'lane_divider')
# Oldest map expansion that the devkit accepts.
MIN_VERSION = (1, 3)
# Four locations exist; two data roots at once are rare.
CACHE_SIZE = 8

_CACHE: 'OrderedDict[Tuple[str, int, int], MapData]' = OrderedDict()


@dataclass
class Edges:
    """Edges of many polygons, so oriented that the winding number of a point counts the polygons that contain it.

    ``start``, ``end``: (E, 2) float64. ``first``: (P + 1,) where polygon p's edges begin. ``boxes``: (P, 4) bounds as
    x_lo, y_lo, x_hi, y_hi.
    """

    start: np.ndarray
    end: np.ndarray
    first: np.ndarray
    boxes: np.ndarray

    @classmethod
    def of(cls, geometries: Sequence[BaseGeometry]) -> 'Edges':
        """Edges of all polygons among ``geometries``."""
        polygons = _polygons(geometries)
        if not len(polygons):
            return cls(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(1, np.int64), np.zeros((0, 4)))
        rings, polygon_of = shapely.get_rings(polygons, return_index=True)
        is_exterior = np.concatenate([[True], polygon_of[1:] != polygon_of[:-1]])
        corners, ring_of = shapely.get_coordinates(rings, return_index=True)
        joined = np.flatnonzero(ring_of[1:] == ring_of[:-1])  # a ring repeats its first corner at its end
        start, end, ring_of = corners[joined], corners[joined + 1], ring_of[joined]
        # Exterior one way round, holes the other: a hole then subtracts exactly what its exterior adds.
        turned = (shapely.is_ccw(rings) != is_exterior)[ring_of, None]
        counts = np.bincount(polygon_of[ring_of], minlength=len(polygons))
        return cls(np.where(turned, end, start), np.where(turned, start, end), np.concatenate([[0], np.cumsum(counts)]),
                   shapely.bounds(polygons))

    @classmethod
    def joined(cls, parts: Sequence['Edges']) -> 'Edges':
        """The edges of all ``parts``."""
        counts = np.concatenate([np.diff(part.first) for part in parts])
        return cls(np.concatenate([part.start for part in parts]), np.concatenate([part.end for part in parts]),
                   np.concatenate([[0], np.cumsum(counts)]), np.concatenate([part.boxes for part in parts]))

    def near(self, box: Tuple[float, float, float, float]) -> Tuple[np.ndarray, np.ndarray]:
        """``start``, ``end`` (E', 2) of the polygons whose bounding box meets ``box`` (x_lo, y_lo, x_hi, y_hi)."""
        hit = _meeting(self.boxes, box)
        if not len(hit):
            return self.start[:0], self.end[:0]
        counts = self.first[hit + 1] - self.first[hit]
        index = np.arange(counts.sum()) + np.repeat(self.first[hit] - (np.cumsum(counts) - counts), counts)
        return self.start[index], self.end[index]


@dataclass
class MapLayer:
    """One layer: its geometries in file order (polygons, or lines) and, derived on demand, their edges."""

    name: str
    geometries: List[BaseGeometry]
    is_line: bool
    _edges: Dict[float, Edges] = field(default_factory=dict)
    _boxes: Optional[np.ndarray] = None

    def edges(self, line_width: float = 0.0) -> Edges:
        """Edges of the polygons, or of the lines widened to ``line_width`` metres (all points within half of it)."""
        key = line_width if self.is_line else 0.0
        if key not in self._edges:
            geometries = self.geometries
            if self.is_line:
                geometries = list(shapely.buffer(np.array(geometries, dtype=object), key / 2, quad_segs=4))
            self._edges[key] = Edges.of(geometries)
        return self._edges[key]

    def near(self, box: Tuple[float, float, float, float]) -> List[BaseGeometry]:
        """The geometries whose bounding box meets ``box`` (x_lo, y_lo, x_hi, y_hi), in file order."""
        if self._boxes is None:
            self._boxes = shapely.bounds(self.geometries).reshape(-1, 4)
        return [self.geometries[i] for i in _meeting(self._boxes, box)]


def _meeting(boxes: np.ndarray, box: Tuple[float, float, float, float]) -> np.ndarray:
    """Indices of the ``boxes`` (P, 4) that meet ``box``; all as x_lo, y_lo, x_hi, y_hi."""
    return np.flatnonzero((boxes[:, 0] <= box[2]) & (boxes[:, 2] >= box[0]) & (boxes[:, 1] <= box[3]) & (boxes[:, 3] >= box[1]))


def _polygons(geometries: Sequence[BaseGeometry]) -> np.ndarray:
    """All polygons of ``geometries`` (object array), self-crossing ones repaired, parts without area dropped."""
    parts = np.array(list(geometries), dtype=object)
    invalid = ~shapely.is_valid(parts)
    if invalid.any():
        parts[invalid] = shapely.make_valid(parts[invalid])
    while (shapely.get_type_id(parts) > shapely.GeometryType.POLYGON).any():  # a collection may hold collections
        parts = shapely.get_parts(parts)
    return parts[(shapely.get_type_id(parts) == shapely.GeometryType.POLYGON) & (shapely.area(parts) > 0)]


class MapData:
    """The layers of one map-expansion file; each is built when first asked for, in one pass over the JSON per set of layers.

    Raises (from the constructor):
        FileNotFoundError: if the map-expansion file is not where the devkit expects it.
        ValueError: if it is not JSON, or older than version 1.3.
    """

    def __init__(self, path: str):
        self.path = path
        self._layers: Dict[str, MapLayer] = {}
        self._edges: Dict[Tuple[Tuple[str, ...], float], Edges] = {}

    def layers(self, names: Sequence[str]) -> Dict[str, MapLayer]:
        """The named layers (polygon or line layers)."""
        missing = [name for name in names if name not in self._layers]
        if missing:
            self._layers.update(_parse(self.path, missing))
        return {name: self._layers[name] for name in names}

    def edges(self, names: Sequence[str], line_width: float) -> Edges:
        """Edges of all the named layers together, lines widened to ``line_width`` metres."""
        key = tuple(names), line_width
        if key not in self._edges:
            self._edges[key] = Edges.joined([layer.edges(line_width) for layer in self.layers(names).values()])
        return self._edges[key]


def load_map(dataset_root: str, location: str) -> MapData:
    """The map of ``location`` under ``<dataset_root>/maps/expansion``, from a small per-process cache.

    A file that changed on disk (time or size) is read again.
    """
    path = os.path.join(dataset_root, 'maps', 'expansion', f'{location}.json')
    if not os.path.isfile(path):
        misplaced = os.path.join(dataset_root, 'maps', f'{location}.json')
        hint = (f'{misplaced} exists: move it one folder down' if os.path.isfile(misplaced)
                else 'unpack the map expansion pack (v1.3) into the maps folder')
        raise FileNotFoundError(f'map file {path!r} does not exist; {hint}')
    stat = os.stat(path)
    key = (os.path.realpath(path), stat.st_mtime_ns, stat.st_size)
    if key not in _CACHE:
        _CACHE[key] = MapData(path)
        while len(_CACHE) > CACHE_SIZE:
            _CACHE.popitem(last=False)
    _CACHE.move_to_end(key)
    return _CACHE[key]


def _parse(path: str, names: Sequence[str]) -> Dict[str, MapLayer]:
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
    except ValueError as error:
        raise ValueError(f'map file {path!r} is not valid JSON ({error}); copy it again') from error
    version = str(content.get('version', '1.0'))
    if tuple(int(part) for part in version.split('.')[:2]) < MIN_VERSION:
        raise ValueError(f'map file {path!r} has version {version}; the map expansion pack v1.3 or newer is needed')
    try:
        return _build(content, names)
    except KeyError as error:
        raise ValueError(f'map file {path!r} is damaged: a record or token {error} is missing') from error


def _build(content: Dict[str, Any], names: Sequence[str]) -> Dict[str, MapLayer]:
    nodes = {node['token']: (node['x'], node['y']) for node in content['node']}
    polygons = {record['token']: record for record in content['polygon']}
    lines = {record['token']: record for record in content['line']}

    def polygon_of(token: str) -> List[Polygon]:
        record = polygons[token]
        exterior = np.array([nodes[t] for t in record['exterior_node_tokens']])
        holes = [np.array([nodes[t] for t in hole['node_tokens']]) for hole in record['holes']]
        if len(exterior) < 3:
            return []
        return [Polygon(exterior, [hole for hole in holes if len(hole) >= 3])]

    layers = {}
    for name in names:
        geometries: List[BaseGeometry] = []
        for record in content[name]:
            if name in LINE_LAYERS:
                corners = [nodes[t] for t in lines[record['line_token']]['node_tokens']]
                if len(corners) >= 2:  # a few lines of singapore-queenstown have no node
                    geometries.append(LineString(corners))
            else:
                # A drivable area has several polygons, every other record has one.
                tokens = record['polygon_tokens'] if name == 'drivable_area' else [record['polygon_token']]
                for token in tokens:
                    geometries.extend(polygon_of(token))
        layers[name] = MapLayer(name, geometries, is_line=name in LINE_LAYERS)
    return layers
