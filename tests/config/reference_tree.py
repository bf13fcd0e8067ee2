"""A configuration tree as users of the reference have it: its folders, keys, type names, expressions and hard-coded grids, with the
pipelines written out in every file that changes them. :func:`write` puts it into a folder."""
from pathlib import Path

import reference_models as m
from reference_pipelines import data_set, pipelines

ROOT = '''
seed: 0
deterministic: false
checkpoint_config:
  interval: 1
  max_keep_ckpts: 1
log_config:
  interval: 50
  hooks:
    - type: TextLoggerHook
    - type: TensorboardLoggerHook
load_from: null
resume_from: null
cudnn_benchmark: false
fp16:
  loss_scale:
    growth_interval: 2000
max_epochs: 20
runner:
  type: CustomEpochBasedRunner
  max_epochs: ${max_epochs}
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
augment2d:
  resize: [[0.38, 0.55], [0.48, 0.48]]
  rotate: [-5.4, 5.4]
  gridmask:
    prob: 0.0
    fixed_prob: true
augment3d:
  scale: [0.9, 1.1]
  rotate: [-0.78539816, 0.78539816]
  translate: 0.5

object_classes: [car, truck, construction_vehicle, bus, trailer, barrier, motorcycle, bicycle, pedestrian, traffic_cone]
map_classes: [drivable_area, ped_crossing, walkway, stop_line, carpark_area, divider]
input_modality: {use_lidar: true, use_camera: true, use_radar: false, use_map: false, use_external: false}
''' + pipelines(9, radar=False, maps=True) + f'''
data:
  samples_per_gpu: 4
  workers_per_gpu: 4
  train:
    type: CBGSDataset
    dataset:
{data_set("train", "train_pipeline", False, "      ", "use_valid_flag: true")}
  val:
{data_set("val", "test_pipeline", False, "    ")}
  test:
{data_set("val", "test_pipeline", True, "    ")}
evaluation:
  interval: 1
  pipeline: ${{test_pipeline}}
'''

RADAR_KEYS = '''
radar_sweeps: 6
radar_max_points: 2500
radar_use_dims: [0, 1, 2, 5, 8, 9, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41,
                 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56]
radar_compensate_velocity: true
radar_filtering: none
radar_voxel_size: [0.8, 0.8, 8]
radar_jitter: 0
radar_normalize: false
'''
DET = RADAR_KEYS + '''
model:
  type: BEVFusion
  encoders: null
  fuser: null
  heads:
    map: null
''' + pipelines(0, radar=True, maps=False)

CENTER, FUSION = 'nuscenes/det/centerhead/', 'nuscenes/det/transfusion/'
FILES = {
    'default.yaml': ROOT,
    'nuscenes/default.yaml': NUSCENES,
    'nuscenes/det/default.yaml': DET,
    CENTER + 'default.yaml': m.CENTERHEAD,
    CENTER + 'lssfpn/default.yaml': m.LSSFPN,
    CENTER + 'lssfpn/camera+radar/default.yaml': m.CAMERA_RADAR,
    CENTER + 'lssfpn/camera+radar/resnet50/default.yaml': m.CAMERA_RADAR_RESNET,
    CENTER + 'lssfpn/camera+radar/resnet50/dlss.yaml': m.DLSS,
    CENTER + 'lssfpn/camera/default.yaml': m.CAMERA,
    CENTER + 'lssfpn/camera/256x704/default.yaml': 'image_size: [256, 704]\n',
    CENTER + 'lssfpn/camera/256x704/resnet/default.yaml':
        'model:\n  encoders:\n    camera:' + m.RESNET + '  decoder: {backbone: {in_channels: 64}}\n',
    CENTER + 'lssfpn/camera/256x704/resnet/bevdepth.yaml': m.BEVDEPTH,
    CENTER + 'lssfpn/camera/256x704/swint/default.yaml':
        'model:\n  encoders:\n    camera:' + m.swin('LSSTransform', 51.2, 0.4, 0.2) + 'data: {samples_per_gpu: 6}\n',
    FUSION + 'default.yaml': m.TRANSFUSION,
    FUSION + 'secfpn/default.yaml': m.SECFPN,
    FUSION + 'secfpn/camera+lidar/default.yaml': '',
    FUSION + 'secfpn/camera+lidar/swint_v0p075/default.yaml': m.SWINT_0P075,
    FUSION + 'secfpn/camera+lidar/swint_v0p075/convfuser.yaml': m.CONVFUSER,
    FUSION + 'secfpn/lidar/default.yaml': 'gt_paste_stop_epoch: 15\nmodel:\n  encoders:\n    camera: null\n    lidar: null\n',
    FUSION + 'secfpn/lidar/pointpillars.yaml': m.PILLARS,
    FUSION + 'secfpn/lidar/voxelnet.yaml': 'model:\n  encoders:\n    lidar:' + m.voxelnet(1024, '90000, 120000'),
    FUSION + 'secfpn/lidar/voxelnet_0p075.yaml':
        m.GRID_0P075 + 'model:\n  encoders:\n    lidar:' + m.voxelnet(1440, '120000, 160000') + m.HEAD_0P075,
    'nuscenes/seg/default.yaml': m.SEG,
    'nuscenes/seg/camera-bev256d2.yaml': m.SEG_CAMERA,
    'nuscenes/seg/fusion-bev256d2-lss.yaml': m.SEG_FUSION,
    'nuscenes/seg/lidar-centerpoint-bev128.yaml': m.SEG_LIDAR,
}


def write(folder: Path, more=None) -> Path:
    """The tree (and ``more`` files by name) below ``folder``/configs; returns that."""
    configs = Path(folder) / 'configs'
    for name, text in {**FILES, **(more or {})}.items():
        (configs / name).parent.mkdir(parents=True, exist_ok=True)
        (configs / name).write_text(text)
    return configs
