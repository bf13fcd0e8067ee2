"""Slow twins of the operators in plain torch: test oracles, never used by the package. Letters as in mmdet3d_ext/ops."""

from __future__ import annotations

import torch


def voxel_coords(points, lower, step, cells):
    """(P, 3) int32 xyz, -1 rows outside; float32 arithmetic."""
    lower, step = (torch.tensor(v, dtype=torch.float32, device=points.device) for v in (lower, step))
    at = torch.floor((points[:, :3].float() - lower) / step)
    inside = ((at >= 0) & (at < torch.tensor(cells, dtype=torch.float32, device=points.device))).all(1)
    return torch.where(inside[:, None], torch.nan_to_num(at, posinf=-1, neginf=-1).clamp(-1, 2**30), torch.tensor(-1.0)).int()


def hard_voxelize(points, lower, step, cells, max_num_points, max_voxels):
    """One point after the other, as the definition says."""
    coords = voxel_coords(points, lower, step, cells).tolist()
    number, members = {}, []
    for p, at in enumerate(map(tuple, coords)):
        if at[0] < 0:
            continue
        if at not in number:
            if max_voxels >= 0 and len(members) >= max_voxels:
                continue
            number[at] = len(members)
            members.append([])
        if len(members[number[at]]) < max_num_points:
            members[number[at]].append(p)
    voxels = points.new_zeros((len(members), max_num_points, points.shape[1]))
    for v, rows in enumerate(members):
        voxels[v, : len(rows)] = points[rows]
    return (
        voxels,
        torch.tensor(list(number), dtype=torch.int32).reshape(-1, 3),
        torch.tensor([len(rows) for rows in members], dtype=torch.int32),
    )


def point_to_voxel(feats, coords, reduce):
    """(features, coords, point2voxel, counts), differentiable."""
    kept = (coords >= 0).all(1)
    voxel_coords, inverse, counts = torch.unique(coords[kept], dim=0, sorted=True, return_inverse=True, return_counts=True)
    point2voxel = torch.full((len(coords),), -1, dtype=torch.int32, device=coords.device)
    point2voxel[kept] = inverse.int()
    points = kept.nonzero()[:, 0]
    if reduce == 'max':
        out = []
        for v in range(len(voxel_coords)):
            rows = feats[points[inverse == v]]
            # The first of equal maxima; NaN above all.
            order = torch.where(rows.isnan(), torch.inf, rows.detach()) if rows.isnan().any() else rows.detach()
            nan_first = rows.isnan().any(0)
            pick = torch.where(nan_first, rows.isnan().int().argmax(0), (order == order.amax(0)).int().argmax(0))
            out.append(rows.gather(0, pick[None])[0])
        result = torch.stack(out) if out else feats[:0]
    else:
        result = feats.new_zeros((len(voxel_coords), feats.shape[1])).index_add(0, inverse, feats[points])
        if reduce == 'mean':
            result = result / counts[:, None].to(result.dtype)
    return result, voxel_coords, point2voxel, counts.int()


def cell_index(geometry, lower, step, cells, truncate=False):
    """(P, 4) long (x, y, z, batch) and which points are inside."""
    lower, step = (torch.tensor(v, dtype=torch.float32, device=geometry.device) for v in (lower, step))
    at = (geometry - lower) / step
    at = torch.trunc(at) if truncate else torch.floor(at)
    inside = ((at >= 0) & (at < torch.tensor(cells, dtype=torch.float32, device=geometry.device))).all(-1)
    at = torch.where(inside[..., None], at, torch.zeros(())).long()
    sample = (
        torch.arange(len(geometry), device=geometry.device).view(-1, *[1] * (geometry.dim() - 2)).expand(geometry.shape[:-1])
    )
    return torch.cat([at.flatten(0, -2), sample.reshape(-1, 1)], 1), inside.flatten()


def bev_pool(feats, coords, B, nz, nx, ny):
    """(B, C, nz, nx, ny), differentiable."""
    x, y, z, b = coords.unbind(1)
    inside = (x >= 0) & (x < nx) & (y >= 0) & (y < ny) & (z >= 0) & (z < nz) & (b >= 0) & (b < B)
    flat = (((b * nz + z) * nx + x) * ny + y)[inside]
    pooled = feats.new_zeros((B * nz * nx * ny, feats.shape[1])).index_add(0, flat, feats[inside])
    return pooled.view(B, nz, nx, ny, feats.shape[1]).permute(0, 4, 1, 2, 3)


def lift_splat(depth, context, geometry, lower, step, cells, truncate=False):
    """(B, C * nz, nx, ny) by materialising depth x context, differentiable."""
    lifted = depth.unsqueeze(-1) * context.unsqueeze(2).permute(0, 1, 2, 4, 5, 3)  # B N D H W C
    coords, inside = cell_index(geometry, lower, step, cells, truncate)
    nx, ny, nz = cells
    pooled = bev_pool(lifted.reshape(-1, lifted.shape[-1])[inside], coords[inside], len(depth), nz, nx, ny)
    return torch.cat(pooled.unbind(2), 1)


def group_norm_relu(x, groups, weight, bias, eps=1e-5, relu=True):
    """Group by group in the type of x, any order in memory, differentiable; a group may hold a single value."""
    parts = x.reshape(len(x), groups, -1)
    mean = parts.mean(2, keepdim=True)
    normed = (parts - mean) / ((parts - mean).square().mean(2, keepdim=True) + eps).sqrt()
    shape = (1, -1, *[1] * (x.dim() - 2))
    out = normed.reshape(x.shape) * weight.reshape(shape) + bias.reshape(shape)
    return out.relu() if relu else out
