"""Augmentation of the lidar frame: one rotation, scale and translation, and flips, followed by points, radar, boxes and maps.

``lidar_aug_matrix`` (augmented_from_lidar, 4x4 float32) starts as the identity; every step multiplies it from the left.
"""
from __future__ import annotations

from typing import Any, Dict, Sequence, Union

import numpy as np

from ...geometry.transforms import bev_flip, bev_rotation_scale_translation
from ...registry import PIPELINES
from .common import lidar_aug_matrix, transform_boxes, transform_scene_points


def apply_to_scene(data: Dict[str, Any], matrix: np.ndarray) -> None:
    """Move points, radar and boxes (each may be absent) by ``matrix`` and record it in ``lidar_aug_matrix``."""
    for key in ('points', 'radar'):
        if data.get(key) is not None:
            data[key] = transform_scene_points(data[key], matrix, matrix[:3, :3])
    if data.get('gt_bboxes_3d') is not None:
        data['gt_bboxes_3d'] = transform_boxes(data['gt_bboxes_3d'], matrix)
    data['lidar_aug_matrix'] = (matrix @ lidar_aug_matrix(data).astype(np.float64)).astype(np.float32)


@PIPELINES.register_module()
class GlobalRotScaleTrans:
    """Turn, translate and scale the scene by one random draw; in test mode nothing moves and nothing is drawn.

    Draw order from numpy's global generator: scale ~ U(resize_lim), angle ~ U(rot_lim), x, y, z ~ N(0, trans_lim).
    The scene is turned clockwise by the angle, then translated, then scaled (translation included).

    Args:
        resize_lim: (low, high) scale factors, > 0.
        rot_lim: (low, high) angles in radians.
        trans_lim: standard deviation in metres, one for all axes or three.
        is_train: whether to draw.
    """

    def __init__(self, resize_lim: Sequence[float], rot_lim: Sequence[float], trans_lim: Union[float, Sequence[float]],
                 is_train: bool):
        if len(resize_lim) != 2 or len(rot_lim) != 2:
            raise ValueError(f'GlobalRotScaleTrans: resize_lim and rot_lim are (low, high), got {resize_lim}, {rot_lim}')
        if min(resize_lim) <= 0:
            raise ValueError(f'GlobalRotScaleTrans: resize_lim must be positive, got {resize_lim}')
        self.resize_lim = tuple(resize_lim)
        self.rot_lim = tuple(rot_lim)
        self.trans_lim = np.broadcast_to(np.asarray(trans_lim, dtype=np.float64), (3,))
        self.is_train = is_train

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        if not self.is_train:
            data['lidar_aug_matrix'] = lidar_aug_matrix(data)
            return data
        if 'gt_masks_bev' in data:
            raise ValueError('GlobalRotScaleTrans must come before LoadBEVSegmentation: map labels are already drawn and '
                             'would not follow the augmentation')
        scale = np.random.uniform(*self.resize_lim)
        angle = np.random.uniform(*self.rot_lim)
        translation = [np.random.normal(0, std) for std in self.trans_lim]
        apply_to_scene(data, bev_rotation_scale_translation(angle, scale, translation))
        return data


@PIPELINES.register_module()
class RandomFlip3D:
    """Flip the scene along y ("horizontal") and along x ("vertical"), each with probability 1/2.

    Draw order: horizontal, vertical. Map labels that are already loaded are mirrored with the scene; that needs a range
    that is symmetric about zero on the flipped axis, so for other ranges LoadBEVSegmentation must come after this step.
    """

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        horizontal = bool(np.random.choice([0, 1]))
        vertical = bool(np.random.choice([0, 1]))
        apply_to_scene(data, bev_flip(horizontal, vertical))
        data['pcd_horizontal_flip'] = bool(data.get('pcd_horizontal_flip', False)) != horizontal
        data['pcd_vertical_flip'] = bool(data.get('pcd_vertical_flip', False)) != vertical
        if data.get('gt_masks_bev') is not None:
            masks = data['gt_masks_bev']  # (C, X, Y)
            for flipped, axis, name in ((horizontal, 2, 'y'), (vertical, 1, 'x')):
                if flipped:
                    self._check_symmetric(data, name)
                    masks = np.flip(masks, axis)
            data['gt_masks_bev'] = np.ascontiguousarray(masks)
        return data

    @staticmethod
    def _check_symmetric(data: Dict[str, Any], name: str) -> None:
        grid = data.get('bev_grid')
        if grid is None:
            return
        axis = getattr(grid, name)
        if abs(axis.lo + axis.hi) > 1e-6 * axis.length:
            raise ValueError(f'RandomFlip3D: map labels cover {name} [{axis.lo:g}, {axis.hi:g}] m, which is not symmetric, so '
                             f'they cannot be mirrored; put LoadBEVSegmentation after RandomFlip3D')
