"""The environment's faults, brought about for real where that is possible, and what the doctor says to each."""
import json
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from ranks import clean_env
from testing import REPO

DOCTOR = str(REPO / 'tools' / 'doctor.py')
SUFFIX = sysconfig.get_config_var('EXT_SUFFIX')

# A torch of another time: no more than what the doctor asks it, and its library in memory as the real one's is.
FAKE_TORCH = '''
import ctypes, os, types
__version__ = "1.10.1+cu102"
_lib = os.path.join(os.path.dirname(__file__), "lib", "libtorch_cuda.so")
ctypes.CDLL(_lib, ctypes.RTLD_GLOBAL)
version = types.SimpleNamespace(cuda="10.2")
cuda = types.SimpleNamespace(is_available=lambda: False, get_arch_list=lambda: ["sm_37", "sm_70"])
backends = types.SimpleNamespace(cudnn=types.SimpleNamespace(version=lambda: 7605))
ops = types.SimpleNamespace(load_library=lambda path: ctypes.CDLL(path))
'''
EXTENSION = '''
#include <Python.h>
extern int thc_state(void);
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ext", NULL, -1, NULL};
PyMODINIT_FUNC PyInit__ext(void) { return thc_state() == 42 ? PyModule_Create(&module) : NULL; }
'''


def examine(*words, env=None, timeout=100, prefix=()):
    """(exit code, {check: finding}) of ``tools/doctor.py --json``."""
    done = subprocess.run([*prefix, sys.executable, DOCTOR, *words, '--json'], capture_output=True, text=True, timeout=timeout,
                          env={**clean_env(), **(env or {})}, cwd=REPO)
    assert done.stdout.startswith('{'), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report['worst'] == done.returncode
    return done.returncode, {finding['check']: finding for finding in report['findings']}


def compile_library(source, output, *flags):
    output.parent.mkdir(parents=True, exist_ok=True)
    (output.parent / 'source.c').write_text(source)
    subprocess.run(['gcc', '-shared', '-fPIC', '-O0', '-o', str(output), str(output.parent / 'source.c'), *flags], check=True)
    (output.parent / 'source.c').unlink()


@pytest.fixture
def old_stack(tmp_path):
    """``site`` with a torch whose CUDA library is in one piece, and an mmcv that was linked against one in two pieces."""
    include = sysconfig.get_paths()['include']
    if shutil.which('gcc') is None or not Path(include, 'Python.h').exists():
        pytest.skip('needs gcc and Python.h')

    def make(in_torch='int thc_state(void) { return 42; }', needs='torch_cuda_cu', keep=False):
        site, build = tmp_path / 'site', tmp_path / 'build'
        compile_library('int thc_state(void) { return 42; }', build / f'lib{needs}.so', f'-Wl,-soname,lib{needs}.so')
        compile_library(in_torch, site / 'torch' / 'lib' / 'libtorch_cuda.so', '-Wl,-soname,libtorch_cuda.so')
        (site / 'torch' / '__init__.py').write_text(FAKE_TORCH)
        compile_library(EXTENSION, site / 'mmcv' / f'_ext{SUFFIX}', f'-I{include}', f'-L{build}', f'-l{needs}')
        (site / 'mmcv' / '__init__.py').write_text('')
        if not keep:
            shutil.rmtree(build)
        return site

    return make


# ---- a library of another torch -----------------------------------------------------------------------------------------

def test_mmcv_built_for_a_split_torch(old_stack, fault_record):
    site = old_stack()
    alone = subprocess.run([sys.executable, '-c', 'import torch, mmcv._ext'], env=clean_env(PYTHONPATH=str(site)), capture_output=True,
                           text=True, cwd=site)
    assert 'libtorch_cuda_cu.so: cannot open shared object file' in alone.stderr  # the user's error
    code, found = examine('--only', 'libraries', env={'PYTHONPATH': str(site)})
    mmcv = found['mmcv library']
    assert code == 2 and mmcv['status'] == 'problem'
    assert 'needs libtorch_cuda_cu.so, which is not there' in mmcv['text']
    assert 'built for a CUDA 11 build of torch 1.8 to 2.0' in mmcv['text'] and 'here is torch 1.10.1+cu102' in mmcv['text']
    assert mmcv['remedy'].startswith('build it for this torch') and mmcv['remedy'].index('--fix') > mmcv['remedy'].index('pip install')
    assert os.listdir(site / 'torch' / 'lib') == ['libtorch_cuda.so']  # nothing was changed
    fault_record('mmcv was built for a torch with libtorch_cuda_cu.so', 'named, with both torch versions; build anew first', 'nothing')


