"""Every shipped configuration is accepted, and the chain that is computed is the one that is built."""
import random

import pytest
import reference_tree
import torch
from testing import REPO

from mmdet3d_ext.checks import check_config
from mmdet3d_ext.config import load_config
from mmdet3d_ext.models.builder import build_model

CONFIGS = REPO / 'configs'
NAMES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob('*.yaml'))
# Folders' parts that leave something for their leaves to decide: no fuser yet, or no camera yet.
UNFINISHED = {'nuscenes/det/transfusion/secfpn/camera+lidar/default.yaml': 'model.fuser',
              'nuscenes/det/transfusion/secfpn/camera+lidar/swint_v0p075/default.yaml': 'model.fuser',
              'nuscenes/det/centerhead/lssfpn/camera+radar/default.yaml': 'model.decoder.backbone.in_channels'}
TINY = 'synthetic/multitask_tiny.yaml'


@pytest.mark.parametrize('name', NAMES)
def test_a_shipped_configuration_is_accepted(name):
    report = check_config(load_config(str(CONFIGS / name)))
    if name in UNFINISHED:
        assert [one.key for one in report.errors] == [UNFINISHED[name]]
        return
    assert not report.findings, [str(one) for one in report.findings]
    assert not [note for note in report.notes if 'not known' in note], report.notes


@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_tree_written_for_the_reference_is_accepted(tmp_path):
    """Without a bev block; models that the tree leaves unfinished aside. Only other sweeps in training than in test are remarked on."""
    root, checked = reference_tree.write(tmp_path), 0
    for name in reference_tree.FILES:
        cfg = load_config(str(root / name))
        if not (cfg.get('optimizer') or {}).get('lr') or name in UNFINISHED:
            continue
        report = check_config(cfg)
        assert not report.errors, (name, [str(one) for one in report.errors])
        assert {one.key.rsplit('.', 1)[-1] for one in report.warnings} <= {'sweeps_num'}
        checked += 1
    assert checked >= 14


def test_the_stages_have_the_cells_of_their_names():
    expected = {'phase3_400': (360, 180, 400), 'stage1_600': (540, 270, 600), 'stage2_800': (720, 360, 800)}
    for name, (camera, trunk, labels) in expected.items():
        report = check_config(load_config(str(CONFIGS / f'nuscenes/multitask/{name}.yaml')), gpus=8 if name == 'phase3_400' else 4)
        cells = {row.stage: row.cells for row in report.rows}
        own = 'map: ' if name != 'phase3_400' else ''
        assert cells[f'{own}camera grid'] == (camera,) * 2 and cells[f'{own}decoder'] == (trunk,) * 2
        assert cells['map output'] == cells['labels (train)'] == cells['labels (val)'] == (labels,) * 2
        assert cells['lidar voxels'] == (1440,) * 2 and cells['decoder'] == (180,) * 2, 'detection keeps its grid'
        assert {row.key for row in report.rows if row.stage.startswith('labels')} == {'bev.labels.cells'}
        assert not report.findings


@pytest.mark.parametrize('name', [TINY, 'nuscenes/multitask/stage1_600.yaml', 'nuscenes/det/transfusion/secfpn/lidar/pointpillars.yaml',
                                  'nuscenes/det/centerhead/lssfpn/camera+radar/resnet50/dlss.yaml', 'nuscenes/seg/camera-bev256d2.yaml'])
def test_the_chain_is_what_is_built(name):
    cfg = load_config(str(CONFIGS / name))
    rows = {row.stage: row for row in check_config(cfg).rows}
    settings = cfg.to_dict()['model']
    if settings['encoders'].get('camera'):
        settings['encoders']['camera']['backbone']['init_cfg'] = None
    model = build_model(settings).eval()
    for sensor, encoder in model.encoders.items():
        row = rows[f'{sensor} map']
        if sensor == 'camera':
            assert (row.cells, row.channels) == (encoder['vtransform'].bev_shape, encoder['vtransform'].bev_channels)
        else:
            assert row.cells == tuple(encoder['backbone'].bev_shape)
            assert row.channels == getattr(encoder['backbone'], 'out_channels', row.channels)
    fused = rows['fused trunk']
    first = model.fuser[0] if model.fuser is not None else None
    channels = model.fuser.out_channels if first is not None else next(row.channels for stage, row in rows.items() if stage.endswith(' map'))
    with torch.no_grad():
        out = model._decode(model.decoder, torch.zeros(1, channels, 48, 48))  # fewer cells, in the same proportion
    assert out.shape[1] == rows['decoder'].channels
    assert out.shape[2] * fused.cells[0] == 48 * rows['decoder'].cells[0]
    for task, branch in model.branches.items():
        assert rows[f'{task}: fused trunk'].cells == branch.grid.shape
        pooled = model.encoders['camera']['vtransform'].extra_grids[task]
        assert rows[f'{task}: camera grid'].cells == pooled.shape
    if 'map' in model.heads:
        assert rows['map output'].cells == model.heads['map'].transform.output_shape


