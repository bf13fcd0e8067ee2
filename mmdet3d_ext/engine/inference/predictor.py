"""A model prepared for predictions: what can be done once is not done in every frame.

    predictor = Predictor(model, device, torch.float16)
    print(predictor.prepare(batch))          # folds, keeps geometry, stores weights; the model is changed for good
    for batch in loader:
        results = predictor(batch)
"""
from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

import torch
from mmcv.parallel import DataContainer
from torch import nn

from ...models.detectors.memory_switches import apply_channels_last
from ...models.vtransforms.base import BaseTransform
from ...models.vtransforms.rigs import RIG_MATRICES, rig_key
from ..parallel import autocast, takes, unpack_batch
from ..timing import parts_of
from .fold import FoldReport, fold_batch_norms
from .graphs import GraphedParts, capturable
from .weights import StoreReport, store_cast_weights

RIGS = 4  # cameras' sets of matrices that are kept unless told otherwise


class Predictor:
    """Calls a model on batches as a loader gives them, or on unpacked ones; labels stay where they are.

    Args:
        model: is moved to ``device`` and put in evaluation mode.
        dtype: autocast type, None for float32.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: Optional[torch.dtype] = None):
        self.model = model.to(device)
        self.model.eval()  # of mmdet's backbones it returns nothing
        self.device, self.dtype = device, dtype
        self._transforms = [module for module in self.model.modules() if isinstance(module, BaseTransform)]
        self._extra = _extra(model)
        self._stored = False

    def __call__(self, batch: Mapping[str, Any]) -> List[Dict[str, Any]]:
        """The model's predictions, on the CPU. ``batch``: what the loader gives, or ``model(**batch)`` takes."""
        rig = self._rig(batch)
        values = dict(_inputs(batch, self.device), **self._extra)
        if rig is not None:
            values['rig'] = rig
        with torch.no_grad(), autocast(self.device, self.dtype):
            return self.model(**values)

    def prepare(self, batch: Mapping[str, Any], fold: bool = True, rigs: int = RIGS, store_weights: bool = True,
                channels_last: bool = False, graphs: bool = False) -> str:
        """All of the steps below that are asked for, in the order that they need; gives what was done in words.

        Args:
            batch: a batch that reaches every part of the model (real, or a random one of the configuration's shapes).
            rigs: 0 for none.
        """
        done = []
        if fold:
            done.append(str(self.fold(batch)))
        if rigs:
            self.keep_geometry(rigs)
            done.append(f'geometry of the last {rigs} rigs kept')
        if store_weights and self.dtype is not None:
            done.append(str(self.store_weights(batch)))
        if channels_last:
            self.channels_last()
            done.append('convolutions in channels-last order')
        if graphs:
            done.append(str(self.record_graphs(batch)))
        return '; '.join(done)

    def fold(self, batch: Mapping[str, Any]) -> FoldReport:
        """See :func:`~.fold.fold_batch_norms`; in float32 whatever the predictor's type is. Before the weights are stored."""
        if self._stored:
            raise ValueError(f'fold: weights are stored in {self.dtype} already, and folding computes in float32; fold first')
        return fold_model(self.model, batch, self.device)

    def keep_geometry(self, rigs: int = RIGS) -> None:
        """See :meth:`BaseTransform.cache_rigs`. The matrices are compared as the loader gives them, on the host."""
        for module in self._transforms:
            module.cache_rigs(rigs)

    def store_weights(self, batch: Mapping[str, Any]) -> StoreReport:
        """See :func:`~.weights.store_cast_weights`."""
        if self.dtype is None:
            raise ValueError('store_weights: a predictor in float32 casts no weights')
        report = store_cast_weights(self.model, lambda: self(batch), self.dtype, _parts(self.model))
        self._stored = True
        return report

    def channels_last(self) -> None:
        """Convolutions' kernels in channels-last order: what GPUs' half-precision units work in."""
        apply_channels_last(self.model, True)

    def record_graphs(self, batch: Mapping[str, Any]) -> GraphedParts:
        """See :class:`~.graphs.GraphedParts`: for batches of this one's size, on a GPU. The last step: other weights or layouts later
        would not be seen. Results of a frame are copies and stay what they are."""
        if self.device.type != 'cuda':
            raise ValueError(f'record_graphs: CUDA graphs need a GPU, the device is {self.device}')
        graphs = GraphedParts(capturable(_parts(self.model) or {}))
        self(batch)
        return graphs

    def geometry_hits(self) -> Dict[str, int]:
        """``hits`` and ``misses`` of the kept geometry since it is kept."""
        caches = [module.rigs for module in self._transforms if module.rigs is not None]
        return {'hits': sum(c.hits for c in caches), 'misses': sum(c.misses for c in caches)}

    def _rig(self, batch: Mapping[str, Any]) -> Any:
        """The rig's key from matrices that are on the host anyway; None leaves it to the model."""
        if not any(module.rigs is not None for module in self._transforms) or batch.get('rig') is not None:
            return batch.get('rig')
        given = {name: batch.get(name) for name in RIG_MATRICES}
        for value in given.values():
            tensors = value.data if isinstance(value, DataContainer) else value
            tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            if not all(isinstance(t, torch.Tensor) and t.device.type == 'cpu' for t in tensors):
                return None
        return rig_key(unpack_batch(given, torch.device('cpu')))


def fold_model(model: nn.Module, batch: Mapping[str, Any], device: torch.device) -> FoldReport:
    """:func:`~.fold.fold_batch_norms` of a whole detector, checked part by part on one batch."""
    values = dict(_inputs(batch, device), **_extra(model))
    return fold_batch_norms(model, lambda: model(**values), _parts(model))


def _inputs(batch: Mapping[str, Any], device: torch.device) -> Dict[str, Any]:
    """The batch without labels, on the device."""
    return unpack_batch({key: value for key, value in batch.items() if not key.startswith('gt_') and key != 'depths'}, device)


def _extra(model: nn.Module) -> Dict[str, Any]:
    return {'return_loss': False} if takes(model, 'return_loss') else {}


def _parts(model: nn.Module) -> Optional[Dict[str, nn.Module]]:
    """What outputs are compared of: the parts of a detector of ours, else (None) the model as a whole."""
    return dict(parts_of(model)) if hasattr(model, 'encoders') else None
