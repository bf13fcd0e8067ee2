"""A rank that raises, dies, or hangs ends or explains the whole job; unlike samples run the same collectives."""
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import clean_env, free_port, in_ranks
from testing import REPO
from torch import nn

sys.path.insert(0, str(REPO / 'tests' / 'models' / 'detectors'))

from mmdet3d_ext.engine import launch, norm_layers, rank_watch  # noqa: E402
from mmdet3d_ext.engine.launch import UserError  # noqa: E402

TOY = str(REPO / 'tests' / 'faults' / 'rank_toy.py')
LIMIT = 30.0  # seconds from the failure to the end of the job


class Ended:
    """How a job ended: exit code (of all processes), what was on the screen, seconds from rank 1's failure to the end."""

    def __init__(self, code, screen, run):
        self.code, self.screen = code, screen
        self.seconds = time.time() - float((run / 'failed_at').read_text()) if (run / 'failed_at').exists() else None


def start(launcher, mode, run, timeout=100, **env):
    """Run rank_toy.py in two processes through ``launcher``: torchpack, torchrun, or none (as srun without its kill switch)."""
    words = [sys.executable, TOY, mode, str(run)]
    if launcher == 'none':
        base = clean_env(SLURM_NTASKS='2', SLURM_NODELIST='localhost', MASTER_PORT=str(free_port()), **env)
        processes = [subprocess.Popen(words, env=dict(base, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)), cwd=REPO,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(2)]
        try:
            screens = [process.communicate(timeout=timeout)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        return Ended([process.returncode for process in processes], ''.join(screens), run)
    if launcher == 'torchpack':
        if shutil.which('mpirun', path=clean_env()['PATH']) is None:
            pytest.skip('needs mpirun')
        command = ['torchpack', 'dist-run', '-np', '2', *words]
    else:
        command = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', '2', '--master_port', str(free_port()), *words[1:]]
    done = subprocess.run(command, env=clean_env(**env), cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=timeout)
    return Ended(done.returncode, done.stdout, run)


def rank_log(run, rank):
    (path,) = Path(run, 'logging').glob(f'*_{rank}.log')
    return path.read_text()


@pytest.mark.parametrize('launcher', ['torchpack', 'torchrun'])
def test_a_rank_that_raises(tmp_path, launcher, fault_record):
    ended = start(launcher, 'raise', tmp_path)
    assert ended.code != 0 and ended.seconds < LIMIT, ended.screen
    for line in ('Traceback (most recent call last)', 'ZeroDivisionError: in the second rank', 'rank_toy.py'):
        assert f'[rank 1] {line}' in ended.screen or line in ended.screen
    assert '[rank 1] ZeroDivisionError: in the second rank' in ended.screen, ended.screen
    assert 'ZeroDivisionError: in the second rank' in rank_log(tmp_path, 1)
    assert 'sums to' not in ended.screen  # rank 0 did not go on
    fault_record(f'rank 1 raises ({launcher})', 'job ended, traceback on the screen and in the log of rank 1', 'nothing: resume')


@pytest.mark.parametrize('mode', ['raise', 'kill'])
def test_without_the_help_of_a_launcher(tmp_path, mode, fault_record):
    """srun without --kill-on-bad-exit: rank 0 would wait in its collective for half an hour."""
    ended = start('none', mode, tmp_path)
    assert ended.seconds < LIMIT, ended.screen
    if mode == 'raise':
        assert ended.code == [1, 1] and '[rank 0] stops, because rank 1 on ' in ended.screen
        assert ended.screen.count('Traceback') == 1
        fault_record('rank 1 raises, nobody kills rank 0', 'rank 0 names the error and ends within seconds', 'nothing: resume')
    else:
        assert ended.code[1] == -9 and ended.code[0] == 1
        # gloo notices a closed connection by itself, NCCL does not; either way the job ends and says which rank it was
        assert re.search(r'rank 1 .*ended without a word|Connection (closed|reset) by peer', ended.screen), ended.screen
        fault_record('rank 1 is killed by the system (SIGKILL)', 'rank 0 notices that its process is gone, and ends', 'nothing: resume')


def test_a_crash_in_a_library(tmp_path, fault_record):
    ended = start('torchpack', 'crash', tmp_path)
    assert ended.code != 0 and ended.seconds < LIMIT, ended.screen
    assert 'Fatal Python error: Segmentation fault' in rank_log(tmp_path, 1) and 'string_at' in rank_log(tmp_path, 1)
    fault_record('rank 1 crashes in a library (SIGSEGV)', 'its Python stack is in its log; the job ends', 'nothing: resume')


def test_an_error_before_the_ranks_have_met(tmp_path, fault_record):
    ended = start('torchpack', 'early', tmp_path)
    assert ended.code != 0 and ended.seconds < LIMIT, ended.screen
    assert 'rank 1 on ' in ended.screen and 'ZeroDivisionError: before the ranks have met' in ended.screen
    assert '[rank 1] Traceback' in ended.screen, ended.screen
    fault_record('rank 1 raises while it starts, its screen is hidden', 'rank 0 shows the traceback and ends', 'nothing')


def test_a_mistake_that_only_one_rank_makes(tmp_path, fault_record):
    """Ranks other than a machine's first leave it to that one to speak; here it has nothing to say."""
    ended = start('torchpack', 'mistake', tmp_path)
    assert ended.code != 0 and ended.seconds < LIMIT, ended.screen
    assert 'UserError: key a.b: only this machine lacks the file' in ended.screen, ended.screen
    fault_record('a mistake that only rank 1 makes', 'rank 0 shows it and ends', 'nothing')


def test_a_stuck_collective_shows_all_stacks(tmp_path, fault_record):
    ended = start('torchrun', 'stall', tmp_path)
    assert ended.code == 0  # the stacks are information: the job goes on
    screen = ended.screen
    first = screen[screen.index('STALL: rank'):]
    assert re.search(r'STALL: rank [01] has been at the same place for [3-9] s', first)
    assert re.search(r'rank 0: .*called by sum_up \(tests/faults/rank_toy.py:\d+\)', first), first
    assert re.search(r'rank 1: .*slow_loader \(rank_toy.py:\d+\)|rank 1: slow_loader', first), first
    assert '--- stack of rank 0 ---' in first and '--- stack of rank 1 ---' in first
    for rank in range(2):
        assert f'Stack of rank {rank}' in rank_log(tmp_path, rank)
    fault_record('rank 1 hangs, rank 0 waits in a collective', 'after the set time the stacks of both are shown', 'time only')


def test_a_library_that_keeps_the_interpreter_lock(tmp_path, fault_record):
    ended = start('none', 'lock', tmp_path)
    assert ended.code == [0, 0]
    assert 'rank 1: no answer' in ended.screen  # by rank 0
    assert 'Timeout (0:00:08)!' in ended.screen and 'rank_toy.py' in ended.screen[ended.screen.index('Timeout (0:00:08)!'):]
    fault_record('a library keeps the interpreter lock', 'faulthandler shows the stack; rank 0 says that rank 1 is silent', 'time only')


def test_steps_at_the_same_place_are_no_standstill(tmp_path):
    ended = start('torchrun', 'steps', tmp_path)
    assert ended.code == 0 and 'STALL' not in ended.screen and 'sums to 2.0' in ended.screen


# ---- parts -----------------------------------------------------------------------------------------------------------

def test_a_place_knows_whether_its_process_lives():
    here = rank_watch.place()
    assert rank_watch.alive(here) and rank_watch.same_machine(here, here)
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
    there = dict(here, pid=child.pid, started=rank_watch._started(child.pid))
    assert rank_watch.alive(there)
    child.kill()
    deadline = time.monotonic() + 10
    while rank_watch.alive(there) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not rank_watch.alive(there)  # a zombie, since nobody has waited for it
    child.wait()
    assert not rank_watch.alive(there)
    assert not rank_watch.alive(dict(here, started='1'))  # another process under the same number
    for name in ('host', 'boot', 'namespace'):
        assert not rank_watch.same_machine(here, dict(here, **{name: 'other'}))


def test_keys_of_a_restarted_attempt_are_others(monkeypatch):
    first = rank_watch.key('abort')
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    assert rank_watch.key('abort') != first


def test_a_standstill_is_shown_anew_after_progress(monkeypatch):
    """Each longer standstill takes twice as long to be shown again, a new one does not."""
    store, here, clock = dist.TCPStore('127.0.0.1', free_port(), is_master=True, wait_for_workers=False), [1], [0.0]
    monkeypatch.setattr(rank_watch, 'signature', lambda frame: tuple(here))
    monkeypatch.setattr(rank_watch.time, 'monotonic', lambda: clock[0])
    watch = rank_watch.RankWatch.__new__(rank_watch.RankWatch)
    watch.__dict__.update(launch=launch.Launch('env', 0, 2), store=store, stall_timeout=10.0, since=0.0, last=None, dumps=0, repeats=0)

    def shown(at):
        clock[0] = at
        watch._watch_main_thread()
        asked = store.check([rank_watch.key('stall', watch.dumps)])
        if asked:  # what _dump does to the counts
            watch.dumps, watch.repeats = watch.dumps + 1, watch.repeats + 1
        return asked

    assert [t for t in range(0, 80) if shown(t)] == [10, 20, 40]
    here[0] = 2
    assert [t for t in range(80, 105) if shown(t)] == [90, 100]


def test_the_first_report_stands(tmp_path):
    store = dist.TCPStore('127.0.0.1', free_port(), is_master=True, wait_for_workers=False)
    store.set(rank_watch.key('read'), '1')
    for rank, text in ((1, 'first'), (0, 'second')):
        assert rank_watch.report_early('127.0.0.1', store.port, rank_watch.Report(rank, text, 'Traceback'))
    assert rank_watch.Report.decoded(store.get(rank_watch.key('abort'))) == rank_watch.Report(1, 'first', 'Traceback')


def test_the_failing_rank_stays_until_rank_0_has_read_why():
    """A lost answer of a name server keeps rank 0's store for 5 s; the launcher kills rank 0 when rank 1 has ended."""
    store = dist.TCPStore('127.0.0.1', free_port(), is_master=True, wait_for_workers=False)
    begin = time.monotonic()
    reader = threading.Timer(2 * rank_watch.GRACE, store.set, (rank_watch.key('read'), '1'))
    reader.start()
    rank_watch.wait_until_read(rank_watch.connect('127.0.0.1', store.port, 30.0))
    assert time.monotonic() - begin > 2 * rank_watch.GRACE - 0.1 and reader.finished.is_set()

    unread = dist.TCPStore('127.0.0.1', free_port(), is_master=True, wait_for_workers=False)
    begin = time.monotonic()
    rank_watch.wait_until_read(unread, timeout=0.5)
    assert 0.4 < time.monotonic() - begin < 5  # nobody reads: not forever

    class Gone:
        def check(self, keys):
            raise RuntimeError('connection closed')

    begin = time.monotonic()
    rank_watch.wait_until_read(Gone())
    assert time.monotonic() - begin < 1  # rank 0 has ended


def test_the_environment_stands_before_another_thread_starts(monkeypatch):
    """To connect reads the environment in C; a main thread that writes it meanwhile can crash the process."""
    seen = []

    class Watch:
        interval = 1.0

        def __init__(self, *args):
            seen.append(dict(os.environ))
            self.met = threading.Event()

    def connected(*args):
        seen.append(dict(os.environ))

    place = launch.Launch('mpi', 0, 2, 0, 2, '127.0.0.1', free_port())
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'OMP_NUM_THREADS'):
        monkeypatch.setenv(name, '')
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch, 'RankWatch', Watch)
    monkeypatch.setattr(launch, 'connect', connected)
    monkeypatch.setattr(launch, '_store', lambda *args: type('Store', (), {'add': lambda self, name, n: 2})())
    monkeypatch.setattr(launch.dist, 'init_process_group', lambda *args, **kwargs: connected())
    monkeypatch.setattr(launch, '_limit_threads', lambda *args: None)
    monkeypatch.setattr(launch, '_watch', None)
    monkeypatch.setattr(launch, '_current', None)
    launch.start(place)
    assert len(seen) == 3 and seen[0] == seen[1] == seen[2] == dict(os.environ)
    assert seen[0]['RANK'] == '0' and seen[0]['MASTER_PORT'] == str(place.master_port)


