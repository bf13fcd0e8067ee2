"""Depth maps drawn from points: which point wins, what is left out, and that nothing is changed in place."""
import math

import numpy as np
import pytest
import torch

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.models.vtransforms.depth_map import draw_depth, drawn_points, expand_heights, project

H, W = 20, 30
FRONT = torch.tensor([[10.0, 0, 15, 0], [0, 10, 10, 0], [0, 0, 1, 0], [0, 0, 0, 1]])  # camera 0 looks along lidar z
BACK = torch.tensor([[10.0, 0, -15, 0], [0, 10, -10, 0], [0, 0, -1, 0], [0, 0, 0, 1]])  # camera 1 the other way
CAMERAS = torch.stack([FRONT, BACK])
SAME = torch.eye(4)


def draw(points, lidar2image=CAMERAS, image=None, lidar=SAME, **kwargs):
    image = torch.eye(4).expand(len(lidar2image), 4, 4) if image is None else image
    return draw_depth(torch.as_tensor(points, dtype=torch.float32).reshape(-1, 5), lidar2image, image, lidar, (H, W), **kwargs)


def test_a_point_lands_in_its_pixel_with_its_depth():
    out = draw([[0.25, 0.1, 5.0, 0, 0]])  # u = 10 * 0.05 + 15, v = 10 * 0.02 + 10
    assert out.shape == (2, 1, H, W) and out.nonzero().tolist() == [[0, 0, 10, 15]] and out[0, 0, 10, 15] == 5.0


def test_the_nearest_point_of_a_pixel_wins_and_in_compat_the_last():
    points = [[0, 0, 9.0, 1, 1], [0, 0, 4.0, 2, 2], [0, 0, 6.0, 3, 3]]
    assert draw(points)[0, 0, 10, 15] == 4.0
    assert draw(points, compat='reference')[0, 0, 10, 15] == 6.0
    full = draw(points, features=True)
    assert full.shape == (2, 6, H, W) and full[0, 1:, 10, 15].tolist() == [0, 0, 4, 2, 2]
    assert draw(points, features=True, compat='reference')[0, 1:, 10, 15].tolist() == [0, 0, 6, 3, 3]


def test_equals_a_slow_loop_over_random_points():
    rng = np.random.default_rng(3)
    points = torch.from_numpy(rng.uniform(-6, 6, (400, 5)).astype(np.float32))
    angle = 0.3
    lidar = torch.tensor([[math.cos(angle), math.sin(angle), 0, 1], [-math.sin(angle), math.cos(angle), 0, -2],
                          [0, 0, 1.1, 0.5], [0, 0, 0, 1]])
    image = torch.eye(4).repeat(2, 1, 1)
    image[1, :2, :2] = torch.tensor([[-1.0, 0], [0, 1]])
    image[1, 0, 3] = W
    expected = np.zeros((2, H, W))
    original = (torch.linalg.inv(lidar) @ torch.cat([points[:, :3], torch.ones(400, 1)], 1).T).double()
    for camera in range(2):
        for x, y, d, _ in (CAMERAS[camera].double() @ original).T.tolist():
            if d <= 0:
                continue
            u, v, _, _ = (image[camera].double() @ torch.tensor([x / d, y / d, d, 1]).double()).tolist()
            if 0 <= u < W and 0 <= v < H:
                old = expected[camera, int(v), int(u)]
                expected[camera, int(v), int(u)] = d if old == 0 else min(old, d)
    got = draw(points, image=image, lidar=lidar)[:, 0].double().numpy()
    assert (expected > 0).sum() > 60
    different = np.argwhere(~np.isclose(got, expected, rtol=1e-5))
    assert len(different) <= 2, f'{different}: more than a pixel edge can explain'


def test_points_behind_the_camera_are_left_out_and_in_compat_drawn_at_no_depth():
    behind = [[1e-5, 1e-5, -1e-7, 0, 0]]  # only positions next to the camera's centre fall on the image
    assert (draw(behind, lidar2image=CAMERAS[:1]) == 0).all()
    old = draw(behind, lidar2image=CAMERAS[:1], compat='reference')
    assert old.nonzero().tolist() == [[0, 0, 9, 9]] and float(old.max()) == pytest.approx(1e-5)


