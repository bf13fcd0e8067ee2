"""Who is in a scene: road users and objects with a place at every instant, and how they are put into a city."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import numpy as np
import shapely

from . import catalog
from .curves import Polyline, rectangles
from .maps import CityMap

NEARBY = 72.0  # m from the recording car's route within which objects are placed

CYCLES = ('bicycle', 'motorcycle')
PEOPLE = ('adult', 'child', 'construction_worker')


@dataclass
class Actor:
    """One annotated object.

    It either rests at ``place`` (x, y, yaw), or moves along ``line``, ``lateral`` metres to its left, with arc length
    ``s`` at ``times``. ``role``: 'driving', 'waiting', 'parked', 'walking', 'standing', 'sitting' or 'object'.
    """
    kind: str
    size: np.ndarray
    parts: np.ndarray
    role: str
    place: Optional[Tuple[float, float, float]] = None
    line: Optional[Polyline] = None
    times: Optional[np.ndarray] = None
    s: Optional[np.ndarray] = None
    lateral: float = 0.0
    rider: bool = False

    @property
    def category(self) -> str:
        return catalog.KINDS[self.kind].category

    def pose(self, time: float) -> Tuple[float, float, float, float]:
        """x, y (m), yaw (radians) and speed (m/s) at a time in seconds since the scene's start."""
        if self.line is None:
            return (*self.place, 0.0)
        s = float(np.interp(time, self.times, self.s))
        x, y = self.line.offset(s, self.lateral)
        speed = float(np.interp(time + 0.05, self.times, self.s) - np.interp(time - 0.05, self.times, self.s)) / 0.1
        return float(x), float(y), float(self.line.heading(s)), speed

    def attribute(self, speed: float) -> Optional[str]:
        """The nuScenes attribute that fits its role and speed; None for objects without attributes."""
        if self.kind in ('cone', 'barrier', 'debris'):
            return None
        if self.kind in CYCLES:
            return 'cycle.with_rider' if self.rider else 'cycle.without_rider'
        if self.kind in PEOPLE:
            return {'sitting': 'pedestrian.sitting_lying_down'}.get(
                self.role, 'pedestrian.moving' if speed > 0.2 else 'pedestrian.standing')
        if self.role == 'parked':
            return 'vehicle.parked'
        return 'vehicle.moving' if speed > 0.2 else 'vehicle.stopped'


