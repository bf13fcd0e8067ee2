"""Predicts the peak GPU memory of training a configuration, part by part, without a GPU and without data.

One training step (forward, losses, backward, gradient norm, optimizer) runs on fake tensors, which have shapes and no
contents, while :class:`.tracker.StorageTracker` counts what lives. The figure is that of ``torch.cuda.max_memory_allocated``
in the steady state, with the optimizer's state in place.
"""
from __future__ import annotations

import contextlib
import gc
import logging
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from ...datasets.synthetic.batch import REAL_POINTS, random_batch
from ...models.builder import build_model
from ..amp import plan_amp
from ..building import building, in_module, running
from ..hooks.optimizer import gradients, total_norm
from ..launch import UserError
from ..parallel import autocast, sum_losses
from ..run_dir import to_plain
from ..train import make_optimizer
from .as_cuda import conv_workspace, cuda_rules
from .stand_ins import Voxels, stand_ins
from .tracker import Key, StorageTracker

MIB, GIB = 2 ** 20, 2 ** 30
PRECISIONS = {'fp32': None, 'fp16': torch.float16, 'bf16': torch.bfloat16}
CPU = torch.device('cpu')
# cuBLAS keeps 32 MiB for each thread that calls it on a Hopper GPU (aten/src/ATen/cuda/CublasHandlePool.cpp): the main thread
# and autograd's. Older GPUs take 8 MiB each.
CUBLAS = 2 * 32 * MIB
# What torch.cuda's figure leaves out and nvidia-smi shows: driver context and loaded kernels; and blocks that the allocator holds
# and cannot hand out, as a share of the peak. Both are assumptions, see docs/memory.md for what was measured.
CONTEXT = 880 * MIB
FRAGMENTATION = 0.08
# Cards by their nominal GB -> GiB that torch sees on them.
CARDS = {16: 15.77, 24: 23.65, 32: 31.74, 40: 39.39, 80: 79.15, 141: 139.8}
SAME_ON_EVERY_GPU = ('In data-parallel training every GPU holds the whole model, its gradients and optimizer state, and the activations '
                     'of its own samples: more GPUs do not lower the memory per GPU, they only add the buckets of the gradient exchange.')


@dataclass
class MemoryPlan:
    """The prediction for one configuration. All sizes in bytes.

    Attributes:
        peak: what ``torch.cuda.max_memory_allocated`` is expected to say.
        parts: bytes at that moment by (kind, part of the model); the sum is the peak. Kinds: parameters, buffers, optimizer,
            gradients, inputs, activations (made by the forward pass), backward, workspace, buckets, average.
        phase, where, operator: what runs at that moment.
        voxels: assumed per sample, by sensor.
    """

    samples: int
    precision: str
    gpus: int
    peak: int
    parts: Dict[Key, int]
    phase: str
    where: str
    operator: str
    points: int
    voxels: Dict[str, int] = field(default_factory=dict)

    def by_kind(self) -> Dict[str, int]:
        """Bytes by kind, largest first."""
        return _sums(self.parts, 0)

    def by_part(self, kinds: Sequence[str] = ('activations',)) -> Dict[str, int]:
        """Bytes of these kinds by part of the model, largest first."""
        return _sums({key: size for key, size in self.parts.items() if key[0] in kinds}, 1)

    @property
    def on_card(self) -> int:
        """What a card must have: the peak, what the allocator cannot hand out, and the context."""
        return round(self.peak * (1 + FRAGMENTATION)) + CONTEXT

    def to_dict(self) -> Dict[str, Any]:
        """For JSON; sizes in MiB."""
        return dict(samples=self.samples, precision=self.precision, gpus=self.gpus, peak_mib=round(self.peak / MIB, 1),
                    on_card_mib=round(self.on_card / MIB, 1), phase=self.phase, where=self.where, operator=self.operator,
                    points=self.points, voxels=self.voxels,
                    kinds={kind: round(size / MIB, 1) for kind, size in self.by_kind().items()},
                    activations={part: round(size / MIB, 1) for part, size in self.by_part().items()})


