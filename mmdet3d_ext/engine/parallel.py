"""Batches on the device, and the wrapper that mmcv's runner drives, for one process and for many.

Letters: B samples in the batch.
"""
from __future__ import annotations

import contextlib
import inspect
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from mmcv.parallel import MODULE_WRAPPERS, DataContainer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ..checks.values import bucket_problem, compression_problem
from .building import where
from .launch import UserError
from .rank_watch import beat

LOSS_PREFIX = 'loss/'
BUCKET_MB = 25  # torch's own default
COMPRESSION = {'fp16': default_hooks.fp16_compress_hook, 'bf16': default_hooks.bf16_compress_hook}


def unpack_batch(batch: Mapping[str, Any], device: torch.device) -> Dict[str, Any]:
    """Plain values of a collated batch, on ``device``: what ``model(**batch)`` takes.

    mmcv's collate leaves a DataContainer per key whose data are chunks of ``samples_per_gpu`` samples. Chunks are joined:
    stacked tensors along the batch axis, lists end to end. ``cpu_only`` values stay where they are.
    """
    return {key: _unpack(value, device) for key, value in batch.items()}


def _unpack(value: Any, device: torch.device) -> Any:
    if not isinstance(value, DataContainer):
        return to_device(value, device)
    data = value.data
    if not isinstance(data, (list, tuple)):  # a container that was never collated: one sample
        return data if value.cpu_only else to_device(data, device)
    if len(data) == 1:
        joined = data[0]
    elif all(isinstance(chunk, torch.Tensor) for chunk in data):
        joined = torch.cat(list(data))
    else:
        joined = [item for chunk in data for item in chunk]
    return joined if value.cpu_only else to_device(joined, device)


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors, boxes and points of a nested value on ``device``; anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, '_fields'):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item, device) for item in value)
    if hasattr(value, 'tensor') and callable(getattr(value, 'to', None)):  # mmdet3d boxes and points
        return value.to(device)
    return value


def batch_size(batch: Mapping[str, Any]) -> int:
    """Number of samples in an unpacked batch: the length of ``metas``, else of the first tensor or list."""
    if isinstance(batch.get('metas'), Sequence):
        return len(batch['metas'])
    for value in batch.values():
        if isinstance(value, (torch.Tensor, list)) and not (isinstance(value, torch.Tensor) and value.dim() == 0):
            return len(value)
    raise ValueError(f'cannot tell the batch size: no metas, tensor or list among the keys {sorted(batch)}')


def sample_tokens(batch: Any) -> List[str]:
    """Tokens (or indices) of the samples in a collated batch."""
    metas = batch.get('metas') if isinstance(batch, Mapping) else None
    metas = getattr(metas, 'data', metas)
    if metas and isinstance(metas[0], (list, tuple)):
        metas = [m for chunk in metas for m in chunk]
    return [str(m.get('token', m.get('sample_idx', '?'))) for m in metas or [] if isinstance(m, Mapping)]


def sum_losses(losses: Mapping[str, Any]) -> Tuple[torch.Tensor, List[str], List[torch.Tensor]]:
    """Total loss, and every logged name with its detached float32 scalar, in the model's order, ``loss`` last.

    Values whose name starts with ``loss/`` are summed. A model of mmdet's family names its losses otherwise; without any
    ``loss/`` name every value with "loss" in its name counts, as mmdet does.

    Raises:
        TypeError: if the model did not return a dict of tensors. ValueError: if nothing in it is a loss.
    """
    if not isinstance(losses, Mapping):
        raise TypeError(f'in training the model must return a dict of losses, got {type(losses).__name__}')
    names, values = [], []
    for name, value in losses.items():
        if isinstance(value, (list, tuple)):
            value = sum(item.mean() for item in value)
        if not isinstance(value, torch.Tensor):
            value = torch.as_tensor(float(value))
        names.append(name)
        values.append(value.mean() if value.dim() else value)
    chosen = [n.startswith(LOSS_PREFIX) for n in names]
    if not any(chosen):
        chosen = ['loss' in n for n in names]
    terms = [value.float() for value, use in zip(values, chosen) if use]
    if not terms:
        raise ValueError(f'the model returned no loss: none of {names} starts with "{LOSS_PREFIX}"')
    total = terms[0] if len(terms) == 1 else torch.stack([t.to(terms[0].device) for t in terms]).sum()
    logged = [value.detach().float().to(total.device) for value in values]
    return total, names + ['loss'], logged + [total.detach()]