@pytest.mark.parametrize('compat', [None, 'reference'])
@pytest.mark.parametrize('bins', [None, (1.0, 2.0, 4)])
def test_no_points_and_broken_points_draw_nothing(compat, bins):
    channels = 1 if bins is None else 4
    assert draw([], compat=compat, bins=bins).shape == (2, channels, H, W)
    nan = float('nan')
    assert (draw([[nan, 0, 5, 0, 0], [0, 0, nan, 0, 0]], compat=compat, bins=bins) == 0).all()


def test_bins_follow_the_depth_bounds_and_in_compat_whole_metres():
    points = [[0, 0, d, 0, 0] for d in (0.5, 1.5, 3.5, 99.0)]
    out = draw(points, bins=(1.0, 2.0, 4))[0, :, 10, 15]
    assert out.tolist() == [1, 1, 0, 1], 'before the first, in the first, in the second bin, behind the last'
    out = draw(points, bins=(1.0, 2.0, 4), compat='reference')[0, :, 10, 15]
    assert out.tolist() == [1, 1, 0, 1]  # int(0.5), int(1.5), int(3.5) and the last
    assert draw([[0, 0, 4.5, 0, 0]], bins=(1.0, 2.0, 4))[0, :, 10, 15].tolist() == [0, 1, 0, 0]
    assert draw([[0, 0, 2.5, 0, 0]], bins=(1.0, 2.0, 4), compat='reference')[0, :, 10, 15].tolist() == [0, 0, 1, 0]


def test_nothing_is_changed_in_place():
    points = torch.tensor([[0.3, 0.2, 5.0, 7, 8]])
    lidar = torch.eye(4)
    lidar[:3, 3] = torch.tensor([0.1, 0.2, 0.3])
    keep = [t.clone() for t in (points, lidar, CAMERAS)]
    for compat in (None, 'reference'):
        out = draw_depth(points, CAMERAS, torch.eye(4).expand(2, 4, 4), lidar, (H, W), features=True, compat=compat)
        at = out[0, 0].nonzero()[0]
        shift = torch.tensor([0.0, 0, 0]) if compat is None else lidar[:3, 3]
        torch.testing.assert_close(out[0, 1:4, at[0], at[1]], points[0, :3] - shift)
    for old, new in zip(keep, (points, lidar, CAMERAS), strict=True):
        assert torch.equal(old, new)
    repeated = expand_heights(points)
    assert repeated.shape == (8, 5) and repeated[:, 2].tolist() == [0.25 * k for k in range(1, 9)]
    assert torch.equal(points, keep[0]) and (repeated[:, [0, 1, 3, 4]] == points[:, [0, 1, 3, 4]]).all()


def test_non_contiguous_points():
    wide = torch.randn(50, 10) * 3
    view = wide[:, ::2]
    assert torch.equal(draw_depth(view, CAMERAS, SAME.expand(2, 4, 4), SAME, (H, W)),
                       draw_depth(view.contiguous(), CAMERAS, SAME.expand(2, 4, 4), SAME, (H, W)))


def test_drawn_points():
    pixel = torch.tensor([[5, 2, 5, 9, 5], [2, 9, 9, 1, 2]])  # two cameras, five points; 9 is outside of the nine pixels
    depth = torch.tensor([[3.0, 1, 2, 0, 2], [0.5, 4, 4, 7, 0.5]])
    assert drawn_points(pixel, 9, depth).tolist() == [5, 3, 0, 5, 5, 2, 5, 5, 5], 'nearest, the first of equally near ones'
    assert drawn_points(pixel, 9, None).tolist() == [5, 3, 4, 5, 5, 4, 5, 5, 5], 'the last one'
    assert drawn_points(pixel[:, :0], 3, None).tolist() == [0, 0, 0] == drawn_points(pixel[:, :0], 3, depth[:, :0]).tolist()


def test_projection_returns_negative_depth_behind_the_camera():
    uv, depth = project(torch.tensor([[1.0, 2.0, -4.0]]), CAMERAS, SAME.expand(2, 4, 4), SAME)
    assert depth.tolist() == [[-4.0], [4.0]] and torch.isfinite(uv).all()


@pytest.mark.gpu
def test_gpu_equals_cpu():
    points = torch.randn(5000, 5) * 4
    args = (points, CAMERAS, SAME.expand(2, 4, 4), SAME)
    expected = draw_depth(*args, (H, W), features=True)
    got = draw_depth(*(a.cuda() for a in args), (H, W), features=True).cpu()
    # a point on a pixel edge may fall on the other side
    assert (got != expected).any(1).float().mean() < 1e-3
