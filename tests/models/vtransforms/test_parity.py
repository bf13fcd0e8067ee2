"""View transforms against the golden fixtures, which hold the reference's behaviour (``compat: reference``)."""
import numpy as np
import pytest
import torch
from testing import Golden, randn, ruled

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.models.builder import build_model

LSS = {'type': 'LSSTransform', 'in_channels': 64, 'out_channels': 80, 'image_size': [64, 176], 'feature_size': [8, 22],
       'xbound': [-51.2, 51.2, 0.8], 'ybound': [-40.0, 40.0, 0.8], 'zbound': [-10.0, 10.0, 20.0], 'dbound': [1.0, 60.0, 1.0],
       'downsample': 2}
ZBINS = {**LSS, 'out_channels': 20, 'xbound': [-51.2, 51.2, 1.6], 'ybound': [-40.0, 40.0, 1.6], 'zbound': [-4.0, 4.0, 2.0],
         'downsample': 1}
DEPTH = {**LSS, 'type': 'DepthLSSTransform'}


@pytest.fixture(scope='module')
def golden():
    return Golden('view_transform.npz')


def build(cfg, compat='reference'):
    return ruled(build_model(cfg, compat=compat))


def rig(golden):
    """The batch's matrices: one rig, two samples with their own augmentations."""
    batch = {}
    for key in ('camera2ego', 'lidar2camera', 'lidar2image', 'camera_intrinsics', 'camera2lidar', 'lidar2ego'):
        matrix = torch.from_numpy(golden[f'rig_{key}'])
        batch[key] = matrix.expand(2, *matrix.shape)
    for key in ('img_aug_matrix', 'lidar_aug_matrix'):
        batch[key] = torch.from_numpy(golden[key])
    return batch


def run(model, features, batch):
    """Output, geometry and pooled map of one call."""
    seen = {}
    model.downsample.register_forward_pre_hook(lambda _, args: seen.update(pooled=args[0]))
    geometry = model.geometry(*(batch[k] for k in ('camera_intrinsics', 'camera2lidar', 'img_aug_matrix', 'lidar_aug_matrix')))
    out = model(features, **batch)
    return out, geometry, seen['pooled']


@torch.no_grad()
@pytest.mark.parametrize('name, cfg', [('lss', LSS), ('lss_zbins', ZBINS)])
def test_lss_equals_the_fixture(golden, name, cfg):
    model = build(cfg)
    out, geometry, pooled = run(model, 6 * randn(301, (2, 6, 64, 8, 22)), rig(golden))
    golden.check(f'{name}_geometry', geometry)
    golden.check(f'{name}_pooled', pooled)
    golden.check(f'{name}_out', out)
    golden.check(f'{name}_dx_bx_nx', np.stack([model.dx, model.bx, model.nx.float()]))
    corner = golden[f'{name}_frustum_corner']
    np.testing.assert_allclose(np.stack([model.frustum[0, 0, 0], model.frustum[-1, -1, -1]]), corner[[0, -1]], rtol=1e-6)
    assert model.bev_shape == tuple(out.shape[2:]) and pooled.shape[1] == model.bev_channels


@torch.no_grad()
def test_depth_lss_equals_the_fixture_and_leaves_the_points_alone(golden):
    points = [torch.from_numpy(golden[f'depth_points{i}']) for i in range(2)]
    before = [p.clone() for p in points]
    model, batch = build(DEPTH), rig(golden)
    batch['points'] = points
    depth_map = model.depth_map(batch)
    golden.check('depth_map', depth_map)
    index = depth_map.nonzero().int()
    assert np.array_equal(index.numpy(), golden['depth_map_nonzero'])
    golden.check('depth_map_values', depth_map[depth_map != 0])
    out, _, pooled = run(model, 6 * randn(302, (2, 6, 64, 8, 22)), batch)
    golden.check('depth_pooled', pooled)
    golden.check('depth_out', out)
    for old, new in zip(before, points, strict=True):
        assert torch.equal(old, new), 'the depth branch changed the points'
    assert batch['points'] is points


@torch.no_grad()
def test_the_number_of_points_kept_only_by_truncation(golden):
    model = build(LSS)
    batch = rig(golden)
    geometry = model.geometry(*(batch[k] for k in ('camera_intrinsics', 'camera2lidar', 'img_aug_matrix', 'lidar_aug_matrix')))
    ones = torch.ones(*geometry.shape[:-1], 1)
    totals = []
    for compat in ('reference', None):
        model.compat = compat
        totals.append(int(model.pool_volume(ones, geometry).double().sum()))
    kept, only_truncated = golden['lss_kept_points']
    assert totals == [kept, kept - only_truncated]


@torch.no_grad()
def test_pooling_a_given_volume_equals_pooling_depth_times_context(golden):
    for compat in ('reference', None):
        model, batch = build(ZBINS, compat), rig(golden)
        features = 6 * randn(301, (2, 6, 64, 8, 22))
        geometry = model.geometry(*(batch[k] for k in ('camera_intrinsics', 'camera2lidar', 'img_aug_matrix',
                                                       'lidar_aug_matrix')))
        depth, context = model.depth_and_context(features, {})
        pooled = model.pool(depth, context, geometry)
        volume = torch.einsum('bndhw,bnchw->bndhwc', depth, context)
        torch.testing.assert_close(model.pool_volume(volume, geometry), pooled, rtol=1e-4, atol=1e-4)
