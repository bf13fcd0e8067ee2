"""The evaluation rows of a run as a table: the metrics that people compare, over epochs."""
from __future__ import annotations

import re
from typing import Dict, List, Tuple

from .records import finite
from .run import Run

_AP = re.compile(r'^object/(.+)_ap_dist_[\d.]+$')
_IOU = re.compile(r'^map/(.+)/iou@max$')


def summary(run: Run) -> Tuple[List[int], List[Tuple[str, str, List[float]]]]:
    """(epochs, rows): each row is (group, label, one value per epoch; NaN where it was not measured).

    Groups: ``overall`` (NDS, mAP, mean IoU), ``object`` (AP per class, the mean over the devkit's distances), ``map`` (IoU at the
    best threshold per class). Logs without these names (mmdet3d's) give all their values in ``other``.
    """
    epochs = [row.epoch for row in run.val]
    tables = [_row(row.values) for row in run.val]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    order = {'overall': 0, 'object': 1, 'map': 2, 'other': 3}
    keys.sort(key=lambda key: order[key[0]])
    return epochs, [(group, label, [table.get((group, label), float('nan')) for table in tables]) for group, label in keys]


def _row(values: Dict[str, float]) -> Dict[Tuple[str, str], float]:
    found: Dict[Tuple[str, str], float] = {}
    for name, label in (('object/nds', 'NDS'), ('object/map', 'mAP'), ('map/mean/iou@max', 'mean IoU')):
        if name in values:
            found['overall', label] = values[name]
    precisions: Dict[str, List[float]] = {}
    for name, value in values.items():
        match = _AP.match(name)
        if match:
            precisions.setdefault(match.group(1), []).append(value)
        match = _IOU.match(name)
        if match and match.group(1) != 'mean':
            found['map', match.group(1)] = value
    for label, numbers in precisions.items():
        numbers = finite(numbers)
        found['object', label] = sum(numbers) / len(numbers) if numbers else float('nan')
    if not found:
        found = {('other', name): value for name, value in values.items() if name != 'lr'}
    return found
