"""Small detection heads: a 12 x 20 cell map of 1.6 m cells (19.2 m x 32 m), 16 channels in."""
from __future__ import annotations

import copy

import torch

from mmdet3d_ext.registry import MODELS, profile

RANGE, VOXEL, FACTOR = [-9.6, -16.0, -5.0, 9.6, 16.0, 3.0], [0.2, 0.2, 8.0], 8
LIMITS = [-20.0, -20.0, -10.0, 20.0, 20.0, 10.0]
X, Y = 12, 20
TRANSFUSION = dict(
    type='TransFusionHead', num_proposals=12, in_channels=16, hidden_channel=32, num_classes=3, num_decoder_layers=1,
    num_heads=4, nms_kernel_size=3, ffn_channel=48, dropout=0.0,
    common_heads=dict(center=[2, 2], height=[1, 2], dim=[3, 2], rot=[2, 2], vel=[2, 2]),
    bbox_coder=dict(type='TransFusionBBoxCoder', pc_range=RANGE[:2], voxel_size=VOXEL[:2], out_size_factor=FACTOR,
                    post_center_range=LIMITS, score_threshold=0.0, code_size=10),
    loss_cls=dict(type='FocalLoss', use_sigmoid=True, gamma=2.0, alpha=0.25, reduction='mean', loss_weight=1.0),
    loss_heatmap=dict(type='GaussianFocalLoss', reduction='mean', loss_weight=1.0),
    loss_bbox=dict(type='L1Loss', reduction='mean', loss_weight=0.25),
    train_cfg=dict(
        dataset='nuScenes', point_cloud_range=RANGE, grid_size=[X * FACTOR, Y * FACTOR, 1], voxel_size=VOXEL,
        out_size_factor=FACTOR, gaussian_overlap=0.1, min_radius=2, pos_weight=-1, code_weights=[1.0] * 8 + [0.2] * 2,
        assigner=dict(type='HungarianAssigner3D', iou_calculator=dict(type='BboxOverlaps3D', coordinate='lidar'),
                      cls_cost=dict(type='FocalLossCost', gamma=2.0, alpha=0.25, weight=0.15),
                      reg_cost=dict(type='BBoxBEVL1Cost', weight=0.25), iou_cost=dict(type='IoU3DCost', weight=0.25))),
    test_cfg=dict(dataset='nuScenes', grid_size=[X * FACTOR, Y * FACTOR, 1], out_size_factor=FACTOR,
                  voxel_size=VOXEL[:2], pc_range=RANGE[:2], nms_type=None))
CENTERPOINT = dict(
    type='CenterHead', in_channels=16, tasks=[['car'], ['pedestrian', 'truck']], share_conv_channel=16,
    common_heads=dict(reg=[2, 2], height=[1, 2], dim=[3, 2], rot=[2, 2], vel=[2, 2]),
    bbox_coder=dict(type='CenterPointBBoxCoder', pc_range=RANGE, post_center_range=LIMITS, max_num=40, score_threshold=0.1,
                    out_size_factor=FACTOR, voxel_size=VOXEL[:2], code_size=9),
    separate_head=dict(type='SeparateHead', init_bias=-2.19, final_kernel=3),
    loss_cls=dict(type='GaussianFocalLoss', reduction='mean'),
    loss_bbox=dict(type='L1Loss', reduction='mean', loss_weight=0.25), norm_bbox=True,
    train_cfg=dict(point_cloud_range=RANGE, grid_size=[X * FACTOR, Y * FACTOR, 1], voxel_size=VOXEL,
                   out_size_factor=FACTOR, dense_reg=1, gaussian_overlap=0.1, max_objs=500, min_radius=2,
                   code_weights=[1.0] * 8 + [0.2] * 2),
    test_cfg=dict(post_center_limit_range=LIMITS, min_radius=[2.0, 0.4], score_threshold=0.1, out_size_factor=FACTOR,
                  voxel_size=VOXEL[:2], nms_type=['circle', 'rotate'], pre_max_size=1000, post_max_size=83, nms_thr=0.2))


def merged(base, changes):
    """``base`` with ``changes`` merged into it, dict by dict; the value ``...`` removes a key."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        if value is ...:
            result.pop(key)
        elif isinstance(value, dict) and isinstance(result.get(key), dict) and 'type' not in value:
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def small_head(base, compat=None, **changes):
    """The head of a configuration with ``changes`` merged into it, in training mode, with the same random weights each time."""
    torch.manual_seed(0)
    with profile(compat):
        return MODELS.build(merged(base, changes))


def bev_map(batch, seed=1):
    """A random input (B, 16, 12, 20)."""
    return torch.randn((batch, 16, X, Y), generator=torch.Generator().manual_seed(seed))
