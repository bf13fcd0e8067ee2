"""Run a function in several ranks of a gloo group, as forks of this process."""
from __future__ import annotations

import multiprocessing
import socket
import traceback
from typing import Any, Callable, List

import torch
import torch.distributed as dist


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def _child(work: Callable, rank: int, world: int, port: int, queue: Any, all_done: Any) -> None:
    torch.set_num_threads(1)  # a forked process must not use the parent's thread pool
    try:
        dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=world)
        queue.put((rank, True, work(rank, world)))
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
    # A rank that leaves early breaks its peers' last collective; and destroy_process_group() of torch 2.7's gloo may wait for
    # ever when a peer closes at the same moment (seen in one of ten runs). A forked process ends without destructors.
    all_done.wait(60)


def run_ranks(work: Callable[[int, int], Any], world: int, seconds: float = 60) -> List[Any]:
    """``[work(rank, world) for each rank]``; an exception in a rank fails the test with its traceback."""
    context = multiprocessing.get_context('fork')
    queue, all_done, port = context.Queue(), context.Event(), _free_port()
    processes = [context.Process(target=_child, args=(work, rank, world, port, queue, all_done), daemon=True)
                 for rank in range(world)]
    for process in processes:
        process.start()
    results = {}
    try:
        for _ in range(world):
            rank, fine, value = queue.get(timeout=seconds)
            assert fine, f'rank {rank}: {value}'
            results[rank] = value
    finally:
        all_done.set()
        for process in processes:
            process.join(timeout=5)
        for process in processes:
            if process.is_alive():
                process.terminate()
    return [results[rank] for rank in range(world)]
