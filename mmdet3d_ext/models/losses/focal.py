"""Focal loss of box classes, without a wait for the device.

Letters: P predictions, C classes.
"""
from __future__ import annotations

from typing import Optional, Union

import torch
from mmdet.models.losses import focal_loss as mmdet_focal

from ...registry import MODELS


@MODELS.register_module()
class FocalLoss(mmdet_focal.FocalLoss):
    """mmdet's ``FocalLoss``, arguments and values, with one way to compute it on every device.

    On a GPU mmdet calls mmcv's kernel, which reads the largest label on the host before it starts: a wait for everything that is
    queued, in every step and decoder layer. Here labels become the table that mmdet makes of them on the CPU.
    """

    def forward(self, pred: torch.Tensor, target: torch.Tensor, weight: Optional[torch.Tensor] = None,
                avg_factor: Union[torch.Tensor, float, None] = None, reduction_override: Optional[str] = None) -> torch.Tensor:
        """pred (P, C) logits, target (P,) classes, C for background; weight (P,) or (P, C) -> a scalar, unless reduction is none."""
        if self.activated or 0 < self.gamma < 1:  # probabilities; a power whose derivative is infinite at 0, which the kernel avoids
            return super().forward(pred, target, weight, avg_factor, reduction_override)
        table = target[:, None] == torch.arange(pred.shape[1], device=target.device)
        return self.loss_weight * mmdet_focal.py_sigmoid_focal_loss(pred, table, weight, gamma=self.gamma, alpha=self.alpha,
                                                                    reduction=reduction_override or self.reduction, avg_factor=avg_factor)
