"""How the launcher is found out, and what happens if ranks do not meet."""
import os
import subprocess
import sys

import pytest
import torch
from testing import REPO

from mmdet3d_ext.engine import launch
from mmdet3d_ext.engine.launch import Launch, LaunchError, detect, expand_nodelist

OPEN_MPI = {'OMPI_COMM_WORLD_RANK': '3', 'OMPI_COMM_WORLD_SIZE': '4', 'OMPI_COMM_WORLD_LOCAL_RANK': '1',
            'OMPI_COMM_WORLD_LOCAL_SIZE': '2'}
SLURM = {'SLURM_PROCID': '9', 'SLURM_NTASKS': '16', 'SLURM_LOCALID': '1', 'SLURM_NODELIST': 'gpu[07-08]', 'SLURM_JOB_ID': '77'}


@pytest.mark.parametrize('env, expected', [
    ({}, ('none', 0, 1, 0, 1, None, None)),
    ({'OMP_NUM_THREADS': '1', 'MASTER_PORT': '1'}, ('none', 0, 1, 0, 1, None, None)),
    ({**OPEN_MPI, 'MASTER_HOST': 'node1:4711'}, ('mpi', 3, 4, 1, 2, 'node1', 4711)),
    # torchpack forwards the launching shell's variables: a cluster's RANK and WORLD_SIZE are of the node, not of this process
    ({**OPEN_MPI, 'MASTER_HOST': 'node1:4711', 'RANK': '0', 'WORLD_SIZE': '1'}, ('mpi', 3, 4, 1, 2, 'node1', 4711)),
    ({**OPEN_MPI, 'PMIX_RANK': '3', 'MASTER_ADDR': 'a', 'MASTER_PORT': '5'}, ('mpi', 3, 4, 1, 2, 'a', 5)),
    ({'PMI_RANK': '1', 'PMI_SIZE': '2', 'MPI_LOCALRANKID': '1', 'MPI_LOCALNRANKS': '2', 'MASTER_HOST': 'localhost:9'},
     ('mpi', 1, 2, 1, 2, 'localhost', 9)),
    ({'TORCHELASTIC_RUN_ID': 'x', 'RANK': '5', 'WORLD_SIZE': '8', 'LOCAL_RANK': '1', 'LOCAL_WORLD_SIZE': '4',
      'MASTER_ADDR': 'h', 'MASTER_PORT': '7', **SLURM}, ('torchrun', 5, 8, 1, 4, 'h', 7)),
    ({'RANK': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': 'h', 'MASTER_PORT': '7'}, ('env', 1, 2, 0, 1, 'h', 7)),
    ({**SLURM, 'MASTER_PORT': '123'}, ('slurm', 9, 16, 1, 8, 'gpu07', 123)),
    ({**SLURM, 'MASTER_PORT': '123', 'SLURM_STEP_NUM_TASKS': '12', 'SLURM_NTASKS_PER_NODE': '6', 'MASTER_ADDR': 'other'},
     ('slurm', 9, 12, 1, 6, 'other', 123)),
    # an allocation alone (salloc, sbatch) is one process
    ({'SLURM_NTASKS': '16', 'SLURM_NODELIST': 'a', 'SLURM_JOB_ID': '1'}, ('none', 0, 1, 0, 1, None, None)),
    ({**SLURM, 'SLURM_PROCID': '0', 'SLURM_LOCALID': '0', 'ENVIRONMENT': 'BATCH'}, ('none', 0, 1, 0, 1, None, None)),
])
def test_detect(env, expected):
    found = detect(env)
    assert (found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size, found.master_addr,
            found.master_port) == expected


def test_ranks_of_one_mpirun_agree_on_a_port_without_torchpack():
    base = {'OMPI_COMM_WORLD_SIZE': '2', 'OMPI_COMM_WORLD_LOCAL_SIZE': '2', 'PMIX_NAMESPACE': 'job1'}
    first, second = (detect({**base, 'OMPI_COMM_WORLD_RANK': r, 'OMPI_COMM_WORLD_LOCAL_RANK': r}) for r in '01')
    other = detect({**base, 'PMIX_NAMESPACE': 'job2', 'OMPI_COMM_WORLD_RANK': '0', 'OMPI_COMM_WORLD_LOCAL_RANK': '0'})
    assert first.master_addr == second.master_addr == '127.0.0.1' and first.master_port == second.master_port
    assert other.master_port != first.master_port and 'MASTER_HOST' in first.notes[0]


def test_ranks_of_one_slurm_step_agree_on_a_port_and_steps_differ():
    ports = {step: detect({**SLURM, 'SLURM_STEP_ID': step}).master_port for step in '01'}
    assert detect({**SLURM, 'SLURM_STEP_ID': '0', 'SLURM_PROCID': '0'}).master_port == ports['0'] != ports['1']


@pytest.mark.parametrize('env, message', [
    ({**OPEN_MPI}, 'MASTER_ADDR'),
    ({**OPEN_MPI, 'MASTER_HOST': 'node1'}, 'host:port.*node1'),
    ({**OPEN_MPI, 'MASTER_HOST': 'a:1', 'OMPI_COMM_WORLD_RANK': '4'}, 'rank 4 is not in a world of 4'),
    ({'RANK': 'x', 'WORLD_SIZE': '2'}, "RANK must be a whole number, got 'x'"),
    ({'RANK': '1', 'WORLD_SIZE': '2'}, 'MASTER_ADDR'),
])
def test_contradictions_are_explained(env, message):
    with pytest.raises(LaunchError, match=message):
        detect(env)


def test_batch_script_without_srun_says_so():
    found = detect({**SLURM, 'SLURM_PROCID': '0', 'SLURM_LOCALID': '0', 'ENVIRONMENT': 'BATCH'})
    assert 'not started by srun' in found.notes[0] and '16 tasks' in found.notes[0]


@pytest.mark.parametrize('text, names', [
    ('a', ['a']), ('gpu[01-03,7],login', ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']), ('n[9-11]', ['n9', 'n10', 'n11']),
    ('r[1-2]n[1-2]', ['r1n1', 'r1n2', 'r2n1', 'r2n2']), ('a,b', ['a', 'b']), ('', []),
])
def test_nodelist(text, names):
    assert expand_nodelist(text) == names


def test_one_slurm_task_on_six_gpus_prints_the_mismatch():
    found = launch._with_device_notes(detect({**SLURM, 'SLURM_NTASKS': '1', 'SLURM_PROCID': '0', 'SLURM_LOCALID': '0'}), gpus=6)
    assert '1 task(s) on a machine with 6 GPUs' in found.notes[-1] and '--ntasks=6' in found.notes[-1]
    assert launch._with_device_notes(Launch('torchrun', 0, 6, 0, 6, 'h', 1), gpus=6).notes == ()


def test_more_ranks_than_gpus_is_an_error_but_not_when_each_task_sees_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    with pytest.raises(LaunchError, match='2 processes on .* but 1 GPU'):
        launch._choose_device(Launch('mpi', 1, 2, 1, 2, 'h', 1), gpus=1, backend='nccl')
    assert launch._choose_device(Launch('slurm', 1, 2, 1, 2, 'h', 1), gpus=1, backend='nccl').index == 0
    assert launch._choose_device(Launch('mpi', 1, 2, 1, 2, 'h', 1), gpus=1, backend='gloo').index == 0
    assert launch._choose_device(Launch('mpi', 5, 8, 1, 4, 'h', 1), gpus=4, backend='nccl').index == 1


def test_a_backend_that_cannot_work_is_refused():
    with pytest.raises(LaunchError, match='"mpi"|mpi'):
        launch.start(Launch('none'), backend='mpi')
    if not torch.cuda.is_available():
        with pytest.raises(LaunchError, match='no GPU is visible'):
            launch.start(Launch('none'), backend='nccl')


def test_missing_ranks_end_the_start_with_a_message():
    """Rank 0 of 2, and nobody else comes: an error after the start timeout, not after half an hour."""
    code = ("import sys; from mmdet3d_ext.engine import launch\n"
            "sys.exit(launch.run(lambda: launch.start(start_timeout=1.5) and 0))")
    env = dict(os.environ, RANK='0', WORLD_SIZE='2', LOCAL_RANK='0', MASTER_ADDR='127.0.0.1', OMP_NUM_THREADS='1')
    import socket
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        env['MASTER_PORT'] = str(free.getsockname()[1])
    done = subprocess.run([sys.executable, '-c', code], env=env, cwd=REPO, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stderr
    assert 'rank 0 of 2 (env): the ranks did not meet at 127.0.0.1' in done.stderr and 'Traceback' not in done.stderr


def test_run_gives_exit_codes_and_shows_errors_cleanly(capsys):
    def fails(error):
        def program():
            raise error
        return program

    assert launch.run(lambda: None) == 0 and launch.run(lambda: 3) == 3
    assert launch.run(fails(launch.UserError('key a.b is wrong'))) == 2
    shown = capsys.readouterr().err
    assert shown == 'error: key a.b is wrong\n'
    assert launch.run(fails(ZeroDivisionError('boom'))) == 1
    assert 'Traceback' in capsys.readouterr().err
    assert launch.run(fails(SystemExit(4))) == 4 and launch.run(fails(SystemExit(0))) == 0


def test_one_rank_of_a_machine_shows_a_mistake_that_all_make(capsys, monkeypatch):
    waited, told = [], []
    monkeypatch.setattr(launch.time, 'sleep', waited.append)
    monkeypatch.setattr(launch, 'report_early', lambda *report: told.append(report[2].rank))

    def program():
        raise launch.UserError('key a.b is wrong')

    for local_rank, expected in ((0, '[rank 0] error: key a.b is wrong\n'), (1, '')):
        for name, value in dict(RANK=local_rank, WORLD_SIZE=2, LOCAL_RANK=local_rank, MASTER_ADDR='127.0.0.1').items():
            monkeypatch.setenv(name, str(value))
        assert launch.run(program) == 2 and capsys.readouterr().err == expected
    assert waited == [launch.GRACE]  # the launcher ends the others with the first that ends
    assert told == [1]  # should rank 0 not have made the mistake, it hears of it


def test_warnings_of_this_package_are_shown_without_python_s_decoration(tmp_path, monkeypatch, capsys):
    import logging
    import warnings
    logging.captureWarnings(False)
    launch.attach_rank_log(str(tmp_path), 'now')
    own = f'{REPO}/mmdet3d_ext/datasets/x.py'
    warnings.warn_explicit('point cloud a.bin: removed 1 of 2 points\nsecond line', UserWarning, own, 7)
    warnings.warn_explicit('of another library', UserWarning, '/lib/other.py', 7)
    shown = capsys.readouterr().err
    assert shown.endswith(' - mmdet3d - WARNING - point cloud a.bin: removed 1 of 2 points\nsecond line\n')
    assert 'another library' not in shown and 'another library' in (tmp_path / 'logging' / 'now.log').read_text()
