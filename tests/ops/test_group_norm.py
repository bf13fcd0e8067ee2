"""Group norm and ReLU against a float64 twin and torch's own: values, gradients, orders in memory, numbers that are hard to add up."""

import ops_reference as slow
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import randn

from mmdet3d_ext import ops

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LAST = torch.channels_last
TOLERANCE = {F64: 1e-11, F32: 2e-5, F16: 2e-3, BF16: 1.6e-2}
# shape, groups: single values side by side, whole vectors, several chunks, odd sizes, one group, one channel a group, one cell
SHAPES = [
    ((2, 12, 5, 7), 4),
    ((1, 64, 16, 8), 8),
    ((1, 16, 100, 120), 4),
    ((2, 40, 61, 67), 8),
    ((3, 6, 9, 4), 1),
    ((2, 5, 33, 31), 5),
    ((2, 288, 1, 1), 12),
    ((1, 3000, 3, 2), 2),
]


def sample(shape, dtype=F64, seed=0, mean=3.0, spread=2.0):
    """x, weight, bias; the same in every type but for rounding."""
    x = (mean + spread * randn(seed, shape).double()).to(dtype)
    work = F64 if dtype == F64 else F32
    return x, *(randn(seed + k, (shape[1],)).to(work) for k in (1, 2))


def laid(x, layout):
    return x.contiguous(memory_format=layout) if x.dim() == 4 else x


def check(x, weight, bias, groups, device, tolerance, relu=True, grad=None, eps=1e-5):
    """Values and gradients are the twin's in float64; the output is as x in type and order."""
    mine = [t.to(device).requires_grad_() for t in (x, weight, bias)]
    twin = [t.double().contiguous().requires_grad_() for t in (x, weight, bias)]
    got, want = (
        ops.group_norm_relu(mine[0], groups, *mine[1:], eps, relu),
        slow.group_norm_relu(twin[0], groups, *twin[1:], eps, relu),
    )
    assert got.dtype == x.dtype and got.shape == x.shape
    torch.testing.assert_close(got.detach().cpu().double(), want.detach(), rtol=tolerance, atol=tolerance)
    grad = randn(9, x.shape).to(x.dtype) if grad is None else grad
    found = torch.autograd.grad(got, mine, grad.to(device))
    wanted = torch.autograd.grad(want, twin, grad.double())
    for a, b, like in zip(found, wanted, mine):
        assert a.dtype == like.dtype and a.shape == like.shape
        torch.testing.assert_close(a.cpu().double(), b, rtol=tolerance, atol=tolerance * max(1.0, b.abs().max().item()))
    return got, found


@pytest.mark.parametrize('shape, groups', SHAPES)
@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
@pytest.mark.parametrize('dtype', TOLERANCE)
def test_equals_the_twin(device, shape, groups, layout, dtype):
    x, weight, bias = sample(shape, dtype)
    x = laid(x, layout)
    got, found = check(x, weight, bias, groups, device, TOLERANCE[dtype])
    for out in (got, found[0]):
        assert out.is_contiguous() if x.is_contiguous() else out.is_contiguous(memory_format=layout)


