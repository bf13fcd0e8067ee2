"""Loading of camera images and annotations (points, radar and maps have files of their own)."""
from __future__ import annotations

from typing import Any, Dict

import numpy as np

from ...registry import PIPELINES
from .common import CREATE_DATA, require
from .images import EncodedImage, open_image, read_image


@PIPELINES.register_module()
class LoadMultiViewImageFromFiles:
    """Decode the N camera images named by ``image_paths``.

    Sets ``img`` (list of N images (H, W, 3) uint8 RGB, not resized), ``filename``, ``ori_shape`` / ``img_shape`` /
    ``pad_shape`` as (W, H) of the first image, ``scale_factor`` and ``img_aug_matrix`` (N identities, 4x4 float32).
    A sample without ``image_paths`` (no camera in use) passes unchanged.

    Args:
        reduced: let :class:`ImageAug3D` decode JPEG files to a half (a quarter, an eighth) of their size where the new size is
            not larger than that. Less work; pixels differ by about one grey level on average from those of the whole image.
        to_float32, color_type: accepted because configurations write them; images are always RGB uint8, and become
            float where they are normalised, after resizing.
    """

    def __init__(self, to_float32: bool = False, color_type: str = 'unchanged', reduced: bool = False):
        if color_type not in ('unchanged', 'color'):
            raise ValueError(f"LoadMultiViewImageFromFiles: color_type must be 'unchanged' or 'color', got {color_type!r}")
        self.to_float32 = to_float32
        self.color_type = color_type
        self.reduced = reduced

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        paths = data.get('image_paths')
        if not paths:
            return data
        images = [(open_image if self.reduced else read_image)(path) for path in paths]
        data['filename'] = list(paths)
        data['img'] = images
        first = images[0]
        for key in ('ori_shape', 'img_shape', 'pad_shape'):
            data[key] = first.size if isinstance(first, EncodedImage) else (first.shape[1], first.shape[0])
        data['scale_factor'] = 1.0
        data['img_aug_matrix'] = [np.eye(4, dtype=np.float32) for _ in images]
        return data


@PIPELINES.register_module()
class LoadAnnotations3D:
    """Copy boxes and labels from ``ann_info`` to ``gt_bboxes_3d`` and ``gt_labels_3d`` (copies: augmentation may change them).

    A sample without ``ann_info`` is an error in training and passes unchanged when ``data['test_mode']`` is true (the
    test split has no annotations).

    Args:
        with_bbox_3d, with_label_3d, with_attr_label: what to copy.
        with_bbox, with_label, with_mask, with_seg, with_bbox_depth, poly2mask: 2-D annotations of mmdet3d's step of this
            name; nuScenes info files hold none, so asking for one is an error.
    """

    def __init__(self, with_bbox_3d: bool = True, with_label_3d: bool = True, with_attr_label: bool = False,
                 with_bbox: bool = False, with_label: bool = False, with_mask: bool = False, with_seg: bool = False,
                 with_bbox_depth: bool = False, poly2mask: bool = True):
        for name, wanted in (('with_bbox', with_bbox), ('with_label', with_label), ('with_mask', with_mask),
                             ('with_seg', with_seg), ('with_bbox_depth', with_bbox_depth)):
            if wanted:
                raise ValueError(f'LoadAnnotations3D: {name}=True is not supported, the info files hold 3-D annotations only')
        self.with_bbox_3d = with_bbox_3d
        self.with_label_3d = with_label_3d
        self.with_attr_label = with_attr_label

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        if data.get('ann_info') is None and data.get('test_mode'):
            return data
        annotations = require(data, 'ann_info', self, f'the info file holds no annotations; fill it with: {CREATE_DATA}')
        if self.with_bbox_3d:
            data['gt_bboxes_3d'] = annotations['gt_bboxes_3d'].clone()
            if 'bbox3d_fields' in data:
                data['bbox3d_fields'].append('gt_bboxes_3d')
        if self.with_label_3d:
            data['gt_labels_3d'] = np.array(annotations['gt_labels_3d'], dtype=np.int64)
        if self.with_attr_label:
            if 'attr_labels' not in annotations:
                raise KeyError(f'LoadAnnotations3D: sample {data.get("token", "?")} has no attr_labels')
            data['attr_labels'] = np.array(annotations['attr_labels'], dtype=np.int64)
        return data
