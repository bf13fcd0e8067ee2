"""PointPillars encoder in (x, y) order.

Letters: V pillars, M point slots per pillar, F point features, B batch, C channels, X/Y cells.
"""
from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from mmcv.cnn import build_norm_layer
from torch import nn
from torch.nn import functional as F

from ...geometry.on_device import constant
from ...registry import MODELS

NORM_CFG = {'type': 'BN1d', 'eps': 1e-3, 'momentum': 0.01}  # PointPillars' choice


def filled_slots(sizes: torch.Tensor, slots: int) -> torch.Tensor:
    """(V, M, 1) mask of the slots that hold a point, from the number of points per pillar (V,)."""
    return (torch.arange(slots, device=sizes.device)[None] < sizes[:, None])[..., None]


def pillar_offsets(points: torch.Tensor, coords: torch.Tensor, voxel_size: Sequence[float],
                   lower: Sequence[float]) -> torch.Tensor:
    """(V, M, 2) metres from the pillar's centre, from points (V, M, >=2) and coords (V, 4) = (batch, x, y, z)."""
    size = constant(voxel_size[:2], points)
    centre = (coords[:, 1:3].to(points.dtype)) * size + (size / 2 + constant(lower[:2], points))
    return points[..., :2] - centre[:, None]


class PointLayer(nn.Module):
    """Linear, norm and ReLU on every point slot; parameters ``linear`` and ``norm``."""

    def __init__(self, in_channels: int, out_channels: int, norm_cfg: Optional[dict] = None):
        super().__init__()
        self.linear = nn.Linear(in_channels, out_channels, bias=False)
        self.norm = build_norm_layer(dict(norm_cfg or NORM_CFG), out_channels)[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)  # (V, M, C)
        return F.relu(self.norm(x.flatten(0, 1)).view_as(x))


