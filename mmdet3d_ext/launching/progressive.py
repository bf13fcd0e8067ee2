"""Stage after stage, each from the best checkpoint of the one before; killed at any point, the same call goes on.

What has happened lies in ``<run_dir>/progressive.json``, replaced as a whole after each step. A stage that trains is a run of
``tools/launch.py`` with its own supervisor: if this process is killed the training goes on, and the next call waits for it.
"""
from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from . import control
from . import state as files
from .processes import newest_checkpoint
from .stages import Facts, Gate, Plan, Stage, as_dict, nearest_metric
from .state import FAILED, FINISHED, STOPPED, UNSUPERVISED, LaunchToolError

WAITING, TRAINING, DONE = 'waiting', 'training', 'done'
EXIT_GATE = 5  # a gate was not met; 0 to 4 and 75 are the trainer's


@dataclass
class Record:
    """What ran: ``load_from`` is what it started from, ``best`` the checkpoint that goes on; times in seconds since 1970."""

    name: str
    phase: str = WAITING
    fingerprint: str = ''
    load_from: Optional[str] = None
    best: Optional[str] = None
    epoch: Optional[int] = None
    metric: str = ''
    score: Optional[float] = None
    gates: List[Dict[str, Any]] = field(default_factory=list)
    message: str = ''
    anew: bool = False  # its folder is to be moved aside before it starts
    started: float = 0.0
    ended: float = 0.0


@dataclass
class Gone(Exception):
    """Why it does not go on, with the exit code."""

    code: int
    text: str


