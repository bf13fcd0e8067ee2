"""Picking weights, matching them with a model, and the report."""
from collections import OrderedDict

import pytest
import torch
from torch import nn

from mmdet3d_ext.engine import checkpoint as files
from mmdet3d_ext.engine.checkpoint import CheckpointError, load_weights


class Camera(nn.Module):
    def __init__(self, step=0.3):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.vtransform = nn.Module()
        self.vtransform.dx = nn.Parameter(torch.tensor([step, step, 20.0]), requires_grad=False)
        self.vtransform.nx = nn.Parameter(torch.tensor([round(108 / step)] * 2 + [1]), requires_grad=False)
        self.vtransform.frustum = nn.Parameter(torch.zeros(2, 2, 3), requires_grad=False)


class Model(nn.Module):
    """Names as in the real model."""

    def __init__(self, step=0.3, classes=10, heads=('object',)):
        super().__init__()
        self.encoders = nn.ModuleDict({'camera': Camera(step)})
        self.decoder = nn.ModuleDict({'backbone': nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))})
        self.heads = nn.ModuleDict({task: nn.Linear(4, classes) for task in heads})


def save(content, path):
    torch.save(content, path)
    return str(path)


def filled(model, value):
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.dim() != 3:
                tensor.fill_(value)
    return model


def test_which_weights_of_a_file(tmp_path):
    raw, ema = {'w': torch.zeros(1)}, {'w': torch.ones(1)}
    both = {'state_dict': raw, 'ema_state_dict': ema}
    pick = lambda content, prefer='auto': float(files.pick_weights(content, 'f', prefer)[0]['w'])  # noqa: E731
    assert pick(both) == 0 and pick(both, 'ema') == 1 and pick({**both, 'meta': {'evaluated_weights': 'ema'}}) == 1
    assert pick({**both, 'meta': {'evaluated_weights': 'ema'}}, 'raw') == 0
    assert pick({'ema_state_dict': ema}) == 1 and pick({'model': raw}) == 0 and pick(raw) == 0  # EMA-only, detectron, bare
    assert pick({'pytorch-lightning_version': '2.0', 'state_dict': raw, 'callbacks': {}}) == 0
    with pytest.raises(CheckpointError, match="holds no weights; its keys are \\['optimizer'\\]"):
        files.pick_weights({'optimizer': {}}, 'f')
    with pytest.raises(CheckpointError, match='Lightning file without weights'):
        files.pick_weights({'pytorch-lightning_version': '2.0', 'hyper': 1}, 'f')


@pytest.mark.parametrize('prefix', ['', 'module.', 'model.', 'module._orig_mod.'])
def test_prefixes_of_wrappers_are_removed(tmp_path, prefix):
    source, target = filled(Model(), 2.0), Model()
    path = save({'state_dict': {prefix + k: v for k, v in source.state_dict().items()}}, tmp_path / 'c.pth')
    report = load_weights(target, path, complete=True)
    assert report.complete and not report.unexpected and report.share == 1.0
    assert float(target.heads['object'].weight.detach().mean()) == 2.0