class Placer:
    """Puts objects beside the recording car's route.

    Args:
        city: the map.
        route: (R, 2) points along the recording car's way.
        rng: source of all randomness.
        density: scales the numbers.
    """

    def __init__(self, city: CityMap, route: np.ndarray, rng: np.random.Generator, density: float):
        self.city, self.rng, self.density = city, rng, density
        self.tree = shapely.STRtree(shapely.points(route))
        self.actors: List[Actor] = []
        self.closed: Dict[Tuple[int, float], List[Tuple[float, float]]] = {}

    def near(self, xy, limit: float = NEARBY) -> bool:
        return len(self.tree.query(shapely.points(xy), predicate='dwithin', distance=limit)) > 0

    def rest(self, kind: str, xy, yaw: float, role: str, rider: bool = False) -> Actor:
        size = catalog.sample_size(kind, self.rng)
        actor = Actor(kind, size, catalog.build_parts(kind, size, self.rng, rider), role,
                      place=(float(xy[0]), float(xy[1]), float(yaw)), rider=rider)
        self.actors.append(actor)
        return actor

    def work_zone(self, road_index: int, side: float, start: float) -> None:
        """A construction site at the roadside, about 33 m long: cones, barriers, a machine, a trailer, a truck, workers."""
        road, rng = self.city.network.roads[road_index], self.rng
        kerb = side * road.half_width
        self.closed.setdefault((road_index, side), []).append((start - 3.0, start + 32.0))

        def at(s, beyond):
            return road.centre.offset(s, kerb + side * beyond), float(road.centre.heading(s))

        for i in range(6):
            xy, yaw = at(start + 3.0 * i, -0.35 - min(road.parking, 1.6) + rng.uniform(-0.1, 0.1))
            self.rest('cone', xy, yaw + rng.uniform(-1, 1), 'object')
        for i in range(4):
            xy, yaw = at(start + 2.0 + 3.0 * i, 0.5)
            # A barrier's width is its long side; it stands along the road.
            self.rest('barrier', xy, yaw + np.pi / 2 + rng.uniform(-0.05, 0.05), 'object')
        xy, yaw = at(start + 5.0, 3.2)
        self.rest('construction_vehicle', xy, yaw + (0 if rng.random() < 0.5 else np.pi) + rng.uniform(-0.2, 0.2), 'parked')
        xy, yaw = at(start + 19.0, 2.6)
        self.rest('trailer', xy, yaw + (0 if rng.random() < 0.5 else np.pi) + rng.uniform(-0.04, 0.04), 'parked')
        xy, yaw = at(start + 29.0, 2.2)
        self.rest('truck', xy, yaw + (0 if rng.random() < 0.5 else np.pi) + rng.uniform(-0.04, 0.04), 'parked')
        for low in (10.0, 11.5):
            xy, yaw = at(start + low + rng.uniform(0.0, 0.8), rng.uniform(1.5, 5.0))
            self.rest('construction_worker', xy, rng.uniform(-3, 3), 'standing')

    def bus_stop(self, road_index: int, side: float, s: float) -> None:
        """A bus that waits at the kerb, people on the walkway beside it, and the cycles that they left there."""
        road, rng = self.city.network.roads[road_index], self.rng
        self.closed.setdefault((road_index, side), []).append((s - 13.0, s + 9.0))
        # In the parking strip where there is one, otherwise in a lay-by.
        lateral = side * (road.half_width + (-1.42 if road.parking else 1.7))
        along = (side < 0) == self.city.network.right_hand
        yaw = float(road.centre.heading(s)) + (0.0 if along else np.pi)
        self.rest('bus', road.centre.offset(s, lateral), yaw, 'waiting')
        for offset, kind in ((-9.0, 'motorcycle'), (-10.3, 'bicycle'), (-11.4, 'bicycle'), (9.0, 'motorcycle'),
                             (10.2, 'bicycle')):
            xy = road.centre.offset(s + offset, side * (road.half_width + 1.4))
            self.rest(kind, xy, yaw + np.pi / 2 + rng.uniform(-0.15, 0.15), 'parked')
        for offset in (-4.0, 0.0, 3.0):
            xy = road.centre.offset(s + offset + rng.uniform(-1, 1), side * (road.half_width + rng.uniform(3.4, 4.0)))
            self.rest('adult', xy, rng.uniform(-3, 3), 'sitting' if rng.random() < 0.2 else 'standing')

    def roadside(self) -> None:
        """Vehicles in the parking strips."""
        rng = self.rng
        for road in self.city.network.roads:
            if not road.parking:
                continue
            for side in (-1.0, 1.0):
                for s in np.arange(13.0, road.length - 13.0, 6.6):
                    xy = road.centre.offset(s, side * (road.half_width - 0.35 - road.parking / 2))
                    if rng.random() > 0.32 * self.density or not self.near(xy, 60.0) or self._closed(road.index, side, s):
                        continue
                    if any(carpark.polygon.distance(shapely.Point(xy)) < 3.5 for carpark in self.city.carparks):
                        continue
                    kind = ('car', 'truck', 'motorcycle')[int(np.searchsorted([0.82, 0.93], rng.random()))]
                    # Parked in the direction of the nearest lane, now and then the other way.
                    along = (side < 0) == self.city.network.right_hand
                    yaw = float(road.centre.heading(s)) + (0.0 if along else np.pi) + rng.uniform(-0.03, 0.03)
                    self.rest(kind, xy, yaw + (np.pi if rng.random() < 0.1 else 0.0), 'parked')

    def _closed(self, road: int, side: float, s: float) -> bool:
        return any(low - 4 < s < high + 4 for low, high in self.closed.get((road, side), []))

    def carparks(self) -> None:
        rng = self.rng
        for carpark in self.city.carparks:
            middle = carpark.origin + carpark.u * carpark.size[0] / 2 + carpark.v * carpark.size[1] / 2
            if not self.near(middle, 60.0):
                continue
            for xy, yaw in carpark.bays():
                if rng.random() < 0.4 * self.density:
                    self.rest('car', xy + rng.uniform(-0.15, 0.15, 2), yaw + rng.uniform(-0.05, 0.05)
                              + (np.pi if rng.random() < 0.3 else 0.0), 'parked')
            if rng.random() < 0.3 * self.density:
                self.rest(('trailer', 'construction_vehicle', 'bus')[rng.integers(3)], middle,
                          float(np.arctan2(carpark.u[1], carpark.u[0])) + rng.uniform(-0.05, 0.05), 'parked')

    def walkways(self, times: np.ndarray) -> None:
        """People and parked cycles on the walkways, and people on the crossings."""
        rng = self.rng
        for path in self.city.paths:
            ring = Polyline(np.concatenate([path, path[1:]]))
            loop = ring.length / 2
            for s in np.arange(0.0, loop, 13.0 / max(self.density, 0.05)) + rng.uniform(0, 6):
                if not self.near(ring.position(s), 50.0):
                    continue
                choice = rng.random()
                if choice < 0.12:
                    kind = CYCLES[int(rng.random() < 0.35)]
                    for i in range(int(rng.integers(1, 4))):
                        self.rest(kind, ring.offset(s + 0.9 * i, 1.0), float(ring.heading(s)) + np.pi / 2
                                  + rng.uniform(-0.2, 0.2), 'parked')
                elif choice < 0.52:
                    self._walker(ring, s if rng.random() < 0.5 else s + loop, times)
                elif choice < 0.6:
                    role = 'sitting' if rng.random() < 0.2 else 'standing'
                    self.rest('adult', ring.offset(s, rng.uniform(-1, 1)), rng.uniform(-3, 3), role)
        for crossing in self.city.crossings:
            road = self.city.network.roads[crossing.road]
            middle = (crossing.start + crossing.end) / 2
            if rng.random() < 0.45 * self.density and self.near(road.centre.position(middle), 45.0):
                reach = road.half_width + 3.0
                ends = road.centre.offset(np.full(2, middle + rng.uniform(-1, 1)), np.array([-reach, reach]))
                line = Polyline(np.linspace(*(ends if rng.random() < 0.5 else ends[::-1]), 8))
                self._walker(line, rng.uniform(0, line.length), times)

    def _walker(self, line: Polyline, s: float, times: np.ndarray) -> None:
        rng = self.rng
        kind = 'child' if rng.random() < 0.12 else 'adult'
        size = catalog.sample_size(kind, rng)
        speed = rng.uniform(0.9, 1.7)
        # Around a block both ways: walking backwards along the line is walking forwards along the reversed one.
        if rng.random() < 0.5:
            line, s = Polyline(line.points[::-1]), line.length - s
        track = np.clip(s + speed * times, 0.0, line.length)
        self.actors.append(Actor(kind, size, catalog.build_parts(kind, size, rng), 'walking', line=line, times=times, s=track,
                                 lateral=float(rng.uniform(-0.9, 0.9))))


def footprints(actors: List[Actor], time: float) -> np.ndarray:
    """Shapely polygons of the actors' boxes on the ground at a time."""
    poses = np.array([actor.pose(time)[:3] for actor in actors])
    sizes = np.array([actor.size[:2] for actor in actors])
    return rectangles(poses, sizes)


def without_overlaps(actors: List[Actor], times: np.ndarray, taken: np.ndarray) -> List[Actor]:
    """Drop the later one of any two actors whose boxes ever meet, and those that meet ``taken`` (fixed shapely polygons)."""
    if not actors:
        return actors
    bad = np.zeros(len(actors), bool)
    fixed = shapely.STRtree(taken)
    meetings = set()
    for time in times:
        shapes = footprints(actors, float(time))
        bad[fixed.query(shapes, predicate='intersects')[0]] = True
        first, second = shapely.STRtree(shapes).query(shapes, predicate='intersects')
        meetings.update((int(a), int(b)) for a, b in zip(first, second) if a < b)
    for a, b in sorted(meetings):
        if not bad[a]:
            bad[b] = True
    return [actor for actor, drop in zip(actors, bad) if not drop]
