"""Loading of images, points, sweeps, annotations: the values, and what damaged files get."""
import warnings

import numpy as np
import pytest
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from PIL import Image

from mmdet3d_ext.datasets.pipelines.loading_points import read_points
from mmdet3d_ext.registry import PIPELINES, profile

LOAD = dict(type='LoadPointsFromFile', coord_type='LIDAR', load_dim=5, use_dim=5)
SWEEPS = dict(type='LoadPointsFromMultiSweeps', sweeps_num=3, load_dim=5, use_dim=5)


def save_points(path, count=50, seed=0):
    points = np.random.default_rng(seed).uniform(-50, 50, (count, 5)).astype(np.float32)
    points[:, 4] = np.arange(count) % 32
    points.tofile(path)
    return points


def sweep(path, timestamp, shift=(0.0, 0.0, 0.0)):
    return dict(data_path=str(path), timestamp=timestamp, sensor2lidar_rotation=np.eye(3),
                sensor2lidar_translation=np.array(shift))


def sample_with_sweeps(folder, count):
    save_points(folder / 'key.bin')
    sweeps = []
    for k in range(count):
        save_points(folder / f'{k}.bin', 10 + k, seed=k + 1)
        sweeps.append(sweep(folder / f'{k}.bin', 1_000_000_000 - 50_000 * (k + 1), (0, -k, 0)))
    return dict(token='s', lidar_path=str(folder / 'key.bin'), timestamp=1_000_000_000, sweeps=sweeps)


def test_images_are_rgb_in_order(tmp_path):
    paths = []
    for k in range(3):
        image = np.zeros((20, 30 + k, 3), np.uint8)
        image[..., 0] = 200
        image[..., 2] = 10 * k
        Image.fromarray(image).save(tmp_path / f'{k}.png')
        paths.append(str(tmp_path / f'{k}.png'))
    Image.fromarray(np.full((20, 30), 77, np.uint8)).save(tmp_path / 'grey.jpg')
    paths.append(str(tmp_path / 'grey.jpg'))
    data = PIPELINES.build(dict(type='LoadMultiViewImageFromFiles', to_float32=True))(dict(image_paths=paths))
    for k in range(3):
        assert np.asarray(data['img'][k])[5, 5].tolist() == [200, 0, 10 * k]
    assert np.asarray(data['img'][3]).shape == (20, 30, 3)
    assert data['ori_shape'] == (30, 20) and data['filename'] == paths
    np.testing.assert_array_equal(data['img_aug_matrix'], np.broadcast_to(np.eye(4), (4, 4, 4)))