# Values that sometimes fit together and often do not.
CHOICES = {
    'bev.lidar.step': [0.1, 0.2, 0.4, 0.3], 'bev.camera.step': [0.4, 0.8, 1.6, 0.7], 'bev.camera.stride': [1, 2, 4],
    'bev.map.step': [None, 0.4, 0.8, 0.6], 'bev.fused.cells': [None, 64, 128, 100], 'out_size_factor': [2, 4, 8],
    'bev.x': ['[-51.2, 51.2]', '[-25.6, 25.6]'], 'bev.labels.cells': [100, 200, 120],
    'model.decoder.backbone.in_channels': [64, 64, 32], 'model.fuser.in_channels': ['[32, 64]', '[32, 64]', '[64, 32]'],
    'model.heads.map.in_channels': [72, 72, 64], 'model.decoder.neck.upsample_strides': ['[2, 4, 8]', '[1, 2, 4]', '[2, 4, 4]'],
    'model.encoders.camera.vtransform.feature_size': ['[12, 32]', '[12, 32]', '[6, 16]'],
    'model.heads.object.bbox_coder.out_size_factor': ['${out_size_factor}', '${out_size_factor}', 4],
}


def runs(cfg, rows):
    """Whether the model can be built and its heads take the maps that they would get."""
    settings = cfg.to_dict()['model']
    try:
        model = build_model(settings)
        maps = {}
        grids = {'main': model.trunk_grid or None}
        shape = grids['main'].shape if grids['main'] else next(iter(model.encoders.values()))['vtransform'].bev_shape
        camera = model.encoders['camera']['vtransform']
        camera.check_inputs(torch.zeros(1, 1, 1, *(n // 8 for n in settings['encoders']['camera']['vtransform']['image_size'])), {
            name: True for name in ('camera_intrinsics', 'camera2lidar', 'img_aug_matrix', 'lidar_aug_matrix')})
        sensors = [camera.bev_channels, model.encoders['lidar']['backbone'].out_channels]
        fused = {'main': model.fuser([torch.zeros(2, n, *shape) for n in sensors])}
        for task, branch in model.branches.items():
            fused[task] = branch.fuser([torch.zeros(2, n, *branch.grid.shape) for n in sensors])
        maps = model.decode(fused)
        model.heads['object'].eval()(maps['object'], None)
        model.heads['map'].train().transform(maps['map'])
        return maps['map'].shape[1] == settings['heads']['map']['in_channels'] and model.heads['map'].features(maps['map']) is not None
    except (ValueError, RuntimeError, KeyError):
        return False


@pytest.mark.filterwarnings('ignore')
def test_what_is_accepted_can_be_built_and_run():
    rng, accepted, refused_but_runs = random.Random(11), 0, []
    for _ in range(25):
        keys = rng.sample(sorted(CHOICES), 2)
        words = []
        for key in keys:
            value = rng.choice(CHOICES[key])
            words += [f'--{key}', 'null' if value is None else str(value)]
        words += ['--bev.labels.x', '[-25, 25]', '--bev.labels.y', '[-25, 25]', '--bev.y', '[-25.6, 25.6]']
        if 'bev.x' not in keys:
            words += ['--bev.x', '[-25.6, 25.6]']
        cfg = load_config(str(CONFIGS / TINY), words)
        report = check_config(cfg)
        works = runs(cfg, report.rows)
        if not report.errors:
            accepted += 1
            assert works, (words, report.text())
        elif works:
            refused_but_runs.append((words, [one.key for one in report.errors]))
    assert accepted >= 5
    # What runs and is refused all the same would silently mean something else: boxes or labels on other cells.
    silent = ('out_size_factor', 'grid_size', 'voxel_size', 'pc_range', 'output_scope', 'input_scope')
    for words, keys in refused_but_runs:
        assert all(key.rsplit('.', 1)[-1] in silent or key.startswith('bev.') for key in keys), (words, keys)
