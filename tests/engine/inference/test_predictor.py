"""Whole detectors prepared for predictions give what the plain ones give, for every set of sensors and both kinds of heads."""
import copy
import importlib.util

import pytest
import torch
from mmcv.parallel import DataContainer, collate
from small_heads import TRANSFUSION, merged
from testing import REPO
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmdet3d_ext.engine.inference import Predictor, fold_model
from mmdet3d_ext.engine.timing import profile_step
from mmdet3d_ext.geometry import on_device
from mmdet3d_ext.models.builder import build_model
from mmdet3d_ext.models.detectors import bevfusion

spec = importlib.util.spec_from_file_location('real_heads_for_inference', REPO / 'tests/models/detectors/test_with_real_heads.py')
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
small, CPU = real.small, torch.device('cpu')

GRID = {'point_cloud_range': real.RANGE, 'grid_size': [256, 192, 1], 'voxel_size': [0.1, 0.1, 8.0], 'out_size_factor': 8}
QUERIES = merged(TRANSFUSION, {
    'in_channels': 12, 'bbox_coder': {'pc_range': real.RANGE[:2], 'voxel_size': [0.1, 0.1]}, 'train_cfg': GRID,
    'test_cfg': {'grid_size': [256, 192, 1], 'voxel_size': [0.1, 0.1], 'pc_range': real.RANGE[:2]}})
HEADS = {'centerpoint': real.CENTER, 'transfusion': QUERIES}
SENSORS = [('camera',), ('lidar',), ('radar',), ('camera', 'lidar'), ('camera', 'lidar', 'radar')]


def detector(*sensors, head='centerpoint'):
    """A detector whose norms have statistics of their own and whose heads find something."""
    torch.manual_seed(0)
    model = build_model({**small.config(*sensors), 'heads': {'object': HEADS[head], 'map': real.MAP}})
    model.init_weights()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.7, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    return model.eval()


def frame(*sensors, seed=0):
    batch = {k: v for k, v in small.batch(seed=seed).items() if not k.startswith('gt_')}
    return batch if 'camera' in sensors else {k: v for k, v in batch.items() if k != 'img'}


