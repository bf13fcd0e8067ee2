"""Lift-splat pooling against materialising depth x context, and bev_pool against index_add; the reference's numbers."""

import ops_reference as slow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import Golden, randn, weights_rule

from mmdet3d_ext import ops

BOUNDS = [[-6.0, 6.0, 0.5], [-4.0, 5.0, 0.25], [-2.0, 2.0, 2.0]]
LOWER, STEP, CELLS = [-6.0, -4.0, -2.0], [0.5, 0.25, 2.0], [24, 36, 2]


def integers(shape, low, high, seed):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).float()


def sample(batch=2, cameras=3, bins=5, channels=8, height=5, width=11, seed=0, spread=3.0):
    """Integer depth and context: sums are exact in any order."""
    return (
        integers((batch, cameras, bins, height, width), 0, 5, seed),
        integers((batch, cameras, channels, height, width), -8, 9, seed + 1),
        randn(seed + 2, (batch, cameras, bins, height, width, 3)) * spread,
    )


def check(depth, context, geometry, device, tolerance=0.0, bounds=BOUNDS, grid=(LOWER, STEP, CELLS)):
    """Value and both gradients equal the twin's, taken in float64."""
    twins = [t.double().requires_grad_() for t in (depth, context)]
    want = slow.lift_splat(*twins, geometry, *grid)
    mine = [t.to(device).requires_grad_() for t in (depth, context)]
    got = ops.lift_splat(*mine, geometry.to(device), bounds)
    assert got.is_contiguous() and got.dtype == context.dtype
    compare = dict(atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got.detach().cpu().double(), want.detach(), **compare)
    grad = integers(got.shape, -8, 9, 7)
    for a, b, like in zip(torch.autograd.grad(got, mine, grad.to(got)), torch.autograd.grad(want, twins, grad.double()), mine):
        assert a.dtype == like.dtype and a.shape == like.shape
        torch.testing.assert_close(a.cpu().double(), b, **compare)
    return got


@pytest.mark.parametrize('channels', [1, 3, 4, 80, 128, 132, 260, 37])
def test_equals_the_twin(device, channels):
    check(*sample(channels=channels), device)


@pytest.mark.parametrize('shape', [(1, 1, 1, 1, 1), (1, 6, 20, 8, 22), (3, 1, 33, 9, 7), (1, 2, 16, 16, 8), (2, 1, 17, 1, 40)])
def test_shapes(device, shape):
    batch, cameras, bins, height, width = shape
    check(*sample(batch, cameras, bins, 12, height, width), device)


def test_columns_over_one_cell(device):
    """The usual case: pixels above each other see the same cell, full tiles beside empty ones, many points per cell."""
    depth, context, geometry = sample(1, 2, 24, 16, 32, 12, spread=0.3)
    geometry[..., 0] += torch.arange(24).view(1, 1, -1, 1, 1) * 0.2
    geometry = geometry[:, :, :, :1].repeat(1, 1, 1, 32, 1, 1)
    check(depth, context, geometry, device)


def test_all_points_in_one_cell(device):
    depth, context, _ = sample(1, 2, 40, 8, 16, 16)
    got = check(depth, context, torch.full((*depth.shape, 3), 0.1), device)
    assert (got != 0).any(1).sum() == 1


def test_random_double(device):
    depth, context, geometry = sample()
    check(randn(5, depth.shape).double(), randn(6, context.shape).double(), geometry, device, 1e-12)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('depth_dtype', [None, torch.float32])
def test_half_precision(device, dtype, depth_dtype):
    depth, context, geometry = sample(channels=12)
    depth, context = depth.to(device), context.to(device)
    a, b = depth.to(depth_dtype or dtype).requires_grad_(), context.to(dtype).requires_grad_()
    got = ops.lift_splat(a, b, geometry.to(device), BOUNDS)
    want = slow.lift_splat(depth.double().cpu(), context.double().cpu(), geometry, LOWER, STEP, CELLS)
    assert got.dtype == dtype and torch.equal(got.cpu(), want.to(dtype))
    grads = torch.autograd.grad(got, (a, b), torch.ones_like(got))
    assert [g.dtype for g in grads] == [a.dtype, b.dtype]
    twins = [t.double().cpu().requires_grad_() for t in (depth, context)]
    wants = torch.autograd.grad(slow.lift_splat(*twins, geometry, LOWER, STEP, CELLS).sum(), twins)
    for g, w in zip(grads, wants):
        assert torch.equal(g.cpu(), w.to(g.dtype))


