"""Suppression against brute force with exact polygons."""
import math

import numpy as np
import pytest
import torch
from shapely.geometry import Polygon

from mmdet3d_ext.models.heads.bbox.suppression import circle_nms, rotated_nms


def polygon(box):
    x, y, length, width, yaw = box
    c, s = math.cos(yaw), math.sin(yaw)
    corners = [(-length / 2, -width / 2), (length / 2, -width / 2), (length / 2, width / 2), (-length / 2, width / 2)]
    return Polygon([(x + c * a - s * b, y + s * a + c * b) for a, b in corners])


def slow_nms(scores, suppresses):
    kept = []
    for i in np.argsort(-np.asarray(scores), kind='stable'):
        if not any(suppresses(j, i) for j in kept):
            kept.append(int(i))
    return kept


def random_boxes(n, seed=5):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([12.0, 20.0, 4.0, 2.0, 2 * math.pi])
    return torch.rand((n, 5), generator=generator) * scale + torch.tensor([0.0, 0.0, 1.0, 0.5, -math.pi]), \
        torch.rand(n, generator=generator)


@pytest.mark.parametrize('threshold', [0.0, 0.2, 0.7])
def test_rotated_equals_brute_force(threshold):
    boxes, scores = random_boxes(60)
    shapes = [polygon(box) for box in boxes.double().tolist()]
    overlap = lambda j, i: shapes[i].intersection(shapes[j]).area / shapes[i].union(shapes[j]).area  # noqa: E731
    expected = slow_nms(scores, lambda j, i: overlap(j, i) > threshold + 1e-9)
    assert 10 < len(expected)
    assert rotated_nms(boxes, scores, threshold).tolist() == expected


def test_rotated_yaw_is_counter_clockwise():
    """A long box at +45 degrees covers points on the x = y diagonal, not on x = -y."""
    boxes = torch.tensor([[0.0, 0.0, 10.0, 1.0, math.pi / 4], [2.5, 2.5, 1.0, 1.0, 0.0], [2.5, -2.5, 1.0, 1.0, 0.0]])
    assert rotated_nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.05).tolist() == [0, 2]


def test_rotated_limits_and_duplicates():
    boxes, scores = random_boxes(30)
    assert rotated_nms(boxes, scores, 0.99, 10, 4).tolist() == scores.argsort(descending=True)[:4].tolist()
    twice = torch.cat([boxes[:1]] * 3)
    assert rotated_nms(twice, torch.tensor([0.5, 0.5, 0.5]), 0.5).tolist() == [0]
    assert rotated_nms(torch.zeros(0, 5), torch.zeros(0), 0.5).tolist() == []


def test_circle_equals_brute_force():
    boxes, scores = random_boxes(80)
    centers = boxes[:, :2]
    gaps = torch.cdist(centers, centers)
    expected = slow_nms(scores, lambda j, i: gaps[i, j] <= 2.5)
    assert circle_nms(centers, scores, 2.5).tolist() == expected
    assert circle_nms(centers, scores, 2.5, post_max_size=5).tolist() == expected[:5]


def test_circle_radius_is_metres():
    centers, scores = torch.tensor([[0.0, 0.0], [3.0, 0.0]]), torch.tensor([0.9, 0.8])
    assert circle_nms(centers, scores, 4.0).tolist() == [0]                    # 3 m apart, within 4 m
    assert circle_nms(centers, scores, 4.0, squared=True).tolist() == [0, 1]   # the reference: 9 m^2 > 4
    assert circle_nms(centers, scores, 2.9).tolist() == [0, 1]


def test_circle_edge_cases():
    assert circle_nms(torch.zeros(0, 2), torch.zeros(0), 1.0).tolist() == []
    assert circle_nms(torch.zeros(1, 2), torch.ones(1), 1.0).tolist() == [0]
    assert circle_nms(torch.zeros(4, 2), torch.ones(4), 1.0).tolist() == [0]   # equal scores: the first wins


@pytest.mark.gpu
def test_gpu_equals_cpu():
    boxes, scores = random_boxes(200)
    assert torch.equal(rotated_nms(boxes.cuda(), scores.cuda(), 0.2).cpu(), rotated_nms(boxes, scores, 0.2))
    assert torch.equal(circle_nms(boxes[:, :2].cuda(), scores.cuda(), 2.0).cpu(), circle_nms(boxes[:, :2], scores, 2.0))
