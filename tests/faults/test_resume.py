"""Runs that are killed, asked to stop, or whose files are damaged, go on as if nothing had happened."""
import contextlib
import logging
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from faulty import CHANGES, DATA, content, finish, kill_points, own_tmpfs, run, same_state, screen, settings, start, tiny, tiny_words  # noqa: E402

from mmdet3d_ext.engine.checkpoint import list_checkpoints  # noqa: E402

EPOCHS = ('--max_epochs', 3)
STEPS = 36  # 3 epochs of 12


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    """Final checkpoints of runs that were left alone, by (ranks, workers)."""
    done = {}

    def of(world=1, workers=0):
        if (world, workers) not in done:
            folder = tmp_path_factory.mktemp(f'alone{world}{workers}')
            assert run(folder, settings(folder, *EPOCHS, '--data.workers_per_gpu', workers), world=world) == [0] * world
            done[world, workers] = content(folder)
        return done[world, workers]

    return of


def names(folder):
    return [os.path.basename(path) for _, path in list_checkpoints(str(folder / 'run'))]


@pytest.mark.parametrize('step, when', kill_points(9, STEPS) + [(11, 'after_train_epoch'), (36, 'after_train_epoch'), (1, 'writing')])
def test_sigkill_at_any_step(tmp_path, alone, fault_record, step, when):
    kill = [{'type': 'FaultyKill', 'step': step, 'when': when, 'priority': 'LOWEST'}]
    codes = run(tmp_path, settings(tmp_path, *EPOCHS, custom_hooks=kill))
    assert codes == [-signal.SIGKILL] or when == 'after_train_epoch' and codes == [0]
    assert run(tmp_path, settings(tmp_path, *EPOCHS), resume='auto') == [0]
    assert same_state(content(tmp_path), alone())
    assert not list((tmp_path / 'run').glob('*.tmp-*'))
    fault_record(f'SIGKILL {"while a checkpoint is written" if when == "writing" else "at a random step"}',
                 '--resume_from auto continues from the newest whole checkpoint; the final weights are bitwise those of a run '
                 'left alone')


def test_killed_again_and_again_and_each_time_with_other_workers(tmp_path, alone, fault_record):
    for number, (step, when) in enumerate([(4, 'after_train_iter'), (9, 'writing'), (17, 'before_train_iter'),
                                           (30, 'after_train_iter')]):
        kill = [{'type': 'FaultyKill', 'step': step, 'when': when, 'priority': 'LOWEST'}]
        config = settings(tmp_path, *EPOCHS, '--data.workers_per_gpu', number % 3, custom_hooks=kill)
        assert run(tmp_path, config, resume='auto') == [-signal.SIGKILL]
    assert run(tmp_path, settings(tmp_path, *EPOCHS), resume='auto') == [0]
    assert same_state(content(tmp_path), alone())
    assert same_state(alone(), alone(workers=2)), 'what a draw gives does not depend on the workers'
    fault_record('SIGKILL four times, other numbers of workers', 'the final weights are bitwise those of a run left alone')


def test_two_ranks_are_killed(tmp_path, alone, fault_record):
    """Random numbers and BatchNorm statistics differ between ranks in the middle of an epoch."""
    for step in (10, 22):
        kill = [{'type': 'FaultyKill', 'step': step, 'priority': 'LOWEST'}]
        config = settings(tmp_path, '--max_epochs', 6, custom_hooks=kill)
        assert run(tmp_path, config, world=2, resume='auto') == [-signal.SIGKILL] * 2
        states = content(tmp_path, names(tmp_path)[-1])['rank_states']
        assert len(states) == 2 and not torch.equal(*(state['statistics']['trunk.1.running_mean'] for state in states))
    assert run(tmp_path, settings(tmp_path, '--max_epochs', 6), world=2, resume='auto') == [0, 0]
    other = tmp_path / 'alone'
    assert run(other, settings(other, '--max_epochs', 6), world=2) == [0, 0]
    assert same_state(content(tmp_path), content(other))
    fault_record('SIGKILL of two ranks at random steps', 'resumed with every rank\'s random numbers and BatchNorm statistics; '
                 'bitwise the same weights')


