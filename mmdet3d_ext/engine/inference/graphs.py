"""CUDA graphs of the parts whose shapes never change: a part's kernels are started by one call instead of one each.

A single sample keeps a large GPU busy for a few microseconds per kernel, less than the host needs to start the next one.
"""
from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, Tuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

WARMUP = 3  # runs before the recording, in which libraries choose kernels and allocate what they keep
# Recordings that broke off. Up to torch 2.11 an allocator goes on asking them what is theirs, so they have to stay.
_BROKEN: List[Any] = []
# Modules of a view transform that see tensors of a fixed shape; around them lie points, whose number changes.
FIXED_IN_TRANSFORM = ('dtransform', 'depthnet', 'downsample')


def capturable(parts: Mapping[str, nn.Module]) -> Dict[str, nn.Module]:
    """The parts without points or voxels: image backbone and neck, the fixed pieces of the view transform, fuser, decoder, heads."""
    found: Dict[str, nn.Module] = {}
    for name, part in parts.items():
        if name.endswith('.vtransform'):
            pieces = [(key, getattr(part, key, None)) for key in FIXED_IN_TRANSFORM]
            found.update({f'{name}.{key}': m for key, m in pieces if isinstance(m, nn.Module) and not isinstance(m, nn.Identity)})
        elif not name.startswith(('encoders.lidar.', 'encoders.radar.')):
            found[name] = part
    return found


class GraphedParts:
    """Parts that are recorded at their next call and replayed from then on.

    A replay writes to the same memory each time: what a part returned is overwritten by its next call. Calls with other shapes, in
    another type or in training run as before. The weights must stay where they are.

    Args:
        parts: by name; see :func:`capturable`.

    Attributes:
        failed: part -> why it could not be recorded (it runs as before).
    """

    def __init__(self, parts: Mapping[str, nn.Module]):
        self.parts, self.failed = dict(parts), {}
        self.pool: Any = None
        self.fixed: Dict[int, torch.Tensor] = {}  # by address: what replays write, which the next part may read in place
        self._before = {name: vars(part).get('forward') for name, part in self.parts.items()}
        for name, part in self.parts.items():
            part.forward = _Replayed(self, name, part.forward)

    def remove(self) -> None:
        """Let every part run as before."""
        for name, part in self.parts.items():
            if self._before[name] is None:
                del part.forward
            else:
                part.forward = self._before[name]

    def __str__(self) -> str:
        text = f'{len(self.parts) - len(self.failed)} parts as CUDA graphs'
        return text + (f'; not {", ".join(f"{name} ({why})" for name, why in self.failed.items())}' if self.failed else '')


class _Replayed:
    """One part's forward: recorded at the first call, replayed where the inputs are alike."""

    def __init__(self, owner: GraphedParts, name: str, forward: Callable):
        self.owner, self.name, self.forward = owner, name, forward
        self.state: Optional[Tuple] = None
        self.held: List[torch.Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self.name in self.owner.failed or torch.is_grad_enabled() or not tensors or not all(t.is_cuda for t in tensors):
            return self.forward(*args, **kwargs)
        kind = _kind(tensors)
        if self.state is None:
            device = tensors[0].device
            before = torch.cuda.current_stream(device), torch.cuda.get_rng_state(device)
            pool = self.owner.pool = self.owner.pool or torch.cuda.graph_pool_handle()
            try:
                self.state = self._record(leaves, structure, kind)
            except RuntimeError as error:  # a wait for the device, or an operator that no graph can hold
                self.owner.failed[self.name] = str(error).splitlines()[0][:120]
                _put_back(device, pool, *before)
                return self.forward(*args, **kwargs)
        graph, inputs, outputs, expected = self.state
        if kind != expected:
            return self.forward(*args, **kwargs)
        for fixed, given in zip(inputs, tensors, strict=True):
            if fixed.data_ptr() != given.data_ptr():
                fixed.copy_(given)
        graph.replay()
        # Fresh containers around the same tensors: a caller may change a list or a dict that it was given.
        return tree_map(lambda leaf: leaf, outputs)

    def _record(self, leaves: List[Any], structure: Any, kind: Tuple) -> Tuple:
        owner = self.owner
        inputs = [_fixed(owner, leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(inputs, structure)
        device = next(leaf for leaf in inputs if isinstance(leaf, torch.Tensor)).device
        with _casts_inside(device):
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(WARMUP - 1):
                    self.forward(*args, **kwargs)
                with Outside() as outside, _waits_are_errors():
                    self.forward(*args, **kwargs)
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            try:
                # Only this thread's calls count: a loader's thread may pin memory meanwhile.
                with torch.cuda.graph(graph, pool=owner.pool, capture_error_mode='thread_local'):
                    outputs = self.forward(*args, **kwargs)
            except RuntimeError:
                _BROKEN.append(graph)
                owner.pool = None  # the next recording gets another one: this one may be taken for in use
                raise
        for leaf in tree_flatten(outputs)[0]:
            if isinstance(leaf, torch.Tensor):
                owner.fixed[leaf.data_ptr()] = leaf
        self.held = outside.tensors()
        return graph, [leaf for leaf in inputs if isinstance(leaf, torch.Tensor)], outputs, kind


class Outside(TorchFunctionMode):
    """The tensors that are read and were there before: weights, and tables that a cache may drop. A graph reads their memory, so it has
    to hold them."""

    def __init__(self):
        super().__init__()
        self.made: Set[int] = set()
        self.found: Dict[int, torch.Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, torch.Tensor) and _address(leaf) not in self.made:
                self.found.setdefault(_address(leaf), leaf)
        out = func(*args, **kwargs)
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, torch.Tensor) and _address(leaf) not in self.found:
                self.made.add(_address(leaf))
        return out

    def tensors(self) -> List[torch.Tensor]:
        return list(self.found.values())


def _address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage().data_ptr()


def _kind(tensors: List[torch.Tensor]) -> Tuple:
    """What must agree between the recording and a replay, besides the values."""
    device = tensors[0].device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return cast, tuple((tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors)


def _fixed(owner: GraphedParts, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where a replay of an earlier part writes it, else memory of its own with its strides."""
    known = owner.fixed.get(tensor.data_ptr())
    if known is not None and _kind([known]) == _kind([tensor]):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _put_back(device: torch.device, pool: Any, stream: torch.cuda.Stream, random: torch.Tensor) -> None:
    """What torch leaves of a recording that broke off, as it was before: the recording's stream would stay the current one; the allocator
    would believe that a recording goes on and keep what it has when memory runs short (up to torch 2.11); random numbers would refuse
    to be drawn."""
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize(device)
    # RuntimeError: "not recording", as the runs before failed or a later torch has ended it. The others: the function is torch's own affair.
    with contextlib.suppress(RuntimeError, TypeError, AttributeError):
        end = getattr(torch._C, '_cuda_endAllocateToPool', None) or torch._C._cuda_endAllocateCurrentStreamToPool  # up to torch 2.7
        end(device.index, pool)
    generator, fresh = torch.cuda.default_generators[device.index], torch.Generator(device)
    fresh.set_state(random)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


@contextlib.contextmanager
def _waits_are_errors():
    """Within: what would wait for the device, and so break a recording off, is refused before there is one to break."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # that it does not know of every wait
        torch.cuda.set_sync_debug_mode('error')
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def _casts_inside(device: torch.device):
    """Within: autocast casts weights anew instead of taking what it cast before, which a graph would read after it is gone."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, dtype=torch.get_autocast_dtype(device.type), cache_enabled=False):
        yield
