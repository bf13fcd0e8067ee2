"""Writes a :class:`CityMap` as a map-expansion v1.3 file that the devkit's ``NuScenesMap`` loads."""
from __future__ import annotations

import hashlib
from typing import Dict, List, Tuple

import numpy as np
from shapely.geometry import Polygon

from .curves import Polyline, arcline_path
from .maps import CityMap, polygons_of


def token(*parts) -> str:
    """A 32-digit hexadecimal token that depends on ``parts`` only."""
    return hashlib.md5('/'.join(str(part) for part in parts).encode()).hexdigest()


class _Writer:
    """Collects nodes, lines and polygons; equal coordinates share one node, as neighbours in the real files do."""

    def __init__(self, city: CityMap, seed: int):
        self.scope = ('map', seed, city.name)
        self.node: Dict[Tuple[int, int], str] = {}
        self.nodes: List[dict] = []
        self.tables: Dict[str, list] = {'polygon': [], 'line': []}

    def new(self, layer: str, *key) -> str:
        return token(*self.scope, layer, *key)

    def add_node(self, point) -> str:
        key = (int(round(float(point[0]) * 1000)), int(round(float(point[1]) * 1000)))
        if key not in self.node:
            self.node[key] = self.new('node', *key)
            self.nodes.append({'token': self.node[key], 'x': key[0] / 1000, 'y': key[1] / 1000})
        return self.node[key]

    def add_nodes(self, points) -> List[str]:
        tokens = [self.add_node(point) for point in points]
        # Points nearer than a millimetre fall on one node; repeating it would make a zero-length edge.
        return [value for i, value in enumerate(tokens) if i == 0 or value != tokens[i - 1]]

    def line(self, points, *key) -> str:
        record = {'token': self.new('line', *key), 'node_tokens': self.add_nodes(points)}
        self.tables['line'].append(record)
        return record['token']

    def polygon(self, polygon: Polygon, *key) -> str:
        record = {'token': self.new('polygon', *key),
                  'exterior_node_tokens': self.add_nodes(list(polygon.exterior.coords)[:-1]),
                  'holes': [{'node_tokens': self.add_nodes(list(ring.coords)[:-1])} for ring in polygon.interiors]}
        self.tables['polygon'].append(record)
        return record['token']


