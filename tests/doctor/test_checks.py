"""Operators, sums over ranks, drivers, reports: the parts that need no fault of the whole environment."""
import json

import pytest
import torch
from ranks import clean_env

from mmdet3d_ext import doctor
from mmdet3d_ext.doctor import gpus, mpi, probe, report, stack
from mmdet3d_ext.doctor.report import Finding


def test_operators_are_right_on_this_machine():
    devices = ['cpu', *(f'cuda:{i}' for i in range(torch.cuda.device_count()))]
    found = list(gpus.check_operators(devices, 300))
    assert [f.check for f in found] == ['torch operators', 'mmdet3d_ext operators', 'mmcv operators', 'spconv operators']
    assert all(f.status == 'ok' for f in found), [(f.check, f.text) for f in found if f.status != 'ok']




def test_an_operator_that_gives_zeros_or_crashes(monkeypatch):
    """As a kernel that was not built for the GPU, and is not checked after its launch; no GPU here can show it."""
    said = {'torch on cuda:0': [83.0], 'mmdet3d_ext on cuda:0': [0.0, 0.0, 0.0], 'mmcv on cuda:0': 'RuntimeError: no kernel image',
            'running': 'spconv on cuda:0'}
    monkeypatch.setattr(gpus, 'ask', lambda *args, **kwargs: probe.Answer([said], -11, 'Segmentation fault'))
    found = {f.check: f for f in gpus.check_operators(['cuda:0'], 10)}
    assert found['torch operators'].status == 'ok'
    ours = found['mmdet3d_ext operators']
    assert ours.status == 'problem' and 'cuda:0: gives [0.0, 0.0, 0.0], not [5.0, 5.0, 5.0]' in ours.text
    assert 'not built for this GPU' in ours.text
    assert 'no kernel image' in found['mmcv operators'].text
    assert 'crashed (SIGSEGV)' in found['spconv operators'].text


def test_a_sum_over_ranks():
    """The same programs as NCCL's, over gloo."""
    found = gpus.check_sum('gloo', 2, 100)
    assert found.status == 'ok' and found.text == '2 ranks sum to 3', found.text


@pytest.mark.gpu
def test_a_sum_over_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip('needs two GPUs')
    assert gpus.check_sum('nccl', torch.cuda.device_count(), 100).status == 'ok'


def test_a_sum_that_fails(monkeypatch):
    monkeypatch.setattr(gpus, '_SUM', gpus._SUM.replace('rank + 1', 'rank'))
    found = gpus.check_sum('gloo', 2, 100)
    assert found.status == 'problem' and 'rank 0: 1.0' in found.text and 'NCCL_DEBUG=INFO' in found.remedy


def test_everything_can_be_imported_here():
    found = stack.check_imports(300)
    assert found.status == 'ok', found.text


def test_an_import_that_fails_or_crashes(monkeypatch, tmp_path):
    for name, code in (('cv2', 'raise ImportError("libGL.so.1: cannot open shared object file: No such file or directory")'),
                       ('mmcv', 'import os; os.abort()')):
        (tmp_path / f'{name}.py').write_text(code)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    found = stack.check_imports(60)
    assert found.status == 'problem' and 'import cv2: ImportError: libGL.so.1' in found.text and 'headless' in found.remedy
    assert 'crashed (SIGABRT)' in found.data['failed']['mmcv']


@pytest.mark.parametrize('error, remedy', [
    ('AssertionError: MMCV==1.7.2 is used but incompatible. Please install mmcv>=1.5.2, <=1.7.0.', 'import mmdet3d_ext before mmdet3d'),
    ('ImportError: numpy.core.multiarray failed to import', 'numpy<2'), ('ImportError: x.so: undefined symbol: f', '--only libraries'),
    ("ModuleNotFoundError: No module named 'spconv'", 'make install')])
def test_remedies_of_imports(error, remedy):
    assert remedy in stack.remedy_of_import(error)


CARD = [{'name': 'Tesla V100', 'capability': '7.0', 'driver': '535.1'}]


@pytest.mark.parametrize('torch_says, check, status, text', [
    ({'version': '2.7', 'cuda': None, 'gpus': []}, 'driver', 'problem', 'is a CPU build'),
    ({'version': '2.7', 'cuda': '12.6', 'gpus': [], 'archs': []}, 'driver', 'problem', 'torch sees no GPU'),
    ({'version': '2.7', 'cuda': '12.6', 'gpus': [['Tesla V100', 7, 0]], 'archs': ['sm_70', 'sm_80']}, 'torch kernels', 'ok', 'cover the GPUs'),
    ({'version': '2.8', 'cuda': '12.8', 'gpus': [['Tesla V100', 7, 0]], 'archs': ['sm_75', 'sm_80']}, 'torch kernels', 'problem',
     'has no code for Tesla V100 (sm_70)'),
    ({'error': 'broken'}, 'driver', 'skipped', 'torch cannot be asked')])
def test_driver_against_torch(monkeypatch, torch_says, check, status, text):
    monkeypatch.setattr(stack, 'gpus_by_driver', lambda: CARD)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    found = {f.check: f for f in stack.check_driver(torch_says)}[check]
    assert found.status == status and text in found.text


