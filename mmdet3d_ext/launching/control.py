"""What ``tools/launch.py`` does with a run from outside: stop it, tell how it is."""
from __future__ import annotations

import glob
import os
import signal
import socket
import time
from typing import Any, Dict, List, Optional, Tuple

from . import state as files
from .processes import ending, kill_run, may_signal, newest_text, of_run, send, wait_until
from .state import ENDED, FAILED, FINISHED, LIVING, STOPPED, UNSUPERVISED, LaunchToolError, State


def check_host(state: State) -> None:
    """Raises LaunchToolError if the run is another machine's: its processes cannot be seen from here."""
    if state.host != socket.gethostname():
        raise LaunchToolError(f'{state.run_dir} was started on {state.host}; run this command there')


def stop(run_dir: str, timeout: float, now: bool = False) -> Tuple[int, str]:
    """End a run: with a checkpoint, or at once.

    Returns:
        exit code (0: it has ended, 1: it still runs) and a sentence.
    """
    state, asked = files.read(run_dir), time.time()
    check_host(state)
    if files.supervised(run_dir):
        if not may_signal(state.supervisor):
            raise LaunchToolError(f'{run_dir}: the run belongs to another user; run this command as the one who started it')
        send([state.supervisor], signal.SIGQUIT if now else signal.SIGTERM)
        ended = wait_until(lambda: not files.supervised(run_dir), timeout)
        state = files.read(run_dir)
        if not ended:
            return 1, (f'{run_dir} has not ended within {timeout:.0f} s ({_describe(state)}). It was left alone: wait longer, look at '
                       f'{state.history[-1]["log"] if state.history else "launch/launch.log"}, or end it without a checkpoint by '
                       '"stop --now"')
        if state.phase in ENDED:
            return 0, _describe(state)
    elif not of_run(state.token):
        return 0, f'{run_dir} does not run ({_describe(state)})'
    return _stop_unsupervised(state, asked, timeout, now)


def _stop_unsupervised(state: State, asked: float, timeout: float, now: bool) -> Tuple[int, str]:
    """The supervisor was killed, its processes went on: end them, and write down what it would have written."""
    run_dir = state.run_dir
    if now:
        left = kill_run(state.token)
        if left:
            return 1, f'{run_dir}: {len(left)} process(es) cannot be killed ({left}): they wait in the kernel or on a GPU'
        phase, text = STOPPED, 'stopped without a last checkpoint'
    else:
        mine = set(of_run(state.token))
        ranks = [record['pid'] for record in _records(state).values() if record['pid'] in mine]
        send(ranks or sorted(mine), signal.SIGTERM)  # without ranks yet there is nothing that a checkpoint could hold
        if not wait_until(lambda: not of_run(state.token), max(0.0, asked + timeout - time.time())):
            return 1, f'{run_dir} has not ended within {timeout:.0f} s; "stop --now" ends it without a checkpoint'
        phase, text = _unseen_end(state) or (STOPPED, 'stopped without a last checkpoint')
    state.phase = phase
    state.message = f'{text}; {newest_text(run_dir)} (its supervisor had been killed before)'
    if state.history and 'ended' not in state.history[-1]:
        state.history[-1].update(ended=time.time(), text=text)
    try:
        state.write()
    except OSError as error:
        return 0, f'{_describe(state)}; this could not be written down: {error.strerror}'
    return 0, _describe(state)


def _describe(state: State) -> str:
    return ': '.join(real_phase(state))


def _records(state: State) -> Dict[int, Dict[str, Any]]:
    """Of the newest attempt's rank processes on this machine, whose first rank may be any."""
    return files.records(files.attempt_dir(state.run_dir, state.attempt), state.ranks + 1024) if state.history else {}


def _unseen_end(state: State) -> Optional[Tuple[str, str]]:
    """(phase, text) of a run that ended when its supervisor was gone, from what its rank processes wrote down; None if they did
    not either."""
    found = [record for record in _records(state).values() if 'code' in record]
    failed = sorted((record for record in found if record['code'] != 0), key=lambda record: record['ended'])
    if len(found) == state.ranks and not failed:
        return FINISHED, 'trained to the end'
    if failed and failed[0]['code'] == state.stopped_code:
        return STOPPED, 'stopped'
    if failed and failed[0]['code'] != -signal.SIGTERM:  # which reaches a rank that is just starting, or one whose peer has failed
        return FAILED, f'rank {failed[0]["rank"]} {ending(failed[0]["code"])}'
    return None


def real_phase(state: State) -> Tuple[str, str]:
    """(phase, message) as it is now: a supervisor that was killed cannot write its own end."""
    if state.phase in ENDED or state.host != socket.gethostname() or files.supervised(state.run_dir):
        return state.phase, state.message
    left = of_run(state.token)
    if left:
        return UNSUPERVISED, (f'the supervisor was killed, {len(left)} process(es) of the run go on; nothing restarts them. '
                              '"stop" ends them with a checkpoint')
    state = files.read(state.run_dir)  # it may have ended in between, in order
    if state.phase in ENDED:
        return state.phase, state.message
    phase, text = _unseen_end(state) or (FAILED, 'the supervisor and its ranks are gone (the machine restarted?). Last known: '
                                         f'{state.phase}: {state.message}')
    return phase, f'{text}; {newest_text(state.run_dir)} (its supervisor had been killed before)'


def find(root: str = 'runs') -> List[str]:
    """Run folders below ``root`` that were started by this tool."""
    return sorted(os.path.dirname(os.path.dirname(path))
                  for path in glob.glob(os.path.join(files.launch_dir(os.path.join(glob.escape(root), '*')), 'state.json')))


def status(run_dir: str, now: Optional[float] = None) -> List[str]:
    """Lines about a run: how it is, what runs where, what was exported, how every attempt ended."""
    now = time.time() if now is None else now
    state = files.read(run_dir)
    phase, message = real_phase(state)
    lines = [f'{run_dir}  {phase}: {message}',
             f'  host {state.host}, supervisor {state.supervisor}{"" if files.supervised(run_dir) else " (ended)"}, {state.ranks} '
             f'rank(s) by {state.launcher} ({state.why})']
    if state.history:
        lines.append(f'  attempt {state.attempt}, {state.restarts} restart(s) of at most {state.max_restarts} in a row without a '
                     f'new checkpoint; log {state.history[-1]["log"]}')
    for record in state.history[-5:]:
        lives = phase in LIVING and record is state.history[-1]
        lasted = f', {(record.get("ended") or now) - record["started"]:.0f} s' if lives or 'ended' in record else ''
        lines.append(f'    attempt {record["attempt"]}: {record.get("text") or ("running" if lives else "nobody saw its end")}{lasted}')
    for rank, record in sorted(_records(state).items()):
        how = f'ended with {record["code"]}' if 'code' in record else f'process {record["pid"]}'
        note = f'; set again, the launcher had changed: {", ".join(record["corrected"])}' if record.get('corrected') else ''
        lines.append(f'    rank {rank}: {how}{note}')
    lines.append('  exported: ' + ' '.join(f'{name}={value}' for name, value in state.exports.items()))
    lines.append(f'  how it learns: python tools/monitor.py {run_dir}')
    return lines
