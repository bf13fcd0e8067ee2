"""Info files and database made from hand-written tables with known geometry."""
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tiny_nuscenes as tiny  # noqa: E402
from testing import REPO  # noqa: E402

from mmdet3d_ext.datasets import gt_database, nuscenes_converter, restricted_pickle  # noqa: E402
from mmdet3d_ext.datasets.info_files import load_info_file  # noqa: E402
from mmdet3d_ext.datasets.nuscenes_schema import CAMERAS, RADARS  # noqa: E402


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp('tiny'))


@pytest.fixture(scope='module')
def made(root, tmp_path_factory):
    out = tmp_path_factory.mktemp('infos')
    written = nuscenes_converter.create_infos(root, out, version='v1.0-mini', max_sweeps=3)
    gt_database.create_gt_database(written['train'], root, out, max_sweeps=3)
    return out


def infos_of(made, split):
    return load_info_file(made / f'nuscenes_infos_{split}.pkl').infos


def test_files_lie_at_the_documented_paths_and_nothing_else_is_left(made):
    names = {path.name for path in made.iterdir()}
    assert names == {'nuscenes_infos_train.pkl', 'nuscenes_infos_val.pkl', 'nuscenes_dbinfos_train.pkl', 'nuscenes_gt_database'}


def test_splits_metadata_and_simple_fields(made):
    train, val = load_info_file(made / 'nuscenes_infos_train.pkl'), load_info_file(made / 'nuscenes_infos_val.pkl')
    assert [info['scene_name'] for info in train.infos] == ['scene-0061'] * 3
    assert [info['scene_name'] for info in val.infos] == ['scene-0103'] * 3
    assert train.metadata['version'] == 'v1.0-mini' and train.metadata['box_convention'] == 'mmdet3d-1.0'
    info = train.infos[1]
    assert info['location'] == 'singapore-onenorth' and val.infos[0]['location'] == 'boston-seaport'
    assert info['prev_token'] == 'scene-0061-sample0' and info['next_token'] == 'scene-0061-sample2'
    assert list(info['cams']) == list(CAMERAS) and sorted(info['radars']) == sorted(RADARS)
    assert info['cams']['CAM_BACK']['cam_intrinsic'].shape == (3, 3)
    assert not Path(info['lidar_path']).is_absolute() and info['lidar_path'].startswith('samples/LIDAR_TOP/')


def test_sweeps_are_newest_first_and_stop_at_the_start_of_the_scene(made):
    counts = [len(info['sweeps']) for info in infos_of(made, 'train')]
    assert counts == [0, 3, 3]
    info = infos_of(made, 'train')[2]
    times = [info['timestamp'], *(sweep['timestamp'] for sweep in info['sweeps'])]
    assert all(np.diff(times) < 0)
    radar = infos_of(made, 'train')[2]['radars']['RADAR_FRONT']
    assert len(radar) == 6 and all(np.diff([entry['timestamp'] for entry in radar]) < 0)
    assert radar[0]['data_path'].startswith('samples/')  # the key frame's own scan comes first


def test_boxes_are_in_the_lidar_frame_and_the_new_convention(made):
    info = infos_of(made, 'train')[1]
    time = tiny.STEP
    for i, row in enumerate(tiny.OBJECTS):
        expected = tiny.to_lidar(tiny.object_centre(row, time)[None], time)[0]
        assert np.allclose(info['gt_boxes'][i, :3], expected, atol=1e-9)
        w, l, h = row[5]
        assert info['gt_boxes'][i, 3:6].tolist() == [l, w, h]
        # the lidar is turned by -90 degrees on the car, which heads along global x: yaw in the lidar frame is yaw + 90
        difference = info['gt_boxes'][i, 6] - np.radians(row[6] + 90)
        assert abs((difference + np.pi) % (2 * np.pi) - np.pi) < 1e-9
    car = info['gt_velocity'][0]
    assert np.allclose(car, [0.0, 8.0], atol=1e-6)  # 8 m/s along global x = lidar +y
    assert info['gt_names'].tolist() == ['car', 'car', 'truck', 'pedestrian', 'traffic_cone', 'animal']
    assert info['gt_categories'][3] == 'human.pedestrian.adult'
    assert info['valid_flag'].tolist() == [True, True, True, True, False, True]


