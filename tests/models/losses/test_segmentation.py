"""Segmentation losses against slow float64 references written cell by cell from the formulas, and at the numeric edges."""
import math

import pytest
import torch
from testing import Golden, rand, randn

from mmdet3d_ext.models.losses.segmentation import cross_entropy_loss, focal_dice_loss, resample_targets


def slow_losses(logits, targets, alpha, gamma, smooth):
    """Focal and dice per class with Python floats."""
    batch, classes, nx, ny = logits.shape
    focal, dice = [], []
    for c in range(classes):
        total, fractions = 0.0, 0.0
        for b in range(batch):
            overlap = p_sum = t_sum = 0.0
            for i in range(nx):
                for j in range(ny):
                    x, t = float(logits[b, c, i, j]), float(targets[b, c, i, j])
                    p = 1 / (1 + math.exp(-x))
                    entropy = -(t * math.log(p) + (1 - t) * math.log(1 - p))
                    right = p * t + (1 - p) * (1 - t)
                    balance = 1.0 if alpha is None else alpha * t + (1 - alpha) * (1 - t)
                    total += balance * (1 - right) ** gamma * entropy
                    overlap, p_sum, t_sum = overlap + p * t, p_sum + p, t_sum + t
            fractions += 1 - (2 * overlap + smooth) / (p_sum + t_sum + smooth)
        focal.append(total / (batch * nx * ny))
        dice.append(fractions / batch)
    return torch.tensor(focal, dtype=torch.float64), torch.tensor(dice, dtype=torch.float64)


@pytest.mark.parametrize('alpha, gamma, smooth', [(None, 2.0, 1.0), (0.25, 2.0, 1.0), (0.9, 0.5, 1e-3), (0.25, 0.0,
                                                                                                         5.0),
                                                                                                         (None, 3.7, 1.0)])
