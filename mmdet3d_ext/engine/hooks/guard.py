"""What happens around a step that is not finite: nothing of it stays, it is explained, and after too many the run goes back."""
from __future__ import annotations

import math
import os
import statistics
from collections import deque
from typing import Any, Deque, Dict, List, Mapping, Optional, Tuple

import torch

from ...datasets.epoch_state import random_state, set_random_state
from ...metrics import on_rank_zero
from ..checkpoint import CheckpointError, CheckpointWriteError, list_checkpoints, read_checkpoint
from ..diagnosis import Finding, trace
from ..parallel import sample_tokens, unpack_batch
from ..rank_state import named_statistics
from ..replay import write_batch
from .checkpoint import link_or_copy

ACTIONS = ('stop', 'rollback')
KEPT = 'before_spike_'  # in front of the name of a checkpoint that is kept


class NonFiniteError(FloatingPointError):
    """Too many steps in a row without a finite gradient."""

    exit_code = 4  # a supervisor does not start such a run again: it would come to the same step


class RollBack(Exception):
    """All ranks go back to an earlier checkpoint; :meth:`carry_out` does it."""

    def __init__(self, guard: 'Guard', why: str):
        super().__init__(why)
        self.guard, self.why = guard, why

    def carry_out(self, runner: Any) -> None:
        self.guard.roll_back(runner, self.why)


