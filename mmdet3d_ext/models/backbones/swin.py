"""Swin Transformer: mmdet's, its parameters and its values, with less kept for the backward pass and fewer kernels."""
from __future__ import annotations

import inspect
from typing import Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from mmdet.models.backbones import swin as mmdet_swin
from mmdet.models.utils import transformer as mmdet_transformer
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...registry import MODELS
from .lean_layers import NormAttention, NormLinear, NormPerceptron, working_type
from .windows import windows

LEAN = (True, False, 'mlp')


def _plain_norm(norm: Optional[nn.Module]) -> bool:
    return isinstance(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None


def _drawn(layer: nn.Module, x: torch.Tensor) -> Optional[torch.Tensor]:
    """What random depth multiplies each image of x (B, L, C) with, (B, 1, 1): 0 or one over the rate of survival. Same draws as
    mmcv's ``drop_path``."""
    if layer.drop_prob == 0 or not layer.training:
        return None
    survive = 1 - layer.drop_prob
    return torch.rand((len(x), 1, 1), dtype=x.dtype, device=x.device).add_(survive).floor_().div_(survive)


class SwinBlock(mmdet_swin.SwinBlock):
    """One block; where it has layers that the lean form does not know (dropout, other norms, other activations) it is mmdet's."""

    lean: Union[bool, str] = True

    def _as_mmdet(self) -> bool:
        attention, layers = self.attn.w_msa, self.ffn.layers
        drops = attention.attn_drop, attention.proj_drop, layers[0][2], layers[2]
        return not (_plain_norm(self.norm1) and _plain_norm(self.norm2) and type(self.ffn.activate) is nn.GELU
                    and not any(layer.p and layer.training for layer in drops))

    def _forward(self, x: torch.Tensor, size: Tuple[int, int]) -> torch.Tensor:
        attention, edge, dtype = self.attn.w_msa, self.attn.window_size, working_type(x)
        if x.shape[1] != size[0] * size[1]:
            raise ValueError(f'SwinBlock: {x.shape[1]} tokens are no map of {size[0]} x {size[1]}')
        grid = windows(len(x), tuple(size), edge, self.attn.shift_size, x.device)
        x = NormAttention.apply(x, self.norm1.weight, self.norm1.bias, attention.qkv.weight, attention.qkv.bias,
                                attention.relative_position_bias_table, attention.proj.weight, attention.proj.bias,
                                _drawn(self.attn.drop, x), grid, attention.num_heads, attention.scale, self.norm1.eps, dtype)
        first, second = self.ffn.layers[0][0], self.ffn.layers[1]
        return NormPerceptron.apply(x, self.norm2.weight, self.norm2.bias, first.weight, first.bias, second.weight, second.bias,
                                    _drawn(self.ffn.dropout_layer, x), self.norm2.eps, dtype, self.ffn.activate.approximate,
                                    self.lean == 'mlp')

    def forward(self, x: torch.Tensor, hw_shape: Tuple[int, int]) -> torch.Tensor:
        """x (B, H * W, C) and (H, W) -> (B, H * W, C)."""
        if self._as_mmdet():
            return super().forward(x, hw_shape)
        if self.with_cp and x.requires_grad:
            return checkpoint(self._forward, x, hw_shape, use_reentrant=False)
        return self._forward(x, hw_shape)


class PatchMerging(mmdet_transformer.PatchMerging):
    """2 x 2 tokens become one: one copy in the place of unfolding image by image, then norm and linear layer in one."""

    def forward(self, x: torch.Tensor, input_size: Sequence[int]) -> Tuple[torch.Tensor, Tuple[int, int]]:
        """x (B, H * W, C) and (H, W) -> (B, H' * W', C_out) and (H', W'), halves rounded up."""
        sampler, two = self.sampler, (2, 2)
        usual = (sampler.kernel_size, sampler.stride, sampler.dilation, sampler.padding) == (two, two, (1, 1), (0, 0))
        if not (usual and self.adap_padding is not None and _plain_norm(self.norm)):
            return super().forward(x, input_size)
        (high, wide), (images, _, channels) = input_size, x.shape
        x = x.reshape(images, high, wide, channels)
        if high % 2 or wide % 2:
            x = F.pad(x, (0, 0, 0, wide % 2, 0, high % 2))
        half = x.shape[1] // 2, x.shape[2] // 2
        # The order of nn.Unfold: channel, row, column.
        x = x.view(images, half[0], 2, half[1], 2, channels).permute(0, 1, 3, 5, 2, 4).reshape(images, half[0] * half[1], -1)
        return NormLinear.apply(x, self.norm.weight, self.norm.bias, self.reduction.weight, self.reduction.bias, self.norm.eps,
                                working_type(x)), half


@MODELS.register_module()
class SwinTransformer(mmdet_swin.SwinTransformer):
    """mmdet's Swin Transformer. Arguments, parameters and their names, initialisation and checkpoints are mmdet's.

    Args:
        lean: what is kept for the backward pass. True: neither attention weights nor the results of norms and activations, about
            half of what mmdet's layers keep in float32 and 0.4 of it under autocast. ``'mlp'``: nor the hidden layers of the
            perceptrons, which are computed again: a third. False: mmdet's own layers.
        everything else: mmdet's.
    """

    def __init__(self, *args, lean: Union[bool, str] = True, **kwargs):
        if lean not in LEAN:
            raise ValueError(f'SwinTransformer: lean must be true, false or mlp, got {lean!r}')
        super().__init__(*args, **kwargs)
        for stage in self.stages if lean else ():
            for block in stage.blocks:
                block.__class__, block.lean = SwinBlock, lean
            if stage.downsample is not None:
                stage.downsample.__class__ = PatchMerging


def _signature() -> inspect.Signature:
    """mmdet's arguments and ``lean``, for whoever checks a configuration's keys."""
    known = inspect.signature(mmdet_swin.SwinTransformer.__init__)
    lean = inspect.signature(SwinTransformer.__init__).parameters['lean']
    return known.replace(parameters=[*known.parameters.values(), lean.replace(annotation=inspect.Parameter.empty)])


SwinTransformer.__init__.__signature__ = _signature()
