"""Where a step stops being finite is found in the batch, the forward and the backward pass."""
import pytest
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from torch import nn

from mmdet3d_ext.engine.diagnosis import tensors_of, trace

INF, NAN = float('inf'), float('nan')


class Net(nn.Module):
    """stem -> two branches; ``spoil``: name of a branch whose output or gradient becomes non-finite."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)
        self.spoil, self.unused = None, nn.Linear(2, 2)

    def forward(self, x):
        h = self.stem(x)
        a, b = self.a(h), self.b(h)
        if self.spoil == 'gradient':
            b = b * 1
            b.register_hook(lambda g: g * INF)
        if self.spoil == 'sqrt':
            b = (b - b.detach()).abs().sqrt()  # 0 with an infinite slope
        return a.sum(), b.sum() * (NAN if self.spoil == 'loss' else 1)


def look(net, x, tokens=('t0', 't1'), **batch):
    def losses():
        a, b = net(x)
        return a + b, ['loss/a', 'loss/b', 'loss'], [a.detach(), b.detach(), (a + b).detach()]

    return trace(net, losses, {'x': x, 'metas': [{}] * len(x), **batch}, tokens)


def test_a_finite_step_has_no_finding_and_leaves_nothing():
    net, x = Net(), torch.ones(2, 3)
    finding = look(net, x)
    assert not finding.found and 'finite values everywhere' in finding.text() and set(finding.losses) == {'loss/a', 'loss/b', 'loss'}
    assert all(p.grad is None for p in net.parameters()) and not any(m._forward_hooks for m in net.modules())


def test_weights_that_are_too_large_are_found_in_the_forward_pass():
    net = Net()
    with torch.no_grad():
        net.stem[0].weight.fill_(1e30), net.b.weight.fill_(1e30)
    finding = look(net, torch.ones(2, 3))
    assert finding.forward == 'b (Linear)' and finding.bad_losses == ['loss/b'] and not finding.inputs
    assert finding.text() == 'the first module with a non-finite output from finite inputs is b (Linear)'


def test_a_bad_input_is_told_with_its_sample_and_is_not_blamed_on_a_module():
    x = torch.ones(2, 3)
    x[1, 2] = NAN
    finding = look(Net(), x)
    assert finding.inputs == ['x of sample t1 (1 values)'] and finding.forward is None and set(finding.bad_losses) == {'loss/a', 'loss/b'}
    points = [torch.ones(4, 5), torch.full((2, 5), INF)]
    assert look(Net(), torch.ones(2, 3), points=points).inputs == ['points of sample t1 (10 values)']


def test_unknown_velocities_are_no_fault():
    def batch(width):
        boxes = torch.ones(2, 9)
        boxes[:, 7:], boxes[0, 3] = NAN, width
        return {'gt_bboxes_3d': [LiDARInstance3DBoxes(boxes, box_dim=9), LiDARInstance3DBoxes(boxes[:0], box_dim=9)]}

    assert look(Net(), torch.ones(2, 3), **batch(2.0)).inputs == []
    assert look(Net(), torch.ones(2, 3), **batch(INF)).inputs == ['gt_bboxes_3d of sample t0 (5 values)']


@pytest.mark.parametrize('spoil', ['gradient', 'sqrt'])
def test_a_gradient_is_found_where_it_arrives_first(spoil):
    net = Net()
    net.spoil = spoil
    finding = look(net, torch.ones(2, 3))
    assert finding.bad_losses == [] and finding.forward is None and finding.backward == 'b (Linear)'
    assert finding.parameters == ['stem.0.weight', 'stem.0.bias', 'b.weight', 'b.bias']
    assert 'the first non-finite gradient arrives at the output of b (Linear); 4 parameters' in finding.text()


def test_a_loss_function_is_told_from_modules():
    net = Net()
    net.spoil = 'loss'
    assert look(net, torch.ones(2, 3)).text() == "all modules' outputs are finite: the loss functions made it"


def test_an_error_in_the_second_attempt_is_a_finding():
    def losses():
        raise ValueError('matrix contains invalid numeric entries')
    finding = trace(Net(), losses, {}, ())
    assert finding.found and finding.text() == ('computing it again ended with ValueError: matrix contains invalid numeric entries')


def test_tensors_are_found_in_everything_that_a_batch_holds():
    sparse = type('Sparse', (), {'features': torch.ones(1)})()
    value = {'a': [torch.ones(1), (torch.ones(2),)], 'b': LiDARInstance3DBoxes(torch.ones(1, 7)), 'c': sparse, 'd': 'text', 'e': None}
    assert [t.numel() for t in tensors_of(value)] == [1, 2, 7, 1]