class Guard:
    """Keeps a run alive and its weights finite; driven by :class:`.optimizer.GuardedOptimizerHook`.

    Args:
        max_consecutive: non-finite steps in a row (the loss scaler's search does not count) after which ``action`` follows.
        action: ``'stop'`` with an error, or ``'rollback'`` to the last checkpoint before these steps, with the learning rate
            times ``lr_factor``.
        max_rollbacks: after so many in a run, stop.
        save_batches: how many non-finite batches per rank are kept in ``<run>/bad_batches`` for ``tools/replay.py``.
        spike: ``{factor: 5.0, window: 200, keep: 2}``: a loss above ``factor`` times the median of the last ``window`` steps
            raises an alarm, and the newest checkpoint before it is kept as ``before_spike_<name>`` (at most ``keep`` of them).
            None: no watch.
    """

    def __init__(self, max_consecutive: int = 50, action: str = 'stop', lr_factor: float = 0.5, max_rollbacks: int = 3,
                 save_batches: int = 3, spike: Optional[Mapping[str, Any]] = None):
        _whole('max_consecutive', max_consecutive, 1), _whole('max_rollbacks', max_rollbacks, 0)
        _whole('save_batches', save_batches, 0)
        if action not in ACTIONS:
            raise ValueError(f'guard.action must be one of {ACTIONS}, got {action!r}')
        if isinstance(lr_factor, bool) or not isinstance(lr_factor, (int, float)) or not 0 < lr_factor <= 1:
            raise ValueError(f'guard.lr_factor must be a number in (0, 1], got {lr_factor!r}')
        self.max_consecutive, self.action, self.lr_factor = max_consecutive, action, float(lr_factor)
        self.max_rollbacks, self.save_batches = max_rollbacks, save_batches
        self.spike = _spike_settings(spike)
        self.lr_scale, self.rollbacks, self.saved, self._in_spike = 1.0, 0, 0, False
        self._losses: Deque[float] = deque(maxlen=self.spike['window'] if self.spike else 1)
        self._steps: List[Tuple[Dict[str, Any], Any]] = []  # random numbers before each step of the group, and its batch
        self._own: List[torch.Tensor] = []
        self._kept: List[torch.Tensor] = []

    # ---- nothing of a bad step stays -----------------------------------------------------------------------------------
    def before_run(self, model: torch.nn.Module) -> None:
        self._own = list(named_statistics(model).values())
        self._kept = [tensor.detach().clone() for tensor in self._own]

    def before_step(self, batch: Any, begins_group: bool) -> None:
        """Remember what a step begins with beside the weights: BatchNorm statistics (of its group), random numbers, the batch."""
        if begins_group:
            self._steps.clear()
            if self._own:
                torch._foreach_copy_(self._kept, self._own)
        self._steps.append((random_state(cuda=True), batch))

    def after_group(self) -> None:
        """Let go of the group's batches."""
        self._steps.clear()

    def statistics_size(self) -> List[torch.Tensor]:
        """The largest value in the BatchNorm statistics as a scalar on the device ([] without such layers)."""
        return [torch.stack(torch._foreach_norm(self._own, float('inf'))).max()] if self._own else []

    def undo_statistics(self) -> None:
        """Statistics as before the step's group."""
        if self._own:
            torch._foreach_copy_(self._own, self._kept)

    # ---- it is explained -----------------------------------------------------------------------------------------------
    def explain(self, runner: Any, place: str, losses: bool, thorough: bool) -> None:
        """Name what is not finite on this rank: losses, samples, module (to stderr and the rank's log file).

        Args:
            losses: whether the losses of the group's last step are to blame; otherwise it can be any step's gradient.
            thorough: compute the steps once more with a look at every module, and keep the batch. All ranks must agree on it.
        """
        local = runner.outputs.get('local_values')
        values = [] if local is None else local.tolist()
        names = [n for n, v in zip(runner.outputs['log_names'], values, strict=False) if not math.isfinite(v) and n != 'loss']
        own = losses and any(not math.isfinite(v) for v in values)
        finding, (random, batch) = None, self._steps[-1]
        if thorough and hasattr(runner.model, 'losses_alone'):
            steps = self._steps[-1:] if losses else self._steps
            findings = [self._trace(runner, *step, backward=not losses) for step in steps]  # all of them, on all ranks alike
            found = [number for number, one in enumerate(findings) if one.found]
            number = found[0] if found else len(steps) - 1
            finding, (random, batch) = findings[number], steps[number]
        if not own and (finding is None or not finding.found):
            return
        tokens = sample_tokens(batch)
        runner.logger.error('%s, rank %d: non-finite %s for samples %s%s', place, runner.rank,
                            ', '.join(names) or ('loss' if own else 'gradient'), tokens,
                            f': {finding.text()}' if finding is not None else '')
        if finding is not None and self.saved < self.save_batches:
            self._save_batch(runner, finding, random, batch, place, tokens)

    def _trace(self, runner: Any, random: Mapping[str, Any], batch: Any, backward: bool) -> Finding:
        now, after = random_state(cuda=True), [tensor.clone() for tensor in self._own]
        set_random_state(random)
        try:
            return trace(runner.model.module, lambda: runner.model.losses_alone(batch),
                         unpack_batch(batch, torch.device('cpu')), sample_tokens(batch), backward)
        finally:
            set_random_state(now)
            for tensor, value in zip(self._own, after):
                tensor.copy_(value)

    def _save_batch(self, runner: Any, finding: Finding, random: Mapping[str, Any], batch: Any, place: str,
                    tokens: List[str]) -> None:
        path = os.path.join(runner.work_dir, 'bad_batches',
                            f'epoch_{runner.epoch + 1}_iter_{runner.inner_iter + 1}_rank_{runner.rank}.pth')
        try:
            write_batch(path, runner.model, batch, random, runner.meta or {}, finding, place, tokens)
            self.saved += 1
            runner.logger.error('the batch, the weights and the random numbers are in %s: see tools/replay.py', path)
        except (OSError, CheckpointWriteError) as error:
            runner.logger.error('ALARM: cannot keep the batch for replay: %s', error)

    # ---- after too many of them ----------------------------------------------------------------------------------------
    def give_up(self, what: str, consecutive: int) -> None:
        """Raises:
            NonFiniteError: with action 'stop'. RollBack: otherwise, for the runner.
        """
        text = f'{what} in {consecutive} steps in a row'
        if self.action == 'rollback':
            raise RollBack(self, text)
        raise NonFiniteError(f'{text}; the weights are those of the last finite step. Lower the learning rate, or look at the '
                             'samples named above; guard.action: rollback goes back to the last checkpoint by itself')

    def roll_back(self, runner: Any, why: str) -> None:
        """Continue from the last checkpoint that was written before the non-finite steps, with a lower learning rate.

        Raises:
            NonFiniteError: if there is none, or this happened ``max_rollbacks`` times.
        """
        path = on_rank_zero(lambda: self._last_good(runner))
        if path is None or self.rollbacks >= self.max_rollbacks:
            reason = 'no checkpoint from before that can be read' if path is None else f'already {self.rollbacks} rollbacks'
            raise NonFiniteError(f'{why}, and {reason} (guard.max_rollbacks {self.max_rollbacks}): the run stops. Lower the '
                                 'learning rate, or look at the samples named above')
        scale, rollbacks = self.lr_scale * self.lr_factor, self.rollbacks + 1
        runner.resume(path, loader=runner.data_loader)
        factor = scale / self.lr_scale  # of the checkpoint's own scale
        self.lr_scale, self.rollbacks = scale, rollbacks
        for group in runner.optimizer.param_groups:
            for key in ('lr', 'initial_lr'):
                if key in group:
                    group[key] *= factor
        for hook in runner.hooks:
            if isinstance(getattr(hook, 'base_lr', None), list):  # mmcv's schedules
                hook.base_lr = [group['initial_lr'] for group in runner.optimizer.param_groups]
        runner.logger.error('ALARM: %s: back to %s with the learning rate times %g (now %g of the configured one; rollback %d of '
                            'at most %d)', why, path, self.lr_factor, scale, rollbacks, self.max_rollbacks)

    def _last_good(self, runner: Any) -> Optional[str]:
        """The newest checkpoint that reads whole, holds finite weights, and was not written among non-finite steps."""
        folder = runner.saver.out_dir if runner.saver is not None else runner.work_dir
        for _, path in reversed(list_checkpoints(folder)):
            try:
                content = read_checkpoint(path)
            except CheckpointError:
                continue
            weights = content['state_dict'].values()
            if (content.get('optimizer_hook') or {}).get('consecutive') == 0 and 'optimizer' in content and all(
                    bool(torch.isfinite(value).all()) for value in weights if value.is_floating_point()):
                return path
        return None

    # ---- spikes --------------------------------------------------------------------------------------------------------
    def watch(self, runner: Any, place: str, tokens: List[str]) -> None:
        """Compare the loss of a good step with the median of those before it."""
        loss = runner.outputs['log_vars'].get('loss')
        if self.spike is None or loss is None:
            return
        if len(self._losses) >= min(self.spike['window'], 50):
            median = statistics.median(self._losses)
            limit = self.spike['factor'] * median
            if median > 0 and loss > limit and not self._in_spike:
                self._in_spike = True
                kept = self._keep_checkpoint(runner) if runner.rank == 0 else None
                runner.logger.warning('ALARM: %s: loss %.4g is %.1f times the median of the last %d steps (%.4g); %s', place, loss,
                                      loss / median, len(self._losses), median,
                                      f'the checkpoint before it is kept as {kept}' if kept else 'there is no checkpoint yet')
                if float(runner.outputs['local_values'][-1]) > limit:
                    runner.logger.error('%s, rank %d: the loss is high for samples %s', place, runner.rank, tokens)
            elif loss <= limit:
                self._in_spike = False
        self._losses.append(loss)

    def _keep_checkpoint(self, runner: Any) -> Optional[str]:
        folder = runner.saver.out_dir if runner.saver is not None else runner.work_dir
        found = list_checkpoints(folder)
        if not found:
            return None
        path = os.path.join(folder, KEPT + os.path.basename(found[-1][1]))
        try:
            if not os.path.exists(path):
                link_or_copy(found[-1][1], path)
            kept = list_checkpoints(folder, KEPT)
            for _, old in kept[:-self.spike['keep']]:
                os.unlink(old)
        except OSError as error:
            runner.logger.error('ALARM: cannot keep %s: %s', found[-1][1], error)
            return None
        return path

    # ---- state -----------------------------------------------------------------------------------------------------------
    def state_dict(self) -> Dict[str, Any]:
        return {'lr_scale': self.lr_scale, 'rollbacks': self.rollbacks, 'losses': list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.lr_scale, self.rollbacks = float(state['lr_scale']), int(state['rollbacks'])
        self._losses.clear()
        self._losses.extend(state.get('losses') or [])
        self._in_spike = False


def _spike_settings(spike: Optional[Mapping[str, Any]]) -> Optional[Dict[str, Any]]:
    if spike is None:
        return None
    settings = {'factor': 5.0, 'window': 200, 'keep': 2}
    unknown = set(spike) - set(settings)
    if unknown:
        raise ValueError(f'guard.spike: unknown keys {sorted(unknown)}; it takes {", ".join(settings)}')
    settings.update(spike)
    if isinstance(settings['factor'], bool) or not isinstance(settings['factor'], (int, float)) or not settings['factor'] > 1:
        raise ValueError(f'guard.spike.factor must be a number > 1, got {settings["factor"]!r}')
    _whole('spike.window', settings['window'], 2), _whole('spike.keep', settings['keep'], 1)
    return settings


def _whole(key: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f'guard.{key} must be a whole number >= {least}, got {value!r}')
