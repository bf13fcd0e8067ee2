"""Resampling weights against loops over cells: interpolation to finer cells, averages to coarser ones."""
import pytest
import torch
import torch.nn.functional as F

from mmdet3d_ext.geometry import Axis
from mmdet3d_ext.geometry.resample import apply_weights, bilinear_weights, cell_weights


def slow(source: Axis, target: Axis) -> torch.Tensor:
    """The linear curve through the source's centres, read at the target's centres or (coarser) averaged by sampling."""
    weights = torch.zeros(target.cells, source.cells, dtype=torch.float64)
    samples = 400 if target.step > source.step * (1 + 1e-6) else 1
    for i in range(target.cells):
        for k in range(samples):
            position = target.lo + (i + (k + 0.5) / samples) * target.step
            if not source.lo <= position <= source.hi:
                continue
            centres = [source.lo + (j + 0.5) * source.step for j in range(source.cells)]
            left = max([j for j in range(source.cells) if centres[j] <= position], default=None)
            if left is None or left == source.cells - 1:
                weights[i, left or 0] += 1 / samples
            else:
                share = (position - centres[left]) / source.step
                weights[i, left] += (1 - share) / samples
                weights[i, left + 1] += share / samples
    return weights


@pytest.mark.parametrize('source, target', [
    (Axis(-54, 54, 18), Axis(-54, 54, 27)), (Axis(-54, 54, 18), Axis(-54, 54, 36)), (Axis(-54, 54, 27), Axis(-54, 54, 18)),
    (Axis(-54, 54, 36), Axis(-54, 54, 18)), (Axis(-54, 54, 18), Axis(-54, 54, 18)), (Axis(0, 7, 7), Axis(0, 7, 1)),
    (Axis(0, 7, 1), Axis(0, 7, 7)), (Axis(-5, 5, 10), Axis(-8, 3, 22)), (Axis(-5, 5, 20), Axis(-8, 3, 11)),
])
def test_equals_a_loop_and_keeps_constants(source, target):
    weights = cell_weights(source, target)
    torch.testing.assert_close(weights, slow(source, target), rtol=0, atol=2e-3)
    edges = [target.lo + i * target.step for i in range(target.cells + 1)]
    inside = torch.tensor([lo >= source.lo - 1e-9 and hi <= source.hi + 1e-9 for lo, hi in zip(edges[:-1], edges[1:])])
    assert inside.any()
    torch.testing.assert_close(weights.sum(1)[inside], torch.ones(int(inside.sum()), dtype=torch.float64))
    assert (weights >= 0).all() and (weights.sum(1) <= 1 + 1e-9).all()


def test_equal_cells_are_the_identity_and_whole_ratios_are_torchs():
    axis = Axis(-54, 54, 18)
    assert torch.equal(cell_weights(axis, axis), torch.eye(18, dtype=torch.float64))
    x = torch.randn(2, 3, 12, 8, dtype=torch.float64)
    double = [cell_weights(Axis(0, n, n), Axis(0, n, 2 * n)) for n in (12, 8)]
    torch.testing.assert_close(apply_weights(x, *double), F.interpolate(x, scale_factor=2, mode='bilinear', align_corners=False))


def test_coarser_cells_see_every_cell_and_keep_places():
    source, target = Axis(-54, 54, 27), Axis(-54, 54, 18)
    weights = cell_weights(source, target)
    assert (weights.sum(0) > 0.5).all(), 'no source cell is skipped'
    ramp = torch.tensor([source.lo + (j + 0.5) * source.step for j in range(27)], dtype=torch.float64)
    places = torch.tensor([target.lo + (i + 0.5) * target.step for i in range(18)], dtype=torch.float64)
    torch.testing.assert_close((weights @ ramp)[1:-1], places[1:-1])
    narrow = cell_weights(Axis(0, 1, 8), Axis(0, 1, 4))
    torch.testing.assert_close(narrow[1], torch.tensor([0, 1, 7, 7, 1, 0, 0, 0], dtype=torch.float64) / 16)


def test_bilinear_weights_have_zeros_outside():
    source, target = Axis(-4, 4, 8), Axis(-4, 4, 16)
    bilinear, cells = bilinear_weights(source, 8, target), cell_weights(source, target)
    torch.testing.assert_close(bilinear[1:-1], cells[1:-1], rtol=0, atol=1e-5)
    assert bilinear[0].sum() == pytest.approx(0.75, abs=1e-5) and cells[0].sum() == 1


def test_the_first_axis_is_x():
    x = torch.zeros(1, 1, 4, 6)
    x[0, 0, 3, 0] = 1
    out = apply_weights(x, torch.eye(4), torch.eye(6).flip(0))
    assert out[0, 0, 3, 5] == 1 and out.sum() == 1 and out.is_contiguous()


@pytest.mark.parametrize('batch, channels', [(1, 5), (3, 7), (2, 1)])
def test_the_order_in_memory_stays(batch, channels):
    weights = torch.rand(9, 4, dtype=torch.float64), torch.rand(8, 6, dtype=torch.float64)
    x = torch.rand(batch, channels, 4, 6, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    want = torch.einsum('ax,by,ncxy->ncab', *weights, leaf)
    (want_grad,) = torch.autograd.grad(want.square().sum(), leaf)
    others = x.transpose(2, 3).contiguous().transpose(2, 3), x.repeat(1, 2, 1, 1)[:, :channels]
    last = x.contiguous(memory_format=torch.channels_last)
    for given in (x, last, *others):
        given = given.detach().requires_grad_()
        out = apply_weights(given, *weights)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), given)[0], want_grad)
    assert apply_weights(last, *weights).is_contiguous(memory_format=torch.channels_last)
    assert apply_weights(x, *weights).is_contiguous()
    for none in (x[:0], last[:0]):
        assert apply_weights(none, *weights).shape == (0, channels, 9, 8)
