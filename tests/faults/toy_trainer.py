"""A trainer of a few lines in place of tools/train.py, for tests of the processes around it: no torch, any behaviour.

``toy_trainer.py CONFIG --run-dir D [--resume_from auto]``; the configuration is JSON: ``steps``, ``every`` (steps between
checkpoints), ``seconds`` (per step), and ``faults``: lists of {rank, attempt, step, do}, with ``do`` one of ``raise``, ``kill``,
``mistake``,
``full``, ``diverged`` (exit codes 2, 3, 4), ``orphan`` (leave a process behind, then be killed), ``parent`` (the rank process is
killed), ``deaf`` (ignore SIGTERM); ``importing`` and ``saving``: seconds before signals are heard, and for the last checkpoint.
The weights are a number that every step changes, so a lost or repeated step shows.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ENDS = {'mistake': (2, 'error: key x is wrong'), 'full': (3, 'ALARM: disk full'), 'diverged': (4, 'NonFiniteError: 10 steps in a row')}

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument('config')
parser.add_argument('--run-dir')
parser.add_argument('--resume_from')
arguments = parser.parse_args()
config = json.loads(Path(arguments.config).read_text())
run_dir = Path(arguments.run_dir)
rank = int(os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('RANK', '0')))
attempt = len(list((run_dir / 'launch').glob('attempt_*')))
asked = []
time.sleep(config.get('importing', 0.0))
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))


def load():
    found = sorted(run_dir.glob('iter_*.pth'), key=lambda path: int(path.stem.split('_')[1]))
    return json.loads(found[-1].read_text()) if found and arguments.resume_from == 'auto' else {'step': 0, 'weight': 1}


def save(state):
    if rank == 0:
        path = run_dir / f'iter_{state["step"]}.pth'
        path.with_suffix('.tmp').write_text(json.dumps(state))
        os.replace(path.with_suffix('.tmp'), path)


def fault(step):
    for item in config.get('faults', []):
        if item['rank'] == rank and item['step'] == step and item.get('attempt', attempt) == attempt:
            if item['do'] == 'raise':
                raise ValueError(f'injected into rank {rank}')
            if item['do'] == 'kill':
                os.kill(os.getpid(), signal.SIGKILL)
            if item['do'] == 'parent':
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(300)
            if item['do'] == 'orphan':
                subprocess.Popen(['sleep', '300'], start_new_session=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if item['do'] == 'deaf':
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if item['do'] in ENDS:
                code, text = ENDS[item['do']]
                print(text, file=sys.stderr)
                sys.exit(code)


state = load()
(run_dir / f'seen_{rank}.json').write_text(json.dumps({**dict(os.environ), 'START_STEP': str(state['step'])}))
print(f'rank {rank} starts at step {state["step"]}', flush=True)
while state['step'] < config['steps']:
    if asked:
        time.sleep(config.get('saving', 0.0) if rank == 0 else 0.0)
        save(state)
        print(f'rank {rank} stopped at step {state["step"]}', flush=True)
        sys.exit(75)
    fault(state['step'])
    time.sleep(config.get('seconds', 0.05))
    state = {'step': state['step'] + 1, 'weight': state['weight'] * 31 % 1000003 + state['step']}
    if state['step'] % config.get('every', 10) == 0:
        save(state)
save(state)
print(f'rank {rank} done', flush=True)
