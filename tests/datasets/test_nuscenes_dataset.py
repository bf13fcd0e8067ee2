"""The data set on hand-written tables and on the real key frame."""
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tiny_nuscenes as tiny  # noqa: E402
from testing import shared_dir  # noqa: E402

from mmdet3d_ext.datasets import NuScenesDataset, SampleError, gt_database, nuscenes_converter, restricted_pickle  # noqa: E402
from mmdet3d_ext.datasets.epoch_state import EpochState  # noqa: E402
from mmdet3d_ext.datasets.info_files import InfoFileError, load_info_file, swap_box_convention  # noqa: E402
from mmdet3d_ext.datasets.shared_list import SharedList  # noqa: E402

CAMERA = dict(use_lidar=True, use_camera=True, use_radar=True)


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    root = tiny.write(tmp_path_factory.mktemp('tiny'))
    nuscenes_converter.create_infos(root, root, version='v1.0-mini', max_sweeps=3)
    return root


def make(root, **kwargs):
    return NuScenesDataset(str(root / 'nuscenes_infos_train.pkl'), dataset_root=str(root), **kwargs)


def test_sample_dictionary(root):
    data = make(root, modality=CAMERA, map_classes=['drivable_area'], use_valid_flag=True).get_data_info(1)
    assert data['token'] == data['sample_idx'] == 'scene-0061-sample1' and data['location'] == 'singapore-onenorth'
    assert Path(data['lidar_path']).is_file() and all(Path(path).is_file() for path in data['image_paths'])
    assert len(data['sweeps']) == 3 and all(Path(sweep['data_path']).is_file() for sweep in data['sweeps'])
    assert set(data['radar']) == set(tiny.RADARS) and Path(data['radar']['RADAR_FRONT'][0]['data_path']).is_file()
    for name in ('lidar2camera', 'camera2lidar', 'camera2ego', 'camera_intrinsics', 'lidar2image'):
        assert len(data[name]) == 6 and all(m.shape == (4, 4) and m.dtype == np.float32 for m in data[name])
    assert data['test_mode'] is False
    boxes = data['ann_info']['gt_bboxes_3d']
    assert boxes.tensor.shape == (5, 9)  # the one without returns is not valid
    assert data['ann_info']['gt_labels_3d'].tolist() == [0, 0, 1, 7, -1]  # an animal is none of the ten classes


def test_matrices_chain(root):
    data = make(root, modality=CAMERA).get_data_info(2)
    time = 2 * tiny.STEP
    lidar2ego, ego2global = data['lidar2ego'], data['ego2global']
    row = tiny.OBJECTS[1]
    in_global = tiny.object_centre(row, time)
    in_lidar = tiny.to_lidar(in_global[None], time)[0]
    assert np.allclose((ego2global @ lidar2ego @ [*in_lidar, 1])[:3], in_global, atol=1e-4)
    for k in range(6):
        assert np.allclose(data['lidar2camera'][k] @ data['camera2lidar'][k], np.eye(4), atol=1e-5)
        assert np.allclose(data['camera_intrinsics'][k] @ data['lidar2camera'][k], data['lidar2image'][k], rtol=1e-4, atol=2e-2)
    # order: front, front right, front left, back, back left, back right. Yaw of each camera's axis on the car:
    yaws = [np.degrees(np.arctan2(m[1, 2], m[0, 2])) for m in data['camera2ego']]
    assert np.allclose(np.cos(np.radians(yaws)), np.cos(np.radians([0, -55, 55, 180, 110, -110])), atol=1e-6)
    assert np.sign(np.round(yaws, 3)[[1, 2, 4, 5]]).tolist() == [-1, 1, 1, -1]


