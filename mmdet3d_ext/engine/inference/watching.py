"""What happens to tensors while a model runs: which modules read them, and the choices that near ties could turn around."""
from __future__ import annotations

import collections
import contextlib
from typing import Any, Callable, Dict, Iterator, List, Mapping, Tuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


def is_view(func: Any) -> bool:
    """Whether an operator's result shares its input's memory and leaves it as it is."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def tensors_in(value: Any) -> List[torch.Tensor]:
    """The tensors of a nested value; of a sparse tensor its features."""
    found = []
    for leaf in tree_leaves(value):
        leaf = getattr(leaf, 'features', leaf)
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found


@contextlib.contextmanager
def comparable() -> Iterator[None]:
    """Within two runs differ by what is compared only: no TF32, convolutions by the algorithm that cuDNN takes without trying, and
    attention not by a second implementation that torch takes for some types of input."""
    cuda, cudnn, mha = torch.backends.cuda, torch.backends.cudnn, torch.backends.mha
    before = cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, mha.get_fastpath_enabled()
    cuda.matmul.allow_tf32 = cudnn.allow_tf32 = cudnn.benchmark = False
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before[:3]
        mha.set_fastpath_enabled(before[3])


class PartOutputs:
    """What the parts of a model return, run after run, with the choices of the first run made again in the later ones.

    Of two values that differ by less than a rounding error, one run takes the one, another run the other: the best 200 cells of a
    heat map come in another order, another cell is the 200th, or one of a plateau is no longer its maximum. Everything behind would
    differ without a fault. So what ``topk``, ``sort`` and comparisons choose within a part is kept and given again.

    Args:
        parts: by name; none may lie in another.
    """

    def __init__(self, parts: Mapping[str, nn.Module]):
        self.parts = parts
        self._choices: Dict[str, List[torch.Tensor]] = {}

    def run(self, work: Callable[[], Any], mode: Any = None) -> Dict[str, List[torch.Tensor]]:
        """Part -> its floating tensors, copied, of all its calls. ``mode``: a further dispatch mode to run under."""
        found: Dict[str, List[torch.Tensor]] = {}
        replay = bool(self._choices)
        chooser = _Chooser(self._choices, replay)

        def enter(name: str) -> Callable:
            def hook(*_: Any) -> None:
                chooser.part = name
            return hook

        def leave(name: str) -> Callable:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                chooser.part = None
                kept = [t.detach().clone() for t in tensors_in(output) if t.is_floating_point()]
                found.setdefault(name, []).extend(kept)
            return hook

        handles = []
        for name, part in self.parts.items():
            handles += [part.register_forward_pre_hook(enter(name)), part.register_forward_hook(leave(name))]
        try:
            with torch.no_grad(), contextlib.nullcontext() if mode is None else mode, chooser:
                work()
        finally:
            for handle in handles:
                handle.remove()
        if not replay:
            self._choices = chooser.kept
        return found


class _Chooser(TorchDispatchMode):
    """Keeps within parts what ``topk``, ``sort`` and comparisons of floating values choose, or gives the kept choices again."""

    def __init__(self, kept: Mapping[str, List[torch.Tensor]], replay: bool):
        super().__init__()
        self.part, self.replay = None, replay
        self.kept: Dict[str, List[torch.Tensor]] = collections.defaultdict(list)
        if replay:
            self.kept.update({name: list(items) for name, items in kept.items()})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.part is None or func._schema.is_mutable:
            return out
        ordered = func.overloadpacket in (aten.topk, aten.sort)
        compared = isinstance(out, torch.Tensor) and out.dtype == torch.bool and any(t.is_floating_point() for t in tensors_in((args, kwargs)))
        if not ordered and not compared:
            return out
        choice = out[1] if ordered else out
        if not self.replay:
            self.kept[self.part].append(choice)
            return out
        mine = self.kept[self.part]
        before = mine.pop(0) if mine else choice
        if before.shape != choice.shape or before.dtype != choice.dtype:
            return out
        return (args[0].gather(_dim(func, args, kwargs), before), before) if ordered else before


def _dim(func: Any, args: Tuple, kwargs: Mapping[str, Any]) -> int:
    names = [argument.name for argument in func._schema.arguments]
    place = names.index('dim')
    return kwargs.get('dim', args[place] if len(args) > place else -1)


def difference(expected: Mapping[str, List[torch.Tensor]], found: Mapping[str, List[torch.Tensor]]) -> Tuple[float, str]:
    """The largest difference of two results of :meth:`PartOutputs.run`, relative to each tensor's largest value, and its part."""
    worst, place = 0.0, ''
    if list(expected) != list(found):
        return float('inf'), 'the parts that run'
    for name, tensors in expected.items():
        others = found[name]
        if [t.shape for t in tensors] != [t.shape for t in others]:
            return float('inf'), f'{name} (shapes)'
        for one, other in zip(tensors, others, strict=True):
            value = relative_difference(one, other)
            if not value <= worst:
                worst, place = value, name
    return worst, place


def relative_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Largest absolute difference over the largest finite value of ``expected``; infinite where only one of them is finite."""
    if expected.numel() == 0:
        return 0.0
    one, other = expected.double(), found.double()
    gap = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs())
    scale = torch.where(one.isfinite(), one, 0.0).abs().max().clamp(min=1e-12)
    return torch.nan_to_num(gap.max() / scale, nan=float('inf'), posinf=float('inf')).item()