def test_boxes_agree_with_the_devkit(made, root):
    from nuscenes.nuscenes import NuScenes
    nusc = NuScenes('v1.0-mini', str(root), verbose=False)
    for info in infos_of(made, 'val'):
        token = nusc.get('sample', info['token'])['data']['LIDAR_TOP']
        _, boxes, _ = nusc.get_sample_data(token)
        assert np.allclose([box.center for box in boxes], info['gt_boxes'][:, :3], atol=1e-9)
        turn = [(box.orientation.yaw_pitch_roll[0] - yaw) % (2 * np.pi) for box, yaw in zip(boxes, info['gt_boxes'][:, 6])]
        assert np.allclose(np.minimum(turn, 2 * np.pi - np.array(turn)), 0, atol=1e-9)


def test_unknown_velocity_stays_unknown(tmp_path):
    root = tiny.write(tmp_path / 'data')
    path = root / 'v1.0-mini' / 'sample_annotation.json'
    records = json.loads(path.read_text())
    for record in records:  # objects seen once have no velocity
        record['prev'] = record['next'] = ''
    path.write_text(json.dumps(records))
    nuscenes_converter.create_infos(root, tmp_path / 'out', version='v1.0-mini')
    info = load_info_file(tmp_path / 'out' / 'nuscenes_infos_val.pkl').infos[0]
    assert np.isnan(info['gt_velocity']).all()


def test_sensor_poses_bring_points_to_the_key_frame_with_the_ego_motion(made, root):
    """A parked car's points of every sweep fall into its key-frame box; a moving one's do not all."""
    info = infos_of(made, 'train')[2]
    cloud = gt_database.load_points_with_sweeps(info, root, 3)
    sweep = cloud[cloud[:, 4] > 0]
    assert np.allclose(np.unique(sweep[:, 4]), [1 / 6, 1 / 3, 0.5], atol=1e-5)
    parked = gt_database.points_in_box(sweep[:, :3], info['gt_boxes'][1]).sum()
    moving = gt_database.points_in_box(sweep[:, :3], info['gt_boxes'][0]).sum()
    assert parked == 3 * 60 and moving < 3 * 60
    assert not ((np.abs(cloud[:, :2]) < 0.9).all(1) & (cloud[:, 4] == 0)).any()


def test_camera_pose_sees_the_object_where_the_pinhole_says(made):
    """The front camera's own time and place: project an object by hand and by the info's matrices."""
    info = infos_of(made, 'train')[1]
    entry = info['cams']['CAM_FRONT']
    row, time = tiny.OBJECTS[1], tiny.STEP  # parked, so that only the ego motion matters
    in_global = tiny.object_centre(row, time)
    relative = in_global - tiny.car_pose(time - 0.03) - [1.5, 0.1, 1.5]  # camera looks along global x
    by_hand = np.array([-relative[1], -relative[2], relative[0]])
    lidar_point = info['gt_boxes'][1, :3]
    rotation, translation = entry['sensor2lidar_rotation'], entry['sensor2lidar_translation']
    assert np.allclose(rotation.T @ (lidar_point - translation), by_hand, atol=1e-6)


def test_database_objects_are_relative_to_the_bottom_centre(made):
    entries = restricted_pickle.load(made / 'nuscenes_dbinfos_train.pkl')
    assert set(entries) >= {'car', 'truck', 'pedestrian', 'traffic_cone'} and 'animal' not in entries
    assert len(entries['car']) == 6 and len(entries['traffic_cone']) == 2  # the one without points is left out
    for found in entries.values():
        for entry in found:
            points = np.fromfile(made / entry['path'], dtype=np.float32).reshape(-1, 5)
            assert len(points) == entry['num_points_in_gt'] > 0
            box = entry['box3d_lidar']
            assert box.shape == (9,) and box.dtype == np.float32
            assert points[:, 2].min() > -1e-3 and points[:, 2].max() < box[5] + 1e-3
            assert (np.hypot(points[:, 0], points[:, 1]) <= np.hypot(box[3], box[4]) / 2 + 1e-3).all()
    ids = [entry['group_id'] for found in entries.values() for entry in found]
    assert len(set(ids)) == len(ids)


