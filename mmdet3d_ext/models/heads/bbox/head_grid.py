"""The BEV map that a detection head works on, and the ground truth as padded tensors on it.

Letters: B batch, G boxes per sample (padded to the largest), X, Y map cells along lidar x and y, C classes.
"""
from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any, Collection, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....geometry.grid import cell_count
from ....geometry.on_device import constant, upload
from .gaussian import draw_gaussians, gaussian_radius

BOX_DIM = 9  # x, y, z (bottom), l, w, h, yaw, vx, vy


@dataclass(frozen=True)
class CellFrame:
    """The map between metres in the lidar frame and cells of the head's map (cell i covers [i, i + 1)).

    Args:
        lo: lower bounds (x, y) of the point cloud range, metres.
        voxel: voxel size (x, y), metres.
        factor: stride of the head's map in voxels.
    """

    lo: Tuple[float, float]
    voxel: Tuple[float, float]
    factor: int

    @classmethod
    def from_config(cls, pc_range: Sequence[float], voxel_size: Sequence[float], out_size_factor: int) -> 'CellFrame':
        lo, voxel = (tuple(float(v) for v in values[:2]) for values in (pc_range, voxel_size))
        return cls(lo, voxel, int(out_size_factor))

    def to_cells(self, xy: Tensor) -> Tensor:
        """(..., 2) metres -> (..., 2) fractional cells."""
        return (xy - constant(self.lo, xy)) / constant(self.voxel, xy) / self.factor

    def to_metres(self, cells: Tensor) -> Tensor:
        """(..., 2) fractional cells -> (..., 2) metres."""
        return cells * self.factor * constant(self.voxel, cells) + constant(self.lo, cells)


@dataclass
class GroundTruth:
    """Boxes of a batch, padded. Rows that are not ``valid`` hold a harmless box and must not be used.

    ``boxes`` (B, G, 9) float with bottom z and NaN where a velocity is unknown; ``labels`` (B, G) long; ``valid`` (B,
    G) bool: a known class, finite numbers, positive sizes, centre inside the map; ``cells`` (B, G, 2) long: the cell of
    the centre, (0, 0) where not ``valid``.
    """

    boxes: Tensor
    labels: Tensor
    valid: Tensor
    cells: Tensor


def map_shape(cfg: Mapping[str, Any], name: str) -> Tuple[int, int]:
    """(X, Y) of the head's map from ``grid_size`` and ``out_size_factor``; checks them against range and voxel size if
    both are there."""
    factor = int(cfg['out_size_factor'])
    grid = [int(v) for v in cfg['grid_size'][:2]]
    pc_range = cfg.get('point_cloud_range')
    if pc_range is not None:
        for axis, letter in enumerate('xy'):
            cells = cell_count(pc_range[axis], pc_range[axis + 3], cfg['voxel_size'][axis], f'{name}.voxel_size ({letter})')
            if cells != grid[axis]:
                raise ValueError(f'{name}.grid_size: range [{pc_range[axis]}, {pc_range[axis + 3]}] m at '
                                 f'{cfg["voxel_size"][axis]} m is {cells} voxels along {letter}, got {grid[axis]}')
    for axis, letter in enumerate('xy'):
        if grid[axis] % factor:
            raise ValueError(f'{name}.grid_size: {grid[axis]} voxels along {letter} are not a multiple of {factor}')
    return grid[0] // factor, grid[1] // factor


def check_keys(cfg: Mapping[str, Any], name: str, required: Collection[str], optional: Collection[str]) -> None:
    """Raise on a missing or an unknown key of a head's ``train_cfg`` or ``test_cfg``; the message names the nearest
    known one."""
    missing = [key for key in required if key not in cfg]
    if missing:
        raise KeyError(f'{name}: missing {", ".join(missing)}')
    known = [*required, *optional]
    for key in cfg:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f'; did you mean {near[0]!r}?' if near else f', known are {sorted(known)}'
            raise KeyError(f'{name}: unknown key {key!r}{hint}')


def check_frame(frame: CellFrame, train_cfg: Optional[Mapping[str, Any]], test_cfg: Optional[Mapping[str, Any]]) -> None:
    """Raise unless the box coder's range, voxel size and stride are those of ``train_cfg`` and ``test_cfg`` (where given)."""
    for name, cfg in (('train_cfg', train_cfg), ('test_cfg', test_cfg)):
        for key, expected in (('out_size_factor', (frame.factor,)), ('voxel_size', frame.voxel),
                              ('point_cloud_range', frame.lo), ('pc_range', frame.lo)):
            found = (cfg or {}).get(key)
            if found is None:
                continue
            values = found[:2] if isinstance(found, (list, tuple)) else [found]
            if any(not math.isclose(a, b, abs_tol=1e-6) for a, b in zip(values, expected, strict=True)):
                raise ValueError(f'{name}.{key}: the box coder has {list(expected)}, got {found}; boxes would be misplaced')


def check_feature_map(x: Tensor, shape: Optional[Tuple[int, int]], head: str) -> None:
    """Raise unless ``x`` is (B, C, X, Y) with the map shape that the configuration gives."""
    if x.dim() != 4:
        raise ValueError(f'{head}: expected a BEV map (B, C, X, Y), got shape {tuple(x.shape)}')
    if shape is not None and tuple(x.shape[2:]) != tuple(shape):
        raise ValueError(f'{head}: the BEV map has {x.shape[2]} x {x.shape[3]} cells, but grid_size / out_size_factor gives '
                         f'{shape[0]} x {shape[1]}; align point_cloud_range, voxel_size and grid_size with the encoders')


