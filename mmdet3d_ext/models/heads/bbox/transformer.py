"""The transformer decoder layer of TransFusion: self-attention among queries, cross-attention into the BEV map."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Ranges of keys in `attend_in_ranges`: 4 samples x 8 heads x 16 are several blocks of threads for each of a GPU's processors.
MAX_RANGES = 16

_ACTIVATIONS = {'relu': F.relu, 'gelu': F.gelu}


class PositionEmbeddingLearned(nn.Module):
    """Positions (B, P, 2) in map cells -> embeddings (B, P, C).

    Always in float32: cell coordinates up to several hundred lose their fraction (or whole cells, in bfloat16) in 16
        bits.
    """

    def __init__(self, in_channels: int, channels: int):
        super().__init__()
        self.position_embedding_head = nn.Sequential(
            nn.Conv1d(in_channels, channels, 1), nn.BatchNorm1d(channels), nn.ReLU(inplace=True),
            nn.Conv1d(channels, channels, 1))

    def forward(self, position: Tensor) -> Tensor:
        with torch.autocast(position.device.type, enabled=False):
            return self.position_embedding_head(position.float().transpose(1, 2)).transpose(1, 2)


class TransformerDecoderLayer(nn.Module):
    """Self-attention, cross-attention and feed-forward, each with a residual and a LayerNorm after it.

    Args:
        channels: C of queries and keys.
        num_heads: attention heads; must divide ``channels``.
        ffn_channels: hidden channels of the feed-forward part.
        dropout: probability, in attention weights and after each part.
        activation: ``'relu'`` or ``'gelu'``.
    """

    def __init__(self, channels: int, num_heads: int, ffn_channels: int, dropout: float = 0.1, activation: str = 'relu'):
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f'activation: expected one of {sorted(_ACTIVATIONS)}, got {activation!r}')
        if channels % num_heads:
            raise ValueError(f'num_heads: must divide the {channels} hidden channels, got {num_heads}')
        self.self_attn = nn.MultiheadAttention(channels, num_heads, dropout=dropout, batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(channels, num_heads, dropout=dropout, batch_first=True)
        self.linear1 = nn.Linear(channels, ffn_channels)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(ffn_channels, channels)
        self.norm1 = nn.LayerNorm(channels)
        self.norm2 = nn.LayerNorm(channels)
        self.norm3 = nn.LayerNorm(channels)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.dropout3 = nn.Dropout(dropout)
        self.activation = _ACTIVATIONS[activation]
        self.self_posembed = PositionEmbeddingLearned(2, channels)
        self.cross_posembed = PositionEmbeddingLearned(2, channels)

    def forward(self, query: Tensor, key: Tensor, query_pos: Tensor, key_pos: Tensor) -> Tensor:
        """``query`` (B, P, C), ``key`` (B, K, C), ``query_pos`` (B, P, 2), ``key_pos`` (1, K, 2) in cells -> (B, P, C).

        The key positions are the same for every sample, so they are embedded once and not once per sample.
        """
        query_embed = self.self_posembed(query_pos)
        memory = key + self.cross_posembed(key_pos)

        q = query + query_embed
        query = self.norm1(query + self.dropout1(self.self_attn(q, q, q, need_weights=False)[0]))
        attended = cross_attention(self.multihead_attn, query + query_embed, memory)
        query = self.norm2(query + self.dropout2(attended))
        hidden = self.linear2(self.dropout(self.activation(self.linear1(query))))
        return self.norm3(query + self.dropout3(hidden))


def cross_attention(attention: nn.MultiheadAttention, query: Tensor, memory: Tensor) -> Tensor:
    """What ``attention(query, memory, memory)`` gives, (B, P, C), by the faster way.

    With a few hundred queries and tens of thousands of keys, torch's fused float32 kernel has little to run in parallel: a block of
    threads goes through all keys (24 ms for the backward pass of a call at B = 4, P = 200, K = 32,400 on an H200). Half
    precision has another kernel without this fault.
    """
    half = torch.is_autocast_enabled(memory.device.type) or memory.dtype != torch.float32
    if memory.is_cuda and not half and torch.is_grad_enabled() and memory.shape[1] > 8 * query.shape[1]:
        return attend_in_ranges(attention, query, memory)
    return attention(query, memory, memory, need_weights=False)[0]


def attend_in_ranges(attention: nn.MultiheadAttention, query: Tensor, memory: Tensor) -> Tensor:
    """The same attention with the keys in ranges of equal length, each of which the fused kernel treats like one more head.

    Args:
        attention: ``batch_first``, with biases.
        query: (B, P, C). memory: (B, K, C), keys and values.
    """
    heads, dropout = attention.num_heads, attention.dropout if attention.training else 0.0
    q, k, v = (F.linear(x, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, heads, P or K, C / heads)
               for x, weight, bias in zip((query, memory, memory), attention.in_proj_weight.chunk(3),
                                          attention.in_proj_bias.chunk(3), strict=True))
    ranges = max(n for n in range(1, MAX_RANGES + 1) if k.shape[2] % n == 0)
    return attention.out_proj(_RangeAttention.apply(q, k, v, ranges, dropout).transpose(1, 2).flatten(2))


class _RangeAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(E)) v over R ranges of keys at once: q (B, H, P, E), k and v (B, H, K, E) -> (B, H, P, E).

    The ranges' results are joined by their log-sum-exp (Dao et al., Flash-Decoding, 2023). The backward pass of a softmax needs its
    result and its log-sum-exp only, so each range is given those of the whole; d q is the sum over the ranges.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, ranges: int, dropout: float) -> Tensor:
        heads, queries = q.shape[1:3]
        split = [_repeat(q, ranges), _split(k, ranges), _split(v, ranges)]
        out, lse, *seeds = _kernel(*split, dropout)
        part = lse[..., :queries].unflatten(1, (heads, ranges))                              # (B, H, R, P)
        total = part.logsumexp(2, keepdim=True)
        out = (out.unflatten(1, (heads, ranges)) * (part - total).exp().to(out.dtype)[..., None]).sum(2)
        lse[..., :queries] = total.expand_as(part).flatten(1, 2)
        ctx.save_for_backward(q, k, v, out, lse, *seeds)
        ctx.settings = (ranges, dropout)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        q, k, v, out, lse, *seeds = ctx.saved_tensors
        ranges, dropout = ctx.settings
        to_q, to_k, to_v = _kernel_backward(_repeat(grad, ranges), _repeat(q, ranges), _split(k, ranges), _split(v, ranges),
                                            _repeat(out, ranges), lse, seeds, dropout)
        return to_q.unflatten(1, (-1, ranges)).sum(2), to_k.reshape(k.shape), to_v.reshape(v.shape), None, None


def _repeat(x: Tensor, ranges: int) -> Tensor:
    """(B, H, P, E) -> (B, H * R, P, E)."""
    return x[:, :, None].expand(-1, -1, ranges, -1, -1).flatten(1, 2)


def _split(x: Tensor, ranges: int) -> Tensor:
    """(B, H, K, E) -> (B, H * R, K / R, E)."""
    return x.unflatten(2, (ranges, -1)).flatten(1, 2)


def _kernel(q: Tensor, k: Tensor, v: Tensor, dropout: float):
    """torch's fused attention: the result, its log-sum-exp (maybe padded) and what dropout was drawn from."""
    if q.is_cuda:
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout)
    if dropout:
        raise NotImplementedError('attention in ranges has no dropout on the CPU')
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)


def _kernel_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seeds, dropout: float):
    if q.is_cuda:
        return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, *seeds, dropout, [True, True, True, False])[:3]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, False)
