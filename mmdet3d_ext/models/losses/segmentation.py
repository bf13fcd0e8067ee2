"""Losses of BEV map segmentation: independent binary maps, all classes at once, one value per class.

Letters: B batch, C classes, X/Y BEV cells. Logits are (B, C, X, Y) of any floating type; targets have the same shape and any
type, with values in [0, 1] (between 0 and 1 where a target was resampled by area). Everything is computed in float32 (float64
for float64 logits) with autocast switched off: an 800 x 800 map has 640,000 cells, and half precision ends at 65,504.

The forward pass keeps only the logits and the targets (in their own type, one byte per cell for bool) for the backward pass,
which recomputes the rest: plain autograd would keep about ten float32 maps of the full size.
"""
from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

RESAMPLE_MODES = ('max', 'nearest', 'area')


class SegmentationLoss(NamedTuple):
    """Unweighted values per class, each (C,), in float32 or float64."""

    focal: torch.Tensor
    dice: torch.Tensor

    @property
    def dice_score(self) -> torch.Tensor:
        """1 - dice loss, detached: 1 is a perfect map."""
        return 1 - self.dice.detach()


def _work_type(logits: torch.Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


class _FocalDice(torch.autograd.Function):
    """Mean focal loss and soft dice loss per class, with the derivative written out.

    With p = sigmoid(x), miss q = p (1 - t) + (1 - p) t, cross entropy h = softplus(x) - x t and balance
    a = alpha t + (1 - alpha)(1 - t):
        focal = a q^gamma h,   d focal / dx = a (gamma q^(gamma - 1) (1 - 2t) p (1 - p) h + q^gamma (p - t)).
    Per sample and class, with I = sum p t and S = sum p + sum t:
        dice = 1 - (2 I + smooth) / (S + smooth),   d dice / dp = ((2 I + smooth) / (S + smooth) - 2 t) / (S + smooth).
    1 - p is computed as sigmoid(-x), which stays exact where p rounds to 1.
    """

    @staticmethod
    def forward(ctx, logits, targets, alpha: Optional[float], gamma: float, smooth: float):
        t = targets.to(logits.dtype)
        p, rest = torch.sigmoid(logits), torch.sigmoid(-logits)
        overlap = (p * t).sum((2, 3))                              # (B, C)
        total = p.sum((2, 3)) + t.sum((2, 3))                      # (B, C)
        focal = F.softplus(logits).sub_(logits * t)                # cross entropy
        if gamma:
            focal *= _miss(p, rest, t).pow_(gamma)
        if alpha is not None:
            focal *= _balance(t, alpha)
        dice = 1 - (2 * overlap + smooth) / (total + smooth)
        ctx.save_for_backward(logits, targets, overlap, total)
        ctx.settings = (alpha, gamma, smooth)
        return focal.mean((0, 2, 3)), dice.mean(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, focal_grad, dice_grad):
        logits, targets, overlap, total = ctx.saved_tensors
        alpha, gamma, smooth = ctx.settings
        t = targets.to(logits.dtype)
        p, rest = torch.sigmoid(logits), torch.sigmoid(-logits)
        slope = p * rest
        batch, _, *cells = logits.shape
        grad = p - t
        if gamma:
            miss = _miss(p, rest, t)
            grad *= miss.pow(gamma)
            # q^(gamma - 1) is infinite at q = 0 for gamma < 1, where the factor p (1 - p) is 0 and wins.
            tiny = torch.finfo(logits.dtype).tiny
            focusing = miss.clamp_(min=tiny).pow_(gamma - 1).mul_(gamma).mul_(slope)
            grad += focusing.mul_(1 - 2 * t).mul_(F.softplus(logits).sub_(logits * t))
        if alpha is not None:
            grad *= _balance(t, alpha)
        grad *= (focal_grad / (batch * cells[0] * cells[1]))[None, :, None, None]
        scale = dice_grad / batch / (total + smooth)               # (B, C)
        ratio = (2 * overlap + smooth) / (total + smooth)
        grad += slope.mul_(ratio[..., None, None] - 2 * t).mul_(scale[..., None, None])
        return grad, None, None, None, None


def _miss(p: torch.Tensor, rest: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Probability given to the wrong side."""
    return torch.where(t == 0, p, torch.where(t == 1, rest, p * (1 - t) + rest * t))


def _balance(t: torch.Tensor, alpha: float) -> torch.Tensor:
    return t.mul(2 * alpha - 1).add_(1 - alpha)


def _check(logits: torch.Tensor, targets: torch.Tensor) -> None:
    if logits.dim() != 4 or logits.shape != targets.shape:
        raise ValueError(f'logits and targets must have one shape (B, C, X, Y), got {tuple(logits.shape)} and '
                         f'{tuple(targets.shape)}')
    if not logits.is_floating_point():
        raise TypeError(f'logits must be floating point, got {logits.dtype}')


def focal_dice_loss(logits: torch.Tensor, targets: torch.Tensor, alpha: Optional[float] = None, gamma: float = 2.0,
                    smooth: float = 1.0) -> SegmentationLoss:
    """Focal loss (Lin et al., arXiv 1708.02002) and soft dice loss (Milletari et al., arXiv 1606.04797, with plain sums).

    Args:
        logits: (B, C, X, Y), any floating type.
        targets: (B, C, X, Y), any type, values in [0, 1].
        alpha: weight of the positive cells, 1 - alpha of the negative ones; None weighs both by 1.
        gamma: focusing exponent, >= 0; 0 is plain cross entropy.
        smooth: added to both parts of the dice fraction, > 0: keeps an empty class finite, with loss 0 once nothing
            is predicted.

    Returns:
        ``focal`` (C,): mean over batch and cells. ``dice`` (C,): per sample and class, then mean over the batch, so that the
        value does not depend on how samples are grouped into batches.
    """
    _check(logits, targets)
    with torch.autocast(logits.device.type, enabled=False):
        logits = logits.to(_work_type(logits), memory_format=torch.contiguous_format)  # the targets' order, in which all of it then runs
        return SegmentationLoss(*_FocalDice.apply(logits, targets, alpha, float(gamma), float(smooth)))


def cross_entropy_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean binary cross entropy per class, (C,)."""
    return focal_dice_loss(logits, targets, alpha=None, gamma=0.0).focal


def resample_targets(targets: torch.Tensor, size: Tuple[int, int], mode: str = 'max') -> torch.Tensor:
    """Map labels (B, C, X, Y) of any type at another resolution, as float32.

    ``max`` (default): a coarse cell is positive if any cell of its window is, so a line thinner than a coarse cell stays whole;
    it gets up to a cell wider, which is harmless where the result only supervises an auxiliary output.
    ``nearest``: one cell of the window decides; thin lines break up. ``area``: the covered share of the window, a
    target between 0 and 1. At a finer resolution all three repeat cells where the sizes are multiples.
    """
    if mode not in RESAMPLE_MODES:
        raise ValueError(f'target resampling mode must be one of {RESAMPLE_MODES}, got {mode!r}')
    targets = targets.float()
    if tuple(targets.shape[-2:]) == tuple(size):
        return targets
    if mode == 'max':
        return F.adaptive_max_pool2d(targets, size)
    if mode == 'area':
        return F.adaptive_avg_pool2d(targets, size)
    return F.interpolate(targets, size=size, mode='nearest-exact')
