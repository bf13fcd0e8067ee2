"""Files of the BEVFusion reference: whose a file is, and the way between its weights and ours.

Names are the same, and so is the layout of sparse kernels in a file (spconv 1's); files with spconv 2's layout are accepted.
What differs is the convention of boxes, which predates mmdet3d's coordinate refactoring: the last layers of ``dim`` and ``rot``
have their rows swapped and negated (:func:`mmdet3d_ext.models.heads.bbox.swap_head_convention`), which is exact in both
directions. The reference's heads also predict the height of a box's *top*, its annotations being half a height too high;
that is not linear in the weights, so the box coder follows the file (``height_target``).

What tells whose a file is, strongest first: the user (``--checkpoint-origin``); ``meta.box_convention``, which every file of this
project has; the version that our heads leave beside a state dict's tensors; the camera's pixel positions, if they are ours; and
mmcv's meta data without our mark. A file without any of these is taken for the reference's, with a warning.
"""
from __future__ import annotations

import os
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import torch
from torch import nn

from ...datasets.nuscenes_schema import BOX_CONVENTION, OLD_BOX_CONVENTION
from ...models.heads.bbox import BOX_ROWS, STATE_VERSION, swap_head_convention
from .reading import CheckpointError

OURS, REFERENCE, AUTO = 'ours', 'reference', 'auto'
ORIGINS = (AUTO, OURS, REFERENCE)
OPTION = '--checkpoint-origin'
_HEAD = re.compile(r'^(.*?)\.?(?:prediction_heads|task_heads)\.')
_KERNEL = re.compile(r'(?:^|\.)encoders\.lidar\.backbone\..*\.weight$')
_PART = re.compile(r'(?:(?:module|model|net|_orig_mod)\.)*(?:encoders\.(?:camera|lidar|radar)|decoder\.(?:backbone|neck)|'
                   r'heads\.(?:object|map)|fuser)\.')
_LARGEST_KERNEL = 7  # no sparse convolution of these models is larger, and no channel count but the input's is smaller


@dataclass(frozen=True)
class Origin:
    """Whose convention a file's box rows are in, why, and whether anything in the file says so."""

    name: str
    why: str
    certain: bool = True


