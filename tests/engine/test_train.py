"""Whole training runs of the toy model in this process: logs, checkpoints, resuming, averages, precision, full disk."""
import glob
import json
import logging
import os
import re
import resource
import sys

import pytest
import torch
from testing import REPO

sys.path.insert(0, str(REPO / 'tests' / 'engine'))
from engine_toy import write_config  # noqa: E402

from mmdet3d_ext.config import load_config  # noqa: E402
from mmdet3d_ext.engine import train as training  # noqa: E402
from mmdet3d_ext.engine.checkpoint import CheckpointError, read_checkpoint  # noqa: E402
from mmdet3d_ext.engine.launch import UserError  # noqa: E402

NOISY = {'model': {'type': 'EngineToyModel', 'dropout': 0.3},
         'data': {'samples_per_gpu': 2, 'workers_per_gpu': 0, 'train': {'type': 'EngineToyDataset', 'size': 8, 'noise': 0.1},
                  'val': {'type': 'EngineToyDataset', 'size': 5}}}


def run(folder, *overrides, options=None, **changes):
    config = load_config(write_config(folder, **changes), [str(word) for word in overrides])
    return training.train(config, training.Options(run_dir=str(folder / 'run'), **(options or {})))


def weights(path):
    return read_checkpoint(str(path))['state_dict']


def equal(a, b):
    return set(a) == set(b) and all(torch.equal(a[k], b[k]) for k in a)


def log_text(folder):
    return ''.join(open(path).read() for path in sorted(glob.glob(str(folder / 'run' / '*.log'))))


def json_lines(folder):
    return [json.loads(line) for path in sorted(glob.glob(str(folder / 'run' / '*.log.json'))) for line in open(path)]


STAMP = r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - mmdet3d - INFO - '
LOSSES = (r'loss/object/l2: \d+\.\d{4}, loss/map/drivable_area/focal: \d+\.\d{4}, stats/object/matched_ious: \d+\.\d{4}, '
          r'loss: \d+\.\d{4}, grad_norm: \d+\.\d{4}')


def test_a_run_leaves_the_logs_and_files_that_users_know(tmp_path):
    result = run(tmp_path, '--max_epochs', 2)
    text = log_text(tmp_path)
    train = re.findall(rf'^{STAMP}Epoch \[(\d)\]\[(\d)/4\]\tlr: \d\.\d{{3}}e-\d\d, eta: \d+:\d\d:\d\d, time: \d\.\d{{3}}, '
                       rf'data_time: \d\.\d{{3}}, (?:memory: \d+, )?{LOSSES}$', text, re.M)
    assert train == [('1', '2'), ('1', '4'), ('2', '2'), ('2', '4')]
    val = re.findall(rf'^{STAMP}Epoch\(val\) \[(\d)\]\[5\]\ttoy/mse: (\d\.\d{{4}}), toy/count: 5\.0000, '
                     r'toy/score: -\d\.\d{4}$', text, re.M)
    assert [epoch for epoch, _ in val] == ['1', '2']
    for line in ("workflow: [('train', 1)], max: 2 epochs", f'Checkpoints will be saved to {result.run_dir} by', 'Config:\n',
                 'Saving checkpoint at 2 epochs', 'Model:\nEngineToyModel(', 'Set random seed to 3', 'Environment info:'):
        assert line in text, line
    first, *lines = json_lines(tmp_path)
    assert first['seed'] == 3 and first['exp_name'] == 'toy.yaml' and 'max_epochs: 2' in first['config']
    memory = ['memory'] if torch.cuda.is_available() else []
    assert list(lines[0]) == ['mode', 'epoch', 'iter', 'lr', *memory, 'data_time', 'loss/object/l2',
                              'loss/map/drivable_area/focal', 'stats/object/matched_ious', 'loss', 'grad_norm', 'time']
    assert [(x['mode'], x['epoch'], x['iter']) for x in lines] == [
        ('train', 1, 2), ('train', 1, 4), ('val', 1, 5), ('train', 2, 2), ('train', 2, 4), ('val', 2, 5)]
    for line in lines:
        if line['mode'] == 'train':
            assert line['loss'] == pytest.approx(line['loss/object/l2'] + line['loss/map/drivable_area/focal'], abs=2e-5)
    names = set(os.listdir(result.run_dir))
    assert {'configs.yaml', 'epoch_1.pth', 'epoch_2.pth', 'latest.pth', 'tf_logs', 'logging', 'metrics',
            'metrics.json'} <= names
    assert os.readlink(os.path.join(result.run_dir, 'latest.pth')) == 'epoch_2.pth'
    assert load_config(os.path.join(result.run_dir, 'configs.yaml')).max_epochs == 2
    assert json.load(open(os.path.join(result.run_dir, 'metrics.json'))) == result.metrics
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(os.path.join(result.run_dir, 'tf_logs')).Reload()
    assert {'train/loss/object/l2', 'train/loss/map/drivable_area/focal', 'train/grad_norm', 'val/toy/mse',
            'learning_rate', 'momentum'} <= set(events.Tags()['scalars'])
    meta = read_checkpoint(os.path.join(result.run_dir, 'epoch_2.pth'))['meta']
    assert (meta['epoch'], meta['iter'], meta['world_size'], meta['CLASSES'], meta['map_classes'], meta['seed']) == (
        2, 8, 1, ['car'], ['drivable_area'], 3)
    assert meta['box_convention'].startswith('mmdet3d-1.0') and len(meta['config_hash']) == 8 and meta['versions']['torch']
    # a checkpoint needs nothing but torch, and the safe way of reading
    assert set(torch.load(os.path.join(result.run_dir, 'latest.pth'), weights_only=True)) >= {'meta', 'state_dict', 'optimizer'}


