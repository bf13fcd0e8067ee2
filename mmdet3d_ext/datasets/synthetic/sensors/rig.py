"""Where the sensors sit: calibration of one car with its small individual deviations, and poses at an instant."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

import numpy as np
from pyquaternion import Quaternion

from .. import schema
from ..world import rotation

# Columns: the camera's x (right), y (down) and z (viewing direction) in a frame with x forward, y left, z up.
CAMERA_AXES = np.array([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])


@dataclass
class Calibration:
    """ego_from_sensor as translation (3,) and rotation (unit quaternion w, x, y, z); intrinsics (3, 3) for cameras."""
    translation: np.ndarray
    quaternion: np.ndarray
    intrinsic: Optional[np.ndarray]

    @property
    def matrix(self) -> np.ndarray:
        return Quaternion(self.quaternion).rotation_matrix


def calibrate(seed: int, log: str, image_size: Tuple[int, int]) -> Dict[str, Calibration]:
    """The calibration of the car behind one log: nominal mounting plus deviations of millimetres and tenths of a degree."""
    rng = np.random.default_rng([seed, 14, *log.encode()])
    found = {}
    for channel, mount in schema.RIG.items():
        wobble = rng.normal(0.0, 0.003, 3)
        matrix = rotation(np.deg2rad(mount.yaw) + wobble[0], np.deg2rad(mount.pitch) + wobble[1], wobble[2])
        intrinsic = None
        if mount.modality == 'camera':
            matrix = matrix @ CAMERA_AXES
            focal = mount.focal + rng.normal(0.0, 2.0)
            centre = np.array(mount.principal) + rng.normal(0.0, 2.0, 2)
            sx, sy = image_size[0] / schema.FULL_IMAGE[0], image_size[1] / schema.FULL_IMAGE[1]
            intrinsic = np.array([[focal * sx, 0.0, centre[0] * sx], [0.0, focal * sy, centre[1] * sy], [0.0, 0.0, 1.0]])
        position = np.array(mount.position) + rng.normal(0.0, 0.003, 3)
        quaternion = Quaternion(matrix=matrix, rtol=1e-4, atol=1e-6).normalised.elements
        found[channel] = Calibration(position, quaternion, intrinsic)
    return found


def sensor_pose(ego_pose: Tuple[np.ndarray, np.ndarray], calibration: Calibration) -> Tuple[np.ndarray, np.ndarray]:
    """global_from_sensor as rotation (3, 3) and translation (3,)."""
    ego_rotation, ego_translation = ego_pose
    return ego_rotation @ calibration.matrix, ego_rotation @ calibration.translation + ego_translation
