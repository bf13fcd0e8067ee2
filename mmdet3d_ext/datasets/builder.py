"""Data sets and loaders from configurations."""
from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing
import signal
from functools import partial
from typing import Any, Mapping, Optional, Sequence, Union

import torch
from torch.utils.data import DataLoader, Dataset

from ..registry import DATASETS
from .collating import Collate
from .epoch_state import seed_process
from .reader import SampleReader, enter_worker, make_notes
from .samplers import DistributedTrainSampler, EvalSampler
from .sharing import FileBatches, plan_sharing

logger = logging.getLogger('mmdet3d_ext')


def build_dataset(cfg: Union[Mapping[str, Any], Sequence[Mapping[str, Any]]], **defaults: Any) -> Dataset:
    """The data set of a configuration.

    A wrapper's inner ``dataset`` is built first; a list of configurations is concatenated. ``defaults`` (such as
    ``test_mode=True``) go to every innermost data set that does not set them.
    """
    if isinstance(cfg, (list, tuple)):
        if len(cfg) == 1:
            return build_dataset(cfg[0], **defaults)
        from mmdet.datasets import ConcatDataset
        return ConcatDataset([build_dataset(one, **defaults) for one in cfg], separate_eval=False)
    if isinstance(cfg, Mapping) and isinstance(cfg.get('dataset'), (Mapping, list, tuple)):
        return DATASETS.build(dict(cfg, dataset=build_dataset(cfg['dataset'], **defaults)))
    if isinstance(cfg, Mapping) and isinstance(cfg.get('datasets'), (list, tuple)):
        return DATASETS.build(dict(cfg, datasets=[build_dataset(one, **defaults) for one in cfg['datasets']]))
    return DATASETS.build(cfg, **defaults)


def init_worker(worker_id: int, seed: Optional[int] = None, rank: int = 0, notes: Optional[torch.Tensor] = None) -> None:
    """Set up a loader worker: one thread each (ranks times workers share the cores), its own random numbers, its row of notes.

    Signals that ask the job to stop reach workers, too (Slurm signals every process of a step). The training process answers
    them and ends its workers itself; a worker only ends by SIGTERM a minute later (see :func:`_kill_workers`).
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    enter_worker(notes, worker_id)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(60))
    try:
        import cv2
        cv2.setNumThreads(0)
    except ImportError:
        pass
    if seed is not None:
        # Draws of training are seeded one by one (SampleReader); this is for whatever else draws. torch draws a new base seed
        # per epoch from the loader's generator, so workers that are started anew do not repeat themselves.
        seed_process(seed, rank, worker_id, torch.initial_seed() % 2 ** 63)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next sample, up to half a gigabyte.

    By default images and clouds are handed back to the kernel after every sample and fetched again, page by page, filled with zeros,
    which takes about a tenth of a sample's time. Elsewhere than on glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    if mallopt(mmap_threshold, 2 ** 28) or mallopt(mmap_threshold, 2 ** 25):  # the larger one is refused before glibc 2.35
        mallopt(trim_threshold, 2 ** 29)


@atexit.register
def _kill_workers() -> None:
    """At the end of this process: multiprocessing's own clean-up would send SIGTERM and wait for each worker."""
    for process in multiprocessing.active_children():
        if getattr(getattr(process, '_target', None), '__name__', '') == '_worker_loop':
            process.kill()


def build_dataloader(dataset: Dataset, samples_per_gpu: int, workers_per_gpu: int, *, shuffle: bool = True,
                     seed: Optional[int] = None, num_replicas: Optional[int] = None, rank: Optional[int] = None,
                     dist: bool = True, persistent_workers: bool = False, pin_memory: Optional[bool] = None,
                     prefetch_factor: Optional[int] = None, unreadable: Union[str, Mapping[str, Any], None] = None,
                     processes: int = 1, **kwargs: Any) -> DataLoader:
    """A loader of this rank's batches, collated by mmcv (DataContainers). Its ``dataset`` is a :class:`.reader.SampleReader`.

    Args:
        shuffle: training: :class:`.samplers.DistributedTrainSampler`, whole batches, seeded augmentation; otherwise
            :class:`.samplers.EvalSampler`, every sample once over all ranks.
        seed: order and augmentation; ``None`` for an order by seed 0 and unseeded augmentation.
        num_replicas, rank: by default those of the process group (1 and 0 without one).
        dist: False: this process alone, whatever process group there is.
        persistent_workers: keep the workers, and the maps that they hold, from epoch to epoch.
        pin_memory: batches in memory from which a GPU copies without making the host wait; by default where CUDA is available.
        prefetch_factor: batches that each worker reads ahead (torch's default: 2).
        unreadable: what a sample that cannot be read does: ``'raise'`` (default), or ``{policy: skip, budget: n}`` in training
            (:class:`.reader.SampleReader`). In evaluation every sample counts, so there it is always an error.
        processes: processes on this machine that load as this one does; they share /dev/shm (:mod:`.sharing`).

    The sampler's ``set_epoch`` (mmcv's ``DistSamplerSeedHook`` calls it) also tells the data set the epoch.
    """
    if not isinstance(samples_per_gpu, int) or samples_per_gpu < 1:
        raise ValueError(f'data.samples_per_gpu must be a whole number >= 1, got {samples_per_gpu!r}')
    if not isinstance(workers_per_gpu, int) or workers_per_gpu < 0:
        raise ValueError(f'data.workers_per_gpu must be a whole number >= 0, got {workers_per_gpu!r}')
    policy = dict({'policy': unreadable} if isinstance(unreadable, str) else unreadable or {})
    unknown = set(policy) - {'policy', 'budget'}
    if unknown:
        raise ValueError(f'data.unreadable: unknown keys {sorted(unknown)}; it takes policy and budget')
    if not shuffle and policy.get('policy', 'raise') != 'raise':
        raise ValueError(f'data.unreadable.policy is {policy["policy"]!r}, but in evaluation every sample counts: it must be "raise"')
    if not dist:
        num_replicas, rank = 1, 0
    reader = SampleReader(dataset, seed if shuffle else None, **policy)
    if shuffle:
        sampler = DistributedTrainSampler(dataset, samples_per_gpu, num_replicas, rank, seed=seed or 0)
    else:
        sampler = EvalSampler(dataset, num_replicas, rank, samples_per_gpu)
    generator = None
    if seed is not None:
        generator = torch.Generator().manual_seed(int(seed) + 1009 * sampler.rank)
    gather: Any = Collate(samples_per_gpu)
    if workers_per_gpu > 0:
        plan = plan_sharing(reader, samples_per_gpu, workers_per_gpu, prefetch_factor or 2, processes)
        workers_per_gpu = plan.workers
        if plan.folder is not None:
            gather = FileBatches(gather, plan.folder)
    if workers_per_gpu == 0:
        persistent_workers, prefetch_factor = False, None
    notes = make_notes(workers_per_gpu)
    loader = DataLoader(reader, batch_size=samples_per_gpu, sampler=sampler, num_workers=workers_per_gpu, collate_fn=gather,
                        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
                        worker_init_fn=partial(init_worker, seed=seed, rank=sampler.rank, notes=notes), generator=generator,
                        persistent_workers=persistent_workers, prefetch_factor=prefetch_factor, **kwargs)
    loader.notes = notes
    return loader
