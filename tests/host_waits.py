"""Where the host would wait if the tensors of a piece of work lay on a GPU, seen on the CPU.

What it knows: values that Python asks for (``item``, ``bool``, ``tolist``, ``cpu``), tensors on their way that are waited for, operators
whose result's size or error depends on values, indices that are masks or Python lists, constants that are made from Python numbers, and
our own operators that count. What it cannot see: blocking copies between devices, and what libraries do in CUDA code of their own.
"""
from __future__ import annotations

import collections
import contextlib
import sys
from typing import Any, Counter, Iterator
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmdet3d_ext.engine.timing import _short
from mmdet3d_ext.geometry.on_device import Arriving

ASKED = ('tolist', 'cpu', 'new_tensor')  # functions that call no operator on the CPU; ``item`` and ``bool`` do
# Operators after which the host knows something of the values: their result's size, or an error.
READERS = set('''aten::_local_scalar_dense aten::nonzero aten::nonzero_numpy aten::masked_select aten::_unique aten::_unique2 aten::unique_dim
    aten::unique_consecutive aten::unique_dim_consecutive aten::repeat_interleave.Tensor aten::equal aten::bincount aten::_linalg_check_errors
    aten::multinomial mmdet3d_ext::hard_voxelize mmdet3d_ext::point_groups mmdet3d_ext::dynamic_point_to_voxel'''.split())
INDEXED = {'aten::index', 'aten::index_put', 'aten::index_put_', 'aten::_index_put_impl_'}
MASKS = (torch.bool, torch.uint8)


def _site() -> str:
    """``file: function`` of the innermost call that is neither torch's nor this file's."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not any(part in name for part in ('/torch/', '/contextlib.py')):
            return f'{_short(name)}: {frame.f_code.co_name}'
        frame = frame.f_back
    return '?'


class _Asked(TorchFunctionMode):
    def __init__(self, found: Counter, read: '_Read'):
        super().__init__()
        self.found, self.read = found, read

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, '__name__', '')
        if name == 'one_hot' and (args[1:] or kwargs):  # looks at the values on the CPU only
            self.read.found, found = collections.Counter(), self.read.found
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.read.found = found
        if name in ASKED or name == 'tensor' and (kwargs or {}).get('device') is not None:
            self.found[_site(), name] += 1
        elif name in ('__getitem__', '__setitem__') and any(isinstance(part, list) and all(isinstance(n, (int, list)) for n in part)
                                                               for part in _parts(args[1])):
            self.found[_site(), 'index of Python numbers'] += 1
        return func(*args, **(kwargs or {}))


class _Read(TorchDispatchMode):
    def __init__(self, found: Counter):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, overload = func._schema.name, func._schema.overload_name
        if name in READERS or f'{name}.{overload}' in READERS:
            sized = name == 'aten::repeat_interleave' and (kwargs or {}).get('output_size') is not None
            self.found[_site(), name] += not sized
        elif name in INDEXED and any(isinstance(t, torch.Tensor) and t.dtype in MASKS for t in tree_leaves(args[1])):
            self.found[_site(), 'index by a mask'] += 1
        return func(*args, **(kwargs or {}))


def _parts(index: Any) -> tuple:
    return index if isinstance(index, tuple) else (index,)


@contextlib.contextmanager
def host_waits() -> Iterator[Counter]:
    """Within: (``file: function``, what) -> how often. Do the work once before: what is made once and kept does not count."""
    found: Counter = collections.Counter()
    read = _Read(found)
    wait = Arriving.wait

    def counted(arriving: Arriving) -> torch.Tensor:
        found[_site(), 'wait'] += 1
        return wait(arriving)

    with mock.patch.object(Arriving, 'wait', counted), _Asked(found, read), read:
        yield found
    for key in [key for key, count in found.items() if not count]:
        del found[key]
