"""Attention within the windows of a map of tokens, shifted or not: how tokens are laid out for it, and the attention itself.

Letters: B images, H/W tokens of an image, C channels, n windows of an image, p places within a window, T = B*H*W tokens. "Map order"
is (B, H*W), "window order" is (B, p, n): with the window next to the channels, (n, heads) is one axis of a fixed stride, and a
bias of shape (n * heads, p, p) serves all images without a copy for each.
"""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

import numpy as np
import torch

from ...geometry.on_device import traced, upload

# Added to a logit between two places that are not neighbours: shifting brings tokens of opposite edges into one window. The value is
# Swin Transformer's.
APART = -100.0
# The fused kernel reads the bias in aligned pieces: its rows begin at multiples of so many elements (torch,
# aten/src/ATen/native/transformers/attention.cpp, preprocess_mask).
ALIGNMENT = 16
HALF = (torch.float16, torch.bfloat16)
aten = torch.ops.aten


@dataclass(frozen=True)
class Windows:
    """Index tables (int32) of B images of H x W tokens cut into windows, on one device.

    Attributes:
        images, count, area: B, n, p.
        to_windows: (B*p*n,) the token of each place; T for padding.
        to_map: (T + 1,) the place of each token, and any place for padding.
        qkv_to_windows: (B*p*3*n,) from rows (T, 3) to rows (B, p, 3, n); 3*T + (0, 1, 2) for padding.
        qkv_to_map: (T*3,) back.
        padding: rows (places without a token, 3) among (B, p, 3, n); None without padding.
        apart: (n, 1, p, row) float32, 0 or :data:`APART`; None if windows are not shifted. row: p rounded up to :data:`ALIGNMENT`.
        relative: (p * row,) for each pair of places, its row of the table of relative positions.
        pairs: (rows of that table * p,) the pairs of places of each relative position; p * p where there are fewer.
    """

    images: int
    count: int
    area: int
    to_windows: torch.Tensor
    to_map: torch.Tensor
    qkv_to_windows: torch.Tensor
    qkv_to_map: torch.Tensor
    padding: Optional[torch.Tensor]
    apart: Optional[torch.Tensor]
    relative: torch.Tensor
    pairs: torch.Tensor


_TABLES: 'OrderedDict[Tuple, Windows]' = OrderedDict()
_MOST = 64  # entries kept: stages x shifts x numbers and sizes of images in use


def windows(images: int, size: Tuple[int, int], edge: int, shift: int, device: torch.device) -> Windows:
    """The tables for ``images`` maps of ``size`` (H, W) in windows of ``edge`` x ``edge``, shifted by ``shift``. Made once."""
    key = (images, *size, edge, shift, device)
    found = _TABLES.get(key)
    if found is not None:
        _TABLES.move_to_end(key)
        return found
    with torch.inference_mode(False):  # an inference tensor could not be used in a later backward pass
        found = _make(images, size, edge, shift, device)
    if not traced():
        _TABLES[key] = found
        if len(_TABLES) > _MOST:
            _TABLES.popitem(last=False)
    return found


