"""Replacements, while a plan is made, for the parts whose sizes depend on the data: voxelisation, sparse convolutions, drawn
depth maps, matched targets. Each makes tensors of the sizes that real data give (:mod:`.sparsity`) and holds no values.

Letters: V voxels, P points, B samples.
"""
from __future__ import annotations

import contextlib
import math
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ... import ops
from ...geometry.grid import BevGrid
from ...models.voxel.voxelizer import HardVoxelizer, _Voxelizer
from ...models.vtransforms.base import BaseDepthTransform, BaseTransform
from .sparsity import occupied, sites_after


class Voxels:
    """How many voxels a sample has: ``given`` for LiDAR, or what the tables say; ``used`` collects them by sensor."""

    def __init__(self, given: Optional[int] = None):
        self.given = given
        self.used: dict = {}

    def count(self, sensor: str, voxelizer: _Voxelizer, points: int) -> int:
        limit = voxelizer.max_voxels[0] if isinstance(voxelizer, HardVoxelizer) else None
        if self.given is not None and sensor == 'lidar':
            found = self.given if limit is None or limit < 0 else min(self.given, limit)
        else:
            found = min(occupied(voxelizer.voxel_size, limit), points)
        self.used[sensor] = found
        return found


@contextlib.contextmanager
def stand_ins(model: nn.Module, voxels: Voxels, to_fake: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within: the model's data-dependent parts are replaced.

    Args:
        to_fake: a real tensor -> a fake one.
    """
    replaced: List[Tuple[nn.Module, str]] = []

    def replace(module: nn.Module, name: str, function: Callable) -> None:
        setattr(module, name, function)
        replaced.append((module, name))

    for sensor, encoder in getattr(model, 'encoders', {}).items():
        if 'voxelize' in encoder:
            replace(encoder['voxelize'], 'batch', _voxelise(sensor, encoder['voxelize'], voxels))
            for module in encoder['backbone'].modules():
                if any(cls.__name__ == 'SparseConvolution' for cls in type(module).__mro__):
                    replace(module, 'forward', _sparse_convolution(module, encoder))
    for module in model.modules():
        if isinstance(module, BaseDepthTransform):
            replace(module, 'depth_map', _depth_map(module))
        if isinstance(module, BaseTransform):
            replace(module, 'pool_volume', _pool_volume(module))
    for head in getattr(model, 'heads', {}).values():
        if hasattr(head, 'get_targets'):
            replace(head, 'get_targets', _targets(head.get_targets, to_fake))
        if hasattr(head, 'start_matching'):
            replace(head, 'start_matching', _matching(head.start_matching))
    try:
        yield
    finally:
        for module, name in replaced:
            delattr(module, name)


def _voxelise(sensor: str, voxelizer: _Voxelizer, voxels: Voxels) -> Callable:
    def batch(clouds: List[torch.Tensor]) -> tuple:
        counts = [voxels.count(sensor, voxelizer, len(points)) for points in clouds]
        coords = clouds[0].new_empty((sum(counts), 4), dtype=torch.int32)
        sizes = clouds[0].new_empty((sum(counts),), dtype=torch.int32)
        if not isinstance(voxelizer, HardVoxelizer):
            points = torch.cat(clouds)
            return points.new_empty((sum(counts), points.shape[1])), coords, sizes
        features = []
        for points, count in zip(clouds, counts, strict=True):
            slots = points.new_empty((count, voxelizer.max_num_points, points.shape[1]))
            if voxelizer.reduce:
                slots = slots.sum(1) / points.new_empty((count, 1)).clamp(min=1)
            features.append(slots)
        return torch.cat(features), coords, sizes
    return batch


class _SparseConvolution(torch.autograd.Function):
    """Keeps what spconv's implicit GEMM keeps: features, kernel, and the index pairs with their masks."""

    @staticmethod
    def forward(ctx, features, weight, sites: int, channels: int, *indices):
        ctx.save_for_backward(features, weight, *indices)
        return features.new_empty((sites, channels))

    @staticmethod
    def backward(ctx, grad):
        features, weight = ctx.saved_tensors[:2]
        return (torch.empty_like(features), torch.empty_like(weight), *[None] * (len(ctx.saved_tensors)))


def _sparse_convolution(module: nn.Module, encoder: nn.ModuleDict) -> Callable:
    kernel, stride = list(module.kernel_size), list(module.stride)
    taps = 1
    for size in kernel:
        taps *= size
    edge = encoder['voxelize'].voxel_size[0]

    def forward(x: Any, add_input: Any = None) -> Any:
        sites = len(x.indices)
        kept = x.indice_dict.get(module.indice_key)
        out = x.shadow_copy()
        if kept is not None:
            indices, coords = kept
        elif module.subm:
            coords = x.indices
            new = coords.new_empty
            indices = [new((2, taps, sites)), new((sites,)), new((sites,))]
        else:
            level = round(math.log2(encoder['backbone'].sparse_shape[0] / x.spatial_shape[0]))
            after = sites_after(sites, stride, edge, level)
            new = x.indices.new_empty
            coords = new((after, x.indices.shape[1]))
            indices = [new((taps, sites)), new((taps, after)), new((2, sites)), new((2, after))]
        if module.indice_key is not None:
            out.indice_dict[module.indice_key] = (indices, coords)
        out = out.replace_feature(_SparseConvolution.apply(x.features, module.weight, len(coords), module.out_channels, *indices))
        out.indices = coords
        if not module.subm:
            out.spatial_shape = [(n + 2 * p - k) // s + 1 for n, k, s, p in
                                 zip(x.spatial_shape, kernel, stride, module.padding, strict=True)]
        return out
    return forward


def _depth_map(module: BaseDepthTransform) -> Callable:
    def depth_map(inputs: dict) -> torch.Tensor:
        like = inputs['lidar2image']
        channels = getattr(module, 'depth_map_channels', 1)
        return like.new_zeros((*like.shape[:2], channels, *module.image_size))
    return depth_map


def _pool_volume(module: BaseTransform) -> Callable:
    def pool_volume(volume: torch.Tensor, geometry: torch.Tensor, grid: Optional[BevGrid] = None) -> torch.Tensor:
        """Every point counts as inside."""
        feats = volume.flatten(0, 4).clone().float()
        coords = feats.new_empty((len(feats), 4), dtype=torch.int64)
        nx, ny = (grid or module.grid).shape
        out = ops.bev_pool(feats, coords, volume.shape[0], module.z_axis.cells, nx, ny)
        return out.transpose(1, 2).flatten(1, 2)
    return pool_volume


def _matching(start: Callable) -> Callable:
    """Fake predictions are matched with nothing; the zeros of :func:`_targets` are matched for real."""
    def stand_in(boxes: Any, labels: Any, preds: Any) -> Any:
        return None if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(preds)) else start(boxes, labels, preds)
    return stand_in


def _targets(get_targets: Callable, to_fake: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """Targets for predictions of zeros, worked out for real and handed back as fakes."""
    def stand_in(boxes: Any, labels: Any, third: Any, started: None = None) -> Any:
        with _disable_current_modes():  # fake and real tensors do not mix
            zeros = tree_map(lambda t: torch.zeros(t.shape, dtype=t.dtype) if isinstance(t, torch.Tensor) else t, third)
            found = get_targets(boxes, labels, zeros)
        return tree_map(lambda t: to_fake(t) if isinstance(t, torch.Tensor) else t, found)
    return stand_in
