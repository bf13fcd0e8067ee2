"""The ``model`` sections of the 14 published nuScenes models, as Python (heads left out: they have tests of their own).

Keys are the configurations' paths in ``state_dicts.json``.
"""
from copy import deepcopy

SWIN = {'type': 'SwinTransformer', 'embed_dims': 96, 'depths': [2, 2, 6, 2], 'num_heads': [3, 6, 12, 24], 'window_size': 7,
        'mlp_ratio': 4, 'qkv_bias': True, 'qk_scale': None, 'drop_rate': 0.0, 'attn_drop_rate': 0.0, 'drop_path_rate': 0.2,
        'patch_norm': True, 'out_indices': [1, 2, 3], 'with_cp': False, 'convert_weights': True}
SWIN_NECK = {'type': 'GeneralizedLSSFPN', 'in_channels': [192, 384, 768], 'out_channels': 256, 'start_level': 0, 'num_outs': 3,
             'norm_cfg': {'type': 'BN2d', 'requires_grad': True}, 'act_cfg': {'type': 'ReLU', 'inplace': True},
             'upsample_cfg': {'mode': 'bilinear', 'align_corners': False}}
RESNET = {'type': 'ResNet', 'depth': 50, 'num_stages': 4, 'out_indices': [0, 1, 2, 3],
          'norm_cfg': {'type': 'BN2d', 'requires_grad': True}, 'norm_eval': False}
RESNET_NECK = {'type': 'SECONDFPN', 'in_channels': [256, 512, 1024, 2048], 'out_channels': [128, 128, 128, 128],
               'upsample_strides': [0.25, 0.5, 1, 2]}
BN = {'type': 'BN', 'eps': 1e-3, 'momentum': 0.01}
SECOND = {'backbone': {'type': 'SECOND', 'in_channels': 256, 'out_channels': [128, 256], 'layer_nums': [5, 5],
                       'layer_strides': [1, 2], 'norm_cfg': BN, 'conv_cfg': {'type': 'Conv2d', 'bias': False}},
          'neck': {'type': 'SECONDFPN', 'in_channels': [128, 256], 'out_channels': [256, 256], 'upsample_strides': [1, 2],
                   'norm_cfg': BN, 'upsample_cfg': {'type': 'deconv', 'bias': False}, 'use_conv_for_no_stride': True}}


def resnet_decoder(in_channels, widths):
    """GeneralizedResNet and LSSFPN."""
    blocks = [[2, widths[0], 2], [2, widths[1], 2], [2, widths[2], 1]]
    return {'backbone': {'type': 'GeneralizedResNet', 'in_channels': in_channels, 'blocks': blocks},
            'neck': {'type': 'LSSFPN', 'in_indices': [-1, 0], 'in_channels': [widths[2], widths[0]], 'out_channels': 256,
                     'scale_factor': 2}}


