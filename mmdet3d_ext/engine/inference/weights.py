"""Weights in the type that autocast casts them to, stored once instead of cast in every call."""
from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Callable, Dict, Mapping, Optional, Set, Tuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from .watching import PartOutputs, aten, comparable, difference, is_view, tensors_in

# Of a part's outputs, relative to their largest value. The same numbers are multiplied as before, so only another order of summation
# may show: a few roundings of float16 (1e-3), or of bfloat16 (8e-3).
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}


class StoreError(RuntimeError):
    """With stored weights the model does not compute what it computes under autocast; they were put back."""


@dataclass(frozen=True)
class StoreReport:
    """``stored``: parameters and buffers by name, of ``megabytes`` before. ``kept``: name -> why it stays in float32."""

    stored: Tuple[str, ...]
    kept: Mapping[str, str]
    megabytes: float
    difference: float

    def __str__(self) -> str:
        return (f'{len(self.stored)} weights ({self.megabytes:.0f} MB) stored as autocast casts them, {len(self.kept)} in float32; '
                f'outputs differ by {self.difference:.1e} of their largest value')


def store_cast_weights(model: nn.Module, work: Callable[[], Any], dtype: torch.dtype,
                       parts: Optional[Mapping[str, nn.Module]] = None) -> StoreReport:
    """Replace every weight that autocast casts to ``dtype``, and that nothing reads in float32, by the cast one.

    Which these are, a run shows: parts that switch autocast off, norms, and weights that a function reads itself stay as they are. The
    results are those of autocast. From now on the model runs under autocast with ``dtype`` only, for predictions; this cannot be undone.

    Args:
        model: in evaluation mode, on the device where it will run.
        work: runs the model once under autocast with ``dtype`` on data that reach every part; called twice.
        parts: modules by name whose outputs are compared before and after; the whole model by default.

    Raises:
        StoreError: if an output changed by more than ``TOLERANCE``; the weights are then as they were.
    """
    outputs, trace = PartOutputs({'model': model} if parts is None else parts), _Reads(model, dtype)
    with comparable():
        before = outputs.run(work, trace)
    chosen, kept = trace.result()
    originals = {name: tensor.data for name, tensor in chosen.items()}
    for tensor in chosen.values():
        tensor.data = tensor.data.to(dtype)
    with _put_back_on_error(chosen, originals), comparable():
        worst, place = difference(before, outputs.run(work))
        if not worst <= TOLERANCE[dtype]:
            raise StoreError(f'with {len(chosen)} weights stored in {dtype} the output of {place} differs by {worst:.1e} of its largest '
                             'value from that under autocast: a weight is read in a way that the traced run did not show. Let autocast '
                             'cast them instead')
    megabytes = sum(t.numel() * t.element_size() for t in originals.values()) / 1e6
    return StoreReport(tuple(chosen), kept, megabytes, worst)


@contextlib.contextmanager
def _put_back_on_error(tensors: Mapping[str, torch.Tensor], originals: Mapping[str, torch.Tensor]):
    try:
        yield
    except Exception:
        for name, tensor in tensors.items():
            tensor.data = originals[name]
        raise


class _Reads(TorchDispatchMode):
    """Which weights are cast to ``dtype``, and which are read otherwise. Autocast's casts are operators like any other here."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.weights = {name: t for name, t in (*model.named_parameters(), *model.named_buffers()) if t.dtype == torch.float32}
        self.owner = WeakTensorKeyDictionary()
        for name, tensor in self.weights.items():
            self.owner[tensor] = name
        self.cast: Set[str] = set()
        self.read: Set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        names = {self.owner[t] for t in tensors_in((args, kwargs)) if t in self.owner}
        out = func(*args, **kwargs)
        if not names:
            return out
        if is_view(func):
            for tensor in tensors_in(out):
                self.owner[tensor] = next(iter(names))
        elif func.overloadpacket is aten._to_copy and kwargs.get('dtype') == self.dtype:
            self.cast |= names
        else:
            self.read |= names
        return out

    def result(self) -> Tuple[Dict[str, torch.Tensor], Dict[str, str]]:
        chosen, kept = {}, {}
        largest = torch.finfo(self.dtype).max
        for name, tensor in self.weights.items():
            if name in self.read:
                kept[name] = 'is read in float32'
            elif name not in self.cast:
                kept[name] = 'was not read'
            elif tensor.numel() and not tensor.detach().abs().max().item() <= largest:
                kept[name] = f'is not finite in {self.dtype}'
            else:
                chosen[name] = tensor
        return chosen, kept
