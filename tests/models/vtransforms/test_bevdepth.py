"""BEVDepth transforms: depth targets and loss, camera awareness, radar depth maps, gradients."""
import math

import pytest
import torch
from torch.nn import functional as F

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.models.builder import build_model
from mmdet3d_ext.models.vtransforms.depth_net import DepthNet, depth_targets

CFG = {'type': 'AwareBEVDepth', 'in_channels': 6, 'out_channels': 4, 'image_size': [64, 96], 'feature_size': [4, 6],
       'xbound': [-9.6, 9.6, 0.8], 'ybound': [-6.4, 6.4, 0.8], 'zbound': [-10.0, 10.0, 20.0], 'dbound': [1.0, 9.0, 1.0],
       'bevdepth_refine': False}
RADAR = {**CFG, 'type': 'AwareDBEVDepth', 'use_points': 'radar', 'depth_input': 'one-hot', 'height_expand': True,
         'add_depth_features': True, 'depth_feature_channels': 7}


def batch(samples=2, cameras=2):
    torch.manual_seed(0)
    intrinsics, camera2lidar, image = (torch.eye(4).repeat(samples, cameras, 1, 1) for _ in range(3))
    intrinsics[..., 0, 0] = intrinsics[..., 1, 1] = 60.0
    intrinsics[..., 0, 2], intrinsics[..., 1, 2] = 48.0, 32.0
    for n in range(cameras):
        a = math.pi * n
        camera2lidar[:, n, :3, :3] = torch.tensor([[math.cos(a), 0, math.sin(a)], [-math.sin(a), 0, math.cos(a)], [0, -1, 0]])
    image[..., :2, 3] = torch.randn(samples, cameras, 2)
    depths = torch.rand(samples, cameras, 64, 96) * 12
    depths[torch.rand_like(depths) < 0.99] = 0
    return {'camera_intrinsics': intrinsics, 'camera2lidar': camera2lidar, 'img_aug_matrix': image,
            'lidar_aug_matrix': torch.eye(4).repeat(samples, 1, 1), 'camera2ego': camera2lidar,
            'lidar2image': intrinsics @ torch.linalg.inv(camera2lidar), 'depths': depths}


def test_targets_are_the_nearest_known_depth_of_each_block():
    depths = torch.zeros(1, 1, 4, 8)
    depths[0, 0, 1, 1], depths[0, 0, 0, 0] = 3.2, 7.0  # block (0, 0): nearest 3.2 -> bin 2 of [1, 9) with step 1
    depths[0, 0, 2, 5] = 0.99  # block (0, 1): before the first bin
    target, known = depth_targets(depths, 4, 1.0, 1.0, 8)
    assert target.shape == known.shape == (1, 1, 2) and target[0, 0, 0] == 2 and known.tolist() == [[[True, False]]]
    depths[0, 0, 2, 5] = 9.0
    assert not depth_targets(depths, 4, 1.0, 1.0, 8)[1][0, 0, 1], 'behind the last bin'
    depths[0, 0, 2, 5] = 8.99
    assert depth_targets(depths, 4, 1.0, 1.0, 8)[0][0, 0, 1] == 7
    depths[0, 0, 2, 5] = float('nan')
    assert not depth_targets(depths, 4, 1.0, 1.0, 8)[1][0, 0, 1]


def test_the_loss_equals_a_loop():
    model, inputs = build_model(CFG), batch()
    depth = torch.randn(2, 2, 8, 4, 6).softmax(2)
    total, count = 0.0, 0
    for b in range(2):
        for n in range(2):
            for i in range(4):
                for j in range(6):
                    block = inputs['depths'][b, n, 16 * i:16 * i + 16, 16 * j:16 * j + 16]
                    block = block[block > 0]
                    if len(block) and 1 <= block.min() < 9:
                        one_hot = F.one_hot((block.min() - 1).long(), 8).float()
                        total += F.binary_cross_entropy(depth[b, n, :, i, j], one_hot, reduction='sum')
                        count += 1
    assert count > 20
    torch.testing.assert_close(model.depth_loss(depth, inputs['depths']), 3.0 * total / count)
    sweeps = torch.stack([inputs['depths'], torch.zeros_like(inputs['depths'])], 1)  # only the key frame counts
    torch.testing.assert_close(model.depth_loss(depth, sweeps), 3.0 * total / count)


@pytest.mark.parametrize('cfg', [CFG, {**CFG, 'bevdepth_refine': True, 'downsample': 2}, RADAR])
@pytest.mark.parametrize('empty', [False, True])
def test_training_gives_a_loss_and_gradients_everywhere(cfg, empty):
    model, inputs = build_model(cfg), batch()
    inputs['radar'] = [torch.rand(0 if empty else 30, 7) * 8 for _ in range(2)]
    if empty:
        inputs['depths'] = torch.zeros_like(inputs['depths'])
    before = [r.clone() for r in inputs['radar']]
    bev, loss = model(torch.randn(2, 2, 6, 4, 6), **inputs)
    assert bev.shape == (2, 4, *model.bev_shape) and loss.requires_grad and torch.isfinite(loss)
    assert (loss == 0) == empty
    (bev.square().sum() + loss).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name
    assert all(torch.equal(a, b) for a, b in zip(before, inputs['radar'], strict=True))
    model.eval()
    with torch.no_grad():
        assert isinstance(model(torch.randn(2, 2, 6, 4, 6), **{**inputs, 'depths': None}), torch.Tensor)


@torch.no_grad()
def test_depth_depends_on_the_camera():
    torch.manual_seed(0)
    net, inputs = DepthNet(6, 6, 4, 8).eval(), batch()
    x = torch.randn(1, 6, 4, 6).expand(4, -1, -1, -1)
    out = net(x, inputs)
    assert not torch.allclose(out[0], out[1]), 'camera 1 looks elsewhere'
    vector = net.camera_vector(inputs)
    assert vector.shape == (4, 27) and vector[0, :4].tolist() == [60, 60, 48, 32]
    assert torch.equal(vector[1, 15:].view(3, 4), inputs['camera2ego'][0, 1, :3])


@torch.no_grad()
def test_depth_targets_are_optional():
    model, inputs = build_model({**CFG, 'depth_loss_factor': 0}), batch()
    del inputs['depths']
    assert isinstance(model(torch.randn(2, 2, 6, 4, 6), **inputs), torch.Tensor)
    with pytest.raises(ValueError, match=r"needs 'depths' in the batch \(pipeline step GTDepth\)"):
        build_model(CFG)(torch.randn(2, 2, 6, 4, 6), **inputs)


def test_errors_name_the_argument():
    inputs = batch()
    with pytest.raises(ValueError, match=r"AwareDBEVDepth \(use_points: radar\) needs 'radar'"):
        build_model(RADAR)(torch.randn(2, 2, 6, 4, 6), **inputs)
    inputs['radar'] = [torch.rand(3, 5)] * 2
    with pytest.raises(ValueError, match='has 13 channels, 15 expected; set depth_feature_channels'):
        build_model(RADAR)(torch.randn(2, 2, 6, 4, 6), **inputs)
    with pytest.raises(ValueError, match=r'stride 16: image_size \(64, 96\) gives \(4, 6\), but feature_size is \(8, 12\)'):
        build_model({**RADAR, 'feature_size': [8, 12]})
    with pytest.raises(ValueError, match='give .* targets for features'):
        build_model({**CFG, 'bevdepth_downsample': 8})(torch.randn(2, 2, 6, 4, 6), **inputs)
    with pytest.raises(ValueError, match="depth_input must be 'scalar' or 'one-hot'"):
        build_model({**RADAR, 'depth_input': 'x'})