class _TrainForward(nn.Module):
    """What DDP sees: the model's training forward under autocast. DDP's own forward prepares the gradient exchange."""

    def __init__(self, module: nn.Module, device: torch.device, amp_dtype: Optional[torch.dtype]):
        super().__init__()
        self.module, self.device, self.amp_dtype = module, device, amp_dtype
        self.extra = {'return_loss': True} if takes(module, 'return_loss') else {}

    def forward(self, batch: Dict[str, Any]) -> Dict[str, torch.Tensor]:
        with autocast(self.device, self.amp_dtype):
            return self.module(**batch, **self.extra)


def takes(module: nn.Module, argument: str) -> bool:
    """Whether the module's ``forward`` has this argument by name (``return_loss`` of OpenMMLab's models)."""
    return argument in inspect.signature(module.forward).parameters


def autocast(device: torch.device, dtype: Optional[torch.dtype]):
    """``torch.autocast`` for ``dtype``, or a context that does nothing for None."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def exchange_settings(cfg: Mapping[str, Any]) -> Dict[str, Any]:
    """How the ranks of a configured training exchange gradients, as arguments of :class:`StepModel`.

    Raises:
        UserError: for a value of ``dist_params.bucket_cap_mb`` or ``dist_params.compression`` that is none.
    """
    section = cfg.get('dist_params') or {}
    found: Dict[str, Any] = {'find_unused_parameters': bool(cfg.get('find_unused_parameters'))}
    for key, problem_with in (('bucket_cap_mb', bucket_problem), ('compression', compression_problem)):
        if section.get(key) is not None:
            problem = problem_with(section[key])
            if problem:
                raise UserError(f'{where(cfg, f"dist_params.{key}")}: {problem}')
            found[key] = section[key]
    return found


def finish_exchange(outputs: Dict[str, Any]) -> None:
    """From here on the device has ``log_values`` and ``flags`` of a step's :meth:`StepModel.train_step` as those of all ranks."""
    exchange = outputs.pop('exchange', None)
    if exchange is not None:
        exchange.wait()  # under NCCL the stream waits, not the host


