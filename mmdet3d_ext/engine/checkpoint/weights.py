"""Picking the weights of a file and loading them into a model, with a report of every tensor."""
from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from typing import Any, Collection, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from . import reference
from .reading import CheckpointError, read_checkpoint
from .report import LoadReport, combined, grid_text

# Camera grids are stored as weights (published checkpoints have them), but they belong to the configuration: loading them would
# silently undo a change of resolution.
GRID_PATTERN = re.compile(r'(^|\.)vtransform\.(dx|bx|nx|frustum)$')
PREFIXES = ('module.', '_orig_mod.', 'model.', 'net.')
RAW_KEYS = ('state_dict', 'model_state', 'model_state_dict', 'model')
EMA_KEYS = ('ema_state_dict', 'state_dict_ema', 'model_ema', 'ema')
EMA_PREFIXES = ('model_ema.', 'ema_model.', 'ema.')  # averages beside the weights in one state dict (Lightning, timm)
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
    raw, inner = _split_averages(raw)
    ema = inner if ema is None else ema
    if raw is None and ema is None:
        kind = ' (a Lightning file without weights)' if 'pytorch-lightning_version' in content else ''
        raise CheckpointError(f'{path} holds no weights{kind}; its keys are {sorted(map(str, content))[:12]}')
    if prefer == 'auto':
        prefer = 'ema' if reference.meta_of(content).get('evaluated_weights') == 'ema' else 'raw'
    use_ema = raw is None or (prefer == 'ema' and ema is not None)
    chosen = ema if use_ema else raw
    state = OrderedDict((k, v) for k, v in chosen.items() if isinstance(k, str) and isinstance(v, torch.Tensor))
    if getattr(chosen, '_metadata', None) is not None:
        state._metadata = chosen._metadata
    return state, 'EMA weights' if use_ema else 'weights'


def _split_averages(state: Optional[Mapping[str, Any]]) -> Tuple[Optional[Mapping[str, Any]], Optional[Mapping[str, Any]]]:
    """Weights and averages of a state dict that may hold both; None for what it does not hold."""
    averages = [name for name in state or () if isinstance(name, str) and name.startswith(EMA_PREFIXES)]
    if not averages:
        return state, None
    if len(averages) < len(state) // 3:  # a module of the model that happens to have such a name
        return state, None
    ema = OrderedDict((k.partition('.')[2], state[k]) for k in averages)
    taken = set(averages)
    rest = OrderedDict((k, v) for k, v in state.items() if k not in taken)
    return (rest if _is_state(rest) else None), ema


