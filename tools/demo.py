#!/usr/bin/env python3
"""The main job from end to end on a small synthetic data set: generate, prepare, train, evaluate, draw.

Each step is the command that a user would type, and is shown before it runs. A step whose result is already there is not
done again, so an interrupted demo goes on where it stopped; --fresh starts over.

    python tools/demo.py
    python tools/demo.py --processes 1 --run-dir runs/demo1
    python tools/demo.py --max-epochs 2                     # a quick look
"""
from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
CONFIG = 'configs/synthetic/multitask_tiny.yaml'
ROWS = [('NDS', 'object/nds'), ('mAP', 'object/map'), ('mean IoU@max', 'map/mean/iou@max')]


class Demo:
    """Holds the paths and runs the steps."""

    def __init__(self, arguments: argparse.Namespace):
        self.data = Path(arguments.data)
        self.run_dir = Path(arguments.run_dir)
        self.processes = arguments.processes
        self.overrides = ['--dataset_root', f'{self.data}/']
        if arguments.max_epochs is not None:
            self.overrides += ['--max_epochs', str(arguments.max_epochs)]
        self.start = time.monotonic()
        # The environment's own mpirun, torchpack and torchrun, also where it is not activated.
        os.environ['PATH'] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get('PATH', os.defpath)])
        self.env = dict(os.environ, OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // self.processes)))

    def step(self, title: str, done: bool, *command: str) -> None:
        elapsed = (time.monotonic() - self.start) / 60
        if done:
            print(f'\n=== {title}: already there ===', flush=True)
            return
        print(f'\n=== {title} (minute {elapsed:.1f}) ===\n$ {shlex.join(command)}', flush=True)
        code = subprocess.run(command, cwd=REPO, env=self.env).returncode
        if code:
            sys.exit(f'demo: "{title}" ended with exit code {code}; the output above says why. '
                     f'The same command goes on at this step.')

    def run(self) -> None:
        python = sys.executable
        self.step('Generate a synthetic nuScenes', (self.data / 'v1.0-mini' / 'sample.json').exists(),
                  python, 'tools/create_synthetic_nuscenes.py', '--out', str(self.data), '--preset', 'demo')
        self.step('Prepare it', (self.data / 'nuscenes_infos_val.pkl').exists(),
                  python, 'tools/create_data.py', 'nuscenes', '--root-path', str(self.data), '--out-dir', str(self.data),
                  '--extra-tag', 'nuscenes', '--version', 'v1.0-mini')
        before, after = self.run_dir / 'untrained', self.run_dir / 'trained'
        self.step('Evaluate the untrained model', (before / 'metrics.json').exists(), *self.launch(
            'tools/test.py', CONFIG, 'none', '--out-dir', str(before), *self.overrides))
        self.step('Train', (self.run_dir / 'latest.pth').exists(), *self.launch(
            'tools/train.py', CONFIG, '--run-dir', str(self.run_dir), *self.overrides))
        self.step('Evaluate the trained model', (after / 'metrics.json').exists(), *self.launch(
            'tools/test.py', CONFIG, str(self.run_dir / 'latest.pth'), '--out-dir', str(after), *self.overrides))
        self.step('Draw predictions', (self.run_dir / 'pictures').exists(),
                  python, 'tools/visualize.py', CONFIG, '--mode', 'pred', '--checkpoint', str(self.run_dir / 'latest.pth'),
                  '--split', 'val', '--num', '4', '--out-dir', str(self.run_dir / 'pictures'), *self.overrides)
        self.summary(json.loads((before / 'metrics.json').read_text()), json.loads((after / 'metrics.json').read_text()))

    def launch(self, *command: str) -> list:
        """torchpack dist-run where there is an mpirun, torchrun elsewhere."""
        count = str(self.processes)
        if shutil.which('mpirun'):
            return ['torchpack', 'dist-run', '-np', count, sys.executable, *command]
        return ['torchrun', '--standalone', '--nproc_per_node', count, *command]

    def summary(self, before: dict, after: dict) -> None:
        rows = ROWS + [(key.split('/')[1], key) for key in after if key.endswith('iou@max') and '/mean/' not in key
                       and key.startswith('map/')]
        print(f'\n{"held-out scenes":<24}{"untrained":>12}{"trained":>12}')
        for label, key in rows:
            print(f'{label:<24}{before.get(key, float("nan")):>12.4f}{after.get(key, float("nan")):>12.4f}')
        print(f'\nlog, checkpoints, TensorBoard: {self.run_dir}\npictures: {self.run_dir / "pictures"}\n'
              f'whole demo: {(time.monotonic() - self.start) / 60:.1f} min')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', default='data/synthetic-nuscenes', help='where the data set is made')
    parser.add_argument('--run-dir', default='runs/demo', help='where the run is written')
    parser.add_argument('--processes', type=int, default=2, help='training processes (default 2)')
    parser.add_argument('--max-epochs', type=int, help='train for so many epochs instead of the configured number')
    parser.add_argument('--fresh', action='store_true', help='remove the run folder first (the data set is kept)')
    arguments = parser.parse_args()
    if arguments.fresh and Path(arguments.run_dir).exists():
        shutil.rmtree(arguments.run_dir)
    Demo(arguments).run()


if __name__ == '__main__':
    from _light import end
    end(main)
