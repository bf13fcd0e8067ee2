"""What goes into the batch, through mmcv's collate, and a whole pipeline on files."""
import numpy as np
import pytest
import torch
from mmcv.parallel import DataContainer, collate
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from PIL import Image
from pipeline_helpers import MapWriter, car_pose, lidar_pose, scene

from mmdet3d_ext.registry import PIPELINES

KEYS = ['img', 'points', 'gt_bboxes_3d', 'gt_labels_3d', 'gt_masks_bev']
CAMERA = ('camera_intrinsics', 'camera2ego', 'lidar2camera', 'camera2lidar', 'lidar2image', 'img_aug_matrix')


def finished(num_boxes=3, cameras=2, seed=0, **more):
    data = scene(num_points=20 + seed, num_boxes=num_boxes, seed=seed)
    data['img'] = [torch.rand(3, 8, 12) for _ in range(cameras)]
    data['gt_masks_bev'] = np.ones((2, 10, 12), np.uint8)
    data.update({key: [np.eye(4, dtype=np.float64)] * cameras for key in CAMERA}, lidar2ego=np.eye(4), timestamp=12, **more)
    return data


def bundle(data, keys=KEYS, **more):
    data = PIPELINES.build(dict(type='DefaultFormatBundle3D', classes=['a', 'b', 'c']))(data)
    return PIPELINES.build(dict(type='Collect3D', keys=keys, **more))(data)


def test_a_batch_of_two():
    samples = [bundle(finished(num_boxes=3, seed=1)), bundle(finished(num_boxes=0, seed=2))]
    batch = {key: value.data[0] for key, value in collate(samples, samples_per_gpu=2).items()}
    assert batch['img'].shape == (2, 2, 3, 8, 12) and batch['img'].dtype == torch.float32
    assert batch['gt_masks_bev'].shape == (2, 2, 10, 12) and batch['gt_masks_bev'].dtype == torch.uint8
    assert [tuple(p.shape) for p in batch['points']] == [(21, 5), (22, 5)]
    assert [len(b) for b in batch['gt_bboxes_3d']] == [3, 0]
    assert [label.dtype for label in batch['gt_labels_3d']] == [torch.int64] * 2
    for key in CAMERA:
        assert batch[key].shape == (2, 2, 4, 4) and batch[key].dtype == torch.float32
    assert batch['lidar2ego'].shape == batch['lidar_aug_matrix'].shape == (2, 4, 4)
    assert [meta['token'] for meta in batch['metas']] == ['sample', 'sample'] and batch['metas'][0]['timestamp'] == 12


def test_absent_sensors_are_left_out():
    data = finished()
    del data['img'], data['points']
    for key in CAMERA:
        del data[key]
    batch = bundle(data)
    assert set(batch) == {'gt_bboxes_3d', 'gt_labels_3d', 'gt_masks_bev', 'lidar2ego', 'lidar_aug_matrix', 'metas'}


def test_absent_ground_truth_is_an_error_in_training_only():
    data = finished()
    del data['gt_masks_bev']
    with pytest.raises(KeyError, match='gt_masks_bev.*LoadBEVSegmentation'):
        bundle(dict(data))
    assert 'gt_masks_bev' not in bundle(dict(data, test_mode=True))


def test_a_missing_matrix_is_named():
    data = finished()
    del data['lidar2camera']
    with pytest.raises(KeyError, match='lidar2camera'):
        bundle(data)


def test_images_that_differ_in_size_and_labels_out_of_range():
    data = finished()
    data['img'][1] = torch.rand(3, 8, 13)
    with pytest.raises(ValueError, match='differ in size.*ImageAug3D'):
        bundle(data)
    data = finished()
    data['gt_labels_3d'] = np.array([0, 1, 3])
    with pytest.raises(ValueError, match='label 3'):
        bundle(data)
    with pytest.raises(TypeError, match='points'):
        bundle(dict(finished(), points=np.zeros((3, 5))))


def test_collating_never_pads():
    small, large = finished(), finished()
    large['img'] = [torch.rand(3, 9, 12)] * 2
    with pytest.raises(RuntimeError):
        collate([bundle(small), bundle(large)], samples_per_gpu=2)


def test_unnormalised_images_become_channel_first_tensors():
    data = finished()
    data['img'] = [np.arange(5 * 6 * 3, dtype=np.uint8).reshape(5, 6, 3)] * 2
    image = bundle(data)['img'].data
    assert image.dtype == torch.uint8 and image.shape == (2, 3, 5, 6)
    assert image[0, :, 2, 3].tolist() == data_pixel(2, 3)


def data_pixel(row, column):
    start = (row * 6 + column) * 3
    return [start, start + 1, start + 2]


