"""Folding of batch norms: every pair of layers, what must be refused, and whole models."""
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mmdet3d_ext.engine.inference.fold import FoldError, fold_batch_norms


def shaken(model: nn.Module) -> nn.Module:
    """Batch norms with statistics and weights far from those of a new layer: a wrong fold shows."""
    draw = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            size = module.num_features
            module.running_mean.copy_(torch.randn(size, generator=draw))
            module.running_var.copy_(0.3 + 2 * torch.rand(size, generator=draw))
            if module.affine:
                module.weight.data.copy_(0.5 + torch.rand(size, generator=draw))
                module.bias.data.copy_(torch.randn(size, generator=draw))
    return model.eval()


PAIRS = {
    'Conv1d': (nn.Conv1d(6, 8, 3, bias=False), nn.BatchNorm1d(8), (2, 6, 9)),
    'Conv2d': (nn.Conv2d(6, 8, 3, groups=2), nn.BatchNorm2d(8), (2, 6, 9, 7)),
    'Conv3d': (nn.Conv3d(3, 4, 3, bias=False), nn.BatchNorm3d(4, affine=False), (2, 3, 5, 6, 4)),
    'ConvTranspose1d': (nn.ConvTranspose1d(6, 8, 3), nn.BatchNorm1d(8), (2, 6, 9)),
    'ConvTranspose2d': (nn.ConvTranspose2d(6, 8, 2, stride=2, bias=False), nn.BatchNorm2d(8), (2, 6, 5, 4)),
    'ConvTranspose2d in groups': (nn.ConvTranspose2d(6, 9, 2, groups=3), nn.BatchNorm2d(9), (2, 6, 5, 4)),
    'Linear': (nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), (11, 5)),
    'SyncBatchNorm': (nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), (1, 3, 5, 5)),
    'channels last': (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(4), (1, 3, 5, 5)),
}


@pytest.mark.parametrize('kind', PAIRS)
def test_pair(kind):
    conv, norm, shape = PAIRS[kind]
    model, x = shaken(nn.Sequential(copy.deepcopy(conv), nn.Identity(), copy.deepcopy(norm), nn.ReLU(inplace=True))), torch.randn(shape)
    with torch.no_grad():
        expected = model(x.clone())
    report = fold_batch_norms(model, lambda: model(x.clone()))
    assert report.folded == (('0', '2'),) and not report.kept and report.difference < 1e-5
    assert isinstance(model[2], nn.Identity) and model[0].bias is not None and model[0].weight.stride() == conv.weight.stride()
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


