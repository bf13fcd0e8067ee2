"""Fusers of BEV maps of the same grid. Letters: B batch, C channels, X/Y cells."""
from __future__ import annotations

from typing import List, Sequence

import torch
from torch import nn

from ...registry import MODELS


def check_maps(maps: Sequence[torch.Tensor], in_channels: Sequence[int], name: str) -> None:
    """Raise ValueError unless there is one map per entry of ``in_channels``, with those channels and one size."""
    if len(maps) != len(in_channels):
        raise ValueError(f'{name}: in_channels {list(in_channels)} expects {len(in_channels)} BEV maps, got {len(maps)}')
    for index, (x, channels) in enumerate(zip(maps, in_channels, strict=True)):
        if x.shape[1] != channels:
            raise ValueError(f'{name}: BEV map {index} has {x.shape[1]} channels, in_channels says {channels}')
    sizes = [tuple(x.shape[-2:]) for x in maps]
    if len(set(sizes)) > 1:
        raise ValueError(f'{name}: the BEV maps differ in size: {sizes}; the encoders must end on the same grid')


@MODELS.register_module()
class ConvFuser(nn.Sequential):
    """Concatenation, then convolution, norm and ReLU (parameters ``0.weight`` and ``1.*``).

    Args:
        in_channels: channels of each map, in the order camera, LiDAR, radar.
        out_channels: channels of the result.
    """

    def __init__(self, in_channels: Sequence[int], out_channels: int):
        super().__init__(nn.Conv2d(sum(in_channels), out_channels, 3, padding=1, bias=False),
                         nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True))
        self.in_channels, self.out_channels = tuple(in_channels), out_channels

    def forward(self, maps: List[torch.Tensor]) -> torch.Tensor:
        """Maps (B, C_i, X, Y) -> (B, out_channels, X, Y)."""
        check_maps(maps, self.in_channels, 'fuser')
        return super().forward(torch.cat(maps, 1))


@MODELS.register_module()
class AddFuser(nn.Module):
    """Mean of the maps after a convolution each; in training one sensor can be left out at random.

    Args:
        in_channels: channels of each map, in the order camera, LiDAR, radar.
        out_channels: channels of the result.
        dropout: probability of leaving one map out (training). Drawn from torch's generator. The map is weighted by
            zero rather than skipped, so that all parameters stay in the graph on every rank.
    """

    def __init__(self, in_channels: Sequence[int], out_channels: int, dropout: float = 0.0):
        super().__init__()
        self.in_channels, self.out_channels, self.dropout = tuple(in_channels), out_channels, float(dropout)
        self.transforms = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels),
                          nn.ReLU(inplace=True)) for channels in in_channels)

    def forward(self, maps: List[torch.Tensor]) -> torch.Tensor:
        """Maps (B, C_i, X, Y) -> (B, out_channels, X, Y)."""
        check_maps(maps, self.in_channels, 'fuser')
        weights = [1.0] * len(maps)
        if self.training and len(maps) > 1 and torch.rand(()).item() < self.dropout:
            weights[int(torch.randint(len(maps), ()).item())] = 0.0
        return sum(w * t(x) for w, t, x in zip(weights, self.transforms, maps, strict=True)) / sum(weights)
