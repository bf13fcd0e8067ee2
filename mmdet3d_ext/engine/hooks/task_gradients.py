"""How strongly each task pulls at the weights that the tasks share, and whether they pull together."""
from __future__ import annotations

from typing import Any, Dict, List, Mapping

import torch
from mmcv.runner import HOOKS, Hook
from torch import nn

from ..launch import UserError
from ..parallel import LOSS_PREFIX


@HOOKS.register_module()
class TaskGradientHook(Hook):
    """Logs ``stats/<task>/trunk_grad_norm`` and ``stats/<task>-<task>/trunk_grad_cos`` of this rank's samples.

    The shared trunk is every parameter that the losses of at least two tasks (``loss/<task>/...``) reach. Each look costs one more
    backward pass per task, and memory for two gradients of the trunk.

    Args:
        interval: steps between two looks.
    """

    def __init__(self, interval: int = 100):
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise ValueError(f'guard.task_gradients must be a whole number of steps >= 1 or null, got {interval!r}')
        self.interval = interval

    def after_train_iter(self, runner: Any) -> None:
        if runner.iter % self.interval:
            return
        model = getattr(runner.model, 'module', runner.model)
        try:
            values = trunk_gradients(model, task_losses(runner.outputs['losses']))
        except RuntimeError as error:
            if 'Checkpointing is not compatible' not in str(error):
                raise
            raise UserError('key guard.task_gradients cannot look through recomputation of the older kind (with_cp of mmdet); set '
                            'it to null, or with_cp to false') from error
        if values:
            runner.log_buffer.update(values, runner.outputs['num_samples'])


def task_losses(losses: Mapping[str, Any]) -> Dict[str, torch.Tensor]:
    """Sum of each task's losses, with their graph, from the dict that a model returns."""
    found: Dict[str, torch.Tensor] = {}
    for name, value in losses.items():
        if name.startswith(LOSS_PREFIX) and isinstance(value, torch.Tensor) and value.requires_grad:
            task = name.split('/')[1]
            found[task] = found[task] + value.float().mean() if task in found else value.float().mean()
    return found


def trunk_gradients(model: nn.Module, losses: Mapping[str, torch.Tensor]) -> Dict[str, float]:
    """Norms of the tasks' gradients on the parameters that at least two of them reach, and the cosines between them; {} for
    fewer than two tasks. The graph stays usable; ``.grad`` is not touched."""
    if len(losses) < 2:
        return {}
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients: Dict[str, List] = {task: list(torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True))
                                  for task, loss in losses.items()}
    shared = [i for i in range(len(parameters)) if sum(g[i] is not None for g in gradients.values()) >= 2]
    if not shared:
        return {}
    flat = {task: torch.cat([(torch.zeros_like(parameters[i]) if g[i] is None else g[i]).detach().float().flatten() for i in shared])
            for task, g in gradients.items()}
    tasks = list(flat)
    pairs = [(a, b) for n, a in enumerate(tasks) for b in tasks[n + 1:]]
    norms = [torch.linalg.vector_norm(flat[task]) for task in tasks]
    cosines = [torch.nn.functional.cosine_similarity(flat[a], flat[b], dim=0) for a, b in pairs]
    numbers = torch.stack(norms + cosines).tolist()
    names = [f'stats/{task}/trunk_grad_norm' for task in tasks] + [f'stats/{a}-{b}/trunk_grad_cos' for a, b in pairs]
    return dict(zip(names, numbers))