def test_boxes_hold_the_bottom_and_unknown_velocity_stays_nan(root, tmp_path):
    data = restricted_pickle.load(root / 'nuscenes_infos_train.pkl')
    for info in data['infos']:
        info['gt_velocity'][0] = np.nan
    restricted_pickle.save(data, tmp_path / 'x.pkl')

    def boxes(compat):
        return NuScenesDataset(str(tmp_path / 'x.pkl'), dataset_root=str(root), compat=compat).get_ann_info(0)['gt_bboxes_3d']

    ours = boxes(None)
    centre = data['infos'][0]['gt_boxes']
    assert np.allclose(ours.gravity_center.numpy(), centre[:, :3], atol=1e-4)
    assert np.allclose(ours.tensor[:, 2].numpy(), centre[:, 2] - centre[:, 5] / 2, atol=1e-5)
    assert torch.isnan(ours.tensor[0, 7:]).all() and torch.isfinite(ours.tensor[1:]).all()
    reference = boxes('reference')
    assert np.allclose(reference.tensor[:, 2].numpy(), centre[:, 2], atol=1e-5)
    assert reference.tensor[0, 7:].tolist() == [0, 0]
    assert NuScenesDataset(str(tmp_path / 'x.pkl'), dataset_root=str(root), with_velocity=False).get_ann_info(0)[
        'gt_bboxes_3d'].tensor.shape == (6, 7)


def test_which_boxes_are_kept(root):
    assert len(make(root, use_valid_flag=True).get_ann_info(1)['gt_labels_3d']) == 5
    assert len(make(root, use_valid_flag=False).get_ann_info(1)['gt_labels_3d']) == 5  # num_lidar_pts is 0 as well
    assert len(make(root).get_ann_info(0)['gt_labels_3d']) == 6


def test_classes_order_and_unknown_class(root):
    labels = make(root, object_classes=['pedestrian', 'car']).get_ann_info(0)['gt_labels_3d']
    assert labels.tolist() == [1, 1, -1, 0, -1, -1]
    with pytest.raises(ValueError, match="unknown class 'pedestrain'; did you mean 'pedestrian'"):
        make(root, object_classes=['car', 'pedestrain'])
    with pytest.raises(ValueError, match='names a class twice'):
        make(root, object_classes=['car', 'car'])
    with pytest.raises(ValueError, match="unknown key 'use_lidr'; did you mean 'use_lidar'"):
        make(root, modality=dict(use_lidr=True))


def test_load_interval_and_time_order(root):
    assert make(root, load_interval=2).tokens == ['scene-0061-sample0', 'scene-0061-sample2']
    with pytest.raises(ValueError, match='load_interval'):
        make(root, load_interval=0)


def test_a_sample_is_a_fresh_copy_each_time(root):
    dataset = make(root, modality=CAMERA)
    first = dataset.get_data_info(1)
    first['sweeps'][0]['sensor2lidar_translation'] += 5
    first['ann_info']['gt_bboxes_3d'].tensor.zero_()
    second = dataset.get_data_info(1)
    assert not np.allclose(first['sweeps'][0]['sensor2lidar_translation'], second['sweeps'][0]['sensor2lidar_translation'])
    assert second['ann_info']['gt_bboxes_3d'].tensor.abs().sum() > 0


def test_missing_root_or_shifted_root_is_said_at_once(root, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"dataset_root '.*gone' does not exist"):
        NuScenesDataset(str(root / 'nuscenes_infos_train.pkl'), dataset_root=str(tmp_path / 'gone'))
    with pytest.raises(FileNotFoundError, match='the first point cloud of .*correct dataset_root'):
        NuScenesDataset(str(root / 'nuscenes_infos_train.pkl'), dataset_root=str(tmp_path))


def test_missing_fields_depend_on_what_is_asked_for(root, tmp_path):
    data = restricted_pickle.load(root / 'nuscenes_infos_train.pkl')
    for info in data['infos']:
        del info['location'], info['radars'], info['cams']
    path = str(tmp_path / 'x_infos_train.pkl')
    restricted_pickle.save(data, path)
    assert len(NuScenesDataset(path, dataset_root=str(root))) == 3
    with pytest.raises(InfoFileError, match="'location' is missing in 3 of 3 .*fill-location"):
        NuScenesDataset(path, dataset_root=str(root), map_classes=['divider'])
    with pytest.raises(InfoFileError, match="'radars' is missing"):
        NuScenesDataset(path, dataset_root=str(root), modality=dict(use_radar=True))
    with pytest.raises(InfoFileError, match="'cams' is missing"):
        NuScenesDataset(path, dataset_root=str(root), modality=dict(use_camera=True))
    for info in data['infos']:
        del info['gt_boxes']
    restricted_pickle.save(data, path)
    with pytest.raises(InfoFileError, match="'gt_boxes' is missing.*test_mode"):
        NuScenesDataset(path, dataset_root=str(root))
    assert 'ann_info' not in NuScenesDataset(path, dataset_root=str(root), test_mode=True).get_data_info(0)


