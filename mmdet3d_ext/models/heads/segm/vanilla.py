"""The segmentation head of BEVFusion: two convolutions and a classifier on the resampled map."""
from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Sequence, Union

import torch
from torch import nn

from ....registry import MODELS
from ...losses.segmentation import cross_entropy_loss, focal_dice_loss
from .base import BEVSegmentationBase

LOSSES = ('focal', 'xent')


@MODELS.register_module()
class BEVSegmentationHead(BEVSegmentationBase):
    """Grid transform, two 3x3 convolutions with BatchNorm, 1x1 classifier (Liu et al., arXiv 2205.13542).

    Args:
        in_channels, grid_transform, classes, trunk_scope, label_scope, compat: see :class:`BEVSegmentationBase`.
        loss: ``'focal'`` (gamma 2, no alpha) or ``'xent'``, the mean over all cells per class.
    """

    def __init__(self, in_channels: int, grid_transform: Mapping[str, Any], classes: Sequence[str], loss: str = 'focal',
                 trunk_scope: Optional[Sequence] = None, label_scope: Optional[Sequence] = None,
                 compat: Optional[str] = None):
        super().__init__(in_channels, grid_transform, classes, trunk_scope, label_scope, compat)
        if loss not in LOSSES:
            raise ValueError(f'BEVSegmentationHead: loss must be one of {LOSSES}, got {loss!r}')
        self.loss = loss
        layers = []
        for _ in range(2):
            layers += [nn.Conv2d(in_channels, in_channels, 3, padding=1, bias=False), nn.BatchNorm2d(in_channels),
                       nn.ReLU(inplace=True)]
        self.classifier = nn.Sequential(*layers, nn.Conv2d(in_channels, len(self.classes), 1))

    def forward(self, x: Union[torch.Tensor, Sequence[torch.Tensor]],
                target: Optional[torch.Tensor] = None) -> Union[torch.Tensor, Dict[str, torch.Tensor]]:
        """Losses ``{'<class>/<loss>': scalar}`` in training mode, probabilities (B, classes, X, Y) in evaluation mode.

        Args:
            x: (B, in_channels, X_in, Y_in), or a list whose first element is that.
            target: in training, gt_masks_bev (B, classes, X, Y) of any type and size, over ``output_scope``.
        """
        x = self.single(x)
        logits = self.classifier(self.transform(x))
        if not self.training:
            return self.probabilities(logits)
        target = self.check_target(x, target)
        logits = self.to_target_size(logits, target.shape[-2:])
        values = focal_dice_loss(logits, target).focal if self.loss == 'focal' else cross_entropy_loss(logits, target)
        return {f'{name}/{self.loss}': value for name, value in zip(self.classes, values.unbind())}
