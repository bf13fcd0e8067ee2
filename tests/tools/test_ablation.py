"""benchmarks/ablation.py: which trainings it makes, side by side, that rows are kept and trainings go on, and its page; on a trainer without
torch."""
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from testing import REPO

from mmdet3d_ext.checks import check_config
from mmdet3d_ext.config import load_config
from mmdet3d_ext.metrics.bev_iou import THRESHOLDS

spec = importlib.util.spec_from_file_location('ablation_benchmark', REPO / 'benchmarks' / 'ablation.py')
benchmark = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = benchmark  # dataclasses look their module up
spec.loader.exec_module(benchmark)
trainings = sys.modules['trainings']

TRAINER = '''
import argparse, json, os, pathlib, signal, sys, time
parser = argparse.ArgumentParser(allow_abbrev=False)
names = ('--run-dir', '--load_from', '--seed', '--model.heads.map.use_aspp', '--model.heads.map.use_dice_loss', '--max_epochs',
         '--data.workers_per_gpu')
for name in ('config', *names): parser.add_argument(name)
found, rest = parser.parse_known_args()
folder = pathlib.Path(found.run_dir)
folder.mkdir(parents=True, exist_ok=True)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
def note(name, text):
    with open(folder.parent / name, 'a') as stream:
        stream.write(text + chr(10))
note('starts.txt', folder.name)
note('where.txt', ' '.join(map(str, [os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('OMP_NUM_THREADS'),
                                     getattr(found, 'data.workers_per_gpu')])))
assert not found.load_from or os.path.exists(found.load_from), 'the base is not there'
begin = time.time()
steps = 10 * int(found.max_epochs)
path = folder / 'a.log.json'
done = len(path.read_text().splitlines()) if path.exists() else 0
slow = folder.parent / ('slow_aspp' if getattr(found, 'model.heads.map.use_aspp') else 'slow')
last = done
while done < steps:
    if asked:
        sys.exit(75)
    if (folder.parent / 'broken').exists() or ((folder.parent / 'no_dice').exists() and getattr(found, 'model.heads.map.use_dice_loss')):
        sys.exit('RuntimeError: this is broken')
    if slow.exists():
        time.sleep(float(slow.read_text() or 0.05))
        if not slow.read_text():
            continue
    done += 1
    with open(path, 'a') as stream:
        stream.write(json.dumps(dict(mode='train', epoch=1 + (done - 1) // 10, iter=1 + (done - 1) % 10, time=0.05, loss=9.0)) + chr(10))
(folder / 'latest.pth').touch()
if '--no-validate' in rest:
    sys.exit(0)
evaluates = folder.parent / 'evaluates'
if evaluates.exists():
    time.sleep(float(evaluates.read_text()))
value = (0.3 if 'deep_supervision' in ' '.join(sys.argv) or 'stage1' in found.config else 0.2) + 0.01 * int(found.seed)
metrics = {}
for grid in ('map', 'map_ref'):
    for name, share in (('drivable_area', 1.0), ('divider', 0.0), ('stop_line', float('nan'))):
        for number in range(1, 20):
            metrics[f'{grid}/{name}/iou@{number / 20:.2f}'] = value * (share if number >= 4 else max(share, 0.5))
        metrics[f'{grid}/{name}/iou@max'] = value * max(share, 0.5) if share == share else share
    metrics[f'{grid}/mean/iou@max'] = -1.0
if (folder.parent / 'few').exists() and getattr(found, 'model.heads.map.use_dice_loss'):
    del metrics['map_ref/divider/iou@0.35']
(folder / 'metrics.json').write_text(json.dumps({**metrics, 'object/nds': 0.1}))
'''


