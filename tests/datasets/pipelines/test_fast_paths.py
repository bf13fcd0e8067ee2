"""What moves points and draws labels fast, against slow and plain forms of the same."""
import numpy as np
import pytest
import shapely
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from mmdet3d.core.points import LiDARPoints
from pipeline_helpers import MapWriter, car_pose, lidar_points
from shapely.geometry import Polygon

from mmdet3d_ext.datasets.db_sampler import _fitting, overlaps_bev
from mmdet3d_ext.datasets.pipelines.common import move, rows, transform_scene_points
from mmdet3d_ext.datasets.pipelines.map_layers import Edges
from mmdet3d_ext.datasets.pipelines.map_raster import fill
from mmdet3d_ext.datasets.pipelines.paste import points_in_boxes
from mmdet3d_ext.geometry import BevGrid
from mmdet3d_ext.registry import PIPELINES


def turned(seed):
    rng = np.random.default_rng(seed)
    matrix = np.eye(4)
    matrix[:3, :3] = np.linalg.qr(rng.normal(size=(3, 3)))[0] * rng.uniform(0.5, 2)
    matrix[:3, 3] = rng.normal(size=3) * 10
    return matrix


@pytest.mark.parametrize('count, columns', [(0, 5), (1, 3), (1000, 5), (37, 45)])
def test_moving_points(count, columns):
    rng = np.random.default_rng(count)
    values = rng.uniform(-100, 100, (count, columns)).astype(np.float32)
    matrix = turned(1)
    points = torch.from_numpy(values.copy())
    move(points, matrix)
    expected = values[:, :3].astype(np.float64) @ matrix[:3, :3].T + matrix[:3, 3]
    np.testing.assert_allclose(points.numpy()[:, :3], expected, atol=1e-4)
    np.testing.assert_array_equal(points.numpy()[:, 3:], values[:, 3:])


def test_moving_leaves_the_other_columns_and_the_input_alone():
    """A NaN in an attribute must not reach the position, and one point's must not reach another's."""
    values = np.random.default_rng(0).uniform(-50, 50, (20, 6)).astype(np.float32)
    values[3, 5], values[7, 4], values[9, 0] = np.nan, np.inf, np.nan
    points = LiDARPoints(torch.from_numpy(values.copy()), points_dim=6)
    matrix = turned(2)
    found = transform_scene_points(points, matrix, matrix[:3, :3]).tensor.numpy()
    np.testing.assert_array_equal(points.tensor.numpy(), values)
    np.testing.assert_array_equal(found[:, 3:], values[:, 3:])
    assert np.isfinite(np.delete(found[:, :3], 9, axis=0)).all()


def test_rows_by_mask_and_by_index():
    tensor = torch.arange(30, dtype=torch.float32).view(10, 3)
    mask = np.arange(10) % 3 == 0
    assert torch.equal(rows(tensor, mask), tensor[torch.from_numpy(mask)])
    order = np.array([4, 4, 0, 9])
    assert torch.equal(rows(tensor, order), tensor[torch.from_numpy(order)])
    assert rows(tensor, np.zeros(10, bool)).shape == (0, 3) and rows(tensor[:0], np.zeros(0, bool)).shape == (0, 3)
    picked = rows(tensor, np.ones(10, bool))
    picked.zero_()
    assert tensor.sum() == 435  # new memory


def test_the_range_is_open_on_both_sides_and_not_a_number_is_outside():
    bounds = [-54.0, -54.0, -5.0, 54.0, 54.0, 3.0]
    values = np.random.default_rng(0).uniform(-60, 60, (5000, 5)).astype(np.float32)
    values[:, 2] /= 10
    for k in range(6):
        values[k, k % 3] = bounds[k]
    values[6, 1] = np.nan
    points = lidar_points(values)
    expected = points.tensor[points.in_range_3d(bounds)]
    found = PIPELINES.build(dict(type='PointsRangeFilter', point_cloud_range=bounds))(dict(points=points))['points']
    assert torch.equal(found.tensor, expected) and 0 < len(found) < 5000 and isinstance(found, LiDARPoints)


