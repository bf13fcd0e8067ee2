"""Batch voxelisation: golden fixtures, empty clouds, precision and configuration errors."""
import numpy as np
import pytest
import torch
from testing import Golden

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.models.voxel import DynamicVoxelizer, build_voxelizer

RANGE, SIZE = [-43.2, -33.6, -5, 43.2, 33.6, 3], [0.6, 0.6, 0.2]
HARD = {'max_num_points': 3, 'point_cloud_range': RANGE, 'voxel_size': SIZE, 'max_voxels': [700, 800]}


@pytest.mark.parametrize('mode', ['train', 'eval'])
def test_batch_of_clouds_equals_the_fixture(mode):
    golden = Golden('voxelize_sparse_encoder.npz')
    voxelizer = getattr(build_voxelizer(HARD, reduce=False), mode)()
    clouds = [torch.from_numpy(golden[f'points{i}']) for i in range(2)]
    before = [points.clone() for points in clouds]
    slots, coords, sizes = voxelizer(clouds)
    for i in range(2):
        of_sample = coords[:, 0] == i
        golden.check(f'vox_{mode}{i}_coords', coords[of_sample, 1:])
        golden.check(f'vox_{mode}{i}_counts', sizes[of_sample])
        golden.check(f'vox_{mode}{i}_points', slots[of_sample])
        assert torch.equal(clouds[i], before[i])


def test_reduction_is_the_mean_of_the_kept_points():
    golden = Golden('voxelize_sparse_encoder.npz')
    clouds = [torch.from_numpy(golden[f'points{i}']) for i in range(2)]
    features, coords, _ = build_voxelizer(HARD).eval()(clouds)
    golden.check('enc_features', features)
    golden.check('enc_coords', coords)


def cloud(*rows):
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 5)


@pytest.mark.parametrize('cfg', [HARD, {'point_cloud_range': RANGE, 'voxel_size': SIZE}])
def test_empty_clouds_keep_their_place_in_the_batch(cfg):
    voxelizer = build_voxelizer(cfg)
    one = cloud([0.1, 0.1, 0.1, 7, 0])
    features, coords, sizes = voxelizer([cloud(), one, cloud()])
    assert coords.tolist() == [[1, 72, 56, 25]] and features.tolist() == [one[0].tolist()] and sizes.tolist() == [1]
    assert coords.dtype == torch.int32
    features, coords, sizes = voxelizer([cloud(), cloud()])
    assert features.shape == (0, 5) and coords.shape == (0, 4) and sizes.shape == (0, )


def test_points_outside_and_not_a_number_are_left_out():
    nan = float('nan')
    points = cloud([-43.2, 0, 0, 1, 0], [43.2, 0, 0, 2, 0], [-43.3, 0, 0, 3, 0], [nan, 0, 0, 4, 0], [0, 0, nan, 5, 0])
    features, coords, _ = build_voxelizer(HARD)([points])
    assert features[:, 3].tolist() == [1.0] and coords[0, 1] == 0


def test_dynamic_voxels_average_every_point_of_a_cell():
    rng = np.random.default_rng(0)
    points = torch.from_numpy(rng.uniform(-1.5, 1.5, (200, 5)).astype(np.float32))
    features, coords, counts = build_voxelizer({'point_cloud_range': RANGE, 'voxel_size': SIZE, 'max_num_points': -1})([points])
    expected = {}
    for p in points.numpy():
        key = tuple(np.floor((p[:3] - np.float32(RANGE[:3])) / np.float32(SIZE)).astype(int))
        expected.setdefault(key, []).append(p)
    got = {tuple(c[1:].tolist()): (f, n) for c, f, n in zip(coords, features, counts, strict=True)}
    assert set(got) == set(expected)
    for key, members in expected.items():
        assert got[key][1] == len(members)
        np.testing.assert_allclose(got[key][0], np.mean(members, 0), rtol=1e-5, atol=1e-6)
    assert isinstance(build_voxelizer({'point_cloud_range': RANGE, 'voxel_size': SIZE}), DynamicVoxelizer)


def test_dynamic_voxels_of_a_batch_are_those_of_its_samples():
    """One call for all samples, in their order; points that lie outside in one sample shift no other."""
    generator = torch.Generator().manual_seed(0)
    clouds = [torch.randn(n, 5, generator=generator) * 20 for n in (300, 0, 1, 500)]
    voxelizer = DynamicVoxelizer(RANGE, SIZE)
    features, coords, counts = voxelizer(clouds)
    parts = [voxelizer([points]) for points in clouds]
    assert torch.equal(features, torch.cat([part[0] for part in parts]))
    assert torch.equal(coords[:, 1:], torch.cat([part[1][:, 1:] for part in parts]))
    assert coords[:, 0].tolist() == [index for index, part in enumerate(parts) for _ in part[0]]
    assert torch.equal(counts, torch.cat([part[2] for part in parts])) and coords.dtype == torch.int32


def test_cells_do_not_depend_on_autocast():
    points = cloud(*[[40.0 + 0.01 * i, 20 + 0.01 * i, 0, 0, 0] for i in range(300)])
    voxelizer = build_voxelizer(HARD)
    plain = voxelizer([points])
    with torch.autocast('cpu', dtype=torch.bfloat16):
        mixed = voxelizer([points])
    for a, b in zip(plain, mixed, strict=True):
        assert torch.equal(a, b)


def test_half_precision_points_are_refused():
    with pytest.raises(ValueError, match='points of sample 0 are torch.float16'):
        build_voxelizer(HARD)([cloud([1, 1, 1, 1, 1]).half()])


def test_configuration_errors_name_the_key():
    with pytest.raises(ValueError, match="lidar.voxelize: the key 'voxel_size' is missing"):
        build_voxelizer({'point_cloud_range': RANGE, 'max_num_points': 3}, name='lidar.voxelize')
    with pytest.raises(ValueError, match="unknown key 'max_voxel'"):
        build_voxelizer({**HARD, 'max_voxel': 3})
    with pytest.raises(ValueError, match=r'voxelize.voxel_size \(x\): a step of 0.7 m does not divide'):
        build_voxelizer({**HARD, 'voxel_size': [0.7, 0.6, 0.2]})
    with pytest.raises(ValueError, match=r'max_voxels must be one number or \(training, evaluation\)'):
        build_voxelizer({**HARD, 'max_voxels': [1, 2, 3]})
    with pytest.raises(ValueError, match=r'points of sample 1 must be \(P, >= 3\)'):
        build_voxelizer(HARD)([cloud(), torch.zeros(4)])
