"""Point-to-voxel reduction against a plain-torch twin and mmcv's CPU op; NaN, ties, empty and huge inputs."""

import os
import subprocess
import sys

import ops_reference as slow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import REPO

from mmdet3d_ext import ops

REDUCTIONS = ['sum', 'mean', 'max']


def sample(points=400, channels=6, cells=5, columns=4, seed=0, integers=True):
    generator = torch.Generator().manual_seed(seed)
    coords = torch.randint(-1, cells, (points, columns), generator=generator, dtype=torch.int32)
    if integers:  # sums of small integers are exact in any order
        return torch.randint(-8, 9, (points, channels), generator=generator).float(), coords
    return torch.randn(points, channels, generator=generator, dtype=torch.float64), coords


def _maps(groups):
    return groups[1:]


def check(feats, coords, reduce, device, tolerance=0.0):
    """Values, maps and gradient equal the twin's."""
    twin = feats.clone().double().requires_grad_()
    want = slow.point_to_voxel(twin, coords, reduce)
    mine = feats.to(device).requires_grad_()
    got = ops.dynamic_point_to_voxel(mine, coords.to(device), reduce)
    for k, name in ((1, 'coords'), (2, 'point2voxel'), (3, 'counts')):
        assert got[k].dtype == want[k].dtype and torch.equal(got[k].cpu(), want[k]), name
    torch.testing.assert_close(got[0].detach().cpu().double(), want[0].detach(), atol=tolerance, rtol=tolerance, equal_nan=True)
    grad = torch.randint(-8, 9, got[0].shape, generator=torch.Generator().manual_seed(1)).double()
    (want_grad,) = torch.autograd.grad(want[0], twin, grad)
    (got_grad,) = torch.autograd.grad(got[0], mine, grad.to(device, feats.dtype))
    torch.testing.assert_close(got_grad.cpu().double(), want_grad, atol=tolerance, rtol=tolerance)
    return got


@pytest.mark.parametrize('reduce', REDUCTIONS)
@pytest.mark.parametrize('channels', [1, 3, 4, 64, 130])
@pytest.mark.parametrize('columns', [3, 4])
def test_equals_the_twin(device, reduce, channels, columns):
    # The mean divides: float32 rounding of a quotient.
    check(*sample(channels=channels, columns=columns), reduce, device, 1e-6 if reduce == 'mean' else 0.0)
    check(*sample(channels=channels, columns=columns, integers=False), reduce, device, 1e-12)


@pytest.mark.parametrize('reduce', REDUCTIONS)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_adds_in_float32(device, reduce, dtype):
    feats, coords = sample(points=3000, cells=2, channels=8)
    want = slow.point_to_voxel(feats.double(), coords, reduce)[0].to(dtype)
    got = ops.dynamic_point_to_voxel(feats.to(device, dtype), coords.to(device), reduce)[0]
    assert got.dtype == dtype and torch.equal(got.cpu(), want)
    ones = torch.ones(5000, 8, dtype=dtype, device=device)  # 5000 ones in bfloat16 would stop at 256
    one_voxel = torch.zeros(5000, 3, dtype=torch.int32, device=device)
    assert ops.dynamic_point_to_voxel(ones, one_voxel, 'mean')[0].eq(1).all()


@pytest.mark.parametrize('reduce', REDUCTIONS)
def test_no_points_and_all_dropped(device, reduce):
    for count in (0, 7):
        feats = torch.ones(count, 4, device=device, requires_grad=True)
        coords = torch.full((count, 4), -1, dtype=torch.int32, device=device)
        out, voxels, point2voxel, counts = ops.dynamic_point_to_voxel(feats, coords, reduce)
        assert out.shape == (0, 4) and voxels.shape == (0, 4) and counts.shape == (0,)
        assert point2voxel.tolist() == [-1] * count
        out.sum().backward()
        assert torch.equal(feats.grad, torch.zeros_like(feats))


