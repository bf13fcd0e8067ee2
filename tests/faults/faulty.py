"""A small training run into which faults are put: model, data, hooks that strike, and forked processes that run it."""
from __future__ import annotations

import ctypes
import io
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'engine'))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from engine_toy import EngineToyDataset, EngineToyModel, write_config  # noqa: E402
from mmcv.runner import HOOKS, Hook  # noqa: E402
from torch import nn  # noqa: E402

from mmdet3d_ext.config import load_config  # noqa: E402
from mmdet3d_ext.engine import launch, stopping, train  # noqa: E402
from mmdet3d_ext.engine.building import correctable  # noqa: E402
from mmdet3d_ext.engine.checkpoint import read_checkpoint  # noqa: E402
from mmdet3d_ext.registry import DATASETS, MODELS  # noqa: E402

FORK = multiprocessing.get_context('fork')


@MODELS.register_module()
class FaultyModel(EngineToyModel):
    """The toy model with BatchNorm (its statistics differ between ranks) and dropout. ``strike``: what a test does to a forward
    pass: ``strike(losses, metas)`` may change the losses."""

    strike = None

    def __init__(self, width=8, dropout=0.2):
        super().__init__(width, dropout)
        self.trunk = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(dropout))

    def forward(self, value, target=None, points=None, metas=None, extra=None):
        if extra is not None:  # arrived whole
            assert all(bool((row == float(meta['token'][6:])).all()) for row, meta in zip(extra, metas))
        losses = super().forward(value, target, points, metas)
        if self.training and FaultyModel.strike is not None:
            FaultyModel.strike(losses, metas)
        return losses


@DATASETS.register_module()
class FaultyDataset(EngineToyDataset):
    """The toy data; an access to ``deadly`` sends its process ``blow`` as long as the file ``while_there`` exists (one access
    removes it), ``broken`` samples raise ``OSError``, ``infinite`` ones hold Inf, ``extra`` adds a tensor of so many numbers."""

    def __init__(self, size=8, noise=0.0, deadly=(), blow='SIGKILL', while_there=None, broken=(), infinite=(), extra=0,
                 test_mode=False):
        super().__init__(size, noise, test_mode=test_mode)
        self.deadly, self.blow, self.while_there, self.broken = set(deadly), blow, while_there, set(broken)
        self.infinite, self.extra = set(infinite), extra

    def __getitem__(self, index):
        if index in self.deadly and (self.while_there is None or os.path.exists(self.while_there)):
            if self.while_there:
                os.unlink(self.while_there)
            os.kill(os.getpid(), getattr(signal, self.blow))
            time.sleep(5)
        if index in self.broken:
            raise OSError(2, 'No such file or directory', f'samples/LIDAR_TOP/{index}.bin')
        sample = super().__getitem__(index)
        if index in self.infinite:
            sample['value'].data[1] = float('inf')
        if self.extra:
            sample['extra'] = torch.full((self.extra,), float(index))
        return sample


