"""Trainings of ``tools/train.py`` as processes, several at a time over the GPUs, until a deadline; for the benchmarks beside it."""
from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from tqdm import tqdm

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / 'tools')]

import _light  # noqa: E402

_light.use_package()  # seconds less until the first training starts

from mmdet3d_ext.launching.gpus import on_machine  # noqa: E402
from mmdet3d_ext.launching.processes import RUN_VARIABLE, interruptible, kill_run, of_run, send, tail, wait_until  # noqa: E402, F401

STOPPED = 75              # exit code of a trainer that was asked to stop and wrote a checkpoint
LAST_START, GRACE = 45.0, 40.0  # seconds that a training needs at least; for its last step and checkpoint
END = 5.0                 # seconds before the deadline in which what still evaluates is stopped
TRIES = 2                 # a training that fails goes on once from its last checkpoint
START, EVALUATION = 30.0, 40.0  # seconds until the first step and after the last one, until they were seen
SETTLE = 20.0             # seconds between two looks at whether the time suffices


class OutOfTime(Exception):
    pass


@dataclass(eq=False)
class Training:
    """One call of the trainer. Its folder's name is made of ``words`` and of what it starts from, so that a later call finds it.

    Args:
        label: for people.
        words: the configuration, then overrides.
        steps: iterations that it will take.
        after: the training from whose last weights it starts.
        validate: whether it ends with an evaluation.
        turn: what has to be there first when the time is short has the lowest; the others make room for it.
    """

    label: str
    words: Tuple[str, ...]
    steps: int
    after: Optional['Training'] = None
    validate: bool = True
    turn: int = 0
    state: str = 'waiting'  # then running, done, failed
    why: str = ''
    tries: int = 0
    put_off: bool = False

    @property
    def mark(self) -> str:
        return hashlib.sha256(json.dumps([self.words, self.after and self.after.mark, self.validate]).encode()).hexdigest()[:12]

    def folder(self, work: Path) -> Path:
        return work / f'run_{self.mark}'

    def log(self, work: Path) -> Path:
        return work / f'run_{self.mark}.log'


@dataclass
class Run:
    """A training's process."""

    process: subprocess.Popen
    gpu: Optional[str]
    began: float
    done_before: int = 0
    ended_steps: Optional[float] = field(default=None)  # when its last step was seen


def train_records(folder: Path) -> List[Dict[str, Any]]:
    """The training lines of a run's logs in order; where it was continued, the later of two for the same step."""
    found = {}
    for path in sorted(folder.glob('*.log.json')):
        for line in path.read_text(errors='replace').splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # it is being written
                continue
            if record.get('mode') == 'train':
                found[record['epoch'], record['iter']] = record
    return [found[key] for key in sorted(found)]


def iterations(records: Sequence[Dict[str, Any]]) -> int:
    """Steps of a training: per epoch the last one that was logged, summed."""
    last: Dict[int, int] = {}
    for record in records:
        last[record['epoch']] = max(last.get(record['epoch'], 0), record['iter'])
    return sum(last.values())


def seconds_per_step(records: Sequence[Dict[str, Any]]) -> float:
    """Mean over the logged intervals without each epoch's first one, which holds the start of the loader's workers."""
    steady = [b['time'] for a, b in zip(records, records[1:]) if a['epoch'] == b['epoch']] or [record['time'] for record in records]
    return sum(steady) / len(steady) if steady else math.nan


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def visible_gpus() -> List[str]:
    """Values for CUDA_VISIBLE_DEVICES, one per GPU; none without one. No CUDA context is made."""
    if 'CUDA_VISIBLE_DEVICES' in os.environ:
        return [name.strip() for name in os.environ['CUDA_VISIBLE_DEVICES'].split(',') if name.strip()]
    import torch
    return [str(index) for index in range(torch.cuda.device_count())]


def device_name() -> str:
    import torch
    count, known = len(visible_gpus()), on_machine()
    name = known[0].name if known else torch.cuda.get_device_name(0) if count and torch.cuda.is_available() else 'CPU'
    return f'{f"{count} x " if count > 1 else ""}{name if count else "CPU"}, torch {torch.__version__}'


