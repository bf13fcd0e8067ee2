"""The nuScenes detection score, by the devkit, on a whole split or any subset of it."""
from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from .gather import gather_results, on_rank_zero
from .nuscenes_results import global_detections, write_results

logger = logging.getLogger('mmdet3d_ext')

Pose = Tuple[np.ndarray, np.ndarray]
RESULTS = 'results_nusc.json'

_ERROR_NAMES = {'trans_err': 'mATE', 'scale_err': 'mASE', 'orient_err': 'mAOE', 'vel_err': 'mAVE', 'attr_err': 'mAAE'}


class NuScenesDetectionMetric:
    """Collects detections sample by sample and evaluates them with the devkit.

    Keys of :meth:`compute`: ``object/nds``, ``object/map`` (mean average precision), ``object/mATE|mASE|mAOE|mAVE|mAAE``,
    ``object/<class>_ap_dist_0.5|1.0|2.0|4.0``, ``object/<class>_trans_err|scale_err|orient_err|vel_err|attr_err``.
    Files in ``out_dir``: ``results_nusc.json``, ``metrics_summary.json``, ``metrics_details.json``.

    The devkit's own functions do everything; only its demand that the results cover exactly one official split is dropped: the
    ground truth is that of the collected samples. On a subset the score is that of the subset.

    Args:
        dataset_root, version: where the tables are.
        poses: token -> (lidar2ego, ego2global), as ``NuScenesDataset.poses``.
        object_classes: detection names in label order.
        out_dir: where the files go.
        eval_version: the devkit's configuration.
        modality: for the results' meta entry.
    """

    def __init__(self, dataset_root: str, version: str, poses: Mapping[str, Pose], object_classes: Sequence[str],
                 out_dir: Union[str, os.PathLike] = '.', eval_version: str = 'detection_cvpr_2019',
                 modality: Optional[Mapping[str, bool]] = None):
        from nuscenes.eval.common.config import config_factory
        self.dataset_root, self.version, self.poses = dataset_root, version, poses
        self.classes = tuple(object_classes)
        self.out_dir = Path(out_dir)
        self.modality = modality
        self.config = config_factory(eval_version)
        for name in self.classes:
            if name not in self.config.class_range:
                raise ValueError(f'NuScenesDetectionMetric: {name!r} is no class of {eval_version} '
                                 f'({", ".join(self.config.class_range)})')
        self.table = ''
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self._detections: Dict[str, Dict[str, np.ndarray]] = {}

    def update(self, token: str, result: Mapping[str, Any]) -> None:
        """Add one sample's ``boxes_3d, scores_3d, labels_3d`` (lidar frame). A second result of a sample is ignored."""
        if token in self._detections:
            return
        if token not in self.poses:
            raise KeyError(f'NuScenesDetectionMetric: the sample {token} is not in the evaluated data set')
        lidar2ego, ego2global = self.poses[token]
        self._detections[token] = global_detections(result, np.asarray(lidar2ego, np.float64),
                                                    np.asarray(ego2global, np.float64), self.classes, self.config.class_range,
                                                    self.config.max_boxes_per_sample)

    def gather(self) -> Optional[Dict[str, Dict[str, np.ndarray]]]:
        """All ranks' samples on rank 0, each once (a collective); ``None`` on the others."""
        return gather_results(self._detections)

    def format(self) -> Optional[Path]:
        """Write ``results_nusc.json`` (a collective); its path on rank 0. For ``v1.0-test`` this is the submission."""
        detections = self.gather()
        return on_rank_zero(lambda: self._write(detections))

    def compute(self) -> Dict[str, float]:
        """Evaluate what all ranks collected; the same scores on every rank (a collective). Keys: see the class."""
        detections = self.gather()
        scores, self.table = on_rank_zero(lambda: self._evaluate(detections))
        return scores

    def _write(self, detections: Mapping[str, Mapping[str, np.ndarray]]) -> Path:
        if not detections:
            raise ValueError('NuScenesDetectionMetric: no sample was evaluated')
        dropped = {token: int(found['dropped']) for token, found in detections.items() if found['dropped']}
        if dropped:
            warnings.warn(f'NuScenesDetectionMetric: {sum(dropped.values())} boxes with non-finite values in '
                          f'{len(dropped)} samples (first: {next(iter(dropped))}) were left out', stacklevel=2)
        return write_results(self.out_dir / RESULTS, detections, self.classes, self.modality)

    def _evaluate(self, detections: Mapping[str, Mapping[str, np.ndarray]]) -> Tuple[Dict[str, float], str]:
        from nuscenes.nuscenes import NuScenes
        path = self._write(detections)
        if not (Path(self.dataset_root) / self.version).is_dir():
            raise FileNotFoundError(f'{Path(self.dataset_root) / self.version} missing: the tables of {self.version} are '
                                    f'needed for the detection score ({path} is written)')
        nusc = NuScenes(version=self.version, dataroot=str(self.dataset_root), verbose=False)
        if not nusc.sample_annotation:
            raise ValueError(f'{self.version} has no annotations to evaluate against; {path} can be submitted to the '
                             f'evaluation server (--format-only)')
        known = {sample['token'] for sample in nusc.sample}
        strangers = [token for token in detections if token not in known]
        if strangers:
            raise ValueError(f'NuScenesDetectionMetric: {len(strangers)} of {len(detections)} samples (first: '
                             f'{strangers[0]}) are not in {Path(self.dataset_root) / self.version}')
        summary, table = evaluate_tokens(nusc, self.config, path, list(detections), self.out_dir)
        return object_scores(summary, self.classes), table


