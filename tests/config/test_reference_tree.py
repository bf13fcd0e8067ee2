"""A whole tree in the reference's dialect: it says the same as the shipped one, and a user's own leaves in it train."""
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import reference_tree
import torch

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.config import load_config

CENTER, FUSION = reference_tree.CENTER + 'lssfpn/', reference_tree.FUSION + 'secfpn/'
RADAR = CENTER + 'camera+radar/resnet50/'
SHIPPED = Path(__file__).resolve().parents[2] / 'configs'
LEAVES = [name for name in reference_tree.FILES if name not in (
    'default.yaml', 'nuscenes/default.yaml', 'nuscenes/det/default.yaml', 'nuscenes/seg/default.yaml',
    reference_tree.CENTER + 'default.yaml', CENTER + 'default.yaml', CENTER + 'camera/default.yaml',
    CENTER + 'camera/256x704/default.yaml', CENTER + 'camera+radar/default.yaml', reference_tree.FUSION + 'default.yaml',
    FUSION + 'default.yaml', FUSION + 'camera+lidar/default.yaml', FUSION + 'lidar/default.yaml')]

# What a leaf of the reference is told, by key.
ALWAYS = {'data.val.test_mode'}
CENTERPOINT = {'model.heads.object.test_cfg.min_radius', 'model.heads.object.train_cfg.dense_reg',
               'model.heads.object.test_cfg.max_per_img'}
SWEEPS, PASTE = {'train_pipeline'}, {'gt_paste_stop_epoch'}
PILLARS = FUSION + 'lidar/pointpillars.yaml'
SAID = {
    PILLARS: ALWAYS | SWEEPS | {'model.heads.object.test_cfg.grid_size'},
    RADAR: ALWAYS | CENTERPOINT | PASTE | {f'data.{part}.modality' for part in ('train.dataset', 'val', 'test')},
    CENTER + 'camera/': ALWAYS | CENTERPOINT | {'lr_config.min_lr_ratio'},
    FUSION: ALWAYS | SWEEPS,
    'nuscenes/seg/': ALWAYS,
}


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
    return reference_tree.write(tmp_path_factory.mktemp('reference'))


def load(path, *overrides):
    """The configuration, and what was said about it: key -> message."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        cfg = load_config(str(path), list(overrides))
    found = [str(entry.message) for entry in caught]
    keys = [re.search(r"key '([^']+)':|'([^']+)' is called", message) for message in found]
    said = {key[1] or key[2]: message for key, message in zip(keys, found, strict=True)}
    assert len(said) == len(found), 'nothing is said twice'
    return cfg, said


def without_null(value):
    return {k: without_null(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def test_the_tree_holds_the_models_that_are_shipped():
    from test_reference_configs import MODELS, TEMPLATES
    assert set(MODELS) - set(TEMPLATES) <= set(LEAVES)


@pytest.mark.parametrize('name', LEAVES)
def test_a_leaf_is_the_shipped_model(tree, name):
    """The same model, key by key, but for what is known to differ; the same optimizer, schedule and length."""
    cfg, said = load(tree / name)
    shipped = load_config(str(SHIPPED / name))
    assert set(said) == next(keys for prefix, keys in SAID.items() if name.startswith(prefix))
    assert all('\n' not in message and re.match(r'.*\.yaml:\d+: key ', message) for message in said.values())
    ours, theirs = (without_null(c.to_dict()['model']) for c in (shipped, cfg))
    for model in (ours, theirs):
        head = model['heads'].get('object', {})
        head.pop('class_names', None)                    # by name here, by number there
        for section in ('train_cfg', 'test_cfg'):
            settings = head.get(section, {})
            if 'grid_size' in settings:
                settings['grid_size'] = settings['grid_size'][:2]
            for key in ('dense_reg', 'max_objs', 'max_per_img', 'max_pool_nms'):
                settings.pop(key, None)
            if 'min_radius' in settings and section == 'test_cfg':
                settings['min_radius'] = len(settings['min_radius'])  # squares there
        if 'camera' in model['encoders']:
            model['encoders']['camera']['vtransform'].pop('depth_feature_channels', None)
    assert theirs == ours
    assert cfg.optimizer.type == shipped.optimizer.type and cfg.optimizer.lr == shipped.optimizer.lr
    assert cfg.lr_config.policy == shipped.lr_config.policy and cfg.max_epochs == shipped.max_epochs
    assert (cfg.get('momentum_config') is None) == (shipped.momentum_config is None)


@pytest.mark.parametrize('name', LEAVES)
def test_training_takes_it_as_it_is(tree, name):
    """The check before training refuses nothing in it; a LiDAR model's different sweeps are said with the number to write."""
    from mmdet3d_ext.checks import check_config
    report = check_config(load(tree / name)[0], 8)
    template = name.endswith('swint_v0p075/default.yaml')  # no fuser: it is there to be inherited from
    assert [error.key for error in report.errors] == (['model.fuser'] if template else [])
    sweeps = 'data.train.dataset.pipeline.2.sweeps_num'
    assert {one.key: one.write for one in report.warnings if 'sweeps_num' in one.key} == (
        {sweeps: {sweeps: 9}} if name.startswith(FUSION) else {})


