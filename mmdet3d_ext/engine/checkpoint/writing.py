"""Writing: plain content, atomic files, and which checkpoint of a run is the newest whole one."""
from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import zipfile
from collections import OrderedDict
from typing import Any, List, Mapping, Optional, Tuple

import numpy as np
import torch

from .reading import CheckpointError, first_line, is_checkpoint_whole


class CheckpointWriteError(CheckpointError):
    """A checkpoint that could not be written; nothing under its final name was touched."""


def plain(value: Any) -> Any:
    """``value`` as plain types and CPU tensors, which ``weights_only`` reads.

    Raises:
        TypeError: for anything that has no plain form.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.generic):
        return value.item()
    for kind in (bool, int, float, str, bytes):
        if isinstance(value, kind):
            return kind(value)  # a subclass, such as torch's version string, would need its class to be read
    if value is None:
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, OrderedDict):
        result = OrderedDict((k, plain(v)) for k, v in value.items())
        if getattr(value, '_metadata', None) is not None:
            result._metadata = value._metadata
        return result
    if isinstance(value, Mapping):
        return {k if isinstance(k, (int, str)) else str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    raise TypeError(f'a checkpoint holds plain values and tensors, not {type(value)}')


def write_atomic(content: Any, path: str) -> None:
    """Write ``content`` with ``torch.save`` so that ``path`` is either the old file or the whole new one.

    The file is synced to the disk and read back before it gets its name: every record's CRC-32, which torch's zip format
    carries, must fit.

    Raises:
        CheckpointWriteError: if the disk is full, the folder cannot be written, or what was written reads back otherwise;
            ``path`` is as it was.
    """
    temporary = f'{path}.tmp-{os.getpid()}'
    try:
        with open(temporary, 'wb') as stream:
            torch.save(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
        _read_back(temporary)
        os.replace(temporary, path)
        _sync_folder(os.path.dirname(path) or '.')
    except (OSError, RuntimeError) as error:
        reason = _why_unwritten(error, temporary)
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise CheckpointWriteError(f'cannot write {path}: {reason}') from error


def _read_back(path: str) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except zipfile.BadZipFile as error:
        raise OSError(0, f'what was written does not read back ({error})') from None
    if bad is not None:
        raise OSError(0, f'what was written does not read back (its record {bad})')


def _why_unwritten(error: BaseException, temporary: str) -> str:
    """torch's archive writer hides the system's error behind its own, so look at the disk while the file is still there."""
    inner = error
    while inner is not None and not isinstance(inner, OSError):
        inner = inner.__cause__ or inner.__context__
    reason = inner.strerror if inner is not None and inner.strerror else first_line(error)
    try:
        written = os.path.getsize(temporary) if os.path.exists(temporary) else 0
        free = shutil.disk_usage(os.path.dirname(temporary) or '.').free
    except OSError:
        return f'{reason} (the folder is gone)'
    if inner is None and free < 2**20:
        reason = 'the disk is full'
    return f'{reason} ({written / 2**20:.0f} MiB were written, {free / 2**20:.0f} MiB free)'


def _sync_folder(folder: str) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        pass  # some network file systems cannot sync a folder


def link_atomic(target: str, link: str) -> None:
    """Make ``link`` a relative symbolic link to ``target`` (same folder), replacing an older one in one step.

    Raises:
        CheckpointWriteError: if the disk is full; ``link`` is as it was.
    """
    temporary = f'{link}.tmp-{os.getpid()}'
    try:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        try:
            os.symlink(os.path.basename(target), temporary)
        except OSError:  # file systems without links: a copy is as good
            shutil.copyfile(target, temporary)
        os.replace(temporary, link)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise CheckpointWriteError(f'cannot write {link}: {error.strerror or error}') from error


def clean_leftovers(folder: str) -> None:
    """Remove half-written files of runs that were killed while writing."""
    for path in glob.glob(os.path.join(glob.escape(folder), '*.pth.tmp-*')):
        try:
            os.unlink(path)
        except OSError:
            pass


def list_checkpoints(folder: str, prefix: str = '') -> List[Tuple[Tuple[int, int], str]]:
    """``((epoch, iteration), path)`` of a run's checkpoints, the least advanced first.

    ``<prefix>epoch_<N>.pth`` stands after N whole epochs, ``<prefix>epoch_<N>_iter_<M>.pth`` M iterations later.
    """
    found = []
    for path in glob.glob(os.path.join(glob.escape(folder), f'{prefix}epoch_*.pth')):
        match = re.fullmatch(rf'{prefix}epoch_(\d+)(?:_iter_(\d+))?\.pth', os.path.basename(path))
        if match:
            found.append(((int(match[1]), int(match[2] or 0)), path))
    return sorted(found)


def newest_checkpoint(folder: str) -> Tuple[Optional[str], List[str]]:
    """The most advanced checkpoint in ``folder`` that reads whole (None if there are none), and more advanced ones that do not.

    Raises:
        CheckpointError: if there are checkpoints, but none reads: starting anew would not be what "resume" asks for.
    """
    broken: List[str] = []
    for _, path in reversed(list_checkpoints(folder)):
        if is_checkpoint_whole(path):
            return path, broken
        broken.append(path)
    if broken:
        raise CheckpointError(f'none of the {len(broken)} checkpoints in {folder} can be read (newest: {broken[0]}); remove '
                              'them to start from the beginning')
    return None, []
