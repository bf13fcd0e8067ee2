"""``tools/launch.py`` and the classic scripts: checks first, environment, launchers, GPUs, mistakes."""
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from testing import REPO

from mmdet3d_ext.launching import control, gpus, launchers, processes, state, supervisor
from mmdet3d_ext.launching.gpus import Gpu

TOOL = [sys.executable, str(REPO / 'tools' / 'launch.py')]
TRAINER = str(REPO / 'tests' / 'faults' / 'toy_trainer.py')


def run_tool(*words, env=None, cwd=None):
    return subprocess.run([*TOOL, *map(str, words)], capture_output=True, text=True, timeout=100, env=env, cwd=cwd)


def program(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def config(tmp_path):
    path = tmp_path / 'toy.json'
    path.write_text(json.dumps({'steps': 3}))
    return path


# ---- environment -------------------------------------------------------------------------------------------------------

def test_exports_put_torchs_libraries_first_and_keep_what_is_there():
    found = launchers.exports(2, '0,1', {'PATH': '/bin', 'LD_LIBRARY_PATH': '/opt/x:/opt/y', 'NCCL_DEBUG': 'INFO', 'HOME': '/home/me'})
    libraries = found['LD_LIBRARY_PATH'].split(':')
    assert libraries[0].endswith('torch/lib') and libraries[1:] == ['/opt/x', '/opt/y']
    assert found['PATH'].split(':') == [str(Path(sys.executable).parent), '/bin'] and found['CUDA_VISIBLE_DEVICES'] == '0,1'
    assert found['PYTHONPATH'] == str(REPO) and found['NCCL_DEBUG'] == 'INFO' and 'HOME' not in found
    assert launchers.exports(1, '', {})['CUDA_VISIBLE_DEVICES'] == ''  # no GPU is something else than any GPU
    again = launchers.exports(2, '0,1', {'PATH': found['PATH'], 'LD_LIBRARY_PATH': found['LD_LIBRARY_PATH'], 'PYTHONPATH': str(REPO)})
    assert all(again[name] == found[name] for name in ('PATH', 'LD_LIBRARY_PATH', 'PYTHONPATH'))


@pytest.mark.parametrize('kind', ['torchpack', 'torchrun', 'python'])
def test_ranks_get_the_exports_from_every_launcher(config, tmp_path, kind):
    env = dict(os.environ, LD_LIBRARY_PATH='/opt/cuda/lib64', OMPI_COMM_WORLD_RANK='7', RANK='5', WORLD_SIZE='9')
    ranks = 1 if kind == 'python' else 2
    done = run_tool('start', config, '-n', ranks, '--run-dir', tmp_path / 'run', '--script', TRAINER, '--skip-checks', '--foreground',
                    '--launcher', 'auto' if kind == 'python' else kind, env=env)
    assert done.returncode == 0 and f'launcher: {kind}' in done.stdout, done
    for rank in range(ranks):
        seen = json.loads((tmp_path / 'run' / f'seen_{rank}.json').read_text())
        assert seen['LD_LIBRARY_PATH'].split(':')[0].endswith('torch/lib') and seen['LD_LIBRARY_PATH'].endswith(':/opt/cuda/lib64')
        assert seen['PATH'].split(':')[0] == str(Path(sys.executable).parent) and seen['PYTHONUNBUFFERED'] == '1'
        assert seen.get('WORLD_SIZE') in (None, str(ranks))
    for line in ('LD_LIBRARY_PATH=', 'PYTHONPATH=', 'OMP_NUM_THREADS='):
        assert line in done.stdout


def test_a_launcher_that_loses_library_paths_is_made_up_for(tmp_path):
    """The rank process sets what is exported once more, and writes down what had not arrived."""
    plan = launchers.write_plan(str(tmp_path), [sys.executable, '-c', 'import os; print(os.environ["LD_LIBRARY_PATH"])'],
                                {'LD_LIBRARY_PATH': '/right', 'LANG': 'C'}, 1, [0])
    done = subprocess.run([sys.executable, '-I', launchers.RANK_PROCESS], capture_output=True, text=True,
                          env={'LD_LIBRARY_PATH': '/lost', 'LANG': 'C', 'RANK': '0', launchers.PLAN_VARIABLE: plan})
    assert done.returncode == 0 and done.stdout == '/right\n'
    assert state.records(str(tmp_path), 1)[0]['corrected'] == ['LD_LIBRARY_PATH']


@pytest.mark.parametrize('folder', ['plain', "with space's"])
def test_every_word_arrives_as_it_was_typed(tmp_path, folder):
    """torchpack's own wrapper would split these words at blanks and take their quotes away."""
    trainer = tmp_path / 'trainer.py'
    trainer.write_text('import json, os, sys\nopen(sys.argv[3] + "/words.json", "w").write(json.dumps(sys.argv))\n')
    words = ['--voxel_size', '[0.1, 0.1, 0.2]', '--optimizer', "{type: AdamW, note: 'a b'}", '--x', '$HOME;ls "*"', 'max_epochs=3']
    (tmp_path / folder).mkdir()
    (tmp_path / 'c.yaml').write_text('')
    done = run_tool('start', 'c.yaml', '-n', 2, '--run-dir', tmp_path / folder, '--script', trainer, '--skip-checks', '--foreground',
                    *words, cwd=tmp_path)
    assert done.returncode == 0, done
    assert json.loads((tmp_path / folder / 'words.json').read_text())[4:] == words


# ---- checks ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('doctor, check, starts', [(0, 0, True), (1, 0, True), (2, 0, False), (0, 1, False), (0, 2, False)])
def test_machine_and_configuration_are_checked_before_anything_starts(tmp_path, monkeypatch, capsys, doctor, check, starts):
    monkeypatch.syspath_prepend(str(REPO / 'tools'))
    import launch
    said = []

    def run(command, env):
        said.append([Path(command[1]).name, *command[2:]])
        assert env['LD_LIBRARY_PATH'].split(':')[0].endswith('torch/lib')
        return subprocess.CompletedProcess(command, doctor if 'doctor.py' in command[1] else check)

    monkeypatch.setattr(launch.subprocess, 'run', run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'c.yaml').write_text('')
    code = launch.main(['start', 'c.yaml', '-n', '1', '--run-dir', str(tmp_path / 'run'), '--dry-run', '--gpus', '',
                        '--resume_from', 'auto', '--max_epochs', '3', '--deterministic'])
    assert code == (0 if starts else 2)
    assert said == [['doctor.py', 'c.yaml', '--only', 'stack', 'libraries', 'gpus', 'system', 'data', '--processes', '1', '--run-dir',
                     str(tmp_path / 'run'), '--max_epochs', '3'],
                    ['check_config.py', 'c.yaml', '--gpus', '1', '--max_epochs', '3']]
    assert ('nothing was started. --skip-checks' in capsys.readouterr().err) != starts and not (tmp_path / 'run').exists()


# ---- launchers ---------------------------------------------------------------------------------------------------------

def test_torchrun_is_taken_where_mpirun_is_missing_or_broken(tmp_path):
    given = {'PATH': '/usr/bin:/bin'}
    found = launchers.choose(2, 'auto', given)
    assert found.kind == 'torchrun' and 'there is no mpirun' in found.why
    program(tmp_path / 'mpirun', '#!/bin/sh\necho "mpirun: error while loading shared libraries: libmpi.so.40" >&2\nexit 127\n')
    found = launchers.choose(2, 'auto', {'PATH': f'{tmp_path}:/usr/bin:/bin'})
    assert found.kind == 'torchrun' and 'libmpi.so.40' in found.why
    with pytest.raises(state.LaunchToolError, match='libmpi.so.40'):
        launchers.choose(2, 'torchpack', {'PATH': f'{tmp_path}:/usr/bin:/bin'})


def test_an_mpirun_that_starts_too_few_is_noticed(tmp_path):
    program(tmp_path / 'mpirun', '#!/bin/bash\nwhile [ "$1" != "--allow-run-as-root" ]; do shift; done\nexit 0\n')
    problem = launchers.try_out('torchpack', 2, {'PATH': f'{tmp_path}:/usr/bin:/bin'})
    assert problem is not None and '0 of 2 processes started' in problem


def test_one_process_needs_no_launcher():
    assert launchers.choose(1, 'auto', {}).kind == 'python'


def test_several_machines_are_torchruns(config, tmp_path):
    env = dict(os.environ, NNODES='2', NODE_RANK='1', MASTER_ADDR='node0', PORT='29511')
    done = run_tool('start', config, '-n', 2, '--run-dir', tmp_path / 'run', '--skip-checks', '--dry-run', env=env)
    assert done.returncode == 0 and '--nnodes 2 --node_rank 1 --master_addr node0 --master_port 29511' in done.stdout
    done = run_tool('start', config, '-n', 2, '--run-dir', tmp_path / 'run', '--skip-checks', '--launcher', 'torchpack', env=env)
    assert done.returncode == 2 and 'torchrun' in done.stderr


# ---- GPUs --------------------------------------------------------------------------------------------------------------

FOUR = [Gpu(0, 14000, 32000, 'V100'), Gpu(1, 3, 32000, 'V100'), Gpu(2, 0, 32000, 'V100'), Gpu(3, 600, 32000, 'V100')]


@pytest.mark.parametrize('ranks, wanted, env, machine, value', [
    (2, None, {}, FOUR, '1,2'), (2, '0,3', {}, FOUR, '0,3'), (4, None, {'CUDA_VISIBLE_DEVICES': '4,5'}, FOUR, '4,5'),
    (2, None, {}, [], None), (2, '', {}, FOUR, '')])
def test_which_gpus(ranks, wanted, env, machine, value):
    chosen, words = gpus.choose(ranks, wanted, env, machine)
    assert chosen == value and words
    if wanted == '0,3':
        assert 'in use already: 0 (14000 MiB), 3 (600 MiB)' in words


@pytest.mark.parametrize('ranks, wanted, words', [
    (3, None, '4, 2 free, in use: 0 (14000 of 32000 MiB used)'), (2, '1', '2 processes need 2 GPUs, 1 given'),
    (1, '9', 'no GPU 9; it has 0, 1, 2, 3'), (2, 'a,b', "must be the numbers of GPUs, each once, such as 0,1 (\"\" for none); 'a' is none"),
    (2, '0,-1', "'-1' is none"), (2, '0,,1', "'' is none"), (1, ',', "'' is none"), (1, '0.5', "'0.5' is none"),
    (2, '0,00', 'one is named twice'), (1, '\u0665', 'this machine has no GPU 5')])
def test_words_that_name_no_gpus_of_this_machine(ranks, wanted, words):
    with pytest.raises(state.LaunchToolError) as error:
        gpus.choose(ranks, wanted, {}, FOUR)
    assert words in str(error.value)


def test_gpus_are_not_taken_from_a_machine_without():
    with pytest.raises(state.LaunchToolError, match='there is no GPU on this machine .* leave --gpus out to train on the CPU'):
        gpus.choose(2, '0,1', {}, [])
    assert gpus.choose(2, '', {}, []) == ('', 'GPUs none as asked')


def test_gpus_are_seen_without_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    for name in ('nvidia1', 'nvidia0', 'nvidiactl', 'nvidia-uvm', 'null'):
        (tmp_path / name).touch()
    assert [gpu.index for gpu in gpus.on_machine(str(tmp_path))] == [0, 1] and gpus.on_machine(str(tmp_path / 'none')) == []
    assert gpus.choose(2, '0,1', {}, gpus.on_machine(str(tmp_path)))[0] == '0,1'


def test_the_driver_is_asked(tmp_path, monkeypatch):
    program(tmp_path / 'nvidia-smi', '#!/bin/sh\nprintf "0, 12, 143771, NVIDIA H200\\n1, 900, 143771, NVIDIA H200\\n[N/A]\\n"\n')
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    assert gpus.on_machine() == [Gpu(0, 12, 143771, 'NVIDIA H200'), Gpu(1, 900, 143771, 'NVIDIA H200')]
    program(tmp_path / 'nvidia-smi', '#!/bin/sh\necho "NVIDIA-SMI has failed"; exit 9\n')
    assert gpus.on_machine() == []


# ---- words -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('words, text', [
    (['start', '-n', '2', 'c.yaml'], 'the configuration comes first'), (['start', 'c.yaml', '-n', '0'], '-n must be at least 1'),
    (['stop', 'nowhere'], 'was not started by tools/launch.py'), (['status', 'nowhere'], 'no run here'),
    (['stop', 'a', '--frobnicate'], 'unknown words'), (['stop', 'a', '--timeout', 'nan'], 'must be a number of seconds >= 0'),
    (['stop', 'a', '--timeout', '-1'], 'must be a number of seconds >= 0'), (['status', 'c.yaml'], 'no run here'),
    (['start', 'c.yaml', '--seed', 'abc', '--skip-checks'], '--seed')])
