"""Broken configurations: each is refused with its key, and what the message says to write puts it right."""
import copy
import random
import shlex

import pytest
from testing import REPO

from mmdet3d_ext.checks import check_config
from mmdet3d_ext.checks.report import spell
from mmdet3d_ext.config import load_config

CONFIGS = REPO / 'configs/nuscenes'
PHASE3, STAGE1 = 'multitask/phase3_400.yaml', 'multitask/stage1_600.yaml'
PILLARS, DEPTH = 'det/transfusion/secfpn/lidar/pointpillars.yaml', 'det/centerhead/lssfpn/camera/256x704/resnet/bevdepth.yaml'
MAP, CAMERA, LIDAR = 'model.heads.map', 'model.encoders.camera', 'model.encoders.lidar'
GRID = f'{MAP}.grid_transform'


def find(pipeline, kind):
    return next(i for i, step in enumerate(pipeline) if step['type'] == kind)


def at(kind, argument, value, which='test_pipeline'):
    """Words that change one argument of one step of a pipeline of stage 1."""
    cfg = load_config(str(CONFIGS / STAGE1))
    return [f'--{which}.{find(cfg[which], kind)}.{argument}', value]


# name -> configuration, words, the key that the message must name, pieces of the message.
# "seed" marks what is on record as having cost days of training.
BROKEN = {
    'seed: output coarser than the labels': (STAGE1, [f'--{GRID}.output_scope', '[[-50, 50, 0.25], [-50, 50, 0.25]]'],
                                             f'{GRID}.output_scope', ['400x400 cells', '600x600 cells', 'LoadBEVSegmentation']),
    'a best checkpoint by a metric that is not computed': (STAGE1, ['--evaluation.save_best', 'map/stop_lines/iou@max'],
                                                           'evaluation.save_best', ['map/stop_line/iou@max']),
    'seed: output finer than the labels': (PHASE3, [f'--{GRID}.output_scope', '[[-50, 50, 0.125], [-50, 50, 0.125]]'],
                                           f'{GRID}.output_scope', ['800x800 cells', '400x400 cells']),
    'seed: epochs of the copied file': (STAGE1, ['--runner.max_epochs', '20'],
        'runner.max_epochs', ['is 20', 'max_epochs (total_epochs) is 10']),
    'seed: labels resampled as whole numbers': (STAGE1, [f'--{MAP}.target_resample', 'bilinear'], f'{MAP}.target_resample',
                                                ["'bilinear'", 'nearest']),
    'seed: a step written as 0.167': (STAGE1, ['--bev.labels.step', '0.167', '--bev.labels.cells', 'null'], f'{GRID}.output_scope.0',
                                      ['0.167 m does not divide the range [-50.0, 50.0]', 'cells: 600']),
    'labels of validation at another step': (STAGE1, at('LoadBEVSegmentation', 'xbound', '[-50, 50, 0.5]'), 'data.val.pipeline.6.xbound',
                                             ['200x600 cells', '600x600 cells']),
    'labels of other metres': (PHASE3, ['--bev.labels.x', '[-40, 40]', f'--{GRID}.output_scope', '[[-50, 50, 0.25], [-50, 50, 0.25]]'],
                               f'{GRID}.output_scope', ['cover', 'x [-40, 40]']),
    'input scope of other metres': (PHASE3, [f'--{GRID}.input_scope', '[[-51.2, 51.2, 0.8], [-51.2, 51.2, 0.8]]'], f'{GRID}.input_scope',
                                    ['x [-51.2, 51.2]', 'x [-54, 54]', 'scaled by 0.9481']),
    'input scope of other cells': (STAGE1, [f'--{GRID}.input_scope', '[[-54, 54, 0.6], [-54, 54, 0.6]]'], f'{GRID}.input_scope',
                                   ['has 270x270 cells', 'describes 180x180 cells']),
    'voxels that the stride does not divide': (PHASE3, ['--bev.lidar.step', '0.12'], f'{LIDAR}.voxelize.voxel_size',
                                               ['900 voxels along x', 'stride 8']),
    'voxels that do not divide the range': (PHASE3, ['--bev.lidar.step', '0.07'], f'{LIDAR}.voxelize.voxel_size',
                                            ['0.07 m does not divide the range [-54.0, 54.0]']),
    'camera cells that the stride does not divide': (STAGE1, ['--bev.map.cells', '541'], 'model.branches.map.camera.downsample',
                                                     ['541x541 cells', 'stride 2']),
    'camera grid against LiDAR grid': (PHASE3, ['--bev.camera.step', '0.2'], f'{CAMERA}.vtransform.xbound',
                                       ['camera: 270x270 cells of 0.4 m', 'lidar: 180x180 cells of 0.6 m', 'bev.fused.step']),
    'camera of other metres': (PHASE3, [f'--{CAMERA}.vtransform.xbound', '[-51.2, 51.2, 0.4]', f'--{CAMERA}.vtransform.ybound',
                                        '[-51.2, 51.2, 0.4]'], f'{CAMERA}.vtransform.xbound', ['cover different metres']),
    'sparse shape of another range': (PHASE3, [f'--{LIDAR}.backbone.sparse_shape', '[1024, 1024, 41]'], f'{LIDAR}.backbone.sparse_shape',
                                      ['1440x1440x40 voxels']),
    'pillar canvas': (PILLARS, [f'--{LIDAR}.backbone.pts_middle_encoder.output_shape', '[256, 256]'],
                      f'{LIDAR}.backbone.pts_middle_encoder.output_shape', ['512x512x1 voxels']),
    'pillar net at another voxel size': (PILLARS, [f'--{LIDAR}.backbone.pts_voxel_encoder.voxel_size', '[0.1, 0.1, 8.0]'],
                                         f'{LIDAR}.backbone.pts_voxel_encoder.voxel_size', ['[0.2, 0.2, 8.0]']),
    'stride of the detection head': (PHASE3, ['--out_size_factor', '4'], 'model.heads.object.train_cfg.out_size_factor',
                                     ['is 4', '180x180 cells of 0.6 m', '8 voxels of 0.075 m']),
    'stride of the box coder alone': (PHASE3, ['--model.heads.object.bbox_coder.out_size_factor', '4'],
                                      'model.heads.object.bbox_coder.out_size_factor', ['boxes would be misplaced']),
    'grid size of the detection head': (PHASE3, ['--model.heads.object.train_cfg.grid_size', '[1024, 1024, 41]'],
                                        'model.heads.object.train_cfg.grid_size', ['1440x1440 voxels']),
    'voxel size of the box coder': (PHASE3, ['--model.heads.object.bbox_coder.voxel_size', '[0.1, 0.1]'],
                                    'model.heads.object.bbox_coder.voxel_size', ['[0.075, 0.075]']),
    'range of the box coder': (PHASE3, ['--model.heads.object.bbox_coder.pc_range', '[-51.2, -51.2]'],
                               'model.heads.object.bbox_coder.pc_range', ['x [-54.0, 54.0]']),
    'two sizes for one branch': (STAGE1, ['--bev.labels.step', '0.25'],
        'bev.labels.cells', ['is 600', 'bev.labels.step is 0.25', 'contradict']),
    'no size': (PHASE3, ['--bev.labels.cells', 'null', '--map_bound', '[[-50, 50, 0.25], [-50, 50, 0.25]]'], 'bev.labels.step', ['both null']),
    'a fused grid that the model does not read': (PHASE3, ['--bev.fused.step', '0.6', '--model.fused_grid', 'null'], 'bev.fused.step',
                                                  ['model.fused_grid is null']),
    'a map grid that the model does not read': (STAGE1, ['--model.branches', 'null', f'--{GRID}.input_scope',
                                                         '[[-54, 54, 0.6], [-54, 54, 0.6]]'],
                                                'bev.map.cells', ['model.branches']),
    'a fused grid of other metres': (PHASE3, ['--model.fused_grid', '[[-51.2, 51.2, 0.8], [-51.2, 51.2, 0.8]]'], 'model.fused_grid',
                                     ['BEV map of the camera covers']),
    'sweeps': (STAGE1, at('LoadPointsFromMultiSweeps', 'sweeps_num', '0'), 'data.val.pipeline.2.sweeps_num',
               ['sweeps_num 9 in training', '0 in validation', 'sweeps_num at the root sets both']),
    'beams': (STAGE1, at('LoadPointsFromFile', 'reduce_beams', '16'), 'data.val.pipeline.1.reduce_beams', ['reduce_beams 32 in training']),
    'image size of validation': (STAGE1, at('ImageAug3D', 'final_dim', '[256, 640]'), 'data.val.pipeline.4.final_dim', ['[256, 640]']),
    'image normalisation': (STAGE1, at('ImageNormalize', 'mean', '[0.5, 0.5, 0.5]'), 'data.val.pipeline.8.mean', ['ImageNormalize has mean']),
    'line width': (STAGE1, at('LoadBEVSegmentation', 'line_width', '2.0'), 'data.val.pipeline.6.line_width', ['line_width 1.0 in training']),
    'range of the point filter': (STAGE1, ['--test_pipeline.7.point_cloud_range', '[-51.2, -51.2, -5, 51.2, 51.2, 3]'],
                                  'data.val.pipeline.7.point_cloud_range', ['PointsRangeFilter has point_cloud_range']),
    'image size of the view transform': (PHASE3, [f'--{CAMERA}.vtransform.image_size', '[256, 640]', f'--{CAMERA}.vtransform.feature_size',
                                                  '[32, 80]'], 'data.train.dataset.pipeline.4.final_dim', ['is [256, 704]', 'is [256, 640]']),
    'feature size': (PHASE3, [f'--{CAMERA}.vtransform.feature_size', '[16, 44]'], f'{CAMERA}.vtransform.feature_size', ['[32, 88]']),
    'channels of the camera neck': (PHASE3, [f'--{CAMERA}.neck.in_channels', '[96, 192, 384]'],
        f'{CAMERA}.neck.in_channels', ['[192, 384, 768]']),
    'channels of the view transform': (PHASE3, [f'--{CAMERA}.vtransform.in_channels', '128'],
        f'{CAMERA}.vtransform.in_channels', ['256 channels']),
    'channels of the fuser': (PHASE3, ['--model.fuser.in_channels', '[64, 256]'], 'model.fuser.in_channels', ['[80, 256]']),
    'channels of the decoder': (PHASE3, ['--model.decoder.backbone.in_channels', '128'],
        'model.decoder.backbone.in_channels', ['256 channels']),
    'levels of the decoder': (PHASE3, ['--model.decoder.neck.upsample_strides', '[1, 4]'],
        'model.decoder.neck.upsample_strides', ['different cells']),
    'channels of the map head': (PHASE3, [f'--{MAP}.in_channels', '256'], f'{MAP}.in_channels', ['512 channels']),
    'values per point': (PHASE3, [f'--{LIDAR}.backbone.in_channels', '4'], f'{LIDAR}.backbone.in_channels', ['5 values per point']),
    'no fuser': (PHASE3, ['--model.fuser', 'null'], 'model.fuser', ['2 sensors']),
    'order of the map classes': (PHASE3, [f'--{MAP}.classes', '[divider, drivable_area, ped_crossing, walkway, stop_line, carpark_area]'],
                                 f'{MAP}.classes', ['same in the same order']),
    'number of object classes': (PHASE3, ['--model.heads.object.num_classes', '7'],
        'model.heads.object.num_classes', ['has 7 classes', 'labels 10']),
    'names of the object classes': (PHASE3, ['--model.heads.object.class_names', '[truck, car, construction_vehicle, bus, trailer, barrier, '
                                             'motorcycle, bicycle, pedestrian, traffic_cone]'], 'model.heads.object.class_names',
                                    ['numbered by object_classes']),
    'weight of an unknown class': (STAGE1, [f'--{MAP}.class_weights', '{stopline: 4.0}'], f'{MAP}.class_weights.stopline', ['does not have']),
    'decoder without layers': (STAGE1, [f'--{MAP}.decoder_channels', '[256, -1]'], f'{MAP}.decoder_channels', ['[256, -1]']),
    'an argument that nobody takes': (STAGE1, [f'--{MAP}.decoder_chanels', '[256, 128]', '--allow-new'], f'{MAP}.decoder_chanels',
                                      ["did you mean 'decoder_channels'"]),
    'a key of bev that nobody reads': (STAGE1, ['--bev.labels.cels', '600', '--allow-new'],
        'bev.labels.cels', ['did you mean bev.labels.cells']),
    'LiDAR that is not read': (PHASE3, ['--input_modality.use_lidar', 'false'], 'data.train.dataset.modality.use_lidar', ['lidar encoder']),
    'a map head without labels': (PHASE3, ['--map_labels', 'false'], 'data.train.dataset.pipeline.14.keys', ['gt_masks_bev']),
    'a depth loss without depth': (DEPTH, ['--depth_labels', 'false'], 'depth_labels', ['AwareBEVDepth learns depth']),
    'no learning rate': (PHASE3, ['--optimizer.lr', 'null'], 'optimizer.lr', ['is missing']),
    'no batch size': (PHASE3, ['--data.samples_per_gpu', 'null'], 'data.samples_per_gpu', ['is missing']),
    'no epochs': (PHASE3, ['--max_epochs', 'null'], 'max_epochs', ['is missing']),
    'a batch that no number of GPUs makes': (PHASE3, ['--data.samples_per_gpu', '3'],
        'auto_scale_lr.base_batch_size', ['is 16', 'no number of GPUs']),
    'a checkpoint that is not there': (STAGE1, ['--load_from', 'runs/nowhere/best.pth'], 'load_from', ['does not exist']),
}
# No command-line value puts these right: the message says what to decide.
TO_DECIDE = {'a checkpoint that is not there', 'weight of an unknown class', 'an argument that nobody takes', 'a key of bev that nobody reads',
             'a fused grid that the model does not read', 'a map grid that the model does not read', 'no size', 'no fuser'}
