"""Which GPUs a run gets, so that two runs on one machine do not meet on one."""
from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
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


def on_machine() -> List[Gpu]:
    """The machine's GPUs; empty without a driver."""
    program = shutil.which('nvidia-smi')
    if program is None:
        return []
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
        LaunchToolError: too few GPUs, or too few free ones.
    """
    gpus = on_machine() if gpus is None else gpus
    known = {str(gpu.index): gpu for gpu in gpus}
    if wanted is None and 'CUDA_VISIBLE_DEVICES' in env:
        return env['CUDA_VISIBLE_DEVICES'], f'CUDA_VISIBLE_DEVICES={env["CUDA_VISIBLE_DEVICES"]} as in this shell'
    if wanted is not None:
        names = [name.strip() for name in wanted.split(',') if name.strip()]
        unknown = [name for name in names if name not in known]
        if names and gpus and unknown:
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
