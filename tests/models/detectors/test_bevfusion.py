"""The detector with small encoders and heads: any set of sensors, empty input, losses, predictions, DDP."""
import importlib.util
import json
import logging
import math
import os
import socket
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.models.builder import build_model

spec = importlib.util.spec_from_file_location('dummy_heads', Path(__file__).parents[1] / 'dummy_heads.py')
HEADS = importlib.util.module_from_spec(spec)
spec.loader.exec_module(HEADS)

RANGE = [-12.8, -9.6, -5.0, 12.8, 9.6, 3.0]
CAMERA = {'backbone': {'type': 'ResNet', 'depth': 18, 'num_stages': 3, 'strides': (1, 2, 2), 'dilations': (1, 1, 1),
                       'base_channels': 4, 'stem_channels': 4, 'out_indices': [1, 2], 'norm_cfg': {'type': 'BN2d'},
                       'norm_eval': False},
          'neck': {'type': 'GeneralizedLSSFPN', 'in_channels': [8, 16], 'out_channels': 8, 'num_outs': 2},
          'vtransform': {'type': 'DepthLSSTransform', 'in_channels': 8, 'out_channels': 6, 'image_size': [32, 48],
                         'feature_size': [4, 6], 'xbound': [-12.8, 12.8, 0.4], 'ybound': [-9.6, 9.6, 0.4],
                         'zbound': [-10.0, 10.0, 20.0], 'dbound': [1.0, 13.0, 1.0], 'downsample': 2}}
LIDAR = {'voxelize': {'max_num_points': 5, 'point_cloud_range': RANGE, 'voxel_size': [0.1, 0.1, 0.2], 'max_voxels': [500, 600]},
         'backbone': {'type': 'SparseEncoder', 'in_channels': 5, 'sparse_shape': [256, 192, 41], 'base_channels': 4,
                      'output_channels': 4, 'encoder_channels': [[4, 4, 8], [8, 8, 8], [8, 8, 8], [8, 8]],
                      'encoder_paddings': [[0, 0, 1], [0, 0, 1], [0, 0, [1, 1, 0]], [0, 0]], 'block_type': 'basicblock'}}
RADAR = {'voxelize_reduce': False,
         'voxelize': {'max_num_points': 4, 'point_cloud_range': RANGE, 'voxel_size': [0.8, 0.8, 8.0], 'max_voxels': 100},
         'backbone': {'type': 'RadarEncoder',
                      'pts_voxel_encoder': {'type': 'RadarFeatureNet', 'in_channels': 7, 'feat_channels': [8, 5],
                                            'point_cloud_range': RANGE, 'voxel_size': [0.8, 0.8, 8.0]},
                      'pts_middle_encoder': {'type': 'PointPillarsScatter', 'in_channels': 5, 'output_shape': [32, 24]}}}
CHANNELS = {'camera': 6, 'lidar': 8, 'radar': 5}


def decoder(channels):
    return {'backbone': {'type': 'SECOND', 'in_channels': channels, 'out_channels': [8, 8], 'layer_nums': [1, 1],
                         'layer_strides': [1, 2]},
            'neck': {'type': 'SECONDFPN', 'in_channels': [8, 8], 'out_channels': [6, 6], 'upsample_strides': [1, 2],
                     'use_conv_for_no_stride': True}}


def config(*sensors, heads=('object', 'map'), **more):
    all_encoders = {'camera': CAMERA, 'lidar': LIDAR, 'radar': RADAR}
    channels = [CHANNELS[s] for s in ('camera', 'lidar', 'radar') if s in sensors]
    # LiDAR's BEV has stride 8 of 0.1 m = 0.8 m, like the camera's 0.4 m with downsample 2 and the radar's pillars
    width = 7 if len(sensors) > 1 else channels[0]
    kinds = {'object': {'type': HEADS.DummyObjectHead, 'in_channels': 12},
             'map': {'type': HEADS.DummyMapHead, 'in_channels': 12}}
    return {'type': 'BEVFusion', 'encoders': {s: all_encoders[s] if s in sensors else None for s in all_encoders},
            'fuser': {'type': 'ConvFuser', 'in_channels': channels, 'out_channels': 7} if len(sensors) > 1 else None,
            'decoder': decoder(width), 'heads': {task: kinds[task] if task in heads else None for task in kinds}, **more}


