#!/usr/bin/env python3
"""Draw samples: boxes on the six images, the LiDAR from above with boxes, predicted and true map side by side.

    python tools/visualize.py configs/synthetic/multitask_tiny.yaml --mode gt --num 4 --out-dir viz
    python tools/visualize.py CONFIG --mode pred --checkpoint runs/demo/latest.pth --split val --bbox-score 0.1 --map-score 0.5
    torchpack dist-run -np 1 python tools/visualize.py CONFIG --mode pred --checkpoint CKPT --out-dir viz

One PNG per sample, <index>_<token>.png. Bird's-eye views show forward up and right to the right. True boxes are green,
predicted ones orange; the front of a box is crossed. Every other --key value goes to the configuration, as in training.

Exit codes: 0 done; 1 an error; 2 something to correct in the command, the configuration or the checkpoint.
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
                                     allow_abbrev=False, usage='visualize.py CONFIG [options] [--any.key value ...]')
    result.add_argument('config', help='YAML configuration')
    result.add_argument('--mode', choices=('gt', 'pred'), default='gt',
                        help='labels only, or predictions beside them (default gt)')
    result.add_argument('--checkpoint', metavar='C',
                        help='with --mode pred: checkpoint file, or "none" for the initial weights')
    result.add_argument('--split', choices=('train', 'val', 'test'), default='val', help='which of data.* (default val)')
    result.add_argument('--bbox-score', type=float, default=0.1, metavar='S',
                        help='draw boxes from this score on (default 0.1)')
    result.add_argument('--map-score', type=float, default=0.5, metavar='S',
                        help='colour map cells from this probability on (default 0.5)')
    result.add_argument('--out-dir', default='viz', metavar='D', help='where the pictures go (default viz)')
    result.add_argument('--num', type=int, metavar='N', help='only N samples, at equal distances over the split')
    result.add_argument('--width', type=int, default=1440, metavar='PX', help='width of a picture (default 1440)')
    result.add_argument('--weights', choices=('auto', 'raw', 'ema'), default='auto',
                        help='which weights of the file; auto: those that were evaluated during training')
    cli.add_common(result)
    return result


def main(argv: Optional[List[str]] = None) -> int:
    from mmdet3d_ext.engine import cli, launch

    arguments, overrides = cli.split(parser(), sys.argv[1:] if argv is None else argv)

    def program() -> int:
        from mmdet3d_ext.engine.building import correctable
        from mmdet3d_ext.engine.startup import load_settings, start
        from mmdet3d_ext.engine.visualize import Options, visualize
        cfg = load_settings(arguments.config, overrides)
        device = start(cfg, arguments)
        names = Options.__dataclass_fields__
        with correctable():
            files = visualize(cfg, Options(**{k: v for k, v in vars(arguments).items() if k in names}), device)
        print(f'{len(files)} pictures in {arguments.out_dir}')
        return 0

    return launch.run(program)


if __name__ == '__main__':
    from _light import end
    end(main)
