#!/usr/bin/env python3
"""Train stages of growing resolution in order, each from the best checkpoint of the one before, as a stages file says.

    python tools/train_progressive.py stages/nuscenes_multitask.yaml --dry-run     # checks every stage, starts nothing
    python tools/train_progressive.py stages/nuscenes_multitask.yaml               # also after a crash, a kill, a reboot, Ctrl-C
    python tools/train_progressive.py stages/nuscenes_multitask.yaml --status      # what ran, with which checkpoint and result
    python tools/train_progressive.py stages/nuscenes_multitask.yaml --again stage1_600

All configurations are checked, and their models built once, before the first stage starts. Each stage is a run of tools/launch.py (own
supervisor, own folder below run_dir). Killed at any point, the same command goes on where it was; if only this command was killed, the
training went on meanwhile. Ctrl-C stops the stage with a checkpoint. mmdet3d_ext/launching/stages.py describes the stages file.

Exit codes: 0 all stages are done; 5 a gate was not met (the message says what to adjust); 75 stopped, the same command goes on;
1 a stage failed; 2 something to correct; 3, 4 as tools/train.py.
"""
from __future__ import annotations

import argparse
import hashlib
import signal
import sys
from pathlib import Path
from typing import List, Optional

import _light

REPO = _light.REPO


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    result.add_argument('stages', help='YAML stages file')
    result.add_argument('--status', action='store_true', help='show the table and end')
    result.add_argument('--dry-run', action='store_true', help='check all stages and end')
    result.add_argument('--again', metavar='STAGE', help='train this stage and what follows anew (once; then without this option)')
    result.add_argument('--skip-checks', action='store_true', help='start without checking configurations and machine')
    result.add_argument('--script', help=argparse.SUPPRESS)
    result.add_argument('--poll', type=float, default=1.0, help=argparse.SUPPRESS)
    return result


def facts(stage, arguments: argparse.Namespace):
    """What the stage's configuration says before it runs (:class:`mmdet3d_ext.launching.stages.Facts`)."""
    from mmdet3d_ext.launching.stages import Facts
    if arguments.script:  # a trainer with configurations of its own
        return Facts(hashlib.sha256(Path(stage.config).read_bytes()).hexdigest())
    from mmdet3d_ext.checks import check_config, metric_names
    from mmdet3d_ext.config import ConfigError, load_config
    from mmdet3d_ext.engine.config_check import unbuildable
    try:
        cfg = load_config(stage.config, stage.settings())
    except ConfigError as error:
        return Facts('', problems=(str(error),))
    if arguments.skip_checks:
        return Facts(cfg.hash)
    names = metric_names(cfg)
    report = check_config(cfg, stage.ranks)
    # A wrong metric is said once, by the plan's check, which also looks at the gates.
    problems = tuple(str(one) for one in report.errors if one.key != 'evaluation.save_best')
    if not problems:
        problems = tuple(filter(None, [unbuildable(cfg)]))
    return Facts(cfg.hash, tuple(names) if names is not None else None, bool(cfg.get('ema')), problems)


def main(argv: Optional[List[str]] = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.status or arguments.script:
        _light.use_package()
    elif str(REPO) not in sys.path:
        sys.path.insert(0, str(REPO))
    from mmdet3d_ext.launching import progressive, stages
    from mmdet3d_ext.launching.processes import interruptible
    from mmdet3d_ext.launching.state import LaunchToolError
    try:
        plan = stages.read_plan(arguments.stages)
        progress = progressive.Progress(plan.run_dir)
        if arguments.status:
            print(progressive.table(progress) if progress.records else f'{plan.run_dir}: nothing has run yet')
            return 0
        known = {stage.name: facts(stage, arguments) for stage in plan.stages}
        problems = stages.check_plan(plan, known)
        if problems:
            raise LaunchToolError('\n'.join(problems) + '\nnothing was started')
        if arguments.dry_run:
            progress.adopt(plan, known, arguments.again)
            print(f'{len(plan.stages)} stages can start: {", ".join(stage.name for stage in plan.stages)} (--dry-run)')
            return 0
        progress.lock()
        progress = progressive.Progress(plan.run_dir)  # as it is now that nobody else changes it
        for note in progress.adopt(plan, known, arguments.again):
            print(note)
        progress.write()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        extra = [*(['--skip-checks'] if arguments.skip_checks else []), *(['--script', arguments.script] if arguments.script else [])]
        runner = progressive.Progressive(plan, progress, [sys.executable, str(REPO / 'tools' / 'launch.py')], tuple(extra),
                                         lambda text: print(text, flush=True), arguments.poll)
        with interruptible():
            code = runner.run()
    except LaunchToolError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print('ended at once; a stage that trains goes on by itself, and the same command waits for it', file=sys.stderr)
        return 75
    print(progressive.table(progress))
    return code


if __name__ == '__main__':
    _light.end(main)
