"""Every CUDA kernel of the operators beside its CPU form, with no other kernel on the device.

Inputs are made on the CPU and results compared there. compute-sanitizer instruments each module of kernels that it meets, and torch's are
large: these tests are what it can run in minutes, kernels of CUB included (docs/benchmarks/notes.md).
"""

import pytest
import torch
from testing import randn

pytestmark = pytest.mark.gpu
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


@pytest.fixture(scope='module')
def namespace():
    from mmdet3d_ext import ops

    assert ops.available()
    return torch.ops.mmdet3d_ext


def on_both(op, *inputs, tolerance=0):
    """Call ``op`` on the CPU and on the GPU; results must be equal (up to ``tolerance``), and those of the CPU are returned."""
    want = op(*inputs)
    got = op(*(value.cuda() if isinstance(value, torch.Tensor) and value.dim() else value for value in inputs))
    for a, b in zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]:
        torch.testing.assert_close(b.cpu(), a, rtol=tolerance, atol=tolerance, equal_nan=True)
    return want


def integers(shape, low, high, seed, dtype=F32):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scattered(points, largest, columns=4, dtype=torch.int32):
    """Coordinates with voxels of one point and full ones, some dropped."""
    generator = torch.Generator().manual_seed(points + largest)
    coords = (torch.rand(points, columns, generator=generator) ** 3 * (largest + 0.999)).to(dtype)
    coords[: points // 2] = coords[:1]
    coords[::9, 1] = -1
    if points:
        coords[-1] = largest
    return coords[torch.randperm(points, generator=generator)]


@pytest.mark.parametrize('dtype', [torch.int32, torch.int64])
@pytest.mark.parametrize('largest', [5, 90, 250])  # by a small bitmap, a large one, by sorting
@pytest.mark.parametrize('points', [0, 1, 300, 2500, 9000])
def test_groups(namespace, points, largest, dtype):
    for columns in (3, 4):
        for _ in range(2):  # the first call decides how the second begins
            on_both(namespace.point_groups, scattered(points, largest, columns, dtype))


@pytest.mark.parametrize('reduce', [0, 1, 2])
@pytest.mark.parametrize('channels', [1, 64, 130])
@pytest.mark.parametrize('dtype', [F32, F64, F16, BF16])
@pytest.mark.parametrize('points', [500, 5000])  # without and with voxels that several blocks share
def test_point_to_voxel(namespace, points, channels, dtype, reduce):
    coords = scattered(points, 5)
    feats = integers((points, channels), -1, 2, 1, dtype)
    feats[3, 0] = float('nan')
    out, _, point2voxel, counts, arg = on_both(namespace.dynamic_point_to_voxel, feats, coords, reduce)
    on_both(lambda f, c: namespace.group_reduce(f, *namespace.point_groups(c)[1:], reduce), feats, coords)
    on_both(namespace.group_reduce_backward, integers(out.shape, -9, 10, 2, dtype), point2voxel, counts, arg, reduce)


@pytest.mark.parametrize('dtype', [F32, F64])
@pytest.mark.parametrize('points', [0, 1, 3000])
def test_voxelize(namespace, points, dtype):
    cloud = (randn(points, (points, 5)) * 3).to(dtype)
    grid = ([-6.0, -3.0, -2.0], [0.5, 0.25, 1.0], [24, 24, 4])
    on_both(namespace.voxel_coords, cloud, *grid)
    for limits in ((1, -1), (10, 200)):
        on_both(namespace.hard_voxelize, cloud, *grid, *limits)
    on_both(namespace.hard_voxelize, cloud, [-16.0] * 3, [0.001, 0.002, 0.004], [32000, 16000, 8000], 2, 1500)


@pytest.mark.parametrize('kinds', [(F32, F32), (F64, F64), (F32, F16), (F32, BF16)])
@pytest.mark.parametrize('channels', [1, 4, 64, 80, 84, 130, 160])
def test_lift_splat(namespace, channels, kinds):
    shape = (2, 2, 17, 9, 11)
    grid = ([-6.0, -4.0, -2.0], [0.5, 0.25, 2.0], [24, 36, 2])
    geometry = randn(3, (*shape, 3)) * torch.tensor([3.0, 3.0, 1.0])
    plan = on_both(namespace.splat_plan, geometry, *grid, False)
    depth = integers(shape, 0, 3, 1, kinds[0])
    context = integers((2, 2, channels, 9, 11), -2, 3, 2, kinds[1])
    out = on_both(namespace.lift_splat, depth, context, *plan, grid[2])
    grad = integers(out.shape, -1, 2, 4, kinds[1])
    on_both(namespace.lift_splat_backward, grad, depth, context, plan[0], grid[2])


@pytest.mark.parametrize('dtype', [F32, F16])
@pytest.mark.parametrize('channels', [3, 80])
def test_bev_pool(namespace, channels, dtype):
    coords = torch.stack([torch.randint(-1, n + 1, (700,), generator=torch.Generator().manual_seed(n)) for n in (7, 19, 2, 3)], 1)
    feats = integers((700, channels), -2, 3, 1, dtype)
    cells = [7, 19, 2]
    plan = on_both(namespace.splat_plan_from_coords, coords, 3, cells)
    out = on_both(namespace.bev_pool, feats, *plan, 3, cells)
    on_both(namespace.bev_pool_backward, integers(out.shape, -9, 10, 2, dtype), plan[0], cells)


@pytest.mark.parametrize('dtype', [F32, F64, F16, BF16])
@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('shape', [(2, 24, 61, 67), (1, 256, 40, 50), (3, 8, 1, 1)])  # alone and side by side, many chunks, one cell
def test_group_norm(namespace, shape, layout, dtype):
    tolerance = {F32: 2e-5, F64: 1e-12, F16: 5e-3, BF16: 4e-2}[dtype]
    x = (3 + 2 * randn(1, shape)).to(dtype).contiguous(memory_format=layout)
    work = F64 if dtype == F64 else F32
    weight, bias = (randn(seed, (shape[1],)).to(work) for seed in (2, 3))
    _, mean, rstd = on_both(namespace.group_norm_relu, x, weight, bias, 8, 1e-5, True, tolerance=tolerance)
    grad = randn(4, shape).to(dtype).contiguous(memory_format=layout)
    # Sums of thousands of numbers around one.
    tolerance *= 20
    on_both(namespace.group_norm_relu_backward, grad, x, mean, rstd, weight, bias, 8, True, tolerance=tolerance)
