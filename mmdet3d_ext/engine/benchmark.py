"""How long a training step or an inference takes, part by part: what ``tools/benchmark.py`` runs.

The step that is timed is the one that training runs: the same model builder, wrapper, optimizer, optimizer hook and runner.
Times of parts come from events on the device's own clock, so that measuring does not make the host wait.
"""
from __future__ import annotations

import collections
import json
import logging
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

import numpy as np
import torch
from mmcv.parallel import DataContainer
from mmcv.runner import Hook
from torch import nn

from ..datasets.synthetic.batch import REAL_POINTS, random_batch
from .amp import AmpPlan, choose_kernels
from .hooks.guard import Guard
from .hooks.optimizer import GuardedOptimizerHook, make_scaler
from .launch import UserError, current
from .norm_layers import use_sync_bn
from .parallel import StepModel, exchange_settings
from .run_dir import to_plain
from .timing import Clock, medians, peak, precision, profile_step, reset_peak, wait
from .train import make_loader, make_model, make_optimizer, make_runner


class _TimingHook(Hook):
    """Spans ``data`` (host), ``forward``, ``backward`` (with gradient norm and clipping) and ``optimizer`` of each step."""

    def __init__(self, clock: Clock, optimizer: torch.optim.Optimizer):
        self.clock, self.waited, self.left = clock, 0.0, None
        self.handles = [optimizer.register_step_pre_hook(lambda *_: (clock.stop('backward'), clock.start('optimizer'))[0]),
                        optimizer.register_step_post_hook(lambda *_: clock.stop('optimizer'))]

    def before_train_iter(self, runner: Any) -> None:
        if self.left is not None:
            self.waited += time.perf_counter() - self.left


class _EndOfStep(Hook):
    """The last hook of a step: from here on the runner waits for data."""

    def __init__(self, timing: _TimingHook):
        self.timing = timing

    def after_train_iter(self, runner: Any) -> None:
        self.timing.left = time.perf_counter()


class _TimedStep:
    """``StepModel`` with its ``train_step`` as the span ``forward``, then the start of ``backward``."""

    def __init__(self, model: StepModel, clock: Clock):
        self.model, self.clock = model, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.start('forward')
        outputs = self.model.train_step(*args, **kwargs)
        self.clock.stop('forward')
        self.clock.start('backward')
        return outputs


class _Repeat:
    """The same few batches again and again, as a loader of a given length."""

    def __init__(self, batches: Sequence[Any], length: int):
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[i % len(self.batches)] for i in range(self.length))


class _Endless:
    """A real loader, epoch after epoch, for a given number of batches."""

    def __init__(self, loader: Any, length: int):
        self.loader, self.length = loader, length
        self.sampler, self.dataset = loader.sampler, loader.dataset

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        given = 0
        while given < self.length:
            before = given
            for batch in self.loader:
                yield batch
                given += 1
                if given == self.length:
                    return
            if given == before:
                raise UserError('the training data set gives no batch')


def make_batches(cfg: Mapping[str, Any], samples: int, device: torch.device, points: int = REAL_POINTS,
                 cloud: Optional[torch.Tensor] = None, count: int = 2) -> List[Dict[str, Any]]:
    """``count`` different random batches on the device, others on every rank. Boxes stay on the CPU, as the pipeline leaves them: a
    container says so to the step."""
    first = current().rank * count
    batches = [random_batch(cfg, samples, device, seed, points, cloud) for seed in range(first, first + count)]
    return [{**batch, 'gt_bboxes_3d': DataContainer([batch['gt_bboxes_3d']], cpu_only=True)} for batch in batches]


def read_cloud(path: str, repeat: int = 1) -> torch.Tensor:
    """(P, 5) points of a nuScenes LiDAR file, ``repeat`` times, each copy 0.4 m further back (8 m/s at 20 sweeps a second).

    Raises:
        UserError: if the file cannot be read or does not hold rows of 5 float32 values.
    """
    try:
        values = np.fromfile(path, dtype=np.float32)
    except OSError as error:
        raise UserError(f'--cloud {path}: {error}') from None
    if values.size == 0 or values.size % 5:
        raise UserError(f'--cloud {path}: {values.size} float32 values are no rows of 5')
    cloud = torch.from_numpy(values.reshape(-1, 5))
    return torch.cat([cloud + torch.tensor([0.003 * k, -0.4 * k, 0.001 * k, 0, 0]) for k in range(repeat)])


