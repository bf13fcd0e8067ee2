"""Several ranks in tests: a clean environment, a free port, work in forked processes with a gloo group."""
from __future__ import annotations

import io
import multiprocessing
import os
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


def free_port():
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


def clean_env(**more):
    """The environment without what a launcher of the tests themselves left."""
    drop = ('OMPI_', 'PMI', 'SLURM_', 'TORCHELASTIC', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_')
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    scripts = str(Path(sys.executable).parent)
    return dict(env, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='', PATH=f'{scripts}{os.pathsep}{env["PATH"]}', **more)


def in_ranks(work, tmp_path, world=2):
    """``work(rank)`` in ``world`` forked processes with a gloo group; returns their results, or fails with a rank's traceback."""
    outcomes = _outcomes(work, tmp_path, world)
    for rank, (error, _) in enumerate(outcomes):
        assert error is None, f'rank {rank}: {error}'
    return [value for _, value in outcomes]


def errors_in_ranks(work, tmp_path, world=2):
    """As :func:`in_ranks` for work that must fail on every rank; returns the tracebacks."""
    outcomes = _outcomes(work, tmp_path, world)
    assert all(error is not None for error, _ in outcomes), outcomes
    return [error for error, _ in outcomes]


def _outcomes(work, tmp_path, world):
    """(traceback or None, result) of each rank."""
    context = multiprocessing.get_context('fork')
    queue = context.Queue()

    def main(rank):
        try:
            torch.set_num_threads(1)  # a forked process must not use the parent's thread pool
            dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=rank, world_size=world)
            value = io.BytesIO()
            torch.save(work(rank), value)  # tensors in a queue would need their sender to stay
            queue.put((rank, None, value.getvalue()))
            dist.barrier()
        except BaseException:
            queue.put((rank, traceback.format_exc(), None))

    processes = [context.Process(target=main, args=(rank,), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    found = {}
    for _ in range(world):
        rank, error, value = queue.get(timeout=90)
        found[rank] = (error, None if value is None else torch.load(io.BytesIO(value), weights_only=False))
    for process in processes:
        process.join(20)
        process.kill()
    return [found[rank] for rank in range(world)]
