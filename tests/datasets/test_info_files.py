"""Reading info files: safety, conventions, missing fields, the mmdet3d >= 1.1 form."""
import os
import pickle
from collections import OrderedDict

import numpy as np
import pytest
from testing import shared_dir

from mmdet3d_ext.datasets import info_files, restricted_pickle
from mmdet3d_ext.datasets.info_files import InfoFileError, load_info_file


def boxes(n, seed=0):
    """(n, 7) cars in the new convention."""
    rng = np.random.default_rng(seed)
    return np.column_stack([rng.uniform(-40, 40, (n, 2)), rng.uniform(-1, 1, n), rng.uniform(4, 5, n), rng.uniform(1.7, 2, n),
                            rng.uniform(1.4, 1.8, n), rng.uniform(-np.pi, np.pi, n)])


def info(token='a', timestamp=1, n=6, convention='new', **extra):
    gt = boxes(n)
    gt = gt if convention == 'new' else info_files.swap_box_convention(gt)
    return {'token': token, 'timestamp': timestamp, 'gt_boxes': gt, 'gt_names': np.array(['car'] * n, dtype=np.str_), **extra}


def write(path, infos, metadata=None):
    restricted_pickle.save({'infos': infos, 'metadata': metadata or {}}, path)
    return path


# ------------------------------------------------------------------------------------------------------------- safety

class Attack:
    def __reduce__(self):
        return os.system, ('touch should-never-exist-mmdet3d-ext',)


class Subtle:
    """A callable hidden inside numpy's own reconstruction."""

    def __reduce__(self):
        return getattr, (np.ndarray, 'tofile')


@pytest.mark.parametrize('payload, name', [(Attack(), 'posix.system'), (Subtle(), 'builtins.getattr'),
                                           (print, 'builtins.print'), (np.random.RandomState(0), 'numpy.random')])
def test_pickle_that_could_run_code_is_refused_and_names_the_global(tmp_path, payload, name):
    path = tmp_path / 'bad_infos_val.pkl'
    path.write_bytes(pickle.dumps({'infos': [{'token': payload}], 'metadata': {}}))
    with pytest.raises(InfoFileError, match=rf'refused to load an info file: .*bad_infos_val.pkl: it asks for {name}'):
        load_info_file(path)
    assert not os.path.exists('should-never-exist-mmdet3d-ext')


@pytest.mark.parametrize('protocol', range(6))
def test_plain_and_numpy_values_survive_every_protocol(tmp_path, protocol):
    value = {'a': np.arange(6.0).reshape(2, 3)[:, ::-1], 'b': np.float32(2.5), 'c': np.array(['car', 'trück']),
             'd': b'\xff\x00', 'e': {1, 2}, 'f': OrderedDict(x=[None, True, 1 + 2j]),
             'g': np.array([], dtype=bool), 'h': np.bool_(True), 'i': np.array([1, 'x', None], dtype=object)}
    path = tmp_path / 'x.pkl'
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    back = restricted_pickle.load(path)
    assert np.array_equal(back['a'], value['a']) and back['b'] == value['b'] and back['c'].tolist() == ['car', 'trück']
    assert {k: back[k] for k in 'def'} == {k: value[k] for k in 'def'} and back['g'].dtype == bool
    assert back['i'].tolist() == [1, 'x', None]


def test_numpy_2_module_names_are_known(tmp_path):
    data = pickle.dumps(np.arange(3), protocol=0).replace(b'numpy.core.multiarray', b'numpy._core.multiarray')
    assert b'numpy._core' in data
    (tmp_path / 'x.pkl').write_bytes(data)
    assert restricted_pickle.load(tmp_path / 'x.pkl').tolist() == [0, 1, 2]


def test_save_is_atomic_and_readable(tmp_path):
    path = tmp_path / 'x.pkl'
    restricted_pickle.save([1, 2], path)
    with pytest.raises(Exception, match='pickle'):
        restricted_pickle.save(lambda: None, path)
    assert restricted_pickle.load(path) == [1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ['x.pkl']
    assert path.stat().st_mode & 0o444 == 0o444 & ~restricted_pickle._umask()


@pytest.mark.parametrize('keep', [0, 1, 100, -1])
def test_cut_off_file_is_named(tmp_path, keep):
    path = write(tmp_path / 'x_infos_val.pkl', [info()])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InfoFileError, match=r'x_infos_val.pkl: not a complete pickle \(\d+ bytes\).*create_data.py'):
        load_info_file(path)


def test_absent_file_names_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'create_data.py nuscenes .* --extra-tag mine'):
        load_info_file(tmp_path / 'mine_infos_val.pkl')


