"""Map segmentation labels from the nuScenes map expansion."""
from __future__ import annotations

import difflib
from typing import Any, Dict, Optional, Sequence, Tuple

import numpy as np

from ...geometry.grid import AxisSpec, BevGrid
from ...geometry.transforms import bev_affine, bev_flip
from ...registry import PIPELINES
from .common import CREATE_DATA, check_compat, lidar_aug_matrix, require
from .map_layers import LINE_LAYERS, POLYGON_LAYERS, MapData, load_map
from .map_raster import devkit_mask, fill

# Classes that join several map layers; every other class is the layer of its name.
GROUPS = {'divider': ('road_divider', 'lane_divider'), 'drivable_area*': ('road_segment', 'lane')}


def class_layers(name: str) -> Tuple[str, ...]:
    """The map layers that make class ``name``.

    Raises:
        ValueError: for an unknown class; the message names the nearest known one.
    """
    known = [*GROUPS, *POLYGON_LAYERS, *LINE_LAYERS]
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f'; did you mean {near[0]!r}?' if near else ''
        raise ValueError(f'LoadBEVSegmentation: unknown map class {name!r}{hint} (known: {", ".join(known)})')
    return GROUPS.get(name, (name,))


@PIPELINES.register_module()
class LoadBEVSegmentation:
    """Draw ``gt_masks_bev`` (C, X, Y) uint8 of 0 and 1 in the augmented lidar frame, and leave ``bev_grid`` beside it.

    A cell is 1 if its centre is inside a polygon of the class (holes excluded). Line layers are stripes: all points within
    ``line_width / 2`` of a line, whatever the cell size, but never thinner than one cell, which would leave gaps. The map
    follows every augmentation in ``lidar_aug_matrix`` (rotation, scale, translation, flips); a sample whose surroundings
    hold no map gives zeros. The map is flat, on the ground below the car (the ego pose's z).

    Needs ``location``, ``lidar2ego``, ``ego2global`` (4x4). Maps are read when first needed, once per worker process.

    Args:
        dataset_root: folder that holds ``maps/expansion/<location>.json`` (version 1.3).
        xbound, ybound: ``[lo, hi, step]`` or ``{range: [lo, hi], cells: n}`` along lidar x and y, metres.
        classes: layer names, ``divider`` (road_divider + lane_divider), ``drivable_area*`` (road_segment + lane).
        line_width: metres (default 1.0: the devkit's two-cell pen on its usual 0.5 m grid).
        compat: ``'reference'``: labels as the reference draws them: the devkit's rasteriser, lines two cells wide, scale
            ignored, int64.
    """

    def __init__(self, dataset_root: str, xbound: AxisSpec, ybound: AxisSpec, classes: Sequence[str], line_width: float = 1.0,
                 compat: Optional[str] = None):
        self.compat = check_compat(compat, self)
        self.dataset_root = dataset_root
        self.grid = BevGrid.parse(xbound, ybound, 'LoadBEVSegmentation xbound/ybound')
        if isinstance(classes, str) or not classes:
            raise ValueError(f'LoadBEVSegmentation: classes must be a list of class names, got {classes!r}')
        self.classes = tuple(classes)
        self.layers_of = {name: class_layers(name) for name in self.classes}
        self.layer_names = sorted({layer for layers in self.layers_of.values() for layer in layers})
        if not line_width > 0:
            raise ValueError(f'LoadBEVSegmentation: line_width must be positive metres, got {line_width}')
        self.line_width = max(float(line_width), *self.grid.step)

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        location = require(data, 'location', self, 'info files of other projects lack the field that names the map; make them '
                                                   f'again with: {CREATE_DATA}')
        ego_from_lidar = require(data, 'lidar2ego', self, f'make the info file with: {CREATE_DATA}')
        world_from_ego = require(data, 'ego2global', self, f'make the info file with: {CREATE_DATA}')
        map_data = load_map(self.dataset_root, location)
        layers = map_data.layers(self.layer_names)  # all in one pass over the file
        augmented_from_lidar = lidar_aug_matrix(data)
        if self.compat == 'reference':
            flips = [bool(data.get(f'pcd_{name}_flip', False)) for name in ('horizontal', 'vertical')]
            masks = self._reference_masks(layers, world_from_ego, ego_from_lidar, augmented_from_lidar, *flips)
            labels = np.zeros((len(self.classes), *self.grid.shape), np.int64)
            for label, name in zip(labels, self.classes):
                for layer in self.layers_of[name]:
                    label[masks[layer]] = 1
        else:
            labels = self._labels(map_data, world_from_ego, ego_from_lidar, augmented_from_lidar)
        data['gt_masks_bev'] = labels
        data['bev_grid'] = self.grid
        return data

    def _labels(self, map_data: MapData, world_from_ego, ego_from_lidar, augmented_from_lidar) -> np.ndarray:
        world_from_augmented = (np.asarray(world_from_ego, np.float64) @ np.asarray(ego_from_lidar, np.float64)
                                @ np.linalg.inv(augmented_from_lidar.astype(np.float64)))
        ground = float(world_from_ego[2, 3])  # the ego frame sits on the ground
        bev_from_world = bev_affine(np.linalg.inv(world_from_augmented), ground)
        labels = np.empty((len(self.classes), *self.grid.shape), np.uint8)
        for label, name in zip(labels, self.classes):
            fill(map_data.edges(self.layers_of[name], self.line_width), bev_from_world, self.grid, out=label.view(bool))
        return labels

    def _reference_masks(self, layers, world_from_ego, ego_from_lidar, augmented_from_lidar, horizontal,
                         vertical) -> Dict[str, np.ndarray]:
        # The reference draws before it flips, and the devkit's rasteriser is not symmetric: draw unflipped, then mirror.
        augmented_from_lidar = bev_flip(horizontal, vertical) @ augmented_from_lidar
        if np.linalg.det(augmented_from_lidar[:3, :3]) < 0:
            raise ValueError("LoadBEVSegmentation: with compat='reference' lidar_aug_matrix may mirror only by RandomFlip3D")
        axes = []
        for flipped, axis, index in ((vertical, self.grid.x, 0), (horizontal, self.grid.y, 1)):
            if flipped:
                if abs(axis.lo + axis.hi) > 1e-6 * axis.length:
                    raise ValueError(f"LoadBEVSegmentation: with compat='reference' flips need a range that is symmetric about "
                                     f'zero, got [{axis.lo:g}, {axis.hi:g}] m')
                axes.append(index)
        # In float32, as the reference computes it.
        world_from_augmented = (np.asarray(world_from_ego, np.float32) @ np.asarray(ego_from_lidar, np.float32)
                                @ np.linalg.inv(augmented_from_lidar.astype(np.float32)))
        heading = world_from_augmented[:3, :3] @ np.array([1, 0, 0])
        degrees = float(np.arctan2(heading[1], heading[0])) / np.pi * 180
        x_lo, y_lo, x_hi, y_hi = self.grid.extent
        middle = np.array([(x_lo + x_hi) / 2, (y_lo + y_hi) / 2])
        turn = np.deg2rad(degrees)
        offset = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]) @ middle
        centre = (float(world_from_augmented[0, 3] + offset[0]), float(world_from_augmented[1, 3] + offset[1]))
        return {name: np.flip(devkit_mask(layer, centre, degrees, self.grid), axes) for name, layer in layers.items()}
