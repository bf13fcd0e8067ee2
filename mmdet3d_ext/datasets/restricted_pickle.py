"""Pickles that hold data only: a reader that refuses everything else, and an atomic writer.

A file is read twice. The first pass builds stand-ins: every callable checks what it is given, array types and arrays check the
state that they would get (NumPy trusts it: an array type that is told to hold no objects, but does, takes bytes of the file for
addresses). Only a file that passed is built for real. The first pass also has a memory limit, since ten bytes can ask for
gigabytes.

What remains possible is a crash: tuples nested 10^5 deep as a key exhaust the C stack when Python hashes them, and the process ends.
"""
from __future__ import annotations

import codecs
import contextlib
import gc
import io
import math
import os
import pickle
import re
import resource
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Tuple, Union

import numpy as np

PathLike = Union[str, os.PathLike]
# Bool, integer, float, complex, bytes, text, object; no structured types, no times.
ARRAY_TYPES = re.compile(r'b1|[biufc](?:1|2|4|8|16)|[US]\d{1,6}|O8?')
OBJECT_FLAGS = 63  # of NumPy's type O: holds objects, counts references, ...
PLAIN_FLAGS = (0, 8)  # 8: memory is zeroed first (text)
MAX_RANGE = 10 ** 7
MEMORY_FLOOR, MEMORY_PER_BYTE = 2 ** 30, 80  # an empty dict takes 64 bytes and one byte of the file


class UnsafePickleError(pickle.UnpicklingError):
    """The pickle asks for something that is not plain data."""


def _require(condition: Any, text: str) -> None:
    if not condition:
        raise UnsafePickleError(text)


class _Callable:
    """What a pickle may call. Nothing in the file can change it (a function's attributes could be set)."""

    __slots__ = ('_run',)

    def __init__(self, run: Callable):
        object.__setattr__(self, '_run', run)

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnsafePickleError('it changes what it should only call')

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickleError('it changes what it should only call')


# ---------------------------------------------------------------------------------------------------------- containers

def _encode_latin1(text: str, encoding: str) -> bytes:
    """How protocol 2 stores bytes; any other codec is no part of a data file."""
    if encoding not in ('latin1', 'latin-1'):
        raise UnsafePickleError(f'bytes stored with the codec {encoding!r}, only latin1 is expected in a data file')
    return codecs.encode(text, 'latin1')


def _from_sequence(kind: type) -> Callable:
    def make(*args: Any) -> Any:
        _require(not args or len(args) == 1 and isinstance(args[0], (list, tuple, set, frozenset)), f'{kind.__name__} of other than a list')
        return kind(*args)
    return make


def _bytes_like(kind: type) -> Callable:
    def make(*args: Any) -> Any:
        known = not args or len(args) == 1 and isinstance(args[0], (bytes, bytearray, list)) or len(args) == 2 and all(
            isinstance(a, str) for a in args)
        _require(known, f'{kind.__name__} of other than bytes')  # a number would be a size
        return kind(_encode_latin1(*args)) if len(args) == 2 else kind(*args)
    return make


def _numbers(kind: type) -> Callable:
    def make(*args: Any) -> Any:
        _require(all(isinstance(a, (int, float, type(None))) for a in args), f'{kind.__name__} of other than numbers')
        made = kind(*args)
        _require(kind is not range or len(made) <= MAX_RANGE, f'a range of more than {MAX_RANGE} numbers')
        return made
    return make


def _ordered(*args: Any) -> OrderedDict:
    _require(not args or len(args) == 1 and isinstance(args[0], list), 'an OrderedDict of other than a list')
    return OrderedDict(*args)


# -------------------------------------------------------------------------------------------------------------- arrays

_NDARRAY = _Callable(lambda *args: _require(False, 'it calls numpy.ndarray'))  # only ever an argument of _reconstruct


