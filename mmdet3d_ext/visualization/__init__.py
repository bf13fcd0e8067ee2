"""Pictures of samples and predictions: numpy arrays in, RGB images out."""
from .bev import View, draw_boxes_bev, draw_ego, draw_points, map_image
from .boxes import box_corners, draw_boxes, project
from .panel import BevMap, Boxes, Scene, draw_bev, draw_camera, draw_map, draw_scene

__all__ = ['BevMap', 'Boxes', 'Scene', 'View', 'box_corners', 'draw_bev', 'draw_boxes', 'draw_boxes_bev', 'draw_camera',
           'draw_ego',
           'draw_map', 'draw_points', 'draw_scene', 'map_image', 'project']