class Steps:
    """Training steps without a run around them: training's own wrapper, optimizer, optimizer hook and runner.

    Args:
        cfg: a resolved configuration; its learning rate is not scaled by the batch.
        samples: of this process per step.
        amp: the precision.

    Attributes:
        model, optimizer, runner: what takes the steps. No file is written.
    """

    def __init__(self, cfg: Mapping[str, Any], model: nn.Module, device: torch.device, samples: int, amp: AmpPlan):
        cfg, logger = with_batch(cfg, samples), _quiet_logger()
        self.model = use_sync_bn(cfg, model, device)[0].to(device)
        step = StepModel(self.model, device, amp.dtype, **exchange_settings(cfg))
        self.optimizer = make_optimizer(cfg, self.model, logger, samples * current().world_size)
        self.runner = make_runner(cfg, step, self.optimizer, None, 'benchmark', logger, {}, 10 ** 6)
        clip = (cfg.get('optimizer_config') or {}).get('grad_clip')
        scaler = make_scaler(amp.loss_scale, device.type) if amp.dtype == torch.float16 else None
        self.runner.register_hook(GuardedOptimizerHook(clip, scaler=scaler, guard=Guard(save_batches=0)), priority='ABOVE_NORMAL')
        self.runner.call_hook('before_run')

    def run(self, batches: Sequence[Mapping[str, Any]], count: int) -> None:
        """``count`` steps over the same few batches again and again."""
        self.runner.train(_Repeat(batches, count))


def training(cfg: Mapping[str, Any], device: torch.device, samples: int, precision_name: str, iterations: int = 20,
             warmup: int = 5, batches: Optional[Sequence[Mapping[str, Any]]] = None, trace: Optional[str] = None,
             model: Optional[nn.Module] = None, times: bool = True, profile: bool = True) -> Dict[str, Any]:
    """Time training steps; ``batches``: random ones, else the configured training data are loaded.

    Args:
        times, profile: whether to measure the former and the latter half of the row. What a process does after it was profiled is a
            tenth or more slower (:func:`~.timing.profile_step`): of several rows, time all before any is profiled.

    Returns:
        one row: ``mode, samples, precision, iterations, ranks``; ``step_ms, samples_per_s`` (of this rank),
        ``data_wait_ms``, ``peak_mib``, ``peak_reserved_mib`` and ``parts`` (name -> median ms); what :func:`~.timing.profile_step` finds.
    """
    choose_kernels(cfg)
    with precision(precision_name, device) as dtype:
        steps, clock = Steps(cfg, model or make_model(cfg), device, samples, AmpPlan(dtype)), Clock(device)
        timing = _TimingHook(clock, steps.optimizer)
        steps.runner.model = _TimedStep(steps.runner.model, clock)
        steps.runner.register_hook(timing, priority='VERY_HIGH')
        steps.runner.register_hook(_EndOfStep(timing), priority='VERY_LOW')

        def run(count: int) -> None:
            if batches is not None:
                steps.run(batches, count)
            else:
                steps.runner.train(_Endless(loader, count))

        loader = None if batches is not None else make_loader(with_batch(cfg, samples), cfg['data']['train'], 0, train=True)
        run(warmup if times else max(warmup, 1))
        clock.milliseconds()
        row = dict(mode='train', samples=samples, precision=precision_name, iterations=iterations, ranks=current().world_size)
        if times:
            reset_peak(device)
            timing.waited, timing.left = 0.0, None
            begin = time.perf_counter()
            run(iterations)
            wait(device)
            seconds = time.perf_counter() - begin
            row.update(step_ms=1e3 * seconds / iterations, samples_per_s=samples * iterations / seconds,
                       data_wait_ms=1e3 * timing.waited / max(iterations - 1, 1), **peak(device))
            clock.milliseconds()
            row['parts'] = medians(steps.model, clock, lambda: run(1), min(iterations, 10))
        if profile:
            row.update(profile_step(device, lambda: run(1), trace))
        for handle in timing.handles:
            handle.remove()
        return row


