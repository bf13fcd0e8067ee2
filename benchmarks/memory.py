#!/usr/bin/env python3
"""Measure the GPU memory and time of training steps beside what ``tools/plan_memory.py`` predicts, with each switch on and off.

Random batches in the real pipeline's form stand in for a data set. The process is capped as a smaller card would be. Writes
memory.md and memory.json, with every row.

    python benchmarks/memory.py --out docs/benchmarks               # all rows, under five minutes on an H200
    python benchmarks/memory.py --rows "stage 2" --iterations 10    # rows whose name holds this
    python benchmarks/memory.py --again docs/benchmarks/memory.json # predict anew beside what was measured then; needs no GPU
    python benchmarks/memory.py --device cpu --tiny --out out       # the machinery on a CPU, with a tiny model; no memory figures
"""
from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import gc
import json
import logging
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / 'benchmarks')]

MIB = 2 ** 20
CAP_GIB = 31.7  # a V100 of 32 GB
SILENCE = 150   # seconds without a row after which the measuring process is taken for stuck
CAMERA = 'configs/nuscenes/seg/camera-bev256d2.yaml'
LIDAR = 'configs/nuscenes/det/transfusion/secfpn/lidar/voxelnet_0p075.yaml'
JOINT = 'configs/nuscenes/multitask/phase3_400.yaml'
STAGE1 = 'configs/nuscenes/multitask/stage1_600.yaml'
STAGE2 = 'configs/nuscenes/multitask/stage2_800.yaml'
TINY = 'configs/synthetic/multitask_tiny.yaml'
HEAD, DECODER = 'heads.map', 'decoder, branches.map.decoder'
SWIN, VIEW = 'encoders.camera.backbone', 'encoders.camera.vtransform'
LAYOUT = 'encoders.camera.neck, encoders.camera.vtransform, fuser, decoder, branches.map, heads.map'


def row(name: str, config: str, samples: int, precision: str, switch: str = '', *overrides: str) -> Dict[str, Any]:
    """One measurement."""
    return dict(name=name, config=config, samples=samples, precision=precision, switch=switch, overrides=list(overrides))


ROWS = [
    row('stage 2, 800', STAGE2, 1, 'fp16'),
    row('stage 2, 800', STAGE2, 1, 'fp16', 'head recomputed', '--model.checkpoint', f'[{HEAD}]'),
    row('stage 2, 800', STAGE2, 1, 'fp16', 'decoders recomputed', '--model.checkpoint', f'[{DECODER}]'),
    row('stage 2, 800', STAGE2, 1, 'fp16', 'Swin recomputed', '--model.checkpoint', f'[{SWIN}]'),
    row('stage 2, 800', STAGE2, 1, 'fp16', 'view transform recomputed', '--model.checkpoint', f'[{VIEW}]'),
    row('stage 2, 800', STAGE2, 1, 'fp16', 'all four recomputed', '--model.checkpoint', f'[{HEAD}, {DECODER}, {SWIN}, {VIEW}]'),
    row('stage 2, 800', STAGE2, 1, 'fp16', 'channels last', '--model.channels_last', f'[{LAYOUT}]'),
    row('stage 2, 800', STAGE2, 1, 'fp16', 'channels last, head recomputed', '--model.channels_last', f'[{LAYOUT}]',
        '--model.checkpoint', f'[{HEAD}]'),
    row('stage 2, 800', STAGE2, 2, 'fp16'),
    row('stage 2, 800', STAGE2, 1, 'fp32'),
    row('stage 1, 600', STAGE1, 1, 'fp16'),
    row('stage 1, 600', STAGE1, 1, 'fp32'),
    row('joint, 400', JOINT, 2, 'fp16'),
    row('joint, 400', JOINT, 2, 'fp32'),
    row('LiDAR only', LIDAR, 2, 'fp16'),
    row('LiDAR only', LIDAR, 2, 'fp32'),
    row('camera only', CAMERA, 2, 'fp16'),
    row('camera only', CAMERA, 2, 'fp32'),
]
TINY_ROWS = [
    row('tiny', TINY, 1, 'fp32'),
    row('tiny', TINY, 1, 'fp32', 'all recomputed', '--model.checkpoint', f'[{HEAD}, decoder, {SWIN}, {VIEW}]'),
    row('wrong', TINY, 1, 'fp32', '', '--model.heads.map.in_channels', '3'),
]
# (what, row, precision, samples, switch, most GiB)
GOALS = [('Stage 1, fp16, 1 sample', 'stage 1, 600', 'fp16', 1, '', 10.0),
         ('Stage 2, fp16, 1 sample, nothing recomputed', 'stage 2, 800', 'fp16', 1, '', 16.0),
         ('Stage 2, fp16, 2 samples, within the cap', 'stage 2, 800', 'fp16', 2, '', CAP_GIB),
         ('Stage 2, fp32, 1 sample, within the cap', 'stage 2, 800', 'fp32', 1, '', CAP_GIB)]