def test_mistakes(tmp_path, words, text):
    (tmp_path / 'c.yaml').write_text('')
    done = run_tool(*words, cwd=tmp_path)
    assert done.returncode == 2 and text in done.stderr and 'Traceback' not in done.stderr, done


def test_start_looks_at_files_and_folders_before_it_examines_the_machine(tmp_path, config):
    """Whatever is wrong with them costs no minute of the doctor's, is one line, and leaves nothing behind."""
    (tmp_path / 'file').write_text('')
    (tmp_path / 'gone').symlink_to(tmp_path / 'nowhere')
    (tmp_path / 'binary.yaml').write_bytes(b'\x89PNG\r\n\x1a\n\0')
    (tmp_path / 'broken.yaml').write_text('a: [1, 2')
    (tmp_path / 'folder').mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    for words, text in [
            (['none.yaml'], 'none.yaml: no such configuration file'), (['binary.yaml'], 'binary.yaml: cannot be read'),
            (['broken.yaml'], 'broken.yaml:1'), (['folder'], 'folder: cannot be read'), (['x.py'], 'Python configurations'),
            ([config, '--run-dir', 'file'], 'file cannot be the run folder: '),
            ([config, '--run-dir', 'file/below'], '/file is no folder'), ([config, '--run-dir', 'gone'], '/gone is a link to nowhere'),
            # to root /proc looks as if it could be written
            ([config, '--run-dir', '/proc/x', '--skip-checks'], '/proc/x cannot be the run folder: '),
            ([config, '--load_from', 'none.pth'], '--load_from none.pth: there is no such file'),
            ([config, '--load_from', 'file,none.pth'], '--load_from none.pth'),
            ([config, '--load_from', '[\'file\', "none.pth"]'], '--load_from none.pth'), ([config, '--gpus', 'a,b'], "'a' is none"),
            ([config, '--resume_from', 'none.pth'], '--resume_from none.pth: there is no such file')]:
        done = run_tool('start', *words, cwd=tmp_path)
        assert done.returncode == 2 and text in done.stderr and len(done.stderr.splitlines()) == 1, (words, done)
        assert 'doctor' not in done.stdout, words
    done = run_tool('start', config, env=dict(os.environ, NNODES='two'), cwd=tmp_path)
    assert done.returncode == 2 and "NNODES (a variable of the shell) must be a whole number, got 'two'" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_folder_without_permission_is_told(tmp_path, monkeypatch):
    """As root everything may be written, so the answer of the system is made up."""
    folder = tmp_path / 'closed'
    folder.mkdir()
    access = os.access
    monkeypatch.setattr(os, 'access', lambda path, mode: str(path) != str(folder) and access(path, mode))
    for place in (folder, folder / 'run'):
        with pytest.raises(state.LaunchToolError, match=f'no permission to write in {folder}. Give another one with --run-dir'):
            state.check_usable(str(place))
    state.check_usable(str(tmp_path / 'new' / 'run'))
    assert not (tmp_path / 'new').exists()