def _make(images: int, size: Tuple[int, int], edge: int, shift: int, device: torch.device) -> Windows:
    (high, wide), area = size, edge * edge
    rows, cols = (-(-n // edge) * edge for n in size)
    count, tokens, part = rows * cols // area, images * high * wide, np.arange(3)

    def cut(grid: np.ndarray) -> np.ndarray:
        """(rows, cols) -> (p, n)"""
        return grid.reshape(rows // edge, edge, cols // edge, edge).transpose(1, 3, 0, 2).reshape(area, count)

    def put(array: np.ndarray, dtype: type = np.int32) -> torch.Tensor:
        return upload(torch.from_numpy(np.ascontiguousarray(array, dtype)), device)

    r, c = np.meshgrid((np.arange(rows) + shift) % rows, (np.arange(cols) + shift) % cols, indexing='ij')
    token = cut(np.where((r < high) & (c < wide), r * wide + c, -1))
    to_windows = np.where(token >= 0, np.arange(images)[:, None, None] * high * wide + token, tokens)  # (B, p, n)
    to_map = np.empty(tokens + 1, np.int64)
    to_map[to_windows.reshape(-1)] = np.arange(to_windows.size)  # the last entry becomes some place of padding
    if not (token < 0).any():
        to_map[tokens] = 0
    outer, window = np.divmod(to_map[:tokens, None], count)
    image, place, window_of = np.nonzero(to_windows == tokens)
    padding = ((image * area + place)[:, None] * 3 + part) * count + window_of[:, None]

    relative = relative_positions(edge)
    row = -(-area // ALIGNMENT) * ALIGNMENT
    aligned = np.zeros((area, row), np.int64)
    aligned[:, :area] = relative
    pairs = np.full(((2 * edge - 1) ** 2, area), area * area)
    for index in range(len(pairs)):
        found = np.flatnonzero(relative == index)
        pairs[index, :len(found)] = found
    apart = None
    if shift:
        zones = [np.digitize(np.arange(n), [n - edge, n - shift]) for n in (rows, cols)]
        zone = cut(zones[0][:, None] * 3 + zones[1]).T  # (n, p)
        apart = np.zeros((count, 1, area, row))
        apart[:, 0, :, :area] = np.where(zone[:, :, None] != zone[:, None], APART, 0.0)
    return Windows(images, count, area, put(to_windows.reshape(-1)), put(to_map),
                   put((to_windows[:, :, None] * 3 + part[:, None]).reshape(-1)),
                   put(((outer * 3 + part) * count + window).reshape(-1)), put(padding.reshape(-1)) if padding.size else None,
                   None if apart is None else put(apart, np.float32), put(aligned.reshape(-1)), put(pairs.reshape(-1)))


def relative_positions(edge: int) -> np.ndarray:
    """(p, p) -> the row of the table of relative positions, (y - y' + edge - 1) * (2 * edge - 1) + (x - x' + edge - 1)."""
    y, x = np.divmod(np.arange(edge * edge), edge)
    return (y[:, None] - y + edge - 1) * (2 * edge - 1) + x[:, None] - x + edge - 1


def take_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``rows[index]`` of a contiguous (R, C), moved in pieces of 16 bytes where rows consist of such."""
    if rows.shape[1] * rows.element_size() % 16 == 0:
        return rows.view(torch.complex128).index_select(0, index).view(rows.dtype)
    return rows.index_select(0, index)


def attention_bias(table: torch.Tensor, grid: Windows, dtype: torch.dtype) -> torch.Tensor:
    """The bias of relative positions and of shifted windows.

    Args:
        table: (relative positions, heads).

    Returns:
        (n * heads, p, p) of ``dtype``, its rows aligned as the fused kernel wants them.
    """
    heads = table.shape[1]
    bias = table.t().index_select(1, grid.relative).view(1, heads, grid.area, -1)
    out = bias.new_empty((grid.count, *bias.shape[1:]), dtype=dtype)
    if grid.apart is None:
        out.copy_(bias.expand_as(out))
    else:
        torch.add(bias, grid.apart, out=out)
    return out.flatten(0, 1)[..., :grid.area]


def attention_bias_backward(grad: torch.Tensor, grid: Windows) -> torch.Tensor:
    """(heads, p, p) -> gradient of the table. Sums in a fixed order, without atomic additions."""
    grad = torch.nn.functional.pad(grad.flatten(1), (0, 1))  # pairs that do not exist read the zero
    return grad.index_select(1, grid.pairs).view(len(grad), -1, grid.area).sum(2).t()


def fused(qkv: torch.Tensor, head_channels: int) -> bool:
    """Whether CUDA's memory-efficient attention can run: it never holds the p x p weights, and sums in float32."""
    if not qkv.is_cuda or torch.version.hip is not None or head_channels % 8:
        return False
    if qkv.dtype == torch.bfloat16:
        return torch.cuda.get_device_capability(qkv.device) >= (8, 0)
    return qkv.dtype in (torch.float16, torch.float32)


def _heads(qkv: torch.Tensor, grid: Windows, heads: int) -> Tuple[torch.Tensor, ...]:
    """Rows (B*p*3*n, C) -> views q, k, v (B, n * heads, p, C / heads)."""
    return qkv.view(grid.images, grid.area, 3, grid.count * heads, -1).transpose(1, 3).unbind(2)


def attend(qkv: torch.Tensor, bias: torch.Tensor, grid: Windows, heads: int, scale: float) -> Tuple[torch.Tensor, ...]:
    """softmax(scale * q k^T + bias) v.

    Args:
        qkv: rows (B*p*3*n, C). bias: (n * heads, p, p).

    Returns:
        The result, rows (B*p*n, C), and what the backward pass wants beside it.
    """
    q, k, v = _heads(qkv, grid, heads)
    if fused(qkv, q.shape[-1]):
        # By name and not through scaled_dot_product_attention: its choice of a kernel changes with torch's versions.
        out, *kept = aten._scaled_dot_product_efficient_attention(q, k, v, bias.expand(len(q), -1, -1, -1), True, scale=scale)
    else:
        out, kept = _weights(q, k, bias, scale).to(v.dtype) @ v, ()
    return out.transpose(1, 2).reshape(-1, qkv.shape[1]), *kept


def _weights(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
    logits = (q * scale) @ k.transpose(-2, -1)
    return torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) + bias, -1)


def attend_backward(grad: torch.Tensor, qkv: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, kept: Tuple[torch.Tensor, ...],
                    grid: Windows, heads: int, scale: float, with_bias: bool) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Gradients of :func:`attend`.

    Args:
        grad, out: rows (B*p*n, C); rows of ``out`` whose gradient is zero may hold anything finite.
        with_bias: whether the bias's gradient is wanted.

    Returns:
        Rows (B*p*3*n, C), and (heads, p, p) in float32 or better, summed over images and windows.
    """
    q, k, v = _heads(qkv, grid, heads)
    out, grad = (rows.view(grid.images, grid.area, grid.count * heads, -1).transpose(1, 2) for rows in (out, grad))
    if kept and qkv.is_cuda:
        parts, d_bias = _fused_backward(grad, q, k, v, bias, out, kept, scale, with_bias)
    elif kept:  # fake tensors of a memory plan, which torch 2.7's fake kernel of the other operator does not take
        *parts, d_bias = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, bias.expand(len(q), -1, -1, -1), out, *kept, 0.0, [True, True, True, with_bias], scale=scale)
    else:
        weights = _weights(q, k, bias, scale)
        d_weights = (grad @ v.transpose(-2, -1)).to(weights.dtype)
        d_bias = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
        d_logits = d_bias.to(q.dtype)
        parts = [(d_logits @ k) * scale, (d_logits.transpose(-2, -1) @ q) * scale, weights.to(q.dtype).transpose(-2, -1) @ grad]
    if with_bias:
        work = torch.promote_types(d_bias.dtype, torch.float32)
        d_bias = d_bias.unflatten(1, (grid.count, heads)).sum((0, 1), dtype=work)
    return _one_buffer(parts, qkv), d_bias if with_bias else None


def _fused_backward(grad, q, k, v, bias, out, kept, scale, with_bias):
    """As ``_scaled_dot_product_efficient_attention_backward``, with the gradients of q, k and v as views of one buffer."""
    grad, q, k, v, out = (t.transpose(1, 2) for t in (grad, q, k, v, out))  # (B, p, n * heads, c), the kernel's own order
    lse, seed, offset = kept
    no_mask = 0
    *parts, d_bias = aten._efficient_attention_backward(
        grad, q, k, v, bias.expand(len(q), -1, -1, -1), out, None, None, q.shape[1], q.shape[1], lse, 0.0, seed, offset, no_mask,
        with_bias, scale=scale, shared_storage_dqdkdv=True)
    return [part.transpose(1, 2) for part in parts], d_bias


def _one_buffer(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The gradients of q, k, v (B, n * heads, p, C / heads) as rows (B*p*3*n, C); no copy where they are views of just this."""
    first = parts[0].transpose(1, 2)  # (B, p, n * heads, c)
    step = first.shape[2] * first.shape[3]
    apart = [part.storage_offset() - parts[0].storage_offset() for part in parts]
    shared = all(part.untyped_storage()._cdata == parts[0].untyped_storage()._cdata for part in parts[1:])
    if shared and apart == [0, step, 2 * step] and first.stride() == (first.shape[1] * 3 * step, 3 * step, first.shape[3], 1):
        return first.as_strided(like.shape, (like.shape[1], 1))
    return torch.stack([part.transpose(1, 2) for part in parts], 2).view_as(like)
