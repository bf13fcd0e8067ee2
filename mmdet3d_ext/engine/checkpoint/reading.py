"""Files and safety: what is read, and what is refused because reading it could run code."""
from __future__ import annotations

import glob
import os
import pickle
import re
import warnings
import zipfile
from typing import Any, Dict, List, Mapping

import numpy as np
import torch


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, and why."""


def read_checkpoint(path: str, allow_unsafe: bool = False) -> Dict[str, Any]:
    """The whole content of a checkpoint file, on the CPU.

    Args:
        path: a local file.
        allow_unsafe: also read pickles that can run code (only for files whose source is trusted).

    Raises:
        CheckpointError: if the file is absent, truncated, not a checkpoint, or needs ``allow_unsafe``.
    """
    path = os.path.expanduser(os.fspath(path))  # as the configuration's check reads it
    if re.match(r'^\w+://', path):
        raise CheckpointError(f'{path}: only local files are read; download it first and give its path')
    if os.path.isdir(path):
        inside = sorted(os.path.basename(p) for p in glob.glob(os.path.join(glob.escape(path), '*.pth')))
        hint = f'give one of its files: {", ".join(inside[:8])}' if inside else 'give a file such as latest.pth'
        raise CheckpointError(f'checkpoint {path} is a folder; {hint}')
    if not os.path.isfile(path):
        near = sorted(glob.glob(os.path.join(glob.escape(os.path.dirname(path)) or '.', '*.pth')))
        there = f'; there are {", ".join(os.path.basename(p) for p in near[:8])}' if near else ''
        broken = ' (a link to a file that is gone)' if os.path.islink(path) else ''
        raise CheckpointError(f'checkpoint {path} does not exist{broken}{there}')
    size = os.path.getsize(path)
    try:
        with torch.serialization.safe_globals(_harmless_globals()), warnings.catch_warnings():
            warnings.simplefilter('ignore')  # of old pickles; what matters is an error
            content = torch.load(path, map_location='cpu', weights_only=not allow_unsafe)
    except pickle.UnpicklingError as error:
        if not allow_unsafe and re.search(r'GLOBAL|allowed global|Unsupported class', str(error)):
            raise CheckpointError(_unsafe_message(path, error)) from None
        raise CheckpointError(f'{path} ({size} bytes) is not a readable checkpoint: {first_line(error)}') from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, ImportError, IndexError, TypeError) as error:
        raise CheckpointError(f'{path} ({size} bytes) is not a readable checkpoint, it is truncated or of another format: '
                              f'{first_line(error)}') from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f'{path} holds a {type(content).__name__}, a checkpoint is a dict')
    return content


def _harmless_globals() -> list:
    """numpy scalars in a checkpoint's meta data (mmcv and mmdet write them); they only hold numbers."""
    core = np._core if hasattr(np, '_core') else np.core
    found: List[Any] = [core.multiarray.scalar, np.dtype]
    found += [(core.multiarray.scalar, 'numpy.core.multiarray.scalar'),
              (core.multiarray._reconstruct, 'numpy.core.multiarray._reconstruct'),
              core.multiarray._reconstruct, np.ndarray]
    for code in 'bBhHiIlLqQefd?':
        found.append(type(np.dtype(code)))
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without torch's advice to read the file unsafely."""
    text = str(error).strip()
    inner = re.search(r'WeightsUnpickler error: (.*)', text)  # around it torch advises to read the file unsafely
    text = (inner[1] if inner else text.split('\n')[0])[:300]
    return text if ' ' in text else f'{type(error).__name__} {text}'.rstrip()


def _unsafe_message(path: str, error: BaseException) -> str:
    names: List[str] = []
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:
        found = re.search(r'GLOBAL (\S+)', str(error))
        names = [found.group(1)] if found else []
    listed = ', '.join(names[:6]) or first_line(error)
    return (f'{path} holds more than weights ({listed}), and reading that can run code of whoever made the file. Get a file '
            'with weights only, or, if you trust its source, add --allow-unsafe-checkpoint')


def is_checkpoint_whole(path: str) -> bool:
    """Whether the file reads completely and safely, checksums of its records included (torch's zip format has them)."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:
                    return False
        read_checkpoint(path)
        return True
    except (CheckpointError, zipfile.BadZipFile, OSError, RuntimeError):
        return False