class Flattened(nn.Module):
    """As per-point layers do it: (V, M, C) -> rows -> norm."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7)

    def forward(self, x):
        x = self.linear(x)
        return F.relu(self.norm(x.flatten(0, 1)).view_as(x))


def test_linear_on_points_with_a_view_between():
    model, x = shaken(Flattened()), torch.randn(6, 4, 5)
    expected = model(x)
    assert fold_batch_norms(model, lambda: model(x)).folded == (('linear', 'norm'),)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


class Graph(nn.Module):
    """Two convolutions and two norms, wired by a function."""

    def __init__(self, wiring, **layers):
        super().__init__()
        self.wiring = wiring
        self.conv, self.other = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.norm, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.wiring(self, x)


class Standardised(nn.Conv2d):
    """A convolution that does not use its weight as it is (weight standardisation)."""

    def forward(self, x):
        return self._conv_forward(x, self.weight / self.weight.std(), self.bias)


def in_place(m, x):
    x = m.conv(x)
    F.relu_(x)
    return m.norm(x)


def tied(model):
    model.other.weight = model.conv.weight
    return model


REFUSED = {
    'the output is also a residual': (lambda m, x: m.norm(y := m.conv(x)) + y, 'read elsewhere'),
    'two norms of one output': (lambda m, x: m.norm(y := m.conv(x)) + m.second(y), 'read elsewhere'),
    'the convolution runs twice': (lambda m, x: m.norm(m.conv(x)) + m.conv(x + 1), 'read elsewhere'),
    'a norm after two convolutions': (lambda m, x: m.norm(m.conv(x)) + m.norm(m.other(x)), 'several'),
    'an operation between': (lambda m, x: m.norm(m.conv(x) * 2), 'something else'),
    'an operation in place between': (in_place, 'read elsewhere'),
    'a view with other channels': (lambda m, x: m.norm(m.conv(x).transpose(1, 2)), 'other values'),
    'the sum of two': (lambda m, x: m.norm(m.conv(x) + m.other(x)), 'something else'),
    'before the convolution': (lambda m, x: m.conv(m.norm(x)), 'something else'),
    'does not run': (lambda m, x: m.conv(x), 'did not run'),
    'a copy is kept elsewhere': (lambda m, x: [m.norm(y := m.conv(x)), y.clone()], 'read elsewhere'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_refused(case):
    wiring, why = REFUSED[case]
    model, x = shaken(Graph(wiring)), torch.randn(2, 4, 4, 4)
    state = copy.deepcopy(model.state_dict())
    report = fold_batch_norms(model, lambda: model(x))
    assert why in report.kept['norm'] and not any(norm == 'norm' for _, norm in report.folded)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items() if not key.startswith(('other', 'second')))


def test_a_weight_that_is_computed_or_shared_is_refused():
    x = torch.randn(2, 4, 4, 4)
    wiring = lambda m, x: m.norm(m.conv(x)) + m.other(x)  # noqa: E731
    for model, why in ((Graph(wiring, conv=Standardised(4, 4, 1)), 'other values'),
                       (Graph(wiring, conv=nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))), 'computes'),
                       (tied(Graph(wiring)), 'shares'),
                       (Graph(wiring, norm=nn.BatchNorm2d(4, track_running_stats=False)), "the batch's")):
        if model.norm.running_mean is not None:
            shaken(model)
        model.eval()
        report = fold_batch_norms(model, lambda: model(x))  # noqa: B023
        assert not report.folded and why in report.kept['norm'], why


def test_a_convolution_and_its_norm_used_twice_are_folded():
    model, x = shaken(Graph(lambda m, x: m.norm(m.conv(m.norm(m.conv(x)).relu())))), torch.randn(2, 4, 4, 4)
    expected = model(x)
    assert fold_batch_norms(model, lambda: model(x)).folded == (('conv', 'norm'),)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_use_that_the_trace_cannot_see_is_an_error_and_undone():
    seen = []

    def wiring(m, x):
        y = m.conv(x)
        seen.append(y.numpy().copy())  # leaves torch
        return m.norm(y) + torch.from_numpy(seen[-1])

    model, x = shaken(Graph(wiring)), torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        expected = model(x)
    with pytest.raises(FoldError, match='differs by'):
        fold_batch_norms(model, lambda: model(x))
    with torch.no_grad():
        assert torch.equal(model(x), expected) and isinstance(model.norm, nn.BatchNorm2d)


def test_a_model_that_reads_a_norm_itself_is_an_error_and_undone():
    model, x = shaken(Graph(lambda m, x: m.norm(m.conv(x)) * m.norm.num_features)), torch.randn(2, 4, 4, 4)
    expected = model(x)
    with pytest.raises(FoldError, match='ends with "AttributeError: .*num_features'):
        fold_batch_norms(model, lambda: model(x))
    assert torch.equal(model(x), expected) and isinstance(model.norm, nn.BatchNorm2d)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_run_that_fails_leaves_no_hook():
    model = shaken(Graph(lambda m, x: m.norm(m.conv(x)).nothing))
    with pytest.raises(AttributeError, match='nothing'):
        fold_batch_norms(model, lambda: model(torch.randn(1, 4, 2, 2)))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()) and isinstance(model.norm, nn.BatchNorm2d)


def no_variance(conv, norm):
    norm.running_var.zero_()


def a_dead_channel(conv, norm):
    conv.weight.data[1].zero_()  # gives its bias everywhere, which is its mean
    conv.bias.data[1] = norm.running_mean[1]
    norm.running_var[1] = 0


def no_weight(conv, norm):
    norm.weight.data.zero_()


def nothing_at_all(conv, norm):
    for tensor in (conv.weight.data, conv.bias.data, norm.running_mean, norm.running_var, norm.bias.data):
        tensor.zero_()


def endless_variance(conv, norm):
    norm.running_var[2] = float('inf')


def far_off_mean(conv, norm):
    norm.running_mean.fill_(1e6)  # what is left behind it is rounding


def not_a_number(conv, norm):
    norm.running_mean[0] = float('nan')


@pytest.mark.parametrize('extreme', [no_variance, a_dead_channel, no_weight, nothing_at_all, endless_variance, far_off_mean, not_a_number])
def test_extreme_statistics_are_folded_right_or_not_at_all(extreme):
    model, x = shaken(Graph(lambda m, x: m.norm(m.conv(x)))), torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        extreme(model.conv, model.norm)
        expected = model(x)
        fold_batch_norms(model, lambda: model(x))
        found = model(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.nan_to_num(0, 0, 0).abs().max().item(), equal_nan=True)


ALIASES = {
    'a norm under two names': lambda m: setattr(m, 'again', m.norm),
    'a convolution under two names': lambda m: setattr(m, 'again', m.conv),
    'a bias that another layer has, too': lambda m: setattr(m.other, 'bias', m.conv.bias),
    'a norm whose weight another norm has': lambda m: setattr(m.second, 'weight', m.norm.weight),
}


@pytest.mark.parametrize('alias', ALIASES)
def test_shared_modules_and_parameters(alias):
    model, x = Graph(lambda m, x: m.norm(m.conv(x)) + m.second(m.other(x) * 2)), torch.randn(2, 4, 4, 4)
    ALIASES[alias](model)
    shaken(model)
    with torch.no_grad():
        expected = model(x)
        report = fold_batch_norms(model, lambda: model(x))
        assert report.folded == (('conv', 'norm'),), report
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert all(not isinstance(m, nn.BatchNorm2d) for m in (model.norm, getattr(model, 'again', model.norm)))
    assert isinstance(model.second, nn.BatchNorm2d)


def test_a_part_of_the_output_is_not_its_all():
    for part in (lambda y: y[:, :, 1:], lambda y: y[:1], lambda y: y.narrow(3, 0, 2)):
        model, x = shaken(Graph(lambda m, x, part=part: m.norm(part(m.conv(x))))), torch.randn(2, 4, 4, 4)
        expected = model(x)
        assert 'another number of values' in fold_batch_norms(model, lambda: model(x)).kept['norm']  # noqa: B023
        assert torch.equal(model(x), expected)


def test_training_mode_is_refused():
    with pytest.raises(ValueError, match='training mode'):
        fold_batch_norms(nn.Sequential(nn.Conv1d(1, 1, 1)).train(), lambda: None)


def test_near_ties_do_not_count_as_differences():
    """A choice among equal values may fall otherwise after folding; what follows is compared for the same choice."""

    class Best(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv1d(4, 8, 1), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.norm(self.conv(x))
            best = x.mean(1).topk(6, dim=1).indices
            peak = x == torch.nn.functional.max_pool1d(x, 3, stride=1, padding=1)
            return self.out((x * peak).gather(2, best[:, None].expand(-1, 8, -1)).transpose(1, 2))

    model = shaken(Best())
    x = torch.randn(2, 4, 1) + 1e-7 * torch.randn(2, 4, 50)
    assert fold_batch_norms(model, lambda: model(x)).difference < 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# sparse convolutions

def sparse_encoder(**settings):
    from mmdet3d_ext.models.backbones.sparse_encoder import SparseEncoder
    return shaken(SparseEncoder(4, (32, 32, 9), base_channels=4, output_channels=8, encoder_channels=((4, 8), (8, 8)),
                                encoder_paddings=((1, 1), (1, 1)), **settings))


@pytest.mark.parametrize('settings, norms', [
    ({'block_type': 'conv_module'}, 6),
    ({'block_type': 'basicblock'}, 9),
    ({'block_type': 'conv_module', 'order': ('norm', 'act', 'conv')}, 5),  # each norm has the layer's before to itself
])
def test_sparse_encoder(settings, norms):
    model = sparse_encoder(**settings)
    draw = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(0, n, (400,), generator=draw) for n in (2, 32, 32, 8)], 1).unique(dim=0)
    features = torch.randn(len(coords), 4, generator=draw)
    assert sum(isinstance(m, nn.BatchNorm1d) for m in model.modules()) == norms
    with torch.no_grad():
        expected = model(features, coords, 2)
        empty = model(features[:0], coords[:0], 2)
    report = fold_batch_norms(model, lambda: model(features, coords, 2))
    assert len(report.folded) == norms and not report.kept
    with torch.no_grad():
        torch.testing.assert_close(model(features, coords, 2), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
        torch.testing.assert_close(model(features[:0], coords[:0], 2), empty, rtol=1e-4, atol=1e-5)


def test_sites_may_come_in_another_order_each_time(monkeypatch):
    """As on a GPU, where a strided sparse convolution finds its sites in no fixed order."""
    from mmdet3d_ext.models.backbones.sparse_layers import sparse
    kind = sparse().SparseConv3d
    forward = kind.forward

    def shuffled(self, x, *args, **kwargs):
        out = forward(self, x, *args, **kwargs)
        order = torch.randperm(len(out.indices))
        return sparse().Tensor(out.features[order], out.indices[order], out.spatial_shape, out.batch_size)

    monkeypatch.setattr(kind, 'forward', shuffled)
    model = sparse_encoder()
    coords = torch.stack([torch.randint(0, n, (200,)) for n in (2, 32, 32, 8)], 1).unique(dim=0)
    features = torch.randn(len(coords), 4)
    report = fold_batch_norms(model, lambda: model(features, coords, 2))
    assert len(report.folded) == 6 and not report.kept