@pytest.mark.parametrize('target, shown', [('null', False), ('file', False), ('pipe', True)])
def test_whether_a_screen_is_shown(tmp_path, target, shown):
    kept = os.dup(2)
    ends = os.pipe()
    stream = {'null': os.open(os.devnull, os.O_WRONLY), 'file': os.open(tmp_path / 'out', os.O_WRONLY | os.O_CREAT), 'pipe': ends[1]}
    try:
        os.dup2(stream[target], 2)
        found = rank_watch.screen_is_shown()
    finally:
        os.dup2(kept, 2)
        for number in {kept, *ends, *stream.values()}:
            os.close(number)
    assert found is shown


# ---- unlike samples ---------------------------------------------------------------------------------------------------------

def record_collectives(names):
    """Wrap torch.distributed's functions so that ``names`` gets (name, shape) of each call."""
    def wrapped(name, function):
        def call(*args, **kwargs):
            shape = tuple(args[0].shape) if args and isinstance(args[0], torch.Tensor) else None
            names.append((name, shape))
            return function(*args, **kwargs)
        return call
    for name in ('all_reduce', 'broadcast', 'all_gather', 'reduce', 'barrier', 'all_gather_into_tensor'):
        setattr(dist, name, wrapped(name, getattr(dist, name)))


