"""Runs the attempts of one run: start, watch, restart after a crash, stop with a checkpoint."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from . import state as files
from .launchers import Choice, environment, write_plan
from .processes import ending, kill_run, newest_checkpoint, newest_text, of_run, send, tail, wait_until
from .state import FAILED, FINISHED, RUNNING, STARTING, STOPPED, STOPPING, WAITING, State

POLL = 0.1  # seconds
LEFTOVER_PATIENCE = 8.0  # seconds that processes may outlive their launcher
LINGER_PATIENCE = 180.0  # seconds that a launcher may outlive its ranks (each waits for the others' last words)
# The last line of a traceback, a clean message, or what the rank watch says of another rank; not torchrun's own report.
_ERROR = re.compile(r'^(\[rank \d+\] )?(error: |stops, because |(?!torch\.distributed\.elastic)[\w.]*(Error|Exception|Fault)\b)')
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # seconds before a restart; doubled at each one without progress


@dataclass(frozen=True)
class ExitCodes:
    """The trainer's exit codes that are no crash, with what they mean for the operator."""

    stopped: int
    mistake: int = 2
    save_failed: int = 3
    gave_up: int = 4

    @property
    def quiet(self) -> List[int]:
        return [0, self.mistake, self.save_failed, self.gave_up, self.stopped]


@dataclass
class Outcome:
    """How an attempt ended. ``rank``: the first one to end otherwise than well; ``code``: its exit code (negative: a signal)."""

    code: Optional[int]
    rank: Optional[int]
    text: str
    log: str = ''


