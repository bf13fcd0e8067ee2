"""Latency of predictions, part by part, with and without each thing that is done once instead of in every frame."""
from __future__ import annotations

import collections
import copy
import itertools
import statistics
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ...models.detectors.bevfusion import MATRICES
from ..amp import choose_kernels
from ..benchmark import find_baseline, with_batch
from ..parallel import unpack_batch
from ..timing import Clock, medians, peak, precision, profile_step, reset_peak, wait
from ..train import make_loader, make_model
from .fold import FoldError
from .predictor import Predictor
from .weights import StoreError

PLAIN = 'plain'
Step = Tuple[str, Callable[[Predictor, Mapping[str, Any]], Any]]
# What the rows of a table add, one after the other.
STEPS: Tuple[Step, ...] = (
    ('+ norms folded', lambda predictor, batch: predictor.fold(batch)),
    ('+ geometry kept', lambda predictor, batch: predictor.keep_geometry()),
    ('+ weights stored', lambda predictor, batch: predictor.store_weights(batch)),
    ('+ channels last', lambda predictor, batch: predictor.channels_last()),
)
HALF_ONLY = ('+ weights stored', '+ channels last')
GRAPHS: Step = ('+ CUDA graphs', lambda predictor, batch: predictor.record_graphs(batch))


def inference(cfg: Mapping[str, Any], device: torch.device, samples: int, precision_name: str, iterations: int = 20, warmup: int = 5,
              batches: Optional[Sequence[Mapping[str, Any]]] = None, trace: Optional[str] = None, plain_only: bool = False,
              graphs: bool = False, model: Optional[nn.Module] = None, times: bool = True, profile: bool = True) -> Iterator[Dict[str, Any]]:
    """Time predictions: plain, then with one more of :data:`STEPS` each time. Decoded boxes and maps reach the host.

    Inputs are on the device, but for the matrices, which come from the host as a loader gives them.

    Args:
        batches: random ones, by default the first two of the configured validation data.
        trace: file of a trace; each row's name is put before its ending.
        plain_only: the first row only. graphs: one more row, :data:`GRAPHS`, on a GPU.
        times, profile: as of :func:`~..benchmark.training`; all rows are timed before the first is profiled.

    Yields:
        rows: ``mode, variant, samples, precision, iterations, ranks``, ``did`` (what the step reports); ``step_ms`` (median latency of a
        batch), ``latency_ms`` (``median, p90``), ``samples_per_s, data_wait_ms, peak_mib, peak_reserved_mib``, ``geometry`` (hits and
        misses) and ``parts`` (name -> median ms); what :func:`~..timing.profile_step` finds.
    """
    choose_kernels(cfg)
    with precision(precision_name, device) as dtype:
        if batches is None:
            loader = make_loader(with_batch(cfg, samples), cfg['data']['val'], 0, train=False)
            batches = [unpack_batch(batch, device) for batch, _ in zip(loader, range(2))]
        batches = [{k: v.cpu() if k in MATRICES else v for k, v in batch.items()} for batch in batches]
        template = model if model is not None else make_model(cfg)
        steps = [(PLAIN, lambda *_: None)] + [s for s in STEPS if dtype is not None or s[0] not in HALF_ONLY]
        if graphs and device.type == 'cuda':
            steps.append(GRAPHS)
        steps = steps[:1] if plain_only else steps

        def rows(measure: Callable[[Predictor, Callable[[], None], str], Dict[str, Any]]) -> Iterator[Dict[str, Any]]:
            predictor = Predictor(copy.deepcopy(template), device, dtype)
            for name, apply in steps:
                try:
                    did = apply(predictor, batches[0])
                except (FoldError, StoreError) as error:
                    did = f'not done: {error}'
                turns = itertools.cycle(batches)
                for _ in range(max(warmup, len(batches))):
                    predictor(next(turns))
                yield dict(mode='infer', variant=name, samples=samples, precision=precision_name, iterations=iterations, ranks=1,
                           did=None if did is None else str(did),
                           **measure(predictor, lambda turns=turns: predictor(next(turns)), name))

        timing = rows(lambda predictor, run, name: _times(predictor, run, device, samples, iterations))
        if not profile:
            yield from timing if times else ()
            return
        timed = list(timing) if times else None
        profiled = rows(lambda predictor, run, name: profile_step(device, run, _named(trace, name)))
        for number, row in enumerate(profiled):
            yield dict(timed[number], **row) if timed else row


