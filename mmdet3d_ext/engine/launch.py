"""How this process was started, and how it joins the other ranks.

:func:`detect` reads the environment that a launcher leaves behind and changes nothing; :func:`start` makes the process
group; :func:`run` wraps a program so that an error on any rank ends the whole job with its traceback on the screen.

Known launchers, innermost first:

* ``torchrun`` (TORCHELASTIC_RUN_ID, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT);
* ``mpi``: ``torchpack dist-run`` or plain ``mpirun`` (Open MPI 4 and 5 set OMPI_COMM_WORLD_*, MPICH and Intel MPI set PMI_*).
  torchpack also sets MASTER_HOST=host:port. mpi4py is not needed: ranks meet through torch's own TCP store;
* ``slurm``: srun (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODELIST);
* ``env``: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set by hand or by a cluster's operator;
* ``none``: plain ``python``, one process, nothing needed.
"""
from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import socket
import sys
import time
import traceback
import zlib
from dataclasses import dataclass, field
from typing import Callable, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist

from ..errors import RankZeroError, output_gone
from .log_files import LogFile, OwnWarnings, is_own_warning
from .rank_watch import GRACE, STALL_TIMEOUT, RankWatch, Report, connect, report_early, screen_is_shown, show_crashes, wait_until_read

LOGGER_NAME = 'mmdet3d'  # the name in every log line that users' scripts look for
PACKAGE_LOGGER = 'mmdet3d_ext'  # of the package's parts below the engine
START_TIMEOUT = 300.0  # seconds for all ranks to meet; torch's default of 30 minutes hides a rank that died while starting
COLLECTIVE_TIMEOUT = 1800.0  # seconds a collective may wait for the slowest rank (rank 0 computes NDS alone meanwhile)


class LaunchError(RuntimeError):
    """The launcher's environment contradicts itself or the machine."""


class RanksDidNotMeet(LaunchError):
    """Other ranks did not arrive; each rank that waited says so."""


@dataclass(frozen=True)
class Launch:
    """One rank's place in the job.

    ``master_addr``/``master_port`` are None for a single process. ``notes`` are sentences for the user, shown by rank 0.
    """

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: Optional[str] = None
    master_port: Optional[int] = None
    notes: Tuple[str, ...] = field(default_factory=tuple)

    @property
    def is_master(self) -> bool:
        return self.rank == 0


def detect(env: Optional[Mapping[str, str]] = None) -> Launch:
    """The place of this process from the environment ``env`` (default ``os.environ``); nothing is started.

    Raises:
        LaunchError: if a variable is not a number, a rank is outside its world, or several machines share no address.
    """
    env = os.environ if env is None else env
    if 'TORCHELASTIC_RUN_ID' in env and 'RANK' in env:
        return _from_rank_variables(env, 'torchrun')
    if 'OMPI_COMM_WORLD_RANK' in env:
        return _from_mpi(env, 'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK',
                         'OMPI_COMM_WORLD_LOCAL_SIZE')
    if 'SLURM_PROCID' in env and ('SLURM_NTASKS' in env or 'SLURM_STEP_NUM_TASKS' in env) and 'SLURM_LOCALID' in env:
        return _from_slurm(env)
    if 'PMI_RANK' in env and 'PMI_SIZE' in env:
        return _from_mpi(env, 'PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS')
    if 'RANK' in env and 'WORLD_SIZE' in env:
        return _from_rank_variables(env, 'env')
    return Launch('none')


def _number(env: Mapping[str, str], name: str, default: Optional[int] = None) -> int:
    text = env.get(name)
    if text is None or text == '':
        if default is None:
            raise LaunchError(f'the launcher did not set {name}')
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f'{name} must be a whole number, got {text!r}') from None


def _checked(launch: Launch) -> Launch:
    if launch.world_size < 1 or not 0 <= launch.rank < launch.world_size:
        raise LaunchError(f'{launch.launcher}: rank {launch.rank} is not in a world of {launch.world_size} processes')
    if launch.world_size > 1 and (launch.master_addr is None or launch.master_port is None):
        raise LaunchError(
            f'{launch.launcher}: {launch.world_size} processes, but no address where they meet: set MASTER_ADDR (host of rank '
            '0) and MASTER_PORT (a free port there), and forward both to every rank (mpirun -x MASTER_ADDR -x MASTER_PORT)')
    return launch


def _from_rank_variables(env: Mapping[str, str], launcher: str) -> Launch:
    world = _number(env, 'WORLD_SIZE')
    address = env.get('MASTER_ADDR')
    return _checked(Launch(launcher, _number(env, 'RANK'), world, _number(env, 'LOCAL_RANK', 0),
                           _number(env, 'LOCAL_WORLD_SIZE', world if 'LOCAL_RANK' in env else 1), address,
                           _number(env, 'MASTER_PORT', 29500) if address else None))


