"""The transformer decoder layer of TransFusion: self-attention among queries, cross-attention into the BEV map."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

WEIGHTS_AT_ONCE = 16 * 2 ** 20  # attention weights of one piece in `attend_in_pieces`: 64 MiB in float32

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

    With a few hundred queries and tens of thousands of keys, torch's fused float32 kernel has little to run in parallel in its
    backward pass (24 ms a call at B = 4, P = 200, K = 32,400 on an H200). Half precision has another kernel without this fault.
    """
    half = torch.is_autocast_enabled(memory.device.type) or memory.dtype != torch.float32
    if memory.is_cuda and not half and torch.is_grad_enabled() and memory.shape[1] > 8 * query.shape[1]:
        return attend_in_pieces(attention, query, memory)
    return attention(query, memory, memory, need_weights=False)[0]


def attend_in_pieces(attention: nn.MultiheadAttention, query: Tensor, memory: Tensor) -> Tensor:
    """Plain attention over a few (sample, head) pairs at a time, whose weights are made again in the backward pass.

    Args:
        attention: ``batch_first``, with biases.
        query: (B, P, C). memory: (B, K, C), keys and values.
    """
    heads, dropout = attention.num_heads, attention.dropout if attention.training else 0.0
    q, k, v = (F.linear(x, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1)  # (B * heads, P or K, C / heads)
               for x, weight, bias in zip((query, memory, memory), attention.in_proj_weight.chunk(3),
                                          attention.in_proj_bias.chunk(3), strict=True))
    pairs = max(1, WEIGHTS_AT_ONCE // (q.shape[1] * k.shape[1]))
    pieces = [checkpoint(_plain_attention, *piece, dropout, use_reentrant=False)
              for piece in zip(q.split(pairs), k.split(pairs), v.split(pairs), strict=True)]
    found = torch.cat(pieces).unflatten(0, (-1, heads)).transpose(1, 2).flatten(2)
    return attention.out_proj(found)


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