@pytest.mark.parametrize('reduce', REDUCTIONS)
@pytest.mark.parametrize('points', [1, 2, 2048, 2049, 2050, 3071, 3072, 3073, 7000])
def test_one_voxel(device, reduce, points):
    feats = torch.randint(-8, 9, (points, 5)).float()
    check(
        feats,
        torch.tensor([[0, 3, 2, 1]], dtype=torch.int32).repeat(points, 1),
        reduce,
        device,
        1e-6 if reduce == 'mean' else 0.0,
    )


@pytest.mark.parametrize('reduce', REDUCTIONS)
def test_full_and_sparse_voxels_together(device, reduce):
    """Several voxels beyond one thread group, between small ones, some dropped: every boundary of the chunks is crossed."""
    generator = torch.Generator().manual_seed(3)
    sizes = [5, 2500, 1, 4096, 2049, 100, 3, 5000, 2048]
    coords = torch.cat([torch.tensor([[0, v, 1]]).repeat(n, 1) for v, n in enumerate(sizes)] + [torch.full((50, 3), -1)])
    coords = coords[torch.randperm(len(coords), generator=generator)]
    feats = torch.randint(-8, 9, (len(coords), 6), generator=generator).float()
    got = check(feats, coords, reduce, device, 1e-6 if reduce == 'mean' else 0.0)
    assert got[3].tolist() == sizes


@pytest.mark.parametrize('reduce', REDUCTIONS)
def test_one_voxel_per_point(device, reduce):
    coords = torch.stack([torch.zeros(300), torch.randperm(300), torch.zeros(300)], 1).long()
    check(sample(300)[0], coords, reduce, device)


def test_order_of_voxels(device):
    coords = torch.tensor([[1, 0, 0, 0], [0, 2, 0, 0], [0, 1, 5, 9], [0, 1, 5, 2], [0, 1, 4, 9], [0, -1, 4, 9]], device=device)
    _, voxels, point2voxel, counts = ops.dynamic_point_to_voxel(torch.ones(6, 1, device=device), coords, 'sum')
    assert voxels.tolist() == [[0, 1, 4, 9], [0, 1, 5, 2], [0, 1, 5, 9], [0, 2, 0, 0], [1, 0, 0, 0]]
    assert point2voxel.tolist() == [4, 3, 2, 1, 0, -1] and counts.tolist() == [1] * 5


