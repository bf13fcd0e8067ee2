"""What a check found, and how findings are shown. Standard library only, as all of this package."""
from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, Iterable, List

OK, SKIPPED, WARNING, PROBLEM = 'ok', 'skipped', 'warning', 'problem'
EXIT_CODES = {OK: 0, SKIPPED: 0, WARNING: 1, PROBLEM: 2}
WIDTH, INDENT = 140, 30  # characters


@dataclass
class Finding:
    """One line of the report.

    Attributes:
        check: what was looked at, for example ``mmcv library``.
        status: ``ok``, ``skipped`` (it does not apply here; the text says why), ``warning`` (training may run) or ``problem``.
        text: what was found, with paths and versions.
        remedy: what to do; needed for a warning or problem.
        data: machine-readable values for ``--json``.
        group: filled in by :func:`mmdet3d_ext.doctor.examine`.
    """

    check: str
    status: str
    text: str
    remedy: str = ''
    data: Dict[str, Any] = field(default_factory=dict)
    group: str = ''

    def __post_init__(self) -> None:
        if self.status not in EXIT_CODES:
            raise ValueError(f'unknown status {self.status!r}')
        if EXIT_CODES[self.status] and not self.remedy:
            raise ValueError(f'{self.check}: a {self.status} needs a remedy')


def exit_code(findings: Iterable[Finding]) -> int:
    """The worst result: 0 nothing to do, 1 warnings, 2 problems."""
    return max((EXIT_CODES[finding.status] for finding in findings), default=0)


def counts(findings: Iterable[Finding]) -> Dict[str, int]:
    found = dict.fromkeys(EXIT_CODES, 0)
    for finding in findings:
        found[finding.status] += 1
    return found


def as_lines(finding: Finding) -> List[str]:
    """``PROBLEM  check            text``, and the remedy below it."""
    def cell(text: str, prefix: str) -> List[str]:
        wrapped = [piece for line in text.splitlines() or [''] for piece in
                   textwrap.wrap(line, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False) or ['']]
        return [(prefix if number == 0 else ' ' * INDENT) + piece for number, piece in enumerate(wrapped)]

    name = finding.status.upper() if EXIT_CODES[finding.status] else finding.status
    lines = cell(finding.text, f'{name:<8} {finding.check:<20} ')
    if finding.remedy and EXIT_CODES[finding.status]:
        lines += cell(finding.remedy, f'{"":<8} {"-> remedy":<20} ')
    return lines


def summary(findings: Iterable[Finding]) -> str:
    found = counts(findings)
    return (f'{found[PROBLEM]} problem(s), {found[WARNING]} warning(s), {found[OK]} ok, {found[SKIPPED]} skipped')


def as_json(findings: Iterable[Finding]) -> str:
    """``{"worst": 0|1|2, "counts": {...}, "findings": [{check, status, text, remedy, data, group}, ...]}``"""
    found = list(findings)
    return json.dumps({'worst': exit_code(found), 'counts': counts(found), 'findings': [asdict(f) for f in found]}, indent=1)
