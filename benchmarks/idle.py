#!/usr/bin/env python3
"""Where the device stands idle in a step: the gaps between kernels and copies of a trace.

    python tools/benchmark.py CONFIG --out out/step                             # writes out/step/trace_train_<batch>_<precision>.json.gz
    python benchmarks/idle.py out/step/trace_train_4_torch.json.gz
    python benchmarks/idle.py TRACE --slice 10 --longest 20 --out idle.md

Gaps are summed over slices of the step; each of the longest stands with the operators of the host meanwhile and the kernel that ends it.
A profiled step is slower than others, so its gaps are upper bounds.
"""
from __future__ import annotations

import argparse
import gzip
import json
import sys
import zlib
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

ON_DEVICE = ('kernel', 'gpu_memcpy', 'gpu_memset')


class Gap(NamedTuple):
    """Idle time of the device, in ms since its first kernel; ``until``: the kernel that ends it."""

    start: float
    length: float
    until: str


def read_trace(path: str) -> List[Dict[str, Any]]:
    """The events with a duration.

    Raises:
        ValueError: it is not a trace with work on a GPU.
    """
    file = Path(path)
    content = json.loads(gzip.decompress(file.read_bytes()) if path.endswith('.gz') else file.read_bytes())
    events = [event for event in content.get('traceEvents', ()) if event.get('ph') == 'X'] if isinstance(content, Mapping) else []
    if not any(event.get('cat') in ON_DEVICE for event in events):
        raise ValueError('it holds no kernel of a GPU')
    return events


def gaps(events: Sequence[Mapping[str, Any]]) -> List[Gap]:
    """Between the device's first and last piece of work, all streams together, in order of time."""
    work = sorted((event for event in events if event.get('cat') in ON_DEVICE), key=lambda event: event['ts'])
    first = end = work[0]['ts']
    found = []
    for event in work:
        if event['ts'] > end:
            found.append(Gap((end - first) / 1e3, (event['ts'] - end) / 1e3, event['name']))
        end = max(end, event['ts'] + event['dur'])
    return found


def report(events: Sequence[Mapping[str, Any]], slice_ms: float, longest: int) -> str:
    work = [event for event in events if event.get('cat') in ON_DEVICE]
    first = min(event['ts'] for event in work)
    span = (max(event['ts'] + event['dur'] for event in work) - first) / 1e3
    found = gaps(events)
    lines = [f'From the first of {len(work):,} kernels and copies to the end of the last: {span:.1f} ms, of which the device was idle '
             f'{sum(gap.length for gap in found):.1f} ms in {len(found):,} gaps.', '', '| ms of the step | idle ms |', '|---|---|']
    for number in range(int(span / slice_ms) + 1):
        idle = sum(gap.length for gap in found if int(gap.start / slice_ms) == number)
        lines.append(f'| {number * slice_ms:g} to {(number + 1) * slice_ms:g} | {idle:.1f} |')
    lines += ['', '| at ms | idle ms | the host meanwhile | until |', '|---|---|---|---|']
    host = [event for event in events if event.get('cat') == 'cpu_op']
    for gap in sorted(found, key=lambda gap: -gap.length)[:longest]:
        begin, end = first + 1e3 * gap.start, first + 1e3 * (gap.start + gap.length)
        busy = sorted((event for event in host if event['ts'] < end and event['ts'] + event['dur'] > begin), key=lambda event: -event['dur'])
        names = ', '.join(dict.fromkeys(event['name'].replace('autograd::engine::evaluate_function: ', '') for event in busy[:3]))
        lines.append(f'| {gap.start:.1f} | {gap.length:.2f} | {names or "-"} | {gap.until[:60].replace("|", "/")} |')
    return '\n'.join(lines)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('trace', help='file that tools/benchmark.py or torch\'s profiler wrote (.json or .json.gz)')
    parser.add_argument('--slice', type=float, default=20.0, metavar='MS', help='of the step, per row of the first table (default 20)')
    parser.add_argument('--longest', type=int, default=10, metavar='N', help='gaps that are shown one by one (default 10)')
    parser.add_argument('--out', type=Path, metavar='F', help='also write this page')
    arguments = parser.parse_args(argv)
    if not arguments.slice > 0 or arguments.longest < 0:
        parser.error(f'--slice must be above 0 and --longest at least 0, got {arguments.slice:g} and {arguments.longest}')
    try:
        text = report(read_trace(arguments.trace), arguments.slice, arguments.longest)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        print(f'error: {arguments.trace}: {error}', file=sys.stderr)
        return 2
    print(text)
    if arguments.out:
        name = Path(arguments.trace).name
        try:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(f'# Where the device stands idle\n\n`python benchmarks/idle.py {name}`\n\n{text}\n')
        except OSError as error:
            print(f'error: --out {arguments.out}: {error}', file=sys.stderr)
            return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
