"""Norms, ASPP and attention of the enhanced head."""
import pytest
import torch
import torch.nn.functional as F
from testing import randn
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmdet3d_ext.models.heads.segm.layers import (
    ASPP,
    ChannelAttention,
    GroupNormReLU,
    PooledBranch,
    SpatialAttention,
    _Mean,
    _MeanAndMax,
    group_count,
    works_channels_last,
)


@pytest.mark.parametrize('channels', [1, 2, 3, 7, 8, 12, 16, 24, 31, 32, 48, 64, 96, 100, 128, 192, 256, 320, 512])
def test_group_count(channels):
    groups, pooled = group_count(channels), group_count(channels, pooled=True)
    assert channels % groups == 0 and channels % pooled == 0 and groups <= 32
    assert groups == max(d for d in range(1, 33) if channels % d == 0)
    assert channels == 1 or channels // pooled >= min(8, channels)
    if channels % 32 == 0:
        assert groups == 32
    if channels == 256:
        assert pooled == 32


@pytest.mark.parametrize('outputs', [1, 2, 4, 8, 16, 32, 36, 64])
def test_pooled_branch_depends_on_its_input(outputs):
    """A group with a single value would always give the same output."""
    torch.manual_seed(0)
    branch = PooledBranch(6, outputs)
    if outputs < 8:  # so few may all be cut off by the ReLU
        nn.init.uniform_(branch.conv.weight)
    results = torch.cat([branch(10 * randn(seed, (1, 6, 5, 4)).abs()) for seed in range(8)])
    assert results.shape == (8, outputs, 1, 1)
    assert results.std(0).max() > 1e-3
    if outputs >= 8:  # and not only by sign
        assert len(results.flatten().unique()) > 8


@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2),
                                              (torch.float16, 2e-3)])
def test_norm_equals_group_norm_and_relu(dtype, tolerance):
    torch.manual_seed(0)
    norm = GroupNormReLU(12)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = (3 + 2 * randn(1, (2, 12, 5, 7))).to(dtype)
    if dtype == torch.float64:
        norm = norm.double()
    a, b = x.clone().requires_grad_(), x.clone().double().requires_grad_()
    got = norm(a)
    expected = F.relu(F.group_norm(b, 12, norm.weight.double(), norm.bias.double(), norm.eps))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    grad = randn(2, got.shape).to(dtype)
    got.backward(grad)
    own = norm.weight.grad.double(), norm.bias.grad.double()
    norm.zero_grad()
    expected.backward(grad.double())
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=tolerance, atol=5 * tolerance)
    torch.testing.assert_close(own[0], norm.weight.grad.double(), rtol=tolerance, atol=20 * tolerance)
    torch.testing.assert_close(own[1], norm.bias.grad.double(), rtol=tolerance, atol=20 * tolerance)


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_a_norm_makes_no_full_size_float_map(layout):
    shape = (1, 256, 400, 400)
    with FakeTensorMode():
        norm = GroupNormReLU(256)
        x = torch.zeros(shape, dtype=torch.bfloat16).contiguous(memory_format=layout).requires_grad_()
        seen = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                seen.extend(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.dtype == torch.float32)
                return out

        with Watch():
            out = norm(x)
            out.backward(torch.zeros_like(out))
    assert out.dtype == torch.bfloat16 and out.stride() == x.grad.stride() == x.stride()
    assert 0 < max(seen) <= 256


def test_norm_gradcheck_and_non_contiguous_input():
    norm = GroupNormReLU(4).double()
    x = randn(3, (2, 3, 5, 4)).double().permute(0, 3, 1, 2).requires_grad_()
    assert not x.is_contiguous()
    assert torch.autograd.gradcheck(lambda t: norm(t), (x,))
    norm.weight.requires_grad_(False)
    assert torch.autograd.gradcheck(lambda t: norm(t), (x,))


def test_norm_keeps_its_half_precision_input_only():
    norm, x = GroupNormReLU(8), randn(4, (1, 8, 20, 20)).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x)
    assert sum(t.numel() * t.element_size() for t in kept if t.numel() > 100) == x.numel() * 2


def test_norm_of_large_half_values_does_not_overflow():
    x = torch.full((1, 4, 300, 300), 3e4, dtype=torch.float16)
    x[:, :, ::2] = -3e4
    out = GroupNormReLU(4)(x)
    assert out.isfinite().all() and out.max() == 1


