"""The enhanced segmentation head: ASPP, attention, a decoder of any depth, deep supervision, focal and dice losses."""
from __future__ import annotations

import math
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Union

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ....registry import MODELS
from ...losses.segmentation import RESAMPLE_MODES, focal_dice_loss, resample_targets
from .base import BEVSegmentationBase, per_class
from .layers import ASPP, ChannelAttention, SpatialAttention, conv_block, direct, works_channels_last

STAGES = ('aspp', 'attention', 'decoder')
# Probability that a new classifier gives every cell: most cells of most classes are empty, and starting at 0.5 makes the first
# steps large and all alike (the prior of Lin et al., arXiv 1708.02002, less extreme because a drivable area is not rare).
PRIOR = 0.1


def _recomputing(function: Callable, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)  # nothing here is random


def _normed(norm: nn.Module, convolution: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return convolution(norm(x))


@MODELS.register_module()
class EnhancedBEVSegmentationHead(BEVSegmentationBase):
    """grid transform -> ASPP -> channel attention -> spatial attention -> [auxiliary classifier] -> decoder -> classifier.

    All norms are GroupNorm, so the output for a sample does not depend on the rest of the batch.

    Args:
        in_channels, grid_transform, classes, trunk_scope, label_scope, compat: see :class:`BEVSegmentationBase`.
        aspp_channels: channels after ASPP.
        aspp_rates: dilations of its 3x3 branches, in output cells.
        decoder_channels: channels of the 3x3 convolutions before the classifier; as many as wanted.
        use_aspp, use_channel_attention, use_spatial_attention: switches for ablation; without ASPP one 3x3 convolution
            takes its place.
        deep_supervision: whether an auxiliary classifier after the attention is trained too.
        aux_weight: weight of its losses.
        use_dice_loss: whether the dice loss is added.
        focal_alpha: weight of positive cells against 1 - alpha of negative ones; None or negative for none.
        focal_gamma: focusing exponent.
        focal_weight, dice_weight: weights of the two losses.
        dice_smooth: see :func:`focal_dice_loss`.
        class_weights: factor on all losses of a class, by name (others 1) or as a list in class order. Thin classes
            (stop_line, divider) usually get 3 to 4.
        target_resample: ``'max'`` (default), ``'nearest'`` or ``'area'``: how labels are brought to the size of the auxiliary
            output where it differs. ``max`` because it keeps thin lines whole, see :func:`resample_targets`.
        use_checkpoint: recompute what lies between convolutions in the backward pass instead of keeping it: True for all stages,
            or a list of ``'aspp'``, ``'attention'`` (with the norm before it), ``'decoder'``.

    Losses in training: ``<class>/focal`` and, as configured, ``<class>/dice``, ``<class>/aux_focal``, ``<class>/aux_dice``, all
    weighted, each a scalar; and ``<class>/dice_score``, detached, 1 being perfect (unweighted, from the main output).
    """

    def __init__(self, in_channels: int, grid_transform: Mapping[str, Any], classes: Sequence[str],
                 aspp_channels: int = 256, aspp_rates: Sequence[int] = (6, 12, 18),
                 decoder_channels: Sequence[int] = (256, 128), use_aspp: bool = True, use_channel_attention: bool = True,
                 use_spatial_attention: bool = True, deep_supervision: bool = False, aux_weight: float = 0.4,
                 use_dice_loss: bool = True, focal_alpha: Optional[float] = 0.25, focal_gamma: float = 2.0,
                 focal_weight: float = 1.0, dice_weight: float = 1.0, dice_smooth: float = 1.0,
                 class_weights: Union[None, Mapping[str, float], Sequence[float]] = None, target_resample: str = 'max',
                 use_checkpoint: Union[bool, Sequence[str]] = False, trunk_scope: Optional[Sequence] = None,
                 label_scope: Optional[Sequence] = None, compat: Optional[str] = None):
        super().__init__(in_channels, grid_transform, classes, trunk_scope, label_scope, compat)
        self._check_settings(focal_alpha, focal_gamma, focal_weight, dice_weight, dice_smooth, aux_weight, target_resample)
        self.deep_supervision, self.aux_weight = bool(deep_supervision), aux_weight
        self.use_dice_loss = bool(use_dice_loss)
        self.focal_alpha = None if focal_alpha is None or focal_alpha < 0 else focal_alpha
        self.focal_gamma, self.focal_weight = focal_gamma, focal_weight
        self.dice_weight, self.dice_smooth = dice_weight, dice_smooth
        self.target_resample = target_resample
        self.checkpointed = self._stages(use_checkpoint)
        weights = per_class(class_weights, self.classes, 'class_weights')
        self.register_buffer('class_weights', torch.tensor(weights), persistent=False)

        self.aspp = ASPP(in_channels, aspp_channels, aspp_rates) if use_aspp else conv_block(in_channels, aspp_channels)
        self.use_aspp = bool(use_aspp)
        self.attention = nn.Sequential()
        if use_channel_attention:
            self.attention.add_module('channel', ChannelAttention(aspp_channels))
        if use_spatial_attention:
            self.attention.add_module('spatial', SpatialAttention())
        if self.deep_supervision:  # only if trained: DistributedDataParallel wants a gradient for every parameter
            self.aux_classifier = nn.Conv2d(aspp_channels, len(self.classes), 1)
        widths = [aspp_channels, *decoder_channels]
        self.decoder = nn.Sequential(*(conv_block(a, b) for a, b in zip(widths[:-1], widths[1:])))
        self.classifier = nn.Conv2d(widths[-1], len(self.classes), 1)
        self._init_parameters()

    @staticmethod
    def _check_settings(alpha, gamma, focal_weight, dice_weight, smooth, aux_weight, resample) -> None:
        if alpha is not None and (isinstance(alpha, (str, bool)) or alpha > 1):
            raise ValueError(f'focal_alpha must be None or a number up to 1, got {alpha!r}')
        for name, value, low in (('focal_gamma', gamma, 0), ('focal_weight', focal_weight, 0), ('dice_weight', dice_weight, 0),
                                 ('aux_weight', aux_weight, 0), ('dice_smooth', smooth, 1e-6)):
            if isinstance(value, (str, bool)) or not low <= value < float('inf'):
                raise ValueError(f'{name} must be a number of at least {low}, got {value!r}')
        if resample not in RESAMPLE_MODES:
            raise ValueError(f'target_resample must be one of {RESAMPLE_MODES}, got {resample!r}')

    @staticmethod
    def _stages(use_checkpoint: Union[bool, Sequence[str]]) -> frozenset:
        if isinstance(use_checkpoint, bool):
            return frozenset(STAGES if use_checkpoint else ())
        stages = [use_checkpoint] if isinstance(use_checkpoint, str) else list(use_checkpoint)
        for stage in stages:
            if stage not in STAGES:
                raise ValueError(f'use_checkpoint: true, false or a list of {STAGES}, got {stage!r}')
        return frozenset(stages)

    def recompute(self) -> None:
        """The same as ``use_checkpoint: true``."""
        self.checkpointed = frozenset(STAGES)

    def _init_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode='fan_out', nonlinearity='relu')
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for classifier in (self.classifier, getattr(self, 'aux_classifier', None)):
            if classifier is not None:
                nn.init.normal_(classifier.weight, std=0.01)
                nn.init.constant_(classifier.bias, -math.log((1 - PRIOR) / PRIOR))

    # ---- forward -------------------------------------------------------------------------------------------------------
    # Recomputed are the stretches from a convolution's result to the next convolution's input: norm and ReLU, attention. What is kept are
    # the results. The second run stops where the last map that the backward pass asks for is there, before the next convolution: it
    # reads and writes maps, a few percent of the head's time, and no convolution runs twice.

    def _runner(self, stage: str) -> Callable:
        """Calls a function directly, or recomputing its activations in the backward pass."""
        return _recomputing if stage in self.checkpointed and self.training and torch.is_grad_enabled() else direct

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """(B, in_channels, X_in, Y_in) -> (B, aspp_channels, X, Y) after attention."""
        if works_channels_last(self):  # once, on the smaller map
            x = x.contiguous(memory_format=torch.channels_last)
        x = self.transform(x)
        if self.use_aspp:
            x, norm = self.aspp(x, self._runner('aspp'), norm=False), self.aspp.project[1]
        else:
            convolution, norm = self.aspp
            x = convolution(x)
        if not len(self.attention):
            return norm(x)
        return self._runner('attention')(lambda x: self.attention(norm(x)), x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        """(B, aspp_channels, X, Y) -> logits (B, classes, X, Y)."""
        run, norm = self._runner('decoder'), None
        for convolution, following in (*self.decoder, (self.classifier, None)):
            x = convolution(x) if norm is None else run(_normed, norm, convolution, x)
            norm = following
        return x

    def forward(self, x: Union[torch.Tensor, Sequence[torch.Tensor]],
                target: Optional[torch.Tensor] = None) -> Union[torch.Tensor, Dict[str, torch.Tensor]]:
        """Losses by name in training mode, probabilities (B, classes, X, Y) in evaluation mode.

        Args:
            x: (B, in_channels, X_in, Y_in), or a list whose first element is that.
            target: in training, gt_masks_bev (B, classes, X, Y) of any type and size, over ``output_scope``.
        """
        x = self.single(x)
        if not self.training:
            return self.probabilities(self.decode(self.features(x)))
        target = self.check_target(x, target)
        features = self.features(x)
        auxiliary = self.aux_classifier(features) if self.deep_supervision else None
        return self.losses(self.decode(features), auxiliary, target)

    def losses(self, logits: torch.Tensor, auxiliary: Optional[torch.Tensor], target: torch.Tensor) -> Dict[str, torch.Tensor]:
        """Weighted losses and dice scores by name; the same names in the same order for every sample."""
        main = self._loss(self.to_target_size(logits, target.shape[-2:]), target)
        weights = self.class_weights.to(main.focal.dtype)
        columns = {'focal': main.focal * weights * self.focal_weight}
        if self.use_dice_loss:
            columns['dice'] = main.dice * weights * self.dice_weight
        if auxiliary is not None:
            if auxiliary.shape[-2:] != target.shape[-2:]:
                target = resample_targets(target, tuple(auxiliary.shape[-2:]), self.target_resample)
            aux = self._loss(auxiliary, target)
            columns['aux_focal'] = aux.focal * weights * (self.focal_weight * self.aux_weight)
            if self.use_dice_loss:
                columns['aux_dice'] = aux.dice * weights * (self.dice_weight * self.aux_weight)
        columns['dice_score'] = main.dice_score
        parts = {key: values.unbind() for key, values in columns.items()}
        return {f'{name}/{key}': values[index] for index, name in enumerate(self.classes) for key, values in parts.items()}

    def _loss(self, logits: torch.Tensor, target: torch.Tensor):
        return focal_dice_loss(logits, target, self.focal_alpha, self.focal_gamma, self.dice_smooth)
