"""benchmarks/data.py and its straightforward pipeline: both must give the same samples, or their times say nothing."""
import importlib
import json
import sys

import numpy as np
import pytest
import torch
from mmdet3d.core.points import LiDARPoints
from testing import REPO

from mmdet3d_ext.datasets.gt_database import create_gt_database
from mmdet3d_ext.datasets.nuscenes_converter import create_infos


def lidar_points(values):
    return LiDARPoints(torch.as_tensor(values, dtype=torch.float32), points_dim=values.shape[1])


@pytest.fixture(scope='module')
def benchmark():
    names = ('data', 'data_files', 'data_peer')
    sys.path.insert(0, str(REPO / 'benchmarks'))
    try:
        yield importlib.import_module('data')
    finally:
        sys.path.remove(str(REPO / 'benchmarks'))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope='module')
def root(benchmark, synthetic_root, tmp_path_factory):
    """The generated data set with info files and object database, and maps of four copies."""
    root = tmp_path_factory.mktemp('bench')
    for entry in synthetic_root.iterdir():
        if entry.name != 'maps' and not entry.name.startswith('nuscenes_'):
            (root / entry.name).symlink_to(entry)
    (root / 'maps' / 'expansion').mkdir(parents=True)
    for entry in (synthetic_root / 'maps').iterdir():
        if entry.name != 'expansion':
            (root / 'maps' / entry.name).symlink_to(entry)
    for path in (synthetic_root / 'maps' / 'expansion').glob('*.json'):
        (root / 'maps' / 'expansion' / path.name).write_bytes(path.read_bytes())
        sys.modules['data_files'].tile(root / 'maps' / 'expansion' / path.name, 2)
    written = create_infos(root, root, version='v1.0-mini')
    create_gt_database(written['train'], root, root)
    return root


def pipelines(benchmark, root, cells, names):
    found = benchmark.make_pipelines(root, [cells], names)
    assert [pipeline.name for pipeline in found] == [benchmark.PEER, *names]
    return found


def through(pipeline, index, seed, until=None, without=()):
    """The value after the steps up to stage ``until``."""
    np.random.seed(seed)
    torch.manual_seed(seed)
    value = pipeline.dataset.get_data_info(index)
    for stage, step in pipeline.steps:
        if stage not in without:
            value = step(value)
        if stage == until:
            break
    return value


@pytest.mark.parametrize('cells', [400, 800])
def test_labels_are_the_devkits(benchmark, root, cells):
    """On every sample, in turned and moved scenes."""
    peer, ours, default = pipelines(benchmark, root, cells, ["ours, the devkit's labels", 'ours'])
    turn, draw = (next(step for stage, step in peer.steps if getattr(step, '__name__', '') == name)
                  for name in ('augment_scene', 'draw_map'))
    by_devkit, by_centre = (next(step for stage, step in pipeline.steps if stage == 'map labels') for pipeline in (ours, default))
    alike = []
    for index in range(len(peer.dataset)):
        np.random.seed(index)
        data = peer.dataset.get_data_info(index)
        data.update(points=lidar_points(np.zeros((1, 5))), gt_bboxes_3d=peer.dataset.get_ann_info(index)['gt_bboxes_3d'])
        expected = draw(turn(data))['gt_masks_bev']
        given = dict(ours.dataset.get_data_info(index), lidar_aug_matrix=data['lidar_aug_matrix'].astype(np.float32))
        np.testing.assert_array_equal(by_devkit(dict(given))['gt_masks_bev'], expected, err_msg=f'sample {index}')
        # The devkit ignores the scale, so without it: cell centres against touched cells are alike.
        given['lidar_aug_matrix'][:3] /= np.cbrt(np.linalg.det(given['lidar_aug_matrix'][:3, :3]))
        mine, theirs = by_centre(dict(given))['gt_masks_bev'][0] > 0, expected[0] > 0
        alike.append((mine & theirs).sum() / (mine | theirs).sum())
    assert expected.any() and min(alike) > 0.9, alike


def test_points_and_boxes_are_the_same(benchmark, root):
    """Without pasting and augmentation, whose draws come in another order."""
    peer, ours = pipelines(benchmark, root, 400, ['ours'])
    for index in range(3):
        both = []
        for pipeline in (peer, ours):
            data = through(pipeline, index, 0, until='points: load')
            if pipeline is ours:  # a stage of two steps
                data = ours.dataset.transforms[2](data)
            both.append(data['points'].tensor.numpy())
        # The peer leaves the car's own returns in the key frame, as the reference does.
        key = both[0][:, 4] == 0
        far = (np.abs(both[0][:, :2]) >= 1).any(axis=1)
        assert both[0].shape[0] - (key & ~far).sum() == both[1].shape[0]
        np.testing.assert_allclose(both[0][far | ~key], both[1], atol=1e-4)
    batch = ours.gather([through(ours, 1, 0)] * 2)
    other = peer.gather([through(peer, 1, 0)] * 2)
    assert batch['img'].data[0].shape == other['img'].data[0].shape == (2, 6, 3, 256, 704)
    assert set(other) - {'metas'} <= set(batch)


def test_the_run_and_its_page(benchmark, root, tmp_path, monkeypatch, capsys):
    files = sys.modules['data_files']
    (root / files.DONE).write_text(json.dumps(dict(about='Test data')))
    pipeline = benchmark.make_pipelines(root, [100], ['ours'])[1]
    stages = pipeline.run(1, seed=0)
    assert list(stages) == benchmark.ORDER and all(wall >= 0 and cpu >= 0 for cpu, wall in stages.values())
    original = benchmark.measure
    monkeypatch.setattr(benchmark, 'measure', lambda found, rounds: original(found, rounds, warm=0, sweeps=0))
    assert benchmark.main(['--root', str(root), '--cells', '50', '--rounds', '1', '--variants', 'ours', 'ours, uint8', '--gpu-rate', '13',
                           '--out', str(tmp_path)]) == 0
    result = json.loads((tmp_path / 'data.json').read_text())
    assert [(row['name'], row['cells']) for row in result['rows']] == [(name, 50) for name in (benchmark.PEER, 'ours', 'ours, uint8')]
    page = (tmp_path / 'data.md').read_text()
    assert '| images: decode |' in page and '| 13, 50 |' in page and 'Test data' in page and page.strip() in capsys.readouterr().out


@pytest.mark.parametrize('words', [['--rounds', '0'], ['--cells', '400', '0']])
def test_counts_of_nothing_are_refused_before_the_data_is_made(benchmark, tmp_path, words, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(['--root', str(tmp_path / 'data'), *words])
    assert ended.value.code == 2 and '--rounds and --cells must be at least 1' in capsys.readouterr().err
    assert not (tmp_path / 'data').exists()