def test_another_number_of_ranks_keeps_the_progress_and_says_so(tmp_path, fault_record):
    kill = [{'type': 'FaultyKill', 'step': 10, 'priority': 'LOWEST'}]
    assert run(tmp_path, settings(tmp_path, custom_hooks=kill), world=2) == [-signal.SIGKILL] * 2
    assert names(tmp_path)[-1] == 'epoch_1_iter_4.pth'  # an epoch has 6 iterations, of 4 samples
    assert run(tmp_path, settings(tmp_path), resume='auto') == [0]
    text = screen(tmp_path)
    assert 'the checkpoint was written by 2 ranks, now there are 1' in text
    assert 'of epoch 2, 4 iterations of 4 samples were done: training goes on at iteration 9 of 12 with 2 samples each (0 samples ' \
           'come again)' in text
    assert 'iteration 10 becomes 20' in text
    meta = content(tmp_path)['meta']
    assert (meta['epoch'], meta['iter'], meta['world_size'], meta['iters_per_epoch']) == (2, 24, 1, 12)
    fault_record('resumed with 1 rank instead of 2, within an epoch', 'goes on after the samples that were seen; says what changes: '
                 'ranks, batch, iterations, random numbers')


def test_more_ranks_than_before_keep_the_progress_and_say_so(tmp_path, fault_record):
    """An iteration of 2 ranks has the samples of two before, and a group of two accumulated ones is not split."""
    kill = [{'type': 'FaultyKill', 'step': 10, 'priority': 'LOWEST'}]
    assert run(tmp_path, settings(tmp_path, custom_hooks=kill)) == [-signal.SIGKILL]
    done = int(names(tmp_path)[-1][len('epoch_0_iter_'):-len('.pth')])
    begin = done * 2 // 4 - done * 2 // 4 % 2
    assert run(tmp_path, settings(tmp_path), world=2, resume='auto') == [0, 0]
    text = screen(tmp_path)
    assert 'the checkpoint was written by 1 rank, now there are 2' in text
    assert f'of epoch 1, {done} iterations of 2 samples were done: training goes on at iteration {begin + 1} of 6 with 4 samples each ' \
           f'({done * 2 - begin * 4} samples come again)' in text
    meta = content(tmp_path)['meta']
    assert (meta['epoch'], meta['iter'], meta['world_size'], meta['iters_per_epoch']) == (2, 12, 2, 6)
    fault_record('resumed with 2 ranks instead of 1, within an epoch', 'goes on at the group of steps that holds the first unseen '
                 'sample; says what changes', 'the time of at most one group')


@pytest.mark.parametrize('signal_name, world', [('SIGTERM', 1), ('SIGUSR1', 2)])
def test_a_signal_writes_a_checkpoint_and_ends_with_its_code(tmp_path, fault_record, signal_name, world):
    hooks = [{'type': 'FaultySlow', 'seconds': 0.05, 'tell': str(tmp_path / 'running')}]
    config = settings(tmp_path, '--checkpoint_config.every_iters', 'null', '--data.workers_per_gpu', 1, custom_hooks=hooks)
    processes = start(tmp_path, config, world=world)
    while not (tmp_path / 'running').exists() or int((tmp_path / 'running').read_text() or 0) < 3:
        time.sleep(0.01)
        assert all(process.is_alive() for process in processes), screen(tmp_path)
    # Slurm signals every process of a step, loader workers as well; here only the last rank's group gets it
    os.killpg(processes[-1].pid, getattr(signal, signal_name))
    assert finish(processes) == [75] * world
    (name,) = [name for name in names(tmp_path) if '_iter_' in name]
    assert os.readlink(tmp_path / 'run' / 'latest.pth') == name
    assert f'stopped after iteration {name.split("_")[3][:-4]} of epoch 1' in screen(tmp_path)
    assert run(tmp_path, settings(tmp_path), world=world, resume='auto') == [0] * world
    other = tmp_path / 'alone'
    assert run(other, settings(other), world=world) == [0] * world
    assert same_state(content(tmp_path), content(other))
    fault_record(f'{signal_name} to {"the process group" if world == 1 else "one rank of two"}',
                 'all ranks write a checkpoint after the same step and end with exit code 75; resumed: bitwise the same weights')