def test_points_on_the_bounds_and_not_finite(device):
    """Floor at the lower edge, the upper edge outside; NaN and Inf geometry drops the point, as do far points."""
    x = torch.tensor([-6.0, -6.0000005, -6.4, 6.0, 5.99, float('nan'), float('inf'), -float('inf'), 1e30, -0.0])
    geometry = torch.zeros(1, 1, 10, 1, 1, 3)
    geometry[0, 0, :, 0, 0, 0] = x
    got = check(torch.ones(1, 1, 10, 1, 1), torch.ones(1, 1, 1, 1, 1), geometry, device)
    assert got.sum() == 3 and got[0, 1, 0].sum() == 1 and got[0, 1, -1].sum() == 1
    old = ops.lift_splat(
        torch.ones(1, 1, 10, 1, 1, device=device),
        torch.ones(1, 1, 1, 1, 1, device=device),
        geometry.to(device),
        BOUNDS,
        compat='reference',
    )
    assert old[0, 1, 0].sum() == 3, 'the reference also takes what lies up to one cell below'


def test_no_point_inside(device):
    depth, context, geometry = sample()
    got = check(depth, context, geometry + 1000, device)
    assert got.eq(0).all()


@pytest.mark.parametrize('empty', ['batch', 'cameras', 'bins', 'height', 'channels'])
def test_empty_axes(device, empty):
    depth, context, geometry = sample(**{empty: 0})
    inputs = [t.to(device).requires_grad_() for t in (depth, context)]
    out = ops.lift_splat(*inputs, geometry.to(device), BOUNDS)
    assert out.shape == (depth.shape[0], context.shape[2] * 2, 24, 36) and out.eq(0).all()
    for grad, value in zip(torch.autograd.grad(out.sum(), inputs), inputs):
        assert grad.shape == value.shape and grad.eq(0).all()


@pytest.mark.parametrize('place', ['depth', 'context'])
@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_not_finite_features_stay_in_their_cells(device, place, value):
    depth, context, geometry = sample(channels=4)
    depth += 1
    clean = ops.lift_splat(depth.to(device), context.to(device), geometry.to(device), BOUNDS)
    coords, inside = slow.cell_index(geometry, LOWER, STEP, CELLS)
    inside = inside.view(depth.shape)
    b, n, d, h, w = (int(v) for v in inside.nonzero()[7])
    if place == 'depth':
        depth[b, n, d, h, w] = value
        context[b, n, :, h, w] = 1
        clean = None
        touched = coords.view(*depth.shape, 4)[b, n, d, h, w][None]
    else:
        context[b, n, 2, h, w] = value
        touched = coords.view(*depth.shape, 4)[b, n, :, h, w][inside[b, n, :, h, w]]
    got = ops.lift_splat(depth.to(device), context.to(device), geometry.to(device), BOUNDS)
    hit = torch.zeros(got.shape, dtype=torch.bool, device=device)
    for x, y, z, sample_index in touched.tolist():
        hit[sample_index, z * 4 : z * 4 + 4, x, y] = True
        if place == 'context':
            hit[sample_index, [z * 4 + c for c in (0, 1, 3)], x, y] = False
    assert got[hit].isfinite().logical_not().all() and got[~hit].isfinite().all()
    if clean is not None:
        assert torch.equal(got[~hit], clean[~hit])