def _from_mpi(env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> Launch:
    world = _number(env, size)
    local = _number(env, local_rank, 0)
    locals_ = _number(env, local_size, 1)
    address, port, notes = None, None, []
    if env.get('MASTER_HOST'):  # torchpack dist-run
        address, _, text = env['MASTER_HOST'].rpartition(':')
        if not address or not text.isdigit():
            raise LaunchError(f'MASTER_HOST must be host:port (torchpack dist-run sets it), got {env["MASTER_HOST"]!r}')
        port = int(text)
    elif env.get('MASTER_ADDR'):
        address, port = env['MASTER_ADDR'], _number(env, 'MASTER_PORT', 29500)
    elif locals_ == world:
        # All ranks are on this machine, so they only have to agree on a port: it follows from the job's identity.
        job = env.get('PMIX_NAMESPACE') or env.get('OMPI_MCA_ess_base_jobid') or env.get('PMI_ID') or str(os.getppid())
        address, port = '127.0.0.1', 20000 + zlib.crc32(job.encode()) % 20000
        if world > 1:
            notes.append(f'started by mpirun without MASTER_HOST: the ranks meet at 127.0.0.1:{port} (set MASTER_PORT and '
                         'MASTER_ADDR to choose another)')
    return _checked(Launch('mpi', _number(env, rank), world, local, locals_, address, port, tuple(notes)))


def _from_slurm(env: Mapping[str, str]) -> Launch:
    world = _number(env, 'SLURM_STEP_NUM_TASKS', _number(env, 'SLURM_NTASKS', 1))
    rank = _number(env, 'SLURM_PROCID')
    in_step = any(name in env for name in ('SLURM_STEP_ID', 'SLURM_STEPID', 'SLURM_STEP_NUM_TASKS'))
    if world > 1 and env.get('ENVIRONMENT') == 'BATCH' and not in_step:
        # The batch script itself carries SLURM_NTASKS, yet it is one process: waiting for the others would hang.
        return Launch('none', notes=(f'this Slurm allocation has {world} tasks, but the program was not started by srun: one '
                                     'process runs. Write "srun python tools/train.py ..." in the batch script',))
    nodes = expand_nodelist(env.get('SLURM_STEP_NODELIST') or env.get('SLURM_NODELIST') or env.get('SLURM_JOB_NODELIST') or '')
    per_node = env.get('SLURM_STEP_TASKS_PER_NODE') or env.get('SLURM_NTASKS_PER_NODE') or env.get('SLURM_TASKS_PER_NODE') or ''
    match = re.match(r'\d+', per_node)
    local_world = int(match.group()) if match else max(1, world // max(1, len(nodes)))
    address = env.get('MASTER_ADDR') or (nodes[0] if nodes else None)
    job = f'{env.get("SLURM_JOB_ID", "0")}.{env.get("SLURM_STEP_ID", "0")}'
    port = _number(env, 'MASTER_PORT', 20000 + zlib.crc32(job.encode()) % 20000)
    return _checked(Launch('slurm', rank, world, _number(env, 'SLURM_LOCALID'), local_world, address,
                           port if address else None))


def expand_nodelist(text: str) -> List[str]:
    """Host names of a Slurm node list: ``gpu[01-03,7],login`` -> gpu01, gpu02, gpu03, gpu7, login."""
    names: List[str] = []
    for item in re.findall(r'[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*', text):
        expanded = ['']
        for part in re.findall(r'\[[^\]]*\]|[^\[\]]+', item):
            choices = [part]
            if part.startswith('['):
                choices = []
                for span in part[1:-1].split(','):
                    low, _, high = span.partition('-')
                    stop = int(high) if high else int(low)
                    choices += [str(value).zfill(len(low)) for value in range(int(low), stop + 1)]
            expanded = [head + tail for head in expanded for tail in choices]
        names += expanded
    return names


# --------------------------------------------------------------------------------------------------------------------
# starting

_current: Optional[Launch] = None
_watch: Optional[RankWatch] = None
_log_file: Optional[str] = None
_log_handlers: List[Tuple[str, logging.Handler]] = []


def current() -> Launch:
    """The launch of this process (after :func:`start`), or a single-process one."""
    return _current or Launch('none')


def start(launch: Optional[Launch] = None, backend: Optional[str] = None, start_timeout: float = START_TIMEOUT,
          collective_timeout: float = COLLECTIVE_TIMEOUT, stall_timeout: float = STALL_TIMEOUT) -> Tuple[Launch, torch.device]:
    """Choose this rank's device and join the other ranks.

    Args:
        launch: from :func:`detect` by default.
        backend: 'nccl' or 'gloo'; by default NCCL if a GPU is visible, else gloo. ``gloo`` lets ranks share a GPU.
        start_timeout: seconds for all ranks to arrive, then an error says how many did.
        collective_timeout: seconds that a collective may wait.
        stall_timeout: seconds that a rank may stand at one place before the stacks of all ranks are shown.

    Returns:
        the launch (with notes added) and the device of this rank.

    Raises:
        LaunchError: more ranks on this machine than GPUs, an unknown backend, or ranks that did not arrive in time.
    """
    global _current, _watch
    launch = launch or detect()
    if backend not in (None, 'nccl', 'gloo'):
        raise LaunchError(f'dist_params.backend must be "nccl" or "gloo", got {backend!r}')
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == 'nccl' and not gpus:
        raise LaunchError('dist_params.backend is "nccl", but no GPU is visible; leave the key out to use gloo on the CPU')
    backend = backend or ('nccl' if gpus else 'gloo')
    device = _choose_device(launch, gpus, backend)
    launch = _with_device_notes(launch, gpus)
    _limit_threads(launch)
    if launch.world_size > 1 and not dist.is_initialized():
        _join(launch, backend, start_timeout, collective_timeout, stall_timeout)
    _current = launch
    return launch, device


def _choose_device(launch: Launch, gpus: int, backend: str) -> torch.device:
    if not gpus:
        return torch.device('cpu')
    # srun --gpus-per-task=1 shows each task its own GPU only; elsewhere one visible GPU means that ranks would share it.
    own_gpu = gpus == 1 and launch.launcher == 'slurm'
    if launch.local_world_size > gpus and backend == 'nccl' and not own_gpu:
        raise LaunchError(f'{launch.local_world_size} processes on {socket.gethostname()}, but {gpus} GPU(s) visible '
                          f'(CUDA_VISIBLE_DEVICES={os.environ.get("CUDA_VISIBLE_DEVICES", "not set")}): start one process per '
                          'GPU, or set dist_params.backend to gloo to share')
    device = torch.device('cuda', launch.local_rank % gpus)
    torch.cuda.set_device(device)
    return device


def _with_device_notes(launch: Launch, gpus: int) -> Launch:
    notes = list(launch.notes)
    if launch.launcher == 'slurm' and launch.local_world_size < gpus:
        notes.append(f'Slurm started {launch.local_world_size} task(s) on a machine with {gpus} GPUs: '
                     f'{gpus - launch.local_world_size} stay idle. Use srun --ntasks={gpus} --ntasks-per-node={gpus}, or '
                     f'torchrun --nproc_per_node {gpus}')
    if launch.launcher == 'none' and gpus > 1:
        notes.append(f'one process on a machine with {gpus} GPUs: use torchpack dist-run -np {gpus} python ..., or '
                     f'torchrun --nproc_per_node {gpus} ..., to use them all')
    return Launch(launch.launcher, launch.rank, launch.world_size, launch.local_rank, launch.local_world_size,
                  launch.master_addr, launch.master_port, tuple(notes))


def _limit_threads(launch: Launch) -> None:
    """Ranks share the cores: N ranks with full-width OpenMP each are slower than one."""
    if 'OMP_NUM_THREADS' not in os.environ and launch.local_world_size > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
        threads = max(1, cores // launch.local_world_size)
        os.environ['OMP_NUM_THREADS'] = str(threads)
        torch.set_num_threads(threads)


def _join(launch: Launch, backend: str, start_timeout: float, collective_timeout: float, stall_timeout: float) -> None:
    global _watch
    # For torch and for libraries. Before the first other thread: a library that reads the environment in C while Python writes
    # it can crash.
    os.environ.update(RANK=str(launch.rank), WORLD_SIZE=str(launch.world_size), LOCAL_RANK=str(launch.local_rank),
                      MASTER_ADDR=str(launch.master_addr), MASTER_PORT=str(launch.master_port))
    begin = time.monotonic()
    try:
        store = _store(launch, start_timeout)
        _watch = RankWatch(launch, connect(launch.master_addr, launch.master_port, start_timeout), _emit, lambda: _log_file,
                           stall_timeout)
        # Every rank has to be here before the long timeout of the collectives begins to count.
        store.add('mmdet3d_ext/arrived', 1)
        while int(store.add('mmdet3d_ext/arrived', 0)) < launch.world_size:
            if time.monotonic() - begin > start_timeout:
                raise TimeoutError(f'{store.add("mmdet3d_ext/arrived", 0)} of {launch.world_size} ranks arrived')
            time.sleep(0.02)
    except (RuntimeError, TimeoutError) as error:  # torch's DistStoreError is a RuntimeError
        hint = ('; was this started by srun, one task per rank?' if launch.launcher == 'slurm' else
                '; the port may be taken by another run, or a rank died while starting: see the messages of the other ranks')
        raise RanksDidNotMeet(
            f'rank {launch.rank} of {launch.world_size} ({launch.launcher}): the ranks did not meet at '
            f'{launch.master_addr}:{launch.master_port} within {start_timeout:.0f} s ({error}){hint}') from error
    kwargs = {}
    if backend == 'nccl':
        kwargs['device_id'] = torch.device('cuda', torch.cuda.current_device())
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size,
                            timeout=datetime.timedelta(seconds=collective_timeout), **kwargs)
    _watch.met.set()


def _store(launch: Launch, timeout: float) -> dist.Store:
    """Where the ranks meet. Rank 0 opens it and does not wait in there, so that its watch can read what another rank reports
    meanwhile; torchrun's agent has opened one before the ranks, and keeps it over its restarts."""
    opened = os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'
    store = dist.TCPStore(launch.master_addr, launch.master_port, launch.world_size, is_master=launch.is_master and not opened,
                          timeout=datetime.timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True)
    return dist.PrefixStore(f'/worker/attempt_{os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}', store) if opened else store


# --------------------------------------------------------------------------------------------------------------------
# logs and ends

def attach_rank_log(run_dir: str, stamp: str) -> str:
    """Write this rank's log, and its traceback if it fails, to ``<run_dir>/logging/<stamp>[_<rank>].log``; returns the path."""
    global _log_file
    for name, handler in _log_handlers:  # of an earlier run in this process
        logging.getLogger(name).removeHandler(handler)
        handler.close()
    _log_handlers.clear()
    launch = current()
    folder = os.path.join(run_dir, 'logging')
    os.makedirs(folder, exist_ok=True)
    suffix = f'_{launch.rank}' if launch.world_size > 1 else ''
    _log_file = os.path.join(folder, f'{stamp}{suffix}.log')
    file = LogFile(_log_file)
    file.setFormatter(logging.Formatter(f'%(asctime)s - rank {launch.rank} - %(name)s - %(levelname)s - %(message)s'))
    screen = logging.StreamHandler(sys.stderr)
    screen.setFormatter(OwnWarnings(f'%(asctime)s - {LOGGER_NAME} - %(levelname)s - %(message)s'))
    screen.addFilter(lambda record: is_own_warning(record, launch.is_master))
    logging.captureWarnings(True)
    _log_handlers.extend([(LOGGER_NAME, file), ('py.warnings', file), ('py.warnings', screen), (PACKAGE_LOGGER, file)])
    for name, handler in _log_handlers:
        logging.getLogger(name).addHandler(handler)
    for handler in logging.getLogger(LOGGER_NAME).handlers:
        if handler is not file and launch.is_master:
            _log_handlers.append((PACKAGE_LOGGER, handler))
            logging.getLogger(PACKAGE_LOGGER).addHandler(handler)
    if launch.world_size > 1:  # rank 0 shows what another rank's log holds; one process shows a crash on the screen itself
        show_crashes(_log_file)
    return _log_file


def _emit(text: str, screen: bool = True) -> None:
    """To stderr in one write (launchers hide the stdout of ranks other than 0) and to the rank's log file."""
    if screen:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.write(text.rstrip('\n') + '\n')
            sys.stderr.flush()
    if _log_file:
        try:
            with open(_log_file, 'a') as stream:
                stream.write(text.rstrip('\n') + '\n')
        except OSError:
            pass


class UserError(Exception):
    """A mistake in what the user gave (a key, a path): shown as one clean message without a traceback, exit code 2."""


def run(program: Callable[[], Optional[int]], clean_errors: Tuple[type, ...] = ()) -> int:
    """Run ``program`` to its end and return the exit code; an error ends every rank of the job.

    Args:
        program: the work; returns None or an exit code.
        clean_errors: error types shown as one message without a traceback (exit code 2), beside :class:`UserError`.

    A rank that fails writes its traceback to stderr and to its log file, tells the other ranks, and ends at once without
    waiting for them (exit code 1); each of them ends within seconds and names the rank that failed. Where the launcher hides
    the failing rank's screen, rank 0 shows its traceback, too. That also holds while the ranks still have to meet.

    With several ranks over gloo the process ends here, also after a success: see :func:`stop`.
    """
    show_crashes()
    try:
        code = int(program() or 0)
        if not stop():
            _exit(code)
        return code
    except RankZeroError as error:
        return _fail(f'{_tag()}{error}', error, 1, follower=True)
    except (UserError, LaunchError) + tuple(clean_errors) as error:
        return _fail(f'{_tag()}error: {error}', error, 2, clean=True)
    except SystemExit as error:
        if error.code in (0, None):
            if not stop():
                _exit(0)
            return 0
        return _fail(f'{_tag()}{error.code}', error, error.code if isinstance(error.code, int) else 1)
    except KeyboardInterrupt as error:
        return _fail(f'{_tag()}interrupted', error, 130)
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _watch is None and output_gone():
            raise  # "tool | head": nothing is wrong; the tool's end takes care of it
        return _fail(''.join(f'{_tag()}{line}\n' for line in traceback.format_exc().rstrip().split('\n')), error,
                     getattr(error, 'exit_code', 1))


def _tag() -> str:
    try:
        launch = _current or detect()
    except LaunchError:
        return ''
    return f'[rank {launch.rank}] ' if launch.world_size > 1 else ''


def _exit(code: int) -> None:
    """End the process without destructors."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(code)


def quiet_here() -> bool:
    """Whether another rank of this machine shows a mistake in the command or the configuration: all ranks see the same.

    Waits a moment before it says so: a launcher ends the other ranks as soon as one has ended.
    """
    try:
        launch = detect()
    except LaunchError:
        return False
    if launch.local_rank == 0 or launch.world_size == 1:
        return False
    time.sleep(GRACE)
    return True


def _fail(text: str, error: BaseException, code: int, clean: bool = False, follower: bool = False) -> int:
    if clean and _watch is None and not isinstance(error, RanksDidNotMeet) and quiet_here():
        # Still here: rank 0 may not have made the mistake (a file that only its machine has), and wait for this rank.
        _report_before_the_meeting(text, error, 10.0)
        return code
    if follower and _watch is not None:  # rank 0 says what happened; its report is on the way
        time.sleep(2 * GRACE + 4 * _watch.interval)
    if clean and _watch is not None and not _watch.launch.is_master:
        time.sleep(1.5 * _watch.interval)  # a mistake in the configuration fails on every rank: rank 0 says it once
    if _watch is not None and _watch.told:  # this rank only failed because another had left
        time.sleep(GRACE)
        os._exit(code if clean else 1)
    _emit(text)
    if clean and error.__cause__ is not None and _log_file:
        _emit(''.join(traceback.format_exception(error.__cause__)), screen=False)
    if _watch is None:
        _report_before_the_meeting(text, error, 1.0 if clean else 20.0)
        return code
    if not isinstance(error, RanksDidNotMeet):  # every rank that waited says that by itself
        where = f'; its traceback is in {_log_file}' if _log_file else ''
        _watch.report(_reported(_watch.launch, text, error, where))
        _watch.close()
        # Let the others read the report before the launcher kills them.
        if _watch.launch.is_master:
            time.sleep(GRACE)
        else:
            wait_until_read(_watch.store)
    _exit(code)  # no destructor may wait for a collective that the other ranks never join
    return code


def _reported(launch: Launch, text: str, error: BaseException, where: str = '') -> Report:
    summary = str(error).split('\n')[0]
    return Report(launch.rank, f'rank {launch.rank} on {socket.gethostname()} failed: {type(error).__name__}: {summary}{where}',
                  '' if screen_is_shown() else text)


def _report_before_the_meeting(text: str, error: BaseException, timeout: float) -> None:
    """Rank 0, which may wait for this rank, and whose screen is the one that every launcher shows, tells what happened."""
    try:
        launch = detect()
    except LaunchError:
        return
    if launch.world_size > 1 and not launch.is_master:
        report_early(launch.master_addr, launch.master_port, _reported(launch, text, error), timeout)


def stop() -> bool:
    """Leave the process group after a success.

    Returns:
        False if the group could only be abandoned: gloo's destructor (torch 2.7) now and then waits forever for a peer that is
        already gone, holding the interpreter's lock, so the process must end by :func:`os._exit` once its files are closed.
    """
    global _watch, _current
    closed = True
    if dist.is_initialized():
        closed = dist.get_backend() != 'gloo' or dist.get_world_size() == 1
        if _watch is not None:
            dist.barrier()
            _watch.close()
            dist.barrier()  # no watch may still look for a store whose host has left
        if closed:
            dist.destroy_process_group()
    _watch, _current = None, None
    return closed
