"""A thread beside every rank: it ends the rank when another one failed or died, and shows all stacks when the job is stuck.

What the ranks tell each other goes through the TCP store in which they met, on a connection of the thread's own, so that it
works while the main thread waits in a collective, in a loader or in a kernel. Every key is one of :func:`key`'s.

* A rank that raises reports its message and its traceback (:meth:`RankWatch.report`); the others read it and end.
* A rank that dies without a word (SIGKILL, out of memory, a crash in a library) is missed by the ranks of its machine.
* A main thread that stands at the same place for ``stall_timeout`` seconds asks all ranks for their stacks; rank 0 shows them.
  Should a library hold the interpreter's lock, faulthandler's own thread still shows where.
"""
from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import os
import re
import socket
import stat
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Callable, Dict, List, Optional, Tuple

import torch.distributed as dist

GRACE = 2.5  # seconds that a failing rank waits for the others to read why, before it ends
READ_TIMEOUT = 12.0  # seconds at most until rank 0 has read it: its store looks names up, and a lost answer costs 5 s each time
INTERVAL = 1.0  # seconds between two looks
STALL_TIMEOUT = 300.0  # seconds at one place before the stacks are shown; the longest steps known take a tenth of it
CRASH_BYTES = 1 << 16  # end of a log in which the stack of a crash is looked for
ANSWER = 10.0  # seconds that rank 0 waits for the stacks of the others
LIBRARIES = (f'{os.sep}site-packages{os.sep}', f'{os.sep}dist-packages{os.sep}', f'{os.sep}lib{os.sep}python', '<')

_steps = 0


def beat() -> None:
    """A training step begins. The same stack at two looks is then no standstill."""
    global _steps
    _steps += 1


def key(*parts: Any) -> str:
    """A key of this job in the store. torchrun keeps one store over its restarts, so the attempt is part of every key."""
    return '/'.join(map(str, ('mmdet3d_ext', os.environ.get('TORCHELASTIC_RESTART_COUNT', '0'), *parts)))


def connect(address: str, port: int, timeout: float) -> dist.TCPStore:
    """A connection of its own to the ranks' store: the process group's blocks while it waits for a key.

    Raises:
        RuntimeError: if nobody answers within ``timeout`` seconds.
    """
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=timeout))


def screen_is_shown() -> bool:
    """Whether this rank's stderr can reach a person: ``torchpack dist-run`` without -v sends that of all but rank 0 to
    /dev/null, Slurm and torchrun can send it to a file."""
    try:
        mode = os.fstat(2)
        return not stat.S_ISREG(mode.st_mode) and mode.st_rdev != os.stat(os.devnull).st_rdev
    except OSError:
        return False


