"""Residual backbone of the BEV decoder for camera models."""
from __future__ import annotations

from typing import List, Sequence

import torch
from mmcv.cnn.resnet import BasicBlock, make_res_layer
from torch import nn

from ...registry import MODELS


@MODELS.register_module()
class GeneralizedResNet(nn.ModuleList):
    """A chain of residual stages on a BEV map; every stage's output is returned.

    Parameters are named ``<stage>.<block>.conv1`` and so on, directly below this module.

    Args:
        in_channels: channels of the BEV map.
        blocks: one ``[number of blocks, channels, stride]`` per stage.
    """

    def __init__(self, in_channels: int, blocks: Sequence[Sequence[int]]):
        stages = []
        for index, spec in enumerate(blocks):
            if len(spec) != 3:
                raise ValueError(f'GeneralizedResNet: blocks[{index}] must be [count, channels, stride], got {spec!r}')
            count, channels, stride = spec
            stages.append(make_res_layer(BasicBlock, in_channels, channels, count, stride=stride))
            in_channels = channels
        super().__init__(stages)

    def forward(self, x: torch.Tensor) -> List[torch.Tensor]:
        """(B, C, X, Y) -> one (B, C_i, X_i, Y_i) per stage."""
        outputs = []
        for stage in self:
            x = stage(x)
            outputs.append(x)
        return outputs
