"""One batch in the form that the real pipeline and collate give, made in memory: for benchmarks, memory measurements and tests
that need a configuration's shapes but no data set.

Letters: B batch, N cameras, P points, M boxes, X/Y map cells.
"""
from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional

import numpy as np
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes

from ...geometry.grid import BevGrid
from ...geometry.transforms import homogeneous
from .catalog import KINDS
from .schema import FULL_IMAGE, RIG
from .sensors.rig import calibrate

# Ten sweeps of the 32-beam scanner inside the range of the 0.075 m models: what one real cloud holds.
REAL_POINTS = 323_000
BOXES = 35  # per sample: nuScenes has 1.4 million boxes in 40,000 key frames
RADAR_POINTS = 1200  # of five radars and six sweeps
_KIND_OF = {'pedestrian': 'adult', 'traffic_cone': 'cone'}
_OTHER_SIZE = (4.0, 2.0, 1.6)  # m, of classes that the catalogue does not have


def lidar_cloud(count: int, generator: torch.Generator, columns: int = 5) -> torch.Tensor:
    """(count, columns) points of a 32-beam scanner over ten sweeps: flat ground, walls at random ranges, ego motion.

    Columns are x, y, z in metres, then random features in [0, 1).
    """
    azimuth = torch.rand(count, generator=generator) * 2 * math.pi
    beam = torch.randint(0, 32, (count,), generator=generator)
    elevation = torch.deg2rad(-30 + beam * (40 / 31))
    ground = torch.where(elevation < -0.02, 1.8 / torch.tan(-elevation).clamp(min=1e-3), torch.full_like(elevation, 80.0))
    wall = 4 + 60 * torch.rand(720, generator=generator)[(azimuth / (2 * math.pi) * 720).long().clamp(max=719)]
    reach = torch.minimum(ground, wall) + 0.02 * torch.randn(count, generator=generator)
    sweep = torch.randint(0, 10, (count,), generator=generator)
    points = torch.rand(count, columns, generator=generator)
    points[:, 0] = reach * torch.cos(azimuth)
    points[:, 1] = reach * torch.sin(azimuth) - 0.4 * sweep
    points[:, 2] = reach * torch.tan(elevation).clamp(-2, 2)
    return points


