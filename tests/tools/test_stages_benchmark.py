"""benchmarks/stages.py: the three shipped stages in order, each from the one before, and its page; on a trainer without torch."""
import importlib.util
import json
import sys

import pytest
from testing import REPO

from mmdet3d_ext.checks import check_config
from mmdet3d_ext.config import load_config

spec = importlib.util.spec_from_file_location('stages_benchmark', REPO / 'benchmarks' / 'stages.py')
benchmark = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = benchmark  # dataclasses look their module up
spec.loader.exec_module(benchmark)

TRAINER = '''
import argparse, json, os, pathlib, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ('config', '--run-dir', '--load_from', '--max_epochs', '--data.samples_per_gpu'): parser.add_argument(name)
found, rest = parser.parse_known_args()
folder = pathlib.Path(found.run_dir)
folder.mkdir(parents=True, exist_ok=True)
assert '--no-validate' in rest
if (folder.parent / 'broken').exists() and 'stage1' in found.config:
    sys.exit('RuntimeError: out of paper')
epoch = -(-50 // int(getattr(found, 'data.samples_per_gpu')))
with open(folder / 'a.log.json', 'w') as stream:
    for number in range(int(found.max_epochs) * epoch):
        record = dict(mode='train', epoch=1 + number // epoch, iter=1 + number % epoch, time=0.3, data_time=0.01, memory=1000 + number,
                      loss=50.0 - 0.1 * number if number < 99 or 'stage2' not in found.config else float('nan'))
        print(json.dumps(record), file=stream)
begin = '2026-01-01 00:00:00,000 - mmdet3d - WARNING - '
lines = [begin + 'loss scale now 32768']
if found.load_from:
    assert os.path.exists(found.load_from)
    lines += [begin + "branches.map.fuser starts from the file's fuser (6 tensors)",
              begin + f'weights of {found.load_from}: 544 tensors matched, 8 missing, 1 of another shape, 0 unexpected',
              '  module      matched', '  new, not in the file: heads.map.decoder.2 (3 tensors)', begin + 'something else',
              '  not of the report']
(folder / 'a.log').write_text(chr(10).join(lines))
(folder / 'latest.pth').touch()
'''


@pytest.fixture
def run(tmp_path):
    (tmp_path / 'trainer.py').write_text(TRAINER)
    (tmp_path / 'data').mkdir()
    (tmp_path / 'work').mkdir()
    (tmp_path / 'data' / 'nuscenes_infos_val.pkl').touch()
    options = {'scenes_train': 5, 'samples_per_scene': 10}
    (tmp_path / 'data' / 'synthetic_nuscenes.json').write_text(json.dumps({'summary': {'options': options}}))

    def call(*words):
        code = benchmark.main([*words, '--data', str(tmp_path / 'data'), '--work', str(tmp_path / 'work'), '--out', str(tmp_path / 'out'),
                               '--script', str(tmp_path / 'trainer.py'), '--last-start', '0.1'])
        pages = [tmp_path / 'out' / name for name in ('stages.md', 'stages.json')]
        return code, *(path.read_text() if path.exists() else None for path in pages)

    call.folder = tmp_path
    return call


@pytest.mark.parametrize('form', benchmark.FORMS)
def test_the_stages_are_consistent_and_100_steps_in_whole_epochs(form):
    made = benchmark.plan(benchmark.FORMS[form], 50, 100)
    assert [one.steps for one in made] == [100, 100, 100] and [one.after for one in made] == [None, *made[:2]]
    cells = []
    for one, (_, _, samples, _) in zip(made, benchmark.FORMS[form].stages):
        cfg = load_config(one.words[0], list(one.words[1:]))
        assert not [finding for finding in check_config(cfg, 1).errors], one.label
        assert cfg.data.samples_per_gpu == samples and cfg.max_epochs * -(-50 // samples) == 100
        cells.append(cfg.bev.labels.cells)
    assert cells == sorted(cells) and len(set(cells)) == 3
    if form == 'full':
        assert cells == [400, 600, 800]


def test_page(run):
    code, page, content = run()
    assert code == 0
    assert '| phase3_400 | 2 | 100 | 49.550 -> 40.550 | yes | 1 | 0.300 | 0.010 | 1,099 | none |' in page
    assert '| stage1_600 | 1 | 100 | 49.550 -> 40.550 | yes | 1 | 0.300 | 0.010 | 1,099 | 544, 8, 1 |' in page
    assert '| stage2_800 | 1 | 100 | 49.550 -> nan | **no** |' in page, 'a loss that is not finite is said'
    assert 'weights of phase3_400\'s latest.pth: 544 tensors matched' in page and 'weights of stage1_600\'s latest.pth' in page
    assert 'not of the report' not in page and str(run.folder) not in page + content and 'at full size' in page
    stages = json.loads(content)['stages']
    assert stages[1]['loaded']['new'] == 'heads.map.decoder.2 (3 tensors)' and stages[1]['loaded']['branch'] == ['branches.map.fuser']


def test_a_stage_that_fails_ends_the_chain_and_is_said(run):
    (run.folder / 'work' / 'broken').touch()
    code, page, _ = run()
    assert code == 1
    assert '| phase3_400 | 2 | 100 |' in page and '| stage1_600 | 1 | 0 | - |' in page
    assert '- stage1_600: exit code 1: RuntimeError: out of paper' in page and '- stage2_800: stage1_600: exit code 1' in page


def test_a_data_set_of_unknown_size(run, capsys):
    (run.folder / 'data' / 'synthetic_nuscenes.json').unlink()
    assert run() == (1, None, None) and 'else give --frames' in capsys.readouterr().err
    code, page, _ = run('--frames', '50')
    assert code == 0 and '50 key frames' in page
