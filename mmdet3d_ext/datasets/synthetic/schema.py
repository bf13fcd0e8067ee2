"""Constants of the nuScenes v1.0 schema and of the car that recorded it: names, tables' fixed rows, sensors, mounting.

The names are those of the public schema; the mounting values are rounded typical ones of the recording cars (ego frame:
x forward, y left, z up, origin on the ground below the rear axle; metres and degrees).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Tuple

LOCATIONS = ('singapore-onenorth', 'singapore-hollandvillage', 'singapore-queenstown', 'boston-seaport')

# The devkit's BitMap class looks the "semantic prior" images up under these file names (map_expansion/bitmap.py).
SEMANTIC_PRIOR = {
    'singapore-onenorth': '53992ee3023e5494b90c316c183be829',
    'singapore-hollandvillage': '37819e65e09e5547b8a3ceaefba56bb2',
    'singapore-queenstown': '93406b464a165eaba6d9de76ca09f5da',
    'boston-seaport': '36092f0b03a857c6a3403e25b4b7aab3',
}

# Where the ten scenes of the mini set were recorded; other scene names get a location in turn.
MINI_SCENE_LOCATION = {
    'scene-0061': 'singapore-onenorth', 'scene-0103': 'boston-seaport', 'scene-0553': 'boston-seaport',
    'scene-0655': 'boston-seaport', 'scene-0757': 'boston-seaport', 'scene-0796': 'singapore-queenstown',
    'scene-0916': 'singapore-queenstown', 'scene-1077': 'singapore-hollandvillage',
    'scene-1094': 'singapore-hollandvillage', 'scene-1100': 'singapore-hollandvillage',
}

CATEGORIES: Dict[str, str] = {
    'human.pedestrian.adult': 'Adult on foot.',
    'human.pedestrian.child': 'Child on foot.',
    'human.pedestrian.wheelchair': 'Wheelchair user.',
    'human.pedestrian.stroller': 'Stroller.',
    'human.pedestrian.personal_mobility': 'Small personal vehicle with its rider.',
    'human.pedestrian.police_officer': 'Police officer.',
    'human.pedestrian.construction_worker': 'Construction worker.',
    'animal': 'Animal.',
    'vehicle.car': 'Car.',
    'vehicle.motorcycle': 'Motorcycle, with its rider if there is one.',
    'vehicle.bicycle': 'Bicycle, with its rider if there is one.',
    'vehicle.bus.bendy': 'Articulated bus.',
    'vehicle.bus.rigid': 'Bus in one piece.',
    'vehicle.truck': 'Truck.',
    'vehicle.construction': 'Construction vehicle.',
    'vehicle.emergency.ambulance': 'Ambulance.',
    'vehicle.emergency.police': 'Police vehicle.',
    'vehicle.trailer': 'Trailer.',
    'movable_object.barrier': 'Temporary road barrier.',
    'movable_object.trafficcone': 'Traffic cone.',
    'movable_object.pushable_pullable': 'Object that a person pushes or pulls.',
    'movable_object.debris': 'Debris on the road.',
    'static_object.bicycle_rack': 'Area where bicycles are parked.',
}

ATTRIBUTES: Dict[str, str] = {
    'vehicle.moving': 'The vehicle moves.',
    'vehicle.stopped': 'The vehicle stands for a moment, with a driver in it.',
    'vehicle.parked': 'The vehicle stands for longer.',
    'cycle.with_rider': 'Somebody rides the cycle.',
    'cycle.without_rider': 'Nobody rides the cycle.',
    'pedestrian.sitting_lying_down': 'The person sits or lies.',
    'pedestrian.standing': 'The person stands.',
    'pedestrian.moving': 'The person moves.',
}

# token -> (level, lowest visible fraction)
VISIBILITY: Dict[str, Tuple[str, float]] = {
    '1': ('v0-40', 0.0), '2': ('v40-60', 0.4), '3': ('v60-80', 0.6), '4': ('v80-100', 0.8)}


@dataclass(frozen=True)
class Mount:
    """How one sensor sits on the car (ego frame).

    Attributes:
        modality: 'camera', 'lidar' or 'radar'.
        position: metres.
        yaw: degrees, counter-clockwise, of the viewing direction (camera, radar: 0 looks forward; lidar: of its x axis).
        pitch: degrees, downwards positive.
        focal, principal: pixels of a 1600 x 900 image (cameras only).
        lag: seconds between the shutter and the lidar's key time (the cameras fire as the beam passes by).
    """
    modality: str
    position: Tuple[float, float, float]
    yaw: float
    pitch: float = 0.0
    focal: float = 0.0
    principal: Tuple[float, float] = (0.0, 0.0)
    lag: float = 0.0


RIG: Dict[str, Mount] = {
    'CAM_FRONT': Mount('camera', (1.70, 0.02, 1.51), 0.0, 0.3, 1266.0, (816.0, 491.0), 0.0355),
    'CAM_FRONT_RIGHT': Mount('camera', (1.55, -0.49, 1.50), -56.0, 0.8, 1260.0, (808.0, 495.0), 0.0276),
    'CAM_FRONT_LEFT': Mount('camera', (1.52, 0.49, 1.51), 55.0, -0.1, 1272.0, (826.0, 480.0), 0.0431),
    'CAM_BACK': Mount('camera', (0.03, 0.0, 1.58), 180.0, 1.0, 809.0, (829.0, 482.0), 0.0104),
    'CAM_BACK_LEFT': Mount('camera', (1.04, 0.48, 1.59), 108.5, 0.9, 1257.0, (792.0, 493.0), 0.0005),
    'CAM_BACK_RIGHT': Mount('camera', (1.01, -0.48, 1.56), -110.5, 0.9, 1259.0, (807.0, 501.0), 0.0201),
    'LIDAR_TOP': Mount('lidar', (0.94, 0.0, 1.84), -90.0),
    'RADAR_FRONT': Mount('radar', (3.41, 0.0, 0.50), 0.0, lag=0.018),
    'RADAR_FRONT_LEFT': Mount('radar', (2.42, 0.80, 0.78), 90.0, lag=0.007),
    'RADAR_FRONT_RIGHT': Mount('radar', (2.42, -0.80, 0.77), -90.0, lag=0.025),
    'RADAR_BACK_LEFT': Mount('radar', (-0.56, 0.63, 0.53), 176.0, lag=0.012),
    'RADAR_BACK_RIGHT': Mount('radar', (-0.56, -0.62, 0.53), -176.0, lag=0.031),
}
CAMERAS = tuple(name for name, mount in RIG.items() if mount.modality == 'camera')
RADARS = tuple(name for name, mount in RIG.items() if mount.modality == 'radar')
FULL_IMAGE = (1600, 900)  # width, height

KEY_INTERVAL = 0.5  # s between key frames (2 Hz)
SWEEP_INTERVAL = 0.05  # s between lidar sweeps (20 Hz)
CAMERA_INTERVAL = 1.0 / 12  # s between images (12 Hz)
RADAR_INTERVAL = 1.0 / 13  # s between radar scans (13 Hz)
