"""The form of mmdet3d >= 1.1 (``data_list``, ``metainfo``): the same samples as from our own files, and what is missing is named."""
import pickletools
from pathlib import Path

import numpy as np
import pytest
import torch
from testing import shared_dir

from mmdet3d_ext.datasets import restricted_pickle
from mmdet3d_ext.datasets.gt_database import points_in_box
from mmdet3d_ext.datasets.info_files import InfoFileError, load_info_file
from mmdet3d_ext.datasets.nuscenes_converter import create_infos, rotation_matrix
from mmdet3d_ext.datasets.nuscenes_dataset import NuScenesDataset
from mmdet3d_ext.datasets.nuscenes_schema import OBJECT_CLASSES
from mmdet3d_ext.datasets.pipelines.loading_points import read_points

KEYFRAME = 'n015-2018-07-24-11-22-45+0800.pkl'


def boxes(n, seed=0):
    """(n, 7) cars: centre, l, w, h, yaw."""
    rng = np.random.default_rng(seed)
    return np.column_stack([rng.uniform(-40, 40, (n, 2)), rng.uniform(-1, 1, n), rng.uniform(4, 5, n), rng.uniform(1.7, 2, n),
                            rng.uniform(1.4, 1.8, n), rng.uniform(-np.pi, np.pi, n)])


# ------------------------------------------------------------------------------------------------- equal to our own files

def matrix(record, prefix):
    out = np.eye(4)
    out[:3, :3], out[:3, 3] = rotation_matrix(record[f'{prefix}_rotation']), record[f'{prefix}_translation']
    return out


def as_data_list(infos, bare):
    """Our infos as mmdet3d >= 1.1's converter writes them: 4x4 float32 lists, seconds, and, if ``bare``, the key frame's file
    names without folder (past clouds keep theirs: some of them are key frames)."""
    name = (lambda path: Path(path).name) if bare else (lambda path: f'./data/nuscenes/{path}')
    plain = lambda value: np.asarray(value, np.float32).tolist()  # noqa: E731
    out = []
    for info in infos:
        images = {}
        for camera, entry in info['cams'].items():
            lidar_from_camera = np.eye(4)
            lidar_from_camera[:3, :3], lidar_from_camera[:3, 3] = entry['sensor2lidar_rotation'], entry['sensor2lidar_translation']
            images[camera] = {'img_path': name(entry['data_path']), 'cam2img': plain(entry['cam_intrinsic']),
                              'cam2ego': plain(matrix(entry, 'sensor2ego')), 'timestamp': entry['timestamp'] / 1e6,
                              'lidar2cam': plain(np.linalg.inv(lidar_from_camera)),
                              'sample_data_token': entry['sample_data_token']}
        sweeps = [{'timestamp': sweep['timestamp'] / 1e6, 'ego2global': plain(matrix(sweep, 'ego2global')),
                   'sample_data_token': sweep['sample_data_token'],
                   'lidar_points': {'lidar_path': f'./data/nuscenes/{sweep["data_path"]}', 'lidar2ego': plain(matrix(sweep, 'sensor2ego'))}}
                  for sweep in info['sweeps']]
        instances = [{'bbox_3d': info['gt_boxes'][i].tolist(), 'velocity': info['gt_velocity'][i].tolist(),
                      'bbox_label_3d': OBJECT_CLASSES.index(label) if label in OBJECT_CLASSES else -1,
                      'num_lidar_pts': int(info['num_lidar_pts'][i]), 'num_radar_pts': int(info['num_radar_pts'][i]),
                      'bbox_3d_isvalid': bool(info['valid_flag'][i])} for i, label in enumerate(info['gt_names'])]
        out.append({'token': info['token'], 'timestamp': info['timestamp'] / 1e6, 'ego2global': plain(matrix(info, 'ego2global')),
                    'lidar_points': {'lidar_path': name(info['lidar_path']), 'lidar2ego': plain(matrix(info, 'lidar2ego'))},
                    'images': images, 'lidar_sweeps': sweeps, 'instances': instances})
    return out