def batch(samples=2, points=200, cameras=2, seed=0):
    """A batch with ``points`` LiDAR and radar points per sample (or one number per sample)."""
    gen = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=gen)  # noqa: E731
    counts = [points] * samples if isinstance(points, int) else points
    intrinsics, camera2lidar, image = (torch.eye(4).repeat(samples, cameras, 1, 1) for _ in range(3))
    intrinsics[..., 0, 0] = intrinsics[..., 1, 1] = 30.0
    intrinsics[..., 0, 2], intrinsics[..., 1, 2] = 24.0, 16.0
    for n in range(cameras):
        a = math.pi * n
        camera2lidar[:, n, :3, :3] = torch.tensor([[math.cos(a), 0, math.sin(a)], [-math.sin(a), 0, math.cos(a)], [0, -1, 0]])
    lidar = torch.eye(4).repeat(samples, 1, 1)
    lidar[:, :3, 3] = rand(samples, 3)
    spread = torch.tensor([24.0, 18, 3, 1, 0.5])
    clouds = [(rand(n, 5) - 0.5) * spread for n in counts]
    return {'img': rand(samples, cameras, 3, 32, 48), 'points': clouds,
            'radar': [torch.cat([c[:, :3], rand(len(c), 4)], 1) for c in clouds],
            'camera_intrinsics': intrinsics, 'camera2lidar': camera2lidar, 'camera2ego': camera2lidar, 'img_aug_matrix': image,
            'lidar_aug_matrix': lidar, 'lidar2image': intrinsics @ torch.linalg.inv(camera2lidar),
            'lidar2camera': torch.linalg.inv(camera2lidar), 'lidar2ego': torch.eye(4).repeat(samples, 1, 1),
            'gt_bboxes_3d': [torch.zeros(k, 9) for k in range(samples)], 'gt_labels_3d': [torch.zeros(k).long() for k in
                                                                                       range(samples)],
            'gt_masks_bev': (rand(samples, 2, 20, 20) < 0.3).long(), 'metas': [{'token': str(k)} for k in range(samples)]}


def check_gradients(model):
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name


SENSOR_SETS = [('camera', ), ('lidar', ), ('radar', ), ('camera', 'lidar'), ('camera', 'radar'), ('camera', 'lidar', 'radar')]


@pytest.mark.parametrize('sensors', SENSOR_SETS)
def test_any_set_of_sensors_trains_and_predicts(sensors):
    model, data = build_model(config(*sensors)), batch()
    if 'camera' not in sensors:
        del data['img']
    losses = model(**data)
    assert list(losses) == ['loss/object/loss_heatmap', 'stats/object/matched', 'loss/map/road/focal', 'loss/map/divider/focal']
    sum(v for k, v in losses.items() if k.startswith('loss/')).backward()
    check_gradients(model)
    model.eval()
    with torch.no_grad():
        outputs = model(**{k: v for k, v in data.items() if not k.startswith('gt_')})
    assert len(outputs) == 2 and all(set(o) == {'boxes_3d', 'scores_3d', 'labels_3d', 'masks_bev'} for o in outputs)
    assert outputs[0]['masks_bev'].shape == (2, 32, 24), 'a BEV that is not square: x before y'
    assert 0 <= outputs[0]['masks_bev'].min() and outputs[0]['masks_bev'].max() <= 1


@pytest.mark.parametrize('sensors', [('lidar', ), ('camera', 'lidar'), ('camera', 'lidar', 'radar')])
@pytest.mark.parametrize('points', [[200, 0], [0, 200], [0, 0], [1, 0]])
def test_empty_clouds_train_with_the_same_losses_and_gradients_everywhere(sensors, points):
    model, data = build_model(config(*sensors)), batch(points=points)
    data['gt_masks_bev'].zero_()
    losses = model(**data)
    assert list(losses) == list(model(**batch()))
    assert all(torch.isfinite(v) for v in losses.values())
    sum(v for k, v in losses.items() if k.startswith('loss/')).backward()
    check_gradients(model)