def transform(kind, half, step, downsample, stride, in_channels, out_channels, depth_step, **more):
    """A view transform on a square grid of +-``half`` metres with 256 x 704 images."""
    return {'type': kind, 'in_channels': in_channels, 'out_channels': out_channels, 'image_size': [256, 704],
            'feature_size': [256 // stride, 704 // stride], 'xbound': [-half, half, step], 'ybound': [-half, half, step],
            'zbound': [-10.0, 10.0, 20.0], 'dbound': [1.0, 60.0, depth_step], 'downsample': downsample, **more}


def swin_camera(kind, half, step):
    """Swin-T camera encoder."""
    return {'backbone': SWIN, 'neck': SWIN_NECK, 'vtransform': transform(kind, half, step, 2, 8, 256, 80, 0.5)}


def resnet_camera(kind, **more):
    """ResNet-50 camera encoder."""
    return {'backbone': RESNET, 'neck': RESNET_NECK, 'vtransform': transform(kind, 51.2, 0.8, 1, 16, 512, 64, 1.0, **more)}


def voxelnet(half, size, cells, max_voxels=(120000, 160000)):
    """Sparse LiDAR encoder."""
    return {'voxelize': {'max_num_points': 10, 'point_cloud_range': [-half, -half, -5.0, half, half, 3.0],
                         'voxel_size': [size, size, 0.2], 'max_voxels': list(max_voxels)},
            'backbone': {'type': 'SparseEncoder', 'in_channels': 5, 'sparse_shape': [cells, cells, 41], 'output_channels': 128,
                         'order': ['conv', 'norm', 'act'], 'block_type': 'basicblock',
                         'encoder_channels': [[16, 16, 32], [32, 32, 64], [64, 64, 128], [128, 128]],
                         'encoder_paddings': [[0, 0, 1], [0, 0, 1], [0, 0, [1, 1, 0]], [0, 0]]}}


RANGE = [-51.2, -51.2, -5.0, 51.2, 51.2, 3.0]
PILLARS = {'voxelize_reduce': False,
           'voxelize': {'max_num_points': 20, 'point_cloud_range': RANGE, 'voxel_size': [0.2, 0.2, 8.0],
                        'max_voxels': [30000, 60000]},
           'backbone': {'type': 'PointPillarsEncoder',
                        'pts_voxel_encoder': {'type': 'PillarFeatureNet', 'in_channels': 5, 'feat_channels': [64, 64],
                                              'with_distance': False, 'point_cloud_range': RANGE,
                                              'voxel_size': [0.2, 0.2, 8.0],
                                              'norm_cfg': {'type': 'BN1d', 'eps': 1e-3, 'momentum': 0.01}},
                        'pts_middle_encoder': {'type': 'PointPillarsScatter', 'in_channels': 64, 'output_shape': [512, 512]}}}
PILLAR_DECODER = {'backbone': {**SECOND['backbone'], 'in_channels': 64, 'out_channels': [64, 128, 256], 'layer_nums': [3, 5, 5],
                               'layer_strides': [2, 2, 2]},
                  'neck': {**SECOND['neck'], 'in_channels': [64, 128, 256], 'out_channels': [128, 128, 128],
                           'upsample_strides': [0.5, 1, 2]}}
RADAR = {'voxelize_reduce': False,
         'voxelize': {'max_num_points': 20, 'point_cloud_range': RANGE, 'voxel_size': [0.8, 0.8, 8.0],
                      'max_voxels': [30000, 60000]},
         'backbone': {'type': 'RadarEncoder',
                      'pts_voxel_encoder': {'type': 'RadarFeatureNet', 'in_channels': 45, 'feat_channels': [128, 128, 128, 64],
                                            'with_distance': False, 'point_cloud_range': RANGE,
                                            'voxel_size': [0.8, 0.8, 8.0],
                                            'norm_cfg': {'type': 'BN1d', 'eps': 1e-3, 'momentum': 0.01}},
                      'pts_middle_encoder': {'type': 'PointPillarsScatter', 'in_channels': 64, 'output_shape': [128, 128]}}}

CONV_FUSER = {'type': 'ConvFuser', 'in_channels': [80, 256], 'out_channels': 256}
RADAR_FUSER = {'type': 'ConvFuser', 'in_channels': [64, 64], 'out_channels': 64}
LIDAR_54, LIDAR_51 = voxelnet(54.0, 0.075, 1440), voxelnet(51.2, 0.1, 1024, (90000, 120000))
C, T, S = 'nuscenes/det/centerhead/lssfpn/', 'nuscenes/det/transfusion/secfpn/', 'nuscenes/seg/'
BEVDEPTH = {'bevdepth_downsample': 16, 'bevdepth_refine': False, 'depth_loss_factor': 3.0}
RADAR_DEPTH = {'use_points': 'radar', 'depth_input': 'one-hot', 'height_expand': True, 'add_depth_features': True}

CONFIGS = {
    C + 'camera+radar/resnet50/default.yaml': {'encoders': {'camera': resnet_camera('LSSTransform'), 'radar': RADAR},
                                               'fuser': RADAR_FUSER, 'decoder': resnet_decoder(64, [128, 256, 512])},
    C + 'camera+radar/resnet50/dlss.yaml': {'encoders': {'camera': resnet_camera('AwareDBEVDepth', **BEVDEPTH, **RADAR_DEPTH),
                                                         'radar': RADAR},
                                            'fuser': RADAR_FUSER, 'decoder': resnet_decoder(64, [128, 256, 512])},
    C + 'camera/256x704/resnet/bevdepth.yaml': {'encoders': {'camera': resnet_camera('AwareBEVDepth', **BEVDEPTH)},
                                                'decoder': resnet_decoder(64, [128, 256, 512])},
    C + 'camera/256x704/resnet/default.yaml': {'encoders': {'camera': resnet_camera('LSSTransform'), 'lidar': None},
                                               'decoder': resnet_decoder(64, [128, 256, 512])},
    C + 'camera/256x704/swint/default.yaml': {'encoders': {'camera': swin_camera('LSSTransform', 51.2, 0.4)},
                                              'decoder': resnet_decoder(80, [128, 256, 512])},
    T + 'camera+lidar/swint_v0p075/convfuser.yaml': {'encoders': {'camera': swin_camera('DepthLSSTransform', 54.0, 0.3),
                                                                  'lidar': LIDAR_54},
                                                     'fuser': CONV_FUSER, 'decoder': SECOND},
    T + 'camera+lidar/swint_v0p075/default.yaml': {'encoders': {'camera': swin_camera('DepthLSSTransform', 54.0, 0.3),
                                                                'lidar': LIDAR_54}, 'decoder': SECOND},
    T + 'lidar/default.yaml': {'encoders': {'camera': None, 'lidar': None}, 'decoder': SECOND},
    T + 'lidar/pointpillars.yaml': {'encoders': {'lidar': PILLARS}, 'decoder': PILLAR_DECODER},
    T + 'lidar/voxelnet.yaml': {'encoders': {'lidar': LIDAR_51}, 'decoder': SECOND},
    T + 'lidar/voxelnet_0p075.yaml': {'encoders': {'lidar': LIDAR_54}, 'decoder': SECOND},
    S + 'camera-bev256d2.yaml': {'encoders': {'lidar': None, 'camera': swin_camera('LSSTransform', 51.2, 0.4)}, 'fuser': None,
                                 'decoder': resnet_decoder(80, [160, 320, 640])},
    S + 'fusion-bev256d2-lss.yaml': {'encoders': {'camera': swin_camera('LSSTransform', 51.2, 0.4), 'lidar': LIDAR_51},
                                     'fuser': CONV_FUSER, 'decoder': SECOND},
    S + 'lidar-centerpoint-bev128.yaml': {'encoders': {'lidar': LIDAR_51}, 'fuser': None, 'decoder': SECOND},
}
RUNNABLE = [name for name, cfg in CONFIGS.items() if any(cfg['encoders'].values())
            and (len([e for e in cfg['encoders'].values() if e]) == 1 or cfg.get('fuser'))]


def model_config(name, heads):
    """The named model with the given heads."""
    return {'type': 'BEVFusion', 'heads': heads, **deepcopy(CONFIGS[name])}