@pytest.fixture(scope='module')
def ours(synthetic_root, tmp_path_factory):
    return create_infos(synthetic_root, tmp_path_factory.mktemp('infos'), version='v1.0-mini')['train']


@pytest.mark.parametrize('bare, prefix', [(False, None), (True, None), (True, 'mmdet3d')])
def test_the_same_samples_as_from_our_own_file(synthetic_root, ours, tmp_path, bare, prefix):
    infos = load_info_file(ours).infos
    path = tmp_path / 'nuscenes_infos_train.pkl'
    meta = {'categories': {name: i for i, name in enumerate(OBJECT_CLASSES)}, 'version': 'v1.0-mini', 'info_version': '1.1'}
    restricted_pickle.save({'metainfo': meta, 'data_list': as_data_list(infos, bare)}, path)
    arguments = dict(dataset_root=str(synthetic_root), modality=dict(use_lidar=True, use_camera=True), use_valid_flag=True)
    if prefix:
        prefix = {'pts': 'samples/LIDAR_TOP', 'sweeps': 'sweeps/LIDAR_TOP', **{c: f'samples/{c}' for c in infos[0]['cams']}}
    a, b = NuScenesDataset(str(ours), **arguments), NuScenesDataset(str(path), data_prefix=prefix, **arguments)
    assert a.tokens == b.tokens and max(len(info['sweeps']) for info in infos) > 0
    for index in range(len(a)):
        mine, other = a.get_data_info(index), b.get_data_info(index)
        assert mine['timestamp'] == other['timestamp'] and mine['lidar_path'] == other['lidar_path']
        assert mine['image_paths'] == other['image_paths'] and Path(other['lidar_path']).is_file()
        for key, scale in (('lidar2camera', 1), ('camera2lidar', 1), ('camera2ego', 1), ('lidar2image', 1000), ('lidar2ego', 1),
                           ('ego2global', 1000)):
            assert np.allclose(mine[key], other[key], atol=2e-5 * scale), key
        assert len(mine['sweeps']) == len(other['sweeps'])
        for one, two in zip(mine['sweeps'], other['sweeps'], strict=True):
            assert one['data_path'] == two['data_path'] and Path(two['data_path']).is_file()
            assert np.allclose(one['sensor2lidar_rotation'], two['sensor2lidar_rotation'], atol=1e-5)
            # float32 poses of a car a kilometre from the map's origin: a tenth of a millimetre each
            assert np.allclose(one['sensor2lidar_translation'], two['sensor2lidar_translation'], atol=2e-3)
        for key in ('gt_bboxes_3d', 'gt_labels_3d'):
            one, two = (data['ann_info'][key] for data in (mine, other))
            one, two = (torch.as_tensor(getattr(value, 'tensor', value)) for value in (one, two))
            torch.testing.assert_close(one, two, equal_nan=True)


def test_bare_names_of_past_clouds(synthetic_root, ours, tmp_path):
    data = {'metainfo': {'classes': list(OBJECT_CLASSES), 'version': 'v1.0-mini'},
            'data_list': as_data_list(load_info_file(ours).infos, True)}
    for sample in data['data_list']:
        for sweep in sample['lidar_sweeps']:
            sweep['lidar_points']['lidar_path'] = Path(sweep['lidar_points']['lidar_path']).name
    restricted_pickle.save(data, tmp_path / 'x.pkl')
    for prefix, folder in ((None, 'sweeps/LIDAR_TOP'), ({'sweeps': 'elsewhere'}, 'elsewhere')):
        dataset = NuScenesDataset(str(tmp_path / 'x.pkl'), dataset_root=str(synthetic_root), data_prefix=prefix)
        paths = [sweep['data_path'] for index in range(len(dataset)) for sweep in dataset.get_data_info(index)['sweeps']]
        assert paths and all(Path(path).parent == Path(synthetic_root) / folder for path in paths)


def test_an_unknown_channel_of_data_prefix_is_named(synthetic_root, ours):
    with pytest.raises(ValueError, match="data_prefix names the unknown channel 'points'; known are pts, sweeps, LIDAR_TOP"):
        NuScenesDataset(str(ours), dataset_root=str(synthetic_root), data_prefix={'points': 'samples/LIDAR_TOP'})


