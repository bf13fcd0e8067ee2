"""The last two steps: values to tensors in mmcv ``DataContainer``s, and the choice of what goes into the batch.

What the batch holds (B samples, N cameras, C map classes; collated by ``mmcv.parallel.collate``):

========================  ==========================================  ===========================
key                       per sample                                  container
========================  ==========================================  ===========================
img                       (N, 3, H, W) float32, or uint8 (see below)   stack
points, radar             (P, F) float32                              list
gt_bboxes_3d              LiDARInstance3DBoxes                        list, stays on the CPU
gt_labels_3d              (M,) int64                                  list
gt_masks_bev              (C, X, Y) uint8                             stack
depths                    (N, H, W) float32                           stack
matrices                  (N, 4, 4) or (4, 4) float32                 stack
metas                     dict                                        list, stays on the CPU
========================  ==========================================  ===========================

``img`` is uint8 if ImageNormalize keeps it; the model then normalises it by ``img_norm_cfg`` of the metas.

Stacking never pads: images of different sizes have different matrices, and a padded border would be read as image.
"""
from __future__ import annotations

from typing import Any, Dict, Sequence

import numpy as np
import torch
from mmcv.parallel import DataContainer
from mmdet3d.core.bbox import BaseInstance3DBoxes
from mmdet3d.core.points import BasePoints

from ...registry import PIPELINES
from .common import as_rgb_array

# Absent where the sensor is not in use.
SENSOR_KEYS = ('img', 'points', 'radar', 'depths')
# Which step makes a key, for the message when it is missing.
MAKERS = {'gt_bboxes_3d': 'LoadAnnotations3D', 'gt_labels_3d': 'LoadAnnotations3D', 'gt_masks_bev': 'LoadBEVSegmentation',
          'img': 'LoadMultiViewImageFromFiles', 'points': 'LoadPointsFromFile', 'depths': 'GTDepth'}
CAMERA_MATRICES = ('camera_intrinsics', 'camera2ego', 'lidar2camera', 'camera2lidar', 'lidar2image', 'img_aug_matrix')
MATRICES = CAMERA_MATRICES + ('lidar2ego', 'lidar_aug_matrix')
META_LIS_KEYS = ('token', 'sample_idx', 'lidar_path', 'timestamp', 'location', 'filename', 'ori_shape', 'img_shape',
                 'lidar2image', 'pad_shape', 'scale_factor', 'img_norm_cfg', 'pcd_horizontal_flip', 'pcd_vertical_flip',
                 'box_mode_3d', 'box_type_3d', 'ego2global', 'lidar2ego')


def _stacked(value: Any) -> DataContainer:
    return DataContainer(torch.as_tensor(np.ascontiguousarray(value)) if not isinstance(value, torch.Tensor) else value,
                         stack=True, pad_dims=None)


def _image_tensor(image: Any) -> torch.Tensor:
    if isinstance(image, torch.Tensor):
        return image
    return torch.from_numpy(np.ascontiguousarray(as_rgb_array(image).transpose(2, 0, 1)))


def _image_batch(images: Any) -> torch.Tensor:
    """(N, 3, H, W)."""
    if isinstance(images, torch.Tensor):
        return images
    images = [_image_tensor(image) for image in images]
    sizes = {tuple(image.shape) for image in images}
    if len(sizes) > 1:
        raise ValueError(f'DefaultFormatBundle3D: images of one sample differ in size {sorted(sizes)}; bring them to one size with '
                         f'ImageAug3D')
    return torch.stack(images)


@PIPELINES.register_module()
class DefaultFormatBundle3D:
    """Values to tensors in ``DataContainer``s, as in the table above. Absent sensors and empty boxes pass through.

    Args:
        classes: detection classes (labels must index them).
        with_gt, with_label: whether boxes and labels are formatted; if off, they are left as they are.
    """

    def __init__(self, classes: Sequence[str], with_gt: bool = True, with_label: bool = True):
        self.classes = tuple(classes)
        self.with_gt = with_gt
        self.with_label = with_label

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        for key in ('points', 'radar'):
            if data.get(key) is None:
                continue
            if not isinstance(data[key], BasePoints):
                raise TypeError(f'DefaultFormatBundle3D: {key} must be loaded points, got {type(data[key]).__name__}; is its '
                                f'loading step missing?')
            data[key] = DataContainer(data[key].tensor.contiguous().float(), stack=False)
        if data.get('img') is not None:
            data['img'] = _stacked(_image_batch(data['img']))
        for key in ('gt_masks_bev', 'depths'):
            if data.get(key) is not None:
                data[key] = _stacked(data[key])
        if self.with_gt and isinstance(data.get('gt_bboxes_3d'), BaseInstance3DBoxes):
            data['gt_bboxes_3d'] = DataContainer(data['gt_bboxes_3d'], cpu_only=True)
        if self.with_gt and self.with_label:
            for key in ('gt_labels_3d', 'attr_labels'):
                if data.get(key) is not None:
                    labels = torch.as_tensor(np.asarray(data[key], dtype=np.int64))
                    if key == 'gt_labels_3d' and labels.numel() and int(labels.max()) >= len(self.classes):
                        raise ValueError(f'DefaultFormatBundle3D: label {int(labels.max())} does not index the '
                                         f'{len(self.classes)} classes {self.classes}')
                    data[key] = DataContainer(labels, stack=False)
        return data


@PIPELINES.register_module()
class Collect3D:
    """Pick ``keys`` and matrices for the batch, and ``metas`` for everything that describes the sample.

    A key of an absent sensor (img, points, radar, depths) is left out, and so is ground truth if ``data['test_mode']`` is
    true; any other absent key is an error.

    Args:
        keys: formatted values that go into the batch.
        meta_keys: 4x4 matrices, stacked to float32 (N, 4, 4) or (4, 4). An absent ``lidar_aug_matrix`` is the identity;
            camera matrices are left out for samples without cameras.
        meta_lis_keys: values that go, unchanged, into ``metas``.
    """

    def __init__(self, keys: Sequence[str], meta_keys: Sequence[str] = MATRICES, meta_lis_keys: Sequence[str] = META_LIS_KEYS):
        self.keys = tuple(keys)
        self.meta_keys = tuple(meta_keys)
        self.meta_lis_keys = tuple(meta_lis_keys)

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        batch: Dict[str, Any] = {}
        for key in self.keys:
            if key in self.meta_keys:
                continue
            if data.get(key) is None:
                if key in SENSOR_KEYS or data.get('test_mode'):
                    continue
                raise KeyError(f'Collect3D: sample {data.get("token", "?")} has no {key!r}; '
                               f'{MAKERS.get(key, "the step that makes it")} is missing in the pipeline')
            batch[key] = data[key]
        for key in self.meta_keys:
            value = data.get(key)
            if value is None:
                if key == 'lidar_aug_matrix':
                    value = np.eye(4)
                elif key in CAMERA_MATRICES and data.get('img') is None:
                    continue
                else:
                    raise KeyError(f'Collect3D: sample {data.get("token", "?")} has no matrix {key!r}')
            batch[key] = _stacked(np.asarray(value, dtype=np.float32))
        metas = {key: data[key] for key in self.meta_lis_keys if key in data}
        batch['metas'] = DataContainer(metas, cpu_only=True)
        return batch