def _sums(parts: Mapping[Key, int], index: int) -> Dict[str, int]:
    sums: Dict[str, int] = {}
    for key, size in parts.items():
        sums[key[index]] = sums.get(key[index], 0) + size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def named_parts(model: nn.Module) -> Dict[str, nn.Module]:
    """The parts that a plan names, from the outside in: the model, what its mappings hold, and their direct children."""
    found: Dict[str, nn.Module] = {'': model}

    def add(prefix: str, module: nn.Module, depth: int) -> None:
        for name, child in module.named_children():
            holder = isinstance(child, (nn.ModuleDict, nn.ModuleList)) or prefix == 'branches'
            if not holder:
                if not any(True for _ in child.parameters()):
                    continue
                found[f'{prefix}{"." if prefix else ""}{name}'] = child
            if holder and not isinstance(child, nn.ModuleList):
                add(f'{prefix}{"." if prefix else ""}{name}', child, depth)
            elif not holder and depth > 0:
                add(f'{prefix}{"." if prefix else ""}{name}', child, depth - 1)

    add('', model, 1)
    return found


def read_precision(cfg: Mapping[str, Any], name: Optional[str] = None) -> str:
    """``fp32``, ``fp16`` or ``bf16``: the given one, or what the configuration trains in on a GPU.

    Raises:
        UserError: for another name.
    """
    if name is not None:
        if name not in PRECISIONS:
            raise UserError(f'--precision must be one of {", ".join(PRECISIONS)}, got {name!r}')
        return name
    # A device type without checks: asked on a machine that has no GPU, for one that has.
    dtype = plan_amp(cfg, torch.device('meta')).dtype
    return next(key for key, value in PRECISIONS.items() if value == dtype)


def make_plan(cfg: Mapping[str, Any], samples: Optional[int] = None, precision: Optional[str] = None,
              points: int = REAL_POINTS, voxels: Optional[int] = None, gpus: int = 1) -> MemoryPlan:
    """Predict the memory of training ``cfg``.

    Args:
        cfg: a resolved configuration.
        samples: per GPU (default: ``data.samples_per_gpu``).
        precision: fp32, fp16 or bf16 (default: the configuration's).
        points: LiDAR points per sample. voxels: occupied LiDAR voxels per sample (default: :mod:`.sparsity`'s tables).
        gpus: of data-parallel training; only adds the gradients' buckets.

    Raises:
        UserError: for a configuration that cannot be built, or whose model runs operators that cannot be followed.
    """
    samples = int(samples or cfg['data']['samples_per_gpu'])
    precision = read_precision(cfg, precision)
    settings = to_plain(cfg)
    batch = random_batch(settings, samples, CPU, points=points)
    with building('model', cfg, settings['model']):
        model = build_model(settings['model'], cfg.get('compat'))  # without init_weights: a plan needs no values and no files
    model.train()
    counts = Voxels(voxels)
    try:
        with running(model), _no_garbage_collection():
            tracker = _run_step(settings, model, batch, PRECISIONS[precision], counts, gpus)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        where = in_module(error, model).removeprefix(' in ') or 'the model'
        raise UserError(f'the memory of this model cannot be planned: {where} runs {error}, whose result depends on data. Measure it '
                        'on a GPU with benchmarks/memory.py') from error
    parts = dict(tracker.at_peak)
    parts[('workspace', 'cuBLAS')] = CUBLAS
    return MemoryPlan(samples, precision, gpus, sum(parts.values()), parts, *tracker.where, tracker.operator, points, counts.used)