@pytest.mark.parametrize('largest', [3, 63, 99, 250, 70000, 2**31 - 1, 2**40, 2**62])
def test_coordinates_of_any_size(device, largest):
    """A small bitmap, a larger one (of 2^24 and 2^27 cells), sorted 32-bit keys, 64-bit keys, and columns that must be ranked; in turns,
    as what came before decides what is tried first."""
    values = torch.tensor([0, 1, largest // 2, largest])
    coords = values[torch.randint(0, 4, (200, 4), generator=torch.Generator().manual_seed(0))]
    coords[::7, 2] = -1
    for _ in range(2):
        check(sample(200)[0], coords, 'sum', device)
        if largest < 2**31:
            check(sample(200)[0], coords.int(), 'max', device)
    check(*sample(), 'sum', device)


@pytest.mark.gpu
@pytest.mark.parametrize('largest', [5, 90, 250, 70000])
@pytest.mark.parametrize('points', [1, 255, 256, 257, 5000])
def test_groups_are_the_same_on_both_devices(largest, points):
    """Every way of finding them, with voxels of one point up to all, and rows that are dropped."""
    generator = torch.Generator().manual_seed(largest + points)
    spread = torch.rand(points, 4, generator=generator) ** 3
    coords = (spread * (largest + 1.5)).int() - (torch.rand(points, 1, generator=generator) < 0.1).int()
    coords[-1] = largest
    coords[: points // 3] = coords[0]
    for _ in range(2):  # what the first call learned decides how the second begins
        cpu, cuda = ops.group_points(coords), ops.group_points(coords.cuda())
        for name, a, b in zip(ops.PointGroups._fields, cpu, cuda):
            assert b.is_contiguous() and torch.equal(a, b.cpu()), name


def test_more_columns_than_a_packed_key(device):
    coords = torch.randint(0, 2, (100, 6), generator=torch.Generator().manual_seed(0)).to(device)
    groups = ops.group_points(coords)
    assert torch.equal(groups.voxel_coords.cpu(), torch.unique(coords.cpu(), dim=0))


def test_ties_go_to_the_first_point(device):
    feats = torch.tensor([[1.0, 5.0], [5.0, 5.0], [5.0, 1.0], [5.0, 5.0]], device=device, requires_grad=True)
    coords = torch.zeros(4, 3, dtype=torch.int32, device=device)
    ops.dynamic_point_to_voxel(feats, coords, 'max')[0].sum().backward()
    assert feats.grad.tolist() == [[0, 1], [1, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize('reduce', REDUCTIONS)
@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf')])
def test_not_finite_stays_in_its_voxel_and_channel(device, reduce, value):
    feats, coords = sample(channels=4, cells=2)
    coords = coords.clamp(min=0)
    voxel = slow.point_to_voxel(feats, coords, 'sum')[2]
    bad = int((voxel == voxel[0]).nonzero()[-1])
    feats[bad, 2] = value
    mine = feats.to(device).requires_grad_()
    out, _, point2voxel, _ = ops.dynamic_point_to_voxel(mine, coords.to(device), reduce)
    others = torch.ones_like(out, dtype=torch.bool)
    others[point2voxel[bad].long(), 2] = False
    assert out[others].isfinite().all()
    hit = out[~others].item()
    if reduce == 'max' and value == -float('inf'):
        assert hit > value, 'another point of the voxel is larger'
    else:
        assert str(hit) == str(value)
    (grad,) = torch.autograd.grad(out, mine, torch.ones_like(out))
    assert grad.isfinite().all()


def test_all_nan_voxel(device):
    """NaN wins, the gradient goes to the voxel's first NaN point and stays finite."""
    feats = torch.zeros(128, 64, device=device)
    feats[[5, 17, 40, 99]] = float('nan')
    feats.requires_grad_()
    coords = torch.zeros(128, 3, dtype=torch.int32, device=device)
    coords[:, 2] = torch.arange(128, device=device) + 1
    coords[[5, 17, 40, 99], 2] = 0
    out = ops.dynamic_point_to_voxel(feats, coords, 'max')[0]
    assert out[0].isnan().all() and out[1:].eq(0).all()
    out.backward(torch.full_like(out, 7.0))
    expected = torch.full((128, 64), 7.0)
    expected[[17, 40, 99]] = 0
    assert torch.equal(feats.grad.cpu(), expected)


@pytest.mark.gpu
def test_gradient_of_nan_stays_inside_its_buffer():
    """The bytes on both sides of the gradient buffer keep their values: mmcv's op writes one row behind it here."""
    points, channels = 128, 64
    feats = torch.randn(points, channels, device='cuda')
    feats[:4] = float('nan')
    coords = torch.arange(points, device='cuda', dtype=torch.int32)[:, None].repeat(1, 3)
    coords[:4] = 0
    groups = ops.group_points(coords)
    out, arg = torch.ops.mmdet3d_ext.group_reduce(feats, *_maps(groups), 2)
    torch.cuda.synchronize()
    grad = torch.ones_like(out)
    blocks = [torch.full((points, channels), 7.0, device='cuda') for _ in range(40)]
    size = blocks[0].numel() * 4
    by_address = sorted(blocks, key=torch.Tensor.data_ptr)
    middle = next(
        k
        for k in range(1, 39)
        if by_address[k].data_ptr() - by_address[k - 1].data_ptr()
        == size
        == by_address[k + 1].data_ptr() - by_address[k].data_ptr()
    )
    before, address, after = by_address[middle - 1], by_address[middle].data_ptr(), by_address[middle + 1]
    keep = [block for block in blocks if block.data_ptr() != address]
    del blocks, by_address
    result = torch.ops.mmdet3d_ext.group_reduce_backward(grad, groups.point2voxel, groups.counts, arg, 2)
    assert result.data_ptr() == address, 'the allocator did not reuse the hole between the two canaries'
    torch.cuda.synchronize()
    assert before.eq(7).all() and after.eq(7).all() and all(block.eq(7).all() for block in keep)
    assert result[0].eq(1).all() and result[1:4].eq(0).all() and result[4:].eq(1).all()


@pytest.mark.parametrize('reduce', REDUCTIONS)
def test_non_contiguous_inputs_and_gradients(device, reduce):
    feats, coords = sample(channels=8)
    wide, wide_coords = feats.to(device).repeat(1, 2), torch.cat([coords, coords], 1).to(device)
    want = ops.dynamic_point_to_voxel(feats.to(device), coords.to(device), reduce)[0]
    mine = wide[:, ::2].requires_grad_()
    got = ops.dynamic_point_to_voxel(mine, wide_coords[:, :4], reduce)[0]
    same = ops.dynamic_point_to_voxel(wide[:, ::2].contiguous(), coords.to(device), reduce)[0]
    assert want.shape == got.shape and torch.equal(got, same)
    grad = torch.arange(got.numel(), device=device, dtype=torch.float32).view(got.shape[1], got.shape[0]).t()
    (strided,) = torch.autograd.grad(got, mine, grad, retain_graph=True)
    (dense,) = torch.autograd.grad(got, mine, grad.contiguous(), retain_graph=True)
    (expanded,) = torch.autograd.grad(got.sum(), mine)
    assert torch.equal(strided, dense) and expanded.shape == mine.shape


@pytest.mark.parametrize('reduce', REDUCTIONS)
def test_gradcheck(device, reduce):
    feats, coords = sample(points=40, channels=3, cells=3, integers=False)
    groups = ops.group_points(coords.to(device))
    assert torch.autograd.gradcheck(lambda f: ops.reduce_points(f, groups, reduce), (feats.to(device).requires_grad_(),))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 2), st.integers(-1, 2), st.integers(0, 3), st.integers(-9, 9)), max_size=40),
    st.sampled_from(REDUCTIONS),
)
def test_property_equals_the_twin(rows, reduce):
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
    for device in ['cpu'] + ['cuda'] * torch.cuda.is_available():
        check(table[:, 3:].float(), table[:, :3].int(), reduce, device, 1e-6 if reduce == 'mean' else 0.0)


@pytest.mark.parametrize('average', [True, False])
def test_module_equals_mmcv(device, average):
    """On the device where mmcv has a kernel: its op is right on finite features."""
    mmcv_ops = pytest.importorskip('mmcv.ops')
    arguments = ([0.5] * 3, [-2.0] * 3 + [2.0] * 3, average)
    feats, coords = sample(channels=5)
    coords = coords.clamp(min=0)  # mmcv's CPU path assumes that a dropped voxel exists; rows of one sample, sorted by sample
    coords = coords[coords[:, 0].sort(stable=True).indices]
    feats, coords = feats.to(device), coords.to(device)
    mine = ops.DynamicScatter(*arguments)
    got_feats, got_coords = mine(feats, coords)
    try:
        want_feats, want_coords = mmcv_ops.DynamicScatter(*arguments)(feats, coords)
    except RuntimeError as error:
        if 'not found' not in str(error) and 'not compiled' not in str(error):
            raise
        pytest.skip(f'mmcv has no kernel for {device}: {error}')
    assert torch.equal(got_coords, want_coords)
    torch.testing.assert_close(got_feats, want_feats, rtol=1e-6, atol=1e-6)


def test_module_with_coordinates_outside_its_grid(device):
    """The grid of 8 x 8 x 8 cells only describes the module: a point behind it keeps its own voxel, one before it is dropped."""
    module = ops.DynamicScatter([0.5] * 3, [-2.0] * 3 + [2.0] * 3, False)
    coords = torch.tensor([[0, 0, 0, 7], [0, 0, 0, 8], [0, 900, 0, 0], [0, 0, -1, 0], [0, 900, 0, 0]], device=device)
    feats = torch.arange(5.0, device=device)[:, None].requires_grad_()
    out, voxels = module(feats, coords)
    assert voxels.tolist() == [[0, 0, 0, 7], [0, 0, 0, 8], [0, 900, 0, 0]] and out.flatten().tolist() == [0, 1, 4]
    assert torch.autograd.grad(out.sum(), feats)[0].flatten().tolist() == [1, 1, 0, 0, 1]


def test_errors():
    feats, coords = sample()
    with pytest.raises(ValueError, match=r"dynamic_point_to_voxel: reduce must be one of \('sum', 'mean', 'max'\), got 'min'"):
        ops.dynamic_point_to_voxel(feats, coords, 'min')
    with pytest.raises(ValueError, match=r'feats must be of as many points as coords \(400\), got 399'):
        ops.dynamic_point_to_voxel(feats[1:], coords)
    with pytest.raises(ValueError, match=r'coords must be \(P, 3\) or \(P, 4\), got shape \(400, 2\)'):
        ops.dynamic_point_to_voxel(feats, coords[:, :2])
    with pytest.raises(ValueError, match='coords must be int32 or int64, got torch.float32'):
        ops.dynamic_point_to_voxel(feats, coords.float())
    with pytest.raises(ValueError, match='feats must be floating, got torch.int32'):
        ops.dynamic_point_to_voxel(feats.int(), coords)
    groups = ops.group_points(coords)
    with pytest.raises(RuntimeError, match="'reduce' must be 0 .*, got 5"):
        torch.ops.mmdet3d_ext.group_reduce(feats, *_maps(groups), 5)
    with pytest.raises(RuntimeError, match='the groups were made of 400 points'):
        torch.ops.mmdet3d_ext.group_reduce(feats[1:], *_maps(groups), 0)


def test_opcheck(device):
    feats, coords = sample(points=40)
    feats, coords = feats.to(device).requires_grad_(), coords.to(device)
    torch.library.opcheck(torch.ops.mmdet3d_ext.point_groups.default, (coords,))
    groups = ops.group_points(coords)
    for reduce in range(3):
        torch.library.opcheck(torch.ops.mmdet3d_ext.dynamic_point_to_voxel.default, (feats, coords, reduce))
        torch.library.opcheck(torch.ops.mmdet3d_ext.group_reduce.default, (feats, *_maps(groups), reduce))
        out, arg = torch.ops.mmdet3d_ext.group_reduce(feats.detach(), *_maps(groups), reduce)
        torch.library.opcheck(
            torch.ops.mmdet3d_ext.group_reduce_backward.default, (out, groups.point2voxel, groups.counts, arg, reduce)
        )


@pytest.mark.parametrize('reduce', REDUCTIONS)
def test_compiles_fullgraph(device, reduce):
    feats, coords = (tensor.to(device) for tensor in sample())
    feats.requires_grad_()

    def step(f, c):
        return ops.dynamic_point_to_voxel(f * 2, c, reduce)[0].sum(0)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(step, fullgraph=True, backend='aot_eager')(feats, coords)
    assert torch.equal(got, step(feats, coords))
    (want_grad,) = torch.autograd.grad(step(feats, coords).sum(), feats)
    (got_grad,) = torch.autograd.grad(got.sum(), feats)
    assert torch.equal(got_grad, want_grad)


@pytest.mark.parametrize('reduce', REDUCTIONS)
def test_repeats_bit_by_bit(device, reduce):
    feats = torch.randn(20000, 16, device=device)
    coords = torch.randint(0, 4, (20000, 3), device=device)
    first, again = (ops.dynamic_point_to_voxel(feats, coords, reduce)[0] for _ in range(2))
    assert torch.equal(first, again)


# In a process of its own: whether the warnings of C++ code are shown is decided when torch is imported.
ONE_SYNCHRONISATION = """
import torch
from mmdet3d_ext import ops
generator = torch.Generator().manual_seed(0)
feats = torch.randn(400, 6, generator=generator).cuda().requires_grad_()
coords = torch.randint(-1, 5, (400, 4), generator=generator).cuda()
ops.dynamic_point_to_voxel(feats, coords, 'max')
torch.cuda.set_sync_debug_mode('warn')
print('begin', flush=True)
ops.dynamic_point_to_voxel(feats, coords, 'max')[0].sum().backward()
torch.cuda.set_sync_debug_mode('default')
print('end')
"""


@pytest.mark.gpu
def test_one_synchronisation():
    env = dict(os.environ, TORCH_CPP_LOG_LEVEL='WARNING', PYTHONWARNINGS='always')
    result = subprocess.run([sys.executable, '-c', ONE_SYNCHRONISATION], cwd=REPO, env=env, capture_output=True, text=True)
    assert result.stdout.split() == ['begin', 'end'], result.stderr[-2000:]
    assert result.stderr.count('called a synchronizing') == 1, result.stderr[-2000:]


@pytest.mark.gpu
def test_reduction_and_gradient_do_not_synchronise():
    feats, coords = (tensor.cuda() for tensor in sample())
    groups = ops.group_points(coords)
    feats.requires_grad_()
    torch.cuda.set_sync_debug_mode('error')
    try:
        for reduce in REDUCTIONS:
            ops.reduce_points(feats, groups, reduce).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode('default')


@pytest.mark.gpu
def test_other_stream():
    feats, coords = sample(points=5000)
    want = slow.point_to_voxel(feats, coords, 'sum')[0]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the inputs arrive late on this stream
        got = ops.dynamic_point_to_voxel(
            feats.pin_memory().cuda(non_blocking=True), coords.pin_memory().cuda(non_blocking=True), 'sum'
        )[0]
    stream.synchronize()
    assert torch.equal(got.cpu(), want)


@pytest.mark.gpu
def test_second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip('needs two GPUs')
    feats, coords = sample()
    got = ops.dynamic_point_to_voxel(feats.to('cuda:1'), coords.to('cuda:1'), 'max')[0]
    assert got.device == torch.device('cuda:1') and torch.equal(got.cpu(), slow.point_to_voxel(feats, coords, 'max')[0])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize('reduce', REDUCTIONS)
def test_more_than_2_to_the_31_values(reduce):
    points, channels = 2**31 // 128 + 1000, 128
    feats = torch.ones(points, channels, dtype=torch.float16, device='cuda')
    feats[-1] = 3
    coords = torch.zeros(points, 3, dtype=torch.int32, device='cuda')
    coords[:, 2] = torch.arange(points, device='cuda') // 2
    feats.requires_grad_()
    out, _, _, counts = ops.dynamic_point_to_voxel(feats, coords, reduce)
    last = {'sum': 4, 'mean': 2, 'max': 3}[reduce]
    assert out[-1].eq(last).all() and out[:-1].eq(2 if reduce == 'sum' else 1).all() and counts.sum() == points
    (grad,) = torch.autograd.grad(out, feats, torch.ones_like(out))
    assert grad[-1].eq({'sum': 1, 'mean': 0.5, 'max': 1}[reduce]).all()
    assert grad[-2].eq({'sum': 1, 'mean': 0.5, 'max': 0}[reduce]).all()
