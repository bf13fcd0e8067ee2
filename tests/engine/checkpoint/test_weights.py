"""Picking weights, matching them with a model, and the report."""
import logging
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
        self.vtransform.bx = nn.Parameter(torch.tensor([-54 + step / 2] * 2 + [0.0]), requires_grad=False)
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
    averaged = {'model.w': raw['w'], 'model_ema.module.w': ema['w']}  # both in one state dict (Lightning, timm)
    assert list(files.pick_weights({'state_dict': averaged}, 'f')[0]) == ['model.w']
    assert files.pick_weights({'state_dict': averaged}, 'f', 'ema')[0] == {'module.w': ema['w']}
    assert files.pick_weights({'state_dict': {'ema.w': ema['w']}}, 'f') == ({'w': ema['w']}, 'EMA weights')
    assert pick({'state_dict': raw, 'meta': ['no', 'mapping']}) == 0 and pick({'model': {1: raw['w']}, 'ema': ema}) == 1
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
    assert report.complete and len(report.grid) == 4 and len(report.grid_differs) == 3
    text = report.text()
    assert 'grid, not loaded: encoders.camera.vtransform.dx' in text and 'differs from' in text
    assert 'file 360 x 360 cells of 0.3 m from (-54, -54) m; configuration, in use: 540 x 540 cells of 0.2 m' in text
    with pytest.raises(CheckpointError, match='another camera grid: the file has 360 x 360 cells of 0.3 m .*, the configuration '
                                              '540 x 540 cells of 0.2 m .*dx, .*nx differ.*--load_from'):
        files.check_same_run(target, {}, Model(step=0.3).state_dict(), path)
    files.check_same_run(target, {}, Model(step=0.2).state_dict(), path)


def test_the_view_transform_keeps_its_cells(tmp_path):
    from mmdet3d_ext.registry import MODELS
    models = []
    for step in (0.3, 0.2):
        model = nn.Module()
        model.vtransform = MODELS.build(dict(
            type='LSSTransform', in_channels=4, out_channels=3, image_size=[16, 32], feature_size=[2, 4], xbound=[-54, 54, step],
            ybound=[-54, 54, step], zbound=[-10, 10, 20], dbound=[1, 5, 1], downsample=2))
        models.append(model)
    with torch.no_grad():
        models[0].vtransform.depthnet.weight.fill_(3.0)
    report = load_weights(models[1], save({'state_dict': models[0].state_dict()}, tmp_path / 'c.pth'), complete=True)
    transform = models[1].vtransform
    assert transform.nx.tolist() == [540, 540, 1] and transform.dx.tolist() == pytest.approx([0.2, 0.2, 20])
    assert transform.bev_shape == (270, 270) and float(transform.depthnet.weight.detach().min()) == 3
    assert sorted(report.grid_differs) == ['vtransform.bx', 'vtransform.dx', 'vtransform.nx']  # the frustum is the image's
    assert '360 x 360 cells of 0.3 m' in report.text() and '540 x 540 cells of 0.2 m' in report.text()


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
    assert report.relaid == (['conv.weight'] if layout == 'spconv1' else [])


@pytest.mark.parametrize('layout', ['spconv1', 'spconv2'])
def test_kernels_of_the_sparse_encoder(tmp_path, layout):
    """A kernel whose sizes equal its channels fits both layouts by its shape; the rest of the file decides."""
    from mmdet3d_ext.models.backbones.sparse_layers import sparse
    model = nn.Module()
    model.a, model.b = sparse().SubMConv3d(3, 3, 3, bias=False), sparse().SubMConv3d(3, 8, 3, bias=False)
    wanted = {name: torch.arange(conv.weight.numel()).float().reshape(conv.weight.shape) for name, conv in
              (('a', model.a), ('b', model.b))}  # (out, kx, ky, kz, in)
    state = {f'{name}.weight': w if layout == 'spconv2' else w.movedim(0, -1).contiguous() for name, w in wanted.items()}
    report = load_weights(model, save({'state_dict': state}, tmp_path / 'c.pth'), complete=True)
    assert all(torch.equal(getattr(model, name).weight.detach(), w) for name, w in wanted.items())
    assert report.relaid == ([] if layout == 'spconv1' else ['a.weight', 'b.weight'])


# ---- several files, deeper models ------------------------------------------------------------------------------------

