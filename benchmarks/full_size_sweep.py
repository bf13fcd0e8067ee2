#!/usr/bin/env python3
"""Every shipped configuration at its full size: forward, backward and a step on a batch made in memory, then a prediction.

    python benchmarks/full_size_sweep.py --out docs/benchmarks/full_size_sweep.md        # on a GPU, minutes
    python benchmarks/full_size_sweep.py --only seg/ --samples 1
    python benchmarks/full_size_sweep.py --small --samples 2                             # small images and ranges, for a CPU

No data set is needed: batches have the form, the sizes and the number of points of real ones. The first step is in float32: its loss
must be finite, and every trainable parameter must get a finite gradient that is not zero everywhere (WITHOUT_GRADIENT names
the exceptions). Then the recipe's own precision is timed, with its optimizer, clipping and loss scaling; after it all weights must be
finite. Samples per step are the recipe's samples_per_gpu. Exit code 1 if any configuration fails.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import re
import statistics
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from mmdet3d_ext.config import Config, load_config  # noqa: E402
from mmdet3d_ext.datasets.synthetic.batch import REAL_POINTS, random_batch  # noqa: E402
from mmdet3d_ext.engine.amp import plan_amp  # noqa: E402
from mmdet3d_ext.engine.benchmark import Steps  # noqa: E402
from mmdet3d_ext.engine.evaluate import forward  # noqa: E402
from mmdet3d_ext.engine.parallel import StepModel  # noqa: E402
from mmdet3d_ext.models.builder import build_model  # noqa: E402

CONFIGS = REPO / 'configs'
GIB = 1024**3
WARM_UP = 4  # steps on a GPU: the loss scale comes down, kernels are chosen

# Folders' defaults that are models themselves, as in the reference; the others only hold what their leaves share.
MODEL_DEFAULTS = (
    'nuscenes/det/centerhead/lssfpn/camera+radar/resnet50/default.yaml',
    'nuscenes/det/centerhead/lssfpn/camera/256x704/resnet/default.yaml',
    'nuscenes/det/centerhead/lssfpn/camera/256x704/swint/default.yaml',
)
# Pattern of a parameter's name -> why its gradient may be zero everywhere.
WITHOUT_GRADIENT: Dict[str, str] = {
    r'heads\.object\.(task_heads|prediction_heads)\.\d+\.(reg|center|height|dim|rot|vel)\.\d+\.bias':
        'an L1 loss gives a bias the sum of the signs of all errors, which cancel exactly for some batches',
}


def shipped() -> List[str]:
    """Every configuration that can be trained, as a path below configs/."""
    found = [str(path.relative_to(CONFIGS)) for path in sorted(CONFIGS.rglob('*.yaml'))]
    return [name for name in found if not name.endswith('default.yaml') or name in MODEL_DEFAULTS]


def small_overrides(name: str) -> List[str]:
    """Overrides that bring a configuration to images of 64 x 160 pixels and, with its own cells, to a range of about 12 m."""
    cfg = load_config(str(CONFIGS / name))
    half = cfg.trunk_cell * 2 * round(3 / cfg.trunk_cell)
    found = ['--image_size', '[64, 160]', '--augment2d.resize', '[[0.5, 0.6], [0.5, 0.5]]', '--bev.x', f'[-{half:g}, {half:g}]',
             '--bev.y', f'[-{half:g}, {half:g}]', '--map_bound', '[[-6, 6, 0.5], [-6, 6, 0.5]]']
    for grid in ('lidar', 'camera', 'map', 'fused'):
        if cfg.bev[grid].get('cells'):  # of the whole range: the same cells in metres
            step = (cfg.bev.x[1] - cfg.bev.x[0]) / cfg.bev[grid].cells
            found += [f'--bev.{grid}.step', f'{step:.9g}', f'--bev.{grid}.cells', 'null']
    return found


def without_gradient(model: nn.Module, excused: Iterable[str] = WITHOUT_GRADIENT) -> List[str]:
    """Trainable parameters whose gradient is absent, not finite, or zero everywhere, but for names that match ``excused``."""
    bad = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            bad.append(f'{name} (none)')
        elif not torch.isfinite(parameter.grad).all():
            bad.append(f'{name} (not finite)')
        elif not parameter.grad.any() and not any(re.fullmatch(pattern, name) for pattern in excused):
            bad.append(f'{name} (zero)')
    return bad


class Memory:
    """Peak of the allocator since the start, GiB; None on the CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == 'cuda':
            torch.cuda.reset_peak_memory_stats(device)

    def peak(self) -> Optional[float]:
        return torch.cuda.max_memory_allocated(self.device) / GIB if self.device.type == 'cuda' else None


