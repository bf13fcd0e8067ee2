"""The epoch, known to loader workers, and random numbers of this process: set, kept, given back."""
from __future__ import annotations

import contextlib
import math
import mmap
import os
import random
from typing import Any, Dict, Iterator, Mapping, Optional, Tuple

import numpy as np
import torch


def seed_process(*numbers: int) -> None:
    """Seed ``random``, numpy's and torch's global CPU generators of this process from whole numbers >= 0."""
    states = np.random.SeedSequence([int(n) for n in numbers]).generate_state(3)
    random.seed(int(states[0]))
    np.random.seed(int(states[1]))
    torch.default_generator.manual_seed(int(states[2]))


def random_state(cuda: bool = False) -> Dict[str, Any]:
    """The state of ``random``, numpy's and torch's global generators, as tensors and numbers.

    Args:
        cuda: also that of the current GPU's generator (``cuda``), if CUDA is in use.
    """
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state = {'python': [version, torch.tensor(numbers, dtype=torch.int64), gauss],
             'numpy': [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
             'torch': torch.get_rng_state()}
    if cuda and torch.cuda.is_available() and torch.cuda.is_initialized():
        state['cuda'] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to what :func:`random_state` gave."""
    version, numbers, gauss = state['python']
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state['numpy']
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state['torch'])
    if 'cuda' in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state['cuda'])


@contextlib.contextmanager
def own_random_numbers(*numbers: int) -> Iterator[None]:
    """Generators seeded from ``numbers`` inside, as they were before outside (CPU generators only)."""
    held = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_process(*numbers)
    try:
        yield
    finally:
        random.setstate(held[0])
        np.random.set_state(held[1])
        torch.set_rng_state(held[2])


def shared_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that this process and its forked workers see alike: in /dev/shm, or in memory without a name where nothing can be made
    there (full, read-only, not mounted)."""
    zeros = torch.zeros(*shape, dtype=dtype)
    try:
        return zeros.share_memory_()
    except RuntimeError:
        place = mmap.mmap(-1, math.prod(shape) * zeros.element_size())
        return torch.frombuffer(place, dtype=dtype).view(*shape)


class EpochState:
    """The current epoch in shared memory, so that workers that live through several epochs see it change."""

    def __init__(self):
        self._epoch = shared_zeros(1, dtype=torch.int64)
        self._entered: Optional[Tuple[int, int]] = None

    @property
    def epoch(self) -> int:
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        self._epoch[0] = int(epoch)

    def enter(self) -> bool:
        """To be called at every access; True at the first one of an epoch in this process."""
        now = (self.epoch, os.getpid())
        if now == self._entered:
            return False
        self._entered = now
        return True