def settings(item: Dict[str, Any]) -> Any:
    """The row's configuration, without pretrained files."""
    from mmdet3d_ext.config import load_config
    cfg = load_config(str(REPO / item['config']), item['overrides'])
    camera = (cfg['model']['encoders'].get('camera') or {}).get('backbone') or {}
    if isinstance(camera.get('init_cfg'), dict):
        cfg = load_config(str(REPO / item['config']), [*item['overrides'], '--model.encoders.camera.backbone.init_cfg', 'null'])
    return cfg


# ---- measuring, in a process of its own ----------------------------------------------------------------------------------

def measure(item: Dict[str, Any], device: Any, iterations: int) -> Dict[str, Any]:
    """Train a few steps as the runner does; what the allocator says, and the median time of a step."""
    import torch
    from inputs import keyframe_cloud

    from mmdet3d_ext.datasets.synthetic.batch import random_batch
    from mmdet3d_ext.engine.amp import AmpPlan
    from mmdet3d_ext.engine.benchmark import Steps
    from mmdet3d_ext.engine.memory.plan import PRECISIONS
    from mmdet3d_ext.engine.run_dir import to_plain
    from mmdet3d_ext.engine.train import make_model

    cuda = device.type == 'cuda'
    cfg = settings(item)
    torch.manual_seed(0)
    tiny = item['config'] == TINY
    batch = random_batch(to_plain(cfg), item['samples'], device, points=2000 if tiny else 323_000,
                         cloud=None if tiny else keyframe_cloud('cpu'))
    steps = Steps(cfg, make_model(cfg), device, item['samples'], AmpPlan(PRECISIONS[item['precision']]))
    model, optimizer = steps.model, steps.optimizer
    seen: Dict[str, int] = {}
    head = model.heads['map'] if 'map' in getattr(model, 'heads', {}) else None
    handles = []
    if head is not None and cuda:
        handles = [head.register_forward_pre_hook(lambda *_: seen.update(before=torch.cuda.memory_allocated())),
                   head.register_forward_hook(lambda *_: seen.update(after=torch.cuda.memory_allocated()))]
    voxels = _count_voxels(model, batch)

    def once() -> float:
        begin = time.perf_counter()
        steps.run([batch], 1)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    for _ in range(3):
        once()
    if not optimizer.state:  # the scaler's search may have skipped every step so far
        for group in optimizer.param_groups:
            for p in group['params']:
                p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    result: Dict[str, Any] = {'voxels': voxels}
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = [once() for _ in range(iterations)]
    result['step_ms'] = 1e3 * statistics.median(times)
    if cuda:
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.max_memory_reserved()
        result.update(peak_mib=torch.cuda.max_memory_allocated() / MIB, reserved_mib=reserved / MIB,
                      context_mib=(total - free - torch.cuda.memory_reserved()) / MIB)
        if 'after' in seen:
            result['head_mib'] = (seen['after'] - seen['before']) / MIB
    for handle in handles:
        handle.remove()
    return result


def _count_voxels(model: Any, batch: Dict[str, Any]) -> Optional[int]:
    """Occupied LiDAR voxels of a sample, mean."""
    if 'lidar' not in getattr(model, 'encoders', {}):
        return None
    coords = model.encoders['lidar']['voxelize'](batch['points'])[1]
    return len(coords) // len(batch['points'])