@pytest.fixture
def bench(tmp_path, monkeypatch):
    (tmp_path / 'trainer.py').write_text(TRAINER)
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data' / 'nuscenes_infos_val.pkl').touch()
    (tmp_path / 'work').mkdir()
    monkeypatch.setattr(trainings, 'GRACE', 5.0)
    monkeypatch.setattr(trainings, 'SETTLE', 0.3)

    def words(*given):
        return [*given, '--rows', str(tmp_path / 'rows.json'), '--out', str(tmp_path / 'page.md'), '--work', str(tmp_path / 'work'), '--data',
                str(tmp_path / 'data'), '--script', str(tmp_path / 'trainer.py'), '--last-start', '0.1']

    def run(*given):
        return benchmark.main(words(*given))

    run.words, run.folder = words, tmp_path
    run.starts = lambda: (tmp_path / 'work' / 'starts.txt').read_text().split()
    run.rows = lambda: {f'{row["name"]}/{row["seed"]}': row for row in json.loads((tmp_path / 'rows.json').read_text())['rows']}
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
    """Of the heads only the widths; both grids of the view transform; the layers' numbers and kinds."""
    widths = {'map': {'in_channels', 'aspp_channels', 'decoder_channels'}, 'object': {'in_channels'}}
    for name, words in (('phase3', benchmark.plan(benchmark.FORMS['h200'], 1, 1, 1)[0].second),
                        ('stage1', benchmark.plan(benchmark.FORMS['h200'], 1, 1, 1)[2].second)):
        shipped, reduced = load_config(words[0]), load_config(words[0], list(words[1:]))
        for key in ('bev', 'voxel_size', 'map_bound', 'point_cloud_range', 'model.branches', 'model.encoders.lidar',
                    'model.encoders.camera.vtransform.xbound', 'model.loss_scale', 'line_width', 'map_classes', 'augment3d'):
            assert shipped.select(key) == reduced.select(key), (name, key)
        for head, changed in widths.items():
            one, other = (dict(cfg.model.heads[head]) for cfg in (shipped, reduced))
            assert {key for key in one if one[key] != other[key]} == changed and set(one) == set(other), (name, head)
        assert len(shipped.model.heads.map.decoder_channels) == len(reduced.model.heads.map.decoder_channels)
        assert shipped.model.decoder.backbone.layer_nums == reduced.model.decoder.backbone.layer_nums
        assert benchmark.FORMS['h200'].epoch == 120


def test_the_reduced_model_learns_in_every_part():
    """The trunk's widths fit each other: the model can be built, and Stage 1's map has a trunk of its own."""
    from mmdet3d_ext.engine.train import make_model
    words = benchmark.plan(benchmark.FORMS['h200'], 1, 1, 1)[2].second
    model = make_model(load_config(words[0], list(words[1:])))
    assert model.branches and model.heads['map'].aux_classifier.in_channels == 64 and model.heads['map'].classifier.in_channels == 32


def test_rows_are_kept_and_bases_shared(bench, capsys):
    assert bench('--only', 'stay400', 'stage1', '--seeds', '2', '--jobs', '3') == 0
    assert len(bench.starts()) == 2 + 4, 'one base per seed'
    assert bench('--only', 'stay400', 'stage1', '--seeds', '2') == 0 and len(bench.starts()) == 6
    assert bench('--seeds', '2', '--jobs', '4') == 0
    assert len(bench.starts()) == 6 + 2 + 5 + 2, 'the other rows; without attention and without ASPP a base of their own'
    text = (bench.folder / 'page.md').read_text()
    assert '10 + 10 iterations' in text and '--jobs 4' in text
    assert '| | stays at 400 | stays at 400, head and losses of Stage 1 | Phase 3 -> Stage 1 (600) |' in text
    assert '| seeds | 2 | 2 | 2 |' in text and '| drivable_area, native | 0.2050 ± 0.0071 | 0.3050 ± 0.0071 | 0.3050 ± 0.0071 |' in text
    assert '| mean, 0.5 m | 0.1025 ± 0.0035 |' in text, 'at the thresholds of the field, over the classes that occur'
    assert '| mean, 0.5 m, any threshold | 0.1538 ± 0.0053 |' in text and '| stop_line, 0.5 m | - | - | - |' in text
    assert 'Stage 1 (600), against stays at 400: +0.0500, +0.0500 (mean +0.0500 ± 0.0000)' in text
    assert '| | with all | without deep supervision | without dice loss |' in text and '| the part\'s effect here | | none seen |' in text
    assert 'standard deviation of 0.0035' in text and '| NDS | 0.1000 ± 0.0000 |' in text
    assert bench('--seeds', '2', '--epochs', '3', '--jobs', '4') == 0 and len(bench.starts()) == 30, 'other settings are other rows'
    assert bench('--plan', '--seeds', '2') == 0 and 'there' in capsys.readouterr().out
    assert bench('--plan', '--seeds', '3', '--jobs', '14', '--gpus', '2', '--epochs', '3') == 0
    assert '3 x 120 steps, 14 at a time on 2 GPU(s)' in capsys.readouterr().out


