"""Lets fake CPU tensors take the paths that CUDA tensors take, where the two differ in what they keep.

Fake tensors of device "cuda" need a driver for the backward pass; fake CPU tensors need nothing. What differs: more operators
run in float32 under autocast, attention is fused, dropout keeps a mask of bytes, convolutions need workspace.
"""
from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable, Iterator

import torch

from ...models.backbones import windows
from .tracker import size_of

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)

# Operators that CUDA's autocast runs in float32 (ATen/autocast_mode.h: AT_FORALL_FP32); the CPU's list is shorter.
FLOAT32 = (
    'acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar '
    'softplus layer_norm native_layer_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d '
    'hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss soft_margin_loss triplet_margin_loss '
    'binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d norm.Scalar norm.ScalarOpt_dim '
    'upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d').split()
# The same with a result type instead of converted inputs (AT_FORALL_FP32_SET_OPT_DTYPE), and its position among the arguments.
FLOAT32_RESULT = {'softmax.int': 2, 'log_softmax.int': 2, 'prod': 1, 'prod.dim_int': 3, 'cumprod': 2, 'cumsum': 2, 'sum': 1,
                  'sum.dim_IntList': 3, 'linalg_vector_norm': 4}
_KEY = 'AutocastCPU'


def conv_workspace(func: Any, args: tuple, result: Any) -> int:
    """Bytes that a convolution on a GPU holds beside its operands while it runs.

    Tensor cores (half precision, and float32 as TF32) work on channels-last data. cuDNN converts operands in the usual order
    first, into its workspace: the input, the result and the kernel once more each. An assumption, checked against
    measurements by ``benchmarks/memory.py``.
    """
    if func is aten.convolution.default:
        operands = [args[0], args[1], result]
    elif func is aten.convolution_backward.default:
        operands = [args[0], args[1], args[2]]
    else:
        return 0
    return sum(size_of(t) for t in operands if t.dim() == 4 and not t.is_contiguous(memory_format=torch.channels_last))


@contextlib.contextmanager
def cuda_rules() -> Iterator[None]:
    """Within: CPU tensors are cast, attended and dropped out as CUDA's are. Process-wide; not for real work."""
    library = torch.library.Library('aten', 'IMPL')
    real, windows.fused = windows.fused, lambda *args: True
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for name in FLOAT32:
            _register(library, name, _cast_inputs)
        for name in FLOAT32_RESULT:
            _register(library, name, _set_result_type)
        library.impl('scaled_dot_product_attention', _fused_attention, 'AutogradCPU')
        library.impl('dropout', _fused_dropout, 'AutogradCPU')
    try:
        yield
    finally:
        library._destroy()
        windows.fused = real


def _register(library: torch.library.Library, name: str, rule: Callable) -> None:
    full = f'aten::{name}'
    if not torch._C._dispatch_has_kernel_for_dispatch_key(full, _KEY):
        base, _, overload = name.partition('.')
        library.impl(name, rule(getattr(getattr(aten, base), overload or 'default'), name), _KEY)


@contextlib.contextmanager
def _below_autocast() -> Iterator[None]:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))):
        yield


def _to_float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value


def _cast_inputs(operator: Any, name: str) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            return operator(*map(_to_float, args), **{key: _to_float(value) for key, value in kwargs.items()})
    return run


def _set_result_type(operator: Any, name: str) -> Callable:
    position = FLOAT32_RESULT[name]
    fused = {'softmax.int': aten._softmax.default, 'log_softmax.int': aten._log_softmax.default}.get(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        x = args[0]
        given = kwargs.get('dtype') is not None or len(args) > position and args[position] is not None
        with _below_autocast():
            if given or x.dtype not in HALF:
                return operator(*args, **kwargs)
            if fused is not None and x.dtype == torch.float16:
                return fused(x, args[1] if len(args) > 1 else kwargs['dim'], True)  # reads half, writes float32
            return operator(*args[:position], **dict(kwargs, dtype=torch.float32))
    return run


def _fused_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Keeps query, key, value, the result and one number per query, as flash and memory-efficient attention do."""
    return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def _fused_dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0:
        return x
    return aten.native_dropout(x, p, True)[0]
