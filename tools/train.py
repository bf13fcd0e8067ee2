#!/usr/bin/env python3
"""Train a model from a configuration, on one process or many, on GPUs or the CPU.

    python tools/train.py configs/synthetic/multitask_tiny.yaml
    torchpack dist-run -np 8 python tools/train.py configs/nuscenes/multitask/phase3_400.yaml --run-dir runs/phase3
    torchrun --nproc_per_node 8 tools/train.py CONFIG --load_from pretrained/lidar-only-det.pth
    srun --ntasks=8 --ntasks-per-node=8 --gres=gpu:8 python tools/train.py CONFIG --resume_from auto
    python tools/train.py CONFIG --max_epochs 1 --optimizer.lr 1e-4 --data.samples_per_gpu 2 --fp16 null

Every other --key value goes to the configuration (dotted names, typed values, lists in brackets; an unknown key is an error unless
--allow-new stands beside it). The run folder gets
configs.yaml, <time>.log, <time>.log.json, logging/ (one log per process), tf_logs/, epoch_<N>.pth, latest.pth, metrics.json.

Exit codes: 0 done; 1 an error, its traceback is on the screen and in logging/; 2 something to correct in the command or the
configuration; 3 the last checkpoint could not be written (at the end, or when asked to stop); 4 stopped by the guard: too many steps
without a finite gradient, or none at the end of the schedule; 75 stopped by Ctrl-C, SIGTERM or SIGUSR1 after a step, with a checkpoint
(--resume_from auto goes on there); 130 stopped at once, without one: a second Ctrl-C, or Ctrl-C while it starts or evaluates.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import List, Optional

REPO = Path(__file__).resolve().parents[1]
if str(REPO) not in sys.path:
    sys.path.insert(0, str(REPO))


def parser() -> argparse.ArgumentParser:
    from mmdet3d_ext.engine import cli
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False, usage='train.py CONFIG [options] [--any.key value ...]')
    result.add_argument('config', help='YAML configuration')
    result.add_argument('--run-dir', '--work-dir', '--run_dir', '--work_dir', metavar='D',
                        help='folder of this run (default runs/run-<code>-<configuration>)')
    result.add_argument('--load_from', '--load-from', metavar='C[,C2]',
                        help='start from the weights of this checkpoint; of several, the first that has a tensor gives it')
    result.add_argument('--load-weights', choices=('auto', 'raw', 'ema'), default='auto',
                        help='which weights of --load_from; auto: those that were evaluated during training')
    result.add_argument('--load-optimizer', action='store_true',
                        help='also take the optimizer\'s moments of the loaded tensors from the (first) --load_from; the schedule begins anew')
    result.add_argument('--resume_from', '--resume-from', metavar='C|auto',
                        help='continue a run: weights, optimizer, epoch; auto: the newest whole checkpoint in the run folder')
    result.add_argument('--auto-resume', action='store_true', help='the same as --resume_from auto')
    result.add_argument('--seed', type=int, help='random seed (default: the configuration\'s)')
    result.add_argument('--deterministic', action='store_true', help='deterministic kernels where torch has them (slower)')
    result.add_argument('--validate', action=argparse.BooleanOptionalAction, default=True,
                        help='evaluate after every epoch (default)')
    result.add_argument('--amp', action='store_true', help='mixed precision: the same as --amp.dtype fp16')
    result.add_argument('--auto-scale-lr', '--autoscale-lr', action='store_true',
                        help='scale the learning rate with the batch: the same as --auto_scale_lr.enable true')
    cli.add_common(result)
    return result


def main(argv: Optional[List[str]] = None) -> int:
    from mmdet3d_ext.engine import cli, launch, stopping

    arguments, overrides = cli.split(parser(), sys.argv[1:] if argv is None else argv)

    def program() -> int:
        from mmdet3d_ext.engine.building import correctable
        from mmdet3d_ext.engine.startup import load_settings, start
        extra = ['--seed', str(arguments.seed)] if arguments.seed is not None else []
        extra += ['--amp', '{dtype: fp16}'] if arguments.amp else []
        extra += ['--auto_scale_lr.enable', 'true'] if arguments.auto_scale_lr else []
        extra += ['--load_from', cli.list_word(arguments.load_from)] if arguments.load_from else []
        cfg = load_settings(arguments.config, overrides + extra)
        device = start(cfg, arguments)
        from mmdet3d_ext.engine.train import Options, train
        names = Options.__dataclass_fields__
        options = Options(**{k: v for k, v in vars(arguments).items() if k in names})
        if arguments.auto_resume and not options.resume_from:
            options.resume_from = 'auto'
        with correctable():
            result = train(cfg, options, device)
        return 3 if result.save_failed else stopping.EXIT_CODE if result.stopped else 0

    return launch.run(program)


if __name__ == '__main__':
    from _light import end
    end(main)
