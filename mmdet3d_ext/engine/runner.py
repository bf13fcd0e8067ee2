"""mmcv's epoch runner with this project's steps: no idle sleeps, atomic checkpoints with state of the hooks, safe resuming at
any step."""
from __future__ import annotations

import contextlib
import os
import time
from typing import Any, ContextManager, Dict, List, Optional, Protocol, Sequence, Tuple

import torch
import torch.distributed as dist
from mmcv.runner import RUNNERS, EpochBasedRunner
from mmcv.runner.utils import get_host_info
from torch.utils.data import DataLoader

from ..datasets.stream import batches
from . import checkpoint as files
from . import rank_state
from .hooks.guard import RollBack
from .hooks.logging import FiniteLogBuffer
from .parallel import finish_exchange
from .stopping import Stopped, StopSignals


class Stateful(Protocol):
    """A hook whose state belongs in checkpoints."""

    def state_dict(self) -> Dict[str, Any]:
        ...

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        ...


@RUNNERS.register_module(force=True)
class CustomEpochBasedRunner(EpochBasedRunner):
    """Epoch runner. ``stateful`` maps a checkpoint key to the hook whose ``state_dict()`` is kept there.

    A step's losses stay on the device (``outputs['log_values']``) until :meth:`publish` copies them to the host together with
    whatever else the step has to look at, so that a step waits for the device once.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.log_buffer = FiniteLogBuffer()
        self.stateful: Dict[str, Stateful] = {}
        self.defer_log = False
        self.evaluated_weights = 'raw'
        self.save_failed: Optional[str] = None
        self.last_checkpoint: Optional[str] = None
        self.saver: Any = None  # the checkpoint hook, which also writes between steps
        self.signals: Optional[StopSignals] = None
        self.stopped: Optional[Stopped] = None
        self.group_open = False  # gradients of an unfinished group of accumulated steps are held
        self.resumed_from: Optional[str] = None
        self._agreed = (False, False)
        self._begin = 0  # iterations of the current epoch that a resumed run has behind it
        self._rank_states: Optional[List[Dict[str, Any]]] = None

    @property
    def begins_within(self) -> bool:
        """Whether the next epoch to run is one that a resumed run has partly behind it."""
        return self._begin > 0

    # ---- one step -------------------------------------------------------------------------------------------------
    def run_iter(self, data_batch: Any, train_mode: bool, **kwargs: Any) -> None:
        step = self.model.train_step if train_mode else self.model.val_step
        flags = self._flags()
        outputs = step(data_batch, self.optimizer, flags=flags, **kwargs)
        self._agreed = flags
        if not isinstance(outputs, dict):
            raise TypeError(f'train_step and val_step must return a dict, got {type(outputs).__name__}')
        self.outputs = outputs
        if 'log_vars' in outputs:
            self.log_buffer.update(outputs['log_vars'], outputs['num_samples'])
        elif 'log_values' in outputs and not self.defer_log:
            self.publish()

    def _flags(self) -> Tuple[bool, bool]:
        """What this rank asks for: (stop, write a checkpoint). One rank that asks is enough; all act after the same step."""
        return (self.signals is not None and self.signals.received is not None,
                self.saver is not None and self.rank == 0 and self.saver.is_time())

    def publish(self, extra: Sequence[torch.Tensor] = ()) -> List[float]:
        """Copy this step's losses, and the scalars ``extra``, to the host in one transfer; log the losses.

        Returns:
            the values of ``extra``.
        """
        outputs = self.outputs
        finish_exchange(outputs)
        values, names = outputs['log_values'], outputs['log_names']
        extra = [*(e.detach().reshape(1).to(values) for e in extra), *([outputs['flags']] if 'flags' in outputs else [])]
        numbers = torch.cat([values.detach(), *extra]).tolist()
        outputs['log_vars'] = dict(zip(names, numbers, strict=False))
        self.log_buffer.update(outputs['log_vars'], outputs['num_samples'])
        rest = numbers[len(names):]
        if 'flags' in outputs:
            self._agreed = rest[-2] > 0, rest[-1] > 0
            rest = rest[:-2]
        return rest

    def train(self, data_loader: DataLoader, **kwargs: Any) -> None:
        self.model.train()
        self.mode = 'train'
        self.data_loader = data_loader
        self._max_iters = self._max_epochs * len(data_loader)
        self.call_hook('before_train_epoch')
        begin, self._begin = self._begin, 0
        self._inner_iter = begin - 1
        for index, batch in batches(data_loader, begin, self.logger):
            if self._rank_states is not None:
                rank_state.restore_random(self._rank_states, self.rank, self.world_size, self.meta['seed'], self.epoch, begin)
                self._rank_states = None
            self.data_batch = batch
            self._inner_iter = index
            self.call_hook('before_train_iter')
            self.run_iter(batch, train_mode=True, **kwargs)
            self.call_hook('after_train_iter')
            del self.data_batch
            self._iter += 1
            self._between_steps(index + 1)
        self._rank_states = None
        self.call_hook('after_train_epoch')
        self._epoch += 1

    def _between_steps(self, done: int) -> None:
        """Write a checkpoint, or stop, if asked; ``done``: iterations of this epoch that are behind.

        Raises:
            Stopped: on all ranks after the same step.
        """
        stop, save = self._agreed
        if self.group_open:
            return
        save = save or self.saver is not None and self.saver.is_turn(self.iter)
        path = None
        if self.saver is not None and (stop or save and done < len(self.data_loader)):
            path = self.saver.save_step(self, done)
        if stop:
            raise Stopped(self._stop_reason(), path)

    def _stop_reason(self) -> str:
        return (self.signals and self.signals.received) or 'a signal to another rank'

    def stop_before_evaluation(self) -> None:
        """Stop here if a signal came after the epoch's last step: an evaluation may take an hour. A collective.

        Raises:
            Stopped: on all ranks.
        """
        asked = torch.tensor(float(self.signals is not None and self.signals.received is not None))
        if self.world_size > 1 and dist.is_initialized():
            asked = asked.to(next(self.model.parameters()).device)
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if not asked.item():
            return
        path = None
        if self.saver is not None and self.saver.saves_epoch(self):
            path = self.last_checkpoint if self.save_failed is None else None  # on rank 0; others write none
        elif self.saver is not None:
            path = self.saver.save_step(self, len(self.data_loader))
        raise Stopped(self._stop_reason(), path)

    def ends_at_once(self) -> ContextManager[None]:
        """Within it Ctrl-C does not wait for the end of a step."""
        return self.signals.at_once() if self.signals is not None else contextlib.nullcontext()

    def run(self, data_loaders: List[DataLoader], workflow: List[Tuple[str, int]], max_epochs: Optional[int] = None,
            **kwargs: Any) -> None:
        """Train until ``max_epochs``; the log lines are mmcv's. The only workflow is ``[('train', n)]``: validation is a hook.

        Raises:
            ValueError: for another workflow.
        """
        if len(workflow) != 1 or workflow[0][0] != 'train' or len(data_loaders) != 1:
            raise ValueError(f"workflow must be [('train', 1)], got {workflow}; validation runs by itself after an epoch")
        self._max_epochs = max_epochs or self._max_epochs
        self._max_iters = self._max_epochs * len(data_loaders[0])
        self.data_loader = data_loaders[0]
        self.logger.info('Start running, host: %s, work_dir: %s', get_host_info(), self.work_dir)
        self.logger.info('Hooks will be executed in the following order:\n%s', self.get_hook_info())
        self.logger.info('workflow: %s, max: %d epochs', workflow, self._max_epochs)
        self.call_hook('before_run')
        while self.epoch < self._max_epochs and self.stopped is None:
            try:
                self.train(data_loaders[0], **kwargs)
            except RollBack as request:
                request.carry_out(self)
            except Stopped as stopped:
                self.stopped = stopped
                self.logger.warning('%s: stopped after iteration %d of epoch %d; %s', stopped.why, self.inner_iter + 1,
                                    self.epoch + 1, f'{stopped.checkpoint} is written' if stopped.checkpoint or self.rank else
                                    'no checkpoint could be written')
        self.call_hook('after_run')

    # ---- checkpoints ----------------------------------------------------------------------------------------------
    def checkpoint_content(self, save_optimizer: bool = True, done: Optional[int] = None) -> Dict[str, Any]:
        """All that a resumed run needs, as plain types and CPU tensors.

        Args:
            done: iterations of the current epoch that are behind; None: the epoch just ended.
        """
        model = getattr(self.model, 'module', self.model)
        meta = dict(self.meta or {}, **files.model_meta(model))
        meta.update(epoch=self.epoch + (done is None), iter=self.iter, inner_iter=done or 0, time=time.asctime(),
                    evaluated_weights=self.evaluated_weights, iters_per_epoch=len(self.data_loader),
                    world_size=self.world_size, samples_per_step=self._samples_per_step(self.data_loader))
        content = {'meta': meta, 'state_dict': model.state_dict()}
        if save_optimizer and self.optimizer is not None:
            content['optimizer'] = self.optimizer.state_dict()
            content['optimizer_info'] = files.optimizer_info(self.optimizer, model)
        for key, hook in self.stateful.items():
            content[key] = hook.state_dict()
        return {key: files.plain(value) for key, value in content.items()}

    def _samples_per_step(self, loader: DataLoader) -> int:
        return self.world_size * (getattr(loader, 'batch_size', None) or 1)

    def save_checkpoint(self, out_dir: str, filename_tmpl: str = 'epoch_{}.pth', save_optimizer: bool = True,
                        meta: Optional[Dict] = None, create_symlink: bool = True) -> str:
        """Write the checkpoint of the epoch that just ended, whole or not at all; returns its path.

        Raises:
            CheckpointWriteError: if it cannot be written; older files are as they were.
        """
        path = os.path.join(out_dir, filename_tmpl.format(self.epoch + 1))
        content = self.checkpoint_content(save_optimizer)
        content['meta'].update(files.plain(meta or {}))
        files.write_atomic(content, path)
        if create_symlink:
            files.link_atomic(path, os.path.join(out_dir, 'latest.pth'))
        return path

    def load_checkpoint(self, filename: str, map_location: str = 'cpu', strict: bool = False, revise_keys: Any = None) -> Any:
        """Weights only, through the safe reader (custom hooks of mmcv call this)."""
        content = files.read_checkpoint(filename)
        files.load_weights(getattr(self.model, 'module', self.model), filename, logger=self.logger, content=content)
        return content

    def resume(self, checkpoint: str, resume_optimizer: bool = True, map_location: str = 'cpu', allow_unsafe: bool = False,
               loader: Optional[DataLoader] = None) -> Dict[str, Any]:
        """Continue from a checkpoint: weights, optimizer, hooks' state, place in the epoch, random numbers.

        The learning rate follows from the place by the schedule's rule. With another number of ranks or another batch size than
        the ``loader``'s the epoch's progress in samples is kept, and what changes is said.

        Raises:
            CheckpointError: if the file is of another model, grid, or lacks what resuming needs.
        """
        content = files.read_checkpoint(checkpoint, allow_unsafe)
        meta = content.get('meta')
        if not isinstance(meta, dict) or 'epoch' not in meta or 'iter' not in meta:
            raise files.CheckpointError(f'{checkpoint} holds no epoch and iteration, it cannot be resumed from; use '
                                        '--load_from')
        model = getattr(self.model, 'module', self.model)
        state, _ = files.pick_weights(content, checkpoint, prefer='raw')
        files.check_same_run(model, content, state, checkpoint)
        files.load_weights(model, checkpoint, prefer='raw', complete=True, logger=self.logger, content=content)
        self._epoch, self._iter, self._begin = int(meta['epoch']), int(meta['iter']), int(meta.get('inner_iter') or 0)
        self._adapt_progress(meta, loader)
        if resume_optimizer and self.optimizer is not None:
            self._load_optimizer(content, checkpoint)
        for key, hook in self.stateful.items():
            if key in content:
                hook.load_state_dict(content[key])
            else:
                self.logger.warning('%s has no "%s" state, it starts anew', checkpoint, key)
        self.resumed_from, self._rank_states = checkpoint, content.get('rank_states')
        if self._rank_states is not None:
            rank_state.restore(self._rank_states, self.rank, self.world_size, model, self.stateful.get('ema_state_dict'))
        if self.meta is not None and meta.get('hook_msgs'):
            self.meta.setdefault('hook_msgs', {}).update(meta['hook_msgs'])
        self.logger.info('resumed epoch %d, iter %d', self.epoch, self.iter)
        return meta

    def _adapt_progress(self, meta: Dict[str, Any], loader: Optional[DataLoader]) -> None:
        then = meta.get('world_size')
        if then is not None and then != self.world_size:
            self.logger.warning('the checkpoint was written by %s rank%s, now there are %d: the effective batch size changes with '
                                'it, the epoch is kept', then, '' if then == 1 else 's', self.world_size)
        if loader is None:
            return
        length, batch, done = len(loader), self._samples_per_step(loader), self._begin
        batch_then = meta.get('samples_per_step') or batch
        group = getattr(self.stateful.get('optimizer_hook'), 'cumulative_iters', 1)
        if done and (batch_then != batch or meta.get('iters_per_epoch') != length or then != self.world_size):
            self._begin = min(done * batch_then // batch, length)
            self._begin -= self._begin % group if self._begin < length else 0
            self.logger.warning('of epoch %d, %d iterations of %d samples were done: training goes on at iteration %d of %d with '
                                '%d samples each (%d samples come again). Random numbers of the model start anew, BatchNorm '
                                'statistics are the mean over the %s ranks of then', self._epoch + 1, done, batch_then,
                                self._begin + 1, length, batch, max(0, done * batch_then - self._begin * batch), then)
        elif done < length and done % group:
            self._begin, self._iter = done - done % group, self._iter - done % group
            self.logger.warning('%d steps make an update now (cumulative_iters), the checkpoint stands within such a group: training goes '
                                'on at iteration %d of epoch %d (%d come again)', group, self._begin + 1, self._epoch + 1, done % group)
        begin = self._epoch * length + self._begin
        if self._iter != begin:
            self.logger.warning('an epoch has %d iterations now (%s before): iteration %d becomes %d%s', length,
                                meta.get('iters_per_epoch', 'unknown'), self._iter, begin,
                                '' if self._begin else f', the start of epoch {self._epoch + 1}')
            self._iter = begin

    def _load_optimizer(self, content: Dict[str, Any], path: str) -> None:
        if 'optimizer' not in content:
            raise files.CheckpointError(f'{path} holds no optimizer state, it cannot be resumed from; use --load_from')
        wanted = [(g['lr'], g.get('weight_decay')) for g in self.optimizer.param_groups]
        try:
            self.optimizer.load_state_dict(files.with_own_kernels(content['optimizer'], self.optimizer))
        except (ValueError, KeyError) as error:
            raise files.CheckpointError(f'{path}: its optimizer state does not fit this model and optimizer: {error}') from None
        lacking = sorted({key for group in self.optimizer.param_groups for key in set(self.optimizer.defaults) - set(group)})
        if lacking:
            raise files.CheckpointError(f'{path}: its optimizer state is of another optimizer than '
                                        f'{type(self.optimizer).__name__} (optimizer.type), it lacks {", ".join(lacking)}; '
                                        'resume with the optimizer of that run, or start a new stage from its weights with '
                                        '--load_from')
        kept = [(g.get('initial_lr', g['lr']), g.get('weight_decay')) for g in self.optimizer.param_groups]
        changed = [(new, old) for new, old in zip(wanted, kept, strict=False) if new != old]
        if changed:
            self.logger.warning('the optimizer continues with the checkpoint\'s base learning rate and weight decay %s; the '
                                'configuration says %s', changed[0][1], changed[0][0])
