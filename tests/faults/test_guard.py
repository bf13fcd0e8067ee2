"""Losses, gradients and inputs that are not finite, on one rank of two: nothing reaches the weights, and the run goes on."""
import os
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from faulty import CHANGES, DATA, FaultyModel, content, finite, run, same_state, screen, settings, tiny, tiny_words  # noqa: E402
from mmcv.runner import HOOKS, Hook  # noqa: E402

from mmdet3d_ext.engine.checkpoint import list_checkpoints, read_checkpoint, write_atomic  # noqa: E402
from mmdet3d_ext.engine.replay import replay, report  # noqa: E402
from mmdet3d_ext.monitor.health import BAD, health  # noqa: E402
from mmdet3d_ext.monitor.run import Run  # noqa: E402

GUARD = {'max_consecutive': 4, 'action': 'rollback', 'lr_factor': 0.5, 'max_rollbacks': 2, 'save_batches': 2,
         'spike': {'window': 20, 'factor': 5.0}}
CPU = torch.device('cpu')


@pytest.fixture(autouse=True)
def no_strike():
    FaultyModel.strike = None
    yield
    FaultyModel.strike = None


def holds(metas, token):
    return any(meta['token'] == token for meta in metas)


def at_token(token, act):
    """A strike on batches that hold one sample (also when the step is computed again)."""
    return lambda losses, metas: act(losses) if holds(metas, token) else None


def spoil_loss(value):
    def act(losses):
        losses['loss/map/drivable_area/focal'] = losses['loss/map/drivable_area/focal'] * value
    return act


def spoil_gradient(value):
    def act(losses):
        losses['loss/object/l2'].register_hook(lambda gradient: gradient * value)
    return act


@pytest.mark.parametrize('where, value', [('loss', 'inf'), ('loss', 'nan'), ('gradient', 'inf'), ('gradient', 'nan'),
                                          ('input', 'inf')])
def test_one_rank_of_two_is_not_finite(tmp_path, fault_record, where, value):
    """The sample is read by one of the ranks; both skip the group that holds it, in each of three epochs."""
    data = DATA
    if where == 'input':
        data = {**DATA, 'train': {**DATA['train'], 'infinite': [5]}}
    else:
        act = (spoil_loss if where == 'loss' else spoil_gradient)(float(value))
        FaultyModel.strike = at_token('token-5', act)
    config = settings(tmp_path, '--max_epochs', 3, data=data, guard=GUARD)
    assert run(tmp_path, config, world=2) == [0, 0]
    end = content(tmp_path)
    assert finite(end) and end['optimizer_hook']['counts'] == {'steps': 6, 'scaler_skips': 0, 'nonfinite_skips': 3}
    assert end['ema_info']['steps'] == 6, 'averages leave the step out'
    text = screen(tmp_path) + screen(tmp_path, 1)
    assert text.count('step skipped on all ranks, weights unchanged') == 3
    what = {'loss': 'loss/map/drivable_area/focal', 'gradient': 'gradient', 'input': 'loss/object/l2, loss/map/drivable_area/focal'}
    named = re.findall(rf"rank (\d): non-finite {what[where]} for samples \[.*'token-5'.*?\]: (.*)", text)
    assert len(named) == 3, 'the sample\'s rank names it, the other one has nothing to say'
    for _, cause in named:
        if where == 'loss':
            assert cause == "all modules' outputs are finite: the loss functions made it"
        elif where == 'gradient':
            assert 'the first non-finite gradient arrives at the output of heads.object (Linear)' in cause
        else:
            assert cause == 'the batch itself holds non-finite values: value of sample token-5 (1 values)'
    kept = sorted((tmp_path / 'run' / 'bad_batches').glob('*.pth'))
    assert 2 <= len(kept) <= 3, 'at most save_batches per rank'
    saved, finding = replay(str(kept[0]), CPU)
    assert 'token-5' in saved['tokens']
    if where == 'gradient':
        assert finding.backward == 'heads.object (Linear)' and finding.losses == pytest.approx(saved['losses'], rel=1e-6)
    else:
        assert set(finding.bad_losses) == set(re.findall(r'loss/[\w/]+\w', what[where]))
    assert 'token-5' in report(saved, finding, 'float32')
    fault_record(f'{value} in the {where} of one rank of two', 'both ranks skip the step; loss, module and sample are named; the '
                 'batch is kept and tools/replay.py finds the same', 'that step')