# ----------------------------------------------------------------------------------------------------- what is missing

def data_list_file(path):
    turn = np.eye(4)
    turn[:2, :2] = [[0, -1], [1, 0]]
    pose, later = np.eye(4), np.eye(4)
    pose[0, 3], later[0, 3] = 100, 103
    sample = {
        'token': 'a', 'timestamp': 1532402927.5, 'ego2global': later.tolist(),
        'lidar_points': {'lidar_path': 'x.pcd.bin', 'lidar2ego': turn.tolist()},
        'lidar_sweeps': [{'timestamp': 1532402927.0, 'ego2global': pose.tolist(), 'sample_data_token': 's',
                          'lidar_points': {'lidar_path': 'sweeps/LIDAR_TOP/y.pcd.bin', 'lidar2ego': turn.tolist()}}],
        'images': {name: {'img_path': f'{name}.jpg', 'cam2img': np.eye(3).tolist(), 'cam2ego': np.eye(4).tolist(),
                          'lidar2cam': turn.tolist(), 'timestamp': 1532402927.4} for name in ('CAM_BACK', 'CAM_FRONT')},
        'instances': [{'bbox_3d': row.tolist(), 'bbox_label_3d': 0 if i else -1, 'velocity': [1.0, 2.0], 'num_lidar_pts': 3,
                       'num_radar_pts': 0, 'bbox_3d_isvalid': True} for i, row in enumerate(boxes(7))],
    }
    restricted_pickle.save({'metainfo': {'categories': {'car': 0}, 'version': 'v1.0-mini'}, 'data_list': [sample]}, path)
    return path


def test_data_list_form(tmp_path):
    loaded = load_info_file(data_list_file(tmp_path / 'x.pkl'))
    got = loaded.infos[0]
    assert got['timestamp'] == 1532402927500000 and list(got['cams']) == ['CAM_FRONT', 'CAM_BACK'], 'our order'
    assert got['gt_names'].tolist() == ['other'] + ['car'] * 6 and np.array_equal(got['gt_boxes'], boxes(7))
    # the car drove 3 m along x between sweep and key frame; the lidar's own axes are turned by 90 degrees
    sweep = got['sweeps'][0]
    assert np.allclose(sweep['sensor2lidar_rotation'], np.eye(3)) and np.allclose(sweep['sensor2lidar_translation'], [0, 3, 0])
    camera = got['cams']['CAM_FRONT']
    assert np.allclose(camera['sensor2lidar_rotation'], [[0, 1, 0], [-1, 0, 0], [0, 0, 1]])
    assert np.allclose(got['lidar2ego_rotation'], [np.sqrt(0.5), 0, 0, np.sqrt(0.5)])


REMOVED = object()


@pytest.mark.parametrize('place, value, message', [
    ('images.CAM_FRONT.lidar2cam', REMOVED, r'images\.CAM_FRONT\.lidar2cam is missing'),
    ('images.CAM_BACK.cam2img', [[1, 0], [0, 1]], r'images\.CAM_BACK\.cam2img must be 3 x 3 numbers, its shape is \(2, 2\)'),
    ('images', 3, 'images is a int, expected a mapping'),
    ('lidar_points.lidar2ego', np.eye(3).tolist(), r'lidar_points\.lidar2ego must be 4 x 4 numbers'),
    ('lidar_points.lidar2ego', np.diag([1, 1, -1, 1]).tolist(), r'lidar_points\.lidar2ego: the upper left 3x3 .* not a rotation'),
    ('lidar_points.lidar2ego', np.full((4, 4), np.nan).tolist(), r'lidar_points\.lidar2ego holds values that are not finite'),
    ('ego2global', REMOVED, 'ego2global is missing'),
    ('timestamp', None, 'timestamp is missing'),
    ('lidar_sweeps.0.lidar_points.lidar_path', REMOVED, r'lidar_sweeps\[0\]\.lidar_points\.lidar_path is missing'),
    ('lidar_sweeps.0.lidar_points.lidar2ego', REMOVED, r'lidar_sweeps\[0\]\.lidar_points\.lidar2sensor is missing'),
    ('instances.3.bbox_3d', [1.0, 2.0], r'instances\[3\]\.bbox_3d must be 7 numbers, its shape is \(2,\)'),
    ('instances.3', 'car', r'instances\[3\] is a str, expected a mapping'),
])
def test_what_is_missing_in_a_data_list_is_named_in_full(tmp_path, place, value, message):
    path = data_list_file(tmp_path / 'x.pkl')
    data = restricted_pickle.load(path)
    node = data['data_list'][0]
    *parents, last = [int(part) if part.isdigit() else part for part in place.split('.')]
    for part in parents:
        node = node[part]
    if value is REMOVED:
        del node[last]
    else:
        node[last] = value
    restricted_pickle.save(data, path)
    with pytest.raises(InfoFileError, match=rf'x\.pkl: data_list\[0\] \(token a\): {message}.*create_data\.py'):
        load_info_file(path)


