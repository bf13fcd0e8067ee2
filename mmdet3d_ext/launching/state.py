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
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, Optional

STARTING, RUNNING, WAITING, STOPPING = 'starting', 'running', 'waiting', 'stopping'  # the supervisor lives
FINISHED, STOPPED, FAILED = 'finished', 'stopped', 'failed'  # it has ended
UNSUPERVISED = 'unsupervised'  # it was killed, the ranks go on; in no file, see control.real_phase
LIVING, ENDED = (STARTING, RUNNING, WAITING, STOPPING, UNSUPERVISED), (FINISHED, STOPPED, FAILED)
LOCK_SECONDS = 0.5  # in which a look at the lock (supervised()) lets go of it


class LaunchToolError(Exception):
    """A mistake that the user can correct; the message says how."""


@dataclass
class State:
    """What ``state.json`` holds; times in seconds since 1970. ``stopped_code``: the trainer's exit code when asked to stop."""

    run_dir: str
    token: str
    host: str
    ranks: int
    launcher: str
    why: str
    command: List[str]
    exports: Dict[str, str]
    max_restarts: int
    stopped_code: int = 0
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


def check_usable(run_dir: str) -> None:
    """Look whether a run could write its files to the absolute ``run_dir``; makes nothing.

    Raises:
        LaunchToolError: a file is in the way, or there is no permission.
    """
    for wanted in (launch_dir(run_dir), run_dir):
        place = wanted
        while not os.path.lexists(place):
            place = os.path.dirname(place)
        if not os.path.isdir(place):
            raise _unusable(run_dir, f'{place} is {"a link to nowhere" if os.path.islink(place) else "no folder"}')
        if not os.access(place, os.W_OK | os.X_OK):
            raise _unusable(run_dir, f'no permission to write in {place}')


def _unusable(run_dir: str, why: str) -> LaunchToolError:
    return LaunchToolError(f'{run_dir} cannot be the run folder: {why}. Give another one with --run-dir')


def take_lock(run_dir: str) -> Optional[int]:
    """The lock's descriptor, or None if a supervisor of this run lives. Its copies in child processes hold the lock as well.

    Raises:
        LaunchToolError: the folder cannot be made or written.
    """
    try:
        os.makedirs(launch_dir(run_dir), exist_ok=True)
        descriptor = os.open(os.path.join(launch_dir(run_dir), 'lock'), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unusable(run_dir, f'{error.filename}: {error.strerror}') from None
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(descriptor)
                return None
        time.sleep(0.05)


def supervised(run_dir: str) -> bool:
    """Whether a supervisor of this run lives. Reads only, so that it also tells of another user's run.

    Raises:
        LaunchToolError: that cannot be seen.
    """
    path = os.path.join(launch_dir(run_dir), 'lock')
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise LaunchToolError(f'{path}: {error.strerror}; run this as the user who started the run') from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the supervisor's is exclusive
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
