#!/usr/bin/env python
"""Time the operators beside their peers: same inputs, same run, medians.

Examples:
    python benchmarks/ops.py                        # CUDA if there is a device, else CPU sizes
    python benchmarks/ops.py --device cpu --repeat 5
    python benchmarks/ops.py --only lift --profile  # one group, with the kernels' times
    python benchmarks/ops.py --out docs/benchmarks  # writes ops_<device>.json and ops_<device>.md

Each call is timed alone, from an idle device and a flushed cache until the device is idle again, launch costs included; inputs
lie on the device. The calls that are compared take turns in short rounds, so that a slow spell of the machine meets all. Memory is the peak
above the inputs, forward and backward with the incoming gradient. Floors: the time to move each byte of inputs and outputs once at
the measured copy bandwidth, and the memory of the output and the gradients, which any implementation must hold at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import inputs  # noqa: E402
import peers  # noqa: E402
import torch  # noqa: E402

from mmdet3d_ext import ops  # noqa: E402

MIB = 1024**2
GROUPS = ['scatter', 'voxel', 'pool', 'lift', 'norm']
LIDAR_RANGE = [-54.0, -54.0, -5.0, 54.0, 54.0, 3.0]


class Clock:
    """Median time and peak memory of a call on one device."""

    def __init__(self, device: str, repeat: int):
        self.device, self.repeat = device, repeat
        self.flush = torch.empty(256 * MIB, dtype=torch.uint8, device=device) if device == 'cuda' else None

    def once(self, call) -> float:
        """Milliseconds of one call."""
        if self.device == 'cuda':
            self.flush.zero_()
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = call()
        if self.device == 'cuda':
            torch.cuda.synchronize()
        elapsed = 1e3 * (time.perf_counter() - start)
        del result
        return elapsed

    def milliseconds(self, *calls, rounds: int = 4, warm: int = 3) -> list:
        """The median of each call. Each has several short rounds in a row, whose first calls are not counted."""
        times = [[] for _ in calls]
        for _ in range(rounds):
            for call, mine in zip(calls, times):
                mine += [self.once(call) for _ in range(warm + -(-self.repeat // rounds))][warm:]
        return [statistics.median(mine) for mine in times]

    def peak(self, call) -> float:
        """MiB above what is allocated before; None on the CPU."""
        if self.device != 'cuda':
            return None
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / MIB
        del result
        return peak

    def kept(self, call, source) -> float:
        """MiB that wait for the backward pass beside the output, the caller having dropped the input; None on the CPU."""
        if self.device != 'cuda':
            return None
        before = torch.cuda.memory_allocated()
        out = call(source * 2)  # whose backward keeps nothing
        return (torch.cuda.memory_allocated() - before - size_of(out)) / MIB

    def copy_bandwidth(self) -> float:
        """GB/s of a large copy, bytes read plus bytes written."""
        size = (4096 if self.device == 'cuda' else 256) * MIB
        source, target = (torch.ones(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        return 2 * size / self.milliseconds(lambda: target.copy_(source))[0] / 1e6


def with_backward(call, leaves):
    """Forward and backward of ``call`` with a gradient of ones in memory."""

    def run():
        out = call()
        return out, torch.autograd.grad(out, leaves, torch.ones_like(out))

    return run


def size_of(*tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def bench(clock, name, variants, leaves, forward_bytes, total_bytes, bandwidth, kept=None):
    """One row per variant; the first is ours."""
    rows, good, held = [], [], 0
    for label, call in variants.items():
        row = dict(work=name, op=label)
        run = with_backward(call, leaves) if leaves else call
        try:
            row['peak_mib'] = clock.peak(run)
            row['kept_mib'] = clock.kept(kept[label], leaves[0]) if kept else None
            result = run()
            if not rows:
                made = result if isinstance(result, tuple) else (result,)
                held = size_of(result[0], result[0], *result[1]) if leaves else size_of(*made)
            del result
            good.append((row, call, run))
        except (RuntimeError, ImportError, NotImplementedError) as error:
            row['error'] = str(error).splitlines()[0][:200]
        rows.append(row)
    calls = [call for _, call, _ in good] + [run for _, _, run in good] * bool(leaves)
    times = clock.milliseconds(*calls)
    for k, (row, _, _) in enumerate(good):
        row['forward_ms'] = times[k]
        row['total_ms'] = times[len(good) + k] if leaves else None
    mine = rows[0]
    for row in rows:
        row['floor_forward_ms'] = forward_bytes / bandwidth / 1e6
        row['floor_total_ms'] = total_bytes / bandwidth / 1e6 if leaves else None
        row['floor_mib'] = held / MIB
        for key in ('forward_ms', 'total_ms', 'peak_mib'):
            if row.get(key) and mine.get(key) and row is not mine:
                row[f'ours_is_{key.split("_")[0]}_x'] = row[key] / mine[key]
        if 'forward_ms' in row:
            row['bandwidth_fraction'] = row['floor_forward_ms'] / row['forward_ms']
        show(row)
    return rows


def cell(value, form='{:.3f}'):
    return '-' if value is None else form.format(value)


COLUMNS = (
    'work',
    'op',
    'forward ms',
    'fwd+bwd ms',
    'peak MiB',
    'floor MiB',
    'kept MiB',
    'floor fwd ms',
    'of copy bandwidth',
    'ours faster fwd',
    'fwd+bwd',
    'less memory',
)


def cells(row):
    if 'error' in row:
        return [row['work'], row['op'], f'failed: {row["error"]}'] + ['-'] * (len(COLUMNS) - 3)
    return [
        row['work'],
        row['op'],
        cell(row['forward_ms']),
        cell(row['total_ms']),
        cell(row['peak_mib'], '{:.0f}'),
        cell(row['floor_mib'], '{:.0f}'),
        cell(row.get('kept_mib'), '{:.0f}'),
        cell(row['floor_forward_ms']),
        cell(row['bandwidth_fraction'], '{:.1%}'),
        cell(row.get('ours_is_forward_x'), '{:.1f}x'),
        cell(row.get('ours_is_total_x'), '{:.1f}x'),
        cell(row.get('ours_is_peak_x'), '{:.1f}x'),
    ]


def show(row):
    print(' | '.join(cells(row)), flush=True)


def point_to_voxel_cases(clock, bandwidth, cuda, sweep):
    sizes = (
        [(250_000, 64, 'mean'), (250_000, 64, 'max'), (1_000_000, 128, 'max')]
        if cuda
        else [(50_000, 64, 'mean'), (50_000, 64, 'max')]
    )
    if sweep:
        sizes += [(n, 64, reduce) for n in (1_000, 4_000, 16_000, 64_000) for reduce in ('mean', 'max')]
    rows = []
    for points, channels, reduce in sizes:
        cloud = inputs.lidar_cloud(points, clock.device)
        coords = ops.dynamic_voxelize(cloud, [0.2, 0.2, 0.2], LIDAR_RANGE)
        feats = torch.randn(points, channels, device=clock.device, requires_grad=True)
        groups = ops.group_points(coords)
        voxels = len(groups.voxel_coords)
        forward = size_of(feats, coords) + 4 * points + voxels * (4 * channels * (2 if reduce == 'max' else 1) + 12)
        total = forward + 4 * voxels * channels * (2 if reduce == 'max' else 1) + size_of(feats) + 4 * points
        variants = {
            'ours': lambda f=feats, c=coords, r=reduce: ops.dynamic_point_to_voxel(f, c, r)[0],
            'mmcv dynamic_scatter': lambda f=feats, c=coords, r=reduce: peers.mmcv_dynamic_scatter(f, c, r),
            'torch unique + scatter_reduce': lambda f=feats, c=coords, r=reduce: peers.torch_point_to_voxel(f, c, r),
        }
        if points >= 250_000 and cuda:
            variants['ours, groups made before'] = lambda f=feats, g=groups, r=reduce: ops.reduce_points(f, g, r)
        rows += bench(
            clock,
            f'point-to-voxel {reduce}, {points:,} points x {channels} ({voxels:,} voxels)',
            variants,
            [feats],
            forward,
            total,
            bandwidth,
            kept=variants,
        )
    return rows


def voxelize_cases(clock, bandwidth, cuda):
    count = 250_000 if cuda else 100_000
    clouds = [
        (f'{count:,} points x 5', inputs.lidar_cloud(count, clock.device)),
        ('a real sweep x 10', inputs.keyframe_cloud(clock.device)),
    ]
    rows = []
    for label, cloud in clouds:
        if cloud is None:
            continue
        arguments = (cloud, [0.075, 0.075, 0.2], LIDAR_RANGE)
        variants = {
            'ours': lambda a=arguments: ops.dynamic_voxelize(*a),
            'mmcv Voxelization (dynamic)': lambda a=arguments: peers.mmcv_voxel_coords(*a),
            'torch floor + compare': lambda a=arguments: peers.torch_voxel_coords(*a),
        }
        size = size_of(cloud) + 12 * len(cloud)
        rows += bench(clock, f'coordinates, {label} ({len(cloud):,} points)', variants, [], size, 0, bandwidth)
        arguments += (10, 120_000)
        voxels = ops.voxelize(*arguments)
        variants = {
            'ours': lambda a=arguments: ops.voxelize(*a),
            'mmcv Voxelization (deterministic)': lambda a=arguments: peers.mmcv_hard_voxelize(*a),
            'torch sort + scan': lambda a=arguments: peers.torch_hard_voxelize(*a),
        }
        rows += bench(
            clock,
            f'hard voxelisation, {label} ({len(cloud):,} points, {len(voxels[0]):,} voxels)',
            variants,
            [],
            size_of(cloud, *voxels),
            0,
            bandwidth,
        )
    return rows


def pool_cases(clock, bandwidth, cuda):
    """What is lifted already: features of points into cells."""
    bins, height, width, channels, cells_ = (118, 32, 88, 80, 360) if cuda else (59, 8, 22, 80, 128)
    points = inputs.frustum(1, bins, height, width, clock.device).view(-1, 3)
    step = torch.tensor([108 / cells_, 108 / cells_, 20.0], device=clock.device)
    at = torch.floor((points - torch.tensor([-54.0, -54.0, -10.0], device=clock.device)) / step).long()
    coords = torch.cat([at, torch.zeros_like(at[:, :1])], 1)
    feats = torch.randn(len(coords), channels, device=clock.device, requires_grad=True)
    arguments = (feats, coords, 1, 1, cells_, cells_)
    variants = {
        'ours': lambda a=arguments: ops.bev_pool(*a),
        'torch index_add': lambda a=arguments: peers.torch_bev_pool(*a),
    }
    out = 4 * channels * cells_**2
    forward = size_of(feats, coords) + out
    name = f'bev_pool float32, {len(coords):,} points x {channels}, {cells_}x{cells_}'
    return bench(clock, name, variants, [feats], forward, forward + out + size_of(feats), bandwidth)


def lift_cases(clock, bandwidth, cuda):
    shapes = (
        [(1, 6, 118, 32, 88, 80, 360), (4, 6, 118, 32, 88, 80, 360), (1, 6, 118, 32, 88, 80, 720)]
        if cuda
        else [(1, 6, 59, 8, 22, 80, 128)]
    )
    kinds = [torch.float32] + ([torch.float16] if cuda else [])
    rows = []
    for batch, cameras, bins, height, width, channels, cells_ in shapes:
        geometry = inputs.frustum(batch, bins, height, width, clock.device, cameras)
        bounds = [[-54.0, 54.0, 108 / cells_], [-54.0, 54.0, 108 / cells_], [-10.0, 10.0, 20.0]]
        for kind in kinds:
            depth = torch.randn(batch, cameras, bins, height, width, device=clock.device).softmax(2).to(kind).requires_grad_()
            context = torch.randn(batch, cameras, channels, height, width, device=clock.device, dtype=kind, requires_grad=True)
            plan = ops.prepare_lift_splat(geometry, bounds)
            out = batch * channels * cells_**2 * depth.element_size()
            forward = size_of(depth, context) + out
            variants = {
                'ours': lambda d=depth, c=context, g=geometry, b=bounds: ops.lift_splat(d, c, g, b),
                'ours, plan reused': lambda d=depth, c=context, p=plan: ops.lift_splat(d, c, p),
                'materialise + sort + pool': lambda d=depth, c=context, g=geometry, b=bounds: peers.materialised_lift_splat(
                    d, c, g, b
                ),
            }
            inside = int((plan.cell >= 0).sum())
            rows += bench(
                clock,
                f'lift-splat {str(kind)[6:]}, batch {batch}, D={bins}, {height}x{width}, C={channels}, {cells_}x{cells_} '
                f'({inside:,} of {plan.cell.numel():,} points inside)',
                variants,
                [depth, context],
                forward,
                2 * forward + out,
                bandwidth,
            )
            with torch.no_grad():
                twin, mine = (variants[k]().float() for k in ('materialise + sort + pool', 'ours'))
                difference = (twin - mine).norm() / twin.norm()
            print(f'  relative difference to the peer: {difference:.1e}', flush=True)
            del twin, mine
    return rows


def norm_cases(clock, bandwidth, cuda):
    kind = torch.float16 if cuda else torch.float32
    rows = []
    for shape in [(1, 256, 800, 800), (2, 256, 400, 400)] if cuda else [(1, 64, 100, 100)]:
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(shape, device=clock.device, dtype=kind).contiguous(memory_format=layout).requires_grad_()
            affine = [torch.randn(shape[1], device=clock.device, requires_grad=True) for _ in range(2)]
            variants = {
                'ours': lambda x, a=affine: ops.group_norm_relu(x, 32, *a),
                'torch group_norm + relu': lambda x, a=affine: peers.torch_group_norm_relu(x, 32, *a),
            }
            if cuda:
                variants['torch, as autocast runs it'] = lambda x, a=affine: peers.torch_group_norm_relu(x.float(), 32, *a)
            size = size_of(x)
            rows += bench(
                clock,
                f'group norm + ReLU {str(kind)[6:]}, {" x ".join(map(str, shape))}, {str(layout)[6:]}',
                {label: (lambda x=x, call=call: call(x)) for label, call in variants.items()},
                [x, *affine],
                2 * size,
                5 * size,
                bandwidth,
                kept=variants,
            )
            del x
    return rows


def profile(groups, clock):
    """The kernels of each of our calls, by device time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    points, channels = 250_000, 64
    coords = ops.dynamic_voxelize(inputs.lidar_cloud(points, 'cuda'), [0.2, 0.2, 0.2], LIDAR_RANGE)
    feats = torch.randn(points, channels, device='cuda', requires_grad=True)
    cloud = inputs.lidar_cloud(points, 'cuda')
    depth = torch.randn(4, 6, 118, 32, 88, device='cuda').softmax(2).requires_grad_()
    context = torch.randn(4, 6, 80, 32, 88, device='cuda', requires_grad=True)
    geometry = inputs.frustum(4, 118, 32, 88, 'cuda')
    bounds = [[-54.0, 54.0, 0.3], [-54.0, 54.0, 0.3], [-10.0, 10.0, 20.0]]
    calls = {
        'scatter': with_backward(lambda: ops.dynamic_point_to_voxel(feats, coords, 'max')[0], [feats]),
        'voxel': lambda: ops.voxelize(cloud, [0.075, 0.075, 0.2], LIDAR_RANGE, 10, 120_000),
        'lift': with_backward(lambda: ops.lift_splat(depth, context, geometry, bounds), [depth, context]),
    }
    affine = [torch.randn(256, device='cuda', requires_grad=True) for _ in range(2)]
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(1, 256, 800, 800, device='cuda', dtype=torch.float16).contiguous(memory_format=layout).requires_grad_()
        calls[f'norm, {str(layout)[6:]}'] = with_backward(lambda x=x: ops.group_norm_relu(x, 32, *affine), [x, *affine])
    for name, call in calls.items():
        if name.split(',')[0] not in groups:
            continue
        call()
        with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
            for _ in range(5):
                clock.flush.zero_()
                call()
            torch.cuda.synchronize()
        print(f'--- {name}: microseconds per call')
        for event in sorted(record.key_averages(), key=lambda e: -e.self_device_time_total)[:14]:
            if event.self_device_time_total > 0:
                print(f'{event.self_device_time_total / 5:10.1f}  x{event.count / 5:.0f}  {event.key[:110]}')


