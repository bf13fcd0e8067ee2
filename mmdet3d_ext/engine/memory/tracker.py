"""Counts the bytes of all living tensors while a program runs on fake ones: what a GPU's allocator would have handed out.

A storage counts from the operator that returns it until its last reference is gone, as with CUDA's caching allocator, whose
blocks are free again the moment that a tensor dies.
"""
from __future__ import annotations

import bisect
import contextlib
import weakref
from collections import Counter
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = 512  # bytes: the caching allocator's granularity (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)
Key = Tuple[str, str]  # (kind, part of the model)


def rounded(size: int) -> int:
    """What the allocator hands out for ``size`` bytes."""
    return -(-size // BLOCK) * BLOCK


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


class StorageTracker(TorchDispatchMode):
    """Within: every storage that an operator returns is counted under ``(phase, part)`` until it dies.

    ``phase`` is set by the caller: inputs, activations, backward, optimizer. In the backward pass the part is that
    whose forward pass made the node that runs. The innermost mode: enter it after ``FakeTensorMode``.

    Args:
        transient: called with (operator, arguments, result), gives the bytes that the operator holds only while it runs.
        scalar: called with the tensor that ``.item()`` is called on; fake tensors hold no value.

    Attributes:
        total, peak: bytes now and at most. ``at_peak``: bytes by (kind, part) at the moment of the peak; ``where``: its phase and
            part, ``operator``: what ran.
    """

    def __init__(self, transient: Optional[Callable[[Any, tuple, Any], int]] = None,
                 scalar: Optional[Callable[[torch.Tensor], Any]] = None):
        super().__init__()
        self.transient, self.scalar = transient, scalar
        self.phase = 'inputs'
        self.total = self.peak = 0
        self.sums: Counter = Counter()
        self.at_peak: Dict[Key, int] = {}
        self.where: Key = ('', '')
        self.operator = ''
        self._entries: Dict[int, List[Any]] = {}  # id of the storage -> [weak reference, bytes, key]
        self._stack: List[str] = []
        self._marks: List[int] = []   # autograd sequence numbers at which the part changes, and the part from there on
        self._marked: List[str] = []

    # ---- operators -------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Optional[dict] = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self.scalar is not None:
            return self.scalar(args[0])
        result = func(*args, **(kwargs or {}))
        name = func.name()
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.track(leaf, operator=name)
        extra = self.transient(func, args, result) if self.transient is not None else 0
        if extra:
            self._see(extra, name)
        return result

    def track(self, tensor: torch.Tensor, key: Optional[Key] = None, operator: str = '') -> None:
        """Count a tensor's storage, if it is not counted yet, under ``key`` (default: the current phase and part)."""
        storage = tensor.untyped_storage()
        number = id(storage)
        if number in self._entries:
            return
        size = rounded(storage.nbytes())
        key = key or (self.phase, self.part())
        reference = weakref.ref(storage, lambda _, number=number: self._free(number))
        self._entries[number] = [reference, size, key]
        self.sums[key] += size
        self.total += size
        self._see(0, operator)

    def relabel(self, tensor: torch.Tensor, key: Key) -> None:
        """Count a tensor that is tracked already under another key."""
        entry = self._entries.get(id(tensor.untyped_storage()))
        if entry is None:
            self.track(tensor, key)
            return
        self.sums[entry[2]] -= entry[1]
        self.sums[key] += entry[1]
        entry[2] = key

    def _free(self, number: int) -> None:
        entry = self._entries.pop(number, None)
        if entry is not None:
            self.total -= entry[1]
            self.sums[entry[2]] -= entry[1]

    def _see(self, extra: int, operator: str) -> None:
        if self.total + extra <= self.peak:
            return
        self.peak = self.total + extra
        part = self.part()
        self.at_peak = {key: size for key, size in self.sums.items() if size}
        if extra:
            key = ('workspace', part)
            self.at_peak[key] = self.at_peak.get(key, 0) + extra
        self.where, self.operator = (self.phase, part), operator

    def reset_peak(self) -> None:
        """Start the search for the peak anew from what lives now."""
        self.peak = 0
        self._see(0, '')

    # ---- parts -----------------------------------------------------------------------------------------------------
    def part(self) -> str:
        """The part of the model that runs, '' outside of all."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node() if self.phase == 'backward' else None
        if node is None:
            return ''
        index = bisect.bisect_right(self._marks, node._sequence_nr()) - 1
        return self._marked[index] if index >= 0 else ''

    def _mark(self) -> None:
        number = torch._C._autograd._get_sequence_nr()
        if self._marks and self._marks[-1] >= number:
            self._marked[-1] = self._stack[-1] if self._stack else ''
            return
        self._marks.append(number)
        self._marked.append(self._stack[-1] if self._stack else '')

    @contextlib.contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """What runs within belongs to ``part``."""
        self._stack.append(part)
        self._mark()
        try:
            yield
        finally:
            self._stack.pop()
            self._mark()

    @contextlib.contextmanager
    def labels(self, parts: Mapping[str, nn.Module]) -> Iterator[None]:
        """Within: what a module's call makes belongs to its name in ``parts``, to the innermost one that is named.

        Whatever is in an ``nn.Sequential`` counts as its call: some owners call its members, or members of these, one by one.
        """
        handles = []

        def enter(name: str) -> Callable:
            def hook(*_: Any) -> None:
                self._stack.append(name)
                self._mark()
            return hook

        def leave(*_: Any) -> None:
            self._stack.pop()
            self._mark()

        for name, part in parts.items():
            for module in part.modules() if isinstance(part, nn.Sequential) else (part,):
                handles.append(module.register_forward_pre_hook(enter(name)))
                handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