@pytest.mark.parametrize('points', [200, [200, 0], 0])
def test_dynamic_voxels_train_as_well(points):
    cfg = config('lidar')
    cfg['encoders']['lidar'] = {**LIDAR, 'voxelize': {'point_cloud_range': RANGE, 'voxel_size': [0.1, 0.1, 0.2]}}
    model = build_model(cfg)
    model.train_step(batch(points=points), None)['loss'].backward()
    check_gradients(model)


def test_the_camera_branch_leaves_points_alone_and_both_modes_see_the_same_lidar():
    model, data = build_model(config('camera', 'lidar')), batch()
    before = [p.clone() for p in data['points']]
    seen = []
    model.encoders['lidar']['backbone'].register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    model.train()
    model(**data)
    model.eval()
    with torch.no_grad():
        model(**data)
    assert all(torch.equal(a, b) for a, b in zip(before, data['points'], strict=True))
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        alone = build_model(config('lidar')).encoders['lidar']['voxelize'].eval()(before)
    assert torch.equal(seen[1][0], alone[0])


def test_samples_are_independent_in_evaluation():
    model, data = build_model(config('camera', 'lidar')).eval(), batch(samples=3, points=[100, 0, 150])
    with torch.no_grad():
        together = model(**data)
        for k in range(3):
            one = model(**{key: value[k:k + 1] for key, value in data.items()})
            torch.testing.assert_close(one[0]['masks_bev'], together[k]['masks_bev'], rtol=1e-4, atol=1e-5)


def test_the_batch_size_is_that_of_the_metas():
    model, data = build_model(config('lidar')), batch()
    with pytest.raises(ValueError, match='points holds 2 clouds for 3 samples'):
        model(**{**data, 'metas': [{}] * 3})
    with pytest.raises(ValueError, match='the batch has no metas'):
        model(**{**data, 'metas': []})
    with pytest.raises(ValueError, match='img holds 2 samples, metas 1'):
        build_model(config('camera'))(**{**data, 'metas': [{}]})


def test_task_weights_scale_losses_but_not_statistics():
    data = batch()
    torch.manual_seed(0)
    plain = build_model(config('lidar'))
    torch.manual_seed(0)
    scaled = build_model(config('lidar', loss_scale={'object': 2.0, 'map': 0.5}))
    a, b = plain(**data), scaled(**data)
    for name, value in a.items():
        factor = {'loss/object': 2.0, 'loss/map': 0.5}.get('/'.join(name.split('/')[:2]), 1.0)
        torch.testing.assert_close(b[name], factor * value)
    with pytest.raises(ValueError, match="model.loss_scale: unknown task 'objekt'"):
        build_model(config('lidar', loss_scale={'objekt': 2.0}))


def test_one_task_and_separate_decoders():
    model = build_model(config('lidar', heads=('map', ), loss_scale={'object': 1.0, 'map': 2.0}))
    assert list(model.heads) == ['map'] and list(model(**batch())) == ['loss/map/road/focal', 'loss/map/divider/focal']
    cfg = config('lidar')
    cfg['decoder'] = {'object': decoder(8), 'map': decoder(8)}
    model = build_model(cfg)
    names = {n.split('.')[1] + '.' + n.split('.')[2] for n in model.state_dict() if n.startswith('decoder.')}
    assert names == {'object.backbone', 'object.neck', 'map.backbone', 'map.neck'}
    losses = model(**batch())
    losses['loss/map/road/focal'].backward()
    touched = {n.split('.')[1] for n, p in model.named_parameters() if n.startswith('decoder.') and p.grad is not None}
    assert touched == {'map'}
    with pytest.raises(ValueError, match=r'share one decoder, or one such mapping per task.*got the keys'):
        build_model({**cfg, 'decoder': {'object': decoder(8)}})