class Progress:
    """The state file of one plan."""

    def __init__(self, run_dir: str):
        self.path = os.path.join(run_dir, 'progressive.json')
        self.plan: Dict[str, Any] = {}
        self.records: Dict[str, Record] = {}
        if os.path.exists(self.path):
            try:
                with open(self.path, encoding='utf-8') as stream:
                    data = json.load(stream)
                self.plan = dict(data['plan'])
                self.records = {one['name']: Record(**one) for one in data['stages']}
                table(self)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise LaunchToolError(f'{self.path}: cannot be read ({error}); move it away to begin anew (the stages\' folders '
                                      'are then continued)') from None

    def lock(self) -> int:
        """Hold the plan's folder until this process ends.

        Raises:
            LaunchToolError: another process does, or the folder cannot be used.
        """
        files.check_usable(os.path.dirname(self.path))
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            descriptor = os.open(f'{self.path[:-len(".json")]}.lock', os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._not_written(error) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise LaunchToolError(f'{os.path.dirname(self.path)}: this command is at work there already; --status shows how it is') from None
        return descriptor

    def write(self) -> None:
        """Replace the file.

        Raises:
            LaunchToolError: it cannot be written.
        """
        temporary = f'{self.path}.tmp'
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with open(temporary, 'w', encoding='utf-8') as stream:
                json.dump({'plan': self.plan, 'stages': [asdict(one) for one in self.records.values()]}, stream, indent=1)
                stream.write('\n')
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            raise self._not_written(error) from None

    def _not_written(self, error: OSError) -> LaunchToolError:
        return LaunchToolError(f'{error.filename or self.path} cannot be written: {error.strerror}. A stage that trains goes on; put that '
                               'right (disk full? permissions?), then the same command goes on, too')

    def adopt(self, plan: Plan, facts: Mapping[str, Facts], again: Optional[str] = None) -> List[str]:
        """Take over a plan; returns what is said about it.

        Raises:
            LaunchToolError: a stage that has begun is another one now.
        """
        notes: List[str] = []
        begun = [one.name for one in self.records.values() if one.phase != WAITING]
        from_here = plan.stage(again) if again else len(plan.stages)
        names = [stage.name for stage in plan.stages]
        if names[:len(begun)] != begun:
            raise LaunchToolError(f'{plan.file} has changed: {", ".join(begun)} ran in this order, now the stages are '
                                  f'{", ".join(names)}. Put it back, or give another run_dir')
        records: Dict[str, Record] = {}
        for number, stage in enumerate(plan.stages):
            record = self.records.get(stage.name) or Record(stage.name)
            print_ = stage.fingerprint(facts[stage.name].config_hash)
            if number >= from_here:
                record = Record(stage.name, anew=True)
            elif record.phase != WAITING and record.fingerprint != print_:
                raise LaunchToolError(
                    f'{plan.file}: stage {stage.name} has begun with other settings (its configuration, overrides, ranks, metric, '
                    f'weights or optimizer have changed since). Put them back to go on, or add --again {stage.name}: it and what '
                    'follows is trained anew, and the folders are moved aside')
            if record.phase == WAITING and record.fingerprint not in ('', print_):
                notes.append(f'stage {stage.name} has changed; it has not begun yet')
            records[stage.name] = record
            record.fingerprint = print_
        if self.plan.get('load_from', plan.load_from) != plan.load_from and records[names[0]].phase != WAITING:
            raise LaunchToolError(f'{plan.file}: load_from was {self.plan["load_from"]} when {names[0]} began. Put it back, or add '
                                  f'--again {names[0]}')
        self.records, self.plan = records, as_dict(plan)
        return notes


class Progressive:
    """Runs a plan.

    Args:
        plan, progress: what is to be done, and what is done.
        launch: words that begin a ``tools/launch.py`` command.
        extra: further words for its ``start``.
        say: prints a line.
        poll: seconds between two looks at a run.
    """

    def __init__(self, plan: Plan, progress: Progress, launch: List[str], extra: Tuple[str, ...] = (),
                 say: Callable[[str], None] = print, poll: float = 1.0):
        self.plan, self.progress, self.launch, self.extra, self.say, self.poll = plan, progress, launch, extra, say, poll

    def run(self) -> int:
        """All stages that are left; returns the exit code."""
        before = self.plan.load_from
        for number, stage in enumerate(self.plan.stages):
            record = self.progress.records[stage.name]
            try:
                if record.phase != DONE:
                    self._train(stage, record, before)
                self._check_best(stage, record)
                last = number + 1 == len(self.plan.stages)
                failed = self._gates(stage, record)
            except Gone as gone:
                record.message = gone.text
                self.progress.write()
                self.say(f'{stage.name}: {gone.text}')
                return gone.code
            if failed:
                what = '' if last else f', so {self.plan.stages[number + 1].name} is not started'
                self.say('\n'.join([f'{stage.name}: not what was asked for{what}', *failed, 'After a change of this stage: the same '
                                    f'command with --again {stage.name}. To go on as it is: lower or remove the gate in {self.plan.file}']))
                return EXIT_GATE
            before = record.best
        return 0

    # ---- one stage -----------------------------------------------------------------------------------------------------
    def _train(self, stage: Stage, record: Record, load_from: Optional[str]) -> None:
        if record.anew:
            self._move_aside(stage)
            record.anew = False
        record.phase, record.load_from, record.message = TRAINING, load_from, ''
        record.metric, record.started = stage.metric, record.started or time.time()
        self.progress.write()
        try:
            phase, message = self._ended_well(stage, load_from) or self._follow(stage, load_from)
        except KeyboardInterrupt:
            phase, message = self._stop(stage)
        if phase == STOPPED:
            raise Gone(75, f'{message}. The same command goes on')
        if phase != FINISHED:
            self._missing_metric(stage, message)
            code = files.read(stage.run_dir).history[-1].get('code') if files.read(stage.run_dir).history else 1
            raise Gone(code if code in (2, 3, 4) else 1, f'{message}. The same command tries again from the newest checkpoint')
        best = _json(os.path.join(stage.run_dir, 'best.json'))
        if best.get('metric') != stage.metric or not {'epoch', 'score'} <= set(best) \
                or not os.path.isfile(os.path.join(stage.run_dir, str(best.get('file')))):
            self._missing_metric(stage, 'it was trained to the end')
            raise Gone(1, f'it was trained to the end, but there is no best checkpoint by {stage.metric}: it was never evaluated, or the '
                       'metric was NaN each time (a class without ground truth in the validation set)')
        record.best, record.epoch, record.score = os.path.join(stage.run_dir, best['file']), best['epoch'], best['score']
        record.phase, record.ended = DONE, time.time()
        self.progress.write()
        self.say(f'{stage.name}: done, best {stage.metric} {record.score:.4f} at epoch {record.epoch}: {record.best}')

    def _move_aside(self, stage: Stage) -> None:
        if os.path.isfile(os.path.join(files.launch_dir(stage.run_dir), 'state.json')):
            found = files.read(stage.run_dir)
            control.check_host(found)
            if files.supervised(stage.run_dir) or control.real_phase(found)[0] == UNSUPERVISED:  # its ranks write where they were told to
                raise Gone(2, f'a run lives in {stage.run_dir}; "launch.py stop {stage.run_dir}" first')
        if os.path.isdir(stage.run_dir):
            number = 1
            while os.path.exists(f'{stage.run_dir}.previous_{number}'):
                number += 1
            os.rename(stage.run_dir, f'{stage.run_dir}.previous_{number}')
            self.say(f'{stage.name}: what was there is in {stage.run_dir}.previous_{number}')

    def _command(self, stage: Stage, load_from: Optional[str]) -> List[str]:
        options = ['-n', str(stage.ranks), '--run-dir', stage.run_dir, '--launcher', stage.launcher, '--max-restarts',
                   str(stage.max_restarts), *(['--gpus', stage.gpus] if stage.gpus is not None else [])]
        return [*self.launch, 'start', stage.config, *options, *self.extra, *stage.words(load_from)]

    def _ended_well(self, stage: Stage, load_from: Optional[str]) -> Optional[Tuple[str, str]]:
        """The end of a run of just this stage that came while nobody waited for it."""
        if not os.path.isfile(os.path.join(files.launch_dir(stage.run_dir), 'state.json')):
            return None
        found = files.read(stage.run_dir)
        same = found.command[-len(stage.words(load_from)):] == stage.words(load_from)
        phase, message = control.real_phase(found)
        return (phase, message) if same and phase == FINISHED else None

    def _follow(self, stage: Stage, load_from: Optional[str]) -> Tuple[str, str]:
        """Start the stage, or find it at work, and wait for its end: (phase, message)."""
        there = os.path.isfile(os.path.join(files.launch_dir(stage.run_dir), 'state.json'))
        if there:
            found = files.read(stage.run_dir)
            control.check_host(found)
            if control.real_phase(found)[0] == UNSUPERVISED:
                self.say(f'{stage.name}: its supervisor was killed; its processes are asked to write a checkpoint and end')
                code, text = control.stop(stage.run_dir, 600.0)
                if code:
                    raise Gone(1, text)
        if there and files.supervised(stage.run_dir):
            self.say(f'{stage.name}: is at work in {stage.run_dir}')
        else:
            newest = newest_checkpoint(stage.run_dir) if os.path.isdir(stage.run_dir) else None
            self.say(f'{stage.name}: starts from {os.path.basename(newest) if newest else load_from or "its initial weights"}; watch: '
                     f'python tools/monitor.py {stage.run_dir} --follow')
            os.makedirs(stage.run_dir, exist_ok=True)
            with open(os.path.join(stage.run_dir, 'start.log'), 'wb') as output:
                code = subprocess.run(self._command(stage, load_from), stdin=subprocess.DEVNULL, stdout=output,
                                      stderr=subprocess.STDOUT).returncode
            if code == 2 and not files.supervised(stage.run_dir):  # one that an earlier, killed call had begun may have come first
                with open(output.name, encoding='utf-8', errors='replace') as stream:
                    raise Gone(2, stream.read().strip()[-4000:])
        return self._wait(stage)

    def _wait(self, stage: Stage) -> Tuple[str, str]:
        last = ''
        while True:
            found = files.read(stage.run_dir)
            phase, message = control.real_phase(found)
            if f'{phase}: {message}' != last:
                last = f'{phase}: {message}'
                self.say(f'{stage.name}: {last}')
            if phase in (FINISHED, STOPPED, FAILED) and not files.supervised(stage.run_dir):
                return phase, message
            if phase == UNSUPERVISED:
                return FAILED, message
            time.sleep(self.poll)

    def _stop(self, stage: Stage) -> Tuple[str, str]:
        if not os.path.isfile(os.path.join(files.launch_dir(stage.run_dir), 'state.json')):
            return STOPPED, 'stopped before it began'
        self.say(f'{stage.name}: asked to write a checkpoint and end')
        code, text = control.stop(stage.run_dir, 600.0)
        return (FAILED if code else STOPPED), text

    # ---- its result ----------------------------------------------------------------------------------------------------
    def _missing_metric(self, stage: Stage, message: str) -> None:
        found = _json(os.path.join(stage.run_dir, 'metrics.json'))
        if found and stage.metric not in found:
            raise Gone(2, f'{message}. Its evaluation has no metric {stage.metric!r}{nearest_metric(stage.metric, found)}')

    def _check_best(self, stage: Stage, record: Record) -> None:
        if not record.best or not os.path.isfile(record.best):
            raise Gone(2, f'its best checkpoint {record.best} is gone; put it back, or add --again {stage.name}')

    def _gates(self, stage: Stage, record: Record) -> List[str]:
        """Judge the best epoch anew (gates may be changed after the training); returns a line per gate that is not met."""
        path = os.path.join(stage.run_dir, 'metrics', f'epoch_{record.epoch}.json')
        found = _json(path)
        if not found and stage.gates:
            raise Gone(2, f'{path} cannot be read, which holds the metrics of its best epoch')
        record.gates, failed = [], []
        for gate in stage.gates:
            if gate.metric not in found:
                raise Gone(2, f'its evaluation has no metric {gate.metric!r}{nearest_metric(gate.metric, found)}')
            value = float(found[gate.metric])
            passed = gate.passes(value)
            record.gates.append({'gate': str(gate), 'value': None if math.isnan(value) else value, 'passed': passed})
            if not passed:
                failed.append(f'  {gate.metric} is {value:.4f}, it must be {str(gate).split(" ", 1)[1]}. {gate.advice or _advice(gate)}')
        record.message = '; '.join(line.strip() for line in failed)
        self.progress.write()
        return failed


def _advice(gate: Gate) -> str:
    parts = gate.metric.split('/')
    if parts[0] in ('map', 'map_ref') and len(parts) == 3 and parts[1] != 'mean':
        return (f'Raise model.heads.map.class_weights.{parts[1]}, train longer (max_epochs), or see whether the class\'s losses still '
                'fall (tools/monitor.py)')
    return 'Train longer (max_epochs), or look at its losses with tools/monitor.py'


def _json(path: str) -> Dict[str, Any]:
    try:
        with open(path, encoding='utf-8') as stream:
            found = json.load(stream)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def table(progress: Progress) -> str:
    """What ran, with which checkpoint and result; no times, so that two tables of the same training are the same text."""
    rows = [('stage', 'state', 'from', 'best checkpoint', 'epoch', 'score', 'gates')]
    for one in progress.records.values():
        gates = ', '.join(f'{gate["gate"]}: {"NaN" if gate["value"] is None else format(gate["value"], ".4f")} '
                          f'{"passed" if gate["passed"] else "NOT MET"}' for gate in one.gates)
        rows.append((one.name, one.phase, _short(one.load_from, progress.path) or ('-' if one.phase == WAITING else 'initial weights'),
                     _short(one.best, progress.path) or '-', str(one.epoch or '-'),
                     '-' if one.score is None else f'{one.metric} {one.score:.4f}', gates or '-'))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ['  '.join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
    return '\n'.join(lines + [f'{one.name}: {one.message}' for one in progress.records.values() if one.message])


def _short(path: Optional[str], state_file: str) -> str:
    if not path:
        return ''
    relative = os.path.relpath(path, os.path.dirname(state_file))
    return path if relative.startswith(os.pardir) else relative
