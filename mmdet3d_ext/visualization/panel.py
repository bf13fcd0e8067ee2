"""One picture per sample: six cameras, the LiDAR bird's-eye view, and predicted and true map side by side."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional, Sequence, Tuple

import cv2
import numpy as np

from . import palette
from .bev import View, blank, draw_boxes_bev, draw_ego, draw_points, map_image
from .boxes import draw_boxes, put_text

# Left to right as one would turn one's head; the back cameras in mirror order, as in nuScenes' own pictures.
LAYOUT = (('CAM_FRONT_LEFT', 'CAM_FRONT', 'CAM_FRONT_RIGHT'), ('CAM_BACK_RIGHT', 'CAM_BACK', 'CAM_BACK_LEFT'))
TITLE_HEIGHT = 24
LEGEND_HEIGHT = 22


@dataclass
class Boxes:
    """Boxes (N, 7+) in the lidar frame with a class name each, and scores for predictions."""

    boxes: np.ndarray
    names: Sequence[str]
    scores: Optional[np.ndarray] = None

    def above(self, score: float) -> 'Boxes':
        """Those that score at least ``score`` (all without scores)."""
        if self.scores is None:
            return self
        keep = np.flatnonzero(np.asarray(self.scores) >= score)
        return Boxes(self.boxes[keep], [self.names[i] for i in keep], np.asarray(self.scores)[keep])

    @property
    def labels(self) -> List[str]:
        """Short text per box."""
        if self.scores is None:
            return list(self.names)
        return [f'{name} {score:.2f}' for name, score in zip(self.names, self.scores)]


@dataclass
class BevMap:
    """A map (C, X, Y) of labels or probabilities with its classes and its bounds ``(x_lo, y_lo, x_hi, y_hi)`` in metres."""

    masks: np.ndarray
    classes: Sequence[str]
    extent: Tuple[float, float, float, float]


@dataclass
class Scene:
    """What there is to draw of one sample; anything may be missing."""

    title: str = ''
    cameras: Sequence[str] = ()                                  # names, e.g. CAM_FRONT
    images: Sequence[np.ndarray] = ()                            # (H, W, 3) uint8 RGB each
    image_from_lidar: Sequence[np.ndarray] = ()                  # (4, 4) each
    points: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)))
    extent: Tuple[float, float, float, float] = (-50.0, -50.0, 50.0, 50.0)
    truth: Optional[Boxes] = None
    prediction: Optional[Boxes] = None
    true_map: Optional[BevMap] = None
    predicted_map: Optional[BevMap] = None


def draw_scene(scene: Scene, width: int = 1440, map_threshold: float = 0.5) -> np.ndarray:
    """The panel, (height, width, 3) uint8 RGB: cameras in two rows, then bird's-eye view, predicted map, true map."""
    column = width // 3
    rows = [_bar(scene.title, 3 * column)]
    if len(scene.images):
        rows += _camera_rows(scene, column)
    rows.append(_ground_row(scene, column, map_threshold))
    return np.concatenate(rows)


def _bar(text: str, width: int, height: int = TITLE_HEIGHT) -> np.ndarray:
    bar = np.full((height, width, 3), palette.BACKGROUND, dtype=np.uint8)
    put_text(bar, text, (8, height - 8), palette.TEXT, 0.45)
    return bar


def draw_camera(scene: Scene, index: int) -> np.ndarray:
    """One camera image at full size with true and predicted boxes and its name."""
    image = np.asarray(scene.images[index])
    thickness = max(1, round(image.shape[1] / 600))
    if scene.truth is not None:
        image = draw_boxes(image, scene.truth.boxes, scene.image_from_lidar[index], palette.TRUTH, thickness)
    if scene.prediction is not None:
        image = draw_boxes(image, scene.prediction.boxes, scene.image_from_lidar[index], palette.PREDICTION, thickness,
                           scene.prediction.labels)
    return image


