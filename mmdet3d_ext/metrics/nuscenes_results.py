"""Detections in the lidar frame -> the nuScenes result format."""
from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

# (attribute of a moving object, attribute of a standing one): the most frequent ones of each class, as mmdet3d and the
# reference assign them. Barriers and cones have none.
ATTRIBUTES: Dict[str, Tuple[str, str]] = {
    'car': ('vehicle.moving', 'vehicle.parked'),
    'truck': ('vehicle.moving', 'vehicle.parked'),
    'trailer': ('vehicle.moving', 'vehicle.parked'),
    'bus': ('vehicle.moving', 'vehicle.stopped'),
    'construction_vehicle': ('vehicle.moving', 'vehicle.parked'),
    'bicycle': ('cycle.with_rider', 'cycle.without_rider'),
    'motorcycle': ('cycle.with_rider', 'cycle.without_rider'),
    'pedestrian': ('pedestrian.moving', 'pedestrian.standing'),
    'traffic_cone': ('', ''),
    'barrier': ('', ''),
}
MOVING_SPEED = 0.2  # m/s
SENSORS = ('use_camera', 'use_lidar', 'use_radar', 'use_map', 'use_external')


def global_detections(result: Mapping[str, Any], lidar2ego: np.ndarray, ego2global: np.ndarray, classes: Sequence[str],
                      class_range: Mapping[str, float], max_boxes: int = 500) -> Dict[str, np.ndarray]:
    """One sample's detections in the global frame, as compact arrays.

    Boxes beyond their class's range (ground-plane distance from the ego frame's origin) are left out, as the devkit does, then
    the ``max_boxes`` best remain. Boxes with a non-finite value are left out and counted in ``dropped``.

    Args:
        result: ``boxes_3d`` (LiDARInstance3DBoxes, n), ``scores_3d`` (n,), ``labels_3d`` (n,).
        lidar2ego, ego2global: 4x4 of the key frame.
        classes: detection names in label order.
        class_range: name -> metres.

    Returns:
        ``translation`` (m, 3), ``size`` (m, 3: width, length, height), ``rotation`` (m, 4: w, x, y, z), ``velocity`` (m, 2),
        ``score`` (m,), ``label`` (m,), ``dropped`` (scalar).
    """
    boxes = result['boxes_3d']
    tensor = boxes.tensor.detach().cpu().double().numpy()
    centre = boxes.gravity_center.detach().cpu().double().numpy()
    scores = np.asarray(_cpu(result['scores_3d']), dtype=np.float64)
    labels = np.asarray(_cpu(result['labels_3d']), dtype=np.int64)
    if not len(tensor) == len(scores) == len(labels):
        raise ValueError(f'detections: {len(tensor)} boxes, {len(scores)} scores, {len(labels)} labels')
    if len(labels) and not (0 <= labels.min() and labels.max() < len(classes)):
        raise ValueError(f'detections: labels must lie in [0, {len(classes)}), got {labels.min()} to {labels.max()}')
    velocity = np.zeros((len(tensor), 3))
    if tensor.shape[1] >= 9:
        velocity[:, :2] = tensor[:, 7:9]
    finite = np.isfinite(tensor[:, :7]).all(1) & np.isfinite(scores) & np.isfinite(velocity).all(1)

    in_ego = centre @ lidar2ego[:3, :3].T + lidar2ego[:3, 3]
    limits = np.array([class_range[name] for name in classes], dtype=np.float64)
    kept = finite.copy()
    kept[finite] &= np.hypot(in_ego[finite, 0], in_ego[finite, 1]) <= limits[labels[finite]]
    order = np.flatnonzero(kept)
    order = order[np.argsort(-scores[order], kind='stable')][:max_boxes]

    global_from_lidar = ego2global @ lidar2ego
    yaw = tensor[order, 6]
    spin = np.stack([np.cos(yaw / 2), np.zeros_like(yaw), np.zeros_like(yaw), np.sin(yaw / 2)], axis=1)
    return {
        'translation': centre[order] @ global_from_lidar[:3, :3].T + global_from_lidar[:3, 3],
        'size': tensor[order][:, [4, 3, 5]],
        'rotation': _quaternion_product(_quaternion(global_from_lidar[:3, :3]), spin),
        'velocity': (velocity[order] @ global_from_lidar[:3, :3].T)[:, :2],
        'score': scores[order],
        'label': labels[order],
        'dropped': np.array(int((~finite).sum())),
    }


def result_records(token: str, detections: Mapping[str, np.ndarray], classes: Sequence[str]) -> List[Dict[str, Any]]:
    """The devkit's records of one sample."""
    records = []
    for i in range(len(detections['score'])):
        name = classes[int(detections['label'][i])]
        speed = math.hypot(*detections['velocity'][i])
        records.append({
            'sample_token': token,
            'translation': detections['translation'][i].tolist(),
            'size': detections['size'][i].tolist(),
            'rotation': detections['rotation'][i].tolist(),
            'velocity': detections['velocity'][i].tolist(),
            'detection_name': name,
            'detection_score': float(detections['score'][i]),
            'attribute_name': ATTRIBUTES[name][0 if speed > MOVING_SPEED else 1],
        })
    return records


def write_results(path: Union[str, os.PathLike], detections: Mapping[str, Mapping[str, np.ndarray]], classes: Sequence[str],
                  modality: Optional[Mapping[str, bool]] = None) -> Path:
    """Write ``{meta, results}`` for the devkit (or the evaluation server); the file appears complete or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = {name: bool((modality or {}).get(name, False)) for name in SENSORS}
    content = {'meta': meta, 'results': {token: result_records(token, found, classes) for token, found in detections.items()}}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.name}.', suffix='.tmp')
    try:
        with os.fdopen(handle, 'w', encoding='utf-8') as file:
            json.dump(content, file)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def _cpu(value: Any) -> Any:
    return value.detach().cpu() if hasattr(value, 'detach') else value


def _quaternion(rotation: np.ndarray) -> np.ndarray:
    """(w, x, y, z) of a rotation matrix, by the largest of the four components (stable for every angle)."""
    m = rotation
    squares = np.array([1 + m[0, 0] + m[1, 1] + m[2, 2], 1 + m[0, 0] - m[1, 1] - m[2, 2],
                        1 - m[0, 0] + m[1, 1] - m[2, 2], 1 - m[0, 0] - m[1, 1] + m[2, 2]])
    largest = int(squares.argmax())
    rows = {
        0: [squares[0], m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1]],
        1: [m[2, 1] - m[1, 2], squares[1], m[1, 0] + m[0, 1], m[0, 2] + m[2, 0]],
        2: [m[0, 2] - m[2, 0], m[1, 0] + m[0, 1], squares[2], m[2, 1] + m[1, 2]],
        3: [m[1, 0] - m[0, 1], m[0, 2] + m[2, 0], m[2, 1] + m[1, 2], squares[3]],
    }
    quaternion = np.array(rows[largest])
    return quaternion / np.linalg.norm(quaternion)


def _quaternion_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Hamilton product of one quaternion (4,) with many (n, 4)."""
    w, x, y, z = a
    bw, bx, by, bz = b.T
    return np.stack([w * bw - x * bx - y * by - z * bz, w * bx + x * bw + y * bz - z * by,
                     w * by - x * bz + y * bw + z * bx, w * bz + x * by - y * bx + z * bw], axis=1)
