"""Checks before the first step that labels and heads mean the same: classes, metres, cells."""
from __future__ import annotations

from typing import Any, Iterator

from torch import nn

from .launch import UserError


def check_map_labels(model: nn.Module, dataset: Any, evaluation: bool = False) -> None:
    """Compare every map head of ``model`` with the ``LoadBEVSegmentation`` step of ``dataset``.

    Args:
        evaluation: the labels are scored against the output, so the cells must agree, too. In training other cells are
            allowed (the head resizes its output to the labels and reports it).

    Raises:
        UserError: naming both configuration keys and both values.
    """
    heads = getattr(model, 'heads', None)
    heads = [head for head in heads.values() if hasattr(head, 'check_labels')] if heads is not None else []
    for labels in _label_steps(dataset):
        for head in heads:
            if list(labels.classes) != list(head.classes):
                raise UserError(f'the map head\'s classes are {list(head.classes)} (model.heads.map.classes), the labels\' are '
                                f'{list(labels.classes)} (classes of LoadBEVSegmentation); they must be the same in the same '
                                'order')
            try:
                head.check_labels(labels.grid)
            except ValueError as error:
                raise UserError(str(error)) from error
            output = head.transform.output_grid
            if evaluation and output.shape != labels.grid.shape:
                raise UserError(f'the map head makes {output} (model.heads.map.grid_transform.output_scope), but it is '
                                f'evaluated on {labels.grid} (xbound/ybound of LoadBEVSegmentation in the validation '
                                'pipeline); align the two')


def check_object_labels(model: nn.Module, dataset: Any) -> None:
    """Compare the classes of every detection head of ``model`` with those that ``dataset`` numbers its labels by.

    Raises:
        UserError: naming both configuration keys and both values.
    """
    while not hasattr(dataset, 'CLASSES') and (getattr(dataset, 'dataset', None) or getattr(dataset, 'datasets', None)):
        dataset = getattr(dataset, 'dataset', None) or dataset.datasets[0]
    labels = getattr(dataset, 'CLASSES', None)
    heads = getattr(model, 'heads', None)
    if labels is None or heads is None:
        return
    for task, head in heads.items():
        if not hasattr(head, 'get_bboxes') or getattr(head, 'num_classes', None) is None:
            continue
        count = head.num_classes if isinstance(head.num_classes, int) else sum(head.num_classes)
        if count != len(labels):
            raise UserError(f'model.heads.{task} has {count} classes (num_classes, or the classes of its tasks), but the data '
                            f'set labels {len(labels)}: {list(labels)} (object_classes); make them the same')
        groups = getattr(head, 'class_names', None) or []
        names = [name for group in groups for name in ([group] if isinstance(group, str) else group)]
        if names and names != list(labels):
            raise UserError(f'model.heads.{task} names its classes {names}, but the data set numbers its labels by '
                            f'{list(labels)} (object_classes): both must have the same order')


def _label_steps(dataset: Any) -> Iterator[Any]:
    """The map label steps of a data set and of those that it wraps."""
    for step in getattr(dataset, 'transforms', None) or ():
        if type(step).__name__ == 'LoadBEVSegmentation':
            yield step
    inner = getattr(dataset, 'dataset', None)
    for one in [inner] if inner is not None else getattr(dataset, 'datasets', None) or ():
        yield from _label_steps(one)
