"""Grids on which sensors meet, and a trunk of its own for the map: detection does not notice, coarse checkpoints go on."""
import copy
import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
from testing import REPO

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.config import load_config
from mmdet3d_ext.engine.checkpoint.weights import load_state
from mmdet3d_ext.geometry import GridError
from mmdet3d_ext.models.builder import build_model

spec = importlib.util.spec_from_file_location('small_models', Path(__file__).with_name('test_bevfusion.py'))
small = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small)

X, Y = [-12.8, 12.8], [-9.6, 9.6]
# The main trunk has cells of 0.8 m (camera grid 0.4 m, halved); the map's of 0.4 m (camera grid 0.2 m, halved).
BRANCH = {'map': {'camera': {'xbound': [*X, 0.2], 'ybound': [*Y, 0.2], 'downsample': 2}, 'grid': [[*X, 0.4], [*Y, 0.4]]}}


def fine(*sensors, **more):
    return small.config(*(sensors or ('camera', 'lidar')), branches=copy.deepcopy(BRANCH), **more)


def predict(model, data):
    model.eval()
    with torch.no_grad():
        return model(**{k: v for k, v in data.items() if not k.startswith('gt_')})


# ---- a trunk of the map's own --------------------------------------------------------------------------------------------
def test_a_branch_trains_with_a_gradient_for_every_parameter():
    model, data = build_model(fine()), small.batch()
    losses = model(**data)
    sum(v for k, v in losses.items() if k.startswith('loss/')).backward()
    small.check_gradients(model)
    names = {name.split('.')[0] + '.' + name.split('.')[1] for name, _ in model.named_parameters()}
    assert 'branches.map' in names
    assert predict(model, data)[0]['masks_bev'].shape == (2, 64, 48), 'twice the cells of the main trunk'


def test_a_finer_map_leaves_detection_as_it_was():
    torch.manual_seed(1)
    coarse, data = build_model(small.config('camera', 'lidar')), small.batch()
    before = predict(coarse, data)
    model = build_model(fine())
    model.load_state_dict(coarse.state_dict(), strict=False)
    after = predict(model, data)
    for old, new in zip(before, after, strict=True):
        for key in ('boxes_3d', 'scores_3d', 'labels_3d'):
            a, b = getattr(old[key], 'tensor', old[key]), getattr(new[key], 'tensor', new[key])
            assert torch.equal(a, b), key
        assert old['masks_bev'].shape != new['masks_bev'].shape
    # and training the map alone does not change it either, running statistics included
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(('branches.map', 'heads.map')))
    kept = [model.get_submodule(name) for name in ('encoders', 'fuser', 'decoder', 'heads.object')]
    for part in kept:
        part.eval()
    for part in (model.encoders['camera']['vtransform'].extra_downsample,):
        part.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    losses = model(**data)
    sum(v for k, v in losses.items() if k.startswith('loss/map')).backward()
    optimizer.step()
    for new, newer in zip(after, predict(model, data), strict=True):
        assert torch.equal(new['scores_3d'], newer['scores_3d']) and not torch.equal(new['masks_bev'], newer['masks_bev'])


def test_frozen_main_parts_stay_while_the_branch_learns():
    camera = [f'encoders.camera.{part}' for part in ('backbone', 'neck', 'vtransform.dtransform', 'vtransform.depthnet',
                                                     'vtransform.downsample')]
    model, data = build_model(fine(freeze=[*camera, 'encoders.lidar', 'fuser', 'decoder', 'heads.object'])), small.batch()
    before = predict(model, data)
    model.train()
    losses = model(**data)
    assert not any(name.startswith('loss/object') for name in losses), 'nothing of detection is learned'
    sum(v for k, v in losses.items() if k.startswith('loss/')).backward()
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.rsplit('.', 1)[0] for name in free} and all(name.startswith((
        'branches.map', 'heads.map', 'encoders.camera.vtransform.extra_downsample.map')) for name in free)
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    after = predict(model, data)
    assert torch.equal(before[0]['scores_3d'], after[0]['scores_3d'])
    assert not torch.equal(before[0]['masks_bev'], after[0]['masks_bev'])


def test_the_branch_starts_from_the_main_trunk_of_a_coarser_checkpoint():
    torch.manual_seed(2)
    coarse, model = build_model(small.config('camera', 'lidar')), build_model(fine())
    report = load_state(model, coarse.state_dict(), 'coarse.pth')
    assert not report.missing and not report.mismatched and not report.unexpected
    own, old = model.state_dict(), coarse.state_dict()
    pairs = (('branches.map.fuser.', 'fuser.'), ('branches.map.decoder.', 'decoder.'),
             ('encoders.camera.vtransform.extra_downsample.map.', 'encoders.camera.vtransform.downsample.'))
    for new, main in pairs:
        names = [name for name in own if name.startswith(new)]
        assert names
        for name in names:
            assert torch.equal(own[name], old[main + name[len(new):]]), name
    # a checkpoint that has the branch keeps it
    with torch.no_grad():
        model.branches['map'].fuser[0].weight.fill_(3)
    again = build_model(fine())
    again.load_state_dict(model.state_dict())
    assert (again.branches['map'].fuser[0].weight == 3).all() and not (again.fuser[0].weight == 3).any()


