import cv2
import numpy as np
import pytest
from nuscenes.utils.data_classes import RadarPointCloud

from mmdet3d_ext.datasets.synthetic import catalog, ground, schema
from mmdet3d_ext.datasets.synthetic.frames import count_inside
from mmdet3d_ext.datasets.synthetic.sensors import cameras, lidar, radar, rig
from mmdet3d_ext.datasets.synthetic.sensors.slab import intersect
from mmdet3d_ext.datasets.synthetic.world import Boxes, rotation


def boxes_of(centres, sizes, yaws, actors=None, colours=None, intensity=50.0):
    """One part for each owner."""
    centres, sizes, yaws = np.atleast_2d(centres).astype(float), np.atleast_2d(sizes).astype(float), np.atleast_1d(yaws)
    count = len(centres)
    colours = np.full((count, 3), 200.0) if colours is None else colours
    return Boxes(centres, sizes / 2, yaws, np.asarray(colours, np.float32), np.full(count, intensity, np.float32),
                 np.full(count, catalog.PLAIN), np.arange(count), np.arange(count + 1), centres, sizes / 2, yaws,
                 count if actors is None else actors)


class PlainScene:
    """Light without haze or tint."""
    light, haze, sun = 1.0, 0.0, 0.0
    tint = np.ones(3)


def flat(name='asphalt', size=1000):
    material = np.full((size, size), ground.INDEX[name], np.uint8)
    return ground.Ground(material, [np.tile(ground.COLOUR[material[:size // 4 ** i, :size // 4 ** i]].astype(np.uint8), 1)
                                    for i in range(3)])


INTRINSIC = np.array([[200.0, 0, 160], [0, 200, 90], [0, 0, 1]])
# A camera at (50, 50) that looks along +x from 1.5 m above the ground.
CAMERA = (rig.CAMERA_AXES, np.array([50.0, 50.0, 1.5]))


def slow_hit(origin, direction, centre, half, yaw):
    """Nearest entry into one box by testing its six faces one by one."""
    c, s = np.cos(yaw), np.sin(yaw)
    turn = np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])
    o, d = turn @ (origin - centre), turn @ direction
    if (np.abs(o) <= half).all():
        return np.inf
    best = np.inf
    for axis in range(3):
        for side in (-1, 1):
            if abs(d[axis]) < 1e-12:
                continue
            t = (side * half[axis] - o[axis]) / d[axis]
            point = o + t * d
            others = [k for k in range(3) if k != axis]
            if t > 0 and (np.abs(point[others]) <= half[others] + 1e-12).all():
                best = min(best, t)
    return best


def test_slab_equals_face_by_face():
    rng = np.random.default_rng(0)
    centre, half, yaw = rng.uniform(-8, 8, (30, 3)), rng.uniform(0.3, 4, (30, 3)), rng.uniform(-4, 4, 30)
    directions = rng.normal(size=(4, 25, 3))
    directions[0, :2] = [[1, 0, 0], [0, 0, 1]]  # parallel to faces
    origin = np.array([0.5, -0.2, 0.3])
    hit, axis = intersect(origin, directions, centre, half, yaw)
    assert hit.shape == axis.shape == (30, 4, 25)
    expected = np.array([[[slow_hit(origin, d, *box) for d in row] for row in directions]
                         for box in zip(centre, half, yaw)])
    assert np.isfinite(expected).sum() > 100
    assert np.array_equal(np.isfinite(hit), np.isfinite(expected))
    known = np.isfinite(expected)
    assert np.allclose(hit[known], expected[known], rtol=1e-9)
    # The reported axis is that of the face: the entry point lies on it.
    p, i, j = np.argwhere(known).T
    point = origin + directions[i, j] * hit[p, i, j][:, None] - centre[p]
    c, s = np.cos(yaw[p]), np.sin(yaw[p])
    local = np.stack([c * point[:, 0] + s * point[:, 1], -s * point[:, 0] + c * point[:, 1], point[:, 2]], 1)
    k = axis[p, i, j].astype(int)
    assert np.allclose(np.abs(local[np.arange(len(k)), k]), half[p, k])


@pytest.mark.parametrize('place,yaw', [((62, 51, 1.0), 0.4), ((56, 47.5, 0.8), -1.2), ((53.0, 50, 1.2), 0.0)])
def test_box_fills_the_hull_of_its_projected_corners(place, yaw):
    size = (4.0, 1.8, 1.6)
    boxes = boxes_of(place, size, yaw, colours=[[255, 0, 0]])
    picture = cameras.render(PlainScene(), flat(), boxes, CAMERA, INTRINSIC, (320, 180), np.random.default_rng(0))
    shown = (picture.image[..., 0] > picture.image[..., 1].astype(int) + 40)
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]) * np.array(size) / 2
    corners = corners @ rotation(yaw).T + np.array(place)
    camera = (corners - CAMERA[1]) @ CAMERA[0]
    assert (camera[:, 2] > 0).all()
    pixels = camera @ INTRINSIC.T
    pixels = pixels[:, :2] / pixels[:, 2:]
    hull = cv2.convexHull(pixels.astype(np.float32))[:, 0]
    expected = np.zeros((180, 320), np.uint8)
    cv2.fillConvexPoly(expected, np.round((hull - 0.5) * 16).astype(np.int32), 1, shift=4)
    union, both = (shown | (expected > 0)).sum(), (shown & (expected > 0)).sum()
    # cv2 also draws the border pixels, ours counts pixel centres: they may differ by the outline.
    assert both > 0.9 * union and union > 100
    assert picture.seen[0] == picture.whole[0] == shown.sum()