def test_shuffling_is_a_permutation_by_numpys_seed():
    values = np.random.default_rng(0).uniform(-60, 60, (500, 5)).astype(np.float32)
    step = PIPELINES.build(dict(type='PointShuffle'))

    def shuffled(seed):
        np.random.seed(seed)
        return step(dict(points=lidar_points(values)))['points'].tensor.numpy()

    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = shuffled(1)
    assert torch.equal(state, torch.get_rng_state())  # torch's own generator is not touched
    assert not np.array_equal(first, values) and np.array_equal(np.sort(first, axis=0), np.sort(values, axis=0))
    np.testing.assert_array_equal(shuffled(1), first)
    assert not np.array_equal(shuffled(2), first)
    assert len(step(dict(points=lidar_points(values[:0])))['points']) == 0


def brute_inside(points, boxes):
    inside = np.zeros(len(points), bool)
    for x, y, z, dx, dy, dz, yaw in boxes[:, :7].astype(np.float64):
        offset = points[:, :3].astype(np.float64) - (x, y, z)
        along = offset[:, 0] * np.cos(yaw) + offset[:, 1] * np.sin(yaw)
        across = offset[:, 1] * np.cos(yaw) - offset[:, 0] * np.sin(yaw)
        with np.errstate(invalid='ignore'):
            inside |= (np.abs(along) <= dx / 2) & (np.abs(across) <= dy / 2) & (offset[:, 2] >= 0) & (offset[:, 2] <= dz)
    return inside


@pytest.mark.parametrize('spread, count', [(5, 1), (40, 30), (40, 0), (3000, 12), (0.0, 3)])
def test_points_in_boxes_equal_a_test_of_every_pair(spread, count):
    rng = np.random.default_rng(count)
    boxes = np.concatenate([rng.uniform(-spread, spread, (count, 2)), rng.uniform(-3, 0, (count, 1)), rng.uniform(0.2, 12, (count, 3)),
                            rng.uniform(-7, 7, (count, 1))], axis=1).astype(np.float32)
    points = rng.uniform(-1.3 * spread - 9, 1.3 * spread + 9, (20000, 5)).astype(np.float32)
    points[:, 2] = rng.uniform(-4, 9, len(points))
    if count:  # many of them near the boxes, some on corners and faces, one nowhere
        near = rng.integers(0, count, 12000)
        points[:12000, :2] = boxes[near, :2] + rng.normal(0, 4, (12000, 2))
        points[12000:12000 + count, :3] = boxes[:, :3]
        points[13000:13000 + count, :3] = boxes[:, :3] + [0, 0, 0] + boxes[:, [5, 5, 5]] * [0, 0, 1]
    points[19999, :2] = np.nan
    found = points_in_boxes(points, LiDARInstance3DBoxes(boxes, box_dim=7))
    np.testing.assert_array_equal(found, brute_inside(points, boxes))
    assert found.any() == bool(count)
    assert not points_in_boxes(points[:0], LiDARInstance3DBoxes(boxes, box_dim=7)).any()


@pytest.mark.parametrize('seed', range(5))
def test_objects_are_taken_as_if_one_by_one(seed):
    rng = np.random.default_rng(seed)

    def boxes(count):
        return np.concatenate([rng.uniform(-15, 15, (count, 2)), np.zeros((count, 1)), rng.uniform(1, 8, (count, 3)),
                               rng.uniform(-3, 3, (count, 1))], axis=1).astype(np.float32)

    present, drawn = boxes(6), boxes(40)
    entries = [dict(box3d_lidar=np.append(box, [0, 0]).astype(np.float32), k=k) for k, box in enumerate(drawn)]
    occupied, expected = present, []
    for k, box in enumerate(drawn):
        if not overlaps_bev(box[None], occupied).any():
            expected.append(k)
            occupied = np.concatenate([occupied, box[None]])
    assert [entry['k'] for entry in _fitting(entries, present)] == expected and 3 < len(expected) < 40
    assert _fitting([], present) == [] and _fitting(entries[:1], present[:0]) == entries[:1]


