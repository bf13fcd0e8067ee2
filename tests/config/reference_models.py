"""The models of a tree in the reference's dialect: what its files hold besides pipelines and data sets (:mod:`reference_tree`)."""
from reference_pipelines import pipelines

CENTERHEAD = '''
model:
  heads:
    object:
      type: CenterHead
      in_channels: null
      train_cfg:
        point_cloud_range: ${point_cloud_range}
        grid_size: [1024, 1024, 1]
        voxel_size: ${voxel_size}
        out_size_factor: 8
        dense_reg: 1
        gaussian_overlap: 0.1
        max_objs: 500
        min_radius: 2
        code_weights: [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.2]
      test_cfg:
        post_center_limit_range: [-61.2, -61.2, -10.0, 61.2, 61.2, 10.0]
        max_per_img: 500
        max_pool_nms: false
        min_radius: [4, 12, 10, 1, 0.85, 0.175]
        score_threshold: 0.1
        out_size_factor: 8
        voxel_size: ${voxel_size[:2]}
        nms_type: rotate
        pre_max_size: 1000
        post_max_size: 83
        nms_thr: 0.2
      tasks: [["car"], ["truck", "construction_vehicle"], ["bus", "trailer"], ["barrier"], ["motorcycle", "bicycle"],
              ["pedestrian", "traffic_cone"]]
      common_heads: {reg: [2, 2], height: [1, 2], dim: [3, 2], rot: [2, 2], vel: [2, 2]}
      share_conv_channel: 64
      bbox_coder:
        type: CenterPointBBoxCoder
        pc_range: ${point_cloud_range}
        post_center_range: [-61.2, -61.2, -10.0, 61.2, 61.2, 10.0]
        max_num: 500
        score_threshold: 0.1
        out_size_factor: 8
        voxel_size: ${voxel_size[:2]}
        code_size: 9
      separate_head: {type: SeparateHead, init_bias: -2.19, final_kernel: 3}
      loss_cls: {type: GaussianFocalLoss, reduction: mean}
      loss_bbox: {type: L1Loss, reduction: mean, loss_weight: 0.25}
      norm_bbox: true
'''
NMS = '''
        nms_type: [circle, rotate, rotate, circle, rotate, rotate]
        nms_scale: [[1.0], [1.0, 1.0], [1.0, 1.0], [1.0], [1.0, 1.0], [2.5, 4.0]]'''
OPTIMIZER = '''
optimizer:
  type: AdamW
  lr: LEARNING_RATE
  weight_decay: 0.01
  paramwise_cfg:
    custom_keys:
      absolute_pos_embed:
        decay_mult: 0
      relative_position_bias_table:
        decay_mult: 0
optimizer_config:
  grad_clip:
    max_norm: 35
    norm_type: 2
'''
COSINE = '''
lr_config:
  policy: CosineAnnealing
  warmup: linear
  warmup_iters: 500
  warmup_ratio: 0.33333333
  min_lr_ratio: 1.0e-3
'''
CYCLIC = 'lr_config:\n  policy: cyclic\nmomentum_config:\n  policy: cyclic\n'
LSS_DECODER = '''
  decoder:
    backbone: {type: GeneralizedResNet, in_channels: IN, blocks: [[2, 128, 2], [2, 256, 2], [2, 512, 1]]}
    neck: {type: LSSFPN, in_indices: [-1, 0], in_channels: [512, 128], out_channels: 256, scale_factor: 2}
'''
LSSFPN = 'model:' + LSS_DECODER.replace('IN,', '80,') + '''
  heads:
    object:
      in_channels: 256
''' + OPTIMIZER.replace('LEARNING_RATE', '2.0e-4') + COSINE
RESNET = '''
      backbone:
        type: ResNet
        depth: 50
        num_stages: 4
        out_indices: [0, 1, 2, 3]
        norm_cfg: {type: BN2d, requires_grad: true}
        norm_eval: false
        init_cfg: {type: Pretrained, checkpoint: torchvision://resnet50}
      neck:
        type: SECONDFPN
        in_channels: [256, 512, 1024, 2048]
        out_channels: [128, 128, 128, 128]
        upsample_strides: [0.25, 0.5, 1, 2]
      vtransform:
        type: LSSTransform
        in_channels: 512
        out_channels: 64
        image_size: ${image_size}
        feature_size: ${[image_size[0] // 16, image_size[1] // 16]}
        xbound: [-51.2, 51.2, 0.8]
        ybound: [-51.2, 51.2, 0.8]
        zbound: [-10.0, 10.0, 20.0]
        dbound: [1.0, 60.0, 1.0]
        downsample: 1
'''
CAMERA_RADAR = '''
gt_paste_stop_epoch: 15
augment2d:
  resize: [[0.38, 0.55], [0.48, 0.48]]
augment3d:
  scale: [0.9, 1.1]
  rotate: [0, 0]
  translate: 0.5
model:
  encoders:
    lidar: null
    camera: null
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
          type: RadarFeatureNet
          in_channels: 45
          feat_channels: [128, 128, 128, 64]
          with_distance: false
          point_cloud_range: ${point_cloud_range}
          voxel_size: ${radar_voxel_size}
          norm_cfg: {type: BN1d, eps: 1.0e-3, momentum: 0.01}
        pts_middle_encoder: {type: PointPillarsScatter, in_channels: 64, output_shape: [128, 128]}
        pts_bev_encoder: null
  heads:
    object:
      test_cfg:''' + NMS + pipelines(0, radar=True, maps=False)
