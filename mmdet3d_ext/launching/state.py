"""``<run folder>/launch/``: what belongs to which start, readable by people and by :mod:`mmdet3d_ext.monitor`.

::

    launch/
      lock              held by the supervisor as long as it lives
      state.json        phase, message, process ids, what was exported, every attempt's end
      launch.log        the supervisor's own lines
      attempt_001/
        launcher.log    what the launcher and rank 0 printed
        rank_1.log ...  what the other ranks printed
        rank_0.json ... process id of the trainer and its exit code
        plan.json       what the rank processes do
"""
from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, Optional

STARTING, RUNNING, WAITING, STOPPING = 'starting', 'running', 'waiting', 'stopping'  # the supervisor lives
FINISHED, STOPPED, FAILED = 'finished', 'stopped', 'failed'  # it has ended


class LaunchToolError(Exception):
    """A mistake that the user can correct; the message says how."""


@dataclass
class State:
    """What ``state.json`` holds; times in seconds since 1970."""

    run_dir: str
    token: str
    host: str
    ranks: int
    launcher: str
    why: str
    command: List[str]
    exports: Dict[str, str]
    max_restarts: int
    phase: str = STARTING
    message: str = ''
    supervisor: int = 0
    started: float = 0.0
    attempt: int = 0
    restarts: int = 0
    last_crash: str = ''
    history: List[Dict[str, Any]] = field(default_factory=list)

    def write(self) -> None:
        path = os.path.join(launch_dir(self.run_dir), 'state.json')
        with open(f'{path}.tmp', 'w', encoding='utf-8') as stream:
            json.dump(asdict(self), stream, indent=1)
            stream.write('\n')
        os.replace(f'{path}.tmp', path)


def launch_dir(run_dir: str) -> str:
    """``launch``; on the further machines of one run (NODE_RANK is set there) ``launch_node<NODE_RANK>``: each has its supervisor."""
    node = os.environ.get('NODE_RANK', '0')
    return os.path.join(run_dir, 'launch' if node in ('', '0') else f'launch_node{node}')


def attempt_dir(run_dir: str, attempt: int) -> str:
    return os.path.join(launch_dir(run_dir), f'attempt_{attempt:03d}')


def read(run_dir: str) -> State:
    """The state of a run.

    Raises:
        LaunchToolError: there is none, or it is of another version.
    """
    path = os.path.join(launch_dir(run_dir), 'state.json')
    try:
        with open(path, encoding='utf-8') as stream:
            data = json.load(stream)
        return State(**data)
    except FileNotFoundError:
        raise LaunchToolError(f'{run_dir}: was not started by tools/launch.py (there is no {path}). A run that was started '
                              'otherwise is stopped by its launcher: SIGTERM to its ranks writes a checkpoint, too') from None
    except (OSError, ValueError, TypeError) as error:
        raise LaunchToolError(f'{path}: cannot be read: {error}') from None


def records(folder: str, ranks: int) -> Dict[int, Dict[str, Any]]:
    """What the rank processes of one attempt wrote, by rank; ranks that did not start are absent."""
    found = {}
    for rank in range(ranks):
        try:
            with open(os.path.join(folder, f'rank_{rank}.json'), encoding='utf-8') as stream:
                found[rank] = json.load(stream)
        except (OSError, ValueError):
            continue
    return found


def take_lock(run_dir: str) -> Optional[int]:
    """The lock's descriptor, or None if a supervisor of this run lives. Its copies in child processes hold the lock as well."""
    os.makedirs(launch_dir(run_dir), exist_ok=True)
    descriptor = os.open(os.path.join(launch_dir(run_dir), 'lock'), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def supervised(run_dir: str) -> bool:
    """Whether a supervisor of this run lives."""
    if not os.path.exists(os.path.join(launch_dir(run_dir), 'lock')):
        return False
    descriptor = take_lock(run_dir)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None
