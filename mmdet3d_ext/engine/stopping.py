"""Signals that ask a run to stop: it writes a checkpoint after the current step and ends with its own exit code."""
from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Dict, Optional

# Slurm: --signal=USR1@300 sends SIGUSR1 five minutes before the time limit; scancel, preemption, torchrun, mpirun send SIGTERM.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: "try again later"


class Stopped(Exception):
    """All ranks stop here because one was asked to. ``checkpoint``: what was written, or None if that failed."""

    def __init__(self, why: str, checkpoint: Optional[str]):
        super().__init__(why)
        self.why, self.checkpoint = why, checkpoint


class StopSignals:
    """Notes the signals while active; the training loop asks for them between steps.

    A context manager. Outside the main thread, where Python cannot receive signals, it does nothing.
    """

    def __init__(self):
        self.received: Optional[str] = None
        self._before: Dict[int, Any] = {}

    def __enter__(self) -> 'StopSignals':
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        self.received = self.received or signal.Signals(number).name
