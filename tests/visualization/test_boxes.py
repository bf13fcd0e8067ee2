"""Boxes on camera images: corners, projection at known pixels, clipping at the near plane and the borders."""
import numpy as np
import pytest
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes

from mmdet3d_ext.visualization import box_corners, draw_boxes, project
from mmdet3d_ext.visualization.boxes import clip_segment, put_text, visible_segments

RED = (255, 0, 0)
# A camera at the lidar's place that looks along lidar +y: u right = x, v down = -z, depth = y. Focal length 100 pixels,
# centre (100, 50).
K = np.array([[100.0, 0, 100, 0], [0, 100, 50, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
CAMERA_FROM_LIDAR = np.array([[1.0, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
MATRIX = K @ CAMERA_FROM_LIDAR


def blank():
    return np.zeros((100, 200, 3), dtype=np.uint8)


def test_a_point_at_a_known_pixel():
    pixels, depth = project(np.array([[1.0, 10.0, 0.5], [0, 5, 0]]), MATRIX)
    np.testing.assert_allclose(pixels, [[110, 45], [100, 50]])
    np.testing.assert_allclose(depth, [10, 5])


def test_corners_equal_mmdet3d_and_begin_with_the_front():
    rng = np.random.default_rng(0)
    boxes = np.concatenate([rng.uniform(-20, 20, (6, 3)), rng.uniform(1, 5, (6, 3)), rng.uniform(-4, 4, (6, 1)),
                            np.ones((6, 2))], 1)
    ours = box_corners(boxes)
    theirs = LiDARInstance3DBoxes(torch.tensor(boxes, dtype=torch.float32), box_dim=9).corners.numpy()
    for a, b in zip(ours, theirs):
        distance = np.linalg.norm(a[:, None] - b[None], axis=-1)
        assert (distance.min(1) < 1e-4).all() and len(set(distance.argmin(1))) == 8
    box = box_corners(np.array([[10.0, 0, -1, 4, 2, 1.5, np.pi / 2]]))[0]  # heads along +y
    np.testing.assert_allclose(box[0], [9, 2, -1], atol=1e-12)             # front left: forward 2, left 1
    np.testing.assert_allclose(box[1], [11, 2, -1], atol=1e-12)
    np.testing.assert_allclose(box[4:], box[:4] + [0, 0, 1.5], atol=1e-12)
    with pytest.raises(ValueError, match=r'got \(2, 6\)'):
        box_corners(np.zeros((2, 6)))


def test_a_box_appears_at_known_pixels():
    # 2 m cube with its near face at y = 10: that face spans 20 px around (100, 50)
    image = draw_boxes(blank(), np.array([[0.0, 11, -1, 2, 2, 2, 0]]), MATRIX, RED, 1)
    for column, row in ((90, 40), (110, 40), (90, 60), (110, 60), (100, 40), (90, 50), (100, 60)):
        assert image[row, column, 0] > 150, (column, row)
    drawn = np.argwhere(image.any(2))
    assert drawn.min(0).tolist() >= [39, 89] and drawn.max(0).tolist() <= [61, 111]
    assert image[..., 1:].max() == 0


def test_the_front_is_crossed():
    def middle(yaw):
        return draw_boxes(blank(), np.array([[0.0, 11, -1, 2, 2, 2, yaw]]), MATRIX, RED, 1)[46:55, 96:105].any()
    assert middle(-np.pi / 2) and not middle(0.0)  # heading to the camera; heading to the right


def test_boxes_behind_beside_or_broken_draw_nothing():
    boxes = np.array([[0.0, -11, -1, 2, 2, 2, 0], [500, 11, 0, 2, 2, 2, 0], [np.nan, 11, 0, 2, 2, 2, 0],
                      [0, 11, 0, 2, np.inf, 2, 0]])
    assert not draw_boxes(blank(), boxes, MATRIX, RED).any()
    for empty in (np.zeros((0, 7)), np.zeros((0, 9)), np.zeros(0)):
        assert not draw_boxes(blank(), empty, MATRIX, RED).any()


def test_a_box_through_the_camera_is_cut_at_the_near_plane():
    box = np.array([[0.0, 0, -1.0, 2, 30, 2, 0]])  # 30 m along y, the camera inside
    segments = visible_segments(box_corners(box)[0], MATRIX, (100, 200))
    assert segments and np.isfinite(np.array(segments)).all()
    ends = np.array(segments).reshape(-1, 2)
    assert ends.min() >= 0 and ends[:, 0].max() <= 199 and ends[:, 1].max() <= 99
    # the far face at 15 m is seen at its place: 13.3 px around the centre
    assert np.abs(ends - [100 - 100 / 15, 50 - 100 / 15]).sum(1).min() < 1e-6


def test_the_input_image_is_not_changed_and_may_be_read_only():
    image = blank()
    image.setflags(write=False)
    out = draw_boxes(image, np.array([[0.0, 11, -1, 2, 2, 2, 0]]), MATRIX, RED, labels=['car 0.90'])
    assert out.any() and not image.any()


def test_labels_stay_inside():
    image = blank()
    put_text(image, 'a long text that is wider than the picture itself', (190, -50), RED)
    assert image.any()


@pytest.mark.parametrize('a, b, expected', [
    ((-10, 5), (30, 5), ((0, 5), (20, 5))), ((5, -5), (5, 25), ((5, 0), (5, 10))), ((1, 1), (2, 2), ((1, 1), (2, 2))),
    ((-5, -5), (-1, 30), None), ((30, 5), (-10, 5), ((20, 5), (0, 5))), ((5, 20), (15, 20), None),
    ((3, 3), (3, 3), ((3, 3), (3, 3))),
])
def test_clip_segment(a, b, expected):
    got = clip_segment(np.array(a, float), np.array(b, float), 20, 10)
    assert (got is None) == (expected is None)
    if expected:
        np.testing.assert_allclose(got, expected)
