"""A tree in the reference's dialect loads as it is; what means something else here is said in one line."""
import re
import warnings

import pytest
from testing import REPO

from mmdet3d_ext.config import ConfigError, load_config, schema

# As a user of the reference has it: bare expressions, pipelines written out, keys that only some models read.
ROOT = '''
seed: 0
deterministic: false
checkpoint_config: {interval: 1, max_keep_ckpts: 1}
log_config: {interval: 50, hooks: [{type: TextLoggerHook}, {type: TensorboardLoggerHook}]}
load_from: null
resume_from: null
cudnn_benchmark: false
fp16: {loss_scale: {growth_interval: 2000}}
max_epochs: 20
runner:
  type: CustomEpochBasedRunner
  max_epochs: ${max_epochs}
'''
POINTS = '''
  - {type: LoadMultiViewImageFromFiles, to_float32: true}
  - {type: LoadPointsFromFile, coord_type: LIDAR, load_dim: "${load_dim}", use_dim: "${use_dim}",
     reduce_beams: "${reduce_beams}", load_augmented: "${load_augmented}"}
  - {type: LoadPointsFromMultiSweeps, sweeps_num: SWEEPS, load_dim: "${load_dim}", use_dim: "${use_dim}",
     reduce_beams: "${reduce_beams}", pad_empty_sweeps: true, remove_close: true, load_augmented: "${load_augmented}"}
  - {type: LoadRadarPointsMultiSweeps, load_dim: 18, sweeps_num: "${radar_sweeps}", use_dim: "${radar_use_dims}",
     max_num: "${radar_max_points}", compensate_velocity: "${radar_compensate_velocity}", filtering: "${radar_filtering}",
     normalize: "${radar_normalize}"}
  - {type: LoadAnnotations3D, with_bbox_3d: true, with_label_3d: true, with_attr_label: False}
'''
FINISH = '''
  - {type: ImageNormalize, mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}
  - {type: DefaultFormatBundle3D, classes: "${object_classes}"}
  - {type: Collect3D, keys: [img, points, radar, gt_bboxes_3d, gt_labels_3d],
     meta_keys: [camera_intrinsics, camera2ego, lidar2ego, lidar2camera, lidar2image, camera2lidar, img_aug_matrix,
                 lidar_aug_matrix]}
  - {type: GTDepth, keyframe_only: true}
'''
NUSCENES = '''
dataset_type: NuScenesDataset
dataset_root: data/nuscenes/
gt_paste_stop_epoch: -1
reduce_beams: 32
load_dim: 5
use_dim: 5
load_augmented: null
point_cloud_range: [-51.2, -51.2, -5.0, 51.2, 51.2, 3.0]
voxel_size: [0.1, 0.1, 0.2]
image_size: [256, 704]
augment2d: {resize: [[0.38, 0.55], [0.48, 0.48]], rotate: [-5.4, 5.4], gridmask: {prob: 0.0, fixed_prob: true}}
augment3d: {scale: [0.9, 1.1], rotate: [-0.78539816, 0.78539816], translate: 0.5}
object_classes: [car, truck, construction_vehicle, bus, trailer, barrier, motorcycle, bicycle, pedestrian, traffic_cone]
map_classes: [drivable_area, ped_crossing, walkway, stop_line, carpark_area, divider]
input_modality: {use_lidar: true, use_camera: true, use_radar: false, use_map: false, use_external: false}
radar_sweeps: 6
radar_max_points: 2500
radar_use_dims: [0, 1, 2, 5, 8, 9, 18, 19, 20, 21]
radar_compensate_velocity: true
radar_filtering: none
radar_voxel_size: [0.8, 0.8, 8]
radar_jitter: 0
radar_normalize: false
train_pipeline:
''' + POINTS.replace('SWEEPS', '0') + '''
  - type: ObjectPaste
    stop_epoch: ${gt_paste_stop_epoch}
    db_sampler:
      dataset_root: ${dataset_root}
      info_path: ${'data/nuscenes/' + "nuscenes_dbinfos_train.pkl"}
      rate: 1.0
      classes: ${object_classes}
      sample_groups: {car: 2}
  - type: ImageAug3D
    final_dim: ${image_size}
    resize_lim: ${augment2d.resize[0]}
    bot_pct_lim: [0.0, 0.0]
    rot_lim: ${augment2d.rotate}
    rand_flip: true
    is_train: true
  - {type: GlobalRotScaleTrans, resize_lim: "${augment3d.scale}", rot_lim: "${augment3d.rotate}",
     trans_lim: "${augment3d.translate}", is_train: true}
  - {type: RandomFlip3D}
  - {type: PointsRangeFilter, point_cloud_range: "${point_cloud_range}"}
  - {type: ObjectRangeFilter, point_cloud_range: "${point_cloud_range}"}
  - {type: ObjectNameFilter, classes: "${object_classes}"}
  - {type: GridMask, use_h: true, use_w: true, max_epoch: "${max_epochs}", rotate: 1, offset: false, ratio: 0.5, mode: 1,
     prob: "${augment2d.gridmask.prob}", fixed_prob: "${augment2d.gridmask.fixed_prob}"}
  - {type: PointShuffle}
''' + FINISH + 'test_pipeline:\n' + POINTS.replace('SWEEPS', '9') + FINISH + '''
data:
  samples_per_gpu: 4
  workers_per_gpu: 4
  train:
    type: CBGSDataset
    dataset: &set {type: "${dataset_type}", dataset_root: "${dataset_root}", ann_file: "${dataset_root + 'train.pkl'}",
                   pipeline: "${train_pipeline}", object_classes: "${object_classes}", map_classes: "${map_classes}",
                   modality: "${input_modality}", test_mode: false, use_valid_flag: true, box_type_3d: LiDAR}
  val: {<<: *set, ann_file: "${dataset_root + 'val.pkl'}", pipeline: "${test_pipeline}"}
  test: {<<: *set, ann_file: "${dataset_root + 'val.pkl'}", pipeline: "${test_pipeline}", test_mode: true}
evaluation:
  interval: 1
  pipeline: ${test_pipeline}
model: {type: BEVFusion, encoders: null, fuser: null, heads: {map: null}}
lr_config: {policy: CosineAnnealing, warmup: linear, warmup_iters: 500, warmup_ratio: 0.33333333, min_lr_ratio: 1.0e-3}
'''
CENTERPOINT = '''
model:
  decoder:
    backbone: {type: GeneralizedResNet, in_channels: 8, blocks: [[1, 8, 2], [1, 8, 2]]}
    neck: {type: LSSFPN, in_indices: [-1, 0], in_channels: [8, 8], out_channels: 8, scale_factor: 2}
  heads:
    object:
      type: CenterHead
      in_channels: 8
      tasks: [["car"], ["truck", "construction_vehicle"], ["bus", "trailer"], ["barrier"], ["motorcycle", "bicycle"],
              ["pedestrian", "traffic_cone"]]
      common_heads: {reg: [2, 2], height: [1, 2], dim: [3, 2], rot: [2, 2], vel: [2, 2]}
      share_conv_channel: 8
      norm_bbox: true
      train_cfg: {point_cloud_range: "${point_cloud_range}", grid_size: [1024, 1024, 1], voxel_size: "${voxel_size}",
                  out_size_factor: 8, dense_reg: 1, gaussian_overlap: 0.1, max_objs: 500, min_radius: 2,
                  code_weights: [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.2]}
      test_cfg: {post_center_limit_range: [-61.2, -61.2, -10.0, 61.2, 61.2, 10.0], max_per_img: 500, max_pool_nms: false,
                 min_radius: [4, 12, 10, 1, 0.85, 0.175], score_threshold: 0.1, out_size_factor: 8,
                 voxel_size: "${voxel_size[:2]}", nms_type: [circle, rotate, rotate, circle, rotate, rotate],
                 nms_scale: [[1.0], [1.0, 1.0], [1.0, 1.0], [1.0], [1.0, 1.0], [2.5, 4.0]], pre_max_size: 1000,
                 post_max_size: 83, nms_thr: 0.2}
      bbox_coder: {type: CenterPointBBoxCoder, pc_range: "${point_cloud_range}", max_num: 500, score_threshold: 0.1,
                   post_center_range: [-61.2, -61.2, -10.0, 61.2, 61.2, 10.0], out_size_factor: 8,
                   voxel_size: "${voxel_size[:2]}", code_size: 9}
'''
RADAR = '''
model:
  encoders:
    radar:
      voxelize_reduce: false
      voxelize:
        max_num_points: 20
        point_cloud_range: ${point_cloud_range}
        voxel_size: ${radar_voxel_size}
        max_voxels: [30000, 60000]
      backbone:
        type: RadarEncoder
        pts_voxel_encoder:
          {type: RadarFeatureNet, in_channels: 10, feat_channels: [8], with_distance: false,
           point_cloud_range: "${point_cloud_range}", voxel_size: "${radar_voxel_size}"}
        pts_middle_encoder: {type: PointPillarsScatter, in_channels: 8, output_shape: [128, 128]}
        pts_bev_encoder: null
lr_config: {policy: cyclic, target_ratio: 5.0}
'''