def test_a_detector_and_a_map_model_seed_a_multitask_model(tmp_path, caplog):
    det = save({'state_dict': filled(Model(heads=('object',)), 2.0).state_dict()}, tmp_path / 'det.pth')
    seg = save({'state_dict': filled(Model(heads=('map',)), 3.0).state_dict()}, tmp_path / 'seg.pth')
    target = filled(Model(heads=('object', 'map')), 1.0)
    with caplog.at_level('INFO', 'load'):
        first, second = files.load_files(target, files.path_list(f'{det},{seg}'), logging.getLogger('load'))
    mean = lambda module: float(module.weight.detach().mean())  # noqa: E731
    assert mean(target.heads['object']) == mean(target.decoder['backbone'][0]) == mean(target.encoders['camera'].conv) == 2
    assert mean(target.heads['map']) == 3 and not first.complete and second.complete
    assert second.matched == ['heads.map.weight', 'heads.map.bias'] and len(second.kept) == 9 and second.share == 1
    assert '9 given by an earlier file' in second.text() and 'weights of 2 files: 13 tensors matched, 0 missing' in caplog.text
    assert not [record for record in caplog.records if record.levelname != 'INFO'] and 'nothing loaded' not in caplog.text
    target = filled(Model(heads=('object', 'map')), 1.0)
    caplog.clear()
    with caplog.at_level('INFO', 'load'):  # neither has the map head; one has a detector of another shape
        torch.save({'state_dict': {**torch.load(det)['state_dict'], 'heads.object.weight': torch.ones(1, 7)}}, tmp_path / 'odd.pth')
        files.load_files(target, [str(tmp_path / 'odd.pth'), det], logging.getLogger('load'), min_matched=0)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
    assert warning.startswith('weights of 2 files: 11 tensors matched, 2 missing, 0 of another shape, 0 unexpected')
    assert 'no file: heads.map (2 tensors)' in warning and 'heads.map' in warning and '<- nothing loaded' in warning
    target = filled(Model(heads=('object', 'map')), 1.0)
    files.load_files(target, [seg, det])  # the first file's trunk wins
    assert mean(target.decoder['backbone'][0]) == 3 and mean(target.heads['object']) == 2


def test_files_of_load_from(tmp_path):
    odd = save({}, tmp_path / 'a,b.pth')
    assert files.path_list(None) == files.path_list('') == []
    assert files.path_list(odd) == [odd] and files.path_list('a.pth, b.pth,') == ['a.pth', 'b.pth']
    assert files.path_list('[a.pth, "b.pth"]') == ['a.pth', 'b.pth'] and files.path_list('a[1].pth') == ['a[1].pth']
    assert files.path_list(['x.pth', tmp_path / 'y.pth']) == ['x.pth', str(tmp_path / 'y.pth')]


@pytest.mark.parametrize('channels, other_shape', [((8, 8, 8, 8), 0), ((8, 8, 4, 4), 0), ((16, 8, 8, 8), 4)])
def test_a_deeper_decoder_lists_what_is_new(tmp_path, channels, other_shape):
    """A head with two decoder blocks for 400 x 400 labels seeds one with four for 500 x 500."""
    from mmdet3d_ext.registry import MODELS
    heads = []
    for step, widths in ((0.25, (8, 8)), (0.2, channels)):
        scope = {'input_scope': [[-54, 54, 0.6]] * 2, 'output_scope': [[-50, 50, step]] * 2}
        heads.append(Model(heads=()))
        heads[-1].heads['map'] = MODELS.build(dict(type='EnhancedBEVSegmentationHead', in_channels=4, grid_transform=scope,
                                                   classes=['road', 'divider'], aspp_channels=8, aspp_rates=(1,),
                                                   decoder_channels=widths))
    report = load_weights(heads[1], save({'state_dict': heads[0].state_dict()}, tmp_path / 'two.pth'))
    new = [name for name in heads[1].state_dict() if '.decoder.2.' in name or '.decoder.3.' in name]
    assert report.missing == new and not report.unexpected
    shown = report.text()
    assert (f'new, not in the file: heads.map.decoder.2 ({len(new) // 2} tensors), heads.map.decoder.3 '
            f'({len(new) // 2} tensors)') in shown
    shapes = [name for name, _, _ in report.mismatched if '.decoder.' in name]
    assert len(shapes) == other_shape and all(f'{name}: shape [' in shown for name in shapes)


def test_large_lists_are_cut():
    from mmdet3d_ext.engine.checkpoint.report import _listed
    assert _listed(['a.b.c', 'a.b.d', 'a.e', 'f'], ['a.g']) == 'a.b (2 tensors), a.e, f'
    assert _listed(['a.b', 'a.c'], []) == 'a (2 tensors)'
    assert _listed([f'm{i}.w' for i in range(40)], []).endswith('m11, and 28 more parts')
