"""Plain values: numbers, counts, and mappings that would only fail, or mean something else, after data and model are built.

The rules return what is wrong with a value, or None; :mod:`mmdet3d_ext.engine.building` says the same for keys outside this check.
"""
from __future__ import annotations

import math
from typing import Any, Mapping, Optional

from .context import Context

# Key -> the least whole number that it takes.
COUNTS = {'log_config.interval': 1, 'evaluation.interval': 1, 'data.samples_per_gpu': 1, 'data.workers_per_gpu': 0,
          'optimizer_config.cumulative_iters': 1, 'max_epochs': 1, 'runner.max_epochs': 1, 'seed': 0}
NUMBERS = ('optimizer.lr', 'optimizer.weight_decay')
FLAGS = ('allow_tf32', 'cudnn_benchmark', 'deterministic', 'find_unused_parameters', 'image_reduced', 'image_uint8', 'sync_bn')
COMPRESSIONS = ('fp16', 'bf16')
PRECISIONS = ('fp16', 'float16', 'half', 'bf16', 'bfloat16', 'fp32', 'float32', 'none', 'off')  # names of ``amp.dtype``
# Sections that hold settings -> an example. False means null, except where mmcv reads it.
SECTIONS = {'auto_scale_lr': '{base_batch_size: 32}', 'checkpoint_config': '{interval: 1}', 'dist_params': '{timeout: 1800}',
            'ema': '{decay: 0.999}', 'evaluation': '{interval: 1}', 'fp16': '{loss_scale: {growth_interval: 2000}}',
            'guard': '{action: rollback}', 'log_config': '{interval: 50}', 'lr_config': '{policy: CosineAnnealing}',
            'momentum_config': '{policy: cyclic}', 'optimizer_config': '{cumulative_iters: 2}',
            'optimizer_config.grad_clip': '{max_norm: 35, norm_type: 2}'}
OF_MMCV = ('checkpoint_config', 'lr_config', 'momentum_config', 'optimizer_config.grad_clip')


def number_problem(value: Any) -> Optional[str]:
    """A finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        return f'must be a number >= 0, got {value!r} (for example 2.0e-4)'
    return None


def whole_problem(value: Any, least: int) -> Optional[str]:
    """A whole number >= ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        return f'must be a whole number >= {least}, got {value!r}'
    return None


def flag_problem(value: Any) -> Optional[str]:
    """True or false; any other value, 'no' too, would count as true."""
    return None if isinstance(value, bool) else f'must be true, false or null, got {value!r}'


def bucket_problem(value: Any) -> Optional[str]:
    """MiB of gradients per exchange."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        return f'must be a number of MiB > 0 or null, got {value!r} (25 by default)'
    return None


def compression_problem(value: Any) -> Optional[str]:
    """The type in which gradients are exchanged."""
    return None if value in COMPRESSIONS else f'must be {" or ".join(COMPRESSIONS)}, or null (gradients as they are), got {value!r}'


def precision_problem(value: Any) -> Optional[str]:
    """``amp.dtype``, or ``amp`` as its short form."""
    return None if str(value).lower() in PRECISIONS else f'{value!r} is not one of fp16, bf16, fp32'


def decay_problem(value: Any) -> Optional[str]:
    """How much of the average stays in a step."""
    return None if not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < 1 else \
        f'must be between 0 and 1, got {value!r}'


def profile_problem(value: Any) -> Optional[str]:
    """The compatibility profile."""
    return None if value == 'reference' else f'must be reference or null, got {value!r}'


def thresholds_problem(value: Any) -> Optional[str]:
    """Probabilities from which on a map cell counts as predicted."""
    if (isinstance(value, (list, tuple)) and value
            and all(isinstance(one, (int, float)) and not isinstance(one, bool) and 0 < one < 1 for one in value)):
        return None
    return f'must be a list of probabilities between 0 and 1, got {value!r} (null: 0.35, 0.40, ... 0.65)'


def check_values(c: Context) -> None:
    for key in NUMBERS:
        problem = number_problem(c.get(key)) if c.has(key) else None
        if problem and not (key == 'optimizer.lr' and c.get(key) is None):  # the schedule says that it is missing
            c.error(key, problem)
    for key, least in COUNTS.items():
        value = c.get(key)
        problem = whole_problem(value, least) if value is not None else None
        if problem and not (key == 'runner.max_epochs' and value == c.get('max_epochs')):  # it follows that, which has its error
            c.error(key, problem, {key: least})
    for key, problem_with in (('dist_params.bucket_cap_mb', bucket_problem), ('dist_params.compression', compression_problem),
                              ('evaluation.thresholds', thresholds_problem), ('amp.dtype', precision_problem), ('ema.decay', decay_problem),
                              ('compat', profile_problem), *((key, flag_problem) for key in FLAGS)):
        problem = problem_with(c.get(key)) if c.get(key) is not None else None
        if problem:
            c.error(key, problem)
    samples = c.get('data.train_dataloader.samples_per_gpu')
    if samples is not None and samples != c.get('data.samples_per_gpu'):
        c.error('data.train_dataloader.samples_per_gpu', f'is {samples!r}, data.samples_per_gpu is {c.get("data.samples_per_gpu")!r}: the '
                'learning rate, the memory plan and the monitor go by that one', {'data.samples_per_gpu': samples})
    if c.get('amp') is not None and not isinstance(c.get('amp'), (bool, Mapping)) and precision_problem(c.get('amp')):
        c.error('amp', precision_problem(c.get('amp')))
    for key, example in SECTIONS.items():
        value = c.get(key)
        if value is not None and not isinstance(value, Mapping) and (value is not False or key in OF_MMCV):
            c.error(key, f'must be a mapping such as {example} or null, got {value!r}')
    for key in ('lr_config', 'momentum_config'):
        value = c.get(key)
        if isinstance(value, Mapping) and value.get('policy') is None:
            c.error(f'{key}.policy', 'is missing: which schedule?')
    for key in ('model', 'data.train'):
        if c.has(key) and c.get(key) is None:
            c.error(key, 'must not be null: there would be nothing to train')


def count(c: Context, key: str) -> Optional[int]:
    """The whole number at ``key``; None where it is missing or was refused."""
    value = c.get(key)
    return value if value is not None and whole_problem(value, COUNTS[key]) is None else None
