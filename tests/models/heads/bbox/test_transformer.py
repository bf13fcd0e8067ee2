"""Cross-attention over ranges of keys is the module's own attention: values, gradients, dropout."""
import pytest
import torch
from torch import nn

from mmdet3d_ext.models.heads.bbox import transformer
from mmdet3d_ext.models.heads.bbox.transformer import attend_in_ranges, cross_attention


def inputs(dropout=0.0, dtype=torch.float64, device='cpu', keys=60, channels=16, queries=5):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(channels, 4, dropout=dropout, batch_first=True).to(device, dtype)
    nn.init.normal_(attention.in_proj_bias)
    query, memory = (torch.randn(3, n, channels, dtype=dtype, device=device, requires_grad=True) for n in (queries, keys))
    return attention, query, memory


def compare(attention, query, memory, **tolerances):
    expected = attention(query, memory, memory, need_weights=False)[0]
    found = attend_in_ranges(attention, query, memory)
    torch.testing.assert_close(found, expected, **tolerances)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), [query, memory, *attention.parameters()])
    for mine, theirs in zip(torch.autograd.grad((found * weight).sum(), [query, memory, *attention.parameters()]), wanted):
        torch.testing.assert_close(mine, theirs, **tolerances)


@pytest.mark.parametrize('keys', [60, 16, 61, 1])  # ranges of 15, 16, 1 and 1 keys
@pytest.mark.parametrize('most', [1, 4, 16])
def test_values_and_gradients(monkeypatch, most, keys):
    monkeypatch.setattr(transformer, 'MAX_RANGES', most)
    compare(*inputs(keys=keys))


def test_ranges_of_very_different_size_do_not_overflow():
    """One key outweighs all others by hundreds in the exponent: the other ranges count for nothing, and nothing becomes NaN."""
    attention, query, memory = inputs()
    with torch.no_grad():
        memory[:, 7] *= 300
        memory[:, 30] *= -300
    compare(attention, query, memory)


def test_dropout_is_refused_where_the_kernel_has_none():
    attention, query, memory = inputs(dropout=0.5)
    with pytest.raises(NotImplementedError, match='dropout'):
        attend_in_ranges(attention, query, memory)


@pytest.mark.gpu
@pytest.mark.parametrize('keys, queries, channels', [(60, 5, 16), (32400, 200, 128), (61, 33, 64), (4000, 1, 32)])
def test_on_a_gpu(keys, queries, channels):
    attention, query, memory = inputs(dtype=torch.float32, device='cuda', keys=keys, queries=queries, channels=channels)
    compare(attention, query, memory, atol=2e-4, rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize('grad', [True, False])
def test_the_faster_way_is_chosen(grad):
    attention, query, memory = inputs(dtype=torch.float32, device='cuda')
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(cross_attention(attention, query, memory),
                                   attention(query, memory, memory, need_weights=False)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_dropout_is_the_same_in_the_backward_pass():
    """A linear function of the values: with the dropout that the forward pass drew, d out / d value weights give out again."""
    attention, query, memory = inputs(dropout=0.5, dtype=torch.float32, device='cuda', keys=4000)
    nn.init.zeros_(attention.in_proj_bias)
    nn.init.zeros_(attention.out_proj.bias)
    torch.manual_seed(1)
    out = attend_in_ranges(attention, query, memory)
    weight = torch.randn_like(out)
    value = (out * weight).sum()
    (grad,) = torch.autograd.grad(value, attention.in_proj_weight)
    torch.testing.assert_close((grad[32:] * attention.in_proj_weight[32:]).sum(), value, atol=1e-4, rtol=1e-4)
    attention.eval()
    assert torch.equal(attend_in_ranges(attention, query, memory), attend_in_ranges(attention, query, memory))
    assert not torch.allclose(out, attend_in_ranges(attention, query, memory))


@pytest.mark.gpu
def test_dropout_gives_the_gradient_of_what_was_drawn():
    """Along a direction in the queries, the difference of two results drawn alike is what the gradient says."""
    attention, query, memory = inputs(dropout=0.3, dtype=torch.float32, device='cuda', keys=4000)
    weight, direction = torch.randn(3, 5, 16, device='cuda'), torch.randn_like(query)

    def value(step):
        torch.manual_seed(5)
        return (attend_in_ranges(attention, query + step * direction, memory) * weight).sum()

    (grad,) = torch.autograd.grad(value(0.0), query)
    numeric = (value(1e-2) - value(-1e-2)).item() / 2e-2
    torch.testing.assert_close((grad * direction).sum().item(), numeric, atol=2e-3, rtol=2e-2)