def milliseconds(call, device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return 1e3 * (time.perf_counter() - start)


def wait(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def measure(cfg: Config, samples: int, points: int, steps: int, device: torch.device) -> Dict[str, Any]:
    """One configuration's row. ``problems`` lists what is wrong; the other values are what was measured."""
    torch.manual_seed(0)
    plain = cfg.to_dict()
    model = build_model(plain['model'], cfg.get('compat')).to(device)
    batch = random_batch(plain, samples, device, points=points)
    classes = len(plain['object_classes'])
    batch['gt_labels_3d'][0][:classes] = torch.arange(classes, device=device)  # or a head of a class not drawn gets no gradient
    row: Dict[str, Any] = {'samples': samples, 'problems': []}
    row['parameters'] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    first_step(model, batch, device, row)
    timed_steps(cfg, model, batch, steps, device, row)
    model.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        outputs = forward(model, batch)
        row['predict'] = statistics.median(milliseconds(lambda: forward(model, batch), device) for _ in range(steps))
    if len(outputs) != samples:
        row['problems'].append(f'{len(outputs)} predictions for {samples} samples')
    return row


def first_step(model: nn.Module, batch: Dict[str, Any], device: torch.device, row: Dict[str, Any]) -> None:
    """Loss, gradients and memory in float32."""
    memory = Memory(device)
    loss = StepModel(model, device).train().train_step(batch)['loss']
    loss.backward()
    row['loss'], row['memory_fp32'] = float(loss.detach()), memory.peak()
    if not torch.isfinite(loss):
        row['problems'].append(f'the loss is {row["loss"]}')
    bad = without_gradient(model)
    if bad:
        row['problems'].append(f'{len(bad)} parameters without gradient: {", ".join(bad[:5])}')


def timed_steps(cfg: Config, model: nn.Module, batch: Dict[str, Any], steps: int, device: torch.device,
                row: Dict[str, Any]) -> None:
    """Time and memory of whole steps in the recipe's precision; the weights must have moved and be finite."""
    amp = plan_amp(cfg, device)
    row['precision'] = {None: 'float32', torch.float16: 'float16', torch.bfloat16: 'bfloat16'}[amp.dtype]
    runner = Steps(cfg, model, device, row['samples'], amp)
    trainable = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().cpu().clone() for p in trainable]  # not on the device: its memory is measured
    runner.run([batch], WARM_UP if device.type == 'cuda' else 1)
    memory = Memory(device)
    row['step'] = statistics.median(milliseconds(lambda: runner.run([batch], 1), device) for _ in range(steps))
    row['memory'] = memory.peak()
    if not all(bool(torch.isfinite(p).all()) for p in trainable):
        row['problems'].append('weights are not finite after the steps')
    if all(torch.equal(a, p.detach().cpu()) for a, p in zip(before, trainable, strict=True)):
        row['problems'].append('no step changed the weights')


def run(names: Sequence[str], arguments: argparse.Namespace, device: torch.device) -> Dict[str, Dict[str, Any]]:
    """All rows by configuration; what raises becomes a row with its error."""
    rows: Dict[str, Dict[str, Any]] = {}
    for name in names:
        start = time.monotonic()
        try:
            cfg = load_config(str(CONFIGS / name), [*(small_overrides(name) if arguments.small else []), *arguments.overrides])
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                rows[name] = measure(cfg, arguments.samples or cfg['data']['samples_per_gpu'], arguments.points, arguments.steps,
                                     device)
        except Exception as error:  # the other configurations are still worth a row
            traceback.print_exc()
            rows[name] = {'problems': [f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ""}']}
        gc.collect()
        if device.type == 'cuda':
            torch.cuda.empty_cache()
        print(f'{name}: {"; ".join(rows[name]["problems"]) or "ok"} ({time.monotonic() - start:.1f} s)', flush=True)
        if arguments.out:  # a run that is cut off keeps what it has
            arguments.out.write_text(table(rows, arguments, device))
    return rows


def table(rows: Dict[str, Dict[str, Any]], arguments: argparse.Namespace, device: torch.device) -> str:
    where = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'
    size = 'Small images and ranges' if arguments.small else 'Full size'
    failed = sum(bool(row['problems']) for row in rows.values())
    command = ' '.join(['python benchmarks/full_size_sweep.py', *arguments.words])
    lines = [
        '# Every shipped configuration: forward, backward, step, prediction', '',
        f'`{command}`, {where}, torch {torch.__version__}, {datetime.date.today()}', '',
        f'{size}, batches made in memory ({arguments.points} LiDAR points per sample). Loss and gradients: one float32 step from the '
        'initial weights; every trainable parameter must get a finite gradient that is not all zero. Step: forward, backward, '
        'clipping and optimizer in the recipe\'s precision, without data loading. Prediction: the whole batch in float32 (cuDNN may '
        f'use TF32). Median of {arguments.steps}. Memory: peak of the allocator.', '',
        f'{len(rows) - failed} of {len(rows)} configurations pass.', '',
        '| configuration | samples | M parameters | loss | GiB, float32 | precision | ms, step | GiB | ms, prediction | result |',
        '|---|---|---|---|---|---|---|---|---|---|']
    for name, row in rows.items():
        def cell(key: str, form: str, row=row) -> str:
            return form.format(row[key]) if row.get(key) is not None else '-'
        millions = f'{row["parameters"] / 1e6:.1f}' if 'parameters' in row else '-'
        lines.append(f'| {name} | {cell("samples", "{}")} | {millions} | {cell("loss", "{:.2f}")} | '
                     f'{cell("memory_fp32", "{:.1f}")} | {cell("precision", "{}")} | {cell("step", "{:.0f}")} | '
                     f'{cell("memory", "{:.1f}")} | {cell("predict", "{:.0f}")} | {"; ".join(row["problems"]) or "ok"} |')
    return '\n'.join(lines) + '\n'


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', nargs='+', default=[''], metavar='TEXT', help='configurations whose path holds any of these')
    parser.add_argument('--samples', type=int, help="per step (default: the recipe's samples_per_gpu)")
    parser.add_argument('--points', type=int, help=f'LiDAR points per sample (default {REAL_POINTS}, with --small 4000)')
    parser.add_argument('--steps', type=int, default=5, help='timed steps (default 5)')
    parser.add_argument('--small', action='store_true', help='small images and ranges')
    parser.add_argument('--device', help='cuda or cpu (default: a GPU if there is one)')
    parser.add_argument('--out', type=Path, help='write the table there')
    words = sys.argv[1:] if argv is None else list(argv)
    arguments, arguments.overrides = parser.parse_known_args(words)
    at = words.index('--out') if '--out' in words else len(words)
    arguments.words = words[:at] + words[at + 2:]
    arguments.points = arguments.points or (4000 if arguments.small else REAL_POINTS)
    device = torch.device(arguments.device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    names = [name for name in shipped() if any(text in name for text in arguments.only)]
    if not names:
        parser.error(f'--only {" ".join(arguments.only)}: no configuration; there are {", ".join(shipped())}')
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows = run(names, arguments, device)
    print(table(rows, arguments, device))
    return 1 if any(row['problems'] for row in rows.values()) else 0


if __name__ == '__main__':
    sys.exit(main())