ROUNDS = {'voxels that do not divide the range': 2, 'voxels that the stride does not divide': 2}  # then the camera must follow the new trunk


def test_the_list_is_long_enough():
    assert len(BROKEN) >= 20


@pytest.fixture(scope='module')
def check():
    def check(file, words, **options):
        return check_config(load_config(str(CONFIGS / file), words), **options)
    return check


@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('name', BROKEN)
def test_a_broken_configuration_is_refused_and_put_right(name, check):
    file, words, key, pieces = BROKEN[name]
    report = check(file, words)
    named = [one for one in report.errors if one.key == key]
    assert named, f'{key} is not among {[one.key for one in report.errors]}'
    text = str(named[0])
    assert f"key '{key}'" in text and not [piece for piece in pieces if piece not in text], text
    if name in TO_DECIDE:
        return
    fixed = []
    for _ in range(ROUNDS.get(name, 1)):
        changes = {k: v for one in report.errors for k, v in one.write.items()}
        assert all(f'--{k} {spell(v)}' in '\n'.join(map(str, report.errors)) for k, v in changes.items())
        fixed += [word for k, v in changes.items() for word in shlex.split(f'--{k} {spell(v)}')]
        assert changes and report.errors
        report = check(file, [*words, *fixed])
    assert not report.errors, (fixed, [str(one) for one in report.errors])


