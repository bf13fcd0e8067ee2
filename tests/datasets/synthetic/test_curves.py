import numpy as np
import pytest
import shapely
from nuscenes.map_expansion.arcline_path_utils import discretize_lane

from mmdet3d_ext.datasets.synthetic.curves import Polyline, arcline_path, bezier, join, rectangles


def test_polyline_by_arc_length():
    line = Polyline([[0, 0], [3, 0], [3, 4]])
    assert line.length == 7
    assert np.allclose(line.position([1.5, 5.0, 99.0, -1.0]), [[1.5, 0], [3, 2], [3, 4], [0, 0]])
    straight = Polyline([[1, 1], [1, 5], [1, 9]])
    assert np.allclose(straight.heading([0, 4, 8]), np.pi / 2)
    # Left of a line that runs north is west.
    assert np.allclose(straight.offset(2.0, 0.5), [0.5, 3.0])
    assert np.allclose(straight.trimmed(1, 3).points[[0, -1]], [[1, 2], [1, 4]])


def test_heading_does_not_jump_at_pi():
    angles = np.linspace(np.pi - 0.5, np.pi + 0.5, 40)
    line = Polyline(50 * np.stack([np.sin(angles), -np.cos(angles)], 1))
    assert np.abs(np.diff(line.heading(line.s))).max() < 0.05


@pytest.mark.parametrize('end', [(20, 0, 0), (14, 9, np.pi / 2), (14, -9, -np.pi / 2), (6, 12, np.pi), (40, 3, 0.2)])
def test_arcline_path_follows_the_curve(end):
    line = Polyline(join((0, 0, 0), end))
    path = arcline_path(line)
    points = np.array(discretize_lane(path, 0.5))[:, :2]
    distance = shapely.distance(shapely.linestrings(line.points), shapely.points(points))
    assert distance.max() < 0.2
    assert np.allclose(points[-1], end[:2], atol=1e-6)
    length = sum(sum(piece['segment_length']) for piece in path)
    assert line.length * 0.99 < length < line.length * 1.05
    for before, after in zip(path[:-1], path[1:]):
        assert before['end_pose'] == after['start_pose']


def test_straight_line_is_one_piece_without_turns():
    path = arcline_path(Polyline(np.linspace([3, 4], [33, 44], 20)))
    assert len(path) == 1
    assert np.allclose(path[0]['segment_length'], [0, 50, 0], atol=1e-4)


def test_bezier_ends_and_tangents():
    controls = np.array([[0, 0], [1, 0], [2, 5], [3, 5]], float)
    points = bezier(controls, 50)
    assert np.allclose(points[[0, -1]], controls[[0, -1]])
    assert abs(points[1, 1] / points[1, 0]) < 0.2
    assert np.allclose(bezier(controls[:3], 3)[1], 0.25 * controls[0] + 0.5 * controls[1] + 0.25 * controls[2])


def test_rectangles():
    shape = rectangles(np.array([[10.0, 5.0, np.pi / 2]]), np.array([[4.0, 2.0]]))[0]
    assert np.allclose(shape.bounds, (9, 3, 11, 7))
    tilted = rectangles(np.array([[0.0, 0.0, 0.4]]), np.array([[4.0, 2.0]]))[0]
    assert tilted.area == pytest.approx(8.0)
    assert tilted.contains(shapely.Point(1.8 * np.cos(0.4), 1.8 * np.sin(0.4)))
