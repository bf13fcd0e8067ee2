"""Bird's-eye views: forward (lidar +y) is up, right (lidar +x) is to the right, as a driver sees a map.

Image column = (x - x_lo) * pixels per metre, image row = (y_hi - y) * pixels per metre.
"""
from __future__ import annotations

import math
from typing import Dict, Iterable, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np

from . import palette
from .boxes import box_corners, drawable, put_text
from .palette import Color


class View(NamedTuple):
    """What part of the ground a bird's-eye image shows: bounds in metres, and its height in pixels."""

    x_lo: float
    y_lo: float
    x_hi: float
    y_hi: float
    height: int

    @property
    def scale(self) -> float:
        """Pixels per metre."""
        return self.height / (self.y_hi - self.y_lo)

    @property
    def width(self) -> int:
        """Width in pixels (cells are square)."""
        return max(1, int(round((self.x_hi - self.x_lo) * self.scale)))

    def pixels(self, points: np.ndarray) -> np.ndarray:
        """(..., 2+) lidar x, y in metres -> (..., 2) float (column, row)."""
        points = np.asarray(points, dtype=np.float64)
        return np.stack([(points[..., 0] - self.x_lo) * self.scale, (self.y_hi - points[..., 1]) * self.scale], -1)


def blank(view: View, color: Color = palette.BACKGROUND) -> np.ndarray:
    """An empty image of a view."""
    return np.full((view.height, view.width, 3), color, dtype=np.uint8)


def draw_points(image: np.ndarray, points: np.ndarray, view: View, color: Color = (190, 195, 205)) -> np.ndarray:
    """A copy of ``image`` with one pixel per lidar point (P, 3+); points with NaN are left out. Higher points are brighter."""
    image = image.copy()
    points = np.asarray(points, dtype=np.float64)
    if not points.size:
        return image
    points = points[np.isfinite(points[:, :3]).all(1)]
    points = points[np.argsort(points[:, 2], kind='stable')]
    at = np.floor(view.pixels(points))
    inside = ((at >= 0) & (at < [view.width, view.height])).all(1)
    columns, rows = at[inside].astype(int).T
    shade = np.clip((points[inside, 2] + 3.0) / 5.0, 0.3, 1.0)  # from the ground (about -1.8 m) to 2 m above the sensor
    image[rows, columns] = (shade[:, None] * np.asarray(color)).astype(np.uint8)
    return image


def draw_boxes_bev(image: np.ndarray, boxes: np.ndarray, view: View, color: Color, thickness: int = 1,
                   labels: Optional[Sequence[str]] = None) -> np.ndarray:
    """A copy of ``image`` with the outlines of boxes (N, 7+) and a line from the centre through the front."""
    image = image.copy()
    boxes, labels = drawable(boxes, labels)
    for index in range(len(boxes)):
        corners = box_corners(boxes[index:index + 1])[0, :4, :2]
        heading = np.stack([boxes[index, :2], corners[:2].mean(0)])
        for line, closed in ((corners, True), (heading, False)):
            ends = np.clip(view.pixels(line), -10_000, 10_000)
            cv2.polylines(image, [np.round(ends * 16).astype(np.int32)], closed, color, thickness, cv2.LINE_AA, shift=4)
        if labels is not None:
            column, row = view.pixels(corners).min(0)
            if 0 <= column < view.width and 0 <= row < view.height:
                put_text(image, labels[index], (int(column), int(row) - 2), color, 0.35)
    return image


def draw_ego(image: np.ndarray, view: View, rings: Iterable[float] = (20.0, 40.0)) -> np.ndarray:
    """A copy of ``image`` with distance rings and an arrow at the sensor that points forward."""
    image = image.copy()
    centre = tuple(int(v) for v in np.round(view.pixels(np.zeros(2))))
    for radius in rings:
        cv2.circle(image, centre, int(round(radius * view.scale)), palette.FAINT, 1, cv2.LINE_AA)
        put_text(image, f'{radius:g} m', (centre[0] + 3, centre[1] - int(round(radius * view.scale)) - 2), palette.FAINT, 0.35)
    size = max(2.0, 6 / view.scale)  # metres: visible at any scale
    arrow = view.pixels(size * np.array([[0, 1.0], [0.5, -0.6], [-0.5, -0.6]]))
    cv2.fillPoly(image, [np.round(arrow).astype(np.int32)], palette.EGO, cv2.LINE_AA)
    return image


def map_image(masks: np.ndarray, classes: Sequence[str], size: Tuple[int, int], threshold: float = 0.5,
              colors: Optional[Dict[str, Color]] = None, background: Color = palette.PAPER) -> np.ndarray:
    """Map masks (C, X, Y), labels or probabilities, as an image of ``size`` (height, width); later classes lie on top.

    Axis X runs to the right and axis Y (forward) up. Cells at or above ``threshold`` are coloured; NaN cells are not. Larger
    images repeat cells, smaller ones keep a class that any of the joined cells has, so thin lines do not vanish.
    """
    masks = np.asarray(masks)
    if masks.ndim != 3 or len(masks) != len(classes):
        raise ValueError(f'masks must be (classes, X, Y) for {len(classes)} classes, got {masks.shape}')
    colors = colors or palette.map_colors(classes)
    image = np.full((size[0], size[1], 3), background, dtype=np.uint8)
    for mask, name in zip(masks, classes):
        upright = np.flipud((mask >= threshold).T)                                # rows: -y, columns: x
        image[_resize_any(upright, size)] = colors[name]
    return image


def _resize_any(mask: np.ndarray, size: Tuple[int, int]) -> np.ndarray:
    """A bool mask at another size: repeated when enlarged, "any" when reduced, per axis."""
    for axis, count in enumerate(size):
        cells = mask.shape[axis]
        if count >= cells:
            mask = np.take(mask, (np.arange(count) * cells) // count, axis)
        else:
            starts = [math.floor(i * cells / count) for i in range(count)]
            mask = np.logical_or.reduceat(mask, starts, axis)
    return mask
