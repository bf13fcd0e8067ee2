"""Fake CPU tensors under CUDA's rules: what is cast, fused and kept, and that nothing stays behind."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mmdet3d_ext.engine.memory.as_cuda import conv_workspace, cuda_rules
from mmdet3d_ext.engine.memory.tracker import StorageTracker

aten = torch.ops.aten


@pytest.fixture
def half():
    with cuda_rules(), FakeTensorMode(), torch.autocast('cpu', dtype=torch.float16):
        yield torch.zeros(4, 8, 6, 6, dtype=torch.float16)


@pytest.mark.parametrize('call, dtype', [
    (lambda x: x.softmax(1), torch.float32), (lambda x: F.softmax(x, -1), torch.float32), (lambda x: x.sum(), torch.float32),
    (lambda x: x.sum((2, 3)), torch.float32), (lambda x: x.exp(), torch.float32), (lambda x: x ** 2, torch.float32),
    (lambda x: F.layer_norm(x, (6,)), torch.float32), (lambda x: F.group_norm(x, 2), torch.float32),
    (lambda x: F.softplus(x), torch.float32), (lambda x: F.l1_loss(x, x), torch.float32), (lambda x: x.norm(), torch.float32),
    (lambda x: x.cumsum(0), torch.float32), (lambda x: F.log_softmax(x, 1), torch.float32),
    (lambda x: F.interpolate(x, scale_factor=2, mode='bilinear'), torch.float32),
    (lambda x: F.relu(x), torch.float16), (lambda x: F.gelu(x), torch.float16), (lambda x: x.mean(), torch.float16),
    (lambda x: F.max_pool2d(x, 2), torch.float16), (lambda x: x + x.float(), torch.float32),
    (lambda x: F.linear(x.float(), torch.zeros(3, 6)), torch.float16), (lambda x: x.float() @ x.float(), torch.float16),
    (lambda x: torch.cat([x, x.float()]), torch.float32)])
def test_types_under_autocast(half, call, dtype):
    """As listed in PyTorch's documentation of autocast for CUDA."""
    assert call(half).dtype == dtype


def test_without_autocast_nothing_is_cast():
    with cuda_rules(), FakeTensorMode():
        x = torch.zeros(2, 3, dtype=torch.float16)
        assert x.softmax(1).dtype == x.sum().dtype == torch.float16
        with torch.autocast('cpu', dtype=torch.bfloat16), torch.autocast('cpu', enabled=False):
            assert x.exp().dtype == torch.float16


def test_rules_end_with_the_context():
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        before = x.softmax(1).dtype, x.sum().dtype
        with cuda_rules():
            assert (x.softmax(1).dtype, x.sum().dtype) == (torch.float32, torch.float32)
        assert (x.softmax(1).dtype, x.sum().dtype) == before == (torch.bfloat16, torch.bfloat16)
    with pytest.raises(KeyError), cuda_rules():
        raise KeyError
    y = torch.randn(1, 2, 4, 8, requires_grad=True)
    F.dropout(F.scaled_dot_product_attention(y, y, y, dropout_p=0.1), 0.5).sum().backward()  # torch's own again
    assert y.grad.abs().sum() > 0


def kept_by(function, *shapes, dtype=None):
    """Bytes that live between the passes beside the inputs and the result's gradient."""
    tracker = StorageTracker()
    with cuda_rules(), FakeTensorMode(), tracker:
        inputs = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        start = tracker.total
        with torch.autocast('cpu', dtype=dtype or torch.float16, enabled=dtype is not None):
            result = function(*inputs)
        kept = tracker.total - start
        result.float().sum().backward()
        assert all(x.grad.shape == x.shape for x in inputs)
    return kept


def test_attention_keeps_no_scores():
    queries, keys = (1, 8, 200, 16), (1, 8, 4000, 16)
    kept = kept_by(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1), queries, keys, keys)
    scores = 8 * 200 * 4000 * 4
    assert kept < scores / 20


def test_multi_head_attention_in_training_is_fused_too():
    with cuda_rules(), FakeTensorMode(), StorageTracker() as tracker:
        attention = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        query, memory = torch.zeros(1, 200, 32), torch.zeros(1, 4000, 32)
        before = tracker.total
        attention(query, memory, memory, need_weights=False)[0].sum().backward()
        assert tracker.peak - before < 4 * 200 * 4000 * 4


def test_dropout_keeps_a_mask_of_bytes():
    kept = kept_by(lambda x: F.dropout(x, 0.1), (512, 1024))
    assert kept == 512 * 1024 * (4 + 1)
    assert kept_by(lambda x: F.dropout(x, 0.0), (512, 1024)) == 0


def test_layer_norm_of_half_precision_keeps_a_float_copy():
    n = 512 * 1024
    kept = kept_by(lambda x: F.layer_norm(x.half(), (1024,)), (512, 1024), dtype=torch.float16)
    assert kept == 4 * n + 4 * n + 2 * 512 * 4  # float32 input, result, mean and deviation; the half-precision input is not needed


def test_a_softmax_of_half_precision_reads_it_as_it_is():
    peak = StorageTracker()
    with cuda_rules(), FakeTensorMode(), torch.autocast('cpu', dtype=torch.float16), peak:
        x = torch.zeros(512, 1024, dtype=torch.float16)
        x.softmax(-1)
    assert peak.peak == 512 * 1024 * (2 + 4)


@pytest.mark.parametrize('dtype, layout, expected', [
    (torch.float16, torch.contiguous_format, 2 * (8 * 100 + 4 * 100 + 4 * 8 * 9)), (torch.float16, torch.channels_last, 0),
    (torch.float32, torch.contiguous_format, 4 * (8 * 100 + 4 * 100 + 4 * 8 * 9))])
def test_workspace_of_convolutions(dtype, layout, expected):
    seen = []

    def note(func, args, result):
        size = conv_workspace(func, args, result)
        if func in (aten.convolution.default, aten.convolution_backward.default):
            seen.append(size)
        return size

    with cuda_rules(), FakeTensorMode(), StorageTracker(note):
        x = torch.zeros(1, 8, 10, 10, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
        weight = torch.zeros(4, 8, 3, 3, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
        out = F.conv2d(x, weight, padding=1)
        out.backward(torch.zeros_like(out))
    assert seen == [expected, expected]