def wait_for(condition, processes, folder, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        time.sleep(0.01)
        assert all(process.is_alive() for process in processes) and time.monotonic() < end, screen(folder)


@pytest.mark.parametrize('world', [1, 2])
def test_ctrl_c_writes_a_checkpoint(tmp_path, alone, fault_record, world):
    """With several ranks the launcher repeats the signal, as another one as well, within two seconds."""
    hooks = [{'type': 'FaultySlow', 'seconds': 0.3, 'tell': str(tmp_path / 'running')}]
    config = settings(tmp_path, *EPOCHS, '--checkpoint_config.every_iters', 'null', '--data.workers_per_gpu', 1, custom_hooks=hooks)
    processes = start(tmp_path, config, world=world)
    wait_for((tmp_path / 'running').exists, processes, tmp_path)
    for process in processes:
        os.killpg(process.pid, signal.SIGINT)  # a terminal signals the loader workers as well
    if world > 1:
        time.sleep(0.2)
        for process, number in zip(processes, (signal.SIGINT, signal.SIGTERM), strict=True):
            os.kill(process.pid, number)
    assert finish(processes) == [75] * world
    assert len([name for name in names(tmp_path) if '_iter_' in name]) == 1
    text = screen(tmp_path)
    assert text.count('Ctrl-C: this step ends, a checkpoint is written') == 1 and 'SIGINT: stopped after iteration' in text
    assert world == 1 or 'Ctrl-C' not in screen(tmp_path, 1)
    assert run(tmp_path, settings(tmp_path, *EPOCHS), world=world, resume='auto') == [0] * world
    assert same_state(content(tmp_path), alone(world))
    fault_record('Ctrl-C (SIGINT)' + (' on two ranks, repeated by the launcher' if world > 1 else ''),
                 'one line says what happens; a checkpoint is written, exit code 75; resumed: bitwise the same weights')


@pytest.mark.parametrize('second', ['SIGINT', 'SIGTERM'])
def test_a_second_ctrl_c_stops_at_once(tmp_path, fault_record, second):
    """torchrun's agent passes the second one on as SIGTERM."""
    hooks = [{'type': 'FaultySlow', 'seconds': 30, 'tell': str(tmp_path / 'running')}]
    config = settings(tmp_path, '--checkpoint_config.every_iters', 'null', custom_hooks=hooks)
    processes = start(tmp_path, config)
    wait_for((tmp_path / 'running').exists, processes, tmp_path)
    os.kill(processes[0].pid, signal.SIGINT)
    wait_for(lambda: 'Ctrl-C: this step ends' in screen(tmp_path), processes, tmp_path)
    time.sleep(0.5)
    begin = time.monotonic()
    os.kill(processes[0].pid, getattr(signal, second))
    assert finish(processes) == [130] and time.monotonic() - begin < 10
    assert names(tmp_path) == [] and 'interrupted' in screen(tmp_path) and 'Traceback' not in screen(tmp_path)
    fault_record('Ctrl-C twice', 'ends at once with exit code 130, without a checkpoint', 'the steps since the last checkpoint')


def test_ctrl_c_in_an_evaluation_ends_at_once(tmp_path, alone, fault_record):
    """The epoch's checkpoint is there; the resumed run evaluates first."""
    mark = tmp_path / 'val'
    mark.touch()
    data = dict(DATA, val=dict(DATA['val'], deadly=[2], blow='SIGINT', while_there=str(mark)))
    assert run(tmp_path, settings(tmp_path, *EPOCHS, data=data)) == [130]
    assert names(tmp_path) == ['epoch_1.pth'] and 'Ctrl-C' not in screen(tmp_path)
    assert run(tmp_path, settings(tmp_path, *EPOCHS), resume='auto') == [0]
    assert 'epoch 1 was not evaluated' in screen(tmp_path) and same_state(content(tmp_path), alone())
    fault_record('Ctrl-C in an evaluation', 'ends at once with 130; the epoch\'s checkpoint is whole, its evaluation comes first when '
                 'resumed')


@pytest.mark.parametrize('world, interval', [(1, 1), (2, 2)])
def test_a_signal_after_the_last_step_of_an_epoch_skips_its_evaluation(tmp_path, alone, world, interval):
    hooks = [{'type': 'FaultyKill', 'step': STEPS // 3 // world, 'when': 'after_train_epoch', 'rank': world - 1, 'blow': 'SIGINT',
              'priority': 'NORMAL'}]  # registered after the checkpoint's hook of this priority
    config = settings(tmp_path, *EPOCHS, '--checkpoint_config.interval', interval, '--checkpoint_config.every_iters', 'null',
                      custom_hooks=hooks)
    assert run(tmp_path, config, world=world) == [75] * world
    assert names(tmp_path) == [['epoch_1.pth'], [f'epoch_0_iter_{STEPS // 3 // world}.pth']][interval - 1]
    assert f'SIGINT: stopped after iteration {STEPS // 3 // world} of epoch 1'[8 * (world - 1):] in screen(tmp_path)
    assert run(tmp_path, settings(tmp_path, *EPOCHS), world=world, resume='auto') == [0] * world
    assert same_state(content(tmp_path), alone(world)) and (tmp_path / 'run' / 'metrics' / 'epoch_1.json').exists()


@pytest.mark.parametrize('damage', ['cut', 'one bit', 'gone'])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, alone, fault_record, damage):
    kill = [{'type': 'FaultyKill', 'step': 16, 'priority': 'LOWEST'}]
    assert run(tmp_path, settings(tmp_path, *EPOCHS, custom_hooks=kill)) == [-signal.SIGKILL]
    found = names(tmp_path)
    assert found == ['epoch_1.pth', 'epoch_1_iter_4.pth']
    newest = tmp_path / 'run' / found[-1]
    raw = bytearray(newest.read_bytes())
    if damage == 'cut':
        newest.write_bytes(raw[:-200])
    elif damage == 'one bit':
        at = raw.find(content(tmp_path, newest.name)['state_dict']['trunk.0.weight'].numpy().tobytes())
        raw[at + 5] ^= 1
        newest.write_bytes(raw)
    else:
        newest.unlink()
    assert run(tmp_path, settings(tmp_path, *EPOCHS), resume='auto') == [0]
    assert ('does not read whole, an older checkpoint is used' in screen(tmp_path)) == (damage != 'gone')
    assert same_state(content(tmp_path), alone())
    fault_record(f'newest checkpoint: {damage}', 'resumed from the one before; bitwise the same weights', 'time since then')


