"""CenterHead against the numbers of the BEVFusion reference (``shared/parity/center_head.npz``).

As in ``test_transfusion_parity.py`` the weights are generated in the older box convention and loaded as
a file of the reference is.
"""
import math

import numpy as np
import pytest
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from testing import Golden, load_as_reference, randn, weights_rule

from mmdet3d_ext.models.heads.bbox import swap_box_convention
from mmdet3d_ext.models.heads.bbox.suppression import circle_nms, rotated_nms
from mmdet3d_ext.registry import MODELS, profile

TASKS = [['car'], ['truck', 'construction_vehicle'], ['bus', 'trailer'], ['barrier'], ['motorcycle', 'bicycle'],
         ['pedestrian', 'traffic_cone']]
RANGE, VOXEL = [-51.2, -51.2, -5.0, 51.2, 51.2, 3.0], [0.2, 0.2, 8.0]


def head_config(**changes):
    limits = [-61.2, -61.2, -10.0, 61.2, 61.2, 10.0]
    test_cfg = dict(post_center_limit_range=limits, max_per_img=500, max_pool_nms=False, min_radius=[4, 12, 10, 1, 0.85, 0.175],
                    score_threshold=0.1, out_size_factor=8, voxel_size=VOXEL[:2], pre_max_size=1000, post_max_size=83,
                    nms_thr=0.2, nms_type=['circle', 'rotate', 'rotate', 'circle', 'rotate', 'rotate'],
                    nms_scale=[[1.0], [1.0, 1.0], [1.0, 1.0], [1.0], [1.0, 1.0], [2.5, 4.0]])
    test_cfg.update(changes.pop('test_cfg', {}))
    return dict(dict(
        type='CenterHead', in_channels=256, tasks=TASKS, share_conv_channel=64, norm_bbox=True,
        common_heads=dict(reg=[2, 2], height=[1, 2], dim=[3, 2], rot=[2, 2], vel=[2, 2]),
        bbox_coder=dict(type='CenterPointBBoxCoder', pc_range=RANGE, post_center_range=limits, max_num=500, score_threshold=0.1,
                        out_size_factor=8, voxel_size=VOXEL[:2], code_size=9),
        separate_head=dict(type='SeparateHead', init_bias=-2.19, final_kernel=3),
        loss_cls=dict(type='GaussianFocalLoss', reduction='mean'),
        loss_bbox=dict(type='L1Loss', reduction='mean', loss_weight=0.25),
        train_cfg=dict(point_cloud_range=RANGE, grid_size=[512, 512, 1], voxel_size=VOXEL, out_size_factor=8, dense_reg=1,
                       gaussian_overlap=0.1, max_objs=500, min_radius=2, code_weights=[1.0] * 8 + [0.2] * 2),
        test_cfg=test_cfg), **changes)


@pytest.fixture(scope='module')
def golden():
    return Golden('center_head.npz')


def build(**changes):
    with profile('reference'):
        head = MODELS.build(head_config(**changes))
    load_as_reference(head, weights_rule().ruled_state_dict(head.state_dict()))
    return head.eval()


@pytest.fixture(scope='module')
def head(golden):
    return build()


@pytest.fixture(scope='module')
def preds(golden, head):
    x = 0.35 * randn(601, (2, 256, 64, 64))
    golden.check('in', x)
    with torch.no_grad():
        return head(x)


@pytest.fixture(scope='module')
def ground_truth(golden):
    boxes = [LiDARInstance3DBoxes(swap_box_convention(torch.from_numpy(golden[f'gt{i}_boxes'])), box_dim=9) for i in range(2)]
    return boxes, [torch.from_numpy(golden[f'gt{i}_labels']) for i in range(2)]


def rows(boxes, scores, labels):
    """(score, label, box) rows in a canonical order; the yaw is wrapped."""
    boxes = boxes.clone()
    boxes[:, 6] = torch.remainder(boxes[:, 6] + math.pi, 2 * math.pi) - math.pi
    return [np.concatenate([[s, c], b]) for s, c, b in zip(scores.numpy(), labels.numpy(), boxes.numpy(), strict=True)]


def check_lists(ours, theirs, tolerance=1e-3):
    """The same detections, whatever the order among equal scores."""
    assert len(ours) == len(theirs)
    theirs = np.stack(theirs)
    free = np.ones(len(theirs), dtype=bool)
    for row in ours:
        gaps = np.maximum(100 * np.abs(row[:2] - theirs[:, :2]).max(1), np.abs(row[2:] - theirs[:, 2:]).max(1))
        gaps[~free] = np.inf
        assert gaps.min() < tolerance, f'no detection like {row}, nearest differs by {gaps.min()}'
        free[gaps.argmin()] = False


