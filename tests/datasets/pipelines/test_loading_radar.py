"""Radar files against the devkit's reader, frames, encodings, augmentation."""
import numpy as np
import pytest
from nuscenes.utils.data_classes import RadarPointCloud

from mmdet3d_ext.datasets.pipelines.loading_radar import FIELDS, read_radar
from mmdet3d_ext.registry import PIPELINES

SIZES = [4, 4, 4, 1, 2, 4, 4, 4, 4, 4, 1, 1, 1, 1, 1, 1, 1, 1]
TYPES = 'F F F I I F F F F F I I I I I I I I'.split()


def write_radar(path, count=20, seed=0, nan_row=False):
    rng = np.random.default_rng(seed)
    dtype = np.dtype([(n, f'<{"f" if t == "F" else "i"}{s}') for n, t, s in zip(FIELDS, TYPES, SIZES)])
    rows = np.zeros(count, dtype)
    for name in ('x', 'y', 'z', 'rcs', 'vx', 'vy', 'vx_comp', 'vy_comp'):
        rows[name] = rng.uniform(-20, 20, count)
    rows['dyn_prop'], rows['ambig_state'] = rng.integers(0, 8, count), rng.integers(2, 5, count)
    rows['invalid_state'], rows['pdh0'] = rng.choice([0, 0, 4, 17], count), rng.integers(0, 8, count)
    if nan_row:
        rows['x'][0] = np.nan
    header = ('# .PCD v0.7 - Point Cloud Data file format\nVERSION 0.7\n' + f'FIELDS {" ".join(FIELDS)}\n'
              + f'SIZE {" ".join(map(str, SIZES))}\nTYPE {" ".join(TYPES)}\nCOUNT {" ".join("1" * 18)}\n'
              + f'WIDTH {count}\nHEIGHT 1\nVIEWPOINT 0 0 0 1 0 0 0\nPOINTS {count}\nDATA binary\n')
    path.write_bytes(header.encode() + rows.tobytes() + b'\n')


def sweep(path, timestamp=1_000_000, degrees=0.0, shift=(0, 0, 0)):
    turn = np.deg2rad(degrees)
    rotation = np.array([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]])
    return dict(data_path=str(path), timestamp=timestamp, sensor2lidar_rotation=rotation,
                sensor2lidar_translation=np.array(shift))


def test_reader_equals_the_devkit(tmp_path):
    write_radar(tmp_path / 'a.pcd')
    every = range(18)
    expected = RadarPointCloud.from_file(str(tmp_path / 'a.pcd'), every, every, every).points.T
    np.testing.assert_allclose(read_radar(str(tmp_path / 'a.pcd')), expected, rtol=1e-6)


def test_default_filter_equals_the_devkit(tmp_path):
    write_radar(tmp_path / 'a.pcd', count=300)
    expected = RadarPointCloud.from_file(str(tmp_path / 'a.pcd')).points.T
    data = dict(timestamp=1_000_000, radar={'RADAR_FRONT': [sweep(tmp_path / 'a.pcd')]})
    points = PIPELINES.build(dict(type='LoadRadarPointsMultiSweeps', use_dim=list(range(18))))(data)['radar'].tensor.numpy()
    assert 0 < len(points) < 300
    np.testing.assert_allclose(points, expected, atol=1e-5)


def test_frames_time_and_velocity(tmp_path):
    write_radar(tmp_path / 'a.pcd', seed=1)
    raw = read_radar(str(tmp_path / 'a.pcd'))
    front = [sweep(tmp_path / 'a.pcd', 900_000, 90, (1, 2, 3))]
    data = dict(timestamp=1_000_000, radar={'RADAR_FRONT': front, 'RADAR_BACK': []})
    step = PIPELINES.build(dict(type='LoadRadarPointsMultiSweeps', use_dim=[0, 1, 2, 8, 9, 18], filtering='none'))
    radar = step(dict(data))['radar']
    np.testing.assert_allclose(radar.tensor.numpy(), np.stack(
        [1 - raw[:, 1], 2 + raw[:, 0], 3 + raw[:, 2], -raw[:, 9], raw[:, 8], np.full(20, 0.1)], axis=1), atol=1e-5)
    moved = PIPELINES.build(dict(type='LoadRadarPointsMultiSweeps', use_dim=[0, 1, 2], filtering='none',
                                 compensate_velocity=True))(dict(data))['radar'].tensor.numpy()
    np.testing.assert_allclose(moved[:, 0], radar.tensor[:, 0] + 0.1 * radar.tensor[:, 3], atol=1e-5)