def test_a_data_list_without_class_names_or_with_something_else_in_it(tmp_path):
    restricted_pickle.save({'metainfo': {}, 'data_list': []}, tmp_path / 'x.pkl')
    with pytest.raises(InfoFileError, match='metainfo holds neither categories nor classes'):
        load_info_file(tmp_path / 'x.pkl')
    restricted_pickle.save({'metainfo': {'classes': ['car']}, 'data_list': [7]}, tmp_path / 'y.pkl')
    with pytest.raises(InfoFileError, match=r'data_list\[0\]: the sample is a int'):
        load_info_file(tmp_path / 'y.pkl')


def test_sweeps_with_a_product_instead_of_poses(tmp_path):
    path = data_list_file(tmp_path / 'x.pkl')
    expected = load_info_file(path).infos[0]['sweeps'][0]
    data = restricted_pickle.load(path)
    sweep = data['data_list'][0]['lidar_sweeps'][0]
    sensor_from_lidar = np.eye(4)
    sensor_from_lidar[:3, :3] = expected['sensor2lidar_rotation'].T
    sensor_from_lidar[:3, 3] = -expected['sensor2lidar_rotation'].T @ expected['sensor2lidar_translation']
    sweep['lidar_points'] = {'lidar_path': 'y.bin', 'lidar2sensor': sensor_from_lidar.tolist()}
    restricted_pickle.save(data, path)
    got = load_info_file(path).infos[0]['sweeps'][0]
    assert np.allclose(got['sensor2lidar_translation'], expected['sensor2lidar_translation'])
    assert np.allclose(got['sensor2lidar_rotation'], expected['sensor2lidar_rotation'])


def test_real_key_frame():
    """Read with the restricted reader; z is the gravity centre: points are counted inside the boxes."""
    folder = shared_dir('data', 'nuscenes_keyframe')
    names = {arg for op, arg, _ in pickletools.genops((folder / KEYFRAME).read_bytes()) if op.name == 'GLOBAL'}
    assert 'numpy.core.multiarray scalar' in names  # it does need globals, so the allow list is at work
    loaded = load_info_file(folder / KEYFRAME)
    got = loaded.infos[0]
    assert len(got['gt_boxes']) == 69 and len(got['cams']) == 6 and got['sweeps'] == []
    points = read_points(str(folder / got['lidar_path']), 5)[:, :3]
    as_centre, as_bottom = [], []
    for box, count in zip(got['gt_boxes'], got['num_lidar_pts']):
        lifted = box + [0, 0, box[5] / 2, 0, 0, 0, 0]
        as_centre.append(abs(int(points_in_box(points, box).sum()) - count))
        as_bottom.append(abs(int(points_in_box(points, lifted).sum()) - count))
    total = got['num_lidar_pts'].sum()
    assert sum(as_centre) < 0.1 * total, 'the annotation counts are met with z as the centre'
    assert sum(as_bottom) > 0.3 * total, 'and not with z as the bottom'
    assert np.isnan(got['gt_velocity']).any(), 'unknown velocities stay unknown'
