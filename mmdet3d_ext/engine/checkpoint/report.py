"""What happened to every tensor when weights were loaded, as counts by module and as log lines."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch

MOST_LISTED = 12  # parts that a line names before it says how many more there are


@dataclass
class LoadReport:
    """What happened to every tensor of one file.

    ``matched``: loaded. ``missing``: the model's, not in the file; they keep their values. ``unexpected``: the file's, not in the
    model. ``mismatched``: (name, shape in the file, shape in the model). ``kept``: in the file as well, but an earlier file of the
    same command gave them. ``grid``: camera grid constants, never loaded; ``grid_differs``: those of another grid;
    ``grid_texts``: the file's and the model's grid in words. ``relaid``: sparse convolution kernels brought to the model's
    layout. ``swapped``: box rows brought from the reference's convention to ours. ``notes``: sentences for the log.
    ``files``: how many were loaded together (:func:`combined`).
    """

    path: str
    kind: str
    matched: List[str] = field(default_factory=list)
    missing: List[str] = field(default_factory=list)
    unexpected: List[str] = field(default_factory=list)
    mismatched: List[Tuple[str, tuple, tuple]] = field(default_factory=list)
    kept: List[str] = field(default_factory=list)
    grid: List[str] = field(default_factory=list)
    grid_differs: List[str] = field(default_factory=list)
    grid_texts: Tuple[str, str] = ('', '')
    relaid: List[str] = field(default_factory=list)
    swapped: List[str] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)
    files: int = 1

    @property
    def total(self) -> int:
        """Number of the file's tensors, camera grids aside."""
        return len(self.matched) + len(self.kept) + len(self.unexpected) + len(self.mismatched)

    @property
    def share(self) -> float:
        """Share of the file's tensors that have a place in the model."""
        return (len(self.matched) + len(self.kept)) / self.total if self.total else 0.0

    @property
    def complete(self) -> bool:
        """Whether every tensor of the model came from the file (or an earlier one)."""
        return not self.missing and not self.mismatched

    def by_module(self) -> Dict[str, Dict[str, int]]:
        """Counts per top module (``encoders.camera``, ``decoder``, ``heads.map``), in the model's order."""
        table: Dict[str, Dict[str, int]] = {}
        for column, names in (('matched', self.matched), ('missing', self.missing),
                              ('mismatched', [m[0] for m in self.mismatched]), ('unexpected', self.unexpected)):
            for name in names:
                row = table.setdefault(_top(name), dict(matched=0, missing=0, mismatched=0, unexpected=0))
                row[column] += 1
        return table

    def text(self, one_of_several: bool = False) -> str:
        """The report as log lines; ``one_of_several``: what this file lacks may be in another one."""
        lines = [f'{self.kind} of {self.path}: {len(self.matched)} tensors matched, {len(self.missing)} missing, '
                 f'{len(self.mismatched)} of another shape, {len(self.unexpected)} unexpected']
        if self.kept:
            lines[0] += f', {len(self.kept)} given by an earlier file'
        width = max([len(name) for name in self.by_module()] + [6])
        lines.append(f'  {"module":<{width}} {"matched":>8} {"missing":>8} {"shape":>8} {"unexpected":>11}')
        for name, row in self.by_module().items():
            empty = not row['matched'] and (row['missing'] or row['mismatched']) and not one_of_several
            note = '  <- nothing loaded' if empty else ''
            lines.append(f'  {name:<{width}} {row["matched"]:>8} {row["missing"]:>8} {row["mismatched"]:>8} '
                         f'{row["unexpected"]:>11}{note}')
        for name, theirs, ours in self.mismatched[:10]:
            lines.append(f'  {name}: shape {list(theirs)} in the file, {list(ours)} in the model')
        if len(self.mismatched) > 10:
            lines.append(f'  ... and {len(self.mismatched) - 10} more of another shape')
        shaped = [m[0] for m in self.mismatched]
        if self.missing:
            nowhere = 'in no file' if self.files > 1 else 'not in the file'
            lines.append(f'  new, {nowhere}: {_listed(self.missing, self.matched + self.kept + shaped)}')
        if self.unexpected:
            lines.append(f'  not in this model: {_listed(self.unexpected, self.matched + self.kept + shaped)}')
        if self.grid:
            lines.append(f'  grid, not loaded: {", ".join(self.grid)} ({self._grids()})')
        if self.relaid:
            lines.append(f'  {len(self.relaid)} sparse convolution kernels brought to the layout of this model')
        return '\n'.join(lines + [f'  {note}' for note in self.notes])

    def _grids(self) -> str:
        theirs, ours = self.grid_texts
        if not self.grid_differs:
            return f'the file\'s camera grid equals the configuration\'s{": " if ours else ""}{ours}'
        if theirs and ours and theirs != ours:
            return f'the file\'s camera grid differs from the configuration\'s: file {theirs}; configuration, in use: {ours}'
        return f'the file\'s camera grid differs from the configuration\'s in {", ".join(self.grid_differs)}'


