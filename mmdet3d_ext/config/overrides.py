"""Command-line overrides: ``--a.b.c value``, ``--a.b.c=value``, ``a.b.c=value``, ``--train_pipeline.3.prob 0.5``.

A value is typed: numbers (``1e-4`` too), ``true``/``false``/``null`` and ``True``/``False``/``None``, lists and mappings in
Python's or YAML's spelling, ``${...}`` expressions; anything else is text. A list may be spread over several words, as
happens when a launcher strips the quotes: ``--voxel_size [0.1, 0.1, 0.2]``.
"""
from __future__ import annotations

import ast
import re
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import yaml

from . import schema
from .errors import COMMAND_LINE, ConfigError, Key, Path, dotted, hint
from .expressions import FROM
from .yaml_source import ArgumentLoader

ALLOW_NEW = '--allow-new'
_KEY = re.compile(r'^[A-Za-z_][\w*+-]*(\.[\w*+-]+)*$')  # "*" and "+": map classes are called "drivable_area*"
_WORDS = {'true': True, 'True': True, 'false': False, 'False': False, 'null': None, 'None': None, '~': None, '': ''}
_YAML_BOOLS = ('yes', 'no', 'on', 'off', 'y', 'n')


class Override(NamedTuple):
    """One ``key = value`` of the command line: the path, and the words of the value."""

    path: Path
    words: Tuple[str, ...]

    @property
    def flag(self) -> str:
        return f'--{dotted(self.path)}'


def parse(argv: Sequence[str]) -> Tuple[List[Override], bool]:
    """Split command-line words into overrides; also tells whether ``--allow-new`` was among them.

    Raises:
        ConfigError: for a word that is no key, or a key without a value.
    """
    overrides: List[Override] = []
    allow_new = False
    words = [str(word) for word in argv]
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word == ALLOW_NEW:
            allow_new = True
            continue
        name, equals, first = word.partition('=')
        key = name[2:] if name.startswith('--') else name
        if not _KEY.match(key):
            raise ConfigError(f'{COMMAND_LINE}: expected --key value or --key=value, got {word!r}')
        values = [first] if equals else []
        while position < len(words) and not words[position].startswith('--') \
                and not (equals and _closed(values) and starts_key(words[position])):
            values.append(words[position])
            position += 1
        if not values:
            raise ConfigError(f'{COMMAND_LINE}: --{key} has no value; write --{key} true (or false, null, a number, a text)')
        path = tuple(int(part) if re.fullmatch(r'-?\d+', part) else part for part in key.split('.'))
        overrides.append(Override(path, tuple(values)))
    return overrides, allow_new


def _closed(words: Sequence[str]) -> bool:
    text = ' '.join(words)
    return all(text.count(a) == text.count(b) for a, b in ('[]', '()', '{}'))


def starts_key(word: str) -> bool:
    """Whether ``word`` is a ``key=value``, rather than more of the value of the word before it."""
    return '=' in word and bool(_KEY.match(word.partition('=')[0]))


def typed(text: str) -> Any:
    """The value that one piece of command-line text means.

    Raises:
        ValueError: for text that begins a list or mapping and is none.
    """
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith('${') or text in _YAML_BOOLS or text.lower() in _YAML_BOOLS:
        return text
    try:
        return _plain(ast.literal_eval(text))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    bracket = text[:1] in '[{('
    try:
        value = yaml.load(text, Loader=ArgumentLoader)  # noqa: S506  (a SafeLoader subclass)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = None
    if bracket:
        if isinstance(value, (list, dict)):
            return value
        raise ValueError(f'{text!r} begins like a list or mapping and is none')
    return value if isinstance(value, (float, bool)) else text  # .inf, TRUE; not 12:30, which YAML takes for 750


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    raise ValueError(f'a {type(value).__name__} has no place in a configuration')