def load(tmp_path, leaf, *overrides, folder='nuscenes/det'):
    """The tree with a leaf; the configuration, and the messages in order."""
    for name, text in {'configs/default.yaml': ROOT, 'configs/nuscenes/default.yaml': NUSCENES,
                       'configs/nuscenes/det/default.yaml': CENTERPOINT, f'configs/{folder}/leaf.yaml': leaf}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        cfg = load_config(str(tmp_path / f'configs/{folder}/leaf.yaml'), overrides)
    return cfg, [str(entry.message) for entry in caught]


def only(messages, pattern):
    (message,) = [m for m in messages if re.search(pattern, m)]
    assert '\n' not in message
    return message


def test_a_tree_of_the_reference_builds(tmp_path):
    from mmdet3d_ext.models.builder import build_model
    from mmdet3d_ext.registry import PIPELINES
    cfg, messages = load(tmp_path, RADAR)
    plain = cfg.to_dict()
    build_model(plain['model'])
    for name in ('train_pipeline', 'test_pipeline'):
        for step in plain[name]:
            PIPELINES.build(step)
    assert plain['data']['val']['pipeline'] == plain['test_pipeline'] and plain['evaluation']['interval'] == 1
    assert all(re.match(r".*\.yaml:\d+: key '", message) for message in messages), messages
    assert len(messages) == len(set(messages)) == 8, messages


