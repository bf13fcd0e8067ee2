import numpy as np
import pytest
import shapely
from shapely.ops import unary_union

from mmdet3d_ext.datasets.synthetic import maps
from mmdet3d_ext.datasets.synthetic.actors import footprints
from mmdet3d_ext.datasets.synthetic.config import resolve
from mmdet3d_ext.datasets.synthetic.curves import Polyline, rectangles
from mmdet3d_ext.datasets.synthetic.traffic import STEP, Driver, Route, Signals, simulate
from mmdet3d_ext.datasets.synthetic.world import EGO_CENTRE, EGO_SIZE, Scene


def ego_shape(scene, time):
    x, y, yaw = scene.ego_place(time)
    return rectangles(np.array([[x + EGO_CENTRE * np.cos(yaw), y + EGO_CENTRE * np.sin(yaw), yaw]]), np.array([EGO_SIZE]))[0]


def test_nothing_overlaps(scene):
    for time in np.arange(0, scene.duration + 1e-6, 0.5):
        shapes = footprints(scene.actors, time)
        first, second = shapely.STRtree(shapes).query(shapes, predicate='intersects')
        assert (first == second).all()
        assert not shapely.intersects(shapes, ego_shape(scene, time)).any()
    buildings = [s for s in scene.city.solids if s.kind == 'building']
    walls = unary_union(rectangles(np.array([[*s.xyz[:2], s.yaw] for s in buildings]),
                                   np.array([s.size[:2] for s in buildings])))
    away = [a for a in scene.actors if a.kind not in ('trailer', 'construction_vehicle', 'truck', 'bus', 'construction_worker')]
    assert not shapely.intersects(footprints(away, 0.0), walls).any()


def test_ego_drives_on_the_street(scene):
    streets = unary_union(scene.city.road_polygons + scene.city.junction_polygons)
    for time in np.arange(0, scene.duration, 0.25):
        assert streets.contains(ego_shape(scene, time).centroid)
    start, end = scene.ego_place(0.0), scene.ego_place(scene.duration)
    assert np.hypot(end[0] - start[0], end[1] - start[1]) > 5


def test_all_kinds_near_the_start_for_many_seeds():
    wanted = {'car', 'truck', 'bus', 'trailer', 'construction_vehicle', 'motorcycle', 'bicycle', 'cone', 'barrier'}
    for seed in range(4):
        config = resolve('tiny', seed=seed)
        for location in ('boston-seaport', 'singapore-onenorth'):
            scene = Scene('scene-0103', maps.build_city(location, seed, 2), config)
            x, y, _ = scene.ego_place(0.5)
            poses = np.array([actor.pose(0.5)[:2] for actor in scene.actors])
            near = np.hypot(*(poses - [x, y]).T)
            kinds = {actor.kind for actor, distance in zip(scene.actors, near) if distance < 40}
            assert wanted <= kinds, (seed, location, wanted - kinds)
            assert kinds & {'adult', 'child', 'construction_worker'}


def test_scene_follows_from_name_and_seed(boston):
    city, _, config = boston
    a, b = (Scene('scene-0103', city, config).boxes(1.0) for _ in range(2))
    assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ('centre', 'yaw', 'colour', 'hull_half'))
    other = Scene('scene-0916', city, config)
    assert other.ego_place(0.0) != Scene('scene-0103', city, config).ego_place(0.0)


def test_boxes_move_with_time(scene):
    before, after = scene.boxes(0.0), scene.boxes(1.0)
    step = np.hypot(*(after.hull_centre - before.hull_centre)[:, :2].T)
    assert (step[before.actors:] == 0).all()  # background
    speeds = np.array([actor.pose(0.5)[3] for actor in scene.actors])
    assert (step[:before.actors][speeds > 4] > 2.5).all() and (speeds > 4).sum() >= 3
    parked = [actor.role == 'parked' for actor in scene.actors]
    assert (step[:before.actors][parked] == 0).all()


def test_density_scales_the_numbers(boston):
    city, _, config = boston
    counts = [len(Scene('scene-0103', city, resolve('tiny', density=density)).actors) for density in (0.0, 1.0, 2.0)]
    assert counts[0] < counts[1] < counts[2] and counts[0] > 10  # the sites along the way stay


def driver(s, speed=8.0, cruise=8.0):
    return Driver(Route(Polyline(np.linspace([0, 0], [400, 0], 401)), [(100.0, 0, 0)]), s, speed, cruise, 4.5, 1.9)


class Light:
    def __init__(self, green):
        self.green = green

    def is_green(self, node, road, time):
        return self.green


def test_drivers_stop_at_red_and_queue_up():
    drivers = [driver(50), driver(30), driver(5, cruise=10)]
    times = simulate(drivers, Light(False), 0.0, 30.0)
    tracks = np.array([d.history for d in drivers])
    assert tracks.shape == (3, len(times)) and np.isclose(times[1] - times[0], STEP)
    assert (np.diff(tracks, axis=1) >= 0).all()
    assert drivers[0].speed < 0.1 and 85 < drivers[0].s < 100  # before the junction at 100 m
    assert (tracks[:-1] - tracks[1:] > 4.6).all()  # no one drives into the one in front
    assert drivers[2].speed < 0.1


def test_drivers_pass_at_green():
    single = driver(50)
    simulate([single], Light(True), 0.0, 15.0)
    assert single.s == pytest.approx(50 + 8 * 15.1, abs=3) and single.speed == pytest.approx(8, abs=0.1)


def test_drivers_stop_for_obstacles():
    single = driver(10)
    simulate([single], Light(True), 0.0, 20.0, np.array([[60.0, 0.3]]))
    assert single.speed < 0.1 and 48 < single.s < 60 - 2.25
    beside = driver(10)
    simulate([beside], Light(True), 0.0, 20.0, np.array([[60.0, 6.0]]))
    assert beside.s > 120


def test_signals_never_give_green_to_crossing_roads(boston):
    network = boston[0].network
    nodes = [node for node, roads in network.at_node.items() if len(roads) >= 3]
    signals = Signals(network, nodes, np.random.default_rng(0))
    changes = 0
    for node in nodes:
        roads = network.at_node[node]
        states = np.array([[signals.is_green(node, road.index, t) for road in roads] for t in np.arange(0, 40, 0.5)])
        axes = np.array([signals.axis[node, road.index] for road in roads])
        assert set(axes) == {0, 1}
        assert not (states[:, axes == 0].any(1) & states[:, axes == 1].any(1)).any()
        changes += np.abs(np.diff(states.astype(int), axis=0)).sum()
    assert changes > 0
