"""Checkpoints while training: written whole or not at all, a bounded number kept, the best one marked."""
from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from typing import Any, Callable, Dict, Mapping, Optional

from mmcv.runner import HOOKS, Hook, master_only

from .. import rank_state
from ..checkpoint import CheckpointWriteError, link_atomic, list_checkpoints, write_atomic
from ..launch import UserError
from ..whole_files import write_json

FILE_NAME = 'epoch_{}.pth'
LESS_IS_BETTER = ('loss', '_err', 'mate', 'mase', 'maoe', 'mave', 'maae')


def lower_is_better(metric: str) -> bool:
    """Whether a metric is an error: losses and the devkit's true-positive errors."""
    return any(part in metric.lower() for part in LESS_IS_BETTER)


@HOOKS.register_module()
class SafeCheckpointHook(Hook):
    """Saves ``epoch_<N>.pth`` every ``interval`` epochs and after the last one, and ``latest.pth`` pointing to the newest file.

    Within an epoch ``epoch_<N>_iter_<M>.pth`` (N epochs and M iterations are done) is written when a signal asks the run to stop,
    and as ``every_iters`` and ``every_minutes`` say. It also holds every rank's random numbers and BatchNorm statistics. The
    newest two are kept until the epoch's own checkpoint is safe.

    If a file cannot be written (full disk), training goes on: an alarm is logged each time, older files stay, and the last
    state is tried once more at the end of the run.

    Args:
        interval: epochs between checkpoints.
        max_keep_ckpts: newest files that are kept; -1 or null keeps all. Older ones are removed only after a newer one is safe.
        save_optimizer: with it a run can be resumed.
        out_dir, filename_tmpl: mmcv's, refused: files that lie elsewhere or are called otherwise would not be found to resume from.
        create_symlink: whether to make ``latest.pth``.
        save_last: also save after the last epoch when ``interval`` does not divide it.
        every_iters: iterations between checkpoints within an epoch (after the group of accumulated steps is complete).
        every_minutes: minutes between checkpoints, by rank 0's clock; those of epochs count.
    """

    def __init__(self, interval: int = 1, max_keep_ckpts: Optional[int] = -1, save_optimizer: bool = True,
                 out_dir: Optional[str] = None, create_symlink: bool = True, save_last: bool = True, filename_tmpl: str = FILE_NAME,
                 every_iters: Optional[int] = None, every_minutes: Optional[float] = None):
        if not isinstance(interval, int) or isinstance(interval, bool) or interval == 0:
            raise ValueError(f'checkpoint_config.interval must be a whole number of epochs (-1: only the last), '
                             f'got {interval!r}')
        max_keep_ckpts = -1 if max_keep_ckpts is None else max_keep_ckpts
        if not isinstance(max_keep_ckpts, int) or isinstance(max_keep_ckpts, bool):
            raise ValueError(f'checkpoint_config.max_keep_ckpts must be a whole number (-1: all), got {max_keep_ckpts!r}')
        if out_dir is not None:
            raise ValueError(f'checkpoint_config.out_dir is {out_dir!r}: checkpoints lie in the run folder, where resuming, restarts and '
                             'the tools look for them; leave it out, and put the run folder there (--run-dir)')
        if filename_tmpl != FILE_NAME:
            raise ValueError(f'checkpoint_config.filename_tmpl is {filename_tmpl!r}: by the name {FILE_NAME} resuming, the removal of old '
                             'files and the tools find checkpoints; leave it out')
        self.interval, self.max_keep_ckpts, self.save_optimizer = interval, max_keep_ckpts, save_optimizer
        self.create_symlink, self.save_last = create_symlink, save_last
        self.out_dir: Optional[str] = None  # the run folder, once the run begins
        if every_iters is not None and (not isinstance(every_iters, int) or isinstance(every_iters, bool) or every_iters < 1):
            raise ValueError(f'checkpoint_config.every_iters must be a whole number >= 1 or null, got {every_iters!r}')
        if every_minutes is not None and (isinstance(every_minutes, bool) or not isinstance(every_minutes, (int, float))
                                          or not every_minutes > 0):
            raise ValueError(f'checkpoint_config.every_minutes must be a number > 0 or null, got {every_minutes!r}')
        self.every_iters, self.every_minutes = every_iters, every_minutes
        self._saved_at, self._turn = time.monotonic(), 0

    def before_run(self, runner: Any) -> None:
        runner.saver = self
        self._saved_at, self._turn = time.monotonic(), runner.iter // (self.every_iters or 1)
        self.out_dir = runner.work_dir
        runner.logger.info('Checkpoints will be saved to %s by HardDiskBackend.', self.out_dir)

    def saves_epoch(self, runner: Any) -> bool:
        """Whether the epoch that ends gets its checkpoint."""
        return self.every_n_epochs(runner, self.interval) or (self.save_last and self.is_last_epoch(runner))

    def after_train_epoch(self, runner: Any) -> None:
        if self.saves_epoch(runner):
            runner.logger.info('Saving checkpoint at %d epochs', runner.epoch + 1)
            self._turn = runner.iter // (self.every_iters or 1)
            self._save(runner)

    @master_only
    def _save(self, runner: Any) -> None:
        if self._write(runner, lambda: runner.save_checkpoint(self.out_dir, FILE_NAME, self.save_optimizer,
                                                              create_symlink=self.create_symlink)):
            files = [path for _, path in list_checkpoints(self.out_dir) if path != runner.last_checkpoint]
            within = [path for path in files if '_iter_' in os.path.basename(path)]
            whole = [path for path in files if path not in within]
            for old in within + (whole[:1 - self.max_keep_ckpts or None] if self.max_keep_ckpts > 0 else []):
                _remove(old)

    def _write(self, runner: Any, write: Callable[[], str]) -> bool:
        self._saved_at = time.monotonic()
        try:
            path = write()
        except CheckpointWriteError as error:
            older = list_checkpoints(self.out_dir)
            runner.save_failed = str(error)
            runner.logger.error('ALARM: %s. Training goes on; the newest checkpoint is %s. Free some space: the next one '
                                'is tried after the next epoch', error, older[-1][1] if older else 'none')
            return False
        runner.save_failed = None
        runner.last_checkpoint = path
        if runner.meta is not None:
            runner.meta.setdefault('hook_msgs', {})['last_ckpt'] = path
        return True

    # ---- within an epoch ---------------------------------------------------------------------------------------------
    def is_time(self) -> bool:
        """Whether ``every_minutes`` have passed."""
        return self.every_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_minutes

    def is_turn(self, iteration: int) -> bool:
        """Whether a checkpoint is due by ``every_iters``; a turn within a group of accumulated steps waits for its end."""
        return self.every_iters is not None and iteration // self.every_iters > self._turn

    def save_step(self, runner: Any, done: int) -> Optional[str]:
        """Write the state after ``done`` iterations of the current epoch. A collective.

        Returns:
            the path on rank 0; None on others, or if it could not be written.
        """
        states = rank_state.gather(getattr(runner.model, 'module', runner.model), runner.stateful.get('ema_state_dict'))
        self._turn = runner.iter // self.every_iters if self.every_iters else 0
        if states is None:
            return None
        path = os.path.join(self.out_dir, f'epoch_{runner.epoch}_iter_{done}.pth')

        def write() -> str:
            write_atomic(dict(runner.checkpoint_content(done=done), rank_states=states), path)
            if self.create_symlink:
                link_atomic(path, os.path.join(self.out_dir, 'latest.pth'))
            return path

        if not self._write(runner, write):
            return None
        runner.logger.info('Saved %s', path)
        for old in [path for _, path in list_checkpoints(self.out_dir) if '_iter_' in os.path.basename(path)][:-2]:
            _remove(old)
        return path

    @master_only
    def after_run(self, runner: Any) -> None:
        if runner.save_failed is None or runner.epoch < 1 or runner.stopped is not None:
            return
        runner._epoch -= 1  # the state is that of the epoch that ended
        try:
            self._save(runner)
        finally:
            runner._epoch += 1
        if runner.save_failed is None:
            runner.logger.info('the last checkpoint is written now')


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