@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
@pytest.mark.parametrize('relu', [True, False])
def test_equals_torch(device, layout, relu):
    x, weight, bias = sample((2, 24, 31, 17))
    inputs = [t.to(device).requires_grad_() for t in (laid(x, layout), weight, bias)]
    want = F.group_norm(inputs[0], 6, *inputs[1:], 1e-3)
    want = want.relu() if relu else want
    got = ops.group_norm_relu(inputs[0], 6, *inputs[1:], 1e-3, relu)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    grad = randn(5, x.shape).double().to(device)
    for a, b in zip(torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('shape', [(3, 8), (3, 8, 50), (2, 8, 3, 4, 5), (2, 4, 3, 2, 2, 3)])
def test_any_number_of_dimensions(device, shape):
    check(*sample(shape), 4, device, 1e-11)
    if len(shape) == 5:
        x, weight, bias = sample(shape)
        got, found = check(x.contiguous(memory_format=torch.channels_last_3d), weight, bias, 4, device, 1e-11)
        assert got.stride() == found[0].stride() == x.contiguous(memory_format=torch.channels_last_3d).stride()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_size(samples, groups, width, height, length, last, relu, seed):
    x, weight, bias = sample((samples, groups * width, height, length), seed=seed)
    check(laid(x, LAST if last else torch.contiguous_format), weight, bias, groups, 'cpu', 1e-9, relu)


@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
@pytest.mark.parametrize('relu', [True, False])
def test_gradcheck(device, layout, relu):
    x, weight, bias = sample((2, 6, 3, 4))
    inputs = [t.to(device).requires_grad_() for t in (laid(x, layout), weight, bias)]
    assert torch.autograd.gradcheck(lambda x, w, b: ops.group_norm_relu(x, 3, w, b, 1e-3, relu), inputs)


def test_other_strides_and_gradients(device):
    """Transposed, cut out, every other cell, one value repeated: as the contiguous copy, with a contiguous output."""
    on_cpu, weight, bias = sample((2, 8, 12, 10))
    base = on_cpu.to(device)
    views = [base.permute(0, 1, 3, 2), base[:, :, 1:9, 2:7], base[:, :, ::2, ::2], base[..., :1].expand(-1, -1, -1, 4)]
    views += [laid(base, LAST)[:, :, 2:], torch.cat([base, base], 1)[:, 4:12]]
    for x in views:
        got = ops.group_norm_relu(x, 4, weight.to(device), bias.to(device))
        assert not x.is_contiguous() and got.is_contiguous()
        want = slow.group_norm_relu(x.cpu().contiguous(), 4, weight, bias)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-11, atol=1e-11)
    for layout in (torch.contiguous_format, LAST):  # gradients: transposed, of the other order, one number for all
        x = laid(on_cpu, layout)
        for grad in (
            randn(1, (2, 8, 10, 12)).double().transpose(2, 3),
            laid(randn(2, x.shape).double(), LAST),
            torch.ones(()).double().expand(x.shape),
        ):
            check(x, weight, bias, 4, device, 1e-11, grad=grad)


def test_slices_that_break_the_alignment(device):
    """Memory that begins between two vectors of 16 bytes."""
    for dtype in (F16, F32):
        x, weight, bias = sample((1, 16, 16, 16), dtype)
        store = torch.empty(x.numel() + 1, dtype=dtype, device=device)
        mine = store[1:].view(x.shape).copy_(x)
        got = ops.group_norm_relu(mine, 4, weight.to(device), bias.to(device))
        want = slow.group_norm_relu(x.double(), 4, weight.double(), bias.double())
        torch.testing.assert_close(got.cpu().double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
def test_a_large_mean_does_not_cancel_a_small_spread(device, layout):
    """E[x^2] - E[x]^2 in float32 would lose the spread whole: 1e6 against a variance of about 20."""
    x, weight, bias = sample((1, 16, 90, 100), F32, mean=1000.0, spread=0.5)
    check(laid(x, layout), weight, bias, 4, device, 5e-4, relu=False)  # whose mask would turn on the last bit of x
    x, weight, bias = sample((1, 16, 90, 100), F32, mean=-1e6, spread=4.0)
    got = ops.group_norm_relu(laid(x, layout).to(device), 4, weight.to(device), bias.to(device)).cpu()
    torch.testing.assert_close(
        got.double(), slow.group_norm_relu(x.double(), 4, weight.double(), bias.double()), rtol=0, atol=0.05
    )


@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
@pytest.mark.parametrize('place', [0, -1])
def test_one_value_far_from_the_rest(device, layout, place):
    """Also where it comes first, and a sum shifted by the first value would cancel."""
    x, weight, bias = sample((1, 8, 60, 70), F32, mean=0.0, spread=1.0)
    x[0, :, place, place] = 1e4
    check(laid(x, layout), weight, bias, 4, device, 5e-4, relu=False)


@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
def test_half_precision_at_the_end_of_its_range(device, layout):
    x = torch.full((1, 8, 150, 160), 65504.0, dtype=F16)
    x[:, :, ::2] = -65504.0
    got = ops.group_norm_relu(laid(x, layout).to(device), 2, torch.ones(8, device=device), torch.zeros(8, device=device))
    assert got[:, :, 1::2].eq(1).all() and got[:, :, ::2].eq(0).all()


@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
@pytest.mark.parametrize('value', [0.0, 0.1, -7.0])
def test_equal_values(device, layout, value):
    """No spread: the bias comes out, and the mean's last bits times 1 / sqrt(eps)."""
    x = laid(torch.full((2, 8, 40, 50), value, dtype=F32, device=device), layout).requires_grad_()
    bias = torch.linspace(-1, 1, 8, device=device)
    got = ops.group_norm_relu(x, 4, torch.ones(8, device=device), bias)
    want = bias.relu().view(1, 8, 1, 1).expand_as(got)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6 + 316 * 8 * 1.2e-7 * abs(value))
    (grad,) = torch.autograd.grad(got.sum(), x)
    assert grad.isfinite().all()


