"""Finding and signalling the processes of one run, and only those."""
from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, List, Optional

ECHO = 2.0  # seconds in which a signal is the one before it again
RUN_VARIABLE = 'MMDET3D_EXT_RUN'  # in the environment of every process of a run; its value belongs to one start of one run


def of_run(token: str) -> List[int]:
    """Ids of the living processes that were started with ``MMDET3D_EXT_RUN=token``: launcher, ranks, loader workers.

    An id alone may belong to another process by now, and launchers put their children into sessions of their own; the
    environment that a process was started with tells both apart.
    """
    wanted = f'{RUN_VARIABLE}={token}'.encode()
    found = []
    for entry in Path('/proc').iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / 'environ').read_bytes().split(b'\0') and alive(int(entry.name)):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return sorted(found)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except OSError:
        return False
    return bool(fields) and fields[0] not in 'ZX'


def send(pids: Iterable[int], number: int) -> None:
    """Signal processes; one that has ended meanwhile is passed over."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def may_signal(pid: int) -> bool:
    """Whether this user may signal a process; also True if there is none."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        pass
    return True


def kill_run(token: str, patience: float = 10.0) -> List[int]:
    """SIGKILL every process of a run, again until none is left; returns those that stay (waiting in the kernel)."""
    end = time.monotonic() + patience
    left = of_run(token)
    while left and time.monotonic() < end:
        send(left, signal.SIGKILL)
        time.sleep(0.1)
        left = of_run(token)
    return left


def wait_until(done: Callable[[], bool], seconds: float, interval: float = 0.1) -> bool:
    """Whether ``done()`` became true within ``seconds``."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(interval)
    return True


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within: SIGTERM is as Ctrl-C, a KeyboardInterrupt; another one within :data:`ECHO` seconds is not. ``timeout`` signals a program and
    then its process group, so that what the first one begins (stopping a run in order, telling of it) would be broken off by the second.
    """
    last = -math.inf

    def interrupt(*_: Any) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > ECHO:
            raise KeyboardInterrupt

    def afterwards(number: int, _: Any) -> None:
        if time.monotonic() - last > ECHO:
            signal.signal(number, handlers[number])
            signal.raise_signal(number)

    def at_the_end() -> None:  # the interpreter takes its handlers away before it ends, and the default one would tell of a kill
        for number in handlers if time.monotonic() - last <= ECHO else ():
            signal.signal(number, signal.SIG_IGN)

    handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)
                if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler if time.monotonic() - last > ECHO else afterwards)
        atexit.register(at_the_end)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f'signal {number}'


def ending(code: int) -> str:
    """``ended with exit code 1``, ``was killed by SIGKILL (...)``."""
    if code >= 0:
        return f'ended with exit code {code}'
    hint = {signal.SIGKILL: ' (out of memory? "dmesg" tells; or by hand)', signal.SIGBUS: ' (/dev/shm full?)'}.get(-code, '')
    return f'was killed by {signal_name(-code)}{hint}'


def tail(path: str, lines: int = 15, most: int = 16384) -> str:
    """The last lines of a file, without the progress bars that were drawn over each other."""
    try:
        with open(path, 'rb') as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, size - most))
            text = stream.read().decode('utf-8', errors='replace')
    except OSError:
        return ''
    kept = [line.rsplit('\r', 1)[-1].rstrip() for line in text.replace('\r\n', '\n').split('\n')]
    return '\n'.join([line for line in kept if line][-lines:])


def newest_checkpoint(folder: str) -> Optional[str]:
    """Path of the checkpoint that was written last, whether or not it reads whole (the trainer tells that)."""
    found = [path for path in Path(folder).glob('*.pth') if not path.is_symlink()]
    try:
        return str(max(found, key=lambda path: path.stat().st_mtime)) if found else None
    except OSError:
        return None


def newest_text(folder: str) -> str:
    """``the newest checkpoint is ..., written 3 s ago``."""
    newest = newest_checkpoint(folder)
    try:
        age = time.time() - os.path.getmtime(newest) if newest else 0.0
    except OSError:  # replaced by a newer one just now
        return newest_text(folder)
    return f'the newest checkpoint is {newest}, written {max(0.0, age):.0f} s ago' if newest else 'there is no checkpoint'