def test_nearer_box_hides_the_farther_one_whatever_the_order():
    places, sizes = np.array([[70, 50, 2.0], [60, 50, 2.0], [65, 58, 1.0]]), np.array([[2, 2, 4.0]] * 2 + [[2, 2, 2.0]])
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255.0]])
    images = []
    for order in ([0, 1, 2], [2, 1, 0]):
        boxes = boxes_of(places[order], sizes[order], np.zeros(3), colours=colours[order])
        picture = cameras.render(PlainScene(), flat(), boxes, CAMERA, INTRINSIC, (320, 180), np.random.default_rng(0))
        seen, whole = picture.seen[np.argsort(order)], picture.whole[np.argsort(order)]
        assert whole[0] > 100 and seen[0] == 0  # fully hidden
        assert seen[1] == whole[1] and seen[2] == whole[2] > 0
        images.append(picture.image)
    assert np.array_equal(*images)


def test_box_around_and_behind_the_camera():
    for place in ((50, 50, 1.0), (40, 50, 1.0), (50.0, 51.2, 1.0)):
        boxes = boxes_of(place, (4.0, 1.8, 3.0), 0.0)
        picture = cameras.render(PlainScene(), flat(), boxes, CAMERA, INTRINSIC, (320, 180), np.random.default_rng(0))
        assert np.isfinite(picture.image).all()
        assert picture.seen[0] == (0 if place[1] == 50 else picture.whole[0])


def test_ground_is_painted_where_the_map_says(boston):
    city, painted, _ = boston
    crossing = city.crossings[0].polygon.centroid
    pose = (rig.CAMERA_AXES, np.array([crossing.x - 9.0, crossing.y, 1.6]))
    empty = boxes_of(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0))
    picture = cameras.render(PlainScene(), painted, empty, pose, INTRINSIC, (320, 180), np.random.default_rng(0))
    rows, columns = np.mgrid[100:180:4, 4:320:6]
    depth = 1.6 / ((rows + 0.5 - 90) / 200)
    x, y = pose[1][0] + depth, pose[1][1] - (columns + 0.5 - 160) / 200 * depth
    names = np.array(ground.NAMES)[painted.material_at(np.stack([x, y], -1))]
    for name in ('zebra', 'asphalt'):
        seen = picture.image[rows, columns][names == name].astype(float).mean(0)
        assert np.abs(seen - ground.COLOUR[ground.INDEX[name]]).max() < 35
    # Above the horizon is sky.
    assert picture.image[:80, :, 2].mean() > 150


