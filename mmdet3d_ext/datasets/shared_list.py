"""A list of Python objects kept as one byte array, so that forked loader workers share its memory."""
from __future__ import annotations

import pickle
from typing import Any, Iterable, Iterator

import numpy as np


class SharedList:
    """A read-only list; every access gives a fresh copy of the element.

    A list of dicts is copied page by page into each worker, because reading counts references in it; the full nuScenes
    training set would take about half a gigabyte per worker. Two arrays are never written to.
    """

    def __init__(self, items: Iterable[Any]):
        chunks = [pickle.dumps(item, protocol=4) for item in items]
        self._ends = np.cumsum([0] + [len(chunk) for chunk in chunks])
        self._bytes = np.frombuffer(b''.join(chunks), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f'index {index} out of range for {len(self)} elements')
        index = int(index) % len(self)
        return pickle.loads(memoryview(self._bytes[self._ends[index]:self._ends[index + 1]]))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))