@pytest.mark.parametrize('name, expected', [
    ('seed: output coarser than the labels', 1), ('seed: a step written as 0.167', 1), ('sparse shape of another range', 1),
    ('channels of the camera neck', 1), ('channels of the decoder', 1), ('voxels that do not divide the range', 1), ('no fuser', 1),
    ('order of the map classes', 1), ('seed: epochs of the copied file', 1), ('camera cells that the stride does not divide', 1),
])
def test_one_mistake_is_one_error(name, expected, check):
    file, words, *_ = BROKEN[name]
    report = check(file, words)
    assert len(report.errors) == expected, [str(one) for one in report.errors]


def test_a_batch_far_below_the_recipes(check):
    report = check(PHASE3, ['--data.samples_per_gpu', '1'], gpus=1)
    (error,) = report.errors
    assert error.key == 'optimizer.lr' and 'batch is 1 samples' in error.problem and 'chosen for 16' in error.problem
    assert '6.25e-06' in error.problem and '--auto_scale_lr.base_batch_size 1' in error.problem
    assert error.write == {'auto_scale_lr.enable': True}
    for words in (['--auto_scale_lr.enable', 'true'], ['--auto_scale_lr.base_batch_size', '1']):
        assert not check(PHASE3, ['--data.samples_per_gpu', '1', *words], gpus=1).errors
    assert not check(PHASE3, ['--optimizer_config.cumulative_iters', '8'], gpus=1).findings, '1 x 2 x 8 = 16'
    some = check(PHASE3, [], gpus=4)
    assert not some.errors and [one.key for one in some.warnings] == ['optimizer.lr']
    assert not check(PHASE3, [], gpus=8).findings