def test_a_root_without_its_slash_is_said(tmp_path):
    write(tmp_path / 'x_infos_val.pkl', [info()])
    with pytest.raises(FileNotFoundError, match='x_infos_val.pkl does: dataset_root lacks its "/" at the end'):
        load_info_file(f'{tmp_path}x_infos_val.pkl', root=tmp_path)
    with pytest.raises(FileNotFoundError, match='create_data.py nuscenes'):
        load_info_file(tmp_path / 'y_infos_val.pkl', root=tmp_path)


def test_other_content_is_refused(tmp_path):
    restricted_pickle.save({'state_dict': 1}, tmp_path / 'x.pkl')
    with pytest.raises(InfoFileError, match=r"expected \{infos, metadata\} or \{data_list, metainfo\}, found \['state_dict'\]"):
        load_info_file(tmp_path / 'x.pkl')
    write(tmp_path / 'y.pkl', [info()], {'info_format': 99})
    with pytest.raises(InfoFileError, match='has format 99'):
        load_info_file(tmp_path / 'y.pkl')


@pytest.mark.parametrize('content, message', [
    ({'infos': [[1]]}, 'must be mappings'),
    ({'infos': [info()], 'metadata': [1]}, 'must be mappings'),
    ({'infos': [info(gt_names=np.array(['car']))]}, 'gt_names has 1 entries for 6 boxes'),
    ({'infos': [info(gt_velocity=3.0)]}, 'gt_velocity has no entries for 6 boxes'),
    ({'infos': [info(), info('b', None)]}, "'timestamp' is missing in 1 of 2 samples .first: index 1, token b"),
])
def test_content_of_another_kind_names_the_file(tmp_path, content, message):
    restricted_pickle.save(content, tmp_path / 'x_infos_val.pkl')
    with pytest.raises(InfoFileError, match=f'info file .*x_infos_val.pkl: .*{message}'):
        load_info_file(tmp_path / 'x_infos_val.pkl')


def test_a_field_without_a_value_is_not_there(tmp_path):
    path = write(tmp_path / 'x.pkl', [info(location=None, gt_velocity=None), dict(info('b'), gt_boxes=None, gt_names=None)])
    first, second = load_info_file(path).infos
    assert 'location' not in first and 'gt_velocity' not in first and 'gt_boxes' not in second
    assert load_info_file(write(tmp_path / 'none.pkl', None)).infos == []


def test_more_columns_than_seven_are_left_out(tmp_path):
    wide = [info(), info('b', 2, n=0), info('c', 3)]
    for one, columns in zip(wide, (9, 9, 7)):
        one['gt_boxes'] = np.concatenate([one['gt_boxes'], np.ones((len(one['gt_boxes']), columns - 7))], axis=1)
    found = load_info_file(write(tmp_path / 'x.pkl', wide)).infos
    assert [one['gt_boxes'].reshape(-1, 7).shape for one in found] == [(6, 7), (0, 7), (6, 7)]
    assert np.array_equal(found[0]['gt_boxes'], found[2]['gt_boxes'])


# -------------------------------------------------------------------------------------------------------- conventions

def test_conversion_there_and_back_and_what_it_means():
    new = boxes(50)
    old = info_files.swap_box_convention(new)
    assert np.allclose(info_files.swap_box_convention(old), new, atol=1e-12)
    # The older convention: dims (w, l, h), yaw clockwise, heading along the box's own -y: (-sin yaw, -cos yaw).
    assert np.array_equal(old[:, 3:5], new[:, [4, 3]])
    heading = np.stack([-np.sin(old[:, 6]), -np.cos(old[:, 6])], 1)
    assert np.allclose(heading, np.stack([np.cos(new[:, 6]), np.sin(new[:, 6])], 1), atol=1e-12)


def test_conversion_matches_the_reference_fixture():
    """`export_*` is what the reference exported for `boxes_in` (old convention) as nuScenes boxes in the lidar frame."""
    from pyquaternion import Quaternion
    golden = np.load(shared_dir('parity', 'data_pipeline.npz'))
    new = info_files.swap_box_convention(golden['boxes_in'].astype(np.float64))
    width_length_height = new[:, [4, 3, 5]]
    assert np.allclose(width_length_height, golden['export_wlh'], atol=1e-5)
    yaw = np.array([Quaternion(q).yaw_pitch_roll[0] for q in golden['export_rotation_wxyz']])
    difference = (new[:, 6] - yaw + np.pi) % (2 * np.pi) - np.pi
    assert np.allclose(difference, 0, atol=1e-5)