def single_level(feats, head: str) -> Tensor:
    """The one feature map of ``feats`` (a tensor, or a list holding one)."""
    if isinstance(feats, (list, tuple)):
        if len(feats) != 1:
            raise ValueError(f'{head}: takes one feature level, got {len(feats)}')
        return feats[0]
    return feats


def collect_ground_truth(gt_bboxes_3d: Sequence, gt_labels_3d: Sequence[Tensor], frame: CellFrame, shape: Tuple[int, int],
                         num_classes: int, device: torch.device, truncate: bool = False) -> GroundTruth:
    """Pad boxes and labels of a batch and mark the usable ones. Does not wait for the device.

    Args:
        gt_bboxes_3d: B ``LiDARInstance3DBoxes`` (or tensors (G, 7 or 9) with bottom z).
        gt_labels_3d: B tensors (G,); a negative label (a class that is not detected) is dropped.
        truncate: cut cell numbers toward zero, as the reference does, so that boxes up to one cell below the map's lower
            bounds count as being in its first cells.
    """
    if len(gt_bboxes_3d) != len(gt_labels_3d):
        raise ValueError(f'ground truth of {len(gt_bboxes_3d)} samples has labels of {len(gt_labels_3d)}')
    tensors = [getattr(boxes, 'tensor', boxes) for boxes in gt_bboxes_3d]
    for i, (boxes, labels) in enumerate(zip(tensors, gt_labels_3d, strict=True)):
        if len(boxes) != len(labels):
            raise ValueError(f'gt_bboxes_3d[{i}]: {len(boxes)} boxes have {len(labels)} labels')
    most = max((len(boxes) for boxes in tensors), default=0)
    boxes = upload(torch.stack([_pad_boxes(boxes, most) for boxes in tensors]), device)
    labels = upload(torch.stack([F.pad(torch.as_tensor(t).long(), (0, most - len(t)), value=-1) for t in gt_labels_3d]), device)

    cells = frame.to_cells(boxes[..., :2])
    whole = cells.trunc() if truncate else cells.floor()
    limit = constant(shape, cells)
    valid = (labels >= 0) & (labels < num_classes) & boxes[..., :7].isfinite().all(-1) & (boxes[..., 3:6] > 0).all(-1)
    valid &= ((whole >= 0) & (whole < limit)).all(-1)
    # A unit box at the map's lower corner in place of an unusable one: logarithms and overlaps stay finite.
    harmless = constant([*frame.lo, 0, 1, 1, 1, 0, 0, 0], boxes)
    boxes = torch.where(valid[..., None], boxes, harmless)
    whole = torch.where(valid[..., None], whole, torch.zeros_like(whole)).long()
    return GroundTruth(boxes, labels, valid, whole)


def _pad_boxes(boxes: Tensor, rows: int) -> Tensor:
    """(G, 7 or 9) -> (rows, 9) float32; an absent velocity becomes NaN, which means "unknown"."""
    boxes = boxes.float()
    if boxes.shape[-1] < BOX_DIM:
        boxes = F.pad(boxes[:, :7], (0, BOX_DIM - 7), value=float('nan'))
    return F.pad(boxes[:, :BOX_DIM], (0, 0, 0, rows - len(boxes)))


def target_heatmap(truth: GroundTruth, frame: CellFrame, shape: Tuple[int, int], num_classes: int, gaussian_overlap: float,
                   min_radius: int) -> Tensor:
    """(B, C, X, Y) heatmap: 1 at each object's cell, a Gaussian around it (see :mod:`.gaussian`)."""
    heatmap = truth.boxes.new_zeros((len(truth.boxes), num_classes, *shape))
    if truth.boxes.shape[1] == 0:
        return heatmap
    # Order of the two divisions as in `to_cells`: a radius is cut to a whole number, so rounding must not differ
    # between heads.
    length = truth.boxes[..., 3] / frame.voxel[0] / frame.factor
    width = truth.boxes[..., 4] / frame.voxel[1] / frame.factor
    radii = gaussian_radius(length, width, gaussian_overlap).long().clamp(min=int(min_radius))
    return draw_gaussians(heatmap, truth.cells, radii, truth.labels, truth.valid)


def clipped_sigmoid(logits: Tensor, eps: float = 1e-4) -> Tensor:
    """Sigmoid kept ``eps`` away from 0 and 1, so that the logarithms of the focal loss stay finite. Not in place."""
    return logits.sigmoid().clamp(eps, 1 - eps)


def box_class(meta: Optional[Mapping[str, Any]]):
    """The box class that a sample asks for (``box_type_3d`` in its meta), by default ``LiDARInstance3DBoxes``."""
    if meta is not None and meta.get('box_type_3d') is not None and not isinstance(meta['box_type_3d'], str):
        return meta['box_type_3d']
    from mmdet3d.core.bbox import LiDARInstance3DBoxes
    return LiDARInstance3DBoxes


def sample_metas(metas: Optional[Sequence], batch: int) -> List[Optional[Mapping[str, Any]]]:
    """``metas`` as a list of ``batch`` entries; ``None`` gives entries of ``None``.

    Raises:
        ValueError: if there are not ``batch`` of them.
    """
    if metas is None:
        return [None] * batch
    if len(metas) != batch:
        raise ValueError(f'metas: {len(metas)} entries for {batch} samples')
    return list(metas)
