"""Named transforms against step-by-step geometry."""
import numpy as np
import pytest
import torch

from mmdet3d_ext.geometry import transforms as T


def random_rigid(seed):
    rng = np.random.default_rng(seed)
    rotation, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    rotation *= np.sign(np.linalg.det(rotation))
    return T.homogeneous(rotation, rng.normal(size=3) * 100)


def test_homogeneous_checks_shapes():
    with pytest.raises(ValueError, match='3x3'):
        T.homogeneous(np.eye(4))
    with pytest.raises(ValueError, match='3 values'):
        T.homogeneous(np.eye(3), [1, 2])
    np.testing.assert_array_equal(T.homogeneous(), np.eye(4))


def test_project_points_pinhole():
    camera = np.array([[100.0, 0, 50, 0], [0, 120.0, 40, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    points = np.array([[0.0, 0, 2], [1, -1, 4], [0, 0, -3]])
    pixels, depth = T.project_points(camera, points)
    np.testing.assert_allclose(pixels[:2], [[50, 40], [75, 10]])
    np.testing.assert_allclose(depth, [2, 4, -3])
    torch_pixels, torch_depth = T.project_points(torch.from_numpy(camera), torch.from_numpy(points))
    np.testing.assert_allclose(torch_pixels.numpy(), pixels)
    np.testing.assert_allclose(torch_depth.numpy(), depth)


def test_image_augmentation_step_by_step():
    matrix = T.image_augmentation((0.5, 0.4), (10, 20), (100, 200), flip=True, degrees=30)
    u, v = 300.0, 150.0
    u, v = u * 0.5 - 10, v * 0.4 - 20
    u = 200 - u
    turn = np.deg2rad(30)
    du, dv = u - 100, v - 50
    # Counter-clockwise as seen, with v down: a point to the right of the centre moves up (v falls).
    expected = [100 + du * np.cos(turn) + dv * np.sin(turn), 50 - du * np.sin(turn) + dv * np.cos(turn)]
    np.testing.assert_allclose((matrix @ [300, 150, 0, 1])[:2], expected)
    np.testing.assert_allclose((matrix @ [300, 150, 7, 1])[2], 7)


def test_bev_rotation_scale_translation_order_and_sense():
    matrix = T.bev_rotation_scale_translation(np.pi / 2, 2.0, [1.0, 0.0, 0.5])
    # Forward (0, 1, 0) turns clockwise to the right (1, 0, 0), moves to (2, 0, 0.5), doubles to (4, 0, 1).
    np.testing.assert_allclose(matrix @ [0, 1, 0, 1], [4, 0, 1, 1], atol=1e-12)
    with pytest.raises(ValueError, match='positive'):
        T.bev_rotation_scale_translation(0, 0, [0, 0, 0])


def test_bev_flip_names():
    np.testing.assert_array_equal(T.bev_flip(True, False) @ [1, 2, 3, 1], [1, -2, 3, 1])
    np.testing.assert_array_equal(T.bev_flip(False, True) @ [1, 2, 3, 1], [-1, 2, 3, 1])


def test_bev_affine_is_the_transform_of_ground_points():
    bev_from_world = random_rigid(3)
    affine = T.bev_affine(bev_from_world, ground_z=2.5)
    world = np.random.default_rng(0).normal(size=(10, 2)) * 30
    expected = T.transform_points(bev_from_world, np.concatenate([world, np.full((10, 1), 2.5)], axis=1))[:, :2]
    np.testing.assert_allclose(world @ affine[:, :2].T + affine[:, 2], expected, atol=1e-10)