def test_points_in_box_matches_corners():
    rng = np.random.default_rng(0)
    box = np.array([1.0, -2.0, 0.5, 4.0, 1.5, 2.0, 0.7])
    points = rng.uniform(-5, 5, (3000, 3))
    cos, sin = np.cos(box[6]), np.sin(box[6])
    local = (points - box[:3]) @ np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
    expected = (np.abs(local) <= box[3:6] / 2).all(1)
    assert expected.sum() > 10 and np.array_equal(gt_database.points_in_box(points, box), expected)
    assert gt_database.points_in_box(np.zeros((0, 3)), box).shape == (0,)


def test_killed_run_goes_on_with_what_was_finished(root, tmp_path, monkeypatch):
    done = []
    original = nuscenes_converter._convert_scene

    def fails_at_second(name):
        if done:
            raise KeyboardInterrupt
        done.append(name)
        return original(name)

    monkeypatch.setattr(nuscenes_converter, '_convert_scene', fails_at_second)
    with pytest.raises(KeyboardInterrupt):
        nuscenes_converter.create_infos(root, tmp_path, version='v1.0-mini')
    assert not list(tmp_path.glob('*.pkl')), 'no half-made info file'

    again = []
    monkeypatch.setattr(nuscenes_converter, '_convert_scene', lambda name: again.append(name) or original(name))
    nuscenes_converter.create_infos(root, tmp_path, version='v1.0-mini')
    assert done + again == ['scene-0061', 'scene-0103']
    assert len(load_info_file(tmp_path / 'nuscenes_infos_train.pkl').infos) == 3

    again.clear()
    monkeypatch.setattr(nuscenes_converter, '_convert_scene', lambda name: again.append(name) or original(name))
    nuscenes_converter.create_infos(root, tmp_path, version='v1.0-mini', max_sweeps=2)
    assert len(again) == 2, 'other settings start anew'


def test_parts_of_other_tables_are_not_taken(tmp_path, monkeypatch):
    """A killed run, then a data set with the same scenes that was made anew in that place."""
    root, original, done = tiny.write(tmp_path / 'data'), nuscenes_converter._convert_scene, []

    def fails_at_second(name):
        if done:
            raise KeyboardInterrupt
        done.append(name)
        return original(name)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(nuscenes_converter, '_convert_scene', fails_at_second)
        nuscenes_converter.create_infos(root, tmp_path, version='v1.0-mini')
    table = root / 'v1.0-mini' / 'sample_annotation.json'
    table.write_text(json.dumps([dict(record, size=[1.0, 9.0, 1.0]) for record in json.loads(table.read_text())]))
    nuscenes_converter.create_infos(root, tmp_path, version='v1.0-mini')
    for split in ('train', 'val'):
        for info in load_info_file(tmp_path / f'nuscenes_infos_{split}.pkl').infos:
            assert (info['gt_boxes'][:, 3] == 9.0).all()


def test_several_processes_give_the_same_files(root, made, tmp_path):
    written = nuscenes_converter.create_infos(root, tmp_path, version='v1.0-mini', max_sweeps=3, workers=2)
    gt_database.create_gt_database(written['train'], root, tmp_path, max_sweeps=3, workers=2)
    for name in ('nuscenes_infos_train.pkl', 'nuscenes_infos_val.pkl', 'nuscenes_dbinfos_train.pkl'):
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes()


@pytest.mark.parametrize('breakage, message', [
    (lambda root: shutil.rmtree(root), r'data root .* does not exist'),
    (lambda root: (root / 'v1.0-mini').rename(root / 'v1.0-trainval'), r'v1.0-mini missing: .*found in .*v1.0-trainval'),
    (lambda root: (root / 'v1.0-mini' / 'ego_pose.json').unlink(), r'missing v1.0-mini/ego_pose.json'),
    (lambda root: (root / 'maps' / 'boston-seaport.png').unlink(), r'missing maps/boston-seaport.png'),
    (lambda root: [p.unlink() for p in (root / 'samples' / 'LIDAR_TOP').iterdir()], r'no lidar file of any of the 2 scenes'),
    (lambda root: [p.unlink() for p in (root / 'sweeps' / 'LIDAR_TOP').glob('scene-0103*')],
     r'scene scene-0103: files missing .*LIDAR_TOP sweeps: 4 of 6 \(first: sweeps/LIDAR_TOP/scene-0103'),
    (lambda root: sorted((root / 'samples' / 'CAM_BACK').glob('scene-0061*'))[1].unlink(),
     r'CAM_BACK: 1 of 3 \(first: samples/'),
])
def test_what_is_missing_is_named(tmp_path, breakage, message):
    root = tiny.write(tmp_path / 'data')
    breakage(root)
    with pytest.raises(nuscenes_converter.DataRootError, match=message):
        nuscenes_converter.create_infos(root, tmp_path / 'out', version='v1.0-mini')


