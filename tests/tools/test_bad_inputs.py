"""What a user sees for each bad input: one message with what, where and what to do; exit code 2; nothing lost or half written."""
import errno
import importlib.util
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from testing import REPO

sys.path.insert(0, str(REPO / 'tests' / 'engine'))
from engine_toy import write_config  # noqa: E402

from mmdet3d_ext.datasets import restricted_pickle  # noqa: E402

CONFIG = str(REPO / 'configs' / 'synthetic' / 'multitask_tiny.yaml')
SHORT = ('--max_epochs', '1', '--no-validate')
pytestmark = pytest.mark.usefixtures('one_thread')
LIDAR, IMAGES = 'samples/LIDAR_TOP', 'samples/CAM_BACK'


def load(name):
    spec = importlib.util.spec_from_file_location(f'bad_inputs_{name}', REPO / 'tools' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOLS = {name: load(name) for name in ('train', 'test', 'visualize', 'create_data')}


@pytest.fixture(scope='module')
def prepared(synthetic_root):
    if not (synthetic_root / 'nuscenes_infos_val.pkl').exists():
        assert TOOLS['create_data'].main(['nuscenes', '--root-path', str(synthetic_root), '--out-dir', str(synthetic_root),
                                          '--version', 'v1.0-mini', '--workers', '1', '--no-database']) == 0
    return synthetic_root


@pytest.fixture
def root(prepared, tmp_path):
    """A data root that a test may damage: links to the folders, copies of what tests change."""
    target = tmp_path / 'data'
    for path in prepared.rglob('*'):
        copy = target / path.relative_to(prepared)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
        elif path.suffix == '.pkl' or any(part in str(path) for part in (LIDAR, IMAGES, 'sweeps/LIDAR_TOP', 'maps/expansion')):
            shutil.copyfile(path, copy)
        else:
            copy.symlink_to(path)
    return target


def call(tool, root, tmp_path, *words):
    """The exit code of a tool on the data of ``root``."""
    common = {'train': ['--run-dir', str(tmp_path / 'run'), *SHORT], 'test': ['none', '--out-dir', str(tmp_path / 'out')],
              'visualize': ['--out-dir', str(tmp_path / 'viz')]}[tool]
    return TOOLS[tool].main([CONFIG, *common, '--dataset_root', f'{root}/', *map(str, words)])


def check_message(capsys, code, *pieces):
    """Exit code 2 and one message, with all ``pieces`` and without a traceback."""
    shown = capsys.readouterr().err
    assert code == 2, shown[-2000:]
    assert 'Traceback' not in shown
    messages = [line for line in shown.splitlines() if line.startswith('error: ')]
    assert len(messages) == 1, shown[-2000:]
    missing = [piece for piece in pieces if piece not in messages[0]]
    assert not missing, f'{missing} not in {messages[0]}'


# ---- files -------------------------------------------------------------------------------------------------------------

def cut(path):
    path.write_bytes(path.read_bytes()[:len(path.read_bytes()) // 2 + 3])


def without_location(path):
    data = restricted_pickle.load(path)
    for info in data['infos']:
        del info['location']
    restricted_pickle.save(data, path)


def lying_convention(path):
    """Boxes of the older convention under the name of the newer one."""
    data = restricted_pickle.load(path)
    for info in data['infos']:
        info['gt_boxes'][:, [3, 4]] = info['gt_boxes'][:, [4, 3]]
        info['gt_boxes'][:, 6] = -info['gt_boxes'][:, 6] - np.pi / 2
    restricted_pickle.save(data, path)


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ['BAD_INPUTS_MARK'],)


def with_code(path):
    import pickle
    path.write_bytes(pickle.dumps(Evil()))


FILES = {  # what is damaged, how, words that the message must hold
    'cut cloud': (f'{LIDAR}/*.bin', cut, ['LoadPointsFromFile', '.pcd.bin', 'is damaged or cut off', 'of 5 float32', 'copy the file']),
    'missing cloud': (f'{LIDAR}/*.bin', Path.unlink, ['.pcd.bin', 'does not exist', 'dataset_root']),
    'cut image': (f'{IMAGES}/*.jpg', cut, ['LoadMultiViewImageFromFiles', '.jpg', 'cannot be decoded', 'copy it again']),
    'no image': (f'{IMAGES}/*.jpg', lambda p: p.write_bytes(bytes(99)), ['.jpg', '(99 bytes) cannot be decoded']),
    'missing image': (f'{IMAGES}/*.jpg', Path.unlink, ['.jpg', 'does not exist; check dataset_root']),
    'missing map': ('maps/expansion/*.json', Path.unlink, ['LoadBEVSegmentation', 'map expansion pack (v1.3)']),
    'cut map': ('maps/expansion/*.json', cut, ['.json', 'is not valid JSON', 'copy it again']),
    'missing info file': ('nuscenes_infos_*.pkl', Path.unlink, ['_infos_', 'does not exist', 'tools/create_data.py nuscenes']),
    'cut info file': ('nuscenes_infos_*.pkl', cut, ['not a complete pickle', 'Make it anew']),
    'info file without location': ('nuscenes_infos_*.pkl', without_location, ["'location' is missing", 'fill-location']),
    'info file with code': ('nuscenes_infos_*.pkl', with_code, ['it asks for posix.mkdir', 'could run code']),
    'info file with a wrong convention': ('nuscenes_infos_*.pkl', lying_convention, ['mmdet3d-1.0', 'as in mmdet3d-pre-1.0']),
    'another pickle': ('nuscenes_infos_*.pkl', lambda p: restricted_pickle.save({'metainfo': {}, 'data_list': [{}]}, p),
                       ['metainfo holds neither categories nor classes']),
    'other boxes': ('nuscenes_infos_*.pkl', lambda p: restricted_pickle.save(
        {'infos': [{'token': 't', 'timestamp': 1, 'gt_boxes': np.ones((2, 5))}], 'metadata': {}}, p), ['must be (n, 7)', '(2, 5)']),
}


def in_turn(cases, tools):
    """(case, tool): the first case with every tool, the others with one after another (the tools share what they call)."""
    first, *rest = cases
    return [(first, tool) for tool in tools] + [(case, tools[number % len(tools)]) for number, case in enumerate(rest)]


@pytest.mark.parametrize('case, tool', in_turn(FILES, ['train', 'test', 'visualize']))
def test_damaged_files(case, tool, root, tmp_path, capsys, monkeypatch):
    mark = tmp_path / 'code_ran'
    monkeypatch.setenv('BAD_INPUTS_MARK', str(mark))
    pattern, damage, pieces = FILES[case]
    chosen = sorted(root.glob(pattern))
    assert chosen
    for path in chosen:
        damage(path)
    check_message(capsys, call(tool, root, tmp_path), *pieces)
    assert not mark.exists() and not list(tmp_path.glob('run/*.pth')) and not list(tmp_path.glob('viz/*.png'))


def test_a_loader_worker_shows_the_same_message(root, tmp_path, capsys):
    for path in root.glob(f'{LIDAR}/*.bin'):
        cut(path)
    code = call('train', root, tmp_path, '--data.workers_per_gpu', 1)
    check_message(capsys, code, 'error: sample ', 'step LoadPointsFromFile', 'is damaged or cut off', 'copy the file again')
    (log,) = (tmp_path / 'run' / 'logging').glob('*.log')
    assert 'Traceback' in log.read_text() and 'loading_points.py' in log.read_text()  # for those who look for a fault


def test_missing_data_root(tmp_path, capsys):
    for tool in ('train', 'test', 'visualize'):
        check_message(capsys, call(tool, tmp_path / 'nowhere', tmp_path), 'dataset_root', 'nowhere', 'samples/',
                      f'tools/create_data.py nuscenes --root-path {tmp_path}/nowhere/ --out-dir {tmp_path}/nowhere --extra-tag nuscenes')
    code = TOOLS['create_data'].main(['nuscenes', '--root-path', str(tmp_path / 'nowhere'), '--version', 'v1.0-mini'])
    check_message(capsys, code, 'data root', 'nowhere does not exist', 'v1.0-mini/')


def test_missing_info_file_gets_the_whole_command(root, tmp_path, capsys):
    for path in root.glob('nuscenes_infos_*.pkl'):
        path.unlink()
    check_message(capsys, call('train', root, tmp_path), f'Make it with: python tools/create_data.py nuscenes --root-path {root}/ --out-dir '
                  f'{root} --extra-tag nuscenes --version v1.0-mini')


def test_create_data_stops_at_a_cut_cloud_and_goes_on_after_it_is_mended(root, tmp_path, capsys):
    words = ['nuscenes', '--root-path', str(root), '--out-dir', str(tmp_path / 'out'), '--version', 'v1.0-mini', '--workers', '2']
    clouds = sorted(root.glob('*/LIDAR_TOP/*.bin'))
    whole = {path: path.read_bytes() for path in clouds}
    for path in clouds:
        cut(path)
    check_message(capsys, TOOLS['create_data'].main(words), '.pcd.bin', 'is damaged or cut off', 'copy the file again')
    assert not (tmp_path / 'out' / 'nuscenes_dbinfos_train.pkl').exists()
    for path in clouds:
        path.write_bytes(whole[path])
    assert TOOLS['create_data'].main(words) == 0 and (tmp_path / 'out' / 'nuscenes_dbinfos_train.pkl').exists()
    assert not list((tmp_path / 'out').glob('.*'))


def test_nan_and_empty_clouds_are_said_and_evaluated_without_their_points(root, tmp_path, capsys):
    clouds = sorted(root.glob('*/LIDAR_TOP/*.bin'))
    for number, path in enumerate(clouds):
        points = np.fromfile(path, np.float32).reshape(-1, 5)
        points[::5, number % 5] = (np.nan, np.inf)[number % 2]
        points[:0 if number % 4 == 3 else None].tofile(path)
    logging.captureWarnings(False)  # an earlier run's, which pytest has undone without its knowledge
    assert call('test', root, tmp_path) == 0
    shown = capsys.readouterr().err
    said = [line for line in shown.splitlines() if ' - mmdet3d - WARNING - point cloud ' in line]
    assert any('removed ' in line and 'with NaN or infinite values' in line and str(root) in line for line in said), shown[-2000:]
    assert any('is empty (0 bytes)' in line for line in said), shown[-2000:]
    metrics = json.loads((tmp_path / 'out' / 'metrics.json').read_text())
    assert all(0 <= metrics[key] <= 1 for key in ('object/nds', 'object/map', 'map/mean/iou@max'))


# ---- configuration -----------------------------------------------------------------------------------------------------

WORDS = {
    'unknown key': (['--optimzer.lr', '1'], ["'optimzer'", "did you mean 'optimizer'"]),
    'unknown inner key': (['--model.heads.map.aspp_chanels', '8'], ["did you mean 'model.heads.map.aspp_channels'"]),
    'unknown model': (['--model.type', 'BEVFuson'], ["key 'model.type'", "did you mean 'BEVFusion'"]),
    'unknown backbone': (['--model.encoders.camera.backbone.type', 'ResNett'],
                         ["key 'model.encoders.camera.backbone.type'", "did you mean 'ResNet'"]),
    'unknown data set': (['--dataset_type', 'NuScenesDatset'], ["did you mean 'NuScenesDataset'"]),
    'object class': (['--object_classes', '[car, trck]'], ["object_classes holds the unknown class 'trck'", "'truck'"]),
    'no object class': (['--object_classes', '[]'], ['object_classes must be a list of class names, got []']),
    'map class': (['--map_classes', '[drivable_area, dividr]'], ["unknown map class 'dividr'", "did you mean 'divider'"]),
    'head with other classes': (['--model.heads.object.num_classes', '7'], ['model.heads.object', 'num_classes', ' 7', ' 10']),
    'step': (['--map_bound', '[[-50, 50, 0.167], [-50, 50, 0.167]]'], ['0.167 m does not divide the range [-50, 50]', 'cells: 600']),
    'sensor grids': (['--camera_step', '0.4'], ['camera: 128x128 cells', 'lidar: 64x64 cells', 'vtransform.xbound']),
    'trunk grid': (['--model.heads.map.grid_transform.input_scope', '[[-40, 40, 0.625], [-40, 40, 0.625]]'],
                   ['model.heads.map.grid_transform.input_scope is 128x128 cells', 'point_cloud_range']),
}
TRAINING = {
    'label grid': (['--model.heads.map.grid_transform.output_scope', '[[-40, 40, 1.0], [-40, 40, 1.0]]'],
                   ['model.heads.map.grid_transform.output_scope is 80x80 cells', 'labels cover 100x100', 'LoadBEVSegmentation']),
    'map head classes': (['--model.heads.map.classes', '[divider]'], ["classes are ['divider']", 'model.heads.map.classes']),
    'learning rate': (['--optimizer.lr', 'fast'], ["key 'optimizer.lr': must be a number >= 0, got 'fast'"]),
    'no epochs': (['--max_epochs', '0'], ["command line: key 'max_epochs': must be a whole number >= 1, got 0"]),
    'no samples per GPU': (['--data.samples_per_gpu', '0'], ["key 'data.samples_per_gpu': must be a whole number >= 1, got 0"]),
    'workers': (['--data.workers_per_gpu', 'two'], ["key 'data.workers_per_gpu': must be", "got 'two'"]),
    'optimizer': (['--optimizer.type', 'AdamWW'], ["key 'optimizer.type'", "did you mean 'AdamW'"]),
    'schedule': (['--lr_config.warmup', 'linearr'], ['lr_config', '"linearr" is not a supported type']),
    'log hook': (['--log_config.hooks', '[{type: TextLogerHook}]'], ["did you mean 'TextLoggerHook'"]),
    'trunk cell': (['--model.heads.map.grid_transform.input_scope', '[[-51.2, 51.2, 0.4], [-51.2, 51.2, 0.4]]'],
                   ['has 128x128 cells', 'input_scope describes 256x256 cells']),
    'channels': (['--model.heads.map.in_channels', '65'], ["key 'model.heads.map.in_channels': is 65", 'gives 72 channels']),
}


@pytest.mark.parametrize('case, tool', in_turn(WORDS, ['train', 'visualize']))
def test_wrong_configuration(case, tool, prepared, tmp_path, capsys):
    words, pieces = WORDS[case]
    extra = ['--mode', 'pred', '--checkpoint', 'none'] if tool == 'visualize' else []
    check_message(capsys, call(tool, prepared, tmp_path, *words, *extra), *pieces)


@pytest.mark.parametrize('case', TRAINING)
def test_wrong_configuration_for_training(case, prepared, tmp_path, capsys):
    words, pieces = TRAINING[case]
    check_message(capsys, call('train', prepared, tmp_path, *words), *pieces)


# ---- checkpoints and disks, with a model of a few numbers -----------------------------------------------------------------

def bad_checkpoints(folder):
    torch.save({'state_dict': {f'a.{i}.w': torch.ones(2) for i in range(5)}, 'meta': {'epoch': 1, 'iter': 3}}, folder / 'other.pth')
    torch.save({'state_dict': {f'model.b.{i}': torch.ones(2) for i in range(5)}, 'pytorch-lightning_version': '2.0',
                'hyper_parameters': {'lr': 1}}, folder / 'lightning.pth')
    torch.save({'state_dict': {}, 'extra': Evil()}, folder / 'code.pth')
    torch.save(torch.ones(3), folder / 'tensor.pth')
    (folder / 'cut.pth').write_bytes((folder / 'other.pth').read_bytes()[:700])
    (folder / 'empty.pth').write_bytes(b'')
    (folder / 'text.pth').write_text('weights')
    with_code(folder / 'pickle.pth')
    (folder / 'folder.pth').mkdir()
    return {'other': 'is of another model: 0 of its 5 tensors', 'lightning': 'is of another model', 'code': 'posix.mkdir',
            'tensor': 'holds a Tensor, a checkpoint is a dict', 'cut': 'is not a readable checkpoint, it is truncated',
            'empty': '(0 bytes) is not a readable checkpoint', 'text': '(7 bytes) is not a readable checkpoint',
            'pickle': 'is not a readable checkpoint', 'folder': 'is a folder', 'absent': 'does not exist'}


def test_checkpoints_that_cannot_be_used(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('BAD_INPUTS_MARK', str(tmp_path / 'code_ran'))
    config = write_config(tmp_path)
    for name, message in bad_checkpoints(tmp_path).items():
        path = str(tmp_path / f'{name}.pth')
        expected = {'lightning': 'holds no epoch and iteration'}.get(name, message)
        code = TOOLS['train'].main([config, '--run-dir', str(tmp_path / 'run'), '--resume_from', path])
        check_message(capsys, code, f'{name}.pth', expected)
        check_message(capsys, TOOLS['test'].main([config, path, '--out-dir', str(tmp_path / 'e')]), f'{name}.pth', message)
    assert not (tmp_path / 'code_ran').exists() and not list((tmp_path / 'run').glob('*.pth'))


def test_a_run_of_another_configuration_is_not_resumed(tmp_path, capsys):
    run = str(tmp_path / 'run')
    assert TOOLS['train'].main([write_config(tmp_path), '--run-dir', run, '--max_epochs', '1']) == 0
    before = (tmp_path / 'run' / 'epoch_1.pth').read_bytes()
    capsys.readouterr()
    for words, pieces in ((['--model.width', '9'], ['is of another model']), (['--optimizer.type', 'SGD'],
                                                                             ['of another optimizer than SGD', 'momentum'])):
        code = TOOLS['train'].main([write_config(tmp_path), '--run-dir', run, '--resume_from', 'auto', *words])
        check_message(capsys, code, 'epoch_1.pth', *pieces)
    assert (tmp_path / 'run' / 'epoch_1.pth').read_bytes() == before


def test_full_disk_keeps_the_older_checkpoint_and_training(tmp_path, capsys, monkeypatch):
    save, calls = torch.save, []

    def full(content, stream, *args, **kwargs):
        calls.append(content['meta']['epoch'])
        if calls[-1] == 1:
            return save(content, stream, *args, **kwargs)
        stream.write(b'half a file')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, 'save', full)
    run = tmp_path / 'run'
    assert TOOLS['train'].main([write_config(tmp_path), '--run-dir', str(run), '--max_epochs', '3']) == 3
    monkeypatch.undo()
    shown = capsys.readouterr().err
    alarms = [line for line in shown.splitlines() if 'ALARM: cannot write' in line]
    assert calls == [1, 2, 3, 3] and len(alarms) == 3 and 'Traceback' not in shown
    assert 'epoch_2.pth: No space left on device' in alarms[0] and 'the newest checkpoint is' in alarms[0]
    assert sorted(path.name for path in run.glob('*.pth*')) == ['epoch_1.pth', 'latest.pth']
    assert torch.load(run / 'latest.pth')['meta']['epoch'] == 1


def test_full_disk_for_logs_is_one_line(tmp_path, capsys, monkeypatch):
    from mmdet3d_ext.engine.log_files import LogFile

    if not os.path.exists('/dev/full'):
        pytest.skip('needs /dev/full')
    monkeypatch.setattr(LogFile, '_open', lambda self: open('/dev/full', 'w'))
    assert TOOLS['train'].main([write_config(tmp_path), '--run-dir', str(tmp_path / 'run'), '--max_epochs', '1']) == 0
    shown = capsys.readouterr().err
    assert 'Traceback' not in shown and shown.count('ALARM: cannot write the log') <= 2 and 'No space left on device' in shown


@pytest.mark.parametrize('tool, words', [('train', ['--run-dir']), ('test', ['none', '--out-dir']), ('test', ['none', '--out'])])
def test_places_that_cannot_be_written_are_found_before_the_work(tool, words, tmp_path, capsys):
    (tmp_path / 'file').write_text('')
    target = tmp_path / 'file' / 'folder' / 'x.json'
    extra = ['--out-dir', str(tmp_path / 'e')] if words[-1] == '--out' else []
    code = TOOLS[tool].main([write_config(tmp_path), *words, str(target), *extra])
    check_message(capsys, code, 'cannot write', str(tmp_path / 'file'), 'Not a directory')


def test_words_of_the_command_line(tmp_path, capsys):
    check_message(capsys, TOOLS['test'].main([write_config(tmp_path), 'none', '--eval', 'boxes']), "unknown 'boxes'", 'bbox', 'map')
    check_message(capsys, TOOLS['train'].main(['/etc/passwd']), '/etc/passwd:1', 'a configuration is a mapping')
    for words in (['--workers', '0'], ['--max-sweeps', '-1']):
        with pytest.raises(SystemExit) as ended:
            TOOLS['create_data'].main(['nuscenes', *words])
        assert ended.value.code == 2 and f'{words[0]} must' in capsys.readouterr().err
