"""Occupancy tables and what is read off them."""
import importlib.util

import numpy as np
import pytest
from testing import REPO, shared_dir

from mmdet3d_ext.engine.memory.sparsity import GROWTH, GROWTH_Z, PILLARS, VOXELS, interpolate, occupied, sites_after

spec = importlib.util.spec_from_file_location('cloud_occupancy', REPO / 'benchmarks' / 'cloud_occupancy.py')
counting = importlib.util.module_from_spec(spec)
spec.loader.exec_module(counting)


def test_interpolation():
    table = {1.0: 100, 4.0: 25}
    assert interpolate(table, 0.1) == 100 and interpolate(table, 9) == 25
    assert interpolate(table, 2.0) == pytest.approx(50)
    assert interpolate(table, 4.0) == pytest.approx(25)


@pytest.mark.parametrize('table', [VOXELS, PILLARS, *GROWTH, GROWTH_Z])
def test_coarser_cells_are_fewer(table):
    values = [table[edge] for edge in sorted(table)]
    assert values == sorted(values, reverse=True)


def test_limits_and_pillars():
    assert occupied((0.075, 0.075, 0.2), 120_000) == 120_000
    assert occupied((0.075, 0.075, 0.2), None) == occupied((0.075, 0.075, 0.2), -1) == VOXELS[0.075]
    assert occupied((0.2, 0.2, 8.0), 60_000) == PILLARS[0.2]
    assert PILLARS[0.2] < occupied((0.15, 0.25, 8.0), None) < PILLARS[0.15]


def test_levels():
    assert sites_after(1000, (2, 2, 2), 0.075, 0) == 1257
    assert sites_after(1000, (2, 2, 2), 0.075, 2) == sites_after(1000, (2, 2, 2), 0.075, 5) == 308
    assert sites_after(1000, (1, 1, 2), 0.075, 3) == 774
    assert sites_after(1, (2, 2, 2), 0.2, 2) == 1


def test_counting_against_a_dense_convolution():
    """Where a dense kernel of ones gives more than zero, the sparse convolution has a site."""
    torch = pytest.importorskip('torch')
    rng = np.random.default_rng(0)
    shape = [9, 8, 7]
    sites = np.unique(rng.integers(0, shape, (12, 3)), axis=0)
    dense = torch.zeros(1, 1, *shape)
    dense[0, 0, sites[:, 0], sites[:, 1], sites[:, 2]] = 1
    for kernel, stride, padding in (((3, 3, 3), (2, 2, 2), (1, 1, 0)), ((1, 1, 3), (1, 1, 2), (0, 0, 0))):
        found, out_shape = counting.convolve(sites, kernel, stride, padding, shape)
        expected = torch.nn.functional.conv3d(dense, torch.ones(1, 1, *kernel), stride=stride, padding=padding)[0, 0]
        assert list(expected.shape) == list(out_shape)
        assert {tuple(s) for s in found} == {tuple(s) for s in expected.nonzero().tolist()}


def test_tables_hold_for_the_real_cloud():
    shared_dir('data', 'nuscenes_keyframe')
    from inputs import keyframe_cloud
    points = keyframe_cloud('cpu').numpy()
    assert len(counting.cells(points, (0.2, 0.2, 0.2))) == VOXELS[0.2]
    assert len(counting.cells(points, (0.4, 0.4, 8.0))) == PILLARS[0.4]
