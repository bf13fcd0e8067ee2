"""``${...}`` expressions, evaluated by walking a whitelisted syntax tree; Python's ``eval`` is never used.

Allowed: numbers, strings, True/False/None, names and attributes of configuration keys, indexing and slicing, + - * / // %
**, comparisons, and/or/not, ``a if c else b``, list/tuple/dict displays, and the functions in :data:`FUNCTIONS`.
Everything else (other calls, lambdas, comprehensions, f-strings, assignments, names with double underscores) is refused.
Sizes are bounded, so a hostile file can neither run code nor take all memory or time.

Names are looked up lazily: ``${model.heads.map.classes}`` touches only that path, so an expression inside ``model`` may
refer to another part of ``model``.

A mapping may begin with another one: ``{_from: "${templates.swin}", depths: [2, 2, 6, 2]}`` is the mapping that the expression
gives with the other keys merged into it, as one file is merged into another.
"""
from __future__ import annotations

import ast
import operator
import warnings
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

from .errors import ConfigError, Key, Path, dotted, hint

MAX_TEXT = 2_000         # characters of one expression
MAX_ITEMS = 100_000      # characters of a string or items of a list that an expression may make
MAX_BITS = 1_024         # size of an integer
MAX_VALUES = 1_000_000   # values made while one configuration is resolved (copies included)
FROM = '_from'           # key of a mapping: the mapping that it begins with
MAX_ROUNDS = 20          # times that a result is evaluated again


class ExpressionError(ValueError):
    """Why an expression was refused; the resolver adds file and key."""


def _range(*args: int) -> List[int]:
    made = range(*args)
    _limit(len(made), 'range')
    return list(made)


def _sum(values: Any) -> Any:
    if any(not isinstance(v, (int, float)) for v in values):
        raise ExpressionError('sum() adds numbers only')
    return sum(values)


def _round(value: Any, digits: Any = None) -> Any:
    if digits is not None and not (isinstance(digits, int) and abs(digits) <= 30):  # round(1, -10**9) would take for ever
        raise ExpressionError(f'round() takes -30 to 30 digits, got {digits!r}')
    return round(value, digits)


def _text(value: Any = '') -> str:
    if not isinstance(value, (str, int, float, bool, type(None))):
        raise ExpressionError('str() takes a number or a string')
    return str(value)


FUNCTIONS: Dict[str, Callable] = {'int': int, 'float': float, 'round': _round, 'len': len, 'min': min, 'max': max,
                                  'abs': abs, 'sum': _sum, 'range': _range, 'str': _text}
_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
           ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_}
_COMPARE = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
            ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
            ast.Is: operator.is_, ast.IsNot: operator.is_not}
_CONSTANT_NAMES = {'true': True, 'false': False, 'null': None}


def _limit(size: int, what: str) -> None:
    if size > MAX_ITEMS:
        raise ExpressionError(f'{what} would make {size} items; the limit is {MAX_ITEMS}')


def _whole_size(value: Any) -> int:
    """Characters and items of ``value`` at every depth, counted until they pass the limit."""
    size, left = 0, [value]
    while left and size <= MAX_ITEMS:
        item = left.pop()
        size += max(1, len(item)) if isinstance(item, str) else 1
        if isinstance(item, (list, tuple)):
            left += item
        elif isinstance(item, Mapping):
            left += item.values()
    return size


def spans(text: str) -> List[Tuple[int, int, str]]:
    """The ``${...}`` parts of ``text`` as (start, end, expression), braces and quotes balanced.

    Raises:
        ExpressionError: if a ``${`` has no closing brace.
    """
    found, position = [], text.find('${')
    while position >= 0:
        depth, quote, end = 1, '', position + 2
        while end < len(text) and depth:
            char = text[end]
            if quote:
                if char == '\\':
                    end += 1
                elif char == quote:
                    quote = ''
            elif char in '\'"':
                quote = char
            else:
                depth += (char == '{') - (char == '}')
            end += 1
        if depth:
            raise ExpressionError('"${" without its closing "}"')
        found.append((position, end, text[position + 2:end - 1]))
        position = text.find('${', end)
    return found


def _parse(expression: str) -> ast.Expression:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', SyntaxWarning)  # Python's remarks on style, such as "1if x"
        return ast.parse(expression.replace('\n', ' ').strip(), mode='eval')


def names_in(text: str) -> Iterator[str]:
    """Root names that the expressions in ``text`` refer to (none from an expression that cannot be parsed)."""
    try:
        for _, _, expression in spans(text):
            for node in ast.walk(_parse(expression)):
                if isinstance(node, ast.Name):
                    yield node.id
    except (ExpressionError, SyntaxError, ValueError, RecursionError, MemoryError):
        return


