"""Load a torchpack-style configuration: folder inheritance, overrides, expressions, and where each value came from."""
from __future__ import annotations

import copy
import hashlib
import json
import os
import warnings
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from . import dialect, schema
from . import overrides as override_rules
from .errors import COMMAND_LINE, ConfigError, Path, Source, display, dotted, hint
from .expressions import FROM, Resolver, names_in
from .yaml_source import dump_yaml, load_yaml

DEFAULT = 'default'
ROOT_FOLDER = 'configs'
HELPERS = '_helpers'  # in a file: names of root keys that are no settings of the framework
TEMPLATES = 'templates'  # root key: parts that expressions refer to; no part of the resolved configuration


class ConfigNode(dict):
    """A mapping of a configuration, whose keys are attributes too (``node.optimizer.lr``).

    dict's own methods win over keys of the same name (``node['items']``). A missing attribute is an ``AttributeError`` that
    names the full key and the nearest one. Assigned attributes become keys; mappings inside lists are nodes as well.
    """

    def __init__(self, data: Mapping[Any, Any] = (), path: Path = ()):
        super().__init__()
        object.__setattr__(self, '_path', tuple(path))
        for key, value in dict(data).items():
            self[key] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, _node(value, (*self._path, key)))

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith('__') or name == '_path':
            raise AttributeError(name)
        path = (*self._path, name)
        raise AttributeError(f'the configuration has no key {dotted(path)!r}{hint(name, self, self._path)}')

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __reduce__(self):
        return type(self), (dict(self), self._path)

    def copy(self) -> 'ConfigNode':
        """A shallow copy."""
        return copy.copy(self)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def select(self, path: Union[str, Sequence[Any]], default: Any = None) -> Any:
        """The value at a dotted path (``'data.train.0.type'``), or ``default`` where any part of it is missing."""
        found = _walk(self, _split(path))
        return default if found is _MISSING else found