def expansion_tables(city: CityMap, seed: int) -> dict:
    """The content of ``maps/expansion/<location>.json``: version 1.3, every layer of the public schema."""
    w = _Writer(city, seed)
    network = city.network
    area = _drivable_areas(city, w)
    segments, blocks = _roads(city, w, area[0]['token'])
    crossings = [{'token': w.new('ped_crossing', i), 'polygon_token': w.polygon(c.polygon, 'ped_crossing', i),
                  'road_segment_token': w.new('road_segment', c.road)} for i, c in enumerate(city.crossings)]
    lights = []
    for i, light in enumerate(city.lights):
        x, y = (float(v) for v in light.position)
        arriving = w.new('road_block', light.road, light.node)
        lights.append({
            'token': w.new('traffic_light', i),
            'line_token': w.line([light.position, light.position + [np.cos(light.heading), np.sin(light.heading)]],
                                 'traffic_light', i),
            'traffic_light_type': 'VERTICAL', 'from_road_block_token': arriving,
            'items': [{'color': color, 'shape': 'CIRCLE', 'rel_pos': {'tx': 0.0, 'ty': 0.0, 'tz': z, 'rx': 0.0,
                                                                     'ry': 0.0, 'rz': 0.0}, 'to_road_block_tokens': []}
                      for color, z in (('RED', 4.0), ('YELLOW', 3.7), ('GREEN', 3.4))],
            'pose': {'tx': x, 'ty': y, 'tz': 0.0, 'rx': 0.0, 'ry': 0.0, 'rz': float(light.heading)}})
    stops = []
    for i, stop in enumerate(city.stop_lines):
        on_crossing = stop.kind in ('PED_CROSSING', 'TURN_STOP')
        stops.append({
            'token': w.new('stop_line', i), 'polygon_token': w.polygon(stop.polygon, 'stop_line', i),
            'stop_line_type': stop.kind,
            'ped_crossing_tokens': [crossings[stop.crossing]['token']] if on_crossing else [],
            'traffic_light_tokens': [lights[stop.light]['token']] if stop.kind == 'TRAFFIC_LIGHT' else [],
            'road_block_token': w.new('road_block', stop.road, stop.node)})
    carparks = []
    for i, carpark in enumerate(city.carparks):
        road = None if carpark.road is None else network.roads[carpark.road]
        carparks.append({'token': w.new('carpark_area', i), 'polygon_token': w.polygon(carpark.polygon, 'carpark_area', i),
                         'orientation': float(np.arctan2(carpark.v[1], carpark.v[0])),
                         'road_block_token': '' if road is None else w.new('road_block', road.index, road.b)})
    walkways = [{'token': w.new('walkway', i), 'polygon_token': w.polygon(p, 'walkway', i)}
                for i, p in enumerate(city.walkways)]
    road_dividers, lane_dividers, segments_of = _dividers(city, w)
    lanes, connectors = _lanes(city, w, segments_of)
    drivable = [lane for lane in network.lanes]
    names = {lane.index: w.new('lane', lane.index) for lane in drivable}
    return {
        'version': '1.3', 'canvas_edge': [city.canvas[0], city.canvas[1]],
        'polygon': w.tables['polygon'], 'line': w.tables['line'], 'node': w.nodes,
        'drivable_area': area, 'road_segment': segments, 'road_block': blocks, 'lane': lanes,
        'lane_connector': connectors, 'ped_crossing': crossings, 'walkway': walkways, 'stop_line': stops,
        'carpark_area': carparks, 'road_divider': road_dividers, 'lane_divider': lane_dividers, 'traffic_light': lights,
        'arcline_path_3': {names[lane.index]: arcline_path(lane.line) for lane in drivable},
        'connectivity': {names[lane.index]: {'incoming': [names[i] for i in lane.incoming],
                                             'outgoing': [names[i] for i in lane.outgoing]} for lane in drivable}}


def _drivable_areas(city: CityMap, w: _Writer) -> List[dict]:
    """One record of several polygons (the streets, then every second lot), and one record for each remaining lot.

    The streets come first: the devkit fills a polygon and then clears its holes, in which the lots lie.
    """
    parts = list(enumerate(city.drivable))
    together = [part for part in parts if part[0] == 0 or part[0] % 2 == 1]
    alone = [part for part in parts if part not in together]
    records = [{'token': w.new('drivable_area', 'streets'),
                'polygon_tokens': [w.polygon(p, 'drivable_area', i) for i, p in together]}]
    return records + [{'token': w.new('drivable_area', i), 'polygon_tokens': [w.polygon(p, 'drivable_area', i)]}
                      for i, p in alone]


