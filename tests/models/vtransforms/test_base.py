"""Grid, geometry and behaviour that view transforms share."""
import math

import pytest
import torch

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.geometry.grid import GridError
from mmdet3d_ext.models.builder import build_model

CFG = {'type': 'LSSTransform', 'in_channels': 6, 'out_channels': 4, 'image_size': [32, 48], 'feature_size': [4, 6],
       'xbound': [-9.6, 9.6, 0.8], 'ybound': [-6.4, 6.4, 0.8], 'zbound': [-10.0, 10.0, 20.0], 'dbound': [1.0, 9.0, 1.0],
       'downsample': 2}
NAMES = ('camera_intrinsics', 'camera2lidar', 'img_aug_matrix', 'lidar_aug_matrix')


def batch(samples=2, cameras=3, seed=0):
    """Cameras that look around horizontally, with random image and BEV augmentations."""
    torch.manual_seed(seed)
    intrinsics, camera2lidar, image = (torch.eye(4).repeat(samples, cameras, 1, 1) for _ in range(3))
    intrinsics[..., 0, 0] = intrinsics[..., 1, 1] = 30.0
    intrinsics[..., 0, 2], intrinsics[..., 1, 2] = 24.0, 16.0
    for n in range(cameras):
        a = 2 * math.pi * n / cameras
        # camera x right, y down, z forward -> lidar z up, forward along (sin a, cos a)
        camera2lidar[:, n, :3, :3] = torch.tensor([[math.cos(a), 0, math.sin(a)], [-math.sin(a), 0, math.cos(a)], [0, -1, 0]])
    camera2lidar[..., :3, 3] = torch.randn(samples, cameras, 3) * 0.2
    image[..., 0, 0] = image[..., 1, 1] = 0.9
    image[..., :2, 3] = torch.randn(samples, cameras, 2)
    bev = torch.eye(4).repeat(samples, 1, 1)
    bev[:, :3, 3] = torch.randn(samples, 3) * 0.1
    lidar2image = intrinsics @ torch.linalg.inv(camera2lidar)
    return {'camera_intrinsics': intrinsics, 'camera2lidar': camera2lidar, 'img_aug_matrix': image, 'lidar_aug_matrix': bev,
            'camera2ego': camera2lidar, 'lidar2image': lidar2image, 'lidar2camera': torch.linalg.inv(camera2lidar)}


def test_cells_are_counted_by_rounding():
    model = build_model({**CFG, 'xbound': [-38.4, 38.4, 0.8], 'downsample': 1})
    assert model.bev_shape == (96, 16) and model.nx.tolist() == [96, 16, 1]
    model = build_model({**CFG, 'xbound': {'range': [-50, 50], 'cells': 600}, 'downsample': 1})
    assert model.bev_shape[0] == 600
    with pytest.raises(GridError, match='LSSTransform.xbound/ybound.*0.167 m does not divide'):
        build_model({**CFG, 'xbound': [-50, 50, 0.167]})
    with pytest.raises(GridError, match='with downsample 2.* 25 cells cannot be divided by 2'):
        build_model({**CFG, 'xbound': [-10, 10, 0.8]})


def test_a_point_half_a_cell_below_the_lower_bound_is_dropped_and_in_compat_kept():
    for compat, kept in ((None, [0, 0, 1, 1, 0]), ('reference', [1, 0, 1, 1, 0])):
        model = build_model({**CFG, 'downsample': 1}, compat=compat)
        x = torch.tensor([-9.6 - 0.4, -9.6 - 1.2, -9.6 + 0.4, 9.6 - 0.4, 9.6 + 0.4])
        geometry = torch.stack([x, torch.full_like(x, 0.1), torch.zeros_like(x)], -1).view(1, 5, 1, 1, 1, 3)
        for k, expected in enumerate(kept):
            out = model.pool(torch.ones(1, 1, 1, 1, 1), torch.ones(1, 1, 4, 1, 1), geometry[:, k:k + 1])
            assert out.sum() == 4 * expected, (compat, k)