def _camera_rows(scene: Scene, column: int) -> List[np.ndarray]:
    names = list(scene.cameras)
    order = [[names.index(name) for name in row if name in names] for row in LAYOUT]
    listed = {index for row in order for index in row}
    rest = [index for index in range(len(names)) if index not in listed]
    order += [rest[start:start + 3] for start in range(0, len(rest), 3)]
    height, width = scene.images[0].shape[:2]
    size = (column, max(1, round(column * height / width)))
    rows = []
    for row in filter(None, order):
        cells = []
        for index in row:
            # Boxes are drawn after scaling, so that lines are equally thick whatever the camera's resolution.
            image = cv2.resize(np.asarray(scene.images[index]), size, interpolation=cv2.INTER_AREA)
            zoom = np.diag([size[0] / scene.images[index].shape[1], size[1] / scene.images[index].shape[0], 1.0, 1.0])
            small = Scene(images=[image], image_from_lidar=[zoom @ np.asarray(scene.image_from_lidar[index])],
                          truth=scene.truth,
                          prediction=None if scene.prediction is None else Boxes(scene.prediction.boxes,
                                                                                 scene.prediction.names))
            image = draw_camera(small, 0)
            put_text(image, names[index].replace('CAM_', '').replace('_', ' ').lower(), (6, 16), palette.TEXT, 0.42)
            cells.append(image)
        cells += [np.full_like(cells[0], palette.BACKGROUND)] * (3 - len(cells))
        rows.append(np.concatenate(cells, 1))
    return rows


def _ground_row(scene: Scene, column: int, threshold: float) -> np.ndarray:
    x_lo, y_lo, x_hi, y_hi = scene.extent
    height = max(1, round(column * (y_hi - y_lo) / (x_hi - x_lo)))
    cells = [_fit(draw_bev(scene, height), column, height, palette.BACKGROUND)]
    bars = [_legend([('truth', palette.TRUTH)] * (scene.truth is not None)
                    + [('prediction', palette.PREDICTION)] * (scene.prediction is not None), 'LiDAR, forward is up', column)]
    for bev_map, title in ((scene.predicted_map, 'predicted map'), (scene.true_map, 'true map')):
        if bev_map is None:
            cells.append(np.full((height, column, 3), palette.BACKGROUND, dtype=np.uint8))
            bars.append(_legend([], f'no {title}', column))
            continue
        cells.append(_fit(draw_map(bev_map, height, threshold), column, height, palette.BACKGROUND))
        bars.append(_legend(list(palette.map_colors(bev_map.classes).items()), title, column))
    return np.concatenate([np.concatenate(bars, 1), np.concatenate(cells, 1)])


def draw_bev(scene: Scene, height: int) -> np.ndarray:
    """Points, true and predicted boxes from above (forward up)."""
    view = View(*scene.extent, height)
    image = draw_points(draw_ego(blank(view), view), scene.points, view)
    if scene.truth is not None:
        image = draw_boxes_bev(image, scene.truth.boxes, view, palette.TRUTH)
    if scene.prediction is not None:
        image = draw_boxes_bev(image, scene.prediction.boxes, view, palette.PREDICTION)
    return image


def draw_map(bev_map: BevMap, height: int, threshold: float = 0.5) -> np.ndarray:
    """A map as an image of ``height`` pixels (forward up), with the sensor's place."""
    view = View(*bev_map.extent, height)
    image = map_image(bev_map.masks, bev_map.classes, (view.height, view.width), threshold)
    return draw_ego(image, view, rings=())


def _fit(image: np.ndarray, width: int, height: int, color: palette.Color) -> np.ndarray:
    """``image`` scaled down to fit, centred on a canvas."""
    zoom = min(1.0, width / image.shape[1], height / image.shape[0])
    if zoom < 1:
        size = (max(1, int(image.shape[1] * zoom)), max(1, int(image.shape[0] * zoom)))
        image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    canvas = np.full((height, width, 3), color, dtype=np.uint8)
    top, left = (height - image.shape[0]) // 2, (width - image.shape[1]) // 2
    canvas[top:top + image.shape[0], left:left + image.shape[1]] = image
    return canvas


def _legend(entries: Sequence[Tuple[str, palette.Color]], title: str, width: int) -> np.ndarray:
    bar = np.full((LEGEND_HEIGHT, width, 3), palette.BACKGROUND, dtype=np.uint8)
    put_text(bar, title, (6, LEGEND_HEIGHT - 7), palette.TEXT, 0.38)
    position = width - 6
    for name, color in reversed(list(entries)):
        (length, _), _ = cv2.getTextSize(name, cv2.FONT_HERSHEY_SIMPLEX, 0.28, 1)
        position -= length
        cv2.putText(bar, name, (position, LEGEND_HEIGHT - 8), cv2.FONT_HERSHEY_SIMPLEX, 0.28, palette.TEXT, 1, cv2.LINE_AA)
        position -= 11
        cv2.rectangle(bar, (position, 7), (position + 8, 15), color, -1)
        position -= 6
    return bar