def make_data(data: Path, options: Sequence[str], version: str, cores: int, log: Path, seconds: Optional[float] = None) -> None:
    """A synthetic data set with its info files, unless it is there.

    Raises:
        OutOfTime: it took longer than ``seconds``; the next call goes on where it was.
        RuntimeError: with the last words of what failed.
    """
    if (data / 'nuscenes_infos_val.pkl').exists():
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for words in (['tools/create_synthetic_nuscenes.py', '--out', str(data), *options, '--workers', str(cores)],
                  ['tools/create_data.py', 'nuscenes', '--root-path', str(data), '--out-dir', str(data), '--extra-tag', 'nuscenes',
                   '--version', version, '--no-database', '--workers', str(cores)]):
        left = None if seconds is None else seconds - (time.monotonic() - began)
        with open(log, 'ab') as output:
            process = subprocess.Popen([sys.executable, *words], cwd=REPO, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=subprocess.STDOUT, start_new_session=True, env=dict(os.environ, OMP_NUM_THREADS='1'))
            try:
                code = process.wait(None if left is None else max(left, 0.0))
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # it has renderers, and files that it writes are whole or not there
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise OutOfTime from None
                raise
        if code:
            raise RuntimeError(f'exit code {code} of\n  python {" ".join(words)}\n{tail(str(log))}')


