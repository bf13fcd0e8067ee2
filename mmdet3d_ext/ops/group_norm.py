"""Group normalisation with a ReLU behind it, for large maps of few groups.

torch's group norm works on a group with one block of GPU threads: a BEV map of 32 groups leaves most of the GPU idle. Here the cells of
a map are divided over all of it. Only the input and two numbers per group are kept for the backward pass.

Letters: B batch, C channels, G groups of C / G channels.
"""

from __future__ import annotations

import torch

from ._checks import check, check_same_device
from ._library import fake, require

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _format(x: torch.Tensor) -> torch.memory_format:
    """The order in memory that the kernels read and write (csrc/group_norm/group_norm.h)."""
    if not x.is_contiguous():
        for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if x.dim() == dims and x.is_contiguous(memory_format=layout):
                return layout
    return torch.contiguous_format


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=_format(x))


@fake('group_norm_relu')
def _(x, weight, bias, groups, eps, relu):
    return _like(x), weight.new_empty((x.shape[0], groups)), weight.new_empty((x.shape[0], groups))


@fake('group_norm_relu_backward')
def _(grad, x, mean, rstd, weight, bias, groups, relu):
    return _like(x), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def group_norm_relu(
    x: torch.Tensor, groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5, relu: bool = True
) -> torch.Tensor:
    """``relu(torch.nn.functional.group_norm(x, groups, weight, bias, eps))``, in float32 for half-precision x.

    Statistics merge means and squared deviations, so that a large mean does not cancel a small spread. Not finite values spread over
    their own group. NaN passes the ReLU, and lets the gradient pass, as in torch. Results repeat bit by bit. No second derivatives.

    Args:
        x: (B, C, ...) float16, bfloat16, float32 or float64. Contiguous and channels-last (4 or 5 dimensions) as they are, anything
            else is made contiguous first.
        groups: G, a divisor of C.
        weight, bias: (C,), converted to float32 (float64 for float64 x).
        eps: added to the variance.
        relu: False leaves the ReLU out.

    Returns:
        As x: shape, type, order in memory (contiguous for other strides).

    Raises:
        ValueError: for a wrong shape, type or number of groups.
    """
    op = 'group_norm_relu'
    if not isinstance(x, torch.Tensor):
        raise TypeError(f'{op}: x must be a tensor (B, C, ...), got {type(x).__name__}')
    if x.dim() < 2 or x.dtype not in DTYPES:
        check(False, op, 'x', '(B, C, ...) float16, bfloat16, float32 or float64', f'shape {tuple(x.shape)} {x.dtype}')
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        check(False, op, 'groups', f'a divisor of the {channels} channels', groups)
    for name, value in (('weight', weight), ('bias', bias)):
        if value.shape != (channels,):
            check(False, op, name, f'({channels},) as the channels of x', f'shape {tuple(value.shape)}')
    check_same_device(op, x=x, weight=weight, bias=bias)
    require(x)
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.ops.mmdet3d_ext.group_norm_relu(x, weight.to(work), bias.to(work), int(groups), float(eps), bool(relu))[0]