def test_parse_losses_sums_only_losses():
    losses = OrderedDict([('loss/a', torch.tensor(1.0, requires_grad=True)), ('stats/loss_like', torch.tensor(50.0)),
                          ('loss/b', torch.tensor([2.0, 4.0], requires_grad=True))])
    total, log = build_model(config('radar'))._parse_losses(losses)
    assert total.item() == 4.0 and total.requires_grad
    assert log == OrderedDict([('loss/a', 1.0), ('stats/loss_like', 50.0), ('loss/b', 3.0), ('loss', 4.0)])
    model, data = build_model(config('radar')), batch()
    step = model.train_step(data, None)
    assert step['num_samples'] == 2 and step['loss'].requires_grad and list(step['log_vars'])[-1] == 'loss'
    model.eval()
    assert len(model.val_step(data)['outputs']) == 2


def test_depth_loss_has_its_name():
    cfg = config('camera')
    cfg['encoders']['camera'] = {**CAMERA, 'vtransform': {**CAMERA['vtransform'], 'type': 'AwareBEVDepth', 'downsample': 2,
                                                          'bevdepth_refine': False, 'bevdepth_downsample': 8}}
    model, data = build_model(cfg), batch()
    with pytest.raises(ValueError, match="needs 'depths'"):
        model(**data)
    losses = model(**data, depths=torch.rand(2, 2, 32, 48) * 12)
    assert list(losses)[-1] == 'loss/depth' and losses['loss/depth'].requires_grad


def test_frozen_parts_get_no_gradient_and_keep_their_statistics():
    model = build_model(config('camera', 'lidar', freeze=['encoders.lidar', 'decoder.backbone'])).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert not model.encoders['lidar'].training and model.encoders['camera'].training
    model.train_step(batch(), None)['loss'].backward()
    for name, p in model.named_parameters():
        frozen = name.startswith(('encoders.lidar', 'decoder.backbone'))
        assert p.requires_grad != frozen and (p.grad is None) == frozen, name
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed and not any(k.startswith(('encoders.lidar', 'decoder.backbone')) for k in changed)
    with pytest.raises(ValueError, match="no part named 'encoders.radar'"):
        build_model(config('lidar', freeze=['encoders.radar']))


def test_lidar_stays_float32_under_autocast():
    model, data = build_model(config('camera', 'lidar')), batch()
    seen = {}
    model.encoders['lidar']['backbone'].register_forward_hook(lambda _, args, out: seen.update(coords=args[1], out=out))
    with torch.no_grad():
        model(**data)
    plain = dict(seen)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        losses = model(**data)
        total = sum(v for k, v in losses.items() if k.startswith('loss/'))
    assert torch.equal(plain['coords'], seen['coords']) and seen['out'].dtype == torch.float32
    total.backward()
    check_gradients(model)


def test_blocks_are_initialised_without_a_line_each(caplog):
    from mmcv.utils.logging import logger_initialized
    model = build_model(config('camera', 'lidar'))
    logger = logging.getLogger(next(iter(logger_initialized), 'mmcv'))
    level = logger.level
    logger.setLevel('INFO')
    logger.addHandler(caplog.handler)
    try:
        model.init_weights()
        assert 'initialize ' not in caplog.text
        logger.info('initialize later')
        assert 'initialize later' in caplog.text and not logger.filters
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(level)


def test_pretrained_files_are_loaded_by_init_weights_only_and_their_absence_is_named(tmp_path, capsys):
    cfg = config('camera')
    path = tmp_path / 'backbone.pth'
    backbone = {**CAMERA['backbone'], 'init_cfg': {'type': 'Pretrained', 'checkpoint': str(path)}}
    cfg['encoders']['camera'] = {**CAMERA, 'backbone': backbone}
    model = build_model(cfg)
    with pytest.raises(RuntimeError, match=r'model.encoders.camera.backbone.init_cfg.checkpoint: cannot load .*backbone.pth'):
        model.init_weights()
    state = {k: torch.full_like(v, 0.25) for k, v in model.encoders['camera']['backbone'].state_dict().items()}
    torch.save({'state_dict': state}, path)
    capsys.readouterr()
    model.init_weights()
    assert sum(capsys.readouterr()[i].count('\n') for i in range(2)) < 20, 'not a paragraph per parameter'
    assert (model.encoders['camera']['backbone'].conv1.weight == 0.25).all()

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'ran'), )

    torch.save({'state_dict': state, 'extra': Evil()}, path)
    with pytest.raises(RuntimeError, match='cannot load'):
        model.init_weights()
    assert not (tmp_path / 'ran').exists(), 'a checkpoint must not run code'