def evaluate_tokens(nusc: Any, config: Any, result_path: Path, tokens: Sequence[str],
                    out_dir: Path) -> Tuple[Dict[str, Any], str]:
    """The devkit's detection evaluation over ``tokens``: (its summary, its printed table). Writes the devkit's JSON files."""
    from nuscenes.eval.common.loaders import add_center_dist, filter_eval_boxes, load_gt_of_sample_tokens, load_prediction
    from nuscenes.eval.detection.data_classes import DetectionBox
    from nuscenes.eval.detection.evaluate import DetectionEval

    class SubsetEval(DetectionEval):
        """The devkit's evaluation with boxes that are loaded for the given samples instead of a split."""

        def __init__(self):
            self.nusc, self.cfg, self.verbose = nusc, config, False
            self.result_path, self.output_dir, self.eval_set = str(result_path), str(out_dir), 'custom'
            self.plot_dir = os.path.join(self.output_dir, 'plots')
            self.pred_boxes, self.meta = load_prediction(self.result_path, config.max_boxes_per_sample, DetectionBox)
            self.gt_boxes = load_gt_of_sample_tokens(nusc, list(tokens), DetectionBox)
            if set(self.pred_boxes.sample_tokens) != set(self.gt_boxes.sample_tokens):
                raise ValueError(f'{result_path} does not hold the evaluated samples')
            for name in ('pred_boxes', 'gt_boxes'):
                boxes = add_center_dist(nusc, getattr(self, name))
                if boxes.all:  # the devkit cannot filter a set without any box
                    boxes = filter_eval_boxes(nusc, boxes, config.class_range)
                setattr(self, name, boxes)
            self.sample_tokens = self.gt_boxes.sample_tokens

    start = time.time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        evaluation = SubsetEval()
        metrics, details = evaluation.evaluate()
    summary = metrics.serialize()
    summary['meta'] = dict(evaluation.meta)
    summary['samples'] = len(tokens)
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, content in (('metrics_summary.json', summary), ('metrics_details.json', details.serialize())):
        with open(out_dir / name, 'w', encoding='utf-8') as file:
            json.dump(content, file, indent=2)
    return summary, summary_table(summary, time.time() - start)


def summary_table(summary: Mapping[str, Any], seconds: float) -> str:
    """The table that the devkit prints, as text."""
    lines = [f'mAP: {summary["mean_ap"]:.4f}']
    lines += [f'{short}: {summary["tp_errors"][name]:.4f}' for name, short in _ERROR_NAMES.items()]
    lines += [f'NDS: {summary["nd_score"]:.4f}', f'Eval time: {seconds:.1f}s', '', 'Per-class results:',
              'Object Class'.ljust(22) + '\t'.join(['AP', 'ATE', 'ASE', 'AOE', 'AVE', 'AAE'])]
    for name, precision in sorted(summary['mean_dist_aps'].items(), key=lambda item: -item[1]):
        errors = summary['label_tp_errors'][name]
        values = [precision] + [errors[key] for key in _ERROR_NAMES]
        lines.append(name.ljust(22) + '\t'.join(f'{value:.3f}' for value in values))
    return '\n'.join(lines)


def object_scores(summary: Mapping[str, Any], classes: Sequence[str]) -> Dict[str, float]:
    """The devkit's summary under the keys of the reference."""
    out: Dict[str, float] = {}
    for name in classes:
        for distance, value in summary['label_aps'][name].items():
            out[f'object/{name}_ap_dist_{float(distance)}'] = _rounded(value)
        for error, value in summary['label_tp_errors'][name].items():
            out[f'object/{name}_{error}'] = _rounded(value)
    for error, short in _ERROR_NAMES.items():
        out[f'object/{short}'] = _rounded(summary['tp_errors'][error])
    out['object/nds'] = float(summary['nd_score'])
    out['object/map'] = float(summary['mean_ap'])
    return out


def _rounded(value: float) -> float:
    """Four decimals, as the reference logs them."""
    return value if math.isnan(value) else float(f'{value:.4f}')
