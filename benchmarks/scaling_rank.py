#!/usr/bin/env python3
"""One rank of ``benchmarks/scaling.py``: time the training step with and without the gradient exchange, compare gradients and weights.

Started by plain python, torchrun or torchpack, one process per GPU; rank 0 writes ``--result``. Not a program of its own.
"""
from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import hashlib
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / 'benchmarks')]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from mmdet3d_ext.datasets.synthetic.batch import random_batch  # noqa: E402
from mmdet3d_ext.engine import benchmark, cli, launch  # noqa: E402
from mmdet3d_ext.engine.amp import AmpPlan  # noqa: E402
from mmdet3d_ext.engine.parallel import BUCKET_MB, StepModel, exchange_settings, finish_exchange, sum_losses  # noqa: E402
from mmdet3d_ext.engine.run_dir import to_plain  # noqa: E402
from mmdet3d_ext.engine.startup import load_settings, start  # noqa: E402
from mmdet3d_ext.engine.train import make_model  # noqa: E402
from mmdet3d_ext.over_ranks import alone, counted_by  # noqa: E402

MIB = 2 ** 20
CHUNKS = 3  # of timed steps; the median counts


def say(text: str) -> None:
    if launch.current().is_master:
        print(f'    {text}', file=sys.stderr, flush=True)