@pytest.mark.parametrize('name', [RADAR + 'dlss.yaml', FUSION + 'camera+lidar/swint_v0p075/convfuser.yaml'])
def test_its_models_have_the_published_weights(tree, name):
    import json

    from testing import shared_dir

    from mmdet3d_ext.models.builder import build_model
    published = json.loads(shared_dir('parity', 'state_dicts.json').read_text())[name]
    model = build_model(load(tree / name)[0].to_dict()['model'])
    assert {key: list(value.shape) for key, value in model.state_dict().items()} == published


def test_overrides_reach_what_is_derived(tree):
    cfg, _ = load(tree / (FUSION + 'lidar/voxelnet.yaml'), '--voxel_size', '[0.2, 0.2, 0.2]', '--load_dim', '6',
                  '--fp16.loss_scale.growth_interval', '100', '--augment2d.gridmask.prob', '0.7')
    assert cfg.model.encoders.lidar.voxelize.voxel_size == [0.2, 0.2, 0.2] and cfg.fp16.loss_scale.growth_interval == 100
    for pipeline in (cfg.train_pipeline, cfg.data.train.dataset.pipeline, cfg.evaluation.pipeline):
        assert [step.load_dim for step in pipeline if step.type.startswith('LoadPoints')] == [6, 6]
    assert next(step for step in cfg.data.train.dataset.pipeline if step.type == 'GridMask').prob == 0.7


def test_the_dump_in_a_run_folder_of_the_reference_is_a_configuration(tree, tmp_path):
    """mmcv writes everything resolved, with the run's folder; nothing vouches for a key by using it any more."""
    import yaml
    cfg, said = load(tree / (RADAR + 'dlss.yaml'))
    (tmp_path / 'configs.yaml').write_text(yaml.safe_dump({**cfg.to_dict(), 'run_dir': 'runs/run-12345678-12345678'}))
    again, repeated = load(tmp_path / 'configs.yaml')
    assert again.to_dict() == {**cfg.to_dict(), 'run_dir': 'runs/run-12345678-12345678'}
    assert set(repeated) < set(said)


# ---- a user's own leaves ---------------------------------------------------------------------------------------------------
DATA = '''
dataset_root: ROOT/
image_size: [64, 160]
augment2d:
  resize: [[0.5, 0.6], [0.5, 0.5]]
data:
  samples_per_gpu: 2
  workers_per_gpu: 0
'''
MY_RADAR = DATA + '''
point_cloud_range: [-6.4, -6.4, -5.0, 6.4, 6.4, 3.0]
gt_paste_stop_epoch: -1
model:
  encoders:
    camera:
      backbone: {depth: 18, init_cfg: null}
      neck: {in_channels: [64, 128, 256, 512], out_channels: [16, 16, 16, 16]}
      vtransform:
        in_channels: 64
        xbound: [-6.4, 6.4, 0.8]
        ybound: [-6.4, 6.4, 0.8]
    radar:
      backbone:
        pts_middle_encoder: {output_shape: [16, 16]}
  decoder:
    backbone: {blocks: [[1, 32, 2], [1, 64, 2], [1, 64, 1]]}
    neck: {in_channels: [64, 32], out_channels: 256}
  heads:
    object:
      train_cfg: {grid_size: [128, 128, 1]}
      test_cfg: {min_radius: [2.0, 3.5, 3.2, 1.0, 0.9, 0.4]}
train_pipeline: TRAIN
lr_config: {warmup_iters: 2}
momentum_config: {policy: cyclic}
total_epochs: 1
fp16: {loss_scale: dynamic}
log_config: {interval: 1}
'''
MY_FUSION = DATA + '''
point_cloud_range: [-6.0, -6.0, -5.0, 6.0, 6.0, 3.0]
gt_paste_stop_epoch: -1
model:
  encoders:
    camera:
      backbone: {init_cfg: null, depths: [1, 1, 1, 1]}
      vtransform:
        xbound: [-6.0, 6.0, 0.3]
        ybound: [-6.0, 6.0, 0.3]
    lidar:
      backbone: {sparse_shape: [160, 160, 41]}
  heads:
    object:
      num_proposals: 30
      train_cfg: {grid_size: [160, 160, 41]}
      test_cfg: {grid_size: [160, 160, 41]}
    map:
      type: EnhancedBEVSegmentationHead
      in_channels: 512
      classes: ${map_classes}
      grid_transform:
        input_scope: [[-6.0, 6.0, 0.6], [-6.0, 6.0, 0.6]]
        output_scope: [[-6.0, 6.0, 0.5], [-6.0, 6.0, 0.5]]
      aspp_channels: 32
      decoder_channels: [32, 32]
      deep_supervision: true
      use_dice_loss: true
  loss_scale: {object: 1.0, map: 2.0}
train_pipeline: TRAIN
test_pipeline: TEST
'''