def test_report_counts_by_module_and_another_model_is_refused(tmp_path):
    source, target = filled(Model(heads=('object',)), 2.0), Model(heads=('map',))
    path = save({'state_dict': source.state_dict()}, tmp_path / 'det.pth')
    report = load_weights(target, path)
    assert report.by_module() == {
        'encoders.camera': dict(matched=2, missing=0, mismatched=0, unexpected=0),
        'decoder.backbone': dict(matched=7, missing=0, mismatched=0, unexpected=0),
        'heads.map': dict(matched=0, missing=2, mismatched=0, unexpected=0),
        'heads.object': dict(matched=0, missing=0, mismatched=0, unexpected=2)}
    assert 'heads.map' in report.text() and 'nothing loaded' in report.text()
    with pytest.raises(CheckpointError, match='(?s)lacks tensors of this model.*heads.map.weight'):
        load_weights(target, path, complete=True)
    other = save({'state_dict': {f'blocks.{i}.w': torch.ones(3) for i in range(30)}}, tmp_path / 'other.pth')
    with pytest.raises(CheckpointError, match=r'other.pth is of another model: 0 of its 30 tensors \(0%\)'):
        load_weights(target, other, allow_partial=True)
    few = {**{f'x.{i}': torch.ones(1) for i in range(20)}, 'heads.map.weight': torch.zeros(10, 4)}
    with pytest.raises(CheckpointError, match=r'1 of its 21 tensors \(5%\) match, 50% are needed'):
        load_weights(target, save({'state_dict': few}, tmp_path / 'few.pth'))
    load_weights(target, str(tmp_path / 'few.pth'), allow_partial=True)
    assert float(target.heads['map'].weight.detach().abs().sum()) == 0


def test_tensors_of_another_shape_are_listed_and_left_alone(tmp_path):
    target = filled(Model(classes=7), 1.0)
    report = load_weights(target, save({'state_dict': filled(Model(classes=10), 2.0).state_dict()}, tmp_path / 'c.pth'))
    assert report.mismatched == [('heads.object.weight', (10, 4), (7, 4)), ('heads.object.bias', (10,), (7,))]
    assert float(target.heads['object'].weight.detach().mean()) == 1.0 and float(target.encoders['camera'].conv.bias[0]) == 2.0
    assert 'shape [10, 4] in the file, [7, 4] in the model' in report.text()


def test_camera_grid_of_the_configuration_survives(tmp_path):
    path = save({'state_dict': Model(step=0.3).state_dict()}, tmp_path / 'c.pth')
    target = Model(step=0.2)
    report = load_weights(target, path, complete=True)
    assert target.encoders['camera'].vtransform.nx.tolist() == [540, 540, 1]
    assert float(target.encoders['camera'].vtransform.dx[0]) == pytest.approx(0.2)
    assert report.complete and len(report.grid) == 3 and len(report.grid_differs) == 2
    assert 'grid, not loaded: encoders.camera.vtransform.dx' in report.text() and 'differs from' in report.text()
    with pytest.raises(CheckpointError, match='another camera grid'):
        files.check_same_grid(target, Model(step=0.3).state_dict(), path)
    files.check_same_grid(target, Model(step=0.2).state_dict(), path)


def test_averages_of_mmcv_ema_hook_do_not_count_against_a_file(tmp_path):
    state = filled(Model(), 2.0).state_dict()
    state.update({f'ema_{k.replace(".", "_")}': v for k, v in list(state.items()) if 'vtransform' not in k})
    report = load_weights(Model(), save({'state_dict': state}, tmp_path / 'c.pth'), complete=True)
    assert report.unexpected == []


@pytest.mark.parametrize('layout', ['spconv1', 'spconv2', 'spconv2 without versions'])
def test_sparse_weights_of_every_layout(tmp_path, layout):
    from spconv.pytorch import SubMConv3d

    import mmdet3d_ext  # noqa: F401  (mmdet3d makes spconv's modules permute by version)
    model = nn.Module()
    model.conv = SubMConv3d(4, 6, 3, bias=True)
    wanted = torch.arange(model.conv.weight.numel()).float().reshape(model.conv.weight.shape)  # (out, kD, kH, kW, in)
    state = OrderedDict([('conv.weight', wanted), ('conv.bias', torch.ones(6))])
    if layout == 'spconv1':
        state['conv.weight'] = wanted.movedim(0, -1).contiguous()
    elif layout == 'spconv2':
        state._metadata = model.state_dict()._metadata
    report = load_weights(model, save({'state_dict': state}, tmp_path / 'c.pth'), complete=True)
    assert torch.equal(model.conv.weight.detach(), wanted)
    assert report.converted == (['conv.weight'] if layout == 'spconv1' else [])