def _times(predictor: Predictor, run: Callable[[], Any], device: torch.device, samples: int, iterations: int) -> Dict[str, Any]:
    clock = Clock(device)
    reset_peak(device)
    before, latencies = predictor.geometry_hits(), []
    for _ in range(iterations):
        wait(device)
        begin = time.perf_counter()
        run()
        wait(device)
        latencies.append(1e3 * (time.perf_counter() - begin))
    median, after = statistics.median(latencies), predictor.geometry_hits()
    found = dict(step_ms=median, latency_ms={'median': median, 'p90': percentile(latencies, 0.9)}, samples_per_s=1e3 * samples / median,
                 data_wait_ms=0.0, geometry={key: after[key] - before[key] for key in after}, **peak(device))
    found['parts'] = medians(predictor.model, clock, run, min(iterations, 10))
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(max(-int(-share * len(ordered) // 1) - 1, 0), len(ordered) - 1)]


def _named(trace: Optional[str], variant: str) -> Optional[str]:
    if trace is None:
        return None
    stem, dot, ending = trace.partition('.json')
    return f'{stem}_{variant.strip("+ ").replace(" ", "_")}{dot}{ending}'


def _same_variant(baseline: Optional[Mapping[str, Any]], row: Mapping[str, Any]) -> Optional[Mapping[str, Any]]:
    """The baseline with rows of this variant only, where it has any."""
    rows = [r for r in (baseline or {}).get('runs', []) if r.get('variant') == row['variant']]
    return {'runs': rows} if rows else baseline


def table(rows: Sequence[Mapping[str, Any]], baseline: Optional[Mapping[str, Any]] = None) -> str:
    """Markdown: a line per row, then the parts with a column per row. Ratios: to the plain row, and to the baseline's (times faster)."""
    lines = ['| batch | precision | variant | median ms | p90 ms | faster than plain | device busy ms | launches | host waits | '
             'geometry hits | peak MiB | baseline ms | faster |', '|---' * 13 + '|']
    for row in rows:
        plain = next(r for r in rows if (r['samples'], r['precision'], r['variant']) == (row['samples'], row['precision'], PLAIN))
        other = find_baseline(_same_variant(baseline, row), row)
        waits, launches = ('-' if row.get(key) is None else f'{row[key]:,}' for key in ('host_waits', 'launches'))
        busy = '-' if row.get('busy_ms') is None else f'{row["busy_ms"]:.1f}'
        hits, all_of = row['geometry']['hits'], sum(row['geometry'].values())
        memory = '-' if row['peak_mib'] is None else f'{row["peak_mib"]:,.0f}'
        against = (f'{other["step_ms"]:.1f} ({other["precision"]})', f'{other["step_ms"] / row["step_ms"]:.2f}x') if other else ('-', '-')
        lines.append(f'| {row["samples"]} | {row["precision"]} | {row["variant"]} | {row["step_ms"]:.1f} | {row["latency_ms"]["p90"]:.1f} | '
                     f'{plain["step_ms"] / row["step_ms"]:.2f}x | {busy} | {launches} | {waits} | '
                     f'{f"{hits} of {all_of}" if all_of else "-"} | {memory} | {against[0]} | {against[1]} |')
    names: List[str] = []
    for row in rows:
        names += [name for name in row['parts'] if name not in names]
    lines += ['', '| part, ms | ' + ' | '.join(f'{r["samples"]} {r["precision"]} {r["variant"]}' for r in rows) + ' |',
              '|---' * (len(rows) + 1) + '|']
    for name in names:
        lines.append(f'| {name} | ' + ' | '.join(f'{r["parts"][name]:.2f}' if name in r['parts'] else '-' for r in rows) + ' |')
    lines += [''] + [f'{r["precision"]} {r["variant"]}: {r["did"]}' for r in rows if r['did']]
    sites = collections.Counter()
    for row in rows[-1:]:
        sites.update(row.get('wait_sites', {}))
    if sites:
        lines += ['', 'In the last row the host waits at: ' + ', '.join(f'{s} ({n})' for s, n in sites.most_common()) + '.']
    return '\n'.join(lines)