CAMERA_RADAR_RESNET = 'model:\n  encoders:\n    camera:' + RESNET + LSS_DECODER.replace('IN,', '64,') + '''
  fuser:
    type: ConvFuser
    in_channels: [64, 64]
    out_channels: 64
  heads:
    object:
      train_cfg:
        code_weights: [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
data:
  samples_per_gpu: 4
'''
DLSS = '''
model:
  encoders:
    camera:
      vtransform:
        type: AwareDBEVDepth
        bevdepth_downsample: 16
        bevdepth_refine: false
        depth_loss_factor: 3.0
        use_points: radar
        depth_input: one-hot
        height_expand: true
        add_depth_features: true
'''
CAMERA = '''
augment3d:
  scale: [0.95, 1.05]
  rotate: [-0.3925, 0.3925]
  translate: 0
model:
  encoders:
    lidar: null
    camera: null
  heads:
    object:
      test_cfg:''' + NMS + '''
optimizer:
  paramwise_cfg:
    custom_keys:
      encoders.camera.backbone:
        lr_mult: 0.1
lr_config:
  policy: cyclic
  target_ratio: 5.0
  cyclic_times: 1
  step_ratio_up: 0.4
momentum_config:
  policy: cyclic
  cyclic_times: 1
  step_ratio_up: 0.4
'''
BEVDEPTH = '''
model:
  encoders:
    camera:
      vtransform:
        type: AwareBEVDepth
        bevdepth_downsample: 16
        bevdepth_refine: false
        depth_loss_factor: 3.0
'''
SWIN = '''
      backbone:
        type: SwinTransformer
        embed_dims: 96
        depths: [2, 2, 6, 2]
        num_heads: [3, 6, 12, 24]
        window_size: 7
        mlp_ratio: 4
        qkv_bias: true
        qk_scale: null
        drop_rate: 0.
        attn_drop_rate: 0.
        drop_path_rate: DROP
        patch_norm: true
        out_indices: [1, 2, 3]
        with_cp: false
        convert_weights: true
        init_cfg:
          type: Pretrained
          checkpoint: https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_tiny_patch4_window7_224.pth
      neck:
        type: GeneralizedLSSFPN
        in_channels: [192, 384, 768]
        out_channels: 256
        start_level: 0
        num_outs: 3
        norm_cfg: {type: BN2d, requires_grad: true}
        act_cfg: {type: ReLU, inplace: true}
        upsample_cfg: {mode: bilinear, align_corners: false}
      vtransform:
        type: TRANSFORM
        in_channels: 256
        out_channels: 80
        image_size: ${image_size}
        feature_size: ${[image_size[0] // 8, image_size[1] // 8]}
        xbound: [-LIMIT, LIMIT, STEP]
        ybound: [-LIMIT, LIMIT, STEP]
        zbound: [-10.0, 10.0, 20.0]
        dbound: [1.0, 60.0, 0.5]
        downsample: 2
'''