def lr_trace(folder):
    return {(x['epoch'], x['iter']): x['lr'] for x in json_lines(folder) if x.get('mode') == 'train'}


@pytest.mark.parametrize('workers', [0, 1])
def test_resuming_equals_never_having_stopped(tmp_path, workers):
    """Noise in the data, dropout in the model, averages, a schedule over 4 epochs: bitwise the same weights."""
    changes = dict(NOISY, ema={'decay': 0.9}, fp16=None)
    more = ['--log_config.interval', 1, '--data.workers_per_gpu', workers]
    straight, stopped = tmp_path / 'a', tmp_path / 'b'
    straight.mkdir(), stopped.mkdir()
    run(straight, '--max_epochs', 4, *more, **changes)
    # the first half of the same schedule: what an interrupted run leaves behind
    run(stopped, '--max_epochs', 4, *more, **changes)
    for name in ('epoch_3.pth', 'epoch_4.pth', 'latest.pth'):
        os.unlink(stopped / 'run' / name)
    for path in glob.glob(str(stopped / 'run' / '*.log*')):
        os.unlink(path)
    torch.manual_seed(99), torch.rand(7)  # whatever state this process is in
    run(stopped, '--max_epochs', 4, *more, options={'resume_from': 'auto'}, **changes)
    ours, theirs = (read_checkpoint(str(folder / 'run' / 'epoch_4.pth')) for folder in (straight, stopped))
    assert equal(ours['state_dict'], theirs['state_dict']) and equal(ours['ema_state_dict'], theirs['ema_state_dict'])
    assert ours['ema_info'] == theirs['ema_info'] == {'steps': 16, 'decay': 0.9}
    assert all(torch.equal(a['exp_avg'], b['exp_avg']) for a, b in zip(ours['optimizer']['state'].values(),
                                                                      theirs['optimizer']['state'].values()))
    full, tail = lr_trace(straight), lr_trace(stopped)
    assert set(tail) == {(e, i) for e in (3, 4) for i in (1, 2, 3, 4)} and all(full[k] == v for k, v in tail.items())
    assert 'resumed epoch 2, iter 8' in log_text(stopped)
    assert not equal(ours['state_dict'], weights(straight / 'run' / 'epoch_3.pth'))


def test_a_next_stage_takes_the_weights_and_the_moments_that_are_asked_for(tmp_path):
    before, after = tmp_path / 'a', tmp_path / 'b'
    before.mkdir(), after.mkdir()
    run(before, '--max_epochs', 2, ema={'decay': 0.9, 'evaluate': 'raw'})
    path = str(before / 'run' / 'epoch_2.pth')
    source = read_checkpoint(path)
    assert source['optimizer_info'] == {'type': 'AdamW', 'names': list(source['state_dict'])}
    none = ['--optimizer.lr', '0.0', '--optimizer.weight_decay', '0.0', '--max_epochs', '1']  # what was loaded is what is saved
    for which, key in (('ema', 'ema_state_dict'), ('raw', 'state_dict'), ('auto', 'state_dict')):
        run(after, *none, options={'load_from': path, 'load_weights': which, 'load_optimizer': which == 'ema'})
        found = read_checkpoint(str(after / 'run' / 'epoch_1.pth'))
        assert equal(found['state_dict'], source[key]), which
        steps = {int(one['step']) for one in found['optimizer']['state'].values()}
        assert steps == ({8 + 4} if which == 'ema' else {4})
    assert not equal(source['state_dict'], source['ema_state_dict'])
    with pytest.raises(UserError, match='no checkpoint to take it from'):
        run(after, options={'load_optimizer': True})


