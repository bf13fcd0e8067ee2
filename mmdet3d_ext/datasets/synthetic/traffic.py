"""How traffic moves: vehicles follow routes over the lane graph, keep their distance and stop at red lights.

Everything is simulated once per scene on a fixed time grid; sensors interpolate, so any instant can be rendered alone.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional, Tuple

import numpy as np

from .curves import Polyline
from .roads import RoadNetwork

STEP = 0.1  # s
LOOK_AHEAD = 32  # m
CYCLE = 16.0  # s, of a traffic light


@dataclass
class Route:
    """A path over lanes and connectors, and the stop positions on it: (arc length, junction, road that one comes from)."""
    line: Polyline
    stops: List[Tuple[float, int, int]]


def make_route(network: RoadNetwork, lane: int, start: float, length: float, rng: np.random.Generator,
               straight: float = 0.6, rear: float = 0.0) -> Route:
    """A random drive that begins at arc length ``start`` of a lane and is at least ``length`` metres long.

    ``straight`` is the probability of preferring the mildest turn at each junction; ``rear`` metres of the lane before
    ``start`` are included (for what is towed).
    """
    current = network.lanes[lane]
    start = max(start - rear, 0.0)
    pieces, stops, total = [current.line.position(current.line.stations(start, current.line.length, 1.0))], [], 0.0
    total = current.line.length - start
    while total < length:
        options = [network.lanes[i] for i in current.outgoing]
        if rng.random() < straight:
            connector = min(options, key=lambda option: abs(option.turn))
        else:
            connector = options[int(rng.integers(len(options)))]
        stops.append((total, connector.start_node, current.road))
        current = network.lanes[connector.outgoing[0]]
        for line in (connector.line, current.line):
            pieces.append(line.position(line.stations(0.0, line.length, 1.0))[1:])
            total += line.length
    return Route(Polyline(np.concatenate(pieces)), stops)


@dataclass
class Driver:
    """One simulated road user.

    Attributes:
        route: where it goes.
        s, speed: arc length of its middle (m) and speed (m/s) at the simulation's start; updated while running.
        cruise: the speed it would like to drive at.
        length, width: metres.
        lateral: constant offset to the left of the route.
    """
    route: Route
    s: float
    speed: float
    cruise: float
    length: float
    width: float
    lateral: float = 0.0
    history: List[float] = field(default_factory=list)


class Signals:
    """Which roads have green: at each junction two groups of roads (by direction) take turns.

    Args:
        green: junction -> road that stays green throughout (the recording car's way), for a part of its junctions.
    """

    def __init__(self, network: RoadNetwork, signalled, rng: np.random.Generator, green=None):
        self.signalled = set(signalled)
        self.phase = {node: float(rng.uniform(0, CYCLE)) for node in range(len(network.nodes))}
        self.axis = {}
        for node, roads in network.at_node.items():
            reference = roads[0].outward(node)
            for road in roads:
                self.axis[node, road.index] = int(abs(np.cos(road.outward(node) - reference)) < 0.7)
        self.forced = {node: self.axis[node, road] for node, road in (green or {}).items()}

    def is_green(self, node: int, road: int, time: float) -> bool:
        if node not in self.signalled:
            return True
        axis = self.axis[node, road]
        if node in self.forced:
            return axis == self.forced[node]
        moment = (time + self.phase[node]) % CYCLE
        # The last two seconds of each half are red for both (clearing the junction).
        return (moment < CYCLE / 2 - 2.0) if axis == 0 else (CYCLE / 2 <= moment < CYCLE - 2.0)


def simulate(drivers: List[Driver], signals: Signals, start: float, end: float,
             obstacles: Optional[np.ndarray] = None) -> np.ndarray:
    """Run the traffic from ``start`` to ``end`` seconds and fill each driver's ``history`` of arc lengths.

    ``obstacles`` (O, 2): fixed positions that drivers must not run into (they stop before). Returns the times (T,).
    """
    times = np.arange(int(round((end - start) / STEP)) + 1) * STEP + start
    if not drivers:
        return times
    ahead = np.arange(0.0, LOOK_AHEAD, 1.0)
    fixed = np.zeros((0, 2)) if obstacles is None else np.asarray(obstacles, float).reshape(-1, 2)
    half = np.array([d.length / 2 for d in drivers])
    # How far beside the path something must stand not to be in the way: others have a width, obstacles are narrow.
    margin = np.concatenate([np.full(len(drivers), 1.0), np.full(len(fixed), 0.4)])
    for time in times:
        for d in drivers:
            d.history.append(d.s)
        here = np.stack([d.route.line.offset(d.s, d.lateral) for d in drivers])
        targets = np.concatenate([here, fixed])
        reach = np.concatenate([half, np.full(len(fixed), 0.8)])
        accelerations = []
        for i, d in enumerate(drivers):
            path = d.route.line.offset(d.s + d.length / 2 + ahead, np.full(len(ahead), d.lateral))
            near = np.hypot(*(targets - here[i]).T) < LOOK_AHEAD + d.length
            near[i] = False
            gap, lead_speed = np.inf, 0.0
            index = np.flatnonzero(near)
            if len(index):
                distance = np.hypot(path[None, :, 0] - targets[index, None, 0], path[None, :, 1] - targets[index, None, 1])
                hit = distance < d.width / 2 + margin[index, None]
                blocked = hit.any(axis=1)
                if blocked.any():
                    first = np.where(blocked, hit.argmax(axis=1), 10 ** 6) - reach[index]
                    closest = int(np.argmin(first))
                    gap = float(first[closest])
                    j = index[closest]
                    lead_speed = drivers[j].speed if j < len(drivers) else 0.0
            for s, node, road in d.route.stops:
                room = s - (d.s + d.length / 2) - 7.5
                if -2.0 < room < LOOK_AHEAD and not signals.is_green(node, road, time):
                    if room < gap:
                        gap, lead_speed = room, 0.0
            accelerations.append(_follow(d.speed, d.cruise, gap, lead_speed))
        for d, acceleration in zip(drivers, accelerations):
            new_speed = max(0.0, d.speed + acceleration * STEP)
            d.s = min(d.s + 0.5 * (d.speed + new_speed) * STEP, d.route.line.length)
            d.speed = new_speed
    return times


def _follow(speed: float, cruise: float, gap: float, lead_speed: float) -> float:
    """Acceleration by the intelligent driver model (Treiber, Hennecke, Helbing 2000), m/s^2, limited to [-7, 2]."""
    free = 1.0 - (speed / cruise) ** 4
    if not np.isfinite(gap):
        return float(2.0 * free)
    wanted = 2.0 + max(0.0, speed * 1.0 + speed * (speed - lead_speed) / (2 * np.sqrt(2.0 * 3.0)))
    return float(np.clip(2.0 * (free - (wanted / max(gap, 0.3)) ** 2), -7.0, 2.0))
