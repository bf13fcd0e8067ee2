"""Validation after an epoch: detection and map metrics together, in the log as ``Epoch(val)`` and in ``metrics/``."""
from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any, Callable, Dict, Optional

from mmcv.runner import HOOKS, Hook
from mmcv.runner.hooks import LoggerHook

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

    def after_train_epoch(self, runner: Any) -> None:
        epoch = runner.epoch + 1
        if self.start is not None and epoch < self.start:
            return
        if epoch % self.interval == 0 or self.is_last_epoch(runner):
            metrics = self._evaluate(runner)
            if runner.rank == 0:
                self._write(runner, metrics)
                if self.keeper is not None:
                    self.keeper.update(runner, metrics, runner.work_dir)

    def _evaluate(self, runner: Any) -> Dict[str, float]:
        begin = time.monotonic()
        which = self.ema.applied(runner) if self.ema is not None and self.ema.evaluate == 'ema' else contextlib.nullcontext()
        training = runner.model.training
        runner.model.eval()
        with which:
            metrics = self.evaluate()
        runner.model.train(training)
        runner.logger.info('evaluated in %.1f s', time.monotonic() - begin)
        runner.log_buffer.output['eval_iter_num'] = self.batches
        for name, value in metrics.items():
            runner.log_buffer.output[name] = float(value)
        runner.log_buffer.ready = True
        runner.metrics = dict(metrics)
        return metrics

    def _write(self, runner: Any, metrics: Dict[str, float]) -> None:
        try:
            folder = os.path.join(runner.work_dir, 'metrics')
            os.makedirs(folder, exist_ok=True)
            for path in (os.path.join(folder, f'epoch_{runner.epoch + 1}.json'), os.path.join(runner.work_dir, 'metrics.json')):
                with open(path, 'w') as stream:
                    json.dump(metrics, stream, indent=2)
                    stream.write('\n')
        except OSError as error:
            runner.logger.error('ALARM: cannot write the metrics: %s. Training goes on; they are in the log line', error)
