"""TransFusionHead against the numbers of the BEVFusion reference (``shared/parity/transfusion_head.npz``).

The fixture is in the box convention from before mmdet3d 1.0. Weights are generated under it and loaded as a user's file
of the reference is, boxes are converted with ``swap_box_convention``; so the conversion of checkpoints is tested by the
same numbers.
"""
import math

import numpy as np
import pytest
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from testing import Golden, load_as_reference, randn, weights_rule

from mmdet3d_ext.models.heads.bbox import swap_box_convention
from mmdet3d_ext.registry import MODELS, profile

SHAPES = {'one': (1, 50), 'two': (2, 40)}


def head_config(layers, proposals, nms_type=None, **test_cfg):
    pc_range, voxel = [-51.2, -51.2, -5.0, 51.2, 51.2, 3.0], [0.2, 0.2, 8.0]
    return dict(
        type='TransFusionHead', num_proposals=proposals, auxiliary=True, in_channels=256, hidden_channel=128, num_classes=10,
        num_decoder_layers=layers, num_heads=8, nms_kernel_size=3, ffn_channel=256, dropout=0.1, bn_momentum=0.1,
        activation='relu', common_heads=dict(center=[2, 2], height=[1, 2], dim=[3, 2], rot=[2, 2], vel=[2, 2]),
        bbox_coder=dict(type='TransFusionBBoxCoder', pc_range=pc_range[:2], voxel_size=voxel[:2], out_size_factor=8,
                        post_center_range=[-61.2, -61.2, -10.0, 61.2, 61.2, 10.0], score_threshold=0.0, code_size=10),
        loss_cls=dict(type='FocalLoss', use_sigmoid=True, gamma=2.0, alpha=0.25, reduction='mean', loss_weight=1.0),
        loss_heatmap=dict(type='GaussianFocalLoss', reduction='mean', loss_weight=1.0),
        loss_bbox=dict(type='L1Loss', reduction='mean', loss_weight=0.25),
        train_cfg=dict(
            dataset='nuScenes', point_cloud_range=pc_range, grid_size=[512, 512, 1], voxel_size=voxel, out_size_factor=8,
            gaussian_overlap=0.1, min_radius=2, pos_weight=-1, code_weights=[1.0] * 8 + [0.2] * 2,
            assigner=dict(type='HungarianAssigner3D', iou_calculator=dict(type='BboxOverlaps3D', coordinate='lidar'),
                          cls_cost=dict(type='FocalLossCost', gamma=2.0, alpha=0.25, weight=0.15),
                          reg_cost=dict(type='BBoxBEVL1Cost', weight=0.25), iou_cost=dict(type='IoU3DCost', weight=0.25))),
        test_cfg=dict(dataset='nuScenes', grid_size=[512, 512, 1], out_size_factor=8, voxel_size=voxel[:2],
                      pc_range=pc_range[:2], nms_type=nms_type, **test_cfg))


def legacy_view(preds):
    """Our predictions in the fixture's convention: sizes swapped, (sin, cos) -> (-cos, -sin)."""
    return dict(preds, dim=preds['dim'][:, [1, 0, 2]], rot=-preds['rot'][:, [1, 0]])


def wrapped(boxes):
    """Boxes with the yaw in [-pi, pi), for comparison."""
    boxes = boxes.clone()
    boxes[..., 6] = torch.remainder(boxes[..., 6] + math.pi, 2 * math.pi) - math.pi
    return boxes


def check_list(boxes, scores, labels, expected_boxes, expected_scores, expected_labels):
    """Two detection lists are equal, whatever the order within 1e-5 of a score."""
    assert len(boxes) == len(expected_boxes)
    order = np.argsort(-expected_scores, kind='stable')
    ours = scores.argsort(descending=True, stable=True)
    assert np.abs(scores[ours].numpy() - expected_scores[order]).max() <= 1e-5
    free = set(range(len(boxes)))
    for i in range(len(boxes)):
        near = [j for j in free if abs(float(scores[j]) - expected_scores[i]) <= 1e-5 and int(labels[j]) == expected_labels[i]
                and np.abs(boxes[j].numpy() - expected_boxes[i]).max() <= 1e-3]
        assert near, f'no detection like {expected_boxes[i]} of score {expected_scores[i]}'
        free.remove(near[0])