def test_the_torch_that_a_wheel_was_made_for_is_named(old_stack):
    site = old_stack()
    (site / 'mmcv_full-1.4.0.dist-info').mkdir()
    (site / 'mmcv_full-1.4.0.dist-info' / 'direct_url.json').write_text(json.dumps(
        {'url': 'https://example.org/mmcv/dist/cu113/torch1.10.0/mmcv_full-1.4.0-cp38-cp38-manylinux1_x86_64.whl'}))
    _, found = examine('--only', 'libraries', env={'PYTHONPATH': str(site)})
    assert 'It was built for torch 1.10.0; here is torch 1.10.1+cu102' in found['mmcv library']['text']


def test_links_are_a_stopgap_behind_fix(old_stack, fault_record):
    site = old_stack()
    code, found = examine('--only', 'libraries', '--fix', env={'PYTHONPATH': str(site)})
    mmcv, folder = found['mmcv library'], site / 'torch' / 'lib'
    assert mmcv['status'] == 'warning' and 'it loads now' in mmcv['text']
    assert 'a stopgap only: build it for this torch' in mmcv['remedy'] and f'LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH' in mmcv['remedy']
    assert os.readlink(folder / 'libtorch_cuda_cu.so') == 'libtorch_cuda.so'
    env = clean_env(PYTHONPATH=str(site), LD_LIBRARY_PATH=str(folder))
    assert subprocess.run([sys.executable, '-c', 'import torch, mmcv._ext'], env=env, cwd=site).returncode == 0
    # the link alone is not enough: the loader has to look there, in every rank
    env.pop('LD_LIBRARY_PATH')
    assert subprocess.run([sys.executable, '-c', 'import torch, mmcv._ext'], env=env, cwd=site, capture_output=True).returncode == 1
    fault_record('the same, doctor --fix', 'links, kept because it loads; says what ranks need', 'nothing')


def test_links_that_do_not_help_are_removed(old_stack, fault_record):
    site = old_stack(in_torch='int another(void) { return 1; }')
    code, found = examine('--only', 'libraries', '--fix', env={'PYTHONPATH': str(site)})
    mmcv = found['mmcv library']
    assert code == 2 and mmcv['status'] == 'problem' and 'Links do not help' in mmcv['text'] and 'thc_state' in mmcv['text']
    assert os.listdir(site / 'torch' / 'lib') == ['libtorch_cuda.so']
    fault_record('the same, but the torch lacks the functions', 'links tried and removed again', 'nothing')


def test_a_function_that_this_torch_lacks(old_stack, fault_record):
    """Same library name, another version: the names in it differ."""
    site = old_stack(in_torch='int another(void) { return 1; }', needs='torch_cuda')
    _, found = examine('--only', 'libraries', env={'PYTHONPATH': str(site)})
    mmcv = found['mmcv library']
    assert mmcv['status'] == 'problem' and 'thc_state is not in torch 1.10.1+cu102' in mmcv['text']
    assert 'built for another torch' in mmcv['text'] and 'libraries --fix' not in mmcv['remedy']
    assert mmcv['data']['undefined'] == ['thc_state']
    fault_record('a compiled library wants a function of another torch', 'function and torch named; build anew', 'nothing')


def test_libraries_that_are_damaged_missing_or_of_another_python(old_stack):
    site = old_stack()
    library = site / 'mmcv' / f'_ext{SUFFIX}'
    whole = library.read_bytes()
    for content, text in ((whole[:3000], 'cut off or damaged'), (b'', '(0 bytes) is no ELF library')):
        library.write_bytes(content)
        _, found = examine('--only', 'libraries', env={'PYTHONPATH': str(site)})
        assert found['mmcv library']['status'] == 'problem' and text in found['mmcv library']['text']
    library.rename(site / 'mmcv' / '_ext.cpython-38-x86_64-linux-gnu.so')
    _, found = examine('--only', 'libraries', env={'PYTHONPATH': str(site)})
    assert 'built for another Python' in found['mmcv library']['text']


