#!/usr/bin/env python3
"""Is a configuration consistent? Prints the chain of grids and refuses what does not fit, with the key to change and the value.

    python tools/check_config.py configs/nuscenes/multitask/stage1_600.yaml
    python tools/check_config.py CONFIG --bev.labels.cells 800          # any --key value of the configuration
    python tools/check_config.py CONFIG --gpus 4 --json                 # learning rate against 4 GPUs' batch; machine-readable
    python tools/check_config.py CONFIG --memory 31.7 --environment     # also: fits a 32 GB card? can this machine train?

Takes seconds and needs no data, no GPU and no model; --memory plans the model's memory and --environment runs the doctor, which takes
longer. Training makes the same check before it begins.

Exit codes: 0 accepted (warnings may stand above); 1 refused: it contradicts itself or names what does not exist; 2 it cannot be loaded:
a mistake in the command or an override, a missing or broken file, an unknown key.
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
    from mmdet3d_ext.engine.cli import positive, whole
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False, usage='check_config.py CONFIG [options] [--any.key value ...]')
    result.add_argument('config', help='YAML configuration')
    result.add_argument('--gpus', type=whole, metavar='N', help='processes that will train (default: those that the recipe is for)')
    result.add_argument('--memory', type=positive, metavar='GIB', help='also plan the peak GPU memory and compare it with a card of this size')
    result.add_argument('--environment', action='store_true', help='also examine libraries and limits of this machine (the doctor)')
    result.add_argument('--json', action='store_true', help='print one JSON object instead of text')
    return result


def main(argv: Optional[List[str]] = None) -> int:
    from mmdet3d_ext.engine import cli

    arguments, overrides = cli.split(parser(), sys.argv[1:] if argv is None else argv)
    from mmdet3d_ext.checks import check_config
    from mmdet3d_ext.config import ConfigError, load_config
    from mmdet3d_ext.engine import config_check
    from mmdet3d_ext.engine.startup import notices
    said: List[str] = []
    try:
        with notices(said):
            cfg = load_config(arguments.config, overrides)
    except ConfigError as error:
        if arguments.json:
            print(json.dumps({'config': arguments.config, 'accepted': False, 'chain': [], 'notes': [], 'warnings': [], 'errors': [
                {'level': 'error', 'key': '', 'place': arguments.config, 'problem': str(error), 'write': {}}]}, indent=1))
        else:
            print(f'error: {error}\n{arguments.config}: refused')
        return 2
    report = check_config(cfg, arguments.gpus)
    config_check.add_notices(report, said)
    if arguments.environment:
        config_check.add_environment(report, arguments.config, overrides)
    if arguments.memory is not None and not report.errors:
        config_check.add_memory(report, cfg, arguments.memory, arguments.gpus)
    print(report.as_json() if arguments.json else report.text())
    return 1 if report.errors else 0


if __name__ == '__main__':
    from _light import end
    end(main)
