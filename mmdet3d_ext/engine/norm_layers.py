"""BatchNorm under small batches: which layers there are, and their replacement by GroupNorm.

BatchNorm's statistics are those of one GPU's batch. Wu & He, "Group Normalization" (ECCV 2018, table 2: ResNet-50, ImageNet)
measure its error against the images per GPU: 23.6% with 32, 24.8% with 8, 27.3% with 4, 34.7% with 2; GroupNorm stays within
0.2 points of 24.1%. GroupNorm also shares nothing between ranks.
"""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ..models.heads.segm.layers import MAX_GROUPS, group_count
from .building import where
from .launch import UserError, current

SMALL_BATCH = 4  # samples per statistic below which the check speaks; the reference's recipes use 4 per GPU
KEY = 'group_norm'


@dataclass(frozen=True)
class NormSection:
    """BatchNorm layers below one section of the configuration.

    Attributes:
        key: the dotted key of the innermost section with a ``type`` that holds them, for example ``model.decoder.backbone``.
        layers: their names in the model.
        kinds: their classes' names.
        norm_cfg: whether that section has a ``norm_cfg``.
    """

    key: str
    layers: Tuple[str, ...]
    kinds: Tuple[str, ...]
    norm_cfg: bool


def batch_norms(model: nn.Module) -> Iterator[Tuple[str, nn.Module]]:
    """(name, module) of the BatchNorm layers whose statistics follow the batch.

    Left out: frozen statistics (``norm_eval``), and layers of sparse convolutions, whose statistics are over thousands of
    voxels whatever the batch.
    """
    sparse = tuple(name for name, module in model.named_modules() if is_sparse(module))
    for name, module in model.named_modules():
        frozen = not module.training and model.training
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not frozen and not below(name, sparse):
            yield name, module


def is_sparse(module: nn.Module) -> bool:
    """Whether the module works on sparse voxel features: its layers are spconv's, or mmcv's copy of it."""
    return any(cls.__module__.split('.')[0] == 'spconv' or 'spconv' in cls.__module__ or cls.__name__ == 'SparseModule'
               for cls in type(module).__mro__)


def below(name: str, prefixes: Sequence[str]) -> bool:
    """Whether the module ``name`` is one of ``prefixes`` or lies in one."""
    return any(prefix == '' or name == prefix or name.startswith(prefix + '.') for prefix in prefixes)


def sections(cfg: Mapping[str, Any], model: nn.Module) -> List[NormSection]:
    """The layers of :func:`batch_norms`, by the section of ``cfg['model']`` that makes them."""
    found: Dict[str, List[Tuple[str, str]]] = {}
    holds: Dict[str, bool] = {}
    for name, module in batch_norms(model):
        node, path, best, has = cfg.get('model'), ['model'], 'model', False
        for part in name.split('.'):
            node = node.get(part) if isinstance(node, Mapping) else None
            if not isinstance(node, Mapping):
                break
            path.append(part)
            if 'type' in node:
                best, has = '.'.join(path), 'norm_cfg' in node
        found.setdefault(best, []).append((name, type(module).__name__))
        holds[best] = has
    return [NormSection(key, tuple(n for n, _ in layers), tuple(sorted({k for _, k in layers})), holds[key])
            for key, layers in found.items()]


def check_norm_layers(cfg: Mapping[str, Any], model: nn.Module, samples: int, logger: logging.Logger) -> List[NormSection]:
    """Warn about BatchNorm layers whose statistics come from fewer than ``SMALL_BATCH`` samples.

    Args:
        samples: per statistic: samples per GPU, times the ranks for SyncBatchNorm.

    Returns:
        the sections with such layers; empty if the batch is large enough.
    """
    found = sections(cfg, model) if samples < SMALL_BATCH else []
    if not found:
        return []
    lines = [f'{sum(len(s.layers) for s in found)} BatchNorm layers take their statistics from {samples} sample(s) per GPU '
             f'(data.samples_per_gpu); below {SMALL_BATCH} they get noisy, and differ from those of the evaluation:']
    for section in found:
        own = f', or {section.key}.norm_cfg: {{type: GN, num_groups: {MAX_GROUPS}}}' if section.norm_cfg else ''
        switch = section.key[len('model.'):] or 'true'
        lines.append(f'  {section.key}: {len(section.layers)} {"/".join(section.kinds)} (first: {section.layers[0]}); '
                     f'--{KEY} "[{switch}]"{own}')
    lines.append(f'--{KEY} true replaces every BatchNorm2d by GroupNorm; --sync_bn true shares the statistics over the GPUs; a '
                 'trained BatchNorm model that is only fine-tuned keeps its statistics with norm_eval: true')
    logger.warning('\n'.join(lines))
    return found


def use_group_norm(cfg: Mapping[str, Any], model: nn.Module) -> int:
    """Replace BatchNorm2d by GroupNorm as the root key ``group_norm`` says; returns the number of layers.

    ``group_norm``: null (none), true (all), or a list of module names such as ``[decoder, heads.map]`` (all below them).
    Names, weights and biases of the layers stay, running statistics go. Layers of another kind stay: BatchNorm1d of sparse
    convolutions sees thousands of voxels, and GroupNorm over a vector without a map would mix unlike quantities.

    Raises:
        UserError: for another value, or a name with no BatchNorm2d below it.
    """
    wanted = cfg.get(KEY)
    if wanted is None or wanted is False:
        return 0
    names = [''] if wanted is True else wanted
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise UserError(f'{where(cfg, KEY)} must be true, null or a list of module names such as [decoder, heads.map], got '
                        f'{wanted!r}')
    layers = [(name, module) for name, module in model.named_modules()
              if isinstance(module, (nn.BatchNorm2d, nn.SyncBatchNorm))]
    for name in names:
        if not any(below(layer, [name]) for layer, _ in layers):
            sections_with = sorted({layer.split('.')[0] for layer, _ in layers})
            raise UserError(f'{where(cfg, KEY)}: no BatchNorm2d in the module {name!r}; they are in {sections_with}')
    chosen = [(name, module) for name, module in layers if below(name, names)]
    for name, module in chosen:
        parent, _, last = name.rpartition('.')
        setattr(model.get_submodule(parent), last, _group_norm(module))
    return len(chosen)


def use_sync_bn(cfg: Mapping[str, Any], model: nn.Module, device: torch.device) -> Tuple[nn.Module, int]:
    """With the root key ``sync_bn`` and several ranks on GPUs every BatchNorm becomes SyncBatchNorm.

    Returns:
        the model, and how many ranks share a statistic.
    """
    ranks = current().world_size
    if ranks == 1 or not cfg.get('sync_bn') or device.type != 'cuda':
        return model, 1
    return nn.SyncBatchNorm.convert_sync_batchnorm(model), ranks


def _group_norm(norm: nn.Module) -> nn.GroupNorm:
    # Groups that also suit a 1x1 map: its size is not known here.
    new = nn.GroupNorm(group_count(norm.num_features, pooled=True), norm.num_features, norm.eps, norm.affine)
    if norm.affine:
        for name in ('weight', 'bias'):
            old: Optional[nn.Parameter] = getattr(norm, name)
            setattr(new, name, nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad))
    return new.train(norm.training)