class Bench:
    """What all measurements of this process share.

    Args:
        cfg: a resolved configuration. template: its model on the CPU, of which each measurement takes a copy.
        arguments: the command line.
    """

    def __init__(self, cfg: Mapping[str, Any], device: torch.device, arguments: argparse.Namespace):
        self.cfg, self.device, self.arguments = to_plain(cfg), device, arguments
        self.ranks = launch.current().world_size
        torch.manual_seed(0)
        self.template = make_model(cfg)
        self.batches = benchmark.make_batches(self.cfg, arguments.batch, device, arguments.points)

    def steps(self, precision: str, dtype: Optional[torch.dtype], **exchange: Any) -> benchmark.Steps:
        """Training steps of a fresh model; ``exchange`` replaces keys of ``dist_params``."""
        cfg = dict(self.cfg, dist_params={**(self.cfg.get('dist_params') or {}), **exchange})
        return benchmark.Steps(cfg, copy.deepcopy(self.template), self.device, self.arguments.batch, AmpPlan(dtype))

    def seconds(self, steps: benchmark.Steps, count: int) -> float:
        """Of one step, mean over ``count`` of them, on the slowest rank."""
        self.wait()
        begin = time.perf_counter()
        steps.run(self.batches, count)
        if self.device.type == 'cuda':
            torch.cuda.synchronize()
        spent = torch.tensor([(time.perf_counter() - begin) / count], dtype=torch.float64, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        return float(spent)

    def wait(self) -> None:
        """Until all ranks and their devices are here."""
        if self.device.type == 'cuda':
            torch.cuda.synchronize()
        if self.ranks > 1:
            dist.barrier()

    def clean(self) -> None:
        gc.collect()
        if self.device.type == 'cuda':
            torch.cuda.empty_cache()


def same_on_all_ranks(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all ranks hold the same bits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    if not dist.is_initialized():
        return True
    found: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digest.hexdigest())
    return len(set(found)) == 1


def measure_step(bench: Bench, precision: str) -> Dict[str, Any]:
    """One row: the step as training runs it, and the same without the exchange of gradients."""
    arguments = bench.arguments
    each = max(1, arguments.steps // CHUNKS)
    with benchmark.precision(precision, bench.device) as dtype:
        steps = bench.steps(precision, dtype)
        steps.run(bench.batches, arguments.warmup)
        benchmark.reset_peak(bench.device)
        times, bare = [bench.seconds(steps, each)], []
        row: Dict[str, Any] = dict(precision=precision, ranks=bench.ranks, samples=arguments.batch, steps=each * CHUNKS)
        if bench.ranks > 1:
            row['weights_equal'] = same_on_all_ranks(list(steps.model.parameters()))
            row['collectives'] = benchmark.collectives(functools.partial(steps.run, bench.batches, 1))
        for _ in range(CHUNKS):
            if bench.ranks > 1 and not arguments.short:
                with steps.runner.model.no_sync():
                    bare.append(bench.seconds(steps, each))
            times.append(bench.seconds(steps, each))
        row.update(step_ms=1e3 * statistics.median(times), bare_ms=1e3 * statistics.median(bare) if bare else None,
                   spread_ms=1e3 * (max(times) - min(times)), **benchmark.peak(bench.device))
        row['samples_per_s'] = 1e3 * bench.ranks * arguments.batch / row['step_ms']
    del steps
    bench.clean()
    say(f'{precision}: {row["step_ms"]:.1f} ms a step, {row["samples_per_s"]:.2f} samples/s'
        + (f', {row["bare_ms"]:.1f} ms without exchange' if bare else ''))
    return row


def sweep(bench: Bench, precision: str, buckets: Sequence[float], compressions: Sequence[str]) -> List[Dict[str, Any]]:
    """Step times by bucket size, then by compression."""
    rows = []
    settings = [dict(bucket_cap_mb=mb) for mb in buckets] + [dict(compression=name) for name in compressions]
    with benchmark.precision(precision, bench.device) as dtype:
        for setting in settings:
            steps = bench.steps(precision, dtype, **setting)
            steps.run(bench.batches, max(3, bench.arguments.warmup // 2))
            each = max(1, bench.arguments.steps // CHUNKS)
            times = [bench.seconds(steps, each) for _ in range(2)]
            calls = benchmark.collectives(functools.partial(steps.run, bench.batches, 1))
            rows.append(dict(precision=precision, bucket_cap_mb=setting.get('bucket_cap_mb', BUCKET_MB),
                             compression=setting.get('compression'), step_ms=1e3 * statistics.median(times), allreduces=calls.get('allreduce')))
            del steps
            bench.clean()
            say(f'{precision}, {setting}: {rows[-1]["step_ms"]:.1f} ms a step, {rows[-1]["allreduces"]} all-reduces')
    return rows


def exchange_alone(bench: Bench, count: int = 5) -> Dict[str, Any]:
    """The gradients' bytes in all-reduces of one bucket each, with nothing beside them."""
    numbers = sum(p.numel() for p in bench.template.parameters() if p.requires_grad)
    pieces = torch.zeros(numbers, device=bench.device).split(BUCKET_MB * MIB // 4)

    def once() -> None:
        for work in [dist.all_reduce(piece, async_op=True) for piece in pieces]:
            work.wait()

    once()
    times = []
    for _ in range(count):
        bench.wait()
        begin = time.perf_counter()
        once()
        if bench.device.type == 'cuda':
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    spent = statistics.median(times)
    moved = 2 * (bench.ranks - 1) / bench.ranks * 4 * numbers  # that a rank of a ring sends
    found = dict(ms=1e3 * spent, gb_per_s=moved / spent / 1e9)
    say(f'exchange alone: {found["ms"]:.2f} ms, {found["gb_per_s"]:.1f} GB/s a rank')
    return found


# ---- gradients against one process with all samples ------------------------------------------------------------------------

@contextlib.contextmanager
def without_chance(model: nn.Module) -> Iterator[None]:
    """Statistics of batch norms frozen and no dropout: what one batch of all samples and a part of it must have in common."""
    chosen = [m for m in model.modules() if isinstance(m, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd,
                                                           nn.MultiheadAttention)) or type(m).__name__ == 'DropPath']
    before = [m.training for m in chosen]
    for module in chosen:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(chosen, before):
            module.training = training


def joined(batches: Sequence[Mapping[str, Any]]) -> Dict[str, Any]:
    """The samples of several batches as one."""
    first = batches[0]
    return {key: torch.cat([b[key] for b in batches]) if isinstance(value, torch.Tensor) else [item for b in batches for item in b[key]]
            for key, value in first.items()}


def gradients(model: nn.Module) -> Dict[str, torch.Tensor]:
    return {name: p.grad.detach().double().cpu() for name, p in model.named_parameters() if p.grad is not None}


def at_once(template: nn.Module, device: torch.device, parts: Sequence[Mapping[str, Any]]) -> Dict[str, torch.Tensor]:
    """The gradient of this process alone for all samples in one forward pass."""
    model = copy.deepcopy(template).to(device).train()
    with without_chance(model), alone():
        sum_losses(model(**joined(parts)))[0].backward()
    return gradients(model)


def part_by_part(template: nn.Module, device: torch.device, parts: Sequence[Mapping[str, Any]]) -> Dict[str, torch.Tensor]:
    """The same with a forward pass for each part, so that every sum runs in the order in which the ranks' do."""
    model = copy.deepcopy(template).to(device).train()
    counts: List[List[torch.Tensor]] = [[] for _ in parts]
    with without_chance(model):
        for part, own in zip(parts, counts):
            with torch.no_grad(), counted_by(lambda c, own=own: (own.append(c), (c, 1))[1]):
                losses = model(**part)
        del losses
        totals = [sum(every) for every in zip(*counts)]
        for part in parts:
            left = iter(totals)
            with counted_by(lambda c, left=left: (next(left), len(parts))):
                (sum_losses(model(**part))[0] / len(parts)).backward()
    return gradients(model)


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Dict[str, Any]:
    """How far two gradients are apart: largest difference; norm of the difference over the norm; the parameter furthest off by that."""
    if set(one) != set(other):
        return {'error': f'{len(set(one) ^ set(other))} parameters have a gradient on one side only: {sorted(set(one) ^ set(other))[:3]}'}
    whole = sum(float(g.square().sum()) for g in other.values()) ** 0.5
    apart = {name: one[name] - g for name, g in other.items()}
    norms = {name: float(d.norm()) for name, d in apart.items()}
    worst = max(norms, key=lambda name: norms[name] / (float(other[name].norm()) + 1e-6 * whole))
    return dict(max_abs=max(float(d.abs().max()) for d in apart.values()), largest=max(float(g.abs().max()) for g in other.values()),
                relative=sum(n * n for n in norms.values()) ** 0.5 / whole, worst=worst,
                worst_relative=norms[worst] / (float(other[worst].norm()) + 1e-6 * whole), parameters=len(other))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Algorithms without atomic sums where torch has them."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        torch.use_deterministic_algorithms(True, warn_only=True)
        before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.deterministic = before


def compare_gradients(bench: Bench) -> Dict[str, Any]:
    """The float32 gradient of a step over all ranks against that of this process with all samples, one part after the other.

    ``again`` and ``at_once`` compare the latter with itself, computed once more and with all samples in one forward pass: what of a
    difference is not the exchange's.
    """
    samples, rank, device = bench.arguments.equal_samples, launch.current().rank, bench.device
    parts = [random_batch(bench.cfg, samples, device, 1000 + r, bench.arguments.points) for r in range(bench.ranks)]
    for number, part in enumerate(parts):  # unlike numbers of objects, so that what losses divide by matters
        for key in ('gt_bboxes_3d', 'gt_labels_3d'):
            part[key] = [value[:max(1, len(value) // (1 + number))] for value in part[key]]
    found: Dict[str, Any] = dict(samples_per_rank=samples, objects=[sum(len(v) for v in part['gt_labels_3d']) for part in parts])
    with benchmark.precision('fp32', device), deterministic():
        model = copy.deepcopy(bench.template).to(device).train()
        wrapped = StepModel(model, device, None, **exchange_settings(bench.cfg))
        with without_chance(model):
            out = wrapped.train_step(parts[rank])
            out['loss'].backward()
            finish_exchange(out)
        exchanged = gradients(model)
        found['gradients_equal_on_ranks'] = same_on_all_ranks([p.grad for p in model.parameters() if p.grad is not None])
        del wrapped, model, out
        bench.clean()
        once = part_by_part(bench.template, device, parts)
        found['difference'] = difference(exchanged, once)
        found['again'] = difference(part_by_part(bench.template, device, parts), once)
        found['at_once'] = difference(at_once(bench.template, device, parts), once)
        bench.clean()
    say('gradients, relative difference: ' + ', '.join(f'{name} {found[name].get("relative", found[name].get("error"))}'
                                                       for name in ('difference', 'again', 'at_once')))
    return found


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    result.add_argument('config')
    result.add_argument('--result', required=True)
    result.add_argument('--precision', nargs='+', required=True)
    result.add_argument('--batch', type=int, required=True)
    result.add_argument('--steps', type=int, required=True)
    result.add_argument('--warmup', type=int, required=True)
    result.add_argument('--points', type=int, default=benchmark.REAL_POINTS)
    result.add_argument('--buckets', type=float, nargs='*', default=[])
    result.add_argument('--compression', nargs='*', default=[])
    result.add_argument('--equal-samples', type=int, default=1)
    result.add_argument('--short', action='store_true', help='the step alone')
    cli.add_common(result)
    return result


def main() -> int:
    arguments, overrides = cli.split(parser(), sys.argv[1:])

    def program() -> int:
        cfg = load_settings(arguments.config, overrides)
        device = start(cfg, arguments)
        place = launch.current()
        bench = Bench(cfg, device, arguments)
        trained = [p for p in bench.template.parameters() if p.requires_grad]
        content: Dict[str, Any] = dict(
            ranks=place.world_size, launcher=place.launcher, backend=dist.get_backend() if dist.is_initialized() else None,
            device=torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU', torch=torch.__version__,
            threads=torch.get_num_threads(), gradient_bytes=sum(p.numel() * p.element_size() for p in trained),
            parameters=sum(p.numel() for p in trained), rows=[])
        if device.type == 'cuda':
            content['nccl'] = '.'.join(map(str, torch.cuda.nccl.version()))

        def keep() -> None:  # after each part, so that a later one that fails takes nothing along
            if place.is_master:
                Path(arguments.result).write_text(json.dumps(content))

        for precision in arguments.precision:
            content['rows'].append(measure_step(bench, precision))
            keep()
        if place.world_size > 1 and not arguments.short:
            content['alone'] = exchange_alone(bench)
            content['gradients'] = compare_gradients(bench)
            keep()
            content['sweep'] = sweep(bench, arguments.precision[0], arguments.buckets, arguments.compression)
            keep()
        return 0

    return launch.run(program)


if __name__ == '__main__':
    sys.exit(main())
