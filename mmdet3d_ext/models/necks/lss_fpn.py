"""Top-down necks of lift-splat models. Letters: B batch (or batch times cameras), C channels, H/W size of a map."""
from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from mmcv.cnn import ConvModule
from torch import nn
from torch.nn import functional as F

from ...registry import MODELS


@MODELS.register_module()
class GeneralizedLSSFPN(nn.Module):
    """Feature pyramid by concatenation: upsample the coarser level, concatenate, 1x1 then 3x3 convolution.

    There is one output less than inputs: the coarsest level only feeds the others.

    Args:
        in_channels: channels of the levels, finest first.
        out_channels: channels of every output.
        num_outs: number of outputs that callers count on; kept for configurations.
        start_level, end_level: the levels used, from ``start_level`` up to and including ``end_level`` (-1: the last).
        no_norm_on_lateral: leave the norm of the 1x1 convolutions out.
        conv_cfg, norm_cfg, act_cfg: mmcv layer configurations.
        upsample_cfg: arguments of ``F.interpolate``.
    """

    def __init__(self, in_channels: Sequence[int], out_channels: int, num_outs: int, start_level: int = 0,
                 end_level: int = -1, no_norm_on_lateral: bool = False, conv_cfg: Optional[dict] = None,
                 norm_cfg: Optional[dict] = None, act_cfg: Optional[dict] = None, upsample_cfg: Optional[dict] = None):
        super().__init__()
        norm_cfg = {'type': 'BN2d'} if norm_cfg is None else dict(norm_cfg)
        act_cfg = {'type': 'ReLU'} if act_cfg is None else dict(act_cfg)
        last = len(in_channels) - 1 if end_level == -1 else end_level
        if not 0 <= start_level < last < len(in_channels):
            raise ValueError(f'GeneralizedLSSFPN: needs at least two levels of {len(in_channels)}, got start_level '
                             f'{start_level} and end_level {end_level}')
        self.in_channels, self.out_channels, self.num_outs = list(in_channels), out_channels, num_outs
        self.levels = range(start_level, last)
        self.upsample_cfg = dict(upsample_cfg or {'mode': 'bilinear', 'align_corners': True})
        self.lateral_convs, self.fpn_convs = nn.ModuleList(), nn.ModuleList()
        common = {'conv_cfg': conv_cfg, 'act_cfg': act_cfg, 'inplace': False}
        for level in self.levels:
            coarser = in_channels[level + 1] if level == last - 1 else out_channels
            self.lateral_convs.append(ConvModule(in_channels[level] + coarser, out_channels, 1,
                                                 norm_cfg=None if no_norm_on_lateral else norm_cfg, **common))
            self.fpn_convs.append(ConvModule(out_channels, out_channels, 3, padding=1, norm_cfg=norm_cfg, **common))

    def forward(self, inputs: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, ...]:
        """Levels (B, C_i, H_i, W_i), finest first -> outputs, finest first."""
        if len(inputs) != len(self.in_channels):
            raise ValueError(f'GeneralizedLSSFPN: in_channels {self.in_channels} expects {len(self.in_channels)} levels, '
                             f'got {len(inputs)}')
        coarser, outputs = inputs[self.levels[-1] + 1], []
        for index in reversed(range(len(self.levels))):
            finer = inputs[self.levels[index]]
            up = upsample(coarser, finer.shape[2:], **self.upsample_cfg)
            coarser = self.fpn_convs[index](self.lateral_convs[index](torch.cat([finer, up], 1)))
            outputs.append(coarser)
        return tuple(reversed(outputs))


def upsample(x: torch.Tensor, size: Sequence[int], **kwargs) -> torch.Tensor:
    """``F.interpolate``; on a GPU with channels innermost: torch's other bilinear kernel has one thread per position loop over all
    channels of all samples, which leaves most of the device idle on the small maps of a neck."""
    if x.is_cuda:
        x = x.contiguous(memory_format=torch.channels_last)
    return F.interpolate(x, size=tuple(size), **kwargs)


def _conv_norm_act(in_channels: int, out_channels: int, kernel: int) -> list:
    return [nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True)]


@MODELS.register_module()
class LSSFPN(nn.Module):
    """Two levels of a BEV backbone -> one map: upsample the first to the second, fuse, optionally upsample the result.

    Args:
        in_indices: which backbone outputs; the first is resized to the second.
        in_channels: their channels.
        out_channels: channels of the result.
        scale_factor: final upsampling (1: none).
    """

    def __init__(self, in_indices: Sequence[int], in_channels: Sequence[int], out_channels: int, scale_factor: int = 1):
        super().__init__()
        self.in_indices, self.in_channels = tuple(in_indices), tuple(in_channels)
        self.fuse = nn.Sequential(*_conv_norm_act(sum(in_channels), out_channels, 1),
                                  *_conv_norm_act(out_channels, out_channels, 3))
        self.upsample = None
        if scale_factor > 1:
            self.upsample = nn.Sequential(nn.Upsample(scale_factor=scale_factor, mode='bilinear', align_corners=True),
                                          *_conv_norm_act(out_channels, out_channels, 3))

    def forward(self, levels: Sequence[torch.Tensor]) -> torch.Tensor:
        """Backbone outputs -> (B, out_channels, X, Y) of the second level, times ``scale_factor``."""
        first, second = (levels[index] for index in self.in_indices)
        for x, channels, index in zip((first, second), self.in_channels, self.in_indices, strict=True):
            if x.shape[1] != channels:
                raise ValueError(f'LSSFPN: level {index} has {x.shape[1]} channels, in_channels says {channels}')
        first = upsample(first, second.shape[-2:], mode='bilinear', align_corners=True)
        x = self.fuse(torch.cat([first, second], 1))
        return x if self.upsample is None else self.upsample(x)
