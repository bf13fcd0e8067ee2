"""One scene: the recording car's drive, everybody around it, and the boxes that sensors see at any instant."""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, Tuple

import numpy as np
import shapely

from . import catalog, schema
from .actors import NEARBY, Actor, Placer, footprints, without_overlaps
from .config import GeneratorConfig
from .curves import rectangles
from .maps import CityMap, Solid
from .traffic import Driver, Signals, make_route, simulate

EGO_SIZE = (4.08, 1.73)  # m, length and width
EGO_CENTRE = 1.4  # m from the rear axle (the ego frame's origin) to the car's middle
WARM_UP = 4.0  # s of traffic before the scene starts
VIEW = 120.0  # m from the route within which background is kept

# Kinds of the vehicles that start nearest to the recording car, so that each scene has them; the others are drawn by lot.
NEAREST = ('car', 'bicycle', 'motorcycle', 'truck', 'bus', 'car', 'bicycle', 'motorcycle')
MIX = (('car', 0.66), ('truck', 0.1), ('bus', 0.06), ('motorcycle', 0.08), ('bicycle', 0.07), ('trailer', 0.03))


@dataclass
class Boxes:
    """Upright boxes at one instant (M rows): centre and half size (m), yaw (radians), looks, and whose they are.

    ``owner`` (M,) counts actors first, then background; ``hull_*`` (O rows) are the owners' own boxes.
    """
    centre: np.ndarray
    half: np.ndarray
    yaw: np.ndarray
    colour: np.ndarray
    intensity: np.ndarray
    pattern: np.ndarray
    owner: np.ndarray
    starts: np.ndarray
    hull_centre: np.ndarray
    hull_half: np.ndarray
    hull_yaw: np.ndarray
    actors: int


