"""What log lines hold, and log hooks that do not end a run when the disk is full."""
from __future__ import annotations

import functools
from typing import Any, Callable

import numpy as np
from mmcv.runner import LogBuffer
from mmcv.runner.hooks import LoggerHook, TensorboardLoggerHook

SKIPPED = 'nonfinite_steps'


class FiniteLogBuffer(LogBuffer):
    """mmcv's buffer, whose means are over the finite values: one skipped step must not hide what the others of its interval did.

    A line whose interval had such steps says how many, as ``nonfinite_steps``: those with a non-finite loss, or as many as
    :meth:`skipped` was told of (a gradient can be non-finite although the losses are finite). A value that was never finite in
    the interval stays NaN.
    """

    def skipped(self, steps: int) -> None:
        """Note for each iteration how many steps the guard skipped in it (0 or 1)."""
        super().update({SKIPPED: steps})

    def average(self, n: int = 0) -> None:
        """Average the latest ``n`` values, or all."""
        assert n >= 0
        worst = 0
        for key, history in self.val_history.items():
            values = np.array(history[-n:], dtype=np.float64)
            counts = np.array(self.n_history[key][-n:], dtype=np.float64)
            if key == SKIPPED:
                worst = max(worst, int(values.sum()))
                continue
            good = np.isfinite(values)
            if key == 'loss':  # the sum of all; statistics may have no value in a step without harm
                worst = max(worst, int((~good).sum()))
            self.output[key] = float((values[good] * counts[good]).sum() / counts[good].sum()) if good.any() else float('nan')
        if worst:
            self.output[SKIPPED] = worst
        else:
            self.output.pop(SKIPPED, None)
        self.ready = True


def survive_full_disk(runner: Any) -> None:
    """Let the runner's registered logger hooks report an ``OSError`` and go on."""
    for hook in runner.hooks:
        if isinstance(hook, LoggerHook):
            hook.log = _tolerant(hook, hook.log, runner)
            hook.after_run = _tolerant(hook, hook.after_run, runner)


def _tolerant(hook: LoggerHook, method: Callable[[Any], Any], runner: Any) -> Callable[[Any], Any]:
    @functools.wraps(method)
    def call(_: Any) -> Any:
        try:
            return method(runner)
        except OSError as error:
            runner.logger.error('ALARM: %s cannot write its log: %s. Training goes on', type(hook).__name__, error)
            if isinstance(hook, TensorboardLoggerHook):
                _reopen(hook)  # its writing thread has ended with the error
            return None

    return call


def _reopen(hook: TensorboardLoggerHook) -> None:
    from torch.utils.tensorboard import SummaryWriter
    try:
        hook.writer = SummaryWriter(hook.log_dir)
    except OSError:
        pass  # tried again at the next line