def test_evaluation_is_in_test_mode(tmp_path):
    cfg, messages = load(tmp_path, RADAR)
    assert cfg.data.val.test_mode is True and cfg.data.train.dataset.test_mode is False
    only(messages, r"key 'data\.val\.test_mode': is taken as true")


def test_arguments_of_another_policy_are_left_out(tmp_path):
    cfg, messages = load(tmp_path, RADAR)
    assert cfg.lr_config == {'policy': 'cyclic', 'warmup': 'linear', 'warmup_iters': 500, 'warmup_ratio': 0.33333333,
                             'target_ratio': 5.0}
    only(messages, r"nuscenes/default\.yaml:\d+: key 'lr_config\.min_lr_ratio': belongs to another policy than 'cyclic'")
    cfg, messages = load(tmp_path, 'lr_config: {policy: cyclic, min_lr_ratio: 1.0}\n')
    assert cfg.lr_config.min_lr_ratio == 1.0, 'a mistake in one place is left to mmcv, which names it'


def test_radar_is_read_by_the_models_that_have_it(tmp_path):
    cfg, messages = load(tmp_path, RADAR)
    assert cfg.data.train.dataset.modality.use_radar and cfg.data.val.modality.use_radar and cfg.data.test.modality.use_radar
    assert sum("is taken with use_radar: true" in m for m in messages) == 3
    cfg, messages = load(tmp_path, '')
    assert not cfg.data.val.modality.use_radar and not any('use_radar' in m for m in messages)


@pytest.mark.parametrize('overrides, said', [((), True), (('--compat', 'reference'), False),
                                             (('--model.heads.object.test_cfg.min_radius', '[2, 3, 3, 1, 1, 1]'), False),
                                             (('--model.heads.object.test_cfg.nms_type', 'rotate'), False)])
def test_squared_radii(tmp_path, overrides, said):
    messages = load(tmp_path, RADAR, *overrides)[1]
    assert any('is in metres here' in m and '[2.0, 3.464, 3.162, 1.0, 0.922, 0.418]' in m for m in messages) == said


