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
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import shapely
from shapely.geometry import LineString, MultiPolygon, Polygon
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
        starts: List[np.ndarray] = []
        ends: List[np.ndarray] = []
        first, boxes, total = [0], [], 0
        for polygon in _polygons(geometries):
            # Exterior one way round, holes the other: a hole then subtracts exactly what its exterior adds.
            polygon = shapely.geometry.polygon.orient(polygon, 1.0)
            for ring in (polygon.exterior, *polygon.interiors):
                corners = shapely.get_coordinates(ring)
                starts.append(corners[:-1])
                ends.append(corners[1:])
                total += len(corners) - 1
            first.append(total)
            boxes.append(polygon.bounds)
        if not boxes:
            return cls(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(1, np.int64), np.zeros((0, 4)))
        return cls(np.concatenate(starts), np.concatenate(ends), np.asarray(first), np.asarray(boxes))

    def near(self, box: Tuple[float, float, float, float]) -> Tuple[np.ndarray, np.ndarray]:
        """``start``, ``end`` (E', 2) of the polygons whose bounding box meets ``box`` (x_lo, y_lo, x_hi, y_hi)."""
        hit = np.flatnonzero((self.boxes[:, 0] <= box[2]) & (self.boxes[:, 2] >= box[0])
                             & (self.boxes[:, 1] <= box[3]) & (self.boxes[:, 3] >= box[1]))
        if not len(hit):
            return self.start[:0], self.end[:0]
        index = np.concatenate([np.arange(self.first[p], self.first[p + 1]) for p in hit])
        return self.start[index], self.end[index]


@dataclass
class MapLayer:
    """One layer: its geometries in file order (polygons, or lines) and, derived on demand, their edges."""

    name: str
    geometries: List[BaseGeometry]
    is_line: bool
    _edges: Dict[float, Edges] = field(default_factory=dict)

    def edges(self, line_width: float = 0.0) -> Edges:
        """Edges of the polygons, or of the lines widened to ``line_width`` metres (all points within half of it)."""
        key = line_width if self.is_line else 0.0
        if key not in self._edges:
            geometries = self.geometries
            if self.is_line:
                geometries = [line.buffer(key / 2, quad_segs=4) for line in geometries]
            self._edges[key] = Edges.of(geometries)
        return self._edges[key]


def _polygons(geometries: Sequence[BaseGeometry]) -> List[Polygon]:
    """All polygons of ``geometries``, self-touching ones repaired, parts of zero area dropped."""
    found: List[Polygon] = []
    stack = list(reversed(list(geometries)))
    while stack:
        geometry = stack.pop()
        if isinstance(geometry, Polygon):
            if not geometry.is_valid:
                stack.append(shapely.make_valid(geometry))
            elif geometry.area > 0:
                found.append(geometry)
        elif hasattr(geometry, 'geoms'):
            if isinstance(geometry, MultiPolygon) and not geometry.is_valid:
                geometry = shapely.make_valid(geometry)
            stack.extend(reversed(geometry.geoms))
    return found


class MapData:
    """The layers of one map-expansion file; each is built when first asked for, in one pass over the JSON per set of layers.

    Raises (from the constructor):
        FileNotFoundError: if the map-expansion file is not where the devkit expects it.
        ValueError: if it is not JSON, or older than version 1.3.
    """

    def __init__(self, path: str):
        self.path = path
        self._layers: Dict[str, MapLayer] = {}

    def layers(self, names: Sequence[str]) -> Dict[str, MapLayer]:
        """The named layers (polygon or line layers)."""
        missing = [name for name in names if name not in self._layers]
        if missing:
            self._layers.update(_parse(self.path, missing))
        return {name: self._layers[name] for name in names}


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
        exterior = [nodes[t] for t in record['exterior_node_tokens']]
        holes = [[nodes[t] for t in hole['node_tokens']] for hole in record['holes']]
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