class Supervisor:
    """Runs ``command`` in ``state.ranks`` processes until it has finished, failed for good, or was stopped.

    Args:
        state: what is run; its file is kept up to date.
        choice: the launcher.
        codes: the trainer's exit codes.
        resume: words that make the trainer continue from its newest good checkpoint, added at a restart.
        echo: also show everything on this process's stderr.
        first_rank: number of this machine's first rank.
    """

    def __init__(self, state: State, choice: Choice, codes: ExitCodes, resume: Tuple[str, ...] = ('--resume_from', 'auto'),
                 echo: bool = False, first_rank: int = 0, first_pause: float = FIRST_PAUSE):
        self.state, self.choice, self.codes, self.resume, self.echo = state, choice, codes, resume, echo
        self.first_rank, self.first_pause = first_rank, first_pause
        self.stop_asked: Optional[float] = None
        self.kill_asked = False
        self.launcher: Optional[subprocess.Popen] = None
        self.shown = 0

    # ---- the loop -------------------------------------------------------------------------------------------------------
    def run(self) -> int:
        """Returns the exit code for the operator: the trainer's own for an end that is no crash, else 1."""
        self._catch_signals()
        self.state.supervisor, self.state.started, self.state.stopped_code = os.getpid(), time.time(), self.codes.stopped
        crashes = 0
        while True:
            before = self._checkpoint_mark()
            outcome = self._attempt()
            final = self._final(outcome)
            if final is not None:
                return final
            self.state.last_crash = outcome.text
            saved = self._checkpoint_mark() != before
            crashes = 1 if saved else crashes + 1
            if crashes > self.state.max_restarts:
                what = 'without a new checkpoint in between' if self.state.max_restarts else '(--max-restarts 0)'
                return self._end(FAILED, f'{outcome.text}. Not restarted: {crashes} crash(es) {what}; see {outcome.log}', 1)
            pause = min(LONGEST_PAUSE, self.first_pause * 2 ** (crashes - 1))
            newest = newest_checkpoint(self.state.run_dir)
            self.state.restarts += 1
            self._phase(WAITING, f'{outcome.text}. Restart {self.state.restarts} in {pause:.0f} s from '
                                 f'{os.path.basename(newest) if newest else "the beginning (there is no checkpoint)"}')
            if wait_until(lambda: self.stop_asked is not None or self.kill_asked, pause):
                return self._end(STOPPED, f'stopped while waiting for a restart; {newest_text(self.state.run_dir)}', self.codes.stopped)

    def _final(self, outcome: Outcome) -> Optional[int]:
        """The exit code if this was the last attempt."""
        code = outcome.code
        if code == 0 and outcome.rank is None:
            return self._end(FINISHED, 'trained to the end' if self.stop_asked is None else 'finished before it could stop', 0)
        if code == self.codes.save_failed:
            return self._end(FAILED, f'the last checkpoint could not be written (disk full?); {newest_text(self.state.run_dir)}', code)
        if code == self.codes.gave_up:
            return self._end(FAILED, f'{outcome.text}: the training stopped itself, a restart would come to the same place; see '
                             f'{outcome.log}', code)
        # Without a handler yet (the rank was just starting) SIGTERM ends it; launchers send it only after another rank has failed.
        if code in (self.codes.stopped, -signal.SIGTERM) or self.stop_asked is not None:
            why = 'stopped' if self.stop_asked is not None else 'stopped by a signal to a rank'
            how = '' if code == self.codes.stopped else ' without a last checkpoint'
            return self._end(STOPPED, f'{why}{how}; {newest_text(self.state.run_dir)}', self.codes.stopped)
        if code == self.codes.mistake:
            return self._end(FAILED, f'{outcome.text}: something to correct, see {outcome.log}', code)
        return None

    def _attempt(self) -> Outcome:
        state = self.state
        state.attempt += 1
        folder = files.attempt_dir(state.run_dir, state.attempt)
        log = os.path.join(folder, 'launcher.log')
        record: Dict[str, Any] = {'attempt': state.attempt, 'started': time.time(), 'log': log}
        state.history.append(record)
        self._phase(STARTING, f'attempt {state.attempt}: {state.ranks} process(es) by {self.choice.kind}; log {log}')
        self.shown = 0
        try:
            self._start(folder, log)
        except OSError as error:  # a full disk, no more processes: it may be over at the next attempt
            outcome = Outcome(1, -1, f'{self.choice.kind} could not be started: {error.filename or folder}: {error.strerror}',
                              os.path.join(files.launch_dir(state.run_dir), 'launch.log'))
        else:
            record['launcher'] = self.launcher.pid
            self._watch(folder, log)
            outcome = self._outcome(folder, log)
        record.update(ended=time.time(), code=outcome.code, rank=outcome.rank, text=outcome.text)
        self._write_state()
        return outcome

    def _start(self, folder: str, log: str) -> None:
        state = self.state
        words = state.command + (list(self.resume) if state.attempt > 1 and state.restarts else [])
        plan = write_plan(folder, words, state.exports, state.ranks, self.codes.quiet, self.first_rank)
        command = self.choice.command(state.ranks, sys.executable)
        with open(log, 'ab') as output:
            # A session of its own: the terminal's Ctrl-C reaches this process alone, which then stops the ranks in order.
            self.launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                             env=environment(state.token, plan, state.exports), start_new_session=True)

    def _watch(self, folder: str, log: str) -> None:
        """Until the launcher and every process of the attempt have ended."""
        launcher, told, asked, all_ended = self.launcher, False, False, None
        while launcher.poll() is None:
            time.sleep(POLL)
            self._show(log)
            records = self._records(folder)
            if not told and len(records) == self.state.ranks:
                told = True
                self._phase(RUNNING, f'{self.state.ranks} process(es) started by {self.choice.kind}')
            if self.kill_asked:
                break
            if self.stop_asked is not None and not asked:
                asked = self._ask_to_stop(records)
            if len(records) == self.state.ranks and all('code' in record for record in records.values()):
                all_ended = all_ended or time.monotonic()
                if time.monotonic() - all_ended > LINGER_PATIENCE:
                    self._say(f'{self.choice.kind} does not end after its ranks: it is ended')
                    break
        wait_until(lambda: not of_run(self.state.token), 0.0 if self.kill_asked else LEFTOVER_PATIENCE, 0.2)
        left = of_run(self.state.token)
        if left and not self.kill_asked:
            self._say(f'{len(left)} process(es) of the attempt are still there after it ended: killed ({left})')
        stuck = kill_run(self.state.token) if left else []
        if stuck:
            self._say(f'processes {stuck} cannot be killed (they wait in the kernel or on a GPU); the GPUs may stay occupied')
        launcher.wait()
        self._show(log)

    def _ask_to_stop(self, records: Mapping[int, Mapping[str, Any]]) -> bool:
        """SIGTERM to the trainers themselves, not to the launcher, which would kill them soon after. Returns whether to stop
        asking."""
        living = set(of_run(self.state.token))
        ranks = [record['pid'] for record in records.values() if 'code' not in record and record['pid'] in living]
        if len(records) < self.state.ranks:
            if time.time() - self.stop_asked < 20.0:
                return False  # they are just being started
            self._say('stop: the ranks were not started yet; the launcher is ended')
            self.kill_asked = True
            return True
        self._phase(STOPPING, f'asked {len(ranks)} process(es) to write a checkpoint and end')
        send(ranks, signal.SIGTERM)
        return True

    # ---- what happened --------------------------------------------------------------------------------------------------
    def _records(self, folder: str) -> Dict[int, Dict[str, Any]]:
        found = files.records(folder, self.first_rank + self.state.ranks)
        return {rank: record for rank, record in found.items() if rank >= self.first_rank}

    def _outcome(self, folder: str, log: str) -> Outcome:
        records = self._records(folder)
        code = self.launcher.returncode
        if not records:
            last = tail(log, 5)
            return Outcome(code or 1, -1, f'{self.choice.kind} started no process (exit code {code}): {_last_line(last)}', log)
        failed = [record for record in records.values() if record.get('code') != 0]
        if not failed and len(records) == self.state.ranks:
            return Outcome(0, None, 'every rank ended well', log)
        # The first to end is the cause; a rank process that was killed itself could not write an end.
        named = sorted((record for record in failed if 'code' in record), key=lambda record: record['ended'])
        crashed = [record for record in named if record['code'] not in self.codes.quiet]
        silent = sorted(record['rank'] for record in failed if 'code' not in record)
        if silent and all(record['code'] == -signal.SIGTERM for record in crashed):  # which launchers send to the others
            which = f'rank {silent[0]} was' if len(silent) == 1 else f'ranks {", ".join(map(str, silent))} were'
            return Outcome(1, silent[0], f'{which} killed without a word, rank process included (by hand, out of memory, or a '
                           'container\'s limit)', log)
        if not named:
            return Outcome(1, -1, f'{self.state.ranks - len(records)} rank(s) did not start: {_last_line(tail(log, 5))}', log)
        first = named[0]
        where = log if first['rank'] == self.first_rank and self.first_rank == 0 else \
            os.path.join(folder, f'rank_{first["rank"]}.log')
        reason = last_error(where) if first['code'] > 0 else ''
        return Outcome(first['code'], first['rank'], f'rank {first["rank"]} {ending(first["code"])}{reason and f" ({reason})"}', where)

    def _end(self, phase: str, message: str, code: int) -> int:
        self._phase(phase, message)
        log = self.state.history[-1]['log'] if self.state.history else ''
        if phase == FAILED and not self.echo:
            self._say('the log ends with:\n' + tail(log))
        return code

    def _checkpoint_mark(self) -> Optional[Tuple[str, float]]:
        newest = newest_checkpoint(self.state.run_dir)
        try:
            return (newest, os.path.getmtime(newest)) if newest else None
        except OSError:
            return None

    # ---- signals and words ----------------------------------------------------------------------------------------------
    def _catch_signals(self) -> None:
        def stop(number: int, frame: Any) -> None:
            if self.stop_asked is not None and number == signal.SIGINT:
                self.kill_asked = True  # Ctrl-C twice
            self.stop_asked = self.stop_asked or time.time()

        def kill(number: int, frame: Any) -> None:
            self.stop_asked = self.stop_asked or time.time()
            self.kill_asked = True

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, stop)
        signal.signal(signal.SIGQUIT, kill)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal was closed: the run goes on

    def _phase(self, phase: str, message: str) -> None:
        self.state.phase, self.state.message = phase, message
        self._write_state()
        self._say(f'{phase}: {message}')

    def _write_state(self) -> None:
        try:
            self.state.write()
        except OSError as error:
            self._say(f'ALARM: cannot write the state: {error.strerror}. The run goes on')

    def _say(self, text: str) -> None:
        line = f'{time.strftime("%Y-%m-%d %H:%M:%S")} launch: {text}\n'
        try:
            with open(os.path.join(files.launch_dir(self.state.run_dir), 'launch.log'), 'a', encoding='utf-8') as stream:
                stream.write(line)
        except OSError:
            pass
        if self.echo:
            _to_screen(line.encode())

    def _show(self, log: str) -> None:
        """Pass on what the launcher printed since the last call."""
        if not self.echo:
            return
        try:
            with open(log, 'rb') as stream:
                stream.seek(self.shown)
                data = stream.read()
        except OSError:
            return
        self.shown += len(data)
        if data:
            _to_screen(data)


def last_error(log: str) -> str:
    """The last line of a log that looks like an error's message; empty if there is none."""
    found = [line for line in tail(log, 200, 65536).split('\n') if _ERROR.match(line)]
    return found[-1].strip()[:300] if found else ''


def _last_line(text: str) -> str:
    return text.split('\n')[-1].strip() or 'it printed nothing'


def _to_screen(data: bytes) -> None:
    try:
        sys.stderr.buffer.write(data)
        sys.stderr.flush()
    except (OSError, ValueError):  # the screen has gone: the run stays
        pass
