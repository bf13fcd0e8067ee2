"""Rules that say whether a run looks well. Thresholds are those that users of these recipes watch by hand."""
from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, List, Mapping, Optional

from .progress import FAILED, RUNNING, SILENT, STARTING, Progress, duration, progress
from .records import finite
from .run import Run

# From the notes of a Phase 3 / Stage 1 run (400 and 600 cells, V100): dice loss below 0.4 for large and 0.9 for small classes,
# focal loss below 0.05, gradient norm below 20. Both losses before class weights.
LARGE_CLASSES = ('drivable_area', 'ped_crossing', 'walkway')
SMALL_CLASSES = ('stop_line', 'carpark_area', 'divider')
DICE_LARGE, DICE_SMALL, FOCAL, GRAD_NORM = 0.4, 0.9, 0.05, 20.0
DATA_SHARE = 0.3  # of a step's time: more, and the loader is what limits the speed
EARLY = 0.1  # share of the schedule in which losses may still be above their thresholds
RISE = 1.25  # of the total loss over its median before: more is no fluctuation of medians over ten lines

SKIPPED = 'nonfinite_steps'  # of a line's interval (engine/hooks/logging.py); its means leave them out

GOOD, INFO, WARN, BAD = 'good', 'info', 'warn', 'bad'
ORDER = (GOOD, INFO, WARN, BAD)


@dataclass(frozen=True)
class Mark:
    """One judgement: ``name`` of what is judged, ``level`` (good, info: not yet, warn, bad), the value, a sentence."""

    name: str
    level: str
    text: str
    value: Optional[float] = None
    limit: Optional[float] = None


def worst(marks: List[Mark]) -> str:
    """The worst level of some marks."""
    return max((mark.level for mark in marks), key=ORDER.index, default=GOOD)


def health(run: Run, state: Optional[Progress] = None) -> List[Mark]:
    """All judgements about a run, in the order in which an operator looks."""
    state = state or progress(run)
    early = state.fraction is not None and state.fraction < EARLY
    marks = [_liveness(state)]
    marks += _finite(run)
    marks += _trend(run)
    marks += _gradients(run, early)
    marks += map_classes(run, early)
    marks += _data(state)
    marks += _alarms(run) + _logs(run, state)
    return marks


def _liveness(state: Progress) -> Mark:
    level = BAD if state.state in (SILENT, FAILED) else GOOD
    return Mark('run', level, f'{state.state}: {state.text}')


def _finite(run: Run) -> List[Mark]:
    marks = []
    rows = run.train[-10:]
    wrong = sorted({name for row in rows for name, value in row.values.items() if not math.isfinite(value)})
    losses = [name for name in wrong if name != 'grad_norm']
    if losses:
        marks.append(Mark('finite values', BAD, f'NaN or infinite in the last {len(rows)} lines: {", ".join(losses[:5])}'
                          + (f' and {len(losses) - 5} more' if len(losses) > 5 else '')))
    elif any(row.values.get(SKIPPED) for row in rows):
        count = int(sum(row.values.get(SKIPPED, 0) for row in rows))
        marks.append(Mark('finite values', WARN, f'{count} step(s) of the last {len(rows)} lines had a non-finite loss or gradient and '
                          'were skipped: see the warnings for loss, module and samples', count))
    elif rows:
        marks.append(Mark('finite values', GOOD, f'no NaN or infinite loss in the last {len(rows)} lines'))
    return marks


