#!/usr/bin/env python
"""Time the training pipeline per core, stage by stage, beside a straightforward one (benchmarks/data_peer.py).

Examples:
    python benchmarks/data.py                                  # makes its data under the system's temporary folder, then measures
    python benchmarks/data.py --root /data/bench --rounds 20   # data kept for the next time
    python benchmarks/data.py --out docs/benchmarks            # writes data.md and data.json
    python benchmarks/data.py --loader-workers 1 4 8 16        # also batches per second of the real loader

One process, one thread. The pipelines take turns, sample by sample, on the same files and random seeds; a figure is the median of
the process's CPU time, which other processes disturb less than the wall clock. The data: synthetic tables and objects in the
nuScenes schema, six full-size camera images and a LiDAR cloud per frame (real ones where --keyframe or ../shared has them), maps
tiled to about a square kilometre. Caches are warm: every file was read before, as on a machine whose memory holds the data; what a slow
disk adds is not in these figures.
"""

from __future__ import annotations

import os

for _name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS'):
    os.environ[_name] = '1'

import argparse  # noqa: E402
import collections  # noqa: E402
import contextlib  # noqa: E402
import datetime  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import platform  # noqa: E402
import shlex  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple  # noqa: E402

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / 'benchmarks')]

import cv2  # noqa: E402
import data_files  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from data_peer import PeerPipeline  # noqa: E402
from mmcv.parallel import collate  # noqa: E402
from nuscenes.map_expansion.map_api import NuScenesMap  # noqa: E402
from tqdm import tqdm  # noqa: E402

from mmdet3d_ext.config import load_config  # noqa: E402
from mmdet3d_ext.datasets import build_dataset  # noqa: E402
from mmdet3d_ext.datasets.builder import keep_freed_memory  # noqa: E402
from mmdet3d_ext.engine.run_dir import to_plain  # noqa: E402
from mmdet3d_ext.registry import profile  # noqa: E402

CONFIG = 'configs/nuscenes/multitask/vanilla_200.yaml'
STAGES = {'LoadMultiViewImageFromFiles': 'images: decode', 'ImageAug3D': 'images: resize, crop, turn',
          'ImageNormalize': 'images: normalise', 'GridMask': 'images: normalise', 'LoadPointsFromFile': 'points: load',
          'LoadPointsFromMultiSweeps': 'points: load', 'LoadAnnotations3D': 'boxes', 'ObjectPaste': 'paste objects',
          'GlobalRotScaleTrans': 'scene: turn, scale, flip', 'RandomFlip3D': 'scene: turn, scale, flip',
          'LoadBEVSegmentation': 'map labels', 'PointsRangeFilter': 'filter, shuffle', 'ObjectRangeFilter': 'filter, shuffle',
          'ObjectNameFilter': 'filter, shuffle', 'PointShuffle': 'filter, shuffle', 'DefaultFormatBundle3D': 'format',
          'Collect3D': 'format'}
ORDER = [*dict.fromkeys(STAGES.values()), 'collate']
PEER, OURS = 'straightforward', 'ours'
# Name -> what it adds to the configuration.
VARIANTS = {OURS: [], 'ours, uint8': ['--image_uint8', 'true'],
            'ours, uint8 and reduced decoding': ['--image_uint8', 'true', '--image_reduced', 'true'],
            "ours, the devkit's labels": ['--compat', 'reference']}
BATCH = 4
# What was changed since the run that --before names.
CHANGES = {
    'images: decode': "OpenCV's libjpeg-turbo for Pillow; no copy",
    'images: resize, crop, turn': "only the crop is resampled, by torch's 8-bit vector kernel for Pillow's C loop",
    'images: normalise': 'a table of 256 levels per channel, into the one tensor of the sample (before: also stacked in "format")',
    'points: load': 'sweeps into one array, moved by OpenCV; no product in double precision, no selection of columns',
    'paste objects': "a coarse picture tells which points can be in a pasted box; one table of overlaps",
    'scene: turn, scale, flip': "OpenCV's transform for BLAS's product with a 3x3 matrix",
    'map labels': 'layers of a class drawn together, whole-number sums, straight into the label array',
    'filter, shuffle': "whole rows moved by numpy for torch's indexing, torch's permutation for numpy's",
    'format': 'images are stacked already', 'collate': 'freed memory is kept for the next sample (the batch itself lies in shared memory)'}