def test_a_value_too_large_for_the_norm_is_skipped_too(tmp_path):
    FaultyModel.strike = at_token('token-5', spoil_gradient(1e30))
    assert run(tmp_path, settings(tmp_path, guard=GUARD)) == [0]
    assert finite(content(tmp_path)) and content(tmp_path)['optimizer_hook']['counts']['nonfinite_skips'] == 2


@HOOKS.register_module(force=True)
class FaultyDivergence(Hook):
    """From a step on losses are NaN, as long as the base learning rate is above ``limit``."""

    now = False

    def __init__(self, step, limit):
        self.step, self.limit = step, limit

    def before_train_iter(self, runner):
        FaultyDivergence.now = runner.iter >= self.step and runner.optimizer.param_groups[0]['initial_lr'] > self.limit


def diverge(losses, metas):
    if FaultyDivergence.now:
        spoil_loss(float('nan'))(losses)


@pytest.mark.parametrize('world', [1, 2])
def test_after_too_many_the_run_goes_back_with_a_lower_rate(tmp_path, fault_record, world):
    FaultyModel.strike = diverge
    data = {**DATA, 'train': {**DATA['train'], 'size': 24 * world}, 'workers_per_gpu': 1, 'persistent_workers': True}
    hooks = [{'type': 'FaultyDivergence', 'step': 16, 'limit': 0.004}]
    checkpoints = {**CHANGES['checkpoint_config'], 'every_iters': None}
    config = settings(tmp_path, '--max_epochs', 3, data=data, guard=GUARD, custom_hooks=hooks, checkpoint_config=checkpoints)
    assert run(tmp_path, config, world=world) == [0] * world
    end, text = content(tmp_path), screen(tmp_path)
    assert finite(end) and (end['guard']['lr_scale'], end['guard']['rollbacks']) == (0.25, 2)
    assert {group['initial_lr'] for group in end['optimizer']['param_groups']} == {0.01 * 0.25}
    assert len(re.findall(r'ALARM: epoch 2, iteration 12: non-finite loss .* in 4 steps in a row: back to \S+epoch_1.pth with the '
                          r'learning rate times 0.5', text)) == 2
    # the same as a run that was resumed there by hand, with a quarter of the rate
    FaultyModel.strike = None
    other = tmp_path / 'by_hand'
    config = settings(other, '--max_epochs', 3, data=data, guard=GUARD, checkpoint_config=checkpoints)
    start = read_checkpoint(str(_first(tmp_path, config, world)))
    for group in start['optimizer']['param_groups']:
        group['initial_lr'] *= 0.25
    (other / 'run').mkdir()
    write_atomic(start, str(other / 'run' / 'epoch_1.pth'))
    assert run(other, config, world=world, resume='auto') == [0] * world
    assert same_state({**content(other), 'optimizer_hook': 0}, {**end, 'optimizer_hook': 0})
    fault_record(f'losses stay NaN ({world} rank{"s" * (world > 1)})', 'back to the last checkpoint before them with the learning '
                 'rate times guard.lr_factor, until losses are finite', 'the steps since that checkpoint')


def _first(tmp_path, config, world):
    """``epoch_1.pth`` of the same run without faults (that of the faulty one is gone by now)."""
    folder = tmp_path / 'first'
    folder.mkdir()
    config.max_epochs = 1
    config.runner.max_epochs = 1
    assert run(folder, config, world=world) == [0] * world
    config.max_epochs = 3
    config.runner.max_epochs = 3
    return folder / 'run' / 'epoch_1.pth'


def test_rollbacks_end_and_a_run_may_stop_at_once(tmp_path, fault_record):
    FaultyModel.strike = diverge
    hooks = [{'type': 'FaultyDivergence', 'step': 16, 'limit': 0.0}]
    assert run(tmp_path, settings(tmp_path, guard=GUARD, custom_hooks=hooks)) == [4]
    assert 'already 2 rollbacks (guard.max_rollbacks 2): the run stops' in screen(tmp_path)
    other = tmp_path / 'stop'
    assert run(other, settings(other, guard={**GUARD, 'action': 'stop'}, custom_hooks=hooks)) == [4]
    assert 'in 4 steps in a row; the weights are those of the last finite step' in screen(other)
    for folder in (tmp_path, other):
        assert all(finite(read_checkpoint(path)) for _, path in list_checkpoints(str(folder / 'run')))
    none = tmp_path / 'none'
    hooks = [{'type': 'FaultyDivergence', 'step': 0, 'limit': 0.0}]
    assert run(none, settings(none, guard=GUARD, custom_hooks=hooks)) == [4]
    assert 'no checkpoint from before that can be read' in screen(none)
    fault_record('losses stay NaN at any rate', 'the run stops with an error after guard.max_rollbacks', 'nothing: all files hold '
                 'finite weights')


