#!/usr/bin/env python3
"""Time a configuration's training step or inference part by part, on a GPU or the CPU.

    python tools/benchmark.py configs/nuscenes/multitask/phase3_400.yaml --batch 2 4 --precision fp32 fp16
    python tools/benchmark.py CONFIG --mode infer --batch 1 --precision fp16 fp32     # latency, with and without what predictions can skip
    python tools/benchmark.py CONFIG --inputs data                 # with the configured data set and its loader
    python tools/benchmark.py CONFIG --out out/before              # writes benchmark.json, benchmark.md, row by row, and a trace per run
    python tools/benchmark.py CONFIG --baseline out/before/benchmark.json
    torchrun --nproc_per_node 2 tools/benchmark.py CONFIG          # each rank's samples/s; gradients are exchanged
    python tools/benchmark.py configs/synthetic/multitask_tiny.yaml --batch 1 --iterations 2 --warmup 1 --points 5000

Random inputs have the shapes and the calibration of the configuration's data; --cloud takes a real LiDAR file's points instead of
drawn ones. Every other --key value goes to the configuration. Traces open in chrome://tracing or Perfetto.
"""
from __future__ import annotations

import argparse
import datetime
import gc
import shlex
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

REPO = Path(__file__).resolve().parents[1]
if str(REPO) not in sys.path:
    sys.path.insert(0, str(REPO))


def parser() -> argparse.ArgumentParser:
    from mmdet3d_ext.engine import cli
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False, usage='benchmark.py CONFIG [options] [--any.key value ...]')
    result.add_argument('config', help='YAML configuration')
    result.add_argument('--mode', choices=('train', 'infer'), default='train')
    result.add_argument('--batch', type=int, nargs='+', metavar='B',
                        help='samples per process (default: the configuration\'s; infer: 1)')
    result.add_argument('--precision', nargs='+', default=['fp32'], metavar='P',
                        help='fp32 (no TF32), torch (its default: TF32 in convolutions), tf32, fp16, bf16 (default fp32)')
    result.add_argument('--inputs', choices=('random', 'data'), default='random', help='random batches on the device, or the data set')
    result.add_argument('--points', type=int, metavar='P', help='points per drawn cloud (default: of ten real sweeps)')
    result.add_argument('--cloud', metavar='F', help='a .bin of float32 rows (5 columns) to use as every sample\'s cloud')
    result.add_argument('--repeat-cloud', type=int, default=1, metavar='K', help='that file K times along a drive (default 1)')
    result.add_argument('--iterations', type=int, default=20, help='timed steps (default 20)')
    result.add_argument('--warmup', type=int, default=8, help='steps before (default 8)')
    result.add_argument('--plain', action='store_true', help='infer: the model as it is only, nothing folded or kept')
    result.add_argument('--graphs', action='store_true', help='infer: one more row, with parts of a fixed shape as CUDA graphs')
    result.add_argument('--out', metavar='D', help='folder for benchmark.json, benchmark.md and the traces')
    result.add_argument('--baseline', metavar='F', help='benchmark.json of an earlier run: print ratios')
    cli.add_common(result)
    return result


def main(argv: Optional[List[str]] = None) -> int:
    from mmdet3d_ext.engine import cli, launch

    words = sys.argv[1:] if argv is None else argv
    arguments, overrides = cli.split(parser(), words)

    def program() -> int:
        import torch

        from mmdet3d_ext.engine import benchmark
        from mmdet3d_ext.engine.inference import benchmark as inference
        from mmdet3d_ext.engine.startup import load_settings, start
        from mmdet3d_ext.engine.whole_files import write_json, write_whole
        from mmdet3d_ext.errors import text_of
        cfg = load_settings(arguments.config, overrides)
        device = start(cfg, arguments)
        baseline = benchmark.read_baseline(arguments.baseline) if arguments.baseline else None
        cloud = benchmark.read_cloud(arguments.cloud, arguments.repeat_cloud) if arguments.cloud else None
        batches = arguments.batch or [1 if arguments.mode == 'infer' else cfg['data']['samples_per_gpu']]
        if min(batches) < 1 or arguments.iterations < 1:
            raise launch.UserError('--batch and --iterations must be at least 1')
        out = Path(arguments.out) if arguments.out and launch.current().is_master else None
        if out:
            try:
                out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise launch.UserError(f'--out: cannot write there: {text_of(error)}') from None
        jobs = [(samples, name) for samples in batches for name in arguments.precision]

        def measured(times: bool, profile: bool) -> Iterator[Dict[str, Any]]:
            for samples, name in jobs:
                if launch.current().is_master:
                    what = f'{arguments.warmup} + {arguments.iterations} steps' if times else 'a step under the profiler'
                    print(f'{arguments.mode}, batch {samples}, {name}: {what} ...', file=sys.stderr, flush=True)
                inputs = None
                if arguments.inputs == 'random':
                    inputs = benchmark.make_batches(cfg, samples, device, arguments.points or benchmark.REAL_POINTS, cloud)
                settings = dict(iterations=arguments.iterations, warmup=arguments.warmup, batches=inputs, times=times, profile=profile,
                                trace=str(out / f'trace_{arguments.mode}_{samples}_{name}.json.gz') if out else None)
                if arguments.mode == 'infer':
                    for row in inference.inference(cfg, device, samples, name, plain_only=arguments.plain,
                                                   graphs=arguments.graphs, **settings):
                        if times and launch.current().is_master:
                            print(f'    {row["variant"]}: {row["step_ms"]:.1f} ms', file=sys.stderr, flush=True)
                        yield row
                else:
                    yield benchmark.training(cfg, device, samples, name, **settings)
                gc.collect()  # a replayed part and its graph hold each other
                if device.type == 'cuda':
                    torch.cuda.empty_cache()

        def write(rows: List[Dict[str, Any]]) -> str:
            """The table; where there is a folder, its files, too."""
            found = (inference if arguments.mode == 'infer' else benchmark).table(rows, baseline)
            if out:
                about = dict(command=shlex.join(['python', 'tools/benchmark.py', *words]), date=str(datetime.date.today()),
                             device=torch.cuda.get_device_name(device) if device.type == 'cuda' else f'CPU, {torch.get_num_threads()} threads',
                             torch=torch.__version__, config=arguments.config, inputs=arguments.inputs)
                head = '\n'.join(f'- {key}: {value}' for key, value in about.items())
                try:
                    write_json(dict(about, runs=rows), out / 'benchmark.json')
                    write_whole(f'# Step times\n\nWritten by `tools/benchmark.py`.\n\n{head}\n\n{found}\n', out / 'benchmark.md')
                except OSError as error:
                    print(found)
                    raise launch.UserError(f'--out: cannot write there: {text_of(error)}') from None
            return found

        rows: List[Dict[str, Any]] = []
        text = ''
        for row in measured(times=True, profile=False):
            rows.append(row)
            text = write(rows)  # what was measured stays if the rest takes too long
        for number, profiled in enumerate(measured(times=False, profile=True)):  # a process that was profiled is slower ever after
            rows[number] = dict(rows[number], **profiled)
            text = write(rows)
        if launch.current().is_master:
            print(text)
        return 0

    return launch.run(program)


if __name__ == '__main__':
    from _light import end
    end(main)