class Pipeline:
    """Named steps over the samples of a data set."""

    def __init__(self, name: str, cells: int, dataset: Any, steps: List[Tuple[str, Callable]], gather: Callable):
        self.name, self.cells, self.dataset, self.steps, self.gather = name, cells, dataset, steps, gather

    def run(self, index: int, seed: int) -> Dict[str, Tuple[float, float]]:
        """Stage -> (CPU, wall) milliseconds of one sample; collating is a sample's share of a batch."""
        spent: Dict[str, List[float]] = collections.OrderedDict((stage, [0.0, 0.0]) for stage in ORDER)
        np.random.seed(seed)
        torch.manual_seed(seed)
        value = self._timed(spent, 'boxes', self.dataset.get_data_info, index)
        for stage, step in self.steps:
            value = self._timed(spent, stage, step, value)
        with as_in_worker():
            self._timed(spent, 'collate', self.gather, [value] * BATCH)
        spent['collate'] = [part / BATCH for part in spent['collate']]
        return {stage: tuple(parts) for stage, parts in spent.items()}

    @staticmethod
    def _timed(spent, stage, call, *arguments):
        cpu, wall = time.process_time(), time.perf_counter()
        result = call(*arguments)
        spent[stage][0] += 1e3 * (time.process_time() - cpu)
        spent[stage][1] += 1e3 * (time.perf_counter() - wall)
        return result


def roomy() -> bool:
    """Whether /dev/shm holds any batch of this benchmark; a process that writes more than it holds dies."""
    try:
        found = os.statvfs('/dev/shm')
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= 2 ** 30


@contextlib.contextmanager
def as_in_worker() -> Iterator[None]:
    """Within: torch collates into shared memory, as in a loader worker, if there is room for it."""
    from torch.utils.data._utils import worker
    held, worker._worker_info = worker._worker_info, True if roomy() else None
    try:
        yield
    finally:
        worker._worker_info = held


def configuration(root: Path, cells: int, overrides: List[str]) -> Dict[str, Any]:
    """The configuration with pasting on and labels of this many cells."""
    return load_config(str(REPO / CONFIG), ['--dataset_root', f'{root}/', '--gt_paste_stop_epoch', '100', '--bev.labels.cells',
                                            str(cells), '--data.train', '${train_dataset}', *overrides])


def train_set(cfg: Any) -> Any:
    with profile(cfg.get('compat')):
        dataset = build_dataset(to_plain(cfg['data']['train']))
    dataset.set_epoch(0)
    dataset._start_epoch()
    return dataset


def make_pipelines(root: Path, sizes: List[int], names: List[str]) -> List[Pipeline]:
    """Every variant at every label size; the peer first."""
    found = []
    maps: Dict[str, NuScenesMap] = {}
    for cells in sizes:
        for name in (PEER, *names):
            cfg = configuration(root, cells, VARIANTS.get(name, []))
            dataset = train_set(cfg)
            if name == PEER:
                for info in dataset.data_infos:
                    if info['location'] not in maps:
                        maps[info['location']] = NuScenesMap(str(root), info['location'])
                paste = next((step for step in to_plain(cfg['train_pipeline']) if step['type'] == 'ObjectPaste'), None)
                peer = PeerPipeline(to_plain(cfg), maps, cells, paste)
                found.append(Pipeline(name, cells, dataset, peer.steps(), peer.collate))
            else:
                steps = [(STAGES[type(step).__name__], step) for step in dataset.transforms]
                found.append(Pipeline(name, cells, dataset, steps, lambda samples: collate(samples, samples_per_gpu=len(samples))))
    return found