def test_image_scale_keeps_the_geometry():
    full, half = (rig.calibrate(0, 'log', size) for size in ((1600, 900), (800, 450)))
    for channel in schema.CAMERAS:
        assert np.allclose(full[channel].intrinsic[:2], 2 * half[channel].intrinsic[:2])
        assert np.array_equal(full[channel].quaternion, half[channel].quaternion)


def test_mounting_looks_the_right_way():
    calibration = rig.calibrate(0, 'log', (1600, 900))
    for channel, yaw in (('CAM_FRONT', 0), ('CAM_FRONT_LEFT', 55), ('CAM_BACK_RIGHT', -110.5), ('CAM_BACK', 180)):
        looks = calibration[channel].matrix @ [0, 0, 1]
        assert np.allclose(looks[:2], [np.cos(np.deg2rad(yaw)), np.sin(np.deg2rad(yaw))], atol=0.02)
        assert (calibration[channel].matrix @ [0, 1, 0])[2] < -0.99  # the image's y points down
    matrix = calibration['LIDAR_TOP'].matrix
    assert np.allclose(matrix @ [0, 1, 0], [1, 0, 0], atol=0.02)  # lidar y is forward
    assert np.allclose(matrix @ [1, 0, 0], [0, -1, 0], atol=0.02)  # lidar x is right
    assert rig.calibrate(0, 'other', (1600, 900))['CAM_FRONT'].intrinsic[0, 0] != calibration['CAM_FRONT'].intrinsic[0, 0]


LIDAR = (rotation(-np.pi / 2), np.array([50.0, 50.0, 1.84]))


def test_lidar_points_lie_on_surfaces():
    boxes = boxes_of([[60, 50, 1.0], [50, 62, 1.0], [45, 40, 0.8]], [[4, 2, 2.0]] * 3, [0.3, 1.0, -2.0])
    points, owner = lidar.scan(flat(), boxes, LIDAR, 720, np.random.default_rng(0))
    assert points.dtype == np.float32 and points.shape[1] == 5
    world = points[:, :3].astype(float) @ LIDAR[0].T + LIDAR[1]
    assert np.abs(world[owner == -1, 2]).max() < 0.1
    for index in range(3):
        mine = world[owner == index]
        assert len(mine) > 20
        assert count_inside(mine, boxes.centre[index], boxes.half[index] + 0.08, boxes.yaw[index]) == len(mine)
        assert count_inside(mine, boxes.centre[index], boxes.half[index] - 0.08, boxes.yaw[index]) == 0
    ring = points[:, 4]
    elevation = np.rad2deg(np.arctan2(points[:, 2], np.hypot(points[:, 0], points[:, 1])))
    assert np.allclose(elevation, -30.67 + ring * 41.34 / 31, atol=1e-3)
    assert points[:, 3].min() >= 0 and points[:, 3].max() <= 255


def test_lidar_does_not_see_through_a_wall():
    wall, car = [60, 50, 4.0], [66, 50, 1.0]
    boxes = boxes_of([wall, car], [[0.5, 8, 8.0], [4, 2, 2.0]], [0, 0])
    _, owner = lidar.scan(flat(), boxes, LIDAR, 720, np.random.default_rng(0))
    assert (owner == 0).sum() > 100 and (owner == 1).sum() == 0
    _, owner = lidar.scan(flat(), boxes_of([car], [[4, 2, 2.0]], [0]), LIDAR, 720, np.random.default_rng(0))
    assert (owner == 0).sum() > 20


def test_lidar_finds_a_box_across_the_seam_of_the_turn():
    """A turn begins behind the sensor (azimuth -pi): a box there is hit on both sides."""
    back = LIDAR[1] + LIDAR[0] @ [-8.0, 0.0, -1.0]
    points, owner = lidar.scan(flat(), boxes_of(back, (2, 2, 2.0), 0.0), LIDAR, 720, np.random.default_rng(0))
    mine = points[owner == 0]
    assert (mine[:, 1] > 0.3).any() and (mine[:, 1] < -0.3).any()


