"""Random numbers: one seed per run, from which every rank and epoch draws its own.

Each epoch starts from numbers that depend on (seed, rank, epoch) only. A run that is resumed at an epoch's end therefore
continues exactly as the one that went on, whatever evaluation or logging drew in between.
"""
from __future__ import annotations

import os
import random
from typing import Optional

import numpy as np
import torch
import torch.distributed as dist


def derive(seed: int, *parts: int) -> int:
    """A 32-bit seed for (seed, parts), spread by numpy's SeedSequence so that neighbours are unrelated."""
    return int(np.random.SeedSequence([seed % 2**32, *(p % 2**32 for p in parts)]).generate_state(1)[0])


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch (CPU and all GPUs) of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def agree_on_seed(seed: Optional[int]) -> int:
    """``seed``, or where it is None one number that rank 0 drew, the same on all ranks."""
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            from .launch import UserError
            raise UserError(f'key seed must be a whole number >= 0 or null, got {seed!r}')
        return seed
    drawn = [int.from_bytes(os.urandom(4), 'little') >> 1]
    if dist.is_initialized():
        dist.broadcast_object_list(drawn, src=0)
    return drawn[0]


def make_deterministic() -> None:
    """Deterministic kernels where torch has them (slower); warns, not fails, where it has none."""
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
