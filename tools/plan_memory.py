#!/usr/bin/env python3
"""Predict the peak GPU memory of training a configuration, part by part, without a GPU and without data.

    python tools/plan_memory.py configs/nuscenes/multitask/phase3_400.yaml
    python tools/plan_memory.py CONFIG --batch 2 --precision fp16
    python tools/plan_memory.py CONFIG --model.checkpoint "[heads.map, decoder]"     # any --key value of the configuration
    python tools/plan_memory.py CONFIG --gpus 8 --no-switches --json plan.json

The figure is that of torch.cuda.max_memory_allocated in a running training. Also said: which cards it fits on, and what each switch that
does not change the result saves (found by planning again with it; --no-switches leaves that out). More GPUs do not lower the memory
per GPU: in data-parallel training each holds the whole model and its own samples.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import List, Optional

REPO = Path(__file__).resolve().parents[1]
if str(REPO) not in sys.path:
    sys.path.insert(0, str(REPO))


def parser() -> argparse.ArgumentParser:
    from mmdet3d_ext.engine.cli import whole
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False, usage='plan_memory.py CONFIG [options] [--any.key value ...]')
    result.add_argument('config', help='YAML configuration')
    result.add_argument('--batch', type=whole, metavar='N', help='samples per GPU (default data.samples_per_gpu)')
    result.add_argument('--precision', choices=('fp32', 'fp16', 'bf16'), help='default: what the configuration trains in')
    result.add_argument('--points', type=whole, metavar='N', help='LiDAR points per sample (default: ten sweeps of a 32-beam scanner)')
    result.add_argument('--voxels', type=whole, metavar='N', help='occupied LiDAR voxels per sample (default: measured on a real cloud)')
    result.add_argument('--gpus', type=whole, default=1, metavar='N', help='GPUs of data-parallel training (adds its gradient buckets)')
    result.add_argument('--switches', action=argparse.BooleanOptionalAction, default=True, help='also plan with each switch')
    result.add_argument('--json', metavar='FILE', help='write the plans to this file, too')
    return result


def main(argv: Optional[List[str]] = None) -> int:
    from mmdet3d_ext.engine import cli, launch

    arguments, overrides = cli.split(parser(), sys.argv[1:] if argv is None else argv)

    def program() -> int:
        from mmdet3d_ext.engine.config_check import refuse_inconsistent
        from mmdet3d_ext.engine.memory import report
        from mmdet3d_ext.engine.memory.plan import make_plan
        from mmdet3d_ext.engine.memory.switches import savings
        from mmdet3d_ext.engine.startup import load_settings
        cfg = load_settings(arguments.config, overrides)
        if arguments.json and not Path(arguments.json).absolute().parent.is_dir():
            raise launch.UserError(f'--json {arguments.json}: its folder does not exist')
        options = {} if arguments.voxels is None else {'voxels': arguments.voxels}
        points = {} if arguments.points is None else {'points': arguments.points}
        try:
            plan = make_plan(cfg, arguments.batch, arguments.precision, gpus=arguments.gpus, **points, **options)
        except Exception:
            refuse_inconsistent(cfg)  # says what to write, if the configuration contradicts itself
            raise
        print(report.table(plan), flush=True)
        larger = make_plan(cfg, plan.samples + 1, plan.precision, gpus=plan.gpus, **points, **options)
        print('\n' + report.cards(plan, larger), flush=True)
        rows = savings(cfg, plan, **options) if arguments.switches else []
        if rows:
            print('\n' + report.switch_table(plan, rows))
        if arguments.json:
            content = dict(config=arguments.config, overrides=overrides, plan=plan.to_dict(),
                           switches=[dict(name=switch.name, words=switch.words, plan=changed.to_dict()) for switch, changed in rows])
            Path(arguments.json).write_text(json.dumps(content, indent=1) + '\n')
        return 0

    return launch.run(program)


if __name__ == '__main__':
    from _light import end
    end(main)
