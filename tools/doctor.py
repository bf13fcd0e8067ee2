#!/usr/bin/env python3
"""Examine this machine's environment before a training run: what is wrong, and what to do about it.

    python tools/doctor.py                                      # everything that needs no configuration
    python tools/doctor.py configs/nuscenes/multitask/phase3_400.yaml --processes 8
    python tools/doctor.py CONFIG --data.workers_per_gpu 8      # every other --key value goes to the configuration
    python tools/doctor.py --data-root data/nuscenes --only data
    python tools/doctor.py --only libraries mpi --json > doctor.json
    python tools/doctor.py --only libraries --fix               # stopgap links for a library of another torch; build it anew instead

Groups: stack (Python, torch, CUDA, driver, which file each package comes from, stale bytecode), libraries (mmcv, spconv, ours:
needed libraries, torch and GPU architectures they were built for), gpus (one point through every operator on every GPU against
the CPU; NCCL), mpi (mpirun, mpi4py, what environment a rank sees), system (/dev/shm, open files, limits, disk), data (nuScenes
folders, map expansion, info files). No GPU is needed. It works where torch or mmcv cannot be imported.

Exit codes: 0 nothing to do; 1 warnings: training may run; 2 problems, or a mistake in the command.
"""
from __future__ import annotations

import argparse
import sys
from typing import List, Optional

from _light import end, seconds, use_package

use_package()

from mmdet3d_ext import doctor  # noqa: E402


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                     usage='doctor.py [CONFIG] [options] [--any.key value ...]')
    result.add_argument('config', nargs='?', help='YAML configuration: its data, workers and batch are then looked at')
    result.add_argument('--only', nargs='+', choices=list(doctor.GROUPS), default=[], metavar='GROUP',
                        help=f'only these groups: {", ".join(doctor.GROUPS)}')
    result.add_argument('--data-root', metavar='D', help='nuScenes folder (default: the configuration\'s)')
    result.add_argument('--version', metavar='V', help='v1.0-trainval, v1.0-mini or v1.0-test (default: what is there)')
    result.add_argument('--info-file', action='append', default=[], metavar='F', help='info file (default: the configuration\'s)')
    result.add_argument('--run-dir', metavar='D', help='where the run is written (default: the configuration\'s, or runs)')
    result.add_argument('--processes', type=int, default=0, metavar='N',
                        help='ranks on this machine (default: its GPUs; 2 to try the launcher)')
    result.add_argument('--timeout', type=seconds, default=120.0, metavar='S', help='seconds for one attempt (default 120)')
    result.add_argument('--json', action='store_true', help='print one JSON object instead of lines')
    result.add_argument('--fix', action='store_true',
                        help='link the names that a library of another torch needs, if it then loads; nothing else is changed')
    return result


def main(argv: Optional[List[str]] = None) -> int:
    arguments, rest = parser().parse_known_args(argv)
    options = doctor.Options(arguments.config, rest, arguments.data_root, arguments.version, arguments.info_file, arguments.run_dir,
                             arguments.processes, fix=arguments.fix, timeout=arguments.timeout)
    if arguments.processes < 0:
        parser().error(f'--processes must be a whole number >= 0, got {arguments.processes}')
    if rest and not arguments.config:
        parser().error(f'unknown option {rest[0]} (overrides need a configuration)')

    def started(group: str) -> None:
        if sys.stderr.isatty():
            print(f'\r{group} ...\x1b[K\r', end='', file=sys.stderr, flush=True)

    findings = []
    for finding in doctor.examine(options, arguments.only, started):
        findings.append(finding)
        if not arguments.json:
            print('\n'.join(doctor.as_lines(finding)), flush=True)
    print(doctor.as_json(findings) if arguments.json else doctor.summary(findings))
    return doctor.exit_code(findings)


if __name__ == '__main__':
    end(main)
