"""The training pipeline as it is usually written, for comparison: Pillow, a loop over sweeps, the devkit's map rasteriser.

Step by step what the BEVFusion reference does, on the libraries that it uses: Pillow decodes and resizes the whole image and crops
after that, torchvision normalises; each sweep is read, copied, filtered and turned by itself, and the clouds are joined; mmdet3d's
own ``ObjectSample`` pastes; ``NuScenesMap.get_map_mask`` draws the labels; labels are int64. None of this is used by the package.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

import numpy as np
import torch
from mmcv.parallel import DataContainer, collate
from mmdet3d.core.points import LiDARPoints
from mmdet3d.datasets.pipelines.transforms_3d import ObjectSample
from nuscenes.map_expansion.map_api import NuScenesMap
from PIL import Image
from torchvision.transforms import functional

GROUPS = {'divider': ['road_divider', 'lane_divider']}
MATRICES = ('camera_intrinsics', 'camera2ego', 'lidar2camera', 'camera2lidar', 'lidar2image', 'img_aug_matrix', 'lidar2ego',
            'lidar_aug_matrix')


class PeerPipeline:
    """The steps with their stages' names, as ``benchmarks/data.py`` times them.

    Args:
        cfg: a resolved configuration with the root keys of ``configs/default.yaml``.
        maps: location -> the devkit's map, read before the clock starts.
        cells: of the map labels along x and along y.
        paste: a configuration of ``ObjectPaste``, or None.
    """

    def __init__(self, cfg: Mapping[str, Any], maps: Mapping[str, NuScenesMap], cells: int, paste: Any = None):
        self.cfg, self.maps, self.cells = cfg, maps, cells
        self.sampler = None
        if paste is not None:
            settings = {key: paste['db_sampler'][key] for key in ('info_path', 'rate', 'sample_groups', 'classes')}
            self.sampler = ObjectSample(dict(
                settings, data_root=paste['db_sampler']['dataset_root'], prepare=dict(paste['db_sampler']['prepare']),
                points_loader=dict(type='LoadPointsFromFile', coord_type='LIDAR', load_dim=5, use_dim=5)))

    def steps(self) -> List[Tuple[str, Any]]:
        """(stage, call) in order."""
        found = [('images: decode', self.decode), ('points: load', self.load_points), ('boxes', self.load_boxes)]
        if self.sampler is not None:
            found.append(('paste objects', self.sampler))
        return found + [
            ('images: resize, crop, turn', self.augment_images), ('scene: turn, scale, flip', self.augment_scene),
            ('map labels', self.draw_map), ('scene: turn, scale, flip', self.flip_scene),
            ('filter, shuffle', self.filter), ('images: normalise', self.normalise),
            ('filter, shuffle', self.shuffle), ('format', self.format)]

    def decode(self, data: Dict[str, Any]) -> Dict[str, Any]:
        data['img'] = [Image.open(path).convert('RGB') for path in data['image_paths']]
        return data

    def load_points(self, data: Dict[str, Any]) -> Dict[str, Any]:
        points = LiDARPoints(np.fromfile(data['lidar_path'], np.float32).reshape(-1, 5), points_dim=5)
        points.tensor[:, 4] = 0
        clouds, sweeps, count = [points], data['sweeps'], self.cfg['sweeps_num']
        if not sweeps:
            clouds += [points[self.far(points.tensor.numpy())]] * count
        for i in np.arange(len(sweeps)) if len(sweeps) <= count else np.random.choice(len(sweeps), count, replace=False):
            values = np.copy(np.fromfile(sweeps[i]['data_path'], np.float32)).reshape(-1, 5)
            values = values[self.far(values)]
            values[:, :3] = values[:, :3] @ np.asarray(sweeps[i]['sensor2lidar_rotation']).T
            values[:, :3] += sweeps[i]['sensor2lidar_translation']
            values[:, 4] = data['timestamp'] / 1e6 - sweeps[i]['timestamp'] / 1e6
            clouds.append(points.new_point(values))
        data['points'] = LiDARPoints.cat(clouds)[:, list(range(5))]
        return data

    @staticmethod
    def far(values: np.ndarray) -> np.ndarray:
        return np.logical_not(np.logical_and(np.abs(values[:, 0]) < 1.0, np.abs(values[:, 1]) < 1.0))

    def load_boxes(self, data: Dict[str, Any]) -> Dict[str, Any]:
        data['gt_bboxes_3d'] = data['ann_info']['gt_bboxes_3d'].clone()
        data['gt_labels_3d'] = np.array(data['ann_info']['gt_labels_3d'])
        return data

    def augment_images(self, data: Dict[str, Any]) -> Dict[str, Any]:
        height, width = self.cfg['image_size']
        images, matrices = [], []
        for image in data['img']:
            scale = np.random.uniform(*self.cfg['augment2d']['resize'][0])
            size = (int(image.width * scale), int(image.height * scale))
            left, top = int(np.random.uniform(0, max(0, size[0] - width))), size[1] - height
            flip, degrees = np.random.choice([0, 1]), np.random.uniform(*self.cfg['augment2d']['rotate'])
            image = image.resize(size).crop((left, top, left + width, top + height))
            if flip:
                image = image.transpose(Image.FLIP_LEFT_RIGHT)
            images.append(image.rotate(degrees))
            matrices.append(self.matrix(scale, left, top, flip, degrees, width, height))
        data['img'], data['img_aug_matrix'] = images, matrices
        return data

    @staticmethod
    def matrix(scale, left, top, flip, degrees, width, height) -> np.ndarray:
        linear, shift = np.eye(2) * scale, -np.array([left, top], float)
        if flip:
            mirror = np.array([[-1, 0], [0, 1]])
            linear, shift = mirror @ linear, mirror @ shift + [width, 0]
        cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
        turn, middle = np.array([[cos, sin], [-sin, cos]]), np.array([width, height]) / 2
        matrix = np.eye(4, dtype=np.float32)
        matrix[:2, :2], matrix[:2, 3] = turn @ linear, turn @ (shift - middle) + middle
        return matrix

    def augment_scene(self, data: Dict[str, Any]) -> Dict[str, Any]:
        settings, points, boxes = self.cfg['augment3d'], data['points'], data['gt_bboxes_3d']
        scale, angle = np.random.uniform(*settings['scale']), np.random.uniform(*settings['rotate'])
        shift = np.random.normal(0, settings['translate'], 3)
        matrix = np.eye(4)
        points.rotate(-angle)
        boxes.rotate(-angle)
        points.translate(shift)
        boxes.translate(shift)
        points.scale(scale)
        boxes.scale(scale)
        turn = np.array([[np.cos(angle), np.sin(angle), 0], [-np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
        matrix[:3, :3], matrix[:3, 3] = turn * scale, shift * scale
        data['lidar_aug_matrix'] = matrix
        return data

    @staticmethod
    def flip_scene(data: Dict[str, Any]) -> Dict[str, Any]:
        """After the labels are drawn, and with them: the devkit cannot draw mirrored."""
        for direction, axis in (('horizontal', 1), ('vertical', 0)):
            if np.random.choice([0, 1]):
                data['points'].flip(direction)
                data['gt_bboxes_3d'].flip(direction)
                data['lidar_aug_matrix'][axis] *= -1
                data['gt_masks_bev'] = np.flip(data['gt_masks_bev'], axis + 1).copy()
        return data

    def draw_map(self, data: Dict[str, Any]) -> Dict[str, Any]:
        (x_lo, x_hi, _), (y_lo, y_hi, _) = self.cfg['map_bound']  # about the car: the centre of the patch is its place
        ego2global, lidar2ego, augmentation = (np.asarray(data[name], np.float32) for name in ('ego2global', 'lidar2ego',
                                                                                              'lidar_aug_matrix'))
        pose = ego2global @ lidar2ego @ np.linalg.inv(augmentation)
        heading = pose[:3, :3] @ np.array([1, 0, 0])
        classes = {name: GROUPS.get(name, [name]) for name in self.cfg['map_classes']}
        layers = list({layer for names in classes.values() for layer in names})
        masks = self.maps[data['location']].get_map_mask(
            patch_box=(pose[0, 3], pose[1, 3], y_hi - y_lo, x_hi - x_lo),
            patch_angle=np.arctan2(heading[1], heading[0]) / np.pi * 180, layer_names=layers, canvas_size=(self.cells, self.cells))
        masks = masks.transpose(0, 2, 1).astype(bool)
        labels = np.zeros((len(classes), self.cells, self.cells), np.int64)
        for k, names in enumerate(classes.values()):
            for name in names:
                labels[k, masks[layers.index(name)]] = 1
        data['gt_masks_bev'] = labels
        return data

    def filter(self, data: Dict[str, Any]) -> Dict[str, Any]:
        bounds = np.array(self.cfg['point_cloud_range'], np.float32)
        data['points'] = data['points'][data['points'].in_range_3d(bounds)]
        keep = data['gt_bboxes_3d'].in_range_bev(bounds[[0, 1, 3, 4]])
        boxes, labels = data['gt_bboxes_3d'][keep], data['gt_labels_3d'][keep.numpy().astype(bool)]
        boxes.limit_yaw(offset=0.5, period=2 * np.pi)
        known = np.array([label in range(len(self.cfg['object_classes'])) for label in labels], dtype=bool)
        data['gt_bboxes_3d'], data['gt_labels_3d'] = boxes[torch.from_numpy(known)], labels[known]
        return data

    def normalise(self, data: Dict[str, Any]) -> Dict[str, Any]:
        data['img'] = [functional.normalize(functional.to_tensor(image), self.cfg['image_mean'], self.cfg['image_std'])
                       for image in data['img']]
        return data

    def shuffle(self, data: Dict[str, Any]) -> Dict[str, Any]:
        data['points'].shuffle()
        return data

    def format(self, data: Dict[str, Any]) -> Dict[str, Any]:
        batch = {'img': DataContainer(torch.stack(data['img']), stack=True, pad_dims=None),
                 'points': DataContainer(data['points'].tensor.float()),
                 'gt_masks_bev': DataContainer(torch.from_numpy(data['gt_masks_bev']), stack=True, pad_dims=None),
                 'gt_bboxes_3d': DataContainer(data['gt_bboxes_3d'], cpu_only=True),
                 'gt_labels_3d': DataContainer(torch.from_numpy(data['gt_labels_3d'])),
                 'metas': DataContainer({'token': data['token']}, cpu_only=True)}
        for key in MATRICES:
            batch[key] = DataContainer(torch.from_numpy(np.array(data[key], np.float32)), stack=True, pad_dims=None)
        return batch

    @staticmethod
    def collate(samples: List[Dict[str, Any]]) -> Dict[str, Any]:
        return collate(samples, samples_per_gpu=len(samples))