@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
@pytest.mark.parametrize('dtype', [F64, F32, F16])
def test_one_value_a_group(device, layout, dtype):
    x, weight, bias = sample((3, 16, 1, 1), dtype)
    mine = laid(x, layout).to(device).requires_grad_()
    got = ops.group_norm_relu(mine, 16, weight.to(device), bias.to(device))
    assert torch.equal(got.cpu(), bias.relu().to(dtype).view(1, 16, 1, 1).expand_as(got))
    (grad,) = torch.autograd.grad(got.sum(), mine)
    assert grad.abs().max() < (1e-3 if dtype != F64 else 1e-12), 'of a constant'


@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf')])
def test_not_finite_stays_in_its_group(device, layout, value):
    x, weight, bias = sample((2, 32, 50, 60), F32)
    x[1, 9, 30, 31] = value
    inputs = [t.to(device).requires_grad_() for t in (laid(x, layout), weight, bias)]
    got = ops.group_norm_relu(inputs[0], 8, *inputs[1:])
    to_x, to_weight, to_bias = torch.autograd.grad(got, inputs, torch.ones_like(got))
    hit = torch.zeros(x.shape, dtype=torch.bool)
    hit[1, 8:12] = True
    for out in (got, to_x):
        assert torch.equal(out.isnan().cpu(), hit) and out.cpu()[~hit].isfinite().all()
    rest = torch.ones(32, dtype=torch.bool)
    rest[8:12] = False
    assert to_weight.cpu()[rest].isfinite().all() and to_bias.isfinite().all()
    torch_out = F.group_norm(inputs[0], 8, *inputs[1:]).relu()
    assert torch.equal(torch_out.isnan(), got.isnan())
    (torch_bias,) = torch.autograd.grad(torch_out, inputs[2:], torch.ones_like(got))
    torch.testing.assert_close(to_bias, torch_bias, rtol=1e-4, atol=5)  # NaN lets the gradient through in both


@pytest.mark.parametrize('shape', [(0, 8, 4, 5), (2, 8, 0, 5), (2, 8, 0)])
def test_empty(device, shape):
    x = torch.zeros(shape, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    out = ops.group_norm_relu(x, 4, weight, torch.zeros(8, device=device, requires_grad=True))
    assert out.shape == shape
    out.sum().backward()
    assert x.grad.shape == shape and torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
@pytest.mark.parametrize('dtype', [F32, F16])
def test_the_backward_pass_sees_the_same_mask(device, layout, dtype):
    """Values that normalise to about zero, where rounding decides: the bias' gradient counts the outputs above zero."""
    x = torch.randint(-1, 2, (2, 16, 70, 80), generator=torch.Generator().manual_seed(0)).to(dtype) + 1000
    inputs = [t.to(device).requires_grad_() for t in (laid(x, layout), torch.rand(16) + 0.5, torch.zeros(16))]
    got = ops.group_norm_relu(inputs[0], 4, *inputs[1:])
    assert got.unique().numel() > 3
    counted = torch.autograd.grad(got, inputs[2], torch.ones_like(got))[0]
    assert torch.equal(counted, (got > 0).sum((0, 2, 3)).float())


@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
def test_repeats_bit_by_bit(device, layout):
    x, weight, bias = (t.to(device).requires_grad_() for t in sample((2, 64, 120, 130), F16))
    x = laid(x.detach(), layout).requires_grad_()
    results = []
    for _ in range(3):
        out = ops.group_norm_relu(x, 32, weight, bias)
        results.append([out, *torch.autograd.grad(out, (x, weight, bias), torch.ones_like(out))])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again))


