"""The pipelines and data sets of a tree in the reference's dialect (:mod:`reference_tree`)."""


def loading(sweeps: int, radar: bool) -> str:
    step = '''
  -
    type: LoadRadarPointsMultiSweeps
    load_dim: 18
    sweeps_num: ${radar_sweeps}
    use_dim: ${radar_use_dims}
    max_num: ${radar_max_points}
    compensate_velocity: ${radar_compensate_velocity}
    filtering: ${radar_filtering}
    normalize: ${radar_normalize}''' if radar else ''
    return f'''
  -
    type: LoadMultiViewImageFromFiles
    to_float32: true
  -
    type: LoadPointsFromFile
    coord_type: LIDAR
    load_dim: ${{load_dim}}
    use_dim: ${{use_dim}}
    reduce_beams: ${{reduce_beams}}
    load_augmented: ${{load_augmented}}
  -
    type: LoadPointsFromMultiSweeps
    sweeps_num: {sweeps}
    load_dim: ${{load_dim}}
    use_dim: ${{use_dim}}
    reduce_beams: ${{reduce_beams}}
    pad_empty_sweeps: true
    remove_close: true
    load_augmented: ${{load_augmented}}{step}
  -
    type: LoadAnnotations3D
    with_bbox_3d: true
    with_label_3d: true
    with_attr_label: False'''


def finishing(radar: bool, maps: bool) -> str:
    keys = ['img', 'points', *(['radar'] if radar else []), 'gt_bboxes_3d', 'gt_labels_3d', *(['gt_masks_bev'] if maps else [])]
    return f'''
  -
    type: DefaultFormatBundle3D
    classes: ${{object_classes}}
  -
    type: Collect3D
    keys: [{", ".join(keys)}]
    meta_keys: [camera_intrinsics, camera2ego, lidar2ego, lidar2camera, camera2lidar, lidar2image, img_aug_matrix, lidar_aug_matrix]
  -
    type: GTDepth
    keyframe_only: true'''


LABELS = '''
  -
    type: LoadBEVSegmentation
    dataset_root: ${dataset_root}
    xbound: [-50.0, 50.0, 0.5]
    ybound: [-50.0, 50.0, 0.5]
    classes: ${map_classes}'''
NORMALIZE = '''
  -
    type: ImageNormalize
    mean: [0.485, 0.456, 0.406]
    std: [0.229, 0.224, 0.225]'''
PASTE = '''
  -
    type: ObjectPaste
    stop_epoch: ${gt_paste_stop_epoch}
    db_sampler:
      dataset_root: ${dataset_root}
      info_path: ${dataset_root + "nuscenes_dbinfos_train.pkl"}
      rate: 1.0
      prepare:
        filter_by_difficulty: [-1]
        filter_by_min_points: {car: 5, truck: 5, bus: 5, trailer: 5, construction_vehicle: 5, traffic_cone: 5, barrier: 5,
                               motorcycle: 5, bicycle: 5, pedestrian: 5}
      classes: ${object_classes}
      sample_groups: {car: 2, truck: 3, construction_vehicle: 7, bus: 4, trailer: 6, barrier: 2, motorcycle: 6, bicycle: 6,
                      pedestrian: 2, traffic_cone: 2}
      points_loader: {type: LoadPointsFromFile, coord_type: LIDAR, load_dim: "${load_dim}", use_dim: "${use_dim}",
                      reduce_beams: "${reduce_beams}"}'''


def pipelines(train_sweeps: int, radar: bool, maps: bool) -> str:
    """Both pipelines, in the reference's order of steps."""
    labels = LABELS if maps else ''
    return f'''
train_pipeline:{loading(train_sweeps, radar)}{PASTE}
  -
    type: ImageAug3D
    final_dim: ${{image_size}}
    resize_lim: ${{augment2d.resize[0]}}
    bot_pct_lim: [0.0, 0.0]
    rot_lim: ${{augment2d.rotate}}
    rand_flip: true
    is_train: true
  -
    type: GlobalRotScaleTrans
    resize_lim: ${{augment3d.scale}}
    rot_lim: ${{augment3d.rotate}}
    trans_lim: ${{augment3d.translate}}
    is_train: true{labels}
  - {{type: RandomFlip3D}}
  - {{type: PointsRangeFilter, point_cloud_range: "${{point_cloud_range}}"}}
  - {{type: ObjectRangeFilter, point_cloud_range: "${{point_cloud_range}}"}}
  - {{type: ObjectNameFilter, classes: "${{object_classes}}"}}{NORMALIZE}
  -
    type: GridMask
    use_h: true
    use_w: true
    max_epoch: ${{max_epochs}}
    rotate: 1
    offset: false
    ratio: 0.5
    mode: 1
    prob: ${{augment2d.gridmask.prob}}
    fixed_prob: ${{augment2d.gridmask.fixed_prob}}
  - {{type: PointShuffle}}{finishing(radar, maps)}
test_pipeline:{loading(9, radar)}
  -
    type: ImageAug3D
    final_dim: ${{image_size}}
    resize_lim: ${{augment2d.resize[1]}}
    bot_pct_lim: [0.0, 0.0]
    rot_lim: [0.0, 0.0]
    rand_flip: false
    is_train: false
  -
    type: GlobalRotScaleTrans
    resize_lim: [1.0, 1.0]
    rot_lim: [0.0, 0.0]
    trans_lim: 0.0
    is_train: false{labels}
  - {{type: PointsRangeFilter, point_cloud_range: "${{point_cloud_range}}"}}{NORMALIZE}{finishing(radar, maps)}
'''


def data_set(split: str, pipeline: str, test_mode: bool, indent: str, more: str = '') -> str:
    lines = ['type: ${dataset_type}', 'dataset_root: ${dataset_root}', f'ann_file: ${{dataset_root + "nuscenes_infos_{split}.pkl"}}',
             f'pipeline: ${{{pipeline}}}', 'object_classes: ${object_classes}', 'map_classes: ${map_classes}',
             'modality: ${input_modality}', f'test_mode: {str(test_mode).lower()}', *([more] if more else []), 'box_type_3d: LiDAR']
    return '\n'.join(indent + line for line in lines)
