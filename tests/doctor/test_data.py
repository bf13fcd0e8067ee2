"""nuScenes folders, map versions and info files, each damaged in one way."""
import json
import os
import shutil
import sys

import pytest
from testing import REPO

sys.path.insert(0, str(REPO / 'tests' / 'datasets'))
import tiny_nuscenes as tiny  # noqa: E402

from mmdet3d_ext.datasets import nuscenes_converter, restricted_pickle  # noqa: E402
from mmdet3d_ext.doctor import data  # noqa: E402
from mmdet3d_ext.doctor.options import Options  # noqa: E402

LOCATIONS = sorted(location for _, location in tiny.SCENES)


@pytest.fixture(scope='module')
def good(tmp_path_factory):
    root = tiny.write(tmp_path_factory.mktemp('nuscenes') / 'root')
    (root / 'maps' / 'expansion').mkdir()
    for location in LOCATIONS:
        (root / 'maps' / 'expansion' / f'{location}.json').write_text(json.dumps({'version': '1.3', 'polygon': []}))
    nuscenes_converter.create_infos(root, root, 'nuscenes', 'v1.0-mini')
    return root


@pytest.fixture
def root(good, tmp_path):
    """A copy that a test may damage."""
    shutil.copytree(good, tmp_path / 'root')
    return tmp_path / 'root'


def examine(root, split='train', **more):
    options = Options(data_root=str(root), info_files=[str(root / f'nuscenes_infos_{split}.pkl')], timeout=60, **more)
    return {finding.check: finding for finding in data.check(options)}


def test_all_is_there(good):
    found = examine(good)
    assert {finding.status for finding in found.values()} == {'ok'}, found
    assert 'v1.0-mini, all tables' in found['data root'].text
    assert 'boston-seaport 1.3' in found['map expansion'].text
    assert '3 samples (v1.0-mini)' in found['info file nuscenes_infos_train.pkl'].text


@pytest.mark.parametrize('version, status', [('1.3', 'ok'), ('1.10', 'ok'), ('2.0', 'ok'), ('1.2', 'problem'), ('1.0', 'problem'),
                                             (None, 'problem')])
def test_map_versions_are_numbers(root, version, status):
    """The devkit compares them as texts: 1.10 < 1.3."""
    for name in LOCATIONS:
        (root / 'maps' / 'expansion' / f'{name}.json').write_text(json.dumps({'version': version} if version else {}))
    found = examine(root)['map expansion']
    # an info file of one split names the location of its own scenes only
    assert found.status == status
    if status == 'problem':
        assert f'version {version}' in found.text and 'nuScenes-map-expansion-v1.3' in found.remedy


def test_map_files_at_the_wrong_level(root):
    for path in (root / 'maps' / 'expansion').iterdir():
        path.rename(root / 'maps' / path.name)
    (root / 'maps' / 'expansion').rmdir()
    found = examine(root)['map expansion']
    assert found.status == 'problem' and f'map JSON files lie in {root / "maps"}, move them there' in found.text


def test_without_map_labels_nothing_is_asked_of_maps(root):
    shutil.rmtree(root / 'maps' / 'expansion')
    found = examine(root, settings={'map_labels': False})
    assert found['map expansion'].status == 'skipped'


def test_missing_tables_and_folders(root):
    os.remove(root / 'v1.0-mini' / 'ego_pose.json')
    shutil.rmtree(root / 'samples')
    found = examine(root)
    assert found['data root'].status == 'problem'
    assert 'v1.0-mini/ego_pose.json' in found['data root'].text and 'samples/' in found['data root'].text
    assert 'sensor files looked at are missing' in found['info file nuscenes_infos_train.pkl'].text


def test_no_root():
    found = examine(REPO / 'no' / 'such' / 'folder')
    assert found['data root'].status == 'problem' and 'does not exist' in found['data root'].text and 'map expansion' not in found
    assert 'create_data.py' in found['info file nuscenes_infos_train.pkl'].text


def damaged(root, change):
    path = root / 'nuscenes_infos_train.pkl'
    content = restricted_pickle.load(path)
    change(content['infos'])
    restricted_pickle.save(content, path)
    return examine(root)['info file nuscenes_infos_train.pkl']


@pytest.mark.parametrize('change, text', [
    (lambda infos: infos[1].pop('location'), "the field 'location' is missing in 1 of 3"),
    (lambda infos: infos[0].pop('sweeps'), "the field 'sweeps' is missing"),
    (lambda infos: infos[2]['cams'].pop('CAM_BACK'), 'cams.CAM_BACK is missing'),
    (lambda infos: infos[2].pop('gt_names'), 'gt_names')])
def test_fields_of_an_info_file(root, change, text):
    found = damaged(root, change)
    assert found.status == 'problem' and text in found.text and 'create_data.py' in found.text


def test_a_cut_info_file(root):
    path = root / 'nuscenes_infos_train.pkl'
    path.write_bytes(path.read_bytes()[:500])
    found = examine(root)['info file nuscenes_infos_train.pkl']
    assert found.status == 'problem' and 'not a complete pickle (500 bytes)' in found.text


def test_nothing_to_look_at():
    (found,) = data.check(Options())
    assert found.status == 'skipped'
