"""Evaluating a checkpoint: what ``tools/test.py`` does after it has parsed its words."""
from __future__ import annotations

import logging
import os
import pickle
import shutil
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional

import torch

from ..errors import text_of
from ..metrics import on_rank_zero
from . import run_dir as run_dirs
from .amp import choose_kernels, plan_amp
from .building import check_whole, running
from .checkpoint import load_weights, read_checkpoint
from .evaluate import TASKS, ResultCollector, build_evaluators, evaluate, table, write_metrics
from .inference import FoldError, fold_model
from .launch import UserError, attach_rank_log, current
from .map_labels import check_map_labels, check_object_labels
from .seeding import derive, seed_all
from .train import make_loader, make_logger, make_model

UNTRAINED = 'none'  # instead of a checkpoint: the model with its initial weights


@dataclass
class Options:
    """What the command line adds to the configuration (see ``tools/test.py --help``)."""

    checkpoint: str
    eval: Optional[List[str]] = None
    out: Optional[str] = None
    out_dir: Optional[str] = None
    split: str = 'test'
    weights: str = 'auto'
    format_only: bool = False
    fuse_conv_bn: bool = False
    amp: bool = False
    allow_unsafe_checkpoint: bool = False
    allow_partial_checkpoint: bool = False
    checkpoint_origin: str = 'auto'


def test(cfg: Mapping[str, Any], options: Options, device: torch.device) -> Dict[str, float]:
    """Evaluate a checkpoint on all ranks; writes ``metrics.json`` and the devkit's files to the output folder.

    Returns:
        the metrics, the same on every rank (empty with ``format_only``).
    """
    tasks = _tasks(options.eval)
    if options.out and not options.out.endswith(('.pkl', '.pickle', '.json')):
        raise UserError(f'--out must end with .pkl (boxes per sample) or .json (nuScenes results), got {options.out!r}')
    if options.out and options.out.endswith('.json') and tasks is not None and 'object' not in tasks:
        raise UserError(f'--out {options.out}: nuScenes results hold detections, which --eval {" ".join(options.eval)} leaves out')
    dataset_cfg = (cfg.get('data') or {}).get(options.split) or (cfg.get('data') or {}).get('val')
    if not dataset_cfg:
        raise UserError(f'the configuration has no data.{options.split}')
    check_whole(cfg, 'seed', 0)
    launch = current()
    folder = os.path.abspath(options.out_dir or _default_folder(options.checkpoint))
    stamp = time.strftime('%Y%m%d_%H%M%S')
    on_rank_zero(lambda: _make_writable(folder, options.out))
    logger = make_logger(folder, stamp, launch, cfg.get('log_level'))
    attach_rank_log(folder, stamp)
    for note in launch.notes:
        logger.warning(note)

    choose_kernels(cfg)  # as in the evaluations of a training
    seed_all(derive(int(cfg.get('seed') or 0), 0))
    model = make_model(cfg)
    if options.checkpoint == UNTRAINED:
        logger.warning('no checkpoint: the model is evaluated with its initial weights')
    else:
        content = read_checkpoint(options.checkpoint, options.allow_unsafe_checkpoint)
        load_weights(model, options.checkpoint, options.weights, complete=True, allow_partial=options.allow_partial_checkpoint,
                     logger=logger, content=content, origin=options.checkpoint_origin)
        mine = run_dirs.build_meta(cfg, 0, launch.world_size)
        run_dirs.warn_about_origin(content.get('meta') or {}, mine, options.checkpoint, logger)
        del content
    model.to(device)
    loader = make_loader(cfg, dataset_cfg, int(cfg.get('seed') or 0), train=False, key=f'data.{options.split}')
    check_object_labels(model, loader.dataset)
    check_map_labels(model, loader.dataset, evaluation=True)
    if options.fuse_conv_bn and len(loader.dataset):
        model.eval()
        try:
            with running(model):
                logger.info('%s', fold_model(model, loader.collate_fn([loader.dataset[0]]), device))
        except FoldError as error:
            raise UserError(f'--fuse-conv-bn: {error}') from error
    evaluators = build_evaluators(cfg, loader.dataset, folder, tasks, options.format_only)
    collector = ResultCollector() if options.out and options.out.endswith(('.pkl', '.pickle')) else None
    amp_dtype = plan_amp(cfg, device, logger).dtype if options.amp else None
    logger.info('evaluating %d samples on %d process(es), device %s', len(loader.dataset), launch.world_size, device)
    with running(model):
        metrics = evaluate(model, loader, evaluators + ([collector] if collector else []), device, amp_dtype,
                           len(loader.dataset))
    if not metrics and not options.format_only and not collector:
        raise UserError(f'nothing was evaluated: the model\'s output holds nothing for --eval {" ".join(options.eval or [])}')
    _report(logger, metrics, evaluators, folder, options)
    if options.out:
        _write_results(options.out, collector, evaluators, logger)
    return metrics


def _make_writable(folder: str, out: Optional[str]) -> None:
    """Make the folders of the results before hours of evaluation, not after."""
    for path in [folder] + ([os.path.dirname(os.path.abspath(out))] if out else []):
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise UserError(f'cannot write results there: {text_of(error)}') from error
        if not os.access(path, os.W_OK):
            raise UserError(f'cannot write results there: {path}: no permission')


def _tasks(names: Optional[List[str]]) -> Optional[List[str]]:
    if not names:
        return None
    unknown = [n for n in names if n not in TASKS]
    if unknown:
        raise UserError(f'--eval: unknown {", ".join(map(repr, unknown))}; it takes bbox (3-D detection) and map '
                        '(segmentation)')
    return [TASKS[n] for n in names]


def _default_folder(checkpoint: str) -> str:
    if checkpoint == UNTRAINED:
        return os.path.join('runs', 'untrained')
    stem = os.path.splitext(os.path.basename(checkpoint))[0]
    return os.path.join(os.path.dirname(checkpoint) or '.', f'eval_{stem}')


def _report(logger: logging.Logger, metrics: Dict[str, float], evaluators: List[Any], folder: str, options: Options) -> None:
    for evaluator in evaluators:
        text = evaluator.table()
        if text:
            logger.info('%s', text)
    if options.format_only:
        return
    path = os.path.join(folder, 'metrics.json')
    write_metrics(metrics, path)
    if current().is_master:
        print(f'\n{table(metrics)}\n\nmetrics: {path}', flush=True)


def _write_results(out: str, collector: Optional[ResultCollector], evaluators: List[Any], logger: logging.Logger) -> None:
    def work() -> None:
        os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
        if collector is not None:
            with open(out, 'wb') as stream:
                pickle.dump([dict(result, token=token) for token, result in collector.gathered.items()], stream)
        else:
            source = next((e.path for e in evaluators if getattr(e, 'path', None)), None)  # not what an earlier evaluation left
            if source is None:
                raise UserError(f'--out {out}: the model gave no detections to write')
            if os.path.realpath(source) != os.path.realpath(out):
                shutil.copyfile(source, out)
        logger.info('writing results to %s', out)

    on_rank_zero(work)