@pytest.fixture(scope='module')
def golden():
    return Golden('transfusion_head.npz')


def build(layers, proposals, nms_type=None, compat='reference', **test_cfg):
    with profile(compat):
        head = MODELS.build(head_config(layers, proposals, nms_type, **test_cfg))
    rule = weights_rule()
    load_as_reference(head, rule.ruled_state_dict(head.state_dict()))
    return head.eval()


@pytest.fixture(scope='module')
def feature_map(golden):
    x = 0.25 * randn(501, (2, 256, 64, 64))
    golden.check('in', x)
    return x


@pytest.fixture(scope='module', params=['one', 'two'])
def run(request, golden, feature_map):
    head = build(*SHAPES[request.param])
    with torch.no_grad():
        preds = head(feature_map)
    return request.param, head, preds


def ground_truth(golden, name):
    boxes, labels = [], []
    for i in range(2):
        boxes.append(LiDARInstance3DBoxes(swap_box_convention(torch.from_numpy(golden[f'{name}_gt{i}_boxes'])), box_dim=9))
        labels.append(torch.from_numpy(golden[f'{name}_gt{i}_labels']))
    return boxes, labels


def test_forward(golden, run):
    name, head, preds = run
    old = legacy_view(preds)
    golden.check(f'{name}_query_labels', old['query_labels'])
    for key in ('center', 'height', 'dim', 'rot', 'vel', 'heatmap', 'query_heatmap_score', 'dense_heatmap'):
        golden.check(f'{name}_pred_{key}', old[key])


def test_queries(golden, run, feature_map):
    name, head, preds = run
    labels, cells, _ = head.propose(preds['dense_heatmap'])
    assert np.array_equal((labels * 4096 + cells).numpy(), golden[f'{name}_query_flat_index'])
    own = preds['query_heatmap_score'].gather(1, labels[:, None])[:, 0]
    golden.check(f'{name}_query_score', own)


def test_decode(golden, run):
    name, head, preds = run
    for i, (boxes, scores, labels) in enumerate(head.get_bboxes(preds)):
        old = wrapped(swap_box_convention(boxes.tensor))
        expected = wrapped(torch.from_numpy(golden[f'{name}_decode{i}_boxes'])).numpy()
        check_list(old, scores, labels, expected, golden[f'{name}_decode{i}_scores'], golden[f'{name}_decode{i}_labels'])
        # the same order as well: no two scores of this fixture are closer than the tolerance
        golden.check(f'{name}_decode{i}_scores', scores)


@pytest.mark.parametrize('nms_type', ['circle', 'rotate'])
def test_suppression(golden, feature_map, nms_type):
    head = build(1, 50, nms_type, pre_maxsize=1000, post_maxsize=83)
    with torch.no_grad():
        results = head.get_bboxes(head(feature_map))
    for i, (_, scores, _) in enumerate(results):
        assert len(scores) == golden[f'one_decode{i}_{nms_type}nms_count'][0]
        golden.check(f'one_decode{i}_{nms_type}nms_scores', scores)


def fixture_preds(golden, name):
    """The fixture's own predictions in our convention: a float32 unit at 50 m (4e-6 m) already moves an overlap by 7e-6."""
    keys = ('center', 'height', 'dim', 'rot', 'vel', 'heatmap')
    return legacy_view({key: torch.from_numpy(golden[f'{name}_pred_{key}__sub']) for key in keys})


