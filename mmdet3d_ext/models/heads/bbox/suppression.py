"""Non-maximum suppression in the ground plane: by centre distance, or by overlap of rotated boxes. CPU and GPU."""
from __future__ import annotations

from typing import Optional

import numpy as np
import torch
from mmcv.ops import box_iou_rotated
from torch import Tensor


def circle_nms(centers: Tensor, scores: Tensor, radius: float, post_max_size: Optional[int] = None,
               squared: bool = False) -> Tensor:
    """Keep the best boxes no two of which are within ``radius`` of each other.

    Args:
        centers: (N, 2) metres.
        scores: (N,).
        radius: metres. With ``squared`` it is compared with the *squared* distance, as the reference does (there "4"
            means 2 m).
        post_max_size: at most so many are kept.

    Returns:
        Tensor: (K,) indices of the kept boxes, best score first.
    """
    order = scores.argsort(descending=True, stable=True).cpu().numpy()
    points = centers.detach().float().cpu().numpy()[order]
    limit = float(radius) if squared else float(radius) ** 2
    alive = np.ones(len(points), dtype=bool)
    kept = []
    for i in range(len(points)):
        if not alive[i]:
            continue
        kept.append(order[i])
        if post_max_size is not None and len(kept) >= post_max_size:
            break
        gap = points[i + 1:] - points[i]
        alive[i + 1:] &= (gap * gap).sum(1) > limit
    return torch.as_tensor(np.asarray(kept, dtype=np.int64), device=scores.device)


def rotated_nms(boxes: Tensor, scores: Tensor, iou_threshold: float, pre_max_size: Optional[int] = None,
                post_max_size: Optional[int] = None) -> Tensor:
    """Greedy suppression of boxes that overlap a better one by more than ``iou_threshold``.

    Args:
        boxes: (N, 5) as (x, y, l, w, yaw), metres and radians, yaw counter-clockwise.
        scores: (N,).
        iou_threshold: ground-plane intersection over union.
        pre_max_size: only so many of the best boxes are looked at; the others are dropped.
        post_max_size: at most so many are kept.

    Returns:
        Tensor: (K,) indices of the kept boxes, best score first.
    """
    order = scores.argsort(descending=True, stable=True)[:pre_max_size]
    if order.numel() == 0:
        return order
    ranked = boxes[order].float()
    # Only boxes whose circumscribed circles meet can overlap; of some hundred boxes on a map that is a few pairs of many.
    reach = ranked[:, 2:4].norm(dim=1) / 2
    near = torch.cdist(ranked[:, :2], ranked[:, :2]) <= reach[:, None] + reach[None]
    better, worse = near.triu(1).nonzero(as_tuple=True)
    overlaps = torch.zeros_like(near)
    if len(better) > 0:
        iou = box_iou_rotated(ranked[better].contiguous(), ranked[worse].contiguous(), aligned=True)
        overlaps[better, worse] = iou > iou_threshold
    overlaps = overlaps.cpu().numpy()
    alive, kept = np.ones(len(order), dtype=bool), []
    for i in range(len(order)):
        if alive[i]:
            kept.append(i)
            alive &= ~overlaps[i]
    return order[torch.as_tensor(kept[:post_max_size], device=order.device)]