def test_the_lock_of_another_user_is_seen_or_told(tmp_path, monkeypatch):
    held = state.take_lock(str(tmp_path))
    opened, modes = os.open, []

    def as_another_user(path, flags, *rest):
        modes.append(flags & os.O_ACCMODE)
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, 'open', as_another_user)
    assert state.supervised(str(tmp_path)) and modes == [os.O_RDONLY] and not (tmp_path / 'none').exists()
    os.close(held)
    assert not state.supervised(str(tmp_path)) and not state.supervised(str(tmp_path / 'none'))

    def refused(path, flags, *rest):
        raise PermissionError(13, 'Permission denied', path)

    monkeypatch.setattr(os, 'open', refused)
    with pytest.raises(state.LaunchToolError, match='lock: Permission denied; run this as the user who started the run'):
        state.supervised(str(tmp_path))


def test_another_users_run_is_not_waited_for(tmp_path, monkeypatch):
    """Signals to it would be lost, and its end would be waited for in vain."""
    run_dir = str(tmp_path / 'run')
    held = state.take_lock(run_dir)
    state.State(run_dir, 'token-of-nobody', socket.gethostname(), 1, 'python', 'test', [], {}, 3, phase=state.RUNNING, supervisor=12345).write()

    def refused(pid, number):
        raise PermissionError(1, 'Operation not permitted')

    monkeypatch.setattr(os, 'kill', refused)
    with pytest.raises(state.LaunchToolError, match='belongs to another user'):
        control.stop(run_dir, 600.0)
    os.close(held)


