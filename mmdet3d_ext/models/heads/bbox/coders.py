"""Box coders: between boxes in metres and the numbers that the heads regress.

Both heads regress the height of the box *centre* (``height_target: centre``). The reference trained its weights on
annotations that stand half a height too high, so its networks predict the height of the box's *top*: with
``height_target: top`` such a checkpoint gives boxes that stand on the ground, and can be trained on with right
annotations. A configuration that does not set it follows the weights that are loaded (:meth:`_Coder.follow_weights`).

``compat='reference'`` keeps one behaviour: a score threshold of 0.0 filters nothing.
"""
from __future__ import annotations

from typing import Dict, List, Optional, Sequence

import torch
from torch import Tensor

from ....geometry.on_device import constant
from ....registry import BBOX_CODERS
from .head_grid import CellFrame

HEIGHT_TARGETS = {'centre': 0.5, 'top': 1.0}  # share of the box's height between the bottom and the regressed height


class _Coder:
    """What the two coders share: the map's frame, filters and the meaning of the regressed height."""

    def __init__(self, pc_range, out_size_factor, voxel_size, post_center_range, score_threshold, height_target, compat):
        if height_target not in (None, *HEIGHT_TARGETS):
            raise ValueError(f'bbox_coder.height_target: expected one of {sorted(HEIGHT_TARGETS)}, or null for what the '
                             f'loaded weights were trained on, got {height_target!r}')
        if post_center_range is not None and len(post_center_range) != 6:
            raise ValueError('bbox_coder.post_center_range: needs 6 numbers (lower x, y, z, upper x, y, z), '
                             f'got {post_center_range!r}')
        self.frame = CellFrame.from_config(pc_range, voxel_size, out_size_factor)
        self.post_center_range = None if post_center_range is None else [float(v) for v in post_center_range]
        self.score_threshold = score_threshold
        self.configured_height = height_target
        self.height_target = height_target or 'centre'
        self.compat = compat

    @property
    def height_share(self) -> float:
        """Share of the box's height between its bottom and the regressed height."""
        return HEIGHT_TARGETS[self.height_target]

    @property
    def trained_height(self) -> str:
        """What weights trained with this coder predict, seen from right annotations: ``'centre'`` or ``'top'``.

        Under the ``'reference'`` profile the data set's boxes stand half a height too high, so their centre is the top.
        """
        return 'top' if self.compat == 'reference' else self.height_target

    def follow_weights(self, target: str) -> bool:
        """Decode and encode heights as ``target`` says, unless the configuration decides (``height_target``, or the
        ``'reference'`` profile, which wants that project's numbers).

        Returns:
            bool: whether the coder now agrees with weights that predict ``target``.
        """
        if target not in HEIGHT_TARGETS:
            raise ValueError(f'height_target: expected one of {sorted(HEIGHT_TARGETS)}, got {target!r}')
        if self.configured_height is None and self.compat != 'reference':
            self.height_target = target
        return self.trained_height == target

    def keep(self, boxes: Tensor, scores: Tensor) -> Tensor:
        """(..., 7+) boxes, (...) scores -> (...) bool: finite, inside ``post_center_range``, score above the
        threshold."""
        mask = boxes.isfinite().all(-1) & scores.isfinite()
        if self.post_center_range is not None:
            limits = constant(self.post_center_range, boxes)
            mask &= ((boxes[..., :3] >= limits[:3]) & (boxes[..., :3] <= limits[3:])).all(-1)
        threshold = self.score_threshold
        if threshold is not None and not (self.compat == 'reference' and threshold == 0):
            mask &= scores > threshold
        return mask

    @staticmethod
    def pack(boxes: Tensor, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """(B, P, code), (B, P) three times -> (B, P, code + 3): what a sample's detections are made from, for one copy to the host."""
        return torch.cat([boxes, *(t[..., None].to(boxes.dtype) for t in (scores, labels, mask))], -1)

    @staticmethod
    def unpack(packed: Tensor) -> Dict[str, Tensor]:
        """(P, code + 3) of one sample -> ``bboxes`` (K, code), ``scores`` (K,), ``labels`` (K,) of those that its mask keeps."""
        kept = packed[packed[:, -1] > 0]
        return dict(bboxes=kept[:, :-3], scores=kept[:, -3], labels=kept[:, -2].long())


@BBOX_CODERS.register_module()
class TransFusionBBoxCoder(_Coder):
    """Coder of :class:`TransFusionHead`: (x, y in map cells, height, log l, log w, log h, sin, cos[, vx, vy]).

    Args:
        pc_range: lower bounds of the point cloud range, metres (only x and y are read).
        out_size_factor: stride of the head's map in voxels.
        voxel_size: metres.
        post_center_range: (6,) limits in metres on (x, y, bottom z) of decoded boxes, or None.
        score_threshold: boxes are kept if their score is greater; 0.0 drops exact zeros, None keeps all.
        code_size: 10 with velocity, 8 without.
        height_target: ``'centre'``, ``'top'``, or None: what the loaded weights were trained on (``'centre'`` without
            any), see the module.
    """

    def __init__(self, pc_range: Sequence[float], out_size_factor: int, voxel_size: Sequence[float],
                 post_center_range: Optional[Sequence[float]] = None, score_threshold: Optional[float] = None,
                 code_size: int = 8, height_target: Optional[str] = None, compat: Optional[str] = None):
        super().__init__(pc_range, out_size_factor, voxel_size, post_center_range, score_threshold, height_target, compat)
        if code_size not in (8, 10):
            raise ValueError(f'bbox_coder.code_size: 10 with velocity, 8 without, got {code_size}')
        self.code_size = code_size

    def encode(self, boxes: Tensor) -> Tensor:
        """(..., 7+) boxes with bottom z -> (..., code_size) targets. An unknown velocity stays NaN."""
        yaw = boxes[..., 6:7]
        parts = [self.frame.to_cells(boxes[..., :2]), boxes[..., 2:3] + boxes[..., 5:6] * self.height_share,
                 boxes[..., 3:6].log(), yaw.sin(), yaw.cos()]
        if self.code_size == 10:
            parts.append(boxes[..., 7:9])
        return torch.cat(parts, -1)

    def decode_boxes(self, center: Tensor, height: Tensor, dim: Tensor, rot: Tensor, vel: Optional[Tensor] = None) -> Tensor:
        """Predictions (B, 2 | 1 | 3 | 2 | 2, P) -> boxes (B, P, 7 or 9), metres, bottom z. The inputs are not
        changed."""
        size = dim.exp()
        parts = [self.frame.to_metres(center.transpose(1, 2)).transpose(1, 2), height - size[:, 2:3] * self.height_share, size,
                 torch.atan2(rot[:, 0:1], rot[:, 1:2])]
        if vel is not None:
            parts.append(vel)
        return torch.cat(parts, 1).transpose(1, 2)

    def decode(self, heatmap: Tensor, rot: Tensor, dim: Tensor, center: Tensor, height: Tensor, vel: Optional[Tensor] = None,
               filter: bool = False) -> List[Dict[str, Tensor]]:
        """Boxes, best class and its score per sample.

        Args:
            heatmap: (B, C, P) scores.
            filter: drop boxes outside ``post_center_range``, not above the score threshold, or not finite.

        Returns:
            list[dict]: ``bboxes`` (P, 7 or 9), ``scores`` (P,), ``labels`` (P,) for each sample.
        """
        return [self.unpack(sample) for sample in self.candidates(heatmap, rot, dim, center, height, vel, filter)]

    def candidates(self, heatmap: Tensor, rot: Tensor, dim: Tensor, center: Tensor, height: Tensor, vel: Optional[Tensor] = None,
                   filter: bool = False) -> Tensor:
        """What :meth:`decode` gives, before anything is dropped: (B, P, code + 3) as :meth:`pack` says. The host waits for nothing."""
        boxes = self.decode_boxes(center, height, dim, rot, vel)
        scores, labels = heatmap.max(1)
        return self.pack(boxes, scores, labels, self.keep(boxes, scores) if filter else torch.ones_like(scores, dtype=torch.bool))


@BBOX_CODERS.register_module()
class CenterPointBBoxCoder(_Coder):
    """Coder of :class:`CenterHead`: (x, y offset inside the cell, height, log l, log w, log h, sin, cos[, vx, vy]) at a
    cell.

    Args:
        max_num: detections per sample and task before suppression.
        code_size: box size, 9 with velocity, 7 without.
        The others are those of :class:`TransFusionBBoxCoder`.
    """

    def __init__(self, pc_range: Sequence[float], out_size_factor: int, voxel_size: Sequence[float],
                 post_center_range: Optional[Sequence[float]] = None, max_num: int = 100,
                 score_threshold: Optional[float] = None, code_size: int = 9,
                 height_target: Optional[str] = None, compat: Optional[str] = None):
        super().__init__(pc_range, out_size_factor, voxel_size, post_center_range, score_threshold, height_target, compat)
        if code_size not in (7, 9):
            raise ValueError(f'bbox_coder.code_size: 9 with velocity, 7 without, got {code_size}')
        self.max_num = int(max_num)
        self.code_size = code_size

    def encode(self, boxes: Tensor, cells: Tensor, log_size: bool = True) -> Tensor:
        """(..., 7+) boxes with bottom z, (..., 2) whole cells of their centres -> (..., code_size + 1) targets."""
        size, yaw = boxes[..., 3:6], boxes[..., 6:7]
        parts = [self.frame.to_cells(boxes[..., :2]) - cells,
                 boxes[..., 2:3] + boxes[..., 5:6] * self.height_share, size.log() if log_size else size,
                 yaw.sin(), yaw.cos()]
        if self.code_size == 9:
            parts.append(boxes[..., 7:9])
        return torch.cat(parts, -1)

    def decode(self, heat: Tensor, rot_sine: Tensor, rot_cosine: Tensor, hei: Tensor, dim: Tensor, vel: Optional[Tensor],
               reg: Optional[Tensor] = None, task_id: int = -1) -> List[Dict[str, Tensor]]:
        """The ``max_num`` best (class, cell) pairs of each sample as boxes.

        Args:
            heat: (B, C, X, Y) probabilities. rot_sine, rot_cosine, hei: (B, 1, X, Y). dim: (B, 3, X, Y) metres. vel:
                (B, 2, X, Y) or None. reg: (B, 2, X, Y) offsets inside the cell; without it the middle of the cell is
                meant.

        Returns:
            list[dict]: ``bboxes`` (K, 7 or 9) whose z is the regressed height, not yet the bottom (see :meth:`lower`);
            ``scores`` (K,) falling; ``labels`` (K,) within the task. Filtered as :meth:`keep` says.
        """
        return [self.unpack(sample) for sample in self.candidates(heat, rot_sine, rot_cosine, hei, dim, vel, reg)]

    def candidates(self, heat: Tensor, rot_sine: Tensor, rot_cosine: Tensor, hei: Tensor, dim: Tensor, vel: Optional[Tensor],
                   reg: Optional[Tensor] = None) -> Tensor:
        """What :meth:`decode` gives, before anything is dropped: (B, ``max_num``, code + 3) as :meth:`pack` says. The host waits for
        nothing."""
        _, _, x_cells, y_cells = heat.shape
        flat = heat.flatten(1)
        scores, index = flat.topk(min(self.max_num, flat.shape[1]), dim=1)
        labels = torch.div(index, x_cells * y_cells, rounding_mode='floor')
        cell = index % (x_cells * y_cells)

        def at_cells(tensor: Tensor) -> Tensor:
            return tensor.flatten(2).gather(2, cell[:, None].expand(-1, tensor.shape[1], -1)).transpose(1, 2)

        whole = torch.stack([torch.div(cell, y_cells, rounding_mode='floor'), cell % y_cells], -1).float()
        position = whole + (at_cells(reg) if reg is not None else 0.5)
        yaw = torch.atan2(at_cells(rot_sine), at_cells(rot_cosine))
        parts = [self.frame.to_metres(position), at_cells(hei), at_cells(dim), yaw]
        if vel is not None:
            parts.append(at_cells(vel))
        boxes = torch.cat(parts, -1)
        return self.pack(boxes, scores, labels, self.keep(boxes, scores))

    def lower(self, boxes: Tensor) -> Tensor:
        """Decoded boxes (K, 7+) with the regressed height as z -> a copy with bottom z."""
        lowered = boxes.clone()
        lowered[:, 2] -= boxes[:, 5] * self.height_share
        return lowered
