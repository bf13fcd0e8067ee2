"""The optimizer step: loss scaling, accumulation, clipping; a non-finite gradient never reaches the weights."""
from __future__ import annotations

import contextlib
import logging
import math
from typing import Any, Dict, List, Mapping, Optional, Union

import torch
from mmcv.runner import HOOKS, Hook

from ..parallel import sample_tokens
from .guard import Guard

THOROUGH = 3  # steps of a row of non-finite ones that are computed again to see where they go wrong
ENDS_BADLY = 3  # non-finite steps in a row with which a run must not end as if all were well: one may be chance
MANY = 0.1  # share of an epoch's steps; the recipes' own runs skip none in thousands
SEARCH_FLOOR = 1.0  # a gradient that overflows at a loss scale of 1 is not the scaler's doing
FIXED = 1.0 - 1e-12  # backoff of a scale that stays (GradScaler wants less than 1); such a scaler searches nothing


def make_scaler(loss_scale: Union[str, float, int, Mapping[str, Any], None], device_type: str) -> torch.amp.GradScaler:
    """torch's GradScaler from what mmcv users write: 'dynamic', a number (static), or GradScaler's arguments.

    Raises:
        ValueError: for anything else.
    """
    if loss_scale in (None, 'dynamic'):
        return torch.amp.GradScaler(device_type)
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        return torch.amp.GradScaler(device_type, init_scale=float(loss_scale), growth_interval=2**31 - 1,
                                    backoff_factor=FIXED)
    if isinstance(loss_scale, Mapping):
        try:
            return torch.amp.GradScaler(device_type, **loss_scale)
        except TypeError as error:
            raise ValueError(f'fp16.loss_scale: {error}; its keys are init_scale, growth_factor, backoff_factor, '
                             'growth_interval') from None
    raise ValueError(f'fp16.loss_scale must be "dynamic", a number or a mapping, got {loss_scale!r}')


