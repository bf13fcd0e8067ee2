"""Every pipeline number of the parity fixtures (``data_pipeline.npz``)."""
import numpy as np
import pytest
import torch
from PIL import Image
from pipeline_helpers import assert_boxes_equal, boxes_from_old, boxes_to_old, fixture_image, lidar_points
from testing import Golden

from mmdet3d_ext.registry import PIPELINES


@pytest.fixture(scope='module')
def golden():
    return Golden('data_pipeline.npz')


@pytest.fixture(scope='module')
def images():
    return [Image.fromarray(fixture_image(k)) for k in range(6)]


TRAIN_AUG = dict(type='ImageAug3D', final_dim=[256, 704], resize_lim=[0.38, 0.55], bot_pct_lim=[0.0, 0.0], rot_lim=[-5.4, 5.4],
                 rand_flip=True, is_train=True)
TEST_AUG = dict(type='ImageAug3D', final_dim=[256, 704], resize_lim=[0.48, 0.48], bot_pct_lim=[0.0, 0.0], rot_lim=[0.0, 0.0],
                rand_flip=False, is_train=False)


def check_grey(golden, key, image):
    """Equal up to one grey level (another resampling library may round differently)."""
    expected = golden[f'{key}__sub'].astype(int)
    strides = golden[f'{key}__stride']
    actual = image[tuple(slice(None, None, int(s)) for s in strides)].astype(int)
    assert image.shape == tuple(golden[f'{key}__shape'])
    assert np.abs(actual - expected).max() <= 1


def test_image_rule(golden, images):
    golden.check('image0_in', np.asarray(images[0]))


def test_image_augmentation_in_training(golden, images):
    np.random.seed(700)
    data = PIPELINES.build(dict(TRAIN_AUG, compat='reference'))(dict(img=images))
    golden.check('aug_train_matrix', np.stack(data['img_aug_matrix']))
    for k in range(3):
        check_grey(golden, f'aug_train_img{k}', data['img'][k])
    means = np.stack([image.reshape(-1, 3).mean(axis=0) for image in data['img']])
    np.testing.assert_allclose(means, golden['aug_train_img_means'], atol=0.05)


def test_image_augmentation_draws(golden):
    np.random.seed(700)
    step = PIPELINES.build(TRAIN_AUG)
    for expected in golden['aug_train_sampled']:
        draw = step.draw(1600, 900)
        row = [draw.scale, *draw.size, *draw.crop, draw.crop[0] + 704, draw.crop[1] + 256, draw.flip, draw.degrees]
        np.testing.assert_allclose(row, expected, rtol=1e-12)


def test_default_matrix_differs_from_the_reference_only_by_whole_pixels(golden, images):
    np.random.seed(700)
    data = PIPELINES.build(TRAIN_AUG)(dict(img=images))
    corner = np.array([1600, 900, 0, 1])
    for matrix, expected in zip(data['img_aug_matrix'], golden['aug_train_matrix']):
        shift = np.abs((matrix - expected) @ corner)[:2].max()
        assert 0.05 < shift < 1.1


def test_image_augmentation_in_test_mode(golden, images):
    state = np.random.get_state()[1].copy()
    data = PIPELINES.build(dict(TEST_AUG, compat='reference'))(dict(img=images))
    assert np.array_equal(state, np.random.get_state()[1])
    golden.check('aug_test_matrix', np.stack(data['img_aug_matrix']))
    check_grey(golden, 'aug_test_img0', data['img'][0])
    normalize = PIPELINES.build(dict(type='ImageNormalize', mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]))
    tensor = normalize(dict(img=data['img'][:1]))['img'][0]
    golden.check('normalized_img0', tensor)


def scene_in(golden):
    return dict(points=lidar_points(golden['points_in']), gt_bboxes_3d=boxes_from_old(golden['boxes_in']))


