"""Voxelisation against a point-by-point twin, the reference's numbers and mmcv's CPU op."""

import ops_reference as slow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import Golden

from mmdet3d_ext import ops

SIZE, RANGE, CELLS = [0.5, 0.25, 1.0], [-6.0, -3.0, -2.0, 6.0, 3.0, 2.0], [24, 24, 4]


def cloud(count, columns=5, seed=0, spread=3.0, dtype=torch.float32):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype) * spread


def check(points, max_num_points, max_voxels, device):
    expected = slow.hard_voxelize(points, RANGE[:3], SIZE, CELLS, max_num_points, max_voxels)
    result = ops.voxelize(points.to(device), SIZE, RANGE, max_num_points, max_voxels)
    for name, got, want in zip(('voxels', 'coords', 'num_points'), result, expected):
        assert got.device.type == device and got.dtype == want.dtype, name
        assert torch.equal(got.cpu(), want), name
    return result


@pytest.mark.parametrize('limits', [(3, 200), (1, -1), (35, 10000), (10, 0), (2, 1)])
def test_equals_the_twin(device, limits):
    check(cloud(3000), *limits, device)


@pytest.mark.parametrize('columns', [3, 4, 7])
def test_columns_and_double(device, columns):
    check(cloud(500, columns), 4, 100, device)
    check(cloud(500, columns, dtype=torch.float64), 4, 100, device)


@pytest.mark.parametrize('count', [0, 1, 2, 257])
def test_few_points(device, count):
    check(cloud(count, spread=0.1), 3, 100, device)


def test_edges_of_the_range(device):
    step = torch.tensor(
        [-6.0, 6.0, 5.999999, -6.0000005, 0.0, -0.0, 0.5, float('nan'), float('inf'), -float('inf'), 3e38, -3e38]
    )
    points = torch.zeros(len(step) * 3, 3)
    for axis in range(3):
        points[axis * len(step) : (axis + 1) * len(step), axis] = step
    check(points, 3, 100, device)
    coords = ops.dynamic_voxelize(points.to(device), SIZE, RANGE).cpu()
    assert torch.equal(coords, slow.voxel_coords(points, RANGE[:3], SIZE, CELLS))
    assert (coords[7:12] == -1).all(), 'NaN, Inf and far points are outside'
    assert (coords[0] >= 0).all() and (coords[1] == -1).all() and (coords[3] == -1).all()


def test_all_outside(device):
    points = cloud(100) + 1000
    voxels, coords, counts = check(points, 3, 100, device)
    assert voxels.shape == (0, 3, 5) and coords.shape == (0, 3) and counts.shape == (0,)


def test_one_voxel_with_many_points(device):
    points = torch.rand(5000, 4) * 0.01 + 0.01
    voxels, _, counts = check(points, 4000, 10, device)
    assert counts.tolist() == [4000] and torch.equal(voxels[0].cpu(), points[:4000])


def test_non_contiguous(device):
    wide = cloud(1000, 8)
    expected = ops.voxelize(wide[:, 1:6].contiguous(), SIZE, RANGE, 3, 200)
    for got, want in zip(ops.voxelize(wide.to(device)[:, 1:6], SIZE, RANGE, 3, 200), expected):
        assert torch.equal(got.cpu(), want)
    assert torch.equal(
        ops.dynamic_voxelize(wide.to(device)[::2, 1:6], SIZE, RANGE).cpu(),
        slow.voxel_coords(wide[::2, 1:6], RANGE[:3], SIZE, CELLS),
    )


def test_grid_too_large_for_32_bit_keys(device):
    points = cloud(2000) * 3
    size, limits = [0.001, 0.002, 0.004], [-16.0, -16.0, -16.0, 16.0, 16.0, 16.0]
    expected = slow.hard_voxelize(points, limits[:3], size, [32000, 16000, 8000], 2, 1500)
    for got, want in zip(ops.voxelize(points.to(device), size, limits, 2, 1500), expected):
        assert torch.equal(got.cpu(), want)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-4, 4, width=32)] * 3), max_size=40), st.integers(1, 4), st.integers(-1, 12))
def test_property_equals_the_twin(rows, max_num_points, max_voxels):
    points = torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)
    for device in ['cpu'] + ['cuda'] * torch.cuda.is_available():
        check(points, max_num_points, max_voxels, device)


@pytest.mark.parametrize('case', ['train0', 'train1', 'eval0', 'eval1'])
def test_golden(device, case):
    golden = Golden('voxelize_sparse_encoder.npz')
    name = f'points{case[-1]}'
    if name not in golden:
        name = next(k for k in golden.data.files if k.endswith(name) or k == f'enc_{name}')
    points = torch.from_numpy(golden[name]).to(device)
    voxels, coords, counts = ops.voxelize(
        points, [0.6, 0.6, 0.2], [-43.2, -33.6, -5, 43.2, 33.6, 3], 3, 700 if 'train' in case else 800
    )
    golden.check(f'vox_{case}_coords', coords)
    golden.check(f'vox_{case}_counts', counts)
    golden.check(f'vox_{case}_points', voxels)


