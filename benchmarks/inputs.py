"""Inputs of the operator benchmark: clouds with a LiDAR's density, and the frustum of a six-camera rig."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from mmdet3d_ext.datasets.synthetic import batch
from mmdet3d_ext.engine.benchmark import read_cloud


def lidar_cloud(count: int, device: str, seed: int = 0, columns: int = 5) -> torch.Tensor:
    """(count, columns) points of a 32-beam scanner; see :func:`mmdet3d_ext.datasets.synthetic.batch.lidar_cloud`."""
    return batch.lidar_cloud(count, torch.Generator().manual_seed(seed), columns).to(device)


def keyframe_cloud(device: str, sweeps: int = 10):
    """One real nuScenes sweep, ``sweeps`` times along a straight drive at 8 m/s; None where the file is not at hand."""
    roots = [os.environ.get('MMDET3D_EXT_SHARED'), Path(__file__).resolve().parents[2] / 'shared']
    for root in filter(None, roots):
        found = sorted(Path(root).glob('data/nuscenes_keyframe/*LIDAR_TOP*.bin'))
        if found:
            return read_cloud(str(found[0]), sweeps).to(device)
    return None


def frustum(batch: int, bins: int, height: int, width: int, device: str, cameras: int = 6, pitch: float = 0.01) -> torch.Tensor:
    """(B, N, D, H, W, 3) lidar-frame points of cameras that see 70 degrees (the back one 110), turned a little."""
    u = torch.linspace(-0.5, 0.5, width)
    v = torch.linspace(-0.5, 0.5, height)
    d = 1 + 59 * torch.arange(bins) / bins
    points = []
    for camera in range(cameras):
        tangent = math.tan(math.radians(55 if camera == 3 else 35))
        yaw = camera * 2 * math.pi / cameras
        x = d.view(-1, 1, 1).expand(bins, height, width)
        y = -2 * tangent * u.view(1, 1, -1) * x
        z = -2 * tangent * height / width * v.view(1, -1, 1) * x + pitch * x
        x = x - pitch * z
        points.append(torch.stack([x * math.cos(yaw) - y * math.sin(yaw), x * math.sin(yaw) + y * math.cos(yaw), z - 0.3], -1))
    geometry = torch.stack(points)
    turned = []
    for b in range(batch):  # each sample with its own BEV augmentation
        angle = 0.3 * b
        rotation = torch.tensor([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0], [0, 0, 1]])
        turned.append(geometry @ rotation.t())
    return torch.stack(turned).to(device)