def test_another_batch_size_keeps_the_epoch(tmp_path):
    run(tmp_path, '--max_epochs', 1)
    run(tmp_path, '--max_epochs', 2, '--data.samples_per_gpu', 4, options={'resume_from': 'auto'})
    assert 'iteration 4 becomes 2, the start of epoch 2' in log_text(tmp_path)
    meta = read_checkpoint(str(tmp_path / 'run' / 'epoch_2.pth'))['meta']
    assert (meta['epoch'], meta['iter'], meta['iters_per_epoch']) == (2, 4, 2)


def test_resuming_from_what_cannot_be_resumed(tmp_path):
    run(tmp_path, '--max_epochs', 1)
    content = read_checkpoint(str(tmp_path / 'run' / 'epoch_1.pth'))
    bare = str(tmp_path / 'bare.pth')
    torch.save({'state_dict': content['state_dict']}, bare)
    with pytest.raises(CheckpointError, match='no epoch and iteration.*--load_from'):
        run(tmp_path, options={'resume_from': bare})
    torch.save({'state_dict': content['state_dict'], 'meta': content['meta']}, bare)
    with pytest.raises(CheckpointError, match='no optimizer state'):
        run(tmp_path, options={'resume_from': bare})
    with pytest.raises(CheckpointError, match='heads.map'):
        run(tmp_path, '--model.width', 9, options={'resume_from': str(tmp_path / 'run' / 'epoch_1.pth')})
    run(tmp_path, '--max_epochs', 1, options={'resume_from': 'auto'})  # nothing is left to do, and that is no error
    assert 'nothing is left to train' in log_text(tmp_path)


def test_auto_skips_a_broken_file_and_starts_anew_without_one(tmp_path):
    run(tmp_path, '--max_epochs', 1, options={'resume_from': 'auto'})
    assert 'nothing to resume from' in log_text(tmp_path)
    (tmp_path / 'run' / 'epoch_7.pth').write_bytes(b'half a file')
    run(tmp_path, '--max_epochs', 2, options={'resume_from': 'auto'})
    assert 'resumed epoch 1, iter 4' in log_text(tmp_path)


def test_load_from_starts_from_weights_only(tmp_path):
    first, second = tmp_path / 'a', tmp_path / 'b'
    first.mkdir(), second.mkdir()
    run(first, '--max_epochs', 2)
    run(second, '--max_epochs', 1, '--load_from', first / 'run' / 'latest.pth', '--optimizer.lr', 0.0,
        '--optimizer.weight_decay', 0.0)
    assert equal(weights(first / 'run' / 'epoch_2.pth'), weights(second / 'run' / 'epoch_1.pth'))
    text = log_text(second)
    assert 'load checkpoint from local path' in text and '6 tensors matched, 0 missing' in text
    assert read_checkpoint(str(second / 'run' / 'epoch_1.pth'))['meta']['epoch'] == 1


def test_an_earlier_run_in_the_folder_is_moved_aside(tmp_path):
    run(tmp_path, '--max_epochs', 1)
    before = (tmp_path / 'run' / 'epoch_1.pth').read_bytes()
    run(tmp_path, '--max_epochs', 1, '--seed', 4)
    moved = glob.glob(str(tmp_path / 'run' / 'previous_*'))
    assert len(moved) == 1 and open(os.path.join(moved[0], 'epoch_1.pth'), 'rb').read() == before
    assert {'configs.yaml', 'metrics.json', 'metrics'} <= set(os.listdir(moved[0]))
    assert 'seed: 3' in open(os.path.join(moved[0], 'configs.yaml')).read()
    assert 'held an earlier run' in log_text(tmp_path)


