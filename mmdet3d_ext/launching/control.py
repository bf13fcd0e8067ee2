"""What ``tools/launch.py`` does with a run from outside: stop it, tell how it is."""
from __future__ import annotations

import glob
import os
import signal
import socket
import time
from typing import List, Optional, Tuple

from . import state as files
from .processes import alive, kill_run, of_run, send, wait_until
from .state import FAILED, FINISHED, STOPPED, LaunchToolError, State


def check_host(state: State) -> None:
    """Raises LaunchToolError if the run is another machine's: its processes cannot be seen from here."""
    if state.host != socket.gethostname():
        raise LaunchToolError(f'{state.run_dir} was started on {state.host}; run this command there')


def stop(run_dir: str, timeout: float, now: bool = False) -> Tuple[int, str]:
    """End a run: with a checkpoint, or at once.

    Returns:
        exit code (0: it has ended, 1: it still runs) and a sentence.
    """
    state = files.read(run_dir)
    check_host(state)
    watched = files.supervised(run_dir)
    if not watched and not of_run(state.token):
        return 0, f'{run_dir} does not run ({describe(state)})'
    if watched:
        send([state.supervisor], signal.SIGQUIT if now else signal.SIGTERM)
        if wait_until(lambda: not files.supervised(run_dir), timeout):
            return 0, describe(files.read(run_dir))
        state = files.read(run_dir)
        return 1, (f'{run_dir} has not ended within {timeout:.0f} s ({describe(state)}). It was left alone: wait longer, look at '
                   f'{state.history[-1]["log"] if state.history else "launch/launch.log"}, or end it without a checkpoint by '
                   '"stop --now"')
    # The supervisor was killed; its processes went on.
    if now:
        left = kill_run(state.token)
        text = f'ended at once, without a checkpoint ({len(left)} process(es) left)'
    else:
        folder = files.attempt_dir(run_dir, state.attempt)
        mine = set(of_run(state.token))
        send([r['pid'] for r in files.records(folder, state.ranks + 1024).values() if r['pid'] in mine], signal.SIGTERM)
        if not wait_until(lambda: not of_run(state.token), timeout):
            return 1, f'{run_dir} has not ended within {timeout:.0f} s; "stop --now" ends it without a checkpoint'
        text = 'ended'
    state.phase, state.message = STOPPED, f'{text}; its supervisor had been killed before'
    state.write()
    return 0, describe(state)


def describe(state: State) -> str:
    return f'{state.phase}: {state.message}'


def real_phase(state: State) -> Tuple[str, str]:
    """(phase, message) as it is now: a supervisor that was killed cannot write its own end."""
    if state.phase in (FINISHED, STOPPED, FAILED) or state.host != socket.gethostname():
        return state.phase, state.message
    if files.supervised(state.run_dir):
        return state.phase, state.message
    left = of_run(state.token)
    if left:
        return 'unsupervised', (f'the supervisor was killed, {len(left)} process(es) of the run go on; nothing restarts them. '
                                '"stop" ends them with a checkpoint')
    return FAILED, f'the supervisor and its ranks are gone (the machine restarted?). Last known: {describe(state)}'


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
             f'  host {state.host}, supervisor {state.supervisor}{"" if alive(state.supervisor) else " (ended)"}, {state.ranks} '
             f'rank(s) by {state.launcher} ({state.why})']
    if state.history:
        lines.append(f'  attempt {state.attempt}, {state.restarts} restart(s) of at most {state.max_restarts} in a row without a '
                     f'new checkpoint; log {state.history[-1]["log"]}')
    for record in state.history[-5:]:
        lasted = (record.get('ended') or now) - record['started']
        lines.append(f'    attempt {record["attempt"]}: {record.get("text", "running")}, {lasted:.0f} s')
    found = files.records(files.attempt_dir(run_dir, state.attempt), 1024) if state.history else {}
    for rank, record in sorted(found.items()):
        how = f'ended with {record["code"]}' if 'code' in record else f'process {record["pid"]}'
        note = f'; set again, the launcher had changed: {", ".join(record["corrected"])}' if record.get('corrected') else ''
        lines.append(f'    rank {rank}: {how}{note}')
    lines.append('  exported: ' + ' '.join(f'{name}={value}' for name, value in state.exports.items()))
    lines.append(f'  how it learns: python tools/monitor.py {run_dir}')
    return lines
