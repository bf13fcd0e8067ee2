"""The configuration under check, and where findings are collected."""
from __future__ import annotations

from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

from ..config.errors import COMMAND_LINE, display
from ..geometry.grid import Axis, AxisSpec, BevGrid, GridError, likely_count
from .report import ERROR, WARNING, Finding, Report, Row

MISSING = object()
# What a value of another kind than expected raises in arithmetic.
OTHER_KIND = (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError, OverflowError)


class Context:
    """One configuration and its report.

    Args:
        cfg: a resolved configuration; a plain mapping works, too, then places are named by key alone.
        gpus: processes that will train, if known.
    """

    def __init__(self, cfg: Mapping[str, Any], gpus: Optional[int] = None):
        self.cfg, self.gpus = cfg, gpus
        self.report = Report(getattr(cfg, 'filename', None) or 'configuration')
        self.reference = cfg.get('compat') == 'reference'
        self.broken = False  # a grid of the chain is no grid: what is derived from it is not looked at
        self._refused: set = set()

    # ---- reading -------------------------------------------------------------------------------------------------------
    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key, or ``default`` where any part of it is missing."""
        found = walk(self.cfg, key)
        return default if found is MISSING else found

    def has(self, key: str) -> bool:
        return walk(self.cfg, key) is not MISSING

    def where(self, key: str) -> str:
        return self.cfg.where(key) if hasattr(self.cfg, 'where') else f'key {key!r}'

    def source(self, key: str) -> str:
        """The file that the value of ``key`` comes from, short."""
        file = self.cfg.source_of(key) if hasattr(self.cfg, 'source_of') else None
        return display(file) if file else ''

    def rank(self, key: str) -> int:
        """How late ``key`` was written: later files count more, the command line most."""
        file = self.cfg.source_of(key) if hasattr(self.cfg, 'source_of') else None
        if file == COMMAND_LINE:
            return len(self.cfg.files)
        return self.cfg.files.index(file) if file in getattr(self.cfg, 'files', ()) else -1

    # ---- collecting ----------------------------------------------------------------------------------------------------
    def error(self, key: str, problem: str, write: Optional[Mapping[str, Any]] = None) -> None:
        """Something that cannot work, or would silently mean something else. ``write``: key -> value that puts it right."""
        self._add(ERROR, key, problem, write)

    def warn(self, key: str, problem: str, write: Optional[Mapping[str, Any]] = None) -> None:
        """Something that works and is probably not meant."""
        self._add(WARNING, key, problem, write)

    def metres(self, key: str, problem: str, write: Optional[Mapping[str, Any]] = None) -> None:
        """An error about metres; under ``compat: reference`` a warning, because models were trained that way."""
        self._add(WARNING if self.reference else ERROR, key, problem, write)

    def _add(self, level: str, key: str, problem: str, write: Optional[Mapping[str, Any]]) -> None:
        finding = Finding(level, key, self.where(key), problem, dict(write or {}))
        if finding not in self.report.findings:
            self.report.findings.append(finding)

    def row(self, stage: str, grid: BevGrid, key: str, channels: Optional[int] = None) -> None:
        self.report.rows.append(Row.of(stage, grid, key, self.source(key), channels))

    def attempt(self, key: str, check: Callable[[], Any]) -> Any:
        """``check()``; where a value below ``key`` is of a kind that the check cannot follow, a warning and None. Building the part
        says exactly what is wrong with it, and a form that only the check does not know must not stop a training."""
        try:
            return check()
        except OTHER_KIND as error:
            self.broken = True
            self.warn(key, f'could not be checked: it holds a value of another kind than expected ({type(error).__name__}: {error})')
            return None

    # ---- grids ---------------------------------------------------------------------------------------------------------
    def axis(self, key: str, spec: Any = MISSING, remedy: Optional[Callable[[float], Mapping[str, Any]]] = None
             ) -> Optional[Axis]:
        """The axis at ``key``; None and an error where it is none.

        Args:
            spec: the axis itself, if it is not what stands at ``key``.
            remedy: what to write for a step that divides the range (default: the whole axis to ``key``).
        """
        spec = self.get(key) if spec is MISSING else spec
        try:
            return Axis.parse(spec, key)
        except (GridError, TypeError, ValueError) as error:
            if repr(spec) not in self._refused:  # the same mistake in all places that follow one key is one error
                self._refused.add(repr(spec))
                self.error(key, _text(error), _corrected(key, spec, remedy))
        return None

    def grid(self, key: str, remedy: Optional[Callable[[float], Mapping[str, Any]]] = None) -> Optional[BevGrid]:
        """The grid whose axes stand at ``<key>.xbound`` and ``<key>.ybound``."""
        axes = [self.axis(f'{key}.{axis}bound', remedy=remedy) for axis in 'xy']
        return None if None in axes else BevGrid(*axes)

    def scope(self, key: str, remedy: Optional[Callable[[float], Mapping[str, Any]]] = None) -> Optional[BevGrid]:
        """The grid at ``key``: ``[x axis, y axis]``."""
        value = self.get(key)
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or len(value) != 2:
            self.error(key, f'must be [[x lo, x hi, x step], [y lo, y hi, y step]] in metres, got {value!r}')
            return None
        axes = [self.axis(f'{key}.{index}', remedy=remedy) for index in (0, 1)]
        return None if None in axes else BevGrid(*axes)


def walk(node: Any, key: str) -> Any:
    """The value at a dotted key, :data:`MISSING` where there is none."""
    for part in key.split('.') if key else ():
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, (list, tuple)) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return MISSING
    return node


def scope_of(grid: BevGrid) -> List[List[float]]:
    """A grid as configurations write it, rounded where float noise would show."""
    return [[clean(v) for v in axis.as_bound()] for axis in (grid.x, grid.y)]


def clean(value: float) -> float:
    """``value`` without the last digits of float arithmetic where it makes it short."""
    short = round(value, 9)
    return short if abs(short - value) <= 1e-12 * max(1.0, abs(value)) else value


def nodes(node: Any, key: str) -> Iterator[Tuple[str, Mapping[str, Any]]]:
    """(dotted key, mapping) of ``node`` and of all mappings below it."""
    if isinstance(node, Mapping):
        yield key, node
        for name, value in node.items():
            yield from nodes(value, f'{key}.{name}')
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from nodes(value, f'{key}.{index}')


def _text(error: Exception) -> str:
    text = str(error)
    return text.split(': ', 1)[1] if ': ' in text and isinstance(error, GridError) else text


def _corrected(key: str, spec: AxisSpec, remedy: Optional[Callable[[float], Mapping[str, Any]]]) -> Mapping[str, Any]:
    """The axis with the nearest step that divides its range, by the key to write it to."""
    try:
        lo, hi, step = (float(v) for v in (spec if not isinstance(spec, Mapping) else (*spec['range'], spec['step'])))
        if not (hi > lo and step > 0):
            return {}
        exact = clean((hi - lo) / likely_count((hi - lo) / step))
    except (TypeError, ValueError, KeyError, OverflowError, ZeroDivisionError):
        return {}
    return remedy(exact) if remedy else {key: [lo, hi, exact]}