def test_old_file_is_recognised_and_converted_with_a_warning(tmp_path, caplog):
    path = write(tmp_path / 'x.pkl', [info('a', 2, convention='old'), info('b', 1, convention='old')], {'version': 'v1.0-mini'})
    loaded = load_info_file(path)
    assert [i['token'] for i in loaded.infos] == ['b', 'a'], 'sorted by time'
    assert np.allclose(loaded.infos[0]['gt_boxes'], boxes(6), atol=1e-9)
    assert loaded.metadata['box_convention'] == 'mmdet3d-1.0' and 'converted' in ' '.join(loaded.notes)
    assert any('converted' in record.message for record in caplog.records)


def test_new_file_without_metadata_is_left_alone(tmp_path):
    loaded = load_info_file(write(tmp_path / 'x.pkl', [info()], {'version': 'v1.0-mini'}))
    assert np.array_equal(loaded.infos[0]['gt_boxes'], boxes(6)) and 'recognised' in ' '.join(loaded.notes)


def test_stated_old_convention_is_converted_whatever_the_number_of_boxes(tmp_path):
    path = write(tmp_path / 'x.pkl', [info(n=1, convention='old')], {'box_convention': 'mmdet3d-pre-1.0'})
    assert np.allclose(load_info_file(path).infos[0]['gt_boxes'], boxes(1), atol=1e-9)


def test_contradiction_between_metadata_and_boxes_is_refused(tmp_path):
    path = write(tmp_path / 'x.pkl', [info(convention='old')], {'box_convention': 'mmdet3d-1.0'})
    with pytest.raises(InfoFileError, match=r'metadata says its boxes are mmdet3d-1.0, but 0 of 6 cars'):
        load_info_file(path)
    path = write(tmp_path / 'y.pkl', [info()], {})
    with pytest.raises(InfoFileError, match=r'the box_convention argument says its boxes are mmdet3d-pre-1.0, but 6 of 6'):
        load_info_file(path, box_convention='mit')


@pytest.mark.parametrize('infos', [
    [info(n=4)],                                              # too few to tell
    [info('a', n=6), info('b', n=6, convention='old')],       # a mixture
    [dict(info(n=6), gt_names=np.array(['pedestrian'] * 6))]  # nothing that is clearly long
])
def test_undecidable_file_is_refused_with_the_ways_out(tmp_path, infos):
    path = write(tmp_path / 'x.pkl', infos)
    with pytest.raises(InfoFileError, match=r'its box convention and it cannot be told .*create_data.py.*box_convention'):
        load_info_file(path)
    loaded = load_info_file(path, box_convention='mmdet3d-1.0')
    assert np.array_equal(loaded.infos[0]['gt_boxes'], infos[0]['gt_boxes'])


def test_file_without_boxes_needs_no_convention(tmp_path):
    path = write(tmp_path / 'x.pkl', [{'token': 'a', 'timestamp': 1}, dict(info(n=0), token='b')])
    assert len(load_info_file(path).infos) == 2


def test_unknown_convention_is_refused(tmp_path):
    with pytest.raises(InfoFileError, match="unknown box convention 'kitti'"):
        load_info_file(write(tmp_path / 'x.pkl', [info()], {'box_convention': 'kitti'}))


def test_missing_field_names_sample_and_command(tmp_path):
    infos = [info('a', 1, location='x'), info('b', 2)]
    with pytest.raises(InfoFileError, match=r"field 'location' is missing in 1 of 2 samples \(first: index 1, token b\).*"
                                            r'create_data.py fill-location .*--info-file f.pkl'):
        info_files.check_fields(infos, ('token', 'location'), 'f.pkl')
    with pytest.raises(InfoFileError, match=r"field 'valid_flag' is missing.*create_data.py nuscenes"):
        info_files.check_fields(infos, ('valid_flag',), 'f.pkl')
    with pytest.raises(InfoFileError, match=r'cams.CAM_FRONT.cam_intrinsic is missing \(index 0, token a\)'):
        info_files.check_cameras([{'token': 'a', 'cams': {'CAM_FRONT': {name: 0 for name in info_files.CAMERA_FIELDS
                                                                        if name != 'cam_intrinsic'}}}], 'f.pkl')


def test_a_radar_file_of_the_reference_names_the_one_file_that_holds_all(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'_radar\.pkl does not exist \(one file holds all sensors here: write '
                                                r'nuscenes_infos_train\.pkl\)'):
        load_info_file(tmp_path / 'nuscenes_infos_train_radar.pkl')