class Config(ConfigNode):
    """A whole, resolved configuration.

    Attributes (not keys):
        filename: absolute name of the leaf file, or None.
        files: every file that was merged, lowest precedence first.
    """

    def __init__(self, data: Mapping[Any, Any] = (), path: Path = (), filename: Optional[str] = None,
                 files: Sequence[str] = (), sources: Optional[Mapping[Path, Source]] = None):
        object.__setattr__(self, 'filename', filename)
        object.__setattr__(self, 'files', tuple(files))
        object.__setattr__(self, '_sources', dict(sources or {}))
        super().__init__(data, path)

    def __reduce__(self):
        return type(self), (dict(self), self._path, self.filename, self.files, self._sources)

    def to_dict(self) -> Dict[str, Any]:
        """A deep copy made of plain dicts, lists and scalars."""
        return _plain(self, ())

    def dump(self, path: Optional[str] = None) -> str:
        """The resolved configuration as YAML, which :func:`load_config` reads back; written to ``path`` if given.

        Keys that only expressions used are listed under ``_helpers``, because no expression is left to vouch for them.
        """
        data = self.to_dict()
        helpers = [key for key in data if not _known_root(key)]
        text = dump_yaml({**data, HELPERS: helpers} if helpers else data)
        if path is not None:
            with open(path, 'w', encoding='utf-8') as stream:
                stream.write(text)
        return text

    @property
    def hash(self) -> str:
        """First 8 hexadecimal digits of the SHA-256 of the resolved configuration as JSON with sorted keys."""
        text = json.dumps(_text_keys(self.to_dict()), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def source_of(self, key: Union[str, Sequence[Any]]) -> Optional[str]:
        """The file that gave ``key`` (dotted) its value: an absolute name, ``'command line'``, or None if unknown.

        A key inside the result of an expression has the source of that expression.
        """
        source = self._source(_split(key))
        return source.file if source else None

    def where(self, key: Union[str, Sequence[Any]]) -> str:
        """``"<file>:<line>: key 'a.b'"``, to begin an error message about the value of ``key`` with."""
        path = _split(key)
        return f"{self._source(path) or display(self.filename or 'configuration')}: key {dotted(path)!r}"

    def _source(self, path: Path) -> Optional[Source]:
        return _find_source(self._sources, path)


_MISSING = object()


def load_config(path: str, overrides: Optional[Iterable[str]] = None, allow_new: bool = False) -> Config:
    """Read a configuration file with everything that it inherits.

    ``default.yaml`` of each folder from the root down to the file's own is merged first, then the file. The root is the nearest
    parent folder called ``configs``; a file outside any such folder inherits from its own folder and from the parents
    above it as long as each of them holds a ``default.yaml``. The working directory plays no part, so a relative and an
    absolute name give the same result. A mapping is merged into a mapping key by key; anything else (list, null,
    scalar) replaces. A mapping is also merged into the mapping that an inherited ``${...}`` gives, unless it names the one it
    begins with itself (``_from: "${...}"``). ``overrides`` come next, and expressions are evaluated last. What stands under
    ``templates`` is only there to be referred to and left out of the result. Values that the reference means differently
    are named in a warning (:mod:`.dialect`).

    Args:
        path: the YAML file.
        overrides: command-line words (see :mod:`mmdet3d_ext.config.overrides`); ``--allow-new`` among them is ``allow_new``.
        allow_new: accept overrides of keys that neither the files nor the schema know.

    Raises:
        ConfigError: naming file, line and key, for a missing or invalid file, an unknown key, a bad override, or a bad
            expression.
    """
    leaf = os.path.abspath(os.path.expanduser(os.fspath(path)))
    if leaf.endswith('.py'):
        raise ConfigError(f'{display(leaf)}: Python configurations are not run; take the YAML of configs/ for this model and '
                          'change what differs (docs/migrating.md has the keys)')
    files = inheritance(leaf)
    tree: Dict[str, Any] = {}
    sources: Dict[Path, Source] = {}
    for file in files:
        data, lines = load_yaml(file)
        _rename_aliases(data, lines)
        _merge(tree, data, sources, lines, ())
    _refuse_unknown_roots(tree, sources)
    _apply_overrides(tree, sources, list(overrides or ()), allow_new)
    cfg = Config(_resolver(tree, sources).resolve(without=(TEMPLATES,)), (), leaf, files, sources)
    dialect.translate(cfg)
    return cfg


def inheritance(leaf: str) -> List[str]:
    """The files that make up ``leaf`` (an absolute name), lowest precedence first; the rule is in :func:`load_config`."""
    name = DEFAULT + os.path.splitext(leaf)[1]
    folders = [os.path.dirname(leaf)]
    while os.path.dirname(folders[-1]) != folders[-1]:
        folders.append(os.path.dirname(folders[-1]))
    roots = [index for index, folder in enumerate(folders) if os.path.basename(folder) == ROOT_FOLDER]
    if roots:
        folders = folders[:roots[0] + 1]
    else:
        count = 1
        while count < len(folders) - 1 and os.path.isfile(os.path.join(folders[count], name)):
            count += 1
        folders = folders[:count]
    candidates = [os.path.join(folder, name) for folder in reversed(folders)]
    return [file for file in candidates if os.path.isfile(file) and file != leaf] + [leaf]


def require(cfg: Config, keys: Iterable[str], allow_null: bool = False) -> None:
    """Check that dotted ``keys`` are there (and not null), before anything expensive is built.

    Raises:
        ConfigError: naming every missing key, the nearest present one, and the file.
    """
    problems = []
    for key in keys:
        path = _split(key)
        value = _walk(cfg, path)
        if value is _MISSING:
            depth = next(n for n in range(len(path)) if _walk(cfg, path[:n + 1]) is _MISSING)
            parent = _walk(cfg, path[:depth]) if depth else cfg
            near = hint(path[depth], parent, path[:depth]) if isinstance(parent, Mapping) else ''
            problems.append(f'{key!r} is missing{near}')
        elif value is None and not allow_null:
            problems.append(f'{key!r} is null ({cfg._source(path) or "set in code"})')
    if problems:
        raise ConfigError(f"{display(cfg.filename or 'configuration')}: required: " + '; '.join(problems))


def expect(cfg: Config, key: str, kinds: Union[type, Tuple[type, ...]], optional: bool = False) -> Any:
    """The value at the dotted ``key``, checked to be of ``kinds`` (an int passes as float, a bool never as a number).

    Raises:
        ConfigError: naming file, line, key and the value received.
    """
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    value = cfg.select(key)
    if value is None and optional:
        return None
    accepted = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
        names = ' or '.join(kind.__name__ for kind in kinds)
        raise ConfigError(f'{cfg.where(key)}: expected {names}, got {value!r}')
    return value


# ---- merging -------------------------------------------------------------------------------------------------------------
def _rename_aliases(data: Dict[str, Any], lines: Dict[Path, Source]) -> None:
    """Old root names of one file become the present ones, so that inheritance works whichever name each file uses."""
    for old, new in schema.ALIASES.items():
        if old not in data:
            continue
        source = lines[(old,)]
        if new in data and data[new] != data[old]:
            raise ConfigError(f'{source}: {old!r} is another name of {new!r}, and they differ: {data[old]!r} and {data[new]!r}')
        warnings.warn(f'{source}: {old!r} is called {new!r} here; taken as such', stacklevel=3)
        data[new] = data.pop(old)
        for path in [p for p in lines if p[0] == old]:
            lines[(new, *path[1:])] = lines.pop(path)


def _merge(base: Dict[str, Any], new: Mapping[str, Any], sources: Dict[Path, Source], lines: Mapping[Path, Source],
           path: Path) -> None:
    for key, value in new.items():
        here = (*path, key)
        merges = isinstance(value, dict) and FROM not in value
        if merges and isinstance(base.get(key), str) and '${' in base[key]:
            sources[(*here, FROM)] = _find_source(sources, here)
            base[key] = {FROM: base[key]}
        if merges and isinstance(base.get(key), dict):
            sources[here] = lines[here]
            _merge(base[key], value, sources, lines, here)
            continue
        base[key] = value
        _replace_sources(sources, here, {p: s for p, s in lines.items() if p[:len(here)] == here})


def _replace_sources(sources: Dict[Path, Source], path: Path, new: Mapping[Path, Source]) -> None:
    for old in [p for p in sources if p[:len(path)] == path]:
        del sources[old]
    sources.update(new)


def _apply_overrides(tree: Dict[str, Any], sources: Dict[Path, Source], words: List[str], allow_new: bool) -> None:
    chosen, flag = override_rules.parse(words)
    names = [override.path[0] for override in chosen]
    for old, new in schema.ALIASES.items():
        if old in names and new in names:
            raise ConfigError(f'{COMMAND_LINE}: --{old} is another name of --{new}; give one of them')
        if old in names:
            warnings.warn(f'{COMMAND_LINE}: --{old} is called --{new} here; taken as such', stacklevel=3)

    def opened(path: Path, raw: Any) -> Any:
        # The copy is private to this place: the key that the expression refers to keeps its own value.
        return _resolver(tree, sources).read(path, raw)

    # Inside an expression's result only after everything that the expression may refer to has been set.
    for override in sorted(chosen, key=lambda item: _crosses_expression(tree, item.path)):
        path = override_rules.apply(tree, override, allow_new or flag, opened)
        _replace_sources(sources, path, {path: Source(COMMAND_LINE)})


def _crosses_expression(tree: Any, path: Path) -> bool:
    for depth in range(1, len(path)):
        value = _walk(tree, path[:depth])
        if override_rules.stands_for_another(value):
            return True
    return False


def _known_root(key: Any) -> bool:
    return key in schema.KNOWN or str(key).startswith('_')


def _refuse_unknown_roots(tree: Dict[str, Any], sources: Mapping[Path, Source]) -> None:
    """A root key is known to the schema, used by some expression, listed as a helper, or private (it begins with "_")."""
    helpers = tree.pop(HELPERS, None) or []
    unknown = [key for key in tree if not _known_root(key) and key not in helpers]
    used = set(_names(tree)) if unknown else set()
    known = [*(key for key in schema.KNOWN if '.' not in key and key not in schema.IGNORED), *(key for key in tree if key in used)]
    for key in unknown:
        if key not in used and schema.replacement((key,)):
            raise ConfigError(f'{sources[(key,)]}: key {key!r} is of mmdet3d >= 1.1: {schema.replacement((key,))}')
        if key not in used:
            raise ConfigError(f'{sources[(key,)]}: unknown key {key!r}{hint(key, known)} (nothing reads it and no expression '
                              f'uses it; a helper may be called _{key})')
    for section, children in schema.KNOWN.items():
        path = _split(section)
        node = _walk(tree, path)
        if children and isinstance(node, dict) and 'type' not in node:
            for key in node:
                if key not in children and not str(key).startswith('_'):
                    raise ConfigError(f'{_find_source(sources, (*path, key))}: unknown key {dotted((*path, key))!r}'
                                      f'{hint(key, children, path)}')


def _names(node: Any) -> Iterable[str]:
    if isinstance(node, str) and '${' in node:
        yield from names_in(node)
    elif isinstance(node, dict):
        for value in node.values():
            yield from _names(value)
    elif isinstance(node, list):
        for value in node:
            yield from _names(value)


def _resolver(tree: Mapping[str, Any], sources: Mapping[Path, Source]) -> Resolver:
    return Resolver(tree, lambda path: str(_find_source(sources, path) or 'configuration'), schema.ALIASES)


# ---- helpers -------------------------------------------------------------------------------------------------------------
def _find_source(sources: Mapping[Path, Source], path: Path) -> Optional[Source]:
    while path:
        for place in (path, (*path[:-1], FROM)):  # not written here: from what the mapping begins with, if with anything
            if place in sources:
                return sources[place]
        path = path[:-1]
    return None


def _split(key: Union[str, Sequence[Any]]) -> Path:
    if not isinstance(key, str):
        return tuple(key)
    return tuple(int(part) if part.isdigit() else part for part in key.split('.'))


def _walk(node: Any, path: Path) -> Any:
    for key in path:
        if isinstance(node, Mapping):
            if key not in node:
                return _MISSING
            node = node[key]
        elif isinstance(node, (list, tuple)) and isinstance(key, int) and -len(node) <= key < len(node):
            node = node[key]
        else:
            return _MISSING
    return node


def _node(value: Any, path: Path) -> Any:
    if isinstance(value, dict) and not isinstance(value, ConfigNode):
        return ConfigNode(value, path)
    if type(value) is list:
        return [_node(item, (*path, index)) for index, item in enumerate(value)]
    return value


def _text_keys(value: Any) -> Any:
    """Keys as text, because JSON cannot sort numbers among names."""
    if isinstance(value, dict):
        return {str(key): _text_keys(item) for key, item in value.items()}
    return [_text_keys(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any, path: Path) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item, (*path, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, (str, bool, int, float)) or value is None:
        return value
    raise ConfigError(f'key {dotted(path)!r} holds a {type(value).__name__}, which cannot be written to YAML')
