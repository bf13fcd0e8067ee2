import numpy as np
import pytest
import shapely
from shapely.ops import unary_union

from mmdet3d_ext.datasets.synthetic import ground, map_json
from mmdet3d_ext.datasets.synthetic.curves import rectangles
from mmdet3d_ext.datasets.synthetic.maps import build_city
from mmdet3d_ext.datasets.synthetic.roads import RoadNetwork


@pytest.fixture(scope='module')
def city():
    return build_city('boston-seaport', 3, 2)


@pytest.fixture(scope='module')
def material(city):
    return ground.paint(city)


@pytest.mark.parametrize('blocks', [2, 3, 5])
def test_networks_of_many_seeds_are_sound(blocks):
    for seed in range(25):
        network = RoadNetwork(np.random.default_rng(seed), blocks, right_hand=bool(seed % 2))
        assert min(road.length for road in network.roads) > 35
        assert min(len(roads) for roads in network.at_node.values()) >= 2
        for lane in network.lanes:
            assert lane.outgoing and lane.incoming
            following = network.lanes[lane.outgoing[0]]
            assert np.allclose(lane.line.points[-1], following.line.points[0], atol=1e-9)
            # No kinks where a lane goes over into the next one.
            turn = lane.line.heading(lane.line.length) - following.line.heading(0.0)
            assert abs((turn + np.pi) % (2 * np.pi) - np.pi) < 0.12


@pytest.mark.parametrize('right_hand', [True, False])
def test_traffic_keeps_to_its_side(right_hand):
    network = RoadNetwork(np.random.default_rng(1), 2, right_hand)
    for lane in network.lanes:
        if lane.road is None:
            continue
        middle = lane.line.length / 2
        heading = lane.line.heading(middle)
        left = np.array([-np.sin(heading), np.cos(heading)])
        road = network.roads[lane.road]
        nearest = road.centre.points[np.argmin(np.hypot(*(road.centre.points - lane.line.position(middle)).T))]
        # In right-hand traffic the middle of the road lies to the driver's left.
        assert ((nearest - lane.line.position(middle)) @ left > 0) == right_hand


def test_lanes_stay_on_the_drivable_area(city):
    area = unary_union(city.drivable).buffer(0.05)
    for lane in city.network.lanes:
        points = lane.line.points
        # A lane may pass the refuge island in the median at most with its inner edge, never with its middle.
        assert area.contains(shapely.multipoints(points))


def test_layers_relate_as_on_a_street(city):
    streets = unary_union(city.road_polygons + city.junction_polygons).buffer(0.05)
    drivable, walkways = unary_union(city.drivable), unary_union(city.walkways)
    for crossing in city.crossings:
        assert streets.contains(crossing.polygon) and crossing.polygon.area > 30
    for stop in city.stop_lines:
        assert streets.contains(stop.polygon)
        assert stop.polygon.area == pytest.approx(1.6 * (3.3 if city.network.roads[stop.road].lanes == 1 else 6.7), rel=0.1)
    for divider in city.dividers:
        assert streets.contains(shapely.linestrings(divider.points))
        assert not any(c.polygon.intersects(shapely.linestrings(divider.points)) for c in city.crossings)
    assert drivable.intersection(walkways).area < 0.002 * walkways.area
    for carpark in city.carparks:
        assert drivable.buffer(0.02).contains(carpark.polygon)
    assert len(city.drivable) >= 2 and city.drivable[0].interiors
    solids = rectangles(np.array([[*s.xyz[:2], s.yaw] for s in city.solids if s.kind == 'building']),
                        np.array([s.size[:2] for s in city.solids if s.kind == 'building']))
    assert len(solids) > 50
    assert not shapely.intersects(solids, unary_union([drivable, walkways])).any()
    assert len(shapely.STRtree(solids).query(solids, predicate='intersects')[0]) == len(solids)  # each meets itself only


