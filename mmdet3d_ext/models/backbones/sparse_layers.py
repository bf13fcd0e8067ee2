"""Sparse 3-D convolutions on spconv 2, imported only when a sparse encoder is built.

Kernels live in memory in spconv 2's layout (out, kx, ky, kz, in). In a state dict they have the layout of published
BEVFusion checkpoints, (kx, ky, kz, in, out), so that names and shapes agree with those files in both directions. Loading
takes either layout and tells them apart by shape.
"""
from __future__ import annotations

import functools
import types
from typing import Any, Dict, Sequence, Tuple, Union

import torch
from mmcv.cnn import build_norm_layer
from torch import nn

TO_MEMORY = (4, 0, 1, 2, 3)  # (kx, ky, kz, in, out) -> (out, kx, ky, kz, in)
TO_STATE = (1, 2, 3, 4, 0)  # (out, kx, ky, kz, in) -> (kx, ky, kz, in, out)


def kernel_to_memory(kernel: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A stored kernel in spconv 2's layout.

    Args:
        kernel: 5-D tensor in the checkpoint layout or already in the memory layout.
        shape: the kernel's shape in memory, (out, kx, ky, kz, in). If both layouts fit (kernel sizes equal to channel
            counts), the checkpoint layout is assumed.
    """
    if kernel.dim() == 5 and tuple(kernel.permute(TO_MEMORY).shape) == tuple(shape):
        return kernel.permute(TO_MEMORY).contiguous()
    return kernel


class _Layer:
    """Mixin: the state dict holds ``weight`` in the checkpoint layout, and CPU tensors are fine with every build of spconv."""

    # nn.Module's own methods are called: mmdet3d replaces those of spconv's base class by ones that permute as well.

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        key = prefix + 'weight'
        destination[key] = destination[key].permute(TO_STATE)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        key = prefix + 'weight'
        if key in state_dict:
            state_dict[key] = kernel_to_memory(state_dict[key], self.weight.shape)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)

    def _conv_forward(self, training, input, weight, bias, *args, **kwargs):
        if input.features.is_cuda:
            return super()._conv_forward(training, input, weight, bias, *args, **kwargs)
        # spconv's CUDA build chooses an algorithm that its CPU code does not have, and that code refuses a bias.
        # Set in a twin, so that other threads' calls of this layer do not see it.
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, algo=sparse().native)
        out = super(_Layer, twin)._conv_forward(training, input, weight, None, *args, **kwargs)
        return out if bias is None else out.replace_feature(out.features + bias)


@functools.lru_cache(maxsize=None)
def sparse() -> types.SimpleNamespace:
    """What is used of spconv: ``constants``, its ``ops``, the ``native`` algorithm, its ``Tensor`` and our layers on it.

    Layers: ``Sequential``, ``SubMConv3d``, ``SparseConv3d``, ``Block``.

    Raises:
        ImportError: if spconv 2 is not installed; the message says what to install.
    """
    try:
        import spconv.pytorch as spconv
        from spconv import constants
        from spconv.pytorch import ops
    except ImportError as error:
        raise ImportError('SparseEncoder needs spconv 2: install "spconv" (CPU) or "spconv-cu126" (GPU), e.g. by '
                          f'`make install` ({error})') from error

    class SubMConv3d(_Layer, spconv.SubMConv3d):
        """Submanifold convolution: outputs only at input sites; always padded by half the kernel."""

    class SparseConv3d(_Layer, spconv.SparseConv3d):
        """Regular sparse convolution: outputs wherever the kernel touches an input site."""

    class Block(spconv.SparseModule):
        """Two submanifold convolutions with a residual connection (parameters conv1, bn1, conv2, bn2)."""

        def __init__(self, channels: int, norm_cfg: dict, indice_key: str):
            super().__init__()
            self.conv1 = SubMConv3d(channels, channels, 3, bias=False, indice_key=indice_key)
            self.bn1 = build_norm_layer(norm_cfg, channels)[1]
            self.conv2 = SubMConv3d(channels, channels, 3, bias=False, indice_key=indice_key)
            self.bn2 = build_norm_layer(norm_cfg, channels)[1]
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            out = self.conv1(x)
            out = out.replace_feature(self.relu(self.bn1(out.features)))
            out = self.conv2(out)
            return out.replace_feature(self.relu(self.bn2(out.features) + x.features))

    return types.SimpleNamespace(
        constants=constants, ops=ops, native=spconv.ConvAlgo.Native, Tensor=spconv.SparseConvTensor, Sequential=spconv.SparseSequential,
        SubMConv3d=SubMConv3d, SparseConv3d=SparseConv3d, Block=Block)


_TUNERS: Dict[bool, Tuple[Any, Any]] = {}  # by whether TF32 is allowed


def allow_tf32(allowed: bool) -> None:
    """Say whether float32 sparse convolutions may run in TF32.

    spconv tries kernels once for each kind of shape and keeps the fastest, also when the setting changes later: a process that turned
    TF32 off would go on with it. So each setting gets a memory of its own.
    """
    ops = sparse().ops
    sparse().constants.SPCONV_ALLOW_TF32 = allowed
    if ops.CONV_CPP is None:  # spconv for the CPU only
        return
    if allowed not in _TUNERS:
        _TUNERS[allowed] = _new_tuners() if _TUNERS else (ops.GEMM_CPP, ops.CONV_CPP)
    ops.GEMM_CPP, ops.CONV_CPP = _TUNERS[allowed]


def _new_tuners() -> Tuple[Any, Any]:
    """As spconv makes them when it is imported, without any choice made."""
    from spconv import algo
    core = algo.algocore
    return (algo.GemmTunerSimple([core.get_gemm_algo_desp_from_param(p) for p in algo.ALL_NATIVE_PARAMS]),
            algo.ConvTunerSimple([core.get_conv_algo_desp_from_param(p) for p in algo.ALL_IMPGEMM_PARAMS]))


def conv_unit(kind: str, in_channels: int, out_channels: int, kernel: Union[int, Sequence[int]], norm_cfg: dict,
              order: Sequence[str], indice_key: str, stride: Union[int, Sequence[int]] = 1,
              padding: Union[int, Sequence[int]] = 0) -> nn.Module:
    """Convolution, norm and ReLU in the given ``order``; members are numbered in that order.

    Args:
        kind: ``SubMConv3d`` or ``SparseConv3d``.
        order: permutation or part of ``('conv', 'norm', 'act')``.
        stride, padding: one number or one per (x, y, z).
    """
    layers = []
    for member in order:
        if member == 'conv':
            extra = {} if kind == 'SubMConv3d' else {'stride': stride, 'padding': padding}
            layers.append(getattr(sparse(), kind)(in_channels, out_channels, kernel, bias=False, indice_key=indice_key,
                                                  **extra))
        elif member == 'norm':
            after = 'conv' in order[:list(order).index('norm')]
            layers.append(build_norm_layer(norm_cfg, out_channels if after else in_channels)[1])
        else:
            layers.append(nn.ReLU(inplace=True))
    return sparse().Sequential(*layers)