@pytest.mark.parametrize('text, expected', [
    ('mpirun (Open MPI) 4.1.8\n\nReport bugs to ...', ('Open MPI', '4.1.8')), ('mpirun (Open MPI) 5.0.0rc1', ('Open MPI', '5.0.0rc1')),
    ('Open MPI v4.1.8, package: Open MPI conda Distribution', ('Open MPI', '4.1.8')),
    ('MPICH Version:      4.2.1\nMPICH Release date: ...', ('MPICH', '4.2.1')),
    ('HYDRA build details:\n    Version:     3.4.1', ('MPICH', '3.4.1')),
    ('Intel(R) MPI Library 2021.10 for Linux* OS', ('Intel MPI', '2021.10')), ('something', ('', ''))])
def test_implementations_of_mpi(text, expected):
    assert mpi.vendor_of(text) == expected


@pytest.mark.parametrize('said, ended, status, text', [
    ({'version': '4.0.3', 'library': 'Open MPI v4.1.6, package: Debian OpenMPI'}, '', 'ok', 'uses Open MPI 4.1.6, as mpirun'),
    ({'version': '4.0.3', 'library': 'Open MPI v5.0.3, package: conda'}, '', 'warning', 'uses Open MPI 5.0.3, mpirun is Open MPI 4.1.8'),
    ({'version': '4.0.3', 'library': 'MPICH Version:      4.2.1'}, '', 'warning', 'every rank would believe that it is alone'),
    ({'version': '4.0.3'}, 'RuntimeError: cannot load MPI library', 'warning', 'finds no MPI library: RuntimeError: cannot load'),
    ({}, "ModuleNotFoundError: No module named 'mpi4py'", 'warning', 'only torchpack.distributed.init() needs it')])
def test_mpi4py_is_of_the_same_mpi_as_mpirun(monkeypatch, said, ended, status, text):
    monkeypatch.setattr(mpi, 'ask', lambda *args, **kwargs: probe.Answer([said], 1 if ended else 0, ended))
    found = mpi.check_mpi4py(('Open MPI', '4.1.8'))
    assert found.status == status and text in f'{found.text} {found.remedy}'
    assert found.status == 'ok' or '--no-binary mpi4py' in found.remedy


def test_what_mpirun_adds_in_front_is_no_loss():
    shell = {'PATH': '/a:/b', 'LD_LIBRARY_PATH': '/l'}
    assert mpi.compare({'env': {'PATH': '/mpi/bin:/a:/b', 'LD_LIBRARY_PATH': '/mpi/lib:/l'}}, shell).status == 'ok'
    lost = mpi.compare({'env': {'PATH': '/a'}}, shell)
    assert lost.status == 'problem' and 'PATH: a rank lacks /b' in lost.text and 'LD_LIBRARY_PATH: a rank lacks /l' in lost.text


# ---- report ------------------------------------------------------------------------------------------------------------------

def test_the_exit_code_is_the_worst_result():
    ok, skipped = Finding('a', 'ok', 'fine'), Finding('b', 'skipped', 'no GPU')
    warning, problem = Finding('c', 'warning', 'tight', 'do'), Finding('d', 'problem', 'broken', 'do this')
    assert report.exit_code([]) == report.exit_code([ok, skipped]) == 0
    assert report.exit_code([ok, warning]) == 1 and report.exit_code([problem, warning, ok]) == 2
    found = json.loads(report.as_json([problem, ok]))
    assert found['worst'] == 2 and found['counts'] == {'ok': 1, 'skipped': 0, 'warning': 0, 'problem': 1}
    assert found['findings'][0]['remedy'] == 'do this'
    assert report.summary([problem, ok]) == '1 problem(s), 0 warning(s), 1 ok, 0 skipped'
    assert 'do this' in '\n'.join(report.as_lines(problem)) and all(len(line) <= 145 for line in report.as_lines(Finding(
        'long', 'problem', 'word ' * 200, 'other ' * 100)))


def test_a_problem_without_a_remedy_is_a_fault_of_the_check():
    with pytest.raises(ValueError, match='needs a remedy'):
        Finding('a', 'problem', 'broken')
    with pytest.raises(ValueError, match='unknown status'):
        Finding('a', 'bad', 'broken')


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def broken(options):
        yield Finding('first', 'ok', 'fine')
        raise KeyError('x')

    monkeypatch.setitem(doctor.GROUPS, 'stack', broken)
    first, second = doctor.examine(doctor.Options(), ['stack'])
    assert first.group == 'stack' and second.status == 'problem' and "KeyError: 'x'" in second.text


# ---- probes --------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('code, ended, said', [
    ('say(a=1)\nsay(b=2)', 'ended with exit code 0', {'a': 1, 'b': 2}), ('say(a=1)\nos.abort()', 'crashed (SIGABRT)', {'a': 1}),
    ('say(a=1)\nimport time\ntime.sleep(60)', 'did not end in time', {'a': 1}), ('import sys\nsys.exit(7)', 'ended with exit code 7', {})])
def test_probes(code, ended, said):
    answer = probe.ask(code, timeout=3, env=clean_env())
    assert answer.how_it_ended() == ended and answer.merged() == said


def test_children_of_a_probe_end_with_it(tmp_path):
    import subprocess
    import time
    code, _ = probe.call(['sh', '-c', f'(sleep 30; touch {tmp_path}/late) & echo $! > {tmp_path}/pid; exit 3'], 20)
    assert code == 3
    time.sleep(0.3)
    state = subprocess.run(['ps', '-o', 'stat=', '-p', (tmp_path / 'pid').read_text().strip()], capture_output=True, text=True).stdout
    assert state.strip()[:1] in ('', 'Z')


def test_a_command_that_is_not_there():
    assert probe.call(['/no/such/program'], 5)[0] == 127
