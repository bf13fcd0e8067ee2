"""Class-balanced grouping and sampling (Zhu et al. 2019, "Class-balanced Grouping and Sampling for Point Cloud 3D Object
Detection"): samples of rare classes are repeated."""
from __future__ import annotations

import logging
from typing import Any, List, Mapping, Union

import numpy as np
from torch.utils.data import Dataset

from ..registry import DATASETS

logger = logging.getLogger('mmdet3d_ext')


@DATASETS.register_module()
class CBGSDataset(Dataset):
    """``dataset`` resampled so that every class occurs in about equally many draws.

    Each class that occurs at all gets an equal share of ``sum of (samples holding a class) over classes`` draws, taken with
    replacement from the samples that hold it. The draw depends on ``seed`` alone, so all ranks agree. A class without
    samples is left out with a warning. nuScenes' 28,130 training samples become about 123,580.

    Args:
        dataset: a data set with ``CLASSES`` and ``get_cat_ids(i)``, or its configuration.
        seed: of the draw.
    """

    def __init__(self, dataset: Union[Dataset, Mapping[str, Any]], seed: int = 0):
        self.dataset = DATASETS.build(dataset) if isinstance(dataset, Mapping) else dataset
        self.CLASSES = self.dataset.CLASSES
        self.sample_indices = self._draw(seed)
        self.flag = np.zeros(len(self), dtype=np.uint8)

    def _draw(self, seed: int) -> np.ndarray:
        holders: List[List[int]] = [[] for _ in self.CLASSES]
        for index in range(len(self.dataset)):
            for label in self.dataset.get_cat_ids(index):
                holders[label].append(index)
        present = [label for label, indices in enumerate(holders) if indices]
        absent = [name for label, name in enumerate(self.CLASSES) if label not in present]
        if not present:
            raise ValueError(f'CBGSDataset: no sample holds a box of {tuple(self.CLASSES)}, there is nothing to balance')
        if absent:
            logger.warning('CBGSDataset: no sample holds %s; balancing the other classes', ', '.join(absent))
        share = sum(len(indices) for indices in holders) / len(present)
        rng = np.random.default_rng(seed)
        return np.concatenate([rng.choice(holders[label], int(share), replace=True) for label in present])

    def __len__(self) -> int:
        return len(self.sample_indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.sample_indices[index])]

    def get_cat_ids(self, index: int) -> List[int]:
        return self.dataset.get_cat_ids(int(self.sample_indices[index]))

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, 'set_epoch'):
            self.dataset.set_epoch(epoch)

    def __repr__(self) -> str:
        return f'CBGSDataset({len(self)} draws of {self.dataset!r})'