def test_geometry_projects_back_to_its_pixel():
    model, inputs = build_model(CFG), batch()
    geometry = model.geometry(*(inputs[n] for n in NAMES))
    assert geometry.shape == (2, 3, 8, 4, 6, 3)
    original = torch.linalg.inv(inputs['lidar_aug_matrix'])
    points = torch.einsum('bij,bn...j->bn...i', original[:, :3, :3], geometry) + original[:, None, None, None, None, :3, 3]
    for b in range(2):
        for n in range(3):
            flat = torch.cat([points[b, n].reshape(-1, 3), torch.ones(8 * 4 * 6, 1)], 1)
            image = flat @ inputs['lidar2image'][b, n].T
            depth = image[:, 2]
            uv = (inputs['img_aug_matrix'][b, n, :2, :2] @ (image[:, :2] / depth[:, None]).T).T
            uv = uv + inputs['img_aug_matrix'][b, n, :2, 3]
            expected = model.frustum.reshape(-1, 3)
            torch.testing.assert_close(depth, expected[:, 2], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(uv, expected[:, :2], rtol=1e-4, atol=1e-2)


def test_frustum_positions_are_cell_centres_and_in_compat_the_published_ones():
    ours, old = build_model(CFG), build_model(CFG, compat='reference')
    assert ours.frustum[0, 0, :, 0].tolist() == [4, 12, 20, 28, 36, 44] and ours.frustum[0, :, 0, 1].tolist() == [4, 12, 20, 28]
    torch.testing.assert_close(old.frustum[0, 0, :, 0], torch.linspace(0, 47, 6))
    assert ours.frustum[:, 0, 0, 2].tolist() == list(range(1, 9)) == old.frustum[:, 0, 0, 2].tolist()


def test_the_grid_of_the_configuration_survives_a_checkpoint_of_another_resolution():
    fine = build_model({**CFG, 'xbound': [-9.6, 9.6, 0.4], 'ybound': [-6.4, 6.4, 0.4]})
    coarse = build_model(CFG)
    state = {k: v.clone() for k, v in coarse.state_dict().items()}
    state['depthnet.weight'] += 1
    missing, unexpected = fine.load_state_dict(state)
    assert not missing and not unexpected
    assert fine.nx.tolist() == [48, 32, 1] and fine.dx.tolist()[:2] == pytest.approx([0.4, 0.4])
    assert torch.equal(fine.depthnet.weight, state['depthnet.weight'])
    report = fine.grid_not_loaded
    assert [k for k, v in report.items() if v['differs']] == ['dx', 'bx', 'nx'] and not report['frustum']['differs']
    assert report['nx'] == {'checkpoint': [24, 16, 1], 'model': [48, 32, 1], 'differs': True}
    # a frustum of another shape, and a checkpoint without the constants
    state['frustum'] = torch.zeros(3, 4, 6, 3)
    fine.load_state_dict(state)
    assert fine.frustum.shape == (8, 4, 6, 3) and fine.grid_not_loaded['frustum']['checkpoint'] == [3, 4, 6, 3]
    fine.load_state_dict({k: v for k, v in state.items() if k.startswith(('depthnet', 'downsample'))})
    assert fine.grid_not_loaded == {}
    assert build_model(CFG).load_state_dict({}, strict=False).missing_keys.count('dx') == 0


@torch.no_grad()
@pytest.mark.parametrize('compat', [None, 'reference'])
def test_a_further_grid_is_pooled_from_the_same_depth_and_context(compat):
    model, inputs = build_model(CFG, compat=compat).eval(), batch()
    features = torch.randn(2, 3, 6, 4, 6)
    names = set(model.state_dict())
    alone = model(features, **inputs)
    grid = model.add_grid('map', [-9.6, 9.6, 0.4], [-6.4, 6.4, 0.4], 2)
    assert grid.shape == (24, 16) and set(model.state_dict()) - names == {
        name.replace('downsample.', 'extra_downsample.map.') for name in names if name.startswith('downsample.')}
    maps = model(features, **inputs)
    assert torch.equal(maps[None], alone) and maps['map'].shape == (2, 4, 24, 16)
    geometry = model.geometry(*(inputs[n] for n in NAMES))
    depth, context = model.depth_and_context(features, inputs)
    fine = build_model({**CFG, 'xbound': [-9.6, 9.6, 0.4], 'ybound': [-6.4, 6.4, 0.4]}, compat=compat)
    pooled = fine.pool(depth, context, geometry)
    torch.testing.assert_close(model.pool(depth, context, geometry, model.extra_grids['map']), pooled)
    torch.testing.assert_close(maps['map'], model.extra_downsample['map'](pooled * 4))
    volume = torch.einsum('bndhw,bnchw->bndhwc', depth, context)
    torch.testing.assert_close(model.pool_volume(volume, geometry, model.extra_grids['map']), pooled, rtol=1e-4, atol=1e-5)
    with pytest.raises(GridError, match="grid of 'other': xbound/ybound with downsample 2.* 25 cells"):
        model.add_grid('other', [-10, 10, 0.8], [-6.4, 6.4, 0.8], 2)
    assert 'other' not in model.extra_grids


@torch.no_grad()
def test_geometry_stays_float32_under_autocast():
    model, inputs = build_model(CFG).eval(), batch()
    features = torch.randn(2, 3, 6, 4, 6)
    plain = model.geometry(*(inputs[n] for n in NAMES))
    out = model(features, **inputs)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert torch.equal(model.geometry(*(inputs[n] for n in NAMES)), plain)
        mixed = model(features, **inputs)
    assert (mixed.float() - out).abs().max() < 0.05 * out.abs().max()


@pytest.mark.parametrize('compat', [None, 'reference'])
def test_no_point_in_range_gives_zero_and_gradients_everywhere(compat):
    model, inputs = build_model(CFG, compat=compat), batch()
    inputs['lidar_aug_matrix'] = inputs['lidar_aug_matrix'].clone()
    inputs['lidar_aug_matrix'][:, 0, 3] = 500.0
    pooled = {}
    model.downsample.register_forward_pre_hook(lambda _, args: pooled.update(x=args[0]))
    model(torch.randn(2, 3, 6, 4, 6), **inputs).sum().backward()
    assert (pooled['x'] == 0).all() and pooled['x'].shape == (2, 4, 24, 16)
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name


def test_samples_do_not_mix_and_the_map_is_x_before_y():
    model, inputs = build_model({**CFG, 'downsample': 1}).eval(), batch()
    features = torch.randn(2, 3, 6, 4, 6)
    with torch.no_grad():
        both = model(features, **inputs)
        for b in range(2):
            one = model(features[b:b + 1], **{k: v[b:b + 1] for k, v in inputs.items()})
            torch.testing.assert_close(one[0], both[b], rtol=1e-5, atol=1e-6)
    geometry = torch.tensor([5.0, -3.0, 0.0]).view(1, 1, 1, 1, 1, 3)
    hit = model.pool(torch.ones(1, 1, 1, 1, 1), torch.ones(1, 1, 4, 1, 1), geometry)
    assert hit[0, 0].nonzero().tolist() == [[int((5 + 9.6) / 0.8), int((-3 + 6.4) / 0.8)]]


def test_errors_name_what_is_missing_or_wrong():
    model, inputs = build_model(CFG), batch()
    with pytest.raises(ValueError, match=r'image features are \(5, 6\), feature_size says \(4, 6\)'):
        model(torch.randn(2, 3, 6, 5, 6), **inputs)
    del inputs['camera2lidar']
    with pytest.raises(ValueError, match="the batch has no 'camera2lidar'"):
        model(torch.randn(2, 3, 6, 4, 6), **inputs)
    with pytest.raises(ValueError, match='feature_size must be'):
        build_model({**CFG, 'feature_size': [4]})
    with pytest.raises(TypeError, match="no argument 'dbounds'; did you mean 'dbound'"):
        build_model({**CFG, 'dbounds': 3})


@pytest.mark.gpu
def test_gpu_equals_cpu():
    model, inputs = build_model(CFG).eval(), batch()
    features = torch.randn(2, 3, 6, 4, 6)
    with torch.no_grad():
        expected = model(features, **inputs)
        got = model.cuda()(features.cuda(), **{k: v.cuda() for k, v in inputs.items()}).cpu()
    # single frustum points may fall into the neighbouring cell; convolutions may use TF32
    assert (got - expected).norm() <= 5e-3 * expected.norm()
