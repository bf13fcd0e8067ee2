"""What two runs have in common and what not: settings, code, versions, results."""
from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from .run import Run

# Where a run is kept and from where it goes on.
NOT_COMPARED = ('run_dir', 'work_dir', 'resume_from', 'auto_resume', 'launcher')
ABSENT = '(not set)'


class Difference(NamedTuple):
    """One thing that differs: a dotted key, this run's value and the other's, as text."""

    key: str
    mine: str
    theirs: str


def flatten(value: Any, prefix: str = '', found: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """Leaves of nested mappings and lists by dotted key; lists of plain values stay whole."""
    found = {} if found is None else found
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            flatten(item, f'{prefix}.{key}' if prefix else str(key), found)
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list)) for item in value):
        for number, item in enumerate(value):
            flatten(item, f'{prefix}.{number}', found)
    else:
        found[prefix] = value
    return found


def settings(mine: Run, theirs: Run) -> List[Difference]:
    """Keys of the resolved configurations that differ."""
    return _differences({k: v for k, v in flatten(mine.config).items() if k.split('.')[0] not in NOT_COMPARED},
                        {k: v for k, v in flatten(theirs.config).items() if k.split('.')[0] not in NOT_COMPARED})


def origins(mine: Run, theirs: Run) -> List[Difference]:
    """Code version, seed, number of ranks and library versions that differ."""
    def known(run: Run) -> Dict[str, Any]:
        found = {key: run.meta[key] for key in ('code_version', 'code_changes', 'seed', 'world_size', 'compat', 'box_convention')
                 if key in run.meta}
        versions = run.meta.get('versions')
        if isinstance(versions, Mapping):
            found.update({f'versions.{name}': value for name, value in versions.items()})
        return found
    return _differences(known(mine), known(theirs))


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> List[Difference]:
    found = []
    for key in dict.fromkeys([*mine, *theirs]):
        one, two = mine.get(key, ABSENT), theirs.get(key, ABSENT)
        if one != two and not (isinstance(one, float) and isinstance(two, float) and math.isnan(one) and math.isnan(two)):
            found.append(Difference(key, _text(one), _text(two)))
    return found


def _text(value: Any) -> str:
    if value is ABSENT:
        return ABSENT
    text = 'null' if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 200 else f'{text[:197]}...'


def results(mine: Run, theirs: Run) -> List[Tuple[str, float, float]]:
    """(metric, mine, theirs) at the newest epoch that both evaluated; empty if there is none."""
    common = {row.epoch for row in mine.val} & {row.epoch for row in theirs.val}
    if not common:
        return []
    epoch = max(common)
    one = next(row.values for row in mine.val if row.epoch == epoch)
    two = next(row.values for row in theirs.val if row.epoch == epoch)
    return [(name, one[name], two[name]) for name in one if name in two and name != 'lr']
