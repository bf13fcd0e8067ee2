#!/usr/bin/env python3
"""Start a training run that goes on by itself, stop it with a checkpoint, see how it is.

    python tools/launch.py start configs/nuscenes/multitask/phase3_400.yaml -n 8 --run-dir runs/phase3 --load_from epoch_19.pth
    python tools/launch.py start CONFIG -n 4 --gpus 4,5,6,7 --max_epochs 10 --data.workers_per_gpu 4
    python tools/launch.py start CONFIG -n 8 --dry-run           # only the checks, and the command
    python tools/launch.py status                                # all runs below runs/
    python tools/launch.py status runs/phase3
    python tools/launch.py stop runs/phase3                      # writes a checkpoint first
    python tools/launch.py start CONFIG -n 8 --run-dir runs/phase3 --resume_from auto

"start" examines the machine (tools/doctor.py) and the configuration (tools/check_config.py), chooses free GPUs and a launcher that
works here, shows what the ranks get in their environment, and leaves a supervisor behind that restarts the run from its newest
good checkpoint after a crash. Every word that it does not know goes to tools/train.py.

Exit codes: 0 done (status: the run lives, supervised or not, or has finished); 1 the run failed, or still lives after "stop";
2 something to correct; 3 (status) it has ended otherwise. With --foreground: the trainer's own.
"""
from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import _light

REPO = _light.REPO
STARTED_WITHIN = 120.0  # seconds that "start" waits for the ranks before it leaves the run alone


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    commands = result.add_subparsers(dest='action', required=True, metavar='start|stop|status')
    start = commands.add_parser('start', help='check, then start a run', allow_abbrev=False,
                                usage='launch.py start CONFIG -n N [options] [options of tools/train.py] [--any.key value ...]')
    start.add_argument('config', help='YAML configuration')
    start.add_argument('-n', '--nproc', type=int, default=1, metavar='N', help='processes on this machine, one per GPU (default 1)')
    start.add_argument('--run-dir', '--work-dir', '--run_dir', '--work_dir', metavar='D',
                       help='folder of the run (default runs/<name of the configuration>)')
    start.add_argument('--gpus', metavar='0,1', help='which GPUs (default: the first free ones)')
    start.add_argument('--launcher', choices=('auto', 'torchpack', 'torchrun'), default='auto',
                       help='what starts the processes (default: torchpack dist-run if it works here, else torchrun)')
    start.add_argument('--max-restarts', type=int, default=3, metavar='K',
                       help='crashes in a row without a new checkpoint after which it gives up (default 3)')
    start.add_argument('--fresh', action='store_true', help='start anew in a folder that holds a run; that is moved aside')
    start.add_argument('--foreground', action='store_true', help='stay, and show what the run prints; Ctrl-C stops it in order')
    start.add_argument('--dry-run', action='store_true', help='do all checks, show the command and start nothing')
    start.add_argument('--skip-checks', action='store_true', help='start without examining the machine and the configuration')
    start.add_argument('--script', default=str(REPO / 'tools' / 'train.py'), help=argparse.SUPPRESS)
    start.add_argument('--pause', type=_light.seconds, default=2.0, help=argparse.SUPPRESS)
    stop = commands.add_parser('stop', help='write a checkpoint and end a run')
    stop.add_argument('run', help='run folder')
    stop.add_argument('--timeout', type=_light.seconds, default=600.0, metavar='S', help='seconds to wait for its end (default 600)')
    stop.add_argument('--now', action='store_true', help='end its processes at once, without a checkpoint')
    status = commands.add_parser('status', help='how a run is; without RUN: all of runs/')
    status.add_argument('run', nargs='?', help='run folder, or a folder that holds run folders')
    status.add_argument('--json', action='store_true', help='the state as JSON')
    return result


def supervise_parser() -> argparse.ArgumentParser:
    """Of what "start" leaves behind; no word for people."""
    result = argparse.ArgumentParser(prog='launch.py supervise', allow_abbrev=False)
    result.add_argument('run')
    result.add_argument('--lock', type=int, required=True)
    result.add_argument('--details', required=True)
    return result


