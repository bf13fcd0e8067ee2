"""The unmodified nuscenes-devkit loads, renders and evaluates the synthetic data set."""
import json

import matplotlib
import numpy as np
import pytest
from nuscenes.eval.detection.config import config_factory
from nuscenes.eval.detection.evaluate import NuScenesEval
from nuscenes.eval.detection.utils import category_to_detection_name, detection_name_to_rel_attributes
from nuscenes.map_expansion.arcline_path_utils import discretize_lane
from nuscenes.map_expansion.bitmap import BitMap
from nuscenes.map_expansion.map_api import NuScenesMap
from nuscenes.nuscenes import NuScenes
from nuscenes.utils import splits
from nuscenes.utils.data_classes import LidarPointCloud, RadarPointCloud
from nuscenes.utils.geometry_utils import points_in_box
from PIL import Image
from shapely.geometry import Point

from mmdet3d_ext.datasets.nuscenes_schema import OBJECT_CLASSES
from mmdet3d_ext.datasets.synthetic import schema

matplotlib.use('Agg')

LAYERS = ['drivable_area', 'ped_crossing', 'walkway', 'stop_line', 'carpark_area', 'road_divider', 'lane_divider']


@pytest.fixture(scope='module')
def nusc(synthetic_root):
    return NuScenes('v1.0-mini', str(synthetic_root), verbose=False)


@pytest.fixture(scope='module')
def city(synthetic_root):
    return {name: NuScenesMap(str(synthetic_root), name) for name in schema.LOCATIONS}


def test_all_tables_and_both_splits(nusc):
    names = {scene['name'] for scene in nusc.scene}
    assert names & set(splits.mini_train) and names & set(splits.mini_val)
    assert names <= set(splits.mini_train) | set(splits.mini_val)
    assert len(nusc.category) == 23 and len(nusc.attribute) == 8 and len(nusc.visibility) == 4
    assert len(nusc.sensor) == 12 and len(nusc.map) == 4
    for sample in nusc.sample:
        assert set(sample['data']) == set(schema.RIG)


def test_chains(nusc):
    for table, first, last, count in (('scene', 'first_sample_token', 'last_sample_token', 'nbr_samples'),
                                      ('instance', 'first_annotation_token', 'last_annotation_token', 'nbr_annotations')):
        chained = 'sample' if table == 'scene' else 'sample_annotation'
        for record in getattr(nusc, table):
            token, previous, steps = record[first], '', 0
            while token:
                row = nusc.get(chained, token)
                assert row['prev'] == previous
                previous, token, steps = token, row['next'], steps + 1
            assert previous == record[last] and steps == record[count]
    for scene in nusc.scene:
        sample = nusc.get('sample', scene['first_sample_token'])
        for channel, token in sample['data'].items():
            stamps, keys = [], 0
            assert nusc.get('sample_data', token)['prev'] == ''
            while token:
                row = nusc.get('sample_data', token)
                assert row['channel'] == channel
                stamps.append(row['timestamp'])
                keys += row['is_key_frame']
                token = row['next']
            assert keys == scene['nbr_samples'] and stamps == sorted(set(stamps))
            sweeps = {'camera': 0, 'lidar': 1, 'radar': 1}[row['sensor_modality']]
            assert len(stamps) == keys + sweeps * (keys - 1)


def test_files(nusc, synthetic_root):
    for row in nusc.sample_data:
        path = synthetic_root / row['filename']
        assert row['filename'].startswith('samples/' if row['is_key_frame'] else 'sweeps/')
        if row['sensor_modality'] == 'camera':
            with Image.open(path) as image:
                assert image.size == (row['width'], row['height']) == (320, 180)
                assert np.asarray(image).std() > 20
        elif row['sensor_modality'] == 'lidar':
            points = np.fromfile(path, np.float32).reshape(-1, 5)
            assert len(points) > 3000 and np.isfinite(points).all()
            assert set(np.unique(points[:, 4])) <= set(range(32)) and len(np.unique(points[:, 4])) > 25
            assert points[:, 3].min() >= 0 and points[:, 3].max() <= 255
            assert LidarPointCloud.from_file(str(path)).points.shape == (4, len(points))
        else:
            RadarPointCloud.disable_filters()
            everything = RadarPointCloud.from_file(str(path)).points
            RadarPointCloud.default_filters()
            assert everything.shape[0] == 18 and 0 < everything.shape[1] <= 125
            assert np.hypot(everything[0], everything[1]).max() < 101


def test_sample_timestamps_and_rate(nusc):
    for sample in nusc.sample:
        assert nusc.get('sample_data', sample['data']['LIDAR_TOP'])['timestamp'] == sample['timestamp']
        if sample['next']:
            assert nusc.get('sample', sample['next'])['timestamp'] - sample['timestamp'] == 500_000
    for scene in nusc.scene:
        token = nusc.get('sample', scene['last_sample_token'])['data']['LIDAR_TOP']
        row = nusc.get('sample_data', token)
        assert row['timestamp'] - nusc.get('sample_data', row['prev'])['timestamp'] == 50_000


