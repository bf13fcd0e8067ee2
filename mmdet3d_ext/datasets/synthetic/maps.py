"""One city map: what lies on and beside the road network, as shapely geometry in map coordinates (metres).

The same object is painted on the ground (:mod:`.ground`), written as a map-expansion file (:mod:`.map_json`) and stands
around the scenes as buildings and poles (:mod:`.world`), so images, point clouds and map labels agree by construction.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional, Tuple

import numpy as np
import shapely
from shapely.geometry import MultiPolygon, Point, Polygon, box
from shapely.ops import unary_union
from shapely.prepared import prep

from .curves import rectangles
from .roads import Road, RoadNetwork

STOP_DEPTH = 1.6  # m
CROSSING_DEPTH = 4.0  # m
BAY = (2.7, 5.4)  # m, width and depth of a parking bay


@dataclass
class Crossing:
    road: int
    node: int
    polygon: Polygon
    start: float  # arc lengths on the road between which it lies
    end: float


@dataclass
class StopLine:
    road: int
    node: int
    polygon: Polygon
    kind: str
    crossing: Optional[int] = None
    light: Optional[int] = None


@dataclass
class Carpark:
    """A rectangle of parking bays on both sides of an aisle. ``origin`` is a corner, ``u`` runs along the aisle."""
    polygon: Polygon
    origin: np.ndarray
    u: np.ndarray
    v: np.ndarray
    size: Tuple[float, float]
    road: Optional[int]

    def bays(self) -> List[Tuple[np.ndarray, float]]:
        """Centre and heading (radians) of every bay; cars stand across the aisle."""
        count = int((self.size[0] - 1.0) // BAY[0])
        heading = float(np.arctan2(self.v[1], self.v[0]))
        found = []
        for i in range(count):
            for depth, turn in ((BAY[1] / 2 + 0.3, np.pi), (self.size[1] - BAY[1] / 2 - 0.3, 0.0)):
                found.append((self.origin + self.u * (0.5 + (i + 0.5) * BAY[0]) + self.v * depth, heading + turn))
        return found


@dataclass
class Divider:
    """``kind`` is 'road' or 'lane'; ``style`` one of the schema's segment types; ``points`` (P, 2)."""
    kind: str
    style: str
    road: int
    points: np.ndarray


@dataclass
class Solid:
    """Something that stands around and is not annotated: an upright box with its base centre at ``xyz``."""
    kind: str
    xyz: np.ndarray
    size: Tuple[float, float, float]
    yaw: float
    tone: float


@dataclass
class TrafficLight:
    road: int
    node: int
    position: np.ndarray
    heading: float


@dataclass
class CityMap:
    name: str
    network: RoadNetwork
    canvas: Tuple[float, float]
    road_polygons: List[Polygon]
    junction_polygons: List[Polygon]
    islands: List[Polygon]
    crossings: List[Crossing] = field(default_factory=list)
    stop_lines: List[StopLine] = field(default_factory=list)
    lights: List[TrafficLight] = field(default_factory=list)
    carparks: List[Carpark] = field(default_factory=list)
    dividers: List[Divider] = field(default_factory=list)
    walkways: List[Polygon] = field(default_factory=list)
    drivable: List[Polygon] = field(default_factory=list)
    paths: List[np.ndarray] = field(default_factory=list)  # closed centre lines of the walkways, for pedestrians
    solids: List[Solid] = field(default_factory=list)


def polygons_of(geometry) -> List[Polygon]:
    """The polygons of any shapely geometry, largest first (the devkit fills them in this order, holes last)."""
    if geometry.is_empty:
        return []
    parts = list(geometry.geoms) if hasattr(geometry, 'geoms') else [geometry]
    return sorted([part for part in parts if isinstance(part, Polygon) and part.area > 0.5], key=lambda p: -p.area)


def build_city(name: str, seed: int, blocks: int) -> CityMap:
    """Build the map of one location; the same arguments give the same map.

    Args:
        name: the location, e.g. 'boston-seaport' (traffic keeps to the right there and to the left elsewhere).
        seed: the data set's seed.
        blocks: city blocks along each side.
    """
    rng = np.random.default_rng([seed, 11, sum(name.encode())])
    network = RoadNetwork(rng, blocks, right_hand=name == 'boston-seaport')
    islands, island_spans = _islands(network)
    island_area = unary_union(islands) if islands else Polygon()
    roads = [Polygon(road.strip(0.0, road.length, -road.half_width, road.half_width)).difference(island_area)
             for road in network.roads]
    city = CityMap(name, network, network.canvas, roads, [Polygon(outline) for outline in network.junctions], islands)
    # Mouths are chords of shared nodes; a hair of overlap keeps rounding from leaving slivers between the parts.
    paved = unary_union([p.buffer(0.01, join_style='mitre') for p in city.road_polygons + city.junction_polygons])
    paved = polygons_of(paved)[0].simplify(0.005)
    _crossings_and_stops(city, rng)
    _dividers(city, island_spans)
    _blocks(city, paved, rng)
    return city