def test_scene_without_any_file_is_left_out_and_said(tmp_path, capsys):
    root = tiny.write(tmp_path / 'data')
    for path in root.glob('*/*/scene-0103*'):
        path.unlink()
    nuscenes_converter.create_infos(root, tmp_path / 'out', version='v1.0-mini')
    assert 'WARNING: 1 of 2 scenes have no sensor files here and are left out (scene-0103)' in capsys.readouterr().out
    assert load_info_file(tmp_path / 'out' / 'nuscenes_infos_val.pkl').infos == []


def test_map_expansion_problems_are_named(tmp_path):
    check = nuscenes_converter.check_map_expansion
    assert 'maps/expansion missing' in check(tmp_path, ['boston-seaport'])[0]
    folder = tmp_path / 'maps' / 'expansion'
    folder.mkdir(parents=True)
    assert 'maps/expansion/boston-seaport.json missing' in check(tmp_path, ['boston-seaport'])[0]
    (folder / 'boston-seaport.json').write_text(json.dumps({'version': '1.2'}))
    assert 'has version 1.2: version 1.3 or newer' in check(tmp_path, ['boston-seaport'])[0]
    (folder / 'boston-seaport.json').write_text(json.dumps({'version': '1.10'}))  # as text, 1.10 < 1.3
    assert check(tmp_path, ['boston-seaport']) == []


@pytest.fixture(scope='module')
def tool():
    spec = importlib.util.spec_from_file_location('create_data', REPO / 'tools' / 'create_data.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *args: module.main([str(arg) for arg in args])


def test_command_line(root, tmp_path):
    command = [sys.executable, str(REPO / 'tools' / 'create_data.py'), 'nuscenes', '--root-path', root, '--out-dir', tmp_path,
               '--extra-tag', 'mine', '--version', 'v1.0-mini', '--workers', '1']
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 'WARNING: maps/expansion missing' in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        'mine_infos_train.pkl', 'mine_infos_val.pkl', 'mine_dbinfos_train.pkl', 'mine_gt_database'}


def test_command_line_failure_is_one_line(tool, tmp_path, capsys):
    assert tool('nuscenes', '--root-path', tmp_path / 'nowhere') == 2
    message = capsys.readouterr().err
    assert message.startswith('error: data root') and 'nowhere does not exist' in message and message.count('\n') == 1


def test_fill_location_completes_an_older_file(root, made, tmp_path, tool, capsys):
    path = tmp_path / 'old_infos_val.pkl'
    data = restricted_pickle.load(made / 'nuscenes_infos_val.pkl')
    for info in data['infos']:
        del info['location']
    restricted_pickle.save({'infos': data['infos'], 'metadata': {'version': 'v1.0-mini'}}, path)
    assert tool('check', '--info-file', path, '--root-path', root) == 1
    said = capsys.readouterr().out
    assert "the field 'location' is missing in 3 of 3" in said
    assert f'fill-location --root-path {root} --info-file {path}' in said
    assert tool('fill-location', '--root-path', root, '--info-file', path) == 0
    assert [info['location'] for info in load_info_file(path).infos] == ['boston-seaport'] * 3
    assert nuscenes_converter.fill_location(path, root) == 0  # nothing left to do


def test_fill_location_refuses_samples_of_another_data_set(root, made, tmp_path):
    path = tmp_path / 'other.pkl'
    restricted_pickle.save({'infos': [{'token': 'elsewhere'}], 'metadata': {'version': 'v1.0-mini'}}, path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match='the sample elsewhere is not in .*v1.0-mini'):
        nuscenes_converter.fill_location(path, root)
    assert path.read_bytes() == before