def test_aspp_equals_the_joined_form():
    torch.manual_seed(0)
    aspp = ASPP(6, 8, (2, 3)).double()
    x = randn(5, (2, 6, 9, 11)).double()
    joined = torch.cat([branch(x).expand(-1, -1, 9, 11) for branch in aspp.branches], 1)
    torch.testing.assert_close(aspp(x), aspp.project(joined))
    assert [tuple(branch[0].kernel_size) for branch in list(aspp.branches)[:-1]] == [(1, 1), (3, 3), (3, 3)]
    assert [branch[0].dilation[0] for branch in list(aspp.branches)[1:-1]] == [2, 3]


def test_aspp_with_rates_beyond_the_map():
    assert ASPP(4, 8, (6, 12, 18))(randn(6, (1, 4, 3, 5))).shape == (1, 8, 3, 5)


def test_which_modules_work_channels_last():
    block = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1))
    assert not works_channels_last(block)
    assert works_channels_last(block.to(memory_format=torch.channels_last))
    assert not works_channels_last(nn.Conv2d(4, 8, 1).to(memory_format=torch.channels_last))  # lies in both orders
    assert not works_channels_last(nn.Sequential())


def test_attention_gates():
    torch.manual_seed(0)
    x = randn(7, (2, 6, 5, 7))
    gate = ChannelAttention(6)(x) / x
    assert gate.min() > 0 and gate.max() < 1 and gate.std((2, 3)).max() < 1e-5 and gate.std() > 1e-4  # one gate per channel
    gate = SpatialAttention()(x) / x
    assert gate.min() > 0 and gate.max() < 1 and gate.std(1).max() < 1e-5 and gate.std() > 1e-4       # one gate per cell


@pytest.mark.parametrize('dims', [(2, 3), (1,)])
@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_pooling_is_torchs_mean_and_amax(dims, layout):
    """Values and gradients, also where several share the maximum."""
    x = randn(8, (2, 6, 5, 7)).double()
    x[:, :3, 1:3, 2] = 5.0
    results = []
    for pool in (lambda t: _MeanAndMax.apply(t, dims, torch.float64),
                 lambda t: (t.mean(dims, keepdim=True), t.amax(dims, keepdim=True))):
        given = x.contiguous(memory_format=layout).requires_grad_()
        mean, peak = pool(given)
        grads = randn(9, mean.shape).double(), randn(10, mean.shape).double()
        results.append((mean, peak, *torch.autograd.grad((mean, peak), given, grads)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
    assert results[0][2].is_contiguous(memory_format=layout)
    given = randn(11, (1, 3, 4, 2)).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: _MeanAndMax.apply(t, dims, torch.float64), (given,))
    assert torch.autograd.gradcheck(lambda t: _Mean.apply(t, dims, torch.float64), (given,))
    torch.testing.assert_close(_Mean.apply(given, dims, torch.float64), given.mean(dims, keepdim=True))


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_nothing_of_the_head_makes_a_full_size_float_map_in_half_precision(layout):
    """Neither pass: torch's own mean fills a float32 map with one number to go back."""
    parts = [ASPP(32, 32, (2,)), ChannelAttention(32), SpatialAttention()]
    x = randn(12, (1, 32, 20, 20)).bfloat16().contiguous(memory_format=layout).requires_grad_()
    large = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            large.extend(str(func) for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.dtype == torch.float32
                         and t.untyped_storage().nbytes() >= 4 * x.numel())
            return out

    with Watch():
        with torch.autocast('cpu', torch.bfloat16):
            out = x
            for part in parts:
                out = part(out)
        out.backward(torch.ones_like(out))
    assert out.dtype == torch.bfloat16 and not large


def test_channel_attention_mean_is_float32_under_autocast():
    """A bfloat16 sum of many cells stops growing at a few hundred; the gate must see the true mean."""
    attention = ChannelAttention(2)
    seen = []
    attention.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.autocast('cpu', torch.bfloat16):
        attention(torch.full((1, 2, 800, 800), 1.5, dtype=torch.bfloat16))
    assert seen[0].dtype == torch.float32 and torch.equal(seen[0], torch.full((1, 2), 1.5))