class _ArrayType:
    """Stands for a ``numpy.dtype`` in the first pass."""

    def __init__(self, spec: Any = None, align: Any = False, copy: Any = False):
        _require(isinstance(spec, str) and ARRAY_TYPES.fullmatch(spec), f'an array of type {spec!r}; arrays of numbers, text and '
                                                                       'objects are loaded')
        _require(align in (False, True) and copy in (False, True), 'an unknown form of array type')
        self.real = np.dtype(spec)
        self.sizes: Dict[Tuple[int, ...], int] = {}  # shape -> bytes, of shapes that were checked

    def __setstate__(self, state: Any) -> None:
        """(version, byte order, subarray, names, fields, item size, alignment, flags[, metadata])"""
        good = isinstance(state, tuple) and len(state) == 8 and state[0] in (3, 4) and state[1] in ('<', '>', '|', '=')
        good = good and state[2] is state[3] is state[4] is None and all(type(value) is int for value in state[5:])
        flags = (OBJECT_FLAGS,) if self.real.hasobject else PLAIN_FLAGS
        good = good and state[5] in (-1, self.real.itemsize) and state[6] in (-1, self.real.alignment) and state[7] in flags
        _require(good, f'an array type {self.real} that is described as another')


class _Array:
    """Stands for a ``numpy.ndarray`` in the first pass."""

    def __setstate__(self, state: Any) -> None:
        """(version, shape, type, Fortran order, bytes or list of objects)"""
        if type(state) is tuple and len(state) == 5 and type(state[2]) is _ArrayType and type(state[4]) is bytes:  # a file has 10^6
            try:
                if state[0] == 1 and type(state[3]) is bool and len(state[4]) == state[2].sizes[state[1]]:
                    return
            except (KeyError, TypeError):
                pass
        _require(isinstance(state, tuple) and len(state) == 5 and state[0] == 1 and isinstance(state[2], _ArrayType)
                 and isinstance(state[3], (bool, int)), 'an array in an unknown form')
        _check_size(state[1], state[2], state[4])


def _check_size(shape: Any, kind: _ArrayType, data: Any) -> None:
    _require(isinstance(shape, tuple) and len(shape) <= 32 and all(type(n) is int and n >= 0 for n in shape), f'an array of shape {shape!r}')
    count = math.prod(shape)
    if not kind.real.hasobject and len(kind.sizes) < 1000:
        kind.sizes[shape] = count * kind.real.itemsize
    if kind.real.hasobject:
        _require(isinstance(data, list) and len(data) == count, 'an array of objects without its objects')
    elif not isinstance(data, str):  # text: bytes of Python 2
        _require(isinstance(data, (bytes, bytearray)) and len(data) == count * kind.real.itemsize, 'an array whose bytes do not fit its shape')


def _empty_array(sub: Any, shape: Any, code: Any) -> _Array:
    _require(sub is _NDARRAY and shape == (0,) and code in (b'b', 'b'), 'an array in an unknown form')
    return _Array()


def _check_scalar(kind: Any, data: Any) -> Any:
    _require(isinstance(kind, _ArrayType) and not kind.real.hasobject, 'a NumPy number in an unknown form')
    raw = data.encode('latin1') if isinstance(data, str) else data
    _require(isinstance(raw, bytes) and len(raw) == kind.real.itemsize, 'a NumPy number whose bytes do not fit its type')
    return np.frombuffer(raw, kind.real)[0] if raw else ''


def _check_buffer(data: Any, kind: Any, shape: Any, order: Any) -> _Array:
    _require(isinstance(kind, _ArrayType) and not kind.real.hasobject and order in ('C', 'F') and not isinstance(data, str),
             'an array in an unknown form')
    _check_size(shape, kind, data)
    return _Array()


def _numpy_internal(name: str) -> Any:
    # numpy 2 moved numpy.core to numpy._core; a file may come from either.
    try:
        import numpy._core.multiarray as multiarray
        import numpy._core.numeric as numeric
    except ImportError:
        import numpy.core.multiarray as multiarray
        import numpy.core.numeric as numeric
    return {'_reconstruct': multiarray._reconstruct, 'scalar': multiarray.scalar, '_frombuffer': numeric._frombuffer}[name]


