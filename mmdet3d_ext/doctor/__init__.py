"""Examines the environment: libraries, GPUs, MPI, limits, data. Says what is wrong and what to do (``tools/doctor.py``).

This package imports the standard library only, and tries everything else in other processes (:mod:`.probe`): it has to work
just where torch or mmcv cannot be imported, or crash. One file per group of checks; each has ``check(options)``, which yields
:class:`.report.Finding` objects.
"""
from __future__ import annotations

import traceback
from typing import Callable, Iterator, List, Sequence

from . import config_values, data, gpus, libraries, mpi, stack, system
from .options import Options
from .report import PROBLEM, Finding, as_json, as_lines, exit_code, summary

GROUPS = {'stack': stack.check, 'libraries': libraries.check, 'gpus': gpus.check, 'mpi': mpi.check, 'system': system.check,
          'data': data.check}

__all__ = ['GROUPS', 'Finding', 'Options', 'as_json', 'as_lines', 'examine', 'exit_code', 'summary']


def examine(options: Options, groups: Sequence[str] = (), started: Callable[[str], None] = lambda group: None) -> Iterator[Finding]:
    """Run the checks of ``groups`` (default: all) and yield what they find, in order.

    A check that fails itself is a finding, too: the rest goes on.

    Args:
        options: what to look at; its ``settings`` are filled in from its configuration.
        started: called with a group's name before it begins.
    """
    if options.config:
        options.settings, finding = config_values.read(options.config, options.overrides)
        finding.group = 'configuration'
        yield finding
    for group in groups or GROUPS:
        started(group)
        for finding in _guarded(GROUPS[group], group, options):
            finding.group = group
            yield finding


def _guarded(check: Callable[[Options], Iterator[Finding]], group: str, options: Options) -> Iterator[Finding]:
    try:
        yield from check(options)
    except Exception as error:
        lines: List[str] = traceback.format_exc().strip().splitlines()
        yield Finding(group, PROBLEM, f'the check itself failed: {type(error).__name__}: {error} ({" ".join(lines[-3:-1]).strip()})',
                      'report this fault of the doctor; the other checks are not affected')
