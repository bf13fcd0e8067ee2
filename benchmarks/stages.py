#!/usr/bin/env python3
"""Train Phase 3 (400), Stage 1 (600) and Stage 2 (800) at full size for some iterations each, each from the one before.

    python benchmarks/stages.py                                # 50 full-size key frames are rendered into data/stages first
    python benchmarks/stages.py --data data/full --slice 200   # that set, if it is there; 200 seconds at most
    python benchmarks/stages.py --form tiny --iterations 4 --work runs/stages --data runs/stages/data --out runs/stages   # CPU, minutes

Through tools/train.py with the shipped configurations; what differs is said on the page. Writes stages.md and stages.json into --out, also
where a stage fails or the time is over: with what there is. The same command goes on if --work is still there.

Exit codes: 0 all three ran; 1 one failed; 75 the time was over.
"""
from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / 'benchmarks'))

import trainings as side_by_side  # noqa: E402
from trainings import STOPPED, OutOfTime, Pool, Training, interruptible  # noqa: E402

FULL = 'configs/nuscenes/multitask'
TINY = 'configs/synthetic/multitask_tiny.yaml'
FINE_HEAD = ('--model.heads.map.decoder_channels', '[32, 32, 32, 32]', '--model.heads.map.deep_supervision', 'true')
EDGE = 10  # losses are averaged over so many steps at the start and at the end


@dataclass(frozen=True)
class Form:
    """``stages``: name, configuration, samples per step, overrides; ``data``, ``version``: of the generated set."""

    stages: Tuple[Tuple[str, str, int, Tuple[str, ...]], ...]
    data: Tuple[str, ...]
    version: str


FORMS = {
    'full': Form((('phase3_400', f'{FULL}/phase3_400.yaml', 2, ()), ('stage1_600', f'{FULL}/stage1_600.yaml', 1, ()),
                  ('stage2_800', f'{FULL}/stage2_800.yaml', 1, ())),
                 # 50 frames are 100 steps in whole epochs with one sample and with two.
                 ('--preset', 'mini', '--scenes-train', '5', '--scenes-val', '1', '--samples-per-scene', '10', '--sweeps', '5',
                  '--radar-sweeps', '0'), 'v1.0-mini'),
    'tiny': Form((('phase3', TINY, 2, ()), ('stage1', TINY, 1, ('--bev.map.step', '0.4', '--bev.labels.cells', '200', *FINE_HEAD)),
                  ('stage2', TINY, 1, ('--bev.map.step', '0.32', '--bev.labels.cells', '250', *FINE_HEAD))),
                 ('--preset', 'tiny'), 'v1.0-mini'),
}


def key_frames(data: Path) -> int:
    """Of the training split of a synthetic data set.

    Raises:
        RuntimeError: if the folder holds none.
    """
    marker = data / 'synthetic_nuscenes.json'
    if not marker.exists():
        raise RuntimeError(f'{marker} is missing: --data must be a data set of tools/create_synthetic_nuscenes.py, or a folder that is not '
                           'there yet; else give --frames, the number of its training key frames')
    options = json.loads(marker.read_text())['summary']['options']
    return options['scenes_train'] * options['samples_per_scene']