def test_a_resumed_run_with_larger_groups_begins_with_a_whole_one(tmp_path):
    run(tmp_path, '--max_epochs', 1, '--checkpoint_config', '{interval: 2, save_last: false, every_iters: 3}')
    run(tmp_path, '--max_epochs', 1, '--optimizer_config.cumulative_iters', 2,
        options={'resume_from': str(tmp_path / 'run' / 'epoch_0_iter_3.pth')})
    assert 'goes on at iteration 3 of epoch 1 (1 come again)' in log_text(tmp_path)
    found = read_checkpoint(str(tmp_path / 'run' / 'epoch_1.pth'))
    assert found['meta']['iter'] == 4 and found['optimizer_hook']['counts']['steps'] == 3 + 1


def test_a_run_starts_from_weights_of_the_run_that_it_moves_aside(tmp_path):
    run(tmp_path, '--max_epochs', 1)
    run(tmp_path, '--max_epochs', 1, '--load_from', tmp_path / 'run' / 'latest.pth', '--optimizer.lr', 0.0,
        '--optimizer.weight_decay', 0.0)
    moved = glob.glob(str(tmp_path / 'run' / 'previous_*'))
    assert equal(weights(tmp_path / 'run' / 'epoch_1.pth'), weights(os.path.join(moved[0], 'epoch_1.pth')))


def test_any_name_of_a_run_folder(tmp_path):
    folder = tmp_path / 'zwei Läufe, lr=[1e-4] *?'
    folder.mkdir()
    run(folder, '--max_epochs', 2, '--checkpoint_config.max_keep_ckpts', 1)
    assert [path.name for path in (folder / 'run').glob('epoch_*.pth')] == ['epoch_2.pth']
    (folder / 'run' / 'epoch_3.pth.tmp-77').write_bytes(b'')
    run(folder, '--max_epochs', 3, options={'resume_from': 'auto'})
    assert sorted(path.name for path in (folder / 'run').glob('epoch_*')) == ['epoch_2.pth', 'epoch_3.pth']
    run(folder, '--max_epochs', 1, '--load_from', folder / 'run' / 'latest.pth')
    places = [folder / 'run', *(folder / 'run').glob('previous_*')]
    assert [sorted(path.name for path in place.glob('epoch_*')) for place in places] == [['epoch_1.pth'], ['epoch_2.pth', 'epoch_3.pth']]


def test_null_switches_a_part_off(tmp_path):
    run(tmp_path, '--max_epochs', 2, '--checkpoint_config.max_keep_ckpts', 'null', '--log_config.interval', 'null', '--evaluation', 'null',
        '--optimizer_config.grad_clip', 'null', '--ema', '{decay: 0.9, warm_up: null}')
    assert sorted(path.name for path in (tmp_path / 'run').glob('epoch_*')) == ['epoch_1.pth', 'epoch_2.pth']
    assert 'Epoch(val)' not in log_text(tmp_path) and not (tmp_path / 'run' / 'metrics.json').exists()


@pytest.mark.parametrize('key, value', [
    ('optimizer_config.grad_clip.max_norm', 'null'), ('optimizer_config.grad_clip.max_norm', -35),
    ('optimizer_config.grad_clip.norm_type', 0), ('evaluation.start', 'late'), ('ema', '{warm_up: -1}'),
    ('checkpoint_config.max_keep_ckpts', 'few'),
])
def test_values_that_would_end_or_turn_the_run_later_are_refused_before_it(tmp_path, key, value):
    with pytest.raises(UserError, match=rf'{key.replace("ema", "ema.warm_up")} must be a .*number'):
        run(tmp_path, f'--{key}', value)
    assert not (tmp_path / 'run' / 'epoch_1.pth').exists()


def test_default_folder_names_code_and_configuration(tmp_path, monkeypatch):
    from mmdet3d_ext.engine import run_dir
    config = load_config(write_config(tmp_path))
    name = run_dir.default_run_dir(config)
    assert re.fullmatch(r'runs/run-[0-9a-f]{8}-[0-9a-f]{8}', name)
    path = config.filename
    assert run_dir.default_run_dir(load_config(path, ['--resume_from', 'auto'])) == name
    assert run_dir.default_run_dir(load_config(path, ['--optimizer.lr', '1'])) != name