def test_sweeps_equal_a_plain_loop(tmp_path):
    rng = np.random.default_rng(0)
    paths, matrices = [], []
    for k in range(5):
        cloud = rng.uniform(-60, 60, (300 + k, 5)).astype(np.float32)
        cloud[:40, :2] = rng.uniform(-2, 2, (40, 2))
        cloud[:, 4] = np.arange(len(cloud)) % 32
        paths.append(str(tmp_path / f'{k}.bin'))
        cloud.tofile(paths[-1])
        matrices.append(turned(k))
    sweeps = [dict(data_path=path, timestamp=10 ** 15 - 50_000 * k, sensor2lidar_rotation=matrix[:3, :3],
                   sensor2lidar_translation=matrix[:3, 3]) for k, (path, matrix) in enumerate(zip(paths, matrices)) if k]
    data = dict(lidar_path=paths[0], timestamp=10 ** 15, sweeps=sweeps)
    for beams, columns in ((None, 5), (8, [0, 1, 2, 4])):
        found = PIPELINES.build(dict(type='LoadPointsFromFile', coord_type='LIDAR', load_dim=5, use_dim=5, reduce_beams=beams))(dict(data))
        found = PIPELINES.build(dict(type='LoadPointsFromMultiSweeps', sweeps_num=9, load_dim=5, use_dim=columns, remove_close=True,
                                     reduce_beams=beams))(found)['points'].tensor.numpy()
        expected = []
        for k, path in enumerate(paths):
            for point in np.fromfile(path, np.float32).reshape(-1, 5).astype(np.float64):
                if abs(point[0]) < 1 and abs(point[1]) < 1 or (beams and int(point[4]) % (32 // beams)):
                    continue
                place = point[:3] if k == 0 else matrices[k][:3, :3] @ point[:3] + matrices[k][:3, 3]
                expected.append([*place, point[3], 0.05 * k])
        expected = np.array(expected)[:, columns if isinstance(columns, list) else slice(None)]
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_class_of_several_layers_is_their_union(tmp_path):
    """``drivable_area*`` and ``divider``, with polygons that overlap within a layer and between layers, both ways round."""
    rng = np.random.default_rng(0)
    writer, polygons = MapWriter(), []
    for k in range(40):
        middle, angles = rng.uniform(60, 140, 2), np.sort(rng.uniform(0, 2 * np.pi, 7))
        corners = middle + rng.uniform(3, 25, (7, 1)) * np.stack([np.cos(angles), np.sin(angles)], 1)
        corners = corners[::-1] if k % 3 else corners
        writer.polygon('road_segment' if k % 2 else 'lane', corners.tolist())
        polygons.append(shapely.make_valid(Polygon(corners)))
    writer.write(tmp_path)
    step = PIPELINES.build(dict(type='LoadBEVSegmentation', dataset_root=str(tmp_path), xbound=[-50, 50, 0.5], ybound=[-40, 40, 0.4],
                                classes=['drivable_area*', 'walkway']))
    pose = car_pose(100, 100, 25)
    labels = step(dict(token='t', location='singapore-onenorth', ego2global=pose,
                       lidar2ego=np.eye(4, dtype=np.float32)))['gt_masks_bev']
    xx, yy = np.meshgrid(-50 + (np.arange(200) + 0.5) * 0.5, -40 + (np.arange(200) + 0.5) * 0.4, indexing='ij')
    world = np.stack([xx, yy, 0 * xx, 1 + 0 * xx], -1).reshape(-1, 4) @ pose.T.astype(np.float64)
    expected = shapely.contains_xy(shapely.union_all(polygons), world[:, 0], world[:, 1]).reshape(200, 200)
    assert labels.dtype == np.uint8 and (labels[0].astype(bool) != expected).sum() <= 2  # a centre on a border, in rounding
    assert not labels[1].any() and 0.1 < labels[0].mean() < 0.95


def test_hundreds_of_polygons_on_one_cell():
    """Counts must not wrap to "outside"."""
    grid = BevGrid.parse([-8, 8, 0.5], [-8, 8, 0.5])
    identity = np.eye(3)[:2]
    squares = [Polygon([(-4, -4), (4, -4), (4, 4), (-4, 4)])] * 300
    mask = fill(Edges.of(squares), identity, grid)
    assert mask[8:24, 8:24].all() and mask.sum() == 256
    many = Edges.of([Polygon([(-4, -4), (-3, -4), (-3, 4), (-4, 4)])])
    copies = 20_000
    many = Edges(np.tile(many.start, (copies, 1)), np.tile(many.end, (copies, 1)), np.arange(copies + 1) * 4, np.tile(many.boxes, (copies, 1)))
    out = np.ones(grid.shape, bool)
    assert fill(many, identity, grid, out=out) is not None and out.sum() == 2 * 16
    assert not fill(Edges.of([]), identity, grid, out=out).any() and not out.any()
