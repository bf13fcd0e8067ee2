#!/usr/bin/env python3
"""Does the chain of stages help, and what does each part of Stage 1 give? Trained on the synthetic data set, in reduced form.

    python benchmarks/ablation.py --jobs 14 --epochs fit --slice 540   # all rows side by side on all visible GPUs, as long as fits
    python benchmarks/ablation.py --jobs 14 --epochs 3 --slice 540     # again and again until it says that all rows are there
    python benchmarks/ablation.py --jobs 14 --epochs 3 --plan          # what would be trained, and how long that would take
    python benchmarks/ablation.py --only stay400 stage1 --seeds 3      # one after the other, these rows only
    python benchmarks/ablation.py --epochs 3 --report                  # only write the page anew
    python benchmarks/ablation.py --form tiny --jobs 2 --rows runs/a.json --out runs/a.md --work runs/a --data runs/a/data   # CPU, minutes

Every row is two trainings of the same number of iterations: a base (Phase 3's configuration) and, from its weights, a second one:
Phase 3's again ("stay"), or Stage 1's, or Stage 1's without one part. Rows of a seed share the base unless the part is in it, too.
--jobs trainings run at a time, spread over the GPUs; they share cores and GPUs, which a reduced model alone leaves idle most of the time.
--epochs fit tries all second trainings side by side for seconds, measures their pace, and takes as many epochs as --slice has room for.

Rows are kept in --rows as they end and not trained again. When --slice seconds are over, the trainings at work write checkpoints and end; the
next call goes on there if --work is still there, and trains them anew if not. If the headline's rows are late, others make room, of the
headline itself the last seeds. A training that fails twice is said in its row, and the others go on. The page is written with every row.
On a machine whose files are lost between calls bring --rows back after each and have it in place before the next. Heads, losses and
grids are those of the configurations; FORMS below says what is reduced.

Exit codes: 0 all rows are there; 1 some trainings failed; 75 the time was over, the same command goes on.
"""
from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / 'benchmarks'))

import trainings as side_by_side  # noqa: E402
from ablation_page import report  # noqa: E402
from trainings import START, STOPPED, OutOfTime, Pool, Training, interruptible, tail  # noqa: E402

HEAD = '--model.heads.map'
FIELD = (0.35, 0.40, 0.45, 0.50, 0.55, 0.60, 0.65)  # mmdet3d_ext.metrics.bev_iou.THRESHOLDS, without importing it
# More than these: a head without dice gives thin classes lower probabilities, and the rest says what it tells apart.
THRESHOLDS = ', '.join(f'{number / 20:g}' for number in range(1, 20))
TRIAL_STEPS, TRIAL_SECONDS, TRIAL_START = 3, 10.0, 150.0  # of the trial: steps before the clock starts; its seconds; most before it
REST = 1000  # turn of the rows that are not the headline's, whose turn is their seed
SHARING = 2.5  # assumed by --plan: what several trainings on one GPU do together, against one that waits for its launches
FULL_HEAD = (f'{HEAD}.deep_supervision', 'true', f'{HEAD}.use_dice_loss', 'true', f'{HEAD}.class_weights',
             '{stop_line: 4.0, divider: 3.0}')


@dataclass(frozen=True)
class Form:
    """A size of the experiment. ``common``: words of every training; ``fine``: of those at the finer grid, beside their file;
    ``decoder``: of the map head's four layers; ``frames``: key frames for training and for evaluation; ``step_ms``: assumed by --plan
    for a step at 400 and at 600 alone on a GPU."""

    phase3: str
    stage1: str
    common: Tuple[str, ...]
    fine: Tuple[str, ...]
    decoder: str
    data: Tuple[str, ...]
    version: str
    frames: Tuple[int, int]
    step_ms: Tuple[float, float]
    reduction: str

    @property
    def epoch(self) -> int:
        """Steps of one; 2 samples each."""
        return math.ceil(self.frames[0] / 2)


