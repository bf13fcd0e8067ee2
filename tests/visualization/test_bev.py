"""Bird's-eye pictures: forward is up, right is right, metres land on known pixels."""
import numpy as np
import pytest

from mmdet3d_ext.visualization import View, draw_boxes_bev, draw_ego, draw_points, map_image
from mmdet3d_ext.visualization.bev import blank
from mmdet3d_ext.visualization.palette import MAP_COLORS, PAPER, map_colors

VIEW = View(-20.0, -10.0, 20.0, 30.0, 400)  # 10 px per metre
BLACK = (0, 0, 0)
RED = (255, 0, 0)


def lit(image):
    return {(int(column), int(row)) for row, column in np.argwhere(image.any(2))}


def test_view():
    assert VIEW.scale == 10 and VIEW.width == 400 and View(-10, 0, 30, 20, 100).width == 200
    np.testing.assert_allclose(VIEW.pixels(np.array([[0.0, 0.0], [-20, 30], [3, 10]])), [[200, 300], [0, 0], [230, 200]])


def test_points_forward_up_right_right():
    ahead, right, behind = [0.05, 20.05, 0], [10.05, 0.05, 0], [0.05, -5.05, 0]
    pixels = [lit(draw_points(blank(VIEW, BLACK), np.array([p]), VIEW)) for p in (ahead, right, behind)]
    assert pixels == [{(200, 99)}, {(300, 299)}, {(200, 350)}]


def test_points_outside_and_broken_points_are_left_out():
    points = np.array([[100.0, 0, 0, 1], [np.nan, 0, 0, 1], [0, np.inf, 0, 1], [0, 0, np.nan, 1], [20.0, 0, 0, 1],
                       [0, 30.1, 0, 1]])
    assert not draw_points(blank(VIEW, BLACK), points, VIEW).any()
    for empty in (np.zeros((0, 5)), np.zeros(0)):
        assert not draw_points(blank(VIEW, BLACK), empty, VIEW).any()


def test_a_box_lies_where_it_is_and_shows_its_heading():
    image = draw_boxes_bev(blank(VIEW, BLACK), np.array([[5.0, 10, -1, 4, 2, 1.5, np.pi / 2]]), VIEW, RED)  # heads forward
    drawn = lit(image)
    columns, rows = zip(*drawn)
    assert abs(min(columns) - 240) <= 1 and abs(max(columns) - 260) <= 1   # 2 m wide around x = 5
    assert abs(min(rows) - 180) <= 1 and abs(max(rows) - 220) <= 1         # 4 m long around y = 10
    assert image[190, 249:252].any() and not image[210, 245:256].any()     # the heading line ends at the front, which is up
    bad = np.array([[np.nan] * 7, [1e7, 1e7, 0, 4, 2, 1, 0]])
    assert not draw_boxes_bev(blank(VIEW, BLACK), bad, VIEW, RED, labels=['a', 'b']).any()


def test_ego_arrow_points_forward():
    image = draw_ego(blank(VIEW, BLACK), VIEW, rings=())
    rows, columns = np.nonzero(image.any(2))
    widths = [np.ptp(columns[rows == row]) for row in (rows.min() + 1, rows.max() - 1)]
    assert widths[0] < widths[1] and abs(columns.mean() - 200) < 1 and rows.min() < 300 < rows.max()


def test_map_axes():
    masks = np.zeros((2, 4, 6), dtype=np.uint8)
    masks[0, 3, 5] = 1   # the cell farthest right and farthest forward
    masks[1, 0, 0] = 1   # left, behind
    image = map_image(masks, ['drivable_area', 'divider'], (60, 40))
    assert (image[:10, 30:] == MAP_COLORS['drivable_area']).all() and (image[50:, :10] == MAP_COLORS['divider']).all()
    image[:10, 30:], image[50:, :10] = PAPER, PAPER
    assert (image == PAPER).all()


def test_map_order_threshold_nan_and_types():
    masks = np.full((2, 3, 3), 0.5, dtype=np.float32)
    masks[1, 1, 1], masks[1, 2, 2] = 0.4999, np.nan
    image = map_image(masks, ['drivable_area', 'walkway'], (3, 3))
    assert tuple(image[1, 1]) == MAP_COLORS['drivable_area'] == tuple(image[0, 2]) and tuple(image[2,
                                                                                                   0]) == MAP_COLORS['walkway']
    for dtype in (bool, np.uint8, np.int64, np.float16):
        assert (map_image((masks >= 0.5).astype(dtype), ['drivable_area', 'walkway'], (3, 3)) == image).all()
    with pytest.raises(ValueError, match=r'for 1 classes, got \(2, 3, 3\)'):
        map_image(masks, ['walkway'], (3, 3))


@pytest.mark.parametrize('size', [(50, 50), (37, 23), (800, 800)])
def test_thin_lines_survive_reduction(size):
    masks = np.zeros((1, 400, 400), dtype=bool)
    masks[0, 123] = True
    image = map_image(masks, ['divider'], size)
    hit = (image == MAP_COLORS['divider']).all(2)
    assert hit.any(1).all() and hit.any(0).sum() == max(1, size[1] // 400)


def test_unknown_classes_get_different_colours():
    colors = map_colors(['divider', 'lake', 'forest'])
    assert len(set(colors.values())) == 3
