"""Results of all ranks on one, without a process group as well.

Everything here is a no-op for a single process. Collectives must be called by all ranks in the same order.
"""
from __future__ import annotations

from itertools import islice
from typing import Any, Callable, Dict, List, Mapping, Optional, TypeVar

import torch
import torch.distributed as dist

from ..errors import RankZeroError

T = TypeVar('T')


def world_size() -> int:
    """Number of ranks (1 without a process group)."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This rank (0 without a process group)."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def collective_device() -> torch.device:
    """Where tensors must lie for a collective of the current backend."""
    if world_size() > 1 and dist.get_backend() == 'nccl':
        return torch.device('cuda', torch.cuda.current_device())
    return torch.device('cpu')


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over ranks as a new tensor on the CPU, exact for integers; the argument is not changed."""
    if world_size() == 1:
        return tensor.detach().cpu().clone()
    total = tensor.detach().to(collective_device(), copy=True).contiguous()
    dist.all_reduce(total)
    return total.cpu()


def all_gather_object(value: T) -> List[T]:
    """Every rank's value, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: List[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_results(results: Mapping[str, T], chunk: int = 256) -> Optional[Dict[str, T]]:
    """All ranks' results by sample token, on rank 0 (``None`` elsewhere).

    A sample that several ranks evaluated (a sampler that fills up its last batch) enters once, from the lowest rank. Sent in
    pieces of ``chunk`` samples, so that no rank holds a second copy of everything.
    """
    if world_size() == 1:
        return dict(results)
    pieces = max(all_gather_object(-(-len(results) // chunk)))
    merged: List[Dict[str, T]] = [{} for _ in range(world_size())]
    items = iter(results.items())
    for _ in range(pieces):
        piece = dict(islice(items, chunk))
        received: Optional[List[Any]] = [None] * world_size() if rank() == 0 else None
        dist.gather_object(piece, received, dst=0)
        if received is not None:
            for mine, part in zip(merged, received):
                mine.update(part)
    if rank() != 0:
        return None
    out: Dict[str, T] = {}
    for mine in merged:
        for token, result in mine.items():
            out.setdefault(token, result)
    return out


def on_rank_zero(work: Callable[[], T]) -> T:
    """Do ``work`` on rank 0 and give its result to all ranks; if it fails there, every rank raises instead of waiting.

    Raises:
        RankZeroError: on the other ranks, with rank 0's message. Rank 0 raises its own exception.
    """
    if world_size() == 1:
        return work()
    outcome: List[Any] = [None, None]
    failure: Optional[BaseException] = None
    if rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            failure = error
            outcome[1] = f'{type(error).__name__}: {error}'
    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise RankZeroError(f'rank 0 failed: {outcome[1]}')
    return outcome[0]