def test_people_are_not_shown_what_start_calls(tmp_path):
    for words in ([], ['--help'], ['frobnicate']):
        done = run_tool(*words, cwd=tmp_path)
        assert 'supervise' not in (done.stdout + done.stderr).replace('supervised or not', '').replace('supervisor', ''), words


def test_status_of_all_runs(tmp_path, config):
    for name in ('a', 'b'):
        assert run_tool('start', config, '--run-dir', f'runs/{name}', '--script', TRAINER, '--skip-checks', '--foreground',
                        cwd=tmp_path).returncode == 0
    done = run_tool('status', cwd=tmp_path)
    assert done.returncode == 0 and [line.split()[1] for line in done.stdout.splitlines()] == ['finished:', 'finished:']
    (tmp_path / 'runs' / 'b' / 'launch' / 'state.json').write_text('{"run')
    done = run_tool('status', cwd=tmp_path)
    assert done.returncode == 0 and 'runs/a  finished' in done.stdout and 'runs/b  unknown' in done.stdout
    done = run_tool('status', 'runs/a', '--json', cwd=tmp_path)
    assert json.loads(done.stdout)['phase'] == 'finished'


def test_the_tool_works_where_torch_does_not(tmp_path, config):
    (tmp_path / 'broken').mkdir()
    (tmp_path / 'broken' / 'torch.py').write_text('raise ImportError("libtorch_cuda_cu.so")')
    done = run_tool('start', config, '--run-dir', tmp_path / 'run', '--script', TRAINER, '--skip-checks', '--foreground',
                    env=dict(os.environ, PYTHONPATH=str(tmp_path / 'broken')))
    assert done.returncode == 0, done