@pytest.mark.parametrize('world, bad, code', [(1, 1, 0), (2, 2, 0), (1, 3, 4), (2, 6, 4), (1, 12, 4)])
def test_a_run_that_ends_among_non_finite_steps_says_so(tmp_path, fault_record, world, bad, code):
    """12 updates in two epochs of which the last ``bad`` are NaN, too few for the guard to act."""
    FaultyModel.strike = diverge
    data = {**DATA, 'train': {**DATA['train'], 'size': 24 * world}}
    config = settings(tmp_path, '--max_epochs', 2, data=data, guard={**GUARD, 'max_consecutive': 50},
                      custom_hooks=[{'type': 'FaultyDivergence', 'step': 24 - 2 * bad, 'limit': 0.0}])
    assert run(tmp_path, config, world=world)[0] == code
    end, text = content(tmp_path), screen(tmp_path)
    assert finite(end) and end['optimizer_hook']['counts'] == {'steps': 12 - bad, 'scaler_skips': 0, 'nonfinite_skips': bad}
    assert end['optimizer_hook']['consecutive'] == bad
    words = 'the run ends with %d non-finite step%s in a row, too few for the guard to act (guard.max_consecutive is 50); the weights are ' \
            'those of the last finite step' % (bad, 's' * (bad > 1)) if bad < 12 else \
            'no step of this run was finite (12 in a row, too few for the guard to act'
    assert text.count(f'ERROR - ALARM: {words}') == 1
    assert ('NonFiniteError: ' + words in text) == (code == 4)
    assert f'epoch 2: {min(bad, 6)} of 6 updates were not finite and left out' in text
    marks = {mark.name: mark for mark in health(Run(str(tmp_path / 'run')))}
    assert marks['alarms'].level == BAD and words[:40] in marks['alarms'].text
    if world == 1 and code == 4:  # seen and accepted: nothing is left to train
        assert run(tmp_path, config, resume='auto') == [0]
        assert screen(tmp_path).count(f'ALARM: the run ends with {bad} non-finite steps') == 1 + (bad < 12)
    if world == 1 and bad in (1, 3):
        fault_record(f'a run ends with {bad} non-finite step{"s" * (bad > 1)}, too few for the guard to act',
                     f'an ALARM line, exit code {code}', 'nothing: weights are those of the last finite step')


def test_a_run_that_is_stopped_among_non_finite_steps_says_so_and_counts_on(tmp_path):
    FaultyModel.strike = diverge
    hooks = [{'type': 'FaultyDivergence', 'step': 4, 'limit': 0.0}, {'type': 'FaultyKill', 'step': 7, 'blow': 'SIGTERM'}]
    config = settings(tmp_path, '--max_epochs', 1, guard={**GUARD, 'max_consecutive': 50}, custom_hooks=hooks)
    assert run(tmp_path, config) == [75]
    assert 'ALARM: the run was stopped among non-finite steps (3 in a row' in screen(tmp_path)
    config = settings(tmp_path, '--max_epochs', 1, guard={**GUARD, 'max_consecutive': 50}, custom_hooks=hooks[:1])
    assert run(tmp_path, config, resume='auto') == [4]
    assert 'no step of this run was finite (4 in a row' in screen(tmp_path)


def test_skips_that_are_never_many_in_a_row_are_told_at_the_end_of_the_epoch(tmp_path):
    FaultyModel.strike = at_token('token-5', spoil_loss(float('nan')))
    few = {**DATA, 'train': {**DATA['train'], 'size': 88}}
    assert run(tmp_path, settings(tmp_path, '--max_epochs', 1, data=few, guard=GUARD)) == [0]
    assert 'WARNING - epoch 1: 1 of 22 updates were not finite and left out\n' in screen(tmp_path)
    assert run(tmp_path / 'b', settings(tmp_path / 'b', '--max_epochs', 1, guard=GUARD)) == [0]
    assert 'ERROR - ALARM: epoch 1: 1 of 6 updates were not finite and left out. Lower the learning' in screen(tmp_path / 'b')


