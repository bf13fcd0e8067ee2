"""The box convention from before mmdet3d 1.0's coordinate refactoring, and the exact way between it and ours.

The older convention stores ``(x, y, z, w, l, h, yaw)``: ``w`` along the box's own x, ``l`` along its own y, yaw
clockwise seen from above, heading along the box's own -y. Ours is mmdet3d 1.0's ``(x, y, z, l, w, h, yaw)``: ``l``
along the box's own x, yaw counter-clockwise, heading along own +x. The same physical box therefore has its two sizes
swapped and ``yaw_new = -yaw_old - pi / 2``; hence ``(sin, cos)_new = (-cos, -sin)_old``. Both maps are their own
inverses, and both are linear in what a head regresses (log sizes, sine, cosine), so a checkpoint is converted exactly
by swapping and negating rows of its last regression layers; no number is lost and no run-time switch is needed.
"""
from __future__ import annotations

import math
import re
from typing import Dict, Mapping

import torch
from torch import Tensor

# '<...>.prediction_heads.<layer>.dim.<last>.weight' (TransFusion) and '<...>.task_heads.<task>.dim.<last>.weight'
# (CenterPoint); the layers before the last one are ConvModules, whose names go on with 'conv' or 'bn'.
BOX_ROWS = re.compile(r'(?:^|\.)(?:prediction_heads|task_heads)\.\d+\.(dim|rot)\.\d+\.(?:weight|bias)$')

# ``_version`` of our heads' state dicts: torch keeps it beside the tensors (``_metadata``), so that a bare file of weights
# still tells which convention its box rows are in. The reference's heads have torch's default, 1.
STATE_VERSION = 2


def swap_box_convention(boxes: Tensor) -> Tensor:
    """Boxes ``(..., 7+)`` from the older convention to ours, or back (the map is its own inverse).

    Position, height and anything after the yaw (velocity) are unchanged: both conventions use the same lidar frame. The
    meaning of ``z`` (bottom or centre) is not touched. The yaw is not wrapped.
    """
    swapped = boxes.clone()
    swapped[..., 3] = boxes[..., 4]
    swapped[..., 4] = boxes[..., 3]
    swapped[..., 6] = -boxes[..., 6] - math.pi / 2
    return swapped


def swap_head_convention(state_dict: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """A copy of ``state_dict`` whose detection heads regress boxes in the other convention (its own inverse).

    Works on a head's own state dict and on a whole model's; other tensors are passed through. Note what it cannot
    change: the reference trains heights on boxes that stand half a height too high, so its heads predict the *top* of a
    box where ours predict the centre. That is not linear in the weights; the box coder's ``height_target: top`` reads
    such heights right.
    """
    swapped = {}
    for name, tensor in state_dict.items():
        match = BOX_ROWS.search(name)
        if match is None:
            swapped[name] = tensor
        elif match.group(1) == 'dim':
            _check_rows(name, tensor, 3)
            swapped[name] = tensor[torch.tensor([1, 0, 2])]
        else:
            _check_rows(name, tensor, 2)
            swapped[name] = -tensor[torch.tensor([1, 0])]
    return swapped


def _check_rows(name: str, tensor: Tensor, rows: int) -> None:
    if tensor.shape[0] != rows:
        raise ValueError(f'{name}: expected {rows} outputs, got shape {tuple(tensor.shape)}')