def test_ours_built_for_another_torch_is_named(old_stack):
    """The real library of this project beside another torch."""
    site = old_stack()
    _, found = examine('--only', 'libraries', env={'PYTHONPATH': str(site)})
    ours = found['mmdet3d_ext library']
    if 'holds no _C' in ours['text']:
        pytest.skip('the operators are not built here')
    assert ours['status'] == 'problem'
    assert 'was built for torch 2' in ours['text'] and 'this is torch 1.10.1' in ours['text'] or 'which is not on this machine' in ours['text']


# ---- what a rank sees -------------------------------------------------------------------------------------------------------

@pytest.fixture
def mpi():
    path = shutil.which('mpirun', path=clean_env()['PATH'])
    if path is None:
        pytest.skip('needs mpirun')
    return path


def wrapper(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / 'mpirun').write_text(f'#!/bin/sh\n{text}\n')
    (folder / 'mpirun').chmod(0o755)
    return f'{folder}{os.pathsep}{clean_env()["PATH"]}'


def test_a_launcher_that_drops_the_library_path(tmp_path, mpi, old_stack, fault_record):
    """The shell has what mmcv needs in LD_LIBRARY_PATH; between it and the ranks the variable is lost."""
    site = old_stack(keep=True)
    path = wrapper(tmp_path / 'bin', f'unset LD_LIBRARY_PATH\nexec {mpi} "$@"')
    env = {'PYTHONPATH': str(site), 'LD_LIBRARY_PATH': str(tmp_path / 'build'), 'PATH': path}
    code, found = examine('--only', 'mpi', 'libraries', env=env)
    assert found['mmcv library']['status'] == 'ok'  # in this shell
    environment, libraries = found['rank environment'], found['rank libraries']
    assert code == 2 and environment['status'] == 'problem' and libraries['status'] == 'problem'
    assert f'LD_LIBRARY_PATH: a rank lacks {tmp_path / "build"}' in environment['text']
    assert 'env LD_LIBRARY_PATH="$LD_LIBRARY_PATH" python tools/train.py' in environment['remedy']
    assert 'mmcv library loads in this shell, but not with a rank' in libraries['text'] and 'libtorch_cuda_cu.so' in libraries['text']
    fault_record('LD_LIBRARY_PATH does not reach the ranks', 'what they lack, which library fails there, and how to pass it', 'nothing')


def test_ranks_with_this_shells_environment_are_fine(mpi):
    code, found = examine('--only', 'mpi')
    assert found['mpirun']['status'] == found['rank environment']['status'] == found['rank python']['status'] == 'ok', found


def test_ranks_that_get_another_python(tmp_path, mpi, fault_record):
    base = sys._base_executable
    if Path(base).resolve() == Path(sys.executable) or sys.prefix == sys.base_prefix:
        pytest.skip('needs a virtual environment')
    (tmp_path / 'python').symlink_to(base)
    _, found = examine('--only', 'mpi', env={'PATH': f'{tmp_path}{os.pathsep}{clean_env()["PATH"]}'})
    assert found['rank python']['status'] == 'problem'
    assert f'torchpack dist-run -np N {sys.executable}' in found['rank python']['remedy']
    fault_record('"python" in a rank is another installation', 'both are named; write the full path', 'nothing')


@pytest.mark.parametrize('says, text', [
    ('HYDRA build details:\n    Version:                                 4.0.2', 'is MPICH 4.0.2'),
    ('Intel(R) MPI Library for Linux* OS, Version 2021.5 Build 20211102', 'is Intel MPI 2021.5')])
def test_an_mpi_that_torchpack_cannot_use(tmp_path, says, text, fault_record):
    path = wrapper(tmp_path / 'bin', f"cat <<'END'\n{says}\nEND")
    code, found = examine('--only', 'mpi', env={'PATH': path})
    assert code == 2 and text in found['mpirun']['text'] and 'torchrun' in found['mpirun']['remedy']
    assert found['rank environment']['status'] == 'skipped'
    fault_record('mpirun is not of Open MPI', 'named; torchrun instead', 'nothing')