@pytest.fixture(scope='module')
def data_root(synthetic_root, tmp_path_factory):
    from mmdet3d_ext.datasets.nuscenes_converter import create_infos
    root = tmp_path_factory.mktemp('data')
    for entry in Path(synthetic_root).iterdir():
        (root / entry.name).symlink_to(entry)
    create_infos(root, root, version='v1.0-mini')
    return root


def write_leaf(tmp_path, name, text, data_root, **pipelines):
    """The tree with a leaf of one's own: ``TRAIN`` and ``TEST`` stand for pipelines that are written out."""
    from reference_pipelines import pipelines as written
    text = text.replace('ROOT', str(data_root))
    if pipelines:
        both = written(**pipelines).replace('[-50.0, 50.0, 0.5]', '[-6.0, 6.0, 0.5]')
        train, test = re.split(r'^test_pipeline:', both.split('train_pipeline:')[1], flags=re.M)
        text = text.replace('train_pipeline: TRAIN', f'train_pipeline:{train}').replace('test_pipeline: TEST',
                                                                                       f'test_pipeline:{test}')
    return reference_tree.write(tmp_path, {name: text}) / name


def test_a_camera_and_radar_model_of_ones_own_trains_and_is_evaluated(tmp_path, data_root):
    """Five radars, through the whole of tools/train.py: schedules, hooks, loss scaling, evaluation, checkpoint."""
    from mmdet3d_ext.datasets.builder import build_dataset
    from mmdet3d_ext.datasets.nuscenes_schema import RADARS
    from mmdet3d_ext.engine.train import Options, train
    leaf = write_leaf(tmp_path, RADAR + 'mine.yaml', MY_RADAR, data_root, train_sweeps=0, radar=True, maps=False)
    cfg, said = load(leaf, '--data.train.dataset.load_interval', '6', '--data.val.load_interval', '3')
    assert "'total_epochs' is called 'max_epochs' here" in said['total_epochs'] and cfg.max_epochs == cfg.runner.max_epochs == 1
    settings = cfg.to_dict()['data']['train']['dataset']
    dataset = build_dataset(dict(settings, pipeline=None))
    assert set(dataset.get_data_info(0)['radar']) == set(RADARS) and len(RADARS) == 5
    sample = build_dataset(settings).load_sample(0)
    assert sample['radar'].data.shape[1] == 45 and len(sample['radar'].data) > 0 and sample['img'].data.shape[0] == 6
    result = train(cfg, Options(run_dir=str(tmp_path / 'run')), torch.device('cpu'))
    assert np.isfinite(result.metrics['object/nds']) and (tmp_path / 'run/epoch_1.pth').is_file() and not result.save_failed


def test_a_joint_camera_and_lidar_model_of_ones_own_trains(tmp_path, data_root):
    """Both heads in a leaf of the detection folder, as projects that grew out of the reference have it."""
    from mmcv.parallel import collate

    from mmdet3d_ext.datasets.builder import build_dataset
    from mmdet3d_ext.engine.parallel import unpack_batch
    from mmdet3d_ext.models.builder import build_model
    name = FUSION + 'camera+lidar/swint_v0p075/mine.yaml'
    leaf = write_leaf(tmp_path, name, MY_FUSION, data_root, train_sweeps=9, radar=False, maps=True)
    cfg, said = load(leaf, '--model.fuser', '{type: ConvFuser, in_channels: [80, 256], out_channels: 256}', '--allow-new')
    assert set(said) == ALWAYS
    plain = cfg.to_dict()
    dataset = build_dataset(plain['data']['train']['dataset'])
    batch = unpack_batch(collate([dataset.load_sample(i) for i in (0, 1)], samples_per_gpu=2), torch.device('cpu'))
    losses = build_model(plain['model'])(**batch)
    assert {'loss/object/layer_-1_loss_bbox', 'loss/map/divider/dice', 'loss/map/divider/aux_focal'} <= set(losses)
    assert all(torch.isfinite(value).all() for value in losses.values())