def _islands(network: RoadNetwork):
    """Refuge islands in the medians of avenues: holes in the drivable area."""
    islands, spans = [], {}
    for road in network.roads:
        if road.median > 0 and road.length > 45:
            middle = road.length / 2
            span = (middle - 6.0, middle + 6.0)
            spans[road.index] = span
            islands.append(Polygon(road.strip(*span, -0.7, 0.7)))
    return islands, spans


def _crossings_and_stops(city: CityMap, rng) -> None:
    network = city.network
    for node, roads in network.at_node.items():
        signals = len(roads) >= 3 and rng.random() < 0.6
        for road in roads:
            if len(roads) < 3 and rng.random() < 0.6:
                continue
            crossing = None
            if rng.random() < 0.8:
                span = sorted(road.from_mouth(node, d) for d in (1.0, 1.0 + CROSSING_DEPTH))
                polygon = Polygon(road.strip(*span, -road.half_width + 0.1, road.half_width - 0.1))
                crossing = len(city.crossings)
                city.crossings.append(Crossing(road.index, node, polygon, *span))
            light = None
            side = _arriving_side(network, road, node)
            near = 2.5 + CROSSING_DEPTH if crossing is not None else 0.8
            if signals:
                s = road.from_mouth(node, near)
                heading = road.outward(node)
                light = len(city.lights)
                city.lights.append(TrafficLight(road.index, node, road.centre.offset(s, side * (road.half_width + 0.7)),
                                                heading))
            kind = 'TRAFFIC_LIGHT' if signals else 'PED_CROSSING' if crossing is not None else \
                ('STOP_SIGN', 'YIELD')[int(rng.integers(2))]
            outer = road.lane_bounds(road.lanes - 1)[1]
            span = sorted(road.from_mouth(node, d) for d in (near, near + STOP_DEPTH))
            lateral = sorted([side * (road.median + 0.1), side * outer])
            city.stop_lines.append(StopLine(road.index, node, Polygon(road.strip(*span, *lateral)), kind,
                                            crossing, light))


def _arriving_side(network: RoadNetwork, road: Road, node: int) -> float:
    """Sign of the lateral offset of the lanes that run towards the junction."""
    forward = node == road.b
    return -1.0 if forward == network.right_hand else 1.0


def _dividers(city: CityMap, island_spans) -> None:
    clear = {(stop.road, stop.node) for stop in city.stop_lines}
    for road in city.network.roads:
        # Lines end where the stop lines and crossings of the two junctions begin.
        gaps = [8.3 if (road.index, node) in clear else 1.0 for node in (road.a, road.b)]
        start, end = gaps[0], road.length - gaps[1]
        spans = [(start, end)]
        if road.index in island_spans:
            low, high = island_spans[road.index]
            spans = [(start, low - 0.5), (high + 0.5, end)]
        style = 'DOUBLE_SOLID_WHITE' if road.median else 'SINGLE_SOLID_WHITE'
        for span in spans:
            s = road.centre.stations(*span, step=6.0)
            city.dividers.append(Divider('road', style, road.index, road.centre.position(s)))
        for k in range(1, road.lanes):
            for side in (-1.0, 1.0):
                s = road.centre.stations(start, end, step=6.0)
                points = road.centre.offset(s, np.full(len(s), side * road.lane_bounds(k)[0]))
                city.dividers.append(Divider('lane', 'SINGLE_DASHED_WHITE', road.index, points))


def _rectangle(origin, u, v, size) -> Polygon:
    return Polygon([origin, origin + u * size[0], origin + u * size[0] + v * size[1], origin + v * size[1]])


def _carparks(city: CityMap, block: Polygon, share: float, rng) -> List[Carpark]:
    """Carparks in one block, entered from the roads around it."""
    found, taken = [], []
    inside = prep(block.buffer(0.6))
    for road in city.network.roads:
        for side in (-1.0, 1.0):
            middle = road.length / 2 + rng.uniform(-6, 6)
            edge = road.centre.offset(middle, side * (road.half_width - 0.3))
            # Only roads along this block, and not all of them.
            if not block.buffer(1.0).contains(Point(road.centre.offset(middle, side * (road.half_width + 3.0)))):
                continue
            if rng.random() > share:
                continue
            heading = float(road.centre.heading(middle))
            u = np.array([np.cos(heading), np.sin(heading)])
            v = side * np.array([-np.sin(heading), np.cos(heading)])
            size = (float(rng.integers(7, 11)) * BAY[0] + 1.0, 2 * BAY[1] + 7.0)
            # 0.3 m of overlap with the road, so that the driveway has no gap on curved streets.
            origin = edge - u * size[0] / 2
            rectangle = _rectangle(origin, u, v, size)
            if not inside.contains(_rectangle(origin + v, u, v, (size[0], size[1] - 1.0))):
                continue
            if any(rectangle.distance(other) < 6.0 for other in taken):
                continue
            taken.append(rectangle)
            found.append(Carpark(rectangle, origin, u, v, size, road.index))
    return found


