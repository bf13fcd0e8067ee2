"""YAML files as plain data plus the line of every key.

The dialect is PyYAML's safe one with three differences, each because users were bitten by the original:
``2e-4`` is a float (PyYAML: the string '2e-4'), a key written twice in one mapping is an error (PyYAML: the last wins
silently), and dates stay strings.
"""
from __future__ import annotations

import math
import re
from typing import Any, Dict, Tuple

import yaml

from .errors import ConfigError, Path, Source, display, dotted

# Aliases (``&a``/``*a``) copy subtrees, so a few lines can describe an exponentially large document.
MAX_NODES = 200_000

_FLOAT = re.compile(r'''^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
                     |[0-9][0-9_]*[eE][-+]?[0-9]+
                     |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
                     |\.(?:inf|Inf|INF))
                     |\.(?:nan|NaN|NAN))$''', re.VERBOSE)
_DROPPED = ('tag:yaml.org,2002:float', 'tag:yaml.org,2002:timestamp')


def _with_our_floats(cls: type) -> type:
    """Replace the float rule and drop the date rule of a PyYAML loader or dumper class, on a copy of its rules."""
    cls.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in _DROPPED]
        for first, rules in cls.yaml_implicit_resolvers.items()}
    cls.add_implicit_resolver('tag:yaml.org,2002:float', _FLOAT, list('-+0123456789.'))
    return cls


@_with_our_floats
class Loader(yaml.SafeLoader):
    """Safe loader with scientific floats."""


class ArgumentLoader(Loader):
    """As :class:`Loader`; ``None`` is null too, because command lines are written in Python's spelling as often as YAML's."""


ArgumentLoader.yaml_implicit_resolvers = {k: list(v) for k, v in Loader.yaml_implicit_resolvers.items()}
ArgumentLoader.add_implicit_resolver('tag:yaml.org,2002:null', re.compile('^None$'), ['N'])
ArgumentLoader.add_constructor('tag:yaml.org,2002:null', lambda loader, node: None)


@_with_our_floats
class Dumper(yaml.SafeDumper):
    """Writes what :class:`Loader` reads back unchanged: a *string* such as '2e-4' is quoted, and there are no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_yaml(data: Any) -> str:
    """``data`` (dicts, lists, scalars) as YAML text in the order given."""
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def load_yaml(file: str) -> Tuple[Dict[str, Any], Dict[Path, Source]]:
    """Read one YAML file.

    Args:
        file: absolute file name.

    Returns:
        The mapping in the file (``{}`` for an empty file), and the source of every key and list item by path.

    Raises:
        ConfigError: file missing or unreadable, invalid YAML, a key written twice, or a top level that is not a mapping.
            The message holds file and line.
    """
    try:
        with open(file, encoding='utf-8') as stream:
            text = stream.read()
    except FileNotFoundError:
        raise ConfigError(f'{display(file)}: no such configuration file') from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'{display(file)}: cannot be read: {error}') from error
    loader = None
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        reader = _Reader(loader, file)
        data = reader.build(node, (), ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 0
        problem = ' '.join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f'{Source(file, line)}: not valid YAML: {problem}') from error
    except yaml.YAMLError as error:
        raise ConfigError(f'{display(file)}: not valid YAML: {error}') from error
    except RecursionError:
        raise ConfigError(f'{display(file)}: nested too deeply') from None
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(f'{Source(file, node.start_mark.line + 1)}: a configuration is a mapping of keys, '
                          f'got {type(data).__name__}')
    return data, reader.sources


class _Reader:
    """Builds data from YAML nodes and notes every line."""

    def __init__(self, loader: Loader, file: str):
        self.loader = loader
        self.file = file
        self.sources: Dict[Path, Source] = {}
        self.count = 0

    def build(self, node: yaml.Node, path: Path, parents: Tuple[int, ...]) -> Any:
        self.count += 1
        source = Source(self.file, node.start_mark.line + 1)
        if self.count > MAX_NODES:
            raise ConfigError(f'{source}: more than {MAX_NODES} values once aliases are expanded')
        if id(node) in parents:
            raise ConfigError(f'{source}: key {dotted(path)!r} contains itself through an alias')
        parents = (*parents, id(node))
        if isinstance(node, yaml.MappingNode):
            self._refuse_duplicates(node, path)
            self.loader.flatten_mapping(node)  # the "<<" merge key
            result = {}
            for key_node, value_node in node.value:
                key = self._key(key_node)
                self.sources[(*path, key)] = Source(self.file, key_node.start_mark.line + 1)
                result[key] = self.build(value_node, (*path, key), parents)
            return result
        if isinstance(node, yaml.SequenceNode) and node.tag == 'tag:yaml.org,2002:seq':
            result = []
            for index, item in enumerate(node.value):
                self.sources[(*path, index)] = Source(self.file, item.start_mark.line + 1)
                result.append(self.build(item, (*path, index), parents))
            return result
        return self._scalar(node)

    def _key(self, node: yaml.Node) -> Any:
        key = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(key, (str, int, float)) or (isinstance(key, float) and math.isnan(key)):
            raise ConfigError(f'{Source(self.file, node.start_mark.line + 1)}: a key must be a name or a number')
        return key

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self.loader.construct_object(node, deep=True)
        except ValueError as error:  # e.g. "0b" or "1__": matches PyYAML's pattern, is no number
            raise ConfigError(f'{Source(self.file, node.start_mark.line + 1)}: {error}') from error

    def _refuse_duplicates(self, node: yaml.MappingNode, path: Path) -> None:
        seen: Dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == 'tag:yaml.org,2002:merge':
                continue
            key = self._key(key_node)
            line = key_node.start_mark.line + 1
            if key in seen and seen[key] != line:
                raise ConfigError(f'{Source(self.file, line)}: key {dotted((*path, key))!r} is written twice '
                                  f'(first in line {seen[key]})')
            seen[key] = line
