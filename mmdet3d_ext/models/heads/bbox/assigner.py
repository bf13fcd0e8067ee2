"""One-to-one matching of predicted and true boxes for TransFusion: costs on the device, the assignment itself on the
CPU."""
from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from mmcv.ops import box_iou_rotated
from mmdet.core.bbox.iou_calculators import build_iou_calculator
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ....geometry.on_device import Arriving, constant, upload
from ....registry import BBOX_ASSIGNERS, MATCH_COSTS

_LOGGER = logging.getLogger('mmdet3d_ext.models.heads.bbox')
_UNUSABLE = 1e6  # cost of a pair whose cost is not a number: matched only if nothing else is left
_FAR = 1e5  # metres; larger numbers in predicted boxes would overflow the overlap's products in float32


@MATCH_COSTS.register_module()
class BBoxBEVL1Cost:
    """L1 distance of the (x, y) centres, each axis divided by the point cloud range; times ``weight``."""

    def __init__(self, weight: float = 1.0):
        self.weight = weight

    def __call__(self, bboxes: Tensor, gt_bboxes: Tensor, train_cfg: Mapping[str, Any]) -> Tensor:
        """``bboxes`` (..., P, 2+), ``gt_bboxes`` (..., G, 2+) in metres -> (..., P, G)."""
        lo = constant(train_cfg['point_cloud_range'][0:2], bboxes)
        extent = constant(train_cfg['point_cloud_range'][3:5], bboxes) - lo
        return torch.cdist((bboxes[..., :2] - lo) / extent, (gt_bboxes[..., :2] - lo) / extent, p=1) * self.weight


@MATCH_COSTS.register_module()
class IoU3DCost:
    """Minus the 3-D overlap; times ``weight``."""

    def __init__(self, weight: float = 1.0):
        self.weight = weight

    def __call__(self, iou: Tensor) -> Tensor:
        return -iou * self.weight


def lidar_overlaps(boxes: Tensor, others: Tensor) -> Tensor:
    """Volume overlap (intersection over union) of boxes (..., P, 7) and (..., G, 7) with bottom z -> (..., P, G).

    The numbers of mmdet3d's ``BboxOverlaps3D`` with ``coordinate='lidar'``, whose box classes take one sample and pick columns by
    lists: a wait for the device each time, two dozen in a step.
    """
    boxes, others = boxes[..., :, None, :], others[..., None, :, :]
    # The overlap's operator knows no batch; it gets a row for each pair, of all samples.
    flat = torch.broadcast_tensors(*(torch.cat([b[..., 0:2], b[..., 3:5], b[..., 6:7]], -1) for b in (boxes, others)))
    shape = flat[0].shape[:-1]
    if shape.numel() == 0:
        return boxes.new_zeros(shape)
    iou = box_iou_rotated(*(f.reshape(-1, 5) for f in flat), aligned=True).view(shape)
    areas = boxes[..., 3] * boxes[..., 4] + others[..., 3] * others[..., 4]
    shared = iou * areas / (1 + iou)
    top = torch.minimum(boxes[..., 2] + boxes[..., 5], others[..., 2] + others[..., 5])
    bottom = torch.maximum(boxes[..., 2], others[..., 2])
    shared = shared * (top - bottom).clamp(min=0)
    volumes = boxes[..., 3:6].prod(-1) + others[..., 3:6].prod(-1)
    return shared / (volumes - shared).clamp(min=1e-8)


def _sample_by_sample(calculator: Callable, boxes: Tensor, others: Tensor) -> Tensor:
    """(B, P, 7), (B, G, 7) -> (B, P, G) by a calculator that takes the boxes of one sample."""
    return torch.stack([calculator(*pair) for pair in zip(boxes, others, strict=True)])


