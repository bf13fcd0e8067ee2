"""Batches of samples, in a form whose tensors torch can pin."""
from __future__ import annotations

import copy
from typing import Any, Mapping, Sequence

from mmcv.parallel import DataContainer, collate
from torch.utils.data._utils.pin_memory import pin_memory


class PinnableContainer(DataContainer):
    """mmcv's container, for which ``pin_memory=True`` of torch's loader does what it says.

    torch leaves alone what it does not know, so the tensors in a plain DataContainer stay in pageable memory and every copy of them
    to a GPU makes the host wait.
    """

    @classmethod
    def of(cls, container: DataContainer) -> 'PinnableContainer':
        """The same content."""
        return cls(container.data, container.stack, container.padding_value, container.cpu_only, container.pad_dims)

    def pin_memory(self) -> 'PinnableContainer':
        """With all tensors in pinned memory; what stays on the CPU is left where it is."""
        if self.cpu_only:
            return self
        pinned = copy.copy(self)
        pinned._data = pin_memory(self.data)
        return pinned


class Collate:
    """mmcv's collate for batches of ``samples_per_gpu`` samples, with :class:`PinnableContainer` for its containers."""

    def __init__(self, samples_per_gpu: int):
        self.samples_per_gpu = samples_per_gpu

    def __call__(self, samples: Sequence[Any]) -> Any:
        batch = collate(samples, samples_per_gpu=self.samples_per_gpu)
        if isinstance(batch, Mapping):
            return {key: self._pinnable(value) for key, value in batch.items()}
        return self._pinnable(batch)

    @staticmethod
    def _pinnable(value: Any) -> Any:
        return PinnableContainer.of(value) if isinstance(value, DataContainer) else value
