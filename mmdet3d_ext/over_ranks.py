"""Counts that losses divide by, summed over the ranks of a training.

Data-parallel training averages the gradients of the ranks' losses. Where a loss is a sum over objects divided by their number, and
each rank divides by its own, an object in a crowded rank counts less than one in an empty rank, and the gradient is not that of one
process with all samples. Divided by ``total / ranks`` instead, with the total over all ranks, it is.
"""
from __future__ import annotations

import contextlib
from typing import Iterator, Tuple

import torch
import torch.distributed as dist

_alone = False


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within: this process counts for itself (a step that is computed again for a look at it; other ranks may not follow)."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def count_over_ranks(counts: torch.Tensor) -> Tuple[torch.Tensor, int]:
    """Counts of any shape on the model's device -> (their float32 sum over ranks, number of ranks).

    One small all-reduce with several ranks, so all must come here with the same shape, whatever their samples hold; none in a single
    process or within :func:`alone`. Exact up to 2^24. The host does not wait for the device.
    """
    total = counts.detach().float()
    if _alone or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return total, 1
    total = total.clone()  # of a float32 argument it would be the argument
    dist.all_reduce(total)
    return total, dist.get_world_size()
