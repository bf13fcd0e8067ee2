"""How far a run is, how fast, how long it still takes, and whether it lives."""
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Optional

from .records import finite
from .run import Run

PATIENCE = 3.0  # a log line may come this many times later than usual before the run counts as silent
LEAST_LIMIT = 60.0  # seconds
START_LIMIT = 900.0  # seconds until the first line: caches, kernel tuning, 8 ranks reading info files
EVALUATION_LIMIT = 3600.0  # seconds for an evaluation whose length is not known yet

RUNNING, SILENT, STARTING, FINISHED, STOPPED, FAILED = 'running', 'silent', 'starting', 'finished', 'stopped', 'failed'
# Phases that tools/launch.py writes -> state here. Its "running" is believed only as far as the log moves.
ENDED = {'finished': FINISHED, 'stopped': STOPPED, 'failed': FAILED}


@dataclass
class Progress:
    """Where a run stands at time ``now``.

    Times in seconds; ``age``: since the last line; ``limit``: from which age on it counts as silent; ``due``: usual distance of
    two lines; ``samples_per_second`` over all ranks; ``data_share``: of the step's time, spent waiting for data.
    """

    state: str
    text: str
    epoch: int
    iteration: int
    epochs: Optional[int]
    iterations: Optional[int]
    fraction: Optional[float]
    age: Optional[float]
    due: Optional[float]
    limit: float
    seconds_per_step: Optional[float]
    samples_per_second: Optional[float]
    data_share: Optional[float]
    eta: Optional[float]


def progress(run: Run, now: Optional[float] = None) -> Progress:
    """Measure ``run`` as its files are now (:meth:`Run.refresh` reads them)."""
    now = time.time() if now is None else now
    last = run.train[-1] if run.train else None
    epoch, iteration = (last.epoch, last.iter) if last else (0, 0)
    epochs, iterations = run.epochs, run.iterations
    step = run.recent('time', 20)
    written = run.written()
    age = max(0.0, now - written) if written is not None else None
    due = step * run.interval if step else None
    batch = run.setting('data.samples_per_gpu')
    samples = None
    if step and run.ranks and isinstance(batch, int):
        samples = run.ranks * batch / step
    data = run.recent('data_time', 20)
    fraction = remaining = None
    if epochs and iterations:
        done = epoch * iterations if run.by_iteration else (max(epoch, 1) - 1) * iterations + iteration
        fraction = min(1.0, done / (epochs * iterations))
        remaining = max(0, epochs * iterations - done)
    eta = remaining * step + _evaluations(run, epoch, epochs) if remaining is not None and step else None
    state, text, limit = _state(run, age, due)
    if state in (FINISHED, FAILED, STOPPED, SILENT):
        eta = None
    return Progress(state, text, epoch, iteration, epochs, iterations, fraction, age, due, limit, step, samples,
                    min(1.0, data / step) if data is not None and step else None, eta)


def evaluation_seconds(run: Run) -> Optional[float]:
    """How long the last evaluation took."""
    for path in sorted(run.texts, reverse=True):
        if run.texts[path].evaluation is not None:
            return run.texts[path].evaluation
    return None


def _evaluations(run: Run, epoch: int, epochs: Optional[int]) -> float:
    """Seconds of the evaluations to come."""
    each = evaluation_seconds(run)
    if not each or not epochs:
        return 0.0
    every = run.setting('evaluation.interval', 1)
    begun = epochs - (run.val[-1].epoch if run.val else epoch - 1)
    return each * max(0, begun) / (every if isinstance(every, int) and every > 0 else 1)


def _at_epoch_end(run: Run) -> bool:
    """Whether the newest row is the last one of its epoch, and no evaluation came after it."""
    last = run.train[-1]
    evaluated = bool(run.val) and run.val[-1].epoch >= last.epoch
    return bool(run.iterations) and last.iter + run.interval > run.iterations and not evaluated


def _complete(run: Run, age: Optional[float]) -> bool:
    """Whether the schedule is over, as far as the log tells; without an evaluation only once the log is quiet."""
    if not run.train or not run.epochs or not run.iterations or run.by_iteration:
        return False
    last = run.train[-1]
    if last.epoch < run.epochs or last.iter + run.interval <= run.iterations:
        return False
    evaluated = bool(run.val) and run.val[-1].epoch >= run.epochs
    saved = any(name == f'epoch_{run.epochs}.pth' for name, _, _ in run.checkpoints())
    return evaluated or (saved and not run.val and (age is None or age > LEAST_LIMIT))


def _state(run: Run, age: Optional[float], due: Optional[float]):
    """(state, sentence, limit of silence in seconds)."""
    phase = str(run.launch.get('phase', ''))
    message = str(run.launch.get('message', ''))
    if not run.train:
        limit = START_LIMIT
    else:
        limit = max(LEAST_LIMIT, PATIENCE * (due or LEAST_LIMIT))
        if _at_epoch_end(run):
            known = evaluation_seconds(run)
            limit += 2 * known if known else EVALUATION_LIMIT
    if phase in ENDED:
        return ENDED[phase], message or f'{phase}', limit
    if _complete(run, age):
        return FINISHED, f'trained to the end of epoch {run.epochs}', limit
    if age is None:
        return STARTING, message or 'no log yet', limit
    if age <= limit:
        if phase in ('waiting', 'stopping'):
            return RUNNING, f'{phase}: {message}', limit
        if not run.train:
            cut = f'; {run.problems[-1]}' if run.problems else ''
            return STARTING, f'no training line yet; the log was written {duration(age)} ago{cut}', limit
        if _at_epoch_end(run):
            return RUNNING, f'at the end of epoch {run.train[-1].epoch}: checkpoint and evaluation', limit
        return RUNNING, f'last line {duration(age)} ago' + (f', one is due every {duration(due)}' if due else ''), limit
    expected = f'one is due every {duration(due)}' if due else f'the first is due within {duration(limit)}'
    cause = ''
    errors = run.rank_errors()
    if errors:
        cause = f'; {errors[0][0]} ends with: {errors[0][1]}'
    elif phase == 'running':
        cause = '; its launcher has written no end of it (tools/launch.py status): a hang, or an evaluation that takes longer than before'
    elif run.problems:
        cause = f'; {run.problems[-1]}'
    return SILENT, f'died or hangs: the last line is {duration(age)} old, {expected}{cause}', limit


def duration(seconds: Optional[float]) -> str:
    """Short text: 4.2 s, 12 min 5 s, 3 h 20 min, 6 d 4 h."""
    if seconds is None or not finite([seconds]):
        return 'unknown'
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f'{seconds:.1f} s'
    whole = int(round(seconds))
    if whole < 60:
        return f'{whole} s'
    if whole < 3600:
        return f'{whole // 60} min {whole % 60} s'
    if whole < 86400:
        return f'{whole // 3600} h {whole % 3600 // 60} min'
    return f'{whole // 86400} d {whole % 86400 // 3600} h'