def test_non_contiguous_inputs_and_gradients(device):
    depth, context, geometry = (t.to(device) for t in sample(channels=8))
    want = ops.lift_splat(depth, context, geometry, BOUNDS)
    net = torch.cat([depth, context], 2)  # the depth net's output: both are slices of it
    channels_last = context.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    wide = torch.stack([context, context], -1)[..., 0]
    swapped = context.transpose(0, 1).contiguous().transpose(0, 1)
    for depth_form, form in ((net[:, :, :5], net[:, :, 5:]), (depth, channels_last), (depth, wide), (depth, swapped)):
        assert torch.equal(ops.lift_splat(depth_form, form, geometry, BOUNDS), want)
    strided_geometry = torch.cat([geometry, geometry], -1)[..., :3]
    assert torch.equal(ops.lift_splat(depth, context, strided_geometry, BOUNDS), want)
    inputs = [depth.requires_grad_(), context.requires_grad_()]
    out = ops.lift_splat(*inputs, geometry, BOUNDS)
    grad = integers(out.shape, -8, 9, 3).to(device)
    dense = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    for form in (grad.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), torch.stack([grad, grad], -1)[..., 0]):
        for a, b in zip(torch.autograd.grad(out, inputs, form, retain_graph=True), dense):
            assert torch.equal(a, b)
    for a, b in zip(
        torch.autograd.grad(out.sum(), inputs, retain_graph=True), torch.autograd.grad(out, inputs, torch.ones_like(out))
    ):
        assert torch.equal(a, b)


def test_channels_last_gradient_of_a_flat_grid(device):
    """With one height bin a channels-last gradient is read in place."""
    bounds = BOUNDS[:2] + [[-2.0, 2.0, 4.0]]
    depth, context, geometry = (t.to(device) for t in sample(channels=8))
    inputs = [depth.requires_grad_(), context.requires_grad_()]
    out = ops.lift_splat(*inputs, geometry, bounds)
    grad = integers(out.shape, -8, 9, 3).to(device)
    dense = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    for a, b in zip(torch.autograd.grad(out, inputs, grad.contiguous(memory_format=torch.channels_last)), dense):
        assert torch.equal(a, b)


@pytest.mark.parametrize('cells', [(1, 1, 1), (2, 16, 1), (3, 17, 2), (31, 1, 3), (1, 33, 1)])
def test_grids_that_tiles_do_not_divide(device, cells):
    depth, context, geometry = sample(spread=0.7)
    lower, step = [-float(n) / 4 for n in cells], [0.5] * 3
    bounds = [{'range': [lo, -lo], 'cells': n} for lo, n in zip(lower, cells)]
    check(depth, context, geometry, device, bounds=bounds, grid=(lower, step, list(cells)))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**31),
    st.tuples(
        st.integers(0, 3), st.integers(1, 3), st.integers(0, 20), st.integers(1, 9), st.integers(1, 17), st.integers(1, 9)
    ),
    st.floats(0.01, 10),
)
def test_property_equals_the_twin(seed, shape, spread):
    batch, cameras, bins, height, width, channels = shape
    for device in ['cpu'] + ['cuda'] * torch.cuda.is_available():
        check(*sample(batch, cameras, bins, channels, height, width, seed, spread), device)


def test_gradcheck(device):
    depth, context, geometry = sample(1, 1, 3, 3, 2, 3, spread=1.0)
    plan = ops.prepare_lift_splat(geometry.to(device), BOUNDS)
    inputs = [randn(k, t.shape).double().to(device).requires_grad_() for k, t in enumerate((depth, context))]
    assert torch.autograd.gradcheck(lambda d, c: ops.lift_splat(d, c, plan), inputs)


def test_a_plan_is_used_again(device):
    depth, context, geometry = (t.to(device) for t in sample())
    plan = ops.prepare_lift_splat(geometry, BOUNDS)
    for factor in (1, 3):
        assert torch.equal(ops.lift_splat(depth * factor, context, plan), ops.lift_splat(depth * factor, context, geometry, BOUNDS))


def test_a_plan_of_coordinates_is_used_again(device):
    draw = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(-1, n + 1, (200,), generator=draw) for n in (5, 7, 3, 2)], 1).to(device)
    plan = ops.prepare_bev_pool(coords, 2, 3, 5, 7)
    for seed in range(2):
        feats = torch.randn(200, 4, generator=draw).to(device)
        assert torch.equal(ops.bev_pool(feats, plan), ops.bev_pool(feats, coords, 2, 3, 5, 7)), seed
    with pytest.raises(ValueError, match='a plan for 199 points'):
        ops.bev_pool(feats[1:], plan)


