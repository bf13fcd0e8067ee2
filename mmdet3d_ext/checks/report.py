"""What a check found: the chain of grids as a table, errors and warnings with the key to change and the value to write."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

from ..config.errors import display
from ..geometry.grid import BevGrid

ERROR, WARNING = 'error', 'warning'


@dataclass(frozen=True)
class Finding:
    """One inconsistency.

    ``place``: file, line and key as :meth:`Config.where` gives them; ``write``: key -> value that would put it right (empty
    where there is no single one).
    """

    level: str
    key: str
    place: str
    problem: str
    write: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        remedy = ' '.join(f'--{key} {spell(value)}' for key, value in self.write.items())
        return f'{self.place}: {self.problem}' + (f'. Write {remedy}' if remedy else '')


@dataclass(frozen=True)
class Row:
    """One stage of the chain: its metres along x and y, step in metres, cells, channels where known, and the key it comes from."""

    stage: str
    x: Tuple[float, float]
    y: Tuple[float, float]
    step: Tuple[float, float]
    cells: Tuple[int, int]
    key: str
    source: str
    channels: Optional[int] = None

    @classmethod
    def of(cls, stage: str, grid: BevGrid, key: str, source: str, channels: Optional[int] = None) -> 'Row':
        return cls(stage, (grid.x.lo, grid.x.hi), (grid.y.lo, grid.y.hi), grid.step, grid.shape, key, source, channels)

    def columns(self) -> List[str]:
        both = '' if self.x == self.y else f' / {_span(self.y)}'
        step = f'{self.step[0]:.6g}' + ('' if abs(self.step[0] - self.step[1]) < 1e-9 else f' x {self.step[1]:.6g}')
        return [self.stage, _span(self.x) + both, step, f'{self.cells[0]} x {self.cells[1]}',
                '' if self.channels is None else str(self.channels), self.key, self.source]


@dataclass
class Report:
    """All that was found in one configuration."""

    config: str
    rows: List[Row] = field(default_factory=list)
    findings: List[Finding] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)

    @property
    def errors(self) -> List[Finding]:
        return [one for one in self.findings if one.level == ERROR]

    @property
    def warnings(self) -> List[Finding]:
        return [one for one in self.findings if one.level == WARNING]

    def table(self) -> str:
        """The chain, one line per stage."""
        head = ['stage', 'range x (/ y), m', 'step, m', 'cells', 'channels', 'key', 'from']
        lines = [head, *(row.columns() for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)

    def text(self) -> str:
        """Table, notes, warnings, errors, and a last line that says whether the configuration is accepted."""
        parts = [self.table()] if self.rows else []
        parts += [f'note: {note}' for note in self.notes]
        parts += [f'{one.level}: {one}' for one in (*self.warnings, *self.errors)]
        count = f'{len(self.errors)} error(s), {len(self.warnings)} warning(s)'
        parts.append(f'{display(self.config)}: ' + (f'refused: {count}' if self.errors else f'accepted: {count}'))
        return '\n'.join(parts)

    def as_json(self) -> str:
        content: Dict[str, Any] = {'config': self.config, 'accepted': not self.errors, 'chain': [asdict(row) for row in self.rows],
                                   'notes': self.notes, 'errors': [asdict(one) for one in self.errors],
                                   'warnings': [asdict(one) for one in self.warnings]}
        return json.dumps(content, indent=1)


def _span(bounds: Tuple[float, float]) -> str:
    return f'[{bounds[0]:g}, {bounds[1]:g}]'


def spell(value: Any) -> str:
    """A value as the command line reads it."""
    if value is None:
        return 'null'
    if isinstance(value, bool):
        return 'true' if value else 'false'
    if isinstance(value, float):
        return f'{value:.12g}'
    if isinstance(value, (list, tuple)):
        return '"' + _inner(value) + '"'
    if isinstance(value, Mapping):
        return '"' + _inner(value) + '"'
    return str(value)


def _inner(value: Union[list, tuple, Mapping, Any]) -> str:
    if isinstance(value, (list, tuple)):
        return '[' + ', '.join(_inner(item) for item in value) + ']'
    if isinstance(value, Mapping):
        return '{' + ', '.join(f'{key}: {_inner(item)}' for key, item in value.items()) + '}'
    return spell(value)