@pytest.mark.parametrize('code, text', [(1, 'ended with exit code 1'), (-9, 'SIGKILL (out of memory?'), (-7, 'SIGBUS (/dev/shm full?)'),
                                        (-250, 'signal 250')])
def test_how_a_rank_ended_in_words(code, text):
    assert text in processes.ending(code)


def test_the_last_error_of_a_log(tmp_path):
    path = tmp_path / 'log'
    path.write_bytes(b'10%|#\r20%|##\r100%|###\n[rank 1] Traceback (most recent call last):\n[rank 1] torch.OutOfMemoryError: CUDA out\n'
                     b'mpirun detected that\n')
    assert supervisor.last_error(str(path)) == '[rank 1] torch.OutOfMemoryError: CUDA out'
    assert processes.tail(str(path), 4).split('\n')[0] == '100%|###'
    assert supervisor.last_error(str(tmp_path / 'none')) == ''
    path.write_text('[rank 0] stops, because rank 1 (process 7) died\n    error_code: 1\n'
                    'torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n')
    assert supervisor.last_error(str(path)) == '[rank 0] stops, because rank 1 (process 7) died'


# ---- the classic scripts -----------------------------------------------------------------------------------------------

def run_script(name, *words, env=None, cwd=None):
    return subprocess.run(['bash', str(REPO / 'tools' / name), *map(str, words)], capture_output=True, text=True, timeout=100, cwd=cwd,
                          env={**os.environ, 'PYTHON': sys.executable, **(env or {})})


