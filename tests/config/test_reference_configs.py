"""The shipped equivalents of the reference's 14 nuScenes models: names of weights, sensors, labels, grids, schedules."""
import json
import math
import warnings

import numpy as np
import pytest
import torch
from testing import REPO, shared_dir

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.config import load_config
from mmdet3d_ext.models.builder import build_model

DET, SEG = 'nuscenes/det/', 'nuscenes/seg/'
CENTER, FUSION = DET + 'centerhead/lssfpn/', DET + 'transfusion/secfpn/'
# Path below configs/, as the keys of state_dicts.json: sensors, and cells of the trunk along x.
MODELS = {
    CENTER + 'camera+radar/resnet50/default.yaml': ('camera radar', 128),
    CENTER + 'camera+radar/resnet50/dlss.yaml': ('camera radar', 128),
    CENTER + 'camera/256x704/resnet/bevdepth.yaml': ('camera', 128),
    CENTER + 'camera/256x704/resnet/default.yaml': ('camera', 128),
    CENTER + 'camera/256x704/swint/default.yaml': ('camera', 128),
    FUSION + 'camera+lidar/swint_v0p075/convfuser.yaml': ('camera lidar', 180),
    FUSION + 'camera+lidar/swint_v0p075/default.yaml': ('camera lidar', 180),
    FUSION + 'lidar/default.yaml': ('', 128),
    FUSION + 'lidar/pointpillars.yaml': ('lidar', 128),
    FUSION + 'lidar/voxelnet.yaml': ('lidar', 128),
    FUSION + 'lidar/voxelnet_0p075.yaml': ('lidar', 180),
    SEG + 'camera-bev256d2.yaml': ('camera', 128),
    SEG + 'fusion-bev256d2-lss.yaml': ('camera lidar', 128),
    SEG + 'lidar-centerpoint-bev128.yaml': ('lidar', 128),
}
TEMPLATES = (FUSION + 'camera+lidar/swint_v0p075/default.yaml', FUSION + 'lidar/default.yaml')  # no fuser; no encoder
RUNNABLE = [name for name in MODELS if name not in TEMPLATES]
WITH_DEPTH = (CENTER + 'camera+radar/resnet50/dlss.yaml', CENTER + 'camera/256x704/resnet/bevdepth.yaml')


def load(name, *overrides):
    return load_config(str(REPO / 'configs' / name), list(overrides))


def step(pipeline, kind):
    """The arguments of the only step of that type, None without one."""
    found = [s for s in pipeline if s['type'] == kind]
    assert len(found) <= 1
    return dict(found[0]) if found else None


# ---- weights ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('name', MODELS)
def test_names_and_shapes_of_all_weights(name):
    published = json.loads(shared_dir('parity', 'state_dicts.json').read_text())[name]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore' if name in TEMPLATES else 'error', UserWarning)
        model = build_model(load(name).to_dict()['model'])
    got = {key: list(value.shape) for key, value in model.state_dict().items()}
    assert got.keys() == published.keys()
    assert got == published
    assert all(p.requires_grad for p in model.parameters()), 'grid constants are no parameters to optimise'


def test_every_published_model_is_here():
    assert set(json.loads(shared_dir('parity', 'state_dicts.json').read_text())) == set(MODELS)


def test_templates_say_that_they_cannot_run():
    for name, word in zip(TEMPLATES, ('model.fuser is null', 'names no sensor'), strict=True):
        with pytest.warns(UserWarning, match=word):
            build_model(load(name).to_dict()['model'])


# ---- recipes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('name', MODELS)
def test_sensors_and_labels_of_a_recipe(name):
    cfg, sensors = load(name), MODELS[name][0]
    encoders = {sensor for sensor, encoder in (cfg.model.encoders or {}).items() if encoder}
    assert ' '.join(sorted(encoders)) == sensors
    modality = {sensor for sensor in ('camera', 'lidar', 'radar') if cfg.input_modality[f'use_{sensor}']}
    assert encoders <= modality and (modality - encoders == set() or not encoders), 'nothing is read that no encoder sees'
    for data in (cfg.data.train.dataset, cfg.data.val, cfg.data.test):
        assert data.modality == cfg.input_modality
        pipeline, training = data.pipeline, data is cfg.data.train.dataset
        depth = training and name in WITH_DEPTH
        assert (step(pipeline, 'LoadPointsFromFile') is not None) == ('lidar' in modality or depth)
        assert (step(pipeline, 'GTDepth') is not None) == depth
        assert (step(pipeline, 'LoadRadarPointsMultiSweeps') is not None) == ('radar' in sensors)
        assert ('radar' in step(pipeline, 'Collect3D')['keys']) == ('radar' in sensors)
        assert (step(pipeline, 'LoadBEVSegmentation') is not None) == bool(cfg.model.heads.get('map'))
        paste = step(pipeline, 'ObjectPaste')
        pastes = training and modality == {'lidar'} and name.startswith(DET)  # images are not pasted into
        assert (paste is not None) == pastes
        if paste is not None:
            assert paste['stop_epoch'] == 15 and set(paste['db_sampler']['sample_groups']) == set(cfg.object_classes)