class Pool:
    """Runs trainings side by side.

    Each process sees one GPU, that with the fewest trainings; several on one take turns. One that fails is started once more, then
    it and what starts from it have failed, and the others go on. When the time is nearly over those that still take steps write
    checkpoints, and go on in their folders in a later call; those that evaluate have until the deadline. Whose turn is earlier and who
    is late gets room from the others.

    Args:
        work: folder of the runs.
        extra: words of every training, for example where the data are.
        jobs: how many at a time.
        cores: shared by their loader workers.
        deadline: of ``time.monotonic()``.
    """

    def __init__(self, work: Path, extra: Sequence[str], jobs: int, cores: int, deadline: float = math.inf,
                 script: str = 'tools/train.py', last_start: Optional[float] = None):
        self.work, self.extra, self.jobs, self.cores, self.deadline = work, list(extra), jobs, cores, deadline
        self.script, self.last_start, self.grace = script, LAST_START if last_start is None else last_start, GRACE
        self.gpus = visible_gpus()
        self.runs: Dict[Training, Run] = {}
        self.evaluation, self._looked = EVALUATION, 0.0

    @property
    def left(self) -> float:
        """Seconds in which steps can still be taken."""
        return self.deadline - time.monotonic() - self.grace

    def run(self, trainings: Sequence[Training], ended: Callable[[Training], None] = lambda _: None) -> None:
        """All of them, in their order as far as they can; ``ended`` is called with each that is done or has failed.

        Raises:
            OutOfTime: the time was over before all had ended.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        live = sys.stderr.isatty()
        shown = 0.0
        with tqdm(total=sum(one.steps for one in trainings), unit='step', ascii=not live, dynamic_ncols=live) as bar:
            try:
                while True:
                    for training in [*self._known(trainings), *self._collect()]:
                        self._say(training)
                        ended(training)
                    self._start_what_can(trainings)
                    if not self.runs:
                        break
                    if self.left < 0:
                        self._stop(self._too_late())
                    else:
                        self._make_room(trainings)
                    if time.monotonic() - shown > (1 if live else 15):
                        shown = time.monotonic()
                        self._show(bar, trainings)
                    time.sleep(0.2)
            finally:
                self._stop(list(self.runs))
                self._stop_strays(trainings)
                for training in self._known(trainings):  # they ended just then
                    self._say(training)
                    ended(training)
                self._show(bar, trainings)
        if any(one.state not in ('done', 'failed') for one in trainings):
            raise OutOfTime

    # ---- starting ------------------------------------------------------------------------------------------------------
    def _known(self, trainings: Sequence[Training]) -> List[Training]:
        """What an earlier call finished, and what cannot start because its base has failed."""
        found = []
        for one in trainings:
            if one.state != 'waiting':
                continue
            if (one.folder(self.work) / 'finished').exists():
                one.state = 'done'
                found.append(one)
            elif one.after is not None and one.after.state == 'failed':
                one.state, one.why = 'failed', f'{one.after.label}: {one.after.why}'
                found.append(one)
        return found

    def _start_what_can(self, trainings: Sequence[Training]) -> None:
        ready = [one for one in trainings if one.state == 'waiting' and (one.after is None or one.after.state == 'done')]
        first = min((one.turn for one in trainings if one.state in ('waiting', 'running') and not one.put_off), default=math.inf)
        ready = [one for one in ready if not one.put_off or one.turn <= first]
        side_by_side = min(self.jobs, len(self.runs) + len(ready))
        for training in ready[:self.jobs - len(self.runs)]:
            if self.left < self.last_start:
                return
            self.start(training, side_by_side)

    def start(self, training: Training, side_by_side: int) -> None:
        """Start one of ``side_by_side`` trainings that share the machine."""
        folder = training.folder(self.work)
        token = str(folder.resolve())
        if of_run(token):  # an earlier call was killed, its training was not
            send(of_run(token), signal.SIGTERM)
            if not wait_until(lambda: not of_run(token), self.grace):
                kill_run(token)
        gpu = None
        if self.gpus:
            used = Counter(run.gpu for run in self.runs.values())
            gpu = min(self.gpus, key=lambda name: (used[name], self.gpus.index(name)))
        # Beside others two keep up with a small model, and all of them share /dev/shm.
        workers = max(0, min(8 if side_by_side == 1 else 2, self.cores // side_by_side - 1))
        base = ['--load_from', str(training.after.folder(self.work) / 'latest.pth')] if training.after else []
        words = [sys.executable, self.script, training.words[0], '--run-dir', str(folder), *base, '--resume_from', 'auto',
                 *([] if training.validate else ['--no-validate']), *self.extra, '--data.workers_per_gpu', str(workers),
                 '--data.persistent_workers', 'true', *training.words[1:]]
        environment = {**os.environ, RUN_VARIABLE: token, 'PYTHONUNBUFFERED': '1',
                       **({'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1'} if side_by_side > 1 else {}),
                       **({'CUDA_VISIBLE_DEVICES': gpu} if gpu is not None else {})}
        done = iterations(train_records(folder))
        with open(training.log(self.work), 'ab') as output:
            # A session of its own: Ctrl-C reaches this program alone, which then stops them all once.
            process = subprocess.Popen(words, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=subprocess.STDOUT, start_new_session=True)
        training.state, training.tries = 'running', training.tries + 1
        self.runs[training] = Run(process, gpu, time.monotonic(), done)

    # ---- ends ----------------------------------------------------------------------------------------------------------
    def _collect(self) -> List[Training]:
        """Those that are done or have failed since the last look."""
        found = []
        for training, run in list(self.runs.items()):
            code = run.process.poll()
            if code is None:
                continue
            del self.runs[training]
            self._add_seconds(training, run)
            if code == 0:
                if training.validate and run.ended_steps:
                    self.evaluation = time.monotonic() - run.ended_steps
                (training.folder(self.work) / 'finished').touch()
                training.state = 'done'
            elif code == STOPPED or training.tries < TRIES:
                training.state = 'waiting'
                tqdm.write(f'{training.label} goes on from its last checkpoint after {self._reason(training, code)}')
                continue
            else:
                training.state, training.why = 'failed', self._reason(training, code)
            found.append(training)
        return found

    def _add_seconds(self, training: Training, run: Run) -> None:
        path = training.folder(self.work) / 'seconds.txt'
        if path.parent.is_dir():
            path.write_text(f'{seconds_spent(path.parent) + time.monotonic() - run.began:.1f}\n')

    def _reason(self, training: Training, code: int) -> str:
        lines = tail(str(training.log(self.work)), 40).splitlines()
        errors = [line for line in lines if 'Error' in line or 'error:' in line]
        text = (errors or lines or ['it said nothing'])[-1].strip()
        return f'exit code {code}: {text[:300]}'

    def _too_late(self) -> List[Training]:
        """Which to stop when no more steps can be taken: those that still take some; at the deadline all."""
        if time.monotonic() > self.deadline - END:
            return list(self.runs)
        return [one for one in self.runs if iterations(train_records(one.folder(self.work))) < one.steps]

    def _stop(self, trainings: Sequence[Training]) -> None:
        """Ask for a checkpoint and wait; what has not ended by then is killed with its workers."""
        runs = {training: self.runs[training] for training in trainings}
        for run in runs.values():
            run.process.send_signal(signal.SIGTERM)
        until = min(time.monotonic() + self.grace, self.deadline)
        for run in runs.values():
            with suppress(subprocess.TimeoutExpired):
                run.process.wait(max(0.0, until - time.monotonic()))
        self.kill({training: run for training, run in runs.items() if run.process.returncode is None})
        for training, run in runs.items():
            del self.runs[training]
            self._add_seconds(training, run)
            if run.process.returncode == 0:
                (training.folder(self.work) / 'finished').touch()
            training.state, training.tries = 'waiting', 0

    def _stop_strays(self, trainings: Sequence[Training]) -> None:
        """Trainings whose start was interrupted before it was written down, and those that an earlier, killed call has left."""
        tokens = [str(one.folder(self.work).resolve()) for one in trainings if one.state not in ('done', 'failed')]
        alive = [token for token in tokens if of_run(token)]
        for token in alive:
            send(of_run(token), signal.SIGTERM)
        wait_until(lambda: not any(map(of_run, alive)), max(0.0, min(self.grace, self.deadline - time.monotonic())))
        for token in alive:
            kill_run(token)

    def kill(self, runs: Mapping[Training, Run]) -> None:
        """With their workers, all at a time: a process takes seconds to leave a GPU."""
        tokens = [str(training.folder(self.work).resolve()) for training in runs]
        for token in tokens:
            send(of_run(token), signal.SIGKILL)
        for token, run in zip(tokens, runs.values()):
            kill_run(token)
            run.process.kill()
            run.process.wait()

    # ---- is there time? ------------------------------------------------------------------------------------------------
    def _expected_end(self, training: Training, run: Run, trainings: Sequence[Training]) -> Optional[float]:
        """When it and what starts from it will have ended at the pace of its last steps; None while that is not known."""
        records = train_records(training.folder(self.work))
        done = iterations(records)
        if done >= training.steps and run.ended_steps is None:
            run.ended_steps = time.monotonic()
        if len(records) < 3 or done - run.done_before < 2:
            return None
        pace = seconds_per_step(records[-3:])
        end = run.ended_steps or time.monotonic() + (training.steps - done) * pace
        end += self.evaluation if training.validate else 0.0
        following = [one for one in trainings if one.after is training and one.turn == training.turn and one.state == 'waiting']
        # On a finer grid, beside more others, a step takes longer; twice is a guess that is corrected once they run.
        return end + (START + 2 * pace * max(one.steps for one in following) + self.evaluation if following else 0.0)

    def _make_room(self, trainings: Sequence[Training]) -> None:
        """If some are late, stop the last of those whose turn comes after theirs."""
        now = time.monotonic()
        if math.isinf(self.deadline) or now - self._looked < SETTLE:
            return
        self._looked = now
        ends = [(one.turn, self._expected_end(one, run, trainings)) for one, run in self.runs.items()]
        late = min((turn for turn, end in ends if end is not None and end > self.deadline - END), default=math.inf)
        others = [one for one in self.runs if one.turn > late]
        if others:
            progress = {one: iterations(train_records(one.folder(self.work))) for one in others}
            last = min(reversed(others), key=lambda one: (-one.turn, progress[one]))
            last.put_off = True
            tqdm.write(f'{last.label} makes room: the time does not suffice for all')
            self._stop([last])

    # ---- words ---------------------------------------------------------------------------------------------------------
    def _say(self, training: Training) -> None:
        if training.state == 'failed':
            tqdm.write(f'{training.label} failed: {training.why} ({training.log(self.work)})')
        else:
            tqdm.write(f'{training.label} is done, {seconds_spent(training.folder(self.work)):.0f} s')

    def _show(self, bar: tqdm, trainings: Sequence[Training]) -> None:
        states = Counter(one.state for one in trainings)
        bar.n = sum(one.steps if one.state == 'done' else min(one.steps, iterations(train_records(one.folder(self.work))))
                    for one in trainings if one.state != 'failed')
        left = '' if math.isinf(self.deadline) else f', {max(0.0, self.left):.0f} s left'
        bar.set_postfix_str(', '.join(f'{states[name]} {name}' for name in ('running', 'waiting', 'done', 'failed') if states[name])
                            + left)


def seconds_spent(folder: Path) -> float:
    """Wall time of a training over all calls, others beside it."""
    path = folder / 'seconds.txt'
    return float(path.read_text()) if path.exists() else 0.0