class BestKeeper:
    """Keeps one ``best_<metric>_epoch_<N>.pth``; the score so far is in ``best.json``, so that a resumed run knows it.

    Args:
        metric: key of the metrics, for example ``object/nds``.
        rule: 'greater', 'less', or None to tell by the name.
    """

    def __init__(self, metric: str, rule: Optional[str] = None):
        if rule not in (None, 'greater', 'less'):
            raise ValueError(f'evaluation.rule must be "greater" or "less", got {rule!r}')
        self.metric = metric
        self.less = rule == 'less' if rule else lower_is_better(metric)

    def update(self, runner: Any, metrics: Mapping[str, float], folder: str) -> None:
        """Mark the epoch that just ended if it is the best; rank 0 only. A metric that is absent or NaN is reported."""
        if self.metric not in metrics:
            raise UserError(f'key evaluation.save_best: there is no metric {self.metric!r}; there are {sorted(metrics)[:20]}')
        score = float(metrics[self.metric])
        if not math.isfinite(score):
            runner.logger.warning('%s is %s at epoch %d, the best checkpoint stays', self.metric, score, runner.epoch + 1)
            return
        record_path = os.path.join(folder, 'best.json')
        record = _read_json(record_path)
        before = record.get('score') if record.get('metric') == self.metric else None
        if before is not None and not (score < before if self.less else score > before):
            return
        epoch = runner.epoch + 1
        name = f'best_{re.sub(r"[^A-Za-z0-9@.-]+", "_", self.metric)}_epoch_{epoch}.pth'
        path = os.path.join(folder, name)
        try:
            source = os.path.join(folder, f'epoch_{epoch}.pth')
            if os.path.isfile(source) and getattr(runner, 'last_checkpoint', None) == source:
                link_or_copy(source, path)
            else:
                write_atomic(runner.checkpoint_content(), path)
            write_json({'metric': self.metric, 'score': score, 'epoch': epoch, 'file': name}, record_path)
        except (OSError, CheckpointWriteError) as error:
            runner.logger.error('ALARM: cannot keep the best checkpoint %s: %s. The earlier one stays', name, error)
            return
        old = record.get('file')
        if old and old != name and os.path.basename(old) == old:
            _remove(os.path.join(folder, old))
        if runner.meta is not None:
            runner.meta.setdefault('hook_msgs', {}).update(best_score=score, best_ckpt=path)
        runner.logger.info('Now best checkpoint is saved as %s.', name)
        runner.logger.info('Best %s is %.4f at %d epoch.', self.metric, score, epoch)


def link_or_copy(source: str, path: str) -> None:
    """Keep a checkpoint under another name, whole or not at all; a copy where the file system has no links."""
    temporary = f'{path}.tmp-{os.getpid()}'
    try:
        os.link(source, temporary)
    except OSError:
        try:
            shutil.copyfile(source, temporary)
        except OSError:
            _remove(temporary)
            raise
    os.replace(temporary, path)


def _read_json(path: str) -> Dict[str, Any]:
    try:
        with open(path) as stream:
            return json.load(stream)
    except (OSError, ValueError):
        return {}
