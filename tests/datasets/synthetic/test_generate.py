import hashlib
import importlib.util
import json
import re
import sys

import pytest
from testing import REPO

from mmdet3d_ext.datasets.synthetic import PRESETS, GeneratorConfig, generate
from mmdet3d_ext.datasets.synthetic import frames as frames_module
from mmdet3d_ext.datasets.synthetic.config import resolve

SMALL = {'scenes_train': 1, 'scenes_val': 1, 'samples_per_scene': 2, 'image_size': (64, 36), 'lidar_azimuth_steps': 60}


def digests(root):
    return {str(path.relative_to(root)): hashlib.md5(path.read_bytes()).hexdigest()
            for path in sorted(root.rglob('*')) if path.is_file()}


@pytest.fixture(scope='module')
def first(tmp_path_factory):
    root = tmp_path_factory.mktemp('generate') / 'first'
    return root, generate(root, seed=7, **SMALL)


def test_same_bytes_for_any_number_of_workers(first, tmp_path):
    again = generate(tmp_path / 'again', seed=7, workers=2, **SMALL)
    assert digests(tmp_path / 'again') == digests(first[0])
    assert not again['reused'] and again['tables'] == first[1]['tables']


def test_other_seed_other_bytes(first, tmp_path):
    generate(tmp_path, seed=8, **SMALL)
    mine, other = digests(first[0]), digests(tmp_path)
    assert mine['maps/expansion/boston-seaport.json'] != other['maps/expansion/boston-seaport.json']
    assert mine['v1.0-mini/sample_data.json'] != other['v1.0-mini/sample_data.json']


def test_summary_counts_what_is_there(first):
    root, summary = first
    for table, count in summary['tables'].items():
        assert len(json.loads((root / 'v1.0-mini' / f'{table}.json').read_text())) == count
    assert len(summary['tables']) == 13 and summary['tables']['sample'] == 4
    assert sum(summary['annotations'].values()) == summary['tables']['sample_annotation']
    assert len(list((root / 'samples').rglob('*.jpg'))) == 4 * 6
    assert not list(root.rglob('*.part')) and not (root / '.synthetic_nuscenes_work').exists()


def test_finished_set_is_left_as_it_is(first):
    root, summary = first
    before = {path: path.stat().st_mtime_ns for path in root.rglob('*')}
    again = generate(root, seed=7, **SMALL)
    assert again['reused'] and again['tables'] == summary['tables']
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob('*')}


def test_interrupted_run_goes_on(first, tmp_path, monkeypatch):
    calls = []
    render = frames_module.render

    def failing(*args, **kwargs):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(args)
        return render(*args, **kwargs)

    monkeypatch.setattr(frames_module, 'render', failing)
    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / 'set', seed=7, **SMALL)
    assert not (tmp_path / 'set' / 'v1.0-mini').exists()
    with pytest.raises(FileExistsError, match='unfinished synthetic data set with other options'):
        generate(tmp_path / 'set', seed=8, **SMALL)
    calls.clear()
    monkeypatch.setattr(frames_module, 'render', lambda *a, **k: (calls.append(a), render(*a, **k))[1])
    generate(tmp_path / 'set', seed=7, **SMALL)
    assert len(calls) == 2  # two of the four key frames were there
    assert digests(tmp_path / 'set') == digests(first[0])


def test_never_touches_a_folder_of_others(tmp_path):
    (tmp_path / 'samples').mkdir()
    (tmp_path / 'samples' / 'precious.jpg').write_bytes(b'x')
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match='not written by this generator'):
            generate(tmp_path, overwrite=overwrite, **SMALL)
    assert (tmp_path / 'samples' / 'precious.jpg').read_bytes() == b'x'
    (tmp_path / 'file').write_text('x')
    with pytest.raises(FileExistsError, match='is a file'):
        generate(tmp_path / 'file', **SMALL)