# What rank 1's sample lacks, while rank 0's has it.
LACKING = ('boxes', 'map', 'points', 'everything')


def test_unlike_samples_run_the_same_collectives(tmp_path, fault_record):
    """Boxes, map and points on one rank only, in turn: same collectives, same weights, no rank waits."""
    import test_with_real_heads as real

    from mmdet3d_ext.engine.hooks import BatchNormSyncHook
    from mmdet3d_ext.engine.parallel import StepModel

    def work(rank):
        torch.manual_seed(0)
        model = real.build_model({**real.small.config('camera', 'lidar'), 'heads': {'object': real.CENTER, 'map': real.MAP}})
        model.init_weights()
        wrapped = StepModel(model, torch.device('cpu'))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        calls, seen = [], []
        record_collectives(calls)
        for step, lacking in enumerate(('nothing', *LACKING)):
            torch.manual_seed(10 * step + rank)
            without = (lacking,) if rank == 1 else ()
            without = LACKING if 'everything' in without else without
            inputs = real.small.batch(1, points=[0 if 'points' in without else 150])
            inputs['gt_masks_bev'] = torch.zeros(1, 2, 48, 36).long() if 'map' in without else (torch.rand(1, 2, 48, 36) < 0.3).long()
            if 'boxes' in without:
                inputs.update(gt_bboxes_3d=[real.boxes()], gt_labels_3d=[torch.zeros(0).long()])
            else:
                inputs.update(real.objects(1))
            optimizer.zero_grad(set_to_none=True)
            out = wrapped.train_step(inputs)
            out['loss'].backward()
            assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
            optimizer.step()
            seen.append(tuple(out['log_names']))
        BatchNormSyncHook(None).after_train_epoch(type('R', (), {'model': wrapped, 'stepped': True})())
        assert len(set(seen)) == 1
        return calls, torch.cat([p.detach().flatten() for p in model.parameters()]), seen[0]

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        results = in_ranks(work, tmp_path)
    (calls0, weights0, names0), (calls1, weights1, names1) = results
    assert calls0 == calls1 and len(calls0) >= len(LACKING) and names0 == names1
    assert torch.isfinite(weights0).all() and torch.equal(weights0, weights1)
    for lacking in LACKING:
        fault_record(f'rank 1 has a sample without {lacking}', 'both ranks run the same collectives, their weights stay equal')


