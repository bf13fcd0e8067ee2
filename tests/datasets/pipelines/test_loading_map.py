"""Map labels: cell centres, metric lines, augmentation, non-square ranges, errors; the devkit's rasteriser in compat mode."""
import json

import numpy as np
import pytest
import shapely
from pipeline_helpers import MapWriter, car_pose, lidar_points, lidar_pose, scene
from shapely import affinity
from shapely.geometry import Polygon

from mmdet3d_ext.datasets.pipelines import map_layers
from mmdet3d_ext.geometry import BevGrid, GridError
from mmdet3d_ext.geometry.transforms import bev_flip, bev_rotation_scale_translation
from mmdet3d_ext.registry import PIPELINES

LOCATION = 'singapore-onenorth'
CLASSES = ['drivable_area', 'ped_crossing', 'walkway', 'stop_line', 'carpark_area', 'divider']


def loader(root, x=(-50.0, 50.0, 0.5), y=(-50.0, 50.0, 0.5), classes=('drivable_area',), **options):
    return PIPELINES.build(dict(type='LoadBEVSegmentation', dataset_root=str(root), xbound=x, ybound=y, classes=list(classes),
                                **options))


def sample(pose=None, lidar=None, **more):
    return dict(token='t', location=LOCATION, ego2global=car_pose(100, 100, 0) if pose is None else pose,
                lidar2ego=np.eye(4, dtype=np.float32) if lidar is None else lidar, **more)


def centre_inside(polygon, world_from_bev, grid):
    """The slow reference: every cell's centre tested by shapely."""
    x = grid.x.lo + (np.arange(grid.x.cells) + 0.5) * grid.x.step
    y = grid.y.lo + (np.arange(grid.y.cells) + 0.5) * grid.y.step
    xx, yy = np.meshgrid(x, y, indexing='ij')
    bev = np.stack([xx, yy, np.zeros_like(xx), np.ones_like(xx)], axis=-1).reshape(-1, 4)
    world = bev @ world_from_bev.T
    return shapely.contains_xy(polygon, world[:, 0], world[:, 1]).reshape(grid.shape)


def star(centre, seed, corners=15):
    rng = np.random.default_rng(seed)
    angle = np.sort(rng.uniform(0, 2 * np.pi, corners))
    radius = rng.uniform(8, 35, corners)
    return [(centre[0] + r * np.cos(a), centre[1] + r * np.sin(a)) for r, a in zip(radius, angle)]


