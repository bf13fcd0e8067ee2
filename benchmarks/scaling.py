#!/usr/bin/env python3
"""How the training step scales over the GPUs of this machine: one GPU, then 2 .. n with the same batch each (weak scaling).

    python benchmarks/scaling.py configs/nuscenes/multitask/vanilla_200.yaml --batch 4 --precision fp16 fp32 --out docs/benchmarks
    python benchmarks/scaling.py CONFIG --ranks 1 2 4 --steps 24 --buckets 5 25 200       # any --key value goes to the configuration
    python benchmarks/scaling.py CONFIG --model.encoders.camera.backbone.init_cfg null    # without a pretrained file
    python benchmarks/scaling.py configs/synthetic/multitask_tiny.yaml --device cpu --batch 1 --precision fp32 --points 500 --steps 3

Random inputs of the configuration's shapes, others on every rank; training's own wrapper, optimizer, optimizer hook and runner. Each
number of ranks is a job of its own: plain python for one, torchrun for more, and torchpack for the largest once more where mpirun is at
hand. For each precision: step time and samples/s, and the step without the gradient exchange, which shows what of the exchange the
backward pass does not hide. For the largest number of ranks also: the exchange with nothing beside it, step times by bucket size and
with compressed gradients (first precision), gradients in float32 against one process with all samples, and whether all ranks hold the
same weights, bit by bit. Writes scaling.md and scaling.json.
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

RANK = str(REPO / 'benchmarks' / 'scaling_rank.py')
GOAL = 1.9  # times one GPU's samples/s, that two should reach


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                     usage='scaling.py CONFIG [options] [--any.key value ...]')
    result.add_argument('config', help='YAML configuration')
    result.add_argument('--batch', type=int, default=4, metavar='B', help='samples per GPU (default 4)')
    result.add_argument('--precision', nargs='+', default=['fp16', 'fp32'], metavar='P', help='as of tools/benchmark.py (default fp16 fp32)')
    result.add_argument('--ranks', type=int, nargs='+', metavar='N', help='default: 1, 2, 4 ... up to the GPUs here (--device cpu: 1 2)')
    result.add_argument('--steps', type=int, default=12, help='timed steps per measurement (default 12)')
    result.add_argument('--warmup', type=int, default=6, help='steps before (default 6)')
    result.add_argument('--buckets', type=float, nargs='*', default=[5, 10, 25, 50, 100], metavar='MB', help='bucket sizes to try')
    result.add_argument('--compression', nargs='*', default=['bf16'], metavar='T', help='types to send gradients in (default bf16)')
    result.add_argument('--points', type=int, metavar='P', help='points per cloud (default: of ten real sweeps)')
    result.add_argument('--device', choices=('cuda', 'cpu'), default='cuda', help='cpu: processes over gloo, to try the machinery')
    result.add_argument('--timeout', type=float, default=240.0, metavar='S', help='seconds for each job (default 240)')
    result.add_argument('--out', metavar='D', help='folder for scaling.md and scaling.json')
    return result


# ---- jobs -----------------------------------------------------------------------------------------------------------------

def gpus() -> int:
    import torch
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def default_ranks(available: int) -> List[int]:
    """1, 2, 4 ... and all."""
    found = [1]
    while found[-1] * 2 <= available:
        found.append(found[-1] * 2)
    return found if found[-1] == available else [*found, available]


def environment(cpu: bool, most: int) -> Dict[str, str]:
    """Of every job: the same number of threads per process, whatever the launcher would choose; nothing of a launcher around."""
    drop = ('OMPI_', 'PMI', 'SLURM_', 'TORCHELASTIC', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_')
    env = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    env.setdefault('OMP_NUM_THREADS', str(max(1, len(os.sched_getaffinity(0)) // most)))
    env['PATH'] = f'{Path(sys.executable).parent}{os.pathsep}{env.get("PATH", "")}'
    if cpu:
        env['CUDA_VISIBLE_DEVICES'] = ''
    return env


def command(ranks: int, launcher: str, words: Sequence[str]) -> List[str]:
    if launcher == 'torchpack':
        return ['torchpack', 'dist-run', '-np', str(ranks), sys.executable, RANK, *words]
    if ranks == 1:
        return [sys.executable, RANK, *words]
    return [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', str(ranks), RANK, *words]


def run_job(ranks: int, launcher: str, words: Sequence[str], env: Dict[str, str], timeout: float) -> Dict[str, Any]:
    """What rank 0 of the job found; ``error`` if it did not come to its end (what it had until then is kept)."""
    begin, error = time.monotonic(), None
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, 'result.json')
        process = subprocess.Popen(command(ranks, launcher, [*words, '--result', str(result)]), env=env, cwd=REPO, start_new_session=True,
                                   stdout=sys.stderr)
        try:
            code = process.wait(timeout)
            error = f'the job ended with {code}' if code else None
        except subprocess.TimeoutExpired:
            error = f'not done after {timeout:.0f} s'
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = json.loads(result.read_text()) if result.exists() else {'ranks': ranks, 'rows': [], 'backend': None}
    found.update(started_by=launcher, seconds=time.monotonic() - begin)
    if error:
        found['error'] = error
        print(f'    {ranks} rank(s) by {launcher}: {error}', file=sys.stderr, flush=True)
    return found


def jobs_of(ranks: Sequence[int], path: str) -> List[Any]:
    """(ranks, launcher) of each job, torchpack's last; ``path``: where programs are looked for."""
    plain = [(n, 'python' if n == 1 else 'torchrun') for n in ranks]
    there = all(shutil.which(program, path=path) for program in ('mpirun', 'torchpack'))
    return plain + [(max(ranks), 'torchpack')] if max(ranks) > 1 and there else plain