def test_lidar_intensity_tells_the_materials_apart():
    empty = boxes_of(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0))
    means = {name: lidar.scan(flat(name), empty, LIDAR, 360, np.random.default_rng(0))[0][:, 3].mean()
             for name in ground.NAMES}
    assert means['asphalt'] < 0.6 * means['carpark'] < means['walkway'] < 0.6 * means['zebra'] < means['stop']
    assert means['line'] > 8 * means['asphalt']


def test_shadows_are_seen_by_cameras_only():
    boxes = boxes_of([60, 50, 0.004], (4, 2, 0.008), 0.0, colours=[[0, 0, 0]])
    boxes.pattern[:] = catalog.SHADOW
    _, owner = lidar.scan(flat(), boxes, LIDAR, 720, np.random.default_rng(0))
    assert (owner == -1).all()
    picture = cameras.render(PlainScene(), flat(), boxes, CAMERA, INTRINSIC, (320, 180), np.random.default_rng(0))
    assert picture.seen[0] == 0 and picture.image.min() < 20


def test_parts_stay_inside_of_their_box():
    rng = np.random.default_rng(0)
    for kind in catalog.KINDS:
        for rider in (False, True):
            size = catalog.sample_size(kind, rng)
            parts = catalog.build_parts(kind, size, rng, rider)
            solid = parts[parts['pattern'] != catalog.SHADOW]
            high = (solid['centre'] + solid['size'] / 2).max(0)
            low = (solid['centre'] - solid['size'] / 2).min(0)
            assert (high <= size * [0.5, 0.5, 1]).all() and (low >= size * [-0.5, -0.5, 0]).all()
            # ... and nearly fill it, so that box and looks agree.
            assert (high - low > 0.8 * size).all(), kind
    with pytest.raises(ValueError, match='unknown kind'):
        catalog.build_parts('boat', np.ones(3), rng)


class OneMover:
    """A scene with one actor that drives along its own heading at 6 m/s."""

    class Actor:
        @staticmethod
        def pose(time):
            return 0.0, 0.0, 0.0, 6.0

    actors = [Actor()]


def test_radar_reads_back_and_measures_radial_speed(tmp_path):
    boxes = boxes_of([70, 50, 0.8], (4, 2, 1.6), np.pi)  # drives towards the sensor
    pose = (np.eye(3), np.array([50.0, 50.0, 0.5]))
    hits, found = 0, []
    for seed in range(30):
        returns = radar.scan(OneMover(), boxes, 0.0, pose, np.array([2.0, 0.0]), np.random.default_rng(seed))
        path = tmp_path / f'{seed}.pcd'
        path.write_bytes(radar.encode(returns))
        points = RadarPointCloud.from_file(str(path), list(range(18)), list(range(8)), list(range(5))).points
        assert points.shape == (18, len(returns))
        for i, name in enumerate(radar.FIELDS.names):
            assert np.array_equal(points[i].astype(returns[name].dtype), returns[name])
        mine = returns[(np.abs(returns['x'] - 18) < 1.5) & (np.abs(returns['y']) < 1.5) & (returns['dyn_prop'] == 0)
                       & (returns['ambig_state'] == 3) & (np.abs(returns['vx_comp'] + 6) < 0.5)]
        hits += len(mine) > 0
        found += mine['vx'].tolist()
    assert hits > 15
    assert np.allclose(found, -8.0, atol=0.5)  # 6 m/s of its own and 2 of the sensor's


def test_radar_files_are_never_empty():
    empty = boxes_of(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0))
    for seed in range(20):
        assert len(radar.scan(OneMover(), empty, 0.0, (np.eye(3), np.zeros(3)), np.zeros(2), np.random.default_rng(seed))) > 0
