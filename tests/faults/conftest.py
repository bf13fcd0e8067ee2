"""Fault injection: each test brings one fault about and reports what happened and what was lost; the table ends the run.

A test that asserted what it says calls ``fault_record(fault, happened, lost)``, so a row stands only for what was seen.
"""
from __future__ import annotations

import textwrap
from typing import Callable, List, Tuple

import pytest

Row = Tuple[str, str, str]
ROWS = pytest.StashKey[List[Row]]()
HEAD: Row = ('fault', 'what happened', 'what was lost')
WIDTHS = (44, 72, 30)


@pytest.fixture(scope='session')
def fault_record(pytestconfig) -> Callable[..., None]:
    """``fault_record(fault, happened, lost='nothing')`` adds a row to the table ``fault -> what happened -> what was lost``."""
    rows = pytestconfig.stash.setdefault(ROWS, [])

    def record(fault: str, happened: str, lost: str = 'nothing') -> None:
        row = (str(fault), str(happened), str(lost))
        if row not in rows:
            rows.append(row)

    return record


@pytest.fixture
def mounts():
    """For tests that mount a small disk."""
    from faulty import may_mount
    if not may_mount():
        pytest.skip('needs the right to mount a file system')


def table(rows: List[Row]) -> List[str]:
    """The rows as lines of three columns; long cells are wrapped."""
    widths = [max([len(HEAD[i])] + [min(len(row[i]), WIDTHS[i]) for row in rows]) for i in range(3)]
    lines = []
    for row in [HEAD, tuple('-' * width for width in widths), *rows]:
        cells = [textwrap.wrap(cell, width) or [''] for cell, width in zip(row, widths)]
        for number in range(max(map(len, cells))):
            parts = [(cell[number] if number < len(cell) else '').ljust(width) for cell, width in zip(cells, widths)]
            lines.append((' -> ' if number == 0 else '    ').join(parts).rstrip())
    return lines


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    rows = config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section(f'{len(rows)} faults injected')
        for line in table(rows):
            terminalreporter.write_line(line)