def swin(transform: str, limit: float, step: float, drop: float) -> str:
    return (SWIN.replace('TRANSFORM', transform).replace('LIMIT', str(limit)).replace('STEP', str(step))
            .replace('DROP', str(drop)))


VOXELNET = '''
      voxelize:
        max_num_points: 10
        point_cloud_range: ${point_cloud_range}
        voxel_size: ${voxel_size}
        max_voxels: [VOXELS]
      backbone:
        type: SparseEncoder
        in_channels: 5
        sparse_shape: [CELLS, CELLS, 41]
        output_channels: 128
        order:
          - conv
          - norm
          - act
        encoder_channels:
          - [16, 16, 32]
          - [32, 32, 64]
          - [64, 64, 128]
          - [128, 128]
        encoder_paddings:
          - [0, 0, 1]
          - [0, 0, 1]
          - [0, 0, [1, 1, 0]]
          - [0, 0]
        block_type: basicblock
'''


def voxelnet(cells: int, voxels: str) -> str:
    return VOXELNET.replace('CELLS', str(cells)).replace('VOXELS', voxels)


SECOND = '''
  decoder:
    backbone:
      type: SECOND
      in_channels: 256
      out_channels: [128, 256]
      layer_nums: [5, 5]
      layer_strides: [1, 2]
      norm_cfg: {type: BN, eps: 1.0e-3, momentum: 0.01}
      conv_cfg: {type: Conv2d, bias: false}
    neck:
      type: SECONDFPN
      in_channels: [128, 256]
      out_channels: [256, 256]
      upsample_strides: [1, 2]
      norm_cfg: {type: BN, eps: 1.0e-3, momentum: 0.01}
      upsample_cfg: {type: deconv, bias: false}
      use_conv_for_no_stride: true
'''
TRANSFUSION = '''
model:
  heads:
    object:
      type: TransFusionHead
      num_proposals: 200
      auxiliary: true
      in_channels: null
      hidden_channel: 128
      num_classes: 10
      num_decoder_layers: 1
      num_heads: 8
      nms_kernel_size: 3
      ffn_channel: 256
      dropout: 0.1
      bn_momentum: 0.1
      activation: relu
      train_cfg:
        dataset: nuScenes
        point_cloud_range: ${point_cloud_range}
        grid_size: [1024, 1024, 1]
        voxel_size: ${voxel_size}
        out_size_factor: 8
        gaussian_overlap: 0.1
        min_radius: 2
        pos_weight: -1
        code_weights: [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.2]
        assigner:
          type: HungarianAssigner3D
          iou_calculator: {type: BboxOverlaps3D, coordinate: lidar}
          cls_cost: {type: FocalLossCost, gamma: 2.0, alpha: 0.25, weight: 0.15}
          reg_cost: {type: BBoxBEVL1Cost, weight: 0.25}
          iou_cost: {type: IoU3DCost, weight: 0.25}
      test_cfg:
        dataset: nuScenes
        grid_size: [1024, 1024, 1]
        out_size_factor: 8
        voxel_size: ${voxel_size[:2]}
        pc_range: ${point_cloud_range[:2]}
        nms_type: null
      common_heads: {center: [2, 2], height: [1, 2], dim: [3, 2], rot: [2, 2], vel: [2, 2]}
      bbox_coder:
        type: TransFusionBBoxCoder
        pc_range: ${point_cloud_range[:2]}
        post_center_range: [-61.2, -61.2, -10.0, 61.2, 61.2, 10.0]
        score_threshold: 0.0
        out_size_factor: 8
        voxel_size: ${voxel_size[:2]}
        code_size: 10
      loss_cls: {type: FocalLoss, use_sigmoid: true, gamma: 2.0, alpha: 0.25, reduction: mean, loss_weight: 1.0}
      loss_heatmap: {type: GaussianFocalLoss, reduction: mean, loss_weight: 1.0}
      loss_bbox: {type: L1Loss, reduction: mean, loss_weight: 0.25}
'''
SECFPN = 'model:' + SECOND + '  heads:\n    object:\n      in_channels: 512\n' + OPTIMIZER.replace('LEARNING_RATE', '1.0e-4') + CYCLIC
GRID_0P075 = '''
voxel_size: [0.075, 0.075, 0.2]
point_cloud_range: [-54.0, -54.0, -5.0, 54.0, 54.0, 3.0]
'''
HEAD_0P075 = '''
  heads:
    object:
      train_cfg:
        grid_size: [1440, 1440, 41]
      test_cfg:
        grid_size: [1440, 1440, 41]
'''
SWINT_0P075 = GRID_0P075 + 'model:\n  encoders:\n    camera:' + swin('DepthLSSTransform', 54.0, 0.3, 0.2) + \
    '    lidar:' + voxelnet(1440, '120000, 160000') + HEAD_0P075 + COSINE + 'max_epochs: 6\noptimizer:\n  lr: 2.0e-4\n'