def test_targets(golden, run):
    name, head, preds = run
    targets = head.get_targets(*ground_truth(golden, name), dict(preds, **fixture_preds(golden, name)))
    for key in ('labels', 'label_weights', 'bbox_weights', 'ious', 'matched_ious', 'heatmap'):
        golden.check(f'{name}_target_{key}', targets[key])
    old = targets['bbox_targets'].clone()
    old[..., [3, 4]] = targets['bbox_targets'][..., [4, 3]]
    old[..., [6, 7]] = -targets['bbox_targets'][..., [7, 6]]
    golden.check(f'{name}_target_bbox_targets', old)
    golden.check(f'{name}_target_num_pos', targets['num_pos'].sum())
    index = torch.from_numpy(golden[f'{name}_target_heatmap_index']).long()
    assert torch.equal(targets['heatmap'].nonzero(), index)
    golden.check(f'{name}_target_heatmap_value', targets['heatmap'][tuple(index.T)])

    own = head.get_targets(*ground_truth(golden, name), preds)  # from our own predictions: the same matches
    assert torch.equal(own['labels'], targets['labels']) and torch.equal(own['bbox_targets'], targets['bbox_targets'])


def test_costs(golden, run):
    name, head, _ = run
    boxes, labels = ground_truth(golden, name)
    last = {key: value[:1, :, -head.num_proposals:] for key, value in fixture_preds(golden, name).items()}
    predicted = head.bbox_coder.decode_boxes(last['center'], last['height'], last['dim'], last['rot'])[0]
    assigner, logits = head.bbox_assigner, last['heatmap'][0].T
    golden.check(f'{name}_cost0_cls', assigner.cls_cost(logits, labels[0]))
    golden.check(f'{name}_cost0_reg', assigner.reg_cost(predicted, boxes[0].tensor, head.train_cfg))
    cost, iou = assigner.costs(predicted[None], boxes[0].tensor[None], labels[0][None], logits[None], head.train_cfg)
    golden.check(f'{name}_cost0_iou3d', iou[0])
    parts = golden[f'{name}_cost0_cls'] + golden[f'{name}_cost0_reg'] - 0.25 * golden[f'{name}_cost0_iou3d']
    assert np.abs(cost[0].numpy() - parts).max() < 2e-6


def test_losses(golden, run):
    name, head, preds = run
    losses = head.loss(*ground_truth(golden, name), preds)
    assert list(losses) == list(golden[f'{name}_loss_keys'])
    for key, expected in zip(losses, golden[f'{name}_loss'], strict=True):
        assert float(losses[key]) == pytest.approx(float(expected), rel=1e-5), key


def test_default_normalises_each_layer_by_its_own_matches(golden, feature_map):
    """Reference: divided by the matches of both layers (44); ours: by the layer's own (22), so twice as large."""
    head = build(2, 40, compat=None)
    head.bbox_coder.follow_weights('centre')  # the fixture's boxes stand half a height too high, as in that profile
    with torch.no_grad():
        preds = head(feature_map)
    losses = head.loss(*ground_truth(golden, 'two'), preds)
    if torch.equal(preds['query_labels'], torch.from_numpy(golden['two_query_labels']).long()):
        expected = dict(zip(golden['two_loss_keys'], golden['two_loss'], strict=True))
        for key in ('layer_0_loss_cls', 'layer_0_loss_bbox', 'layer_-1_loss_cls', 'layer_-1_loss_bbox'):
            assert float(losses[key]) == pytest.approx(2 * float(expected[key]), rel=1e-5), key


def test_overlap_and_corners(golden):
    head = build(1, 50)
    a, b = (swap_box_convention(torch.from_numpy(golden[key])) for key in ('iou_boxes_a', 'iou_boxes_b'))
    golden.check('iou3d', head.bbox_assigner.iou_calculator(a, b))
    first = LiDARInstance3DBoxes(a[:4], box_dim=9)
    golden.check('gravity_center', first.gravity_center)
    expected, found = golden['corners'], first.corners.numpy()
    for i in range(4):  # the two conventions number the corners differently
        gaps = np.linalg.norm(expected[i][:, None] - found[i][None], axis=-1)
        assert gaps.min(1).max() < 1e-4 and len(set(gaps.argmin(1))) == 8
