"""Data sets and loaders from configurations."""
from __future__ import annotations

import logging
from functools import partial
from typing import Any, Mapping, Optional, Sequence, Union

import torch
from mmcv.parallel import collate
from torch.utils.data import DataLoader, Dataset

from ..registry import DATASETS
from .epoch_state import seed_process
from .samplers import DistributedTrainSampler, EvalSampler

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


def init_worker(worker_id: int, seed: Optional[int] = None, rank: int = 0) -> None:
    """Set up a loader worker: one thread each (ranks times workers share the cores), and its own random numbers."""
    torch.set_num_threads(1)
    try:
        import cv2
        cv2.setNumThreads(0)
    except ImportError:
        pass
    if seed is not None:
        # Data sets with seed_augmentation set them again at every epoch; this is for those without. torch draws a new base
        # seed per epoch from the loader's generator, so workers that are started anew do not repeat themselves.
        seed_process(seed, rank, worker_id, torch.initial_seed() % 2 ** 63)


def build_dataloader(dataset: Dataset, samples_per_gpu: int, workers_per_gpu: int, *, shuffle: bool = True,
                     seed: Optional[int] = None, num_replicas: Optional[int] = None, rank: Optional[int] = None,
                     dist: bool = True, persistent_workers: bool = False, pin_memory: Optional[bool] = None,
                     prefetch_factor: Optional[int] = None, **kwargs: Any) -> DataLoader:
    """A loader of this rank's batches, collated by mmcv (DataContainers).

    Args:
        shuffle: training: :class:`.samplers.DistributedTrainSampler`, whole batches, seeded augmentation; otherwise
            :class:`.samplers.EvalSampler`, every sample once over all ranks.
        seed: order and augmentation; ``None`` for an order by seed 0 and unseeded augmentation.
        num_replicas, rank: by default those of the process group (1 and 0 without one).
        dist: False: this process alone, whatever process group there is.
        pin_memory: by default where CUDA is available.

    The sampler's ``set_epoch`` (mmcv's ``DistSamplerSeedHook`` calls it) also tells the data set the epoch.
    """
    if not isinstance(samples_per_gpu, int) or samples_per_gpu < 1:
        raise ValueError(f'data.samples_per_gpu must be a whole number >= 1, got {samples_per_gpu!r}')
    if not isinstance(workers_per_gpu, int) or workers_per_gpu < 0:
        raise ValueError(f'data.workers_per_gpu must be a whole number >= 0, got {workers_per_gpu!r}')
    if not dist:
        num_replicas, rank = 1, 0
    if shuffle:
        sampler = DistributedTrainSampler(dataset, samples_per_gpu, num_replicas, rank, seed=seed or 0)
    else:
        sampler = EvalSampler(dataset, num_replicas, rank)
    if shuffle and hasattr(dataset, 'seed_augmentation'):
        dataset.seed_augmentation(seed, sampler.rank)
    generator = None
    if seed is not None:
        generator = torch.Generator().manual_seed(int(seed) + 1009 * sampler.rank)
    if workers_per_gpu == 0:
        persistent_workers, prefetch_factor = False, None
    return DataLoader(dataset, batch_size=samples_per_gpu, sampler=sampler, num_workers=workers_per_gpu,
                      collate_fn=partial(collate, samples_per_gpu=samples_per_gpu),
                      pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
                      worker_init_fn=partial(init_worker, seed=seed, rank=sampler.rank), generator=generator,
                      persistent_workers=persistent_workers, prefetch_factor=prefetch_factor, **kwargs)