def test_a_part_is_said_to_help_or_harm_only_beyond_the_spread_of_seeds():
    def row(name, seed, value):
        return {'name': name, 'seed': seed, 'device': 'd', 'date': 'd', 'iterations': [5, 5],
                'metrics': {f'{grid}/{key}/iou@{column}': value for grid in ('map', 'map_ref') for key in ('mean', 'divider')
                            for column in ('max', 'any')}}
    rows = [row('stage1', seed, value) for seed, value in enumerate((0.30, 0.31, 0.32))]
    rows += [row('no_dice', 0, 0.27), row('no_aspp', 0, 0.33), row('no_attention', 0, 0.29), {'name': 'no_x', 'seed': 1, 'error': 'it burst'}]
    switches = {'dice': 'without dice', 'attention': 'without attention', 'aspp': 'without ASPP'}
    text = benchmark.report(rows, {'stage1': 'Stage 1'}, switches, 'all', 'command')
    assert '| mean, 0.5 m, against with all | | -0.0300 | -0.0100 | +0.0300 |' in text
    assert '| the part\'s effect here | | helps | none seen | does harm |' in text
    assert '- no_x/1: it burst' in text


@pytest.mark.parametrize('there', [['stay400/0'], ['no_dice/0'], ['stay400/0', 'stage1/1'], ['stage1/1', 'no_dice/0'],
                                   ['stage1/0', 'no_dice/0']])
def test_a_page_of_the_rows_that_are_there(there):
    """Rows end in any order, and the time may be over after any of them."""
    rows = [{'name': name, 'seed': int(seed), 'device': 'd', 'date': 'd', 'iterations': [5, 5], 'step_ms': [1.0, 2.0], 'seconds': [1.0, 2.0],
             'metrics': {f'{grid}/{key}/iou@{column}': 0.5 for grid in ('map', 'map_ref') for key in ('mean', 'divider')
                         for column in ('max', 'any')}} for name, seed in (key.split('/') for key in there)]
    text = benchmark.report(rows, benchmark.HEADLINE, {'dice': 'without dice'}, 'all', 'command')
    assert ('None of its rows is there yet' in text) == (there == ['no_dice/0']) and ', against' not in text.split('## Stage 1')[0]
    assert ('| without dice |' in text) == (there == ['stage1/0', 'no_dice/0'])
    assert ('Not shown, as Stage 1 with the same seed is not there yet: without dice' in text) == (
        'no_dice/0' in there and 'stage1/0' not in there)