def test_equals_mmcv_on_the_cpu(device):
    mmcv_ops = pytest.importorskip('mmcv.ops')
    points = cloud(2000)
    voxels, coords, counts = mmcv_ops.Voxelization(SIZE, RANGE, 3, 300)(points)
    result = ops.voxelize(points.to(device), SIZE, RANGE, 3, 300)
    assert torch.equal(result[0].cpu(), voxels) and torch.equal(result[2].cpu(), counts)
    assert torch.equal(result[1].cpu(), coords.flip(1))  # mmcv: z, y, x
    assert torch.equal(
        mmcv_ops.Voxelization(SIZE, RANGE, -1)(points).flip(1), ops.dynamic_voxelize(points.to(device), SIZE, RANGE).cpu()
    )


def test_coordinates_stay_float32_under_autocast(device):
    points = cloud(1000, spread=10.0).to(device)
    size, limits = [0.01] * 3, [-30.0] * 3 + [30.0] * 3
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(ops.dynamic_voxelize(points, size, limits), ops.dynamic_voxelize(points, size, limits))
        assert torch.equal(
            ops.dynamic_voxelize(points, size, limits).cpu(), slow.voxel_coords(points.cpu(), limits[:3], size, [6000] * 3)
        )
    with pytest.raises(ValueError, match='dynamic_voxelize: points must be float32 or float64 .* got torch.float16'):
        ops.dynamic_voxelize(points.half(), size, limits)


def test_errors():
    points = cloud(10)
    with pytest.raises(ValueError, match=r'voxelize: max_num_points must be at least 1, got 0'):
        ops.voxelize(points, SIZE, RANGE, 0, 10)
    with pytest.raises(ValueError, match=r'voxelize: max_voxels must be at least 0, or -1 .* got -2'):
        ops.voxelize(points, SIZE, RANGE, 3, -2)
    with pytest.raises(ValueError, match=r'voxelize: points must be .*\(P, F >= 3\).*, got shape \(10, 2\)'):
        ops.voxelize(points[:, :2], SIZE, RANGE, 3, 10)
    with pytest.raises(TypeError, match='points must be a tensor'):
        ops.voxelize([[0, 0, 0]], SIZE, RANGE, 3, 10)
    with pytest.raises(ValueError, match='does not divide the range'):
        ops.voxelize(points, [0.7, 1, 1], RANGE, 3, 10)
    with pytest.raises(RuntimeError, match=r"hard_voxelize: 'max_num_points' must be at least 1, got 0"):
        torch.ops.mmdet3d_ext.hard_voxelize(points, RANGE[:3], SIZE, CELLS, 0, 10)
    with pytest.raises(RuntimeError, match=r"voxel_coords: 'points' must be \(P, F\).*got \[10, 2\]"):
        torch.ops.mmdet3d_ext.voxel_coords(points[:, :2], RANGE[:3], SIZE, CELLS)


def test_opcheck(device):
    points = cloud(50).to(device)
    torch.library.opcheck(torch.ops.mmdet3d_ext.voxel_coords.default, (points, RANGE[:3], SIZE, CELLS))
    torch.library.opcheck(torch.ops.mmdet3d_ext.hard_voxelize.default, (points, RANGE[:3], SIZE, CELLS, 3, 20))


def test_compiles_fullgraph(device):
    points = cloud(200).to(device)

    def step(p):
        voxels, coords, counts = ops.voxelize(p, SIZE, RANGE, 3, 50)
        return voxels.sum(1) / counts[:, None], coords, ops.dynamic_voxelize(p, SIZE, RANGE)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(step, fullgraph=True, backend='aot_eager')
        for got, want in zip(compiled(points), step(points)):
            assert torch.equal(got, want)


@pytest.mark.gpu
def test_other_stream():
    points = cloud(5000)
    want = slow.hard_voxelize(points, RANGE[:3], SIZE, CELLS, 3, 200)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the points arrive late on this stream
        got = ops.voxelize(points.pin_memory().cuda(non_blocking=True), SIZE, RANGE, 3, 200)
    stream.synchronize()
    for a, b in zip(got, want):
        assert torch.equal(a.cpu(), b)


@pytest.mark.gpu
def test_second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip('needs two GPUs')
    points = cloud(3000)
    got = ops.voxelize(points.to('cuda:1'), SIZE, RANGE, 3, 200)
    for a, b in zip(got, slow.hard_voxelize(points, RANGE[:3], SIZE, CELLS, 3, 200)):
        assert a.device == torch.device('cuda:1') and torch.equal(a.cpu(), b)