FORMS = {
    'h200': Form(
        'configs/nuscenes/multitask/phase3_400.yaml', 'configs/nuscenes/multitask/stage1_600.yaml',
        ('--image_size', '[128, 352]', '--augment2d.resize', '[[0.70, 0.80], [0.74, 0.74]]',
         '--model.encoders.camera.backbone', '{type: ResNet, depth: 18, num_stages: 4, out_indices: [1, 2, 3], frozen_stages: -1, '
         'norm_cfg: {type: BN, requires_grad: true}, norm_eval: false, style: pytorch}',
         '--model.encoders.camera.neck.in_channels', '[128, 256, 512]', '--optimizer.paramwise_cfg', 'null', '--sweeps_num', '1',
         # A quarter of the widths from the fuser on: at full width a Stage 1 step is bound by the head's arithmetic (310 ms, memory.md).
         '--model.fuser.out_channels', '128', '--model.decoder.backbone.in_channels', '128',
         '--model.decoder.backbone.out_channels', '[64, 128]', '--model.decoder.neck.in_channels', '[64, 128]',
         '--model.decoder.neck.out_channels', '[64, 64]', '--model.heads.object.in_channels', '128', f'{HEAD}.in_channels', '128',
         f'{HEAD}.aspp_channels', '64', f'{HEAD}.decoder_channels', '[64, 32]',
         '--data.samples_per_gpu', '2', '--auto_scale_lr.base_batch_size', '2', '--optimizer.lr', '1.0e-3',
         # The scaler's search from 65,536 would skip the first ten of so few steps.
         '--fp16.loss_scale.init_scale', '1024',
         '--lr_config.warmup_iters', '50', '--log_config', '{interval: 10, hooks: [{type: TextLoggerHook}]}'),
        (), '[64, 64, 32, 32]',
        ('--preset', 'demo', '--version', 'v1.0-trainval', '--scenes-train', '24', '--scenes-val', '8', '--samples-per-scene', '10'),
        'v1.0-trainval', (240, 80), (110.0, 160.0),
        'ResNet-18 without pretraining in the place of Swin-T; images of 128 x 352 of a synthetic set of 240 + 80 key frames from 24 + 8 '
        'scenes (480 x 270 images, 540 lidar columns), one sweep; fuser, decoder and map head of the same layers with a quarter (the '
        'fuser half) of the channels; one learning rate (1e-3, cosine, unless --lr says otherwise) and 2 samples per step in every training, '
        'one GPU each. LiDAR encoder, view transform, the kinds of both heads, losses and all grids are those of the configurations.'),
    'tiny': Form(
        'configs/synthetic/multitask_tiny.yaml', 'configs/synthetic/multitask_tiny.yaml',
        ('--lr_config.warmup_iters', '2', '--auto_scale_lr.base_batch_size', '2', '--data.samples_per_gpu', '2',
         '--augment2d.resize', '[[0.80, 0.90], [0.85, 0.85]]', '--log_config', '{interval: 1, hooks: [{type: TextLoggerHook}]}'),
        ('--bev.map.step', '0.4', '--bev.labels.cells', '200', *FULL_HEAD), '[32, 32, 32, 32]',
        ('--preset', 'tiny'), 'v1.0-mini', (6, 3), (2500.0, 4000.0),
        'the tiny model of "make demo" on nine key frames: only for trying this script out.'),
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
            common = (*form.common, '--max_epochs', str(epochs), '--evaluation.interval', str(epochs), '--checkpoint_config.interval',
                      str(epochs), '--seed', str(seed), '--data.train', '${train_dataset}', '--evaluation.thresholds', f'[{THRESHOLDS}]',
                      *(('--optimizer.lr', rate) if rate else ()))
            second = {'stay400': (form.phase3,), 'stay400_head': (form.phase3, *FULL_HEAD, f'{HEAD}.decoder_channels', form.decoder)}.get(
                name, (form.stage1, *form.fine, f'{HEAD}.decoder_channels', form.decoder))
            rows.append(Row(name, seed, (form.phase3, *common, *both), (second[0], *common, *second[1:], *both, *own)))
    return sorted(rows, key=lambda row: (row.name not in HEADLINE, row.seed if row.name in HEADLINE else 0))


def fingerprint(row: Row) -> str:
    return hashlib.sha256(json.dumps([row.base, row.second]).encode()).hexdigest()[:12]


def as_trainings(rows: Sequence[Row], steps: int) -> Dict[Tuple[str, ...], Training]:
    """The trainings that rows need, by words, those of the headline first; rows with the same base share it."""
    found: Dict[Tuple[str, ...], Training] = {}
    for row in rows:
        turn = row.seed if row.name in HEADLINE else REST + row.seed
        base = found.setdefault(('base', *row.base), Training(f'base of {row.key}', row.base, steps, validate=False, turn=turn))
        base.turn = min(base.turn, turn)
        found[row.second] = Training(row.key, row.second, steps, base, turn=turn)
    return found


def result(row: Row, training: Training, arguments: argparse.Namespace) -> Dict[str, Any]:
    """The row's record for --rows."""
    record: Dict[str, Any] = {'name': row.name, 'seed': row.seed, 'fingerprint': fingerprint(row), 'device': arguments.device,
                              'date': str(datetime.date.today())}
    if training.state == 'failed':
        return {**record, 'error': training.why}
    work = Path(arguments.work)
    folders = [training.after.folder(work), training.folder(work)]
    try:
        metrics = scores(json.loads((folders[1] / 'metrics.json').read_text()))
    except (OSError, ValueError, KeyError) as error:  # the others are not to end for it
        return {**record, 'error': f'its metrics cannot be read: {error!r}'}
    logs = [side_by_side.train_records(folder) for folder in folders]
    return {**record, 'metrics': metrics, 'seconds': [round(side_by_side.seconds_spent(folder), 1) for folder in folders],
            'iterations': [side_by_side.iterations(log) for log in logs], 'side_by_side': arguments.jobs,
            'step_ms': [round(1000 * side_by_side.seconds_per_step(log), 1) for log in logs],
            'loss': [[round(log[0]['loss'], 4), round(log[-1]['loss'], 4)] if log and 'loss' in log[0] else None for log in logs]}


def scores(metrics: Dict[str, float]) -> Dict[str, float]:
    """Of a run's ``metrics.json``: per grid and class ``iou@max`` over the field's thresholds and ``iou@any`` over all that were
    evaluated, their means over classes that occur, and the detection scores."""
    kept = {key: metrics[key] for key in ('object/nds', 'object/map') if key in metrics}
    for grid in ('map', 'map_ref'):
        columns: Dict[str, List[float]] = {'max': [], 'any': []}
        for name in dict.fromkeys(key.split('/')[1] for key in metrics if key.startswith(f'{grid}/') and '/mean/' not in key):
            found = {'max': max(metrics[f'{grid}/{name}/iou@{threshold:.2f}'] for threshold in FIELD),
                     'any': metrics[f'{grid}/{name}/iou@max']}
            for column, value in found.items():
                kept[f'{grid}/{name}/iou@{column}'] = value
                if not math.isnan(value):
                    columns[column].append(value)
        for column, values in columns.items():
            kept[f'{grid}/mean/iou@{column}'] = statistics.mean(values) if values else math.nan
    return kept


# ---- how long? -------------------------------------------------------------------------------------------------------

def seconds_of(trainings: Sequence[Training], steps: int, jobs: int, base_step: float, second_step: float, evaluation: float,
               start: float = START) -> float:
    """Wall time of all trainings, ``jobs`` at a time, if a step takes so many seconds beside the others."""
    bases = sum(one.after is None for one in trainings)
    return (math.ceil(bases / jobs) * (start + steps * base_step)
            + math.ceil((len(trainings) - bases) / jobs) * (start + steps * second_step + evaluation))


def assumed_steps(form: Form, trainings: Sequence[Training], jobs: int, gpus: int) -> List[float]:
    """Seconds per step of bases and of second trainings beside each other, as --plan assumes them."""
    bases = sum(one.after is None for one in trainings)
    return [max(1.0, min(jobs, max(1, count)) / max(1, gpus) / SHARING) * ms / 1000
            for count, ms in zip((bases, len(trainings) - bases), form.step_ms)]


def evaluation_seconds(form: Form, step: float) -> float:
    """Guess: a key frame costs half a training step, the devkit 15 s."""
    return 15.0 + form.frames[1] * step / 2


def fit(form: Form, wanted: Sequence[Row], arguments: argparse.Namespace, deadline: float) -> int:
    """Epochs for which the time until ``deadline`` suffices, from a trial of the second trainings side by side.

    Raises:
        RuntimeError: all trials failed; with the last words of one.
    """
    everything = list(as_trainings(wanted, form.epoch).values())
    bases = [one for one in everything if one.after is None]
    endless = ('--max_epochs', '1000', '--evaluation.interval', '1000', '--checkpoint_config.interval', '1000', '--log_config.interval', '1')
    trials = [Training(f'trial of {one.label}', (*one.words, *endless), 0, validate=False) for one in everything if one.after is not None]
    trials = trials[:arguments.jobs]
    pool = make_pool(arguments, deadline, Path(arguments.work) / 'trial')
    pool.work.mkdir(parents=True, exist_ok=True)

    def steps() -> Dict[Training, int]:
        for one, run in list(pool.runs.items()):
            if run.process.poll() is not None:
                text = f'{one.label} failed with exit code {run.process.returncode}\n{tail(str(one.log(pool.work)))}'
                del pool.runs[one]
                if not pool.runs:
                    raise RuntimeError(text)
                print(text, file=sys.stderr, flush=True)
        return {one: len(side_by_side.train_records(one.folder(pool.work))) for one in pool.runs}

    def pace(seconds: float) -> Dict[Training, float]:
        """Seconds per step, measured at the same time in all."""
        before, began = steps(), time.monotonic()
        while True:
            time.sleep(seconds)
            after, past = steps(), time.monotonic() - began
            if all(after[one] > before.get(one, 0) + 1 for one in after) or past > 5 * seconds:
                return {one: past / max(1, after[one] - before.get(one, 0)) for one in after}

    def end(these: Sequence[Training]) -> None:
        pool.kill({one: pool.runs.pop(one) for one in these})

    began = time.monotonic()
    try:
        for one in trials:
            pool.start(one, len(trials))
        while min(steps().values()) < arguments.trial[0] and time.monotonic() - began < TRIAL_START:
            if pool.left < 0:
                raise OutOfTime
            time.sleep(0.2)
        start = time.monotonic() - began
        begun = [one for one, count in steps().items() if count >= arguments.trial[0]]
        end([one for one in pool.runs if begun and one not in begun])  # one that hangs is not to stand for the others
        loaded = pace(arguments.trial[1])
        coarse = [one for one in pool.runs if one.words[0] == form.phase3][:len(bases)] or list(pool.runs)[:1]
        end([one for one in pool.runs if one not in coarse])
        time.sleep(1.0)
        alone = pace(arguments.trial[1] / 2)
    finally:
        end(list(pool.runs))
        shutil.rmtree(pool.work, ignore_errors=True)
    base_step, second_step = statistics.mean(alone.values()), max(loaded.values())
    evaluation = evaluation_seconds(form, second_step)

    def takes(epochs: int) -> float:
        return seconds_of(everything, epochs * form.epoch, arguments.jobs, base_step, second_step, evaluation, start)

    room = 0.92 * (deadline - side_by_side.END - time.monotonic())  # the last evaluations have until the deadline, steps do not
    most = next((epochs for epochs in range(60, 1, -1) if takes(epochs) < min(room, pool.left + evaluation)), 1)
    print(f'trial, {len(loaded)} side by side: {start:.0f} s to step {arguments.trial[0]}; a step takes {1000 * min(loaded.values()):.0f} to '
          f'{1000 * second_step:.0f} ms, {1000 * base_step:.0f} ms in {len(coarse)} trainings at 400. {most} epoch(s) of {form.epoch} steps '
          f'should take {takes(most):.0f} s of {deadline - time.monotonic():.0f} s that are left', flush=True)
    return most


def make_pool(arguments: argparse.Namespace, deadline: float, work: Path) -> Pool:
    return Pool(work, ['--dataset_root', f'{arguments.data}/'], arguments.jobs, arguments.cores, deadline, arguments.script,
                arguments.last_start)


# ---- rows ------------------------------------------------------------------------------------------------------------

class Rows:
    """The file of rows, and the epochs that were fitted for a set of them."""

    def __init__(self, path: Path):
        self.path = path
        content = json.loads(path.read_text()) if path.exists() else {}
        self.found = {f'{row["name"]}/{row["seed"]}': row for row in content.get('rows', [])}
        self.fitted: Dict[str, int] = content.get('fitted', {})

    def write(self) -> None:
        temporary = self.path.with_suffix('.tmp')
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({'fitted': self.fitted, 'rows': list(self.found.values())}, indent=1) + '\n')
        os.replace(temporary, self.path)

    def current(self, row: Row) -> Optional[Dict[str, Any]]:
        """What is known of a row as it would be trained now: its record, perhaps with an ``error``."""
        found = self.found.get(row.key)
        return found if found and found['fingerprint'] == fingerprint(row) else None

    def there(self, row: Row) -> bool:
        return 'metrics' in (self.current(row) or {})