def test_a_file_with_both_names_of_the_epochs(tmp_path, check):
    (tmp_path / 'configs').mkdir()
    (tmp_path / 'configs/leaf.yaml').write_text('total_epochs: 10\nrunner: {type: CustomEpochBasedRunner, max_epochs: 20}\n'
                                                'optimizer: {type: AdamW, lr: 1.0e-4}\ndata: {samples_per_gpu: 1}\n')
    with pytest.warns(UserWarning, match="'total_epochs' is called 'max_epochs' here"):
        cfg = load_config(str(tmp_path / 'configs/leaf.yaml'))
    errors = {one.key: str(one) for one in check_config(cfg).errors}
    assert 'leaf.yaml:2' in errors['runner.max_epochs'] and 'is 20' in errors['runner.max_epochs'] and '10' in errors['runner.max_epochs']
    assert 'is missing' in errors['lr_config'] and '--lr_config null' in errors['lr_config']


def test_a_dumped_configuration_has_no_expressions_left(tmp_path):
    load_config(str(CONFIGS / STAGE1)).dump(str(tmp_path / 'resolved.yaml'))
    cfg = load_config(str(tmp_path / 'resolved.yaml'))
    assert not check_config(cfg).findings
    for words, key in ((['--bev.labels.cells', '800'], 'bev.labels.cells'), (['--bev.camera.step', '0.2'], 'bev.camera.step'),
                       (['--bev.lidar.step', '0.1'], 'bev.lidar.step'), (['--bev.x', '[-51.2, 51.2]'], 'bev.x'),
                       (['--bev.camera.stride', '1'], 'bev.camera.stride')):
        errors = check_config(load_config(str(tmp_path / 'resolved.yaml'), words)).errors
        assert [one.key for one in errors] == [key] and 'nothing follows' in errors[0].problem, [str(one) for one in errors]


