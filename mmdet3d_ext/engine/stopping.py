"""Signals that ask a run to stop: it writes a checkpoint after the current step and ends with its own exit code."""
from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Dict, Iterator, Optional

# Slurm: --signal=USR1@300 sends SIGUSR1 five minutes before the time limit; scancel, preemption, mpirun send SIGTERM; a terminal
# and torchrun's agent pass on Ctrl-C as SIGINT.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: "try again later"
# Seconds after a Ctrl-C in which another signal is the same one again: a launcher passes on what the terminal sent to all its
# processes. Alone only programs like timeout repeat it, at once.
ECHO, ECHO_ALONE = 2.0, 0.2


class Stopped(Exception):
    """All ranks stop here because one was asked to. ``checkpoint``: what was written, or None if that failed."""

    def __init__(self, why: str, checkpoint: Optional[str]):
        super().__init__(why)
        self.why, self.checkpoint = why, checkpoint


class StopSignals:
    """Notes the signals while active; the training loop asks for them between steps.

    A second Ctrl-C raises KeyboardInterrupt at once. It may arrive as SIGTERM: torchrun's agent turns it into one. Within
    :meth:`at_once` (an evaluation, which has no step whose end could be waited for) the first one does.

    A context manager. Outside the main thread, where Python cannot receive signals, it does nothing.

    Args:
        ranks: number of processes of the run.
        speaks: whether this one says what a Ctrl-C does.
    """

    def __init__(self, ranks: int = 1, speaks: bool = True):
        self.received: Optional[str] = None
        self.speaks, self._echo = speaks, ECHO_ALONE if ranks == 1 else ECHO
        self._before: Dict[int, Any] = {}
        self._interrupted: Optional[float] = None  # when the first Ctrl-C came
        self._at_once = False
        self._process = os.getpid()

    def __enter__(self) -> 'StopSignals':
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Ctrl-C ends what runs in here without waiting for a step.

        Raises:
            KeyboardInterrupt: also if it came before.
        """
        self._at_once = True
        try:
            if self._interrupted is not None:
                raise KeyboardInterrupt
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        if os.getpid() != self._process:  # a loader worker that has not yet set its own; the trainer ends it
            return
        now = time.monotonic()
        if self._interrupted is not None:
            if number in (signal.SIGINT, signal.SIGTERM) and now - self._interrupted > self._echo:
                raise KeyboardInterrupt
            return
        self.received = self.received or signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupted = now
            if self._at_once:
                raise KeyboardInterrupt
            if self.speaks:  # not through logging or print: a handler may interrupt them while they hold their locks
                with contextlib.suppress(OSError):
                    os.write(2, b'Ctrl-C: this step ends, a checkpoint is written, then training stops (exit code 75); a second '
                                b'Ctrl-C stops at once, without checkpoint (130)\n')
