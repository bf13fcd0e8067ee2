"""How long the parts of a model take, on the device's own clock, and where the host waits for it.

Times come from events that the device records, so that measuring does not make the host wait.
"""
from __future__ import annotations

import collections
import contextlib
import statistics
import time
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import nn

from .launch import UserError

MIB = 1024 ** 2
# Name -> autocast type, TF32 in matrix products and sparse convolutions, TF32 in convolutions. 'torch' is what torch does unless told
# otherwise; with an autocast type it is the configuration's allow_tf32 that says what the float32 rest runs in.
PRECISIONS = {'fp32': (None, False, False), 'torch': (None, False, True), 'tf32': (None, True, True),
              'fp16': (torch.float16, None, None), 'bf16': (torch.bfloat16, None, None)}
KERNELS = 40  # that a row names
# CUDA runtime calls in which the host waits for the device.
WAITS = ('cudaStreamSynchronize', 'cudaDeviceSynchronize', 'cudaEventSynchronize')


class Clock:
    """Named spans of one step, on the device's clock (CUDA events) or the host's."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == 'cuda'
        self.spans: List[Tuple[str, Any, Any]] = []
        self._open: Dict[str, Any] = {}

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, name: str) -> None:
        self._open[name] = self.now()

    def stop(self, name: str) -> None:
        if name in self._open:
            self.spans.append((name, self._open.pop(name), self.now()))

    def milliseconds(self) -> Dict[str, float]:
        """Sum per name, and start anew. Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        found: Dict[str, float] = collections.OrderedDict()
        for name, begin, end in self.spans:
            spent = begin.elapsed_time(end) if self.cuda else 1e3 * (end - begin)
            found[name] = found.get(name, 0.0) + spent
        self.spans, self._open = [], {}
        return found


def parts_of(model: nn.Module) -> Dict[str, nn.Module]:
    """The model's parts that a table shows, by name: one level below encoders, decoders and heads, whole fusers."""
    found: Dict[str, nn.Module] = collections.OrderedDict()
    for sensor, encoder in getattr(model, 'encoders', {}).items():
        for name, part in encoder.items():
            found[f'encoders.{sensor}.{name}'] = part
    branches = {f'branches.{task}.': branch for task, branch in getattr(model, 'branches', {}).items()}
    for prefix, trunk in {'': model, **branches}.items():
        if getattr(trunk, 'fuser', None) is not None:
            found[f'{prefix}fuser'] = trunk.fuser
        for name, part in getattr(trunk, 'decoder', {}).items():
            for inner, module in part.items() if isinstance(part, nn.ModuleDict) else [('', part)]:
                found[f'{prefix}decoder.{name}{"." if inner else ""}{inner}'] = module
    for task, head in getattr(model, 'heads', {}).items():
        found[f'heads.{task}'] = head
    return found or collections.OrderedDict(model.named_children())


@contextlib.contextmanager
def timed_parts(model: nn.Module, clock: Clock) -> Iterator[None]:
    """Within: every call of a part is a span of ``clock`` (and ``heads.<task>.start_matching`` and ``.loss`` of a head's losses,
    ``.candidates`` and ``.detections`` of its decoding)."""
    handles, wrapped = [], []
    for name, part in parts_of(model).items():
        handles.append(part.register_forward_pre_hook(lambda *_, name=name: clock.start(name)))
        handles.append(part.register_forward_hook(lambda *_, name=name: clock.stop(name)))
        for method in ('start_matching', 'loss', 'get_bboxes', 'candidates', 'detections') if name.startswith('heads.') else ():
            if callable(getattr(part, method, None)):
                wrapped.append((part, method))
                setattr(part, method, _timed(getattr(part, method), f'{name}.{method}', clock))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for part, method in wrapped:
            delattr(part, method)


def _timed(call: Callable, name: str, clock: Clock) -> Callable:
    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.start(name)
        try:
            return call(*args, **kwargs)
        finally:
            clock.stop(name)
    return timed