def test_global_augmentation(golden):
    np.random.seed(730)
    step = PIPELINES.build(dict(type='GlobalRotScaleTrans', resize_lim=[0.9, 1.1], rot_lim=[-0.78539816, 0.78539816],
                                trans_lim=0.5, is_train=True))
    data = step(scene_in(golden))
    golden.check('global_lidar_aug_matrix', data['lidar_aug_matrix'])
    golden.check('global_points', data['points'].tensor)
    assert_boxes_equal(boxes_to_old(data['gt_bboxes_3d']), golden['global_boxes'])


def test_global_augmentation_in_test_mode(golden):
    state = np.random.get_state()[1].copy()
    step = PIPELINES.build(dict(type='GlobalRotScaleTrans', resize_lim=[1.0, 1.0], rot_lim=[0.0, 0.0], trans_lim=0.0,
                                is_train=False))
    data = step(scene_in(golden))
    golden.check('global_test_matrix', data['lidar_aug_matrix'])
    golden.check('points_in', data['points'].tensor)
    assert np.array_equal(state, np.random.get_state()[1])


@pytest.mark.parametrize('case', ['h0_v0', 'h1_v0', 'h1_v1', 'h0_v1'])
def test_flips(golden, case):
    np.random.seed(int(golden[f'flip_{case}_seed']))
    data = scene_in(golden)
    data['gt_masks_bev'] = golden['flip_masks_in']
    data['lidar_aug_matrix'] = golden['global_lidar_aug_matrix']
    data = PIPELINES.build(dict(type='RandomFlip3D'))(data)
    golden.check(f'flip_{case}_lidar_aug_matrix', data['lidar_aug_matrix'])
    golden.check(f'flip_{case}_points40', data['points'].tensor[:40])
    golden.check(f'flip_{case}_masks', data['gt_masks_bev'])
    assert_boxes_equal(boxes_to_old(data['gt_bboxes_3d']), golden[f'flip_{case}_boxes'])
    assert (data['pcd_horizontal_flip'], data['pcd_vertical_flip']) == (case[1] == '1', case[4] == '1')


def test_filters(golden):
    points, boxes = golden['points_in'].copy(), golden['boxes_in'].copy()
    points[0, 0], points[1, 2] = 51.2, -5.0
    boxes[:, 6] *= 3
    boxes[0, 0] = 53.0
    data = dict(points=lidar_points(points), gt_bboxes_3d=boxes_from_old(boxes), gt_labels_3d=np.arange(len(boxes)) % 10)
    bounds = [-51.2, -51.2, -5.0, 51.2, 51.2, 3.0]
    for name in ('PointsRangeFilter', 'ObjectRangeFilter'):
        data = PIPELINES.build(dict(type=name, point_cloud_range=bounds))(data)
    data = PIPELINES.build(dict(type='ObjectNameFilter', classes=[str(k) for k in range(10)]))(data)
    golden.check('filter_points', data['points'].tensor)
    assert_boxes_equal(boxes_to_old(data['gt_bboxes_3d']), golden['filter_boxes'])
    assert (data['gt_bboxes_3d'].tensor[:, 6] >= -np.pi).all() and (data['gt_bboxes_3d'].tensor[:, 6] < np.pi).all()
    np.testing.assert_array_equal(data['gt_labels_3d'], golden['filter_labels'])


@pytest.mark.parametrize('keyframe_only', [True, False])
@pytest.mark.parametrize('formatted', [True, False])
def test_depth_targets(golden, keyframe_only, formatted):
    rig = Golden('view_transform.npz')
    data = dict(img=[torch.zeros(3, 256, 704)] * 6, points=lidar_points(golden['gtdepth_points']),
                lidar2image=list(rig['rig_lidar2image']), img_aug_matrix=list(golden['aug_train_matrix']),
                lidar_aug_matrix=golden['global_lidar_aug_matrix'])
    if formatted:
        data = PIPELINES.build(dict(type='DefaultFormatBundle3D', classes=['car']))(data)
        data = PIPELINES.build(dict(type='Collect3D', keys=['img', 'points'],
                                    meta_keys=['lidar2image', 'img_aug_matrix', 'lidar_aug_matrix']))(data)
    data = PIPELINES.build(dict(type='GTDepth', keyframe_only=keyframe_only, compat='reference'))(data)
    depths = data['depths'].data.numpy() if formatted else data['depths']
    key = f'gtdepth_key{int(keyframe_only)}'
    index = np.stack(np.nonzero(depths), axis=1)
    np.testing.assert_array_equal(index, golden[f'{key}_index'])
    np.testing.assert_allclose(depths[tuple(index.T)], golden[f'{key}_value'], rtol=2e-5)
    points = data['points'].data if formatted else data['points'].tensor
    golden.check('gtdepth_points', points)  # the reference shifts them for key0; we never do