@pytest.mark.gpu
def test_plan_is_the_same_on_both_devices():
    _, _, geometry = sample(2, 3, 20, 4, 16, 22)
    cpu, cuda = ops.prepare_lift_splat(geometry, BOUNDS), ops.prepare_lift_splat(geometry.cuda(), BOUNDS)
    for name, a, b in zip(ops.SplatPlan._fields, cpu.tensors, cuda.tensors):
        assert torch.equal(a, b.cpu()), name


def test_repeats_bit_by_bit(device):
    depth, context, geometry = sample(1, 3, 20, 80, 16, 22)
    inputs = [randn(k, t.shape).to(device).requires_grad_() for k, t in enumerate((depth, context))]
    plan = ops.prepare_lift_splat(geometry.to(device), BOUNDS)
    runs = []
    for _ in range(2):
        out = ops.lift_splat(*inputs, plan)
        runs.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for a, b in zip(*runs):
        assert torch.equal(a, b)


@pytest.mark.parametrize('name', ['lss', 'lss_zbins'])
def test_golden(device, name):
    """The reference's pooled map of a seeded depth net ."""
    golden = Golden('view_transform.npz')
    channels, step, z = (80, 0.8, [-10.0, 10.0, 20.0]) if name == 'lss' else (20, 1.6, [-4.0, 4.0, 2.0])
    geometry = _golden_geometry(golden)
    golden.check(f'{name}_geometry', geometry)
    rule = weights_rule()
    weight, bias = (
        rule.rule_tensor('depthnet.weight', (59 + channels, 64, 1, 1)),
        rule.rule_tensor('depthnet.bias', (59 + channels,)),
    )
    features = torch.nn.functional.conv2d((6 * randn(301, (2, 6, 64, 8, 22))).flatten(0, 1), weight, bias)
    depth = features[:, :59].softmax(1).view(2, 6, 59, 8, 22)
    context = features[:, 59:].view(2, 6, channels, 8, 22)
    bounds = [[-51.2, 51.2, step], [-40.0, 40.0, step], z]
    out = ops.lift_splat(depth.to(device), context.to(device), geometry.to(device), bounds, compat='reference')
    golden.check(f'{name}_pooled', out)
    plan = ops.prepare_lift_splat(geometry.to(device), bounds, compat='reference')
    kept = int((plan.cell >= 0).sum())
    floor = int((ops.prepare_lift_splat(geometry.to(device), bounds).cell >= 0).sum())
    assert [kept, kept - floor] == golden[f'{name}_kept_points'].tolist()


def _golden_geometry(golden):
    """(2, 6, 59, 8, 22, 3): rays of the fixture's rig, in float32 as the reference computes them."""
    v, u = torch.linspace(0, 63, 8), torch.linspace(0, 175, 22)
    d = torch.arange(1, 60, 1, dtype=torch.float32)
    frustum = torch.stack(
        [u.view(1, 1, 22).expand(59, 8, 22), v.view(1, 8, 1).expand(59, 8, 22), d.view(59, 1, 1).expand(59, 8, 22)], -1
    )
    aug, bev = torch.from_numpy(golden['img_aug_matrix']), torch.from_numpy(golden['lidar_aug_matrix'])
    intrinsics, lidar_from_camera = (
        torch.from_numpy(golden['rig_camera_intrinsics']),
        torch.from_numpy(golden['rig_camera2lidar']),
    )
    points = frustum - aug[:, :, :3, 3].view(2, 6, 1, 1, 1, 3)
    points = torch.inverse(aug[:, :, :3, :3]).view(2, 6, 1, 1, 1, 3, 3).matmul(points[..., None])
    points = torch.cat([points[..., :2, :] * points[..., 2:, :], points[..., 2:, :]], -2)
    combine = lidar_from_camera[:, :3, :3].matmul(torch.inverse(intrinsics[:, :3, :3]))
    points = combine.view(1, 6, 1, 1, 1, 3, 3).matmul(points)[..., 0] + lidar_from_camera[:, :3, 3].view(1, 6, 1, 1, 1, 3)
    points = bev[:, :3, :3].view(2, 1, 1, 1, 1, 3, 3).matmul(points[..., None])[..., 0]
    return points + bev[:, :3, 3].view(2, 1, 1, 1, 1, 3)