# ---- the report --------------------------------------------------------------------------------------------------------------

def single(jobs: Sequence[Dict[str, Any]], precision: str) -> Optional[Dict[str, Any]]:
    return next((row for job in jobs if job['ranks'] == 1 for row in job['rows'] if row['precision'] == precision), None)


def efficiency(row: Dict[str, Any], one: Optional[Dict[str, Any]]) -> Optional[float]:
    return row['samples_per_s'] / (row['ranks'] * one['samples_per_s']) if one else None


def step_table(jobs: Sequence[Dict[str, Any]]) -> List[str]:
    lines = ['| GPUs | started by | precision | step ms | spread ms | samples/s | times one GPU | efficiency | without exchange ms | '
             'exposed ms | all-reduces | other collectives | same weights |', '|---' * 13 + '|']
    for job in jobs:
        for row in job['rows']:
            share = efficiency(row, single(jobs, row['precision']))
            bare, calls = row.get('bare_ms'), dict(row.get('collectives') or {})
            reduced = calls.pop('allreduce', 0)
            several = row['ranks'] > 1
            lines.append(' | '.join(['', str(row['ranks']), job['started_by'], row['precision'], f'{row["step_ms"]:.1f}',
                                     f'{row["spread_ms"]:.1f}', f'{row["samples_per_s"]:.2f}',
                                     f'{share * row["ranks"]:.2f}' if share else '-', f'{share:.1%}' if share and several else '-',
                                     f'{bare:.1f}' if bare else '-', f'{row["step_ms"] - bare:+.2f}' if bare else '-',
                                     str(reduced) if several else '-', str(sum(calls.values())) if several else '-',
                                     {True: 'yes', False: 'NO'}.get(row.get('weights_equal'), '-'), '']).strip(' '))
    return lines


def about_gradients(found: Dict[str, Any]) -> List[str]:
    lines = ['', '## Gradients', '', f'Float32, deterministic algorithms where there are any, {found["samples_per_rank"]} sample(s) a rank '
             f'with {found["objects"]} objects, batch norms with frozen statistics, no dropout. The gradient that the ranks hold after '
             'the exchange, beside that of one process which takes the same samples one after the other, so that its sums run in the same '
             'order. Then what has nothing to do with the exchange: that process once more (atomic sums), and with all samples in one '
             'forward pass (other kernels and orders; a last bit decides which of two equal peaks becomes a proposal).', '',
             '| compared | largest difference | largest gradient | relative (norm) | worst parameter | its relative |', '|---' * 6 + '|']
    titles = dict(difference='ranks, one process', again='one process, itself again', at_once='one process, itself with all samples at once')
    for name, title in titles.items():
        row = found[name]
        lines.append(f'| {title} | {row["error"]} | | | | |' if 'error' in row else
                     f'| {title} | {row["max_abs"]:.2e} | {row["largest"]:.2e} | {row["relative"]:.2e} | `{row["worst"]}` | '
                     f'{row["worst_relative"]:.2e} |')
    equal = found['gradients_equal_on_ranks']
    return [*lines, '', f'All ranks hold the same gradient bit by bit: {"yes" if equal else "NO"}.']