@MODULE_WRAPPERS.register_module()
class StepModel(nn.Module):
    """The model as the runner sees it: ``train_step(batch, optimizer)``, ``val_step(batch, optimizer)`` and a plain call.

    ``.module`` is the model itself, so parameter names, mmcv's hooks and checkpoints look through the wrapper. With several
    ranks, training goes through DistributedDataParallel's own forward (mmcv 1.7.2's wrapper calls parts of DDP that torch
    2.1 removed), and evaluation calls the model directly: ranks may hold different numbers of samples.

    What the ranks exchange in a step, with docs/scaling.md for the reasons:

    * the gradients, in buckets that are sent while the backward pass goes on. They are views of the buckets, so they are not copied,
      and the optimizer, the clipping and the guard see the mean over ranks without another exchange;
    * losses and flags, one small all-reduce beside the backward pass (:func:`finish_exchange`);
    * counts that losses divide by, one per detection head (:mod:`..over_ranks`).

    Buffers are never sent: statistics are shared in SyncBatchNorm or averaged at an epoch's end
    (:class:`.hooks.buffers.BatchNormSyncHook`), and the others are constants. DDP's ``static_graph`` is not used: buckets follow the
    order of the backward pass without it, and a group of accumulated steps (:meth:`no_sync`) is no static graph.

    Args:
        module: the model, on ``device``. In training ``module(**batch)`` gives a dict of losses, in evaluation a list.
        device: where batches go.
        amp_dtype: torch.float16, torch.bfloat16, or None for float32 training.
        find_unused_parameters: passed to DDP. False needs every trainable parameter in every sample's loss.
        bucket_cap_mb: MiB of gradients per all-reduce. With the default the first one is of 1 MiB, as torch has it.
        compression: ``'fp16'`` or ``'bf16'``: gradients are rounded to it, divided by the ranks and summed in it; half the bytes. None:
            as they are.
    """

    def __init__(self, module: nn.Module, device: torch.device, amp_dtype: Optional[torch.dtype] = None,
                 find_unused_parameters: bool = False, bucket_cap_mb: float = BUCKET_MB, compression: Optional[str] = None):
        super().__init__()
        self.module = module
        self.device = device
        self.amp_dtype = amp_dtype
        self.find_unused_parameters = find_unused_parameters
        forward = _TrainForward(module, device, amp_dtype)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            buckets = {} if bucket_cap_mb == BUCKET_MB else {'bucket_cap_mb': bucket_cap_mb}
            forward = DistributedDataParallel(forward, device_ids=[device.index] if device.type == 'cuda' else None,
                                              broadcast_buffers=False, find_unused_parameters=find_unused_parameters,
                                              gradient_as_bucket_view=True, **buckets)
            if compression is not None:
                forward.register_comm_hook(None, COMPRESSION[compression])
        # In a tuple, so that the parameters are not registered a second time under another name.
        self._forward = (forward,)
        self._names: Optional[Tuple[str, ...]] = None
        # mmcv's text logger reduces the peak memory over the ranks on this device.
        self.output_device = device if device.type == 'cuda' else None

    @property
    def distributed(self) -> bool:
        return isinstance(self._forward[0], DistributedDataParallel)

    def train(self, mode: bool = True) -> 'StepModel':
        super().train(mode)
        for part in self._forward:
            part.train(mode)
        return self

    def forward(self, batch: Optional[Mapping[str, Any]] = None, **kwargs: Any) -> Any:
        """``model(batch)`` or ``model(**batch)`` without losses' bookkeeping; DataContainers are unpacked."""
        values = unpack_batch(dict(batch or {}, **kwargs), self.device)
        if not self.training and takes(self.module, 'return_loss'):
            values.setdefault('return_loss', False)
        return self.module(**values)

    @contextlib.contextmanager
    def no_sync(self):
        """Gradients of this step stay on their rank (gradient accumulation)."""
        with self._forward[0].no_sync() if self.distributed else contextlib.nullcontext():
            yield

    def train_step(self, data: Mapping[str, Any], optimizer: Any = None, flags: Sequence[bool] = (),
                   **kwargs: Any) -> Dict[str, Any]:
        """One forward pass in training.

        Args:
            flags: what this rank asks all ranks to know. They travel with the losses, so asking costs no exchange of its own.

        Returns:
            dict of ``loss`` (scalar with graph, this rank's), ``num_samples``, ``losses`` (the ``loss/`` values of the model, with graph), and
            ``log_names``/``log_values``: names and a float32 vector on the device, mean over ranks. With several ranks
            ``flags``: a vector on the device, > 0 where any rank asks. These two are under way until :func:`finish_exchange`: a rank
            goes on to its backward pass without waiting for the others' forward pass. Nothing is copied to the host here (see the
            optimizer hook).
        """
        beat()
        batch = unpack_batch(data, self.device)
        losses = self._forward[0](batch)
        total, names, values = sum_losses(losses)
        local = torch.stack(values)
        # Only what the total holds: its graph is freed by the backward pass, any other would live until the next step.
        terms = {name: value for name, value in losses.items() if name.startswith(LOSS_PREFIX)}
        outputs = {'loss': total, 'num_samples': batch_size(batch), 'losses': terms, 'log_names': names, 'log_values': local,
                   'local_values': local}
        if self.distributed:
            self._same_names(tuple(names))
            mean = torch.cat([local, torch.tensor(flags, dtype=local.dtype).to(local.device, non_blocking=True)]) / dist.get_world_size()
            outputs.update(exchange=dist.all_reduce(mean, async_op=True), log_values=mean[:len(names)], flags=mean[len(names):])
        return outputs

    def losses_alone(self, data: Mapping[str, Any]) -> Tuple[torch.Tensor, List[str], List[torch.Tensor]]:
        """:func:`sum_losses` of one more forward pass of this process, without the other ranks (except in SyncBatchNorm)."""
        forward = self._forward[0].module if self.distributed else self._forward[0]
        return sum_losses(forward(unpack_batch(data, self.device)))

    def val_step(self, data: Mapping[str, Any], optimizer: Any = None, **kwargs: Any) -> Dict[str, Any]:
        """One forward pass of the model as it stands, as a dict ``{'results': ...}``."""
        return {'results': self(data)}

    def _same_names(self, names: Tuple[str, ...]) -> None:
        """All ranks must log the same names in the same order, or the sums would mix different losses.

        The ranks compare once, at the first step; from then on each compares with its own first step.
        """
        if self._names is None:
            every: List[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, names)
            for rank, other in enumerate(every):
                if other != every[0]:
                    missing, extra = sorted(set(every[0]) - set(other)), sorted(set(other) - set(every[0]))
                    raise RuntimeError(f'rank {rank} logs other losses than rank 0: missing {missing}, additional {extra}, or '
                                       'another order. A model must return the same names whatever its samples hold')
            self._names = names
        elif names != self._names:
            missing, extra = sorted(set(self._names) - set(names)), sorted(set(names) - set(self._names))
            raise RuntimeError(f'the losses changed during training: missing {missing}, additional {extra}, or another order. '
                               'A model must return the same names whatever its samples hold')