@BBOX_ASSIGNERS.register_module()
class HungarianAssigner3D:
    """Optimal one-to-one assignment on the sum of a class, a position and an overlap cost.

    Args:
        cls_cost: called once a batch with the logits (B*P, C) of all queries and the labels 0..C-1, e.g. mmdet's
            ``FocalLossCost``: what a pair costs may depend on its query and the box's class only.
        reg_cost: called with boxes (B, P, 7+), ground truth (B, G, 7+) and ``train_cfg`` (:class:`BBoxBEVL1Cost`).
        iou_cost: called with overlaps (B, P, G) (:class:`IoU3DCost`).
        iou_calculator: called with boxes (P, 7) and (G, 7) of each sample, bottom z. For mmdet3d's ``BboxOverlaps3D`` in the
            lidar frame, the default, :func:`lidar_overlaps` is used, for all samples at once.
    """

    def __init__(self, cls_cost: Optional[dict] = None, reg_cost: Optional[dict] = None, iou_cost: Optional[dict] = None,
                 iou_calculator: Optional[dict] = None):
        self.cls_cost = MATCH_COSTS.build(cls_cost or dict(type='FocalLossCost', weight=0.15))
        self.reg_cost = MATCH_COSTS.build(reg_cost or dict(type='BBoxBEVL1Cost', weight=0.25))
        self.iou_cost = MATCH_COSTS.build(iou_cost or dict(type='IoU3DCost', weight=0.25))
        kind = dict(iou_calculator or dict(type='BboxOverlaps3D', coordinate='lidar'))
        ours = kind == dict(type='BboxOverlaps3D', coordinate='lidar')
        self.iou_calculator = lidar_overlaps if ours else functools.partial(_sample_by_sample, build_iou_calculator(kind))
        self._reports = 0

    def costs(self, bboxes: Tensor, gt_bboxes: Tensor, gt_labels: Tensor, cls_pred: Tensor,
              train_cfg: Mapping[str, Any]) -> Tuple[Tensor, Tensor]:
        """Cost and overlap of each pair of a sample's predictions and true boxes.

        Args:
            bboxes: (B, P, 7+) predictions, metres, bottom z; may hold NaN or infinity.
            gt_bboxes: (B, G, 7+), finite but for velocities. gt_labels: (B, G) in [0, C). cls_pred: (B, P, C) logits.

        Returns:
            tuple[Tensor, Tensor]: (B, P, G) cost, not finite where the prediction is not; (B, P, G) overlap in [0, 1],
            finite.
        """
        # The overlap kernel sorts corner points; NaN among them is undefined behaviour, so it sees a finite stand-in.
        safe = bboxes[..., :7].nan_to_num(0.0, _FAR, -_FAR).clamp(-_FAR, _FAR)
        iou = self.iou_calculator(safe, gt_bboxes[..., :7]).nan_to_num(0.0).clamp(0.0, 1.0)
        poison = torch.where(bboxes[..., :7].isfinite().all(-1, keepdim=True), 0.0, float('nan'))
        batch, queries, classes = cls_pred.shape
        of_class = self.cls_cost(cls_pred.flatten(0, 1), torch.arange(classes, device=cls_pred.device))
        cls_cost = of_class.view(batch, queries, classes).gather(2, gt_labels[:, None].expand(-1, queries, -1))
        return cls_cost + self.reg_cost(bboxes, gt_bboxes, train_cfg) + self.iou_cost(iou) + poison, iou

    @staticmethod
    def send(cost: Tensor, valid: Tensor) -> Arriving:
        """Let the costs travel to the CPU: whatever is queued on the device between this and :meth:`solve` keeps it busy while the host
        assigns.

        Args:
            cost: (B, L, P, G) costs.
            valid: (B, G) bool, which ground-truth boxes exist.
        """
        # The validity flags travel as one more row of the costs, so that the host waits for the device once.
        return Arriving(torch.cat([cost, valid[:, None, None].expand(-1, cost.shape[1], -1, -1).to(cost.dtype)], 2).float())

    def solve(self, sent: Arriving, device: torch.device) -> Tensor:
        """Assign every sample and decoder layer; one wait for what was sent and one transfer back for the whole batch.

        Returns:
            Tensor: (B, L, P) long on ``device``, the matched ground-truth row, or -1 for background.
        """
        packed = sent.wait().numpy()
        batch, layers, queries = packed.shape[0], packed.shape[1], packed.shape[2] - 1
        matched = np.full((batch, layers, queries), -1, dtype=np.int64)
        for i in range(batch):
            columns = np.flatnonzero(packed[i, 0, -1] > 0)
            if len(columns) == 0:
                continue
            for layer in range(layers):
                table = packed[i, layer, :-1][:, columns]
                finite = np.isfinite(table)
                if not finite.all():
                    self._report(i, int((~finite.all(1)).sum()), queries)
                    table = np.where(finite, table, _UNUSABLE)
                rows, picked = linear_sum_assignment(table)
                matched[i, layer, rows] = columns[picked]
        return upload(torch.from_numpy(matched), device)

    def _report(self, sample: int, broken: int, queries: int) -> None:
        # With mixed precision this may go on for many steps: the first ten, then every hundredth.
        self._reports += 1
        if self._reports <= 10 or self._reports % 100 == 0:
            _LOGGER.warning(
                'detection head: %d of %d queries of sample %d in the batch have predictions that are not finite; they are '
                'matched last. A NaN prediction makes the loss NaN: lower the learning rate, start mixed precision later, or '
                'look for bad input.', broken, queries, sample)


def layer_slices(total: int, layers: int) -> Sequence[slice]:
    """The parts of a last axis of ``total`` entries that holds ``layers`` decoder layers one after the other."""
    each = total // layers
    return [slice(i * each, (i + 1) * each) for i in range(layers)]