def test_no_mpirun(tmp_path):
    (tmp_path / 'python').symlink_to(sys.executable)
    code, found = examine('--only', 'mpi', env={'PATH': str(tmp_path)})
    assert code == 1 and 'not on PATH' in found['mpirun']['text'] and 'torchrun --nproc_per_node' in found['mpirun']['remedy']


def test_ranks_that_never_start(tmp_path, fault_record):
    path = wrapper(tmp_path / 'bin', 'case "$1" in --version) echo "mpirun (Open MPI) 4.1.8";; *) sleep 60;; esac')
    code, found = examine('--only', 'mpi', '--timeout', '2', env={'PATH': path})
    assert '0 of 2 ranks started (did not end in time)' in found['rank environment']['text'] and code == 2
    fault_record('mpirun hangs', 'said after the time limit; nothing is left running', 'nothing')


# ---- an edit that changes nothing -----------------------------------------------------------------------------------------------

@pytest.fixture
def light_doctor():
    """The doctor's own modules, in a process of their own import: they must not need the package's start."""
    from mmdet3d_ext.doctor import stack
    return stack


def test_two_installs(tmp_path, light_doctor, monkeypatch, fault_record):
    """The usual cause of "my edit has no effect": another copy comes first."""
    other = tmp_path / 'old'
    (other / 'mmdet3d_ext').mkdir(parents=True)
    (other / 'mmdet3d_ext' / '__init__.py').write_text('__version__ = "0.0.1"\n')
    monkeypatch.setenv('PYTHONPATH', f'{other}{os.pathsep}{REPO}')
    used = {finding.check: finding for finding in light_doctor.check_packages()}['mmdet3d_ext']
    assert used.status == 'problem' and f'{other}/mmdet3d_ext/__init__.py is what runs, not this checkout' in used.text
    assert 'clearing __pycache__ does not help' in used.text
    monkeypatch.setenv('PYTHONPATH', str(other))
    used = {finding.check: finding for finding in light_doctor.check_packages()}['mmdet3d_ext']
    assert used.status == 'problem' and f'A second copy lies in {other}/mmdet3d_ext' in used.text
    assert light_doctor.check_bytecode(REPO / 'mmdet3d_ext').status == 'ok'
    fault_record('two installs: an edit in one changes nothing', 'both places are named, and which one runs', 'nothing')


def what_runs(folder):
    done = subprocess.run([sys.executable, '-c', 'import part.code as c; print(c.VALUE)'], cwd=folder, capture_output=True, text=True,
                          env=clean_env())
    return done.stdout.strip()


@pytest.mark.parametrize('how', ['plain', 'same time and size', 'unchecked hash'])
def test_old_bytecode(tmp_path, light_doctor, how, fault_record):
    package = tmp_path / 'part'
    package.mkdir()
    (package / '__init__.py').write_text('')
    source = package / 'code.py'
    source.write_text('VALUE = 1\n')
    modes = py_compile.PycInvalidationMode
    py_compile.compile(str(source), invalidation_mode=modes.UNCHECKED_HASH if how == 'unchecked hash' else modes.TIMESTAMP)
    assert what_runs(tmp_path) == '1'
    assert light_doctor.check_bytecode(package).status == 'ok'
    before = source.stat()
    source.write_text('VALUE = 2\n' if how != 'plain' else 'VALUE = 2  # edited\n')
    if how == 'same time and size':  # cp -p, rsync -t, a docker layer
        os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    finding = light_doctor.check_bytecode(package)
    if how == 'plain':
        assert what_runs(tmp_path) == '2' and finding.status == 'ok'  # Python notices by itself
        return
    assert what_runs(tmp_path) == '1' and finding.status == 'problem' and str(source) in finding.text
    subprocess.run(finding.remedy.split('   ')[0], shell=True, check=True)
    assert what_runs(tmp_path) == '2' and light_doctor.check_bytecode(package).status == 'ok'
    fault_record(f'bytecode hides an edit ({how})', 'file and reason named; the command given there cures it', 'nothing')


# ---- limits ---------------------------------------------------------------------------------------------------------------------------

