"""One rank of a job that fails in a chosen way: ``rank_toy.py MODE RUN_DIR``. Started by test_ranks.py through each launcher."""
from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'tools'))

from _light import use_package  # noqa: E402

use_package()  # without mmcv and the models: they take most of the start

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from mmdet3d_ext.engine import launch, rank_watch  # noqa: E402

MODE, RUN = sys.argv[1:3]


def sum_up() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return float(value)


def slow_loader() -> None:
    time.sleep(12)


def failing() -> None:
    Path(RUN, 'failed_at').write_text(str(time.time()))


def program() -> int:
    rank = launch.detect().rank
    if MODE == 'early' and rank == 1:
        failing()
        raise ZeroDivisionError('before the ranks have met')
    if MODE == 'mistake' and rank == 1:
        failing()
        raise launch.UserError('key a.b: only this machine lacks the file')
    launch.start(start_timeout=60, stall_timeout=3.0)
    launch.attach_rank_log(RUN, 'now')
    for _ in range(3):
        rank_watch.beat()
        sum_up()
    if rank == 1:
        failing()
        if MODE == 'raise':
            raise ZeroDivisionError('in the second rank')
        if MODE == 'kill':
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == 'crash':
            ctypes.string_at(0)
        if MODE == 'stall':
            slow_loader()
        if MODE == 'lock':  # PyDLL keeps the interpreter's lock
            ctypes.PyDLL(None).sleep(15)
    if MODE == 'steps':  # the same stack for longer than the stall timeout, but every step is a new one
        begin = time.monotonic()
        while time.monotonic() - begin < 5:
            rank_watch.beat()
            time.sleep(0.01)
    print(f'rank {rank} sums to', sum_up())
    return 0


if __name__ == '__main__':
    sys.exit(launch.run(program))