def pool_sample(points=500, channels=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    coords = torch.stack([torch.randint(-1, n + 1, (points,), generator=generator) for n in (7, 19, 2, 3)], 1)
    return integers((points, channels), -8, 9, seed), coords


@pytest.mark.parametrize('channels', [1, 4, 80, 130])
def test_bev_pool_equals_the_twin(device, channels):
    feats, coords = pool_sample(channels=channels)
    twin, mine = feats.double().requires_grad_(), feats.to(device).requires_grad_()
    want = slow.bev_pool(twin, coords, 3, 2, 7, 19)
    got = ops.bev_pool(mine, coords.to(device), 3, 2, 7, 19)
    assert torch.equal(got.cpu().double(), want)
    grad = integers(got.shape, -8, 9, 5)
    assert torch.equal(
        torch.autograd.grad(got, mine, grad.to(device))[0].cpu().double(), torch.autograd.grad(want, twin, grad.double())[0]
    )


@pytest.mark.parametrize('dtype', [torch.float64, torch.float16, torch.bfloat16])
def test_bev_pool_types(device, dtype):
    feats, coords = pool_sample(points=20000)  # about five points a cell: sums of these integers are exact in float32
    want = slow.bev_pool(feats.double(), coords, 3, 2, 7, 19).to(dtype)
    mine = feats.to(device, dtype).requires_grad_()
    got = ops.bev_pool(mine, coords.to(device).int(), 3, 2, 7, 19)
    assert got.dtype == dtype and torch.equal(got.cpu(), want)
    (grad,) = torch.autograd.grad(got, mine, torch.ones_like(got))
    inside = ((coords >= 0) & (coords < torch.tensor([7, 19, 2, 3]))).all(1)
    assert grad.dtype == dtype and torch.equal(grad.cpu(), inside[:, None].expand_as(grad).to(dtype))


def test_bev_pool_non_contiguous_inputs_and_gradients(device):
    feats, coords = (t.to(device) for t in pool_sample(channels=8))
    wide = torch.stack([feats, feats + 1], -1).requires_grad_()
    out = ops.bev_pool(wide[..., 0], torch.cat([coords, coords], 1)[:, :4], 3, 2, 7, 19)
    assert torch.equal(out, ops.bev_pool(feats, coords, 3, 2, 7, 19))
    grad = integers(out.shape, -8, 9, 3).to(device)
    (dense,) = torch.autograd.grad(out, wide, grad, retain_graph=True)
    strided = grad.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)
    assert torch.equal(torch.autograd.grad(out, wide, strided, retain_graph=True)[0], dense)
    (expanded,) = torch.autograd.grad(out.sum(), wide, retain_graph=True)
    assert torch.equal(expanded, torch.autograd.grad(out, wide, torch.ones_like(out))[0])


def test_bev_pool_gradcheck(device):
    feats, coords = pool_sample(points=30, channels=3)
    feats, coords = feats.to(device).double().requires_grad_(), coords.to(device)
    assert torch.autograd.gradcheck(lambda f: ops.bev_pool(f, coords, 2, 2, 4, 5), (feats,))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(-2, 5)] * 4, st.integers(-9, 9)), max_size=60),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.integers(1, 18)),
)
def test_property_bev_pool_equals_the_twin(rows, grid):
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 5)
    coords, feats = table[:, :4], table[:, 4:].double().repeat(1, 3).requires_grad_()
    want = slow.bev_pool(feats, coords, *grid)
    grad = integers(want.shape, -8, 9, 5).double()
    for device in ['cpu'] + ['cuda'] * torch.cuda.is_available():
        mine = feats.detach().to(device).requires_grad_()
        got = ops.bev_pool(mine, coords.to(device), *grid)
        assert torch.equal(got.cpu(), want)
        (got_grad,) = torch.autograd.grad(got, mine, grad.to(device))
        assert torch.equal(got_grad.cpu(), torch.autograd.grad(want, feats, grad, retain_graph=True)[0])