@contextlib.contextmanager
def precision(name: str, device: torch.device) -> Iterator[Optional[torch.dtype]]:
    """Set where TF32 is allowed as :data:`PRECISIONS` says; gives the autocast type or None.

    Raises:
        UserError: for an unknown precision, or float16 on the CPU.
    """
    if name not in PRECISIONS:
        raise UserError(f'--precision must be among {list(PRECISIONS)}, got {name!r}')
    dtype, products, convolutions = PRECISIONS[name]
    if device.type == 'cpu' and dtype == torch.float16:
        raise UserError('--precision fp16 needs a GPU; on the CPU use fp32 or bf16')
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if products is not None:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions
    try:
        yield dtype
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def wait(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> Dict[str, Optional[float]]:
    """What the caching allocator reported at most, MiB: handed out, and held (None on the CPU)."""
    if device.type != 'cuda':
        return {'peak_mib': None, 'peak_reserved_mib': None}
    return {'peak_mib': torch.cuda.max_memory_allocated(device) / MIB, 'peak_reserved_mib': torch.cuda.max_memory_reserved(device) / MIB}


def medians(model: nn.Module, clock: Clock, run: Callable[[], None], iterations: int) -> Dict[str, float]:
    rows: Dict[str, List[float]] = collections.OrderedDict()
    with timed_parts(model, clock):
        for _ in range(iterations):
            run()
            for name, spent in clock.milliseconds().items():
                rows.setdefault(name, []).append(spent)
    return {name: statistics.median(values) for name, values in rows.items()}


def profile_step(device: torch.device, run: Callable[[], None], trace: Optional[str]) -> Dict[str, Any]:
    """One step under torch's profiler, and one to look for waits.

    What the process does afterwards is slower by a tenth or more, host-bound work above all: the profiler's library stays attached to
    CUDA's (pytorch issue 144455). So measure times first.

    Returns:
        ``host_waits``: calls in which the host waited for the device, ``wait_sites``: the Python lines of those that torch knows of;
        ``launches`` and ``busy_ms``: kernels and copies on the device and their time together (None on the CPU);
        ``kernels``: those that took most time, ``[name, calls, ms]`` (operators on the CPU).
    """
    from torch.profiler import ProfilerActivity, profile
    cuda = device.type == 'cuda'
    wait(device)
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as recorded:
        run()
    averages = recorded.key_averages()
    waits = sum(event.count for event in averages if event.key in WAITS) if cuda else None
    spent = 'self_device_time_total' if cuda else 'self_cpu_time_total'
    # Annotations (Optimizer.step#...) are shown on the device too, and are no work of their own.
    events = [e for e in averages if not cuda or e.device_type == torch.autograd.DeviceType.CUDA and '#' not in e.key]
    events.sort(key=lambda event: -getattr(event, spent))
    kernels = [[event.key[:120], event.count, round(getattr(event, spent) / 1e3, 3)] for event in events[:KERNELS]]
    launches = sum(event.count for event in events) if cuda else None
    busy = sum(event.self_device_time_total for event in events) / 1e3 if cuda else None
    if trace:
        recorded.export_chrome_trace(trace)
    sites: Dict[str, int] = collections.Counter()
    if cuda:
        torch.cuda.set_sync_debug_mode('warn')
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter('always')
                run()
        finally:
            torch.cuda.set_sync_debug_mode('default')
        for item in caught:
            if 'synchroniz' in str(item.message):
                sites[f'{_short(item.filename)}:{item.lineno}'] += 1
    return dict(host_waits=waits, wait_sites=dict(sites), launches=launches, busy_ms=busy, kernels=kernels)


def _short(path: str) -> str:
    for root in ('mmdet3d_ext/', 'site-packages/', 'dist-packages/'):
        if root in path:
            return (root if root == 'mmdet3d_ext/' else '') + path.rsplit(root, 1)[1]
    return path
