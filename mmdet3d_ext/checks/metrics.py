"""Names of the metrics that an evaluation gives, known before anything is built."""
from __future__ import annotations

from typing import Any, List, Mapping, Optional

from ..config.errors import nearest
from ..metrics.bev_iou import THRESHOLDS
from .context import Context, walk
from .values import thresholds_problem

# The devkit's configurations all have these distances (metres) and errors.
DISTANCES = (0.5, 1.0, 2.0, 4.0)
ERRORS = ('trans_err', 'scale_err', 'orient_err', 'vel_err', 'attr_err')
MEANS = ('nds', 'map', 'mATE', 'mASE', 'mAOE', 'mAVE', 'mAAE')


def metric_names(cfg: Mapping[str, Any]) -> Optional[List[str]]:
    """Keys of ``metrics.json`` as this configuration's validation writes them; None for data sets with metrics of their own."""
    data, heads = walk(cfg, 'data.val'), walk(cfg, 'model.heads')
    if not isinstance(data, Mapping) or data.get('type') != 'NuScenesDataset' or not isinstance(heads, Mapping):
        return None
    names: List[str] = []
    if heads.get('object') is not None:
        names += [f'object/{name}' for name in MEANS]
        names += [f'object/{name}_{key}' for name in cfg.get('object_classes') or ()
                  for key in (*(f'ap_dist_{one}' for one in DISTANCES), *ERRORS)]
    if heads.get('map') is not None:
        wanted = walk(cfg, 'evaluation.thresholds')
        thresholds = wanted if thresholds_problem(wanted) is None else THRESHOLDS
        keys = [*(f'iou@{one:.2f}' for one in thresholds), 'iou@max']
        for grid in ('map', 'map_ref'):
            names += [f'{grid}/mean/iou@max', *(f'{grid}/{name}/{key}' for name in cfg.get('map_classes') or () for key in keys)]
    return names


def check_metrics(c: Context) -> None:
    """The best checkpoint's metric; else it is refused after the first epoch, hours later."""
    wanted, known = c.get('evaluation.save_best'), metric_names(c.cfg)
    if wanted is None or known is None or wanted in known:
        return
    near = nearest(wanted, known) or (known[0] if known else None)
    c.error('evaluation.save_best', f'is {wanted!r}, which this evaluation does not give', {'evaluation.save_best': near} if near else None)
