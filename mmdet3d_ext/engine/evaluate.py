"""Evaluation: one pass over a data set, metrics that accumulate while it runs, and the table at the end.

Memory does not grow with the number of samples for maps (counts only); of a detection sample only its boxes are kept.
Every sample counts exactly once, however many ranks there are and whatever the last batch holds.
"""
from __future__ import annotations

import logging
import math
import os
import sys
from typing import Any, Dict, Iterable, List, Mapping, Optional, Protocol, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from ..datasets.stream import batches
from ..metrics import BevMapIoU, NuScenesDetectionMetric, gather_results, on_rank_zero
from ..metrics.bev_iou import THRESHOLDS
from ..metrics.nuscenes_detection import RESULTS
from .launch import LOGGER_NAME, UserError
from .parallel import autocast, batch_size, takes, unpack_batch
from .whole_files import write_json

TASKS = {'bbox': 'object', 'object': 'object', 'map': 'map', 'segm': 'map'}  # what --eval takes -> task


class Evaluator(Protocol):
    """A metric over a data set."""

    task: str

    def update(self, output: Mapping[str, Any], batch: Mapping[str, Any], index: int) -> bool:
        """Add sample ``index`` of ``batch`` with the model's output; False if the output holds nothing for this metric."""

    def compute(self) -> Dict[str, float]:
        """The metrics over all ranks, the same on each (a collective)."""

    def table(self) -> str:
        """Text for people, after :meth:`compute`."""


def _token(batch: Mapping[str, Any], index: int) -> str:
    meta = batch['metas'][index]
    token = meta.get('token', meta.get('sample_idx'))
    if token is None:
        raise UserError(f'the samples do not say which they are (their metas hold {sorted(meta)}): add token to meta_lis_keys of Collect3D')
    return token


class DetectionEvaluator:
    """nuScenes detection scores of outputs that hold ``boxes_3d``. ``format_only``: write the result file without scores.

    ``path``: the result file, after :meth:`compute` on rank 0.
    """

    task = 'object'

    def __init__(self, metric: NuScenesDetectionMetric, format_only: bool = False):
        self.metric, self.format_only, self.path = metric, format_only, None

    def update(self, output: Mapping[str, Any], batch: Mapping[str, Any], index: int) -> bool:
        if 'boxes_3d' not in output:
            return False
        self.metric.update(_token(batch, index), output)
        return True

    def compute(self) -> Dict[str, float]:
        if self.format_only:
            self.path = self.metric.format()
            return {}
        scores = self.metric.compute()
        self.path = self.metric.out_dir / RESULTS
        return scores

    def table(self) -> str:
        return f'results are in {self.path}' if self.format_only else self.metric.table


class MapEvaluator:
    """Map IoU of outputs that hold ``masks_bev``, against the batch's ``gt_masks_bev``."""

    task = 'map'

    def __init__(self, metric: BevMapIoU):
        self.metric, self.scores = metric, {}

    def update(self, output: Mapping[str, Any], batch: Mapping[str, Any], index: int) -> bool:
        if 'masks_bev' not in output:
            return False
        if batch.get('gt_masks_bev') is None:
            raise UserError('the model predicts maps, but the evaluated samples hold no map labels: add LoadBEVSegmentation to '
                            'the pipeline and gt_masks_bev to the keys of Collect3D')
        self.metric.update(_token(batch, index), output['masks_bev'], batch['gt_masks_bev'][index].cpu())
        return True

    def compute(self) -> Dict[str, float]:
        self.scores = self.metric.compute()
        return self.scores

    def table(self) -> str:
        return self.metric.table(self.scores)


class ResultCollector:
    """Keeps the detections (never the maps) of all samples for a result file."""

    task = 'object'

    def __init__(self):
        self.results: Dict[str, Dict[str, Any]] = {}

    def update(self, output: Mapping[str, Any], batch: Mapping[str, Any], index: int) -> bool:
        if 'boxes_3d' not in output:
            return False
        self.results[_token(batch, index)] = {
            'boxes_3d': output['boxes_3d'].tensor.cpu().numpy(), 'scores_3d': output['scores_3d'].cpu().numpy(),
            'labels_3d': output['labels_3d'].cpu().numpy()}
        return True

    def compute(self) -> Dict[str, float]:
        self.gathered = gather_results(self.results)
        return {}

    def table(self) -> str:
        return ''