def test_unreadable_sample_names_sample_step_and_file(root):
    def step(data):
        raise OSError(f'{data["lidar_path"]}: cut off')

    dataset = make(root, pipeline=[step])
    with pytest.raises(SampleError, match=r'sample scene-0061-sample2 \(index 2 of .*infos_train.pkl\), step function: '
                                          r'.*LIDAR_TOP.*: cut off'):
        dataset[2]


def test_samples_without_boxes_are_replaced_only_in_training(root, tmp_path):
    data = restricted_pickle.load(root / 'nuscenes_infos_train.pkl')
    for info in data['infos'][1:]:
        info['valid_flag'][:] = False
    path = str(tmp_path / 'x.pkl')
    restricted_pickle.save(data, path)

    def tokens(**kwargs):
        dataset = NuScenesDataset(path, dataset_root=str(root), pipeline=[lambda data: data], use_valid_flag=True, **kwargs)
        return [dataset[i]['token'][-1] for i in range(3)]

    assert tokens() == ['0', '0', '0']
    assert tokens(filter_empty_gt=False) == ['0', '1', '2']
    assert tokens(test_mode=True) == ['0', '1', '2']

    def drops_everything(data):
        return dict(data, gt_labels_3d=np.array([-1]))

    dataset = NuScenesDataset(path, dataset_root=str(root), pipeline=[drops_everything], use_valid_flag=True)
    with pytest.raises(SampleError, match='without boxes .*filter_empty_gt: false'):
        dataset[0]


def test_step_that_gives_nothing_in_evaluation_is_an_error(root):
    with pytest.raises(SampleError, match='the step function gave nothing'):
        make(root, pipeline=[lambda data: None], test_mode=True)[0]


@pytest.mark.parametrize('prefix', ['', './data/nuscenes/', '/elsewhere/nuscenes/', '/mnt/samples/nuscenes/', 'sweeps/x/'])
def test_paths_with_another_root_in_front(root, tmp_path, prefix):
    data = restricted_pickle.load(root / 'nuscenes_infos_train.pkl')
    for info in data['infos']:
        info['lidar_path'] = prefix + info['lidar_path']
        for sweep in info['sweeps']:
            sweep['data_path'] = prefix + sweep['data_path']
    restricted_pickle.save(data, tmp_path / 'x.pkl')
    got = NuScenesDataset(str(tmp_path / 'x.pkl'), dataset_root=str(root)).get_data_info(2)
    assert Path(got['lidar_path']).is_file() and all(Path(sweep['data_path']).is_file() for sweep in got['sweeps'])


def test_older_convention_gives_the_same_boxes(root, tmp_path):
    data = restricted_pickle.load(root / 'nuscenes_infos_train.pkl')
    for info in data['infos']:
        info['gt_boxes'] = swap_box_convention(info['gt_boxes'])
    data['metadata'] = {'version': 'v1.0-mini'}
    restricted_pickle.save(data, tmp_path / 'x.pkl')
    old = NuScenesDataset(str(tmp_path / 'x.pkl'), dataset_root=str(root))
    new = make(root)
    for i in range(3):
        a, b = (dataset.get_ann_info(i)['gt_bboxes_3d'].corners for dataset in (old, new))
        assert torch.allclose(a, b, atol=1e-4)


def test_poses_for_the_metric(root):
    dataset = make(root)
    lidar2ego, ego2global = dataset.poses['scene-0061-sample1']
    assert np.allclose(ego2global[:3, 3], tiny.car_pose(tiny.STEP)) and np.allclose(lidar2ego[:3, 3], tiny.LIDAR_EGO)


# -------------------------------------------------------------------------------------------------- epochs and workers