def close(found, expected, atol=1e-4):
    """Maps and sorted scores agree; nine boxes of ten have a counterpart (of equally good ones either may be the last one taken)."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one['masks_bev'], other['masks_bev'], rtol=0, atol=atol)
        assert len(one['scores_3d']) == len(other['scores_3d']) > 0
        torch.testing.assert_close(one['scores_3d'].sort().values, other['scores_3d'].sort().values, rtol=0, atol=atol)
        gap = (one['boxes_3d'].tensor[:, None] - other['boxes_3d'].tensor).abs().amax(-1)
        gap[one['labels_3d'][:, None] != other['labels_3d']] = float('inf')
        assert (gap.amin(0) <= 20 * atol).float().mean() >= (0.9 if atol else 1)


@pytest.mark.parametrize('sensors', SENSORS)
@pytest.mark.parametrize('head', HEADS)
def test_prepared_equals_plain(sensors, head):
    model = detector(*sensors, head=head)
    frames = [frame(*sensors, seed=seed) for seed in range(2)]
    plain, state = Predictor(model, CPU), copy.deepcopy(model.state_dict())
    expected = [plain(x) for x in frames]
    ready = Predictor(copy.deepcopy(model), CPU)
    norms = sum(isinstance(m, _BatchNorm) for m in model.modules())
    said = ready.prepare(frames[0], channels_last=True)
    assert said.startswith(f'{norms} batch norms folded into convolutions, 0 kept; outputs differ by ')
    assert not any(isinstance(m, _BatchNorm) for m in ready.model.modules())
    for x, want in zip(frames, expected, strict=True):
        close(ready(x), want)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items()), 'a copy was prepared, not this one'


@pytest.mark.parametrize('points', [[200, 0], [0, 0], [1, 0]])
def test_folded_on_one_frame_right_on_frames_without_points(points):
    model = detector('camera', 'lidar')
    plain, ready = Predictor(model, CPU), Predictor(copy.deepcopy(model), CPU)
    ready.fold(frame('camera', 'lidar'))
    x = {k: v for k, v in small.batch(points=points).items() if not k.startswith('gt_')}
    close(ready(x), plain(x))


@pytest.mark.parametrize('head', HEADS)
def test_stored_weights_give_what_autocast_gives(head, monkeypatch):
    monkeypatch.setattr(torch.backends.mha, 'get_fastpath_enabled', lambda: False)  # of float32 weights on the CPU, not of a GPU
    model, x = detector('camera', 'lidar', head=head), frame('camera', 'lidar')
    plain, ready = (Predictor(copy.deepcopy(model), CPU, torch.bfloat16) for _ in range(2))
    expected = plain(x)
    report = ready.store_weights(x)
    assert report.difference == 0 and report.megabytes > 0
    for one, other in zip(ready(x), expected, strict=True):
        assert torch.equal(one['masks_bev'], other['masks_bev']) and torch.equal(one['boxes_3d'].tensor, other['boxes_3d'].tensor)
    types = {name: p.dtype for name, p in ready.model.named_parameters()}
    assert types['fuser.0.weight'] == types['encoders.camera.backbone.conv1.weight'] == torch.bfloat16
    in_float32 = {name for name, dtype in types.items() if dtype == torch.float32}
    assert in_float32 == set(report.kept) & set(types)
    norms = {f'{name}.{key}' for name, m in ready.model.named_modules() if isinstance(m, _BatchNorm) for key in ('weight', 'bias')}
    assert norms <= in_float32 and all(name in in_float32 for name in types if name.startswith('encoders.lidar.'))
    assert all(name in in_float32 for name in types if 'posembed' in name), 'positions are embedded in float32'
    with pytest.raises(ValueError, match='weights are stored in torch.bfloat16 already, and folding computes in float32; fold first'):
        ready.fold(x)
    with pytest.raises(ValueError, match='float32 casts no weights'):
        plain.dtype = None
        plain.store_weights(x)


def test_geometry_is_found_by_the_loaders_matrices():
    model = detector('camera', 'lidar')
    predictor = Predictor(model, CPU)
    x = frame('camera', 'lidar')
    want = predictor(x)
    predictor.keep_geometry(2)
    loaded = [{key: DataContainer(value[b], cpu_only=key == 'metas', stack=isinstance(value, torch.Tensor), pad_dims=None)
               for key, value in x.items()} for b in range(2)]
    loaded = collate(loaded, samples_per_gpu=2)
    for given in (x, loaded, loaded):
        close(predictor(given), want, atol=0)
    assert predictor.geometry_hits() == {'hits': 2, 'misses': 1}
    predictor(frame('camera', 'lidar', seed=5))  # other augmentation
    assert predictor.geometry_hits() == {'hits': 2, 'misses': 2}


def test_one_download_for_all_heads(monkeypatch):
    model, x, calls = detector('lidar', head='centerpoint'), frame('lidar'), []
    monkeypatch.setattr(bevfusion, 'download', lambda tensors: calls.append(len(tensors)) or on_device.download(tensors))
    Predictor(model, CPU)(x)
    assert calls == [2]


def test_another_decoding_of_a_subclass_is_used():
    model, x = detector('lidar'), frame('lidar')
    head = model.heads['object']

    class Own(type(head)):
        def get_bboxes(self, preds, metas=None):
            return [(boxes[:1], scores[:1], labels[:1]) for boxes, scores, labels in super().get_bboxes(preds, metas)]

    head.__class__ = Own
    assert [len(output['scores_3d']) for output in Predictor(model, CPU)(x)] == [1, 1]


def test_a_model_of_another_kind_is_folded_too():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

        def forward(self, img, return_loss=True):
            assert not return_loss
            return self.layers(img)

    assert fold_model(Plain().eval(), {'img': torch.randn(1, 3, 6, 6)}, CPU).folded == (('layers.0', 'layers.1'),)


@pytest.mark.gpu
@pytest.mark.parametrize('head', HEADS)
def test_on_a_gpu(head, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)  # other weights would be rounded otherwise, to ten bits
    device, x = torch.device('cuda'), frame('camera', 'lidar')
    model = detector('camera', 'lidar', head=head)
    expected = Predictor(copy.deepcopy(model), device)(x)
    ready = Predictor(copy.deepcopy(model), device)
    assert ready.fold(x).kept == {}
    ready.keep_geometry()
    close(ready(x), expected, atol=1e-3)
    close(ready(x), expected, atol=1e-3)
    half = Predictor(copy.deepcopy(model), device, torch.float16)
    auto = half(x)
    print(half.prepare(x, channels_last=True))
    for one, other in zip(half(x), auto, strict=True):
        torch.testing.assert_close(one['masks_bev'], other['masks_bev'], rtol=0, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize('head', HEADS)
def test_the_host_waits_once_for_a_frame_of_cameras(head):
    """No voxels are counted there, so the one wait is that for the results."""
    device, x = torch.device('cuda'), frame('camera')
    predictor = Predictor(detector('camera', head=head), device, torch.float16)
    predictor.prepare(x)
    x = {key: value if key in bevfusion.MATRICES else on_gpu(value, device) for key, value in x.items()}
    for _ in range(2):
        predictor(x)
    found = profile_step(device, lambda: predictor(x), None)
    # The one wait is for the event behind the results' copy; the profiler's own end counts as one more.
    sites = {site: n for site, n in found['wait_sites'].items() if not site.startswith('torch/cuda/streams.py')}
    assert not sites and sum(found['wait_sites'].values()) <= 1 and found['host_waits'] <= 2, (found['host_waits'], found['wait_sites'])


def on_gpu(value, device):
    if isinstance(value, list):
        return [on_gpu(item, device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