def test_an_older_key_on_the_command_line_is_warned_about_and_counts(check):
    report = check(PHASE3, ['--map_bound', '[[-50, 50, 0.5], [-50, 50, 0.5]]'])
    assert not report.errors
    (warning,) = report.warnings
    assert warning.key == 'bev.labels.cells' and 'command line' in warning.problem and warning.write == {'bev.labels.cells': 200}


def test_the_references_profile_only_warns_about_metres(check):
    words = [f'--{GRID}.input_scope', '[[-51.2, 51.2, 0.8], [-51.2, 51.2, 0.8]]', '--compat', 'reference']
    report = check(PHASE3, words)
    assert not report.errors and f'{GRID}.input_scope' in [one.key for one in report.warnings]


def test_what_works_and_is_probably_not_meant(check):
    report = check(PHASE3, ['--evaluation.start', '9', '--checkpoint_config.interval', '9', f'--{MAP}.aux_weight', '0.4',
                            '--gt_paste_stop_epoch', '9', '--bev.labels.x', '[-60, 60]', '--bev.labels.y', '[-60, 60]'])
    assert not report.errors
    assert {one.key for one in report.warnings} >= {'evaluation.start', 'checkpoint_config.interval', f'{MAP}.aux_weight',
                                                    'gt_paste_stop_epoch', f'{GRID}.output_scope'}


# ---- values of any kind ----------------------------------------------------------------------------------------------------
JUNK = [None, 'x', -1, 0, [], {}, float('nan'), True, [1, 2, 3], {'type': 'X'}, 1e9, [None, None, None], [[1]]]


def paths(node, path=()):
    if path:
        yield path
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from paths(value, (*path, key))


@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('name', [STAGE1, PILLARS, 'det/centerhead/lssfpn/camera+radar/resnet50/dlss.yaml'])
def test_no_value_makes_the_check_fail(name):
    rng, cfg = random.Random(7), load_config(str(CONFIGS / name)).to_dict()
    every = list(paths(cfg))
    for _ in range(120):
        path, broken = rng.choice(every), copy.deepcopy(cfg)
        node = broken
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = rng.choice(JUNK)
        report = check_config(broken)
        assert report.text() and report.as_json(), path


def test_a_value_that_the_check_cannot_follow_is_a_warning_with_its_part(check):
    report = check(PHASE3, ['--model.decoder.backbone.layer_strides', '[1, two]'])
    (warning,) = [one for one in report.warnings if one.key == 'model.decoder.backbone']
    assert 'another kind than expected' in warning.problem and not report.errors
