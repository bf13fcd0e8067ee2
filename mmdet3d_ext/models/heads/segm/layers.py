"""Building blocks of the enhanced segmentation head. Norms are GroupNorm: no statistics shared between samples or ranks.

Letters: B batch, C channels, X/Y BEV cells. All statistics (norms, pooling) are computed in float32 under AMP.
"""
from __future__ import annotations

from typing import Callable, List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ....ops import group_norm_relu

MAX_GROUPS = 32
# A pooled map has one cell, so a group holds its channels only. One value normalises to 0 and two to +1 and -1, whatever they
# are; from about eight on a group carries its values. 256 channels make 32 groups of 8, the usual case.
POOLED_GROUP_CHANNELS = 8


def group_count(channels: int, pooled: bool = False) -> int:
    """Number of GroupNorm groups: the largest divisor of ``channels`` up to 32.

    For a pooled 1x1 map a group must hold several channels: the largest divisor with at least eight per group.
    """
    smallest = min(POOLED_GROUP_CHANNELS, channels) if pooled else 1
    return max(n for n in range(1, MAX_GROUPS + 1) if channels % n == 0 and channels // n >= smallest)


class GroupNormReLU(nn.GroupNorm):
    """GroupNorm and ReLU over (B, C, X, Y); parameters ``weight`` and ``bias``.

    Autocast would compute the norm in float32 and keep its input and output in float32; the operator reads and writes the map's own
    type and keeps the input alone. A channels-last map stays one.
    """

    def __init__(self, channels: int, pooled: bool = False):
        super().__init__(group_count(channels, pooled), channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return group_norm_relu(x, self.num_groups, self.weight, self.bias, self.eps)


def conv_block(inputs: int, outputs: int, kernel: int = 3, dilation: int = 1) -> nn.Sequential:
    """Convolution (no bias, same size), GroupNorm, ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=dilation * (kernel // 2), dilation=dilation, bias=False),
                         GroupNormReLU(outputs))


def works_channels_last(module: nn.Module) -> bool:
    """Whether the kernels of a module's convolutions lie in channels-last order (``model.channels_last``): maps should then, too.

    Kernels of one cell lie in both orders.
    """
    return any(isinstance(m, nn.Conv2d) and not m.weight.is_contiguous() and m.weight.is_contiguous(memory_format=torch.channels_last)
               for m in module.modules())


class _Mean(torch.autograd.Function):
    """Mean over some dimensions, in float32 for half precision. The gradient is one number a place: torch's own fills a float32 map with it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, dims: Tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.mean(dims, keepdim=True, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return (grad * (grad.numel() / ctx.shape.numel())).to(ctx.dtype).expand(ctx.shape), None, None


class _MeanAndMax(torch.autograd.Function):
    """Mean and maximum over some dimensions, in float32 for half precision, with one pass for the gradient of both.

    Equal maxima share the maximum's gradient, as in ``torch.amax``.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, dims: Tuple[int, ...], dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor]:
        mean, peak = x.mean(dims, keepdim=True, dtype=dtype), x.amax(dims, keepdim=True)
        ctx.save_for_backward(x, peak)
        ctx.dims = dims
        return mean, peak.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, to_mean, to_peak):
        x, peak = ctx.saved_tensors
        here = x == peak
        share = to_mean * (to_mean.numel() / x.numel())
        own = to_peak / here.sum(ctx.dims, keepdim=True)
        return torch.where(here, (share + own).to(x.dtype), share.to(x.dtype)), None, None


class PooledBranch(nn.Module):
    """Global mean of the map, 1x1 convolution, norm, ReLU: (B, C, X, Y) -> (B, outputs, 1, 1).

    Fewer than eight outputs have a bias instead of a norm: there is too little to normalise by.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        few = outputs < POOLED_GROUP_CHANNELS
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=few)
        self.norm = nn.ReLU() if few else GroupNormReLU(outputs, pooled=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work = torch.promote_types(x.dtype, torch.float32)
        mean = _Mean.apply(x, (2, 3), work)
        with torch.autocast(x.device.type, enabled=False):
            return self.norm(self.conv(mean.to(self.conv.weight.dtype)))


def direct(function: Callable, *args: torch.Tensor) -> torch.Tensor:
    """Call a function: what runs a stage that is not recomputed."""
    return function(*args)


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling (Chen et al., arXiv 1706.05587): 1x1, dilated 3x3 and global branches, projected.

    The projection of the joined branches is computed as the sum of the projections of each (the same sum in another order), so
    the joined map, as large as all branches together, never exists.

    Args:
        inputs, outputs: channels.
        rates: dilations of the 3x3 branches, in cells.
    """

    def __init__(self, inputs: int, outputs: int, rates: Sequence[int] = (6, 12, 18)):
        super().__init__()
        branches: List[nn.Module] = [conv_block(inputs, outputs, 1)]
        branches += [conv_block(inputs, outputs, 3, rate) for rate in rates]
        branches.append(PooledBranch(inputs, outputs))
        self.branches = nn.ModuleList(branches)
        self.project = nn.Sequential(nn.Conv2d(outputs * len(branches), outputs, 1, bias=False), GroupNormReLU(outputs))

    def project_branch(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """The convolved map of branch ``index``, normalised, and its part of the projection."""
        branch, outputs = self.branches[index], self.project[0].out_channels
        weight = self.project[0].weight[:, index * outputs:(index + 1) * outputs]
        return F.conv2d(x if isinstance(branch, PooledBranch) else branch[1](x), weight)

    def forward(self, x: torch.Tensor, run: Callable = direct, norm: bool = True) -> torch.Tensor:
        """(B, inputs, X, Y) -> (B, outputs, X, Y).

        Args:
            run: ``run(function, *args)`` calls what follows each branch's convolution.
            norm: False leaves the last norm to the caller (``project[1]``).
        """
        total = None
        for index, branch in enumerate(self.branches):
            if isinstance(branch, PooledBranch):
                part = self.project_branch(branch(x), index)
            else:
                part = run(self.project_branch, branch[0](x), index)
            total = part if total is None else total.add_(part.to(total.dtype))  # a convolution does not need its result again
        return self.project[1](total) if norm else total


class ChannelAttention(nn.Module):
    """A gate per channel from its global mean and maximum (CBAM, Woo et al., arXiv 1807.06521), computed in float32."""

    def __init__(self, channels: int, reduction: int = 16):
        super().__init__()
        hidden = max(channels // reduction, 4)
        self.mlp = nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work = self.mlp[0].weight.dtype
        mean, peak = _MeanAndMax.apply(x, (2, 3), work)                            # (B, C, 1, 1)
        with torch.autocast(x.device.type, enabled=False):
            gate = torch.sigmoid(self.mlp(mean.flatten(1)) + self.mlp(peak.flatten(1)))
        return x * gate.to(x.dtype)[:, :, None, None]


class SpatialAttention(nn.Module):
    """A gate per cell from the mean and maximum over channels (CBAM), computed in float32."""

    def __init__(self, kernel: int = 7):
        super().__init__()
        self.conv = nn.Conv2d(2, 1, kernel, padding=kernel // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work = self.conv.weight.dtype
        pooled = torch.cat(_MeanAndMax.apply(x, (1,), work), 1)                    # (B, 2, X, Y)
        with torch.autocast(x.device.type, enabled=False):
            gate = torch.sigmoid(self.conv(pooled))
        return x * gate.to(x.dtype)
