#!/usr/bin/env python3
"""Does the chain of stages help, and what does each part of Stage 1 give? Trained on the synthetic data set, in reduced form.

    python benchmarks/ablation.py --slice 540                       # again and again until it says that all rows are there
    python benchmarks/ablation.py --slice 540 --only stay400 stage1 # the headline rows first
    python benchmarks/ablation.py --plan                            # what would be trained
    python benchmarks/ablation.py --report                          # only write the page anew
    python benchmarks/ablation.py --form tiny --rows runs/a.json --out runs/a.md --work runs/a --data runs/a/data   # CPU, minutes

Every row is two trainings of the same number of iterations: a base (Phase 3's configuration) and, from its weights, a second one:
Phase 3's again ("stay"), or Stage 1's, or Stage 1's without one part. Rows are kept in --rows after each and not trained again. When
--slice seconds are over, the training at work writes a checkpoint and ends; the next call goes on there if --work is still there,
and trains that one anew if not. On a machine whose files are lost between calls bring --rows back after each and have it in place before the
next. Heads, losses and grids are those of the configurations; FORMS below says what is reduced.
"""
from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from tqdm import tqdm

REPO = Path(__file__).resolve().parents[1]
HEAD = '--model.heads.map'
STOPPED, LAST_START, GRACE = 75, 45.0, 45.0  # exit code; seconds that a training needs at least; for its last checkpoint
FULL_HEAD = (f'{HEAD}.deep_supervision', 'true', f'{HEAD}.use_dice_loss', 'true', f'{HEAD}.class_weights',
             '{stop_line: 4.0, divider: 3.0}')


@dataclass(frozen=True)
class Form:
    """A size of the experiment. ``common``: words of every training; ``stage1``: of those at the finer grid, beside its file."""

    phase3: str
    stage1: str
    common: Tuple[str, ...]
    fine: Tuple[str, ...]
    decoder: str
    data: Tuple[str, ...]
    version: str
    reduction: str


FORMS = {
    'h200': Form(
        'configs/nuscenes/multitask/phase3_400.yaml', 'configs/nuscenes/multitask/stage1_600.yaml',
        ('--image_size', '[128, 352]', '--augment2d.resize', '[[0.70, 0.80], [0.74, 0.74]]',
         '--model.encoders.camera.backbone', '{type: ResNet, depth: 18, num_stages: 4, out_indices: [1, 2, 3], frozen_stages: -1, '
         'norm_cfg: {type: BN, requires_grad: true}, norm_eval: false, style: pytorch}',
         '--model.encoders.camera.neck.in_channels', '[128, 256, 512]', '--optimizer.paramwise_cfg', 'null', '--sweeps_num', '1',
         '--data.samples_per_gpu', '2', '--auto_scale_lr.base_batch_size', '2', '--optimizer.lr', '1.0e-3',
         '--lr_config.warmup_iters', '50', '--log_config.interval', '25'),
        (), '[256, 256, 128, 128]',
        ('--preset', 'demo', '--version', 'v1.0-trainval', '--scenes-train', '30', '--scenes-val', '6'), 'v1.0-trainval',
        'ResNet-18 without pretraining in the place of Swin-T, images of 128 x 352 of a synthetic set of 600 + 120 key frames (480 x 270 '
        'images, 540 lidar columns), one sweep, one learning rate (1e-3, cosine, unless --lr says otherwise) and 2 samples per step in '
        'every training, one GPU. LiDAR encoder, view transform, decoder, both heads, losses and all grids are those of the '
        'configurations.'),
    'tiny': Form(
        'configs/synthetic/multitask_tiny.yaml', 'configs/synthetic/multitask_tiny.yaml',
        ('--lr_config.warmup_iters', '2', '--auto_scale_lr.base_batch_size', '2', '--data.samples_per_gpu', '2',
         '--augment2d.resize', '[[0.80, 0.90], [0.85, 0.85]]', '--log_config.interval', '1'),
        ('--bev.map.step', '0.4', '--bev.labels.cells', '200', *FULL_HEAD), '[32, 32, 32, 32]',
        ('--preset', 'tiny'), 'v1.0-mini', 'the tiny model of "make demo" on nine key frames: only for trying this script out.'),
}
# name -> (what it is, words of both trainings, words of the second alone)
SWITCHES = {
    'deep_supervision': ('without deep supervision', (), (f'{HEAD}.deep_supervision', 'false')),
    'dice': ('without dice loss', (), (f'{HEAD}.use_dice_loss', 'false')),
    'attention': ('without attention', (f'{HEAD}.use_channel_attention', 'false', f'{HEAD}.use_spatial_attention', 'false'), ()),
    'aspp': ('without ASPP', (f'{HEAD}.use_aspp', 'false'), ()),
    'class_weights': ('without class weights', (), (f'{HEAD}.class_weights', 'null')),
}
HEADLINE = {'stay400': 'stays at 400', 'stay400_head': 'stays at 400, head and losses of Stage 1', 'stage1': 'Phase 3 -> Stage 1 (600)'}


