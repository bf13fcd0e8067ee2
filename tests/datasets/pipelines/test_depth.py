"""Depth targets on a hand-made camera."""
import numpy as np
import pytest
import torch
from pipeline_helpers import lidar_points

from mmdet3d_ext.geometry.transforms import bev_flip, bev_rotation_scale_translation, image_augmentation
from mmdet3d_ext.registry import PIPELINES

# A camera at the lidar looking along lidar y: camera x = lidar x, camera y = -lidar z, depth = lidar y.
CAMERA_FROM_LIDAR = np.array([[1, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1]], np.float32)
INTRINSICS = np.array([[50, 0, 40, 0], [0, 50, 30, 0], [0, 0, 1, 0], [0, 0, 0, 1]], np.float32)


def sample(points, **more):
    return dict(img=[np.zeros((60, 80, 3), np.uint8)], points=lidar_points(points),
                lidar2image=[INTRINSICS @ CAMERA_FROM_LIDAR], **more)


def ray(u, v, depth, lag=0.0):
    """The point that the camera sees at continuous pixel (u, v)."""
    return [(u - 40) * depth / 50, depth, -(v - 30) * depth / 50, 1.0, lag]


def test_nearest_point_wins_in_any_order():
    points = [ray(10.5, 20.5, 9), ray(10.2, 20.8, 4), ray(10.9, 20.1, 30), ray(70.5, 5.5, 12)]
    for order in ([0, 1, 2, 3], [1, 0, 2, 3], [3, 2, 0, 1]):
        depths = PIPELINES.build(dict(type='GTDepth'))(sample(np.array(points)[order]))['depths']
        assert depths.shape == (1, 60, 80) and depths.dtype == np.float32
        assert depths[0, 20, 10] == pytest.approx(4) and depths[0, 5, 70] == pytest.approx(12) and (depths > 0).sum() == 2
    last = PIPELINES.build(dict(type='GTDepth', compat='reference'))(sample(np.array(points)))['depths']
    assert last[0, 20, 10] == pytest.approx(30)


def test_points_behind_and_beside_the_image_are_left_out():
    points = [ray(40, 30, -5), ray(-0.5, 30, 5), ray(80.5, 30, 5), ray(40, 60.2, 5), ray(40, -0.2, 5), [0, 0, 0, 0, 0]]
    assert not PIPELINES.build(dict(type='GTDepth'))(sample(np.array(points)))['depths'].any()


def test_key_frame_only():
    points = [ray(10.5, 20.5, 9, lag=0.05), ray(30.5, 20.5, 7)]
    depths = PIPELINES.build(dict(type='GTDepth', keyframe_only=True))(sample(np.array(points)))['depths']
    assert depths[0, 20, 10] == 0 and depths[0, 20, 30] == pytest.approx(7)
    with pytest.raises(ValueError, match='4 columns'):
        PIPELINES.build(dict(type='GTDepth', keyframe_only=True))(sample(np.zeros((2, 4))))


def test_augmentations_of_scene_and_image_are_undone_and_done():
    scene = bev_flip(True, False) @ bev_rotation_scale_translation(0.7, 1.1, [1, -2, 0.3])
    image = image_augmentation((0.5, 0.5), (4, 3), (24, 30), flip=True)
    points = np.array([ray(30.4, 20.2, 9)], np.float32)
    moved = points.copy()
    moved[:, :3] = points[:, :3] @ scene[:3, :3].T + scene[:3, 3]
    data = sample(moved, lidar_aug_matrix=scene.astype(np.float32), img_aug_matrix=[image.astype(np.float32)])
    data['img'] = [torch.zeros(3, 24, 30)]
    before = data['points'].tensor.clone()
    depths = PIPELINES.build(dict(type='GTDepth'))(data)['depths']
    u, v = (image @ [30.4, 20.2, 0, 1])[:2]
    assert depths[0, int(v), int(u)] == pytest.approx(9, rel=1e-4) and (depths > 0).sum() == 1
    assert (data['points'].tensor == before).all()


def test_nothing_to_see():
    step = PIPELINES.build(dict(type='GTDepth'))
    assert not step(sample(np.zeros((0, 5))))['depths'].any()
    assert 'depths' not in step(dict(points=lidar_points(np.zeros((1, 5)))))
    assert 'depths' not in step(dict(img=[np.zeros((4, 4, 3), np.uint8)]))
    with pytest.raises(KeyError, match='lidar2image.*meta_keys'):
        step(dict(img=[np.zeros((4, 4, 3), np.uint8)], points=lidar_points(np.zeros((1, 5)))))
