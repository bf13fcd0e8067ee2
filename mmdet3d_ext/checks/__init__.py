"""Is a configuration consistent? Answered in seconds from its values alone: no data, no GPU, no model is built.

:func:`check_config` follows the chain sensors -> fused trunk -> decoder -> heads -> labels in metres, cells and channels, compares the
pipelines, the classes and the schedule, and names for every inconsistency the key to change and the value to write.
"""
from __future__ import annotations

from typing import Any, Mapping, Optional

from .arguments import check_arguments
from .bev import check_bev
from .context import Context
from .grids import check_chain
from .heads import check_heads
from .metrics import check_metrics, metric_names
from .pipelines import check_pipelines
from .report import Finding, Report, Row
from .schedule import check_schedule
from .types import check_classes, check_types
from .values import check_values

__all__ = ['Finding', 'Report', 'Row', 'check_config', 'metric_names']


def check_config(cfg: Mapping[str, Any], gpus: Optional[int] = None) -> Report:
    """Check a resolved configuration.

    Args:
        cfg: from :func:`mmdet3d_ext.config.load_config` (a plain mapping works; places then lack file and line).
        gpus: number of processes that will train; None: not known, the learning rate is only checked against the recipe.

    Returns:
        The chain and the findings. Nothing is raised for what is found.
    """
    context = Context(cfg, gpus)
    context.attempt('optimizer', lambda: check_values(context))
    context.attempt('model', lambda: check_types(context))
    context.attempt('data', lambda: check_classes(context))
    context.attempt('bev', lambda: check_bev(context))
    chain = context.attempt('model', lambda: check_chain(context))
    if chain is not None:
        context.attempt('model.heads', lambda: check_heads(context, chain))
    context.attempt('data', lambda: check_pipelines(context))
    context.attempt('optimizer', lambda: check_schedule(context))
    context.attempt('evaluation.save_best', lambda: check_metrics(context))
    context.attempt('model', lambda: check_arguments(context))
    return context.report
