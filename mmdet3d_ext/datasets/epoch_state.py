"""The epoch, known to loader workers, and the seeds of augmentation that follow from it."""
from __future__ import annotations

import os
import random
from typing import Optional, Tuple

import numpy as np
import torch
from torch.utils.data import get_worker_info


def seed_process(*numbers: int) -> None:
    """Seed ``random``, numpy's and torch's global generators of this process from whole numbers >= 0."""
    states = np.random.SeedSequence([int(n) for n in numbers]).generate_state(3)
    random.seed(int(states[0]))
    np.random.seed(int(states[1]))
    torch.manual_seed(int(states[2]))


class EpochState:
    """The current epoch in shared memory, so that workers that live through several epochs see it change.

    With :meth:`seed_with`, each process's generators are set at the start of every epoch from (seed, rank, epoch, worker):
    augmentation differs between epochs, ranks and workers, and a resumed run continues as an uninterrupted one would.
    """

    def __init__(self):
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._entered: Optional[Tuple[int, int]] = None
        self._seed: Optional[Tuple[int, int]] = None

    @property
    def epoch(self) -> int:
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        self._epoch[0] = int(epoch)

    def seed_with(self, seed: Optional[int], rank: int = 0) -> None:
        self._seed = None if seed is None else (int(seed), int(rank))
        self._entered = None

    def enter(self) -> bool:
        """To be called at every access; True at the first one of an epoch in this process (generators were just set)."""
        now = (self.epoch, os.getpid())
        if now == self._entered:
            return False
        self._entered = now
        if self._seed is not None:
            worker = get_worker_info()
            seed_process(*self._seed, self.epoch, 0 if worker is None else worker.id + 1)
        return True
