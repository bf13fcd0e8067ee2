"""Every published model runs forward and backward on a small scene, with a gradient in every parameter."""
import importlib.util
from pathlib import Path

import pytest
import torch

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.models.builder import build_model


def sibling(name, folder='.'):
    path = Path(__file__).parent / folder / f'{name}.py'
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONFIGS, HEADS = sibling('reference_configs'), sibling('dummy_heads')
SMALL = sibling('test_bevfusion', 'detectors')


def shrink(value, key=None):
    """The same cells and channels in a scene of +-12.8 m (12 m for the models of 54 m) and images of 64 x 192 pixels."""
    if isinstance(value, dict):
        return {k: shrink(v, k) for k, v in value.items()}
    if key in ('xbound', 'ybound', 'point_cloud_range'):
        small = {51.2: 12.8, 54.0: 12.0}
        return [v if abs(v) not in small else small[abs(v)] * (1 if v > 0 else -1) for v in value]
    if key in ('output_shape', 'sparse_shape'):
        return [{1440: 320, 41: 41}.get(n, n // 4) for n in value]
    if key in ('image_size', 'feature_size'):
        return [value[0] // 4, value[1] * 3 // 11]
    return value


def scene(radar_features):
    """Two cameras, 300 points in the first sample and none in the last."""
    data = SMALL.batch(points=[300, 0])
    data['img'] = torch.rand(2, 2, 3, 64, 192)
    for key in ('camera_intrinsics', 'lidar2image'):
        data[key] = data[key].clone()
    data['camera_intrinsics'][..., 0, 0] = data['camera_intrinsics'][..., 1, 1] = 100.0
    data['camera_intrinsics'][..., 0, 2], data['camera_intrinsics'][..., 1, 2] = 96.0, 32.0
    data['lidar2image'] = data['camera_intrinsics'] @ data['lidar2camera']
    data['radar'] = [torch.cat([p[:, :3], torch.rand(len(p), radar_features - 3)], 1) for p in data['points']]
    data['depths'] = torch.rand(2, 2, 64, 192) * 20
    return data


@pytest.mark.parametrize('name', CONFIGS.RUNNABLE)
def test_a_published_model_trains(name):
    torch.manual_seed(0)
    cfg = shrink(CONFIGS.CONFIGS[name])
    neck = cfg['decoder']['neck']
    channels = neck['out_channels'] if isinstance(neck['out_channels'], int) else sum(neck['out_channels'])
    model = build_model({'type': 'BEVFusion', **cfg, 'heads': {'map': {'type': HEADS.DummyMapHead, 'in_channels': channels}}})
    losses = model(**scene(45))
    assert ('loss/depth' in losses) == ('bevdepth' in name or 'dlss' in name)
    assert all(torch.isfinite(v) for v in losses.values())
    sum(losses.values()).backward()
    SMALL.check_gradients(model)
