"""BatchNorm statistics over ranks."""
from __future__ import annotations

from typing import Any, List

import torch
import torch.distributed as dist
from mmcv.runner import HOOKS, Hook

from ..rank_state import named_statistics


@HOOKS.register_module()
class BatchNormSyncHook(Hook):
    """After each epoch, before it is saved and evaluated: running statistics of BatchNorm become their mean over ranks.

    Ranks see different samples, so their statistics differ. Without this the checkpoint would hold rank 0's, each rank would
    evaluate another model, and a resumed run would continue differently on the other ranks.

    Args:
        ema: a :class:`WeightAverageHook`, whose averaged statistics are treated the same way.
    """

    def __init__(self, ema: Any = None):
        self.ema = ema

    def after_train_epoch(self, runner: Any) -> None:
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return
        own = named_statistics(getattr(runner.model, 'module', runner.model))
        average_over_ranks(list(own.values()))
        if self.ema is not None:
            average_over_ranks([self.ema.average[name] for name in own])


@torch.no_grad()
def average_over_ranks(tensors: List[torch.Tensor]) -> None:
    """Replace each tensor by its mean over ranks, in one collective."""
    if not tensors:
        return
    flat = torch.cat([t.detach().float().flatten() for t in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(piece.view_as(tensor))