@pytest.mark.parametrize('soft', [False, True])
def test_values_equal_the_slow_reference(alpha, gamma, smooth, soft):
    logits = 3 * randn(1, (2, 3, 5, 4))
    targets = rand(2, (2, 3, 5, 4))
    targets = targets if soft else (targets < 0.3).float()
    focal, dice = slow_losses(logits.double(), targets.double(), alpha, gamma, smooth)
    exact = focal_dice_loss(logits.double(), targets.double(), alpha, gamma, smooth)
    torch.testing.assert_close(exact.focal, focal, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(exact.dice, dice, rtol=1e-12, atol=1e-14)
    single = focal_dice_loss(logits, targets, alpha, gamma, smooth)
    torch.testing.assert_close(single.focal, focal.float(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(single.dice, dice.float(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(single.dice_score, 1 - single.dice)
    assert not single.dice_score.requires_grad


@pytest.mark.parametrize('alpha, gamma', [(None, 2.0), (0.25, 1.0), (0.7, 0.5), (0.25, 0.0)])
@pytest.mark.parametrize('soft', [False, True])
def test_gradients(alpha, gamma, soft):
    logits = (2 * randn(3, (2, 2, 3, 4))).double().requires_grad_()
    targets = rand(4, (2, 2, 3, 4)).double()
    targets = targets if soft else (targets < 0.4).double()
    weights = torch.tensor([0.7, 1.9], dtype=torch.float64)

    def total(x):
        loss = focal_dice_loss(x, targets, alpha, gamma, 0.5)
        return (loss.focal * weights).sum() + (loss.dice * weights.flip(0)).sum()

    assert torch.autograd.gradcheck(total, (logits,))
    assert torch.autograd.gradcheck(lambda x: focal_dice_loss(x, targets, alpha, gamma).focal, (logits,))
    assert torch.autograd.gradcheck(lambda x: focal_dice_loss(x, targets, alpha, gamma).dice, (logits,))


def test_reference_fixture():
    golden = Golden('bev_grid_and_segm_head.npz')
    logits, targets = torch.from_numpy(golden['loss_logits']), torch.from_numpy(golden['loss_targets'])
    golden.check('loss_focal', focal_dice_loss(logits, targets).focal)
    golden.check('loss_xent', cross_entropy_loss(logits, targets))


@pytest.mark.parametrize('dtype', [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64])
def test_targets_of_any_type(dtype):
    logits = randn(5, (1, 2, 6, 7))
    mask = rand(6, (1, 2, 6, 7)) < 0.3
    expected, got = focal_dice_loss(logits, mask.float(), 0.25), focal_dice_loss(logits, mask.to(dtype), 0.25)
    assert torch.equal(expected.focal, got.focal) and torch.equal(expected.dice, got.dice)


@pytest.mark.parametrize('value', [0.0, 1.0])
@pytest.mark.parametrize('scale', [0.0, 1.0, 88.0, 1e4, 3e38])
@pytest.mark.parametrize('gamma', [0.0, 0.5, 2.0])
def test_one_sided_classes_and_huge_logits_stay_finite(value, scale, gamma):
    logits = (randn(7, (2, 2, 4, 5)).sign() * scale).requires_grad_()
    loss = focal_dice_loss(logits, torch.full((2, 2, 4, 5), value), 0.25, gamma)
    if scale < 1e38:  # a sum of such cross entropies is no float32 number; the gradient still is
        assert loss.focal.isfinite().all()
    assert loss.dice.isfinite().all()
    grad, = torch.autograd.grad(loss.focal.sum() + loss.dice.sum(), logits)
    assert grad.isfinite().all()


def test_confident_right_answers_cost_nothing_and_wrong_ones_their_logit():
    targets = torch.tensor([[[[0.0, 1.0]]]])
    right = focal_dice_loss(torch.tensor([[[[-200.0, 200.0]]]]), targets)
    assert right.focal.item() == 0 and right.dice.item() == pytest.approx(0, abs=1e-7)
    wrong = focal_dice_loss(torch.tensor([[[[200.0, -200.0]]]]), targets)
    assert wrong.focal.item() == pytest.approx(200) and wrong.dice.item() == pytest.approx(1 - 1 / 3)
    assert focal_dice_loss(torch.full((1, 1, 3, 3), -200.0), torch.zeros(1, 1, 3, 3)).dice.item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_reduced_in_float32(dtype):
    """640,000 cells overflow half precision, and bfloat16 sums stop growing at a few hundred."""
    logits = torch.zeros(1, 1, 800, 800, dtype=dtype, requires_grad=True)
    targets = torch.ones(1, 1, 800, 800, dtype=torch.bool)
    with torch.autocast('cpu', torch.bfloat16):
        loss = focal_dice_loss(logits, targets, gamma=0.0)
    assert loss.focal.dtype == loss.dice.dtype == torch.float32
    assert loss.focal.item() == pytest.approx(math.log(2), rel=1e-5)
    assert loss.dice.item() == pytest.approx(1 - 640_001 / 960_001, rel=1e-5)
    grad, = torch.autograd.grad(loss.dice.sum(), logits)
    assert grad.dtype == dtype and grad.isfinite().all()


def test_batches_are_means_of_their_samples():
    logits, targets = randn(8, (3, 2, 6, 6)), rand(9, (3, 2, 6, 6)) < 0.2
    whole = focal_dice_loss(logits, targets)
    singles = [focal_dice_loss(logits[b:b + 1], targets[b:b + 1]) for b in range(3)]
    torch.testing.assert_close(whole.focal, torch.stack([s.focal for s in singles]).mean(0))
    torch.testing.assert_close(whole.dice, torch.stack([s.dice for s in singles]).mean(0))


def test_non_contiguous_inputs():
    logits, targets = randn(10, (2, 5, 6, 3)), rand(11, (2, 5, 6, 3)) < 0.5
    a = focal_dice_loss(logits.permute(0, 3, 1, 2), targets.permute(0, 3, 1, 2))
    b = focal_dice_loss(logits.permute(0, 3, 1, 2).contiguous(), targets.permute(0, 3, 1, 2).contiguous())
    torch.testing.assert_close(a.focal, b.focal)
    torch.testing.assert_close(a.dice, b.dice)


def test_only_logits_and_targets_are_kept_for_the_backward_pass():
    logits, targets = randn(12, (1, 2, 40, 40)).requires_grad_(), torch.zeros(1, 2, 40, 40, dtype=torch.bool)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        focal_dice_loss(logits, targets, 0.25)
    assert sum(t.numel() * t.element_size() for t in kept) <= 3200 * (4 + 1) + 100


def test_shape_and_type_errors():
    with pytest.raises(ValueError, match=r'\(1, 2, 3, 4\) and \(1, 2, 3, 5\)'):
        focal_dice_loss(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5))
    with pytest.raises(TypeError, match='floating'):
        focal_dice_loss(torch.zeros(1, 2, 3, 4, dtype=torch.long), torch.zeros(1, 2, 3, 4))


# ---- target resampling ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('dtype', [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32])
@pytest.mark.parametrize('mode', ['max', 'nearest', 'area'])
def test_resampled_targets_are_floats(mode, dtype):
    targets = (rand(13, (2, 3, 8, 12)) < 0.3).to(dtype)
    got = resample_targets(targets, (4, 6), mode)
    assert got.dtype == torch.float32 and got.shape == (2, 3, 4, 6)
    assert torch.equal(resample_targets(targets, (8, 12), mode), targets.float())
    assert torch.equal(resample_targets(targets, (16, 24), mode),
                       targets.float().repeat_interleave(2, -1).repeat_interleave(2, -2))


def test_what_each_mode_does_to_a_thin_line():
    line = torch.zeros(1, 1, 12, 12, dtype=torch.uint8)
    line[0, 0, :, 4] = 1
    assert resample_targets(line, (3, 3), 'max')[0, 0].tolist() == [[0, 1, 0]] * 3
    assert resample_targets(line, (3, 3), 'area')[0, 0].tolist() == [[0, 0.25, 0]] * 3
    assert resample_targets(line, (3, 3), 'nearest').sum() == 0
    with pytest.raises(ValueError, match="got 'bilinear'"):
        resample_targets(line, (3, 3), 'bilinear')


def test_sizes_that_are_no_multiples_lose_nothing_with_max():
    line = torch.zeros(1, 1, 100, 100)
    line[0, 0, 37, :] = 1
    assert resample_targets(line, (33, 47), 'max').amax(2).eq(1).all()
