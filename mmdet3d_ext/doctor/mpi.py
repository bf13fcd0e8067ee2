"""mpirun, mpi4py, and what environment a rank gets from the launcher, against the launching shell."""
from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from .libraries import load_as
from .options import Options
from .probe import ask, call
from .report import OK, PROBLEM, SKIPPED, WARNING, Finding

TORCHRUN = 'torchrun --nproc_per_node N tools/train.py CONFIG starts the same training without MPI'
COMPARED = ('LD_LIBRARY_PATH', 'PATH', 'PYTHONPATH', 'CUDA_VISIBLE_DEVICES', 'CONDA_PREFIX', 'VIRTUAL_ENV', 'LD_PRELOAD')

# Runs under the bare name `python`, as users write it; standard library only, and any Python 3 may come.
_RANK = '''
import json, os, sys
import resource
out = {"env": dict(os.environ), "executable": sys.executable, "prefix": sys.prefix, "version": sys.version.split()[0],
       "cwd": os.getcwd(), "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "0"
try:
    from mpi4py import MPI
    out["mpi_size"] = MPI.COMM_WORLD.Get_size()
except BaseException as error:
    out["mpi_error"] = "%s: %s" % (type(error).__name__, error)
path = os.path.join(sys.argv[1], "rank_%s_%d.json" % (rank, os.getpid()))
with open(path + ".part", "w") as stream:
    json.dump(out, stream)
os.rename(path + ".part", path)
'''
_MPI4PY = '''
import mpi4py
say(version=mpi4py.__version__)
mpi4py.rc.initialize = False
from mpi4py import MPI
say(library=MPI.Get_library_version().strip("\\0 \\n"), vendor=list(map(str, MPI.get_vendor())))
'''


def check(options: Options) -> Iterator[Finding]:
    """All of this group."""
    mpirun = shutil.which('mpirun')
    if mpirun is None:
        yield Finding('mpirun', WARNING, 'not on PATH, so torchpack dist-run cannot start anything',
                      f'{TORCHRUN}; or make install REDO=open-mpi')
        return
    finding, vendor = check_mpirun(mpirun)
    yield finding
    yield check_mpi4py(vendor)
    if finding.status == PROBLEM:
        yield Finding('rank environment', SKIPPED, 'mpirun cannot be used')
        return
    yield from check_ranks(options.processes or 2, options.timeout)


def vendor_of(text: str) -> Tuple[str, str]:
    """(implementation, version) from what ``mpirun --version`` or an MPI library says; ('', '') if unknown."""
    for name, pattern in (('Open MPI', r'Open ?MPI\)? v?(\d+[\d.]*\w*)'), ('Intel MPI', r'Intel\(R\) MPI Library.*?(20\d\d[\d.]*)'),
                          ('MVAPICH', r'MVAPICH\d?\D*([\d.]+)'), ('MPICH', r'(?:MPICH|HYDRA)[^\d]*([\d.]+)')):
        found = re.search(pattern, text, re.S)
        if found:
            return name, found[1]
    if 'HYDRA' in text.upper():
        found = re.search(r'Version:\s*([\d.]+)', text)
        return 'MPICH', found[1] if found else ''
    return '', ''


def check_mpirun(path: str) -> Tuple[Finding, Tuple[str, str]]:
    code, text = call([path, '--version'], 30)
    vendor = vendor_of(text)
    data = {'path': path, 'version': ' '.join(vendor)}
    if code != 0:
        last = text.strip().splitlines()[-1] if text.strip() else f'exit code {code}'
        return Finding('mpirun', PROBLEM, f'{path} does not run: {last}', f'make install REDO=open-mpi; {TORCHRUN}', data), vendor
    if vendor[0] != 'Open MPI':
        return Finding('mpirun', PROBLEM, f'{path} is {" ".join(vendor).strip() or "of an unknown MPI"}; torchpack dist-run uses options '
                       'that only Open MPI has (-bind-to, -mca)', f'put an Open MPI first on PATH (make install REDO=open-mpi); {TORCHRUN}',
                       data), vendor
    return Finding('mpirun', OK, f'{" ".join(vendor)} at {path}', data=data), vendor


def check_mpi4py(mpirun: Tuple[str, str]) -> Finding:
    """Whether mpi4py binds the MPI that mpirun belongs to. This project does without mpi4py; torchpack's own init needs it."""
    answer = ask(_MPI4PY, 60)
    said = answer.merged()
    fix = 'pip install --force-reinstall --no-binary mpi4py mpi4py   (with that mpirun\'s mpicc first on PATH)'
    if 'version' not in said:
        return Finding('mpi4py', WARNING, f'cannot be imported: {answer.last_line()}', f'only torchpack.distributed.init() needs it: {fix}')
    if 'library' not in said:
        return Finding('mpi4py', WARNING, f'{said["version"]} finds no MPI library: {answer.last_line()}', fix, said)
    library = vendor_of(said['library'])
    if library[0] != mpirun[0] or library[1].split('.')[0] != mpirun[1].split('.')[0]:
        return Finding('mpi4py', WARNING, f'{said["version"]} uses {" ".join(library) or said["library"].splitlines()[0]}, mpirun is '
                       f'{" ".join(mpirun)}: every rank would believe that it is alone', fix, said)
    return Finding('mpi4py', OK, f'{said["version"]} uses {" ".join(library)}, as mpirun', data=said)


# -------------------------------------------------------------------------------------------------- a rank's environment

