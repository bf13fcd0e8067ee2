"""The focal loss of box classes is mmdet's in values and gradients, and a GPU's host does not wait in it."""
import pytest
import torch
from mmdet.models.losses import FocalLoss as MmdetFocal
from testing import rand, randn

from mmdet3d_ext.registry import MODELS


def case(device='cpu', rows=30, classes=5):
    pred = (4 * randn(1, (rows, classes))).to(device).requires_grad_()
    labels = (rand(2, (rows,)) * (classes + 1)).long().to(device)  # the last one is background
    weights = {'none': None, 'rows': rand(3, (rows,)).to(device), 'all': rand(4, (rows, classes)).to(device)}
    return pred, labels, weights


def result(loss, pred, labels, weight, **more):
    value = loss(pred, labels, weight, **more)
    return value.detach(), torch.autograd.grad(value.sum(), pred)[0]


@pytest.mark.parametrize('settings', [{}, {'gamma': 0.0, 'loss_weight': 0.5}, {'gamma': 1.5, 'alpha': 0.9, 'reduction': 'sum'},
                                      {'gamma': 0.5}])
@pytest.mark.parametrize('kind', ['none', 'rows', 'all'])
def test_it_is_mmdets(settings, kind):
    ours, theirs = MODELS.build({'type': 'FocalLoss', **settings}), MmdetFocal(**settings)
    assert type(ours) is not MmdetFocal and isinstance(ours, MmdetFocal)
    pred, labels, weights = case()
    ways = [{}, {'reduction_override': 'none'}, {'reduction_override': 'sum'}]
    if ours.reduction == 'mean':
        ways += [{'avg_factor': 7.0}, {'avg_factor': torch.tensor(0.25)}]
    for more in ways:
        found, expected = result(ours, pred, labels, weights[kind], **more), result(theirs, pred, labels, weights[kind], **more)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]), more


def test_probabilities_and_no_predictions():
    pred, labels, _ = case()
    ours, theirs = MODELS.build({'type': 'FocalLoss', 'activated': True}), MmdetFocal(activated=True)
    assert torch.equal(ours(pred.sigmoid(), labels), theirs(pred.sigmoid(), labels))
    assert MODELS.build({'type': 'FocalLoss'})(pred[:0], labels[:0], avg_factor=1.0) == 0


def test_logits_far_out_have_finite_gradients():
    pred = torch.tensor([[-200.0, 200.0], [200.0, -200.0], [0.0, 0.0]], requires_grad=True)
    for label in (0, 1, 2):
        value, grad = result(MODELS.build({'type': 'FocalLoss'}), pred, torch.full((3,), label), None)
        assert value.isfinite() and grad.isfinite().all()


@pytest.mark.gpu
def test_on_a_gpu_it_gives_the_kernels_values_and_the_host_does_not_wait():
    pred, labels, weights = case('cuda', 2000, 10)
    ours, theirs = MODELS.build({'type': 'FocalLoss'}), MmdetFocal()
    factor = torch.tensor(3.0, device='cuda')
    expected = result(theirs, pred, labels, weights['rows'], avg_factor=factor)
    torch.cuda.set_sync_debug_mode('error')
    try:
        found = result(ours, pred, labels, weights['rows'], avg_factor=factor)
    finally:
        torch.cuda.set_sync_debug_mode('default')
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)