def test_samples_do_not_depend_on_each_other(device):
    x, weight, bias = (t.to(device) for t in sample((3, 16, 60, 50), F32))
    together = ops.group_norm_relu(x, 4, weight, bias)
    for b in range(3):
        torch.testing.assert_close(
            ops.group_norm_relu(x[b : b + 1], 4, weight, bias), together[b : b + 1], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize('threads', [1, 2, 5])
@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
def test_threads_do_not_change_the_result(threads, layout):
    x, weight, bias = sample((2, 16, 80, 90), F32)
    x = laid(x, layout).requires_grad_()
    before = torch.get_num_threads()
    want = ops.group_norm_relu(x, 4, weight, bias)
    (want_grad,) = torch.autograd.grad(want.sum(), x)
    torch.set_num_threads(threads)
    try:
        got = ops.group_norm_relu(x, 4, weight, bias)
        (grad,) = torch.autograd.grad(got.sum(), x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got, want) and torch.equal(grad, want_grad)


def test_keeps_the_input_and_two_numbers_a_group(device):
    for layout in (torch.contiguous_format, LAST):
        x, weight, bias = (t.to(device).requires_grad_() for t in sample((2, 16, 20, 20), F16))
        x = laid(x.detach(), layout).requires_grad_()
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            ops.group_norm_relu(x, 4, weight, bias).sum()
        assert sorted(t.numel() for t in kept) == [8, 8, 16, 16, x.numel()]
        assert any(t.data_ptr() == x.data_ptr() for t in kept)


def test_frozen_parts(device):
    x, weight, bias = (t.to(device) for t in sample((2, 8, 5, 6)))
    assert not ops.group_norm_relu(x, 4, weight, bias).requires_grad
    out = ops.group_norm_relu(x, 4, weight.requires_grad_(), bias)
    assert torch.autograd.grad(out.sum(), weight)[0].shape == (8,) and x.grad is None
    half = ops.group_norm_relu(x.half().requires_grad_(), 4, weight.detach().half(), bias.half())  # parameters of any type
    assert half.dtype == F16 and half.requires_grad


def test_under_autocast_the_map_keeps_its_type(device):
    x, weight, bias = (t.to(device) for t in sample((1, 8, 6, 6), BF16))
    with torch.autocast(device, BF16):
        out = ops.group_norm_relu(x, 4, weight, bias)
    assert out.dtype == BF16 and torch.equal(out, ops.group_norm_relu(x, 4, weight, bias))


def test_a_second_derivative_is_an_error(device):
    x, weight, bias = (t.to(device).requires_grad_() for t in sample((1, 8, 5, 6)))
    (grad,) = torch.autograd.grad(ops.group_norm_relu(x, 4, weight, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='group_norm_relu: second derivatives are not implemented'):
        grad.sum().backward()


def test_wrong_arguments_are_named():
    x, weight, bias = sample((1, 8, 5, 6))
    for arguments, message in [
        ((x[0, 0, 0], 4, weight, bias), r'group_norm_relu: x must be \(B, C, ...\).*got shape \(6,\)'),
        ((x.long(), 4, weight, bias), r'x must be .*float64, got .*int64'),
        ((x, 3, weight, bias), 'groups must be a divisor of the 8 channels, got 3'),
        ((x, 0, weight, bias), 'groups must be a divisor of the 8 channels, got 0'),
        ((x, 4, weight[:4], bias), r'weight must be \(8,\) as the channels of x, got shape \(4,\)'),
        ((x, 4, weight, bias.to('meta')), 'bias must be on the device of x'),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.group_norm_relu(*arguments)
    with pytest.raises(TypeError, match='x must be a tensor'):
        ops.group_norm_relu([1.0], 1, weight, bias)
    raw = torch.ops.mmdet3d_ext
    for arguments, message in [
        ((x, weight.float(), bias, 4, 1e-5, True), "'weight' and 'bias' must be .*Double"),
        ((x, weight, bias, 3, 1e-5, True), "'groups' must divide the channels"),
        ((x[0, 0, 0], weight, bias, 3, 1e-5, True), "'x' must be"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            raw.group_norm_relu(*arguments)
    out, mean, rstd = raw.group_norm_relu(x, weight, bias, 4, 1e-5, True)
    with pytest.raises(RuntimeError, match="'grad' must be like 'x'"):
        raw.group_norm_relu_backward(out[:, :4], x, mean, rstd, weight, bias, 4, True)
    with pytest.raises(RuntimeError, match="'mean' and 'rstd' must be"):
        raw.group_norm_relu_backward(out, x, mean[:, :2], rstd, weight, bias, 4, True)


@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
def test_opcheck(device, layout):
    x, weight, bias = (t.to(device) for t in sample((2, 8, 5, 6), F32))
    x, raw = laid(x, layout), torch.ops.mmdet3d_ext
    torch.library.opcheck(raw.group_norm_relu.default, (x, weight, bias, 4, 1e-5, True))
    out, mean, rstd = raw.group_norm_relu(x, weight, bias, 4, 1e-5, True)
    torch.library.opcheck(raw.group_norm_relu_backward.default, (out, x, mean, rstd, weight, bias, 4, True))
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]
    torch.library.opcheck(raw.group_norm_relu.default, (*inputs, 4, 1e-5, True))
    torch.library.opcheck(raw.group_norm_relu.default, (x.transpose(2, 3).requires_grad_(), *inputs[1:], 4, 1e-5, False))


@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
def test_compiles_fullgraph(device, layout):
    x, weight, bias = (t.to(device).requires_grad_() for t in sample((2, 8, 5, 6), F32))
    x = laid(x.detach(), layout).requires_grad_()

    def step(x, weight, bias):
        return ops.group_norm_relu(x * 2, 4, weight, bias) * 3

    got, want = torch.compile(step, fullgraph=True, backend='aot_eager')(x, weight, bias), step(x, weight, bias)
    assert torch.equal(got, want) and got.stride() == want.stride()
    for a, b in zip(torch.autograd.grad(got.sum(), (x, weight, bias)), torch.autograd.grad(want.sum(), (x, weight, bias))):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
@pytest.mark.parametrize('dtype', [F16, BF16, F32])
def test_a_full_size_map(layout, dtype):
    """The size it was written for, against torch in float32."""
    x = (
        torch.randn(1, 256, 800, 800, device='cuda', dtype=dtype)
        .mul_(2)
        .add_(1)
        .contiguous(memory_format=layout)
        .requires_grad_()
    )
    weight, bias = (torch.randn(256, device='cuda').requires_grad_() for _ in range(2))
    got = ops.group_norm_relu(x, 32, weight, bias)
    normed = F.group_norm(x.float(), 32, weight, bias)
    want = normed.relu()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, want.to(dtype), rtol=tolerance, atol=tolerance)
    # Of 164 million values a few lie so close to zero that rounding decides whether the ReLU passes their gradient.
    grad = torch.randn_like(got).masked_fill_(normed.detach().abs() < 1e-5, 0)
    found, wanted = (torch.autograd.grad(y, (x, weight, bias), grad.to(y.dtype)) for y in (got, want))
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=5 * tolerance)
    for a, b in zip(found[1:], wanted[1:]):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2.0)  # sums of 640,000 numbers around one


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize('layout', [torch.contiguous_format, LAST])
def test_more_than_2_to_the_31_values(layout):
    x = torch.empty(2, 1024, 1100, 1100, device='cuda', dtype=F16).normal_().contiguous(memory_format=layout).requires_grad_()
    weight, bias = torch.ones(1024, device='cuda'), torch.zeros(1024, device='cuda')
    got = ops.group_norm_relu(x, 32, weight, bias)
    got.backward(torch.ones_like(got))
    for part in (slice(0, 32), slice(992, 1024)):
        for b in (0, 1):
            own = x.detach()[b : b + 1, part].float().requires_grad_()
            want = F.group_norm(own, 1).relu()
            torch.testing.assert_close(got.detach()[b : b + 1, part].float(), want.detach(), rtol=2e-3, atol=2e-3)
            want.backward(torch.ones_like(want))
            torch.testing.assert_close(x.grad[b : b + 1, part].float(), own.grad, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
def test_no_synchronisation():
    x, weight, bias = (t.cuda().requires_grad_() for t in sample((2, 16, 30, 40), F16))
    ops.group_norm_relu(x, 4, weight, bias).sum().backward()
    torch.cuda.set_sync_debug_mode('error')
    try:
        ops.group_norm_relu(x, 4, weight, bias).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode('default')


@pytest.mark.gpu
def test_other_stream():
    x, weight, bias = sample((2, 16, 200, 200), F32)
    want = slow.group_norm_relu(x.double(), 4, weight.double(), bias.double())
    weight, bias = weight.cuda(), bias.cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the input arrives late on this stream
        got = ops.group_norm_relu(x.pin_memory().cuda(non_blocking=True), 4, weight, bias)
    stream.synchronize()
    torch.testing.assert_close(got.cpu().double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
def test_second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip('needs two GPUs')
    x, weight, bias = sample((2, 16, 20, 20), F32)
    got = ops.group_norm_relu(x.to('cuda:1'), 4, weight.to('cuda:1'), bias.to('cuda:1'))
    torch.testing.assert_close(got.cpu(), ops.group_norm_relu(x, 4, weight, bias), rtol=1e-5, atol=1e-5)