def test_the_disk_fills_up_within_an_epoch(tmp_path, alone, fault_record):
    """No file may grow beyond a few bytes from step 2 of epoch 2 on, until step 9: training goes on and ends well."""
    from mmcv.runner import HOOKS, Hook

    said = []

    @HOOKS.register_module(force=True)
    class FaultyDisk(Hook):
        def before_run(self, runner):
            listener = logging.Handler()
            listener.emit = lambda record: said.append(record.getMessage())
            runner.logger.addHandler(listener)

        def before_train_iter(self, runner):
            if runner.iter in (14, 21):
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (50 if runner.iter == 14 else hard, hard))

        def after_run(self, runner):
            (tmp_path / 'said.txt').write_text('\n'.join(said))

    config = settings(tmp_path, *EPOCHS, custom_hooks=[{'type': 'FaultyDisk'}])
    assert run(tmp_path, config, prepare=lambda rank: signal.signal(signal.SIGXFSZ, signal.SIG_IGN)) == [0]
    alarms = [line for line in (tmp_path / 'said.txt').read_text().splitlines() if line.startswith('ALARM: cannot write')]
    assert len(alarms) == 2 and 'epoch_1_iter_4.pth: File too large' in alarms[0] and 'epoch_1_iter_6.pth' in alarms[1]
    assert all('the newest checkpoint is' in line and 'epoch_1.pth' in line for line in alarms)
    assert same_state(content(tmp_path), alone()) and names(tmp_path) == ['epoch_2.pth', 'epoch_3.pth']
    fault_record('disk full for a while', 'an ALARM line per checkpoint that could not be written; training goes on, later ones '
                 'are written', 'nothing while the run lives')