def test_grids_that_do_not_fit_are_named_at_build_time():
    cfg = config('camera', 'lidar')
    fine = {**CAMERA, 'vtransform': {**CAMERA['vtransform'], 'xbound': [-12.8, 12.8, 0.2], 'ybound': [-9.6, 9.6, 0.2]}}
    cfg['encoders'] = {'camera': fine, 'lidar': LIDAR}
    with pytest.raises(ValueError, match=r'64x48 cells .*vtransform.xbound/ybound/downsample.*32x24 cells .*voxel_size'):
        build_model(cfg)
    moved = {**CAMERA, 'vtransform': {**CAMERA['vtransform'], 'xbound': [-13.8, 11.8, 0.4]}}
    cfg['encoders'] = {'camera': moved, 'lidar': LIDAR}
    with pytest.raises(ValueError, match='cover different metres'):
        build_model(cfg)
    with pytest.warns(UserWarning, match='cover different metres'):
        build_model(cfg, compat='reference')
    cfg['encoders'] = {'lidar': {**LIDAR, 'backbone': {**LIDAR['backbone'], 'sparse_shape': [192, 256, 41]}}}
    message = r'backbone.sparse_shape is \[192, 256, 41\].*256x192x40 voxels.*write \[256, 192, 41\]'
    with pytest.raises(ValueError, match=message):
        build_model(cfg)


class NeedsTrunk(HEADS.DummyMapHead):
    def check_trunk(self, grid):
        raise ValueError(f'asked about {grid.extent}')


def test_configuration_errors_name_the_key():
    for change, message in (({'encoders': {'sonar': {}}}, "model.encoders: unknown key 'sonar'"),
                            ({'encoders': {'camera': {'backbone': CAMERA['backbone']}}},
                             "model.encoders.camera: the key 'vtransform' is missing"),
                            ({'encoders': {'lidar': {**LIDAR, 'neck': {}}}}, "model.encoders.lidar: unknown key 'neck'"),
                            ({'heads': {'map': None}}, 'model.heads names no task'),
                            ({'heads': {'map': {'type': NeedsTrunk, 'in_channels': 12}}}, r'asked about \(-12.8, -9.6'),
                            ({'decoder': {'neck': {}}}, "model.decoder: the key 'backbone' is missing")):
        with pytest.raises(ValueError, match=message):
            build_model({**config('lidar'), **change})


def test_batches_without_what_the_model_needs_name_it():
    model, data = build_model(config('camera', 'lidar')), batch()
    with pytest.raises(ValueError, match="has a camera encoder, but the batch has no 'img'"):
        model(**{k: v for k, v in data.items() if k != 'img'})
    with pytest.raises(ValueError, match="model.heads.map trains on 'gt_masks_bev'"):
        model(**{**data, 'gt_masks_bev': None})
    with pytest.raises(ValueError, match=r'img must be \(B, N, 3, H, W\)'):
        model(**{**data, 'img': data['img'][0]})


def _ddp_worker(rank, port):
    """One of two ranks; prints what it logged as one JSON line."""
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(build_model(config('camera', 'lidar', 'radar')))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    names, logs = [], []
    for step in range(3):  # rank 1 sees no point at all in two of three steps
        losses = model(**batch(points=0 if rank == 1 and step != 1 else 150, seed=10 * rank + step))
        total, log = model.module._parse_losses(losses)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        names.append(list(losses))
        logs.append(log['loss'])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum().item()
    print(json.dumps({'names': names, 'logs': logs, 'weights': weights}))
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_train_without_searching_for_unused_parameters():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join(p for p in sys.path if p)}
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(port)], env=env, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), [err[-3000:] for _, err in outputs]
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert first == second, 'same names, reduced values and weights on both ranks'
    assert len(set(map(tuple, first['names']))) == 1


if __name__ == '__main__':
    _ddp_worker(int(sys.argv[1]), int(sys.argv[2]))