@HOOKS.register_module(force=True)
class FaultyKill(Hook):
    """Ends the process by ``blow`` at a global step, before or after its update, or in the middle of writing a file."""

    def __init__(self, step, when='after_train_iter', rank=None, blow='SIGKILL'):
        self.step, self.when, self.rank, self.blow = step, when, rank, blow

    def _strike(self, runner, when):
        if when == self.when and runner.iter == self.step and self.rank in (None, runner.rank):
            os.kill(os.getpid(), getattr(signal, self.blow))

    def before_run(self, runner):
        if self.when == 'writing':
            save = torch.save

            def torn(content, stream):
                if runner.iter < self.step:
                    return save(content, stream)
                whole = io.BytesIO()
                save(content, whole)
                stream.write(whole.getvalue()[:len(whole.getvalue()) // 2])
                stream.flush()
                os.kill(os.getpid(), getattr(signal, self.blow))

            torch.save = torn

    def before_train_iter(self, runner):
        self._strike(runner, 'before_train_iter')

    def after_train_iter(self, runner):
        self._strike(runner, 'after_train_iter')

    def after_train_epoch(self, runner):
        self._strike(runner, 'after_train_epoch')


@HOOKS.register_module(force=True)
class FaultySlow(Hook):
    """Makes steps slow enough to be hit by a signal from outside, and tells through a file that training runs."""

    def __init__(self, seconds=0.05, tell=None):
        self.seconds, self.tell = seconds, tell

    def after_train_iter(self, runner):
        if self.tell and runner.rank == 0:
            Path(self.tell).write_text(str(runner.iter))
        time.sleep(self.seconds)


DATA = {'samples_per_gpu': 2, 'workers_per_gpu': 0, 'train': {'type': 'FaultyDataset', 'size': 24, 'noise': 0.1},
        'val': {'type': 'FaultyDataset', 'size': 5}}
CHANGES = {'model': {'type': 'FaultyModel'}, 'data': DATA, 'ema': {'decay': 0.9},
           'optimizer_config': {'grad_clip': {'max_norm': 35, 'norm_type': 2}, 'cumulative_iters': 2},
           'checkpoint_config': {'interval': 1, 'max_keep_ckpts': 2, 'every_iters': 3}, 'evaluation': {'interval': 1},
           'log_config': {'interval': 4, 'hooks': [{'type': 'TextLoggerHook'}]}}


def settings(folder, *overrides, **changes):
    """The configuration of the small run, with whole root keys replaced and words of a command line."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return load_config(write_config(folder, **{**CHANGES, **changes}), [str(word) for word in overrides])


def own_tmpfs(folder, size):
    """Mount a disk of ``size`` bytes at ``folder``, for this process and its children alone (needs the right to mount)."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result):
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    check(libc.unshare(0x00020000))  # CLONE_NEWNS
    check(libc.mount(b'none', b'/', None, 0x4000 | 0x40000, None))  # MS_REC | MS_PRIVATE
    check(libc.mount(b'tmpfs', os.fsencode(folder), b'tmpfs', 0, f'size={size}'.encode()))


def may_mount():
    pid = os.fork()
    if pid == 0:
        try:
            own_tmpfs('/dev/shm', 2 ** 20)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def free_port():
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


def start(folder, config, world=1, resume=None, prepare=None):
    """``tools/train.py``'s program in ``world`` forked processes; their screens go to ``<folder>/screen_<rank>.txt``."""
    port = free_port()

    def main(rank):
        screen = os.open(f'{folder}/screen_{rank}.txt', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(screen, 1), os.dup2(screen, 2)
        sys.stdout, sys.stderr = os.fdopen(1, 'w', 1), os.fdopen(2, 'w', 1)
        os.setpgid(0, 0)
        logging.captureWarnings(False)  # an earlier run's in this process, which pytest has undone without its knowledge
        torch.set_num_threads(1)
        if world > 1:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
                              MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
        if prepare is not None:
            prepare(rank)

        def program():
            _, device = launch.start(backend='gloo')
            with correctable():
                result = train.train(config, train.Options(run_dir=f'{folder}/run', resume_from=resume), device)
            return 3 if result.save_failed else stopping.EXIT_CODE if result.stopped else 0

        code = launch.run(program)
        sys.stderr.flush()
        os._exit(code)

    processes = [FORK.Process(target=main, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    return processes


def finish(processes, timeout=60):
    """Exit codes in rank order (-9: SIGKILL). A process that does not end in time is killed, and the test fails."""
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
    late = [process for process in processes if process.exitcode is None]
    for process in late:
        process.kill()
    assert not late, f'{len(late)} processes did not end within {timeout} s'
    return [process.exitcode for process in processes]


def run(folder, config, timeout=60, **kwargs):
    """:func:`start` and :func:`finish`."""
    return finish(start(folder, config, **kwargs), timeout)


def screen(folder, rank=0):
    path = Path(folder) / f'screen_{rank}.txt'
    return path.read_text() if path.exists() else ''


def content(folder, name='latest.pth'):
    return read_checkpoint(str(Path(folder) / 'run' / name))


def same_state(one, other):
    """Whether two checkpoints are bitwise the same run: weights, averages, optimizer, counts."""
    def equal(a, b):
        if isinstance(a, torch.Tensor):
            return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
        if isinstance(a, dict):
            return set(a) == set(b) and all(equal(a[key], b[key]) for key in a)
        if isinstance(a, list):
            return len(a) == len(b) and all(map(equal, a, b))
        return a == b
    keys = ('state_dict', 'ema_state_dict', 'ema_info', 'optimizer', 'optimizer_hook')
    return all(equal(one[key], other[key]) for key in keys if key in one or key in other)


def finite(checkpoint):
    return all(bool(torch.isfinite(v).all()) for key in ('state_dict', 'ema_state_dict') for v in checkpoint.get(key, {}).values())


def kill_points(count, last, seed=0):
    """Random global steps below ``last`` and moments within them."""
    draw = np.random.default_rng(seed)
    moments = ['before_train_iter', 'after_train_iter', 'writing']
    return [(int(draw.integers(1, last)), moments[i % len(moments)]) for i in range(count)]


def tiny_words(root, infos):
    """Words of the tiny multitask configuration on the synthetic data of ``root``; makes its info files and database."""
    import importlib.util
    repo = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location('create_data_tool', repo / 'tools' / 'create_data.py')
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.main(['nuscenes', '--root-path', str(root), '--out-dir', str(infos), '--version', 'v1.0-mini']) == 0
    return ['--dataset_root', f'{root}/', '--train_dataset.ann_file', f'{infos}/nuscenes_infos_train.pkl', '--data.val', 'null',
            '--max_epochs', '1', '--data.samples_per_gpu', '1', '--log_config.interval', '1']


def tiny(words, hooks=()):
    repo = Path(__file__).resolve().parents[2]
    config = load_config(str(repo / 'configs' / 'synthetic' / 'multitask_tiny.yaml'), [str(word) for word in words])
    config.custom_hooks = list(hooks)
    return config