def read_value(override: Override, current: Any) -> Any:
    """The typed value of an override. ``current``: the present value, which decides what several bare words mean."""
    text = ' '.join(override.words)
    try:
        if len(override.words) == 1 or text.lstrip()[:1] in '[{(' or text.lstrip().startswith('${'):
            return typed(text)
        if isinstance(current, list):
            return [typed(word) for word in override.words]
    except ValueError as error:
        raise ConfigError(f'{COMMAND_LINE}: {override.flag}: {error}') from None
    if isinstance(current, str):
        return text
    raise ConfigError(f'{COMMAND_LINE}: {override.flag}: several words {list(override.words)} for one value; write a list as '
                      f'[a, b], and every key with --')


def apply(tree: Dict[str, Any], override: Override, allow_new: bool,
          open_expression: Callable[[Path, Any], Any]) -> Path:
    """Set one override in ``tree``.

    Args:
        tree: the raw configuration, changed in place.
        override: what to set.
        allow_new: whether unknown keys may be made.
        open_expression: gives the value of an expression (or of a mapping that begins with one) at a path, for an
            override of something inside it.

    Returns:
        The path that was set.

    Raises:
        ConfigError: naming the key, for an unknown key (with the nearest known one), a list index outside the list, or a
            path through something that is neither a list nor a mapping.
    """
    node: Any = tree
    path = tuple(schema.ALIASES.get(part, part) if index == 0 else part for index, part in enumerate(override.path))
    here: Path = ()
    for key in path[:-1]:
        key = _index(node, key, override)
        parent, node = node, _child(node, here, key, override, allow_new, open_expression)
        here = (*here, key)
        if stands_for_another(node):
            node = open_expression(here, node)
        if node is None and (allow_new or _declared(here)):
            node = {}
        if not isinstance(node, (dict, list)):
            raise ConfigError(f'{COMMAND_LINE}: {override.flag}: {dotted(here)!r} is {node!r}, it has no keys')
        parent[key] = node
    last = _index(node, path[-1], override)
    if isinstance(node, dict) and last not in node:
        _check_new(node, here, last, override, allow_new, open_expression)
    current = node[last] if isinstance(node, list) else node.get(last)
    node[last] = read_value(override, current)
    return (*here, last)


def stands_for_another(node: Any) -> bool:
    """Whether ``node`` is an expression, or a mapping that begins with one."""
    return isinstance(node, str) and '${' in node or isinstance(node, dict) and FROM in node


def _declared(path: Path) -> bool:
    return bool(schema.KNOWN.get(dotted(path)))


def _child(node: Any, path: Path, key: Key, override: Override, allow_new: bool,
           open_expression: Callable[[Path, Any], Any]) -> Any:
    if isinstance(node, dict) and key not in node:
        _check_new(node, path, key, override, allow_new, open_expression)
        return {}
    return node[key]


def _index(node: Any, key: Key, override: Override) -> Key:
    """``key`` as it indexes ``node``: itself in a mapping, a checked position from 0 in a list."""
    if not isinstance(node, list):
        return key
    if not isinstance(key, int):
        raise ConfigError(f'{COMMAND_LINE}: {override.flag}: {key!r} indexes a list; write a number from 0 to {len(node) - 1}')
    if not -len(node) <= key < len(node):
        raise ConfigError(f'{COMMAND_LINE}: {override.flag}: index {key} is outside a list of {len(node)}')
    return key % len(node)


def _check_new(node: Dict[Any, Any], path: Path, key: Key, override: Override, allow_new: bool,
               open_expression: Callable[[Path, Any], Any]) -> None:
    """Refuse a ``key`` that may not be added to the mapping ``node`` at ``path``."""
    if allow_new:
        return
    if stands_for_another(node.get('type')):
        node = {**node, 'type': open_expression((*path, 'type'), node['type'])}
    allowed = schema.allowed_children(path, node)
    if str(key) in allowed:
        return
    if schema.replacement((*path, key)):
        raise ConfigError(f'{COMMAND_LINE}: {override.flag}: a key of mmdet3d >= 1.1: {schema.replacement((*path, key))}')
    where = f'in {dotted(path)!r}' if path else 'at the top'
    allowed = [name for name in allowed if path or name not in schema.IGNORED]
    raise ConfigError(f'{COMMAND_LINE}: {override.flag}: unknown key {str(key)!r} {where}{hint(key, allowed, path)} '
                      f'({ALLOW_NEW} adds new keys)')
