"""Points drawn into the cameras' depth maps.

Letters: B batch, N cameras, P points, F point features, H/W image size in pixels, C channels of the depth map.
Nothing here changes its inputs.
"""
from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch

MIN_DEPTH = 1e-5  # metres; the nearest depth that is still in front of the camera
MAX_DEPTH = 1e5


def affine(matrix: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Apply (..., 3, 4) matrices to (..., 3) points, as float32 sums (a matrix product could run in TF32 on a GPU)."""
    x, y, z = points.unbind(-1)
    columns = matrix.unbind(-1)
    return columns[0] * x[..., None] + columns[1] * y[..., None] + columns[2] * z[..., None] + columns[3]


def project(points: torch.Tensor, lidar2image: torch.Tensor, img_aug_matrix: torch.Tensor,
            lidar_aug_matrix: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Pixel positions and depths of points in every camera.

    Args:
        points: (P, >= 3), x, y, z in the augmented lidar frame.
        lidar2image: (N, 4, 4) original lidar frame -> (u * depth, v * depth, depth).
        img_aug_matrix: (N, 4, 4) original -> augmented pixels, acts on (u, v, depth).
        lidar_aug_matrix: (4, 4) original -> augmented lidar frame.

    Returns:
        (N, P, 2) positions (u, v) in augmented pixels, and (N, P) depths in metres, negative behind the camera.
    """
    image_from_points = (lidar2image.double() @ torch.linalg.inv(lidar_aug_matrix.double())).float()  # (N, 4, 4)
    xyz = affine(image_from_points[:, None, :3], points[None, :, :3].float())  # (N, P, 3)
    depth = xyz[..., 2]
    visible = depth.clamp(MIN_DEPTH, MAX_DEPTH)
    uvd = torch.cat([xyz[..., :2] / visible[..., None], visible[..., None]], -1)
    return affine(img_aug_matrix[:, None, :3].float(), uvd)[..., :2], depth


def one_per_pixel(pixel: torch.Tensor, depth: Optional[torch.Tensor]) -> torch.Tensor:
    """Indices of one entry per distinct ``pixel`` (K,): the smallest ``depth``, or the last entry if ``depth`` is None.

    The result does not depend on the device or on the run: only stable sorts are used.
    """
    if depth is None:
        order = torch.argsort(pixel, stable=True)
        ranked = pixel[order]
        chosen = torch.ones_like(ranked, dtype=torch.bool)
        chosen[:-1] = ranked[1:] != ranked[:-1]
    else:
        order = torch.argsort(depth, stable=True)
        order = order[torch.argsort(pixel[order], stable=True)]
        ranked = pixel[order]
        chosen = torch.ones_like(ranked, dtype=torch.bool)
        chosen[1:] = ranked[1:] != ranked[:-1]
    return order[chosen]


def expand_heights(points: torch.Tensor) -> torch.Tensor:
    """Each point (radar: no height of its own) repeated at z = 0.25, 0.5 ... 2.0 m: (P, F) -> (8 P, F)."""
    heights = torch.arange(1, 9, device=points.device, dtype=points.dtype) * 0.25
    repeated = points.repeat_interleave(len(heights), 0)
    return torch.cat([repeated[:, :2], heights.repeat(len(points))[:, None], repeated[:, 3:]], 1)


def draw_depth(points: torch.Tensor, lidar2image: torch.Tensor, img_aug_matrix: torch.Tensor,
               lidar_aug_matrix: torch.Tensor, image_size: Sequence[int], bins: Optional[Tuple[float, float, int]] = None,
               features: bool = False, compat: Optional[str] = None) -> torch.Tensor:
    """Depth maps of one sample.

    Args:
        points: (P, F); P may be 0. Points whose position is NaN are left out.
        lidar2image, img_aug_matrix, lidar_aug_matrix: as in :func:`project`.
        image_size: (H, W) of the augmented images.
        bins: None for one channel in metres; ``(lower bound, step, D)`` for D channels that are 1 where a point lies in
            that depth bin (nearer and farther points count for the first and the last bin).
        features: append the F features of the point that is drawn.
        compat: ``'reference'``: the last point of a pixel wins instead of the nearest one; points behind the camera that
            fall on the image are drawn at 1e-5 m instead of left out; bins are counted in whole metres from zero;
            appended x, y, z have the augmentation's translation subtracted (there the points are changed in place).

    Returns:
        (N, C, H, W) float32, 0 where no point falls. C = 1 or D, plus F.
    """
    height, width = image_size
    old = compat == 'reference'
    points = points.float()
    uv, depth = project(points, lidar2image, img_aug_matrix, lidar_aug_matrix)
    u, v = uv.unbind(-1)
    inside = (u >= 0) & (u < width) & (v >= 0) & (v < height)
    if not old:
        inside &= depth > MIN_DEPTH
    camera, index = inside.nonzero(as_tuple=True)
    u, v, depth = u[inside].long(), v[inside].long(), depth[inside]
    if old:
        depth = depth.clamp(MIN_DEPTH, MAX_DEPTH)
    pixel = (camera * height + v) * width + u
    kept = one_per_pixel(pixel, None if old else depth)

    channels = 1 if bins is None else bins[2]
    out = points.new_zeros(lidar2image.shape[0], channels + (points.shape[1] if features else 0), height, width)
    if bins is None:
        out[camera[kept], 0, v[kept], u[kept]] = depth[kept]
    else:
        lower, step, count = (0.0, 1.0, bins[2]) if old else bins
        cell = ((depth - lower) / step).clamp(0, count - 1).long()
        out[camera, cell, v, u] = 1.0
    if features:
        values = points
        if old:
            values = torch.cat([points[:, :3] - lidar_aug_matrix[:3, 3].float(), points[:, 3:]], 1)
        out[camera[kept], channels:, v[kept], u[kept]] = values[index[kept]]
    return out