def _globals() -> Tuple[Dict[Tuple[str, str], Any], Dict[Tuple[str, str], Any]]:
    """What may be named in a file, for the first pass and for the second, which only sees files that passed the first."""
    containers = {'set': _from_sequence(set), 'frozenset': _from_sequence(frozenset), 'bytes': _bytes_like(bytes),
                  'bytearray': _bytes_like(bytearray), 'complex': _numbers(complex), 'slice': _numbers(slice), 'range': _numbers(range)}
    trial = {(module, name): _Callable(run) for module in ('builtins', '__builtin__') for name, run in containers.items()}
    trial[('__builtin__', 'xrange')] = trial[('builtins', 'range')]  # its name in protocol 2
    trial[('_codecs', 'encode')] = _Callable(_encode_latin1)
    trial[('collections', 'OrderedDict')] = _Callable(_ordered)
    real = {key: run._run for key, run in trial.items()}
    trial[('numpy', 'ndarray')], real[('numpy', 'ndarray')] = _NDARRAY, np.ndarray
    trial[('numpy', 'dtype')], real[('numpy', 'dtype')] = _Callable(_ArrayType), np.dtype
    for core in ('numpy.core', 'numpy._core'):
        for module, name, check in (('multiarray', '_reconstruct', _empty_array), ('multiarray', 'scalar', _check_scalar),
                                    ('numeric', '_frombuffer', _check_buffer)):
            trial[(f'{core}.{module}', name)], real[(f'{core}.{module}', name)] = _Callable(check), _numpy_internal(name)
    return trial, real


_TRIAL, _REAL = _globals()


class _DataUnpickler(pickle.Unpickler):

    def __init__(self, data: bytes, known: Dict[Tuple[str, str], Any]):
        super().__init__(io.BytesIO(data))
        self.known = known

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.known[(module, name)]
        except KeyError:
            raise UnsafePickleError(f'it asks for {module}.{name}; only Python containers, numbers, text and NumPy arrays '
                                    f'are loaded, since anything else could run code') from None


@contextlib.contextmanager
def _memory_limit(more: int) -> Iterator[None]:
    """No allocation beyond ``more`` bytes above what this process has; a request for it is a MemoryError, not a full machine."""
    limits: Optional[Tuple[int, int]] = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = used + more
        if all(limit == resource.RLIM_INFINITY or wanted < limit for limit in (soft, hard)):
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
            limits = (soft, hard)
    try:
        yield
    finally:
        if limits is not None:
            resource.setrlimit(resource.RLIMIT_AS, limits)


def load(path: PathLike) -> Any:
    """Read a pickle of plain Python and NumPy data.

    Raises:
        FileNotFoundError: if there is no such file.
        UnsafePickleError: if the pickle asks for any other global, or for arrays, sizes or changes that data do not need; the
            message names the file and the reason.
        ValueError: if the file is cut off or is no pickle.
    """
    path = Path(path)
    data = path.read_bytes()
    collecting = gc.isenabled()
    gc.disable()  # millions of containers, none of them garbage: collections take half of the time
    try:
        with _memory_limit(MEMORY_FLOOR + MEMORY_PER_BYTE * len(data)):
            _DataUnpickler(data, _TRIAL).load()
        return _DataUnpickler(data, _REAL).load()
    except UnsafePickleError as error:
        raise UnsafePickleError(f'{path}: {error}') from None
    except MemoryError:
        raise UnsafePickleError(f'{path}: it asks for more memory than data of {len(data)} bytes need') from None
    except Exception as error:  # whatever a wrong opcode leads to; no code of the file has run
        raise ValueError(f'{path}: not a complete pickle ({len(data)} bytes): {error or type(error).__name__}') from error
    finally:
        if collecting:
            gc.enable()


def save(data: Any, path: PathLike) -> None:
    """Write ``data`` so that ``path`` holds either the old or the whole new content, whatever happens meanwhile."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.name}.', suffix='.tmp')
    try:
        with os.fdopen(handle, 'wb') as file:
            pickle.dump(data, file, protocol=4)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:  # a full disk does not tell where
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
