"""Counts that losses divide by, summed over the ranks of a training.

Data-parallel training averages the gradients of the ranks' losses. Where a loss is a sum over objects divided by their number, and
each rank divides by its own, an object in a crowded rank counts less than one in an empty rank, and the gradient is not that of one
process with all samples. Divided by ``total / ranks`` instead, with the total over all ranks, it is.
"""
from __future__ import annotations

import contextlib
from typing import Callable, ContextManager, Iterator, Optional, Tuple

import torch
import torch.distributed as dist

Count = Callable[[torch.Tensor], Tuple[torch.Tensor, int]]
_instead: Optional[Count] = None


def count_over_ranks(counts: torch.Tensor) -> Tuple[torch.Tensor, int]:
    """Counts of any shape on the model's device -> (their float32 sum over ranks, number of ranks).

    One small all-reduce with several ranks, so all must come here with the same shape, whatever their samples hold; none in a single
    process or within :func:`alone`. Exact up to 2^24. The host does not wait for the device.
    """
    total = counts.detach().float()
    if _instead is not None:
        return _instead(total)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return total, 1
    total = total.clone()  # of a float32 argument it would be the argument
    dist.all_reduce(total)
    return total, dist.get_world_size()


@contextlib.contextmanager
def counted_by(count: Count) -> Iterator[None]:
    """Within: ``count`` (float32 counts -> sum, ranks) in place of the exchange."""
    global _instead
    before, _instead = _instead, count
    try:
        yield
    finally:
        _instead = before


def alone() -> ContextManager[None]:
    """Within: this process counts for itself (a step that is computed again for a look at it; other ranks may not follow)."""
    return counted_by(lambda counts: (counts, 1))
