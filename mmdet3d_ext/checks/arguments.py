"""Every ``type`` of the model and of the pipelines takes the arguments that it is given."""
from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, Set

from ..config.errors import nearest
from ..config.schema import constructor_arguments
from .context import Context, nodes
from .pipelines import dataset_keys


def check_arguments(c: Context) -> None:
    places = [('model', c.get('model'))]
    places += [(f'{key}.pipeline', c.get(f'{key}.pipeline')) for part in ('train', 'val', 'test') for key in dataset_keys(c, part)]
    for root, value in places:
        for key, settings in nodes(value, root):
            _arguments(c, key, settings, constructor_arguments)


def _arguments(c: Context, key: str, settings: Mapping[str, Any], arguments: Callable[[Any], Optional[Set[str]]]) -> None:
    known = arguments(settings.get('type')) if 'type' in settings else None
    for name in settings if known else ():
        if name not in known and name != 'type':
            near = nearest(name, sorted(known))
            c.error(f'{key}.{name}', f'{settings["type"]} takes no argument {name!r}' + (f'; did you mean {near!r}?' if near else ''))