def test_bev_pool_edges(device):
    for count in (0, 3):
        feats = torch.ones(count, 4, device=device, requires_grad=True)
        out = ops.bev_pool(feats, torch.full((count, 4), 99, device=device), 2, 1, 3, 3)
        assert out.shape == (2, 4, 1, 3, 3) and out.eq(0).all()
        assert torch.autograd.grad(out.sum(), feats)[0].eq(0).all()
    far = torch.tensor([[2**40, 0, 0, 0], [0, -(2**40), 0, 0], [0, 0, 0, 2**35]], device=device)
    assert ops.bev_pool(torch.ones(3, 4, device=device), far, 2, 1, 3, 3).eq(0).all()


def test_errors():
    depth, context, geometry = sample()
    with pytest.raises(ValueError, match=r'lift_splat: depth must be a tensor \(B, N, D, H, W\), got shape \(2, 3, 5, 5\)'):
        ops.lift_splat(depth[..., 0], context, geometry, BOUNDS)
    with pytest.raises(
        ValueError, match=r'lift_splat: context must be .*\(2, 3, C, 5, 11\) as depth, got shape \(2, 3, 8, 5, 10\)'
    ):
        ops.lift_splat(depth, context[..., 1:], geometry, BOUNDS)
    with pytest.raises(ValueError, match=r'lift_splat: geometry must be \(2, 3, 5, 5, 11\) \+ \(3,\) as depth'):
        ops.lift_splat(depth, context, geometry[:1], BOUNDS)
    with pytest.raises(ValueError, match='geometry must be float32 .* got torch.float16'):
        ops.lift_splat(depth, context, geometry.half(), BOUNDS)
    with pytest.raises(ValueError, match="compat must be None or 'reference', got 'old'"):
        ops.lift_splat(depth, context, geometry, BOUNDS, compat='old')
    with pytest.raises(ValueError, match='bounds must be three axes'):
        ops.lift_splat(depth, context, geometry)
    with pytest.raises(ValueError, match=r'geometry must be a plan for 1650 points in 2 samples, got one for 825 in 1'):
        ops.lift_splat(depth, context, ops.prepare_lift_splat(geometry[:1], BOUNDS))
    with pytest.raises(ValueError, match=r'bev_pool: coords must be \(500, 4\) as feats, got shape \(500, 3\)'):
        feats, coords = pool_sample()
        ops.bev_pool(feats, coords[:, :3], 1, 1, 1, 1)
    with pytest.raises(ValueError, match=r'bev_pool: B, nz, nx, ny must be given beside coordinates, got \(2, None, None, None\)'):
        ops.bev_pool(feats, coords, 2)
    plan = ops.prepare_lift_splat(geometry, BOUNDS)
    with pytest.raises(RuntimeError, match='the plan was made for 144 tiles, the grid has 72'):
        torch.ops.mmdet3d_ext.lift_splat(depth, context, *plan.tensors, [24, 36, 1])
    with pytest.raises(RuntimeError, match="'grad' must be"):
        torch.ops.mmdet3d_ext.lift_splat_backward(depth.sum((1, 2)), depth, context, plan.cell, CELLS)