def whole_pipeline(root, train):
    augment = [
        dict(type='ImageAug3D', final_dim=[64, 176], resize_lim=[0.4, 0.5], bot_pct_lim=[0, 0], rot_lim=[-5, 5], rand_flip=True,
             is_train=train),
        dict(type='GlobalRotScaleTrans', resize_lim=[0.9, 1.1], rot_lim=[-0.5, 0.5], trans_lim=0.5, is_train=train),
        dict(type='LoadBEVSegmentation', dataset_root=str(root), xbound=[-50, 50, 1.0], ybound=[-50, 50, 1.0],
             classes=['drivable_area', 'divider'])]
    flips = [dict(type='RandomFlip3D')] if train else []
    return [PIPELINES.build(cfg) for cfg in [
        dict(type='LoadMultiViewImageFromFiles', to_float32=True),
        dict(type='LoadPointsFromFile', coord_type='LIDAR', load_dim=5, use_dim=5, reduce_beams=32),
        dict(type='LoadPointsFromMultiSweeps', sweeps_num=2, load_dim=5, use_dim=5, pad_empty_sweeps=True, remove_close=True),
        dict(type='LoadAnnotations3D', with_bbox_3d=True, with_label_3d=True, with_attr_label=False), *augment, *flips,
        dict(type='PointsRangeFilter', point_cloud_range=[-50, -50, -5, 50, 50, 3]),
        dict(type='ObjectRangeFilter', point_cloud_range=[-50, -50, -5, 50, 50, 3]),
        dict(type='ObjectNameFilter', classes=['a', 'b', 'c']),
        dict(type='ImageNormalize', mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        dict(type='GridMask', use_h=True, use_w=True, max_epoch=2, prob=0.5),
        dict(type='PointShuffle'),
        dict(type='DefaultFormatBundle3D', classes=['a', 'b', 'c']),
        dict(type='Collect3D', keys=KEYS),
        dict(type='GTDepth', keyframe_only=True)]]


@pytest.fixture()
def files(tmp_path):
    rng = np.random.default_rng(0)
    writer = MapWriter()
    writer.polygon('drivable_area', [(80, 80), (130, 80), (130, 120), (80, 120)])
    writer.line('road_divider', [(80, 100), (130, 100)])
    writer.write(tmp_path)
    for k in range(2):
        Image.fromarray(rng.integers(0, 256, (180, 400, 3), dtype=np.uint8)).save(tmp_path / f'{k}.jpg')
    rng.uniform(-40, 40, (500, 5)).astype(np.float32).tofile(tmp_path / 'lidar.bin')
    camera = np.array([[200, 0, 200, 0], [0, 200, 90, 0], [0, 0, 1, 0], [0, 0, 0, 1]], np.float32)
    lidar2camera = np.array([[1, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1]], np.float32)
    boxes = scene(num_boxes=4)['gt_bboxes_3d']
    info = dict(token='t', sample_idx='t', lidar_path=str(tmp_path / 'lidar.bin'), timestamp=1_000_000,
                location='singapore-onenorth', ego2global=car_pose(100, 100, 10), lidar2ego=lidar_pose(),
                ann_info=dict(gt_bboxes_3d=boxes, gt_labels_3d=np.arange(4) - 1),
                image_paths=[str(tmp_path / f'{k}.jpg') for k in range(2)], lidar2image=[camera @ lidar2camera] * 2,
                lidar2camera=[lidar2camera] * 2, camera_intrinsics=[camera] * 2, camera2ego=[np.eye(4)] * 2,
                camera2lidar=[np.eye(4)] * 2,
                sweeps=[dict(data_path=str(tmp_path / 'lidar.bin'), timestamp=950_000, sensor2lidar_rotation=np.eye(3),
                             sensor2lidar_translation=np.zeros(3))])
    return tmp_path, info


@pytest.mark.parametrize('train', [True, False])
def test_whole_pipeline_twice_with_one_seed(files, train):
    root, info = files
    steps = whole_pipeline(root, train)
    results = []
    for _ in range(2):
        np.random.seed(7)
        torch.manual_seed(len(results))  # torch's generator must play no part
        data = dict(info)
        for step in steps:
            data = step(data)
        results.append(data)
    first, second = results
    assert all(isinstance(value, DataContainer) for value in first.values())
    assert set(first) == set(KEYS) | set(CAMERA) | {'lidar2ego', 'lidar_aug_matrix', 'metas', 'depths'}
    for key in ('img', 'points', 'gt_masks_bev', 'depths', 'img_aug_matrix', 'lidar_aug_matrix', 'gt_labels_3d'):
        assert torch.equal(first[key].data, second[key].data), key
    assert torch.equal(first['gt_bboxes_3d'].data.tensor, second['gt_bboxes_3d'].data.tensor)
    assert first['gt_masks_bev'].data.float().mean() > 0.02 and (first['depths'].data > 0).sum() > 10
    assert first['img'].data.shape == (2, 3, 64, 176)
    assert isinstance(first['gt_bboxes_3d'].data, LiDARInstance3DBoxes)
    batch = collate([first, second], samples_per_gpu=2)
    assert batch['depths'].data[0].shape == (2, 2, 64, 176)


def test_whole_pipeline_changes_nothing_of_the_data_set(files):
    import pickle
    root, info = files
    before = pickle.dumps(info)
    np.random.seed(1)
    data = dict(info)
    for step in whole_pipeline(root, True):
        data = step(data)
    assert pickle.dumps(info) == before
    assert not np.allclose(data['lidar_aug_matrix'].data, np.eye(4))
