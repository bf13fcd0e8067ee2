"""Which GPUs a run gets, so that two runs on one machine do not meet on one."""
from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import List, Mapping, Optional, Tuple

from .state import LaunchToolError

FREE_BELOW = 500  # MiB in use: a context of another process takes more; an idle driver takes less


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver counts it; memory in MiB."""

    index: int
    used: int
    total: int
    name: str


def on_machine(devices: str = '/dev') -> List[Gpu]:
    """The machine's GPUs; empty without a driver. Containers may lack nvidia-smi: then what the driver has put into ``devices``
    counts, with no memory in use as far as is known."""
    program = shutil.which('nvidia-smi')
    if program is None:
        names = [path.name for path in Path(devices).glob('nvidia*')] if Path(devices).is_dir() else []
        return [Gpu(number, 0, 0, 'memory unknown: there is no nvidia-smi')
                for number in sorted(int(name[6:]) for name in names if re.fullmatch(r'nvidia\d+', name))]
    try:
        done = subprocess.run([program, '--query-gpu=index,memory.used,memory.total,name', '--format=csv,noheader,nounits'],
                              capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        parts = [part.strip() for part in line.split(',', 3)]
        if len(parts) == 4 and all(part.isdigit() for part in parts[:3]):
            found.append(Gpu(int(parts[0]), int(parts[1]), int(parts[2]), parts[3]))
    return found


def choose(ranks: int, wanted: Optional[str], env: Mapping[str, str], gpus: Optional[List[Gpu]] = None) -> Tuple[Optional[str], str]:
    """The value of CUDA_VISIBLE_DEVICES for the run, and a sentence about it.

    Args:
        wanted: ``--gpus``: indices with commas; '' for none; None to choose: what the shell has set, else the first free ones.

    Returns:
        None as value if there is nothing to set (no GPU on the machine).

    Raises:
        LaunchToolError: too few GPUs, too few free ones, or words that name none of the machine's.
    """
    gpus = on_machine() if gpus is None else gpus
    known = {str(gpu.index): gpu for gpu in gpus}
    if wanted is None and 'CUDA_VISIBLE_DEVICES' in env:
        return env['CUDA_VISIBLE_DEVICES'], f'CUDA_VISIBLE_DEVICES={env["CUDA_VISIBLE_DEVICES"]} as in this shell'
    if wanted is not None:
        names = [name.strip() for name in wanted.split(',')] if wanted.strip() else []
        wrong = [name for name in names if not re.fullmatch(r'\d+', name)]
        if wrong or len(set(map(int, names))) < len(names):
            raise LaunchToolError(f'--gpus {wanted}: must be the numbers of GPUs, each once, such as 0,1 ("" for none); '
                                  + (f'{wrong[0]!r} is none' if wrong else 'one is named twice'))
        names = [str(int(name)) for name in names]
        if names and not gpus:
            raise LaunchToolError(f'--gpus {wanted}: there is no GPU on this machine (tools/doctor.py --only gpus); leave --gpus out to '
                                  'train on the CPU')
        unknown = [name for name in names if name not in known]
        if unknown:
            raise LaunchToolError(f'--gpus {wanted}: this machine has no GPU {", ".join(unknown)}; it has {", ".join(known)}')
        if names and len(names) < ranks:
            raise LaunchToolError(f'--gpus {wanted}: {ranks} processes need {ranks} GPUs, {len(names)} given')
        busy = [f'{name} ({known[name].used} MiB)' for name in names if name in known and known[name].used >= FREE_BELOW]
        return ','.join(names), f'GPUs {",".join(names) or "none"} as asked' + (f'; in use already: {", ".join(busy)}' if busy else '')
    if not gpus:
        return None, 'no GPU on this machine: the run uses the CPU'
    free = [gpu for gpu in gpus if gpu.used < FREE_BELOW]
    if len(free) < ranks:
        used = ', '.join(f'{gpu.index} ({gpu.used} of {gpu.total} MiB used)' for gpu in gpus if gpu not in free)
        raise LaunchToolError(f'{ranks} processes need {ranks} GPUs; this machine has {len(gpus)}, {len(free)} free'
                              + (f', in use: {used}' if used else '') + '. Choose with --gpus, or start fewer processes with -n')
    chosen = ','.join(str(gpu.index) for gpu in free[:ranks])
    return chosen, f'GPUs {chosen} of {len(gpus)} ({free[0].name}), free now'