def test_point_counts_are_those_of_the_files(nusc):
    checked = 0
    for sample in nusc.sample[::3]:
        token = sample['data']['LIDAR_TOP']
        path, boxes, _ = nusc.get_sample_data(token)
        points = LidarPointCloud.from_file(path).points[:3].astype(float)
        for box in boxes:
            counted = points_in_box(box, points).sum()
            # Float32 points against float64 boxes: a point on a face may fall on either side.
            assert abs(counted - nusc.get('sample_annotation', box.token)['num_lidar_pts']) <= 1
            checked += counted > 0
    assert checked > 30


def test_all_classes_in_range_in_each_split(nusc):
    ranges = config_factory('detection_cvpr_2019').class_range
    for split in (splits.mini_train, splits.mini_val):
        found = set()
        for sample in nusc.sample:
            if nusc.get('scene', sample['scene_token'])['name'] not in split:
                continue
            ego = nusc.get('ego_pose', nusc.get('sample_data', sample['data']['LIDAR_TOP'])['ego_pose_token'])
            for token in sample['anns']:
                row = nusc.get('sample_annotation', token)
                name = category_to_detection_name(row['category_name'])
                distance = np.hypot(*(np.array(row['translation']) - ego['translation'])[:2])
                if row['num_lidar_pts'] > 0 and distance < ranges[name]:
                    found.add(name)
        assert found == set(OBJECT_CLASSES)


def test_velocities_and_attributes(nusc):
    moving = 0
    for row in nusc.sample_annotation:
        velocity = nusc.box_velocity(row['token'])[:2]
        names = [nusc.get('attribute', token)['name'] for token in row['attribute_tokens']]
        allowed = detection_name_to_rel_attributes(category_to_detection_name(row['category_name']))
        assert len(names) == min(1, len(allowed)) and set(names) <= set(allowed)
        if np.isnan(velocity).any():
            assert not row['prev'] and not row['next']
            continue
        speed = np.hypot(*velocity)
        assert speed < 16
        if names and names[0] in ('vehicle.parked', 'cycle.without_rider', 'pedestrian.standing'):
            assert speed < 0.6
        if speed > 2.0:
            moving += 1
            assert names[0] in ('vehicle.moving', 'cycle.with_rider', 'pedestrian.moving')
            # Vehicles drive where they look.
            w, _, _, z = row['rotation']
            heading = np.array([w * w - z * z, 2 * w * z])
            assert velocity @ heading > 0.9 * speed
    assert moving > 10


def test_visibility_falls_with_occlusion(nusc):
    levels = [row['visibility_token'] for row in nusc.sample_annotation]
    assert set(levels) == {'1', '2', '3', '4'}


def test_rendering(nusc, city, tmp_path):
    sample = nusc.sample[1]
    for channel in ('CAM_FRONT', 'LIDAR_TOP', 'RADAR_FRONT'):
        nusc.render_sample_data(sample['data'][channel], out_path=str(tmp_path / f'{channel}.png'), verbose=False)
        matplotlib.pyplot.close('all')
    nusc.render_annotation(sample['anns'][0], out_path=str(tmp_path / 'annotation.png'))
    matplotlib.pyplot.close('all')
    nusc.render_pointcloud_in_image(sample['token'], out_path=str(tmp_path / 'points.png'))
    nusc.render_egoposes_on_map(nusc.get('log', nusc.scene[0]['log_token'])['location'],
                                out_path=str(tmp_path / 'poses.png'))
    assert len(list(tmp_path.glob('*.png'))) == 6
    matplotlib.pyplot.close('all')
    for name in schema.LOCATIONS:
        for layer in ('basemap', 'semantic_prior'):
            assert BitMap(nusc.dataroot, name, layer).image.std() > 10


def test_map_rendering(nusc, city, tmp_path):
    sample = nusc.sample[1]
    m = city[nusc.get('log', nusc.get('scene', sample['scene_token'])['log_token'])['location']]
    m.render_map_in_image(nusc, sample['token'], min_polygon_area=100, verbose=False, out_path=str(tmp_path / 'image.png'))
    assert (tmp_path / 'image.png').stat().st_size > 10_000
    figure, axes = m.render_map_patch((80, 80, 180, 180), m.non_geometric_layers, figsize=(3, 3))
    assert len(axes.patches) > 20
    figure, axes = m.render_centerlines(figsize=1)
    assert axes.lines or axes.collections
    matplotlib.pyplot.close('all')


