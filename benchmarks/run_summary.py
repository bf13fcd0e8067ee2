#!/usr/bin/env python3
"""Sum up a training run from its ``.log.json`` (and ``metrics.json``) as a Markdown table: speed, peak memory, losses.

    python benchmarks/run_summary.py runs/phase3 --samples 2 --title "Phase 3, 400 x 400" --device "NVIDIA H200" \\
        --command "python tools/train.py ..." --out docs/benchmarks/phase3_400.md
"""
from __future__ import annotations

import argparse
import datetime
import json
import statistics
from pathlib import Path


def read(path: Path) -> list:
    """Training records of a log, in order."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [record for record in records if record.get('mode') == 'train']


def summary(records: list, samples: int) -> list:
    """Rows (quantity, value). Times leave out the first record of each epoch, which holds the start of the loader's workers."""
    steady = [record for number, record in enumerate(records)
              if number and record['epoch'] == records[number - 1]['epoch']] or records
    time = statistics.median(record['time'] for record in steady)
    rows = [('logged points', str(len(records))), ('step, s (median, data included)', f'{time:.3f}'),
            ('data wait, s (median)', f'{statistics.median(record["data_time"] for record in steady):.3f}'),
            ('samples/s', f'{samples / time:.2f}')]
    if 'memory' in records[-1]:
        rows.append(('peak memory, MiB (allocator)', str(max(record['memory'] for record in records))))
    names = [name for name in records[0] if name.startswith('loss') and name in records[-1]]
    for name in sorted(names, key=lambda n: (n != 'loss', n)):
        rows.append((name, f'{records[0][name]:.4f} -> {records[-1][name]:.4f}'))
    return rows


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', type=Path, help='run folder, or a .log.json file')
    parser.add_argument('--samples', type=int, required=True, help='samples per step over all processes')
    parser.add_argument('--metrics', type=Path, help='metrics.json of the evaluation (default: in the run folder)')
    parser.add_argument('--title', required=True)
    parser.add_argument('--device', required=True)
    parser.add_argument('--command', required=True, help='what was run')
    parser.add_argument('--date', default=str(datetime.date.today()))
    parser.add_argument('--out', type=Path, required=True)
    arguments = parser.parse_args(argv)
    log = arguments.run if arguments.run.is_file() else sorted(arguments.run.glob('*.log.json'))[-1]
    rows = summary(read(log), arguments.samples)
    metrics = arguments.metrics or (arguments.run / 'metrics.json' if arguments.run.is_dir() else None)
    lines = [f'# {arguments.title}', '', f'`{arguments.command}`', '', f'{arguments.device}, {arguments.date}', '',
             '| quantity | value |', '|---|---|', *(f'| {name} | {value} |' for name, value in rows)]
    if metrics and metrics.is_file():
        found = json.loads(metrics.read_text())
        wanted = [key for key in found if key in ('object/nds', 'object/map')]
        wanted += [key for key in found if key.startswith('map/') and key.endswith('@max')]
        lines += ['', 'Evaluation:', '', '| metric | value |', '|---|---|']
        lines += [f'| {key} | {found[key]:.4f} |' for key in wanted]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text('\n'.join(lines) + '\n')
    print('\n'.join(lines))


if __name__ == '__main__':
    main()