@dataclass(frozen=True)
class Row:
    """One row: a variant and a seed, with the words of its two trainings."""

    name: str
    seed: int
    base: Tuple[str, ...]
    second: Tuple[str, ...]

    @property
    def key(self) -> str:
        return f'{self.name}/{self.seed}'


def plan(form: Form, seeds: int, ablation_seeds: int, epochs: int, rate: Optional[str] = None) -> List[Row]:
    """All rows, the headline's first; rows of one base beside each other where that does not break this order."""
    rows: List[Row] = []
    for name in [*HEADLINE, *(f'no_{switch}' for switch in SWITCHES)]:
        both, own = SWITCHES[name[3:]][1:] if name.startswith('no_') else ((), ())
        for seed in range(seeds if name in HEADLINE else ablation_seeds):
            common = (*form.common, '--max_epochs', str(epochs), '--evaluation.interval', str(epochs), '--seed', str(seed),
                      '--data.train', '${train_dataset}', *(('--optimizer.lr', rate) if rate else ()))
            second = {'stay400': (form.phase3,), 'stay400_head': (form.phase3, *FULL_HEAD, f'{HEAD}.decoder_channels', form.decoder)}.get(
                name, (form.stage1, *form.fine, f'{HEAD}.decoder_channels', form.decoder))
            rows.append(Row(name, seed, (form.phase3, *common, *both), (second[0], *common, *second[1:], *both, *own)))
    return sorted(rows, key=lambda row: (row.name not in HEADLINE, row.seed if row.name in HEADLINE else 0))


def fingerprint(row: Row) -> str:
    return hashlib.sha256(json.dumps([row.base, row.second]).encode()).hexdigest()[:12]


class OutOfTime(Exception):
    pass


