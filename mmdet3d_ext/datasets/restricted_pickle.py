"""Pickles that hold data only: a reader that refuses everything else, and an atomic writer."""
from __future__ import annotations

import codecs
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any, Union

import numpy as np

PathLike = Union[str, os.PathLike]


class UnsafePickleError(pickle.UnpicklingError):
    """The pickle asks for something that is not plain data."""


def _encode_latin1(text: str, encoding: str) -> bytes:
    """How protocol 2 stores bytes; any other codec is no part of a data file."""
    if encoding not in ('latin1', 'latin-1'):
        raise UnsafePickleError(f'bytes stored with the codec {encoding!r}, only latin1 is expected in a data file')
    return codecs.encode(text, 'latin1')


def _numpy_internal(name: str) -> Any:
    # numpy 2 moved numpy.core to numpy._core; a file may come from either.
    try:
        import numpy._core.multiarray as multiarray
        import numpy._core.numeric as numeric
    except ImportError:
        import numpy.core.multiarray as multiarray
        import numpy.core.numeric as numeric
    return {'_reconstruct': multiarray._reconstruct, 'scalar': multiarray.scalar, '_frombuffer': numeric._frombuffer}[name]


def _allowed_globals() -> dict:
    allowed = {
        ('numpy', 'ndarray'): np.ndarray,
        ('numpy', 'dtype'): np.dtype,
        ('_codecs', 'encode'): _encode_latin1,
        ('collections', 'OrderedDict'): __import__('collections').OrderedDict,
    }
    for module in ('numpy.core', 'numpy._core'):
        for name in ('_reconstruct', 'scalar'):
            allowed[(f'{module}.multiarray', name)] = _numpy_internal(name)
        allowed[(f'{module}.numeric', '_frombuffer')] = _numpy_internal('_frombuffer')
    for module in ('builtins', '__builtin__'):
        for value in (set, frozenset, bytes, bytearray, complex, slice, range):
            allowed[(module, value.__name__)] = value
    return allowed


_ALLOWED = _allowed_globals()


class _DataUnpickler(pickle.Unpickler):

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[(module, name)]
        except KeyError:
            raise UnsafePickleError(f'it asks for {module}.{name}; only Python containers, numbers, text and NumPy arrays '
                                    f'are loaded, since anything else could run code') from None


def load(path: PathLike) -> Any:
    """Read a pickle of plain Python and NumPy data.

    Raises:
        FileNotFoundError: if there is no such file.
        UnsafePickleError: if the pickle asks for any other global; the message names the file and the global.
        ValueError: if the file is cut off or is no pickle.
    """
    path = Path(path)
    with open(path, 'rb') as file:
        try:
            return _DataUnpickler(file).load()
        except UnsafePickleError as error:
            raise UnsafePickleError(f'{path}: {error}') from None
        except (pickle.UnpicklingError, EOFError, IndexError, KeyError, AttributeError, ValueError, TypeError,
                UnicodeDecodeError) as error:
            size = path.stat().st_size
            raise ValueError(f'{path}: not a complete pickle ({size} bytes): {error or type(error).__name__}') from error


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