def sweeps_in(golden, folder):
    sweeps = []
    for i in range(4):
        path = folder / f'sweep{i}.bin'
        golden[f'sweep{i}_points'].astype(np.float32).tofile(path)
        yaw = float(golden[f'sweep{i}_yaw'])
        rotation = np.array([[np.cos(yaw), -np.sin(yaw), 0], [np.sin(yaw), np.cos(yaw), 0], [0, 0, 1]])
        sweeps.append(dict(data_path=str(path), timestamp=int(golden[f'sweep{i}_timestamp']),
                           sensor2lidar_rotation=rotation, sensor2lidar_translation=golden[f'sweep{i}_translation']))
    return sweeps


@pytest.mark.parametrize('key, sweeps_num, test_mode, seed, count', [
    ('sweeps_all', 9, False, None, 4), ('sweeps_test2', 2, True, None, 4), ('sweeps_random2', 2, False, 790, 4),
    ('sweeps_empty3', 3, False, None, 0)])
def test_sweeps(golden, tmp_path, key, sweeps_num, test_mode, seed, count):
    key_path = tmp_path / 'key.bin'
    golden['sweep_key_points'].astype(np.float32).tofile(key_path)
    data = dict(lidar_path=str(key_path), timestamp=1600000000000000, sweeps=sweeps_in(golden, tmp_path)[:count])
    if seed is not None:
        np.random.seed(seed)
    data = PIPELINES.build(dict(type='LoadPointsFromFile', coord_type='LIDAR', load_dim=5, use_dim=5))(data)
    data = PIPELINES.build(dict(type='LoadPointsFromMultiSweeps', sweeps_num=sweeps_num, load_dim=5, use_dim=5,
                                pad_empty_sweeps=True, remove_close=True, test_mode=test_mode, compat='reference'))(data)
    golden.check(key, data['points'].tensor)


@pytest.mark.parametrize('case', ['plain', 'aug'])
def test_map_masks(golden, tmp_path, case):
    import json

    from pipeline_helpers import MapWriter
    shapes = json.loads(str(golden['map_json']))
    writer = MapWriter()
    for layer, polygons in shapes['polygons'].items():
        for corners in polygons:
            writer.polygon(layer, corners)
    for layer, lines in shapes['lines'].items():
        for corners in lines:
            writer.line(layer, corners)
    writer.write(tmp_path)
    classes = ['drivable_area', 'ped_crossing', 'walkway', 'stop_line', 'carpark_area', 'divider']
    step = PIPELINES.build(dict(type='LoadBEVSegmentation', dataset_root=str(tmp_path), xbound=[-50.0, 50.0, 0.5],
                                ybound=[-50.0, 50.0, 0.5], classes=classes, compat='reference'))
    data = dict(location='singapore-onenorth', ego2global=golden['map_ego2global'], lidar2ego=golden['map_lidar2ego'])
    if case == 'aug':
        data['lidar_aug_matrix'] = golden['global_lidar_aug_matrix']
    labels = step(data)['gt_masks_bev']
    shape = tuple(golden[f'map_{case}_mask_shape'])
    expected = np.unpackbits(golden[f'map_{case}_mask'])[:np.prod(shape)].reshape(shape)
    np.testing.assert_array_equal(labels.sum(axis=(1, 2)), golden[f'map_{case}_counts'])
    np.testing.assert_array_equal(labels, expected)