def write(rows, header, directory: Path, device: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f'ops_{device}.json').write_text(json.dumps(dict(header, rows=rows), indent=1) + '\n')
    lines = [
        f'# Operators beside their peers ({device})',
        '',
        'Written by `benchmarks/ops.py`; what is measured stands at its top.',
        '',
    ]
    lines += [f'- {key}: {value}' for key, value in header.items()]
    lines += ['', '| ' + ' | '.join(COLUMNS) + ' |', '|' + '---|' * len(COLUMNS)]
    lines += ['| ' + ' | '.join(cells(row)) + ' |' for row in rows]
    (directory / f'ops_{device}.md').write_text('\n'.join(lines) + '\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', choices=['cpu', 'cuda'], default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--repeat', type=int, default=20, help='timed runs, of which the median counts (default: 20)')
    parser.add_argument('--only', choices=GROUPS, nargs='+', default=GROUPS)
    parser.add_argument('--no-sweep', action='store_true', help='leave out the sizes from 1,000 points')
    parser.add_argument('--profile', action='store_true', help='also print the time of each kernel (CUDA)')
    parser.add_argument('--out', type=Path, help='directory for ops_<device>.json and .md')
    args = parser.parse_args()
    cuda = args.device == 'cuda'
    clock = Clock(args.device, args.repeat)
    bandwidth = clock.copy_bandwidth()
    one = torch.ones(1, device=args.device, requires_grad=True)
    autograd = clock.milliseconds(lambda: one * 2, with_backward(lambda: one * 2, [one]))
    header = dict(
        device=torch.cuda.get_device_name() if cuda else f'CPU, {torch.get_num_threads()} threads',
        torch=torch.__version__,
        build=str(ops.build_info()),
        repeat=args.repeat,
        copy_bandwidth_gb_s=round(bandwidth, 1),
        one_number_times_two_ms='{:.3f} forward, {:.3f} with backward: what launches and autograd cost by themselves'.format(*autograd),
    )
    print(header)
    print(' | '.join(COLUMNS))
    rows = []
    if 'scatter' in args.only:
        rows += point_to_voxel_cases(clock, bandwidth, cuda, not args.no_sweep)
    if 'voxel' in args.only:
        rows += voxelize_cases(clock, bandwidth, cuda)
    if 'pool' in args.only:
        rows += pool_cases(clock, bandwidth, cuda)
    if 'lift' in args.only:
        rows += lift_cases(clock, bandwidth, cuda)
    if 'norm' in args.only:
        rows += norm_cases(clock, bandwidth, cuda)
    if args.out:
        write(rows, header, args.out, args.device)
    if args.profile and cuda:
        profile(args.only, clock)


if __name__ == '__main__':
    main()
