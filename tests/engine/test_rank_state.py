"""What a checkpoint within an epoch holds per rank; the place in the epoch with other ranks and batches; signals."""
import logging
import os
import signal
import threading
import zipfile

import pytest
import torch
from torch import nn

from mmdet3d_ext.datasets.epoch_state import random_state, seed_process
from mmdet3d_ext.engine import rank_state
from mmdet3d_ext.engine.checkpoint import CheckpointWriteError, list_checkpoints, newest_checkpoint, writing
from mmdet3d_ext.engine.hooks import SafeCheckpointHook, WeightAverageHook
from mmdet3d_ext.engine.runner import CustomEpochBasedRunner
from mmdet3d_ext.engine.stopping import StopSignals


def model(value):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.InstanceNorm1d(2))
    net[1].running_mean.fill_(value), net[1].running_var.fill_(value + 1)
    return net


def test_statistics_and_random_numbers_come_back():
    seed_process(1)
    net = model(3.0)
    ema = WeightAverageHook(decay=0.5)
    ema.before_run(type('R', (), {'model': net})())
    ema.average['1.running_mean'].fill_(7.0)
    (state,) = rank_state.gather(net, ema)
    expected = [torch.rand(2), random_state()]
    other, fresh = model(0.0), WeightAverageHook(decay=0.5)
    fresh.load_state_dict({**ema.average, '1.running_mean': torch.zeros(2)})
    rank_state.restore([state], 0, 1, other, fresh)
    assert other[1].running_mean.tolist() == [3.0, 3.0] and other[1].running_var.tolist() == [4.0, 4.0]
    fresh.before_run(type('R', (), {'model': other})())
    assert fresh.average['1.running_mean'].tolist() == [7.0, 7.0]
    rank_state.restore_random([state], 0, 1, 5, 2, 3)
    assert torch.equal(torch.rand(2), expected[0])


def test_with_other_ranks_statistics_are_the_mean_and_random_numbers_anew():
    states = [rank_state.gather(model(value))[0] for value in (1.0, 2.0, 6.0)]
    net = model(0.0)
    rank_state.restore(states, 1, 2, net)
    assert net[1].running_mean.tolist() == [3.0, 3.0]
    draws = set()
    for rank, place in ((0, 4), (1, 4), (0, 5)):
        rank_state.restore_random(states, rank, 2, 9, 2, place)
        draws.add(float(torch.rand(())))
    assert len(draws) == 3


@pytest.mark.parametrize('done, then, now, length, group, begin, again', [
    (4, 8, 8, 20, 1, 4, 0), (4, 8, 4, 40, 1, 8, 0), (4, 8, 16, 10, 1, 2, 0), (5, 8, 16, 10, 1, 2, 8), (5, 8, 12, 14, 1, 3, 4),
    (5, 8, 4, 40, 4, 8, 8), (20, 8, 16, 10, 4, 10, 0)])
def test_the_place_in_the_epoch_is_kept_in_samples(caplog, done, then, now, length, group, begin, again):
    """done x then samples were seen; nothing is left out, and as little as possible comes again."""
    runner = CustomEpochBasedRunner.__new__(CustomEpochBasedRunner)
    runner.logger, runner._world_size = logging.getLogger('place-test'), 1
    runner.stateful = {'optimizer_hook': type('H', (), {'cumulative_iters': group})()}
    runner._epoch, runner._iter, runner._begin = 2, 2 * 20 + done, done
    loader = type('L', (), {'__len__': lambda self: length, 'batch_size': now})()
    with caplog.at_level(logging.WARNING, 'place-test'):
        runner._adapt_progress({'world_size': 1, 'samples_per_step': then, 'iters_per_epoch': 20}, loader)
    assert (runner._begin, runner._iter) == (begin, 2 * length + begin)
    assert (f'({again} samples come again)' in caplog.text) == (then != now)


# ---- files ---------------------------------------------------------------------------------------------------------------

def test_checkpoints_are_ordered_by_progress(tmp_path):
    for name in ('epoch_2.pth', 'epoch_10.pth', 'epoch_2_iter_30.pth', 'epoch_2_iter_4.pth', 'epoch_x.pth', 'epoch_9.pth.tmp-1',
                 'best_a_epoch_3.pth', 'before_spike_epoch_1.pth'):
        torch.save({'name': name}, tmp_path / name)
    assert [os.path.basename(path) for _, path in list_checkpoints(str(tmp_path))] == [
        'epoch_2.pth', 'epoch_2_iter_4.pth', 'epoch_2_iter_30.pth', 'epoch_10.pth']
    assert [place for place, _ in list_checkpoints(str(tmp_path), 'before_spike_')] == [(1, 0)]
    (tmp_path / 'epoch_10.pth').write_bytes(b'x')
    path, broken = newest_checkpoint(str(tmp_path))
    assert path.endswith('epoch_2_iter_30.pth') and len(broken) == 1


def test_what_does_not_read_back_never_gets_its_name(tmp_path, monkeypatch):
    path = tmp_path / 'epoch_1.pth'
    writing.write_atomic({'a': torch.ones(1000)}, str(path))
    before = path.read_bytes()
    save = torch.save

    def lying(content, stream):
        save(content, stream)
        stream.seek(3000)
        stream.write(b'\xff\x00\xff')

    monkeypatch.setattr(torch, 'save', lying)
    with pytest.raises(CheckpointWriteError, match='what was written does not read back'):
        writing.write_atomic({'a': torch.zeros(1000)}, str(path))
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ['epoch_1.pth']
    assert zipfile.is_zipfile(path)


@pytest.mark.parametrize('wrong', [{'every_iters': 0}, {'every_iters': 1.5}, {'every_minutes': 0}, {'every_minutes': 'often'},
                                   {'max_keep_ckpts': '3'}, {'out_dir': '/elsewhere'}, {'filename_tmpl': 'model_{}.pth'}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=f'checkpoint_config.{next(iter(wrong))} (must be|is .*leave it out)'):
        SafeCheckpointHook(**wrong)


def test_time_for_a_checkpoint(monkeypatch):
    from mmdet3d_ext.engine.hooks import checkpoint
    clock = [100.0]
    monkeypatch.setattr(checkpoint.time, 'monotonic', lambda: clock[0])
    hook = SafeCheckpointHook(every_minutes=0.5)
    assert not hook.is_time() and not SafeCheckpointHook().is_time()
    clock[0] += 30
    assert hook.is_time()
    hook = SafeCheckpointHook(every_iters=5)
    assert [hook.is_turn(i) for i in (4, 5, 6)] == [False, True, True], 'a turn within a group waits for its end'


# ---- signals -----------------------------------------------------------------------------------------------------------

def test_signals_are_noted_and_given_back():
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == 'SIGUSR1'
    assert signal.getsignal(signal.SIGUSR1) is before
    done = []

    def elsewhere():
        with StopSignals() as signals:
            done.append(signals.received)

    thread = threading.Thread(target=elsewhere)
    thread.start(), thread.join()
    assert done == [None]
