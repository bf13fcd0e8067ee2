"""Bytes of living tensors: programs whose peak is known by hand, on fake tensors and on real ones."""
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mmdet3d_ext.engine.memory.tracker import BLOCK, StorageTracker, rounded

K = 1024
KB = 4 * K  # bytes of K floats


def test_rounding():
    assert [rounded(n) for n in (0, 1, 512, 513)] == [0, BLOCK, BLOCK, 2 * BLOCK]


@pytest.fixture(params=['fake', 'real'])
def tracker(request):
    tracker = StorageTracker(scalar=lambda t: 1.0)
    if request.param == 'fake':
        with FakeTensorMode(), tracker:
            yield tracker
    else:
        with tracker:
            yield tracker


def test_a_chain_that_frees(tracker):
    a = torch.zeros(K)
    assert tracker.total == KB
    b = a + 1
    del a
    c = b * 2  # b and c live, a is gone
    assert (tracker.total, tracker.peak) == (2 * KB, 2 * KB)
    d = torch.cat([b, c])
    assert (tracker.total, tracker.peak) == (4 * KB, 4 * KB)
    del b, c, d
    assert (tracker.total, tracker.peak) == (0, 4 * KB)


def test_views_and_in_place_operators_cost_nothing(tracker):
    a = torch.zeros(K)
    b = a.view(2, -1).t()[3:].add_(1)
    b.relu_()
    assert tracker.total == tracker.peak == KB
    del a
    assert tracker.total == KB  # the view keeps the storage
    del b
    assert tracker.total == 0


def test_what_the_backward_pass_needs_stays_until_it_is_used(tracker):
    tracker.phase = 'activations'
    weight = torch.zeros(K, requires_grad=True)
    x = (weight * 2).sigmoid()   # keeps its result; the product is not needed
    y = x.sigmoid()
    loss = y.sum()
    del x, y
    small = rounded(4)
    assert tracker.total == KB + 2 * KB + small
    tracker.phase = 'backward'
    loss.backward()
    assert tracker.total == 2 * KB + small  # weight, gradient, loss
    del loss
    weight.grad = None
    assert tracker.sums[('backward', '')] == 0


def test_phases_parts_and_the_moment_of_the_peak(tracker):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Sigmoid(), nn.Linear(64, 4096, bias=False))
    tracker.phase = 'activations'
    x = torch.zeros(256, 64)
    with tracker.labels({'': model, 'first': model[0], 'last': model[2]}):
        out = model(x)
        assert tracker.sums[('activations', 'first')] == 0  # the linear layer's result is not needed
        assert tracker.sums[('activations', 'last')] == 256 * 4096 * 4
        tracker.phase = 'backward'
        out.sum().backward()
    phase, part = tracker.where
    assert phase == 'backward' and part in ('last', '')
    assert sum(tracker.at_peak.values()) == tracker.peak
    assert tracker.at_peak[('activations', 'last')] == 256 * 4096 * 4


def test_parts_of_the_backward_pass(tracker):
    class Wide(nn.Module):
        def forward(self, x):
            return (x.repeat(1, 64).sigmoid() + 1).sum(1, keepdim=True)

    model = nn.Sequential(nn.Linear(64, 64), Wide(), nn.Linear(1, 1))
    x = torch.zeros(1024, 64)
    with tracker.labels({'a': model[0], 'wide': model[1], 'b': model[2]}):
        tracker.phase = 'activations'
        loss = model(x).sum()
        tracker.reset_peak()
        tracker.phase = 'backward'
        loss.backward()
    assert tracker.where == ('backward', 'wide')


def test_relabel_and_workspace():
    tracker = StorageTracker(transient=lambda func, args, result: 5 * KB if func is torch.ops.aten.sigmoid.default else 0)
    with FakeTensorMode(), tracker:
        a = torch.zeros(K)
        tracker.relabel(a, ('parameters', 'x'))
        assert tracker.sums[('parameters', 'x')] == KB and tracker.sums[('inputs', '')] == 0
        b = a.sigmoid()
        assert tracker.peak == 7 * KB and tracker.total == 2 * KB
        assert tracker.at_peak == {('parameters', 'x'): KB, ('inputs', ''): KB, ('workspace', ''): 5 * KB}
        del b


def test_an_error_inside_a_part_leaves_no_part_behind(tracker):
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError('no')

    broken = Broken()
    with tracker.labels({'broken': broken}):
        with pytest.raises(RuntimeError, match='no'):
            broken(torch.zeros(1))
        assert tracker.part() == ''
    assert not broken._forward_hooks and not broken._forward_pre_hooks


def test_layers_within_layers_of_a_sequence_count_as_it():
    """A head calls its blocks' convolutions and norms one by one."""
    blocks = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    tracker = StorageTracker()
    x = torch.zeros(2, 4)
    with tracker, tracker.labels({'blocks': blocks}):
        for tensor in (x, *blocks.parameters()):
            tracker.track(tensor)
        tracker.phase = 'activations'
        out = blocks[1][0](blocks[0][0](x))
        assert tracker.sums['activations', 'blocks'] == 2 * rounded(2 * 8 * 4)  # the result, and the first one for the backward pass
    assert out.shape == (2, 8)