# ---- norm layers ----------------------------------------------------------------------------------------------------------------

class Frozen(nn.Sequential):
    """A backbone with ``norm_eval``."""

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


class SparseModule(nn.Module):
    """As mmcv's and spconv's sparse layers are recognised."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


def norm_model():
    model = nn.Module()
    model.encoders = nn.ModuleDict({'camera': nn.ModuleDict({'backbone': Frozen(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))}),
                                    'lidar': nn.ModuleDict({'backbone': SparseModule()})})
    model.decoder = nn.ModuleDict({'backbone': nn.Sequential(nn.Conv2d(8, 64, 1), nn.BatchNorm2d(64)), 'neck': nn.BatchNorm2d(24)})
    model.heads = nn.ModuleDict({'map': nn.Sequential(nn.GroupNorm(2, 8)), 'object': nn.BatchNorm1d(8)})
    return model.train()


CFG = {'model': {'type': 'BEVFusion', 'encoders': {'camera': {'backbone': {'type': 'ResNet'}}, 'lidar': {'backbone': {'type': 'S'}}},
                 'decoder': {'backbone': {'type': 'SECOND', 'norm_cfg': {'type': 'BN'}}, 'neck': {'type': 'SECONDFPN'}},
                 'heads': {'map': {'type': 'M'}, 'object': {'type': 'O'}}}}


def test_batch_norm_under_small_batches_is_listed(caplog, fault_record):
    logger = logging.getLogger('norm-check')
    model = norm_model()
    assert norm_layers.check_norm_layers(CFG, model, 4, logger) == [] and not caplog.records
    found = norm_layers.check_norm_layers(CFG, model, 2, logger)
    assert [(s.key, s.layers, s.norm_cfg) for s in found] == [
        ('model.decoder.backbone', ('decoder.backbone.1',), True), ('model.decoder.neck', ('decoder.neck',), False),
        ('model.heads.object', ('heads.object',), False)]
    (record,) = caplog.records
    text = record.getMessage()
    assert '3 BatchNorm layers take their statistics from 2 sample(s) per GPU (data.samples_per_gpu)' in text
    assert 'model.decoder.backbone.norm_cfg: {type: GN' in text and '--group_norm "[decoder.neck]"' in text
    assert 'camera' not in text and 'lidar' not in text  # frozen, and sparse
    fault_record('BatchNorm under 2 samples per GPU', 'layers, sections and the keys that replace them are listed', 'accuracy')


def test_group_norm_replaces_what_is_named():
    model = norm_model()
    with torch.no_grad():
        model.decoder['neck'].weight.fill_(3.0)
    before = set(model.state_dict())
    assert norm_layers.use_group_norm({'group_norm': None}, model) == 0
    assert norm_layers.use_group_norm({'group_norm': ['decoder.neck']}, model) == 1
    neck = model.decoder['neck']
    assert isinstance(neck, nn.GroupNorm) and neck.num_groups == 3 and neck.num_channels == 24 and float(neck.weight[0]) == 3.0
    assert isinstance(model.decoder['backbone'][1], nn.BatchNorm2d)
    assert norm_layers.use_group_norm({'group_norm': True}, model) == 2
    assert model.decoder['backbone'][1].num_groups == 8
    assert isinstance(model.heads['object'], nn.BatchNorm1d)
    gone = before - set(model.state_dict())
    assert gone and all(name.endswith(('running_mean', 'running_var', 'num_batches_tracked')) for name in gone)
    assert set(model.state_dict()) <= before
    x = torch.randn(1, 24, 1, 1)  # a pooled map keeps its values' differences
    assert float(neck(x).std()) > 0.1


def test_the_tiny_configuration_with_group_norm(caplog):
    from mmdet3d_ext.config import load_config
    from mmdet3d_ext.engine import train
    path = str(REPO / 'configs' / 'synthetic' / 'multitask_tiny.yaml')
    plain, cfg = load_config(path, []), load_config(path, ['--group_norm', 'true'])
    before, model = train.make_model(plain), train.make_model(cfg)
    assert any(isinstance(module, nn.BatchNorm2d) for module in before.modules())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    found = norm_layers.check_norm_layers(plain, before.train(), 1, logging.getLogger('norm-check'))
    assert {'model.decoder.backbone', 'model.decoder.neck'} <= {section.key for section in found if section.norm_cfg}
    assert not any('lidar' in section.key for section in found)  # sparse convolutions
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            x = torch.randn(1, module.num_channels, 3, 3)
            assert torch.isfinite(module(x)).all()


def test_a_checkpoint_with_batch_norm_loads_into_group_norm(tmp_path):
    from mmdet3d_ext.engine.checkpoint import load_weights
    before, model = norm_model(), norm_model()
    with torch.no_grad():
        before.decoder['neck'].weight.fill_(3.0)
    norm_layers.use_group_norm({'group_norm': True}, model)
    torch.save({'meta': {}, 'state_dict': before.state_dict()}, tmp_path / 'old.pth')
    load_weights(model, str(tmp_path / 'old.pth'))
    assert float(model.decoder['neck'].weight[0]) == 3.0


@pytest.mark.parametrize('value, message', [('decoder', 'must be true, null or a list'), (['head'], "no BatchNorm2d in the module 'head'"),
                                            ([1], 'must be true, null or a list')])
def test_wrong_group_norm(value, message):
    with pytest.raises(UserError, match=message):
        norm_layers.use_group_norm({'group_norm': value}, norm_model())


def test_reports_are_plain_json():
    report = rank_watch.Report(3, 'rank 3 failed: ä', 'Traceback\n  x')
    assert rank_watch.Report.decoded(report.encoded().encode()) == report and json.loads(report.encoded())['rank'] == 3


def test_a_failing_rank_says_why_before_it_ends(capsys):
    assert launch.run(lambda: 1 / 0) == 1
    assert 'ZeroDivisionError' in capsys.readouterr().err
