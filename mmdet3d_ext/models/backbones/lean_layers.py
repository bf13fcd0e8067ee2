"""Transformer layers with a backward pass of their own, which keep for it what is dear to compute and nothing else.

A norm before a linear layer is folded into it: W (g * n + b) + c = (W g) n + (W b + c), with n the normalised map, g and b the
norm's weight and bias, W and c the linear layer's. So n is what is normalised, multiplied and kept, once and in the type of the
matrix product. The residual stream itself, float32 under autocast, is not kept at all.

Kept per token of C channels, in the type of the matrix products: attention 5 C (n, queries, keys, values, result), perceptron
C + 4 C (n and the hidden layer before its activation; C if that is recomputed), norm and linear C.

Letters: B images, T tokens of all images, C channels, R rows of channels.
"""
from __future__ import annotations

import contextlib
from typing import Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ...geometry.on_device import traced
from . import windows

HALF = windows.HALF
Maybe = Optional[torch.Tensor]


def working_type(x: torch.Tensor) -> torch.dtype:
    """The type of matrix products on ``x``: autocast's where it is on."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def normalise(x: torch.Tensor, eps: float, dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor]:
    """(..., C) -> rows of mean 0 and variance 1 (R, C) in ``dtype``, and one over the standard deviation (R, 1)."""
    normed, _, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
    return normed.to(dtype).reshape(-1, x.shape[-1]), rstd.reshape(-1, 1)


_UNIT: Dict[Tuple[torch.dtype, torch.device], torch.Tensor] = {}  # (2, R): zeros and ones, for the most rows so far


def _unit_statistics(rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(2, R, 1): mean and ``rstd`` of rows that are normalised. Shared: never write to it."""
    found = _UNIT.get((dtype, device))
    if found is None or found.shape[1] < rows:
        with torch.inference_mode(False):
            found = torch.arange(2, dtype=dtype, device=device)[:, None].repeat(1, rows)
        if not traced():
            _UNIT[dtype, device] = found
    return found[:, :rows, None]


