"""What a loader reads: every draw with its own random numbers, samples that cannot be read, and which sample a worker died on."""
from __future__ import annotations

import contextlib
import signal
import warnings
from typing import Any, List, Optional, Sized

import numpy as np
import torch
from torch.utils.data import Dataset

from ..errors import text_of
from .epoch_state import own_random_numbers, shared_zeros

POLICIES = ('raise', 'skip')
TRIES = 100  # samples in a row that are drawn for one that cannot be read
RECORD = 200  # bytes of a worker's note


class SampleError(RuntimeError):
    """A sample that cannot be loaded; the message names the sample, the step and the file."""


class SampleFault(SampleError):
    """A sample whose loading failed for another reason than its files and settings: most likely a fault of a step."""


class Draw(int):
    """An index with its place in training: ``position`` in the epoch's order over all ranks, from 0, and ``epoch``."""

    def __new__(cls, index: int, position: int, epoch: int) -> 'Draw':
        self = super().__new__(cls, index)
        self.position, self.epoch = position, epoch
        return self

    def __reduce__(self) -> tuple:
        return Draw, (int(self), self.position, self.epoch)


class SampleReader(Dataset):
    """A data set as the loader sees it; attributes are those of the data set.

    A :class:`Draw` is read with random numbers from (seed, epoch, position): what a draw gives does not depend on the number of
    workers or ranks, nor on what was read before it, so a run can be continued at any step. The process's own generators are
    left as they were.

    Args:
        dataset: what is read.
        seed: of augmentation; None reads with the process's generators.
        policy: ``'raise'``: a sample that cannot be read (:class:`SampleError`, ``OSError``) ends the run. ``'skip'``: it is
            reported with its file and another random one is read in its place.
        budget: how many different samples may be unreadable before the run ends all the same; below 1 a share of the data set.
            Every rank counts its own.

    Raises:
        ValueError: for another policy or a budget below 0.
    """

    def __init__(self, dataset: Sized, seed: Optional[int] = None, policy: str = 'raise', budget: float = 0):
        if policy not in POLICIES:
            raise ValueError(f'data.unreadable.policy must be one of {POLICIES}, got {policy!r}')
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget >= 0:
            raise ValueError(f'data.unreadable.budget must be a number >= 0 (below 1: a share of the samples), got {budget!r}')
        self.dataset, self.seed, self.policy = dataset, seed, policy
        self.allowed = int(budget * len(dataset) if budget < 1 else min(budget, len(dataset)))
        # Shared with the workers: which samples were unreadable.
        self._unreadable = shared_zeros(len(dataset), dtype=torch.uint8) if policy == 'skip' else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') or name == 'dataset':
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if self.seed is None or not isinstance(index, Draw):
            return self._read(int(index))
        with own_random_numbers(self.seed, index.epoch, index.position):
            return self._read(int(index))

    def _read(self, index: int) -> Any:
        for _ in range(TRIES):
            note(f'sample {index}')
            try:
                sample = self.dataset[index]
                note('')
                return sample
            except SampleFault:
                raise
            except (SampleError, OSError) as error:
                if self._unreadable is not None:
                    self._count(index, error)
                elif isinstance(error, SampleError):
                    raise
                else:  # as an error of ours, so that it arrives from a worker with its text and as what it is
                    raise SampleError(f'sample {index}: {text_of(error)}') from error
            index = int(np.random.randint(len(self)))
        raise SampleError(f'{TRIES} random samples in a row cannot be read')

    def _count(self, index: int, error: Exception) -> None:
        self._unreadable[index] = 1
        found, text = self.unreadable(), text_of(error)
        if found > self.allowed:
            raise SampleError(f'{text} (sample {found} of {len(self)} that cannot be read; data.unreadable.budget allows '
                              f'{self.allowed})') from error
        warnings.warn(f'{text}. The sample is left out and a random other one takes its place ({found} of {len(self)} samples '
                      f'cannot be read, data.unreadable.budget allows {self.allowed})', stacklevel=1)

    def unreadable(self) -> int:
        """Number of different samples that this rank could not read so far."""
        return 0 if self._unreadable is None else int(self._unreadable.sum())


# ---------------------------------------------------------------------------------------------- what a worker is reading

_note: Optional[np.ndarray] = None


def make_notes(workers: int) -> torch.Tensor:
    """Shared memory in which each worker notes what it reads."""
    return shared_zeros(max(workers, 1), RECORD, dtype=torch.uint8)


def enter_worker(notes: Optional[torch.Tensor], worker_id: int) -> None:
    """In a loader worker: later :func:`note` calls write to its row."""
    global _note
    _note = None if notes is None else notes[worker_id].numpy()


def note(text: str) -> None:
    """Say what this process reads now (only in a loader worker), so that its death can be told with the sample."""
    if _note is None:
        return
    raw = text.encode(errors='replace')[:RECORD]
    _note[:len(raw)] = np.frombuffer(raw, dtype=np.uint8)
    _note[len(raw):] = 0


def dead_workers(iterator: Any, notes: Optional[torch.Tensor]) -> List[str]:
    """For each worker of a loader's iterator that ended by itself: who, how, and what it was reading."""
    found = []
    for number, process in enumerate(getattr(iterator, '_workers', ())):
        code = process.exitcode
        if code is None or code == 0:
            continue
        how = f'ended with exit code {code}'
        if code < 0:
            with contextlib.suppress(ValueError):
                how = f'was killed by {signal.Signals(-code).name}'
        text = '' if notes is None else bytes(notes[number].tolist()).rstrip(b'\0').decode(errors='replace')
        found.append(f'loader worker {number} (pid {process.pid}) {how}{_hint(-code)} while it read '
                     f'{text or "no sample (it was making or sending a batch)"}')
    return found


def _hint(number: int) -> str:
    return {signal.SIGKILL: ' (most often the kernel, for want of memory: lower data.workers_per_gpu)',
            signal.SIGBUS: ' (most often /dev/shm is full)',
            signal.SIGSEGV: ' (a fault in a compiled library)'}.get(number, '')