@pytest.mark.parametrize('what', ['loss', 'gradient'])
def test_the_log_s_means_are_over_the_finite_steps(tmp_path, what):
    """One sample's step is skipped: its interval's line has the mean of the others, and says that one is missing."""
    import json
    import math
    FaultyModel.strike = at_token('token-5', (spoil_loss if what == 'loss' else spoil_gradient)(float('nan')))
    log = {'interval': 4, 'hooks': [{'type': 'TextLoggerHook'}]}
    accumulation = {**CHANGES['optimizer_config'], 'cumulative_iters': 1}
    assert run(tmp_path, settings(tmp_path, '--max_epochs', 1, log_config=log, optimizer_config=accumulation, guard=GUARD)) == [0]
    path, = (tmp_path / 'run').glob('*.log.json')
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if row.get('mode') == 'train']
    assert len(rows) == 3 and all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert sorted(row.get('nonfinite_steps', 0) for row in rows) == [0, 0, 1]
    assert screen(tmp_path).count('nonfinite_steps: 1') == 1


@pytest.mark.parametrize('links', [True, False])
def test_a_spike_raises_an_alarm_and_keeps_the_checkpoint_before_it(tmp_path, fault_record, monkeypatch, links):
    if not links:  # as on file systems that have none
        def refuse(*_, **__):
            raise PermissionError(1, 'Operation not permitted')
        monkeypatch.setattr(os, 'link', refuse)

    @HOOKS.register_module(force=True)
    class FaultySpike(Hook):
        now = False

        def before_train_iter(self, runner):
            FaultySpike.now = runner.iter in (53, 55)  # the last of a group

    def strike(losses, metas):
        if FaultySpike.now:
            losses['loss/object/l2'] = losses['loss/object/l2'] * 1e4

    FaultyModel.strike = strike
    config = settings(tmp_path, '--max_epochs', 8, guard=GUARD, custom_hooks=[{'type': 'FaultySpike'}])
    assert run(tmp_path, config) == [0]
    text = screen(tmp_path)
    assert len(re.findall(r'ALARM: epoch 5, iteration 6: loss \S+ is \S+ times the median of the last 20 steps', text)) == 1
    assert 'rank 0: the loss is high for samples [' in text and text.count('the median of the last') == 1
    kept = [os.path.basename(path) for _, path in list_checkpoints(str(tmp_path / 'run'), 'before_spike_')]
    assert kept == ['before_spike_epoch_4_iter_4.pth'] and finite(content(tmp_path, kept[0]))
    assert not (tmp_path / 'run' / 'epoch_4.pth').exists(), 'only the last two are kept otherwise'
    fault_record('the loss jumps', 'an ALARM line with its samples; the checkpoint before it is kept')


@pytest.mark.slow
def test_the_real_model_with_infinite_inputs(tmp_path, synthetic_root, fault_record):
    """Images, then points, are not finite: no matcher and no kernel ends the run, and the batch is named."""
    @HOOKS.register_module(force=True)
    class FaultyInputs(Hook):
        def before_train_iter(self, runner):
            batch = runner.data_batch
            if runner.iter == 1:
                batch['img'].data[0][0, 2, :, 5] = float('inf')
            if runner.iter == 3:
                batch['points'].data[0][0][:7, 4] = float('nan')

    config = tiny(tiny_words(synthetic_root, tmp_path / 'infos'), [{'type': 'FaultyInputs', 'priority': 'VERY_HIGH'}])
    assert run(tmp_path, config, timeout=200) == [0]
    end, text = content(tmp_path), screen(tmp_path)
    assert finite(end) and end['optimizer_hook']['counts'] == {'steps': 4, 'scaler_skips': 0, 'nonfinite_skips': 2}
    for key, count in (('img', 3 * config.image_size[1]), ('points', 7)):
        assert re.search(rf'the batch itself holds non-finite values: {key} of sample \w+ \({count} values\)', text)
    for path in sorted((tmp_path / 'run' / 'bad_batches').glob('*.pth')):
        saved, finding = replay(str(path), CPU)
        assert finding.bad_losses and report(saved, finding, 'float32')
    fault_record('images or points with Inf or NaN, tiny multitask model', 'the step is skipped, sample and input are named, the batch '
                 'replays', 'that step')