def test_forward(golden, preds):
    for task, pred in enumerate(preds):
        old = dict(pred, dim=pred['dim'][:, [1, 0, 2]], rot=-pred['rot'][:, [1, 0]])
        for key in ('reg', 'height', 'dim', 'rot', 'vel', 'heatmap'):
            golden.check(f'task{task}_{key}', old[key])


def test_before_suppression(golden, head, preds):
    found = head.bbox_coder.unpack(head._task_candidates(preds[1])[0])
    golden.check('task1_pre_nms0_scores', found['scores'])
    n = len(golden['task1_pre_nms0_boxes'])
    labels = golden['task1_pre_nms0_labels'].astype(np.int64)
    assert np.array_equal(np.bincount(found['labels'].numpy(), minlength=2), np.bincount(labels, minlength=2))
    old = swap_box_convention(found['bboxes'])
    expected = rows(torch.from_numpy(golden['task1_pre_nms0_boxes']), torch.from_numpy(golden['task1_pre_nms0_scores'][:n]),
                    torch.from_numpy(labels[:n]))
    ours = rows(old, found['scores'], found['labels'])
    for row in expected:
        gaps = np.abs(np.stack(ours) - row)
        assert np.maximum(100 * gaps[:, :2].max(1), gaps[:, 2:].max(1)).min() < 1e-3


def test_decode(golden, head, preds):
    for i, (boxes, scores, labels) in enumerate(head.get_bboxes(preds)):
        expected = rows(torch.from_numpy(golden[f'decode{i}_boxes']), torch.from_numpy(golden[f'decode{i}_scores']),
                        torch.from_numpy(golden[f'decode{i}_labels']))
        check_lists(rows(swap_box_convention(boxes.tensor), scores, labels), expected)


def test_targets(golden, head, ground_truth):
    targets = head.get_targets(*ground_truth, torch.device('cpu'))
    first = 0
    for task, target in enumerate(targets):
        index = torch.from_numpy(golden[f'target{task}_heatmap_index']).long()
        assert torch.equal(target['heatmap'].nonzero(), index)
        golden.check(f'target{task}_heatmap_value', target['heatmap'][tuple(index.T)])

        # The reference numbers slots within the task, class by class; find which of the sample's boxes each slot is.
        slots = golden[f'target{task}_mask_index']
        old = target['boxes'].clone()
        old[..., [3, 4]] = target['boxes'][..., [4, 3]]
        old[..., [6, 7]] = -target['boxes'][..., [7, 6]]
        picked = []
        for sample, slot in slots:
            labels = ground_truth[1][sample].numpy()
            order = np.concatenate([np.flatnonzero(labels == first + c) for c in range(head.num_classes[task])])
            picked.append((sample, order[slot]))
        samples, which = (torch.tensor([int(p[k]) for p in picked]) for k in range(2))
        assert target['mask'].sum() == len(slots) and target['mask'][samples, which].all()
        assert np.array_equal(target['cells'][samples, which].numpy(), golden[f'target{task}_cell'])
        golden.check(f'target{task}_boxes', old[samples, which])
        first += head.num_classes[task]


def test_losses(golden, head, preds, ground_truth):
    losses = head.loss(*ground_truth, preds)
    assert list(losses) == list(golden['loss_keys'])
    for key, expected in zip(losses, golden['loss'], strict=True):
        assert float(losses[key]) == pytest.approx(float(expected), rel=1e-5), key


def test_losses_without_ground_truth(golden, head, preds):
    empty = [LiDARInstance3DBoxes(torch.zeros(0, 9), box_dim=9)] * 2, [torch.zeros(0, dtype=torch.long)] * 2
    losses = head.loss(*empty, preds)
    for key, expected in zip(losses, golden['loss_without_gt'], strict=True):
        assert float(losses[key]) == pytest.approx(float(expected), rel=1e-5), key


def test_suppression(golden):
    boxes, scores = torch.from_numpy(golden['nms_boxes_xywlr']), torch.from_numpy(golden['nms_scores'])
    ours = boxes[:, [0, 1, 3, 2, 4]].clone()
    ours[:, 4] = -boxes[:, 4] - math.pi / 2
    assert np.array_equal(rotated_nms(ours, scores, 0.2), golden['nms_rotated_keep'])
    assert np.array_equal(rotated_nms(ours, scores, 0.2, 40, 10), golden['nms_rotated_keep_pre40_post10'])
    assert np.array_equal(circle_nms(boxes[:, :2], scores, 4, squared=True), golden['nms_circle4_keep'])
    assert np.array_equal(circle_nms(boxes[:, :2], scores, 2), golden['nms_circle4_keep'])
