"""3-D boxes as wireframes on camera images.

A box row is ``(x, y, z of the bottom, l, w, h, yaw, ...)`` in the lidar frame (metres, radians counter-clockwise), as
mmdet3d's ``LiDARInstance3DBoxes.tensor``: ``l`` lies along the heading. Images are (H, W, 3) uint8 RGB.
"""
from __future__ import annotations

from typing import Optional, Sequence, Tuple

import cv2
import numpy as np

from .palette import Color

NEAR = 0.1  # metres in front of the camera; edges are cut there, because behind it a projection is mirrored
# Bottom rectangle, top rectangle, verticals. Corners 0 and 1 (4 and 5 on top) are the front ones.
EDGES = ((0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4), (0, 4), (1, 5), (2, 6), (3, 7))
FRONT_CROSS = ((0, 5), (1, 4))  # marks the face that the object heads with


def box_corners(boxes: np.ndarray) -> np.ndarray:
    """(N, 7+) boxes -> (N, 8, 3) corners: bottom front left, front right, rear right, rear left, then the same on top."""
    boxes = np.asarray(boxes, dtype=np.float64)
    if boxes.ndim != 2 or boxes.shape[1] < 7:
        raise ValueError(f'boxes must be (N, 7 or more), got {boxes.shape}')
    unit = np.array([[0.5, 0.5], [0.5, -0.5], [-0.5, -0.5], [-0.5, 0.5]])
    flat = np.tile(unit, (2, 1))[None] * boxes[:, None, 3:5]                       # (N, 8, 2) along heading and to its left
    cos, sin = np.cos(boxes[:, 6])[:, None], np.sin(boxes[:, 6])[:, None]
    x = boxes[:, None, 0] + cos * flat[..., 0] - sin * flat[..., 1]
    y = boxes[:, None, 1] + sin * flat[..., 0] + cos * flat[..., 1]
    top = np.repeat([0.0, 1.0], 4)[None]
    z = boxes[:, None, 2] + boxes[:, None, 5] * top
    return np.stack([x, y, z], -1)


def project(points: np.ndarray, image_from_lidar: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """(..., 3) lidar points -> pixels (..., 2) as (u to the right, v down), and depth (...,) in metres.

    Pixels are meaningless where the depth is not positive.
    """
    points = np.asarray(points, dtype=np.float64)
    matrix = np.asarray(image_from_lidar, dtype=np.float64)
    camera = points @ matrix[:3, :3].T + matrix[:3, 3]
    depth = camera[..., 2]
    with np.errstate(divide='ignore', invalid='ignore'):
        return camera[..., :2] / depth[..., None], depth


def clip_segment(a: np.ndarray, b: np.ndarray, width: float, height: float) -> Optional[Tuple[np.ndarray, np.ndarray]]:
    """The part of a segment inside the image [0, width] x [0, height] (Liang and Barsky), or None."""
    start, end = 0.0, 1.0
    direction = b - a
    for step, low, high in ((direction[0], -a[0], width - a[0]), (direction[1], -a[1], height - a[1])):
        if step == 0:
            if low > 0 or high < 0:
                return None
            continue
        first, last = sorted((low / step, high / step))
        start, end = max(start, first), min(end, last)
    if start > end:
        return None
    return a + start * direction, a + end * direction


def visible_segments(corners: np.ndarray, image_from_lidar: np.ndarray, size: Tuple[int, int],
                     edges: Sequence[Tuple[int, int]] = EDGES) -> list:
    """Pixel segments of one box (8, 3) inside an image of ``size`` (height, width), cut at the near plane and the borders."""
    matrix = np.asarray(image_from_lidar, dtype=np.float64)
    camera = corners @ matrix[:3, :3].T + matrix[:3, 3]                            # (8, 3): u * depth, v * depth, depth
    found = []
    for i, j in edges:
        a, b = camera[i], camera[j]
        if a[2] < NEAR and b[2] < NEAR:
            continue
        if a[2] < NEAR or b[2] < NEAR:
            cut = a + (NEAR - a[2]) / (b[2] - a[2]) * (b - a)
            a, b = (cut, b) if a[2] < NEAR else (a, cut)
        inside = clip_segment(a[:2] / a[2], b[:2] / b[2], size[1] - 1, size[0] - 1)
        if inside is not None:
            found.append(inside)
    return found


def drawable(boxes: np.ndarray, labels: Optional[Sequence[str]]) -> Tuple[np.ndarray, Optional[Sequence[str]]]:
    """Boxes (N, 7+), also from an empty array of any shape, without those that hold NaN or infinity; and their labels."""
    boxes = np.asarray(boxes, dtype=np.float64)
    boxes = boxes.reshape(-1, boxes.shape[-1] if boxes.size else 7)
    keep = np.flatnonzero(np.isfinite(boxes[:, :7]).all(1))
    return boxes[keep], None if labels is None else [labels[i] for i in keep]


def draw_boxes(image: np.ndarray, boxes: np.ndarray, image_from_lidar: np.ndarray, color: Color, thickness: int = 2,
               labels: Optional[Sequence[str]] = None) -> np.ndarray:
    """A copy of ``image`` with the wireframes of all boxes that it shows; the front face is crossed.

    Args:
        image: (H, W, 3) uint8 RGB.
        boxes: (N, 7+) in the lidar frame.
        image_from_lidar: (4, 4) ``lidar2image`` of this image.
        labels: text per box, written above it.
    """
    image = np.ascontiguousarray(image).copy()
    boxes, labels = drawable(boxes, labels)
    if not len(boxes):
        return image
    corners = box_corners(boxes)
    _, depth = project(corners.mean(1), image_from_lidar)
    for index in np.argsort(-depth):  # near boxes last, over far ones
        segments = visible_segments(corners[index], image_from_lidar, image.shape[:2])
        cross = visible_segments(corners[index], image_from_lidar, image.shape[:2], FRONT_CROSS)
        for (a, b), width in [*((s, thickness) for s in segments), *((s, max(1, thickness // 2)) for s in cross)]:
            cv2.line(image, _pixel(a), _pixel(b), color, width, cv2.LINE_AA)
        if labels is not None and segments:
            ends = np.array(segments).reshape(-1, 2)
            put_text(image, labels[index], (int(ends[:, 0].min()), int(ends[:, 1].min()) - 4), color,
                     0.4 * max(1, thickness / 2))
    return image


def _pixel(point: np.ndarray) -> Tuple[int, int]:
    return int(round(float(point[0]))), int(round(float(point[1])))


def put_text(image: np.ndarray, text: str, origin: Tuple[int, int], color: Color, scale: float = 0.5) -> None:
    """Write ``text`` into ``image`` (changed) with its lower left corner at ``origin``, kept inside the image."""
    (width, height), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, scale, 1)
    x = min(max(origin[0], 0), max(image.shape[1] - width, 0))
    y = min(max(origin[1], height + 1), image.shape[0] - 2)
    cv2.putText(image, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, scale, (0, 0, 0), 3, cv2.LINE_AA)
    cv2.putText(image, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, scale, color, 1, cv2.LINE_AA)