class Bench:
    """Trains rows until the time is over."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.form = arguments, FORMS[arguments.form]
        self.deadline = time.monotonic() + arguments.slice if arguments.slice else math.inf
        self.work, self.data = Path(arguments.work), Path(arguments.data)
        self.trained = 0.0

    def call(self, words: Sequence[str], log: Path) -> None:
        """Run a command until the deadline; it is then asked to stop."""
        left = self.deadline - time.monotonic() - GRACE
        if left < self.arguments.last_start:
            raise OutOfTime
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, 'ab') as output:
            process = subprocess.Popen([sys.executable, *words], cwd=REPO, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            try:
                code = process.wait(None if math.isinf(left) else left)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                raise OutOfTime from None
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if code == STOPPED:
            raise OutOfTime
        if code:
            sys.exit(f'ablation: exit code {code} of\n  python {" ".join(words)}\n'
                     + '\n'.join(log.read_text(errors='replace').splitlines()[-15:]))

    def prepare(self) -> None:
        """The data set, if it is not there."""
        if not (self.data / 'nuscenes_infos_val.pkl').exists():
            self.call(['tools/create_synthetic_nuscenes.py', '--out', str(self.data), *self.form.data], self.work / 'data.log')
            self.call(['tools/create_data.py', 'nuscenes', '--root-path', str(self.data), '--out-dir', str(self.data), '--extra-tag',
                       'nuscenes', '--version', self.form.version], self.work / 'data.log')

    def train(self, words: Sequence[str], load_from: Optional[Path] = None) -> Path:
        """The run folder of a training, which is done unless it was before; its name is its words."""
        mark = hashlib.sha256(json.dumps([words, str(load_from)]).encode()).hexdigest()[:12]
        folder = self.work / f'run_{mark}'
        if (folder / 'finished').exists():
            return folder
        start = ['--load_from', str(load_from)] if load_from else []
        workers = min(8, max(0, (os.cpu_count() or 1) - 2))
        began = time.monotonic()
        try:
            self.call([self.arguments.script, words[0], '--run-dir', str(folder), *start, '--resume_from', 'auto', '--dataset_root',
                       f'{self.data}/', '--data.workers_per_gpu', str(workers), *words[1:]], self.work / f'run_{mark}.log')
        finally:
            self.trained += time.monotonic() - began
        (folder / 'finished').touch()
        return folder

    def row(self, row: Row) -> Dict[str, Any]:
        self.trained = 0.0
        base = self.train(row.base)
        folder = self.train(row.second, base / 'latest.pth')
        found = json.loads((folder / 'metrics.json').read_text())
        kept = {key: value for key, value in found.items() if key.endswith('iou@max') or key in ('object/nds', 'object/map')}
        return {'name': row.name, 'seed': row.seed, 'fingerprint': fingerprint(row), 'metrics': kept, 'seconds': round(self.trained, 1),
                'iterations': [iterations(base), iterations(folder)], 'device': self.arguments.device, 'date': str(datetime.date.today())}


def iterations(folder: Path) -> int:
    """Steps of a training, from its log: epochs times the last step of one."""
    last: Dict[int, int] = {}
    for path in folder.glob('*.log.json'):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record.get('mode') == 'train':
                last[record['epoch']] = max(last.get(record['epoch'], 0), record['iter'])
    return sum(last.values())


def read_rows(path: Path) -> Dict[str, Dict[str, Any]]:
    return {f'{row["name"]}/{row["seed"]}': row for row in json.loads(path.read_text())['rows']} if path.exists() else {}


def write_rows(path: Path, rows: Dict[str, Dict[str, Any]]) -> None:
    temporary = path.with_suffix('.tmp')
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(json.dumps({'rows': list(rows.values())}, indent=1) + '\n')
    os.replace(temporary, path)


# ---- report --------------------------------------------------------------------------------------------------------------

def report(rows: Dict[str, Dict[str, Any]], form: Form, command: str) -> str:
    """The page: headline over its seeds, parts off one at a time, both on the native and the 0.5 m grid."""
    by_name: Dict[str, List[Dict[str, Any]]] = {}
    for row in rows.values():
        by_name.setdefault(row['name'], []).append(row)
    some = next(iter(rows.values()), None)
    lines = ['# Do the stages help? What does each part give?', '', f'`{command}`', '']
    if some is None:
        return '\n'.join([*lines, 'No row is there yet.', ''])
    steps = sorted({tuple(row['iterations']) for row in rows.values()})
    devices = sorted({f'{row["device"]}, {row["date"]}' for row in rows.values()})
    lines += ['; '.join(devices), '',
              f'Reduced: {form.reduction}', '',
              'Each row: Phase 3\'s configuration, then, from its last weights, the one that is named, each '
              f'{" or ".join(f"{a} + {b}" for a, b in steps)} iterations with a schedule of its own. IoU is that of the best threshold per '
              'class on the held-out scenes; "0.5 m" is the reference grid, the only one on which 400 and 600 cells compare.', '',
              'These are short trainings of a small camera branch on rendered scenes: they tell which way a part pulls, not what a '
              'full training reaches.', '', '## Headline', '']
    lines += _table({name: by_name[name] for name in HEADLINE if name in by_name}, HEADLINE)
    both = [name for name in ('stay400', 'stage1') if name in by_name]
    if len(both) == 2:
        lines += ['', 'Stage 1 against staying at 400, by seed (0.5 m, mean IoU): ' + ', '.join(
            f'{one["metrics"]["map_ref/mean/iou@max"] - other["metrics"]["map_ref/mean/iou@max"]:+.4f}'
            for one in by_name['stage1'] for other in by_name['stay400'] if one['seed'] == other['seed']) + '.']
    parts = {f'no_{switch}': text for switch, (text, _, _) in SWITCHES.items() if f'no_{switch}' in by_name}
    if parts and 'stage1' in by_name:
        seeds = {row['seed'] for name in parts for row in by_name[name]}
        full = [row for row in by_name['stage1'] if row['seed'] in seeds]
        lines += ['', '## Stage 1 without one part', '',
                  f'Same seed(s) {", ".join(map(str, sorted(seeds)))} as the row "with all". Seeds alone spread the headline\'s mean IoU '
                  f'(0.5 m) by {_spread(by_name["stage1"])}; a difference below that is no finding.', '']
        lines += _table({'all': full, **{name: by_name[name] for name in parts}}, {'all': 'with all', **parts}, against='all')
    lines += ['', 'Seconds of training per row: ' + ', '.join(f'{key} {row["seconds"]:.0f}' for key, row in rows.items()) + '.', '']
    return '\n'.join(lines)


def _spread(rows: Sequence[Dict[str, Any]]) -> str:
    values = [row['metrics']['map_ref/mean/iou@max'] for row in rows]
    return f'{max(values) - min(values):.4f} (largest minus smallest of {len(values)})' if len(values) > 1 else 'an unknown amount (one seed)'


def _table(groups: Dict[str, List[Dict[str, Any]]], names: Dict[str, str], against: Optional[str] = None) -> List[str]:
    """Rows by name; a cell is the mean over seeds, with the half spread where there are several."""
    first = next(iter(groups.values()))[0]['metrics']
    classes = [key.split('/')[1] for key in first if key.startswith('map_ref/') and '/mean/' not in key]
    keys = ['map/mean/iou@max', 'map_ref/mean/iou@max', *(f'map_ref/{name}/iou@max' for name in classes)]
    keys += [f'map/{name}/iou@max' for name in classes] + ['object/nds']
    titles = ['mean, native', 'mean, 0.5 m', *(f'{name}, 0.5 m' for name in classes), *(f'{name}, native' for name in classes), 'NDS']
    extra = ['0.5 m mean against all'] if against else []
    lines = ['| | seeds | ' + ' | '.join([*titles, *extra]) + ' |', '|' + '---|' * (len(titles) + len(extra) + 2)]
    for name, rows in groups.items():
        cells = [_cell([row['metrics'].get(key, math.nan) for row in rows]) for key in keys]
        if against:
            mean = [statistics.mean(row['metrics']['map_ref/mean/iou@max'] for row in group) for group in (rows, groups[against])]
            cells.append('' if name == against else f'{mean[0] - mean[1]:+.4f}')
        lines.append(f'| {names[name]} | {len(rows)} | ' + ' | '.join(cells) + ' |')
    return lines


def _cell(values: Sequence[float]) -> str:
    scored = [value for value in values if not math.isnan(value)]
    if not scored:
        return '-'
    text = f'{statistics.mean(scored):.4f}'
    return f'{text} ± {(max(scored) - min(scored)) / 2:.4f}' if len(scored) > 1 else text


def device_name() -> str:
    import torch
    return f'{torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"}, torch {torch.__version__}'


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--form', choices=FORMS, default='h200')
    parser.add_argument('--slice', type=float, metavar='S', help='end after so many seconds (default: when all rows are there)')
    parser.add_argument('--seeds', type=int, default=3, help='of the headline rows (default 3)')
    parser.add_argument('--ablation-seeds', type=int, default=1, help='of the rows without one part (default 1)')
    parser.add_argument('--epochs', type=int, default=1, help='of each of the two trainings (default 1)')
    parser.add_argument('--lr', metavar='R', help='learning rate of all trainings, for example 5e-4 (default: the form\'s)')
    parser.add_argument('--only', nargs='+', metavar='ROW', help='names of rows, for example stage1 no_dice')
    parser.add_argument('--rows', type=Path, default=REPO / 'docs/benchmarks/ablation.json', help='where rows are kept')
    parser.add_argument('--out', type=Path, default=REPO / 'docs/benchmarks/ablation.md', help='the page')
    parser.add_argument('--work', default='runs/ablation', help='folder of the trainings')
    parser.add_argument('--data', default='data/ablation', help='folder of the data set; made if it is not there')
    parser.add_argument('--plan', action='store_true', help='show the rows and end')
    parser.add_argument('--report', action='store_true', help='write the page from the rows that are there and end')
    parser.add_argument('--script', default='tools/train.py', help=argparse.SUPPRESS)
    parser.add_argument('--last-start', type=float, default=LAST_START, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    form = FORMS[arguments.form]
    wanted = plan(form, arguments.seeds, arguments.ablation_seeds, arguments.epochs, arguments.lr)
    known = {row.name for row in wanted}
    if arguments.only and not set(arguments.only) <= known:
        parser.error(f'--only: there are the rows {", ".join(sorted(known))}')
    chosen = [row for row in wanted if not arguments.only or row.name in arguments.only]
    rows = read_rows(arguments.rows)
    left = [row for row in chosen if rows.get(row.key, {}).get('fingerprint') != fingerprint(row)]
    command = ' '.join(['python benchmarks/ablation.py', *(f'--{name} {value}' for name, value, usual in (
        ('form', arguments.form, 'h200'), ('seeds', arguments.seeds, 3), ('ablation-seeds', arguments.ablation_seeds, 1),
        ('epochs', arguments.epochs, 1), ('lr', arguments.lr, None)) if value != usual)])
    if arguments.plan:
        for row in chosen:
            print(f'{row.key:<24} {"to train" if row in left else "there"}')
        return 0
    code = 0
    if not arguments.report:
        arguments.device = device_name()
        bench = Bench(arguments)
        try:
            if left:
                bench.prepare()
            for row in tqdm(left, unit='row'):
                rows[row.key] = bench.row(row)
                write_rows(arguments.rows, rows)
        except OutOfTime:
            code = STOPPED
            missing = [row.key for row in left if rows.get(row.key, {}).get('fingerprint') != fingerprint(row)]
            print(f'the time is over; {len(missing)} row(s) are left: {", ".join(missing)}. The same command goes on')
    order = {row.key: number for number, row in enumerate(wanted)}
    current = {row.key: rows[row.key] for row in sorted(wanted, key=lambda row: order[row.key])
               if rows.get(row.key, {}).get('fingerprint') == fingerprint(row)}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(report(current, form, command))
    print(f'{len(current)} of {len(wanted)} rows are in {arguments.out}')
    return code


if __name__ == '__main__':
    sys.exit(main())
