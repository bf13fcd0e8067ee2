"""Cross-attention in pieces is the module's own attention: values, gradients, dropout."""
import pytest
import torch
from torch import nn

from mmdet3d_ext.models.heads.bbox import transformer
from mmdet3d_ext.models.heads.bbox.transformer import attend_in_pieces, cross_attention


def inputs(dropout=0.0, dtype=torch.float64, device='cpu'):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, dropout=dropout, batch_first=True).to(device, dtype)
    nn.init.normal_(attention.in_proj_bias)
    query, memory = (torch.randn(3, n, 16, dtype=dtype, device=device, requires_grad=True) for n in (5, 60))
    return attention, query, memory


@pytest.mark.parametrize('at_once', [1, 700, 10 ** 6])
def test_values_and_gradients(monkeypatch, at_once):
    monkeypatch.setattr(transformer, 'WEIGHTS_AT_ONCE', at_once)
    attention, query, memory = inputs()
    expected = attention(query, memory, memory, need_weights=False)[0]
    found = attend_in_pieces(attention, query, memory)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), [query, memory, *attention.parameters()])
    for mine, theirs in zip(torch.autograd.grad((found * weight).sum(), [query, memory, *attention.parameters()]), wanted):
        torch.testing.assert_close(mine, theirs)


def test_dropout_is_the_same_in_the_backward_pass():
    """A linear function of the values: with the dropout that the forward pass drew, d out / d value weights give out again."""
    attention, query, memory = inputs(dropout=0.5)
    nn.init.zeros_(attention.in_proj_bias)
    nn.init.zeros_(attention.out_proj.bias)
    torch.manual_seed(1)
    out = attend_in_pieces(attention, query, memory)
    weight = torch.randn_like(out)
    value = (out * weight).sum()
    (grad,) = torch.autograd.grad(value, attention.in_proj_weight)
    torch.testing.assert_close((grad[32:] * attention.in_proj_weight[32:]).sum(), value)
    attention.eval()
    assert torch.equal(attend_in_pieces(attention, query, memory), attend_in_pieces(attention, query, memory))
    assert not torch.allclose(out, attend_in_pieces(attention, query, memory))


@pytest.mark.gpu
@pytest.mark.parametrize('grad', [True, False])
def test_on_a_gpu(grad):
    attention, query, memory = inputs(dtype=torch.float32, device='cuda')
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(cross_attention(attention, query, memory),
                                   attention(query, memory, memory, need_weights=False)[0], atol=1e-4, rtol=1e-4)