def collectives(run: Callable[[], None]) -> Dict[str, int]:
    """How often ``run`` calls each of torch's collectives, DistributedDataParallel's own included (``{'allreduce': 5}``)."""
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    # The raw events: to sort all of them into a tree takes ten times as long as the step.
    raw = getattr(recorded.profiler, 'kineto_results', None)
    names = [event.name() for event in raw.events()] if raw is not None else [event.name for event in recorded.events()]
    calls = collections.Counter(name[len('c10d::'):].rstrip('_') for name in names if name.startswith('c10d::'))
    return dict(calls)


def with_batch(cfg: Mapping[str, Any], samples: int) -> Dict[str, Any]:
    """The configuration with this batch, whose learning rate is not what is measured."""
    plain = to_plain(cfg)
    plain['data'] = dict(plain['data'], samples_per_gpu=samples)
    plain['auto_scale_lr'] = None
    return plain


def _quiet_logger() -> logging.Logger:
    logger = logging.getLogger('mmdet3d_ext.benchmark')
    logger.setLevel(logging.WARNING)
    return logger


# --------------------------------------------------------------------------------------------------------------------
# tables

def find_baseline(baseline: Optional[Mapping[str, Any]], row: Mapping[str, Any]) -> Optional[Mapping[str, Any]]:
    """The baseline's row of the same mode and batch: of the same precision, else of fp32."""
    rows = [r for r in (baseline or {}).get('runs', []) if r['mode'] == row['mode'] and r['samples'] == row['samples']]
    for wanted in (row['precision'], 'fp32'):
        for candidate in rows:
            if candidate['precision'] == wanted:
                return candidate
    return None


def read_baseline(path: str) -> Mapping[str, Any]:
    """A file that ``--out`` wrote before.

    Raises:
        UserError: if it is not one.
    """
    try:
        with open(path) as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise UserError(f'--baseline {path}: {error}') from None
    if not isinstance(content, dict) or not isinstance(content.get('runs'), list):
        raise UserError(f'--baseline {path} is not a file of this tool: it has no list "runs"')
    return content


def table(rows: Sequence[Mapping[str, Any]], baseline: Optional[Mapping[str, Any]] = None) -> str:
    """Markdown: one line per run, then one table of parts with a column per run. Ratios: baseline over this (times faster)."""
    lines = ['| mode | batch | precision | step ms | samples/s | data wait ms | device busy ms | launches | host waits | peak MiB | '
             'baseline | faster | less memory |', '|---' * 13 + '|']
    for row in rows:
        other = find_baseline(baseline, row)
        faster = f'{row["samples_per_s"] / other["samples_per_s"]:.2f}x' if other else '-'
        memory = f'{other["peak_mib"] / row["peak_mib"]:.2f}x' if other and other.get('peak_mib') and row['peak_mib'] else '-'
        peak = '-' if row['peak_mib'] is None else f'{row["peak_mib"]:,.0f}'
        waits, launches = ('-' if row.get(key) is None else f'{row[key]:,}' for key in ('host_waits', 'launches'))
        busy = '-' if row.get('busy_ms') is None else f'{row["busy_ms"]:.1f}'
        against = f'{other["samples_per_s"]:.2f}/s ({other["precision"]})' if other else '-'
        lines.append(f'| {row["mode"]} | {row["samples"]} | {row["precision"]} | {row["step_ms"]:.1f} | {row["samples_per_s"]:.2f} | '
                     f'{row["data_wait_ms"]:.1f} | {busy} | {launches} | {waits} | {peak} | {against} | {faster} | {memory} |')
    names: List[str] = []
    for row in rows:
        names += [name for name in row['parts'] if name not in names]
    lines += ['', '| part, ms | ' + ' | '.join(f'{r["mode"]} {r["samples"]} {r["precision"]}' for r in rows) + ' |',
              '|---' * (len(rows) + 1) + '|']
    for name in names:
        cells = [f'{row["parts"][name]:.2f}' if name in row['parts'] else '-' for row in rows]
        lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
    sites = collections.Counter()
    for row in rows:
        for site, count in row.get('wait_sites', {}).items():
            sites[site] = max(sites[site], count)
    if sites:
        lines += ['', 'The host waits at (calls a step, at most): ' + ', '.join(f'{s} ({n})' for s, n in sites.most_common()) + '.']
    return '\n'.join(lines)