def test_velocities_turn_scale_and_flip_with_the_scene(tmp_path):
    write_radar(tmp_path / 'a.pcd', seed=2)
    step = PIPELINES.build(dict(type='LoadRadarPointsMultiSweeps', use_dim=[0, 1, 2, 8, 9], filtering='none'))
    data = step(dict(timestamp=1_000_000, radar={'RADAR_FRONT': [sweep(tmp_path / 'a.pcd')]}))
    before = data['radar'].tensor.numpy().copy()
    np.random.seed(2)
    for cfg in (dict(type='GlobalRotScaleTrans', resize_lim=[0.9, 1.1], rot_lim=[-1, 1], trans_lim=0.5, is_train=True),
                dict(type='RandomFlip3D'), dict(type='PointsRangeFilter', point_cloud_range=[-100, -100, -99, 100, 100, 99])):
        data = PIPELINES.build(cfg)(data)
    matrix = data['lidar_aug_matrix']
    after = data['radar'].tensor.numpy()
    np.testing.assert_allclose(after[:, :3], before[:, :3] @ matrix[:3, :3].T + matrix[:3, 3], atol=1e-4)
    np.testing.assert_allclose(after[:, 3:5], before[:, 3:5] @ matrix[:2, :2].T, atol=1e-4)


def test_encodings_limits_and_normalisation(tmp_path):
    write_radar(tmp_path / 'a.pcd', count=50)
    raw = read_radar(str(tmp_path / 'a.pcd'))
    data = dict(timestamp=1_000_000, radar={'RADAR_FRONT': [sweep(tmp_path / 'a.pcd')]})
    build = lambda **more: PIPELINES.build(dict(type='LoadRadarPointsMultiSweeps', filtering='none', **more))  # noqa: E731
    encoded = build(use_dim=list(range(58)))(dict(data))['radar'].tensor.numpy()
    np.testing.assert_array_equal(encoded[:, 19:27].argmax(axis=1), raw[:, 3])
    np.testing.assert_array_equal(encoded[:, 32:50].argmax(axis=1), raw[:, 14])
    np.testing.assert_array_equal(encoded[:, 50:57].sum(axis=1), raw[:, 15])
    np.testing.assert_array_equal(encoded[:, 57], (raw[:, 14] == 0) & (raw[:, 3] < 7) & (raw[:, 11] == 3))
    assert len(build(max_num=7)(dict(data))['radar']) == 7
    scaled = build(use_dim=[0, 1, 2, 5], normalize=True, normalize_dims=[(3, -20, 20)])(dict(data))['radar'].tensor.numpy()
    np.testing.assert_allclose(scaled[:, 3], (raw[:, 5] + 20) / 40, atol=1e-6)


@pytest.mark.parametrize('dims', [[(5, 0, 1)], [(-1, 0, 1)], [(3, 1, 1)]])
def test_normalisation_of_what_is_not_kept_is_refused(dims):
    with pytest.raises(ValueError, match='normalize_dims are .* below 5'):
        PIPELINES.build(dict(type='LoadRadarPointsMultiSweeps', normalize=True, normalize_dims=dims))


def test_no_returns_and_no_radar(tmp_path):
    write_radar(tmp_path / 'none.pcd', count=1, nan_row=True)
    step = PIPELINES.build(dict(type='LoadRadarPointsMultiSweeps'))
    radar = step(dict(timestamp=1_000_000, radar={'RADAR_FRONT': [sweep(tmp_path / 'none.pcd')]}))['radar']
    assert radar.tensor.shape == (0, 5)
    assert step(dict(timestamp=0, radar={}))['radar'].tensor.shape == (0, 5)
    assert 'radar' not in step(dict(timestamp=0))


def test_damaged_files_name_themselves(tmp_path):
    path = tmp_path / 'a.pcd'
    write_radar(path)
    content = path.read_bytes()
    path.write_bytes(content[:-60])
    with pytest.raises(ValueError, match='a.pcd.*cut off'):
        read_radar(str(path))
    path.write_bytes(content[:100])
    with pytest.raises(ValueError, match='a.pcd.*DATA'):
        read_radar(str(path))
    path.write_bytes(content.replace(b' rcs ', b' snr '))
    with pytest.raises(ValueError, match='fields'):
        read_radar(str(path))
    with pytest.raises(FileNotFoundError, match='b.pcd'):
        read_radar(str(tmp_path / 'b.pcd'))
    with pytest.raises(ValueError, match='use_dim'):
        PIPELINES.build(dict(type='LoadRadarPointsMultiSweeps', use_dim=[0, 1, 8]))
