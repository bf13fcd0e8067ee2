"""Batch norms folded into the convolutions before them, for predictions.

With frozen statistics a batch norm is ``y * a + c`` per channel, and a convolution that feeds it, and nothing else, can give that at
once. Which convolution that is cannot be told from the order of modules: a traced run shows it.

Letters: C output channels.
"""
from __future__ import annotations

import collections
import contextlib
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from ..norm_layers import is_sparse
from .watching import PartOutputs, comparable, difference, is_view, relative_difference, tensors_in

# Relative to the largest value of a tensor: of one layer's output, and of a part's output after some dozens of layers. Float32 rounding
# gives about 1e-6 and 1e-5.
LAYER_TOLERANCE = 1e-4
MODEL_TOLERANCE = 1e-3

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_DENSE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, *_TRANSPOSED)


class FoldError(RuntimeError):
    """The folded model does not compute what the model computed; the model was left as it was."""


@dataclass(frozen=True)
class FoldReport:
    """``folded``: (convolution, norm) by name. ``kept``: norm -> why it stays. ``difference``: the largest one of a part's outputs,
    relative to their largest value, or None if it was not asked for."""

    folded: Tuple[Tuple[str, str], ...]
    kept: Mapping[str, str]
    difference: Optional[float]

    def __str__(self) -> str:
        text = f'{len(self.folded)} batch norms folded into convolutions, {len(self.kept)} kept'
        if self.kept:
            reasons = collections.Counter(self.kept.values())
            text += ' (' + '; '.join(f'{n}: {reason}' for reason, n in reasons.most_common()) + ')'
        return text if self.difference is None else f'{text}; outputs differ by {self.difference:.1e} of their largest value'


def fold_batch_norms(model: nn.Module, work: Callable[[], Any], parts: Optional[Mapping[str, nn.Module]] = None,
                     check: bool = True) -> FoldReport:
    """Fold every batch norm whose input is exactly one convolution's (or linear layer's, or sparse convolution's) output.

    The model is changed for good: the norms become identities, the convolutions have other weights, and a state dict of it is no
    longer one of the model. Keep a ``copy.deepcopy`` where the model is needed as it was. Nothing is changed for a norm if

    * its input has another source, or its convolution's output is read by anything else (a residual, a second norm);
    * its convolution is called elsewhere, too, shares its weight, or computes its weight (parametrisation, hooks);
    * it uses the batch's statistics;
    * the folded convolution's output differs from the norm's by more than ``LAYER_TOLERANCE`` in the traced run.

    Args:
        model: in evaluation mode, float32, on the device where it will run.
        work: runs it once, on data that reach every part (``lambda: model(**batch)``). It is called under ``no_grad``, without TF32;
            with ``check`` twice.
        parts: modules by name whose outputs are compared before and after; the whole model by default.
        check: compare them.

    Raises:
        FoldError: if a part's output changed by more than ``MODEL_TOLERANCE``, or the model does not run any more. It is then as it was.
        ValueError: if the model is in training mode.
    """
    if model.training:
        raise ValueError('fold_batch_norms: the model is in training mode, where norms follow the batch; call eval() first')
    outputs, trace = PartOutputs({'model': model} if parts is None else parts), _Trace(model)
    with comparable(), trace.hooks():
        before = outputs.run(work, trace)
    pairs, kept = trace.result()
    undo = [_fold(model, conv, norm) for conv, norm in pairs]
    worst = None
    if check:
        with _undone_on_error(undo):
            worst = _compared(before, outputs, work, len(pairs))
    return FoldReport(tuple(pairs), kept, worst)


def _compared(before: Mapping[str, List[torch.Tensor]], outputs: PartOutputs, work: Callable[[], Any], count: int) -> float:
    """The difference that folding made; FoldError if it is more than rounding or the model does not run any more."""
    advice = 'a layer is used in a way that the traced run did not show. Predict with the batch norms instead'
    try:
        with comparable():
            worst, place = difference(before, outputs.run(work))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise FoldError(f'after folding {count} batch norms the model ends with "{type(error).__name__}: {error}": {advice}') from error
    if not worst <= MODEL_TOLERANCE:
        raise FoldError(f'after folding {count} batch norms the output of {place} differs by {worst:.1e} of its largest value '
                        f'(at most {MODEL_TOLERANCE:.0e} is rounding): {advice}')
    return worst


