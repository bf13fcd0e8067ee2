"""Picking the weights of a file and loading them into a model, with a report of every tensor."""
from __future__ import annotations

import logging
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch import nn

from .reading import CheckpointError, read_checkpoint

# Camera grids are stored as weights (published checkpoints have them), but they belong to the configuration: loading them would
# silently undo a change of resolution.
GRID_PATTERN = re.compile(r'(^|\.)vtransform\.(dx|bx|nx|frustum)$')
PREFIXES = ('module.', '_orig_mod.', 'model.', 'net.')
RAW_KEYS = ('state_dict', 'model_state', 'model_state_dict', 'model')
EMA_KEYS = ('ema_state_dict', 'state_dict_ema', 'model_ema', 'ema')
MIN_MATCHED = 0.5  # share of the checkpoint's tensors that must find a place; below it is another model's file


def pick_weights(content: Mapping[str, Any], path: str, prefer: str = 'auto') -> Tuple['OrderedDict[str, torch.Tensor]', str]:
    """The state dict in a checkpoint's content, and a word for what it is ('weights', 'EMA weights').

    Args:
        prefer: 'raw', 'ema', or 'auto': the weights that were evaluated during training (``meta.evaluated_weights``), raw
            where the file does not say. A file that holds only one kind gives that one.

    Raises:
        CheckpointError: if there are no weights; the message lists the file's keys.
    """
    raw = next((content[k] for k in RAW_KEYS if _is_state(content.get(k))), None)
    ema = next((content[k] for k in EMA_KEYS if _is_state(content.get(k))), None)
    if raw is None and ema is None and _is_state(content):
        raw = content
    if raw is None and ema is None:
        kind = ' (a Lightning file without weights)' if 'pytorch-lightning_version' in content else ''
        raise CheckpointError(f'{path} holds no weights{kind}; its keys are {sorted(map(str, content))[:12]}')
    if prefer == 'auto':
        prefer = 'ema' if (content.get('meta') or {}).get('evaluated_weights') == 'ema' else 'raw'
    use_ema = raw is None or (prefer == 'ema' and ema is not None)
    chosen = ema if use_ema else raw
    state = OrderedDict((k, v) for k, v in chosen.items() if isinstance(v, torch.Tensor))
    if getattr(chosen, '_metadata', None) is not None:
        state._metadata = chosen._metadata
    return state, 'EMA weights' if use_ema else 'weights'