def command(processes: int, script: str, folder: str) -> List[str]:
    """What a user types, with the bare name ``python``; without torchpack the mpirun line that it would make."""
    torchpack = shutil.which('torchpack')
    if torchpack:
        return [torchpack, 'dist-run', '-np', str(processes), 'python', script, folder]
    exported = [word for name in sorted(os.environ) if not name.startswith('BASH_FUNC') for word in ('-x', name)]
    return ['mpirun', '--allow-run-as-root', '-np', str(processes), '-H', f'localhost:{processes}', '-bind-to', 'none', '-map-by',
            'slot', *exported, 'python', script, folder]


def ask_ranks(processes: int, timeout: float) -> Tuple[List[Dict[str, Any]], Optional[int], str]:
    """What each rank sees, the launcher's exit code (None: it did not end in time), and its output."""
    with tempfile.TemporaryDirectory(prefix='mmdet3d_ext-doctor-') as folder:
        script = Path(folder, 'rank.py')
        script.write_text(_RANK)
        code, output = call(command(processes, str(script), folder), timeout)
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob('rank_*.json'))], code, output


def check_ranks(processes: int, timeout: float) -> Iterator[Finding]:
    """Start ranks as training would and compare their environment with this shell's."""
    ranks, code, output = ask_ranks(processes, timeout)
    if len(ranks) < processes:
        lines = [line for line in output.splitlines() if line.strip(' -')]
        end = 'did not end in time' if code is None else f'ended with code {code}'
        extra = '. "Read -1, errno = 1" in a container: export OMPI_MCA_btl_vader_single_copy_mechanism=none' if 'Read -1' in output else ''
        yield Finding('rank environment', PROBLEM, f'{len(ranks)} of {processes} ranks started ({end}): '
                      f'{" ".join(lines[:3]) or "the launcher said nothing"}{extra}', TORCHRUN)
        return
    yield compare(ranks[0], os.environ)
    yield from _python_of(ranks)
    alone = [rank for rank in ranks if rank.get('mpi_size') not in (None, processes)]
    if alone:
        yield Finding('mpi4py ranks', WARNING, f'mpi4py says {alone[0]["mpi_size"]} rank(s) where mpirun started {processes}: it is '
                      'bound to another MPI', 'pip install --force-reinstall --no-binary mpi4py mpi4py')
    if ranks[0]['env'].get('LD_LIBRARY_PATH') != os.environ.get('LD_LIBRARY_PATH'):
        yield from _libraries_of(ranks[0], timeout)


def compare(rank: Mapping[str, Any], shell: Mapping[str, str]) -> Finding:
    """The variables that decide which Python and libraries run, in a rank and in the shell."""
    differences, lost = [], []
    for name in COMPARED:
        mine, its = shell.get(name), rank['env'].get(name)
        if mine == its:
            continue
        gone = [part for part in (mine or '').split(':') if part and part not in (its or '').split(':')]
        more = [part for part in (its or '').split(':') if part and part not in (mine or '').split(':')]
        parts = [f'lacks {":".join(gone)}'] * bool(gone) + [f'has {":".join(more)} besides'] * bool(more)
        differences.append(f'{name}: a rank {" and ".join(parts) or "has another order"}')
        # mpirun puts its own folders in front of PATH and LD_LIBRARY_PATH; what is lost is what matters.
        if gone:
            lost.append(name)
    data = {'differences': differences, 'rank': {name: rank['env'].get(name) for name in COMPARED}}
    if not lost:
        text = '; '.join(differences) or 'a rank sees this shell\'s ' + ', '.join(COMPARED[:3])
        return Finding('rank environment', OK, text, data=data)
    assignments = ' '.join(f'{name}="${name}"' for name in lost)
    return Finding('rank environment', PROBLEM, f'{"; ".join(differences)}. Something between this shell and the ranks drops it (an '
                   'mpirun wrapper, a module system, a login shell on another host)',
                   f'set it in front of the rank\'s own command: torchpack dist-run -np N env {assignments} python tools/train.py CONFIG; '
                   f'or {TORCHRUN}', data)


def _python_of(ranks: List[Dict[str, Any]]) -> Iterator[Finding]:
    others = sorted({f'{rank["executable"]} ({rank["version"]})' for rank in ranks if rank['prefix'] != sys.prefix})
    if others:
        yield Finding('rank python', PROBLEM, f'"python" in a rank is {", ".join(others)}; this one is {sys.executable}',
                      f'write the full path: torchpack dist-run -np N {sys.executable} tools/train.py CONFIG', {'python': others})
    else:
        yield Finding('rank python', OK, f'{ranks[0]["executable"]}, the same installation as here')


def _libraries_of(rank: Mapping[str, Any], timeout: float) -> Iterator[Finding]:
    """A library that loads here may not load there."""
    here, there = load_as(os.environ, timeout), load_as(rank['env'], timeout)
    broken = {name: error for name, error in there.items() if error is not None and here.get(name) is None}
    if broken:
        name, error = next(iter(broken.items()))
        yield Finding('rank libraries', PROBLEM, f'{name} loads in this shell, but not with a rank\'s LD_LIBRARY_PATH: {error}',
                      'torchpack dist-run -np N env LD_LIBRARY_PATH="$LD_LIBRARY_PATH" python tools/train.py CONFIG', {'broken': broken})
    else:
        yield Finding('rank libraries', OK, 'with a rank\'s LD_LIBRARY_PATH the same libraries load as here')
