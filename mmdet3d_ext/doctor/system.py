"""Shared memory, file descriptors and other limits, free disk."""
from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path
from typing import Iterator, Optional

from .options import DEFAULTS, Options
from .report import OK, PROBLEM, SKIPPED, WARNING, Finding
from .stack import gpus_by_driver

MIB, GIB = 1 << 20, 1 << 30
POINTS = 300_000 * 5 * 4  # bytes: ten LiDAR sweeps of about 30,000 points, five float32 each
PREFETCH = 2  # torch's default batches per worker
CHECKPOINT = 520 * MIB  # the reference's multitask model with its optimizer
FEW_FILES, ENOUGH_FILES = 1024, 4096  # Linux's default soft limit; with it, tensors of eight workers run out of descriptors


def check(options: Options) -> Iterator[Finding]:
    """All of this group."""
    yield check_shared_memory(options)
    yield check_files()
    yield from check_limits()
    yield check_disk('run folder', options.run_dir or options.settings.get('run_dir') or 'runs', 4 * CHECKPOINT)
    yield check_disk('temporary folder', tempfile.gettempdir(), 256 * MIB)


def bytes_per_sample(options: Options) -> int:
    """Bytes of one training sample between a worker and its rank: float32 images, points, one byte per map cell and class."""
    values = {**DEFAULTS, **options.settings}
    height, width = values['image_size'][-2:]
    images = int(values['cameras']) * 3 * int(height) * int(width) * 4
    labels = int(values['map_cells']) * int(values['map_classes']) if values.get('map_labels', True) else 0
    return images + labels + POINTS


def check_shared_memory(options: Options) -> Finding:
    """Free bytes of /dev/shm against workers x prefetched batches x batch x ranks on this machine."""
    values = {**DEFAULTS, **options.settings}
    workers, samples = int(values['workers']), int(values['samples'])
    ranks = options.processes or len(gpus_by_driver() or []) or 1
    need = ranks * workers * int(values.get('prefetch') or PREFETCH) * samples * bytes_per_sample(options)
    rule = (f'{ranks} rank(s) x {workers} workers x {int(values.get("prefetch") or PREFETCH)} batches x {samples} samples x '
            f'{bytes_per_sample(options) / MIB:.0f} MiB')
    if workers == 0:
        return Finding('shared memory', SKIPPED, 'workers_per_gpu is 0: no tensor goes through it')
    try:
        found = os.statvfs(options.shm)
    except OSError as error:
        return Finding('shared memory', PROBLEM, f'{options.shm}: {error.strerror}; loaders with workers need it ({rule})',
                       'mount it (docker run --shm-size=16g, or --ipc=host), or set data.workers_per_gpu to 0')
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    data = {'free': free, 'total': total, 'needed': need}
    remedy = (f'docker run --shm-size={max(1, round(need / GIB + 0.5))}g (or --ipc=host); on the host: mount -o '
              f'remount,size={max(1, round(need / GIB + 0.5))}G {options.shm}; else fewer workers. workers_per_gpu 0 is not needed')
    failure = try_to_write(options.shm)
    if failure:
        return Finding('shared memory', PROBLEM, f'{options.shm} ({free / MIB:.0f} of {total / MIB:.0f} MiB free) cannot be written: '
                       f'{failure}. Workers fail with "unable to write to file </torch_...>"', remedy, data)
    text = f'{options.shm}: {free / MIB:.0f} of {total / MIB:.0f} MiB free, training needs up to {need / MIB:.0f} MiB ({rule})'
    if free < need:
        return Finding('shared memory', WARNING, f'{text}. Other programs end there with "unable to write to file </torch_...>" or a bus '
                       'error in a worker; this one sends batches through files, a little slower', remedy, data)
    return Finding('shared memory', OK, text, data=data)


def try_to_write(folder: str, size: int = MIB) -> Optional[str]:
    """Why a file of ``size`` bytes cannot be made in ``folder``; None if it can. Nothing stays."""
    try:
        with tempfile.TemporaryFile(dir=folder) as stream:
            os.posix_fallocate(stream.fileno(), 0, size)
        return None
    except OSError as error:
        return error.strerror or str(error)


def check_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f'{soft} open files per process (hard limit {"none" if hard == resource.RLIM_INFINITY else hard})'
    data = {'soft': soft, 'hard': hard}
    remedy = ('ulimit -n 65536 before the start, or LimitNOFILE / /etc/security/limits.conf (docker run --ulimit nofile=65536); '
              'ranks inherit it')
    if 0 <= soft < FEW_FILES:
        return Finding('open files', PROBLEM, f'{text}: a loader worker needs one per tensor in flight, "too many open files" comes '
                       'within an epoch', remedy, data)
    if 0 <= soft < ENOUGH_FILES:
        return Finding('open files', WARNING, f'{text}: tight for eight workers ("too many open files")', remedy, data)
    return Finding('open files', OK, text, data=data)


def check_limits() -> Iterator[Finding]:
    """Limits that end a run late: file size (a checkpoint), address space (CUDA reserves terabytes), processes."""
    for name, number, least, why, option in (
            ('file size', resource.RLIMIT_FSIZE, CHECKPOINT, 'a checkpoint is cut off at it', '-f'),
            ('address space', resource.RLIMIT_AS, 64 * GIB, 'CUDA reserves more than that', '-v'),
            ('processes', resource.RLIMIT_NPROC, 512, 'each rank starts workers and threads', '-u')):
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY and soft < least:
            yield Finding(f'limit: {name}', PROBLEM, f'{soft}: {why}', f'ulimit {option} unlimited', {'soft': soft})


def check_disk(name: str, path: str, least: int) -> Finding:
    """Free bytes and inodes where ``path`` is or would be, and whether it can be written."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return Finding(name, PROBLEM, f'{folder}: {error.strerror}', 'choose another folder: --run-dir')
    free = found.f_bavail * found.f_frsize
    data = {'path': str(folder.resolve()), 'free': free, 'inodes': found.f_favail}
    text = f'{free / GIB:.1f} GiB free for {path} (on {folder.resolve()})'
    if not os.access(folder, os.W_OK):
        return Finding(name, PROBLEM, f'{folder.resolve()} cannot be written by this user', 'choose another folder: --run-dir', data)
    if found.f_files and not found.f_favail:
        return Finding(name, PROBLEM, f'{text}, but no inode: no new file can be made', 'remove files there, or choose another disk', data)
    failure = try_to_write(str(folder), 4096)
    if failure:
        return Finding(name, PROBLEM, f'{text}, but nothing can be written: {failure}', 'choose another folder: --run-dir', data)
    if free < least:
        return Finding(name, PROBLEM, f'{text}; {least / GIB:.1f} GiB are needed', 'remove old runs, or choose another disk: --run-dir', data)
    if free < 4 * least:
        return Finding(name, WARNING, f'{text}; an epoch writes one checkpoint of about {CHECKPOINT / GIB:.1f} GiB',
                       'remove old runs, or lower checkpoint_config.max_keep_ckpts', data)
    return Finding(name, OK, text, data=data)