def test_paint_agrees_with_geometry(city, material):
    """The raster against point-in-polygon tests, away from borders (a cell is 0.1 m)."""
    rng = np.random.default_rng(0)
    xy = rng.uniform([60, 60], np.array(city.canvas) - 60, (8000, 2))
    points = shapely.points(xy)
    found = np.array(ground.NAMES)[ground.Ground(material, []).material_at(xy)]
    drivable, walkways = unary_union(city.drivable), unary_union(city.walkways)
    crossings, stops = unary_union([c.polygon for c in city.crossings]), unary_union([s.polygon for s in city.stop_lines])
    for area, names in ((drivable, {'asphalt', 'carpark', 'line', 'centre', 'zebra', 'zebra_gap', 'stop'}),
                        (walkways, {'walkway', 'kerb'}), (crossings, {'zebra', 'zebra_gap'}), (stops, {'stop'})):
        shrunk, grown = shapely.buffer(area, -0.15), shapely.buffer(area, 0.15)
        shapely.prepare([shrunk, grown])
        inside = shapely.contains(shrunk, points)
        assert inside.sum() > 5
        assert set(found[inside]) <= names
        outside = ~shapely.contains(grown, points)
        assert not set(found[outside]) & (names - {'kerb', 'line'})
    # Dividers are the only yellow lines, and each has one.
    lines = unary_union([shapely.linestrings(d.points) for d in city.dividers if d.kind == 'road'])
    yellow = np.argwhere(material == ground.INDEX['centre'])[::50, ::-1] * ground.CELL + 0.05
    assert shapely.distance(lines, shapely.points(yellow)).max() < 0.6
    for divider in city.dividers:
        if divider.kind == 'road' and divider.style.startswith('SINGLE'):
            along = ground.Ground(material, []).material_at(divider.points[1:-1])
            assert (along == ground.INDEX['centre']).all()


def test_material_outside_of_the_map_is_grass(material):
    xy = np.array([[-5.0, 10.0], [1e5, 1e5], [10.0, -0.01]])
    assert (ground.Ground(material, []).material_at(xy) == ground.INDEX['grass']).all()


def test_images_of_the_map(city, material):
    prior = ground.semantic_prior(city)
    assert prior.shape == material.shape and set(np.unique(prior)) == {0, 255}
    x, y = city.network.roads[0].centre.position(10.0)
    assert prior[-1 - int(y / ground.CELL), int(x / ground.CELL)] == 255  # north is up
    levels = ground.texture(material, np.random.default_rng(0))
    assert [level.shape[0] for level in levels] == [material.shape[0] // 4 ** i for i in range(3)]
    asphalt, stop = (levels[0][material == ground.INDEX[name]].mean() for name in ('asphalt', 'stop'))
    assert 65 < asphalt < 90 and stop > 200


def test_everything_follows_from_the_seed(city):
    again, other = build_city('boston-seaport', 3, 2), build_city('boston-seaport', 4, 2)
    assert map_json.expansion_tables(again, 3) == map_json.expansion_tables(city, 3)
    assert map_json.expansion_tables(other, 3)['node'] != map_json.expansion_tables(city, 3)['node']
    assert build_city('singapore-onenorth', 3, 2).canvas != city.canvas


def test_tables_refer_to_existing_records(city):
    tables = map_json.expansion_tables(city, 3)
    tokens = {layer: {row['token'] for row in rows} for layer, rows in tables.items()
              if isinstance(rows, list) and layer != 'canvas_edge'}
    every = [token for found in tokens.values() for token in found]
    assert len(every) == len(set(every))
    assert all(len(rows) == len(tokens[layer]) for layer, rows in tables.items() if layer in tokens)
    for layer in ('road_block', 'lane'):
        for row in tables[layer]:
            assert {row['from_edge_line_token'], row['to_edge_line_token']} <= tokens['line']
    for row in tables['stop_line']:
        assert set(row['ped_crossing_tokens']) <= tokens['ped_crossing']
        assert set(row['traffic_light_tokens']) <= tokens['traffic_light']
        assert row['road_block_token'] in tokens['road_block']
    for layer, kind in (('ped_crossing', 'road_segment'), ('road_divider', 'road_segment')):
        assert {row['road_segment_token'] for row in tables[layer]} <= tokens[kind]
    assert {row['road_block_token'] for row in tables['carpark_area']} - {''} <= tokens['road_block']
    assert {row['from_road_block_token'] for row in tables['traffic_light']} <= tokens['road_block']
    for row in tables['polygon']:
        assert len(row['exterior_node_tokens']) >= 3
        assert set(row['exterior_node_tokens']).union(*(h['node_tokens'] for h in row['holes'])) <= tokens['node']
    for row in tables['lane_divider']:
        assert [p['node_token'] for p in row['lane_divider_segments']] == \
            next(line['node_tokens'] for line in tables['line'] if line['token'] == row['line_token'])
    assert any(row['left_lane_divider_segments'] for row in tables['lane'])
    assert set(tables['connectivity']) == set(tables['arcline_path_3']) == tokens['lane'] | tokens['lane_connector']