@HOOKS.register_module()
class GuardedOptimizerHook(Hook):
    """Backward, clip, step. Takes the places of mmcv's optimizer hooks (fp16, cumulative, both).

    A step whose total loss or gradient norm is not finite is skipped: weights, optimizer state, averages and BatchNorm statistics
    stay as they were. All ranks see the same reduced values, which reach the host in the one transfer that clipping needs, so
    all skip together. The log tells the loss scaler's normal search ("loss scale now X") from a real non-finite loss or
    gradient; what follows after these is the ``guard``'s matter.

    Args:
        grad_clip: ``{max_norm: 35, norm_type: 2}`` or None. ``grad_norm`` in the log is the norm before clipping; skipped steps
            are not in its average.
        cumulative_iters: steps whose gradients are averaged into one update. A group never crosses an epoch's end; a shorter
            last group is averaged over its own length.
        scaler: torch GradScaler for float16, else None.
        guard: what happens around non-finite steps (:class:`.guard.Guard`).
    """

    def __init__(self, grad_clip: Optional[Mapping[str, Any]] = None, cumulative_iters: int = 1,
                 scaler: Optional[torch.amp.GradScaler] = None, guard: Optional[Guard] = None):
        if not isinstance(cumulative_iters, int) or isinstance(cumulative_iters, bool) or cumulative_iters < 1:
            raise ValueError(f'optimizer_config.cumulative_iters must be a whole number >= 1, got {cumulative_iters!r}')
        unknown = set(grad_clip or {}) - {'max_norm', 'norm_type'}
        if unknown:
            raise ValueError(f'optimizer_config.grad_clip: unknown keys {sorted(unknown)}; it takes max_norm and norm_type')
        for key, value in {'max_norm': None, **grad_clip}.items() if grad_clip else ():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f'optimizer_config.grad_clip.{key} must be a number > 0, got {value!r} (grad_clip: null does not clip)')
        self.max_norm = float(grad_clip['max_norm']) if grad_clip else None
        self.norm_type = float((grad_clip or {}).get('norm_type', 2))
        self.cumulative_iters, self.scaler, self.guard = cumulative_iters, scaler, guard or Guard()
        self.counts = {'steps': 0, 'scaler_skips': 0, 'nonfinite_skips': 0}
        self.consecutive = 0
        self._sync = contextlib.ExitStack()
        self._checked = False
        self._bad: List[str] = []
        self._explained = False
        self._finite = 0  # steps of this process that changed the weights
        self._epoch = {'updates': 0, 'skipped': 0}
        self.verdict: Optional[str] = None  # at the run's end: why it has not ended well

    # ---- accumulation ------------------------------------------------------------------------------------------------
    def _group(self, runner: Any) -> tuple:
        """(whether this iteration ends a group, the group's length)."""
        index, total, size = runner.inner_iter, len(runner.data_loader), self.cumulative_iters
        start = index - index % size
        length = min(size, total - start)
        return index == start + length - 1, length

    def before_run(self, runner: Any) -> None:
        runner.defer_log = True
        runner.optimizer.zero_grad(set_to_none=True)
        self.guard.before_run(getattr(runner.model, 'module', runner.model))

    def before_train_epoch(self, runner: Any) -> None:
        """A run that went back to a checkpoint may have left a group unfinished."""
        self._bad, self._explained = [], False
        self._epoch = {'updates': 0, 'skipped': 0}
        runner.optimizer.zero_grad(set_to_none=True)

    def before_train_iter(self, runner: Any) -> None:
        last, _ = self._group(runner)
        self.guard.before_step(runner.data_batch, begins_group=runner.inner_iter % self.cumulative_iters == 0)
        if not last and hasattr(runner.model, 'no_sync'):
            self._sync.enter_context(runner.model.no_sync())

    def after_train_iter(self, runner: Any) -> None:
        last, length = self._group(runner)
        loss = runner.outputs['loss'] / length
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self._sync.close()
        runner.stepped, runner.group_open = False, not last
        if not last:
            runner.publish()
            self._note_bad(runner)
            _skipped(runner, 0)
            return
        if not self._checked:
            self._check_unused(runner)
        if self.scaler is not None:
            self.scaler.unscale_(runner.optimizer)
        norm = total_norm(gradients(runner.optimizer), self.norm_type)
        norm_value, *statistics = runner.publish([norm, *self.guard.statistics_size()])
        self._note_bad(runner)
        if math.isfinite(norm_value) and not self._bad:
            what = None
            self._step(runner, norm_value)
            if not all(map(math.isfinite, statistics)):  # of this rank alone, so no other rank has to know
                self.guard.undo_statistics()
                runner.logger.error('%s, rank %d: BatchNorm statistics became non-finite for samples %s although loss and gradient '
                                    'are finite; the statistics are as before the step', _place(runner), runner.rank,
                                    sample_tokens(runner.data_batch))
            self.guard.watch(runner, _place(runner), sample_tokens(runner.data_batch))
        else:
            what = self._skip(runner)
            self.guard.undo_statistics()
        self._epoch['updates'] += 1
        self._epoch['skipped'] += what is not None
        _skipped(runner, int(what is not None))
        if self.scaler is not None:
            self.scaler.update()
        runner.optimizer.zero_grad(set_to_none=True)
        if what is not None and not self._bad:
            self._explain(runner, self.consecutive)
        self.guard.after_group()
        self._bad, self._explained = [], False
        if self.consecutive >= self.guard.max_consecutive:
            self.guard.give_up(f'{_place(runner)}: {what}', self.consecutive)

    def _note_bad(self, runner: Any) -> None:
        """Remember the group's non-finite losses, and name this rank's samples that gave them."""
        values = runner.outputs['log_vars']
        if all(math.isfinite(values[name]) for name in values if name == 'loss'):
            return
        self._bad += [name for name, value in values.items() if not math.isfinite(value) and name not in self._bad]
        self._explain(runner, self.consecutive + 1)

    def _explain(self, runner: Any, row: int) -> None:
        # The first of a row show where it begins; the last before the end is the one that a replay should have.
        thorough = not self._explained and (row <= THOROUGH or row == self.guard.max_consecutive)
        self._explained = True
        self.guard.explain(runner, _place(runner), bool(self._bad), thorough)

    def _step(self, runner: Any, norm: float) -> None:
        if self.max_norm is not None and norm > self.max_norm:
            torch._foreach_mul_(gradients(runner.optimizer), self.max_norm / (norm + 1e-6))
        # The gradients are unscaled and finite here, so the scaler has nothing left to decide.
        runner.optimizer.step()
        runner.stepped = True
        runner.log_buffer.update({'grad_norm': norm}, runner.outputs['num_samples'])
        self.counts['steps'] += 1
        self._finite += 1
        self.consecutive = 0

    def _skip(self, runner: Any) -> Optional[str]:
        """Count and report a skipped step; returns what was not finite, or None for the scaler's search."""
        bad, where = self._bad, _place(runner)
        scale = self.scaler.get_scale() if self.scaler is not None else None
        fixed = scale is not None and self.scaler.get_backoff_factor() >= FIXED
        if scale is not None and scale > SEARCH_FLOOR and not fixed and not bad:
            self.counts['scaler_skips'] += 1
            runner.logger.info('%s: gradients overflow in float16 at loss scale %g; step skipped, loss scale now %g (the '
                               'scaler\'s normal search)', where, scale, scale * self.scaler.get_backoff_factor())
            return None
        self.counts['nonfinite_skips'] += 1
        self.consecutive += 1
        what = f'non-finite loss ({", ".join(bad)})' if bad else 'non-finite gradient (the losses are finite)'
        if fixed and not bad:
            what += f' at the fixed loss scale {scale:g} (fp16.loss_scale: dynamic lowers it where float16 overflows)'
        runner.logger.warning('%s: %s; step skipped on all ranks, weights unchanged (%d in a row, %d in this run)', where, what,
                              self.consecutive, self.counts['nonfinite_skips'])
        return what

    def _check_unused(self, runner: Any) -> None:
        """After the first backward: parameters without a gradient stop data-parallel training with an obscure message later."""
        self._checked = True
        unused = [n for n, p in runner.model.named_parameters() if p.requires_grad and p.grad is None]
        if not unused:
            return
        text = (f'{len(unused)} trainable parameters got no gradient in the first step: {", ".join(unused[:8])}'
                f'{" ..." if len(unused) > 8 else ""}')
        if getattr(runner.model, 'distributed', False) and not runner.model.find_unused_parameters:
            raise RuntimeError(f'{text}. Every trainable parameter must take part in every loss; freeze them '
                               '(requires_grad false), or set find_unused_parameters: true')
        runner.logger.warning('%s', text)

    # ---- what is left at the end -------------------------------------------------------------------------------------
    def after_train_epoch(self, runner: Any) -> None:
        """Say how many of the epoch's updates were skipped: never too many in a row can still be too many."""
        skipped, updates = self._epoch['skipped'], self._epoch['updates']
        if skipped:
            many = skipped >= MANY * updates
            runner.logger.log(logging.ERROR if many else logging.WARNING, '%sepoch %d: %d of %d updates were not finite and left out%s',
                              'ALARM: ' if many else '', runner.epoch + 1, skipped, updates,
                              '. Lower the learning rate, or look at the samples named above' if many else '')

    def after_run(self, runner: Any) -> None:
        """A run must not end among non-finite steps as if all were well, however few they were: an alarm, and from
        ``ENDS_BADLY`` in a row on (or if no step was finite) a ``verdict``. Only the process that trained so gives one: to resume
        the run when nothing is left to train accepts it as it is."""
        row, most = self.consecutive, self.guard.max_consecutive
        idle = not self._finite and self._epoch['updates'] > 0
        if not row and (not idle or runner.stopped is not None):
            return
        if runner.stopped is not None:
            text = f'the run was stopped among non-finite steps ({row} in a row, guard.max_consecutive is {most}); resumed, it counts on'
        elif not row:
            text = 'no step of this run changed the weights: the loss scaler (fp16) was still searching its scale'
        elif idle:
            text = (f'no step of this run was finite ({row} in a row, too few for the guard to act: guard.max_consecutive is {most}); '
                    'the weights are as they were at its start')
        else:
            text = (f'the run ends with {row} non-finite step{"s" * (row > 1)} in a row, too few for the guard to act '
                    f'(guard.max_consecutive is {most}); the weights are those of the last finite step')
        runner.logger.error('ALARM: %s', text)
        if runner.stopped is None and self._epoch['updates'] and row >= (1 if idle else min(ENDS_BADLY, most)):
            self.verdict = f'{text}. Lower the learning rate, or look at the samples named above'

    # ---- state -------------------------------------------------------------------------------------------------------
    def state_dict(self) -> Dict[str, Any]:
        state: Dict[str, Any] = {'counts': dict(self.counts), 'consecutive': self.consecutive}
        if self.scaler is not None:
            state['scaler'] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sync.close()
        self.counts.update(state.get('counts', {}))
        self.consecutive = int(state.get('consecutive', 0))
        if self.scaler is not None and state.get('scaler'):
            self.scaler.load_state_dict(dict(state['scaler']))


def _skipped(runner: Any, steps: int) -> None:
    if hasattr(runner.log_buffer, 'skipped'):  # ours; mmcv's own runner has its own
        runner.log_buffer.skipped(steps)


def _place(runner: Any) -> str:
    return f'epoch {runner.epoch + 1}, iteration {runner.inner_iter + 1}'


def gradients(optimizer: torch.optim.Optimizer) -> List[torch.Tensor]:
    """Of all parameters that have one, in the optimizer's order."""
    return [p.grad for group in optimizer.param_groups for p in group['params'] if p.grad is not None]


def total_norm(grads: List[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Norm of all gradients together, a float32 scalar on their device (0 if there are none)."""
    if not grads:
        return torch.zeros(())
    norms = torch._foreach_norm(grads, norm_type)
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([n.to(device, torch.float32) for n in norms]), norm_type)
