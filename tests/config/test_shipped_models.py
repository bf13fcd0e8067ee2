"""Every shipped configuration trains and predicts on synthetic data, at small images and ranges: finite losses, and a gradient in
every trainable parameter. The same at full size: benchmarks/full_size_sweep.py, whose list and rules are used here."""
import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from testing import REPO

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.config import load_config
from mmdet3d_ext.models.builder import build_model

spec = importlib.util.spec_from_file_location('full_size_sweep', REPO / 'benchmarks/full_size_sweep.py')
sweep = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sweep)

TINY = 'synthetic/multitask_tiny.yaml'


@pytest.fixture(scope='module')
def data_root(synthetic_root, tmp_path_factory):
    """The synthetic set with info files and an object database, as tools/create_data.py leaves them."""
    from mmdet3d_ext.datasets.gt_database import create_gt_database
    from mmdet3d_ext.datasets.nuscenes_converter import create_infos
    root = tmp_path_factory.mktemp('data')
    for entry in Path(synthetic_root).iterdir():
        (root / entry.name).symlink_to(entry)
    files = create_infos(root, root, version='v1.0-mini')
    create_gt_database(files['train'], root, root)
    return root


def samples(dataset_cfg, indices, cameras=2):
    """A batch through the whole pipeline, with the first ``cameras`` only."""
    from mmcv.parallel import collate

    from mmdet3d_ext.datasets.builder import build_dataset
    from mmdet3d_ext.datasets.pipelines.formatting import CAMERA_MATRICES
    from mmdet3d_ext.engine.parallel import unpack_batch
    np.random.seed(0)
    dataset = build_dataset(dataset_cfg)
    batch = unpack_batch(collate([dataset.load_sample(i) for i in indices], samples_per_gpu=len(indices)), torch.device('cpu'))
    for key in ('img', 'depths', *CAMERA_MATRICES):
        if key in batch:
            batch[key] = batch[key][:, :cameras]
    return batch


def objects(names, at_once=False):
    """One box of every class around the car, some of two, and a sample without any.

    Each task of CenterPoint's head gets an odd number, and so does a head of all classes (``at_once``): an L1 loss gives a bias the
    sum of the signs of the errors, and an even number of them may cancel.
    """
    from mmdet3d.core.bbox import LiDARInstance3DBoxes
    twice = [names.index(name) for name in ('truck', 'bus', 'motorcycle', 'pedestrian')]
    labels = torch.tensor([*range(len(names)), *twice][:-1 if at_once else None])
    rows = torch.tensor([[4 * math.cos(k), 4 * math.sin(k), -1.5, 2.0, 1.0, 1.5, 0.3 * k, 1.0, -0.5] for k in range(len(labels))])
    return {'gt_bboxes_3d': [LiDARInstance3DBoxes(rows, box_dim=9), LiDARInstance3DBoxes(rows[:0], box_dim=9)],
            'gt_labels_3d': [labels, torch.zeros(0).long()]}


@pytest.mark.parametrize('name', sweep.shipped())
def test_a_shipped_configuration_trains_and_predicts(name, data_root):
    cfg = load_config(str(sweep.CONFIGS / name), [*sweep.small_overrides(name), '--dataset_root', f'{data_root}/',
                                                  '--train_dataset.filter_empty_gt', 'false'])
    torch.manual_seed(0)
    plain = cfg.to_dict()
    model = build_model(plain['model'])
    cameras = 6 if cfg.input_modality.use_radar else 2  # few radar points lie in any one image
    at_once = (plain['model']['heads'].get('object') or {}).get('type') == 'TransFusionHead'
    batch = {**samples(plain['train_dataset'], [0, 1], cameras), **objects(list(cfg.object_classes), at_once)}
    losses = model(**batch)
    tasks = {task for task, head in plain['model']['heads'].items() if head}
    assert {key.split('/')[1] for key in losses if key.startswith('loss/')} - {'depth'} == tasks
    assert ('loss/depth' in losses) == bool(cfg.depth_labels)
    assert all(torch.isfinite(value).all() for value in losses.values())
    sum(value for key, value in losses.items() if key.startswith('loss/')).backward()
    assert sweep.without_gradient(model, excused=()) == []
    model.eval()
    with torch.no_grad():
        outputs = model(**samples(plain['data']['val'], [0], cameras))
    assert len(outputs) == 1
    if 'object' in tasks:
        assert len(outputs[0]['boxes_3d']) == len(outputs[0]['scores_3d']) == len(outputs[0]['labels_3d'])
    if 'map' in tasks:
        assert outputs[0]['masks_bev'].shape == (6, 24, 24)


