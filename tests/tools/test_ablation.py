"""benchmarks/ablation.py: which trainings it makes, that rows are kept and trainings go on, and its page; on a trainer without torch."""
import importlib.util
import json
import sys

import pytest
from testing import REPO

from mmdet3d_ext.checks import check_config
from mmdet3d_ext.config import load_config

spec = importlib.util.spec_from_file_location('ablation_benchmark', REPO / 'benchmarks' / 'ablation.py')
benchmark = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = benchmark  # dataclasses look their module up
spec.loader.exec_module(benchmark)

TRAINER = '''
import argparse, json, pathlib, signal, sys, time
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ('config',): parser.add_argument(name)
for name in ('--run-dir', '--load_from', '--resume_from', '--dataset_root', '--seed', '--model.heads.map.use_aspp'): parser.add_argument(name)
found, rest = parser.parse_known_args()
folder = pathlib.Path(found.run_dir)
folder.mkdir(parents=True, exist_ok=True)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
with open(folder.parent / 'starts.txt', 'a') as stream:
    stream.write(folder.name + '\\n')
(folder / 'trying').touch()
slow = folder.parent / 'slow'
while slow.exists() and not asked:
    time.sleep(0.05)
if asked:
    sys.exit(75)
if (folder.parent / 'broken').exists():
    sys.exit('RuntimeError: this is broken')
(folder / 'latest.pth').touch()
(folder / 'a.log.json').write_text('\\n'.join(json.dumps(dict(mode='train', epoch=e, iter=i)) for e in (1, 2) for i in (5, 10)))
value = (0.3 if 'deep_supervision' in ' '.join(sys.argv) or 'stage1' in found.config else 0.2) + 0.01 * int(found.seed)
classes = ('drivable_area', 'mean')
(folder / 'metrics.json').write_text(json.dumps({f'{grid}/{name}/iou@max': value for grid in ('map', 'map_ref') for name in classes}))
'''


@pytest.fixture
def bench(tmp_path):
    (tmp_path / 'trainer.py').write_text(TRAINER)
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data' / 'nuscenes_infos_val.pkl').touch()
    (tmp_path / 'work').mkdir()

    def run(*words):
        return benchmark.main([*words, '--rows', str(tmp_path / 'rows.json'), '--out', str(tmp_path / 'page.md'), '--work',
                               str(tmp_path / 'work'), '--data', str(tmp_path / 'data'), '--script', str(tmp_path / 'trainer.py'),
                               '--last-start', '0.1'])

    run.folder = tmp_path
    run.starts = lambda: (tmp_path / 'work' / 'starts.txt').read_text().split()
    return run


@pytest.mark.parametrize('form', benchmark.FORMS)
def test_every_training_is_a_consistent_configuration(form):
    """Headline rows differ in what their names say, and a row without a part lacks just that part."""
    rows = {row.name: row for row in benchmark.plan(benchmark.FORMS[form], 1, 1, 1)}
    found = {}
    for name, row in rows.items():
        for words in (row.base, row.second):
            cfg = load_config(words[0], list(words[1:]))
            assert not check_config(cfg, 1).findings, name
        found[name] = cfg
    coarse, fine = found['stay400'], found['stage1']
    assert fine.bev.labels.cells > coarse.bev.labels.cells == found['stay400_head'].bev.labels.cells
    head = fine.model.heads.map
    assert head.deep_supervision and head.use_dice_loss and head.class_weights and len(head.decoder_channels) == 4
    assert found['stay400_head'].model.heads.map.class_weights == head.class_weights
    for switch, off in {'deep_supervision': {'deep_supervision': False}, 'dice': {'use_dice_loss': False}, 'aspp': {'use_aspp': False},
                        'attention': {'use_channel_attention': False, 'use_spatial_attention': False},
                        'class_weights': {'class_weights': None}}.items():
        other = found[f'no_{switch}'].to_dict()
        changed = {**fine.model.heads.map.to_dict(), **off} if hasattr(head, 'to_dict') else {**json.loads(json.dumps(head)), **off}
        assert json.loads(json.dumps(other['model']['heads']['map'])) == json.loads(json.dumps(changed)), switch
        other['model']['heads']['map'] = None
        same = fine.to_dict()
        same['model']['heads']['map'] = None
        assert other == same, f'no_{switch} differs in more than the map head'


def test_what_is_reduced_does_not_touch_grids_heads_and_losses():
    for name, words in (('phase3', benchmark.plan(benchmark.FORMS['h200'], 1, 1, 1)[0].second),
                        ('stage1', benchmark.plan(benchmark.FORMS['h200'], 1, 1, 1)[2].second)):
        shipped, reduced = load_config(words[0]), load_config(words[0], list(words[1:]))
        for key in ('bev', 'voxel_size', 'map_bound', 'point_cloud_range', 'model.heads', 'model.fuser', 'model.decoder', 'model.branches',
                    'model.encoders.lidar', 'model.encoders.camera.vtransform.xbound', 'model.loss_scale'):
            assert shipped.select(key) == reduced.select(key), (name, key)


def test_rows_are_kept_and_bases_shared(bench, capsys):
    assert bench('--only', 'stay400', 'stage1', '--seeds', '2') == 0
    assert len(bench.starts()) == 2 + 4, 'one base per seed'
    assert bench('--only', 'stay400', 'stage1', '--seeds', '2') == 0 and len(bench.starts()) == 6
    assert bench('--seeds', '2') == 0
    assert len(bench.starts()) == 6 + 2 + 5 + 2, 'the other rows; without attention and without ASPP a base of their own'
    text = (bench.folder / 'page.md').read_text()
    assert '| stays at 400 | 2 | 0.2050 ± 0.0050 | 0.2050 ± 0.0050 |' in text and '20 + 20 iterations' in text
    assert '(0.5 m, mean IoU): +0.1000, +0.1000.' in text and '| without dice loss | 1 | 0.3000 |' in text
    assert 'by 0.0100 (largest minus smallest of 2)' in text
    assert bench('--seeds', '2', '--epochs', '3') == 0 and len(bench.starts()) == 30, 'other settings are other rows'
    assert bench('--plan', '--seeds', '2') == 0 and 'to train' in capsys.readouterr().out


def test_the_time_is_kept_and_the_next_call_goes_on(bench, monkeypatch):
    monkeypatch.setattr(benchmark, 'GRACE', 2.0)
    (bench.folder / 'work' / 'slow').touch()
    assert bench('--only', 'stay400', '--slice', '4') == benchmark.STOPPED
    assert not (bench.folder / 'rows.json').exists() and 'No row is there yet' in (bench.folder / 'page.md').read_text()
    (bench.folder / 'work' / 'slow').unlink()
    assert bench('--only', 'stay400', '--seeds', '1') == 0
    assert bench.starts()[0] == bench.starts()[1], 'the training that was stopped goes on in its folder'


def test_a_training_that_fails_ends_it_with_its_last_words(bench):
    (bench.folder / 'work' / 'broken').touch()
    with pytest.raises(SystemExit, match='this is broken'):
        bench('--only', 'stay400')