CONVFUSER = 'model:\n  fuser:\n    type: ConvFuser\n    in_channels: [80, 256]\n    out_channels: 256\n'
PILLARS = '''
voxel_size: [0.2, 0.2, 8]
model:
  encoders:
    lidar:
      voxelize_reduce: false
      voxelize:
        max_num_points: 20
        point_cloud_range: ${point_cloud_range}
        voxel_size: ${voxel_size}
        max_voxels: [30000, 60000]
      backbone:
        type: PointPillarsEncoder
        pts_voxel_encoder:
          type: PillarFeatureNet
          in_channels: 5
          feat_channels: [64, 64]
          with_distance: false
          point_cloud_range: ${point_cloud_range}
          voxel_size: ${voxel_size}
          norm_cfg: {type: BN1d, eps: 1.0e-3, momentum: 0.01}
        pts_middle_encoder: {type: PointPillarsScatter, in_channels: 64, output_shape: [512, 512]}
  decoder:
    backbone: {in_channels: 64, out_channels: [64, 128, 256], layer_nums: [3, 5, 5], layer_strides: [2, 2, 2]}
    neck: {in_channels: [64, 128, 256], out_channels: [128, 128, 128], upsample_strides: [0.5, 1, 2]}
  heads:
    object:
      in_channels: 384
      train_cfg: {grid_size: [512, 512, 1], out_size_factor: 4}
      test_cfg: {out_size_factor: 4}
      bbox_coder: {out_size_factor: 4}
'''
SEG = '''
model:
  type: BEVFusion
  heads:
    object: null
    map:
      type: BEVSegmentationHead
      in_channels: 256
      grid_transform:
        input_scope: [[-51.2, 51.2, 0.8], [-51.2, 51.2, 0.8]]
        output_scope: [[-50, 50, 0.5], [-50, 50, 0.5]]
      classes: ${map_classes}
      loss: focal
'''
SEG_FUSION = 'model:\n  encoders:\n    camera:' + swin('LSSTransform', 51.2, 0.4, 0.3) + '    lidar:' + \
    voxelnet(1024, '90000, 120000') + '  fuser: {type: ConvFuser, in_channels: [80, 256], out_channels: 256}' + SECOND + \
    '  heads:\n    map:\n      in_channels: 512\n' + OPTIMIZER.replace('LEARNING_RATE', '1.0e-4') + CYCLIC
SEG_CAMERA = 'model:\n  encoders:\n    lidar: null\n    camera:' + swin('LSSTransform', 51.2, 0.4, 0.3) + '''  fuser: null
  decoder:
    backbone: {type: GeneralizedResNet, in_channels: 80, blocks: [[2, 160, 2], [2, 320, 2], [2, 640, 1]]}
    neck: {type: LSSFPN, in_indices: [-1, 0], in_channels: [640, 160], out_channels: 256, scale_factor: 2}
''' + OPTIMIZER.replace('LEARNING_RATE', '1.0e-4') + CYCLIC
SEG_LIDAR = 'model:\n  encoders:\n    camera: null\n    lidar:' + voxelnet(1024, '90000, 120000') + '  fuser: null' + SECOND + \
    '  heads:\n    map:\n      in_channels: 512\n' + OPTIMIZER.replace('LEARNING_RATE', '1.0e-4') + CYCLIC
