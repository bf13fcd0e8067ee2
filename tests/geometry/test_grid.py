"""Cell counts by rounding, refusal of steps that do not divide, and the axis specifications."""
import numpy as np
import pytest

from mmdet3d_ext.geometry import Axis, BevGrid, GridError, cell_count


@pytest.mark.parametrize('lo, hi, step, cells', [
    (-50, 50, 0.5, 200), (-50, 50, 0.25, 400), (-50, 50, 1 / 6, 600), (-50, 50, 0.16666667, 600), (-50, 50, 0.125, 800),
    (-38.4, 38.4, 0.8, 96), (-54, 54, 0.3, 360), (-51.2, 51.2, 0.1, 1024), (-30.0, 70.0, 0.1, 1000), (-10, 10, 20.0, 1),
    (1.0, 60.0, 0.5, 118)])
def test_counts_are_rounded(lo, hi, step, cells):
    assert cell_count(lo, hi, step) == cells


def test_counts_agree_with_exact_arithmetic_for_many_grids():
    for cells in range(1, 2000, 7):
        for lo, hi in ((-50.0, 50.0), (-51.2, 51.2), (-38.4, 40.0), (0.1, 70.3)):
            assert cell_count(lo, hi, (hi - lo) / cells) == cells


@pytest.mark.parametrize('step, meant', [(0.167, 600), (0.3333, 300), (0.1667, 600), (0.7, 143)])
def test_a_step_that_does_not_divide_is_refused_with_the_count_that_is_meant(step, meant):
    with pytest.raises(GridError, match=rf'xbound.*{step}.*cells: {meant}'):
        cell_count(-50, 50, step, 'xbound')


@pytest.mark.parametrize('lo, hi, step, word', [
    (0, 0, 1, 'greater'), (1, 0, 1, 'greater'), (0, 1, 0, 'positive'), (0, 1, -1, 'positive'), (0, 1, float('nan'), 'finite'),
    (float('inf'), 1, 1, 'finite'), ('0', 1, 1, 'finite'), (0, 1, 3, 'divide'), (0, True, 1, 'finite')])
def test_malformed_axes_are_refused(lo, hi, step, word):
    with pytest.raises(GridError, match=word):
        cell_count(lo, hi, step)


def test_axis_forms_are_equal():
    forms = [[-50, 50, 0.5], {'range': [-50, 50], 'cells': 200}, {'range': [-50, 50], 'step': 0.5}, Axis(-50.0, 50.0, 200)]
    axes = [Axis.parse(form) for form in forms]
    assert all(axis == axes[0] for axis in axes)
    assert axes[0].step == 0.5 and axes[0].length == 100 and axes[0].as_bound() == (-50, 50, 0.5)


@pytest.mark.parametrize('spec', [[0, 1], [0, 1, 0.5, 2], {'range': [0, 1]}, {'range': [0, 1], 'cells': 2, 'step': 0.5},
                                  {'cells': 3}, {'range': [0, 1], 'cell': 2}, {'range': [0, 1], 'cells': 2.5},
                                  {'range': [0, 1], 'cells': 0}, {'range': [1, 0], 'cells': 2}])
def test_malformed_specifications_are_refused(spec):
    with pytest.raises(GridError):
        Axis.parse(spec, 'ybound')


def test_bev_grid():
    grid = BevGrid.parse([-30, 70, 0.5], [-40, 40, 0.8], 'labels')
    assert grid.shape == (200, 100)
    np.testing.assert_allclose(grid.step, (0.5, 0.8))
    assert grid.extent == (-30, -40, 70, 40)
    half = grid.downsample(2)
    assert half.shape == (100, 50) and half.same_scope(grid)
    with pytest.raises(GridError, match='divided by 3'):
        grid.downsample(3)
    assert not grid.same_scope(BevGrid.parse([-30, 70, 0.5], [-41, 41, 0.5]))
    with pytest.raises(GridError, match=r'labels \(y\)'):
        BevGrid.parse([-50, 50, 0.5], [-50, 50, 0.167], 'labels')
