"""Radar pillar encoder.

Letters: V pillars, M point slots per pillar, F radar features (x, y, z first), C channels.
"""
from __future__ import annotations

from typing import Optional, Sequence

import torch
from torch import nn

from ...geometry.on_device import constant
from ...registry import MODELS
from .pillars import PillarBackbone, PointLayer, filled_slots, pillar_offsets


@MODELS.register_module()
class RadarFeatureNet(nn.Module):
    """Features of each radar pillar: x, y, z normalised by the range, plus the offset from the pillar's centre (2).

    All layers keep their full width and see single points; the last one's maximum over the slots is returned.

    Args:
        in_channels: F.
        feat_channels: channels after each layer.
        voxel_size, point_cloud_range: metres; the pillar grid and the bounds that x, y, z are normalised with.
        with_distance: accepted for old configurations, has no effect (as in the models that published it).
        norm_cfg: norm layer (default BN1d, eps 1e-3, momentum 0.01).
    """

    def __init__(self, in_channels: int = 4, feat_channels: Sequence[int] = (64, ), with_distance: bool = False,
                 voxel_size: Sequence[float] = (0.2, 0.2, 4), point_cloud_range: Sequence[float] = (0, -40, -3, 70.4, 40, 1),
                 norm_cfg: Optional[dict] = None):
        super().__init__()
        if not feat_channels:
            raise ValueError('RadarFeatureNet: feat_channels must name at least one layer')
        self.in_channels = in_channels
        self.voxel_size, self.point_cloud_range = tuple(voxel_size), tuple(point_cloud_range)
        widths = [in_channels + 2, *feat_channels]
        self.rfn_layers = nn.ModuleList(PointLayer(a, b, norm_cfg) for a, b in zip(widths[:-1], widths[1:], strict=True))

    def forward(self, features: torch.Tensor, sizes: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        """Features (V, M, F), points per pillar (V,), coords (V, 4) -> (V, C)."""
        bounds = constant(self.point_cloud_range, features)
        position = (features[..., :3] - bounds[:3]) / (bounds[3:] - bounds[:3])
        offsets = pillar_offsets(features, coords, self.voxel_size, self.point_cloud_range)
        x = torch.cat([position, features[..., 3:], offsets], -1) * filled_slots(sizes, features.shape[1])
        # Unknown radar attributes are NaN in the files; they count as zero.
        x = torch.nan_to_num(x)
        for layer in self.rfn_layers:
            x = layer(x)
        return x.max(1).values


@MODELS.register_module()
class RadarEncoder(PillarBackbone):
    """Radar points -> BEV map (``pts_voxel_encoder``: RadarFeatureNet, ``pts_middle_encoder``: PointPillarsScatter).

    ``pts_bev_encoder`` optionally names a further backbone on the BEV map.
    """