def combined(reports: Sequence[LoadReport]) -> LoadReport:
    """What several files, loaded one after the other, gave the model together.

    ``missing`` and ``mismatched``: the model's that no file gave (a tensor of another shape in one file may have come from
    another). ``unexpected``: of any file.
    """
    whole = LoadReport(f'{len(reports)} files', 'weights', files=len(reports))
    whole.matched = [name for report in reports for name in report.matched]
    given = set(whole.matched)
    whole.mismatched = list({m[0]: m for report in reports for m in report.mismatched if m[0] not in given}.values())
    settled = given | {m[0] for m in whole.mismatched}
    whole.missing = [name for name in reports[-1].missing if name not in settled]
    whole.unexpected = list(dict.fromkeys(name for report in reports for name in report.unexpected))
    return whole


def _top(name: str) -> str:
    parts = name.split('.')
    return '.'.join(parts[:2]) if parts[0] in ('encoders', 'heads', 'decoder') and len(parts) > 2 else parts[0]


def _listed(names: Iterable[str], others: Iterable[str]) -> str:
    """``names`` by the largest modules that hold none of ``others``: ``heads.map.decoder.2 (3 tensors), heads.map.scale``."""
    taken = {name[:i] for name in others for i in _ends(name)}
    groups: Dict[str, int] = {}
    for name in names:
        part = next((name[:i] for i in _ends(name) if name[:i] not in taken), name)
        groups[part] = groups.get(part, 0) + 1
    words = [part if count == 1 else f'{part} ({count} tensors)' for part, count in groups.items()]
    rest = [f'and {len(words) - MOST_LISTED} more parts'] if len(words) > MOST_LISTED else []
    return ', '.join(words[:MOST_LISTED] + rest)


def _ends(name: str) -> List[int]:
    """Where the dotted prefixes of ``name`` end, shortest first."""
    return [i for i, letter in enumerate(name) if letter == '.'] + [len(name)]


def grid_text(state: Mapping[str, torch.Tensor]) -> str:
    """The camera grid that a state dict's constants describe, e.g. ``360 x 360 cells of 0.3 m``; '' if they are not there."""
    for name in state:
        if name.endswith('vtransform.dx'):
            prefix = name[:-2]
            constants = [_values(state.get(prefix + key)) for key in ('nx', 'dx', 'bx')]
            if all(constants):
                cells, steps, first = constants
                step = f'{steps[0]:g}' if abs(steps[0] - steps[1]) < 1e-6 else f'{steps[0]:g} x {steps[1]:g}'
                corner = ', '.join(f'{centre - width / 2:g}' for centre, width in zip(first[:2], steps[:2], strict=True))
                depth = state.get(prefix + 'frustum')
                bins = f', {depth.shape[0]} depth bins' if depth is not None and depth.dim() == 4 else ''
                return f'{cells[0]:g} x {cells[1]:g} cells of {step} m from ({corner}) m{bins}'
    return ''


def _values(tensor: Optional[torch.Tensor]) -> List[float]:
    return [round(float(v), 6) for v in tensor] if tensor is not None and tensor.shape == (3,) else []
