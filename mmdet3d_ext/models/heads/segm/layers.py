"""Building blocks of the enhanced segmentation head. Norms are GroupNorm: no statistics shared between samples or ranks.

Letters: B batch, C channels, X/Y BEV cells. All statistics (norms, pooling) are computed in float32 under AMP.
"""
from __future__ import annotations

from typing import Iterator, List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

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


# Elements that a norm converts to float32 at a time: 64 MiB. Full-size float32 maps, 650 MiB at 800 x 800 cells, never exist.
CHUNK = 16 * 1024 ** 2


def _chunks(x: torch.Tensor, groups: int) -> Iterator[Tuple[slice, slice]]:
    """Samples and channels of parts of x (B, C, X, Y) that are contiguous, hold whole groups, and have about CHUNK elements."""
    batch, channels = x.shape[:2]
    whole = channels * x.shape[2] * x.shape[3]
    if whole <= CHUNK:
        step = max(CHUNK // max(whole, 1), 1)
        for first in range(0, batch, step):
            yield slice(first, min(first + step, batch)), slice(0, channels)
        return
    width = channels // groups
    step = max(CHUNK // (whole // groups), 1) * width
    for sample in range(batch):
        for first in range(0, channels, step):
            yield slice(sample, sample + 1), slice(first, min(first + step, channels))


class _GroupNormReLU(torch.autograd.Function):
    """relu(group_norm(x)) in float32, keeping input and output in the input's own type for the backward pass.

    Autocast would compute the norm in float32 too, but keep a float32 copy of its input and a float32 output: three times the
    memory at half precision. Groups do not depend on each other, so both passes go through them part by part.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, groups: int, eps: float):
        x = x.contiguous()
        batch, channels, *cells = x.shape
        area, width = cells[0] * cells[1], channels // groups
        out = torch.empty_like(x)
        mean, rstd = (weight.new_empty(batch, groups) for _ in range(2))
        for b, c in _chunks(x, groups):
            part = x[b, c]
            count = (c.stop - c.start) // width
            normed, m, r = torch.native_group_norm(part.to(weight.dtype), weight[c], bias[c], len(part), c.stop - c.start, area,
                                                   count, eps)
            g = slice(c.start // width, c.stop // width)
            mean[b, g], rstd[b, g] = m, r
            out[b, c] = normed.relu_()
        ctx.save_for_backward(x, out, weight, mean, rstd)
        ctx.sizes = (area, width)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, out, weight, mean, rstd = ctx.saved_tensors
        area, width = ctx.sizes
        need = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        to_x = torch.empty_like(x) if need[0] else None
        to_weight = torch.zeros_like(weight) if need[1] else None
        to_bias = torch.zeros_like(weight) if need[2] else None
        for b, c in _chunks(x, x.shape[1] // width):
            part = x[b, c]
            g = slice(c.start // width, c.stop // width)
            through = grad[b, c].to(mean.dtype).mul(out[b, c] > 0)
            found = torch.ops.aten.native_group_norm_backward(
                through.contiguous(), part.to(mean.dtype), mean[b, g].contiguous(), rstd[b, g].contiguous(), weight[c], len(part),
                c.stop - c.start, area, g.stop - g.start, need)
            if need[0]:
                to_x[b, c] = found[0]
            if need[1]:
                to_weight[c] += found[1]
            if need[2]:
                to_bias[c] += found[2]
        return to_x, to_weight, to_bias, None, None


class GroupNormReLU(nn.GroupNorm):
    """GroupNorm and ReLU over (B, C, X, Y); parameters ``weight`` and ``bias``."""

    def __init__(self, channels: int, pooled: bool = False):
        super().__init__(group_count(channels, pooled), channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return _GroupNormReLU.apply(x, self.weight.to(work), self.bias.to(work), self.num_groups, self.eps)


def conv_block(inputs: int, outputs: int, kernel: int = 3, dilation: int = 1) -> nn.Sequential:
    """Convolution (no bias, same size), GroupNorm, ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=dilation * (kernel // 2), dilation=dilation, bias=False),
                         GroupNormReLU(outputs))


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
        mean = x.mean((2, 3), keepdim=True, dtype=work)
        with torch.autocast(x.device.type, enabled=False):
            return self.norm(self.conv(mean.to(self.conv.weight.dtype)))


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
        """Branch ``index`` and its part of the projection."""
        branch = self.branches[index]
        outputs = self.project[0].out_channels
        weight = self.project[0].weight[:, index * outputs:(index + 1) * outputs]
        return F.conv2d(branch(x), weight)

    def forward(self, x: torch.Tensor, run=None) -> torch.Tensor:
        """(B, inputs, X, Y) -> (B, outputs, X, Y). ``run(function, *args)`` calls each branch (default: directly)."""
        total = None
        for index in range(len(self.branches)):
            part = run(self.project_branch, x, index) if run else self.project_branch(x, index)
            total = part if total is None else total + part.to(total.dtype)
        return self.project[1](total)


class ChannelAttention(nn.Module):
    """A gate per channel from its global mean and maximum (CBAM, Woo et al., arXiv 1807.06521), computed in float32."""

    def __init__(self, channels: int, reduction: int = 16):
        super().__init__()
        hidden = max(channels // reduction, 4)
        self.mlp = nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work = self.mlp[0].weight.dtype
        mean, peak = x.mean((2, 3), dtype=work), x.amax((2, 3)).to(work)
        with torch.autocast(x.device.type, enabled=False):
            gate = torch.sigmoid(self.mlp(mean) + self.mlp(peak))
        return x * gate.to(x.dtype)[:, :, None, None]


class SpatialAttention(nn.Module):
    """A gate per cell from the mean and maximum over channels (CBAM), computed in float32."""

    def __init__(self, kernel: int = 7):
        super().__init__()
        self.conv = nn.Conv2d(2, 1, kernel, padding=kernel // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work = self.conv.weight.dtype
        pooled = torch.stack((x.mean(1, dtype=work), x.amax(1).to(work)), 1)      # (B, 2, X, Y)
        with torch.autocast(x.device.type, enabled=False):
            gate = torch.sigmoid(self.conv(pooled))
        return x * gate.to(x.dtype)