@dataclass(frozen=True)
class Report:
    """Why a rank failed. ``details``: its traceback, if its own screen may not have shown it."""

    rank: int
    text: str
    details: str = ''

    def encoded(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def decoded(cls, data: bytes) -> 'Report':
        return cls(**json.loads(data))


def report_early(address: str, port: int, report: Report, timeout: float = 20.0) -> bool:
    """Tell rank 0 of a failure before the ranks have met, and wait until it has read that; returns whether it could be told."""
    try:
        store = connect(address, port, timeout)
        store.compare_set(key('abort'), '', report.encoded())
    except Exception:
        return False
    wait_until_read(store)
    return True


def wait_until_read(store: dist.TCPStore, timeout: float = READ_TIMEOUT) -> None:
    """Wait until rank 0 has shown a report, or has ended: a launcher ends it as soon as the rank that failed has ended."""
    deadline = time.monotonic() + timeout
    with contextlib.suppress(Exception):
        while not store.check([key('read')]) and time.monotonic() < deadline:
            time.sleep(0.05)


# ---------------------------------------------------------------------------------------------------------- processes

def place() -> Dict[str, Any]:
    """What another rank of this machine needs to find this process."""
    return {'host': socket.gethostname(), 'boot': _read('/proc/sys/kernel/random/boot_id'), 'pid': os.getpid(),
            'namespace': _link('/proc/self/ns/pid'), 'started': _started(os.getpid())}


def same_machine(one: Dict[str, Any], other: Dict[str, Any]) -> bool:
    """Whether a process id of ``one`` means the same process to ``other`` (two containers of a machine may not share them)."""
    return bool(one['namespace']) and all(one[name] == other[name] for name in ('host', 'boot', 'namespace'))


def alive(where: Dict[str, Any]) -> bool:
    """Whether the process of :func:`place` still runs; a zombie, or another process under its number, does not."""
    return where['started'] is None or _started(where['pid']) == where['started']


def _started(pid: int) -> Optional[str]:
    """When the kernel started this process, in ticks since boot; None for none, or one that has ended."""
    fields = _read(f'/proc/{pid}/stat').rpartition(')')[2].split()  # after the name, which may hold anything
    return None if len(fields) < 20 or fields[0] in 'ZX' else fields[19]


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ''


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ''


# ------------------------------------------------------------------------------------------------------------- stacks

def main_stack() -> Optional[FrameType]:
    """The innermost Python frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident)


def signature(frame: Optional[FrameType]) -> Tuple:
    """Where a thread stands: every function and instruction from the innermost frame outwards. Holds no reference to frames,
    which would keep a step's tensors alive."""
    found = []
    while frame is not None:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def place_of(frame: Optional[FrameType]) -> str:
    """``all_reduce (distributed_c10d.py:2810), called by train_step (mmdet3d_ext/engine/parallel.py:160)``: the innermost
    function, and the innermost one outside libraries."""
    summary = traceback.extract_stack(frame) if frame is not None else []
    if not summary:
        return 'no Python code'
    own = [entry for entry in summary if not any(part in entry.filename for part in LIBRARIES)]
    text = f'{summary[-1].name} ({os.path.basename(summary[-1].filename)}:{summary[-1].lineno})'
    if own and own[-1] is not summary[-1]:
        text += f', called by {own[-1].name} ({os.sep.join(own[-1].filename.split(os.sep)[-3:])}:{own[-1].lineno})'
    return text


def all_stacks() -> str:
    """The main thread's stack in full, the other threads' by the place where they stand."""
    frames, main = sys._current_frames(), threading.main_thread()
    lines = traceback.format_stack(frames[main.ident]) if main.ident in frames else ['  no Python code\n']
    others = [f'  thread {thread.name}: {place_of(frames.get(thread.ident))}\n' for thread in threading.enumerate()
              if thread not in (main, threading.current_thread())]
    return ''.join(lines + others)


# -------------------------------------------------------------------------------------------------------------- watch

class RankWatch(threading.Thread):
    """The thread. It begins while the ranks still meet.

    Args:
        launch: this rank's :class:`.launch.Launch`.
        store: a connection of the thread's own (:func:`connect`), made before it starts: to connect reads the environment in
            C code, which the main thread must not write meanwhile.
        emit: ``emit(text, screen)`` writes to the rank's log file and, if ``screen``, to stderr.
        log: the rank's log file, None before there is one.
        stall_timeout: seconds at one place before all ranks show their stacks; again after twice, four times ... as long.
        interval: seconds between two looks.
    """

    def __init__(self, launch: Any, store: dist.TCPStore, emit: Callable[..., None],
                 log: Callable[[], Optional[str]] = lambda: None, stall_timeout: float = STALL_TIMEOUT,
                 interval: float = INTERVAL):
        super().__init__(name='rank-watch', daemon=True)
        self.launch, self.store, self.emit, self.log = launch, store, emit, log
        self.stall_timeout, self.interval = stall_timeout, interval
        self.stopped = threading.Event()
        self.met = threading.Event()  # all ranks are in the process group
        self.told: Optional[str] = None
        self.own = place()
        self.peers: Dict[int, Optional[Dict[str, Any]]] = {}
        self.since, self.last = time.monotonic(), None
        self.dumps = 0  # of the job
        self.repeats = 0  # of this standstill
        self._armed, self._stream = -1e9, None
        self.start()

    def report(self, report: Report) -> None:
        """Tell the other ranks why this one ends; the first report of a job stands. By rank 0: it has been shown."""
        with contextlib.suppress(Exception):  # the store's host is gone: the other ranks notice by themselves
            self.store.compare_set(key('abort'), '', report.encoded())
            if self.launch.is_master:
                self.store.set(key('read'), '1')

    def close(self) -> None:
        """Called by the main thread at the end, between two barriers: from here on nothing is missed any more."""
        self.stopped.set()
        if threading.current_thread() is not self:
            self.join(5 * self.interval)  # a thread in the store's code must not meet the interpreter's end
        faulthandler.cancel_dump_traceback_later()

    def run(self) -> None:
        told = False  # the others where this process is
        while not self.stopped.is_set():
            try:
                if not told:
                    self.store.set(key('place', self.launch.rank), json.dumps(self.own))
                    told = True
                self._look()
            except Exception:  # gone
                if self.met.is_set() and not self._still_there():
                    return
            self.stopped.wait(self.interval)

    def _look(self) -> None:
        if self.store.check([key('abort')]):
            self._end(Report.decoded(self.store.get(key('abort'))))
        if not self.met.is_set():
            return
        for rank in self._dead():
            self._end(Report(rank, f'rank {rank} (process {self.peers[rank]["pid"]} on {self.peers[rank]["host"]}) ended without '
                                   'a word: killed by the system (out of memory? dmesg tells) or crashed in a library',
                             self._crash_of(rank)))
        self._watch_main_thread()
        if self.store.check([key('stall', self.dumps)]):
            self._dump()
        self._arm()

    # ---- the end of another rank ----------------------------------------------------------------------------------------
    def _still_there(self) -> bool:
        """Whether the store answers again; ends this rank if not."""
        if self.stopped.wait(2 * self.interval):
            return False
        with contextlib.suppress(Exception):
            self.store.check([key('abort')])
            return True
        if self.stopped.wait(3 * self.interval):
            return False
        text = f'lost the connection to {self.launch.master_addr}:{self.launch.master_port}: rank 0 ended'
        first = self.peers.get(0)
        if first is not None and not alive(first):
            text += f' without a word (process {first["pid"]}): killed by the system (out of memory? dmesg tells) or crashed'
        self._end(Report(0, text))
        return False

    def _dead(self) -> List[int]:
        """Ranks of this machine whose process is gone although nobody said so."""
        for rank in range(self.launch.world_size):
            if rank not in self.peers and rank != self.launch.rank and self.store.check([key('place', rank)]):
                found = json.loads(self.store.get(key('place', rank)))
                self.peers[rank] = found if same_machine(found, self.own) else None
        gone = [rank for rank, found in self.peers.items() if found is not None and not alive(found)]
        # A rank that reports ends after it; look once more before it is called silent.
        return [] if not gone or self.store.check([key('abort')]) else gone

    def _crash_of(self, rank: int) -> str:
        """What faulthandler wrote into the log of another rank of this machine when it crashed; empty if nothing."""
        own = self.log()
        if own is None:
            return ''
        path, text = re.sub(rf'_{self.launch.rank}\.log$', f'_{rank}.log', own), ''
        with contextlib.suppress(OSError), open(path, 'rb') as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - CRASH_BYTES))
            text = stream.read().decode(errors='replace')
        start = text.rfind('Fatal Python error')
        return '' if path == own or start < 0 else f'{path}:\n{text[start:]}'

    def _end(self, report: Report) -> None:
        if self.stopped.is_set() or report.rank == self.launch.rank:
            return
        self.told = report.text
        # The rank that failed shows its error itself; one line for the whole job is enough beside it.
        self.emit(f'[rank {self.launch.rank}] stops, because {report.text}', screen=self.launch.is_master)
        if self.launch.is_master and report.details:
            self.emit(report.details)
        self.report(report)  # for ranks of other machines, if this rank found it out
        time.sleep(GRACE + 3 * self.interval)  # the rank that failed ends first, so that launchers name it
        os._exit(1)

    # ---- standstills --------------------------------------------------------------------------------------------------------
    def _watch_main_thread(self) -> None:
        now, here = time.monotonic(), (_steps, signature(main_stack()))
        if here != self.last:
            self.last, self.since, self.repeats = here, now, 0
        elif now - self.since >= self.stall_timeout * 2 ** self.repeats:
            text = (f'rank {self.launch.rank} has been at the same place for {now - self.since:.0f} s: '
                    f'{place_of(main_stack())}')
            self.store.compare_set(key('stall', self.dumps), '', text)

    def _dump(self) -> None:
        """Show this rank's stack in its log and, by rank 0, all stacks on the screen."""
        number, self.dumps, self.repeats = self.dumps, self.dumps + 1, self.repeats + 1
        why = self.store.get(key('stall', number)).decode(errors='replace')
        stack = all_stacks()
        summary = f'rank {self.launch.rank}: {place_of(main_stack())}'
        self.store.set(key('stack', number, self.launch.rank), json.dumps([summary, stack]))
        self.emit(f'STALL: {why}. Stack of rank {self.launch.rank}:\n{stack}', screen=False)
        deadline = time.monotonic() + (ANSWER if self.launch.is_master else 2 * ANSWER)
        if not self.launch.is_master:  # rank 0 shows all; if it cannot, each shows its own
            while time.monotonic() < deadline and not self.stopped.wait(self.interval):
                if self.store.check([key('shown', number)]):
                    return
            if not self.stopped.is_set():
                self.emit(f'STALL: {why}. Stack of rank {self.launch.rank}:\n{stack}')
            return
        found: Dict[int, Tuple[str, str]] = {}
        while len(found) < self.launch.world_size and time.monotonic() < deadline:
            for rank in range(self.launch.world_size):
                if rank not in found and self.store.check([key('stack', number, rank)]):
                    found[rank] = tuple(json.loads(self.store.get(key('stack', number, rank))))
            if len(found) < self.launch.world_size and self.stopped.wait(0.2):
                return
        self.store.set(key('shown', number), '1')
        silent = f'no answer within {ANSWER:.0f} s: it holds the interpreter lock, or its machine is gone'
        lines = [f'STALL: {why}. The {self.launch.world_size} ranks stand at:']
        lines += ['  ' + found.get(rank, (f'rank {rank}: {silent}', ''))[0] for rank in range(self.launch.world_size)]
        for rank, (_, text) in sorted(found.items()):
            lines += [f'--- stack of rank {rank} ---', text.rstrip()]
        self.emit('\n'.join(lines + ['--- the job goes on waiting; a rank that stands elsewhere than the others is the one that '
                                     'they wait for ---']))

    def _arm(self) -> None:
        """faulthandler shows the stacks should this thread not come back: its clock needs no interpreter lock."""
        if time.monotonic() - self._armed < min(10.0, self.stall_timeout / 4):
            return
        self._armed = time.monotonic()
        with contextlib.suppress(AttributeError, ValueError, OSError):  # no stderr, or one without a descriptor
            # Later than this thread would: only a held interpreter lock keeps it from showing the stacks.
            later = max(5.0, 0.1 * self.stall_timeout)
            faulthandler.dump_traceback_later(self.stall_timeout * 2 ** self.repeats + later, file=self._fault_stream())

    def _fault_stream(self) -> Any:
        if screen_is_shown() or self.log() is None:
            return sys.__stderr__
        if self._stream is None or self._stream.name != self.log():
            self._stream = open(self.log(), 'a')  # stays open: faulthandler writes to its descriptor
        return self._stream


# ------------------------------------------------------------------------------------------------------------ crashes

_crash_stream: Optional[IO[str]] = None


def show_crashes(log: Optional[str] = None) -> None:
    """A crash in a library (SIGSEGV, SIGABRT, SIGBUS ...) writes the Python stack to the file ``log``, or to stderr."""
    global _crash_stream
    stream = sys.__stderr__
    if log is not None:
        with contextlib.suppress(OSError):
            _crash_stream = stream = open(log, 'a')
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no stderr, or one without a descriptor
        faulthandler.enable(file=stream, all_threads=True)
