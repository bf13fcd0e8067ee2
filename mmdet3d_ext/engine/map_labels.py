"""Checks before the first step that map labels and map heads mean the same: classes, metres, cells."""
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


def _label_steps(dataset: Any) -> Iterator[Any]:
    """The map label steps of a data set and of those that it wraps."""
    for step in getattr(dataset, 'transforms', None) or ():
        if type(step).__name__ == 'LoadBEVSegmentation':
            yield step
    inner = getattr(dataset, 'dataset', None)
    for one in [inner] if inner is not None else getattr(dataset, 'datasets', None) or ():
        yield from _label_steps(one)
