"""Where a step stops being finite: the batch, the first module of the forward pass, the first gradient of the backward pass.

Computes the step once more with every value looked at, so it belongs behind a step that failed, not in the training loop.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ..over_ranks import alone

Losses = Tuple[torch.Tensor, List[str], List[torch.Tensor]]  # total with graph, names, values


@dataclass
class Finding:
    """What one rank saw.

    ``inputs``: parts of the batch that are not finite. ``losses``: value by name. ``forward``: the first module (below the model
    itself, whose output are the losses) whose output was not finite although its inputs were. ``backward``: the module at whose
    output the first non-finite gradient arrived.
    ``parameters``: those with a non-finite gradient, in the model's order. ``error``: an exception that ended the attempt.
    """

    inputs: List[str] = field(default_factory=list)
    losses: Dict[str, float] = field(default_factory=dict)
    forward: Optional[str] = None
    backward: Optional[str] = None
    parameters: List[str] = field(default_factory=list)
    error: Optional[str] = None

    @property
    def bad_losses(self) -> List[str]:
        return [name for name, value in self.losses.items() if not math.isfinite(value) and name != 'loss']

    @property
    def found(self) -> bool:
        """Whether anything here is not finite."""
        return bool(self.inputs or self.forward or self.backward or self.parameters or self.bad_losses or self.error)

    def text(self) -> str:
        """One line for the log."""
        parts = []
        if self.inputs:
            parts.append(f'the batch itself holds non-finite values: {"; ".join(self.inputs[:4])}')
        if self.forward:
            parts.append(f'the first module with a non-finite output from finite inputs is {self.forward}')
        elif self.bad_losses and not self.inputs:
            parts.append('all modules\' outputs are finite: the loss functions made it')
        if not self.bad_losses and self.backward:
            parts.append(f'the first non-finite gradient arrives at the output of {self.backward}')
        if not self.bad_losses and self.parameters:
            parts.append(f'{len(self.parameters)} parameters get a non-finite gradient ({", ".join(self.parameters[:4])}'
                         f'{", ..." if len(self.parameters) > 4 else ""})')
        if self.error:
            parts.append(f'computing it again ended with {self.error}')
        return '; '.join(parts) or 'computing the step again on this rank gave finite values everywhere'


def trace(model: nn.Module, losses: Callable[[], Losses], batch: Mapping[str, Any], names: Sequence[str] = (),
          backward: Optional[bool] = None) -> Finding:
    """Run ``losses()`` and its gradients with a look at every module of ``model``.

    Args:
        losses: one forward pass; gradients are taken, but nothing is added to ``.grad``.
        batch: the unpacked batch, to look at. names: the samples' tokens, for messages.
        backward: whether to take gradients; by default if the total loss is finite. Ranks that trace together must agree on
            it, for SyncBatchNorm exchanges values in both directions. Losses count this rank's objects alone: one whose attempt
            ends with an error would leave the others waiting for its count.
    """
    finding = Finding(inputs=list(_bad_inputs(batch, names)))
    titles = {module: f'{name} ({type(module).__name__})' for name, module in model.named_modules() if name}

    def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        title = titles[module]
        for tensor in tensors_of(output):
            if finding.forward is None and not is_finite(tensor) and all(is_finite(t) for t in tensors_of((args, kwargs))):
                finding.forward = title
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(lambda gradient: note_gradient(gradient, title))

    def note_gradient(gradient: torch.Tensor, title: str) -> None:
        if finding.backward is None and not is_finite(gradient):
            finding.backward = title

    handles = [module.register_forward_hook(look, with_kwargs=True) for module in titles]
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    try:
        with alone():
            total, loss_names, values = losses()
            finding.losses = dict(zip(loss_names, torch.stack(values).tolist()))
            if total.requires_grad and (math.isfinite(float(total.detach())) if backward is None else backward):
                gradients = torch.autograd.grad(total, [p for _, p in parameters], allow_unused=True)
                finding.parameters = [name for (name, _), g in zip(parameters, gradients) if g is not None and not is_finite(g)]
    except Exception as error:
        finding.error = f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ""}'
    finally:
        for handle in handles:
            handle.remove()
    return finding


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every value of a floating tensor is finite (True for other types)."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested lists, tuples and mappings, in boxes, points and sparse tensors."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    else:
        for name in ('tensor', 'features'):
            inner = getattr(value, name, None)
            if isinstance(inner, torch.Tensor):
                yield inner


def _bad_inputs(batch: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    for key, value in batch.items():
        if key == 'metas':
            continue
        rows = isinstance(value, (list, tuple)) or isinstance(value, torch.Tensor) and value.dim() > 0
        parts = list(value) if rows and len(names) and len(value) == len(names) else [value]
        for row, part in enumerate(parts):
            count = sum(int((~torch.isfinite(t)).sum()) for t in tensors_of(part) if t.is_floating_point())
            if count and not _may_be_nan(key, part):
                yield f'{key}{f" of sample {names[row]}" if len(parts) > 1 or len(names) == 1 else ""} ({count} values)'


def _may_be_nan(key: str, value: Any) -> bool:
    """Unknown velocities of boxes are NaN on purpose; heads leave them out."""
    tensor = getattr(value, 'tensor', None)
    return 'bboxes' in key and isinstance(tensor, torch.Tensor) and bool(torch.isfinite(tensor[:, :7]).all())