class _Ref:
    """A place in the configuration that has not been read yet."""

    __slots__ = ('path', 'raw')

    def __init__(self, path: Path, raw: Any):
        self.path = path
        self.raw = raw


class Resolver:
    """Replaces every expression of a configuration by its value.

    Args:
        tree: the raw configuration (not changed).
        where: gives the file and line of a path for error messages.
        aliases: other names of root keys (old name -> name).
    """

    def __init__(self, tree: Mapping[str, Any], where: Callable[[Path], str], aliases: Mapping[str, str] = ()):
        self.tree = tree
        self.where = where
        self.aliases = dict(aliases)
        self.stack: List[Path] = []
        self.known: Dict[Path, Any] = {}
        self.values = 0

    def resolve(self, without: Sequence[str] = ()) -> Dict[str, Any]:
        """The whole configuration without expressions; no two places share a list or dict.

        Root keys in ``without`` are left out, and evaluated only as far as others refer to them.

        Raises:
            ConfigError: naming file, key and expression, for a refused or failing expression or a cycle.
        """
        try:
            return self.read((), {key: value for key, value in self.tree.items() if key not in without})
        except ExpressionError as error:
            raise ConfigError(str(error)) from error
        except RecursionError:
            raise ConfigError(f'{self.where(())}: nested too deeply') from None

    def read(self, path: Path, raw: Any) -> Any:
        """The resolved value of ``raw``, which stands at ``path``."""
        self._count()
        if isinstance(raw, Mapping):
            if FROM in raw:
                return self._extended_at(path, raw)
            return {key: self.read((*path, key), value) for key, value in raw.items()}
        if isinstance(raw, (list, tuple)):
            return [self.read((*path, index), value) for index, value in enumerate(raw)]
        if isinstance(raw, str) and '${' in raw:
            return self._expression_at(path, raw)
        return raw

    def _extended_at(self, path: Path, raw: Mapping[Any, Any]) -> Any:
        """A mapping that begins with another one; other keys replace what turns out to be no mapping."""
        first, place = (*path, FROM), (*path, FROM, FROM)
        if place not in self.known:
            if not (isinstance(raw[FROM], Mapping) or isinstance(raw[FROM], str) and '${' in raw[FROM]):
                raise ConfigError(f'{self.where(first)}: key {dotted(first)!r}: expected "${{...}}" that gives a mapping, '
                                  f'got {raw[FROM]!r}')
            self._enter(path)
            try:
                self.known[place] = self._extend(path, self.read(first, raw[FROM]), raw)
            finally:
                self.stack.pop()
        return self._copy(self.known[place])

    def _extend(self, path: Path, base: Any, raw: Mapping[Any, Any]) -> Dict[Any, Any]:
        merged = dict(base) if isinstance(base, Mapping) else {}
        for key, value in raw.items():
            if key == FROM:
                continue
            if isinstance(value, Mapping) and FROM not in value and isinstance(merged.get(key), Mapping):
                merged[key] = self._extend((*path, key), merged[key], value)
            else:
                merged[key] = self.read((*path, key), value)
        return merged

    def _enter(self, path: Path) -> None:
        if path in self.stack:
            chain = [*self.stack[self.stack.index(path):], path]
            raise ConfigError(f'{self.where(path)}: expressions refer to each other in a circle: '
                              + ' -> '.join(dotted(p) for p in chain))
        self.stack.append(path)

    def _count(self) -> None:
        self.values += 1
        if self.values > MAX_VALUES:
            raise ExpressionError(f'more than {MAX_VALUES} values in all; expressions multiply each other')

    def _copy(self, value: Any) -> Any:
        self._count()
        if isinstance(value, Mapping):
            return {key: self._copy(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._copy(item) for item in value]
        return value

    def _expression_at(self, path: Path, text: str) -> Any:
        if path in self.known:
            return self._copy(self.known[path])
        self._enter(path)
        try:
            value = self._again(text, 0)
        except ConfigError:
            raise
        except ExpressionError as error:
            raise ConfigError(f'{self.where(path)}: key {dotted(path)!r}: {text!r}: {error}') from error
        except RecursionError:
            raise ConfigError(f'{self.where(path)}: key {dotted(path)!r}: expressions are nested too deeply') from None
        finally:
            self.stack.pop()
        self.known[path] = value
        return self._copy(value)

    def _again(self, value: Any, rounds: int) -> Any:
        """Evaluate text, then whatever expressions its result holds, and so on."""
        if isinstance(value, str) and '${' in value:
            if rounds >= MAX_ROUNDS:
                raise ExpressionError(f'still an expression after {MAX_ROUNDS} evaluations')
            return self._again(self._text(value), rounds + 1)
        self._count()
        if isinstance(value, Mapping):
            return {key: self._again(item, rounds) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._again(item, rounds) for item in value]
        return value

    def _text(self, text: str) -> Any:
        parts = spans(text)
        if len(parts) == 1 and parts[0][:2] == (0, len(text)):
            return self._evaluate(parts[0][2])
        pieces, last = [], 0
        for start, end, expression in parts:
            value = self._evaluate(expression)
            if not isinstance(value, (str, int, float)):
                raise ExpressionError(f'${{{expression}}} inside a longer text must be a text or a number, '
                                      f'got {type(value).__name__}')
            pieces += [text[last:start], str(value)]
            last = end
        joined = ''.join((*pieces, text[last:]))
        _limit(len(joined), 'the text')
        return joined

    def _evaluate(self, expression: str) -> Any:
        if len(expression) > MAX_TEXT:
            raise ExpressionError(f'longer than {MAX_TEXT} characters')
        try:
            tree = _parse(expression)
        except (SyntaxError, ValueError, MemoryError) as error:
            message = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ExpressionError(f'not an expression: {message}') from None
        try:
            return self._value(tree.body)
        except (ExpressionError, ConfigError, RecursionError):
            raise
        except Exception as error:  # TypeError, ZeroDivisionError, IndexError, OverflowError, ... of the user's arithmetic
            raise ExpressionError(f'{type(error).__name__}: {error}') from None

    # ---- syntax tree -------------------------------------------------------------------------------------------------
    def _value(self, node: ast.AST) -> Any:
        """Value of a syntax node, fully resolved."""
        result = self._lazy(node)
        return self.read(result.path, result.raw) if isinstance(result, _Ref) else result

    def _lazy(self, node: ast.AST) -> Any:
        """Value of a syntax node, or a reference to a place in the configuration."""
        self._count()
        method = getattr(self, f'_node_{type(node).__name__.lower()}', None)
        if method is None:
            raise ExpressionError(f'{type(node).__name__} is not allowed in an expression')
        return method(node)

    def _node_constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, (str, bool, int, float)) or node.value is None:
            return self._sized(node.value)
        raise ExpressionError(f'a {type(node.value).__name__} constant is not allowed')

    def _node_name(self, node: ast.Name) -> Any:
        name = node.id
        for candidate in (name, self.aliases.get(name)):
            if candidate is not None and candidate in self.tree:
                return _Ref((candidate,), self.tree[candidate])
        if name in _CONSTANT_NAMES:
            return _CONSTANT_NAMES[name]
        if name in FUNCTIONS:
            raise ExpressionError(f'the function {name} must be called')
        raise ExpressionError(f'unknown key {name!r}{hint(name, self.tree)}')

    def _node_attribute(self, node: ast.Attribute) -> Any:
        if node.attr.startswith('__'):
            raise ExpressionError(f'{node.attr!r}: names with double underscores are not allowed')
        base = self._open(self._lazy(node.value))
        holder = base.raw if isinstance(base, _Ref) else base
        if not isinstance(holder, Mapping):
            raise ExpressionError(f'.{node.attr}: only a mapping of the configuration has keys, '
                                  f'this is a {type(holder).__name__}')
        return self._item(base, node.attr)

    def _node_subscript(self, node: ast.Subscript) -> Any:
        base = self._open(self._lazy(node.value))
        if isinstance(node.slice, ast.Slice):
            bounds = [None if part is None else self._value(part)
                      for part in (node.slice.lower, node.slice.upper, node.slice.step)]
            holder = base.raw if isinstance(base, _Ref) else base
            if not isinstance(holder, (list, tuple, str)):
                raise ExpressionError(f'only lists and texts can be sliced, this is a {type(holder).__name__}')
            chosen = holder[slice(*bounds)]
            if isinstance(base, _Ref) and not isinstance(holder, str):
                indices = range(len(holder))[slice(*bounds)]
                return [self.read((*base.path, index), holder[index]) for index in indices]
            return chosen
        return self._item(base, self._value(node.slice))

    def _open(self, base: Any) -> Any:
        """A reference that stands on an expression is read, so that its result can be indexed."""
        if isinstance(base, _Ref) and (not isinstance(base.raw, (Mapping, list, tuple)) or FROM in base.raw):
            return self.read(base.path, base.raw)
        return base

    @staticmethod
    def _item(base: Any, key: Key) -> Any:
        holder = base.raw if isinstance(base, _Ref) else base
        if isinstance(holder, Mapping):
            if isinstance(key, (list, dict)):
                raise ExpressionError(f'a {type(key).__name__} cannot be a key')
            if key not in holder:
                raise ExpressionError(f'no key {key!r}{hint(key, holder)}')
            return _Ref((*base.path, key), holder[key]) if isinstance(base, _Ref) else holder[key]
        if not isinstance(holder, (list, tuple, str)):
            raise ExpressionError(f'a {type(holder).__name__} cannot be indexed')
        if not isinstance(key, int):
            raise ExpressionError(f'a list index must be a whole number, got {key!r}')
        if not -len(holder) <= key < len(holder):
            raise ExpressionError(f'index {key} is outside a list of {len(holder)}')
        if isinstance(base, _Ref) and not isinstance(holder, str):
            key = key % len(holder)
            return _Ref((*base.path, key), holder[key])
        return holder[key]

    def _node_list(self, node: ast.List) -> List[Any]:
        made: List[Any] = []
        for item in node.elts:
            if isinstance(item, ast.Starred):
                more = self._value(item.value)
                if not isinstance(more, (list, tuple)):
                    raise ExpressionError(f'*: needs a list, got {type(more).__name__}')
                made += more
            else:
                made.append(self._value(item))
        return self._sized(made)

    _node_tuple = _node_list  # YAML has no tuples: one kind of sequence, so that a list compares equal to a tuple display

    def _node_dict(self, node: ast.Dict) -> Dict[Any, Any]:
        made: Dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values):
            if key is None:
                more = self._value(value)
                if not isinstance(more, Mapping):
                    raise ExpressionError(f'**: needs a mapping, got {type(more).__name__}')
                made.update(more)
            else:
                made[self._value(key)] = self._value(value)
        return made

    def _node_unaryop(self, node: ast.UnaryOp) -> Any:
        apply = _UNARY.get(type(node.op))
        if apply is None:
            raise ExpressionError(f'the operator {type(node.op).__name__} is not allowed')
        return apply(self._value(node.operand))

    def _node_binop(self, node: ast.BinOp) -> Any:
        apply = _BINARY.get(type(node.op))
        if apply is None:
            raise ExpressionError(f'the operator {type(node.op).__name__} is not allowed')
        left, right = self._value(node.left), self._value(node.right)
        if isinstance(node.op, ast.Mult):
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list)) and isinstance(times, int):
                    # At every depth: the copies are one object, but are compared and resolved item by item.
                    _limit(_whole_size(sequence) * max(times, 0), 'the multiplication')
        elif isinstance(node.op, ast.Pow):
            self._check_power(left, right)
        elif isinstance(node.op, ast.Mod) and isinstance(left, str):
            raise ExpressionError('text formatting with % is not allowed')
        return self._sized(apply(left, right))

    @staticmethod
    def _check_power(base: Any, exponent: Any) -> None:
        if not isinstance(base, (int, float)) or not isinstance(exponent, (int, float)):
            raise ExpressionError('** needs numbers')
        if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 \
                and base.bit_length() * abs(exponent) > MAX_BITS:
            raise ExpressionError(f'the power is larger than {MAX_BITS} bits')

    @staticmethod
    def _sized(value: Any) -> Any:
        if isinstance(value, (str, list, tuple)):
            _limit(len(value), 'the result')
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise ExpressionError(f'the number is larger than {MAX_BITS} bits')
        elif isinstance(value, complex):
            raise ExpressionError('the result is not a real number')
        return value

    def _node_boolop(self, node: ast.BoolOp) -> Any:
        stop = isinstance(node.op, ast.Or)
        value = None
        for part in node.values:
            value = self._value(part)
            if bool(value) == stop:
                break
        return value

    def _node_compare(self, node: ast.Compare) -> bool:
        left = self._value(node.left)
        for operation, part in zip(node.ops, node.comparators):
            right = self._value(part)
            if not _COMPARE[type(operation)](left, right):
                return False
            left = right
        return True

    def _node_ifexp(self, node: ast.IfExp) -> Any:
        return self._lazy(node.body if self._value(node.test) else node.orelse)

    def _node_call(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name not in FUNCTIONS:
            raise ExpressionError(f'only {", ".join(FUNCTIONS)} may be called')
        if node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
            raise ExpressionError(f'{name}() takes plain arguments only')
        return self._sized(FUNCTIONS[name](*(self._value(arg) for arg in node.args)))
