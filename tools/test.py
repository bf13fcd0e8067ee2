#!/usr/bin/env python3
"""Evaluate a checkpoint: nuScenes detection scores and map IoU, on one process or many.

    python tools/test.py configs/synthetic/multitask_tiny.yaml runs/demo/latest.pth
    torchpack dist-run -np 8 python tools/test.py CONFIG epoch_20.pth --eval bbox map
    python tools/test.py CONFIG epoch_20.pth --eval map --map_bound "[[-50, 50, 0.5], [-50, 50, 0.5]]"
    python tools/test.py CONFIG epoch_20.pth --format-only --split test      # results_nusc.json for the evaluation server
    python tools/test.py CONFIG epoch_20.pth --data.test.load_interval 8     # every eighth sample, for a quick look
    python tools/test.py CONFIG none                                         # the untrained model

Every other --key value goes to the configuration, as in training, and derived values follow. Without --eval everything that the
model predicts is evaluated. metrics.json and the devkit's files go to --out-dir (default: eval_<checkpoint>/ beside it).

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
                                     allow_abbrev=False, usage='test.py CONFIG CHECKPOINT [options] [--any.key value ...]')
    result.add_argument('config', help='YAML configuration')
    result.add_argument('checkpoint', help='checkpoint file, or "none" for the initial weights')
    result.add_argument('--eval', nargs='+', metavar='TASK',
                        help='bbox (3-D detection) and/or map (segmentation); default: all')
    result.add_argument('--out', metavar='F',
                        help='also write the detections: .pkl (boxes per sample) or .json (nuScenes format)')
    result.add_argument('--out-dir', '--work-dir', '--out_dir', metavar='D', help='folder of metrics.json and the result files')
    result.add_argument('--split', choices=('train', 'val', 'test'), default='test',
                        help='which of data.* is evaluated (default test)')
    result.add_argument('--weights', choices=('auto', 'raw', 'ema'), default='auto',
                        help='which weights of the file; auto: those that were evaluated during training')
    result.add_argument('--format-only', action='store_true', help='write results_nusc.json without scores')
    result.add_argument('--fuse-conv-bn', action='store_true', help='fold batch norms into convolutions first')
    result.add_argument('--amp', action='store_true', help="evaluate in the configuration's mixed precision instead of float32")
    cli.add_common(result)
    return result


def main(argv: Optional[List[str]] = None) -> int:
    from mmdet3d_ext.engine import cli, launch

    arguments, overrides = cli.split(parser(), sys.argv[1:] if argv is None else argv)

    def program() -> int:
        from mmdet3d_ext.engine.building import correctable
        from mmdet3d_ext.engine.startup import load_settings, start
        cfg = load_settings(arguments.config, overrides)
        device = start(cfg, arguments)
        from mmdet3d_ext.engine.test import Options, test
        names = Options.__dataclass_fields__
        with correctable():
            test(cfg, Options(**{k: v for k, v in vars(arguments).items() if k in names}), device)
        return 0

    return launch.run(program)


if __name__ == '__main__':
    from _light import end
    end(main)