def _is_state(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    tensors = sum(isinstance(v, torch.Tensor) for v in value.values())
    return tensors > 0 and tensors >= len(value) // 2


@dataclass
class LoadReport:
    """What happened to every tensor. ``mismatched``: (name, shape in the file, shape in the model)."""

    path: str
    kind: str
    matched: List[str] = field(default_factory=list)
    missing: List[str] = field(default_factory=list)
    unexpected: List[str] = field(default_factory=list)
    mismatched: List[Tuple[str, tuple, tuple]] = field(default_factory=list)
    grid: List[str] = field(default_factory=list)
    grid_differs: List[str] = field(default_factory=list)
    converted: List[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of the file's tensors, camera grids aside."""
        return len(self.matched) + len(self.unexpected) + len(self.mismatched)

    @property
    def share(self) -> float:
        """Share of the file's tensors that found their place."""
        return len(self.matched) / self.total if self.total else 0.0

    @property
    def complete(self) -> bool:
        """Whether every tensor of the model came from the file."""
        return not self.missing and not self.mismatched

    def by_module(self) -> Dict[str, Dict[str, int]]:
        """Counts per top module (``encoders.camera``, ``decoder``, ``heads.map``), in the model's order."""
        table: Dict[str, Dict[str, int]] = {}
        for column, names in (('matched', self.matched), ('missing', self.missing),
                              ('mismatched', [m[0] for m in self.mismatched]), ('unexpected', self.unexpected)):
            for name in names:
                row = table.setdefault(_top(name), dict(matched=0, missing=0, mismatched=0, unexpected=0))
                row[column] += 1
        return table

    def text(self) -> str:
        """The report as log lines."""
        lines = [f'{self.kind} of {self.path}: {len(self.matched)} tensors matched, {len(self.missing)} missing, '
                 f'{len(self.mismatched)} of another shape, {len(self.unexpected)} unexpected']
        width = max([len(name) for name in self.by_module()] + [6])
        lines.append(f'  {"module":<{width}} {"matched":>8} {"missing":>8} {"shape":>8} {"unexpected":>11}')
        for name, row in self.by_module().items():
            note = '  <- nothing loaded' if not row['matched'] and (row['missing'] or row['mismatched']) else ''
            lines.append(f'  {name:<{width}} {row["matched"]:>8} {row["missing"]:>8} {row["mismatched"]:>8} '
                         f'{row["unexpected"]:>11}{note}')
        for name, theirs, ours in self.mismatched[:10]:
            lines.append(f'  {name}: shape {list(theirs)} in the file, {list(ours)} in the model')
        if len(self.mismatched) > 10:
            lines.append(f'  ... and {len(self.mismatched) - 10} more of another shape')
        if self.grid:
            state = 'differs from' if self.grid_differs else 'equals'
            lines.append(f'  grid, not loaded: {", ".join(self.grid)} (the file\'s camera grid {state} the configuration\'s)')
        if self.converted:
            lines.append(f'  {len(self.converted)} sparse convolution weights converted from the spconv 1 layout')
        return '\n'.join(lines)


def _top(name: str) -> str:
    parts = name.split('.')
    return '.'.join(parts[:2]) if parts[0] in ('encoders', 'heads', 'decoder') and len(parts) > 2 else parts[0]


def load_weights(model: nn.Module, path: str, prefer: str = 'auto', min_matched: float = MIN_MATCHED, complete: bool = False,
                 allow_partial: bool = False, allow_unsafe: bool = False, logger: Optional[logging.Logger] = None,
                 content: Optional[Mapping[str, Any]] = None) -> LoadReport:
    """Load a checkpoint's weights into ``model`` and report what matched.

    Prefixes of wrappers (``module.``, ``model.``, ``_orig_mod.``) are removed where that makes names match. Sparse convolution
    weights in the spconv 1 layout are turned into spconv 2's. The camera grid stays the configuration's.

    Args:
        model: the model itself, not a wrapper.
        prefer: see :func:`pick_weights`.
        min_matched: least share of the file's tensors that must find a place.
        complete: also require that every tensor of the model comes from the file (evaluation).
        allow_partial: report instead of raising for both rules.
        content: what :func:`read_checkpoint` gave, to read the file only once.

    Raises:
        CheckpointError: with the table of modules, if too little matched; and as :func:`read_checkpoint`.
    """
    content = read_checkpoint(path, allow_unsafe) if content is None else content
    state, kind = pick_weights(content, path, prefer)
    report = load_state(model, state, path, kind)
    if not report.matched or (report.share < min_matched and not allow_partial):
        raise CheckpointError(
            f'{path} is of another model: {len(report.matched)} of its {report.total} tensors ({100 * report.share:.0f}%) '
            f'match, {100 * min_matched:.0f}% are needed (--allow-partial-checkpoint loads what matches)\n{report.text()}')
    if complete and not report.complete and not allow_partial:
        raise CheckpointError(f'{path} lacks tensors of this model, which would be evaluated with random values there '
                              f'(--allow-partial-checkpoint goes on)\n{report.text()}\n  first missing: '
                              f'{", ".join((report.missing + [m[0] for m in report.mismatched])[:5])}')
    broken = [k for k, v in state.items() if v.is_floating_point() and not bool(torch.isfinite(v).all())]
    if logger is not None:
        if broken:
            logger.error('%s: %d of its tensors hold NaN or infinite values (first: %s): it was saved by a run that had '
                         'diverged', path, len(broken), ', '.join(broken[:3]))
        logger.info('load checkpoint from local path: %s', path)
        logger.log(logging.INFO if report.complete else logging.WARNING, report.text())
    return report


def load_state(model: nn.Module, state: Mapping[str, torch.Tensor], path: str, kind: str = 'weights') -> LoadReport:
    """Put ``state`` into ``model`` as far as names and shapes agree; see :func:`load_weights`."""
    report = LoadReport(path, kind)
    own = model.state_dict()
    named = _strip_prefixes(state, own)
    for shadow in {f'ema_{name.replace(".", "_")}' for name in own} & set(named):
        del named[shadow]  # mmcv's EMA hook keeps its averages as buffers of the model
    sparse = _sparse_weights(model)
    chosen: 'OrderedDict[str, torch.Tensor]' = OrderedDict()
    for name, tensor in named.items():
        if GRID_PATTERN.search(name):
            report.grid.append(name)
            if name not in own or not _same(own[name], tensor):
                report.grid_differs.append(name)
            continue
        if name in own and own[name].shape != tensor.shape:
            if name in sparse and tensor.dim() == own[name].dim() and tensor.movedim(-1, 0).shape == own[name].shape:
                report.converted.append(name)
                tensor = tensor.movedim(-1, 0).contiguous()
            elif own[name].numel() == 1 == tensor.numel():
                tensor = tensor.reshape(own[name].shape)
            else:
                report.mismatched.append((name, tuple(tensor.shape), tuple(own[name].shape)))
                continue
        chosen[name] = tensor
    # Sparse modules decide by version whether to permute; ours are in their final layout here. Other modules keep the file's.
    metadata = OrderedDict(getattr(own, '_metadata', {}))
    owners = {name.rpartition('.')[0] for name in sparse}
    for prefix, value in (getattr(named, '_metadata', None) or {}).items():
        if prefix not in owners:
            metadata[prefix] = value
    chosen._metadata = metadata
    try:
        result = model.load_state_dict(chosen, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f'{path}: {error}') from None
    shape_misses = {m[0] for m in report.mismatched}
    report.missing = [k for k in result.missing_keys if not GRID_PATTERN.search(k) and k not in shape_misses
                      and not k.endswith('num_batches_tracked')]
    report.unexpected = list(result.unexpected_keys)
    missing = set(result.missing_keys)
    report.matched = [k for k in own if k not in missing and not GRID_PATTERN.search(k)]
    return report


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return mine.shape == theirs.shape and torch.allclose(mine.cpu().double(), theirs.cpu().double(), rtol=1e-5)


def _strip_prefixes(state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> 'OrderedDict[str, torch.Tensor]':
    best, hits = OrderedDict(state), sum(k in own for k in state)
    metadata = dict(getattr(state, '_metadata', None) or {})
    current = best
    for _ in range(4):
        prefix = next((p for p in PREFIXES if any(k.startswith(p) for k in current)), None)
        if prefix is None:
            break
        current = OrderedDict((k[len(prefix):] if k.startswith(prefix) else k, v) for k, v in current.items())
        metadata = {(k[len(prefix):] if k.startswith(prefix) else k): v for k, v in metadata.items() if k != prefix[:-1]}
        found = sum(k in own for k in current)
        if found > hits:
            best, hits = current, found
            best._metadata = dict(metadata)
    if best is not state and getattr(best, '_metadata', None) is None:
        best._metadata = dict(getattr(state, '_metadata', None) or {})
    return best


def _sparse_weights(model: nn.Module) -> set:
    """Names of the weights of spconv 2 convolutions."""
    try:
        from spconv.pytorch import SparseModule
    except ImportError:
        return set()
    return {f'{name}.weight' if name else 'weight' for name, module in model.named_modules()
            if isinstance(module, SparseModule) and isinstance(getattr(module, 'weight', None), torch.Tensor)}


def check_same_grid(model: nn.Module, state: Mapping[str, torch.Tensor], path: str) -> None:
    """Refuse to go on with a run at another camera grid than it was started with.

    Raises:
        CheckpointError: naming the tensors that differ.
    """
    own = model.state_dict()
    differs = [k for k, v in _strip_prefixes(state, own).items() if GRID_PATTERN.search(k) and k in own
               and not _same(own[k], v)]
    if differs:
        raise CheckpointError(f'{path} was trained on another camera grid ({", ".join(differs)} differ), so the run cannot be '
                              'resumed at this resolution; start a new stage from its weights with --load_from')
