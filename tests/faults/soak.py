#!/usr/bin/env python3
"""Kills a run at random for a time, through tools/launch.py, and compares its end with that of a run that was left alone.

    python tests/faults/soak.py --minutes 15 --out soak
    python tests/faults/soak.py --minutes 2 --seed 7 --launcher torchrun --out soak

It strikes at the trainer's processes and at all that stands around them. Two ranks train a small model with dropout, BatchNorm,
averaged weights, accumulated gradients and random inputs; a checkpoint every three steps. Again and again, some seconds after training
is under way, something strikes: a signal to a rank, to its rank process, to the launcher, to all processes, to the supervisor, a stop by
the tool, a rank that is frozen for some seconds. Where the supervisor does not restart by itself (it was killed, or the run was
stopped), this script starts the run again with --resume_from auto. After the time is over the run may finish.

Prints every strike and its answer. Exit code 0: the run finished, and weights, averages and optimizer are bitwise those of the other
run; 1: they are not, or it did not finish.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(Path(__file__).resolve().parent)]

STEPS_PER_EPOCH, SAMPLES = 60, 2
TOOL = [sys.executable, str(REPO / 'tools' / 'launch.py')]
TRAINER = str(Path(__file__).with_name('soak_trainer.py'))
START_SECONDS, END_SECONDS = 240, 600


class Soak:
    """One soak: paths, what was done, and the strikes."""

    def __init__(self, arguments: argparse.Namespace):
        self.out = Path(arguments.out).resolve()
        self.ranks, self.launcher, self.minutes = arguments.ranks, arguments.launcher, arguments.minutes
        self.draw = random.Random(arguments.seed)
        self.begin, self.done, self.starts = time.monotonic(), Counter(), 0
        self.epochs = max(2, round(self.minutes * 60 / 0.5 / STEPS_PER_EPOCH))
        self.pace = self.out / 'pace.txt'

    def say(self, text: str) -> None:
        print(f'{time.monotonic() - self.begin:7.1f} s  {text}', flush=True)

    # ---- the run -------------------------------------------------------------------------------------------------------
    def config(self, name: str, pace: Path) -> str:
        from faulty import CHANGES, DATA, write_config
        data = {**DATA, 'samples_per_gpu': SAMPLES, 'workers_per_gpu': 1,
                'train': {**DATA['train'], 'size': STEPS_PER_EPOCH * SAMPLES * self.ranks}}
        changes = {**CHANGES, 'data': data, 'max_epochs': self.epochs, 'evaluation': {'interval': 5},
                   'dist_params': {'backend': 'gloo'}, 'custom_hooks': [{'type': 'SoakPace', 'file': str(pace)}]}
        return write_config(self.out, f'{name}.yaml', **changes)

    def start(self, name: str, *words: str) -> None:
        self.starts += 1
        command = [*TOOL, 'start', self.config(name, self.pace if name == 'killed' else self.out / 'none.txt'), '-n', str(self.ranks),
                   '--run-dir', str(self.out / name), '--script', TRAINER, '--skip-checks', '--launcher', self.launcher, *words]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f'start failed: {done.stdout[-2000:]}{done.stderr[-2000:]}')

    def state(self, name: str = 'killed'):
        from mmdet3d_ext.launching import control, state
        found = state.read(str(self.out / name))
        return found, control.real_phase(found)[0]

    def step(self) -> int:
        try:
            return int(self.pace.with_suffix('.step').read_text())
        except (OSError, ValueError):
            return -1

    def wait_for_training(self) -> bool:
        """Until a step is done that was not done before, or the run has ended; False if neither comes."""
        before, end = self.step(), time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            _, phase = self.state()
            if phase == 'finished' or (phase == 'running' and self.step() not in (before, -1)):
                return True
            if phase in ('stopped', 'failed', 'unsupervised'):
                return True
            time.sleep(0.2)
        return False

    # ---- strikes -------------------------------------------------------------------------------------------------------
    def strike(self) -> str:
        """Do one of the things; returns what it was."""
        from mmdet3d_ext.launching import processes
        from mmdet3d_ext.launching import state as files
        found, _ = self.state()
        folder = files.attempt_dir(found.run_dir, found.attempt)
        trainers = {rank: record['pid'] for rank, record in files.records(folder, self.ranks).items() if 'code' not in record}
        if not trainers:
            return 'nothing (no rank lives)'
        rank = self.draw.choice(sorted(trainers))
        pid = trainers[rank]
        kind = self.draw.choices(['SIGKILL', 'SIGSEGV', 'SIGABRT', 'rank process', 'launcher', 'all', 'supervisor', 'stop', 'SIGTERM',
                                  'SIGUSR1', 'freeze'], [4, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1])[0]
        if kind.startswith('SIG'):
            processes.send([pid], getattr(signal, kind))
            return f'{kind} to rank {rank}'
        if kind == 'rank process':
            parent = int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])
            processes.send([parent], signal.SIGKILL)
            return f'SIGKILL to the rank process of rank {rank}'
        if kind == 'launcher':
            processes.send([found.history[-1]['launcher']], signal.SIGKILL)
        elif kind == 'all':
            processes.send(processes.of_run(found.token), signal.SIGKILL)
        elif kind == 'supervisor':
            processes.send([found.supervisor], signal.SIGKILL)
            time.sleep(1)
            subprocess.run([*TOOL, 'stop', found.run_dir, '--timeout', '120'], check=True, capture_output=True)
        elif kind == 'stop':
            subprocess.run([*TOOL, 'stop', found.run_dir, '--timeout', '120'], check=True, capture_output=True)
        elif kind == 'freeze':
            processes.send([pid], signal.SIGSTOP)
            time.sleep(self.draw.uniform(1, 6))
            processes.send([pid], signal.SIGCONT)
        return {'launcher': 'SIGKILL to the launcher', 'all': 'SIGKILL to every process of the run', 'stop': 'launch.py stop',
                'supervisor': 'SIGKILL to the supervisor, then launch.py stop', 'freeze': f'rank {rank} frozen for seconds'}[kind]

    def run(self) -> int:
        if self.out.exists() and any(self.out.iterdir()):
            if not (self.out / 'alone.yaml').exists():
                raise SystemExit(f'--out {self.out} holds something else than an earlier soak; give another folder')
            shutil.rmtree(self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        total = self.epochs * STEPS_PER_EPOCH
        self.say(f'left alone: {self.ranks} ranks, {total} steps')
        self.start('alone')
        self.finish('alone')
        self.pace.write_text(str(self.minutes * 60 / total))
        deadline = time.monotonic() + self.minutes * 60
        self.start('killed')
        while time.monotonic() < deadline:
            if not self.wait_for_training():
                self.say(f'FAILED: no step within {START_SECONDS} s: {self.state()[0].message}')
                return 1
            time.sleep(self.draw.uniform(1, 8))
            _, phase = self.state()
            if phase == 'finished':
                break
            what = self.strike() if phase == 'running' else None
            if what:
                self.done[what.split(' to rank')[0].split(' of rank')[0].replace(f'rank {what[5:6]} ', 'a rank ')] += 1
                self.say(f'step {self.step():5d}: {what}')
                time.sleep(self.draw.uniform(0, 3))
            if self.state()[1] in ('stopped', 'failed', 'unsupervised'):
                self.say(f'            {self.state()[0].message[:150]}; started again')
                self.start('killed', '--resume_from', 'auto')
        self.pace.unlink()
        self.say('no more strikes: the run may finish')
        self.finish('killed')
        return self.compare()

    def finish(self, name: str) -> None:
        end = time.monotonic() + END_SECONDS
        while time.monotonic() < end:
            found, phase = self.state(name)
            if phase == 'finished':
                return
            if phase in ('stopped', 'failed', 'unsupervised'):
                if name == 'alone':
                    raise SystemExit(f'the run that was left alone: {phase}: {found.message}')
                self.say(f'            {phase}: {found.message[:150]}; started again')
                self.start(name, '--resume_from', 'auto')
            time.sleep(0.5)
        raise SystemExit(f'{name}: not finished within {END_SECONDS} s: {self.state(name)[0].message}')

    def compare(self) -> int:
        from faulty import same_state

        from mmdet3d_ext.engine.checkpoint import read_checkpoint
        mine, other = (read_checkpoint(str(self.out / name / 'latest.pth')) for name in ('killed', 'alone'))
        good = same_state(mine, other) and mine['meta']['iter'] == other['meta']['iter'] == self.epochs * STEPS_PER_EPOCH
        report = {'minutes': self.minutes, 'ranks': self.ranks, 'steps': self.epochs * STEPS_PER_EPOCH, 'strikes': dict(self.done),
                  'starts': self.starts - 1, 'bitwise equal': good, 'seconds': round(time.monotonic() - self.begin)}
        (self.out / 'report.json').write_text(json.dumps(report, indent=1) + '\n')
        self.say(json.dumps(report))
        return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=15.0, help='how long strikes go on (default 15)')
    parser.add_argument('--ranks', type=int, default=2)
    parser.add_argument('--seed', type=int, default=0, help='of the strikes')
    parser.add_argument('--launcher', choices=('auto', 'torchpack', 'torchrun'), default='auto')
    parser.add_argument('--out', required=True, help='folder for both runs; an earlier soak in it is removed')
    os.environ.setdefault('CUDA_VISIBLE_DEVICES', '')
    return Soak(parser.parse_args()).run()


if __name__ == '__main__':
    sys.exit(main())
