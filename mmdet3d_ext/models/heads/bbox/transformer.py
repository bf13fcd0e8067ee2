"""The transformer decoder layer of TransFusion: self-attention among queries, cross-attention into the BEV map."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        attended = self.multihead_attn(query + query_embed, memory, memory, need_weights=False)[0]
        query = self.norm2(query + self.dropout2(attended))
        hidden = self.linear2(self.dropout(self.activation(self.linear1(query))))
        return self.norm3(query + self.dropout3(hidden))
