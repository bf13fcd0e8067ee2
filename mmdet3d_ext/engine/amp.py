"""Which precision a run computes in, from the configuration and the device."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Mapping, Optional

import torch

from ..checks.values import precision_problem
from .launch import UserError

DTYPES = {'fp16': torch.float16, 'float16': torch.float16, 'half': torch.float16,
          'bf16': torch.bfloat16, 'bfloat16': torch.bfloat16, 'fp32': None, 'float32': None, 'none': None, 'off': None}


@dataclass(frozen=True)
class AmpPlan:
    """``dtype``: autocast type or None for float32. ``loss_scale``: what GradScaler is made from (float16 only)."""

    dtype: Optional[torch.dtype]
    loss_scale: Any = None


def plan_amp(cfg: Mapping[str, Any], device: torch.device, logger: Optional[logging.Logger] = None) -> AmpPlan:
    """Read ``fp16: {loss_scale: ...}`` (as in the reference) and ``amp: {dtype: fp16|bf16|fp32, loss_scale: ...}``.

    ``amp`` decides where both are given. float16 needs a GPU: on the CPU the run is in float32, which is said once.

    Raises:
        UserError: for an unknown type or key.
    """
    fp16, amp = cfg.get('fp16'), cfg.get('amp')
    if isinstance(amp, (str, bool)):
        amp = {'dtype': amp if isinstance(amp, str) else ('fp16' if amp else 'fp32')}
    if not amp and (not fp16 or fp16.get('enabled') is False):
        return AmpPlan(None)
    name, loss_scale = 'fp16', None
    if fp16:
        name = fp16.get('dtype') or 'fp16'
        loss_scale = fp16.get('loss_scale')
        extra = {k: fp16[k] for k in ('growth_interval', 'init_scale') if fp16.get(k) is not None}
        if extra:
            loss_scale = {**(loss_scale if isinstance(loss_scale, Mapping) else {}), **extra}
    if amp:
        unknown = set(amp) - {'dtype', 'loss_scale', 'enabled'}
        if unknown:
            raise UserError(f'key amp: unknown keys {sorted(unknown)}; it takes dtype (fp16, bf16, fp32), loss_scale, enabled')
        if amp.get('enabled') is False:
            return AmpPlan(None)
        name = amp.get('dtype') or name
        loss_scale = amp.get('loss_scale', loss_scale)
    problem = precision_problem(name)
    if problem:
        raise UserError(f'key amp.dtype: {problem}')
    dtype = DTYPES[str(name).lower()]
    if dtype == torch.float16 and device.type == 'cpu':
        if logger is not None:
            logger.warning('float16 training needs a GPU: on the CPU this run computes in float32')
        return AmpPlan(None)
    if dtype == torch.bfloat16 and device.type == 'cuda' and not torch.cuda.is_bf16_supported(including_emulation=False):
        if logger is not None:
            logger.warning('%s has no bfloat16 units: it is emulated and slow; use amp.dtype fp16',
                           torch.cuda.get_device_name(device))
    if isinstance(loss_scale, Mapping):
        loss_scale = dict(loss_scale)
    return AmpPlan(dtype, loss_scale)


def choose_kernels(cfg: Mapping[str, Any]) -> None:
    """Apply ``cudnn_benchmark`` and ``allow_tf32`` to this process.

    ``allow_tf32``: whether float32 convolutions, matrix products and sparse convolutions may run in TF32 (10 bits of mantissa, on GPUs
    of compute capability 8.0 and higher); None leaves torch's default, convolutions only.

    Raises:
        UserError: if ``allow_tf32`` is not true, false or null.
    """
    torch.backends.cudnn.benchmark = bool(cfg.get('cudnn_benchmark'))
    wanted = cfg.get('allow_tf32')
    if wanted is not None and not isinstance(wanted, bool):
        raise UserError(f'key allow_tf32 must be true, false or null, got {wanted!r}')
    if wanted is not None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = wanted