class Scene:
    """The world of one scene; the same arguments give the same world.

    Attributes:
        actors: annotated objects.
        light: brightness factor of the scene; haze: per-metre fading.
    """

    def __init__(self, name: str, city: CityMap, config: GeneratorConfig):
        self.name, self.city = name, city
        self.duration = (config.samples_per_scene - 1) * schema.KEY_INTERVAL
        rng = np.random.default_rng([config.seed, 13, *name.encode()])
        self.light = float(rng.uniform(0.82, 1.1))
        self.tint = rng.uniform(0.95, 1.05, 3)
        self.haze = float(rng.uniform(0.0015, 0.004))
        self.sun = float(rng.uniform(0, 2 * np.pi))
        network = city.network
        lanes = [lane for lane in network.lanes if lane.road is not None]
        start_lane = lanes[int(rng.integers(len(lanes)))]
        cruise = float(rng.uniform(7.0, 11.0))
        begin = float(rng.uniform(6.0, 0.25 * start_lane.line.length))
        route = make_route(network, start_lane.index, begin, cruise * (self.duration + WARM_UP) + 60.0, rng, straight=0.5)
        self.ego = Driver(route, EGO_CENTRE, cruise * 0.8, cruise, *EGO_SIZE)
        # Simulation starts before the scene; the route's first metres are driven then.
        track = route.line.position(route.line.stations(0.0, cruise * (self.duration + WARM_UP) + 10.0, 2.0))
        placer = Placer(city, track, rng, config.density)
        self._zones(placer, route, cruise, rng)
        sites, placer.actors = placer.actors, []
        placer.roadside()
        placer.carparks()
        resting = placer.actors
        drivers, kinds = self._traffic(placer, start_lane.index, rng, config.density)
        green = {node: road for s, node, road in route.stops if rng.random() < 0.9}
        signals = Signals(network, {light.node for light in city.lights}, rng, green)
        blocking = [actor.place[:2] for actor in sites]
        self.times = simulate([self.ego, *drivers], signals, -WARM_UP, self.duration + 0.2, np.array(blocking))
        self.ego_s = np.array(self.ego.history)
        moving = self._drivers_as_actors(drivers, kinds, rng)
        placer.actors = []
        placer.walkways(self.times)
        solids = self._clear_of(sites)
        self.actors = self._settle(sites, resting + moving + placer.actors, solids)
        self._prepare(track, solids)

    def _zones(self, placer: Placer, route, cruise: float, rng) -> None:
        """Construction sites along the way: one near the start, others further on now and then."""
        network = self.city.network
        # Where the car will be when the scene starts.
        origin = cruise * 0.9 * WARM_UP
        seen = set()
        for s in np.arange(origin + 4.0, route.line.length - 10.0, 6.0):
            xy = route.line.position(s)
            for road in network.roads:
                if road.index in seen:
                    continue
                distance = np.hypot(*(road.centre.points - xy).T)
                nearest = int(distance.argmin())
                along = float(road.centre.s[nearest])
                if distance[nearest] > 7.0 or not 4.0 < along < road.length - 4.0:
                    continue
                seen.add(road.index)
                if len(seen) > 1 and rng.random() < 0.5:
                    continue
                begin = float(np.clip(along + rng.uniform(-8.0, 6.0), 9.0, max(9.0, road.length - 35.0)))
                side = 1.0 if rng.random() < 0.5 else -1.0
                placer.work_zone(road.index, side, begin)
                placer.bus_stop(road.index, -side, float(np.clip(along + 8.0, 15.0, max(15.0, road.length - 15.0))))

    def _traffic(self, placer: Placer, own_lane: int, rng, density: float) -> Tuple[List[Driver], List[str]]:
        network, spots = self.city.network, []
        own = self.ego.route.line.position(0.0)
        for lane in network.lanes:
            if lane.road is None:
                continue
            s = rng.uniform(6.0, 20.0)
            while s < lane.line.length - 6.0:
                xy = lane.line.position(s)
                if placer.near(xy, NEARBY) and (lane.index != own_lane or np.hypot(*(xy - own)) > 14.0):
                    spots.append((float(np.hypot(*(xy - own))), lane.index, float(s)))
                s += 14.0 + rng.exponential(20.0 / max(density, 0.05))
        drivers, kinds = [], []
        for rank, (_, lane, s) in enumerate(sorted(spots)):
            kind = NEAREST[rank] if rank < len(NEAREST) else \
                MIX[int(np.searchsorted(np.cumsum([share for _, share in MIX])[:-1], rng.random()))][0]
            length, width, _ = catalog.KINDS[kind].size
            cruise = float(rng.uniform(3.5, 5.5) if kind == 'bicycle' else rng.uniform(5.5, 10.0))
            tow = kind == 'trailer'
            route = make_route(network, lane, s, 11.0 * (self.duration + WARM_UP) + 50.0, rng, rear=12.0 if tow else 0.0)
            begin = min(s, 12.0) if tow else 0.0
            lateral = float(rng.uniform(-0.25, 0.25))
            drivers.append(Driver(route, begin, cruise * 0.7, cruise, 7.0 if tow else length, width, lateral))
            kinds.append(kind)
        return drivers, kinds

    def _drivers_as_actors(self, drivers: List[Driver], kinds: List[str], rng) -> List[Actor]:
        actors = []

        def add(kind, driver, s, rider=False):
            size = catalog.sample_size(kind, rng)
            parts = catalog.build_parts(kind, size, rng, rider)
            actors.append(Actor(kind, size, parts, 'driving', line=driver.route.line, times=self.times, s=s,
                                lateral=driver.lateral, rider=rider))
            return size

        for driver, kind in zip(drivers, kinds):
            s = np.array(driver.history)
            if kind != 'trailer':
                add(kind, driver, s, rider=kind in ('bicycle', 'motorcycle'))
                continue
            truck = add('truck', driver, s)
            size = catalog.sample_size('trailer', rng)
            gap = truck[0] / 2 + size[0] / 2 + 0.7
            if s[0] - gap < 0.0:  # no room for the trailer behind the truck's start
                continue
            actors.append(Actor('trailer', size, catalog.build_parts('trailer', size, rng), 'driving',
                                line=driver.route.line, times=self.times, s=s - gap, lateral=driver.lateral))
        return actors

    def _clear_of(self, sites: List[Actor]) -> List[Solid]:
        """The map's buildings and poles without those that stand where this scene has a construction site."""
        areas = shapely.STRtree(shapely.buffer(footprints(sites, 0.0), 0.5)) if sites else None
        if areas is None:
            return list(self.city.solids)
        shapes = rectangles(np.array([[*s.xyz[:2], s.yaw] for s in self.city.solids]),
                            np.array([s.size[:2] for s in self.city.solids]))
        hit = set(areas.query(shapes, predicate='intersects')[0].tolist())
        return [solid for i, solid in enumerate(self.city.solids) if i not in hit]

    def _settle(self, sites: List[Actor], others: List[Actor], solids: List[Solid]) -> List[Actor]:
        """Drop what runs into the recording car, into buildings or into each other; sites go first."""
        times = np.arange(0.0, self.duration + 1e-6, schema.KEY_INTERVAL)
        taken = rectangles(np.array([[*s.xyz[:2], s.yaw] for s in solids]), np.array([s.size[:2] for s in solids]))
        return without_overlaps([_EgoFootprint(self), *sites, *others], times, taken)[1:]

    def ego_place(self, time: float) -> Tuple[float, float, float]:
        """x, y and yaw of the ego frame (rear axle) at a time in seconds."""
        s = float(np.interp(time, self.times, self.ego_s)) - EGO_CENTRE
        x, y = self.ego.route.line.position(s)
        return float(x), float(y), float(self.ego.route.line.heading(s))

    def ego_pose(self, time: float) -> Tuple[np.ndarray, np.ndarray]:
        """Rotation (3, 3) and translation (3,) global_from_ego; the body pitches and rolls by a fraction of a degree."""
        x, y, yaw = self.ego_place(time)
        pitch, roll = 0.003 * np.sin(1.7 * time + self.sun), 0.004 * np.sin(1.1 * time + 2 * self.sun)
        return rotation(yaw, pitch, roll), np.array([x, y, 0.0])

    def _prepare(self, track: np.ndarray, solids: List[Solid]) -> None:
        solids = [solid for solid in solids
                  if np.min(np.hypot(*(track - solid.xyz[:2]).T)) < VIEW + max(solid.size[:2])]
        looks = [actor.parts for actor in self.actors] + [catalog.build_solid(s.kind, s.size, s.tone) for s in solids]
        self._parts = np.concatenate(looks)
        counts = np.array([len(look) for look in looks])
        self._owner = np.repeat(np.arange(len(looks)), counts)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._solid_places = np.array([[*s.xyz[:2], s.yaw] for s in solids]).reshape(-1, 3)
        self._sizes = np.array([actor.size for actor in self.actors] + [s.size for s in solids], float)

    def boxes(self, time: float) -> Boxes:
        """Everything that stands on the ground at a time."""
        poses = np.array([actor.pose(time)[:3] for actor in self.actors]).reshape(-1, 3)
        poses = np.concatenate([poses, self._solid_places])
        local, owner = self._parts['centre'], self._owner
        c, s = np.cos(poses[owner, 2]), np.sin(poses[owner, 2])
        centre = np.stack([poses[owner, 0] + c * local[:, 0] - s * local[:, 1],
                           poses[owner, 1] + s * local[:, 0] + c * local[:, 1], local[:, 2]], axis=1)
        hull = np.concatenate([poses[:, :2], self._sizes[:, 2:] / 2], axis=1)
        return Boxes(centre, self._parts['size'] / 2, poses[owner, 2], self._parts['colour'], self._parts['intensity'],
                     self._parts['pattern'], owner, self._starts, hull, self._sizes / 2, poses[:, 2], len(self.actors))


class _EgoFootprint:
    """The recording car among the actors while overlaps are removed (a little larger than it is)."""

    def __init__(self, scene: Scene):
        self.size, self._scene = np.array([EGO_SIZE[0] + 0.6, EGO_SIZE[1] + 0.4]), scene

    def pose(self, time: float):
        x, y, yaw = self._scene.ego_place(time)
        return x + EGO_CENTRE * np.cos(yaw), y + EGO_CENTRE * np.sin(yaw), yaw, 0.0


def rotation(yaw: float, pitch: float = 0.0, roll: float = 0.0) -> np.ndarray:
    """Rotation matrix Rz(yaw) Ry(pitch) Rx(roll): with x forward, y left, z up a positive pitch looks down."""
    cy, sy, cp, sp, cr, sr = np.cos(yaw), np.sin(yaw), np.cos(pitch), np.sin(pitch), np.cos(roll), np.sin(roll)
    return np.array([[cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr],
                     [sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr],
                     [-sp, cp * sr, cp * cr]])