def meta_of(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The file's ``meta``, empty if there is none."""
    meta = content.get('meta')
    return meta if isinstance(meta, Mapping) else {}


def box_rows(state: Mapping[str, torch.Tensor]) -> List[str]:
    """Names of the tensors whose rows depend on the box convention."""
    return [name for name in state if BOX_ROWS.search(name)]


def find_origin(content: Mapping[str, Any], state: Mapping[str, torch.Tensor], path: str, stated: str = AUTO,
                option: str = OPTION, without: str = REFERENCE) -> Origin:
    """Whose convention the box rows of a file are in.

    Args:
        content: the file's content; ``state``: its weights, with their ``_metadata`` if the file has it.
        stated: ``'ours'`` or ``'reference'`` where the user says so, else ``'auto'``.
        option: what the user writes to say so, for messages.
        without: what a file without any sign is taken for.

    Raises:
        CheckpointError: if the file's signs contradict each other or the user.
    """
    if stated not in ORIGINS:
        raise CheckpointError(f'{option}: expected one of {", ".join(ORIGINS)}, got {stated!r}')
    mark = meta_of(content).get('box_convention')
    if mark is not None:
        marked = _marked(str(mark), path)
        if stated not in (AUTO, marked):
            raise CheckpointError(f'{path}: its meta.box_convention is {str(mark).partition(":")[0]!r}, so its boxes are in the '
                                  f'convention of {marked!r}; leave out {option} {stated}')
        return Origin(marked, f'meta.box_convention is {str(mark).partition(":")[0]}')
    if stated != AUTO:
        return Origin(stated, f'{option} {stated}')
    versions = _head_versions(state)
    if any(version >= STATE_VERSION for version in versions):
        return Origin(OURS, f'its detection head was saved as version {max(versions)}')
    ours = 'its camera pixel positions are at cell centres, as in this project' if _centred_frustum(state) else ''
    signs = ['its detection head was saved without our version'] if versions else []
    if 'mmcv_version' in meta_of(content):
        signs.append(f'it was written by mmcv {meta_of(content)["mmcv_version"]} without this project\'s mark')
    if ours and signs:
        raise CheckpointError(f'{path}: it cannot be told whether its boxes follow the reference\'s convention or ours: {ours}, '
                              f'but {signs[0]}. Add {option} reference (trained by the BEVFusion reference\'s code) or '
                              f'{option} ours')
    if ours:
        return Origin(OURS, ours)
    if signs:
        return Origin(REFERENCE, signs[0])
    return Origin(without, 'it does not say whose boxes it predicts', certain=False)


def _marked(mark: str, path: str) -> str:
    for start, name in ((BOX_CONVENTION, OURS), (OLD_BOX_CONVENTION, REFERENCE)):
        if mark.partition(':')[0].strip() == start:
            return name
    raise CheckpointError(f'{path}: meta.box_convention is {mark[:60]!r}, known are {BOX_CONVENTION} and {OLD_BOX_CONVENTION}')


def _head_versions(state: Mapping[str, torch.Tensor]) -> List[int]:
    """Versions of the detection heads' state dicts, as torch noted them when the weights were taken; none in a rebuilt dict."""
    metadata = getattr(state, '_metadata', None) or {}
    heads = {_HEAD.match(name).group(1) for name in box_rows(state)}
    return [int(metadata[head].get('version') or 1) for head in sorted(heads) if isinstance(metadata.get(head), Mapping)]


def _centred_frustum(state: Mapping[str, torch.Tensor]) -> bool:
    """Whether the first pixel position is half a feature from the border: ours; the reference's (and our profile's) is at 0."""
    for name, tensor in state.items():
        if name.endswith('vtransform.frustum') and tensor.dim() == 4 and tensor.shape[2] > 1:
            first, second = (float(tensor[0, 0, i, 0]) for i in (0, 1))
            return first > 0 and abs(2 * first - (second - first)) < 1e-3 * (second - first)
    return False


# --------------------------------------------------------------------------------------------------------------------
# boxes

def to_ours(state: Mapping[str, torch.Tensor], path: str) -> 'OrderedDict[str, torch.Tensor]':
    """The reference's weights with box rows in our convention; ``path``: where they come from, for messages."""
    return _swapped(state, path, STATE_VERSION)


def to_reference(state: Mapping[str, torch.Tensor], path: str) -> 'OrderedDict[str, torch.Tensor]':
    """Our weights with box rows in the reference's convention; :func:`to_ours` gives the same bits back."""
    return _swapped(state, path, 1)


def _swapped(state: Mapping[str, torch.Tensor], path: str, version: int) -> 'OrderedDict[str, torch.Tensor]':
    try:
        result = OrderedDict(swap_head_convention(state))
    except ValueError as error:  # a tensor with other rows than sizes or sine and cosine
        raise CheckpointError(f'{path}: {error}') from None
    metadata = getattr(state, '_metadata', None)
    if metadata is not None:
        heads = {_HEAD.match(name).group(1) for name in box_rows(state)}
        result._metadata = OrderedDict((name, dict(value, version=version) if name in heads else value)
                                       for name, value in metadata.items())
    return result


def coders(model: nn.Module) -> List[Any]:
    """The box coders of the model's detection heads."""
    found = (getattr(module, 'bbox_coder', None) for module in model.modules())
    return [coder for coder in found if hasattr(coder, 'follow_weights')]


def model_meta(model: nn.Module) -> Dict[str, str]:
    """What a checkpoint of this model says about its boxes beside the convention: the height that its heads predict."""
    heights = {coder.trained_height for coder in coders(model)}
    return {'height_target': heights.pop()} if len(heights) == 1 else {}


def height_of(content: Mapping[str, Any], origin: Origin) -> str:
    """The height that a file's detection head predicts, ``'centre'`` or ``'top'``."""
    meta = meta_of(content)
    if meta.get('height_target') in ('centre', 'top'):
        return meta['height_target']
    return 'top' if origin.name == REFERENCE or meta.get('compat') == 'reference' else 'centre'


def follow_height(model: nn.Module, height: str) -> Tuple[str, bool]:
    """Let the model's box coders decode the height that the loaded weights predict.

    Returns:
        a sentence for the log ('' if there is nothing to say), and whether it is a warning.
    """
    found = coders(model)
    if not all([coder.follow_weights(height) for coder in found]):
        return (f'its heads predict the height of a box\'s {height}, the configuration decodes {found[0].trained_height} '
                f'(model.heads.object.bbox_coder.height_target, compat): boxes are half a height off', True)
    if height == 'top' and found and found[0].compat == 'reference':
        return 'box heights are decoded as the reference does, half a height too high (compat: reference)', False
    if height == 'top' and found:
        return 'its heads predict the height of a box\'s top and are decoded so (height_target: top)', False
    return '', False


# --------------------------------------------------------------------------------------------------------------------
# sparse kernels

def fit_kernels(state: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> Dict[str, torch.Tensor]:
    """The kernels of ``state`` that have to be re-laid to have ``shapes``: spconv 1's (kx, ky, kz, in, out) and spconv 2's
    (out, kx, ky, kz, in). The whole file is in one layout, so a kernel that fits both follows the others."""
    ways = (lambda t: t, lambda t: t.movedim(0, -1), lambda t: t.movedim(-1, 0))
    names = [name for name in shapes if name in state and state[name].dim() == len(shapes[name])]
    fits = [[name for name in names if tuple(way(state[name]).shape) == tuple(shapes[name])] for way in ways]
    best = max(range(len(ways)), key=lambda i: (len(fits[i]), -i))
    return {name: ways[best](state[name]).contiguous() for name in fits[best]} if best else {}


def file_layout(state: Mapping[str, torch.Tensor]) -> Tuple['OrderedDict[str, torch.Tensor]', int]:
    """``state`` with its LiDAR kernels in the layout of files (spconv 1's), and how many were re-laid.

    Told by shape: three kernel sizes stand first in spconv 1's layout, after the output channels in spconv 2's.
    """
    kernels = [name for name, tensor in state.items() if _KERNEL.search(name) and tensor.dim() == 5]
    first = sum(max(state[name].shape[:3]) <= _LARGEST_KERNEL for name in kernels)
    second = sum(max(state[name].shape[1:4]) <= _LARGEST_KERNEL for name in kernels)
    result = OrderedDict(state)
    if getattr(state, '_metadata', None) is not None:
        result._metadata = state._metadata
    if second <= first:
        return result, 0
    for name in kernels:
        result[name] = state[name].movedim(0, -1).contiguous()
    return result, len(kernels)


# --------------------------------------------------------------------------------------------------------------------
# whole files

def other_family(state: Mapping[str, torch.Tensor]) -> str:
    """What tells that weights are neither the reference's nor ours; '' if their names are those of BEVFusion's parts."""
    if any(_PART.match(name) for name in state):
        return ''
    tops = sorted({name.partition('.')[0] for name in state})
    known = ' (as in mmdet3d 1.x\'s BEVFusion project, whose files are not converted)' if 'pts_middle_encoder' in tops else ''
    return f'its tensors begin with {", ".join(tops[:6])}{known}, expected encoders, fuser, decoder, heads'


def convert(content: Mapping[str, Any], state: Mapping[str, torch.Tensor], path: str, to: str, stated: str = AUTO,
            option: str = '--from') -> Tuple[Dict[str, Any], List[str]]:
    """The content of a checkpoint file in the other convention.

    Args:
        content, path: what was read, and where.
        state: its weights, without wrappers' prefixes.
        to: ``'ours'`` or ``'reference'``.
        stated: whose the file is, ``'auto'`` to find out; without any sign it is taken for the other one than ``to``.

    Returns:
        ``meta`` and ``state_dict``, and lines that say what was done.

    Raises:
        CheckpointError: if the file is in that convention already, or of another family of models.
    """
    family = other_family(state)
    if family:
        raise CheckpointError(f'{path} is no checkpoint of the BEVFusion reference or of this project: {family}')
    origin = find_origin(content, state, path, stated, option, without=OURS if to == REFERENCE else REFERENCE)
    rows = box_rows(state)
    if origin.name == to and rows:
        raise CheckpointError(f'{path} is in the convention of {to!r} already ({origin.why}), so converting it would turn its boxes '
                              f'wrong; add {option} {OURS if to == REFERENCE else REFERENCE} if you know better')
    converted, relaid = file_layout((to_ours if to == OURS else to_reference)(state, path))
    meta = dict(meta_of(content))
    meta.update(box_convention=BOX_CONVENTION if to == OURS else OLD_BOX_CONVENTION,
                converted_from={'file': os.path.basename(path), 'origin': origin.name})
    lines = [f'{len(state)} tensors of {path}',
             f'{len(rows)} tensors of box rows converted to the convention of {to!r} ({origin.why})' if rows else
             'no detection head: nothing depends on the box convention']
    if not origin.certain and rows:
        lines.append(f'the file does not say whose it is; taken for {origin.name!r} because it is to be converted to {to!r}')
    if rows:
        meta['height_target'] = height_of(content, origin)
    if relaid:
        lines.append(f'{relaid} sparse convolution kernels re-laid from spconv 2\'s layout to that of files')
    return {'meta': meta, 'state_dict': converted}, lines