def main(argv: Optional[List[str]] = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    _light.use_package()
    from mmdet3d_ext.launching.state import LaunchToolError
    if words[:1] == ['start'] and len(words) > 1 and words[1].startswith('-') and words[1] not in ('-h', '--help'):
        return _mistake('the configuration comes first: launch.py start CONFIG -n N ...')
    if words[:1] == ['supervise']:
        return supervise(supervise_parser().parse_args(words[1:]))
    arguments, rest = parser().parse_known_args(words)
    if rest and arguments.action != 'start':
        return _mistake(f'unknown words: {shlex.join(rest)}')
    try:
        return {'start': start, 'stop': stop, 'status': status}[arguments.action](arguments, rest)
    except LaunchToolError as error:
        return _mistake(str(error))
    except OSError as error:  # a full disk, a folder that somebody removes meanwhile
        if isinstance(error, BrokenPipeError) or not error.filename:
            raise  # of the output: see _light.end
        return _mistake(f'{error.filename}: {error.strerror}')
    except KeyboardInterrupt:
        return 130


def _mistake(text: str) -> int:
    print(f'error: {text}', file=sys.stderr)
    return 2


# ---- start -----------------------------------------------------------------------------------------------------------

def start(arguments: argparse.Namespace, rest: List[str]) -> int:
    from mmdet3d_ext.launching import gpus, launchers, state
    if arguments.nproc < 1 or arguments.max_restarts < 0:
        return _mistake('-n must be at least 1 and --max-restarts at least 0')
    run_dir = os.path.abspath(arguments.run_dir or os.path.join('runs', Path(arguments.config).stem))
    options, overrides = _train_words(arguments.config, rest)
    _check_config_file(arguments.config)
    _check_weights(options)
    state.check_usable(run_dir)
    nodes, first_rank = _nodes(arguments.nproc)
    visible, which = gpus.choose(arguments.nproc, arguments.gpus, os.environ)
    print(which)
    if state.supervised(run_dir):
        return _lives(run_dir)
    _check_folder(run_dir, arguments.fresh, bool(options.resume_from or options.auto_resume))
    exports = launchers.exports(arguments.nproc, visible)
    if not arguments.skip_checks and not check(arguments.config, overrides, arguments.nproc, run_dir, exports):
        return _mistake('the checks above found problems; nothing was started. --skip-checks starts all the same')
    choice = launchers.choose(arguments.nproc, arguments.launcher, exports, nodes=nodes)
    print(f'launcher: {choice.kind}, because {choice.why}')
    print('every rank gets:\n' + '\n'.join(f'  {name}={value}' for name, value in exports.items()))
    command = [sys.executable, arguments.script, arguments.config, '--run-dir', run_dir, *rest]
    print(f'$ {shlex.join(choice.command(arguments.nproc, sys.executable))}\n  each of which starts\n$ {shlex.join(command)}')
    if arguments.dry_run:
        print('nothing was started (--dry-run)')
        return 0
    lock = state.take_lock(run_dir)
    if lock is None:  # started by somebody else during the checks
        return _lives(run_dir)
    description = state.State(run_dir, uuid.uuid4().hex, socket.gethostname(), arguments.nproc, choice.kind, choice.why, command,
                              exports, arguments.max_restarts)
    details = {'nodes': list(nodes), 'first_rank': first_rank, 'pause': arguments.pause}
    _clear_attempts(run_dir)
    description.write()
    if arguments.foreground:
        return _supervisor(description, details, echo=True).run()
    return _leave(run_dir, lock, details)


def _lives(run_dir: str) -> int:
    from mmdet3d_ext.launching import state
    other = state.read(run_dir)
    return _mistake(f'{run_dir}: a run lives there (supervisor {other.supervisor} on {other.host}); stop it first, or give another '
                    '--run-dir')


def _train_words(config: str, rest: List[str]) -> Tuple[argparse.Namespace, List[str]]:
    """The words for tools/train.py as it will read them: its options, and the configuration's overrides."""
    from train import parser as train_parser

    from mmdet3d_ext.engine import cli
    return cli.split(train_parser(), [config, *rest])


def _check_config_file(path: str) -> None:
    """Whether the configuration, and what it inherits, can be read at all; what it says is tools/check_config.py's matter."""
    from mmdet3d_ext.config import ConfigError, inheritance, load_config
    from mmdet3d_ext.config.yaml_source import load_yaml
    from mmdet3d_ext.launching.state import LaunchToolError
    try:
        if path.endswith('.py'):
            load_config(path)  # says why not
        for file in inheritance(os.path.abspath(os.path.expanduser(path))):
            load_yaml(file)
    except ConfigError as error:
        raise LaunchToolError(str(error)) from None


def _check_weights(options: argparse.Namespace) -> None:
    """Whether the checkpoints that the command names are there: the ranks would find out minutes later."""
    from mmdet3d_ext.launching.state import LaunchToolError
    load = options.load_from or ''
    named = [('--load_from', path) for path in ([load] if os.path.exists(load) else load.strip('[]').split(',')) if path]
    named += [('--resume_from', options.resume_from)] if options.resume_from not in (None, 'auto') else []
    for option, path in named:
        path = path.strip().strip('\'"')  # as engine/checkpoint's path_list reads it
        if not os.path.isfile(os.path.expanduser(path)):
            raise LaunchToolError(f'{option} {path}: there is no such file')


def _check_folder(run_dir: str, fresh: bool, resumes: bool) -> None:
    """Starting over what a folder holds must be said."""
    from mmdet3d_ext.launching.processes import newest_checkpoint, of_run
    from mmdet3d_ext.launching.state import LaunchToolError, launch_dir, read
    if os.path.exists(os.path.join(launch_dir(run_dir), 'state.json')):
        left = of_run(read(run_dir).token)
        if left:
            raise LaunchToolError(f'{run_dir}: {len(left)} process(es) of an earlier start still live there, their supervisor was '
                                  f'killed; "launch.py stop {run_dir}" ends them with a checkpoint')
    newest = newest_checkpoint(run_dir)
    if newest and not fresh and not resumes:
        raise LaunchToolError(f'{run_dir} holds a run ({os.path.basename(newest)}): add --resume_from auto to continue it, --fresh to '
                              'start anew (its files are moved aside), or give another --run-dir')


def _clear_attempts(run_dir: str) -> None:
    """What an earlier start in this folder left is kept as launch/previous_<n>."""
    from mmdet3d_ext.launching.state import launch_dir
    folder = Path(launch_dir(run_dir))
    old = sorted(folder.glob('attempt_*'))
    if old:
        number = len(list(folder.glob('previous_*'))) + 1
        target = folder / f'previous_{number}'
        target.mkdir()
        for path in [*old, *(folder / name for name in ('state.json', 'launch.log') if (folder / name).exists())]:
            path.rename(target / path.name)


def check(config: str, overrides: List[str], ranks: int, run_dir: str, exports: Dict[str, str]) -> bool:
    """The doctor and the configuration check, in the environment of the ranks; shows what they say and returns whether training
    may start."""
    good = True
    # Without the group mpi: which launcher works is tried next, and what one drops from the environment is put back.
    groups = ['stack', 'libraries', 'gpus', 'system', 'data']
    for enough, words in (((0, 1), ['doctor.py', config, '--only', *groups, '--processes', str(ranks), '--run-dir', run_dir, *overrides]),
                          ((0,), ['check_config.py', config, '--gpus', str(ranks), *overrides])):
        print(f'--- {shlex.join(words)}', flush=True)
        code = subprocess.run([sys.executable, str(REPO / 'tools' / words[0]), *words[1:]],
                              env={**os.environ, **exports}).returncode
        good = good and code in enough
    return good


def _nodes(ranks: int) -> Tuple[List[str], int]:
    """torchrun's words for several machines, from the variables that OpenMMLab's users set: NNODES, NODE_RANK, MASTER_ADDR, PORT."""
    count, number = _whole('NNODES', 1), _whole('NODE_RANK', 0)
    if count < 2:
        return [], 0
    return ['--nnodes', str(count), '--node_rank', str(number), '--master_addr', os.environ.get('MASTER_ADDR', '127.0.0.1'),
            '--master_port', os.environ.get('PORT', '29500')], number * ranks


def _whole(name: str, default: int) -> int:
    from mmdet3d_ext.launching.state import LaunchToolError
    text = os.environ.get(name) or str(default)
    if not text.isdigit():
        raise LaunchToolError(f'{name} (a variable of the shell) must be a whole number, got {text!r}')
    return int(text)


def _supervisor(description: Any, details: dict, echo: bool) -> Any:
    from mmdet3d_ext.engine.stopping import EXIT_CODE
    from mmdet3d_ext.launching.launchers import Choice
    from mmdet3d_ext.launching.supervisor import ExitCodes, Supervisor
    choice = Choice(description.launcher, description.why, tuple(details['nodes']))
    return Supervisor(description, choice, ExitCodes(stopped=EXIT_CODE), echo=echo, first_rank=details['first_rank'],
                      first_pause=details['pause'])


def supervise(arguments: argparse.Namespace) -> int:
    from mmdet3d_ext.launching import state
    os.set_inheritable(arguments.lock, False)  # this process holds the lock, the ranks do not
    return _supervisor(state.read(arguments.run), json.loads(arguments.details), echo=False).run()


def _leave(run_dir: str, lock: int, details: dict) -> int:
    """Start the supervisor in a session of its own and wait until the ranks are there."""
    from mmdet3d_ext.launching import state
    from mmdet3d_ext.launching.control import real_phase
    from mmdet3d_ext.launching.processes import wait_until
    with open(os.path.join(state.launch_dir(run_dir), 'supervisor.err'), 'wb') as errors:
        process = subprocess.Popen([sys.executable, __file__, 'supervise', run_dir, '--lock', str(lock), '--details',
                                    json.dumps(details)], stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
                                   pass_fds=[lock], start_new_session=True)
    os.close(lock)
    wait_until(lambda: process.poll() is not None or state.read(run_dir).phase not in (state.STARTING,), STARTED_WITHIN)
    found = state.read(run_dir)
    print('\n'.join([f'{found.phase}: {found.message}', f'log     {found.history[-1]["log"] if found.history else "none yet"}',
                     f'status  python tools/launch.py status {run_dir}', f'watch   python tools/monitor.py {run_dir} --follow',
                     f'stop    python tools/launch.py stop {run_dir}']))
    return 1 if real_phase(found)[0] == state.FAILED else 0


# ---- stop, status ----------------------------------------------------------------------------------------------------

def stop(arguments: argparse.Namespace, rest: List[str]) -> int:
    from mmdet3d_ext.launching import control
    code, text = control.stop(os.path.abspath(arguments.run), arguments.timeout, arguments.now)
    print(text, file=sys.stderr if code else sys.stdout)
    return code


def status(arguments: argparse.Namespace, rest: List[str]) -> int:
    from mmdet3d_ext.launching import control, state
    root = os.path.abspath(arguments.run or 'runs')
    folders = [root] if os.path.isdir(state.launch_dir(root)) else control.find(root)
    if not folders:
        return _mistake(f'{root}: no run here that was started by tools/launch.py')
    phases = []
    for folder in folders:
        try:
            found = state.read(folder)
            phase, message = control.real_phase(found)
        except state.LaunchToolError as error:  # one of many that cannot be told must not hide the others
            if len(folders) == 1:
                raise
            print(f'{folder}  unknown: {error}')
            continue
        phases.append(phase)
        if arguments.json:
            print(json.dumps({**vars(found), 'phase': phase, 'message': message}))
        elif len(folders) == 1:
            print('\n'.join(control.status(folder)))
        else:
            print(f'{folder}  {phase}: {message}')
    return 0 if any(phase in (*state.LIVING, state.FINISHED) for phase in phases) else 3


if __name__ == '__main__':
    _light.end(main)