@pytest.mark.parametrize('seed', range(6))
def test_polygons_with_holes_and_parts_equal_the_slow_reference(tmp_path, seed):
    rng = np.random.default_rng(seed)
    exterior, hole = star((95, 110), seed), [(96, 111), (99, 111), (99, 114), (96, 114)]
    second, third = star((120, 90), seed + 100), star((60, 100), seed + 200)
    writer = MapWriter()
    writer.multipolygon('drivable_area', [(exterior, [hole]), (second[::-1], [])])  # the second one clockwise
    writer.polygon('drivable_area', third)
    writer.write(tmp_path)
    union = Polygon(exterior, [hole]).union(Polygon(second)).union(Polygon(third))
    grid = BevGrid.parse([-40, 40, 0.4], [-50, 50, 0.5])
    augmentation = bev_rotation_scale_translation(rng.uniform(-1, 1), rng.uniform(0.9, 1.1), rng.normal(size=3))
    augmentation = bev_flip(bool(seed % 2), bool(seed // 2 % 2)) @ augmentation
    pose = car_pose(100, 100, rng.uniform(0, 360))
    labels = loader(tmp_path, [-40, 40, 0.4])(sample(pose, lidar_aug_matrix=augmentation.astype(np.float32)))['gt_masks_bev']
    assert labels.shape == (1, 200, 200) and labels.dtype == np.uint8
    world_from_bev = pose.astype(np.float64) @ np.linalg.inv(augmentation.astype(np.float32).astype(np.float64))
    expected = centre_inside(union, world_from_bev, grid)
    assert 1000 < expected.sum() < 35000
    np.testing.assert_array_equal(labels[0].astype(bool), expected)


def test_touching_and_overlapping_polygons_and_an_overlapped_hole(tmp_path):
    writer = MapWriter()
    square = [(90, 90), (110, 90), (110, 110), (90, 110)]
    writer.polygon('walkway', square, holes=[[(95, 95), (105, 95), (105, 105), (95, 105)]])
    writer.polygon('walkway', square[::-1], holes=[[(98, 98), (102, 98), (102, 102), (98, 102)]])  # covers most of that hole
    writer.polygon('walkway', [(110, 90), (120, 90), (120, 110), (110, 110)])  # shares an edge
    writer.write(tmp_path)
    labels = loader(tmp_path, [-50, 50, 1.0], [-50, 50, 1.0], ['walkway'])(sample())['gt_masks_bev'][0]
    expected = np.zeros((100, 100), np.uint8)
    expected[40:70, 40:60] = 1
    expected[48:52, 48:52] = 0
    np.testing.assert_array_equal(labels, expected)


def test_self_crossing_polygon_is_repaired(tmp_path):
    writer = MapWriter()
    writer.polygon('walkway', [(90, 90), (110, 110), (110, 90), (90, 110)])  # bow tie
    writer.polygon('walkway', [(80, 80), (85, 85), (90, 90)])  # no area
    writer.write(tmp_path)
    labels = loader(tmp_path, [-20, 20, 0.5], [-20, 20, 0.5], ['walkway'])(sample())['gt_masks_bev'][0]
    assert abs(labels.sum() * 0.25 - 200) < 8  # two triangles of 100 m2
    assert labels[40 + 18, 40] == 1 and labels[40, 40 + 15] == 0  # right wing; above the knot


def test_scale_moves_a_corner(tmp_path):
    """A corner at 40 m is labelled at 44 m after scale 1.1 (the reference leaves it at 40 m)."""
    writer = MapWriter()
    writer.polygon('drivable_area', [(100, 100), (140, 100), (140, 140), (100, 140)])
    writer.write(tmp_path)
    augmentation = bev_rotation_scale_translation(0.0, 1.1, [0, 0, 0]).astype(np.float32)
    labels = loader(tmp_path)(sample(lidar_aug_matrix=augmentation))['gt_masks_bev'][0]
    filled = np.argwhere(labels)
    assert abs((filled.max(axis=0) + 1) * 0.5 - 50 - 44).max() <= 0.5
    labels = loader(tmp_path, compat='reference')(sample(lidar_aug_matrix=augmentation))['gt_masks_bev'][0]
    assert abs((np.argwhere(labels).max(axis=0) + 1) * 0.5 - 50 - 40).max() <= 0.5


@pytest.mark.parametrize('cells', [200, 400, 600, 800])
@pytest.mark.parametrize('width', [1.0, 0.6])
def test_lines_keep_their_metric_width_at_every_resolution(tmp_path, cells, width):
    writer = MapWriter()
    writer.line('road_divider', [(40, 97.13), (160, 97.13)])
    writer.line('lane_divider', [(100 - 60, 103 - 45), (100 + 60, 103 + 45)])
    writer.write(tmp_path)
    axis = {'range': [-50, 50], 'cells': cells}
    straight = loader(tmp_path, axis, axis, ['road_divider', 'divider', 'lane_divider'], line_width=width)
    labels = straight(sample())['gt_masks_bev']
    step = 100 / cells
    expected = max(width, step)
    # A stripe holds the next lower or higher whole number of cell centres.
    assert set(np.unique(labels[0].sum(axis=1))) <= {np.floor(expected / step + 1e-9), np.ceil(expected / step - 1e-9)}
    slanted = labels[2].sum() * step ** 2 / (100 / 0.8)  # it crosses 100 m of x at a slope of 3 in 4
    assert abs(slanted - expected) < 0.03
    np.testing.assert_array_equal(labels[1], labels[0] | labels[2])


def test_lines_are_never_thinner_than_a_cell(tmp_path):
    writer = MapWriter()
    writer.line('road_divider', [(40, 97.1), (160, 97.1)])
    writer.write(tmp_path)
    labels = loader(tmp_path, [-48, 48, 2.0], [-48, 48, 2.0], ['divider'], line_width=0.3)(sample())['gt_masks_bev'][0]
    np.testing.assert_array_equal(labels.sum(axis=1), 1)


@pytest.mark.parametrize('step', [0.5, 0.25, 1 / 6, 0.125])
def test_label_grid_is_the_bev_grid(tmp_path, step):
    writer = MapWriter()
    writer.polygon('drivable_area', [(90, 90), (110, 90), (110, 110), (90, 110)])
    writer.write(tmp_path)
    data = loader(tmp_path, [-50, 50, step], [-50, 50, step])(sample())
    grid = BevGrid.parse([-50, 50, step], [-50, 50, step])
    assert data['gt_masks_bev'].shape[1:] == grid.shape
    assert data['bev_grid'] == grid
    assert abs(data['gt_masks_bev'].sum() * grid.step[0] * grid.step[1] - 400) < 1e-6


def test_a_step_that_does_not_divide_is_refused(tmp_path):
    with pytest.raises(GridError, match='xbound.*0.167.*600'):
        loader(tmp_path, [-50, 50, 0.167], [-50, 50, 0.167])


def test_non_square_and_off_centre_range(tmp_path):
    writer = MapWriter()
    writer.polygon('drivable_area', [(110, 85), (150, 85), (150, 95), (110, 95)])
    writer.write(tmp_path)
    for compat in (None, 'reference'):
        labels = loader(tmp_path, [-30, 70, 0.5], [-20, 20, 0.25], compat=compat)(sample())['gt_masks_bev'][0]
        assert labels.shape == (200, 160)
        filled = np.argwhere(labels)
        np.testing.assert_allclose(filled.min(axis=0), [(10 + 30) / 0.5, (-15 + 20) / 0.25], atol=1)
        np.testing.assert_allclose(filled.max(axis=0) + 1, [(50 + 30) / 0.5, (-5 + 20) / 0.25], atol=1)


def test_box_corner_point_and_map_corner_stay_together(tmp_path):
    """After a turn, scale, translation and flips, one place is one place for points, boxes and map."""
    pose, lidar = car_pose(100, 100, 37.0), lidar_pose()
    data = scene(num_points=0, num_boxes=1, seed=4)
    box = data['gt_bboxes_3d']
    box.tensor[0, :7] = box.tensor.new_tensor([12.0, -9.0, -1.84, 10.0, 6.0, 1.5, 0.4])
    corners = box.corners[0].numpy()
    ground = corners[np.argsort(corners[:, 2])[:4]]
    data['points'] = lidar_points(np.concatenate([ground, np.zeros((4, 2))], axis=1))
    world = ground @ (pose @ lidar)[:3, :3].T + (pose @ lidar)[:3, 3]
    hull = Polygon(world[:, :2]).convex_hull
    writer = MapWriter()
    writer.polygon('carpark_area', list(hull.exterior.coords)[:-1])
    writer.write(tmp_path)
    data.update(sample(pose, lidar))
    for seed in range(8):
        np.random.seed(seed)
        moved = {**data, 'gt_bboxes_3d': box.clone(), 'points': data['points'].clone()}
        for step in (dict(type='GlobalRotScaleTrans', resize_lim=[0.9, 1.1], rot_lim=[-0.8, 0.8], trans_lim=0.5, is_train=True),
                     dict(type='RandomFlip3D')):
            moved = PIPELINES.build(step)(moved)
        new_corners = moved['gt_bboxes_3d'].corners[0].numpy()
        new_ground = new_corners[np.argsort(new_corners[:, 2])[:4]]
        points = moved['points'].tensor[:, :3].numpy()
        distance = np.linalg.norm(points[:, None] - new_ground[None], axis=-1)
        assert (distance.min(axis=1) < 1e-4).all() and (distance.min(axis=0) < 1e-4).all()
        labels = loader(tmp_path, [-50, 50, 0.125], [-50, 50, 0.125], ['carpark_area'])(moved)['gt_masks_bev'][0]
        x = -50 + (np.argwhere(labels) + 0.5) * 0.125
        assert len(x) * 0.125 ** 2 == pytest.approx(Polygon(points[:, :2]).convex_hull.area, rel=0.01)
        outline = Polygon(points[:, :2]).convex_hull
        assert shapely.contains_xy(outline.buffer(1e-3), x[:, 0], x[:, 1]).all()


@pytest.mark.parametrize('compat', [None, 'reference'])
def test_labels_before_and_after_a_flip_are_equal(tmp_path, compat):
    writer = MapWriter()
    writer.polygon('drivable_area', star((103, 98), 5))
    writer.line('road_divider', [(70, 90), (140, 117)])
    writer.write(tmp_path)
    step = loader(tmp_path, classes=CLASSES, compat=compat)
    flip = PIPELINES.build(dict(type='RandomFlip3D'))
    seen = set()
    for seed in range(12):
        np.random.seed(seed)
        early = flip(step(sample(car_pose(100, 100, 20))))
        np.random.seed(seed)
        late = step(flip(sample(car_pose(100, 100, 20))))
        np.testing.assert_array_equal(early['gt_masks_bev'], late['gt_masks_bev'])
        assert early['gt_masks_bev'].any()
        seen.add((early['pcd_horizontal_flip'], early['pcd_vertical_flip']))
    assert len(seen) == 4


def test_roll_and_pitch_shift_the_ground_below_the_sensor(tmp_path):
    """A lidar that leans by 5 degrees sees the ground point below the mast's foot displaced by its height times sin(5 deg)."""
    writer = MapWriter()
    writer.polygon('drivable_area', [(95, 95), (105, 95), (105, 105), (95, 105)])
    writer.write(tmp_path)
    lean = np.deg2rad(5)
    lidar = np.eye(4)
    lidar[:3, :3] = [[np.cos(lean), 0, np.sin(lean)], [0, 1, 0], [-np.sin(lean), 0, np.cos(lean)]]
    lidar[2, 3] = 2.0
    labels = loader(tmp_path, [-10, 10, 0.02], [-10, 10, 1.0])(sample(lidar=lidar.astype(np.float32)))['gt_masks_bev'][0]
    filled = np.flatnonzero(labels[:, 10])
    middle = -10 + (filled.min() + filled.max() + 1) / 2 * 0.02
    assert middle == pytest.approx(2.0 * np.sin(lean), abs=0.03)


def test_no_map_around_gives_zeros(tmp_path):
    writer = MapWriter()
    writer.polygon('drivable_area', [(900, 900), (950, 900), (950, 950)])
    writer.write(tmp_path)
    for compat in (None, 'reference'):
        labels = loader(tmp_path, classes=CLASSES, compat=compat)(sample())['gt_masks_bev']
        assert labels.shape == (6, 200, 200) and labels.sum() == 0


def rich_map():
    writer = MapWriter()
    hole = [(101, 106), (104, 106), (104, 109)]
    writer.multipolygon('drivable_area', [(star((100, 105), 1), [hole]), (star((130, 80), 2), [])])
    writer.polygon('drivable_area', star((80, 120), 3))
    writer.polygon('ped_crossing', [(90, 92), (97, 92), (97, 96), (90, 96)])
    writer.polygon('walkway', star((75, 85), 4), holes=[[(75, 85), (77, 85), (77, 87)]])
    writer.polygon('stop_line', [(110, 110), (112.2, 110.4), (112, 118)])
    writer.polygon('carpark_area', star((120, 125), 6))
    writer.polygon('road_segment', star((90, 100), 7))
    writer.polygon('lane', star((110, 100), 8))
    writer.polygon('road_segment', [(90, 90), (110, 110), (110, 90), (90, 110)])  # crosses itself: the devkit leaves it out
    writer.line('road_divider', [(60, 90), (100, 104), (138, 160)])
    writer.line('lane_divider', [(100, 40), (101, 90), (104, 170)])
    return writer


@pytest.mark.parametrize('degrees', [0.0, 33.3, -120.0])
@pytest.mark.parametrize('step', [0.5, 0.25])
def test_compat_labels_are_the_devkits(tmp_path, degrees, step):
    from nuscenes.map_expansion.map_api import NuScenesMap
    rich_map().write(tmp_path)
    devkit = NuScenesMap(str(tmp_path), LOCATION)
    pose, lidar = car_pose(103.7, 99.1, degrees), lidar_pose()
    classes = CLASSES + ['drivable_area*']
    bounds = [-50, 50, step]
    labels = loader(tmp_path, bounds, bounds, classes, compat='reference')(sample(pose, lidar))['gt_masks_bev']
    world_from_lidar = pose @ lidar
    heading = world_from_lidar[:3, :3] @ np.array([1, 0, 0])
    patch = (float(world_from_lidar[0, 3]), float(world_from_lidar[1, 3]), 100.0, 100.0)
    layers = {'divider': ['road_divider', 'lane_divider'], 'drivable_area*': ['road_segment', 'lane']}
    size = int(round(100 / step))
    for label, name in zip(labels, classes):
        masks = devkit.get_map_mask(patch, float(np.arctan2(heading[1], heading[0]) / np.pi * 180), layers.get(name, [name]),
                                    (size, size))
        expected = masks.any(axis=0).T
        assert expected.any()
        np.testing.assert_array_equal(label.astype(bool), expected, err_msg=name)


def test_compat_labels_lie_near_the_default_ones(tmp_path):
    rich_map().write(tmp_path)
    ours = loader(tmp_path, classes=['drivable_area'])(sample())['gt_masks_bev'][0].astype(bool)
    theirs = loader(tmp_path, classes=['drivable_area'], compat='reference')(sample())['gt_masks_bev'][0].astype(bool)
    iou = (ours & theirs).sum() / (ours | theirs).sum()
    assert 0.9 < iou < 0.995  # alike, and different at the borders


def test_compat_refuses_a_mirror_that_it_cannot_undo(tmp_path):
    rich_map().write(tmp_path)
    with pytest.raises(ValueError, match='only by RandomFlip3D'):
        loader(tmp_path, compat='reference')(sample(lidar_aug_matrix=bev_flip(True, False)))
    data = sample(lidar_aug_matrix=bev_flip(True, False), pcd_horizontal_flip=True)
    with pytest.raises(ValueError, match=r'symmetric about zero.*\[-20, 40\]'):
        loader(tmp_path, y=[-20, 40, 0.5], compat='reference')(data)


def test_missing_location_names_the_command(tmp_path):
    data = sample()
    del data['location']
    with pytest.raises(KeyError, match="sample t has no 'location'.*create_data.py"):
        loader(tmp_path)(data)


def test_missing_and_misplaced_and_old_and_damaged_maps(tmp_path):
    with pytest.raises(FileNotFoundError, match='expansion.*singapore-onenorth.json.*unpack'):
        loader(tmp_path)(sample())
    (tmp_path / 'maps').mkdir()
    (tmp_path / 'maps' / f'{LOCATION}.json').write_text('{}')
    with pytest.raises(FileNotFoundError, match='move it one folder down'):
        loader(tmp_path)(sample())
    writer = rich_map()
    writer.content['version'] = '1.2'
    path = writer.write(tmp_path)
    with pytest.raises(ValueError, match='version 1.2'):
        loader(tmp_path)(sample())
    path.write_text(path.read_text()[:200])
    with pytest.raises(ValueError, match='not valid JSON'):
        loader(tmp_path)(sample())
    writer.content['version'] = '1.10'  # newer than 1.3, though not as text
    del writer.content['node'][0]
    path.write_text(json.dumps(writer.content))
    with pytest.raises(ValueError, match='damaged.*node0'):
        loader(tmp_path)(sample())


def test_unknown_classes_name_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="'walkways'.*did you mean 'walkway'"):
        loader(tmp_path, classes=['walkways'])
    with pytest.raises(ValueError, match='list of class names'):
        loader(tmp_path, classes=[])
    with pytest.raises(ValueError, match='line_width'):
        loader(tmp_path, line_width=0)


def test_maps_are_read_once_and_again_when_they_change(tmp_path, monkeypatch):
    path = rich_map().write(tmp_path)
    reads = []
    parse = map_layers._parse
    monkeypatch.setattr(map_layers, '_parse', lambda *args: reads.append(args) or parse(*args))
    step = loader(tmp_path, classes=CLASSES)
    first = step(sample())['gt_masks_bev']
    step(sample())
    loader(tmp_path, classes=['drivable_area'])(sample())
    assert len(reads) == 1
    loader(tmp_path, classes=['lane'])(sample())
    assert len(reads) == 2 and reads[1][1] == ['lane']
    writer = rich_map()
    writer.polygon('walkway', [(100, 100), (140, 100), (140, 140)])
    writer.write(tmp_path)
    assert step(sample())['gt_masks_bev'].sum() != first.sum()
    assert path.exists()


def test_input_matrices_stay_as_they_are(tmp_path):
    rich_map().write(tmp_path)
    data = sample(car_pose(100, 100, 12), lidar_pose(), lidar_aug_matrix=bev_flip(True, True).astype(np.float32))
    before = {key: data[key].copy() for key in ('ego2global', 'lidar2ego', 'lidar_aug_matrix')}
    loader(tmp_path)(data)
    for key, value in before.items():
        np.testing.assert_array_equal(data[key], value)


def test_lines_equal_a_buffer(tmp_path):
    """A bent line labels all cells whose centre is within half the width (the round ends included)."""
    writer = MapWriter()
    corners = [(80, 80), (110, 95), (112, 130)]
    writer.line('lane_divider', corners)
    writer.write(tmp_path)
    labels = loader(tmp_path, [-40, 40, 0.25], [-40, 40, 0.25], ['divider'], line_width=3.0)(sample())['gt_masks_bev'][0]
    line = affinity.translate(shapely.LineString(corners), -100, -100)
    centres = -40 + (np.arange(320) + 0.5) * 0.25
    xx, yy = np.meshgrid(centres, centres, indexing='ij')
    distance = shapely.distance(line, shapely.points(xx, yy))
    assert (labels[distance < 1.47] == 1).all() and (labels[distance > 1.5] == 0).all()