def test_different_sweeps_matter_to_lidar_models(tmp_path):
    messages = load(tmp_path, 'model: {encoders: {lidar: {a: 1}}}\n')[1]
    only(messages, r"key 'train_pipeline': reads 0 LiDAR sweeps, test_pipeline 9; write the same sweeps_num")
    assert not any('sweeps' in m for m in load(tmp_path, 'model: {encoders: {lidar: null, camera: {a: 1}}}\n')[1]
                   if 'train_pipeline' in m)


@pytest.mark.parametrize('sensor', ['camera', 'lidar'])
def test_pasting_into_scenes_with_cameras(tmp_path, sensor):
    messages = load(tmp_path, f'model: {{encoders: {{{sensor}: {{a: 1}}}}}}\ngt_paste_stop_epoch: 15\n')[1]
    pattern = r"leaf\.yaml:2: key 'gt_paste_stop_epoch': is 15: .* no camera sees them"
    assert any(re.search(pattern, message) for message in messages) == (sensor == 'camera')


def test_a_key_that_nothing_reads(tmp_path):
    only(load(tmp_path, 'radar_jitter: 0.5\n')[1], r"key 'radar_jitter': has no effect")


def test_keys_of_openmmlab_that_mean_nothing_here_are_accepted_and_never_suggested(tmp_path):
    only(load(tmp_path, 'gpu_ids: [0, 1]\n')[1], r"key 'gpu_ids': has no effect: .*tools/launch\.py -n and --gpus.*; leave it out")
    (tmp_path / 'empty.yaml').write_text('')
    for word in ('gpu_id', 'gpus', 'devices', 'work_flow'):
        with pytest.raises(ConfigError) as in_file:
            load(tmp_path, f'{word}: 1\n')
        with pytest.raises(ConfigError) as in_words:
            load_config(str(tmp_path / 'empty.yaml'), [f'--{word}', '1'])
        for error in (in_file, in_words):
            assert not any(f"'{key}'" in str(error.value) for key in schema.IGNORED), error.value


def test_keys_of_mmcvs_evaluation_and_loaders_that_nothing_reads(tmp_path):
    messages = load(tmp_path, 'evaluation: {interval: 2, metric: bbox, gpu_collect: true}\ndata: {test_dataloader: {}}\n')[1]
    only(messages, r"key 'evaluation\.metric': has no effect, like gpu_collect: every task is evaluated")
    only(messages, r"key 'data\.test_dataloader': has no effect: .* data\.val_dataloader")


def test_a_loaders_own_keys_are_known(tmp_path):
    (tmp_path / 'a.yaml').write_text('data: {samples_per_gpu: 2}\n')
    cfg = load_config(str(tmp_path / 'a.yaml'), ['--data.train_dataloader.samples_per_gpu', '3', '--data.val_dataloader.pin_memory', 'false'])
    assert cfg.data.train_dataloader == {'samples_per_gpu': 3} and cfg.data.val_dataloader.pin_memory is False
    with pytest.raises(ConfigError, match="did you mean 'data.train_dataloader.samples_per_gpu'"):
        load_config(str(tmp_path / 'a.yaml'), ['--data.train_dataloader.sample_per_gpu', '3'])


def test_keys_of_the_centerpoint_head_without_effect(tmp_path):
    messages = load(tmp_path, RADAR)[1]
    message = only(messages, r"key 'model\.heads\.object\.train_cfg\.dense_reg': has no effect, like max_objs: .*leave it out")
    assert 'det/default.yaml:' in message
    only(messages, r"key 'model\.heads\.object\.test_cfg\.max_per_img': has no effect, like max_pool_nms")


ORDERED = 'car, truck, construction_vehicle, bus, trailer, barrier, motorcycle, bicycle, pedestrian, traffic_cone'
TURNED = ', '.join(reversed(ORDERED.split(', ')))
HEAD = 'model: {heads: {object: {type: TransFusionHead, num_classes: 10}}}\n'


