"""The page of ``ablation.py``: rows of trainings as Markdown tables."""
from __future__ import annotations

import math
import statistics
from typing import Any, Dict, List, Mapping, Optional, Sequence

COLUMNS = {'max': '', 'any': ', any threshold'}


def report(found: Sequence[Dict[str, Any]], headline: Mapping[str, str], switches: Mapping[str, str], reduction: str, command: str) -> str:
    """The page: headline over its seeds, parts off one at a time, both on the native and the 0.5 m grid.

    Args:
        found: records as ``ablation.result`` makes them.
        headline, switches: names of rows -> what they are; Stage 1 is ``stage1``, without a part ``no_<switch>``.
        reduction: what the form reduces.
        command: what was run.
    """
    lines = ['# Do the stages help? What does each part give?', '', f'`{command}`', '']
    failed = [f'{row["name"]}/{row["seed"]}: {row["error"]}' for row in found if 'error' in row]
    rows = [row for row in found if 'metrics' in row]
    by_name: Dict[str, List[Dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row['name'], []).append(row)
    if not rows:
        return '\n'.join([*lines, 'No row is there yet.', *_failed_lines(failed), ''])
    steps = sorted({tuple(row['iterations']) for row in rows})
    lines += ['; '.join(sorted({f'{row["device"]}, {row["date"]}' for row in rows})), '', f'Reduced: {reduction}', '',
              'Each row: Phase 3\'s configuration, then, from its last weights, the one that is named, each '
              f'{" or ".join(f"{a} + {b}" for a, b in steps)} iterations with a schedule of its own. IoU is that of the best of '
              'the field\'s thresholds (0.35 to 0.65) per class on the held-out scenes, "any threshold" that of 0.05 to 0.95: the first wants '
              'probabilities that mean something, which dice and class weights change, the second only that cells are told apart. "0.5 m" is '
              'the reference grid, the only one on which 400 and 600 cells compare. "a ± b": mean and '
              'standard deviation over seeds, which change initial weights, order and augmentation of both trainings.', '',
              'These are short trainings of a small model on rendered scenes: they tell which way a part pulls, not what a full training '
              'reaches.']
    first = {headline[name]: by_name[name] for name in headline if name in by_name}
    lines += ['', '## Headline', '', *(_table(first) if first else ['None of its rows is there yet.'])]
    pairs = [(one, other) for one, other in (('stage1', 'stay400'), ('stage1', 'stay400_head'), ('stay400_head', 'stay400'))
             if {row['seed'] for row in by_name.get(one, [])} & {row['seed'] for row in by_name.get(other, [])}]
    if pairs:
        lines += ['', 'Difference of the mean IoU on the 0.5 m grid, seed by seed:', '']
    for one, other in pairs:
        for column, title in COLUMNS.items():
            gaps = [_score(a, column) - _score(b, column) for a in by_name[one] for b in by_name[other] if a['seed'] == b['seed']]
            mean = f' (mean {statistics.mean(gaps):+.4f} ± {statistics.stdev(gaps):.4f})' if len(gaps) > 1 else ''
            lines.append(f'- {headline[one]}, against {headline[other]}{title}: {", ".join(f"{gap:+.4f}" for gap in gaps)}{mean}')
    parts = {f'no_{switch}': text for switch, text in switches.items() if f'no_{switch}' in by_name}
    seeds = {row['seed'] for name in parts for row in by_name[name]}
    full = [row for row in by_name.get('stage1', []) if row['seed'] in seeds]
    if parts and full:
        stage1 = by_name['stage1']
        spread = {column: statistics.stdev(_score(row, column) for row in stage1) for column in COLUMNS} if len(stage1) > 1 else None
        limit = (f'Seeds alone spread Stage 1\'s mean IoU with a standard deviation of {spread["max"]:.4f}, of {spread["any"]:.4f} at any '
                 f'threshold ({len(stage1)} seeds); a difference of at most twice that is called none.' if spread is not None else
                 'One seed: how far seeds alone spread is not known.')
        lines += ['', '## Stage 1 without one part', '',
                  f'Same seed(s) {", ".join(map(str, sorted(seeds)))} in all columns. {limit}', '']
        lines += _table({'with all': full, **{parts[name]: by_name[name] for name in parts}}, 'with all', spread)
    elif parts:
        lines += ['', f'Not shown, as Stage 1 with the same seed is not there yet: {", ".join(parts.values())}.']
    ms = [row['step_ms'] for row in rows if 'step_ms' in row]
    if ms:
        jobs = sorted({row['side_by_side'] for row in rows if 'side_by_side' in row})
        lines += ['', f'{" or ".join(map(str, jobs))} training(s) at a time: {min(a for a, _ in ms):.0f} to {max(a for a, _ in ms):.0f} ms per '
                  f'step of a base, {min(b for _, b in ms):.0f} to {max(b for _, b in ms):.0f} of a second training, so beside others. '
                  'Wall seconds of both trainings per row: '
                  + ', '.join(f'{row["name"]}/{row["seed"]} {sum(row["seconds"]):.0f}' for row in rows) + '.']
    return '\n'.join([*lines, *_failed_lines(failed), ''])


def _failed_lines(failed: Sequence[str]) -> List[str]:
    return ['', '## Failed', '', *(f'- {line}' for line in failed)] if failed else []


def _score(row: Dict[str, Any], column: str = 'max') -> float:
    return row['metrics'][f'map_ref/mean/iou@{column}']


def _table(groups: Dict[str, List[Dict[str, Any]]], against: Optional[str] = None,
           spread: Optional[Mapping[str, float]] = None) -> List[str]:
    """A column per group, a row per metric; with ``against`` also what the mean loses or gains."""
    first = next(iter(groups.values()))[0]['metrics']
    classes = [key.split('/')[1] for key in first if key.startswith('map_ref/') and key.endswith('@max') and '/mean/' not in key]
    keys = [(f'{name}, {title}', f'{prefix}/{name}/iou@{column}') for title, prefix, column in (
        ('0.5 m', 'map_ref', 'max'), ('native', 'map', 'max'), ('0.5 m, any threshold', 'map_ref', 'any')) for name in ('mean', *classes)]
    keys.append(('NDS', 'object/nds'))
    lines = ['| | ' + ' | '.join(groups) + ' |', '|' + '---|' * (len(groups) + 1),
             '| seeds | ' + ' | '.join(str(len(rows)) for rows in groups.values()) + ' |']
    for title, key in keys:
        cells = [_cell([row['metrics'].get(key, math.nan) for row in rows]) for rows in groups.values()]
        lines.append(f'| {title} | {" | ".join(cells)} |')
    for column, title in COLUMNS.items() if against else ():
        means = {name: statistics.mean(_score(row, column) for row in rows) for name, rows in groups.items()}
        gaps = {name: mean - means[against] for name, mean in means.items() if name != against}
        lines.append(f'| mean, 0.5 m{title}, against {against} | | {" | ".join(f"{gap:+.4f}" for gap in gaps.values())} |')
        if spread is not None:
            said = ['none seen' if abs(gap) <= 2 * spread[column] else 'helps' if gap < 0 else 'does harm' for gap in gaps.values()]
            lines.append(f'| the part\'s effect here{title} | | {" | ".join(said)} |')
    return lines


def _cell(values: Sequence[float]) -> str:
    scored = [value for value in values if not math.isnan(value)]
    if not scored:
        return '-'
    text = f'{statistics.mean(scored):.4f}'
    return f'{text} ± {statistics.stdev(scored):.4f}' if len(scored) > 1 else text