def test_keep_last_and_best(tmp_path):
    run(tmp_path, '--max_epochs', 5, '--checkpoint_config.max_keep_ckpts', 2, '--evaluation.save_best', 'toy/mse',
        '--evaluation.rule', 'less')
    scores = {x['epoch']: x['toy/mse'] for x in json_lines(tmp_path) if x.get('mode') == 'val'}
    best = min(scores, key=scores.get)
    names = sorted(os.path.basename(p) for p in glob.glob(str(tmp_path / 'run' / '*.pth')))
    assert names == sorted([f'best_toy_mse_epoch_{best}.pth', 'epoch_4.pth', 'epoch_5.pth', 'latest.pth'])
    assert read_checkpoint(str(tmp_path / 'run' / f'best_toy_mse_epoch_{best}.pth'))['meta']['epoch'] == best
    record = json.load(open(tmp_path / 'run' / 'best.json'))
    assert record['epoch'] == best and record['score'] == pytest.approx(scores[best], abs=1e-5)
    with pytest.raises(UserError, match="evaluation.save_best.*no metric 'object/nds'.*toy/mse"):
        run(tmp_path, '--evaluation.save_best', 'object/nds')


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')  # TensorBoard's writing thread
def test_a_full_disk_does_not_stop_training(tmp_path, capfd):
    """From epoch 2 on no file may grow beyond a few bytes: checkpoints, logs, TensorBoard and metrics all fail to write."""
    from mmcv.runner import HOOKS, Hook
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    messages = []

    class EngineDiskFull(Hook):
        def before_train_epoch(self, runner):
            if runner.epoch == 1:
                listener = logging.Handler()
                listener.emit = lambda record: messages.append(record.getMessage())
                runner.logger.addHandler(listener)
                resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))

    HOOKS.register_module(module=EngineDiskFull, force=True)
    try:
        with capfd.disabled():
            result = run(tmp_path, '--max_epochs', 3, '--evaluation.save_best', 'toy/count',
                         custom_hooks=[{'type': 'EngineDiskFull'}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    alarms = [m for m in messages if m.startswith('ALARM: cannot write')]
    assert any('epoch_2.pth' in m and 'the newest checkpoint is' in m and 'epoch_1.pth' in m for m in alarms)
    assert any('epoch_3.pth' in m for m in alarms) and 'epoch_3.pth' in result.save_failed
    assert any('cannot write the metrics' in m for m in alarms) and result.metrics['toy/count'] == 5
    assert any(m.startswith('Epoch [3][4/4]') for m in messages) and any(m.startswith('Epoch(val) [3]') for m in messages)
    names = sorted(os.path.basename(p) for p in glob.glob(str(tmp_path / 'run' / '*.pth*')))
    assert names == ['best_toy_count_epoch_1.pth', 'epoch_1.pth', 'latest.pth'] and weights(tmp_path / 'run' / 'latest.pth')


def test_averages_are_evaluated_and_kept_apart(tmp_path):
    result = run(tmp_path, '--max_epochs', 2, ema={'decay': 0.5, 'warm_up': 0})
    content = read_checkpoint(str(tmp_path / 'run' / 'latest.pth'))
    assert not equal(content['state_dict'], content['ema_state_dict']) and content['meta']['evaluated_weights'] == 'ema'
    assert set(content['state_dict']) == set(content['ema_state_dict']) and 'WeightAverageHook' in log_text(tmp_path)
    from engine_toy import EngineToyDataset, EngineToyModel, ToyEvaluator
    from mmcv.parallel import collate

    from mmdet3d_ext.engine.evaluate import evaluate

    def score(state):
        model = EngineToyModel()
        model.load_state_dict(state)
        data = EngineToyDataset(5)
        return evaluate(model, [collate([data[i] for i in range(5)], 5)], [ToyEvaluator()], torch.device('cpu'), progress=False)

    assert score(content['ema_state_dict'])['toy/mse'] == pytest.approx(result.metrics['toy/mse'], rel=1e-6)
    assert score(content['state_dict'])['toy/mse'] != pytest.approx(result.metrics['toy/mse'], rel=1e-3)
    plain = tmp_path / 'plain'
    plain.mkdir()
    run(plain, '--max_epochs', 2)
    assert equal(weights(plain / 'run' / 'latest.pth'), content['state_dict'])  # averaging does not touch training


def test_average_follows_its_formula(tmp_path):
    from mmdet3d_ext.engine.hooks.ema import WeightAverageHook
    model = torch.nn.BatchNorm1d(2)
    runner = type('R', (), {'model': model, 'stepped': True})()
    hook = WeightAverageHook(decay=0.9, warm_up=10)
    hook.before_run(runner)
    expected = 1.0
    for step in range(4):
        with torch.no_grad():
            model.weight.fill_(step + 2.0)
            model.num_batches_tracked.fill_(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * (step + 2.0)
        hook.after_train_iter(runner)
    runner.stepped = False
    hook.after_train_iter(runner)  # a skipped step does not count
    assert hook.average['weight'].tolist() == pytest.approx([expected, expected])
    assert int(hook.average['num_batches_tracked']) == 3
    with hook.applied(runner):
        assert model.weight.tolist() == pytest.approx([expected, expected])
    assert model.weight.tolist() == [5.0, 5.0]


@pytest.mark.parametrize('wrong, message', [
    ({'ema': {'decay': 1.5}}, "key 'ema.decay': must be between 0 and 1"), ({'ema': {'decy': 0.9}}, 'decy'),
    ({'amp': {'dtype': 'fp8'}}, "amp.dtype': 'fp8' is not one of"), ({'amp': {'type': 'fp16'}}, "unknown keys \\['type'\\]"),
    ({'custom_hooks': [{'type': 'EMAHok'}]}, "custom_hooks.0': 'EMAHok' is not known; did you mean 'EMAHook'"),
    ({'seed': -1}, "key 'seed': must be"),
    ({'runner': {'type': 'IterBasedRunner', 'max_epochs': 2}}, 'runner.type'), ({'max_epochs': 0}, "toy.yaml:.*key 'max_epochs': must be"),
    ({'data': {'samples_per_gpu': 0, 'train': {'type': 'EngineToyDataset'}}},
     "key 'data.samples_per_gpu': must be a whole number >= 1, got 0")])
def test_wrong_settings_are_named(tmp_path, wrong, message):
    with pytest.raises((UserError, ValueError), match=message):
        run(tmp_path, **wrong)


@pytest.mark.parametrize('wrong, message', [
    ({'data': {'samples_per_gpu': 1, 'train': {'type': 'EngineToyDataset', 'sise': 3}}},
     "toy.yaml:.*key 'data.train.sise': .*did you mean 'size'")])
def test_what_cannot_be_built_is_one_message_and_a_traceback_in_the_log(tmp_path, wrong, message):
    from mmdet3d_ext.engine import launch
    with pytest.raises(UserError, match=message):
        run(tmp_path, **wrong)
    config = load_config(str(tmp_path / 'toy.yaml'))
    assert launch.run(lambda: training.train(config, training.Options(run_dir=str(tmp_path / 'run')))) == 2
    assert any('Traceback' in path.read_text() for path in (tmp_path / 'run' / 'logging').glob('*.log'))


def test_what_the_check_of_the_configuration_finds_leaves_no_run_folder(tmp_path):
    with pytest.raises(UserError, match="toy.yaml:.*key 'model.widht': .*no argument 'widht'; did you mean 'width'"):
        run(tmp_path, model={'type': 'EngineToyModel', 'widht': 3})
    with pytest.raises(UserError, match="toy.yaml:.*key 'model.type': unknown model type 'EngineToyModle'; did you mean 'EngineToyModel'"):
        run(tmp_path, model={'type': 'EngineToyModle'})
    with pytest.raises(UserError, match='batch is 2 samples .* was chosen for 32'):
        run(tmp_path, auto_scale_lr={'enable': False, 'base_batch_size': 32})
    assert not (tmp_path / 'run').exists()


def test_an_epoch_shorter_than_the_log_interval_is_logged(tmp_path):
    run(tmp_path, '--max_epochs', 2, '--log_config.interval', 50)
    assert [(x['epoch'], x['iter']) for x in json_lines(tmp_path) if x.get('mode') == 'train'] == [(1, 4), (2, 4)]


def test_bfloat16_trains_close_to_float32_and_custom_hooks_run(tmp_path):
    from mmcv.runner import HOOKS, Hook

    seen = []

    class EngineProbe(Hook):
        def after_train_iter(self, runner):
            seen.append(runner.outputs['loss'].dtype)

    HOOKS.register_module(module=EngineProbe, force=True)
    folders = [tmp_path / 'a', tmp_path / 'b']
    losses = []
    for folder, amp in zip(folders, (None, {'dtype': 'bf16'})):
        folder.mkdir()
        run(folder, '--max_epochs', 3, amp=amp, custom_hooks=[{'type': 'EngineProbe', 'priority': 'LOWEST'}])
        losses.append([x['loss'] for x in json_lines(folder) if x.get('mode') == 'train'])
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.05)
    assert seen == [torch.float32] * 24 and 'EngineProbe' in log_text(folders[0])
    half = tmp_path / 'c'
    half.mkdir()
    run(half, '--max_epochs', 1, fp16={'loss_scale': {'growth_interval': 2000}})
    assert 'float16 training needs a GPU: on the CPU this run computes in float32' in log_text(half)


def test_a_sample_of_nan_is_skipped_named_and_harmless(tmp_path):
    data = {'samples_per_gpu': 2, 'workers_per_gpu': 0, 'train': {'type': 'EngineToyDataset', 'size': 8, 'poison': [5]},
            'val': {'type': 'EngineToyDataset', 'size': 5}}
    run(tmp_path, '--max_epochs', 2, data=data)
    text = log_text(tmp_path)
    assert 'non-finite loss (loss/object/l2, loss/map/drivable_area/focal, loss); step skipped on all ranks' in text
    assert re.search(r"rank 0: non-finite loss/object/l2, loss/map/drivable_area/focal for samples \[.*'token-5'", text)
    content = read_checkpoint(str(tmp_path / 'run' / 'latest.pth'))
    assert all(torch.isfinite(v).all() for v in content['state_dict'].values())
    assert content['optimizer_hook']['counts'] == {'steps': 6, 'scaler_skips': 0, 'nonfinite_skips': 2}


def test_another_batch_than_the_recipes_is_said_loudly_or_scaled(tmp_path):
    run(tmp_path, '--max_epochs', 1, auto_scale_lr={'enable': False, 'base_batch_size': 16})
    text = log_text(tmp_path)
    assert 'The effective batch is 2 samples' in text and 'in proportion it would be 0.00125' in text
    scaled = tmp_path / 'b'
    scaled.mkdir()
    run(scaled, '--max_epochs', 1, '--auto_scale_lr.enable', 'true', auto_scale_lr={'enable': False, 'base_batch_size': 16},
        lr_config=None)
    assert next(x['lr'] for x in json_lines(scaled) if x.get('mode') == 'train') == pytest.approx(0.01 * 2 / 16, abs=1e-5)


@pytest.mark.parametrize('lr_config', [
    {'policy': 'cyclic', 'target_ratio': [10, 1e-4], 'cyclic_times': 1, 'step_ratio_up': 0.4},
    {'policy': 'step', 'step': [1], 'warmup': 'linear', 'warmup_iters': 2, 'warmup_ratio': 0.1}])
def test_other_schedules(tmp_path, lr_config):
    momentum = {'policy': 'cyclic', 'target_ratio': [0.85, 1.0], 'cyclic_times': 1, 'step_ratio_up': 0.4}
    run(tmp_path, '--max_epochs', 2, '--log_config.interval', 1, lr_config=lr_config,
        momentum_config=momentum if lr_config['policy'] == 'cyclic' else None)
    rates = [x['lr'] for x in json_lines(tmp_path) if x.get('mode') == 'train']
    if lr_config['policy'] == 'cyclic':
        assert rates[0] == pytest.approx(0.01) and max(rates) == pytest.approx(0.1) and rates[-1] < 0.02
    else:
        assert rates == pytest.approx([0.001, 0.0055, 0.01, 0.01, 0.001, 0.001, 0.001, 0.001])


def test_groups_with_equal_settings_are_one_group(tmp_path):
    optimizer = {'type': 'AdamW', 'lr': 0.01, 'weight_decay': 0.01,
                 'paramwise_cfg': {'custom_keys': {'trunk': {'lr_mult': 0.1}, 'bias': {'decay_mult': 0.0}}}}
    run(tmp_path, '--max_epochs', 1, optimizer=optimizer)
    groups = read_checkpoint(str(tmp_path / 'run' / 'latest.pth'))['optimizer']['param_groups']
    assert sorted((round(g['initial_lr'], 5), g['weight_decay'], len(g['params'])) for g in groups) == [
        (0.001, 0.01, 2), (0.01, 0.0, 2), (0.01, 0.01, 2)]