def test_each_training_sees_one_gpu_one_thread_and_its_share_of_the_cores(bench, monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3,5')
    (bench.folder / 'work' / 'slow').write_text('0.1')
    monkeypatch.setattr(benchmark.side_by_side, 'device_name', lambda: 'two GPUs')
    assert bench('--only', 'stay400', '--seeds', '4', '--jobs', '4', '--cores', '12') == 0
    seen = [line.split() for line in (bench.folder / 'work' / 'where.txt').read_text().splitlines()]
    assert sorted(seen[:4]) == [['3', '1', '2'], ['3', '1', '2'], ['5', '1', '2'], ['5', '1', '2']]
    assert len(seen) == 8 and bench.rows()['stay400/3']['device'] == 'two GPUs' and bench.rows()['stay400/3']['side_by_side'] == 4


def test_the_time_is_kept_and_the_next_call_goes_on(bench):
    (bench.folder / 'work' / 'slow').touch()
    assert bench('--only', 'stay400', '--slice', '8', '--jobs', '2', '--seeds', '2') == benchmark.STOPPED
    assert not (bench.folder / 'rows.json').exists() and 'No row is there yet' in (bench.folder / 'page.md').read_text()
    (bench.folder / 'work' / 'slow').unlink()
    assert bench('--only', 'stay400', '--seeds', '2', '--jobs', '2') == 0
    assert sorted(bench.starts()[:2]) == sorted(bench.starts()[2:4]), 'the trainings that were stopped go on in their folders'


def test_an_evaluation_has_until_the_deadline(bench, monkeypatch):
    """A row that is there when the time is over is written; what still takes steps then is stopped before."""
    monkeypatch.setattr(trainings, 'END', 0.5)
    monkeypatch.setattr(trainings, 'GRACE', 6.0)
    monkeypatch.setattr(trainings, 'SETTLE', 100.0)
    (bench.folder / 'work' / 'evaluates').write_text('4')
    (bench.folder / 'work' / 'slow_aspp').touch()
    pages = []
    real = benchmark.write_page
    monkeypatch.setattr(benchmark, 'write_page', lambda *given: (real(*given), pages.append(bench.folder.joinpath('page.md').read_text())))
    began = time.monotonic()
    words = ('--form', 'tiny', '--jobs', '2')
    assert bench(*words, '--slice', '9', '--only', 'stay400', 'no_aspp', '--seeds', '1') == benchmark.STOPPED
    assert list(bench.rows()) == ['stay400/0'] and 4 < time.monotonic() - began < 9.5
    assert len(pages) == 2 and '## Headline' in pages[0], 'with every row'
    (bench.folder / 'work' / 'evaluates').write_text('60')
    monkeypatch.setattr(trainings, 'GRACE', 2.0)
    assert bench(*words, '--slice', '4', '--only', 'stay400', '--seeds', '2') == benchmark.STOPPED
    assert list(bench.rows()) == ['stay400/0'] and not trainings.of_run(str(bench.folder / 'work' / bench.starts()[-1]))
    (bench.folder / 'work' / 'evaluates').unlink()
    assert bench(*words, '--only', 'stay400', '--seeds', '2') == 0 and list(bench.rows()) == ['stay400/0', 'stay400/1']


def test_metrics_that_cannot_be_read_are_one_rows_failure(bench):
    (bench.folder / 'work' / 'few').touch()
    assert bench('--only', 'stay400', 'no_dice', '--jobs', '2', '--seeds', '1') == 1
    rows = bench.rows()
    assert 'metrics' in rows['stay400/0'] and 'map_ref/divider/iou@0.35' in rows['no_dice/0']['error']


def test_a_training_that_fails_leaves_the_others_alone(bench, capsys):
    (bench.folder / 'work' / 'no_dice').touch()
    assert bench('--jobs', '3', '--seeds', '1', '--only', 'stage1', 'no_dice', 'no_aspp') == 1
    rows = bench.rows()
    assert 'metrics' in rows['stage1/0'] and 'metrics' in rows['no_aspp/0']
    assert 'exit code 1: RuntimeError: this is broken' in rows['no_dice/0']['error'], 'the row says why'
    assert '- no_dice/0: exit code 1: RuntimeError' in (bench.folder / 'page.md').read_text()
    assert len(bench.starts()) == 5 + 1, 'a failure is tried once more'
    (bench.folder / 'work' / 'no_dice').unlink()
    assert bench('--jobs', '3', '--seeds', '1', '--only', 'stage1', 'no_dice', 'no_aspp') == 0 and 'metrics' in bench.rows()['no_dice/0']
    assert len(bench.starts()) == 7


def test_what_starts_from_a_failed_base_fails_with_its_reason(bench):
    (bench.folder / 'work' / 'broken').touch()
    assert bench('--jobs', '2', '--seeds', '1', '--only', 'stay400', 'stage1') == 1
    assert all('base of stay400/0: exit code 1: RuntimeError: this is broken' in row['error'] for row in bench.rows().values())
    assert len(bench.starts()) == 2


def test_others_make_room_for_the_headline(bench, capsys, monkeypatch):
    """With the time too short for all, those without a part stop, and go on only when the headline is there."""
    monkeypatch.setattr(trainings, 'EVALUATION', 100.0)  # the evaluation is expected to be long, so the headline looks late
    (bench.folder / 'work' / 'slow').write_text('0.15')
    (bench.folder / 'work' / 'slow_aspp').write_text('0.15')
    assert bench('--jobs', '4', '--seeds', '1', '--only', 'stay400', 'no_aspp', '--slice', '60') == 0
    assert 'makes room: the time does not suffice for all' in capsys.readouterr().out
    rows = list(bench.rows())
    assert rows == ['stay400/0', 'no_aspp/0'] and len(bench.starts()) == 5


def test_of_the_headline_the_last_seeds_make_room(bench, capsys, monkeypatch):
    monkeypatch.setattr(trainings, 'EVALUATION', 100.0)
    (bench.folder / 'work' / 'slow').write_text('0.15')
    assert bench('--jobs', '4', '--seeds', '2', '--only', 'stay400', '--slice', '60') == 0
    said = capsys.readouterr().out
    assert 'stay400/1 makes room' in said and 'stay400/0 makes room' not in said
    assert list(bench.rows()) == ['stay400/0', 'stay400/1'] and len(bench.starts()) == 5


def test_a_killed_call_leaves_trainings_that_the_next_one_ends_first(bench):
    (bench.folder / 'work' / 'slow').touch()
    script = [sys.executable, str(REPO / 'benchmarks' / 'ablation.py'), *bench.words('--only', 'stay400', '--seeds', '1')]
    killed = subprocess.Popen(script, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    starts = bench.folder / 'work' / 'starts.txt'
    assert trainings.wait_until(lambda: starts.exists(), 60)
    killed.kill()
    killed.wait()
    folder = bench.folder / 'work' / bench.starts()[0]
    left = trainings.of_run(str(folder))
    assert left, 'its training goes on alone'
    (bench.folder / 'work' / 'slow').unlink()
    os.kill(left[0], signal.SIGSTOP)  # so that it is still there, and does not end by itself
    before, trainings.GRACE = trainings.GRACE, 1.0
    began = time.monotonic()
    try:
        assert bench('--only', 'stay400', '--seeds', '1') == 0
    finally:
        trainings.GRACE = before
    assert not trainings.of_run(str(folder)) and bench.starts()[:2] == [folder.name] * 2 and time.monotonic() - began < 30


def test_sigterm_stops_the_trainings_with_a_checkpoint(bench):
    (bench.folder / 'work' / 'slow').touch()
    script = [sys.executable, str(REPO / 'benchmarks' / 'ablation.py'), *bench.words('--only', 'stay400', '--seeds', '1')]
    asked = subprocess.Popen(script, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert trainings.wait_until(lambda: (bench.folder / 'work' / 'starts.txt').exists(), 60)
    asked.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    asked.send_signal(signal.SIGTERM)  # timeout sends it to the program, then to its group
    assert asked.wait(30) == benchmark.STOPPED, asked.stdout.read()
    assert not trainings.of_run(str(bench.folder / 'work' / bench.starts()[0]))


def test_an_interrupt_right_after_a_start_leaves_no_training_behind(bench, monkeypatch):
    (bench.folder / 'work' / 'slow').touch()

    def interrupted(*_):
        assert trainings.wait_until((bench.folder / 'work' / 'starts.txt').exists, 60)
        raise KeyboardInterrupt
    monkeypatch.setattr(trainings, 'Run', interrupted)
    assert bench('--only', 'stay400', '--seeds', '1') == benchmark.STOPPED
    assert not trainings.of_run(str(bench.folder / 'work' / bench.starts()[0]))


def test_epochs_that_fit(bench, capsys):
    """The pace is measured with all side by side; the number is kept with the rows, so that the next call goes on with it."""
    (bench.folder / 'work' / 'trial').mkdir()
    (bench.folder / 'work' / 'trial' / 'slow').write_text('0.05')
    words = ('--jobs', '3', '--seeds', '1', '--only', 'stay400', 'stage1', '--slice', '400', '--epochs', 'fit', '--trial', '3', '1')
    assert bench(*words, '--plan') == 0 and not (bench.folder / 'work' / 'starts.txt').exists()
    seen = []
    real = benchmark.train
    benchmark.train = lambda wanted, form, arguments, epochs, rows, deadline: seen.append(epochs)
    try:
        assert bench(*words) == 0 and bench(*words) == 0
    finally:
        benchmark.train = real
    assert len(seen) == 2 and seen[0] == seen[1]
    steps = seen[0] * 120
    evaluation = benchmark.evaluation_seconds(benchmark.FORMS['h200'], 0.05)
    assert 0.5 < (steps * 0.1 + 2 * evaluation) / 400 <= 1.0, 'about as many steps as there is time for'
    assert not (bench.folder / 'work' / 'trial').exists()
    said = capsys.readouterr().out
    assert 'trial, 2 side by side' in said and said.count('trial,') == 1


def test_a_trial_that_fails_says_so_before_the_time_is_spent(bench, capsys):
    (bench.folder / 'work' / 'trial').mkdir()
    (bench.folder / 'work' / 'trial' / 'broken').touch()
    assert bench('--seeds', '1', '--only', 'stay400', '--slice', '400', '--epochs', 'fit') == 1
    assert 'trial of stay400/0 failed with exit code 1' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['--rows', '--out'])
def test_a_folder_for_a_file_is_refused_before_anything_is_trained(tmp_path, capsys, name):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(['--form', 'tiny', name, str(tmp_path)])
    assert ended.value.code == 2 and f'{name} {tmp_path} is a folder' in capsys.readouterr().err


def test_one_trial_that_fails_is_left_out(bench, capsys, monkeypatch):
    trial = bench.folder / 'work' / 'trial'
    trial.mkdir()
    (trial / 'no_dice').touch()
    (trial / 'slow').write_text('0.05')
    monkeypatch.setattr(benchmark, 'train', lambda *_: None)
    assert bench('--seeds', '1', '--only', 'stay400', 'no_dice', '--slice', '400', '--epochs', 'fit', '--jobs', '2', '--trial', '3', '1') == 0
    said = capsys.readouterr()
    assert 'trial of no_dice/0 failed with exit code 1' in said.err and 'ms in 1 trainings at 400' in said.out


def test_a_trial_that_hangs_does_not_stand_for_the_others(bench, capsys, monkeypatch):
    trial = bench.folder / 'work' / 'trial'
    trial.mkdir()
    (trial / 'slow_aspp').touch()
    (trial / 'slow').write_text('0.05')
    monkeypatch.setattr(benchmark, 'TRIAL_START', 4.0)
    seen = []
    monkeypatch.setattr(benchmark, 'train', lambda wanted, form, arguments, epochs, *_: seen.append(epochs))
    assert bench('--seeds', '1', '--only', 'stay400', 'no_aspp', '--slice', '600', '--epochs', 'fit', '--jobs', '2', '--trial', '3', '1') == 0
    assert 'trial, 1 side by side: 4 s to step 3' in capsys.readouterr().out and seen[0] > 20


def test_scores_are_those_of_the_field_and_of_any_threshold():
    metrics = {f'map/a/iou@{number / 20:.2f}': number / 100 for number in range(1, 20)}
    metrics.update({f'map/b/iou@{number / 20:.2f}': math.nan for number in range(1, 20)})
    found = benchmark.scores({**metrics, 'map/a/iou@max': 0.19, 'map/b/iou@max': math.nan, 'map/mean/iou@max': 0.19})
    assert found['map/a/iou@max'] == found['map/mean/iou@max'] == 0.13 and found['map/mean/iou@any'] == 0.19
    assert math.isnan(found['map/b/iou@max']) and benchmark.FIELD == THRESHOLDS