def plan(form: Form, frames: int, iterations: int) -> List[Training]:
    """The three trainings, each after the one before, of at least so many steps in whole epochs."""
    found: List[Training] = []
    for name, config, samples, words in form.stages:
        epoch = math.ceil(frames / samples)
        epochs = math.ceil(iterations / epoch)
        found.append(Training(name, (
            config, *words, '--data.samples_per_gpu', str(samples), '--max_epochs', str(epochs), '--data.train', '${train_dataset}',
            '--lr_config.warmup_iters', str(min(20, iterations // 2)), '--checkpoint_config.interval', str(epochs),
            '--log_config', '{interval: 1, hooks: [{type: TextLoggerHook}]}'), epochs * epoch, found[-1] if found else None, validate=False))
    return found


def load_report(training: Training, work: Path) -> Dict[str, Any]:
    """What the run's log says about the weights that it started from: ``text`` (without folders), ``new``, tensor counts."""
    if training.after is None:
        return {}
    folder = training.after.folder(work)
    lines = [line for path in sorted(training.folder(work).glob('*.log')) for line in path.read_text(errors='replace').splitlines()]
    start = next((number for number, line in enumerate(lines) if f'of {folder}/latest.pth: ' in line), None)
    if start is None:
        return {}
    body = [lines[start].split(' - ', 3)[-1]]
    for line in lines[start + 1:]:
        if not line.startswith('  '):
            break
        body.append(line)
    counts = re.search(r'(\d+) tensors matched, (\d+) missing, (\d+) of another shape, (\d+) unexpected', body[0])
    own = [line.split(' - ', 3)[-1] for line in lines if ' starts from the file\'s ' in line]
    text = '\n'.join([*own, *body]).replace(f'{folder}/latest.pth', f'{training.after.label}\'s latest.pth')
    return {'text': text, 'matched': int(counts[1]), 'missing': int(counts[2]), 'reshaped': int(counts[3]),
            'new': next((line.split(': ', 1)[1] for line in body if line.startswith('  new, ')), ''),
            'branch': [line.split(' starts from', 1)[0] for line in own]}


def measure(training: Training, samples: int, work: Path) -> Dict[str, Any]:
    """What a stage's log holds."""
    folder = training.folder(work)
    records = side_by_side.train_records(folder)
    row: Dict[str, Any] = {'name': training.label, 'config': training.words[0], 'samples': samples, 'state': training.state,
                           'iterations': side_by_side.iterations(records)}
    if training.why:
        row['error'] = training.why
    if not records:
        return row
    losses = [record['loss'] for record in records]
    edge = min(EDGE, max(1, len(losses) // 2))
    steady = records[EDGE:] or records
    text = '\n'.join(path.read_text(errors='replace') for path in folder.glob('*.log'))
    row.update(first=statistics.mean(losses[:edge]), last=statistics.mean(losses[-edge:]), finite=all(map(math.isfinite, losses)),
               scaler_skips=len(re.findall('loss scale now', text)), step_s=statistics.median(record['time'] for record in steady),
               data_s=statistics.median(record['data_time'] for record in steady),
               memory_mib=max((record['memory'] for record in records if 'memory' in record), default=None),
               seconds=side_by_side.seconds_spent(folder), loaded=load_report(training, work))
    return row


def report(content: Dict[str, Any]) -> str:
    """The page."""
    lines = [f'# Three stages {content["size"]}, each from the one before', '', f'`{content["command"]}`', '',
             f'{content["device"]}, {content["date"]}; {content["frames"]} key frames', '',
             'The configurations through `tools/train.py`, with: every frame once per epoch, a schedule of so few steps with at most 20 of '
             'warm-up, no evaluation, initial weights instead of a trained detector. Samples: per step. Loss: mean of the first and of the '
             f'last {EDGE} steps (of half of them if there are fewer than {2 * EDGE}). Step: median, data included; the loader\'s waiting is a '
             'part of it. Memory: the allocator\'s peak. Skipped: steps that the loss scale\'s search did not take. Tensors: those of the '
             'model by the load report.', '',
             '| stage | samples | iterations | loss | finite | skipped | step, s | data, s | peak MiB | loaded, new, reshaped | wall, s |',
             '|' + '---|' * 11]
    for row in content['stages']:
        if 'first' not in row:
            lines.append(f'| {row["name"]} | {row["samples"]} | {row["iterations"]} |' + ' - |' * 8)
            continue
        loaded = row['loaded']
        tensors = f'{loaded["matched"]}, {loaded["missing"]}, {loaded["reshaped"]}' if loaded else 'none'
        memory = '-' if row['memory_mib'] is None else f'{row["memory_mib"]:,}'
        lines.append(f'| {row["name"]} | {row["samples"]} | {row["iterations"]} | {row["first"]:.3f} -> {row["last"]:.3f} | '
                     f'{"yes" if row["finite"] else "**no**"} | {row["scaler_skips"]} | {row["step_s"]:.3f} | {row["data_s"]:.3f} | {memory} | '
                     f'{tensors} | {row["seconds"]:.0f} |')
    failed = [row for row in content['stages'] if row['state'] != 'done']
    if failed:
        lines += ['', '## Not finished', '', *(f'- {row["name"]}: {row.get("error", row["state"])}' for row in failed)]
    lines += ['', '## What each stage was started from', '']
    for row in content['stages']:
        if row.get('loaded'):
            lines += [f'{row["name"]}:', '', '```', row['loaded']['text'], '```', '']
    return '\n'.join(lines)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--form', choices=FORMS, default='full')
    parser.add_argument('--iterations', type=int, default=100, help='at least, of each stage (default 100)')
    parser.add_argument('--data', type=Path, default=Path('data/stages'), help='synthetic data set; made if it is not there')
    parser.add_argument('--frames', type=int, help='key frames for training, of a data set that is not synthetic')
    parser.add_argument('--work', type=Path, default=Path('runs/stages'), help='folder of the runs')
    parser.add_argument('--out', type=Path, default=REPO / 'docs/benchmarks', help='folder of stages.md and stages.json')
    parser.add_argument('--cores', type=int, default=side_by_side.usable_cores(), help='for rendering and loading (default: all)')
    parser.add_argument('--slice', type=float, metavar='S', help='end after so many seconds')
    parser.add_argument('--script', default='tools/train.py', help=argparse.SUPPRESS)
    parser.add_argument('--last-start', type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.work, arguments.data = arguments.work.resolve(), arguments.data.resolve()  # trainings run in the checkout
    form = FORMS[arguments.form]
    deadline = time.monotonic() + arguments.slice if arguments.slice else math.inf
    trainings: List[Training] = []
    frames, code = arguments.frames, 0
    with interruptible():  # what it started is stopped, too
        try:
            side_by_side.make_data(arguments.data, form.data, form.version, arguments.cores, arguments.work / 'data.log',
                                   None if math.isinf(deadline) else deadline - time.monotonic())
            frames = frames or key_frames(arguments.data)
            trainings = plan(form, frames, arguments.iterations)
            # Stages follow each other, so the cores are one training's at a time.
            Pool(arguments.work, ['--dataset_root', f'{arguments.data}/'], 1, arguments.cores, deadline, arguments.script,
                 arguments.last_start).run(trainings)
        except (OutOfTime, KeyboardInterrupt):
            code = STOPPED
        except RuntimeError as error:
            print(f'stages: {error}', file=sys.stderr)
            return 1
    rows = [measure(one, samples, arguments.work) for one, (_, _, samples, _) in zip(trainings, form.stages)]
    command = ' '.join(['python benchmarks/stages.py', *([f'--form {arguments.form}'] if arguments.form != 'full' else []),
                        *([f'--iterations {arguments.iterations}'] if arguments.iterations != 100 else [])])
    content = dict(command=command, size='at full size' if arguments.form == 'full' else 'of the tiny form', frames=frames, stages=rows,
                   device=side_by_side.device_name(), date=str(datetime.date.today()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / 'stages.json').write_text(json.dumps(content, indent=1) + '\n')
    (arguments.out / 'stages.md').write_text(report(content))
    print(report(content).split('## What')[0])
    print(f'written to {arguments.out}/stages.md and stages.json' + ('; the time was over' if code else ''))
    return code or int(any(row['state'] != 'done' for row in rows))


if __name__ == '__main__':
    sys.exit(main())