def _run_step(settings: Mapping[str, Any], model: nn.Module, batch: Mapping[str, Any], dtype: Optional[torch.dtype],
              voxels: Voxels, gpus: int) -> StorageTracker:
    """One step on fake tensors; the tracker that watched it."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = StorageTracker(conv_workspace, _some_value)
    batch = {key: value if key.startswith('gt_bboxes') or key in ('gt_labels_3d', 'metas') else _fakes(value, fake)
             for key, value in batch.items()}
    _fake_state(model, fake)
    with cuda_rules(), stand_ins(model, voxels, fake.from_tensor), fake, tracker:
        parts = named_parts(model)
        owner = {id(p): name for name, part in parts.items() for p in part.parameters()}  # the innermost comes last
        for kind, tensors in (('parameters', model.parameters()), ('buffers', model.buffers())):
            for tensor in tensors:
                tracker.track(tensor, (kind, owner.get(id(tensor), '')))
        for value in batch.values():
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, torch.Tensor):
                    tracker.track(tensor, ('inputs', ''))
        trained = [p for p in model.parameters() if p.requires_grad]
        for p in trained:
            p.register_post_accumulate_grad_hook(lambda p: tracker.relabel(p.grad, ('gradients', owner.get(id(p), ''))))
        held = _held_besides(settings, model, trained, gpus, tracker)
        optimizer = _optimizer(settings, model)
        tracker.phase = 'optimizer'
        for p in trained:
            p.grad = torch.empty_like(p)
        optimizer.step()  # makes its state
        optimizer.zero_grad(set_to_none=True)
        tracker.reset_peak()

        tracker.phase = 'activations'
        with tracker.labels(parts):
            with autocast(CPU, dtype):
                losses = _losses(model, batch, tracker)
            total = sum_losses(losses)[0]
            del losses
            tracker.phase = 'backward'
            total.backward()
        tracker.phase = 'optimizer'
        total_norm(gradients(optimizer))
        optimizer.step()
        del held
    return tracker


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Within: tensors in reference cycles stay, so that a plan does not depend on when Python happens to look for them."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _losses(model: nn.Module, batch: Mapping[str, Any], tracker: StorageTracker) -> Mapping[str, torch.Tensor]:
    """The model's losses; what a head's ``loss`` makes is counted as that head's."""
    wrapped = []
    for name, head in getattr(model, 'heads', {}).items():
        if callable(getattr(head, 'loss', None)):
            def loss(*args: Any, _call: Any = head.loss, _name: str = f'heads.{name}.loss') -> Any:
                with tracker.inside(_name):
                    return _call(*args)
            head.loss = loss
            wrapped.append(head)
    try:
        return model(**batch)
    finally:
        for head in wrapped:
            del head.loss


def _held_besides(settings: Mapping[str, Any], model: nn.Module, trained: Sequence[nn.Parameter], gpus: int,
                  tracker: StorageTracker) -> List[torch.Tensor]:
    """What training keeps beside the model: averaged weights, and DDP's buckets, which copy the gradients."""
    held = []
    ema = settings.get('ema')
    if ema and ema.get('enable', ema.get('enabled', True)) is not False:
        held += [('average', torch.empty_like(t)) for t in model.state_dict().values()]
    if gpus > 1:
        held += [('buckets', torch.empty_like(p)) for p in trained]
    for kind, tensor in held:
        tracker.relabel(tensor, (kind, ''))
    return [tensor for _, tensor in held]


def _optimizer(settings: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """The configured optimizer, stepping over all parameters at once where it would on a GPU."""
    logger = logging.getLogger('mmdet3d_ext.memory')
    logger.setLevel(logging.ERROR)
    optimizer = make_optimizer(dict(settings, auto_scale_lr=None), model, logger, 1)
    for group in optimizer.param_groups:
        if 'foreach' in group and group['foreach'] is None and not group.get('fused'):
            group['foreach'] = True
    return optimizer


def _some_value(tensor: torch.Tensor) -> Any:
    """A value for ``.item()`` on a fake tensor."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _fakes(value: Any, fake: FakeTensorMode) -> Any:
    if isinstance(value, torch.Tensor):
        return fake.from_tensor(value)
    return [_fakes(item, fake) for item in value] if isinstance(value, list) else value


def _fake_state(model: nn.Module, fake: FakeTensorMode) -> None:
    """Put fakes in the place of the model's parameters and buffers; shared ones stay shared."""
    known: Dict[int, Any] = {}  # id -> (fake, real): the real one is kept so that no id is used twice
    for module in model.modules():
        for members in (module._parameters, module._buffers):
            for name, real in members.items():
                if real is None:
                    continue
                if id(real) not in known:
                    made = fake.from_tensor(real.detach())
                    known[id(real)] = (nn.Parameter(made, real.requires_grad) if members is module._parameters else made, real)
                members[name] = known[id(real)][0]
