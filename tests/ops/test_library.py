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
    assert info['torch'] == torch.__version__
    assert info['cuda'] in ('', torch.version.cuda)
    assert bool(info['cuda']) == bool(info['archs'])
    assert f'torch={info["torch"]};' in torch.ops.mmdet3d_ext.build_info()


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
    for name in ('voxelize', 'point_to_voxel', 'lift_splat'):
        spec = importlib.util.spec_from_file_location(
            f'mmdet3d_ext.ops.{name}_again', REPO / 'mmdet3d_ext' / 'ops' / f'{name}.py'
        )
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.gpu
def test_cpu_build_given_a_cuda_tensor(monkeypatch):
    monkeypatch.setattr(_library, '_cuda_kernels', False)
    with pytest.raises(ops.OpsUnavailableError, match='CPU kernels only, and a tensor on cuda:0'):
        ops.dynamic_voxelize(torch.zeros(1, 3, device='cuda'), [1, 1, 1], [0, 0, 0, 1, 1, 1])
