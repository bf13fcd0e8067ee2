"""The road network of one map: a jittered, rotated grid of streets with junctions, lanes and lane connectors.

Coordinates are the map's (metres, x east, y north, origin in the south-western corner), as in the real map files.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Tuple

import numpy as np
from shapely.geometry import Polygon

from .curves import Polyline, bezier, join

SPACING = 92.0  # m between neighbouring junctions: a view of +-50 m nearly always holds a junction
MARGIN = 75.0  # m around the outermost junctions, so that a view from a border road stays on the map
CORNER = 5.0  # m, kerb radius at junctions


@dataclass
class Road:
    """A street between two junctions.

    Lateral offsets are metres to the left of ``centre`` (which runs from junction ``a`` to junction ``b`` and is trimmed at
    the junctions' mouths). From the centre outwards: median, lanes, parking strip, gutter.
    """
    index: int
    a: int
    b: int
    full: Polyline
    lanes: int
    median: float
    lane_width: float
    parking: float
    centre: Polyline = None
    trims: List[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def half_width(self) -> float:
        return self.median + self.lanes * self.lane_width + self.parking + 0.4

    @property
    def length(self) -> float:
        return self.centre.length

    def lane_bounds(self, k: int) -> Tuple[float, float]:
        """Unsigned offsets of lane ``k`` (0 = innermost) from the centre: inner and outer side."""
        return self.median + k * self.lane_width, self.median + (k + 1) * self.lane_width

    def strip(self, start: float, end: float, right: float, left: float) -> np.ndarray:
        """Outline (P, 2) of the area between two arc lengths and two lateral offsets."""
        s = self.centre.stations(start, end)
        return np.concatenate([self.centre.offset(s, np.full(len(s), right)),
                               self.centre.offset(s[::-1], np.full(len(s), left))])

    def outward(self, node: int) -> float:
        """Direction (radians) in which the road leaves this junction."""
        if node == self.a:
            return float(self.full.heading(0.0))
        return float(self.full.heading(self.full.length) + np.pi)

    def from_mouth(self, node: int, distance: float) -> float:
        """Arc length of the place ``distance`` metres into the road, seen from this junction."""
        return distance if node == self.a else self.length - distance


@dataclass
class Lane:
    """A lane (``road`` is set) or a lane connector across a junction (``road`` is None).

    ``forward`` tells whether the lane runs in the direction of the road's centre line; ``start_node`` and ``end_node`` are
    junction indices (equal for a connector). ``polygon`` is (P, 2).
    """
    index: int
    line: Polyline
    polygon: np.ndarray
    start_node: int
    end_node: int
    road: int = None
    forward: bool = True
    k: int = 0
    turn: float = 0.0
    outgoing: List[int] = field(default_factory=list)
    incoming: List[int] = field(default_factory=list)


class RoadNetwork:
    """Streets, junction outlines, lanes and connectors.

    Args:
        rng: source of all randomness.
        blocks: city blocks along each side.
        right_hand: whether traffic keeps to the right (Boston) or to the left (Singapore).
    """

    def __init__(self, rng: np.random.Generator, blocks: int, right_hand: bool):
        self.right_hand = right_hand
        self.nodes, self.canvas = self._place_nodes(rng, blocks)
        self.roads = self._make_roads(rng, blocks)
        self.at_node: Dict[int, List[Road]] = {
            node: sorted([road for road in self.roads if node in (road.a, road.b)],
                         key=lambda road, node=node: road.outward(node) % (2 * np.pi))
            for node in range(len(self.nodes))}
        self._trim()
        self.junctions = [self._junction_outline(node) for node in range(len(self.nodes))]
        self.lanes: List[Lane] = []
        self._make_lanes()
        self._make_connectors()

    @staticmethod
    def _place_nodes(rng, blocks):
        grid = np.stack(np.meshgrid(np.arange(blocks + 1), np.arange(blocks + 1), indexing='xy'), -1).reshape(-1, 2)
        nodes = grid * SPACING + rng.uniform(-6.0, 6.0, grid.shape)
        angle = np.deg2rad(rng.uniform(-25.0, 25.0))
        nodes = nodes @ np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        nodes = nodes - nodes.min(axis=0) + MARGIN
        canvas = np.ceil(nodes.max(axis=0) + MARGIN)
        return nodes, (float(canvas[0]), float(canvas[1]))

    def _make_roads(self, rng, blocks) -> List[Road]:
        side = blocks + 1
        pairs = [(j * side + i, j * side + i + 1, 'row', j) for j in range(side) for i in range(blocks)]
        pairs += [(j * side + i, (j + 1) * side + i, 'column', i) for j in range(blocks) for i in range(side)]
        degree = np.zeros(side * side, int)
        for a, b, _, _ in pairs:
            degree[[a, b]] += 1
        avenues = {('row', int(rng.integers(side))), ('column', int(rng.integers(side)))}
        kept = []
        for a, b, kind, line in pairs:
            # A street is left out now and then, so that there are T junctions and double blocks inside as well.
            if (kind, line) not in avenues and degree[a] == 4 and degree[b] == 4 and rng.random() < 0.25:
                degree[[a, b]] -= 1
                continue
            kept.append((a, b, (kind, line) in avenues))
        roads = []
        for a, b, avenue in kept:
            start, end = self.nodes[a], self.nodes[b]
            normal = np.array([-(end - start)[1], (end - start)[0]]) / np.hypot(*(end - start))
            bend = rng.uniform(-9.0, 9.0) if rng.random() < 0.5 else 0.0
            points = bezier(np.array([start, (start + end) / 2 + bend * normal, end]), 64)
            roads.append(Road(len(roads), a, b, Polyline(points), lanes=2 if avenue else 1, median=0.8 if avenue else 0.0,
                              lane_width=3.4, parking=0.0 if avenue else 2.4))
        return roads

    def _corner(self, node: int, left: Road, right: Road) -> Tuple[float, float, np.ndarray]:
        """Where the left kerb of one road meets the right kerb of the next one, counter-clockwise.

        Returns the distances from the junction's centre along both roads, and the point; nearly parallel kerbs meet
        nowhere, for which the distances are 0 and the point is None.
        """
        a, b = left.outward(node), right.outward(node)
        angle = (b - a) % (2 * np.pi)
        if abs(np.sin(angle)) < 0.35:
            return 0.0, 0.0, None
        along_a = (right.half_width + left.half_width * np.cos(angle)) / np.sin(angle)
        along_b = (left.half_width + right.half_width * np.cos(angle)) / np.sin(angle)
        u, n = np.array([np.cos(a), np.sin(a)]), np.array([-np.sin(a), np.cos(a)])
        return along_a, along_b, self.nodes[node] + along_a * u + left.half_width * n

    def _trim(self) -> None:
        for node, roads in self.at_node.items():
            reach = {road.index: 6.0 for road in roads}
            for road, following in zip(roads, roads[1:] + roads[:1]):
                along, along_next, _ = self._corner(node, road, following)
                reach[road.index] = max(reach[road.index], along)
                reach[following.index] = max(reach[following.index], along_next)
            for road in roads:
                road.trims[0 if node == road.a else 1] = reach[road.index] + CORNER
        for road in self.roads:
            road.centre = road.full.trimmed(road.trims[0], road.full.length - road.trims[1])

    def mouth(self, node: int, road: Road) -> np.ndarray:
        """The points of a road's cross-section at a junction, from right to left as seen from the junction."""
        inner = [bound for k in range(road.lanes) for bound in road.lane_bounds(k)] + [road.half_width]
        offsets = sorted({round(v, 6) for bound in inner for v in (bound, -bound)})
        s = 0.0 if node == road.a else road.length
        points = road.centre.offset(np.full(len(offsets), s), np.array(offsets))
        return points if node == road.a else points[::-1]

    def _junction_outline(self, node: int) -> np.ndarray:
        roads = self.at_node[node]
        ring = []
        for road, following in zip(roads, roads[1:] + roads[:1]):
            mouth, after = self.mouth(node, road), self.mouth(node, following)
            ring.append(mouth)
            corner = self._corner(node, road, following)[2]
            if corner is not None:
                ring.append(bezier(np.array([mouth[-1], corner, after[0]]), 8)[1:-1])
        outline = np.concatenate(ring)
        if not Polygon(outline).is_valid:
            raise ValueError(f'the outline of junction {node} crosses itself; use another seed')
        return outline

    def _make_lanes(self) -> None:
        for road in self.roads:
            for forward in (True, False):
                # Right-hand traffic keeps to the right of its own direction of travel.
                side = -1.0 if forward == self.right_hand else 1.0
                for k in range(road.lanes):
                    inner, outer = road.lane_bounds(k)
                    s = road.centre.stations(0.0, road.length)
                    if not forward:
                        s = s[::-1]
                    line = Polyline(road.centre.offset(s, np.full(len(s), side * (inner + outer) / 2)))
                    polygon = np.concatenate([road.centre.offset(s, np.full(len(s), side * inner)),
                                              road.centre.offset(s[::-1], np.full(len(s), side * outer))])
                    ends = (road.a, road.b) if forward else (road.b, road.a)
                    self.lanes.append(Lane(len(self.lanes), line, polygon, *ends, road=road.index, forward=forward, k=k))

    def _make_connectors(self) -> None:
        lanes = list(self.lanes)
        for node in range(len(self.nodes)):
            arriving = [lane for lane in lanes if lane.end_node == node]
            leaving = [lane for lane in lanes if lane.start_node == node]
            for a in arriving:
                for b in leaving:
                    if a.road != b.road and self._allowed(a, b):
                        self._connect(node, a, b)
            # At corners and T junctions a lane may be left without a successor or predecessor: give it the mildest turn.
            for a in arriving:
                if not a.outgoing:
                    self._connect(node, a, min((b for b in leaving if b.road != a.road),
                                               key=lambda b, a=a: (abs(self._turn(a, b)), abs(a.k - b.k))))
            for b in leaving:
                if not b.incoming:
                    self._connect(node, min((a for a in arriving if a.road != b.road),
                                            key=lambda a, b=b: (abs(self._turn(a, b)), abs(a.k - b.k))), b)

    @staticmethod
    def _turn(a: Lane, b: Lane) -> float:
        """Change of heading (radians, left positive) from the end of one lane to the start of another."""
        return float(b.line.heading(0.0) - a.line.heading(a.line.length) + np.pi) % (2 * np.pi) - np.pi

    def _allowed(self, a: Lane, b: Lane) -> bool:
        turn = self._turn(a, b)
        lanes_a, lanes_b = self.roads[a.road].lanes, self.roads[b.road].lanes
        near_side = turn < 0 if self.right_hand else turn > 0
        if abs(turn) < np.deg2rad(35):
            return b.k == min(a.k, lanes_b - 1) or (a.k == lanes_a - 1 and b.k == lanes_b - 1 and lanes_a < lanes_b)
        if near_side:
            return a.k == lanes_a - 1 and b.k == lanes_b - 1
        return a.k == 0 and b.k == 0

    def _connect(self, node: int, a: Lane, b: Lane) -> None:
        points = join((*a.line.points[-1], float(a.line.heading(a.line.length))),
                      (*b.line.points[0], float(b.line.heading(0.0))))
        line = Polyline(points)
        half = self.roads[a.road].lane_width / 2
        # The connector's two ends are the lanes' own end edges, so that they share nodes.
        left = line.offset(line.s, np.full(len(points), half))
        right = line.offset(line.s[::-1], np.full(len(points), -half))
        connector = Lane(len(self.lanes), line, np.concatenate([left, right]), node, node,
                         turn=self._turn(a, b))
        connector.incoming, connector.outgoing = [a.index], [b.index]
        a.outgoing.append(connector.index)
        b.incoming.append(connector.index)
        self.lanes.append(connector)