def test_recomputing_a_branch_and_the_pooling_changes_no_gradient():
    torch.manual_seed(4)
    plain, data = build_model(fine()), small.batch()
    lean = build_model(fine(checkpoint=['encoders.camera.vtransform', 'decoder', 'branches.map.decoder', 'branches.map.fuser']))
    lean.load_state_dict(plain.state_dict())
    for model in (plain, lean):
        sum(v for k, v in model(**data).items() if k.startswith('loss/')).backward()
    theirs = dict(lean.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(theirs[name].grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(lean.state_dict()[name], value, msg=name)


def test_a_pooled_map_keeps_its_mean_at_another_cell_size():
    model, data = build_model(fine('camera')), small.batch()
    transform = model.encoders['camera']['vtransform']
    transform.downsample, transform.extra_downsample['map'] = torch.nn.Identity(), torch.nn.Identity()
    with torch.no_grad():
        maps = model.extract_camera(data)
    assert maps[None].shape[-2:] == (64, 48) and maps['map'].shape[-2:] == (128, 96) and maps[None].abs().sum() > 0
    torch.testing.assert_close(torch.nn.functional.avg_pool2d(maps['map'], 2), maps[None], rtol=1e-4, atol=1e-4)


def test_lidar_alone_and_a_branch_of_other_channels():
    cfg = small.config('lidar', branches={'map': {'grid': BRANCH['map']['grid'], 'fuser': None, 'decoder': small.decoder(8)}})
    model, data = build_model(cfg), small.batch()
    assert predict(model, data)[0]['masks_bev'].shape == (2, 64, 48)
    other = small.config('lidar', branches={'map': {'grid': BRANCH['map']['grid'], 'decoder': {
        'backbone': {'type': 'SECOND', 'in_channels': 8, 'out_channels': [12], 'layer_nums': [1], 'layer_strides': [1]}}}})
    own = build_model(other)
    report = load_state(own, build_model(small.config('lidar')).state_dict(), 'coarse.pth')
    assert all(name.startswith('branches.map.decoder.') for name in report.missing) and report.missing, 'new: named, not copied'


def test_the_depth_loss_of_bevdepth_comes_with_a_branch():
    cfg = fine('camera')
    cfg['encoders']['camera'] = copy.deepcopy(cfg['encoders']['camera'])
    cfg['encoders']['camera']['vtransform'].update(type='AwareBEVDepth', bevdepth_downsample=8, bevdepth_refine=True)
    data = {**small.batch(), 'depths': torch.rand(2, 2, 32, 48) * 10}
    model = build_model(cfg)
    losses = model(**data)
    assert 'loss/depth' in losses
    sum(v for k, v in losses.items() if k.startswith('loss/')).backward()
    small.check_gradients(model)


# ---- one grid for sensors of different cells -----------------------------------------------------------------------------
def other_cells(step, **more):
    cfg = small.config('camera', 'lidar', **more)
    cfg['encoders'] = copy.deepcopy(cfg['encoders'])
    cfg['encoders']['camera']['vtransform'].update(xbound=[*X, step], ybound=[*Y, step])
    return cfg


def test_sensors_of_different_cells_meet_on_the_declared_grid():
    with pytest.raises(ValueError, match='camera: 64x48 cells.*lidar: 32x24 cells'):
        build_model(other_cells(0.2))
    for cells in (32, 48, 64):  # the LiDAR's, between, the camera's
        grid = [{'range': X, 'cells': cells}, {'range': Y, 'cells': cells * 3 // 4}]
        model, data = build_model(other_cells(0.2, fused_grid=grid)), small.batch()
        names = set(model.state_dict())
        assert names == set(build_model(small.config('camera', 'lidar')).state_dict()), 'resampling has no state'
        losses = model(**data)
        sum(v for k, v in losses.items() if k.startswith('loss/')).backward()
        small.check_gradients(model)
        assert predict(model, data)[0]['masks_bev'].shape == (2, cells, cells * 3 // 4)


def test_a_declared_grid_that_all_sensors_have_changes_nothing():
    torch.manual_seed(3)
    plain, data = build_model(small.config('camera', 'lidar')), small.batch()
    same = build_model(small.config('camera', 'lidar', fused_grid=[[*X, 0.8], [*Y, 0.8]]))
    same.load_state_dict(plain.state_dict())
    assert torch.equal(predict(plain, data)[1]['masks_bev'], predict(same, data)[1]['masks_bev'])


@pytest.mark.parametrize('change, error, message', [
    ({'fused_grid': [[-10, 10, 0.8], [*Y, 0.8]]}, GridError, 'model.fused_grid is 25x24.*BEV map of the camera covers'),
    ({'branches': {'map': {'camera': BRANCH['map']['camera']}}}, ValueError, 'model.branches.map.grid is missing'),
    ({'branches': {'map': {**BRANCH['map'], 'gird': 1}}}, ValueError, "model.branches.map: unknown key 'gird'"),
    ({'branches': {'lanes': BRANCH['map']}}, ValueError, "model.branches: there is no head 'lanes'"),
    ({'branches': {'map': BRANCH['map'], 'object': BRANCH['map']}}, ValueError, 'every head .* main one would train for nothing'),
    ({'branches': {'map': {'grid': [[-10, 10, 0.4], [*Y, 0.4]]}}}, GridError, 'model.branches.map.grid is 50x48'),
    ({'branches': {'map': {**BRANCH['map'], 'camera': {'xbound': [*X, 0.3], 'ybound': [*Y, 0.2]}}}}, GridError,
     "grid of 'map': xbound/ybound .*0.3 m does not divide"),
])
def test_wrong_grids_are_named(change, error, message):
    with pytest.raises(error, match=message):
        build_model(small.config('camera', 'lidar', **copy.deepcopy(change)))


def test_a_grid_for_a_camera_that_is_not_there():
    with pytest.raises(ValueError, match='model.encoders.camera is null'):
        build_model(small.config('lidar', branches=copy.deepcopy(BRANCH)))


# ---- the shipped stages, in small ------------------------------------------------------------------------------------------
STAGES = REPO / 'configs/nuscenes/multitask'
# 1/20 of the range with the stages' cells; fewer channels where the configuration allows it.
HALF = ['--bev.x', '[-4.8, 4.8]', '--bev.y', '[-4.8, 4.8]', '--image_size', '[64, 160]']


def stage(name, labels):
    cells = {'stage1_600': 48, 'stage2_800': 64}.get(name)
    words = ['--bev.labels', f'{{x: [-4, 4], y: [-4, 4], step: null, cells: {labels}}}']
    words += ['--bev.map.cells', str(cells)] if cells else []
    cfg = load_config(str(STAGES / f'{name}.yaml'), HALF + words).to_dict()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        return build_model(cfg['model']), cfg


def test_each_stage_loads_the_one_before_and_detects_the_same():
    torch.manual_seed(0)
    phase3, cfg = stage('phase3_400', 32)
    data = inputs(cfg)
    boxes = predict(phase3, data)
    stage1, cfg1 = stage('stage1_600', 48)
    report = load_state(stage1, phase3.state_dict(), 'phase3.pth')
    new = {name.rsplit('.', 2)[0] for name in report.missing}
    assert new == {'heads.map.decoder.2', 'heads.map.decoder.3', 'heads.map'}, 'the two further layers and the auxiliary classifier'
    assert {m[0].rsplit('.', 2)[0] for m in report.mismatched} == {'heads.map.decoder.1'}, '256 -> 128 became 256 -> 256'
    assert not report.unexpected
    same_boxes(boxes, predict(stage1, data))
    stage2, cfg2 = stage('stage2_800', 64)
    report = load_state(stage2, stage1.state_dict(), 'stage1.pth')
    assert report.complete and not report.unexpected
    assert set(report.grid) == {f'encoders.camera.vtransform.{name}' for name in ('dx', 'bx', 'nx', 'frustum')}
    found = predict(stage2, data)
    same_boxes(boxes, found)
    assert found[0]['masks_bev'].shape == (6, 64, 64)


def same_boxes(before, after):
    assert len(before[0]['boxes_3d']) > 0
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old['boxes_3d'].tensor, new['boxes_3d'].tensor) and torch.equal(old['scores_3d'], new['scores_3d'])
        assert torch.equal(old['labels_3d'], new['labels_3d'])


def inputs(cfg):
    data = small.batch(samples=1, points=300)
    data['img'] = torch.rand(1, 2, 3, *cfg['image_size'], generator=torch.Generator().manual_seed(5))
    data['points'] = [cloud * torch.tensor([0.35, 0.35, 1, 1, 1]) for cloud in data['points']]
    return data


def test_a_stage_trains_with_a_gradient_for_every_parameter():
    torch.manual_seed(0)
    model, cfg = stage('stage1_600', 48)
    data = {**inputs(cfg), **boxes_and_map(cfg, 48)}
    losses = model(**data)
    names = {name.split('/')[-1] for name in losses if name.startswith('loss/map/')}
    assert names == {'focal', 'dice', 'aux_focal', 'aux_dice'}
    assert all(torch.isfinite(value).all() for value in losses.values())
    sum(v for k, v in losses.items() if k.startswith('loss/')).backward()
    small.check_gradients(model)


def boxes_and_map(cfg, labels):
    from mmdet3d.core.bbox import LiDARInstance3DBoxes
    boxes = LiDARInstance3DBoxes(torch.tensor([[1.0, 2, -1, 4, 2, 1.6, 0.3, 1, 0]]), box_dim=9)
    masks = torch.rand(1, len(cfg['map_classes']), labels, labels, generator=torch.Generator().manual_seed(6)) < 0.2
    return {'gt_bboxes_3d': [boxes], 'gt_labels_3d': [torch.tensor([0])], 'gt_masks_bev': masks.long()}
