"""Small detection heads for the tests of this folder (``tests/small_heads.py``), and ground truth on their map."""
import functools

import pytest
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from small_heads import CENTERPOINT, TRANSFUSION, bev_map, small_head

CLASSES = ['car', 'pedestrian', 'truck']


@pytest.fixture
def transfusion():
    """Factory: ``transfusion(compat=None, **changes of the configuration)`` -> a small TransFusionHead in training mode."""
    return functools.partial(small_head, TRANSFUSION)


@pytest.fixture
def centerhead():
    """Factory: ``centerhead(compat=None, **changes of the configuration)`` -> a small CenterHead in training mode."""
    return functools.partial(small_head, CENTERPOINT)


@pytest.fixture
def features():
    """Factory: ``features(B)`` -> a random BEV map (B, 16, 12, 20)."""
    return bev_map


@pytest.fixture
def scene():
    """Factory: ``scene(rows, labels)`` -> (boxes, labels) of one sample; a row is (x, y, z bottom, l, w, h, yaw[, vx, vy])."""

    def make(rows=((-3.0, 5.0, -1.5, 4.2, 1.8, 1.6, 0.5, 2.0, -1.0), (4.1, -7.3, -1.7, 0.7, 0.6, 1.7, 2.0, 0.3, 0.4),
                   (6.0, 10.0, -1.4, 8.0, 2.5, 3.0, -1.2, 0.0, 0.0)), labels=(0, 1, 2)):
        boxes = torch.tensor(rows, dtype=torch.float32).reshape(len(labels), -1 if len(labels) else 9)
        return LiDARInstance3DBoxes(boxes, box_dim=boxes.shape[1]), torch.tensor(labels, dtype=torch.long)

    return make