def test_overwrite_replaces_own_files_only(tmp_path):
    tiny = {**SMALL, 'scenes_val': 0, 'samples_per_scene': 1}
    generate(tmp_path, seed=7, **tiny)
    (tmp_path / 'nuscenes_infos_train.pkl').write_bytes(b'kept')
    with pytest.raises(FileExistsError, match='overwrite'):
        generate(tmp_path, seed=8, **tiny)
    with pytest.warns(UserWarning, match='nuscenes_infos_train.pkl describe the data set that is replaced'):
        generate(tmp_path, seed=8, overwrite=True, **tiny)
    assert (tmp_path / 'nuscenes_infos_train.pkl').read_bytes() == b'kept'
    assert len(list((tmp_path / 'samples' / 'LIDAR_TOP').iterdir())) == 1
    generate(tmp_path, seed=8, overwrite=True, **{**tiny, 'version': 'v1.0-trainval'})
    assert [path.name for path in tmp_path.glob('v1.0-*')] == ['v1.0-trainval']


@pytest.mark.parametrize('options,message', [
    ({'version': 'v1.0-test'}, "version: expected one of .*got 'v1.0-test'"),
    ({'scenes_train': 9}, 'scenes_train: must be a whole number from 0 to 8, got 9'),
    ({'scenes_train': 0, 'scenes_val': 0}, 'at least one scene'),
    ({'sweeps': 10}, 'sweeps: must be a whole number from 0 to 9, got 10'),
    ({'sweeps': 1.5}, 'sweeps'), ({'samples_per_scene': 0}, 'samples_per_scene'),
    ({'image_size': (10, 10)}, 'image_size'), ({'density': -1.0}, 'density'), ({'jpeg_quality': 0}, 'jpeg_quality'),
    ({'sweep': 1}, r"unknown option\(s\) \['sweep'\]"), ({'workers': 0}, 'workers'), ({'preset': 'huge'}, 'preset'),
    ({'seed': -1}, 'seed: must be a whole number from 0')])
def test_bad_options_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        generate(tmp_path / 'x', **options)
    assert not (tmp_path / 'x').exists()


def test_trainval_uses_the_official_splits():
    from nuscenes.utils import splits
    config = resolve('tiny', version='v1.0-trainval', scenes_train=5, scenes_val=3)
    names = [name for name, _ in config.scenes()]
    assert names == splits.train[:5] + splits.val[:3]
    assert len({location for _, location in config.scenes()}) == 4


def test_presets_are_valid_and_differ():
    assert {'tiny', 'demo', 'mini'} <= set(PRESETS)
    assert len({config.digest() for config in PRESETS.values()}) == len(PRESETS)
    assert GeneratorConfig().digest() == PRESETS['mini'].digest()


def command():
    spec = importlib.util.spec_from_file_location('create_synthetic', REPO / 'tools' / 'create_synthetic_nuscenes.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, 'path', list(sys.path))
    tool = command()
    arguments = ['--root-path', str(tmp_path / 'set'), '--preset', 'tiny', '--scenes-train', '1', '--scenes-val', '0',
                 '--samples-per-scene', '1', '--image-scale', '0.05', '--lidar-azimuth-steps', '60', '--workers', '1']
    assert tool.main(arguments) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert summary['options']['image_size'] == [80, 45] and summary['tables']['sample'] == 1
    assert '5/5' in printed.err  # the progress bar: four maps and a frame
    assert tool.main([*arguments, '--seed', '3']) == 2
    assert re.fullmatch(r'error: .*other options.*\n', capsys.readouterr().err)
    (tmp_path / 'file').touch()
    assert tool.main(['--out', str(tmp_path / 'file' / 'set'), '--preset', 'tiny']) == 2
    assert re.fullmatch(r'error: \S*/file/set: Not a directory\n', capsys.readouterr().err)
    with pytest.raises(SystemExit):
        tool.main(['--help'])
    assert 'Examples:' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tool.main(['--out', 'x', '--image-size', '480'])
    assert 'WIDTHxHEIGHT' in capsys.readouterr().err
