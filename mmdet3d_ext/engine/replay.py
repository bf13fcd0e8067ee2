"""Batches that were not finite, kept with all that the step needs, and computed again."""
from __future__ import annotations

import enum
import os
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn

from ..config import Config
from ..datasets.epoch_state import set_random_state
from .checkpoint import CheckpointError, plain, read_checkpoint, write_atomic
from .diagnosis import Finding, trace
from .parallel import StepModel, unpack_batch

KIND = 'mmdet3d_ext batch'
MARK = '__kind__'
DTYPES = {'float16': torch.float16, 'bfloat16': torch.bfloat16, 'float32': None}


def write_batch(path: str, model: Any, batch: Mapping[str, Any], random: Optional[Mapping[str, Any]], meta: Mapping[str, Any],
                finding: Finding, place: str, tokens: Sequence[str]) -> None:
    """Write a batch, the weights and random numbers before its step, and the configuration, as plain types and tensors.

    Args:
        model: a :class:`.parallel.StepModel` whose weights are those before the step.
        random: :func:`mmdet3d_ext.datasets.epoch_state.random_state` before the step.
        meta: of the run (``config`` is the configuration's text).

    Raises:
        CheckpointWriteError, OSError: if it cannot be written.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    values = unpack_batch(batch, torch.device('cpu'))
    content = {'kind': KIND, 'place': place, 'tokens': list(tokens), 'losses': finding.losses, 'finding': finding.text(),
               'config': meta.get('config'), 'dtype': _dtype_name(model), 'random': random,
               'state_dict': model.module.state_dict()}
    write_atomic({**plain(content), 'batch': {key: encode(value) for key, value in values.items()}}, path)


def _dtype_name(model: Any) -> str:
    dtype = getattr(model, 'amp_dtype', None)
    return 'float32' if dtype is None else str(dtype).replace('torch.', '')


def read_batch(path: str) -> Dict[str, Any]:
    """The content of :func:`write_batch`'s file, the batch decoded.

    Raises:
        CheckpointError: if it is another file.
    """
    content = read_checkpoint(path)
    if content.get('kind') != KIND:
        raise CheckpointError(f'{path} is no batch that training kept (those are in <run folder>/bad_batches)')
    return {**content, 'batch': {key: decode(value) for key, value in content['batch'].items()}}


# ------------------------------------------------------------------------------------- a batch as plain types and tensors

def encode(value: Any) -> Any:
    """A batch's value without classes: boxes, points, arrays and names become mappings that say what they were."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray) and value.dtype.kind in 'biuf' and value.dtype.itemsize <= 8:
        return {MARK: 'array', 'dtype': value.dtype.str, 'shape': list(value.shape),
                'data': torch.frombuffer(bytearray(np.ascontiguousarray(value).tobytes()) or bytearray(1), dtype=torch.uint8)}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Mapping):
        return {MARK: 'mapping', 'items': [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {MARK: type(value).__name__ if type(value) in (list, tuple) else 'list', 'items': [encode(v) for v in value]}
    name = type(value).__name__
    if isinstance(value, enum.Enum) and name in _structures():
        return {MARK: 'enum', 'name': name, 'value': plain(value.value)}
    if name in _structures():
        extra = {key: getattr(value, key) for key in ('box_dim', 'with_yaw', 'points_dim', 'attribute_dims') if hasattr(value, key)}
        return {MARK: 'structure', 'name': name, 'tensor': value.tensor.detach().cpu(), 'extra': plain(extra)}
    if isinstance(value, type) and value.__name__ in _structures():
        return {MARK: 'class', 'name': value.__name__}
    return {MARK: 'text', 'text': repr(value)}


def decode(value: Any) -> Any:
    """The inverse of :func:`encode`; what had no plain form comes back as its text."""
    if not isinstance(value, Mapping):
        return value
    kind = value.get(MARK)
    if kind == 'array':
        count = int(np.prod(value['shape'], dtype=np.int64))
        raw = value['data'].numpy().tobytes()
        return np.frombuffer(raw, np.dtype(value['dtype']), count=count).reshape(value['shape']).copy()
    if kind == 'mapping':
        return {decode(k): decode(v) for k, v in value['items']}
    if kind in ('list', 'tuple'):
        items = [decode(item) for item in value['items']]
        return tuple(items) if kind == 'tuple' else items
    if kind in ('structure', 'class', 'enum'):
        known = _structures()
        if value['name'] not in known:
            raise CheckpointError(f'the batch holds a {value["name"]!r}, which is not known here')
        cls = known[value['name']]
        if kind == 'class':
            return cls
        if kind == 'enum':
            return cls(value['value'])
        return cls(value['tensor'], **value['extra'])
    if kind == 'text':
        return value['text']
    raise CheckpointError(f'the batch holds a value of the unknown kind {kind!r}')


def _structures() -> Dict[str, type]:
    from mmdet3d.core.bbox import Box3DMode, CameraInstance3DBoxes, DepthInstance3DBoxes, LiDARInstance3DBoxes
    from mmdet3d.core.points import BasePoints, CameraPoints, DepthPoints, LiDARPoints
    return {cls.__name__: cls for cls in (Box3DMode, CameraInstance3DBoxes, DepthInstance3DBoxes, LiDARInstance3DBoxes, BasePoints,
                                          CameraPoints, DepthPoints, LiDARPoints)}


# ------------------------------------------------------------------------------------------------------------- replaying

def replay(path: str, device: torch.device, precision: Optional[str] = None,
           model: Optional[nn.Module] = None) -> Tuple[Dict[str, Any], Finding]:
    """Compute a kept batch again, with the weights and random numbers of then.

    Args:
        precision: ``'float32'``, ``'float16'`` or ``'bfloat16'``; by default that of the run.
        model: by default built from the kept configuration.

    Returns:
        the file's content and what was found.

    Raises:
        CheckpointError: if the file is another one or its weights do not fit. ValueError: for an unknown precision.
    """
    content = read_batch(path)
    precision = precision or content['dtype']
    if precision not in DTYPES:
        raise ValueError(f'precision must be one of {sorted(DTYPES)}, got {precision!r}')
    if model is None:
        import yaml

        from .train import make_model
        model = make_model(Config(yaml.safe_load(content['config'])))
    missing = model.load_state_dict(content['state_dict'], strict=False)
    if missing.missing_keys or missing.unexpected_keys:
        raise CheckpointError(f'{path}: its weights do not fit the model: {(missing.missing_keys + missing.unexpected_keys)[:4]}')
    model.to(device).train()
    step = StepModel(model, device, DTYPES[precision])
    if content.get('random'):
        set_random_state(content['random'])
    return content, trace(model, lambda: step.losses_alone(content['batch']), content['batch'], content['tokens'])


def report(content: Mapping[str, Any], finding: Finding, precision: str) -> str:
    """Text for people: the losses of then and now, and where the first non-finite value is."""
    names = list(dict.fromkeys([*content['losses'], *finding.losses]))
    width = max([len(name) for name in names] + [4])
    lines: List[str] = [f'{content["place"]}, samples {", ".join(content["tokens"])}',
                        f'then: {content["finding"]}', f'now, in {precision}: {finding.text()}', '',
                        f'{"loss":<{width}}  {"then":>12}  {"now":>12}']
    for name in names:
        then, now = content['losses'].get(name), finding.losses.get(name)
        lines.append(f'{name:<{width}}  {_number(then):>12}  {_number(now):>12}')
    return '\n'.join(lines)


def _number(value: Optional[float]) -> str:
    return '-' if value is None else f'{value:.6g}'
