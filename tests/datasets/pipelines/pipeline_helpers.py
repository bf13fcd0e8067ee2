"""Small scenes, files and map-expansion JSON for the pipeline tests."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from mmdet3d.core.points import LiDARPoints

MAP_LAYERS = ('polygon', 'line', 'node', 'drivable_area', 'road_segment', 'road_block', 'lane', 'ped_crossing', 'walkway',
              'stop_line', 'carpark_area', 'road_divider', 'lane_divider', 'traffic_light', 'lane_connector')


def fixture_image(k: int) -> np.ndarray:
    """Image k of the parity fixtures, by its rule; (900, 1600, 3) uint8."""
    y, x = np.meshgrid(np.arange(900, dtype=np.int64), np.arange(1600, dtype=np.int64), indexing='ij')
    return np.stack([(x * (3 + k) // 4 + y * 2) % 256, (x + y * (5 + k) // 3) % 256,
                     ((x // (16 + k) + y // 16) % 2) * 160 + (x * y // 4000) % 90], axis=-1).astype(np.uint8)


def boxes_from_old(old: np.ndarray) -> LiDARInstance3DBoxes:
    """Boxes of the old convention (x, y, z, w, l, h, yaw clockwise from -y, vx, vy) in mmdet3d 1.0's."""
    new = np.array(old, dtype=np.float32)
    new[:, 3], new[:, 4] = old[:, 4], old[:, 3]
    new[:, 6] = -old[:, 6] - np.pi / 2
    return LiDARInstance3DBoxes(new, box_dim=new.shape[1])


def boxes_to_old(boxes: LiDARInstance3DBoxes) -> np.ndarray:
    """The inverse of :func:`boxes_from_old`."""
    new = boxes.tensor.numpy()
    old = new.copy()
    old[:, 3], old[:, 4] = new[:, 4], new[:, 3]
    old[:, 6] = -new[:, 6] - np.pi / 2
    return old


def assert_boxes_equal(actual_old: np.ndarray, expected_old: np.ndarray, tolerance: float = 2e-5) -> None:
    """Old-convention boxes equal, yaw modulo a full turn."""
    assert actual_old.shape == expected_old.shape
    columns = [c for c in range(expected_old.shape[1]) if c != 6]
    scale = np.abs(expected_old).max()
    np.testing.assert_allclose(actual_old[:, columns], expected_old[:, columns], rtol=0, atol=tolerance * scale)
    turn = (actual_old[:, 6] - expected_old[:, 6] + np.pi) % (2 * np.pi) - np.pi
    assert np.abs(turn).max() < 2e-5


def lidar_points(values) -> LiDARPoints:
    tensor = torch.as_tensor(np.asarray(values, dtype=np.float32))
    return LiDARPoints(tensor, points_dim=tensor.shape[1])


def scene(num_points: int = 200, num_boxes: int = 4, seed: int = 0) -> dict:
    """A sample with points and boxes after loading."""
    rng = np.random.default_rng(seed)
    points = rng.uniform(-60, 60, (num_points, 5)).astype(np.float32)
    points[:, 2] = rng.uniform(-3, 2, num_points)
    boxes = np.concatenate([rng.uniform(-40, 40, (num_boxes, 2)), rng.uniform(-2, 0, (num_boxes, 1)),
                            rng.uniform(1, 6, (num_boxes, 3)), rng.uniform(-3, 3, (num_boxes, 1)),
                            rng.uniform(-5, 5, (num_boxes, 2))], axis=1).astype(np.float32)
    return dict(token='sample', points=lidar_points(points), gt_bboxes_3d=LiDARInstance3DBoxes(boxes, box_dim=9),
                gt_labels_3d=np.arange(num_boxes) % 3)


class MapWriter:
    """A map-expansion JSON (v1.3) written by hand, complete enough for the devkit's NuScenesMap."""

    def __init__(self):
        self.content = {name: [] for name in MAP_LAYERS}
        self.content.update(version='1.3', canvas_edge=[2000.0, 2000.0], connectivity={}, arcline_path_3={})

    def _nodes(self, corners):
        tokens = []
        for x, y in corners:
            token = f'node{len(self.content["node"])}'
            self.content['node'].append(dict(token=token, x=float(x), y=float(y)))
            tokens.append(token)
        return tokens

    def _polygon(self, exterior, holes=()):
        token = f'polygon{len(self.content["polygon"])}'
        self.content['polygon'].append(dict(token=token, exterior_node_tokens=self._nodes(exterior),
                                            holes=[dict(node_tokens=self._nodes(hole)) for hole in holes]))
        return token

    def polygon(self, layer, exterior, holes=()):
        """One record of a polygon layer (drivable_area: a record with this polygon only)."""
        token = self._polygon(exterior, holes)
        record = dict(token=f'{layer}{len(self.content[layer])}', polygon_token=token, polygon_tokens=[token])
        if layer == 'stop_line':
            record.update(stop_line_type='YIELD')
        if layer == 'lane':
            record.update(left_lane_divider_segments=[], right_lane_divider_segments=[])
        self.content[layer].append(record)

    def multipolygon(self, layer, parts):
        """A drivable_area record of several (exterior, holes) polygons."""
        self.content[layer].append(dict(token=f'{layer}{len(self.content[layer])}',
                                        polygon_tokens=[self._polygon(*part) for part in parts]))

    def line(self, layer, corners):
        token = f'line{len(self.content["line"])}'
        self.content['line'].append(dict(token=token, node_tokens=self._nodes(corners)))
        self.content[layer].append(dict(token=f'{layer}{len(self.content[layer])}', line_token=token))

    def write(self, root, location='singapore-onenorth') -> Path:
        path = Path(root) / 'maps' / 'expansion' / f'{location}.json'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.content))
        return path


def car_pose(x: float, y: float, degrees: float) -> np.ndarray:
    """ego2global (4, 4) float32 of a car at (x, y) with this heading."""
    turn = np.deg2rad(degrees)
    pose = np.eye(4, dtype=np.float32)
    pose[:2, :2] = [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
    pose[:2, 3] = x, y
    return pose


def lidar_pose() -> np.ndarray:
    """lidar2ego (4, 4) float32 like the real car's: lidar y is forward, 0.94 m ahead, 1.84 m up."""
    pose = np.eye(4, dtype=np.float32)
    pose[:3, :3] = [[0, 1, 0], [-1, 0, 0], [0, 0, 1]]
    pose[:3, 3] = 0.94, 0.0, 1.84
    return pose
