#!/usr/bin/env python3
"""Show how a run is doing: progress, losses per task and class, health, evaluation; in the terminal or as one HTML page.

    python tools/monitor.py runs/phase3
    python tools/monitor.py runs/phase3 --follow              # again every 10 s until the run has ended
    python tools/monitor.py runs/phase3 --html phase3.html    # one file: curves, evaluation, pictures, configuration
    python tools/monitor.py runs/stage1 --html stage1.html --compare runs/phase3
    python tools/monitor.py old/20251030_130707.log.json      # a log of mmcv's runner from anywhere
    python tools/monitor.py runs/phase3 --check || mail ...   # for cron

RUN is a folder that training wrote, while it runs or after it ended in whatever way, or one .log.json file.

Exit codes: 0 shown; 1 with --check: the run is dead or a value is bad; 2 something to correct in the command.
"""
from __future__ import annotations

import argparse
import sys
from typing import List, Optional

import _light


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    result.add_argument('run', help='run folder or .log.json file')
    result.add_argument('--follow', nargs='?', type=float, const=10.0, metavar='S',
                        help='show again every S seconds (default 10) until the run has ended')
    result.add_argument('--html', metavar='FILE', help='write a page instead')
    result.add_argument('--compare', metavar='RUN2', help='with --html: curves, results and settings against another run')
    result.add_argument('--check', action='store_true', help='only say what is bad; exit code 1 if anything is')
    result.add_argument('--width', type=int, help='columns (default: those of the terminal)')
    return result


def main(argv: Optional[List[str]] = None) -> int:
    arguments = parser().parse_args(argv)
    _light.use_package()
    from mmdet3d_ext.monitor import terminal
    from mmdet3d_ext.monitor.health import BAD, health
    from mmdet3d_ext.monitor.page import page
    from mmdet3d_ext.monitor.records import MonitorError
    from mmdet3d_ext.monitor.run import Run

    if arguments.compare and not arguments.html:
        return _mistake('--compare goes with --html FILE')
    if arguments.follow is not None and not 0 < arguments.follow <= 86400:
        return _mistake(f'--follow must be a number of seconds from 0 to 86400 (a day), got {arguments.follow:g}')
    try:
        run = Run(arguments.run)
        if arguments.check:
            wrong = [mark for mark in health(run) if mark.level == BAD]
            for mark in wrong:
                print(f'{run.name}: {mark.name}: {mark.text}')
            return 1 if wrong else 0
        if arguments.html:
            text = page(run, Run(arguments.compare) if arguments.compare else None)
            with open(arguments.html, 'w', encoding='utf-8') as stream:
                stream.write(text)
            print(f'{arguments.html}: {len(text.encode()) / 2**20:.1f} MiB, one file')
        elif arguments.follow is not None:
            terminal.follow(run, arguments.follow)
        else:
            sys.stdout.write(terminal.render(run, terminal.Style.of(sys.stdout, arguments.width)))
    except MonitorError as error:
        return _mistake(str(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError) or not (error.filename or arguments.html):
            raise  # of the output: see _light.end
        return _mistake(f'{error.filename or arguments.html}: {error.strerror}')
    except KeyboardInterrupt:
        return 130
    return 0


def _mistake(text: str) -> int:
    print(f'error: {text}', file=sys.stderr)
    return 2


if __name__ == '__main__':
    _light.end(main)