@pytest.mark.parametrize('freed', [True, False])
def test_the_run_folder_s_disk_is_really_full(tmp_path, mounts, fault_record, freed):
    """Every write on it fails from step 2 of epoch 2 on: checkpoints, logs, metrics; until step 9, or to the end."""
    from mmcv.runner import HOOKS, Hook

    @HOOKS.register_module(force=True)
    class FaultyFull(Hook):
        def before_train_iter(self, runner):
            fill = tmp_path / 'run' / 'fill'
            if runner.iter == 14:
                with contextlib.suppress(OSError), open(fill, 'wb', buffering=0) as stream:
                    while stream.write(bytes(4096)) == 4096:
                        pass
            if runner.iter == 21 and freed:
                fill.unlink()

        def after_run(self, runner):
            (tmp_path / 'at_the_end').write_text(' '.join(os.listdir(tmp_path / 'run')))

    (tmp_path / 'run').mkdir()
    config = settings(tmp_path, *EPOCHS, custom_hooks=[{'type': 'FaultyFull', 'priority': 'LOWEST'}])
    assert run(tmp_path, config, prepare=lambda rank: own_tmpfs(tmp_path / 'run', 4 * 2 ** 20)) == [0 if freed else 3]
    text = screen(tmp_path)
    assert re.search(r'ALARM: cannot write \S+epoch_1_iter_4.pth: No space left on device .*Training goes on; the newest checkpoint is '
                     r'\S+epoch_1.pth', text)
    assert re.search(r'ALARM: cannot write the log \S+: No space left on device. It lacks lines from here on', text)
    there = set((tmp_path / 'at_the_end').read_text().split())
    if freed:
        assert {'epoch_2.pth', 'epoch_3.pth'} <= there
        fault_record('the run folder\'s disk is full for a while', 'ALARM lines for checkpoints and logs; training goes on')
    else:
        assert 'epoch_1.pth' in there and 'epoch_3.pth' not in there
        assert 'ALARM: cannot write the metrics' in text and 'TextLoggerHook cannot write its log' in text
        fault_record('the run folder\'s disk is full to the end', 'ALARM lines, exit code 3; the last whole checkpoint is kept',
                     'what was trained since it')


def test_killed_between_checkpoint_and_evaluation(tmp_path, alone, fault_record):
    import json

    from engine_toy import ToyEvaluator

    def prepare(rank):
        ToyEvaluator.compute = lambda self: os.kill(os.getpid(), signal.SIGKILL)

    assert run(tmp_path, settings(tmp_path, *EPOCHS), prepare=prepare) == [-signal.SIGKILL]
    assert names(tmp_path) == ['epoch_1.pth']
    assert run(tmp_path, settings(tmp_path, *EPOCHS), resume='auto') == [0]
    assert 'epoch 1 was not evaluated before the run was interrupted' in screen(tmp_path)
    scores = [json.loads((tmp_path / 'run' / 'metrics' / f'epoch_{epoch}.json').read_text()) for epoch in (1, 2, 3)]
    assert all(score['toy/count'] == 5 for score in scores) and same_state(content(tmp_path), alone())
    fault_record('SIGKILL during the evaluation of an epoch', 'the resumed run evaluates that epoch first')


