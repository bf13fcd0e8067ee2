"""LiDAR and radar pillar encoders: values against loops, order of axes, and input with (almost) nothing in it."""
import pytest
import torch

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.registry import MODELS

RANGE = [-8, -6, -5, 8, 6, 3]
GRID = {'point_cloud_range': RANGE, 'voxel_size': [0.5, 0.5, 8]}
PILLARS = {'type': 'PointPillarsEncoder', 'pts_voxel_encoder': {'type': 'PillarFeatureNet', 'in_channels': 5,
                                                                'feat_channels': [8, 6], **GRID},
           'pts_middle_encoder': {'type': 'PointPillarsScatter', 'in_channels': 6, 'output_shape': [32, 24]}}
RADAR = {'type': 'RadarEncoder', 'pts_voxel_encoder': {'type': 'RadarFeatureNet', 'in_channels': 9, 'feat_channels': [8, 6],
                                                       **GRID},
         'pts_middle_encoder': {'type': 'PointPillarsScatter', 'in_channels': 6, 'output_shape': [32, 24]}}


def pillars(count, features, seed=0, slots=4):
    """Random pillars with 1..slots points each; unused slots are zero."""
    torch.manual_seed(seed)
    cells = torch.randperm(32 * 24)[:count]
    coords = torch.stack([torch.zeros_like(cells), cells // 24, cells % 24, torch.zeros_like(cells)], 1).int()
    sizes = torch.randint(1, slots + 1, (count, )).int()
    points = torch.randn(count, slots, features) * (torch.arange(slots) < sizes[:, None])[..., None]
    return points, coords, sizes


def centre(coords):
    return torch.tensor([-8 + 0.5 * (coords[1] + 0.5), -6 + 0.5 * (coords[2] + 0.5)])


@torch.no_grad()
def test_pillar_features_equal_a_loop():
    net = MODELS.build(PILLARS['pts_voxel_encoder']).eval()
    for norm in (net.pfn_layers[0].norm, net.pfn_layers[1].norm):
        torch.nn.init.normal_(norm.bias)
    points, coords, sizes = pillars(20, 5)
    out = net(points, sizes, coords)
    for k in range(20):
        n = int(sizes[k])
        x = torch.zeros(4, 10)
        own = points[k, :n]
        x[:n] = torch.cat([own, own[:, :3] - own[:, :3].mean(0), own[:, :2] - centre(coords[k].float())], 1)
        for i, layer in enumerate(net.pfn_layers):
            x = torch.relu(layer.norm(layer.linear(x)))  # empty slots take part, as in PointPillars
            if i == 0:
                x = torch.cat([x, x.max(0).values.expand(4, -1)], 1)
        torch.testing.assert_close(out[k], x.max(0).values, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_radar_features_equal_a_loop_and_leave_the_input_alone():
    net = MODELS.build(RADAR['pts_voxel_encoder']).eval()
    points, coords, sizes = pillars(20, 9)
    points[3, 0, 7] = float('nan')  # an unknown attribute counts as zero
    before = points.clone()
    out = net(points, sizes, coords)
    assert torch.equal(points.nan_to_num(), before.nan_to_num())
    low, high = torch.tensor(RANGE[:3]), torch.tensor(RANGE[3:])
    for k in range(20):
        n = int(sizes[k])
        x = torch.zeros(4, 11)
        own = points[k, :n]
        position = (own[:, :3] - low) / (high - low)
        x[:n] = torch.cat([position, own[:, 3:].nan_to_num(), own[:, :2] - centre(coords[k].float())], 1)
        for layer in net.rfn_layers:
            x = torch.relu(layer.norm(layer.linear(x)))
        torch.testing.assert_close(out[k], x.max(0).values, rtol=1e-4, atol=1e-5)


def test_scatter_is_x_before_y_and_keeps_empty_samples():
    scatter = MODELS.build({'type': 'PointPillarsScatter', 'in_channels': 2, 'output_shape': [5, 3]})
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    out = scatter(features, torch.tensor([[0, 4, 1, 0], [2, 0, 2, 0]], dtype=torch.int32), 4)
    assert out.shape == (4, 2, 5, 3) and out.nonzero().tolist() == [[0, 0, 4, 1], [0, 1, 4, 1], [2, 0, 0, 2], [2, 1, 0, 2]]
    assert out[2, :, 0, 2].tolist() == [3, 4]


@pytest.mark.parametrize('cfg, features', [(PILLARS, 5), (RADAR, 9)])
@pytest.mark.parametrize('count', [0, 1, 2, 30])
@pytest.mark.parametrize('slots', [1, 4])
def test_any_number_of_pillars_trains_with_a_gradient_everywhere(cfg, features, count, slots):
    model = MODELS.build(cfg)
    points, coords, sizes = pillars(count, features, slots=slots)
    out = model(points, coords, 2, sizes)
    assert out.shape == (2, 6, 32, 24) and (out[1] == 0).all() and torch.isfinite(out).all()
    out.square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name


@torch.no_grad()
@pytest.mark.parametrize('cfg, features', [(PILLARS, 5), (RADAR, 9)])
def test_a_single_pillar_is_the_same_alone_and_among_others(cfg, features):
    model = MODELS.build(cfg).eval()
    points, coords, sizes = pillars(10, features)
    alone = model(points[:1], coords[:1], 1, sizes[:1])
    among = model(points, coords, 1, sizes)
    x, y = coords[0, 1:3].tolist()
    torch.testing.assert_close(alone[0, :, x, y], among[0, :, x, y])
    assert alone.count_nonzero() == alone[0, :, x, y].count_nonzero()


def test_averaged_voxels_are_refused_by_name():
    with pytest.raises(ValueError, match='set voxelize_reduce: false'):
        MODELS.build(PILLARS)(torch.zeros(3, 5), torch.zeros(3, 4).int(), 1, torch.ones(3).int())