def test_ego_is_on_the_drivable_area(nusc, city):
    for scene in nusc.scene:
        log = nusc.get('log', scene['log_token'])
        prior = nusc.get('map', log['map_token'])['mask']
        for sample in (scene['first_sample_token'], scene['last_sample_token']):
            data = nusc.get('sample_data', nusc.get('sample', sample)['data']['LIDAR_TOP'])
            x, y, _ = nusc.get('ego_pose', data['ego_pose_token'])['translation']
            assert prior.is_on_mask(x, y)
            found = city[log['location']].layers_on_point(x, y)
            assert found['drivable_area'] and found['road_segment'] and not found['walkway']


def test_map_layers(city):
    for name, m in city.items():
        assert m.version == '1.3'
        for layer in m.non_geometric_layers:
            assert getattr(m, layer), f'{name} has no {layer}'
        assert all(m.extract_polygon(row['token']).is_valid for row in m.polygon)
        assert any(len(row['polygon_tokens']) > 1 for row in m.drivable_area), 'no area of several parts'
        for layer in ('drivable_area', 'walkway', 'road_segment'):
            tokens = [t for row in getattr(m, layer) for t in row.get('polygon_tokens', [row.get('polygon_token')])]
            assert any(m.get('polygon', token)['holes'] for token in tokens), f'{name}: no hole in {layer}'
        masks = m.get_map_mask(None, 0, LAYERS, (300, 300))
        assert (masks.reshape(len(LAYERS), -1).sum(1) > 0).all()


def test_map_masks_at_any_angle(city):
    """Also the ones whose patch border cuts curved dividers, which the devkit cannot draw if they fall apart."""
    m = city['boston-seaport']
    width, height = m.canvas_edge
    rng = np.random.default_rng(0)
    for _ in range(40):
        box = (*rng.uniform([60, 60], [width - 60, height - 60]), 100, 100)
        assert m.get_map_mask(box, float(rng.uniform(-180, 180)), LAYERS, (200, 200)).shape == (len(LAYERS), 200, 200)


def test_lane_graph(city):
    for m in city.values():
        for lane in m.lane:
            outgoing = m.get_outgoing_lane_ids(lane['token'])
            assert outgoing and m.get_incoming_lane_ids(lane['token'])
            for token in outgoing:
                assert lane['token'] in m.get_incoming_lane_ids(token)
                assert np.allclose(m.get_arcline_path(lane['token'])[-1]['end_pose'][:2],
                                   m.get_arcline_path(token)[0]['start_pose'][:2], atol=1e-6)
        for token, path in m.arcline_path_3.items():
            points = np.array(discretize_lane(path, 1.0))
            assert np.hypot(*(points[-1, :2] - path[-1]['end_pose'][:2])) < 1e-6
            record = m.get('lane' if token in m._token2ind['lane'] else 'lane_connector', token)
            polygon = m.extract_polygon(record['polygon_token']).buffer(0.4)
            assert all(polygon.covers(Point(xy)) for xy in points[:, :2])
        lane = max(m.lane, key=lambda row: len(m.get_arcline_path(row['token'])))
        x, y, _ = m.discretize_lanes([lane['token']], 1.0)[lane['token']][20]
        assert m.get_closest_lane(x, y) == lane['token']
        assert m.get_next_roads(x, y)['road_segment']


def test_perfect_predictions_evaluate_to_one(nusc, tmp_path):
    results = {}
    for sample in nusc.sample:
        if nusc.get('scene', sample['scene_token'])['name'] not in splits.mini_val:
            continue
        rows = []
        for token in sample['anns']:
            row = nusc.get('sample_annotation', token)
            if row['num_lidar_pts'] + row['num_radar_pts'] == 0:
                continue  # the devkit drops these from the truth, not from predictions
            names = [nusc.get('attribute', t)['name'] for t in row['attribute_tokens']]
            rows.append({'sample_token': sample['token'], 'translation': row['translation'], 'size': row['size'],
                         'rotation': row['rotation'], 'velocity': np.nan_to_num(nusc.box_velocity(token)[:2]).tolist(),
                         'detection_name': category_to_detection_name(row['category_name']), 'detection_score': 0.8,
                         'attribute_name': names[0] if names else ''})
        results[sample['token']] = rows
    meta = {'use_camera': True, 'use_lidar': True, 'use_radar': False, 'use_map': False, 'use_external': False}
    (tmp_path / 'results.json').write_text(json.dumps({'meta': meta, 'results': results}))
    evaluation = NuScenesEval(nusc, config_factory('detection_cvpr_2019'), str(tmp_path / 'results.json'), 'mini_val',
                              str(tmp_path), verbose=False)
    summary = evaluation.main(plot_examples=0, render_curves=False)
    assert summary['mean_ap'] > 0.999 and summary['nd_score'] > 0.999
