"""Validation after an epoch: detection and map metrics together, in the log as ``Epoch(val)`` and in ``metrics/``."""
from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Callable, Dict, Optional

from mmcv.runner import HOOKS, Hook
from mmcv.runner.hooks import LoggerHook

from ...metrics import on_rank_zero
from ..whole_files import write_json
from .checkpoint import BestKeeper


@HOOKS.register_module()
class EvaluationHook(Hook):
    """Calls ``evaluate()`` every ``interval`` epochs (and after the last one).

    Args:
        evaluate: evaluates the model as it stands on all ranks and returns the metrics, the same on every rank.
        batches: number of batches per rank, shown in the log line.
        interval: epochs between evaluations.
        start: first epoch (from 1) that is evaluated.
        save_best: metric whose best epoch is kept as ``best_<metric>_epoch_<N>.pth``; rule: see :class:`BestKeeper`.
        before_train: also evaluate before the first step (epoch 0 in the log).
        ema: hook with ``applied(runner)``; its weights are evaluated if it says so.
    """

    def __init__(self, evaluate: Callable[[], Dict[str, float]], batches: int, interval: int = 1, start: Optional[int] = None,
                 save_best: Optional[str] = None, rule: Optional[str] = None, before_train: bool = False, ema: Any = None):
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise ValueError(f'evaluation.interval must be a whole number of epochs >= 1, got {interval!r}')
        if start is not None and (not isinstance(start, int) or isinstance(start, bool)):
            raise ValueError(f'evaluation.start must be a whole number of epochs or null, got {start!r}')
        self.evaluate, self.batches, self.interval, self.start = evaluate, batches, interval, start
        self.keeper = BestKeeper(save_best, rule) if save_best else None
        self.before_train, self.ema = before_train, ema

    def before_train_epoch(self, runner: Any) -> None:
        if not self.before_train or runner.iter > 0:
            return
        runner.mode = 'val'  # the log then says epoch 0
        self._evaluate(runner)
        for hook in runner.hooks:
            if isinstance(hook, LoggerHook):
                hook.log(runner)
        runner.log_buffer.clear()
        runner.mode = 'train'

    def before_run(self, runner: Any) -> None:
        """Evaluate the last epoch of a run that was interrupted after its checkpoint, before its metrics."""
        if runner.resumed_from is None or runner.begins_within or runner.epoch < 1:
            return
        runner._epoch -= 1  # the state is that of the epoch that ended
        try:
            if self._is_due(runner) and os.path.dirname(os.path.abspath(runner.resumed_from)) == runner.work_dir and on_rank_zero(
                    lambda: not os.path.exists(_metrics_file(runner))):
                runner.logger.info('epoch %d was not evaluated before the run was interrupted: that comes first',
                                   runner.epoch + 1)
                self._evaluate_and_keep(runner)
        finally:
            runner._epoch += 1

    def after_train_epoch(self, runner: Any) -> None:
        if self._is_due(runner):
            runner.stop_before_evaluation()
            self._evaluate_and_keep(runner)

    def _is_due(self, runner: Any) -> bool:
        epoch = runner.epoch + 1
        if self.start is not None and epoch < self.start:
            return False
        return epoch % self.interval == 0 or self.is_last_epoch(runner)

    def _evaluate_and_keep(self, runner: Any) -> None:
        metrics = self._evaluate(runner)
        if runner.rank == 0:
            self._write(runner, metrics, os.path.join(runner.work_dir, 'metrics.json'))
            if self.keeper is not None:
                self.keeper.update(runner, metrics, runner.work_dir)
            # Last: what says that this epoch needs no other evaluation.
            self._write(runner, metrics, _metrics_file(runner))

    def _evaluate(self, runner: Any) -> Dict[str, float]:
        begin = time.monotonic()
        which = self.ema.applied(runner) if self.ema is not None and self.ema.evaluate == 'ema' else contextlib.nullcontext()
        training = runner.model.training
        runner.model.eval()
        with runner.ends_at_once(), which:
            metrics = self.evaluate()
        runner.model.train(training)
        runner.logger.info('evaluated in %.1f s', time.monotonic() - begin)
        runner.log_buffer.output['eval_iter_num'] = self.batches
        for name, value in metrics.items():
            runner.log_buffer.output[name] = float(value)
        runner.log_buffer.ready = True
        runner.metrics = dict(metrics)
        return metrics

    def _write(self, runner: Any, metrics: Dict[str, float], path: str) -> None:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_json(metrics, path)
        except OSError as error:
            runner.logger.error('ALARM: cannot write the metrics: %s. Training goes on; they are in the log line', error)


def _metrics_file(runner: Any) -> str:
    return os.path.join(runner.work_dir, 'metrics', f'epoch_{runner.epoch + 1}.json')
