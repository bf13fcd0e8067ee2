#!/usr/bin/env python3
"""Compute a batch again that training kept because a loss or gradient was not finite, and show where it goes wrong.

    python tools/replay.py runs/phase3/bad_batches/epoch_3_iter_812_rank_5.pth
    python tools/replay.py FILE --precision float32          # does it also happen without mixed precision?
    python tools/replay.py FILE --device cpu

The file holds the batch, the weights and the random numbers before its step, and the configuration, so nothing else is needed. The
answer names non-finite inputs by sample, the first module whose output is not finite, and the first non-finite gradient.

Exit codes: 0 finite now; 1 an error; 2 something to correct in the command; 4 not finite again.
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
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    result.add_argument('file', help='<run folder>/bad_batches/epoch_<E>_iter_<I>_rank_<R>.pth: iteration I of epoch E, both from 1')
    result.add_argument('--precision', choices=('float32', 'float16', 'bfloat16'), help='default: that of the run')
    result.add_argument('--device', help='cpu, cuda, cuda:1 (default: a GPU if there is one)')
    return result


def main(argv: Optional[List[str]] = None) -> int:
    from mmdet3d_ext.engine import launch

    arguments = parser().parse_args(argv)

    def program() -> int:
        import torch

        from mmdet3d_ext.engine.building import correctable
        from mmdet3d_ext.engine.replay import replay, report
        device = torch.device(arguments.device or ('cuda' if torch.cuda.is_available() else 'cpu'))
        with correctable():
            content, finding = replay(arguments.file, device, arguments.precision)
        print(report(content, finding, arguments.precision or content['dtype']))
        return 4 if finding.found else 0

    return launch.run(program)


if __name__ == '__main__':
    from _light import end
    end(main)