class Draws:
    """A step that returns random numbers and the epoch that it was told."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __call__(self, data):
        return {'draw': float(np.random.rand()), 'epoch': self.epoch}


def collect(dataset, workers, persistent=False, epochs=(0, 1), seed=3, rank=0):
    from mmdet3d_ext.datasets import build_dataloader
    loader = build_dataloader(dataset, 1, workers, seed=seed, num_replicas=2, rank=rank, persistent_workers=persistent)
    out = []
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        out.append([(float(batch['draw'][0]), int(batch['epoch'][0])) for batch in loader])
    return out


@pytest.mark.parametrize('workers, persistent', [(0, False), (2, False), (2, True)])
def test_epoch_reaches_the_steps_and_augmentation_is_seeded_by_it(root, workers, persistent):
    def make_one():
        return make(root, pipeline=[Draws()], filter_empty_gt=False)

    both = collect(make_one(), workers, persistent)
    assert [epoch for run in both for _, epoch in run] == [0] * len(both[0]) + [1] * len(both[1])
    assert both[0] != both[1], 'each epoch draws anew'
    resumed = collect(make_one(), workers, persistent, epochs=(1,))
    assert resumed[0] == both[1], 'a resumed run continues as an uninterrupted one'
    assert collect(make_one(), workers, persistent, rank=1)[0] != both[0], 'ranks differ'
    assert collect(make_one(), workers, persistent, seed=4)[0] != both[0], 'seeds differ'


def test_workers_do_not_repeat_each_other(root):
    draws = [draw for run in collect(make(root, pipeline=[Draws()], filter_empty_gt=False), 2) for draw, _ in run]
    assert len(set(draws)) == len(draws)


def test_unseeded_state_touches_no_generator():
    state = EpochState()
    np.random.seed(5)
    expected = np.random.rand()
    np.random.seed(5)
    assert state.enter() and not state.enter()
    assert np.random.rand() == expected


def test_shared_list():
    items = [{'a': np.arange(i), 'b': 'x' * i} for i in range(5)]
    shared = SharedList(items)
    assert len(shared) == 5 and [len(item['b']) for item in shared] == [0, 1, 2, 3, 4]
    assert shared[-1]['b'] == 'xxxx' and shared[-1]['a'].flags.writeable
    shared[2]['a'][:] = 9
    assert shared[2]['a'].tolist() == [0, 1]
    with pytest.raises(IndexError):
        shared[5]
    assert len(SharedList([])) == 0
    again = pickle.loads(pickle.dumps(shared))
    assert again[3]['b'] == 'xxx'


def test_real_key_frame():
    folder = shared_dir('data', 'nuscenes_keyframe')
    dataset = NuScenesDataset(str(folder / 'n015-2018-07-24-11-22-45+0800.pkl'), dataset_root=str(folder), test_mode=True,
                              modality=dict(use_lidar=True, use_camera=True))
    data = dataset.get_data_info(0)
    assert [Path(path).name.split('__')[1] for path in data['image_paths']] == [
        'CAM_FRONT', 'CAM_FRONT_RIGHT', 'CAM_FRONT_LEFT', 'CAM_BACK', 'CAM_BACK_LEFT', 'CAM_BACK_RIGHT']
    assert all(Path(path).is_file() for path in [data['lidar_path'], *data['image_paths']])
    boxes = data['ann_info']['gt_bboxes_3d']
    points = gt_database.read_points(data['lidar_path'], 5)
    biggest = int(np.argmax(load_info_file(dataset.ann_file).infos[0]['num_lidar_pts']))
    box = load_info_file(dataset.ann_file).infos[0]['gt_boxes'][biggest]
    hits = points[gt_database.points_in_box(points[:, :3], box)]
    # its points project into one of the images
    seen = 0
    for matrix in data['lidar2image']:
        uvd = np.column_stack([hits[:, :3], np.ones(len(hits))]) @ matrix.T
        uv = uvd[:, :2] / uvd[:, 2:3]
        seen += ((uvd[:, 2] > 0) & (uv > 0).all(1) & (uv[:, 0] < 1600) & (uv[:, 1] < 900)).sum()
    assert seen >= len(hits) * 0.9 and len(boxes) == int((load_info_file(dataset.ann_file).infos[0]['num_lidar_pts'] > 0).sum())