LOADER = '''
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.zeros(4 << 20)
for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2): pass
'''


def test_a_small_shared_memory(fault_record):
    small = ['unshare', '-rm', 'sh', '-c', 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', 'sh']
    if shutil.which('unshare') is None or subprocess.run([*small, 'true'], capture_output=True).returncode:
        pytest.skip('needs user namespaces to mount a small /dev/shm')
    done = subprocess.run([*small, sys.executable, '-c', LOADER], capture_output=True, text=True, env=clean_env(), timeout=90)
    assert done.returncode and ('unable to' in done.stderr or 'Bus error' in done.stderr or 'bus error' in done.stderr), done.stderr
    code, found = examine('--only', 'system', prefix=small)
    shm = found['shared memory']
    assert code == 1 and shm['status'] == 'warning' and 'of 8 MiB free' in shm['text'] and 'workers x 2 batches x 4 samples' in shm['text']
    assert '--shm-size=' in shm['remedy'] and 'workers_per_gpu 0 is not needed' in shm['remedy']
    fault_record('/dev/shm of 8 MiB', 'bytes needed against bytes there, and how to enlarge it', 'nothing')


def test_a_shared_memory_that_cannot_be_written(fault_record):
    """A limit on the size of files is felt there, too; torch's message is the seed's "unable to write to file"."""
    code, found = examine('--only', 'system', prefix=['sh', '-c', 'ulimit -f 16; exec "$@"', 'sh'])
    assert code == 2 and 'unable to write to file </torch_...>' in found['shared memory']['text']
    assert 'cannot be written: File too large' in found['shared memory']['text']
    assert found['limit: file size']['status'] == 'problem' and 'ulimit -f unlimited' in found['limit: file size']['remedy']
    fault_record('a limit on file sizes', 'felt in /dev/shm and by checkpoints; the limit is named', 'nothing')


@pytest.mark.parametrize('limit, status', [(256, 'problem'), (1024, 'warning'), (8192, 'ok')])
def test_open_files(limit, status, fault_record):
    code, found = examine('--only', 'system', prefix=['sh', '-c', f'ulimit -n {limit}; exec "$@"', 'sh'])
    assert found['open files']['status'] == status and f'{limit} open files' in found['open files']['text']
    if status == 'problem':
        fault_record('256 open files per process', 'said, with the command that raises it', 'nothing')


def test_a_run_folder_that_cannot_be_written(tmp_path):
    (tmp_path / 'file').write_text('')
    _, found = examine('--only', 'system', '--run-dir', '/proc/runs')
    assert found['run folder']['status'] == 'problem'
    _, found = examine('--only', 'system', '--run-dir', str(tmp_path / 'a' / 'b'))
    assert found['run folder']['status'] in ('ok', 'warning')


# ---- where nothing can be imported ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('torch, text', [
    ('raise ImportError("libcudart.so.10.2: cannot open shared object file: No such file or directory")', 'libcudart.so.10.2'),
    ('import os; os.abort()', 'SIGABRT'), ('import sys; sys.exit(3)', 'exit code 3')])
def test_a_torch_that_cannot_be_imported(tmp_path, torch, text, fault_record):
    for name, content in (('torch', torch), ('mmcv', 'raise ImportError("broken")'), ('numpy', 'raise ImportError("broken")')):
        (tmp_path / name).mkdir()
        (tmp_path / name / '__init__.py').write_text(content)
    code, found = examine('--only', 'stack', 'libraries', 'gpus', 'system', env={'PYTHONPATH': str(tmp_path)})
    assert code == 2 and 'torch' in found and found['open files']['status'] in ('ok', 'warning', 'problem')
    assert found['operators']['status'] == 'skipped' and found['mmdet3d_ext library']['status'] == 'problem'
    fault_record(f'torch cannot be imported ({text})', 'the doctor goes on and says so', 'nothing')


def test_the_doctor_itself_imports_neither_torch_nor_numpy():
    code = ('import sys; sys.path.insert(0, "tools"); import doctor; '
            'print([name for name in ("torch", "numpy", "mmcv", "yaml") if name in sys.modules])')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=REPO, env=clean_env())
    assert done.stdout.strip() == '[]', done.stderr
