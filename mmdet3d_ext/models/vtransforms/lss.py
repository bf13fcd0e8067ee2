"""Lift-splat (LSS) with depth from the image alone, and with a depth map drawn from points.

Letters: B batch, N cameras, D depth bins, C context channels, H/W image feature.
"""
from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from torch import nn

from ...geometry.grid import AxisSpec
from ...registry import MODELS
from .base import BaseDepthTransform, BaseTransform


def conv_norm_act(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> list:
    """Convolution with bias, BatchNorm, ReLU: one step of the published depth networks."""
    return [nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2), nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True)]


def check_stride(name: str, image_size: Sequence[int], feature_size: Sequence[int], stride: int) -> None:
    """The depth map's network shrinks it by ``stride``; it must then fit the image features."""
    got = tuple(-(-n // stride) for n in image_size)
    if got != tuple(feature_size):
        raise ValueError(f'{name}: its depth branch has stride {stride}: image_size {tuple(image_size)} gives {got}, but '
                         f'feature_size is {tuple(feature_size)}')


@MODELS.register_module()
class LSSTransform(BaseTransform):
    """Depth and context from one 1x1 convolution (``depthnet``). Arguments: see :class:`BaseTransform`."""

    def __init__(self, in_channels: int, out_channels: int, image_size: Sequence[int], feature_size: Sequence[int],
                 xbound: AxisSpec, ybound: AxisSpec, zbound: AxisSpec, dbound: AxisSpec, downsample: int = 1,
                 compat: Optional[str] = None):
        super().__init__(in_channels, out_channels, image_size, feature_size, xbound, ybound, zbound, dbound, downsample,
                         compat)
        self.depthnet = nn.Conv2d(self.in_channels, self.D + self.C, 1)

    def depth_and_context(self, features: torch.Tensor, inputs: dict) -> Tuple[torch.Tensor, torch.Tensor]:
        return self.split(self.depthnet(features.flatten(0, 1)), len(features))


@MODELS.register_module()
class DepthLSSTransform(BaseDepthTransform):
    """Depth and context from image features and a one-channel LiDAR depth map, which comes first in the concatenation.

    Parameters: ``dtransform`` (depth map, stride 8) and ``depthnet``. Arguments: see :class:`BaseDepthTransform`;
    ``depth_input`` and ``add_depth_features`` are for :class:`~.bevdepth.AwareDBEVDepth`.
    """

    def __init__(self, in_channels: int, out_channels: int, image_size: Sequence[int], feature_size: Sequence[int],
                 xbound: AxisSpec, ybound: AxisSpec, zbound: AxisSpec, dbound: AxisSpec, downsample: int = 1,
                 use_points: str = 'lidar', height_expand: bool = False, compat: Optional[str] = None):
        super().__init__(in_channels, out_channels, image_size, feature_size, xbound, ybound, zbound, dbound, downsample,
                         use_points, height_expand=height_expand, compat=compat)
        check_stride('DepthLSSTransform', self.image_size, self.feature_size, 8)
        self.dtransform = nn.Sequential(*conv_norm_act(1, 8, 1), *conv_norm_act(8, 32, 5, 4), *conv_norm_act(32, 64, 5, 2))
        width = self.in_channels
        self.depthnet = nn.Sequential(*conv_norm_act(width + 64, width, 3), *conv_norm_act(width, width, 3),
                                      nn.Conv2d(width, self.D + self.C, 1))

    def depth_and_context(self, features: torch.Tensor, inputs: dict) -> Tuple[torch.Tensor, torch.Tensor]:
        depth = self.dtransform(self.depth_map(inputs).flatten(0, 1))
        x = torch.cat([depth, features.flatten(0, 1).to(depth.dtype)], 1)
        return self.split(self.depthnet(x), len(features))
