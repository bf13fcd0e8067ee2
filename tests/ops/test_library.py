"""A library that is missing, foreign or built for another torch says so and how to rebuild."""

import importlib.util

import pytest
import torch
from testing import REPO

from mmdet3d_ext import ops
from mmdet3d_ext.ops import _library


def record(path, torch_version='2.7.1+cu126', cuda='', archs=''):
    path.write_bytes(
        b'\x7fELF junk mmdet3d_ext-build{torch=%s;cuda=%s;archs=%s}\0 more'
        % (torch_version.encode(), cuda.encode(), archs.encode())
    )
    return path


def test_the_built_library_records_this_torch():
    info = ops.build_info()
    assert list(info) == ['torch', 'cuda', 'archs']
    assert info['torch'] == torch.__version__
    assert info['cuda'] in ('', torch.version.cuda)
    assert bool(info['cuda']) == bool(info['archs'])
    assert f'torch={info["torch"]};' in torch.ops.mmdet3d_ext.build_info()


def test_the_built_library_shares_the_cxx_runtime():
    """With libstdc++ inside the library, the first error message with a number in it would crash (setup.py names the shared one)."""
    assert b'\0libstdc++.so.6\0' in _library.library_path().read_bytes()
    with pytest.raises(RuntimeError, match=r'got \[3, 2\]'):
        torch.ops.mmdet3d_ext.voxel_coords(torch.zeros(3, 2), [0.0] * 3, [1.0] * 3, [2] * 3)


def test_missing(tmp_path):
    with pytest.raises(ops.OpsUnavailableError, match=r'missing: .*_C\.so does not exist.*pip install --no-build-isolation'):
        _library.check_build(tmp_path / '_C.so', '2.7.1', None)


def test_foreign_and_empty_files(tmp_path):
    path = tmp_path / '_C.so'
    for content in (b'', b'\x7fELF something else'):
        path.write_bytes(content)
        with pytest.raises(ops.OpsUnavailableError, match='no build record'):
            _library.check_build(path, '2.7.1', None)


def test_other_torch(tmp_path):
    path = record(tmp_path / '_C.so')
    assert _library.check_build(path, '2.7.0', None)['torch'] == '2.7.1+cu126'
    with pytest.raises(ops.OpsUnavailableError, match=r'built for torch 2\.7\.1\+cu126, this is torch 2\.11\.0.*pip install'):
        _library.check_build(path, '2.11.0+cu130', '13.0')


def test_other_cuda(tmp_path):
    path = record(tmp_path / '_C.so', cuda='12.6', archs='9.0')
    assert _library.check_build(path, '2.7.1', '12.8')['archs'] == '9.0'
    with pytest.raises(ops.OpsUnavailableError, match=r'built for CUDA 12\.6, this torch has CUDA none'):
        _library.check_build(path, '2.7.1', None)


def test_use_without_a_library_says_how_to_build(monkeypatch):
    monkeypatch.setattr(_library, '_failure', ops.OpsUnavailableError(f'gone. {_library.REBUILD}'))
    with pytest.raises(ops.OpsUnavailableError, match='pip install'):
        ops.dynamic_voxelize(torch.zeros(1, 3), [1, 1, 1], [0, 0, 0, 1, 1, 1])


def test_package_imports_without_a_library(monkeypatch):
    """The operators' modules can be imported; only their use fails."""
    monkeypatch.setattr(_library, '_failure', ops.OpsUnavailableError('gone'))
    for name in ('voxelize', 'point_to_voxel', 'lift_splat', 'group_norm'):
        spec = importlib.util.spec_from_file_location(
            f'mmdet3d_ext.ops.{name}_again', REPO / 'mmdet3d_ext' / 'ops' / f'{name}.py'
        )
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.gpu
def test_cpu_build_given_a_cuda_tensor(monkeypatch):
    monkeypatch.setattr(_library, '_cuda_kernels', False)
    with pytest.raises(ops.OpsUnavailableError, match='CPU kernels only, and a tensor on cuda:0'):
        ops.dynamic_voxelize(torch.zeros(1, 3, device='cuda'), [1, 1, 1], [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ('archs', 'capability', 'answer'),
    [
        ('8.0', (9, 0), False),
        ('8.0', (8, 0), True),
        ('8.0', (8, 9), True),
        ('8.6', (8, 0), False),
        ('8.0+PTX', (9, 0), True),
        ('9.0+PTX', (8, 9), False),
        ('8.6+PTX', (8, 0), False),
        ('7.0 7.5 8.0 8.6 8.9 9.0+PTX', (7, 0), True),
        ('7.0 7.5 8.0 8.6 8.9 9.0+PTX', (12, 0), True),
        ('7.5;8.0', (6, 1), False),
        ('9.0a', (9, 0), True),
        ('9.0a', (10, 0), False),
        ('10.0', (10, 3), True),
        ('10.0', (9, 0), False),
        ('Hopper', (8, 0), True),
    ],
)
def test_what_a_list_of_architectures_covers(archs, capability, answer):
    assert _library.covers(archs, capability) is answer


def test_a_gpu_that_the_build_does_not_cover(monkeypatch):
    monkeypatch.setattr(_library, '_covered', set())
    monkeypatch.setattr(_library, 'build_info', lambda: {'torch': torch.__version__, 'cuda': '13.0', 'archs': '8.0'})
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index: (9, index))
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda index: 'NVIDIA H200')
    for _ in range(2):  # an error every time, not the first time only
        with pytest.raises(
            ops.OpsUnavailableError,
            match=r'architectures 8\.0 .* no code for cuda:0 \(NVIDIA H200, compute capability 9\.0\).*TORCH_CUDA_ARCH_LIST=9\.0.*pip install',
        ):
            _library._require_covered(0)
    monkeypatch.setattr(_library, 'build_info', lambda: {'torch': torch.__version__, 'cuda': '13.0', 'archs': '8.0+PTX'})
    _library._require_covered(0)


@pytest.mark.gpu
def test_a_first_call_on_a_gpu_that_the_build_does_not_cover(monkeypatch):
    monkeypatch.setattr(_library, '_covered', set())
    monkeypatch.setattr(_library, 'build_info', lambda: {'torch': torch.__version__, 'cuda': '13.0', 'archs': '5.0'})
    with pytest.raises(ops.OpsUnavailableError, match='5.0 and holds no code for cuda:0'):
        ops.dynamic_voxelize(torch.zeros(1, 3, device='cuda'), [1, 1, 1], [0, 0, 0, 1, 1, 1])


@pytest.mark.gpu
def test_errors_of_the_cuda_kernels_reach_python():
    with pytest.raises(RuntimeError, match=r"voxel_coords: 'points' must be \(P, F\).*got \[3, 2\]"):
        torch.ops.mmdet3d_ext.voxel_coords(torch.zeros(3, 2, device='cuda'), [0.0] * 3, [1.0] * 3, [2] * 3)
    with pytest.raises(RuntimeError, match="'context'.*got Half"):
        plan = torch.ops.mmdet3d_ext.splat_plan(torch.zeros(1, 1, 2, 2, 2, 3, device='cuda'), [0.0] * 3, [1.0] * 3, [2] * 3, False)
        depth = torch.zeros(1, 1, 2, 2, 2, device='cuda', dtype=torch.float16)
        torch.ops.mmdet3d_ext.lift_splat(depth, torch.zeros(1, 1, 3, 2, 2, device='cuda'), *plan, [2, 2, 2])
