"""Small values to a device and from it without making the host wait, or only for what it needs.

``tensor.new_tensor([...])`` copies from pageable memory, and a GPU's host thread stands still until everything queued before
has run. A step has dozens of such constants.
"""
from __future__ import annotations

from typing import Dict, Iterable, List, Sequence, Tuple

import torch

_CONSTANTS: Dict[Tuple, torch.Tensor] = {}
_MOST = 512  # entries kept; configurations have tens of them


def constant(values: Iterable[float], like: torch.Tensor) -> torch.Tensor:
    """``like.new_tensor(values)``, copied to ``like``'s device once and shared after that: never write to it."""
    key = (tuple(values), like.dtype, like.device)
    found = _CONSTANTS.get(key)
    if found is None:
        with torch.inference_mode(False):  # an inference tensor could not be saved for a later backward pass
            found = torch.tensor(key[0], dtype=like.dtype, device=like.device)
        if type(found) is torch.Tensor and not traced():
            if len(_CONSTANTS) >= _MOST:
                _CONSTANTS.clear()
            _CONSTANTS[key] = found
    return found


def traced() -> bool:
    """Whether some mode watches or replaces tensors: what is made under it must not outlive it."""
    return bool(torch.utils._python_dispatch._get_current_dispatch_mode_stack()) or torch.compiler.is_compiling()


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor.to(device)``; a CPU tensor goes to a GPU through pinned memory, behind what is already queued."""
    if tensor.device.type == 'cpu' and torch.device(device).type == 'cuda':
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def download(tensors: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """The tensors on the CPU, with one wait for all of them. What comes from a GPU lies in pinned memory."""
    found = [tensor.to('cpu', non_blocking=True) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return found


class Arriving:
    """A tensor on its way to the CPU. The host waits in :meth:`wait` only, and for this tensor only: what is queued on the device
    after the construction goes on meanwhile."""

    def __init__(self, tensor: torch.Tensor):
        self._copy = tensor.detach().to('cpu', non_blocking=True)
        self._there = None
        if tensor.is_cuda:
            with torch.cuda.device(tensor.device):
                self._there = torch.cuda.Event()
                self._there.record()

    def wait(self) -> torch.Tensor:
        """The tensor on the CPU."""
        if self._there is not None:
            self._there.synchronize()
        return self._copy