def random_batch(cfg: Mapping[str, Any], samples: int, device: torch.device, seed: int = 0, points: int = REAL_POINTS,
                 cloud: Optional[torch.Tensor] = None) -> Dict[str, Any]:
    """What ``model(**batch)`` takes in training and in evaluation, for the sensors and labels that ``cfg`` names.

    Args:
        cfg: a resolved configuration with the root keys of ``configs/default.yaml`` (``image_size, input_modality,
            point_cloud_range, object_classes, map_classes, map_bound, map_labels, depth_labels, use_dim, radar_use_dims``).
        samples: B.
        points: P per sample. ``cloud``: (P, >= use_dim) points to use for every sample instead of drawn ones, e.g. a real
            cloud; those outside ``point_cloud_range`` are left out.

    Returns:
        ``img`` (B, N, 3, H, W) standard normal; ``points``, ``radar`` list[B] of (P, F); matrices of a nuScenes-like rig;
        ``gt_bboxes_3d``, ``gt_labels_3d`` list[B]; ``gt_masks_bev`` (B, classes, X, Y) uint8; ``depths`` (B, N, H, W);
        ``metas`` list[B]. The same for equal arguments on every device.
    """
    draw = torch.Generator().manual_seed(seed)
    modality = cfg['input_modality']
    batch: Dict[str, Any] = {'metas': [dict(token=f'random-{seed}-{b}', sample_idx=b, timestamp=0.0, location='boston-seaport',
                                           box_type_3d=LiDARInstance3DBoxes) for b in range(samples)]}
    height, width = cfg['image_size']
    batch.update(_matrices(samples, height, width, seed))
    cameras = batch['camera_intrinsics'].shape[1]
    if modality.get('use_camera'):
        batch['img'] = torch.randn(samples, cameras, 3, height, width, generator=draw)
    use_dim = cfg['use_dim'] if isinstance(cfg['use_dim'], int) else len(cfg['use_dim'])
    bounds = cfg['point_cloud_range']
    if modality.get('use_lidar') or cfg.get('depth_labels'):
        if cloud is not None:  # as the pipeline's range filter leaves it
            lower, upper = torch.tensor(bounds[:3]), torch.tensor(bounds[3:])
            cloud = cloud[((cloud[:, :3] > lower) & (cloud[:, :3] < upper)).all(1), :use_dim].float()
        batch['points'] = [lidar_cloud(points, draw, use_dim) if cloud is None else cloud.clone() for _ in range(samples)]
    if modality.get('use_radar'):
        batch['radar'] = [_radar(len(cfg['radar_use_dims']), draw) for _ in range(samples)]
    batch['gt_bboxes_3d'], batch['gt_labels_3d'] = _boxes(samples, bounds, cfg['object_classes'], draw)
    if cfg.get('map_labels') and cfg.get('map_bound'):
        grid = BevGrid.parse(*cfg['map_bound'], 'map_bound')
        batch['gt_masks_bev'] = _maps(samples, len(cfg['map_classes']), *grid.shape, draw)
    if cfg.get('depth_labels'):
        seen = torch.rand(samples, cameras, height, width, generator=draw)
        batch['depths'] = torch.where(seen < 0.02, 1 + 58 * seen / 0.02, torch.zeros(()))
    return {key: _on(value, device) for key, value in batch.items()}


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_on(item, device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _matrices(samples: int, height: int, width: int, seed: int) -> Dict[str, torch.Tensor]:
    """The rig's matrices, each sample with a rig of its own; images scaled by 0.48 of full size and cropped at the top."""
    scale = max(width / FULL_IMAGE[0], height / FULL_IMAGE[1])
    resized = np.array(FULL_IMAGE) * scale
    image_aug = homogeneous()
    image_aug[0, 0] = image_aug[1, 1] = scale
    image_aug[0, 3], image_aug[1, 3] = -(resized[0] - width) / 2, -(resized[1] - height)
    collected: Dict[str, List[np.ndarray]] = {}
    for sample in range(samples):
        rig = calibrate(seed, f'random-{sample}', FULL_IMAGE)
        ego_from_lidar = homogeneous(rig['LIDAR_TOP'].matrix, rig['LIDAR_TOP'].translation)
        rows: Dict[str, List[np.ndarray]] = {}
        for channel in [name for name, mount in RIG.items() if mount.modality == 'camera']:
            camera = rig[channel]
            intrinsics = homogeneous(camera.intrinsic)
            ego_from_camera = homogeneous(camera.matrix, camera.translation)
            camera_from_lidar = np.linalg.inv(ego_from_camera) @ ego_from_lidar
            for key, matrix in (('camera_intrinsics', intrinsics), ('camera2ego', ego_from_camera),
                                ('lidar2camera', camera_from_lidar), ('camera2lidar', np.linalg.inv(camera_from_lidar)),
                                ('lidar2image', intrinsics @ camera_from_lidar), ('img_aug_matrix', image_aug)):
                rows.setdefault(key, []).append(matrix)
        for key, matrices in rows.items():
            collected.setdefault(key, []).append(np.stack(matrices))
        collected.setdefault('lidar2ego', []).append(ego_from_lidar)
        collected.setdefault('lidar_aug_matrix', []).append(np.eye(4))
    return {key: torch.from_numpy(np.stack(value)).float() for key, value in collected.items()}


def _boxes(samples: int, bounds, classes, draw: torch.Generator):
    sizes = torch.tensor([KINDS[_KIND_OF.get(name, name)].size if _KIND_OF.get(name, name) in KINDS else _OTHER_SIZE
                          for name in classes])
    boxes, labels = [], []
    for _ in range(samples):
        label = torch.randint(0, len(classes), (BOXES,), generator=draw)
        row = torch.empty(BOXES, 9)
        for axis in range(2):
            lo, hi = bounds[axis] * 0.9, bounds[axis + 3] * 0.9
            row[:, axis] = lo + (hi - lo) * torch.rand(BOXES, generator=draw)
        row[:, 2] = -1.8
        row[:, 3:6] = sizes[label] * (0.9 + 0.2 * torch.rand(BOXES, 3, generator=draw))
        row[:, 6] = (torch.rand(BOXES, generator=draw) * 2 - 1) * math.pi
        row[:, 7:] = torch.randn(BOXES, 2, generator=draw)
        boxes.append(LiDARInstance3DBoxes(row, box_dim=9))
        labels.append(label)
    return boxes, labels


def _maps(samples: int, classes: int, nx: int, ny: int, draw: torch.Generator) -> torch.Tensor:
    """Bands of different width and direction: wide ones for the first class, thin ones for the last."""
    x, y = torch.meshgrid(torch.linspace(-1, 1, nx), torch.linspace(-1, 1, ny), indexing='ij')
    masks = torch.zeros(samples, classes, nx, ny, dtype=torch.uint8)
    for b in range(samples):
        for c in range(classes):
            angle, offset = torch.rand(2, generator=draw).tolist()
            distance = (x * math.cos(math.pi * angle) + y * math.sin(math.pi * angle) - offset + 0.5).abs()
            masks[b, c] = distance < 0.4 / (1 + 3 * c)
    return masks


def _radar(columns: int, draw: torch.Generator) -> torch.Tensor:
    points = torch.randn(RADAR_POINTS, columns, generator=draw)
    points[:, :2] *= 25
    points[:, 2] = 0.5
    return points