def _trend(run: Run) -> List[Mark]:
    values = finite(run.series('loss')[1])
    if len(values) < 30:
        return []
    now, before = statistics.median(values[-10:]), statistics.median(values[-30:-10])
    lowest = min(statistics.median(values[start:start + 10]) for start in range(0, len(values) - 9, max(1, len(values) // 200)))
    if before > 0 and now > RISE * before:
        return [Mark('total loss', WARN, f'rises: {now:.4g} over the last 10 lines, {before:.4g} over the 20 before', now)]
    if lowest > 0 and now > 2 * RISE * lowest:
        return [Mark('total loss', WARN, f'{now:.4g} is far above its lowest level of {lowest:.4g}', now)]
    return [Mark('total loss', GOOD, f'{now:.4g}, {before:.4g} before', now)]


def _gradients(run: Run, early: bool) -> List[Mark]:
    last = run.last('grad_norm')
    if last is None:
        return []
    if not math.isfinite(last):
        return [Mark('gradient norm', WARN, f'{last}: the newest line has no finite norm. Mixed precision searches its loss scale '
                     'so at the start; later, see the warnings', last, GRAD_NORM)]
    value = run.recent('grad_norm')
    return [_below('gradient norm', value, GRAD_NORM, early)]


def _below(name: str, value: float, limit: float, early: bool, note: str = '') -> Mark:
    if value < limit:
        return Mark(name, GOOD, f'{value:.4g} < {limit:g}{note}', value, limit)
    return Mark(name, INFO if early else WARN,
                f'{value:.4g} is not below {limit:g}' + (' yet' if early else '') + note, value, limit)


def map_classes(run: Run, early: bool = False) -> List[Mark]:
    """Dice and focal marks of every map class; named ``map/<class>/dice`` and ``map/<class>/focal``."""
    marks = []
    for label, kinds in run.map_losses().items():
        score = run.recent(f'stats/map/{label}/dice_score')
        dice = 1.0 - score if score is not None else _unweighted(run, label, 'dice', kinds)
        if dice is not None and 'dice' in kinds:
            limit = DICE_SMALL if label in SMALL_CLASSES else DICE_LARGE if label in LARGE_CLASSES else None
            name = f'map/{label}/dice'
            marks.append(_below(name, dice, limit, early) if limit is not None else
                         Mark(name, INFO, f'{dice:.4g}; no threshold is known for this class', dice))
        focal = _unweighted(run, label, 'focal', kinds)
        if focal is not None:
            marks.append(_below(f'map/{label}/focal', focal, FOCAL, early))
    return marks


def _unweighted(run: Run, label: str, kind: str, kinds: Mapping[str, str]) -> Optional[float]:
    """A class's logged loss divided by the weights that the configuration gave it."""
    value, weight = run.recent(kinds[kind]) if kind in kinds else None, loss_weight(run, label, kind)
    return None if value is None or weight <= 0 else value / weight


def loss_weight(run: Run, label: str, kind: str) -> float:
    """By what the configuration multiplies a map class's ``focal`` or ``dice`` loss before it is logged."""
    weight = _number(run.setting(f'model.heads.map.{kind}_weight'), 1.0) * _number(run.setting('model.loss_scale.map'), 1.0)
    weights = run.setting('model.heads.map.class_weights')
    names = run.setting('map_classes') or []
    if isinstance(weights, Mapping):
        weight *= _number(weights.get(label), 1.0)
    elif isinstance(weights, list) and label in names and len(weights) == len(names):
        weight *= _number(weights[names.index(label)], 1.0)
    return weight


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default


def _data(state: Progress) -> List[Mark]:
    if state.data_share is None:
        return []
    text = f'{state.data_share:.0%} of a step waits for data'
    if state.data_share < DATA_SHARE:
        return [Mark('data time', GOOD, text, state.data_share, DATA_SHARE)]
    return [Mark('data time', WARN, f'{text}: more workers (data.workers_per_gpu), faster storage, or a smaller pipeline',
                 state.data_share, DATA_SHARE)]


def _alarms(run: Run) -> List[Mark]:
    marks = []
    alarms = [item for item in run.messages() if item[2].startswith('ALARM')]
    others = [item for item in run.messages() if item[1] != 'WARNING' and not item[2].startswith('ALARM')]
    if alarms:
        marks.append(Mark('alarms', BAD, f'{len(alarms)} in the log, the last at {alarms[-1][0]}: {alarms[-1][2]}', len(alarms)))
    if others:
        marks.append(Mark('errors', BAD, f'{len(others)} in the log, the last at {others[-1][0]}: {others[-1][2]}', len(others)))
    restarts = run.launch.get('restarts')
    if isinstance(restarts, int) and restarts > 0:
        marks.append(Mark('restarts', WARN, f'{restarts} after crashes, the last: {run.launch.get("last_crash", "unknown")}',
                          restarts))
    late = [duration(age) for age in [_checkpoint_age(run)] if age is not None]
    if late:
        marks.append(Mark('checkpoints', WARN, f'the newest is {late[0]} old, that is more than two epochs'))
    return marks


def _logs(run: Run, state: Progress) -> List[Mark]:
    """What is wrong with the log files themselves."""
    texts = list(run.problems)
    for log in run.logs.values():
        if log.problem:
            continue
        if log.broken:
            texts.append(f'{log.path}: {log.broken} line(s) cannot be read (a full disk, or two runs in one folder)')
        if log.partial and state.state not in (RUNNING, STARTING):
            texts.append(f'{log.path}: its last line is cut (killed while it was written, or a part of the file)')
    return [Mark('log', WARN, '; '.join(texts), len(texts))] if texts else []


def _checkpoint_age(run: Run) -> Optional[float]:
    """Age of the newest checkpoint at the last log line if two epochs went by without one (an interval > 1 is allowed for)."""
    saved, written = run.checkpoints(), run.written()
    step, iterations = run.recent('time', 20), run.iterations
    every = run.setting('checkpoint_config.interval', 1)
    if run.single or not saved or not written or not step or not iterations or not isinstance(every, int) or every < 1:
        return None
    age = written - saved[-1][1]
    return age if age > 2.2 * every * iterations * step else None
