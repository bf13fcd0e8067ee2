#!/usr/bin/env python3
"""Two ranks, killed at random moments for some minutes, end with the weights of a run that was left alone.

    python tests/faults/soak.py --minutes 15

Blows: SIGKILL to one rank or to both, SIGTERM, SIGUSR1, at times drawn from the seed. Exit code 0: bitwise the same weights.
"""
from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from faulty import CHANGES, DATA, content, finish, run, same_state, settings, start  # noqa: E402

BLOWS = [('SIGKILL', (0,)), ('SIGKILL', (1,)), ('SIGKILL', (0, 1)), ('SIGTERM', (0, 1)), ('SIGUSR1', (1,))]
STEPS = 60  # of an epoch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=15.0)
    parser.add_argument('--seed', type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix='soak-'))
    epochs = max(2, int(arguments.minutes * 60 / (STEPS * 0.05) / 2))  # starts, endings and lost steps take the rest
    data = {**DATA, 'workers_per_gpu': 1, 'train': {**DATA['train'], 'size': 4 * STEPS}}
    more = dict(data=data, checkpoint_config={**CHANGES['checkpoint_config'], 'every_iters': 7})
    slow = [{'type': 'FaultySlow', 'seconds': 0.05, 'tell': str(folder / 'running')}]
    config = settings(folder, '--max_epochs', epochs, custom_hooks=slow, **more)
    begin, counts, codes = time.monotonic(), Counter(), [1]
    while codes != [0, 0]:
        (folder / 'running').unlink(missing_ok=True)
        processes = start(folder, config, world=2, resume='auto')
        while not (folder / 'running').exists() and any(process.is_alive() for process in processes):
            time.sleep(0.02)
        last = time.monotonic() - begin > arguments.minutes * 60
        end = time.monotonic() + (1e9 if last else draw.uniform(0.2, 15))
        while time.monotonic() < end and all(process.is_alive() for process in processes):
            time.sleep(0.02)
        name, ranks = draw.choice(BLOWS)
        if all(process.is_alive() for process in processes):
            for rank in ranks:
                os.kill(processes[rank].pid, getattr(signal, name))
            counts[f'{name} to rank {" and ".join(map(str, ranks))}'] += 1
        codes = finish(processes, timeout=90)
        print(f'{time.monotonic() - begin:6.0f} s  {name} {ranks}: exit codes {codes}', flush=True)
    alone = folder / 'alone'
    assert run(alone, settings(alone, '--max_epochs', epochs, **more), world=2, timeout=1e4) == [0, 0]
    same = same_state(content(folder), content(alone))
    steps = content(folder)['meta']['iter']
    print(f'{epochs} epochs, {steps} steps, {sum(counts.values())} blows: {dict(counts)}')
    print('bitwise the same weights, averages and optimizer' if same else 'DIFFERENT from the run left alone')
    return 0 if same else 1


if __name__ == '__main__':
    sys.exit(main())