def measure(pipelines: List[Pipeline], rounds: int, warm: int = 2, sweeps: int = 9) -> List[Dict[str, Any]]:
    """Medians over rounds and samples; in each round every pipeline reads every sample, in changing order."""
    samples = [i for i, info in enumerate(pipelines[0].dataset.data_infos) if len(info['sweeps']) >= sweeps]
    if not samples:
        raise SystemExit(f'error: no sample has {sweeps} earlier sweeps; use other data')
    taken: List[List[Dict[str, Tuple[float, float]]]] = [[] for _ in pipelines]
    for turn in tqdm(range(-warm, rounds), desc='rounds'):
        for index in samples:
            for k in range(len(pipelines)):
                k = (k + turn + index) % len(pipelines)
                result = pipelines[k].run(index, seed=1000 * index + turn + warm)
                if turn >= 0:
                    taken[k].append(result)
    rows = []
    for pipeline, runs in zip(pipelines, taken):
        stages = {stage: statistics.median(run[stage][0] for run in runs) for stage in ORDER}
        totals = sorted(sum(cpu for cpu, _ in run.values()) for run in runs)
        rows.append(dict(name=pipeline.name, cells=pipeline.cells, stages=stages, cpu_ms=statistics.median(totals),
                         wall_ms=statistics.median(sum(wall for _, wall in run.values()) for run in runs),
                         quarter_ms=totals[len(totals) // 4], runs=len(totals)))
    return rows


def loader_rates(root: Path, cells: int, workers: List[int], seconds: float, names: List[str]) -> List[Dict[str, Any]]:
    """Samples per second of the real loader, from its first to its last batch in ``seconds``."""
    from mmdet3d_ext.engine.train import make_loader
    rows = []
    for name in names:
        for count in workers:
            cfg = configuration(root, cells, [*VARIANTS[name], '--data.samples_per_gpu', str(BATCH), '--data.workers_per_gpu',
                                              str(count), '--data.train', '{type: RepeatDataset, times: 4000, dataset: '
                                              '"${train_dataset}"}'])
            loader = make_loader(cfg, cfg['data']['train'], 0, train=True)
            batches = iter(loader)
            for _ in range(2 * count + 1):  # what was read ahead
                next(batches)
            began, cpu, read = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - began < seconds:
                next(batches)
                read += BATCH
            spent = time.perf_counter() - began
            rows.append(dict(name=name, cells=cells, workers=count, samples_per_s=read / spent,
                             main_process_ms=1e3 * (time.process_time() - cpu) / read))
            print(f'loader: {name}, {count} workers: {read / spent:.1f} samples/s', flush=True)
            del batches
    return rows


def report(result: Dict[str, Any]) -> str:
    """Markdown."""
    rows, names = result['rows'], list(dict.fromkeys(row['name'] for row in result['rows']))
    lines = ['# Training data: time per sample on one core', '', f'`{result["command"]}`', '',
             f'{result["machine"]}, {result["date"]}. {result["data"]}', '',
             'Milliseconds of CPU time per sample, one process and one thread: medians of the stages and, apart from them, of the sums. '
             f'In brackets: how many times the straightforward pipeline (`benchmarks/data_peer.py`) takes. Labels are '
             f'{len(result["classes"])} classes; batches of {BATCH} are collated into {result["memory"]} memory.', '']
    for cells in dict.fromkeys(row['cells'] for row in rows):
        found = {row['name']: row for row in rows if row['cells'] == cells}
        peer = found[PEER]
        lines += [f'## Map labels of {cells} x {cells}', '', *_head('stage', names)]
        for stage in ORDER:
            lines.append(_line(stage, [_cell(found[name]['stages'][stage], peer['stages'][stage], name) for name in names]))
        lines.append(_line('**sample**', [_cell(found[name]['cpu_ms'], peer['cpu_ms'], name) for name in names]))
        bare = {name: row['cpu_ms'] - row['stages']['map labels'] for name, row in found.items()}
        lines.append(_line('sample without its map labels', [_cell(bare[name], bare[PEER], name) for name in names]))
        lines.append(_line('samples/s per core', ['{:.1f}'.format(1e3 / found[name]['cpu_ms']) for name in names]))
        lines += [_line('wall clock, ms', ['{:.1f}'.format(found[name]['wall_ms']) for name in names]), '']
    lines += ['## Cores that one GPU needs', '', *_head('samples/s of the GPU, labels', names)]
    for rate in result['gpu_rates']:
        for cells in dict.fromkeys(row['cells'] for row in rows):
            need = [f'{rate * row["cpu_ms"] / 1e3:.1f}' for row in rows if row['cells'] == cells]
            lines.append(_line(f'{rate:g}, {cells}', need))
    lines += ['', 'That is the work of the loader workers alone; leave one more core per GPU to the training process. Set '
              '`data.workers_per_gpu` to the next whole number above it.', '']
    if result.get('before'):
        lines += _gains(result)
    if result.get('loader'):
        lines += ['## The loader', '', f'Batches of {BATCH}, read as training reads them.', '',
                  '| pipeline | labels | workers | samples/s | training process, CPU ms per sample |', '|---|---|---|---|---|']
        lines += [f'| {row["name"]} | {row["cells"]} | {row["workers"]} | {row["samples_per_s"]:.1f} | {row["main_process_ms"]:.1f} |'
                  for row in result['loader']]
        lines.append('')
    return '\n'.join(lines)


def _gains(result: Dict[str, Any]) -> List[str]:
    """Stage by stage: the earlier run beside this one; brackets make runs on different machines comparable."""
    before = result['before']
    lines = ['## What the changes gained', '', f'Before: {before["machine"]}, {before["date"]}, a run of its own; compare the brackets.', '']
    for cells in dict.fromkeys(row['cells'] for row in result['rows']):
        found = [{row['name']: row for row in run['rows'] if row['cells'] == cells} for run in (before, result)]
        if not all(OURS in rows and PEER in rows for rows in found):
            continue
        lines += [*_head(f'stage, labels of {cells} x {cells}', ['before', 'now', 'change'])]
        for stage in ORDER:
            values = [_cell(rows[OURS]['stages'][stage], rows[PEER]['stages'][stage], OURS) for rows in found]
            lines.append(_line(stage, [*values, CHANGES.get(stage, '')]))
        lines += [_line('**sample**', [*(_cell(rows[OURS]['cpu_ms'], rows[PEER]['cpu_ms'], OURS) for rows in found), '']), '']
    return lines


def _head(first: str, names: List[str]) -> List[str]:
    return [_line(first, names), '|---' * (1 + len(names)) + '|']


def _line(first: str, cells: List[str]) -> str:
    return f'| {first} | {" | ".join(cells)} |'


def _cell(value: float, peer: float, name: str) -> str:
    return f'{value:.1f}' if name == PEER else f'{value:.1f} ({peer / value:.1f}x)' if value >= 0.05 else f'{value:.1f}'


def cpu_name() -> str:
    try:
        text = Path('/proc/cpuinfo').read_text()
        return next(line.split(':', 1)[1].strip() for line in text.splitlines() if line.startswith('model name'))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def alone() -> None:
    """Make this process one core's worth of a loader worker, and quiet."""
    logging.disable(logging.INFO)
    warnings.filterwarnings('ignore')
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    keep_freed_memory()  # as a loader worker does; it helps all pipelines here


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--root', type=Path, help='folder of the data; made if it is not there (default: in the temporary folder)')
    parser.add_argument('--keyframe', type=Path, help='folder with real images and a cloud, as <...>__<channel>__<...>.jpg and .bin')
    parser.add_argument('--cells', type=int, nargs='+', default=[400, 800], help='sizes of the map labels')
    parser.add_argument('--variants', nargs='+', default=list(VARIANTS), choices=list(VARIANTS), metavar='NAME',
                        help=f'of {list(VARIANTS)}')
    parser.add_argument('--rounds', type=int, default=12, help='how often every pipeline reads every sample')
    parser.add_argument('--gpu-rate', type=float, nargs='+', default=[13.0, 20.0], help='samples/s that one GPU trains')
    parser.add_argument('--loader-workers', type=int, nargs='*', default=[], help='also measure the loader with so many workers')
    parser.add_argument('--loader-seconds', type=float, default=15.0)
    parser.add_argument('--before', type=Path, help='data.json of an earlier version, to show what the changes gained')
    parser.add_argument('--out', type=Path, help='folder for data.md and data.json')
    options = parser.parse_args(argv)
    if min(options.rounds, *options.cells) < 1:
        parser.error('--rounds and --cells must be at least 1')
    root = options.root or Path(tempfile.gettempdir()) / 'mmdet3d_ext-bench-data'
    about = data_files.prepare(root, options.keyframe)
    with torch.no_grad():
        pipelines = make_pipelines(root, options.cells, options.variants)
        rows = measure(pipelines, options.rounds)
    command = shlex.join(['python', 'benchmarks/data.py', *(sys.argv[1:] if argv is None else argv)])
    result = dict(command=command, machine=cpu_name(), memory='shared' if roomy() else 'ordinary (a worker: shared)',
                  date=str(datetime.date.today()), data=about, classes=list(configuration(root, 200, [])['map_classes']),
                  versions={module.__name__: module.__version__ for module in (np, cv2, torch)}, rows=rows, gpu_rates=options.gpu_rate)
    if options.before:
        result['before'] = {key: value for key, value in json.loads(options.before.read_text()).items() if key != 'before'}
    if options.loader_workers:
        result['loader'] = loader_rates(root, options.cells[0], options.loader_workers, options.loader_seconds, options.variants[:2])
    text = report(result)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / 'data.json').write_text(json.dumps(result, indent=1) + '\n')
        (options.out / 'data.md').write_text(text)
    return 0


if __name__ == '__main__':
    alone()
    sys.exit(main())
