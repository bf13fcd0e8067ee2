"""Which rank loads which samples, in which order."""
from __future__ import annotations

from typing import Iterator, Optional, Sized

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from .reader import Draw


def _group(num_replicas: Optional[int], rank: Optional[int]) -> tuple:
    """(world size, rank), from the process group where not given."""
    ready = dist.is_available() and dist.is_initialized()
    world = num_replicas if num_replicas is not None else dist.get_world_size() if ready else 1
    rank = rank if rank is not None else dist.get_rank() if ready else 0
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f'sampler: rank must lie in [0, num_replicas), got rank {rank} of {world}')
    return world, rank


class DistributedTrainSampler(Sampler):
    """Every sample once per epoch, in an order that depends on (seed, epoch) only; whole batches on every rank.

    The order is cut into global batches of ``num_replicas * samples_per_gpu``; rank r gets its slice of each, so that what a
    step sees does not depend on how many ranks share it. The last batch is filled up from the start of the order.

    The indices are :class:`.reader.Draw`: each knows its place in the order and the epoch.

    Args:
        dataset: only its length is used; if it has ``set_epoch`` it is told the epoch, too.
        shuffle: random order (else the data set's).
    """

    def __init__(self, dataset: Sized, samples_per_gpu: int = 1, num_replicas: Optional[int] = None,
                 rank: Optional[int] = None, seed: int = 0, shuffle: bool = True):
        if samples_per_gpu < 1:
            raise ValueError(f'sampler: samples_per_gpu must be at least 1, got {samples_per_gpu}')
        if len(dataset) == 0:
            raise ValueError('sampler: the training set is empty')
        self.dataset, self.samples_per_gpu, self.seed, self.shuffle = dataset, samples_per_gpu, int(seed or 0), shuffle
        self.num_replicas, self.rank = _group(num_replicas, rank)
        self.epoch, self._begin = 0, 0
        self.num_batches = -(-len(dataset) // (self.num_replicas * samples_per_gpu))

    def order(self) -> np.ndarray:
        """(num_batches * num_replicas * samples_per_gpu,) indices of the whole epoch over all ranks."""
        total = self.num_batches * self.num_replicas * self.samples_per_gpu
        n = len(self.dataset)
        order = np.arange(n)
        if self.shuffle:
            generator = torch.Generator().manual_seed(int(np.random.SeedSequence([self.seed, self.epoch]).generate_state(1)[0]))
            order = torch.randperm(n, generator=generator).numpy()
        return np.resize(order, total)  # repeats from the start

    def __iter__(self) -> Iterator[Draw]:
        shape = self.num_batches, self.num_replicas, self.samples_per_gpu
        order = self.order()
        places = np.arange(len(order)).reshape(shape)[self._begin:, self.rank].reshape(-1)
        self._begin = 0
        return iter([Draw(index, place, self.epoch) for index, place in zip(order[places].tolist(), places.tolist())])

    def begin_at(self, batch: int) -> None:
        """Let the next iteration (only that) leave out this rank's first ``batch`` batches."""
        if not 0 <= batch <= self.num_batches:
            raise ValueError(f'sampler: batch {batch} is not in an epoch of {self.num_batches}')
        self._begin = batch

    def __len__(self) -> int:
        return self.num_batches * self.samples_per_gpu

    def set_epoch(self, epoch: int) -> None:
        self.epoch = int(epoch)
        if hasattr(self.dataset, 'set_epoch'):
            self.dataset.set_epoch(epoch)


class EvalSampler(Sampler):
    """Every sample exactly once over all ranks: rank r takes r, r + world, r + 2 world, ...

    Ranks may get one sample more or less than each other; nothing is repeated, so nothing is counted twice.
    """

    def __init__(self, dataset: Sized, num_replicas: Optional[int] = None, rank: Optional[int] = None, samples_per_gpu: int = 1):
        self.num_replicas, self.rank = _group(num_replicas, rank)
        self.samples_per_gpu, self._begin = samples_per_gpu, 0
        self.indices = range(self.rank, len(dataset), self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        begin, self._begin = self._begin, 0
        return iter(self.indices[begin * self.samples_per_gpu:])

    def begin_at(self, batch: int) -> None:
        """Let the next iteration (only that) leave out this rank's first ``batch`` batches."""
        self._begin = batch

    def __len__(self) -> int:
        return len(self.indices)

    def set_epoch(self, epoch: int) -> None:
        """The order never changes."""