def test_killed_between_evaluation_and_best_checkpoint(tmp_path, fault_record):
    """All epochs score the same here, so the first one is the best: unless its score was forgotten."""
    import json

    from mmdet3d_ext.engine.hooks.checkpoint import BestKeeper

    def prepare(rank):
        BestKeeper.update = lambda *given: os.kill(os.getpid(), signal.SIGKILL)

    config = settings(tmp_path, *EPOCHS, '--evaluation.save_best', 'toy/count')
    assert run(tmp_path, config, prepare=prepare) == [-signal.SIGKILL]
    assert run(tmp_path, config, resume='auto') == [0]
    best = json.loads((tmp_path / 'run' / 'best.json').read_text())
    assert best['epoch'] == 1 and (tmp_path / 'run' / best['file']).is_file()
    assert sorted(path.name for path in (tmp_path / 'run' / 'metrics').iterdir()) == [f'epoch_{epoch}.json' for epoch in (1, 2, 3)]
    fault_record('SIGKILL between an evaluation and its best checkpoint', 'the resumed run evaluates that epoch again')


def test_only_a_bounded_number_of_files_is_kept(tmp_path):
    assert run(tmp_path, settings(tmp_path, '--max_epochs', 4, '--checkpoint_config.every_iters', 1)) == [0]
    assert names(tmp_path) == ['epoch_3.pth', 'epoch_4.pth']
    kill = [{'type': 'FaultyKill', 'step': 20, 'priority': 'LOWEST'}]
    other = tmp_path / 'killed'
    config = settings(other, checkpoint_config={**CHANGES['checkpoint_config'], 'every_iters': 1}, custom_hooks=kill, data=DATA)
    assert run(other, config) == [-signal.SIGKILL]
    assert names(other) == ['epoch_1.pth', 'epoch_1_iter_6.pth', 'epoch_1_iter_8.pth']  # groups of two steps are not split


def test_checkpoints_by_the_clock_of_rank_0(tmp_path):
    """Every step is late by this clock, so every group of two steps ends with a file; both ranks agree on it."""
    hooks = [{'type': 'FaultyKill', 'step': 9, 'priority': 'LOWEST'}]
    words = ['--checkpoint_config.every_iters', 'null', '--checkpoint_config.every_minutes', 1e-6]
    assert run(tmp_path, settings(tmp_path, *words, custom_hooks=hooks), world=2) == [-signal.SIGKILL] * 2
    assert names(tmp_path) == ['epoch_1.pth', 'epoch_1_iter_2.pth']
    assert run(tmp_path, settings(tmp_path), world=2, resume='auto') == [0, 0]
    other = tmp_path / 'alone'
    assert run(other, settings(other), world=2) == [0, 0]
    assert same_state(content(tmp_path), content(other))


@pytest.mark.slow
def test_the_real_model_is_killed_within_an_epoch(tmp_path, synthetic_root, fault_record):
    """The tiny multitask configuration: cameras, points, object paste, map labels, both heads; workers, augmentation, dropout."""
    infos = tmp_path / 'infos'
    paste = f'{{type: ObjectPaste, stop_epoch: 1, db_sampler: {{dataset_root: {infos}, info_path: {infos}/nuscenes_dbinfos_train.pkl, ' \
            'rate: 1.0, classes: "${object_classes}", sample_groups: {car: 8, pedestrian: 8}}}'
    words = [*tiny_words(synthetic_root, infos), '--templates.steps.paste', f'[{paste}]', '--gt_paste_stop_epoch', 1, '--ema',
             '{decay: 0.9}', '--checkpoint_config.every_iters', 2, '--data.workers_per_gpu', 1]
    assert 'ObjectPaste' in [step['type'] for step in tiny(words).train_dataset.pipeline]
    left = tmp_path / 'alone'
    left.mkdir()
    assert run(left, tiny(words), timeout=200) == [0]
    kill = [{'type': 'FaultyKill', 'step': 3, 'priority': 'LOWEST'}]
    assert run(tmp_path, tiny(words, kill), timeout=200) == [-signal.SIGKILL]
    assert names(tmp_path) == ['epoch_0_iter_2.pth']
    words[-1] = 0
    assert run(tmp_path, tiny(words), timeout=200, resume='auto') == [0]
    assert same_state(content(tmp_path), content(left))
    fault_record('SIGKILL of the tiny multitask model within an epoch', 'resumed; weights, averages and optimizer are bitwise those of '
                 'a run left alone')