def test_dist_train_is_launch_in_the_foreground(config, tmp_path):
    done = run_script('dist_train.sh', config, 2, '--work-dir', tmp_path / 'run', '--script', TRAINER, '--skip-checks')
    assert done.returncode == 0 and 'rank 0 done' in done.stderr and 'finished: trained to the end' in done.stderr, done
    done = run_script('dist_train.sh', config)
    assert done.returncode == 2 and 'dist_train.sh CONFIG GPUS' in done.stderr


@pytest.fixture
def slurm(tmp_path):
    """A folder with an srun that writes down its words and starts the command for each of two tasks, and a python that tells
    what it was asked to run instead of running it."""
    (tmp_path / 'bin').mkdir()
    program(tmp_path / 'bin' / 'srun', f'#!/bin/bash\necho "srun $*" | head -1 >> {tmp_path}/said\nwhile [ "$1" != bash ]; do shift; done\n'
            'code=0\nfor id in 0 1; do SLURM_LOCALID=$id "$@" || code=$?; done\nexit $code\n')
    program(tmp_path / 'bin' / 'python', f'#!/bin/bash\nfor word in "$@"; do printf "[%s] " "$word"; done >> {tmp_path}/said\n'
            f'echo "task ${{SLURM_LOCALID:-none}}" >> {tmp_path}/said\n'
            'case "$*" in *doctor*) exit ${DOCTOR:-0};; *check_config*) exit ${CHECK:-0};; *) exit ${TRAIN:-0};; esac\n')
    return lambda *words, **env: run_script('slurm_train.sh', *words, env={**env, 'PATH': f'{tmp_path / "bin"}:{os.environ["PATH"]}',
                                                                          'PYTHON': 'python'})


def test_slurm_train_checks_then_trains_and_resumes(slurm, tmp_path):
    done = slurm('gpu', 'phase3', 'c.yaml', 'runs/x', '--voxel_size', '[0.1, 0.1]', GPUS='4', DOCTOR='1', SRUN_ARGS='--qos=long -x node7')
    assert done.returncode == 0, done
    said = (tmp_path / 'said').read_text().splitlines()
    assert 'check_config.py] [c.yaml] [--gpus] [4] task none' in said[0]
    for word in ('-p gpu', '--job-name=phase3', '--gres=gpu:4', '--ntasks=4', '--ntasks-per-node=4', '--kill-on-bad-exit=1',
                 '--signal=USR1@300', '--qos=long -x node7'):
        assert word in said[1]
    assert 'doctor.py] [c.yaml]' in said[2] and said[2].endswith('task 0')
    train = '/train.py] [c.yaml] [--run-dir] [runs/x] [--resume_from] [auto] [--voxel_size] [[0.1, 0.1]] task '
    assert [line.split(train)[1] for line in said[3:]] == ['0', '1']


@pytest.mark.parametrize('env, code, trained', [({'CHECK': '1'}, 1, False), ({'DOCTOR': '2'}, 2, False), ({'TRAIN': '75'}, 75, True)])
def test_slurm_train_ends_with_what_went_wrong(slurm, tmp_path, env, code, trained):
    assert slurm('gpu', 'phase3', 'c.yaml', 'runs/x', **env).returncode == code
    lines = (tmp_path / 'said').read_text().splitlines()
    assert any('train.py' in line and line.endswith('task 0') for line in lines) == trained