@pytest.mark.parametrize('name', MODELS)
def test_training_and_test_see_the_same_sweeps(name):
    cfg = load(name)
    train, test = (step(p, 'LoadPointsFromMultiSweeps') for p in (cfg.train_pipeline, cfg.test_pipeline))
    if train is not None and test is not None:
        assert train['sweeps_num'] == test['sweeps_num'] == 9
        assert test.pop('test_mode') is True and test == train
    elif train is not None:
        assert train['sweeps_num'] == 0, 'depth labels come from the key frame'
    assert step(cfg.train_pipeline, 'LoadRadarPointsMultiSweeps') == step(cfg.test_pipeline, 'LoadRadarPointsMultiSweeps')


@pytest.mark.parametrize('name', RUNNABLE)
def test_grids_of_a_recipe(name):
    cfg, cells = load(name), MODELS[name][1]
    lo, hi = cfg.point_cloud_range[0], cfg.point_cloud_range[3]
    assert math.isclose((hi - lo) / cells, cfg.trunk_cell)
    encoders = cfg.model.encoders
    if encoders.get('camera'):
        x = encoders.camera.vtransform.xbound
        assert x[:2] == [lo, hi] and round((hi - lo) / x[2] / encoders.camera.vtransform.downsample) == cells
    if encoders.get('lidar'):
        size, shape = encoders.lidar.voxelize.voxel_size, encoders.lidar.backbone.get('sparse_shape')
        assert size == cfg.voxel_size and (shape is None or shape == [cells * 8, cells * 8, 41])
    if cfg.model.heads.get('map'):
        transform = cfg.model.heads.map.grid_transform
        assert transform.input_scope == [[lo, hi, cfg.trunk_cell]] * 2 and transform.output_scope == [[-50.0, 50.0, 0.5]] * 2


@pytest.mark.parametrize('name', [name for name in MODELS if name.startswith(CENTER)])
def test_suppression_radii_are_metres(name):
    cfg = load(name).model.heads.object.test_cfg
    assert np.allclose(np.square(cfg.min_radius), [4, 12, 10, 1, 0.85, 0.175], rtol=2e-3)


@pytest.mark.parametrize('name, lr, policy, momentum, epochs', [
    (CENTER + 'camera/256x704/swint/default.yaml', 2e-4, 'cyclic', 'cyclic', 20),
    (CENTER + 'camera+radar/resnet50/dlss.yaml', 2e-4, 'CosineAnnealing', None, 20),
    (FUSION + 'camera+lidar/swint_v0p075/convfuser.yaml', 2e-4, 'CosineAnnealing', 'cyclic', 6),
    (FUSION + 'lidar/voxelnet_0p075.yaml', 1e-4, 'cyclic', 'cyclic', 20),
    (SEG + 'camera-bev256d2.yaml', 1e-4, 'cyclic', 'cyclic', 20),
])
def test_schedules(name, lr, policy, momentum, epochs):
    from mmcv.runner import HOOKS
    cfg = load(name)
    assert cfg.optimizer.lr == lr and cfg.max_epochs == cfg.runner.max_epochs == epochs
    for settings, expected, kind in ((cfg.lr_config, policy, 'Lr'), (cfg.momentum_config, momentum, 'Momentum')):
        if expected is None:
            assert settings is None
            continue
        args = dict(settings)
        policy_name = args.pop('policy')
        assert policy_name == expected
        HOOKS.get(f'{policy_name.title() if policy_name == policy_name.lower() else policy_name}{kind}UpdaterHook')(**args)


def test_readme_overrides_of_the_reference_apply():
    cfg = load(FUSION + 'camera+lidar/swint_v0p075/convfuser.yaml', '--model.encoders.camera.backbone.init_cfg.checkpoint',
               'pretrained/swint-nuimages-pretrained.pth', '--load_from', 'pretrained/lidar-only-det.pth')
    assert cfg.model.encoders.camera.backbone.init_cfg == {'type': 'Pretrained',
                                                           'checkpoint': 'pretrained/swint-nuimages-pretrained.pth'}


def test_a_pretrained_file_is_loaded_or_named(tmp_path):
    swin = '--model.encoders.camera.backbone.init_cfg.checkpoint'
    cfg = load(SEG + 'camera-bev256d2.yaml', swin, str(tmp_path / 'swin.pth')).to_dict()['model']
    torch.save({'model': {'patch_embed.proj.weight': torch.full((96, 3, 4, 4), 0.5)}}, tmp_path / 'swin.pth')  # Swin's names
    model = build_model(cfg)
    model.init_weights()
    assert (model.encoders['camera']['backbone'].patch_embed.projection.weight == 0.5).all()
    (tmp_path / 'swin.pth').unlink()
    with pytest.raises(RuntimeError, match=r'model\.encoders\.camera\.backbone\.init_cfg\.checkpoint: .*swin\.pth'):
        build_model(cfg).init_weights()
