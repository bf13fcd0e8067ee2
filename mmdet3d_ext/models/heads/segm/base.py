"""What the segmentation heads share: grids, targets, class weights and the reports about them."""
from __future__ import annotations

import warnings
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn

from ....geometry.grid import GridError, parse_scope
from .grid_transform import INPUT_KEY, OUTPUT_KEY, BEVGridTransform

LABEL_KEYS = 'xbound/ybound of LoadBEVSegmentation in train_pipeline and test_pipeline'


class BEVSegmentationBase(nn.Module):
    """Independent binary maps per class on a metric grid.

    Args:
        in_channels: channels of the trunk's BEV map.
        grid_transform: ``{input_scope, output_scope, prescale_factor}``, see :class:`BEVGridTransform`.
        classes: names of the map classes, in the order of ``gt_masks_bev``.
        trunk_scope: grid of the map that reaches the head, if known (``[x axis, y axis]`` or a BevGrid): its metres must
            be those of ``input_scope``.
        label_scope: grid of the labels, if known: its metres must be those of ``output_scope``.
        compat: ``'reference'`` only warns where metres or cells disagree, as trained models may depend on it.

    Raises:
        GridError: if scopes differ in metres, or a step does not divide its range.
    """

    def __init__(self, in_channels: int, grid_transform: Mapping[str, Any], classes: Sequence[str],
                 trunk_scope: Optional[Sequence] = None, label_scope: Optional[Sequence] = None,
                 compat: Optional[str] = None):
        super().__init__()
        if isinstance(classes, str) or not classes or len(set(classes)) != len(classes):
            raise ValueError(f'classes must be a list of different names, got {classes!r}')
        self.in_channels = in_channels
        self.classes: List[str] = [str(name) for name in classes]
        self.compat = compat
        transform = dict(grid_transform)
        transform.pop('type', None)
        unknown = set(transform) - {'input_scope', 'output_scope', 'prescale_factor', 'compat'}
        if unknown or not {'input_scope', 'output_scope'} <= set(transform):
            raise ValueError('grid_transform takes input_scope, output_scope and prescale_factor, got '
                             f'{sorted(map(str, grid_transform))}')
        transform.setdefault('compat', compat)
        self.transform = BEVGridTransform(**transform)
        if trunk_scope is not None:
            self.check_trunk(trunk_scope)
        if label_scope is not None:
            self.check_labels(label_scope)
        self._reported: set = set()

    # ---- scopes --------------------------------------------------------------------------------------------------------
    def check_trunk(self, scope: Any) -> None:
        """Raise GridError unless ``scope`` covers the metres of ``input_scope`` (5.5 % scale errors are silent otherwise)."""
        self._same_metres(parse_scope(scope, 'the trunk\'s BEV grid'), self.transform.input_grid, INPUT_KEY,
                          'the trunk\'s BEV map', 'point_cloud_range (and the camera\'s xbound/ybound)')

    def check_labels(self, scope: Any) -> None:
        """Raise GridError unless ``scope`` covers the metres of ``output_scope``; the cells may differ."""
        self._same_metres(parse_scope(scope, 'the label grid'), self.transform.output_grid, OUTPUT_KEY, 'the labels',
                          LABEL_KEYS)

    def _same_metres(self, other, own, key: str, what: str, keys: str) -> None:
        if not other.same_scope(own):
            message = f'{key} is {own}, but {what} cover {other}. Align it with {keys}'
            if self.compat != 'reference':
                raise GridError(message)
            warnings.warn(message, stacklevel=3)

    # ---- targets -------------------------------------------------------------------------------------------------------
    def check_target(self, x: torch.Tensor, target: Optional[torch.Tensor]) -> torch.Tensor:
        """The target, if it fits the batch and the classes.

        Raises:
            ValueError: naming ``gt_masks_bev``, for a missing target, another shape, or (looked at once) values outside [0, 1].
        """
        if target is None:
            raise ValueError('a segmentation head in training mode needs gt_masks_bev (B, classes, X, Y), got None')
        expected = (x.shape[0], len(self.classes))
        if target.dim() != 4 or tuple(target.shape[:2]) != expected:
            raise ValueError(f'gt_masks_bev must be (B, classes, X, Y) = ({expected[0]}, {expected[1]}, X, Y) for classes '
                             f'{self.classes}, got {tuple(target.shape)}')
        if 'values' not in self._reported and target.dtype is not torch.bool:
            self._reported.add('values')  # once: the look-up waits for the GPU
            low, high = target.min().item(), target.max().item()
            if not (low >= 0 and high <= 1):
                raise ValueError(f'gt_masks_bev must hold 0 and 1, got values from {low} to {high}')
        return target

    def to_target_size(self, logits: torch.Tensor, size: Tuple[int, int]) -> torch.Tensor:
        """Logits (B, C, X, Y) at the target's size: bilinear in float32, reported once."""
        if tuple(logits.shape[-2:]) == tuple(size):
            return logits
        if 'size' not in self._reported:
            self._reported.add('size')
            warnings.warn(f'the map head makes {logits.shape[-2]}x{logits.shape[-1]} cells ({OUTPUT_KEY}), the labels have '
                          f'{size[0]}x{size[1]} ({LABEL_KEYS}). The output is resized to the labels; align the two keys',
                          stacklevel=3)
        return F.interpolate(logits.to(torch.promote_types(logits.dtype, torch.float32)), size=tuple(size), mode='bilinear',
                             align_corners=False)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """(B, C, X, Y) float32 probabilities."""
        return torch.sigmoid(logits.float())

    @staticmethod
    def single(x: Union[torch.Tensor, Sequence[torch.Tensor]]) -> torch.Tensor:
        """The map itself; the first of a list, as necks return one."""
        return x[0] if isinstance(x, (list, tuple)) else x


def per_class(values: Union[None, Mapping[str, float], Sequence[float]], classes: Sequence[str], name: str) -> List[float]:
    """One positive number per class, from a mapping by class (1 where absent) or a list in class order.

    Raises:
        ValueError: for an unknown class, a list of another length, or a number that is not positive.
    """
    if values is None:
        return [1.0] * len(classes)
    if isinstance(values, Mapping):
        unknown = [key for key in values if key not in classes]
        if unknown:
            raise ValueError(f'{name}: unknown class {unknown[0]!r}, the classes are {list(classes)}')
        found: Dict[str, Any] = dict(values)
        numbers = [found.get(cls, 1.0) for cls in classes]
    else:
        numbers = list(values)
        if len(numbers) != len(classes):
            raise ValueError(f'{name}: {len(numbers)} values for {len(classes)} classes {list(classes)}')
    for number in numbers:
        if isinstance(number, (bool, str)) or not 0 < number < float('inf'):
            raise ValueError(f'{name}: a weight must be a positive number, got {number!r}')
    return [float(number) for number in numbers]
