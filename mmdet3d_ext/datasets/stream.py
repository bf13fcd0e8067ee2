"""Batches of an epoch from any step on, with loader workers that may die."""
from __future__ import annotations

import itertools
import logging
import time
from typing import Any, Iterator, List, Optional, Tuple

from torch.utils.data import DataLoader

from .reader import SampleError, dead_workers

ATTEMPTS = 3  # that the workers get at one batch


class WorkerDied(SampleError):
    """Loader workers died again and again at the same batch; the message names what they were reading."""


def batches(loader: DataLoader, begin: int, logger: logging.Logger) -> Iterator[Tuple[int, Any]]:
    """(number, batch) of the loader's epoch, from batch ``begin`` on.

    If a worker dies (killed for memory, a bus error, a fault in a library), an alarm names what it was reading, and workers
    start again at the batch that is next: draws depend on their place alone, so nothing is lost or repeated.

    Raises:
        WorkerDied: after three attempts at the same batch.
    """
    _leave_deaths_to_us()
    number, failed = begin, 0
    iterator = _start(loader, begin)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:  # a batch that a dead worker had sent cannot be fetched any more
            dead = [] if 'in DataLoader worker process' in str(error) else _wait_for_dead(iterator, loader)
            if not dead:
                raise
            failed += 1
            text = '; '.join(dead)
            if failed >= ATTEMPTS or not hasattr(loader.sampler, 'begin_at'):
                raise WorkerDied(f'{text}. This was attempt {failed} at batch {number + 1} of the epoch') from error
            logger.error('ALARM: %s. The workers are started again at batch %d of the epoch, nothing is lost', text, number + 1)
            iterator._shutdown_workers()
            _end_workers(loader)
            iterator = _start(loader, number)
            continue
        yield number, batch
        number, failed = number + 1, 0


def _wait_for_dead(iterator: Any, loader: DataLoader, seconds: float = 3.0) -> List[str]:
    """:func:`.reader.dead_workers`; the kernel may take a moment to tell."""
    end = time.monotonic() + seconds
    while hasattr(iterator, '_workers'):
        dead = dead_workers(iterator, getattr(loader, 'notes', None))
        if dead or time.monotonic() > end:
            return dead
        time.sleep(0.05)
    return []


def close(loader: Optional[DataLoader]) -> None:
    """End what a loader holds when it is not needed any more: persistent workers, files of batches."""
    if loader is None:
        return
    _end_workers(loader)
    if hasattr(loader.collate_fn, 'close'):
        loader.collate_fn.close()


def _end_workers(loader: DataLoader) -> None:
    """Now: left to the garbage collector, whose order is anyone's guess, persistent workers can take five seconds each."""
    iterator = getattr(loader, '_iterator', None)
    if iterator is not None:
        loader._iterator = None
        iterator._shutdown_workers()


def _start(loader: DataLoader, begin: int) -> Iterator[Any]:
    sampler = getattr(loader, 'sampler', None)
    if begin and not hasattr(sampler, 'begin_at'):
        return itertools.islice(iter(loader), begin, None)
    if hasattr(sampler, 'begin_at'):
        sampler.begin_at(begin)
    return iter(loader)


def _leave_deaths_to_us() -> None:
    """Keep torch from raising in the middle of a training step when a worker dies: the next batch tells it as well."""
    from torch.utils.data._utils import signal_handling
    signal_handling._SIGCHLD_handler_set = True