@MODELS.register_module()
class PillarFeatureNet(nn.Module):
    """Features of each pillar by a small PointNet (PointPillars, Lang et al. 2019).

    Point features are extended by the offset from the pillar's mean point (3) and from the pillar's centre (2), and
    optionally by the range (1). Every layer but the last appends the pillar's maximum to each point, so it has half
    the channels asked for; the last one returns the maximum over the slots.

    Args:
        in_channels: F.
        feat_channels: channels after each layer.
        with_distance: append the distance from the origin.
        voxel_size, point_cloud_range: metres; the pillar grid.
        norm_cfg: norm layer (default BN1d, eps 1e-3, momentum 0.01).
    """

    def __init__(self, in_channels: int = 4, feat_channels: Sequence[int] = (64, ), with_distance: bool = False,
                 voxel_size: Sequence[float] = (0.2, 0.2, 4), point_cloud_range: Sequence[float] = (0, -40, -3, 70.4, 40, 1),
                 norm_cfg: Optional[dict] = None):
        super().__init__()
        if not feat_channels:
            raise ValueError('PillarFeatureNet: feat_channels must name at least one layer')
        self.in_channels = in_channels
        self.with_distance = with_distance
        self.voxel_size, self.point_cloud_range = tuple(voxel_size), tuple(point_cloud_range)
        width = in_channels + 5 + int(with_distance)
        self.pfn_layers = nn.ModuleList()
        for i, channels in enumerate(feat_channels):
            last = i == len(feat_channels) - 1
            self.pfn_layers.append(PointLayer(width, channels if last else channels // 2, norm_cfg))
            width = channels

    def forward(self, features: torch.Tensor, sizes: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        """Features (V, M, F), points per pillar (V,), coords (V, 4) -> (V, C)."""
        mean = features[..., :3].sum(1, keepdim=True) / sizes.to(features.dtype).clamp(min=1).view(-1, 1, 1)
        parts = [features, features[..., :3] - mean,
                 pillar_offsets(features, coords, self.voxel_size, self.point_cloud_range)]
        if self.with_distance:
            parts.append(features[..., :3].norm(dim=2, keepdim=True))
        x = torch.cat(parts, -1) * filled_slots(sizes, features.shape[1])
        for i, layer in enumerate(self.pfn_layers):
            x = layer(x)
            largest = x.max(1, keepdim=True).values
            if i == len(self.pfn_layers) - 1:
                return largest.squeeze(1)
            x = torch.cat([x, largest.expand_as(x)], -1)


@MODELS.register_module()
class PointPillarsScatter(nn.Module):
    """Pillars -> dense BEV map (B, C, X, Y).

    Args:
        in_channels: C.
        output_shape: (X, Y) cells.
    """

    def __init__(self, in_channels: int = 64, output_shape: Sequence[int] = (512, 512)):
        super().__init__()
        self.in_channels = in_channels
        self.output_shape = tuple(int(n) for n in output_shape)

    @property
    def bev_shape(self) -> Tuple[int, int]:
        """(X, Y) cells of the BEV map."""
        return self.output_shape

    def forward(self, features: torch.Tensor, coords: torch.Tensor, batch_size: int) -> torch.Tensor:
        """Features (V, C), coords (V, 4) = (batch, x, y, z) -> (batch_size, C, X, Y), zero where no pillar is."""
        nx, ny = self.output_shape
        coords = coords.long()
        flat = (coords[:, 0] * nx + coords[:, 1]) * ny + coords[:, 2]
        canvas = features.new_zeros(batch_size * nx * ny, features.shape[1])
        canvas = canvas.index_copy(0, flat, features)
        return canvas.view(batch_size, nx, ny, -1).permute(0, 3, 1, 2).contiguous()


class PillarBackbone(nn.Module):
    """What the LiDAR and the radar pillar encoders share: voxel encoder, scatter, and how empty input is handled."""

    def __init__(self, pts_voxel_encoder: dict, pts_middle_encoder: dict, pts_bev_encoder: Optional[dict] = None):
        super().__init__()
        self.pts_voxel_encoder = MODELS.build(pts_voxel_encoder)
        self.pts_middle_encoder = MODELS.build(pts_middle_encoder)
        self.pts_bev_encoder = None if pts_bev_encoder is None else MODELS.build(pts_bev_encoder)

    @property
    def bev_shape(self) -> Optional[Tuple[int, int]]:
        """(X, Y) cells of the BEV map, if no further encoder follows the scatter."""
        return self.pts_middle_encoder.bev_shape if self.pts_bev_encoder is None else None

    def forward(self, features: torch.Tensor, coords: torch.Tensor, batch_size: int, sizes: torch.Tensor) -> torch.Tensor:
        """Encode a batch.

        Args:
            features: (V, M, F) point slots of each pillar; V may be 0.
            coords: (V, 4) integers (batch, x, y, z).
            batch_size: number of samples; never derived from ``coords``.
            sizes: (V,) points per pillar.

        Returns:
            (batch_size, C, X, Y).
        """
        if features.dim() != 3:
            raise ValueError(f'{type(self).__name__} needs the single points of each pillar (V, M, F), got '
                             f'{tuple(features.shape)}: set voxelize_reduce: false in its encoder')
        samples = batch_size
        if len(features) < 2:
            # Norm layers need two values and every rank needs the same graph: two empty pillars in a helper sample
            # behind the last one, which is cut off the result.
            features = torch.cat([features, features.new_zeros(2, *features.shape[1:])])
            helper = coords.new_zeros(2, 4)
            helper[:, 0], helper[1, 1] = batch_size, 1
            coords, sizes = torch.cat([coords, helper]), torch.cat([sizes, sizes.new_zeros(2)])
            samples += 1
        x = self.pts_voxel_encoder(features, sizes, coords)
        x = self.pts_middle_encoder(x, coords, samples)[:batch_size]
        return x if self.pts_bev_encoder is None else self.pts_bev_encoder(x)


@MODELS.register_module()
class PointPillarsEncoder(PillarBackbone):
    """LiDAR pillar encoder (``pts_voxel_encoder``: PillarFeatureNet, ``pts_middle_encoder``: PointPillarsScatter)."""

    def __init__(self, pts_voxel_encoder: dict, pts_middle_encoder: dict):
        super().__init__(pts_voxel_encoder, pts_middle_encoder)