# ---- program ---------------------------------------------------------------------------------------------------------

def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    def epochs(text: str) -> Union[int, str]:
        if text == 'fit' or text.isdigit() and int(text) > 0:
            return text if text == 'fit' else int(text)
        raise argparse.ArgumentTypeError(f'expected a whole number of at least 1, or fit, got {text!r}')

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--form', choices=FORMS, default='h200')
    parser.add_argument('--jobs', type=int, default=1, metavar='N', help='trainings at a time (default 1)')
    parser.add_argument('--cores', type=int, default=side_by_side.usable_cores(), help='of the CPU, for rendering and loading (default: all)')
    parser.add_argument('--slice', type=float, metavar='S', help='end after so many seconds (default: when all rows are there)')
    parser.add_argument('--seeds', type=int, default=3, help='of the headline rows (default 3)')
    parser.add_argument('--ablation-seeds', type=int, default=1, help='of the rows without one part (default 1)')
    parser.add_argument('--epochs', type=epochs, default=1, help='of each of the two trainings (default 1), or "fit": as many as --slice has '
                        'room for')
    parser.add_argument('--lr', metavar='R', help='learning rate of all trainings, for example 5e-4 (default: the form\'s)')
    parser.add_argument('--only', nargs='+', metavar='ROW', help='names of rows, for example stage1 no_dice')
    parser.add_argument('--rows', type=Path, default=REPO / 'docs/benchmarks/ablation.json', help='where rows are kept')
    parser.add_argument('--out', type=Path, default=REPO / 'docs/benchmarks/ablation.md', help='the page')
    parser.add_argument('--work', default='runs/ablation', help='folder of the trainings')
    parser.add_argument('--data', default='data/ablation', help='folder of the data set; made if it is not there')
    parser.add_argument('--plan', action='store_true', help='show the rows and an estimate, and end')
    parser.add_argument('--gpus', type=int, metavar='N', help='for the estimate of --plan (default: those of this machine)')
    parser.add_argument('--report', action='store_true', help='write the page from the rows that are there and end')
    parser.add_argument('--script', default='tools/train.py', help=argparse.SUPPRESS)
    parser.add_argument('--last-start', type=float, help=argparse.SUPPRESS)
    parser.add_argument('--trial', type=float, nargs=2, default=(TRIAL_STEPS, TRIAL_SECONDS), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    known = [*HEADLINE, *(f'no_{switch}' for switch in SWITCHES)]
    if arguments.only and not set(arguments.only) <= set(known):
        parser.error(f'--only: there are the rows {", ".join(known)}')
    if arguments.epochs == 'fit' and not arguments.slice and not (arguments.plan or arguments.report):
        parser.error('--epochs fit: say with --slice how many seconds there are')
    if arguments.jobs < 1 or arguments.cores < 1 or arguments.seeds < 1 or arguments.ablation_seeds < 0:
        parser.error('--jobs, --cores and --seeds must be at least 1, --ablation-seeds at least 0')
    for name in ('rows', 'out'):
        if getattr(arguments, name).is_dir():
            parser.error(f'--{name} {getattr(arguments, name)} is a folder: name the file in it')
    arguments.work, arguments.data = (Path(path).resolve() for path in (arguments.work, arguments.data))  # trainings run in the checkout
    return arguments


def main(argv: Optional[List[str]] = None) -> int:
    arguments = parse(argv)
    form, rows = FORMS[arguments.form], Rows(arguments.rows)
    deadline = time.monotonic() + arguments.slice if arguments.slice else math.inf

    def planned(epochs: int) -> List[Row]:
        return [row for row in plan(form, arguments.seeds, arguments.ablation_seeds, epochs, arguments.lr)
                if not arguments.only or row.name in arguments.only]

    # Not of --only: all rows are to have the same number of epochs.
    everything = plan(form, arguments.seeds, arguments.ablation_seeds, 0, arguments.lr)
    set_of_rows = hashlib.sha256(''.join(map(fingerprint, everything)).encode()).hexdigest()[:12]
    epochs, code = arguments.epochs, 0
    if epochs == 'fit':
        epochs = rows.fitted.get(set_of_rows)
    if arguments.plan:
        return show_plan(planned(epochs or 1), form, arguments, epochs or 1, rows)
    if not arguments.report:
        arguments.device = side_by_side.device_name()
        try:
            with interruptible():  # what it started is stopped, too
                data_seconds = time.monotonic()
                side_by_side.make_data(Path(arguments.data), form.data, form.version, arguments.cores, Path(arguments.work) / 'data.log',
                                       None if math.isinf(deadline) else deadline - time.monotonic())
                print(f'the data set is there after {time.monotonic() - data_seconds:.0f} s', flush=True)
                if epochs is None:
                    epochs = rows.fitted[set_of_rows] = fit(form, planned(1), arguments, deadline)
                    rows.write()
                train(planned(epochs), form, arguments, epochs, rows, deadline)
        except (OutOfTime, KeyboardInterrupt):
            code = STOPPED
        except RuntimeError as error:
            print(f'ablation: {error}', file=sys.stderr)
            return 1
    epochs = epochs or 1
    wanted = planned(epochs)
    missing = [row.key for row in wanted if not rows.there(row)]
    failed = [row.key for row in wanted if 'error' in (rows.current(row) or {})]
    if code == STOPPED:
        print(f'stopped; {len(missing)} row(s) are left: {", ".join(missing)}. The same command goes on')
    write_page(form, arguments, epochs, rows)
    print(f'{len(wanted) - len(missing)} of {len(wanted)} rows are in {arguments.out}')
    return code or (1 if failed and not arguments.report else 0)


def write_page(form: Form, arguments: argparse.Namespace, epochs: int, rows: Rows) -> None:
    """The page from the rows that are there."""
    command = ' '.join(['python benchmarks/ablation.py', *(f'--{name} {value}' for name, value, usual in (
        ('form', arguments.form, 'h200'), ('jobs', arguments.jobs, 1), ('seeds', arguments.seeds, 3),
        ('ablation-seeds', arguments.ablation_seeds, 1), ('epochs', epochs, 1), ('lr', arguments.lr, None)) if value != usual)])
    current = [rows.current(row) for row in plan(form, arguments.seeds, arguments.ablation_seeds, epochs, arguments.lr)]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(report([row for row in current if row], HEADLINE, {name: text for name, (text, _, _) in SWITCHES.items()},
                                    form.reduction, command))


def train(wanted: Sequence[Row], form: Form, arguments: argparse.Namespace, epochs: int, rows: Rows, deadline: float) -> None:
    """Train what is not there yet; every row is written as it ends, and the page.

    Raises:
        OutOfTime: the time was over before.
    """
    left = [row for row in wanted if not rows.there(row)]
    trainings = as_trainings(left, epochs * form.epoch)
    row_of = {trainings[row.second]: row for row in left}

    def ended(training: Training) -> None:
        row = row_of.get(training)
        if row is not None:
            rows.found[row.key] = result(row, training, arguments)
            rows.write()
            write_page(form, arguments, epochs, rows)

    make_pool(arguments, deadline, Path(arguments.work)).run(list(trainings.values()), ended)


def show_plan(wanted: Sequence[Row], form: Form, arguments: argparse.Namespace, epochs: int, rows: Rows) -> int:
    left = [row for row in wanted if not rows.there(row)]
    for row in wanted:
        print(f'{row.key:<24} {"to train" if row in left else "there"}')
    trainings = list(as_trainings(left, epochs * form.epoch).values())
    gpus = arguments.gpus or max(1, len(side_by_side.visible_gpus()))
    base, second = assumed_steps(form, trainings, arguments.jobs, gpus)
    total = seconds_of(trainings, epochs * form.epoch, arguments.jobs, base, second, evaluation_seconds(form, second)) if left else 0.0
    print(f'{len(trainings)} trainings of {epochs} x {form.epoch} steps, {arguments.jobs} at a time on {gpus} GPU(s); '
          f'{sum(form.frames)} key frames to render first if they are not there.\n'
          f'Assumed: {form.step_ms[0]:.0f} ms per step at 400 and {form.step_ms[1]:.0f} at 600 alone, {SHARING} times as many together; so '
          f'{1000 * base:.0f} and {1000 * second:.0f} ms beside the others, {START:.0f} s per start, '
          f'{evaluation_seconds(form, second):.0f} s per evaluation: about {total:.0f} s in all. "--epochs fit" measures instead.')
    return 0


if __name__ == '__main__':
    sys.exit(main())
