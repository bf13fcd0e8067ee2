"""An optimizer's moments across stages: kept by the parameter's name, where a resumed run keeps them by number."""
from __future__ import annotations

import logging
from typing import Any, Collection, Dict, List, Mapping

import torch
from torch import nn

from .reading import CheckpointError, read_checkpoint

# Settings of a parameter group that say how an update is computed, not what it is.
KERNELS = ('foreach', 'fused')


def optimizer_info(optimizer: torch.optim.Optimizer, model: nn.Module) -> Dict[str, Any]:
    """``type``, and ``names`` in the order in which ``optimizer.state_dict()`` numbers the parameters ('' if not the model's)."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    names = [known.get(id(parameter), '') for group in optimizer.param_groups for parameter in group['params']]
    return {'type': type(optimizer).__name__, 'names': names}


def keep_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: str, loaded: Collection[str], logger: logging.Logger,
                   allow_unsafe: bool = False) -> List[str]:
    """Give ``optimizer`` the state that ``path`` holds for the tensors which the model took from it.

    Moments belong to a weight, not to a grid: they are kept where the weight was loaded (``loaded``: its names) and has the same
    shape. What is new begins without moments and counts its own steps. Settings (learning rate, weight decay) are the
    configuration's, and the schedule begins anew.

    Returns:
        names of the parameters whose state was kept.

    Raises:
        CheckpointError: the file has no optimizer, does not name its parameters, or is of another optimizer.
    """
    content = read_checkpoint(path, allow_unsafe)
    info, state = content.get('optimizer_info'), (content.get('optimizer') or {}).get('state')
    if not state or not info:
        what = 'holds no optimizer' if not state else 'does not name the parameters of its optimizer (it is of an older version)'
        raise CheckpointError(f'{path} {what}: leave --load-optimizer out (stages file: optimizer: reset), or train that stage again with '
                              'checkpoint_config.save_optimizer true')
    if info['type'] != type(optimizer).__name__:
        raise CheckpointError(f'{path} is of the optimizer {info["type"]}, the configuration has {type(optimizer).__name__}: leave '
                              '--load-optimizer out (stages file: optimizer: reset)')
    numbers = {name: number for number, name in enumerate(info['names']) if name}
    used = {id(parameter) for group in optimizer.param_groups for parameter in group['params']}
    steps_beside = {id(parameter) for group in optimizer.param_groups if group.get('fused') or group.get('capturable')
                    for parameter in group['params']}
    kept, left = [], 0
    for name, parameter in model.named_parameters():
        if id(parameter) not in used:
            continue
        found = state.get(numbers.get(name, -1)) if name in loaded else None
        fits = bool(found) and all(not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape == parameter.shape
                                   for value in found.values())
        if not fits:
            left += 1
            continue
        optimizer.state[parameter] = {key: _moved(value, parameter, key, id(parameter) in steps_beside)
                                      for key, value in found.items()}
        kept.append(name)
    logger.info('optimizer state kept for %d parameters from %s, %d begin without', len(kept), path, left)
    return kept


def with_own_kernels(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
    """An optimizer's state dict with ``optimizer``'s choice of kernels (:data:`KERNELS`) in its groups instead of the saved one.

    torch takes a loaded group's settings as they are; an update that was plain when it was saved would never be fused again, and one
    that was fused could not be told otherwise.
    """
    groups = [dict(saved, **{key: own[key] for key in KERNELS if key in own})
              for saved, own in zip(state['param_groups'], optimizer.param_groups, strict=False)]
    return dict(state, param_groups=groups + list(state['param_groups'][len(groups):]))


def _moved(value: Any, parameter: torch.Tensor, key: str, steps_beside: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if key == 'step':  # of which fused updates are told beside the parameter, all others on the CPU
        return value.to(device=parameter.device if steps_beside else 'cpu', dtype=torch.float32, copy=True)
    if value.dim() == 0:
        return value.clone()
    return value.to(device=parameter.device, dtype=parameter.dtype).clone()
