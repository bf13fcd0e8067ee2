"""The batch that is made in memory has the real pipeline's keys and shapes, for every shipped configuration."""
from pathlib import Path

import pytest
import torch

from mmdet3d_ext.config import load_config
from mmdet3d_ext.datasets.synthetic.batch import random_batch

CONFIGS = Path(__file__).resolve().parents[3] / 'configs'


def batch_of(name, samples=2, **kwargs):
    cfg = load_config(str(CONFIGS / name), ['--image_size', '[64, 160]'])
    return cfg, random_batch(cfg, samples, torch.device('cpu'), points=500, **kwargs)


def test_shapes_of_the_joint_model():
    cfg, batch = batch_of('nuscenes/multitask/phase3_400.yaml')
    assert batch['img'].shape == (2, 6, 3, 64, 160)
    assert [len(p) for p in batch['points']] == [500, 500] and batch['points'][0].shape[1] == cfg['use_dim']
    assert batch['gt_masks_bev'].shape == (2, len(cfg['map_classes']), 400, 400)
    assert batch['gt_masks_bev'].flatten(2).sum(2).min() > 0, 'a class is not drawn'
    assert batch['lidar2image'].shape == (2, 6, 4, 4) and batch['lidar2ego'].shape == (2, 4, 4)
    assert len(batch['gt_bboxes_3d']) == len(batch['metas']) == 2
    assert int(torch.cat(batch['gt_labels_3d']).max()) < len(cfg['object_classes'])
    assert not torch.equal(batch['lidar2image'][0], batch['lidar2image'][1])


def test_matrices_belong_together():
    _, batch = batch_of('nuscenes/multitask/phase3_400.yaml')
    torch.testing.assert_close(batch['lidar2camera'] @ batch['camera2lidar'], torch.eye(4).expand(2, 6, 4, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch['camera_intrinsics'] @ batch['lidar2camera'], batch['lidar2image'], atol=1e-2, rtol=1e-5)
    # The point 10 m in front of the car (lidar y) is in the front camera's augmented image.
    u, v, d, _ = (batch['lidar2image'][0, 0] @ torch.tensor([0.0, 10.0, -1.0, 1.0])).tolist()
    u, v = (batch['img_aug_matrix'][0, 0] @ torch.tensor([u / d, v / d, d, 1.0]))[:2].tolist()
    assert d > 5 and 0 <= u < 160 and 0 <= v < 64


def test_same_seed_same_batch():
    _, first = batch_of('nuscenes/multitask/phase3_400.yaml', seed=3)
    _, again = batch_of('nuscenes/multitask/phase3_400.yaml', seed=3)
    _, other = batch_of('nuscenes/multitask/phase3_400.yaml', seed=4)
    assert torch.equal(first['points'][1], again['points'][1]) and torch.equal(first['gt_masks_bev'], again['gt_masks_bev'])
    assert not torch.equal(first['points'][1], other['points'][1])


@pytest.mark.parametrize('name, present, absent', [
    ('nuscenes/det/transfusion/secfpn/lidar/voxelnet.yaml', {'points'}, {'img', 'radar'}),
    ('nuscenes/det/centerhead/lssfpn/camera/256x704/resnet/bevdepth.yaml', {'img', 'depths'}, {'radar'}),
    ('nuscenes/det/centerhead/lssfpn/camera+radar/resnet50/dlss.yaml', {'img', 'radar'}, set()),
    ('nuscenes/seg/camera-bev256d2.yaml', {'img', 'gt_masks_bev'}, {'radar'}),
])
def test_only_the_sensors_of_the_configuration(name, present, absent):
    cfg, batch = batch_of(name, samples=1)
    assert present <= set(batch) and not absent & set(batch)
    if 'radar' in batch:
        assert batch['radar'][0].shape[1] == len(cfg['radar_use_dims'])
