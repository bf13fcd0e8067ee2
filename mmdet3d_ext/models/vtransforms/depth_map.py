"""Points drawn into the cameras' depth maps.

Letters: B batch, N cameras, P points, F point features, H/W image size in pixels, C channels of the depth map.
Nothing here changes its inputs.
"""
from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch

MIN_DEPTH = 1e-5  # metres; the nearest depth that is still in front of the camera
MAX_DEPTH = 1e5
# Points on no image go to entries behind the last pixel. Five of six points see a camera from outside: in a single entry they would
# queue for one address (1.5 ms for 323,000 points on an H200).
ASIDE = 4096


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
    image_from_points = (lidar2image.double() @ torch.linalg.inv_ex(lidar_aug_matrix.double()).inverse).float()  # (N, 4, 4)
    xyz = affine(image_from_points[:, None, :3], points[None, :, :3].float())  # (N, P, 3)
    depth = xyz[..., 2]
    visible = depth.clamp(MIN_DEPTH, MAX_DEPTH)
    uvd = torch.cat([xyz[..., :2] / visible[..., None], visible[..., None]], -1)
    return affine(img_aug_matrix[:, None, :3].float(), uvd)[..., :2], depth


def drawn_points(pixel: torch.Tensor, count: int, depth: Optional[torch.Tensor]) -> torch.Tensor:
    """Which point each pixel shows: (count,) index along P, or P where there is none.

    Args:
        pixel: (N, P) number of the pixel on which a point falls, from ``count`` to ``count + ASIDE - 1`` where it falls on none.
        depth: (N, P): the nearest point is shown, the first of equally near ones; None: the last one.

    Only minima and maxima are scattered, so the result does not depend on the device or on the run, and nothing waits for the
    device: no list of hits is made whose length the host would have to know.
    """
    points = pixel.shape[-1]
    flat, index = pixel.flatten(), torch.arange(points, device=pixel.device).expand_as(pixel).flatten()
    if depth is None:
        last = index.new_full((count + ASIDE,), -1).scatter_reduce_(0, flat, index, 'amax')[:count]
        return torch.where(last < 0, points, last)
    nearest = nearest_depth(pixel, count, depth)
    index = torch.where(depth.flatten() == nearest[flat], index, points)
    return index.new_full((count + ASIDE,), points).scatter_reduce_(0, flat, index, 'amin')[:count]


def nearest_depth(pixel: torch.Tensor, count: int, depth: torch.Tensor) -> torch.Tensor:
    """(count + ASIDE,) smallest depth per pixel, infinity where no point falls; the last entries are of points outside."""
    return depth.new_full((count + ASIDE,), float('inf')).scatter_reduce_(0, pixel.flatten(), depth.flatten(), 'amin')


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
    cameras, extra = lidar2image.shape[0], points.shape[1] if features else 0
    channels, count = 1 if bins is None else bins[2], cameras * height * width
    if len(points) == 0:
        return points.new_zeros(cameras, channels + extra, height, width)
    uv, depth = project(points, lidar2image, img_aug_matrix, lidar_aug_matrix)
    u, v = uv.unbind(-1)
    inside = (u >= 0) & (u < width) & (v >= 0) & (v < height)
    if old:
        depth = depth.clamp(MIN_DEPTH, MAX_DEPTH)
    else:
        inside &= depth > MIN_DEPTH
    u, v, depth = (torch.where(inside, value, 0.0) for value in (u, v, depth))  # NaN has no whole number
    camera = torch.arange(cameras, device=points.device)[:, None]
    row = v.long() * width + u.long()
    aside = torch.arange(points.shape[0], device=points.device) % ASIDE
    pixel = torch.where(inside, camera * (height * width) + row, count + aside)

    chosen = drawn_points(pixel, count, None if old else depth) if features or (old and bins is None) else None
    if bins is not None:
        lower, step, cells = (0.0, 1.0, bins[2]) if old else bins
        cell = ((depth - lower) / step).clamp(0, cells - 1).long()
        hit = torch.where(inside, (camera * channels + cell) * (height * width) + row, count * channels + aside)
        drawn = points.new_zeros(count * channels + ASIDE).scatter_(0, hit.flatten(), 1.0)[:count * channels]
    elif old:
        drawn = torch.cat([depth, depth.new_zeros(cameras, 1)], 1)  # one more point, of depth 0, for pixels without any
        drawn = drawn.gather(1, chosen.view(cameras, -1))
    else:
        drawn = nearest_depth(pixel, count, depth)[:count]
        drawn = torch.where(drawn.isinf(), 0.0, drawn)
    drawn = drawn.view(cameras, channels, height, width)
    if not features:
        return drawn
    values = points
    if old:
        values = torch.cat([points[:, :3] - lidar_aug_matrix[:3, 3].float(), points[:, 3:]], 1)
    values = torch.cat([values, values.new_zeros(1, extra)]).t()  # (F, P + 1)
    shown = values[:, chosen].view(extra, cameras, height, width).transpose(0, 1)
    return torch.cat([drawn, shown], 1)