def worker(rows_file: str, out_file: str, device_name: str, cap: float, iterations: int) -> None:
    """Measure the rows of a file one after the other; one line of JSON each, as soon as it is known."""
    import torch
    logging.disable(logging.WARNING)
    device = torch.device(device_name)
    if device.type == 'cuda':
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * 2 ** 30 / total))
    for number, item in json.loads(Path(rows_file).read_text()):
        begin = time.perf_counter()
        try:
            result = measure(item, device, iterations)
        except torch.cuda.OutOfMemoryError as error:
            result = {'error': 'out of memory: ' + str(error).splitlines()[0]}
        except Exception as error:  # a row that fails must not take the others along
            result = {'error': f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ""}'}
        result['seconds'] = time.perf_counter() - begin
        result['device'] = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'
        with open(out_file, 'a') as file:
            file.write(json.dumps([number, result]) + '\n')
        gc.collect()
        if device.type == 'cuda':
            torch.cuda.empty_cache()


def measure_all(rows: List[Dict[str, Any]], arguments: argparse.Namespace,
                seen: Callable[[Dict[int, Dict[str, Any]]], Any] = lambda found: None) -> Dict[int, Dict[str, Any]]:
    """All rows in a process that is started again, without the row that ended it, if it dies or hangs. ``seen`` is called with what is
    there after each row."""
    found: Dict[int, Dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out, todo = Path(folder, 'out'), Path(folder, 'rows')
        out.touch()
        while len(found) < len(rows):
            left = [(i, item) for i, item in enumerate(rows) if i not in found]
            todo.write_text(json.dumps(left))
            process = subprocess.Popen([sys.executable, __file__, '--worker', str(todo), str(out), '--device', arguments.device,
                                        '--cap', str(arguments.cap), '--iterations', str(arguments.iterations)])
            known, since = len(found), time.monotonic()
            while process.poll() is None:
                time.sleep(0.2)
                found = _read(out)
                if len(found) > known:
                    known, since = len(found), time.monotonic()
                    item, result = rows[max(found)], found[max(found)]
                    print(f'[{len(found)}/{len(rows)}] {label(item)}: {result.get("error") or _short(result)}', flush=True)
                    seen(found)
                if time.monotonic() - since > SILENCE:
                    process.kill()
                    process.wait()
            found = _read(out)
            missing = [i for i in range(len(rows)) if i not in found]
            if missing:
                found[missing[0]] = {'error': f'the process ended with {process.returncode} or was stuck'}
                with open(out, 'a') as file:
                    file.write(json.dumps([missing[0], found[missing[0]]]) + '\n')
    return found


def _read(path: Path) -> Dict[int, Dict[str, Any]]:
    return dict(json.loads(line) for line in path.read_text().splitlines() if line.endswith(']'))


def _short(result: Dict[str, Any]) -> str:
    peak = f'{result["peak_mib"]:,.0f} MiB, ' if 'peak_mib' in result else ''
    return f'{peak}{result["step_ms"]:.0f} ms a step ({result["seconds"]:.0f} s)'


def label(item: Dict[str, Any]) -> str:
    """A row in words."""
    return f'{item["name"]}, {item["samples"]} x {item["precision"]}' + (f', {item["switch"]}' if item['switch'] else '')


# ---- predicting, on the CPU, while the GPU measures -------------------------------------------------------------------------

def predict(item: Dict[str, Any]) -> Dict[str, Any]:
    """The plan of a row, as plain values, or why there is none."""
    begin = time.perf_counter()
    try:
        import torch
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        from mmdet3d_ext.engine.memory.plan import make_plan
        points = {'points': 2000} if item['config'] == TINY else {}
        plan = make_plan(settings(item), item['samples'], item['precision'], **points)
    except Exception as error:
        return {'error': f'{type(error).__name__}: {error}'}
    return dict(plan.to_dict(), seconds=round(time.perf_counter() - begin, 1))


# ---- the report ----------------------------------------------------------------------------------------------------------

def report(content: Dict[str, Any]) -> str:
    """Markdown from what memory.json holds: rows with ``measured`` and ``predicted``, and where they come from."""
    rows = content['rows']
    lines = ['# GPU memory of training: measured and predicted', '', f'`{content["command"]}`', '',
             f'{content["device"]}, torch {content["torch"]}, {content["date"]}; process capped at {content["cap_gib"]} GiB', '',
             'Measured is `torch.cuda.max_memory_allocated` over steps in the steady state (optimizer state in place), predicted what '
             '`tools/plan_memory.py` says without a GPU, with the voxel counts that it assumes. Random images and map labels, a real LiDAR '
             'cloud where there is one. fp32: with TF32 in convolutions, torch\'s default.', '',
             '| configuration | samples | precision | switch | measured MiB | predicted MiB | off | reserved MiB | step ms |',
             '|---|---|---|---|---|---|---|---|---|']
    for item in rows:
        got, plan = item['measured'], item['predicted']
        peak, said = got.get('peak_mib'), plan.get('peak_mib')
        off = f'{said / peak - 1:+.1%}' if peak and said else '-'
        shown = f'{peak:,.0f}' if peak else got.get('error', '-')
        reserved = f'{got["reserved_mib"]:,.0f}' if peak else '-'
        spent = f'{got["step_ms"]:.0f}' if 'step_ms' in got else '-'
        lines.append(f'| {item["name"]} | {item["samples"]} | {item["precision"]} | {item["switch"] or "-"} | {shown} | '
                     f'{f"{said:,.0f}" if said else plan.get("error", "-")} | {off} | '
                     f'{reserved} | {spent} |')
    offs = [abs(item['predicted']['peak_mib'] / item['measured']['peak_mib'] - 1) for item in rows
            if item['measured'].get('peak_mib') and item['predicted'].get('peak_mib')]
    if offs:
        lines += ['', f'Largest deviation of the prediction: {max(offs):.1%}, median {statistics.median(offs):.1%}.']
    contexts = [item['measured']['context_mib'] for item in rows if 'context_mib' in item['measured']]
    spares = [item['measured']['reserved_mib'] / item['measured']['peak_mib'] - 1 for item in rows if item['measured'].get('peak_mib')]
    if contexts:
        lines += ['', f'Beside the allocator: {min(contexts):,.0f} to {max(contexts):,.0f} MiB on the card (context and kernels). Reserved '
                      f'over allocated at the peak: {min(spares):.1%} to {max(spares):.1%}.']
    lines += _goal_lines(rows) + _switch_lines(rows)
    return '\n'.join(lines) + '\n'


def _find(rows: List[Dict[str, Any]], name: str, precision: str, samples: int, switch: str) -> Dict[str, Any]:
    for item in rows:
        if (item['name'], item['precision'], item['samples'], item['switch']) == (name, precision, samples, switch):
            return item['measured']
    return {}


def _goal_lines(rows: List[Dict[str, Any]]) -> List[str]:
    lines = ['', '## Goals', '', '| goal | at most GiB | measured GiB | met |', '|---|---|---|---|']
    for what, name, precision, samples, switch, most in GOALS:
        got = _find(rows, name, precision, samples, switch)
        peak = got.get('peak_mib')
        if got:
            met = 'yes' if peak and peak / 1024 <= most else 'no'
            lines.append(f'| {what} | {most} | {f"{peak / 1024:.2f}" if peak else got.get("error", "-")} | {met} |')
    off, on = (_find(rows, 'stage 2, 800', 'fp16', 1, switch) for switch in ('', 'head recomputed'))
    if off.get('head_mib') and on.get('head_mib'):
        saved, slower = 1 - on['head_mib'] / off['head_mib'], on['step_ms'] / off['step_ms'] - 1
        lines += [f'| recomputing the map head saves at least 40% of what its forward pass keeps | - | {off["head_mib"] / 1024:.2f} -> '
                  f'{on["head_mib"] / 1024:.2f} ({saved:.0%}) | {"yes" if saved >= 0.4 else "no"} |',
                  f'| and costs at most 30% of the step\'s time | - | {slower:+.0%} | {"yes" if slower <= 0.3 else "no"} |']
    return lines if len(lines) > 5 else []


def _switch_lines(rows: List[Dict[str, Any]]) -> List[str]:
    lines = []
    for item in rows:
        if not item['switch']:
            continue
        base = _find(rows, item['name'], item['precision'], item['samples'], '')
        plain = next((r['predicted'] for r in rows if r['measured'] is base), {})
        got = item['measured']
        if 'step_ms' not in got or 'step_ms' not in base:
            continue
        saved = f'{base["peak_mib"] - got["peak_mib"]:,.0f}' if 'peak_mib' in got and 'peak_mib' in base else '-'
        said = f'{plain["peak_mib"] - item["predicted"]["peak_mib"]:,.0f}' if 'peak_mib' in plain and 'peak_mib' in item['predicted'] else '-'
        kept = f'{base["head_mib"]:,.0f} -> {got["head_mib"]:,.0f}' if 'head_mib' in got and 'head_mib' in base else '-'
        lines.append(f'| {label(item)} | {saved} | {said} | {kept} | {got["step_ms"] / base["step_ms"] - 1:+.0%} |')
    if not lines:
        return []
    return ['', '## Switches', '', '| switch | peak MiB saved | predicted | kept by the map head\'s forward, MiB | step time |',
            '|---|---|---|---|---|', *lines]


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, help='folder of memory.md and memory.json (default: docs/benchmarks; with --again its file\'s)')
    parser.add_argument('--rows', default='', help='only rows whose name holds this')
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--cap', type=float, default=CAP_GIB, help='GiB that the process may take (default: a V100 of 32 GB)')
    parser.add_argument('--iterations', type=int, default=6, help='timed steps per row, after three others')
    parser.add_argument('--planners', type=int, default=max(1, min(6, (os.cpu_count() or 1) // 2)), help='processes that predict')
    parser.add_argument('--again', type=Path, metavar='JSON', help='keep the measurements of this file, predict anew')
    parser.add_argument('--tiny', action='store_true', help='rows of a tiny model, to try this program')
    parser.add_argument('--worker', nargs=2, help=argparse.SUPPRESS)
    words = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(words)
    if arguments.worker:
        worker(*arguments.worker, arguments.device, arguments.cap, arguments.iterations)
        return 0
    if arguments.again and arguments.rows:
        parser.error('--again takes all rows of its file')
    earlier = json.loads(arguments.again.read_text()) if arguments.again else None
    rows = earlier['rows'] if earlier else TINY_ROWS if arguments.tiny else ROWS
    rows = [item for item in rows if arguments.rows in label(item)]
    if not rows:
        parser.error(f'--rows {arguments.rows!r} is in no name among {sorted({label(item) for item in ROWS})}')
    import torch
    begin = time.monotonic()
    with concurrent.futures.ProcessPoolExecutor(arguments.planners, multiprocessing.get_context('spawn')) as pool:
        planned = [pool.submit(predict, item) for item in rows]

        def write(measured: Dict[int, Dict[str, Any]]) -> str:
            for number, (item, future) in enumerate(zip(rows, planned)):
                item.update(measured=item['measured'] if earlier else measured.get(number, {'error': 'not measured'}),
                            predicted=future.result() if future.done() else {'error': 'not planned'})
            content = dict(earlier, rows=rows) if earlier else dict(
                command=f'python benchmarks/memory.py {shlex.join(words)}'.strip(),
                device=next((got['device'] for got in measured.values() if 'device' in got), arguments.device),
                torch=torch.__version__, date=str(datetime.date.today()), cap_gib=arguments.cap, rows=rows)
            out = arguments.out or (arguments.again.parent if earlier else Path('docs/benchmarks'))
            out.mkdir(parents=True, exist_ok=True)
            (out / 'memory.md').write_text(report(content))
            (out / 'memory.json').write_text(json.dumps(content, indent=1) + '\n')
            return report(content)

        measured = {} if earlier else measure_all(rows, arguments, write)
        concurrent.futures.wait(planned)
        print(write(measured) + f'\n{time.monotonic() - begin:.0f} s')
    return 0


if __name__ == '__main__':
    sys.exit(main())