def _private_lot(block: Polygon, rng) -> Optional[Carpark]:
    """A lot inside a block that no public road reaches: a separate part of the drivable area."""
    inside = prep(block.buffer(-6.0))
    size = (6 * BAY[0] + 1.0, 2 * BAY[1] + 6.0)
    centre = np.array(block.centroid.coords[0])
    for angle in np.deg2rad(rng.uniform(-45, 45, 8)):
        u, v = np.array([np.cos(angle), np.sin(angle)]), np.array([-np.sin(angle), np.cos(angle)])
        origin = centre - u * size[0] / 2 - v * size[1] / 2
        rectangle = _rectangle(origin, u, v, size)
        if inside.contains(rectangle):
            return Carpark(rectangle, origin, u, v, size, None)
    return None


def _blocks(city: CityMap, paved: Polygon, rng) -> None:
    width, height = city.canvas
    outside = box(0, 0, width, height).difference(Polygon(paved.exterior))
    blocks = [Polygon(ring).buffer(0) for ring in paved.interiors]
    blocks = [block for block in blocks if block.area > 100]  # traffic islands are holes too
    attached, detached, free = [], [], []
    for index, block in enumerate([*blocks, outside]):
        inner = index < len(blocks)
        border = polygons_of(block)[0]
        # Two blocks have no carpark at the street, so that their walkway is a closed ring (a polygon with a hole) and
        # a lot fits inside.
        closed = inner and index % 8 in (1, 3)
        carparks = [] if closed else _carparks(city, border, 0.6, rng)
        walk = float(rng.uniform(3.2, 4.2))
        if inner:
            ring = block.difference(block.buffer(-walk, join_style='round'))
        else:
            ring = Polygon(paved.exterior).buffer(walk).difference(Polygon(paved.exterior))
        attached += carparks
        cut = unary_union([c.polygon for c in carparks]) if carparks else Polygon()
        city.walkways += [p.simplify(0.03) for p in polygons_of(ring.difference(cut.buffer(0.05)))]
        centre_line = block.buffer(-walk / 2) if inner else Polygon(paved.exterior).buffer(walk / 2)
        city.paths.append(np.array(polygons_of(centre_line)[0].exterior.coords))
        lot = _private_lot(block, rng) if closed else None
        if lot is not None:
            detached.append(lot)
        interior = block.buffer(-walk) if inner else block.difference(Polygon(paved.exterior).buffer(walk))
        taken = cut.union(lot.polygon) if lot is not None else cut
        free.append(interior.difference(taken.buffer(0.8)))
        _street_furniture(city, ring.difference(cut.buffer(1.0)), rng)
    city.carparks = attached + detached
    main = unary_union([paved] + [carpark.polygon for carpark in attached])
    city.drivable = polygons_of(main) + [lot.polygon for lot in detached]
    for area in free:
        _buildings(city, area, rng)


def _street_furniture(city: CityMap, ring, rng) -> None:
    """Lamp poles and trees on the walkways' inner edge, and the poles of the traffic lights."""
    for part in polygons_of(ring):
        for boundary in [part.exterior, *part.interiors]:
            s = rng.uniform(0, 12)
            while s < boundary.length:
                point = boundary.interpolate(s)
                # The block's side of the walkway, so that the walking line stays free.
                if point.distance(MultiPolygon(city.road_polygons + city.junction_polygons)) > 2.5:
                    kind = 'tree' if rng.random() < 0.5 else 'pole'
                    size = (1.6, 1.6, rng.uniform(3.5, 5.5)) if kind == 'tree' else (0.22, 0.22, rng.uniform(5.0, 7.5))
                    city.solids.append(Solid(kind, np.array([point.x, point.y, 0.0]), size, rng.uniform(0, 1.5),
                                             float(rng.uniform(0.7, 1.3))))
                s += rng.uniform(11, 24)
    if not any(solid.kind == 'light' for solid in city.solids):
        for light in city.lights:
            city.solids.append(Solid('light', np.array([*light.position, 0.0]), (0.3, 0.3, 4.2), light.heading, 1.0))


def _buildings(city: CityMap, area, rng) -> None:
    """Upright boxes that fill the insides of the blocks, none on roads, walkways or carparks."""
    if area.is_empty:
        return
    count = int(area.area / 45)
    bounds = area.bounds
    sizes = rng.uniform(7.0, 20.0, (count, 2))
    places = np.column_stack([rng.uniform(bounds[:2], bounds[2:], (count, 2)), rng.uniform(0, np.pi, count)])
    heights, tones = rng.uniform(5.0, 16.0, count), rng.uniform(0.0, 1.0, count)
    footprints = rectangles(places, sizes)
    shapely.prepare(area)
    fitting = np.flatnonzero(shapely.contains(area, footprints))
    first, second = shapely.STRtree(footprints[fitting]).query(footprints[fitting], predicate='dwithin', distance=1.5)
    neighbours = [set() for _ in fitting]
    for i, j in zip(first.tolist(), second.tolist()):
        neighbours[i].add(j)
    placed = set()
    for i, index in enumerate(fitting.tolist()):
        if placed.isdisjoint(neighbours[i]):
            placed.add(i)
            city.solids.append(Solid('building', np.array([*places[index, :2], 0.0]),
                                     (float(sizes[index, 0]), float(sizes[index, 1]), float(heights[index])),
                                     float(places[index, 2]), float(tones[index])))