@pytest.mark.parametrize('leaf, taken', [
    (HEAD, False), (HEAD + f'object_classes: [{TURNED}]\n', True),
    (HEAD.replace('10', '10, class_names: "${object_classes}"') + f'object_classes: [{TURNED}]\n', False),
    (HEAD + 'object_classes: [car, truck]\n', False), (f'object_classes: [{TURNED}]\n', False)])
def test_classes_in_an_order_of_ones_own_are_named_in_the_head(tmp_path, leaf, taken):
    cfg, messages = load(tmp_path, leaf)
    assert any(re.search(r"key 'object_classes': has an order of its own: .*class_names is taken from it", m) for m in messages) == taken
    assert (cfg.model.heads.object.get('class_names') == cfg.object_classes) == (taken or 'class_names' in leaf)


def test_a_grid_of_another_model_left_in_test_cfg(tmp_path):
    head = 'model: {heads: {object: {train_cfg: {grid_size: [512, 512, 1]}TEST}}}\n'
    inherited = CENTERPOINT.replace('test_cfg: {', 'test_cfg: {grid_size: [1024, 1024, 1], ')
    for name, text in {'default.yaml': ROOT, 'nuscenes/default.yaml': NUSCENES, 'nuscenes/det/default.yaml': inherited}.items():
        (tmp_path / 'configs' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'configs' / name).write_text(text)
    leaf = tmp_path / 'configs/nuscenes/det/leaf.yaml'
    for test, grid in (('', [512, 512, 1]), (', test_cfg: {grid_size: [256, 256, 1]}', [256, 256, 1])):
        leaf.write_text(head.replace('TEST', test))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            cfg = load_config(str(leaf))
        assert cfg.model.heads.object.test_cfg.grid_size == grid, 'what stands in the same file is a mistake, and checked later'
        assert any("test_cfg.grid_size': is taken as [512, 512, 1]" in str(w.message) for w in caught) == (not test)


def test_a_pipeline_of_evaluation_that_is_not_the_one_that_runs(tmp_path):
    only(load(tmp_path, 'evaluation: {pipeline: []}\n')[1], r"key 'evaluation\.pipeline': has no effect: .*data\.val\.pipeline")
    assert not any('evaluation.pipeline' in message for message in load(tmp_path, '')[1])


@pytest.mark.parametrize('value, said', [('true', False), ('{exclude: []}', False), ('{exclude: [decoder]}', True)])
def test_synchronised_norms_without_exceptions(tmp_path, value, said):
    messages = load(tmp_path, f'sync_bn: {value}\n')[1]
    assert any("key 'sync_bn.exclude': has no effect" in m and "['decoder']" in m for m in messages) == said


def test_a_leaf_in_the_dialect_below_the_shipped_defaults(tmp_path):
    """A user's own leaf, put into the shipped tree: it changes parts of what is inherited, and pipelines written out work."""
    import shutil
    shutil.copytree(REPO / 'configs', tmp_path / 'configs')
    leaf = tmp_path / 'configs/nuscenes/det/transfusion/secfpn/camera+lidar/swint_v0p075/mine.yaml'
    pipeline = NUSCENES[NUSCENES.index('train_pipeline:'):NUSCENES.index('\ntest_pipeline:')]
    pipeline = pipeline.replace('sweeps_num: 0', 'sweeps_num: 9')
    leaf.write_text(f'model:\n  encoders:\n    camera:\n      vtransform: {{dbound: [1.0, 60.0, 1.0]}}\n{pipeline}\n'
                    'lr_config: {policy: cyclic}\n')
    with pytest.warns(UserWarning) as caught:
        cfg = load_config(str(leaf))
    left_out = [str(w.message) for w in caught if 'belongs to another policy' in str(w.message)]
    assert len(caught) == len(left_out) == 1
    assert re.search(r"camera\+lidar/default\.yaml:\d+: key 'lr_config\.min_lr_ratio'", left_out[0])
    assert cfg.model.encoders.camera.vtransform.dbound == [1.0, 60.0, 1.0]
    assert cfg.model.encoders.camera.vtransform.xbound == [-54.0, 54.0, 0.3] and cfg.model.encoders.camera.backbone.depths
    assert [s.type for s in cfg.data.train.dataset.pipeline][-1] == 'GTDepth' and cfg.lr_config.policy == 'cyclic'
