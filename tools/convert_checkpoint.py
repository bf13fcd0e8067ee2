#!/usr/bin/env python3
"""Convert a checkpoint of the BEVFusion reference to this project's box convention, or back.

    python tools/convert_checkpoint.py pretrained/bevfusion-det.pth pretrained/bevfusion-det-ours.pth
    python tools/convert_checkpoint.py bevfusion-det.pth ours.pth \\
        --config configs/nuscenes/det/transfusion/secfpn/camera+lidar/swint_v0p075/convfuser.yaml      # shows what fits the model
    python tools/convert_checkpoint.py runs/det/latest.pth for_bevfusion.pth --to reference
    python tools/convert_checkpoint.py epoch_20.pth ours.pth --weights ema

It is not needed for training or evaluation: --load_from and tools/test.py convert while loading (docs/checkpoints.md). Every other
--key value goes to the configuration.

Exit codes: 0 done; 1 an error; 2 something to correct in the command or the file.
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
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False, usage='convert_checkpoint.py IN OUT [options] [--any.key value ...]')
    result.add_argument('source', metavar='IN', help='checkpoint file')
    result.add_argument('target', metavar='OUT', help='file to write: meta and state_dict')
    result.add_argument('--to', choices=('ours', 'reference'), default='ours', help='convention of the result (default ours)')
    result.add_argument('--from', dest='origin', choices=('auto', 'ours', 'reference'), default='auto',
                        help='convention of the file, where it does not say so (default: found out)')
    result.add_argument('--config', metavar='C', help='also load the result into this configuration\'s model and show the report')
    result.add_argument('--weights', choices=('auto', 'raw', 'ema'), default='auto',
                        help='which weights of the file; auto: those that were evaluated during training')
    result.add_argument('--force', action='store_true', help='replace OUT if it exists')
    result.add_argument('--allow-unsafe-checkpoint', action='store_true',
                        help='also read files that can run code (only if you trust their source)')
    result.add_argument('--allow-partial-checkpoint', action='store_true',
                        help='with --config: go on although much of the file does not match')
    return result


def main(argv: Optional[List[str]] = None) -> int:
    from mmdet3d_ext.engine import cli, launch
    arguments, overrides = cli.split(parser(), sys.argv[1:] if argv is None else argv)

    def program() -> int:
        from mmdet3d_ext.engine.building import correctable
        from mmdet3d_ext.engine.convert_checkpoint import Options, convert_file
        with correctable():
            for line in convert_file(Options(**vars(arguments), overrides=overrides)):
                print(line)
        return 0

    return launch.run(program)


if __name__ == '__main__':
    from _light import end
    end(main)
