"""What the operators are compared with: mmcv's ops, and plain-torch forms of what BEV models otherwise do.

None of this is used by the package.
"""

from __future__ import annotations

import torch


def torch_point_to_voxel(feats, coords, reduce):
    """Unique rows, then a scatter reduction: how a model does it without a special op."""
    kept = (coords >= 0).all(1)
    voxels, inverse = torch.unique(coords[kept], dim=0, return_inverse=True)
    index = inverse[:, None].expand(-1, feats.shape[1])
    out = feats.new_zeros((len(voxels), feats.shape[1]))
    return out.scatter_reduce(0, index, feats[kept], {'sum': 'sum', 'mean': 'mean', 'max': 'amax'}[reduce], include_self=False)


def torch_voxel_coords(points, size, limits):
    """The cell of each point, -1 -1 -1 outside."""
    lower, step = (torch.tensor(v, dtype=torch.float32, device=points.device) for v in (limits[:3], size))
    cells = ((torch.tensor(limits[3:], device=points.device) - lower) / step).round()
    at = torch.floor((points[:, :3] - lower) / step)
    inside = ((at >= 0) & (at < cells)).all(1, keepdim=True)
    return torch.where(inside, at, torch.full((), -1.0, device=points.device)).int()


def torch_hard_voxelize(points, size, limits, max_num_points, max_voxels):
    """Deterministic hard voxelisation from sorts and scans."""
    lower, step = (torch.tensor(v, dtype=torch.float32, device=points.device) for v in (limits[:3], size))
    cells = ((torch.tensor(limits[3:], device=points.device) - lower) / step).round().long()
    at = torch.floor((points[:, :3] - lower) / step).long()
    inside = ((at >= 0) & (at < cells)).all(1)
    rows, at = points[inside], at[inside]
    key = (at[:, 2] * cells[1] + at[:, 1]) * cells[0] + at[:, 0]
    key, order = key.sort(stable=True)
    head = torch.ones_like(key, dtype=torch.bool)
    head[1:] = key[1:] != key[:-1]
    position = torch.arange(len(key), device=key.device)
    start = torch.where(head, position, torch.zeros_like(position)).cummax(0).values
    first = torch.zeros_like(key)
    first[order[head]] = 1
    number = (first.cumsum(0) - 1)[order[start]]
    nth = position - start
    keep = (number < max_voxels) & (nth < max_num_points)
    voxels = points.new_zeros((min(int(first.sum()), max_voxels), max_num_points, points.shape[1]))
    voxels[number[keep], nth[keep]] = rows[order[keep]]
    counts = torch.zeros(len(voxels), dtype=torch.int32, device=points.device)
    counts.scatter_reduce_(0, number[keep], (nth[keep] + 1).int(), 'amax')
    coords = at.new_zeros((len(voxels), 3))
    coords[number[head & (number < max_voxels)]] = at[order[head & (number < max_voxels)]]
    return voxels, coords.int(), counts


def materialised_lift_splat(depth, context, geometry, bounds):
    """Form depth x context, drop points outside, sort by cell, pool: the usual lift-splat."""
    lower = torch.tensor([b[0] for b in bounds], device=depth.device)
    step = torch.tensor([b[2] for b in bounds], device=depth.device)
    nx, ny, nz = (int(round((b[1] - b[0]) / b[2])) for b in bounds)
    batch, channels = depth.shape[0], context.shape[2]
    lifted = depth.unsqueeze(2) * context.unsqueeze(3)  # B N C D H W
    lifted = lifted.permute(0, 1, 3, 4, 5, 2).reshape(-1, channels)
    at = torch.floor((geometry - lower) / step).long().view(-1, 3)
    sample = torch.arange(batch, device=depth.device).repeat_interleave(at.shape[0] // batch)
    inside = (at >= 0).all(1) & (at[:, 0] < nx) & (at[:, 1] < ny) & (at[:, 2] < nz)
    lifted, at, sample = lifted[inside], at[inside], sample[inside]
    rank = ((sample * nz + at[:, 2]) * nx + at[:, 0]) * ny + at[:, 1]
    order = rank.argsort()
    lifted, rank = lifted[order], rank[order]
    pooled = lifted.new_zeros((batch * nz * nx * ny, channels)).index_add(0, rank, lifted)
    pooled = pooled.view(batch, nz, nx, ny, channels).permute(0, 1, 4, 2, 3)
    return pooled.reshape(batch, nz * channels, nx, ny).contiguous()


def torch_bev_pool(feats, coords, batch, nz, nx, ny):
    """Drop what lies outside, add up the rest by cell."""
    x, y, z, b = coords.unbind(1)
    inside = (x >= 0) & (x < nx) & (y >= 0) & (y < ny) & (z >= 0) & (z < nz) & (b >= 0) & (b < batch)
    flat = (((b * nz + z) * nx + x) * ny + y)[inside]
    pooled = feats.new_zeros((batch * nz * nx * ny, feats.shape[1])).index_add(0, flat, feats[inside])
    return pooled.view(batch, nz, nx, ny, feats.shape[1]).permute(0, 4, 1, 2, 3).contiguous()


def torch_group_norm_relu(x, groups, weight, bias):
    """torch's own two operators, in the type of x."""
    return torch.nn.functional.group_norm(x, groups, weight.to(x.dtype), bias.to(x.dtype)).relu()


def mmcv_dynamic_scatter(feats, coords, reduce):
    """mmcv-full's dynamic_scatter; the coordinates must be of one sample."""
    from mmcv.ops.scatter_points import dynamic_scatter

    return dynamic_scatter(feats, coords, reduce)[0]


def mmcv_voxel_coords(points, size, limits):
    """mmcv-full's dynamic Voxelization."""
    from mmcv.ops.voxelize import voxelization

    return voxelization(points, size, limits, -1, -1)


def mmcv_hard_voxelize(points, size, limits, max_num_points, max_voxels):
    """mmcv-full's deterministic Voxelization."""
    from mmcv.ops.voxelize import voxelization

    return voxelization(points, size, limits, max_num_points, max_voxels, True)