def build_evaluators(cfg: Mapping[str, Any], dataset: Any, out_dir: str, tasks: Optional[Sequence[str]] = None,
                     format_only: bool = False) -> List[Evaluator]:
    """The metrics that a data set can be evaluated with.

    Args:
        cfg: the configuration (``compat``; ``evaluation.thresholds`` of map probabilities, by default the field's).
        dataset: :class:`NuScenesDataset`, or any data set with a method ``evaluators(out_dir)`` that returns them.
        out_dir: where result files go.
        tasks: 'object' and/or 'map'; both by default, as far as the model's output holds them.
        format_only: only write the result file for the evaluation server.

    Raises:
        UserError: for a data set that is neither. ValueError: for classes that the devkit does not score.
    """
    if hasattr(dataset, 'evaluators'):
        found = list(dataset.evaluators(out_dir))
    else:
        if not all(hasattr(dataset, name) for name in ('dataset_root', 'version', 'transforms')):
            raise UserError(f'a {type(getattr(dataset, "dataset", dataset)).__name__} cannot be evaluated: give one data set, not a list or '
                            'a wrapper of data sets')
        found = [DetectionEvaluator(NuScenesDetectionMetric(
            dataset.dataset_root, dataset.version, dataset.poses, dataset.CLASSES, out_dir,
            dataset.eval_version or 'detection_cvpr_2019', dataset.modality), format_only)]
        labels = next((step for step in dataset.transforms if type(step).__name__ == 'LoadBEVSegmentation'), None)
        if labels is not None and not format_only:
            thresholds = (cfg.get('evaluation') or {}).get('thresholds') or THRESHOLDS
            found.append(MapEvaluator(BevMapIoU(labels.classes, labels.grid, thresholds, compat=cfg.get('compat'))))
    return [e for e in found if tasks is None or e.task in tasks]


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, evaluators: Sequence[Evaluator], device: torch.device,
             amp_dtype: Optional[torch.dtype] = None, expected: Optional[int] = None,
             progress: bool = True) -> Dict[str, float]:
    """Run ``model`` over ``loader`` and return the metrics of all ``evaluators``, the same on every rank.

    Args:
        model: the bare model, set to evaluation mode here; ``model(**batch)`` gives list[B] of dicts on the CPU.
        amp_dtype: evaluate under autocast with this type; None is float32.
        expected: number of samples over all ranks; another number seen is an error.

    An evaluator for which no output holds anything (a model without that head) is left out.

    Raises:
        RuntimeError: if samples were left out or seen twice, or the model gave another number of results than samples.
    """
    was_training = model.training
    model.eval()
    seen, used = 0, [0] * len(evaluators)
    for _, raw in _progress(batches(loader, 0, logging.getLogger(LOGGER_NAME)), loader, progress):
        batch = unpack_batch(raw, device)
        with autocast(device, amp_dtype):
            outputs = forward(model, batch)
        if len(outputs) != batch_size(batch):
            raise RuntimeError(f'the model gave {len(outputs)} results for {batch_size(batch)} samples')
        for index, output in enumerate(outputs):
            for number, evaluator in enumerate(evaluators):
                used[number] += bool(evaluator.update(output, batch, index))
        seen += len(outputs)
    model.train(was_training)
    total, *used = _sum_over_ranks([seen, *used])
    if expected is not None and total != expected:
        raise RuntimeError(f'{total} samples were evaluated, the data set has {expected}: metrics would be wrong')
    metrics: Dict[str, float] = {}
    for evaluator, count in zip(evaluators, used):
        if count:
            metrics.update({k: float(v) for k, v in evaluator.compute().items()})
    return metrics


def forward(model: nn.Module, batch: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """The model's evaluation output for an unpacked batch, on the CPU."""
    extra = {'return_loss': False} if takes(model, 'return_loss') else {}
    outputs = model(**batch, **extra)
    if not isinstance(outputs, (list, tuple)):
        raise RuntimeError(f'in evaluation the model must return one dict per sample, got {type(outputs).__name__}')
    return list(outputs)


def _sum_over_ranks(counts: List[int]) -> List[int]:
    if not dist.is_initialized():
        return counts
    total = torch.tensor(counts, dtype=torch.int64, device='cuda' if dist.get_backend() == 'nccl' else 'cpu')
    dist.all_reduce(total)
    return total.tolist()


def _progress(steps: Iterable[Any], loader: Any, show: bool) -> Iterable[Any]:
    if not show or (dist.is_initialized() and dist.get_rank() != 0):
        return steps
    from tqdm import tqdm
    live = sys.stderr.isatty()
    total = len(loader) if hasattr(loader, '__len__') else None
    return tqdm(steps, total=total, file=_Screen(), desc='evaluating', unit='batch', mininterval=0.2 if live else 15.0,
                ascii=not live, dynamic_ncols=live)


class _Screen:
    """stderr for the progress bar; a screen that is a file on a full disk must not end the run."""

    def write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
        except OSError:
            pass

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except OSError:
            pass

    def fileno(self) -> int:
        return sys.stderr.fileno()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


# --------------------------------------------------------------------------------------------------------------------
# presentation

DETECTION_ROWS = (('NDS', 'object/nds'), ('mAP', 'object/map'), ('mATE (m)', 'object/mATE'), ('mASE (1-IoU)', 'object/mASE'),
                  ('mAOE (rad)', 'object/mAOE'), ('mAVE (m/s)', 'object/mAVE'), ('mAAE (1-acc)', 'object/mAAE'))


def table(metrics: Mapping[str, float]) -> str:
    """The summary for people: detection scores and IoU@max per map class, on the native and the 0.5 m reference grid."""
    rows = [(label, metrics[key]) for label, key in DETECTION_ROWS if key in metrics]
    lines = ['3-D detection (nuScenes)', *(f'  {label:<24}{value:>10.4f}' for label, value in rows)] if rows else []
    classes = [k.split('/')[1] for k in metrics if k.startswith('map/') and k.endswith('/iou@max')]
    if classes:
        lines.append(f'{"Map segmentation, IoU@max":<26}{"native":>10}{"0.5 m":>10}')
        for name in classes:
            cells = [metrics.get(f'{prefix}/{name}/iou@max', math.nan) for prefix in ('map', 'map_ref')]
            lines.append(f'  {name:<24}' + ''.join(f'{v:>10.4f}' if math.isfinite(v) else f'{"-":>10}' for v in cells))
    rest = [k for k in metrics if not k.startswith(('map/', 'map_ref/', 'object/'))]
    lines += [f'  {k:<24}{metrics[k]:>10.4f}' for k in rest]
    return '\n'.join(lines)


def write_metrics(metrics: Mapping[str, float], path: str) -> None:
    """The metrics as a flat JSON object (NaN as ``NaN``, which Python's json reads); whole or not at all. A rank-0 step."""
    def work() -> None:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write_json(metrics, path)

    on_rank_zero(work)