def _is_state(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    tensors = sum(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items())
    return tensors > 0 and tensors >= len(value) // 2


def load_weights(model: nn.Module, path: str, prefer: str = 'auto', min_matched: float = MIN_MATCHED, complete: bool = False,
                 allow_partial: bool = False, allow_unsafe: bool = False, logger: Optional[logging.Logger] = None,
                 content: Optional[Mapping[str, Any]] = None, origin: str = reference.AUTO,
                 given: Collection[str] = (), one_of_several: bool = False) -> LoadReport:
    """Load a checkpoint's weights into ``model`` and report what matched.

    Prefixes of wrappers (``module.``, ``model.``, ``_orig_mod.``) are removed where that makes names match. Weights of the
    BEVFusion reference are converted: box rows to our convention (:mod:`.reference`), sparse kernels to this model's layout. The
    box coder decodes the height that the file's heads predict, unless the configuration decides. The camera grid stays the
    configuration's.

    Args:
        model: the model itself, not a wrapper.
        prefer: see :func:`pick_weights`.
        min_matched: least share of the file's tensors that must find a place.
        complete: also require that every tensor of the model comes from the file (evaluation).
        allow_partial: report instead of raising for both rules.
        content: what :func:`read_checkpoint` gave, to read the file only once.
        origin: ``'ours'`` or ``'reference'``, whose box convention the file has; ``'auto'`` finds out
            (:func:`.reference.find_origin`).
        given: names of the model's tensors that stay as they are, because an earlier file gave them (:func:`load_files`).
        one_of_several: what this file lacks deserves no warning, others may have it.

    Raises:
        CheckpointError: with the table of modules, if too little matched; and as :func:`read_checkpoint`.
    """
    content = read_checkpoint(path, allow_unsafe) if content is None else content
    state, kind = pick_weights(content, path, prefer)
    own = model.state_dict()
    state = strip_prefixes(state, own)
    rows = [name for name in reference.box_rows(state) if name in own and name not in given]
    found = reference.find_origin(content, state, path, origin) if rows else None
    if found is not None and found.name == reference.REFERENCE:
        state = reference.to_ours(state, path)
    report = load_state(model, state, path, kind, given)
    warnings = _settle_boxes(model, content, found, rows, report)
    if not report.share or (report.share < min_matched and not allow_partial):
        raise CheckpointError(
            f'{path} is of another model: {len(report.matched)} of its {report.total} tensors ({100 * report.share:.0f}%) '
            f'match, {100 * min_matched:.0f}% are needed (--allow-partial-checkpoint loads what matches)\n{report.text()}'
            + ('' if report.share else f'\n  {reference.other_family(state)}'.rstrip()))
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
        logger.log(logging.INFO if report.complete or one_of_several else logging.WARNING, report.text(one_of_several))
        for text in warnings:
            logger.warning('%s: %s', path, text)
    return report


def _settle_boxes(model: nn.Module, content: Mapping[str, Any], found: Optional[reference.Origin], rows: Sequence[str],
                  report: LoadReport) -> List[str]:
    """Note in the report what was done about the box convention and the height; returns what deserves a warning."""
    if found is None:
        return []
    warnings: List[str] = []
    if found.name == reference.REFERENCE:
        report.swapped = list(rows)
        report.notes.append(f'{len(rows)} tensors of box rows converted from the reference\'s convention to ours ({found.why})')
    if not found.certain:
        warnings.append(f'it does not say whose box convention it follows (this project\'s files do) and was taken for a file of the '
                        f'BEVFusion reference; {reference.OPTION} ours takes its boxes as they are, {reference.OPTION} reference '
                        'confirms')
    text, is_warning = reference.follow_height(model, reference.height_of(content, found))
    if text:
        (warnings if is_warning else report.notes).append(text)
    return warnings


def load_files(model: nn.Module, paths: Sequence[str], logger: Optional[logging.Logger] = None, allow_unsafe: bool = False,
               **options: Any) -> List[LoadReport]:
    """Load the weights of several files, for example a detector's and a map model's into a multitask model.

    The first file that has a tensor gives it; later ones fill what is still missing. After a report per file comes one of the
    whole, as a warning if tensors of the model are still without a value from any file. ``options`` are :func:`load_weights`'s.

    Returns:
        one report per file.
    """
    reports: List[LoadReport] = []
    given: List[str] = []
    for path in paths:
        reports.append(load_weights(model, path, logger=logger, allow_unsafe=allow_unsafe, given=frozenset(given),
                                    one_of_several=len(paths) > 1, **options))
        given += reports[-1].matched
        if not reports[-1].matched and logger is not None:
            logger.warning('%s gave nothing: earlier files have all of its tensors that this model knows', path)
    if len(reports) > 1 and logger is not None:
        whole = combined(reports)
        logger.log(logging.INFO if whole.complete else logging.WARNING, whole.text())
    return reports


def path_list(value: Union[None, str, Sequence[str]]) -> List[str]:
    """The files that ``load_from`` names: a path, several with commas between them (also in brackets), or a list."""
    if not value:
        return []
    if isinstance(value, (str, os.PathLike)):
        value = os.fspath(value)
        if os.path.exists(value):
            return [value]
        parts = (part.strip().strip('\'"') for part in re.sub(r'^\[(.*)\]$', r'\1', value.strip()).split(','))
        return [part for part in parts if part]
    return [os.fspath(part) for part in value]


def load_state(model: nn.Module, state: Mapping[str, torch.Tensor], path: str, kind: str = 'weights',
               given: Collection[str] = ()) -> LoadReport:
    """Put ``state`` into ``model`` as far as names and shapes agree, without a look at conventions; see :func:`load_weights`."""
    report = LoadReport(path, kind)
    own = model.state_dict()
    named = strip_prefixes(state, own)
    for shadow in {f'ema_{name.replace(".", "_")}' for name in own} & set(named):
        del named[shadow]  # mmcv's EMA hook keeps its averages as buffers of the model
    sparse = _sparse_weights(model)
    relaid = reference.fit_kernels(named, {name: own[name].shape for name in own if name in sparse})
    chosen: 'OrderedDict[str, torch.Tensor]' = OrderedDict()
    for name, tensor in named.items():
        if GRID_PATTERN.search(name):
            report.grid.append(name)
            if name not in own or not _same(own[name], tensor):
                report.grid_differs.append(name)
            continue
        if name in given and name in own:
            report.kept.append(name)
            continue
        if name in relaid:
            report.relaid.append(name)
            tensor = relaid[name]
        if name in own and own[name].shape != tensor.shape:
            if own[name].numel() == 1 == tensor.numel():
                tensor = tensor.reshape(own[name].shape)
            else:
                report.mismatched.append((name, tuple(tensor.shape), tuple(own[name].shape)))
                continue
        chosen[name] = tensor
    report.grid_texts = (grid_text(named), grid_text(own))
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
    settled = {m[0] for m in report.mismatched} | set(given)
    report.missing = [k for k in result.missing_keys if not GRID_PATTERN.search(k) and k not in settled
                      and not k.endswith('num_batches_tracked')]
    report.unexpected = list(result.unexpected_keys)
    missing = set(result.missing_keys)
    report.matched = [k for k in own if k not in missing and not GRID_PATTERN.search(k)]
    return report


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return mine.shape == theirs.shape and torch.allclose(mine.cpu().double(), theirs.cpu().double(), rtol=1e-5)


def strip_prefixes(state: Mapping[str, torch.Tensor], own: Collection[str]) -> 'OrderedDict[str, torch.Tensor]':
    """``state`` without the prefixes of wrappers, as far as that makes more of its names those in ``own``; ``_metadata`` too."""
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


def strip_wrappers(state: Mapping[str, torch.Tensor]) -> 'OrderedDict[str, torch.Tensor]':
    """:func:`strip_prefixes` without a model: for the names of BEVFusion's parts. mmcv's averages are left out."""
    inner = (re.search(r'(?:^|\.)((?:encoders|decoder|fuser|heads)\..*)', name) for name in state)
    named = strip_prefixes(state, {match.group(1) for match in inner if match})
    for shadow in {f'ema_{name.replace(".", "_")}' for name in named} & set(named):
        del named[shadow]
    return named


def _sparse_weights(model: nn.Module) -> set:
    """Names of the weights of spconv 2 convolutions."""
    try:
        from spconv.pytorch import SparseModule
    except ImportError:
        return set()
    return {f'{name}.weight' if name else 'weight' for name, module in model.named_modules()
            if isinstance(module, SparseModule) and isinstance(getattr(module, 'weight', None), torch.Tensor)}


def check_same_run(model: nn.Module, content: Mapping[str, Any], state: Mapping[str, torch.Tensor], path: str) -> None:
    """Refuse to go on with a run at another camera grid than it was started with, or with the reference's box convention (the
    optimizer's state could not be converted with the weights).

    Raises:
        CheckpointError: naming both grids and the tensors that differ, or what tells that it is the reference's.
    """
    own = model.state_dict()
    named = strip_prefixes(state, own)
    if reference.box_rows(named):
        found = reference.find_origin(content, named, path)
        if found.name == reference.REFERENCE:
            raise CheckpointError(f'{path} is not a checkpoint of a run of this project ({found.why}) but of the BEVFusion reference: '
                                  'that cannot be resumed here, its optimizer knows boxes in another convention; start from its '
                                  'weights with --load_from')
    differs = [k for k, v in named.items() if GRID_PATTERN.search(k) and k in own and not _same(own[k], v)]
    if differs:
        theirs, ours = grid_text(named), grid_text(own)
        both = f'the file has {theirs}, the configuration {ours}; ' if theirs and ours and theirs != ours else ''
        raise CheckpointError(f'{path} was trained on another camera grid: {both}{", ".join(differs)} differ. A run cannot be resumed '
                              'on another grid; start a new stage from its weights with --load_from')