def _roads(city: CityMap, w: _Writer, area: str) -> Tuple[List[dict], List[dict]]:
    segments, blocks = [], []
    for road, polygon in zip(city.network.roads, city.road_polygons):
        segments.append({'token': w.new('road_segment', road.index),
                         'polygon_token': w.polygon(polygon, 'road_segment', road.index),
                         'is_intersection': False, 'drivable_area_token': area})
        for end in (road.b, road.a):
            forward = end == road.b
            side = -1.0 if forward == city.network.right_hand else 1.0
            # The part of the road whose lanes run towards ``end``, without parking strip and gutter.
            outline = road.strip(0.0, road.length, *sorted([0.0, side * road.lane_bounds(road.lanes - 1)[1]]))
            if road.index in {index for index, island in _road_islands(city)}:
                outline = polygons_of(Polygon(outline).difference(dict(_road_islands(city))[road.index]))[0]
            else:
                outline = Polygon(outline)
            bounds = [side * v for v in (road.lane_bounds(0)[0], road.lane_bounds(road.lanes - 1)[1])]
            edges = [[road.centre.offset(s, v) for v in bounds] for s in ((0.0, road.length) if forward
                                                                          else (road.length, 0.0))]
            blocks.append({'token': w.new('road_block', road.index, end),
                           'polygon_token': w.polygon(outline, 'road_block', road.index, end),
                           'from_edge_line_token': w.line(edges[0], 'road_block', road.index, end, 'from'),
                           'to_edge_line_token': w.line(edges[1], 'road_block', road.index, end, 'to'),
                           'road_segment_token': w.new('road_segment', road.index)})
    for node, polygon in enumerate(city.junction_polygons):
        segments.append({'token': w.new('road_segment', 'junction', node),
                         'polygon_token': w.polygon(polygon, 'road_segment', 'junction', node),
                         'is_intersection': True, 'drivable_area_token': area})
    return segments, blocks


def _road_islands(city: CityMap):
    return [(road.index, island) for road, polygon in zip(city.network.roads, city.road_polygons)
            for island in city.islands if island.centroid.distance(polygon) < 2.0]


def _dividers(city: CityMap, w: _Writer):
    road_dividers, lane_dividers, segments_of = [], [], {}
    for i, divider in enumerate(city.dividers):
        layer = f'{divider.kind}_divider'
        # A straight line meets any (convex) patch in one piece. A curved one may leave and enter it again, and the
        # devkit's rasteriser cannot draw the resulting multi-part line under shapely 2; so curves go as chords.
        straight = np.ptp(Polyline(divider.points).heading(Polyline(divider.points).s)) < 1e-3
        chains = [divider.points] if straight else [divider.points[j:j + 2] for j in range(len(divider.points) - 1)]
        for j, chain in enumerate(chains):
            record = {'token': w.new(layer, i, j), 'line_token': w.line(chain, layer, i, j)}
            if divider.kind == 'road':
                road_dividers.append({**record, 'road_segment_token': w.new('road_segment', divider.road)})
                continue
            pieces = [{'node_token': w.add_node(point), 'segment_type': divider.style} for point in chain]
            lane_dividers.append({**record, 'lane_divider_segments': pieces})
            segments_of.setdefault(divider.road, []).append((divider.points, pieces))
    return road_dividers, lane_dividers, segments_of


def _lanes(city: CityMap, w: _Writer, segments_of) -> Tuple[List[dict], List[dict]]:
    lanes, connectors = [], []
    for lane in city.network.lanes:
        polygon = Polygon(lane.polygon)
        if lane.road is None:
            polygon = polygon if polygon.is_valid else polygons_of(polygon.buffer(0))[0]
            connectors.append({'token': w.new('lane', lane.index),
                               'polygon_token': w.polygon(polygon, 'lane_connector', lane.index), 'lane_type': 'CAR'})
            continue
        half = len(lane.polygon) // 2
        inner, outer = lane.polygon[:half], lane.polygon[half:][::-1]
        sides = {'left_lane_divider_segments': [], 'right_lane_divider_segments': []}
        for points, pieces in segments_of.get(lane.road, []):
            middle = points[len(points) // 2]
            for side, edge in (('left', outer if city.network.right_hand is False else inner),
                               ('right', inner if city.network.right_hand is False else outer)):
                if np.min(np.hypot(*(edge - middle).T)) < 1.2:
                    sides[f'{side}_lane_divider_segments'] += pieces
        lanes.append({'token': w.new('lane', lane.index), 'polygon_token': w.polygon(polygon, 'lane', lane.index),
                      'lane_type': 'CAR',
                      'from_edge_line_token': w.line([inner[0], outer[0]], 'lane', lane.index, 'from'),
                      'to_edge_line_token': w.line([inner[-1], outer[-1]], 'lane', lane.index, 'to'), **sides})
    return lanes, connectors
