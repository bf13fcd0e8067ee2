"""Names that the nuScenes v1.0 schema fixes: classes, sensors, splits, map locations. Constants only, no imports."""
from __future__ import annotations

# The ten detection classes in the order of mmdet3d's NuScenesDataset.CLASSES; a configuration's object_classes number the labels.
OBJECT_CLASSES = ('car', 'truck', 'trailer', 'bus', 'construction_vehicle', 'bicycle', 'motorcycle', 'pedestrian',
                  'traffic_cone', 'barrier')

MAP_CLASSES = ('drivable_area', 'ped_crossing', 'walkway', 'stop_line', 'carpark_area', 'divider')

# nuScenes category -> detection class (https://www.nuscenes.org/object-detection); other categories are not detected.
CATEGORY_TO_CLASS = {
    'movable_object.barrier': 'barrier',
    'vehicle.bicycle': 'bicycle',
    'vehicle.bus.bendy': 'bus',
    'vehicle.bus.rigid': 'bus',
    'vehicle.car': 'car',
    'vehicle.construction': 'construction_vehicle',
    'vehicle.motorcycle': 'motorcycle',
    'human.pedestrian.adult': 'pedestrian',
    'human.pedestrian.child': 'pedestrian',
    'human.pedestrian.construction_worker': 'pedestrian',
    'human.pedestrian.police_officer': 'pedestrian',
    'movable_object.trafficcone': 'traffic_cone',
    'vehicle.trailer': 'trailer',
    'vehicle.truck': 'truck',
}

# Camera order of every per-camera list and tensor (N = 6).
CAMERAS = ('CAM_FRONT', 'CAM_FRONT_RIGHT', 'CAM_FRONT_LEFT', 'CAM_BACK', 'CAM_BACK_LEFT', 'CAM_BACK_RIGHT')

RADARS = ('RADAR_FRONT', 'RADAR_FRONT_LEFT', 'RADAR_FRONT_RIGHT', 'RADAR_BACK_LEFT', 'RADAR_BACK_RIGHT')

LIDAR = 'LIDAR_TOP'

LOCATIONS = ('boston-seaport', 'singapore-hollandvillage', 'singapore-onenorth', 'singapore-queenstown')

# version -> {name of the info file's split: name of the devkit's split}
SPLITS = {
    'v1.0-trainval': {'train': 'train', 'val': 'val'},
    'v1.0-mini': {'train': 'mini_train', 'val': 'mini_val'},
    'v1.0-test': {'test': 'test'},
}

TABLES = ('attribute', 'calibrated_sensor', 'category', 'ego_pose', 'instance', 'log', 'map', 'sample',
          'sample_annotation', 'sample_data', 'scene', 'sensor', 'visibility')

# How `gt_boxes` of an info file is to be read; see info_files.py.
BOX_CONVENTION = 'mmdet3d-1.0'
OLD_BOX_CONVENTION = 'mmdet3d-pre-1.0'
