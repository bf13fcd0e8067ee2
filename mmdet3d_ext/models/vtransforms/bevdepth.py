"""Lift-splat with BEVDepth's camera-aware depth network and a supervised depth distribution.

Letters: B batch, N cameras, D depth bins, C context channels, H/W image feature, X/Y BEV cells.
"""
from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from torch import nn
from torch.nn import functional as F

from ...geometry.grid import AxisSpec
from ...over_ranks import count_over_ranks
from ...registry import MODELS
from .base import BaseDepthTransform, BaseTransform
from .depth_net import DepthNet, DepthRefinement, depth_targets
from .lss import check_stride, conv_norm_act


class _DepthSupervised:
    """Mixin: refinement of the lifted volume, the depth loss, and a forward that returns it in training."""

    def init_depth(self, in_channels: int, bevdepth_downsample: int, bevdepth_refine: bool, depth_loss_factor: float):
        self.bevdepth_downsample, self.depth_loss_factor = bevdepth_downsample, depth_loss_factor
        self.refinement = DepthRefinement(self.C) if bevdepth_refine else None
        self.depthnet = DepthNet(in_channels, self.in_channels, self.C, self.D)

    @property
    def has_depth_loss(self) -> bool:
        """Whether training needs ``depths`` in the batch."""
        return self.depth_loss_factor > 0

    def depth_loss(self, depth: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        """Binary cross entropy of the depth distribution, mean over the features with a known depth (of all ranks; with ``compat:
        reference`` of this one).

        Args:
            depth: (B, N, D, H, W) distribution.
            depths: (B, N, image height, image width) metres, 0 where unknown; with a sweep axis after B the first
                sweep (key frame) counts.
        """
        name = type(self).__name__
        if depths is None:
            raise ValueError(f"{name}: the depth loss needs 'depths' in the batch (pipeline step GTDepth); or set "
                             'depth_loss_factor: 0')
        if depths.dim() == 5:
            depths = depths[:, 0]
        axis = self.depth_axis
        target, known = depth_targets(depths, self.bevdepth_downsample, axis.lo, axis.step, axis.cells)
        with torch.autocast(depth.device.type, enabled=False):
            prediction = depth.float().flatten(0, 1).permute(0, 2, 3, 1)  # (B * N, H, W, D)
            if prediction.shape[:3] != target.shape:
                raise ValueError(f'{name}: depths {tuple(depths.shape)} with bevdepth_downsample {self.bevdepth_downsample} '
                                 f'give {tuple(target.shape[1:])} targets for features {self.feature_size}')
            one_hot = F.one_hot(target, axis.cells).to(prediction.dtype)
            # Rounding may leave a softmax value a hair above 1, which binary cross entropy refuses.
            entropy = F.binary_cross_entropy(prediction.clamp(0, 1), one_hot, reduction='none').sum(-1)
            # Weighted instead of indexed: attached to the graph even if no depth is known.
            total, ranks = (known.sum(), 1) if self.compat == 'reference' else count_over_ranks(known.sum())
            return self.depth_loss_factor * (entropy * known).sum() / (total.clamp(min=1) / ranks)

    def forward(self, features: torch.Tensor, points=None, radar=None, **inputs):
        inputs.update(points=points, radar=radar)
        self.check_inputs(features, inputs)
        placed = self.placed(inputs, volume=self.refinement is not None)
        depth, context = self.depth_and_context(features, inputs)
        if self.refinement is None:
            bev = self.on_grids(lambda grid: self.pool(depth, context, placed(grid), grid))
        else:
            volume = self.refinement(torch.einsum('bndhw,bnchw->bndhwc', depth.float(), context.float()))
            bev = self.on_grids(lambda grid: self.pool_volume(volume, placed(grid), grid))
        if self.training and self.has_depth_loss:
            return bev, self.depth_loss(depth, inputs.get('depths'))
        return bev

    def check_inputs(self, features: torch.Tensor, inputs: dict) -> None:
        super().check_inputs(features, inputs)
        if inputs.get('camera2ego') is None:
            raise ValueError(f"{type(self).__name__}: the batch has no 'camera2ego'; collect it in the pipeline "
                             '(Collect3D meta_keys)')


@MODELS.register_module()
class AwareBEVDepth(_DepthSupervised, BaseTransform):
    """BEVDepth's view transform.

    Args (besides those of :class:`BaseTransform`):
        bevdepth_downsample: pixels per feature, for the depth targets.
        bevdepth_refine: convolve the lifted volume before pooling (needs the whole volume in memory).
        depth_loss_factor: weight of the depth loss; 0 turns it off.
        use_points: accepted for old configurations; the depth targets come from the batch's ``depths``.
    """

    def __init__(self, in_channels: int, out_channels: int, image_size: Sequence[int], feature_size: Sequence[int],
                 xbound: AxisSpec, ybound: AxisSpec, zbound: AxisSpec, dbound: AxisSpec, downsample: int = 1,
                 use_points: str = 'lidar', bevdepth_downsample: int = 16, bevdepth_refine: bool = True,
                 depth_loss_factor: float = 3.0, compat: Optional[str] = None):
        super().__init__(in_channels, out_channels, image_size, feature_size, xbound, ybound, zbound, dbound, downsample,
                         compat)
        self.init_depth(self.in_channels, bevdepth_downsample, bevdepth_refine, depth_loss_factor)

    def depth_and_context(self, features: torch.Tensor, inputs: dict) -> Tuple[torch.Tensor, torch.Tensor]:
        return self.split(self.depthnet(features.flatten(0, 1), inputs), len(features))


@MODELS.register_module()
class AwareDBEVDepth(_DepthSupervised, BaseDepthTransform):
    """BEVDepth's view transform that also sees a depth map drawn from LiDAR or radar points.

    Args (besides those of :class:`AwareBEVDepth` and :class:`BaseDepthTransform`):
        depth_feature_channels: features per point if ``add_depth_features`` (45 radar features).
    """

    def __init__(self, in_channels: int, out_channels: int, image_size: Sequence[int], feature_size: Sequence[int],
                 xbound: AxisSpec, ybound: AxisSpec, zbound: AxisSpec, dbound: AxisSpec, downsample: int = 1,
                 use_points: str = 'lidar', depth_input: str = 'scalar', height_expand: bool = False,
                 bevdepth_downsample: int = 16, bevdepth_refine: bool = True, depth_loss_factor: float = 3.0,
                 add_depth_features: bool = False, depth_feature_channels: int = 45, compat: Optional[str] = None):
        super().__init__(in_channels, out_channels, image_size, feature_size, xbound, ybound, zbound, dbound, downsample,
                         use_points, depth_input, height_expand, add_depth_features, compat)
        check_stride('AwareDBEVDepth', self.image_size, self.feature_size, 16)
        channels = 1 if self.depth_input == 'scalar' else self.D
        if self.add_depth_features:
            channels += depth_feature_channels
        width = 8 if self.depth_input == 'scalar' else 32
        self.depth_map_channels = channels
        self.dtransform = nn.Sequential(*conv_norm_act(channels, width, 1), *conv_norm_act(width, 32, 5, 4),
                                        *conv_norm_act(32, 64, 5, 2), *conv_norm_act(64, 64, 5, 2))
        self.init_depth(self.in_channels + 64, bevdepth_downsample, bevdepth_refine, depth_loss_factor)

    def depth_and_context(self, features: torch.Tensor, inputs: dict) -> Tuple[torch.Tensor, torch.Tensor]:
        maps = self.depth_map(inputs)
        if maps.shape[2] != self.depth_map_channels:
            raise ValueError(f'AwareDBEVDepth: the depth map has {maps.shape[2]} channels, {self.depth_map_channels} '
                             'expected; set depth_feature_channels to the features per point')
        depth = self.dtransform(maps.flatten(0, 1))
        x = torch.cat([depth, features.flatten(0, 1).to(depth.dtype)], 1)
        return self.split(self.depthnet(x, inputs), len(features))
