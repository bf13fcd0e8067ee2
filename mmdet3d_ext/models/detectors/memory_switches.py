"""Switches that change what a step costs and not what it computes: recomputation and memory layout, by name of a part."""
from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator, List, Sequence, Union

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


@contextlib.contextmanager
def kept_statistics(module: nn.Module) -> Iterator[None]:
    """Within: batch norms below ``module`` leave their running statistics alone (a second pass would count twice)."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
    before = [(m.momentum, m._buffers['num_batches_tracked']) for m in norms]
    # A momentum of 0 keeps the values without writing to them, which a later backward pass would refuse.
    for m in norms:
        m.momentum, m._buffers['num_batches_tracked'] = 0.0, None
    try:
        yield
    finally:
        for m, (momentum, count) in zip(norms, before):
            m.momentum, m._buffers['num_batches_tracked'] = momentum, count


class _Recomputed:
    """Mixin: in training, ``forward`` keeps its inputs only and runs again in the backward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        if not self.training or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), kept_statistics(self)),
                          **kwargs)


@functools.lru_cache(maxsize=None)
def _recomputed_class(cls: type) -> type:
    return type(cls.__name__, (_Recomputed, cls), {'__module__': cls.__module__})


def recompute(module: nn.Module) -> None:
    """From now on ``module`` is recomputed in the backward pass. Names in the state dict stay as they are."""
    if not isinstance(module, _Recomputed):
        module.__class__ = _recomputed_class(type(module))


def is_recomputed(module: nn.Module) -> bool:
    """Whether :func:`recompute` was called for this module."""
    return isinstance(module, _Recomputed)


def _innermost(part: nn.Module, chosen) -> List[nn.Module]:
    """The modules at or below ``part`` that ``chosen`` accepts and that hold no other such module."""
    found = [m for m in part.modules() if chosen(m)]
    return [m for m in found if not any(other is not m and chosen(other) for other in m.modules())]


def _outermost(part: nn.Module, kind: type) -> List[nn.Module]:
    if isinstance(part, kind):
        return [part] if any(True for _ in part.parameters()) else []
    return [m for child in part.children() for m in _outermost(child, kind)]


def units(part: nn.Module) -> List[nn.Module]:
    """The pieces of a part that are recomputed one by one: little is kept between them, and little lives at a time.

    Blocks of a backbone (Swin, residual: those with the libraries' ``with_cp``), else chains of layers (``nn.Sequential``), else
    the part as a whole.
    """
    if isinstance(part, (nn.ModuleDict, nn.ModuleList)):
        return [unit for child in part for unit in units(part[child] if isinstance(part, nn.ModuleDict) else child)]
    return _innermost(part, lambda m: hasattr(m, 'with_cp')) or _outermost(part, nn.Sequential) or [part]


def _part(model: nn.Module, name: str, key: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        names = [n for n, _ in model.named_modules() if n and n.count('.') < 3 and not n.rpartition('.')[2].isdigit()]
        raise ValueError(f'{key}: there is no part named {name!r} in this model; it has {", ".join(names[:40])}') from None


def apply_checkpoint(model: nn.Module, names: Sequence[str]) -> None:
    """Recompute the named parts; a part with a method ``recompute`` decides for itself what is worth it.

    The libraries' ``with_cp: true`` comes to the same; their own form would update running statistics twice.

    Raises:
        ValueError: naming ``model.checkpoint`` and the parts that there are.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f'model.checkpoint: write a list of part names, e.g. [decoder, encoders.camera.backbone], got {names!r}')
    for module in _innermost(model, lambda m: getattr(m, 'with_cp', False)):
        recompute(module)
    for module in model.modules():
        if getattr(module, 'with_cp', False):
            module.with_cp = False
    for name in names:
        part = _part(model, name, 'model.checkpoint')
        if hasattr(part, 'recompute'):
            part.recompute()
            continue
        for unit in units(part):
            recompute(unit)


def apply_channels_last(model: nn.Module, names: Union[bool, Sequence[str]]) -> None:
    """Keep the kernels of 2-D convolutions in channels-last order in the named parts (True: everywhere).

    Convolutions then work on and return maps in that order, as GPUs' half-precision units want them; values and the state dict
    stay the same.

    Raises:
        ValueError: naming ``model.channels_last`` and the parts that there are.
    """
    if isinstance(names, bool):
        parts = [model] if names else []
    elif isinstance(names, str):
        raise ValueError(f'model.channels_last: write true, false or a list of part names, got {names!r}')
    else:
        parts = [_part(model, name, 'model.channels_last') for name in names]
    for part in parts:
        for module in part.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