@contextlib.contextmanager
def _undone_on_error(undo: List[Callable[[], None]]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for step in reversed(undo):
            step()
        raise


# --------------------------------------------------------------------------------------------------------------------
# the arithmetic

def folded_weights(conv: nn.Module, norm: _BatchNorm) -> Tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias (C,) of the convolution that does both, computed in float64, in the convolution's type."""
    scale = norm.weight.detach().double() if norm.affine else torch.ones_like(norm.running_mean, dtype=torch.float64)
    scale = scale / (norm.running_var.double() + norm.eps).sqrt()
    shift = -norm.running_mean.double() if conv.bias is None else conv.bias.detach().double() - norm.running_mean.double()
    shift = shift * scale + (norm.bias.detach().double() if norm.affine else 0)
    weight = conv.weight.detach()
    if isinstance(conv, _TRANSPOSED):  # (in, C / groups, ...), the input channels group after group
        per_group = scale.view(conv.groups, 1, -1)
        rows = weight.double().unflatten(0, (conv.groups, -1)) * per_group.view(*per_group.shape, *[1] * (weight.dim() - 2))
        product = rows.flatten(0, 1)
    else:  # (C, ...), also of spconv
        product = weight.double() * scale.view(-1, *[1] * (weight.dim() - 1))
    product = torch.empty_like(weight).copy_(product)  # in the weight's order of axes
    return product, shift.to(weight.dtype)


@contextlib.contextmanager
def _as_folded(conv: nn.Module, norm: _BatchNorm) -> Iterator[None]:
    before = conv._parameters['weight'], conv._parameters['bias']
    conv._parameters['weight'], conv._parameters['bias'] = map(nn.Parameter, folded_weights(conv, norm))
    try:
        yield
    finally:
        conv._parameters['weight'], conv._parameters['bias'] = before


def _fold(model: nn.Module, conv_name: str, norm_name: str) -> Callable[[], None]:
    """Fold one pair; gives what undoes it."""
    conv, norm = model.get_submodule(conv_name), model.get_submodule(norm_name)
    before = conv._parameters['weight'], conv._parameters['bias']
    holders = [(module, key) for module in model.modules() for key, child in module._modules.items() if child is norm]
    for place, new, old in zip(('weight', 'bias'), folded_weights(conv, norm), before, strict=True):
        conv._parameters[place] = nn.Parameter(new, requires_grad=old is None or old.requires_grad)
    for module, key in holders:
        module._modules[key] = nn.Identity()

    def undo() -> None:
        conv._parameters['weight'], conv._parameters['bias'] = before
        for module, key in holders:
            module._modules[key] = norm
    return undo


# --------------------------------------------------------------------------------------------------------------------
# the traced run

class _Call:
    """One call of a convolution: its inputs, as long as its output lives, and who read the output (None: not a norm).

    ``sites``: (V, 4) integers, where the rows of a sparse output lie; None for a dense one.
    """

    def __init__(self, conv: str, inputs: Tuple, sites: Optional[torch.Tensor] = None):
        self.conv, self.inputs, self.sites = conv, inputs, sites
        self.readers: set = set()


def _order(sites: torch.Tensor) -> torch.Tensor:
    """Rows of (V, 4) integer sites in lexicographic order; no site comes twice."""
    key = sites[:, 0].long()
    if not len(key):
        return key
    for column in sites.long().unbind(1)[1:]:
        key = key * (column.max() + 1) + column
    return key.argsort()


class _Trace(TorchDispatchMode):
    """Which norm reads which convolution's output. Operators tell: one that reads an output while no norm runs is another reader."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.convs = {name: module for name, module in model.named_modules() if _is_conv(module)}
        self.norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
        self.computing = {name for name, conv in self.convs.items() if is_parametrized(conv) or conv._forward_pre_hooks}
        self.source = WeakTensorKeyDictionary()
        self.running: Optional[str] = None
        self.made: Dict[str, List[_Call]] = collections.defaultdict(list)
        self.read: Dict[str, List[Optional[_Call]]] = collections.defaultdict(list)
        self.wrong: Dict[str, str] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        calls = [self.source[t] for t in tensors_in((args, kwargs)) if t in self.source]
        out = func(*args, **kwargs)
        if calls and is_view(func):
            for tensor in tensors_in(out):
                self.source[tensor] = calls[0]
        else:
            for call in calls:
                call.readers.add(self.running)
        return out

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        handles = []
        for name, module in self.convs.items():
            handles.append(module.register_forward_hook(self._after_conv(name)))
        for name, module in self.norms.items():
            handles += [module.register_forward_pre_hook(self._before_norm(name)), module.register_forward_hook(self._after_norm(name))]
        for module in self.model.modules():
            if not any(True for _ in module.children()):
                handles.append(module.register_forward_pre_hook(self._before_leaf))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_leaf(self, module: nn.Module, inputs: Tuple) -> None:
        """spconv's kernels are no operators of torch: its layers read what they are given."""
        for value in inputs:
            if not isinstance(value, torch.Tensor) and isinstance(getattr(value, 'features', None), torch.Tensor):
                if value.features in self.source:
                    self.source[value.features].readers.add(None)

    def _after_conv(self, name: str) -> Callable:
        def hook(module: nn.Module, inputs: Tuple, output: Any) -> None:
            call = _Call(name, inputs, getattr(output, 'indices', None) if hasattr(output, 'features') else None)
            self.made[name].append(call)
            for tensor in tensors_in(output):
                self.source[tensor] = call
        return hook

    def _before_norm(self, name: str) -> Callable:
        def hook(module: nn.Module, inputs: Tuple) -> None:
            self.read[name].append(self.source.get(inputs[0]))
            self.running = name
        return hook

    def _after_norm(self, name: str) -> Callable:
        def hook(module: nn.Module, inputs: Tuple, output: torch.Tensor) -> None:
            self.running = None
            call = self.read[name][-1]
            if call is None or call.inputs is None or self._refusal(name, call.conv):
                return
            conv = self.convs[call.conv]
            # Nothing of this is the model's own work: no mode may see it.
            with _disable_current_modes(), _as_folded(conv, module), torch.autocast(output.device.type, enabled=False):
                again = conv.forward(*call.inputs)
                found = tensors_in(again)[0]
                if found.numel() != output.numel():
                    self.wrong[name] = 'the convolution behind it gives another number of values'
                    return
                if call.sites is not None:  # on a GPU spconv finds the sites of a strided convolution in another order each time
                    output, found = output[_order(call.sites)], found[_order(again.indices)]
                if not relative_difference(output, found.reshape(output.shape)) <= LAYER_TOLERANCE:
                    self.wrong[name] = 'the folded convolution gives other values'
            call.inputs = None
        return hook

    def _refusal(self, norm_name: str, conv_name: str) -> Optional[str]:
        """Why these two layers can never be folded."""
        norm, conv = self.norms[norm_name], self.convs[conv_name]
        if norm.running_mean is None or norm.training:
            return "uses the batch's statistics"
        if conv_name in self.computing:
            return 'its convolution computes its weight'
        channels = conv.out_features if isinstance(conv, nn.Linear) else conv.out_channels
        if channels != norm.num_features:
            return 'normalises another axis than the channels of its convolution'
        shared = sum(p is conv.weight for module in self.model.modules() for p in module._parameters.values())
        return 'its convolution shares its weight' if shared > 1 else None

    def result(self) -> Tuple[List[Tuple[str, str]], Dict[str, str]]:
        """(convolution, norm) pairs that can be folded, and the other norms with the reason."""
        pairs, kept = [], {}
        for norm in self.norms:
            reason = self._reason(norm)
            if reason is None:
                pairs.append((self.read[norm][0].conv, norm))
            else:
                kept[norm] = reason
        return pairs, kept

    def _reason(self, norm: str) -> Optional[str]:
        calls = self.read.get(norm)
        if not calls:
            return 'did not run'
        if None in calls:
            return "reads something else than a convolution's output"
        if len({call.conv for call in calls}) > 1:
            return 'follows several convolutions'
        conv = calls[0].conv
        if set(self.made[conv]) != set(calls) or any(call.readers != {norm} for call in calls):
            return "its convolution's output is read elsewhere, too"
        return self._refusal(norm, conv) or self.wrong.get(norm)


def _is_conv(module: nn.Module) -> bool:
    if isinstance(module, _DENSE):
        return True
    return is_sparse(module) and isinstance(module._parameters.get('weight'), nn.Parameter) and 'bias' in module._parameters \
        and hasattr(module, 'out_channels') and not getattr(module, 'transposed', False)
