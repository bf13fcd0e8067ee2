"""Log hooks that do not end a run when the disk is full."""
from __future__ import annotations

import functools
from typing import Any, Callable

from mmcv.runner.hooks import LoggerHook, TensorboardLoggerHook


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
