"""Scene augmentation, filters, shuffling and pasting on ordinary, empty and absent inputs."""
import numpy as np
import pytest
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from pipeline_helpers import lidar_points, scene

from mmdet3d_ext.datasets.pipelines.common import transform_boxes
from mmdet3d_ext.datasets.pipelines.paste import points_in_boxes
from mmdet3d_ext.geometry import BevGrid
from mmdet3d_ext.geometry.transforms import bev_flip, bev_rotation_scale_translation
from mmdet3d_ext.registry import PIPELINES

GLOBAL = dict(type='GlobalRotScaleTrans', resize_lim=[0.9, 1.1], rot_lim=[-0.78, 0.78], trans_lim=[0.5, 0.5, 0.2],
              is_train=True)
BOUNDS = [-51.2, -51.2, -5.0, 51.2, 51.2, 3.0]
STEPS = [GLOBAL, dict(type='RandomFlip3D'), dict(type='PointsRangeFilter', point_cloud_range=BOUNDS),
         dict(type='ObjectRangeFilter', point_cloud_range=BOUNDS), dict(type='ObjectNameFilter', classes=['a', 'b']),
         dict(type='PointShuffle')]


@pytest.mark.parametrize('seed', range(5))
def test_boxes_follow_like_their_corners(seed):
    rng = np.random.default_rng(seed)
    boxes = scene(num_boxes=6, seed=seed)['gt_bboxes_3d']
    matrix = bev_flip(bool(seed % 2), bool(seed // 2)) @ bev_rotation_scale_translation(
        rng.uniform(-3, 3), rng.uniform(0.8, 1.2), rng.normal(size=3))
    moved = transform_boxes(boxes, matrix)
    expected = boxes.corners.numpy() @ matrix[:3, :3].T + matrix[:3, 3]
    for corners, target in zip(moved.corners.numpy(), expected):
        distance = np.linalg.norm(corners[:, None] - target[None], axis=-1)
        assert distance.min(axis=1).max() < 1e-3
    heading = np.stack([np.cos(boxes.tensor[:, 6]), np.sin(boxes.tensor[:, 6])], axis=1) @ matrix[:2, :2].T
    actual = np.stack([np.cos(moved.tensor[:, 6]), np.sin(moved.tensor[:, 6])], axis=1)
    np.testing.assert_allclose(actual, heading / np.linalg.norm(heading, axis=1, keepdims=True), atol=1e-5)
    np.testing.assert_allclose(moved.tensor[:, 7:9].numpy(), boxes.tensor[:, 7:9].numpy() @ matrix[:2, :2].T, atol=1e-4)


def test_boxes_agree_with_mmdet3d():
    boxes = scene(num_boxes=5)['gt_bboxes_3d']
    expected = boxes.clone()
    expected.rotate(-0.4)
    expected.translate(torch.tensor([1.0, 2.0, 0.5]))
    expected.scale(1.05)
    expected.flip('horizontal')
    expected.flip('vertical')
    actual = transform_boxes(boxes, bev_flip(True, True) @ bev_rotation_scale_translation(0.4, 1.05, [1.0, 2.0, 0.5]))
    difference = (actual.tensor - expected.tensor).numpy()
    difference[:, 6] = (difference[:, 6] + np.pi) % (2 * np.pi) - np.pi
    assert np.abs(difference).max() < 1e-4


def test_matrix_accumulates_from_the_left_and_maps_every_point():
    data = scene()
    before = data['points'].tensor.numpy().copy()
    np.random.seed(1)
    for cfg in (dict(type='RandomFlip3D'), GLOBAL, dict(type='RandomFlip3D'), GLOBAL):
        data = PIPELINES.build(cfg)(data)
    matrix = data['lidar_aug_matrix']
    assert matrix.dtype == np.float32
    expected = before[:, :3] @ matrix[:3, :3].T + matrix[:3, 3]
    np.testing.assert_allclose(data['points'].tensor[:, :3].numpy(), expected, atol=1e-3)
    np.testing.assert_array_equal(data['points'].tensor[:, 3:].numpy(), before[:, 3:])


def test_originals_are_not_changed():
    data = scene()
    points, boxes, labels = data['points'], data['gt_bboxes_3d'], data['gt_labels_3d']
    matrix = np.eye(4, dtype=np.float32)
    masks = np.random.default_rng(0).integers(0, 2, (2, 8, 8))
    before = points.tensor.clone(), boxes.tensor.clone(), labels.copy(), masks.copy()
    data['lidar_aug_matrix'] = matrix
    for seed in range(4):
        np.random.seed(seed)
        moved = dict(data)
        for cfg in STEPS:
            moved = PIPELINES.build(cfg)(moved)
        PIPELINES.build(dict(type='RandomFlip3D'))(dict(data, gt_masks_bev=masks))
    assert (points.tensor == before[0]).all() and (boxes.tensor == before[1]).all()
    np.testing.assert_array_equal(labels, before[2])
    np.testing.assert_array_equal(masks, before[3])
    np.testing.assert_array_equal(matrix, np.eye(4))


@pytest.mark.parametrize('points, boxes', [(0, 0), (0, 3), (1, 1), (50, 0)])
def test_empty_inputs_pass_every_step(points, boxes):
    data = scene(points, boxes)
    for cfg in STEPS:
        data = PIPELINES.build(cfg)(data)
    assert data['points'].tensor.shape[1] == 5 and data['gt_bboxes_3d'].tensor.shape[1] == 9
    assert len(data['gt_bboxes_3d']) == len(data['gt_labels_3d']) <= boxes


@pytest.mark.parametrize('absent', [['points'], ['gt_bboxes_3d', 'gt_labels_3d'], ['points', 'gt_bboxes_3d', 'gt_labels_3d']])
def test_absent_inputs_pass_every_step(absent):
    data = scene()
    for key in absent:
        del data[key]
    for cfg in STEPS:
        data = PIPELINES.build(cfg)(data)
    assert not set(absent) & set(data) and data['lidar_aug_matrix'].shape == (4, 4)


def test_a_single_box_keeps_its_label():
    data = scene(num_boxes=1)
    data['gt_labels_3d'] = np.array([1])
    for cfg in STEPS[2:5]:
        data = PIPELINES.build(cfg)(data)
    assert data['gt_labels_3d'].tolist() == [1] and data['gt_bboxes_3d'].tensor.shape == (1, 9)


def test_ranges_exclude_both_ends():
    points = np.zeros((8, 5), np.float32)
    points[:, :3] = [[51.2, 0, 0], [-51.2, 0, 0], [0, 51.2, 0], [0, -51.2, 0], [0, 0, 3], [0, 0, -5],
                     [51.19, -51.19, 2.99], [0, 0, 0]]
    data = PIPELINES.build(dict(type='PointsRangeFilter', point_cloud_range=BOUNDS))(dict(points=lidar_points(points)))
    np.testing.assert_array_equal(data['points'].tensor.numpy(), points[6:])
    with pytest.raises(ValueError, match='point_cloud_range'):
        PIPELINES.build(dict(type='PointsRangeFilter', point_cloud_range=[0, 0, 0, 1, 1, 0]))


def test_labels_outside_the_classes_are_dropped():
    data = scene(num_boxes=4)
    data['gt_labels_3d'] = np.array([-1, 1, 2, 0])
    kept = data['gt_bboxes_3d'].tensor[[1, 3]]
    data = PIPELINES.build(dict(type='ObjectNameFilter', classes=['a', 'b']))(data)
    assert data['gt_labels_3d'].tolist() == [1, 0] and (data['gt_bboxes_3d'].tensor == kept).all()


def test_shuffle_is_a_permutation_from_numpys_generator():
    data = scene()
    before = data['points'].tensor.clone()
    np.random.seed(5)
    first = PIPELINES.build(dict(type='PointShuffle'))(dict(data))['points'].tensor
    np.random.seed(5)
    second = PIPELINES.build(dict(type='PointShuffle'))(dict(data))['points'].tensor
    assert (first == second).all() and not (first == before).all()
    assert (torch.sort(first[:, 0])[0] == torch.sort(before[:, 0])[0]).all()


def test_map_labels_cannot_lag_behind():
    with pytest.raises(ValueError, match='before LoadBEVSegmentation'):
        PIPELINES.build(GLOBAL)(dict(scene(), gt_masks_bev=np.zeros((1, 4, 4))))
    data = dict(scene(), gt_masks_bev=np.zeros((1, 100, 80)), bev_grid=BevGrid.parse([-50, 50, 1], [-30, 50, 1]))
    seen = 0
    for seed in range(8):
        np.random.seed(seed)
        try:
            PIPELINES.build(dict(type='RandomFlip3D'))(dict(data))
        except ValueError as error:
            assert 'y [-30, 50]' in str(error) and 'after RandomFlip3D' in str(error)
            seen += 1
    assert 0 < seen < 8


def test_wrong_augmentation_arguments():
    with pytest.raises(ValueError, match='resize_lim'):
        PIPELINES.build(dict(GLOBAL, resize_lim=[0.0, 1.0]))
    with pytest.raises(ValueError, match='low, high'):
        PIPELINES.build(dict(GLOBAL, rot_lim=[0.1]))


class FixedSampler:
    """Pastes the same boxes; remembers what it was asked."""

    def __init__(self, boxes, labels, points):
        self.answer = dict(gt_bboxes_3d=boxes, gt_labels_3d=labels, points=points)
        self.asked = []

    def sample_all(self, boxes, labels):
        self.asked.append((boxes.tensor.clone(), labels.copy()))
        return self.answer


def pasted_scene():
    box = LiDARInstance3DBoxes(np.array([[10, 5, -1, 4, 2, 1.5, 0.5, 1, 0]], np.float32), box_dim=9)
    inside = box.gravity_center.numpy() + np.array([[0.3, 0.2, 0.1], [-0.5, 0.1, 0.6]])
    outside = np.array([[10.0, 5.0, 0.6], [10.0, 5.0, -1.1], [13.0, 5.0, 0.0]])
    cloud = np.concatenate([np.concatenate([inside, outside]), np.zeros((5, 2))], axis=1)
    data = dict(token='t', points=lidar_points(cloud), gt_labels_3d=np.array([2]),
                gt_bboxes_3d=LiDARInstance3DBoxes(np.array([[-10, 0, -1, 4, 2, 1.5, 0, 0, 0]], np.float32), box_dim=9))
    return data, FixedSampler(box, np.array([1]), lidar_points(np.full((3, 5), 7.0))), outside


def test_paste_replaces_scene_points_inside_the_new_box():
    data, sampler, outside = pasted_scene()
    before = data['points'].tensor.clone()
    original = data['points']
    result = PIPELINES.build(dict(type='ObjectPaste', db_sampler=sampler))(data)
    points = result['points'].tensor.numpy()
    assert (points[:3] == 7).all()
    np.testing.assert_allclose(points[3:, :3], outside, atol=1e-6)
    assert result['gt_labels_3d'].tolist() == [2, 1] and result['gt_bboxes_3d'].tensor.shape == (2, 9)
    assert (original.tensor == before).all() and sampler.asked[0][1].tolist() == [2]


def test_paste_until_the_epoch():
    data, sampler, _ = pasted_scene()
    step = PIPELINES.build(dict(type='ObjectPaste', db_sampler=sampler, stop_epoch=3))
    for epoch, pasted in ((0, True), (2, True), (3, False), (9, False), (1, True)):
        step.set_epoch(epoch)
        assert (len(step(dict(data))['gt_labels_3d']) == 2) == pasted
    never = PIPELINES.build(dict(type='ObjectPaste', db_sampler=dict(info_path='/not/there.pkl'), stop_epoch=-1))
    assert len(never(dict(data))['gt_labels_3d']) == 1


def test_paste_into_an_empty_scene_and_pasting_nothing():
    data, sampler, _ = pasted_scene()
    data = dict(data, points=lidar_points(np.zeros((0, 5))), gt_labels_3d=np.zeros(0, np.int64),
                gt_bboxes_3d=data['gt_bboxes_3d'][torch.zeros(1, dtype=torch.bool)])
    result = PIPELINES.build(dict(type='ObjectPaste', db_sampler=sampler))(dict(data))
    assert len(result['points']) == 3 and result['gt_labels_3d'].tolist() == [1]
    sampler.answer = None
    assert len(PIPELINES.build(dict(type='ObjectPaste', db_sampler=sampler))(dict(data))['points']) == 0


def test_paste_without_points_changes_nothing_and_says_so():
    data, sampler, _ = pasted_scene()
    del data['points']
    with pytest.warns(UserWarning, match='loads no points'):
        result = PIPELINES.build(dict(type='ObjectPaste', db_sampler=sampler))(data)
    assert len(result['gt_labels_3d']) == 1


def test_paste_reports_what_does_not_fit():
    data, sampler, _ = pasted_scene()
    step = PIPELINES.build(dict(type='ObjectPaste', db_sampler=sampler))
    with pytest.raises(KeyError, match='LoadAnnotations3D'):
        step(dict(points=data['points']))
    sampler.answer['points'] = lidar_points(np.zeros((3, 4)))
    with pytest.raises(ValueError, match='4 columns.*5'):
        step(dict(data))
    sampler.answer['gt_bboxes_3d'] = LiDARInstance3DBoxes(np.ones((1, 7), np.float32))
    with pytest.raises(ValueError, match='velocity'):
        step(dict(data))
    with pytest.raises(TypeError, match='sample_all'):
        PIPELINES.build(dict(type='ObjectPaste', db_sampler=3))
    with pytest.raises(ValueError, match='sample_2d'):
        PIPELINES.build(dict(type='ObjectPaste', db_sampler=sampler, sample_2d=True))


def test_points_in_boxes_equals_a_slow_reference():
    rng = np.random.default_rng(0)
    boxes = scene(num_boxes=8, seed=3)['gt_bboxes_3d']
    boxes.tensor[:, :2] *= 0.2
    points = rng.uniform((-12, -12, -4), (12, 12, 4), (3000, 3)).astype(np.float32)
    expected = np.zeros(3000, bool)
    for box in boxes.tensor.numpy().astype(float):
        turn = np.array([[np.cos(box[6]), np.sin(box[6])], [-np.sin(box[6]), np.cos(box[6])]])
        local = (points[:, :2] - box[:2]) @ turn.T
        expected |= ((np.abs(local) <= box[3:5] / 2).all(axis=1) & (points[:, 2] >= box[2]) & (points[:, 2] <= box[2] + box[5]))
    assert 100 < expected.sum() < 2900
    np.testing.assert_array_equal(points_in_boxes(points, boxes), expected)
    for value in (np.nan, np.inf):
        broken = boxes.tensor[:2].clone()
        broken[0, 0], broken[1, 3] = value, value
        np.testing.assert_array_equal(points_in_boxes(points, boxes.new_box(torch.cat([broken, boxes.tensor]))), expected)
        assert not points_in_boxes(points, boxes.new_box(broken)).any()


def test_paste_with_the_database_sampler(tmp_path):
    """Built from a configuration, as training does."""
    from mmdet3d_ext.datasets import restricted_pickle
    from mmdet3d_ext.datasets.nuscenes_schema import BOX_CONVENTION
    np.array([[0.1, 0.2, 0.5, 9, 0], [-0.3, 0.1, 1.0, 9, 0]], np.float32).tofile(tmp_path / 'object.bin')
    entry = dict(name='car', path='object.bin', image_idx='x', gt_idx=0, num_points_in_gt=2, difficulty=0, group_id=0,
                 box3d_lidar=np.array([20, 10, -1, 4, 2, 1.5, 0.3, 1, 0], np.float32), box_convention=BOX_CONVENTION)
    restricted_pickle.save({'car': [entry]}, tmp_path / 'dbinfos.pkl')
    step = PIPELINES.build(dict(type='ObjectPaste', stop_epoch=2, db_sampler=dict(
        info_path=str(tmp_path / 'dbinfos.pkl'), dataset_root=str(tmp_path), classes=['car'],
        sample_groups=dict(car=1), rate=1.0,
        points_loader=dict(type='LoadPointsFromFile', coord_type='LIDAR', load_dim=5, use_dim=5, reduce_beams=32))))
    data = dict(scene(num_boxes=0), gt_labels_3d=np.zeros(0, np.int64))
    result = step(dict(data))
    np.testing.assert_allclose(result['gt_bboxes_3d'].tensor[0].numpy(), entry['box3d_lidar'])
    np.testing.assert_allclose(result['points'].tensor[0].numpy(), [20.1, 10.2, -0.5, 9, 0], atol=1e-5)
    assert len(result['points']) == 202 and result['gt_labels_3d'].tolist() == [0]
