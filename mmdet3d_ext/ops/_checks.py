"""Argument checks shared by the operators: messages name the operator, the argument, the rule and the value."""

from __future__ import annotations

import math
from typing import List, Sequence, Tuple

import torch

from mmdet3d_ext.geometry.grid import Axis


def check(condition: bool, op: str, argument: str, rule: str, value: object) -> None:
    """Raise ``ValueError`` unless ``condition``."""
    if not condition:
        raise ValueError(f'{op}: {argument} must be {rule}, got {value}')


def check_tensor(tensor: object, op: str, argument: str, shape: str, dims: int) -> None:
    """Raise unless ``tensor`` is a tensor with ``dims`` dimensions; ``shape`` describes it."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f'{op}: {argument} must be a tensor {shape}, got {type(tensor).__name__}')
    if tensor.dim() != dims:  # messages are made only if needed: small inputs would wait for them
        check(False, op, argument, f'a tensor {shape}', f'shape {tuple(tensor.shape)}')


def check_same_device(op: str, **tensors: torch.Tensor) -> None:
    """Raise unless all tensors are on the device of the first."""
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        check(tensor.device == reference.device, op, name, f'on the device of {first} ({reference.device})', tensor.device)


GridArguments = Tuple[List[float], List[float], List[int]]


def grid_from_range(op: str, voxel_size: Sequence[float], point_cloud_range: Sequence[float]) -> GridArguments:
    """``(lower, step, cells)`` along x, y, z from a voxel size and ``[x_lo, y_lo, z_lo, x_hi, y_hi, z_hi]`` (metres)."""
    sizes, limits = [float(v) for v in voxel_size], [float(v) for v in point_cloud_range]
    check(
        len(sizes) == 3 and all(math.isfinite(v) and v > 0 for v in sizes),
        op,
        'voxel_size',
        'three positive lengths (x, y, z)',
        sizes,
    )
    check(len(limits) == 6, op, 'point_cloud_range', 'six bounds (x, y, z lower, then upper)', limits)
    axes = [Axis.parse((limits[k], limits[3 + k], sizes[k]), f'{op}: axis {"xyz"[k]}') for k in range(3)]
    return [axis.lo for axis in axes], sizes, [axis.cells for axis in axes]


def grid_from_bounds(op: str, bounds: Sequence) -> GridArguments:
    """``(lower, step, cells)`` along x, y, z from three axis specifications (:meth:`Axis.parse`)."""
    check(len(bounds) == 3, op, 'bounds', 'three axes (x, y, z), each [lo, hi, step]', bounds)
    axes = [Axis.parse(spec, f'{op}: axis {"xyz"[k]}') for k, spec in enumerate(bounds)]
    return [axis.lo for axis in axes], [axis.step for axis in axes], [axis.cells for axis in axes]