def report(content: Dict[str, Any]) -> str:
    """Markdown from what scaling.json holds."""
    jobs = content['jobs']
    last = next((job for job in reversed(jobs) if job.get('alone')), None)
    facts = next((job for job in jobs if job.get('parameters')), {})
    lines = ['# The training step over several GPUs', '', f'`{content["command"]}`', '',
             f'{facts.get("device", "nothing measured")}, torch {facts.get("torch")}, NCCL {facts.get("nccl", "-")}, '
             f'{facts.get("threads")} threads a process, {content["date"]}; {content["batch"]} samples per GPU, random inputs. Written by '
             '`benchmarks/scaling.py`.', '',
             'Efficiency is samples/s over those of as many single GPUs. Exposed is the step time less that without the exchange of '
             'gradients: what the backward pass does not hide. Spread is between the fastest and the slowest of the timed parts.', '',
             *step_table(jobs)]
    for row in (row for job in jobs if job['started_by'] == 'torchrun' and job['backend'] == 'nccl' for row in job['rows']):
        share = efficiency(row, single(jobs, row['precision']))
        if row['ranks'] == 2 and share:
            lines += ['', f'Goal for two GPUs, {row["precision"]}: {GOAL} times one. Measured {2 * share:.2f}: '
                          f'{"reached" if 2 * share >= GOAL else "missed"}.']
    for job in jobs:
        if job.get('error'):
            lines += ['', f'**{job["ranks"]} rank(s) by {job["started_by"]}: {job["error"]}.**']
    if content.get('without_torchpack'):
        lines += ['', content['without_torchpack']]
    if facts:
        size = facts['gradient_bytes']
        lines += ['', '## Exchange', '', f'{facts["parameters"]:,} trained parameters, {size / 1e6:.1f} MB of gradients a step and rank.']
    if last:
        alone, n = last['alone'], last['ranks']
        lines += [f'With nothing beside it their all-reduce over {n} ranks takes {alone["ms"]:.2f} ms, {alone["gb_per_s"]:.1f} GB/s a rank '
                  f'(a ring sends {2 * (n - 1)}/{n} of the bytes).']
        if last.get('sweep'):
            lines += ['', '| bucket MB | sent as | precision | step ms | all-reduces |', '|---|---|---|---|---|']
            lines += [f'| {row["bucket_cap_mb"]:g} | {row["compression"] or "float32"} | {row["precision"]} | {row["step_ms"]:.1f} | '
                      f'{row["allreduces"]} |' for row in last['sweep']]
        if last.get('gradients'):
            lines += about_gradients(last['gradients'])
    return '\n'.join(lines) + '\n'


def main(argv: Optional[List[str]] = None) -> int:
    from mmdet3d_ext.engine.cli import split
    words = sys.argv[1:] if argv is None else argv
    arguments, overrides = split(parser(), words)
    cpu = arguments.device == 'cpu'
    available = 2 if cpu else gpus()
    ranks = sorted(set(arguments.ranks or default_ranks(max(1, available))))
    if min(ranks) < 1 or arguments.batch < 1 or arguments.steps < 1:
        parser().error('--ranks, --batch and --steps must be at least 1')
    if not cpu and max(ranks) > available:
        parser().error(f'--ranks {max(ranks)}: {available} GPU(s) are visible; --device cpu tries the machinery over gloo')
    common = [arguments.config, '--precision', *arguments.precision, '--batch', str(arguments.batch), '--steps', str(arguments.steps),
              '--warmup', str(arguments.warmup), *(['--points', str(arguments.points)] if arguments.points else []),
              '--buckets', *map(str, arguments.buckets), '--compression', *arguments.compression]
    env, jobs = environment(cpu, max(ranks)), []
    todo = jobs_of(ranks, env['PATH'])
    for number, (count, launcher) in enumerate(todo):
        print(f'[{number + 1}/{len(todo)}] {count} rank(s) by {launcher} ...', file=sys.stderr, flush=True)
        extra = [] if (count, launcher) == (max(ranks), 'torchrun') else ['--short']
        jobs.append(run_job(count, launcher, [*common, *extra, *overrides], env, arguments.timeout))
    content = dict(command=shlex.join(['python', 'benchmarks/scaling.py', *words]), date=str(datetime.date.today()), config=arguments.config,
                   batch=arguments.batch, jobs=jobs)
    if max(ranks) > 1 and all(launcher != 'torchpack' for _, launcher in todo):
        content['without_torchpack'] = ('`torchpack dist-run` was not measured: there is no mpirun here, or no torchpack. Its processes run '
                                        'the same code as torchrun\'s, from `engine/launch.py` on.')
    text = report(content)
    print(text)
    if arguments.out:
        out = Path(arguments.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / 'scaling.json').write_text(json.dumps(content, indent=1) + '\n')
        (out / 'scaling.md').write_text(text)
    return 1 if any('error' in job for job in jobs) else 0


if __name__ == '__main__':
    sys.exit(main())
