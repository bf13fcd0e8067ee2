"""Map segmentation quality: intersection over union per class and threshold, summed over the data set while it runs.

Letters: C classes, X, Y cells along lidar x and y, T thresholds.
"""
from __future__ import annotations

import hashlib
import math
import warnings
from collections import OrderedDict
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from ..geometry.grid import Axis, BevGrid
from .gather import all_gather_object, all_reduce_sum, rank

THRESHOLDS = (0.35, 0.40, 0.45, 0.50, 0.55, 0.60, 0.65)  # of the reference; a cell is predicted where p >= threshold
REFERENCE_STEP = 0.5      # metres; the published numbers are at 200 x 200 cells over +-50 m
REFERENCE_EXTENT = 50.0
_EPS = 1e-7               # of the reference's tp / (tp + fp + fn + eps)
_RECENT = 32              # samples per rank whose own counts are kept, to take back those that another rank counted, too


class BevMapIoU:
    """Streaming map score. Of a sample, only its counts are added and its token's hash is remembered (some 60 bytes).

    Keys of :meth:`compute`: ``map/<class>/iou@0.35`` ... ``@0.65``, ``map/<class>/iou@max`` (the best threshold of the class,
    on the evaluated set itself), ``map/mean/iou@max`` (mean of the former over classes), and the same under
    ``map_ref/...`` on the reference grid.

    *Reference grid*: cells of 0.5 m on the lattice of multiples of 0.5 m, inside both +-50 m and the native grid. Probabilities
    are area-averaged: a reference cell gets the mean of the native cells weighted by the area they share (for 0.25 m cells, the
    mean of four). A reference label is true where at least half of the cell's area is. That keeps sizes: a divider drawn
    1.0 m wide stays two cells wide, as in labels drawn at 0.5 m, whereas "any part of the cell" would widen every shape by up
    to a cell per side and so raise the score of blurred predictions. A native grid of 0.5 m cells is taken
    over unchanged; a coarser cell is divided, which adds no information: labels are then coarser than published ones.

    A class that never occurs in the ground truth has no score: its values are NaN, it is left out of the mean, and
    :meth:`notes` says so. With ``compat='reference'`` it counts as 0.

    Args:
        classes: names, in the order of the predictions' first axis.
        grid: the native grid; ``None`` computes at the native cells only.
        thresholds: probabilities are compared with ``>=``.
        reference_labels: ``'area'`` (at least half of the cell) or ``'max'`` (any part).
    """

    def __init__(self, classes: Sequence[str], grid: Optional[BevGrid] = None, thresholds: Sequence[float] = THRESHOLDS,
                 reference_labels: str = 'area', compat: Optional[str] = None):
        if reference_labels not in ('area', 'max'):
            raise ValueError(f"BevMapIoU: reference_labels must be 'area' or 'max', got {reference_labels!r}")
        if not classes:
            raise ValueError('BevMapIoU: at least one class is needed')
        self.classes, self.grid, self.compat = tuple(classes), grid, compat
        self.thresholds = torch.tensor(list(thresholds), dtype=torch.float32)
        self.reference_labels = reference_labels
        self.reference_grid = None if grid is None else reference_grid(grid)
        if self.reference_grid is not None:
            self._weights = (overlap_weights(self.reference_grid.x, grid.x), overlap_weights(self.reference_grid.y, grid.y))
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        grids = 1 if self.reference_grid is None else 2
        # [grid, class, threshold, (tp, fp, fn)]
        self._counts = torch.zeros(grids, len(self.classes), len(self.thresholds), 3, dtype=torch.int64)
        self._seen: set = set()
        self._recent: 'OrderedDict[int, torch.Tensor]' = OrderedDict()
        self._not_a_number = 0

    # -------------------------------------------------------------------------------------------------------- counting

    def update(self, token: str, probabilities: torch.Tensor, labels: torch.Tensor) -> bool:
        """Count one sample; returns False (and counts nothing) if the token was counted already.

        Args:
            token: identifies the sample over all ranks.
            probabilities: (C, X, Y) floating, on any device.
            labels: (C, X, Y) of any dtype; true where > 0.5.

        Raises:
            ValueError: if the shapes differ from each other, the classes or the grid.
        """
        key = int.from_bytes(hashlib.blake2b(str(token).encode(), digest_size=8).digest(), 'big', signed=True)
        if key in self._seen:
            return False
        self._check(probabilities, labels)
        labels = labels.to(probabilities.device)
        truth = labels if labels.dtype == torch.bool else labels > 0.5
        probabilities = probabilities.detach().float()
        bad = torch.isnan(probabilities).sum().item()
        if bad and not self._not_a_number:
            warnings.warn(f'BevMapIoU: {bad} predicted probabilities of sample {token} are NaN; they count as "not predicted"',
                          stacklevel=2)
        self._not_a_number += bad
        counts = [self._count(probabilities, truth)]
        if self.reference_grid is not None:
            counts.append(self._count(*self._to_reference(probabilities, truth)))
        sample = torch.stack(counts).cpu()
        self._seen.add(key)
        self._counts += sample
        self._recent[key] = sample
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        return True

    def _check(self, probabilities: torch.Tensor, labels: torch.Tensor) -> None:
        if probabilities.ndim != 3 or probabilities.shape[0] != len(self.classes):
            raise ValueError(f'BevMapIoU: predictions must be ({len(self.classes)} classes, X, Y), got '
                             f'{tuple(probabilities.shape)}')
        if labels.shape != probabilities.shape:
            raise ValueError(f'BevMapIoU: predictions {tuple(probabilities.shape)} and labels {tuple(labels.shape)} differ; '
                             f'the head\'s output grid (heads.map.grid_transform.output_scope) and the labels\' grid '
                             f'(LoadBEVSegmentation xbound, ybound) must agree')
        if self.grid is not None and tuple(probabilities.shape[1:]) != self.grid.shape:
            raise ValueError(f'BevMapIoU: predictions have {tuple(probabilities.shape[1:])} cells, the grid is {self.grid}')
        if not probabilities.is_floating_point():
            raise ValueError(f'BevMapIoU: predictions must be probabilities (floating), got {probabilities.dtype}')

    def _count(self, probabilities: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """(C, T, 3) int64 of one sample."""
        positives = truth.flatten(1).sum(1)
        rows = []
        for threshold in self.thresholds.to(probabilities.device):
            predicted = probabilities >= threshold
            hits = (predicted & truth).flatten(1).sum(1)
            rows.append(torch.stack([hits, predicted.flatten(1).sum(1) - hits, positives - hits], dim=-1))
        return torch.stack(rows, dim=1)

    def _to_reference(self, probabilities: torch.Tensor, truth: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Both on the reference grid. Exact taking over where the grids are the same."""
        if self.reference_grid.shape == self.grid.shape and self.reference_grid.same_scope(self.grid):
            return probabilities, truth
        wx, wy = (weights.to(probabilities.device) for weights in self._weights)
        averaged = wx @ probabilities @ wy.T                          # (C, X', X) (X, Y) (Y, Y')
        area = wx @ truth.float() @ wy.T
        # Half a cell is a sum of a few rounded weights; 1e-4 of a cell decides nothing else.
        return averaged, area >= 0.5 - 1e-4 if self.reference_labels == 'area' else area > 1e-6

    # --------------------------------------------------------------------------------------------------------- results

    def counts(self) -> torch.Tensor:
        """(grids, C, T, 3) int64 true positives, false positives, misses over all ranks, each sample once (a collective)."""
        surplus = self._counted_elsewhere()
        return all_reduce_sum(self._counts - surplus)

    def _counted_elsewhere(self) -> torch.Tensor:
        """What this rank must take back, because another rank counts the same samples.

        A sampler that fills up its last batch repeats samples at its end, so at least one of the two is among a rank's recent
        samples.
        """
        surplus = torch.zeros_like(self._counts)
        ranks = all_gather_object((sorted(self._seen), sorted(self._recent)))
        if len(ranks) == 1:
            return surplus
        holders: Dict[int, List[int]] = {}
        for index, (seen, _) in enumerate(ranks):
            for key in seen:
                holders.setdefault(key, []).append(index)
        recent = [set(keys) for _, keys in ranks]
        for key, held_by in holders.items():
            if len(held_by) == 1:
                continue
            settled = [index for index in held_by if key not in recent[index]]
            if len(settled) > 1:
                raise RuntimeError(f'BevMapIoU: ranks {settled} evaluated the same sample early on and both counted it; use '
                                   f'EvalSampler (each sample on one rank)')
            keeper = settled[0] if settled else held_by[0]
            if rank() in held_by and rank() != keeper:
                surplus += self._recent[key]
        return surplus

    def samples(self) -> int:
        """Number of different samples over all ranks (a collective)."""
        return len(set().union(*map(set, all_gather_object(sorted(self._seen)))))

    def compute(self) -> Dict[str, float]:
        """The scores over all ranks, the same on each (a collective). Keys: see the class."""
        counts = self.counts()
        self._without_truth = [name for index, name in enumerate(self.classes)
                               if int(counts[0, index, 0, 0] + counts[0, index, 0, 2]) == 0]
        out: Dict[str, float] = {}
        for prefix, grid_counts in zip(('map', 'map_ref'), counts):
            out.update(self._scores(prefix, grid_counts))
        return out

    def _scores(self, prefix: str, counts: torch.Tensor) -> Dict[str, float]:
        tp, fp, fn = counts.unbind(-1)
        # float32 as in the reference would lose single cells from 2^24 on.
        iou = tp.double() / ((tp + fp + fn).double() + _EPS)
        if self.compat != 'reference':
            iou[(tp + fn)[:, 0] == 0] = math.nan
        out: Dict[str, float] = {}
        best = []
        for index, name in enumerate(self.classes):
            best.append(float(iou[index].max()))
            out[f'{prefix}/{name}/iou@max'] = best[-1]
            for threshold, value in zip(self.thresholds.tolist(), iou[index].tolist()):
                out[f'{prefix}/{name}/iou@{threshold:.2f}'] = value
        scored = [value for value in best if not math.isnan(value)]
        out[f'{prefix}/mean/iou@max'] = sum(scored) / len(scored) if scored else math.nan
        return out

    def notes(self) -> List[str]:
        """Sentences to print below the table of the last :meth:`compute`."""
        out = []
        absent = getattr(self, '_without_truth', [])
        if absent:
            effect = 'counts as 0 in' if self.compat == 'reference' else 'is left out of'
            out.append(f'{", ".join(absent)}: no ground truth in the evaluated samples, so the class {effect} the mean')
        if self._not_a_number:
            out.append(f'{self._not_a_number} predicted probabilities were NaN and count as "not predicted"')
        return out

    def table(self, scores: Dict[str, Any]) -> str:
        """A text table of :meth:`compute`'s scores: classes by thresholds, native and reference grid."""
        lines = []
        for prefix, grid in (('map', self.grid), ('map_ref', self.reference_grid)):
            if f'{prefix}/mean/iou@max' not in scores:
                continue
            lines.append(f'Map IoU, {"native grid" if prefix == "map" else "reference grid"}' + (f' ({grid})' if grid else ''))
            names = [f'{threshold:.2f}' for threshold in self.thresholds.tolist()]
            lines.append(f'{"class":<16}' + ''.join(f'{"@" + name:>8}' for name in [*names, 'max']))
            for name in self.classes:
                values = [scores[f'{prefix}/{name}/iou@{key}'] for key in [*names, 'max']]
                lines.append(f'{name:<16}' + ''.join(f'{value:8.4f}' for value in values))
            lines.append(f'{"mean":<16}' + ' ' * 8 * len(names) + f'{scores[f"{prefix}/mean/iou@max"]:8.4f}')
        return '\n'.join(lines + self.notes())


def reference_grid(grid: BevGrid) -> Optional[BevGrid]:
    """The 0.5 m cells inside both +-50 m and ``grid``; ``None`` if there is no whole one."""
    axes = []
    for axis in (grid.x, grid.y):
        low = math.ceil(max(axis.lo, -REFERENCE_EXTENT) / REFERENCE_STEP - 1e-6)
        high = math.floor(min(axis.hi, REFERENCE_EXTENT) / REFERENCE_STEP + 1e-6)
        if high <= low:
            return None
        axes.append(Axis(low * REFERENCE_STEP, high * REFERENCE_STEP, high - low))
    return BevGrid(*axes)


def overlap_weights(target: Axis, source: Axis) -> torch.Tensor:
    """(target cells, source cells) float32: the share of each target cell that lies in each source cell; rows sum to 1."""
    t = target.lo + torch.arange(target.cells + 1, dtype=torch.float64) * target.step
    s = source.lo + torch.arange(source.cells + 1, dtype=torch.float64) * source.step
    low = torch.maximum(t[:-1, None], s[None, :-1])
    high = torch.minimum(t[1:, None], s[None, 1:])
    shared = (high - low).clamp_min(0)
    shared[shared < 1e-9 * target.step] = 0
    return (shared / shared.sum(1, keepdim=True)).float()