def test_the_profile_at_the_root_reaches_every_part(data_root):
    """``compat: reference`` is one key: models, data sets, pipeline steps and metrics get it as training and evaluation build them."""
    from mmdet3d_ext.engine.evaluate import build_evaluators
    from mmdet3d_ext.engine.train import make_loader, make_model
    name = 'nuscenes/multitask/phase3_400.yaml'
    cfg = load_config(str(sweep.CONFIGS / name), [*sweep.small_overrides(name), '--dataset_root', f'{data_root}/',
                                                  '--data.workers_per_gpu', '0', '--depth_labels', 'true', '--compat', 'reference'])
    model = make_model(cfg)
    train, val = (make_loader(cfg, part, 0, train).dataset for part, train in ((cfg.data.train, True), (cfg.data.val, False)))
    evaluators = build_evaluators(cfg, val, str(data_root))
    while hasattr(train, 'dataset'):
        train = train.dataset
    parts = [*model.modules(), model.heads['object'].bbox_coder, train, *train.transforms, val, *val.transforms,
             *[evaluator.metric for evaluator in evaluators]]
    held = {type(part).__name__: part.compat for part in parts if hasattr(part, 'compat')}
    assert set(held) >= {'DepthLSSTransform', 'TransFusionHead', 'TransFusionBBoxCoder', 'EnhancedBEVSegmentationHead',
                         'BEVGridTransform', 'NuScenesDataset', 'ImageAug3D', 'LoadPointsFromMultiSweeps', 'LoadBEVSegmentation',
                         'GTDepth', 'BevMapIoU'}
    assert set(held.values()) == {'reference'}, held


# ---- the full-size sweep itself ------------------------------------------------------------------------------------------
def test_the_list_holds_every_leaf():
    names = sweep.shipped()
    leaves = {str(path.relative_to(sweep.CONFIGS)) for path in sweep.CONFIGS.rglob('*.yaml') if path.name != 'default.yaml'}
    assert leaves <= set(names) and len(names) == len(set(names)) == len(leaves) + len(sweep.MODEL_DEFAULTS)


def test_full_size_sweep_on_small_sizes(tmp_path):
    out = tmp_path / 'sweep.md'
    assert sweep.main(['--small', '--only', TINY, '--samples', '2', '--steps', '1', '--device', 'cpu', '--out', str(out)]) == 0
    rows = [line for line in out.read_text().splitlines() if line.startswith(f'| {TINY} |')]
    assert len(rows) == 1 and rows[0].endswith('| ok |') and '1 of 1 configurations pass' in out.read_text()


@pytest.mark.parametrize('overrides, said', [
    (['--loss_scale', 'x'], 'ConfigError'),
    (['--model.heads.object.loss_bbox.loss_weight', '0.0', '--model.heads.object.train_cfg.code_weights', f'{[0.0] * 10}'],
     'parameters without gradient: .*prediction_heads'),
    (['--model.heads.map.focal_weight', '.inf'], 'ValueError'),
])
def test_a_configuration_that_fails_is_a_row_and_an_exit_code(tmp_path, overrides, said, capsys):
    arguments = ['--small', '--only', TINY, '--samples', '1', '--steps', '1', '--device', 'cpu']
    assert sweep.main([*arguments, *overrides]) == 1
    import re
    assert re.search(said, capsys.readouterr().out)


def test_what_counts_as_without_gradient():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in ('fine', 'none', 'zero', 'nan', 'frozen')})
    for name, value in (('fine', 1.0), ('zero', 0.0), ('nan', float('nan'))):
        model[name].weight.grad = torch.full((1, 1), value)
    model['frozen'].weight.requires_grad_(False)
    assert sweep.without_gradient(model) == ['none.weight (none)', 'zero.weight (zero)', 'nan.weight (not finite)']
    assert sweep.without_gradient(model, excused=['zero.*', 'none.*', 'nan.*']) == ['none.weight (none)', 'nan.weight (not finite)']
    with pytest.raises(SystemExit):
        sweep.main(['--only', 'no-such-configuration'])
