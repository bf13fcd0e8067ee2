"""The camera-aware depth network of BEVDepth (Li et al. 2022), with its published parameter names.

Letters: B batch, N cameras, D depth bins, C context channels, H/W image feature, M inner channels.
"""
from __future__ import annotations

from typing import Tuple

import torch
from mmcv.cnn.resnet import BasicBlock
from torch import nn
from torch.nn import functional as F

CAMERA_VALUES = 27  # what DepthNet.camera_vector returns per camera


def conv_norm_act(in_channels: int, out_channels: int, bias: bool = False) -> list:
    """3x3 convolution, BatchNorm, ReLU."""
    return [nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=bias), nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True)]


class AtrousBranch(nn.Module):
    """Dilated convolution, norm, ReLU (parameters ``atrous_conv``, ``bn``)."""

    def __init__(self, channels: int, kernel: int, dilation: int):
        super().__init__()
        padding = dilation if kernel > 1 else 0
        self.atrous_conv = nn.Conv2d(channels, channels, kernel, padding=padding, dilation=dilation, bias=False)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn(self.atrous_conv(x)))


class DepthASPP(nn.Module):
    """Atrous spatial pyramid with dilations 1, 6, 12, 18 and a global branch."""

    def __init__(self, channels: int):
        super().__init__()
        self.aspp1 = AtrousBranch(channels, 1, 1)
        self.aspp2 = AtrousBranch(channels, 3, 6)
        self.aspp3 = AtrousBranch(channels, 3, 12)
        self.aspp4 = AtrousBranch(channels, 3, 18)
        self.global_avg_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1, bias=False),
                                             nn.BatchNorm2d(channels), nn.ReLU())
        self.conv1 = nn.Conv2d(5 * channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(0.5)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        overall = self.global_avg_pool(x).expand(-1, -1, *x.shape[2:])
        x = torch.cat([self.aspp1(x), self.aspp2(x), self.aspp3(x), self.aspp4(x), overall], 1)
        return self.dropout(F.relu(self.bn1(self.conv1(x))))


class CameraMlp(nn.Module):
    """Two linear layers on the camera vector (parameters ``fc1``, ``fc2``)."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.fc1 = nn.Linear(in_features, out_features)
        self.fc2 = nn.Linear(out_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class CameraGate(nn.Module):
    """Channel gate computed from an embedding of the camera (parameters ``conv_reduce``, ``conv_expand``)."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv_reduce = nn.Conv2d(channels, channels, 1)
        self.conv_expand = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        gate = self.conv_expand(F.relu(self.conv_reduce(embedding[..., None, None])))
        return x * gate.sigmoid()


class DepthNet(nn.Module):
    """Image features and camera parameters -> depth logits (D) and context (C), concatenated in that order.

    Args:
        in_channels: channels of the input.
        mid_channels: M.
        context_channels, depth_channels: C and D.
    """

    def __init__(self, in_channels: int, mid_channels: int, context_channels: int, depth_channels: int):
        super().__init__()
        self.reduce_conv = nn.Sequential(*conv_norm_act(in_channels, mid_channels, bias=True))
        self.context_conv = nn.Conv2d(mid_channels, context_channels, 1)
        self.bn = nn.BatchNorm1d(CAMERA_VALUES)
        self.depth_mlp = CameraMlp(CAMERA_VALUES, mid_channels)
        self.depth_se = CameraGate(mid_channels)
        self.context_mlp = CameraMlp(CAMERA_VALUES, mid_channels)
        self.context_se = CameraGate(mid_channels)
        self.depth_conv_1 = nn.Sequential(*(BasicBlock(mid_channels, mid_channels) for _ in range(3)))
        self.depth_conv_2 = nn.Sequential(DepthASPP(mid_channels), nn.Conv2d(mid_channels, mid_channels, 3, padding=1),
                                          nn.BatchNorm2d(mid_channels))
        self.depth_conv_3 = nn.Sequential(nn.Conv2d(mid_channels, depth_channels, 1), nn.BatchNorm2d(depth_channels))

    @staticmethod
    def camera_vector(inputs: dict) -> torch.Tensor:
        """(B * N, 27) float32: focal lengths and centre, the 2-D part of the image augmentation, the linear part of the
        BEV augmentation, and camera-to-ego (3 x 4)."""
        k, image, ego = (inputs[key].float() for key in ('camera_intrinsics', 'img_aug_matrix', 'camera2ego'))
        bev = inputs['lidar_aug_matrix'].float()[:, None].expand(-1, k.shape[1], -1, -1)
        values = [k[..., 0, 0], k[..., 1, 1], k[..., 0, 2], k[..., 1, 2],
                  image[..., 0, 0], image[..., 0, 1], image[..., 0, 3], image[..., 1, 0], image[..., 1, 1], image[..., 1, 3],
                  bev[..., 0, 0], bev[..., 0, 1], bev[..., 1, 0], bev[..., 1, 1], bev[..., 2, 2]]
        return torch.cat([torch.stack(values, -1), ego[..., :3, :].flatten(-2)], -1).flatten(0, 1)

    def forward(self, x: torch.Tensor, inputs: dict) -> torch.Tensor:
        """x (B * N, in_channels, H, W) -> (B * N, D + C, H, W)."""
        camera = self.bn(self.camera_vector(inputs))
        x = self.reduce_conv(x)
        context = self.context_conv(self.context_se(x, self.context_mlp(camera)))
        depth = self.depth_se(x, self.depth_mlp(camera))
        depth = self.depth_conv_3(self.depth_conv_2(self.depth_conv_1(depth)))
        return torch.cat([depth, context], 1)


class DepthRefinement(nn.Module):
    """Convolutions on the (W, D) slices of the lifted volume, row by row (parameters ``reduce_conv, conv, out_conv``)."""

    def __init__(self, channels: int):
        super().__init__()
        self.reduce_conv = nn.Sequential(*conv_norm_act(channels, channels))
        self.conv = nn.Sequential(*conv_norm_act(channels, channels), *conv_norm_act(channels, channels))
        self.out_conv = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, volume: torch.Tensor) -> torch.Tensor:
        """(B, N, D, H, W, C) -> the same shape."""
        size = volume.shape[:2]
        x = volume.flatten(0, 1).permute(0, 2, 4, 3, 1).flatten(0, 1)  # (B * N * H, C, W, D)
        with torch.autocast(x.device.type, enabled=False):
            x = self.reduce_conv(x.float())
            x = self.out_conv(self.conv(x) + x)
        x = x.unflatten(0, (-1, volume.shape[3])).permute(0, 4, 1, 3, 2)  # (B * N, D, H, W, C)
        return x.unflatten(0, size)


def depth_targets(depths: torch.Tensor, factor: int, lower: float, step: float,
                  bins: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Depth classes of the image features from sparse depth images.

    Args:
        depths: (B, N, H * factor, W * factor) metres, 0 or NaN where unknown.
        factor: pixels per feature; the nearest known depth of its block counts.
        lower, step, bins: depth bins in metres; bin j covers [lower + j * step, lower + (j + 1) * step).

    Returns:
        (B * N, H, W) long class, 0 where unknown or out of range, and the (B * N, H, W) mask of known ones.
    """
    images = depths.flatten(0, 1).float()
    images = torch.where(images > 0, images, torch.full_like(images, torch.inf))
    nearest = -F.max_pool2d(-images[:, None], factor)[:, 0]
    cell = torch.floor((nearest - lower) / step)
    known = (cell >= 0) & (cell < bins)
    return torch.where(known, cell, torch.zeros_like(cell)).long(), known
