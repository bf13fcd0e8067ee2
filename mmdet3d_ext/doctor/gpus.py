"""One point through every operator on every GPU against the CPU, and a sum over the GPUs."""
from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, Iterator, List

from .libraries import REBUILD
from .options import Options
from .probe import PATHS, SAY, ask
from .report import OK, PROBLEM, SKIPPED, Finding
from .stack import ask_torch

# One point with feature 5 in a grid of 2 x 3 cells: the sum is 5 at its cell, whatever the device. A kernel that was not built
# for a GPU, and is not checked after its launch, returns zeros.
_OPERATORS = '''
import importlib, warnings
warnings.filterwarnings("ignore")
import torch
devices = json.loads(sys.argv[1])

def package(device):
    from mmdet3d_ext import ops
    pooled = ops.bev_pool(torch.full((1, 1), 5.0, device=device), torch.tensor([[1, 2, 0, 0]], device=device), 1, 1, 2, 3)
    voxels = ops.dynamic_point_to_voxel(torch.full((1, 1), 5.0, device=device),
                                        torch.tensor([[0, 1, 2, 0]], dtype=torch.int32, device=device), "sum")[0]
    return [float(pooled.sum()), float(pooled[0, 0, 0, 1, 2]), float(voxels.sum())]

def mmcv(device):
    from mmcv.ops import nms
    boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [0.0, 0.0, 4.0, 4.1]], device=device)
    kept, index = nms(boxes, torch.tensor([0.5, 0.9], device=device), 0.5)
    return [float(len(kept)), float(index[0])]

def spconv(device):
    import mmdet3d_ext
    import spconv.pytorch as spconv
    from spconv.core import ConvAlgo
    layer = spconv.SubMConv3d(1, 1, 3, bias=False, algo=ConvAlgo.Native).to(device)
    with torch.no_grad():
        layer.weight.fill_(0.5)
        found = layer(spconv.SparseConvTensor(torch.full((1, 1), 10.0, device=device),
                                              torch.tensor([[0, 1, 1, 1]], dtype=torch.int32, device=device), [3, 3, 3], 1))
    return [float(found.features.sum())]

def product(device):
    a = torch.arange(6.0, device=device).view(2, 3)
    return [float((a @ a.T).sum())]

for name, run in (("torch", product), ("mmdet3d_ext", package), ("mmcv", mmcv), ("spconv", spconv)):
    for device in devices:
        say(running=f"{name} on {device}")
        try:
            values = run(torch.device(device))
            if device != "cpu":
                torch.cuda.synchronize(device)
            say(**{f"{name} on {device}": values})
        except Exception as error:
            say(**{f"{name} on {device}": f"{type(error).__name__}: {error}"})
say(running=None)
'''
EXPECTED = {'torch': [83.0], 'mmdet3d_ext': [5.0, 5.0, 5.0], 'mmcv': [1.0, 1.0], 'spconv': [5.0]}

_SUM = '''
import datetime, warnings
warnings.filterwarnings("ignore")
import torch, torch.distributed as dist
rank, world, backend = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
if backend == "nccl":
    torch.cuda.set_device(rank)
dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
value = torch.full((1 << 16,), float(rank + 1), device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(value)
say(sum=float(value[0]), last=float(value[-1]))
sys.stdout.flush()
os._exit(0)
'''


def check(options: Options) -> Iterator[Finding]:
    """All of this group."""
    torch = ask_torch()
    if 'version' not in torch:
        yield Finding('operators', SKIPPED, 'torch cannot be imported')
        return
    gpus = torch.get('gpus') or []
    yield from check_operators(['cpu', *(f'cuda:{number}' for number in range(len(gpus)))], max(options.timeout, 180.0))
    if len(gpus) < 2:
        yield Finding('NCCL', SKIPPED, f'{len(gpus)} GPU(s): there is nobody to talk to')
    else:
        yield check_sum('nccl', len(gpus), options.timeout)


def check_operators(devices: List[str], timeout: float) -> Iterator[Finding]:
    """One finding per library: its operators on each device against the known result."""
    answer = ask(_OPERATORS, timeout, arguments=[json.dumps(devices)])
    said = answer.merged()
    for name, expected in EXPECTED.items():
        wrong: Dict[str, object] = {}
        for device in devices:
            found = said.get(f'{name} on {device}')
            if found is None:
                crashed = said.get('running') == f'{name} on {device}'
                found = (f'the process {answer.how_it_ended()}: {answer.last_line()}' if crashed else
                         f'not reached, because the process {answer.how_it_ended()}')
            if isinstance(found, str) or [round(value, 4) for value in found] != expected:
                wrong[device] = found
        data = {'expected': expected, 'wrong': {device: str(value) for device, value in wrong.items()}}
        if not wrong:
            yield Finding(f'{name} operators', OK, f'right on {", ".join(devices)}', data=data)
            continue
        text = '; '.join(f'{device}: {value if isinstance(value, str) else f"gives {value}, not {expected}"}'
                         for device, value in wrong.items())
        zeros = [device for device, value in wrong.items() if isinstance(value, list) and not any(value)]
        if zeros:
            text += '. Zeros without an error: the kernel was not built for this GPU'
        yield Finding(f'{name} operators', PROBLEM, text, REBUILD.get(name, 'make install REDO=torch'), data)


def check_sum(backend: str, world: int, timeout: float) -> Finding:
    """One process per GPU adds up its rank by ``backend``; the sum must be right in all."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    name = 'NCCL' if backend == 'nccl' else backend
    with tempfile.TemporaryDirectory(prefix='mmdet3d_ext-doctor-') as folder:
        script = Path(folder, 'sum.py')
        script.write_text(PATHS + SAY + _SUM)
        processes = []
        for rank in range(world):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port),
                       MMDET3D_EXT_PROBE=str(Path(folder, f'answer_{rank}')), NCCL_DEBUG=os.environ.get('NCCL_DEBUG', 'WARN'))
            with open(Path(folder, f'output_{rank}'), 'wb') as output:
                processes.append(subprocess.Popen([sys.executable, str(script), backend], env=env, stdin=subprocess.DEVNULL,
                                                  stdout=output, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + timeout
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        expected = world * (world + 1) / 2
        wrong = []
        for rank in range(world):
            answer = Path(folder, f'answer_{rank}')
            said = json.loads(answer.read_text()) if answer.exists() and answer.stat().st_size else {}
            if said.get('sum') != expected or said.get('last') != expected:
                lines = [line for line in Path(folder, f'output_{rank}').read_text(errors='replace').splitlines() if line.strip()]
                wrong.append(f'rank {rank}: {said.get("sum") or (lines[-1] if lines else "no answer in time")}')
    if wrong:
        return Finding(name, PROBLEM, f'a sum over {world} ranks failed: {"; ".join(wrong)}',
                       'NCCL_DEBUG=INFO shows where; in containers try --ipc=host and a larger /dev/shm, between GPUs NCCL_P2P_DISABLE=1, '
                       'over the network NCCL_SOCKET_IFNAME=<interface>', {'wrong': wrong})
    return Finding(name, OK, f'{world} ranks sum to {expected:g}')
