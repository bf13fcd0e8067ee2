"""Matching: optimal, and not shaken by predictions that are not numbers."""
import itertools
import logging

import numpy as np
import pytest
import torch

from mmdet3d_ext.registry import BBOX_ASSIGNERS

CFG = dict(point_cloud_range=[-9.6, -16.0, -5.0, 9.6, 16.0, 3.0])


@pytest.fixture
def assigner():
    return BBOX_ASSIGNERS.build(dict(
        type='HungarianAssigner3D', iou_calculator=dict(type='BboxOverlaps3D', coordinate='lidar'),
        cls_cost=dict(type='FocalLossCost', gamma=2.0, alpha=0.25, weight=0.15),
        reg_cost=dict(type='BBoxBEVL1Cost', weight=0.25), iou_cost=dict(type='IoU3DCost', weight=0.25)))


def match(assigner, cost, valid):
    return assigner.solve(assigner.send(cost, valid), cost.device)


def best_total(table):
    """Smallest total of a one-to-one assignment, by trying all."""
    rows, columns = table.shape
    if rows < columns:
        return best_total(table.T)
    return min(sum(table[r, c] for c, r in enumerate(chosen)) for chosen in itertools.permutations(range(rows), columns))


@pytest.mark.parametrize('queries,boxes', [(6, 3), (3, 5), (4, 4), (1, 1), (5, 0)])
def test_match_is_optimal_and_one_to_one(assigner, queries, boxes):
    cost = torch.randn((2, 3, queries, boxes + 2), generator=torch.Generator().manual_seed(queries))
    valid = torch.zeros(2, boxes + 2, dtype=torch.bool)
    valid[0, :boxes], valid[1, 2:] = True, True  # padding at either end
    matched = match(assigner, cost, valid).numpy()
    for sample, layer in itertools.product(range(2), range(3)):
        got = matched[sample, layer]
        used = got[got >= 0]
        assert len(set(used)) == len(used) == min(queries, boxes)
        assert valid[sample, used].all()
        if boxes:
            table = cost[sample, layer].numpy()[:, valid[sample].numpy()]
            total = sum(cost[sample, layer, q, g].item() for q, g in enumerate(got) if g >= 0)
            assert total == pytest.approx(best_total(table), abs=1e-5)


def costs_of_one(assigner, *sample):
    """(P, G) costs and overlaps of a batch of one sample."""
    return [found[0] for found in assigner.costs(*[part[None] for part in sample], CFG)]


def test_costs_by_hand(assigner):
    box = torch.tensor([[0.0, 0.0, 0.0, 4.0, 2.0, 2.0, 0.3]])
    moved = box + torch.tensor([1.92, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    logits = torch.tensor([[0.0, 2.0]])
    cost, iou = costs_of_one(assigner, torch.cat([box, moved]), box, torch.tensor([1]), logits.expand(2, -1))
    p = 1 / (1 + np.exp(-2.0))
    focal = 0.15 * (-0.25 * (1 - p) ** 2 * np.log(p) + 0.75 * p ** 2 * np.log(1 - p))
    assert iou[0, 0] == pytest.approx(1.0, abs=1e-5)
    assert cost[0, 0] == pytest.approx(focal - 0.25, abs=1e-5)
    assert cost[1, 0] == pytest.approx(focal + 0.25 * 0.1 - 0.25 * iou[1, 0].item(), abs=1e-5)  # 1.92 m of 19.2 m


@pytest.mark.parametrize('value', [float('nan'), float('inf'), float('-inf')])
@pytest.mark.parametrize('column', range(7))
def test_broken_predictions_do_not_crash_and_are_matched_last(assigner, caplog, value, column):
    truth = torch.tensor([[0.0, 0.0, 0.0, 4.0, 2.0, 2.0, 0.3], [5.0, 5.0, 0.0, 4.0, 2.0, 2.0, 1.0]])
    boxes = truth[[0, 1, 0, 1]].clone()
    boxes[0, column] = value
    cost, iou = costs_of_one(assigner, boxes, truth, torch.tensor([0, 1]), torch.zeros(4, 2))
    assert iou.isfinite().all() and (iou >= 0).all() and (iou <= 1).all()
    assert not cost[0].isfinite().any() and cost[1:].isfinite().all()
    with caplog.at_level(logging.WARNING):
        matched = match(assigner, cost[None, None], torch.ones(1, 2, dtype=torch.bool))[0, 0]
    assert matched[0] == -1 and matched[2] == 0 and sorted(matched[matched >= 0].tolist()) == [0, 1]
    assert '1 of 4 queries of sample 0' in caplog.text


def test_all_predictions_broken(assigner):
    cost = torch.full((1, 1, 3, 2), float('nan'))
    matched = match(assigner, cost, torch.ones(1, 2, dtype=torch.bool))[0, 0]
    assert sorted(matched.tolist()) == [-1, 0, 1]


def test_warnings_do_not_flood(assigner, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(250):
            match(assigner, torch.full((1, 1, 2, 1), float('nan')), torch.ones(1, 1, dtype=torch.bool))
    assert len(caplog.records) == 12  # the first ten, the 100th, the 200th


@pytest.mark.gpu
def test_gpu_equals_cpu(assigner):
    truth = torch.rand(3, 6, 7) + 0.5
    boxes = truth.repeat(1, 7, 1) + torch.randn(3, 42, 7) * 0.1
    boxes[1, 3, 2] = float('nan')
    args = (boxes, truth, torch.randint(0, 4, (3, 6)), torch.randn(3, 42, 4))
    cpu, gpu = assigner.costs(*args, CFG), assigner.costs(*[a.cuda() for a in args], CFG)
    assert torch.allclose(cpu[1], gpu[1].cpu(), atol=1e-5)
    assert torch.allclose(cpu[0], gpu[0].cpu(), atol=1e-5, equal_nan=True)
    valid = torch.ones(3, 6, dtype=torch.bool)
    matched = match(assigner, cpu[0][:, None], valid)
    assert torch.equal(matched, match(assigner, gpu[0][:, None], valid.cuda()).cpu())
    cost = gpu[0][:, None]
    sent = assigner.send(cost, valid.cuda())
    cost.fill_(float('nan'))  # queued behind the way to the CPU
    torch.cuda._sleep(10 ** 8)
    assert torch.equal(matched, assigner.solve(sent, torch.device('cpu'))), 'the costs as they were when they were sent'
    assert not torch.cuda.current_stream().query(), 'the host waited for the costs only'


def test_lidar_overlaps_are_mmdet3ds():
    from mmdet3d.core.bbox.iou_calculators import BboxOverlaps3D

    from mmdet3d_ext.models.heads.bbox.assigner import lidar_overlaps
    generator = torch.Generator().manual_seed(0)
    boxes, others = (torch.randn(count, 7, generator=generator) * torch.tensor([3, 3, 1, 0, 0, 0, 3.0]) +
                     torch.tensor([0, 0, 0, 4, 2, 1.5, 0]) for count in (40, 25))
    others[:3] = boxes[:3]
    expected = BboxOverlaps3D(coordinate='lidar')(boxes, others)
    found = lidar_overlaps(boxes, others)
    assert (expected > 0).sum() > 50
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[range(3), range(3)], torch.ones(3), atol=1e-4, rtol=0)
    assert lidar_overlaps(boxes[:0], others).shape == (0, 25) and lidar_overlaps(boxes, others[:0]).shape == (40, 0)
