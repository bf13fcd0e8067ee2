"""Small helpers shared by the pipeline steps."""
from __future__ import annotations

import warnings
from typing import Any, Mapping, Optional, Set

import cv2
import numpy as np
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from mmdet3d.core.points import BasePoints
from PIL import Image

CREATE_DATA = ('python tools/create_data.py nuscenes --root-path DATA_ROOT --out-dir DATA_ROOT --extra-tag nuscenes '
               '--version v1.0-trainval|v1.0-mini|v1.0-test')

_WARNED: Set[str] = set()


def warn_once(message: str) -> None:
    """A warning that each process shows once, however many epochs repeat its cause."""
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, stacklevel=3)


def check_compat(compat: Optional[str], owner: object) -> Optional[str]:
    """``compat`` if it is a known profile (``None`` or ``'reference'``)."""
    if compat not in (None, 'reference'):
        raise ValueError(f"{type(owner).__name__}: compat must be null or 'reference', got {compat!r}")
    return compat


def require(data: Mapping[str, Any], key: str, owner: object, remedy: str) -> Any:
    """``data[key]``, or a KeyError that names the step, the key, the sample and what to do."""
    if data.get(key) is None:
        raise KeyError(f'{type(owner).__name__}: sample {data.get("token", "?")} has no {key!r}; {remedy}')
    return data[key]


def lidar_aug_matrix(data: Mapping[str, Any]) -> np.ndarray:
    """``augmented_from_lidar`` (4, 4) float32 of this sample so far; the identity before any augmentation."""
    matrix = data.get('lidar_aug_matrix')
    return np.eye(4, dtype=np.float32) if matrix is None else np.asarray(matrix)


def as_rgb_array(image: Any) -> np.ndarray:
    """``(H, W, 3)`` array of a Pillow image (uint8) or of an array that is already one (no copy then)."""
    if isinstance(image, Image.Image):
        image = np.asarray(image if image.mode == 'RGB' else image.convert('RGB'))
    image = np.asarray(image)
    if image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f'an image must be (H, W, 3) RGB, got shape {image.shape}')
    return image


def move(points: torch.Tensor, matrix: np.ndarray) -> None:
    """Move (P, >= 3) float32 points by a 4x4 ``matrix``, in place.

    OpenCV's loop is several times faster than BLAS's product with a 3x3 matrix, and torch copies columns faster than numpy.
    """
    if len(points):
        xyz = points[:, :3].contiguous().numpy()
        points[:, :3] = torch.from_numpy(cv2.transform(xyz[None], np.asarray(matrix[:3], dtype=np.float32))[0])


def rows(tensor: torch.Tensor, which: np.ndarray) -> torch.Tensor:
    """The rows of a (P, F) CPU tensor that a mask (P,) or an array of indices names, in new memory.

    numpy moves whole rows; torch's own indexing moves value by value, several times slower.
    """
    array = tensor.numpy()
    return torch.from_numpy(np.compress(which, array, axis=0) if which.dtype == bool else np.take(array, which, axis=0))


def transform_scene_points(points: BasePoints, matrix: np.ndarray, linear: np.ndarray) -> BasePoints:
    """New points after a similarity ``matrix`` (4, 4); velocity columns named in ``attribute_dims`` turn by ``linear`` (3, 3).

    ``attribute_dims['velocity*'] = [column of vx, column of vy]`` (radar); lidar points have none.
    """
    tensor = points.tensor.clone()
    move(tensor, matrix)
    planar = torch.as_tensor(linear[:2, :2], dtype=tensor.dtype)
    for name, columns in (points.attribute_dims or {}).items():
        if name.startswith('velocity'):
            tensor[:, columns] = points.tensor[:, columns] @ planar.T
    return points.new_point(tensor)


def transform_boxes(boxes: LiDARInstance3DBoxes, matrix: np.ndarray) -> LiDARInstance3DBoxes:
    """New boxes after a similarity ``matrix`` (4, 4) about the z axis: rotation, uniform scale, flips and translation.

    Sizes and velocities scale; a mirrored matrix mirrors the heading. The heading direction (cos yaw, sin yaw) is carried
    through the matrix's planar part, so one rule serves turns and flips.
    """
    planar = np.asarray(matrix, dtype=np.float64)[:2, :2]
    scale = float(np.sqrt(abs(np.linalg.det(planar))))
    mirrored = np.linalg.det(planar) < 0
    # A planar similarity is scale * R(turn) (* diag(1, -1) if mirrored): a heading yaw becomes turn + yaw (turn - yaw).
    turn = float(np.arctan2(planar[1, 0], planar[0, 0]))
    source = boxes.tensor
    tensor = source.clone()
    full = torch.as_tensor(matrix[:3, :3], dtype=source.dtype)
    tensor[:, :3] = source[:, :3] @ full.T + torch.as_tensor(matrix[:3, 3], dtype=source.dtype)
    tensor[:, 3:6] = source[:, 3:6] * scale
    tensor[:, 6] = turn + (-source[:, 6] if mirrored else source[:, 6])
    if tensor.shape[1] >= 9:
        tensor[:, 7:9] = source[:, 7:9] @ full[:2, :2].T
    return type(boxes)(tensor, box_dim=tensor.shape[-1], with_yaw=boxes.with_yaw)