def test_damaged_and_missing_images_name_the_file(tmp_path):
    step = PIPELINES.build(dict(type='LoadMultiViewImageFromFiles'))
    noise = np.random.default_rng(0).integers(0, 256, (90, 160, 3), dtype=np.uint8)
    whole = tmp_path / 'whole.jpg'
    Image.fromarray(noise).save(whole)
    content = whole.read_bytes()
    for name, damaged in (('cut.jpg', content[:len(content) // 2]), ('garbage.jpg', b'not an image'), ('empty.jpg', b'')):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(OSError, match=rf'{name}.*\({len(damaged)} bytes\) cannot be decoded'):
            step(dict(image_paths=[str(whole), str(tmp_path / name)]))
    with pytest.raises(FileNotFoundError, match='absent.jpg.*does not exist'):
        step(dict(image_paths=[str(tmp_path / 'absent.jpg')]))


def test_point_columns_and_beams(tmp_path):
    points = save_points(tmp_path / 'a.bin', 64)
    data = dict(lidar_path=str(tmp_path / 'a.bin'))
    np.testing.assert_array_equal(PIPELINES.build(LOAD)(data)['points'].tensor.numpy(), points)
    picked = PIPELINES.build(dict(LOAD, use_dim=[0, 1, 2, 4]))(data)['points'].tensor.numpy()
    np.testing.assert_array_equal(picked, points[:, [0, 1, 2, 4]])
    few = PIPELINES.build(dict(LOAD, reduce_beams=4))(data)['points'].tensor.numpy()
    assert sorted(set(few[:, 4])) == [0, 8, 16, 24]
    np.save(tmp_path / 'b.npy', points)
    np.testing.assert_array_equal(read_points(str(tmp_path / 'b.npy'), 5), points)


def test_truncated_cloud_names_file_and_size(tmp_path):
    path = tmp_path / 'cut.pcd.bin'
    save_points(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r'cut.pcd.bin.*993 bytes.*load_dim'):
        PIPELINES.build(LOAD)(dict(lidar_path=str(path)))
    with pytest.raises(FileNotFoundError, match='absent.bin'):
        PIPELINES.build(LOAD)(dict(lidar_path=str(tmp_path / 'absent.bin')))
    with pytest.raises(KeyError, match="no 'lidar_path'.*create_data"):
        PIPELINES.build(LOAD)(dict(token='x'))


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_bad_rows_are_counted_and_reported_once(tmp_path, bad):
    path = tmp_path / f'bad{bad}.bin'
    points = save_points(path, 40)
    points[[3, 17], [0, 3]] = bad
    points.tofile(path)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        for _ in range(3):
            loaded = PIPELINES.build(LOAD)(dict(lidar_path=str(path)))['points'].tensor.numpy()
    np.testing.assert_array_equal(loaded, np.delete(points, [3, 17], axis=0))
    assert len(seen) == 1 and path.name in str(seen[0].message) and 'removed 2 of 40' in str(seen[0].message)


def test_huge_but_finite_values_are_kept(tmp_path):
    path = tmp_path / 'huge.bin'
    points = np.full((100, 5), 3e38, np.float32)
    points.tofile(path)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert len(read_points(str(path), 5)) == 100


def test_bad_rows_in_a_sweep_are_removed_too(tmp_path):
    data = sample_with_sweeps(tmp_path, 1)
    points = np.fromfile(tmp_path / '0.bin', np.float32).reshape(-1, 5)
    points[4, 1] = np.nan
    points.tofile(tmp_path / '0.bin')
    with pytest.warns(UserWarning, match='0.bin.*removed 1 of 10'):
        data = PIPELINES.build(SWEEPS)(PIPELINES.build(LOAD)(data))
    assert len(data['points']) == 59 and np.isfinite(data['points'].tensor.numpy()).all()


def test_sweep_order_frames_and_time(tmp_path):
    data = PIPELINES.build(SWEEPS)(PIPELINES.build(LOAD)(sample_with_sweeps(tmp_path, 2)))
    points = data['points'].tensor.numpy()
    assert len(points) == 50 + 10 + 11
    np.testing.assert_allclose(np.unique(points[:, 4]), [0, 0.05, 0.1], atol=1e-6)
    second = np.fromfile(tmp_path / '1.bin', np.float32).reshape(-1, 5)
    np.testing.assert_allclose(points[60:, 1], second[:, 1] - 1, atol=1e-5)
    np.testing.assert_allclose(points[60:, 3], second[:, 3])


def test_test_mode_comes_from_the_data_set_and_is_not_random(tmp_path):
    step = PIPELINES.build(SWEEPS)
    state = np.random.get_state()[1].copy()
    data = PIPELINES.build(LOAD)(dict(sample_with_sweeps(tmp_path, 8), test_mode=True))
    lags = np.unique(step(data)['points'].tensor[:, 4].numpy())
    np.testing.assert_allclose(lags, [0, 0.05, 0.1, 0.15], atol=1e-6)
    assert np.array_equal(state, np.random.get_state()[1])
    draws = set()
    for seed in range(6):
        np.random.seed(seed)
        data = PIPELINES.build(LOAD)(sample_with_sweeps(tmp_path, 8))
        draws.add(tuple(np.unique(step(data)['points'].tensor[:, 4].numpy().round(3))))
    assert len(draws) > 2 and all(len(draw) == 4 for draw in draws)


@pytest.mark.parametrize('own, distinct', [({}, True), ({'test_mode': True}, False)])
def test_evaluation_draws_at_random_in_the_reference_only(tmp_path, own, distinct):
    """As there, unless the step itself says test_mode."""
    step = PIPELINES.build(dict(SWEEPS, compat='reference', **own))
    draws = set()
    for seed in range(6):
        np.random.seed(seed)
        data = PIPELINES.build(LOAD)(dict(sample_with_sweeps(tmp_path, 8), test_mode=True))
        draws.add(tuple(np.unique(step(data)['points'].tensor[:, 4].numpy().round(3))))
    assert (len(draws) > 2) == distinct and all(len(draw) == 4 for draw in draws)


@pytest.mark.parametrize('compat, kept', [(None, 0), ('reference', 1)])
def test_returns_from_the_car_leave_the_key_frame_by_default(tmp_path, compat, kept):
    data = sample_with_sweeps(tmp_path, 1)
    points = np.fromfile(tmp_path / 'key.bin', np.float32).reshape(-1, 5)
    points[:, :2] += np.sign(points[:, :2])
    points[7, :2] = 0.3, -0.9
    points[8, :2] = 0.3, -1.0  # on the border: stays
    points.tofile(tmp_path / 'key.bin')
    with profile(compat):
        step = PIPELINES.build(dict(SWEEPS, remove_close=True))
    result = step(PIPELINES.build(LOAD)(data))['points'].tensor.numpy()
    key = result[result[:, 4] == 0]
    assert len(key) == 49 + kept
    assert (key[:, :2] == np.float32([0.3, -1.0])).all(axis=1).any()


def test_first_sample_of_a_scene_without_sweeps(tmp_path):
    data = PIPELINES.build(LOAD)(sample_with_sweeps(tmp_path, 0))
    assert len(PIPELINES.build(SWEEPS)(dict(data))['points']) == 50
    assert len(PIPELINES.build(dict(SWEEPS, pad_empty_sweeps=True))(dict(data))['points']) == 200
    key_only = PIPELINES.build(dict(SWEEPS, sweeps_num=0))(PIPELINES.build(LOAD)(sample_with_sweeps(tmp_path, 3)))
    assert len(key_only['points']) == 50 and not key_only['points'].tensor[:, 4].any()


@pytest.mark.parametrize('content', [b'', b'123', b'\x93NUMPY\x01\x00v'])
def test_damaged_npy_files_name_themselves(tmp_path, content):
    (tmp_path / 'cloud.npy').write_bytes(content)
    with pytest.raises(ValueError, match=r'point cloud .*cloud\.npy. is damaged'):
        read_points(str(tmp_path / 'cloud.npy'), 5)


def test_empty_clouds_pass(tmp_path):
    data = sample_with_sweeps(tmp_path, 2)
    for name in ('key.bin', '0.bin', '1.bin'):
        (tmp_path / name).write_bytes(b'')
    data = PIPELINES.build(dict(SWEEPS, remove_close=True, pad_empty_sweeps=True))(PIPELINES.build(LOAD)(data))
    assert data['points'].tensor.shape == (0, 5)


def test_the_key_frame_is_not_changed_in_place(tmp_path):
    loaded = PIPELINES.build(LOAD)(sample_with_sweeps(tmp_path, 2))
    key = loaded['points']
    before = key.tensor.clone()
    PIPELINES.build(SWEEPS)(dict(loaded))
    assert (key.tensor == before).all()


@pytest.mark.parametrize('cfg, word', [
    (dict(LOAD, use_dim=6), 'use_dim'), (dict(LOAD, coord_type='DEPTH'), 'coord_type'),
    (dict(LOAD, load_augmented='mvp'), 'mvp'), (dict(LOAD, shift_height=True), 'shift_height'),
    (dict(LOAD, reduce_beams=5), 'reduce_beams'),
    (dict(LOAD, load_dim=4, use_dim=4, reduce_beams=4), 'ring'), (dict(SWEEPS, sweeps_num=-1), 'sweeps_num'),
    (dict(SWEEPS, load_dim=4, use_dim=4), 'load_dim'), (dict(SWEEPS, compat='mine'), 'compat')])
def test_wrong_arguments(cfg, word):
    with pytest.raises(ValueError, match=word):
        PIPELINES.build(cfg)


def test_steps_in_the_wrong_order_say_so(tmp_path):
    with pytest.raises(KeyError, match='LoadPointsFromFile before'):
        PIPELINES.build(SWEEPS)(dict(sweeps=[]))
    data = PIPELINES.build(dict(LOAD, use_dim=4))(sample_with_sweeps(tmp_path, 1))
    with pytest.raises(ValueError, match='4 columns.*use_dim: 5'):
        PIPELINES.build(SWEEPS)(data)


def test_annotations_are_copies():
    boxes = LiDARInstance3DBoxes(np.ones((2, 9), np.float32), box_dim=9)
    labels = np.array([0, -1])
    annotations = dict(gt_bboxes_3d=boxes, gt_labels_3d=labels)
    data = PIPELINES.build(dict(type='LoadAnnotations3D'))(dict(ann_info=annotations))
    data['gt_bboxes_3d'].tensor.zero_()
    data['gt_labels_3d'][:] = 5
    assert (boxes.tensor == 1).all() and labels.tolist() == [0, -1]


def test_missing_annotations_are_an_error_in_training_only():
    step = PIPELINES.build(dict(type='LoadAnnotations3D', with_attr_label=False))
    with pytest.raises(KeyError, match='create_data'):
        step(dict(token='x'))
    assert 'gt_bboxes_3d' not in step(dict(token='x', test_mode=True))
    with pytest.raises(ValueError, match='with_mask'):
        PIPELINES.build(dict(type='LoadAnnotations3D', with_mask=True))
