"""The process that a launcher starts for one rank: it starts the trainer and writes down how it ended.

Run by its path with ``python -I``; imports nothing but the standard library. What to do is in the JSON file that the variable
MMDET3D_EXT_RANK_PLAN names:

* ``command``: the trainer's words; ``folder``: where records and outputs go; ``exports``: variables that the trainer gets,
  whatever the launcher let through (mpirun changes library paths);
* ``quiet``: exit codes that are no crash. They become 0 towards the launcher, and only after the other ranks have ended:
  launchers kill the others when one rank ends otherwise, also while it writes the last checkpoint.

Rank 0 writes where the launcher shows it, the others to ``<folder>/rank_<N>.log``.
"""
import ctypes
import json
import os
import signal
import subprocess
import sys
import time

PLAN_VARIABLE = 'MMDET3D_EXT_RANK_PLAN'
RANK_VARIABLES = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'RANK', 'SLURM_PROCID')
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
PATIENCE = 120.0  # seconds that an ended rank waits for the others


def rank_here():
    return next((int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name, '').isdigit()), 0)


def die_with_parent():
    """Runs in the trainer before its program: it gets SIGKILL when this process is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def write(path, record):
    try:
        with open(f'{path}.tmp', 'w') as stream:
            json.dump(record, stream)
        os.replace(f'{path}.tmp', path)
    except OSError as error:  # a full disk: the run goes on, only its end is told less well
        print(f'launch: cannot write {path}: {error.strerror}', file=sys.stderr)


def ended(path):
    try:
        with open(path) as stream:
            return 'code' in json.load(stream)
    except (OSError, ValueError):
        return False


def main():
    with open(os.environ[PLAN_VARIABLE]) as stream:
        plan = json.load(stream)
    rank, folder = rank_here(), plan['folder']
    path = os.path.join(folder, f'rank_{rank}.json')
    differing = sorted(name for name, value in plan['exports'].items() if os.environ.get(name) != value)
    child = None
    early = []

    def forward(number, frame):
        if child is None:
            early.append(number)
        elif child.poll() is None:
            child.send_signal(number)

    for number in FORWARDED:
        signal.signal(number, forward)
    output = None
    if rank:
        try:
            output = open(os.path.join(folder, f'rank_{rank}.log'), 'ab', buffering=0)
        except OSError:
            output = subprocess.DEVNULL
    child = subprocess.Popen(plan['command'], cwd=plan['cwd'], env={**os.environ, **plan['exports']}, stdin=subprocess.DEVNULL,
                             stdout=output, stderr=subprocess.STDOUT if output is not None else None,
                             start_new_session=True, preexec_fn=die_with_parent)
    record = {'rank': rank, 'pid': child.pid, 'started': time.time(), 'corrected': differing}
    write(path, record)
    for number in early:
        child.send_signal(number)
    code = child.wait()
    write(path, dict(record, code=code, ended=time.time()))
    if code not in plan['quiet']:
        return code if code >= 0 else 128 - code
    others = [os.path.join(folder, f'rank_{other}.json') for other in plan['local_ranks'] if other != rank]
    end = time.monotonic() + PATIENCE
    while not all(map(ended, others)) and time.monotonic() < end:
        time.sleep(0.1)
    return 0


if __name__ == '__main__':
    sys.exit(main())