def test_opcheck(device):
    depth, context, geometry = (t.to(device) for t in sample(channels=4))
    namespace = torch.ops.mmdet3d_ext
    torch.library.opcheck(namespace.splat_plan.default, (geometry, LOWER, STEP, CELLS, False))
    plan = namespace.splat_plan(geometry, LOWER, STEP, CELLS, False)
    torch.library.opcheck(namespace.lift_splat.default, (depth.requires_grad_(), context.requires_grad_(), *plan, CELLS))
    out = namespace.lift_splat(depth, context, *plan, CELLS).detach()
    torch.library.opcheck(namespace.lift_splat_backward.default, (out, depth.detach(), context.detach(), plan[0], CELLS))
    feats, coords = (t.to(device) for t in pool_sample())
    torch.library.opcheck(namespace.splat_plan_from_coords.default, (coords, 3, [7, 19, 2]))
    plan = namespace.splat_plan_from_coords(coords, 3, [7, 19, 2])
    torch.library.opcheck(namespace.bev_pool.default, (feats.requires_grad_(), *plan, 3, [7, 19, 2]))
    out = namespace.bev_pool(feats, *plan, 3, [7, 19, 2]).detach()
    torch.library.opcheck(namespace.bev_pool_backward.default, (out, plan[0], [7, 19, 2]))


def test_compiles_fullgraph(device):
    depth, context, geometry = (t.to(device) for t in sample(channels=4))
    inputs = [depth.requires_grad_(), context.requires_grad_()]
    feats, coords = (t.to(device) for t in pool_sample())

    def step(d, c, g):
        return ops.lift_splat(d * 2, c + 1, g, BOUNDS) * 3, ops.bev_pool(feats, coords, 3, 2, 7, 19)

    compiled = torch.compile(step, fullgraph=True, backend='aot_eager')
    got, want = compiled(*inputs, geometry), step(*inputs, geometry)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    for a, b in zip(torch.autograd.grad(got[0].sum(), inputs), torch.autograd.grad(want[0].sum(), inputs)):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_no_synchronisation():
    depth, context, geometry = (t.cuda() for t in sample())
    depth.requires_grad_()
    ops.lift_splat(depth, context, geometry, BOUNDS).sum().backward()
    torch.cuda.set_sync_debug_mode('error')
    try:
        ops.lift_splat(depth, context, geometry, BOUNDS).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode('default')


@pytest.mark.gpu
def test_other_stream():
    depth, context, geometry = sample(1, 6, 20, 16, 16, 22)
    want = slow.lift_splat(depth, context, geometry, LOWER, STEP, CELLS)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the inputs arrive late on this stream
        got = ops.lift_splat(*(t.pin_memory().cuda(non_blocking=True) for t in (depth, context, geometry)), BOUNDS)
    stream.synchronize()
    assert torch.equal(got.cpu(), want)


@pytest.mark.gpu
def test_second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip('needs two GPUs')
    depth, context, geometry = sample()
    got = ops.lift_splat(depth.to('cuda:1'), context.to('cuda:1'), geometry.to('cuda:1'), BOUNDS)
    assert torch.equal(got.cpu(), slow.lift_splat(depth, context, geometry, LOWER, STEP, CELLS))


@pytest.mark.gpu
@pytest.mark.slow
def test_lifted_size_beyond_2_to_the_31():
    """depth x context would hold 2.2 G numbers, and so does the pooled map's gradient per sample times its batch."""
    batch, cameras, bins, channels, height, width = 2, 6, 118, 512, 32, 88
    depth = torch.zeros(batch, cameras, bins, height, width, device='cuda')
    depth[-1, -1, -1, -1, -1] = 2
    context = torch.ones(batch, cameras, channels, height, width, device='cuda', dtype=torch.float32)
    geometry = torch.rand(batch, cameras, bins, height, width, 3, device='cuda') * 100 - 50
    geometry[-1, -1, -1, -1, -1] = torch.tensor([51.15, 51.15, 25.0])
    bounds = [[-51.2, 51.2, 0.1], [-51.2, 51.2, 0.1], [-50.0, 50.0, 50.0]]
    inputs = [depth.requires_grad_(), context.requires_grad_()]
    out = ops.lift_splat(*inputs, geometry, bounds)
    assert out.numel() >= 2**31
    assert out[-1, 512:, -1, -1].eq(2).all() and out.count_nonzero() == 512
    grad_depth, grad_context = torch.autograd.grad(out, inputs, torch.ones(1, device='cuda').expand_as(out))
    assert grad_depth.eq(512).all() and grad_context[-1, -1, :, -1, -1].eq(2).all() and grad_context.count_nonzero() == 512
