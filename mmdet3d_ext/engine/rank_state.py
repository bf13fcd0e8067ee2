"""What differs between the ranks in the middle of an epoch: random numbers and BatchNorm statistics."""
from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

import torch
import torch.distributed as dist
from torch import nn

from ..datasets.epoch_state import random_state, set_random_state
from .checkpoint import plain
from .seeding import derive, seed_all


def named_statistics(model: nn.Module) -> Dict[str, torch.Tensor]:
    """Running means and variances of all layers that keep them, by full name (the tensors themselves, not copies)."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            for part in ('running_mean', 'running_var'):
                if getattr(module, part, None) is not None:
                    found[f'{name}.{part}' if name else part] = getattr(module, part)
    return found


def gather(model: nn.Module, ema: Any = None) -> Optional[List[Dict[str, Any]]]:
    """Every rank's state, in rank order, on rank 0 (None on the others). A collective.

    At an epoch's end the statistics are averaged and the next epoch seeds anew, so only checkpoints in between hold this.

    Args:
        ema: a :class:`.hooks.WeightAverageHook`, whose averaged statistics differ as well.
    """
    state = {'random': random_state(cuda=True), 'statistics': named_statistics(model)}
    if ema is not None:
        state['ema'] = {name: ema.average[name] for name in state['statistics']}
    state = plain(state)
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return [state]
    states: Optional[List[Any]] = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(state, states, dst=0)
    return states


@torch.no_grad()
def restore(states: List[Mapping[str, Any]], rank: int, world_size: int, model: nn.Module, ema: Any = None) -> None:
    """Give this rank its statistics back; with another number of ranks every rank gets their mean over the ranks of then."""
    def pick(key: str) -> Dict[str, torch.Tensor]:
        if len(states) == world_size:
            return dict(states[rank].get(key) or {})
        every = [state.get(key) or {} for state in states]
        return {name: torch.stack([one[name].float() for one in every]).mean(0).to(value.dtype)
                for name, value in every[0].items()}

    own = named_statistics(model)
    for name, value in pick('statistics').items():
        if name in own:
            own[name].copy_(value)
    if ema is not None:
        ema.replace(pick('ema'))


def restore_random(states: List[Mapping[str, Any]], rank: int, world_size: int, seed: int, *place: int) -> None:
    """This rank's generators as they were; with another number of ranks seeded from (seed, rank, place)."""
    if len(states) == world_size:
        set_random_state(states[rank]['random'])
    else:
        seed_all(derive(seed, rank, *place))
