"""How loader workers hand over batches: through /dev/shm, or through files where that is too small.

Containers often have 64 MB of /dev/shm. A worker that writes more dies of a bus error, so what is needed is compared with what
is there before the first worker starts.
"""
from __future__ import annotations

import glob
import io
import logging
import mmap
import multiprocessing
import os
import pickle
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any, Callable, List, Mapping, Optional, Sized

import numpy as np
import torch
from torch.utils.data import get_worker_info

from .epoch_state import own_random_numbers

logger = logging.getLogger('mmdet3d_ext')

SHM = '/dev/shm'
PLENTY = 256 * 2 ** 20  # bytes per sample that no pipeline here reaches (6 float32 images of 900 x 1600 are 104 MB)
MARGIN = 1.25  # samples differ in their points
LOCKS = 8, 4  # pages of /dev/shm: of a loader, of each of its workers, for the locks of their queues (measured: 8 and 3)
FOLDER = 'mmdet3d_ext-batches-'
_said: List[str] = []


@dataclass
class SharingPlan:
    """``workers`` to start; ``folder``: where batches go as files, or None for /dev/shm."""

    workers: int
    folder: Optional[str] = None


def plan_sharing(dataset: Sized, samples: int, workers: int, prefetch: int, processes: int = 1,
                 free: Optional[int] = None) -> SharingPlan:
    """Compare workers x prefetch x batch bytes with the free part of /dev/shm; too little is reported once.

    Args:
        dataset: read at up to three places to see how large a sample is; with plenty of room it is not read at all.
        samples: per batch. prefetch: batches per worker.
        processes: on this machine, each with as many workers.
        free: bytes there (default: as the file system says).
    """
    free = _free(SHM) if free is None else free
    reason = _no_locks(free, processes, workers)
    if reason:
        _say(f'{SHM} cannot hold even the locks of loader workers ({reason}): 0 workers instead of {workers} (the training process reads '
             f'by itself, which is slow). Free some space there, or mount it: docker --shm-size or --ipc=host')
        return SharingPlan(0)
    batches = processes * workers * prefetch
    if free is None or free >= batches * samples * PLENTY:
        return SharingPlan(workers)
    size = _sample_bytes(dataset)
    if size is None:  # nothing can be read: that is for the loader to say
        return SharingPlan(workers)
    batch = int(size * samples * MARGIN)
    need = batches * batch
    if need <= free:
        return SharingPlan(workers)
    text = (f'{SHM} has {_mib(free)} MiB free, but {processes} process(es) x {workers} workers x {prefetch} batches x '
            f'{_mib(batch)} MiB need {_mib(need)} MiB')
    disk = tempfile.gettempdir()
    if (_free(disk) or 0) >= 2 * need and not _same_device(disk, SHM):
        _say(f'{text}: batches go through files in {disk} instead (a little slower). More room: docker --shm-size, or mount a '
             f'larger {SHM}')
        return SharingPlan(workers, _new_folder())
    fewer = free // max(1, processes * prefetch * batch)
    _say(f'{text}, and {disk} has too little room as well: {fewer} workers instead of {workers}'
         + ('' if fewer else ' (the training process reads by itself, which is slow)')
         + f'. More room: docker --shm-size, a larger {SHM}, or another disk with TMPDIR')
    return SharingPlan(int(fewer))


def _no_locks(free: Optional[int], processes: int, workers: int) -> Optional[str]:
    """Why the queues of workers cannot be made: their locks lie in /dev/shm, wherever the batches go. None if they can."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        return error.strerror or str(error)
    need = processes * (LOCKS[0] + LOCKS[1] * workers) * mmap.PAGESIZE
    return None if free is None or free >= need else f'less than {need // 1024} KiB free'


def _say(text: str) -> None:
    if text not in _said:
        _said.append(text)
        logger.warning(text)


def _mib(size: float) -> int:
    return -(-int(size) // 2 ** 20)


def _free(folder: str) -> Optional[int]:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _same_device(a: str, b: str) -> bool:
    try:
        return os.stat(a).st_dev == os.stat(b).st_dev
    except OSError:
        return False


def _sample_bytes(dataset: Sized) -> Optional[int]:
    largest = None
    for index in sorted({0, len(dataset) // 2, len(dataset) - 1}):
        try:
            with own_random_numbers(0):
                found = tensor_bytes(dataset[index])
        except Exception:
            continue
        largest = found if largest is None else max(largest, found)
    return largest


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors and arrays in a nested sample (DataContainers, boxes and points included)."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(tensor_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(item) for item in value)
    inner = getattr(value, 'tensor', None)  # mmdet3d's boxes and points
    if inner is None and hasattr(value, 'cpu_only'):  # DataContainer
        inner = value.data
    return 0 if inner is None else tensor_bytes(inner)


# --------------------------------------------------------------------------------------------------- batches as files

def _new_folder() -> str:
    """A folder for this process; those of processes that were killed are removed."""
    for path in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f'{FOLDER}*-*')):
        owner = os.path.basename(path)[len(FOLDER):].split('-')[0]
        if owner.isdigit() and not os.path.exists(f'/proc/{owner}'):
            shutil.rmtree(path, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f'{FOLDER}{os.getpid()}-')


class FileBatches:
    """A collate function whose result crosses to the training process with its tensors in files, not in /dev/shm.

    Each file is mapped by the receiver and unlinked at once, so that nothing is left and most of it never reaches the disk.

    Args:
        collate: what makes the batch. folder: of the files.

    Raises:
        OSError: in the worker, if the folder's disk is full.
    """

    def __init__(self, collate: Callable[[Any], Any], folder: str):
        self.collate, self.folder = collate, folder

    def close(self) -> None:
        """Remove the folder, with batches that nobody fetched."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def __call__(self, samples: Any) -> Any:
        from torch.utils.data._utils import worker
        if get_worker_info() is None:
            return self.collate(samples)
        # torch's collate makes its result in /dev/shm where it sees that it runs in a worker
        held, worker._worker_info = worker._worker_info, None
        try:
            batch = self.collate(samples)
        finally:
            worker._worker_info = held
        stream = io.BytesIO()
        _Writer(stream, self.folder).dump(batch)
        return _Parcel(stream.getvalue())


class _Parcel:
    """Pickled bytes that arrive as what they hold."""

    def __init__(self, content: bytes):
        self.content = content

    def __reduce__(self) -> tuple:
        return pickle.loads, (self.content,)


class _Writer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, folder: str):
        super().__init__(stream, protocol=4)
        self.folder = folder

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != 'cpu' or value.layout != torch.strided:
            return NotImplemented
        flat = value.detach().contiguous().reshape(-1)
        if flat.numel() == 0:
            return _empty, (value.dtype, tuple(value.shape))
        handle, path = tempfile.mkstemp(prefix='batch-', dir=self.folder)
        with os.fdopen(handle, 'wb') as stream:
            stream.write(flat.view(torch.uint8).numpy().data)
        return _from_file, (path, value.dtype, tuple(value.shape))


def _empty(dtype: torch.dtype, shape: tuple) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _from_file(path: str, dtype: torch.dtype, shape: tuple) -> torch.Tensor:
    count = int(np.prod(shape, dtype=np.int64))
    try:
        return torch.from_file(path, shared=False, size=count, dtype=dtype).reshape(shape)
    finally:
        os.unlink(path)