def normalise_backward(grad: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """The gradient of :func:`normalise`'s input divided by ``rstd``, rows (R, C)."""
    statistics = torch.float32 if normed.dtype in HALF and normed.is_cuda else normed.dtype  # what the kernels of each expect
    mean, rstd = _unit_statistics(len(normed), statistics, normed.device)
    return torch.ops.aten.native_layer_norm_backward(grad, normed, normed.shape[1:], mean, rstd, None, None, [True, False, False])[0]


def fold(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(C_out, C): the weight, in ``dtype``, that acts on the normalised map."""
    return torch.mul(weight, scale, out=weight.new_empty(weight.shape, dtype=dtype))


def fold_bias(weight: torch.Tensor, shift: torch.Tensor, bias: Maybe, dtype: torch.dtype) -> torch.Tensor:
    """(C_out,): the bias that goes with it."""
    return (torch.mv(weight, shift) if bias is None else torch.addmv(bias, weight, shift)).to(dtype)


def fold_backward(d_folded: torch.Tensor, d_moved: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor,
                  shift: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of scale, shift and weight; that of the bias is ``d_moved``."""
    d_folded = d_folded.to(weight.dtype)
    return (d_folded * weight).sum(0), torch.mv(weight.t(), d_moved), torch.addr(d_folded * scale, d_moved, shift)


def row_sum(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sum over rows in the type of ``like``, a parameter."""
    return rows.sum(0, dtype=like.dtype)


def add_scaled(x: torch.Tensor, rows: torch.Tensor, scale: Maybe) -> torch.Tensor:
    """x + scale * rows in one pass; x (B, L, C) sets the result's type."""
    rows = rows.view(x.shape)
    return torch.add(x, rows) if scale is None else torch.addcmul(x, rows, scale)


def scaled_rows(grad: torch.Tensor, scale: Maybe, dtype: torch.dtype) -> torch.Tensor:
    """grad (B, L, C) times scale (B, 1, 1), as rows (T, C) of ``dtype``."""
    grad = grad.contiguous()
    if scale is not None:
        grad = torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))
    return grad.to(dtype).view(-1, grad.shape[-1])


def back_to_stream(grad: torch.Tensor, d_normed: torch.Tensor, normed: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """The residual stream's gradient (B, L, C): ``grad`` that passed by, and what comes through the norm."""
    through = normalise_backward(d_normed, normed)
    return torch.addcmul(grad, through.view(grad.shape), rstd.view(*grad.shape[:-1], 1))


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """Within: operators run in the types that they are given."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


class NormLinear(torch.autograd.Function):
    """linear(layer_norm(x)): x (..., C) -> (..., C_out) of the matrix products' type."""

    @staticmethod
    def forward(ctx, x, scale, shift, weight, bias, eps: float, dtype: torch.dtype):
        with without_autocast(x):
            normed, rstd = normalise(x, eps, dtype)
            out = torch.addmm(fold_bias(weight, shift, bias, dtype), normed, fold(weight, scale, dtype).t())
        ctx.save_for_backward(normed, rstd, scale, shift, weight)
        ctx.like = x.shape, x.dtype, bias is not None
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        normed, rstd, scale, shift, weight = ctx.saved_tensors
        shape, dtype, biased = ctx.like
        d_x = d_scale = d_shift = d_weight = d_moved = None
        with without_autocast(grad):
            grad = grad.reshape(-1, grad.shape[-1]).to(normed.dtype)
            if any(ctx.needs_input_grad[1:5]):
                d_moved = row_sum(grad, weight)
                d_scale, d_shift, d_weight = fold_backward(grad.t() @ normed, d_moved, weight, scale, shift)
            if ctx.needs_input_grad[0]:
                through = normalise_backward(grad @ fold(weight, scale, normed.dtype), normed)
                d_x = torch.mul(through, rstd, out=torch.empty_like(through, dtype=dtype)).view(shape)
        return d_x, d_scale, d_shift, d_weight, d_moved if biased else None, None, None


class NormPerceptron(torch.autograd.Function):
    """x + keep * fc2(gelu(fc1(layer_norm(x)))) for x (B, L, C); keep (B, 1, 1) or None for ones.

    The activation is recomputed in the backward pass; with ``recompute`` the first linear layer too.
    """

    @staticmethod
    def forward(ctx, x, scale, shift, weight1, bias1, weight2, bias2, keep, eps: float, dtype: torch.dtype, approximate: str,
                recompute: bool):
        with without_autocast(x):
            normed, rstd = normalise(x, eps, dtype)
            hidden = torch.addmm(fold_bias(weight1, shift, bias1, dtype), normed, fold(weight1, scale, dtype).t())
            out = torch.addmm(bias2.to(dtype), F.gelu(hidden, approximate=approximate), weight2.to(dtype).t())
            result = add_scaled(x, out, keep)
        ctx.save_for_backward(normed, rstd, None if recompute else hidden, keep, scale, shift, weight1, bias1, weight2)
        ctx.approximate = approximate
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        normed, rstd, hidden, keep, scale, shift, weight1, bias1, weight2 = ctx.saved_tensors
        d_x = d_scale = d_shift = d_weight1 = d_bias1 = d_weight2 = d_bias2 = None
        with without_autocast(grad):
            dtype, parameters = normed.dtype, any(ctx.needs_input_grad[1:7])
            folded = fold(weight1, scale, dtype)
            if hidden is None:
                hidden = torch.addmm(fold_bias(weight1, shift, bias1, dtype), normed, folded.t())
            d_out = scaled_rows(grad, keep, dtype)
            if parameters:
                d_weight2 = (d_out.t() @ F.gelu(hidden, approximate=ctx.approximate)).to(weight2.dtype)
                d_bias2 = row_sum(d_out, weight2)
            d_hidden = d_out @ weight2.to(dtype)
            del d_out
            torch.ops.aten.gelu_backward.grad_input(d_hidden, hidden, approximate=ctx.approximate, grad_input=d_hidden)
            del hidden
            if parameters:
                d_bias1 = row_sum(d_hidden, weight1)
                d_scale, d_shift, d_weight1 = fold_backward(d_hidden.t() @ normed, d_bias1, weight1, scale, shift)
            if ctx.needs_input_grad[0]:
                d_normed = d_hidden @ folded
                del d_hidden
                d_x = back_to_stream(grad, d_normed, normed, rstd)
        return d_x, d_scale, d_shift, d_weight1, d_bias1, d_weight2, d_bias2, None, None, None, None, None


class NormAttention(torch.autograd.Function):
    """x + keep * proj(attention(qkv(layer_norm(x)))) within windows, for x (B, L, C); keep (B, 1, 1) or None for ones.

    Linear layers see tokens only. Places of padding have a normed map of zeros, so their queries, keys and values are the bias.
    What is kept is in map order, without padding.
    """

    @staticmethod
    def forward(ctx, x, scale, shift, qkv_weight, qkv_bias, table, proj_weight, proj_bias, keep, grid: windows.Windows, heads: int,
                factor: float, eps: float, dtype: torch.dtype):
        with without_autocast(x):
            normed, rstd = normalise(x, eps, dtype)
            qkv = normed.new_empty((len(normed) + 1, len(qkv_weight)))
            torch.addmm(fold_bias(qkv_weight, shift, qkv_bias, dtype), normed, fold(qkv_weight, scale, dtype).t(), out=qkv[:-1])
            if qkv_bias is None:
                qkv[-1].zero_()
            else:
                qkv[-1].copy_(qkv_bias)
            bias = windows.attention_bias(table, grid, dtype)
            out, *kept = windows.attend(windows.take_rows(qkv.view(-1, normed.shape[1]), grid.qkv_to_windows), bias, grid, heads,
                                        factor)
            out = windows.take_rows(out, grid.to_map)
            result = add_scaled(x, torch.addmm(proj_bias.to(dtype), out[:-1], proj_weight.to(dtype).t()), keep)
        ctx.save_for_backward(normed, rstd, qkv, out, keep, scale, shift, qkv_weight, qkv_bias, table, proj_weight, *kept)
        ctx.settings = grid, heads, factor
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        normed, rstd, qkv, out, keep, scale, shift, qkv_weight, qkv_bias, table, proj_weight, *kept = ctx.saved_tensors
        grid, heads, factor = ctx.settings
        d_x = d_scale = d_shift = d_qkv_weight = d_qkv_bias = d_table = d_proj_weight = d_proj_bias = None
        with without_autocast(grad):
            dtype, parameters, width = normed.dtype, any(ctx.needs_input_grad[1:8]), normed.shape[1]
            d_out = scaled_rows(grad, keep, dtype)
            if parameters:
                d_proj_weight = (d_out.t() @ out[:-1]).to(proj_weight.dtype)
                d_proj_bias = row_sum(d_out, proj_weight)
            d_attended = torch.empty_like(out)
            torch.mm(d_out, proj_weight.to(dtype), out=d_attended[:-1])
            d_attended[-1].zero_()
            del d_out
            d_windows, d_bias = windows.attend_backward(
                windows.take_rows(d_attended, grid.to_windows), windows.take_rows(qkv.view(-1, width), grid.qkv_to_windows),
                windows.attention_bias(table, grid, dtype), windows.take_rows(out, grid.to_windows), tuple(kept), grid, heads, factor,
                ctx.needs_input_grad[5])
            del d_attended
            d_qkv = windows.take_rows(d_windows, grid.qkv_to_map).view(-1, 3 * width)
            if d_bias is not None:
                d_table = windows.attention_bias_backward(d_bias, grid).to(table.dtype)
            if parameters:
                d_moved = row_sum(d_qkv, qkv_weight)
                d_scale, d_shift, d_qkv_weight = fold_backward(d_qkv.t() @ normed, d_moved, qkv_weight, scale, shift)
                if qkv_bias is not None:
                    d_qkv_bias = d_moved
                    if grid.padding is not None:
                        d_qkv_bias = d_moved + row_sum(windows.take_rows(d_windows, grid.padding).view(-1, 3 * width), qkv_weight)
            del d_windows
            if ctx.needs_input_grad[0]:
                d_normed = d_qkv @ fold(qkv_weight, scale, dtype)
                del d_qkv
                d_x = back_to_stream(grad, d_normed, normed, rstd)
        return (d_x, d_scale, d_shift, d_qkv_weight, d_qkv_bias, d_table, d_proj_weight, d_proj_bias, None, None, None, None, None,
                None)
