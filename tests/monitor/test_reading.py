"""Logs as they are found: being written, cut off, resumed, damaged, ours and the reference's."""
import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_runs import CLASSES, CONFIG, make_run, meta, schedule, train_row, val_row, write_json  # noqa: E402

from mmdet3d_ext.monitor.evaluation import summary
from mmdet3d_ext.monitor.records import JsonLog, LineFollower, MonitorError, TextLog
from mmdet3d_ext.monitor.run import Run


def test_only_whole_lines_are_read_and_each_once(tmp_path):
    path = tmp_path / 'log'
    follower = LineFollower(str(path))
    assert follower.read() == []
    for added, lines, tail in (('a\nb', ['a'], 'b'), ('c\n', ['bc'], ''), ('', [], ''), ('d\n\ne', ['d', ''], 'e')):
        with open(path, 'a') as stream:
            stream.write(added)
        assert follower.read() == lines and follower.tail == tail
    path.write_text('x\n')  # written anew, shorter
    assert follower.read() == ['x'] and follower.rewound


@pytest.mark.parametrize('cut', range(1, 40, 3))
def test_a_line_that_is_being_written_is_no_row_until_it_is_whole(tmp_path, cut):
    path = tmp_path / 'a.log.json'
    write_json(path, [train_row(1, 50, 0.1)], meta())
    whole = json.dumps(train_row(1, 100, 0.2))
    log = JsonLog(str(path))
    with open(path, 'a') as stream:
        stream.write(whole[:-cut])
    log.refresh()
    assert [row.iter for row in log.train] == [50] and log.partial and log.broken == 0
    with open(path, 'a') as stream:
        stream.write(whole[-cut:])
    log.refresh()
    assert [row.iter for row in log.train] == [50, 100] and not log.partial  # only its end of line is missing
    with open(path, 'a') as stream:
        stream.write('\n')
    log.refresh()
    log.refresh()
    assert [row.iter for row in log.train] == [50, 100]


def test_damaged_lines_are_counted_and_passed_over(tmp_path):
    path = tmp_path / 'a.log.json'
    rows = [json.dumps(train_row(1, i, 0.1)) for i in (50, 100, 150)]
    path.write_bytes('\n'.join([json.dumps(meta()), rows[0], rows[1][:80] + rows[2], '[1, 2]', '{"mode": "train", "epoch": null}',
                                rows[2]]).encode() + b'\n\0\0\0\0')
    log = JsonLog(str(path))
    log.refresh()
    assert [row.iter for row in log.train] == [50, 150] and log.broken == 3 and not log.partial


def test_nan_is_read_as_mmcv_writes_it(tmp_path):
    path = tmp_path / 'a.log.json'
    path.write_text('{}\n{"mode": "train", "epoch": 1, "iter": 50, "lr": {"generator": 0.1}, "loss": NaN, "grad_norm": Infinity, '
                    '"note": "text", "flag": true}\n')
    log = JsonLog(str(path))
    log.refresh()
    values = log.train[0].values
    assert math.isnan(values['loss']) and values['grad_norm'] == math.inf and values['lr'] == 0.1
    assert set(values) == {'loss', 'grad_norm', 'lr'}


def test_a_resumed_run_is_one_run(tmp_path):
    """It died at epoch 2, iteration 700 and went on from the start of epoch 2: what was trained twice counts once."""
    first = schedule(upto=(2, 700))
    again = [row for row in schedule() if row['epoch'] >= 2]
    folder = make_run(tmp_path / 'run', first)
    make_run(folder, again, stamp='20261130_120000')
    run = Run(str(folder))
    places = [row.place for row in run.train]
    assert places == sorted(set(places)) and len(places) == 80
    assert run.joints == [(2, 50)] and [row.epoch for row in run.val] == [1, 2, 3, 4]


def test_a_run_being_written_grows(tmp_path):
    folder = make_run(tmp_path / 'run', schedule(upto=(1, 500)))
    run = Run(str(folder))
    assert len(run.train) == 10
    with open(folder / '20261130_080000.log.json', 'a') as stream:
        stream.write(json.dumps(train_row(1, 550, 0.2)) + '\n' + json.dumps(train_row(1, 600, 0.2))[:50])
    run.refresh()
    assert run.train[-1].place == (1, 550)


def test_description_size_and_settings(tmp_path):
    run = Run(str(make_run(tmp_path / 'run', schedule(upto=(2, 300)))))
    assert run.ranks == 8 and run.epochs == 4 and run.iterations == 1000 and run.interval == 50
    assert run.setting('data.samples_per_gpu') == 2 and run.setting('no.such', 7) == 7
    assert run.step(run.train[-1]) == pytest.approx(1.3) and run.step_unit == 'epoch'
    assert list(run.map_losses()) == CLASSES and set(run.losses()) == {'object', 'map'}


def test_the_references_log_alone_in_a_folder(tmp_path):
    """Its first line is ``{}``; there is no text log, no configuration, no rank count."""
    rows = schedule(epochs=4, iterations=1030, upto=(3, 600), dice=False, ours=False)
    path = tmp_path / '20251030_130707.log.json'
    write_json(path, rows, {})
    for place in (path, tmp_path):
        run = Run(str(place))
        assert run.meta == {} and run.config == {} and run.epochs is None and run.ranks is None
        assert run.iterations == 1000  # the longest finished epoch that the log shows: 1000 of the 1030
        assert run.train[-1].place == (3, 600) and [row.epoch for row in run.val] == [1, 2]
    assert set(run.map_losses()['divider']) == {'focal'}


def test_the_references_configuration_is_found_beside_its_log(tmp_path):
    import yaml
    write_json(tmp_path / 'a.log.json', schedule(upto=(1, 500)), {})
    (tmp_path / 'configs.yaml').write_text(yaml.safe_dump({**CONFIG, 'max_epochs': 6}))
    assert Run(str(tmp_path)).epochs == 6


def test_mmdet3ds_log_has_losses_without_tasks(tmp_path):
    rows = [{'mode': 'train', 'epoch': 1, 'iter': i, 'lr': 1e-3, 'loss_cls': 1.0, 'loss_bbox': 2.0, 'loss': 3.0, 'time': 0.1,
             'data_time': 0.01} for i in (50, 100)]
    rows.append({'mode': 'val', 'epoch': 1, 'iter': 81, 'lr': 1e-3, 'pts_bbox_NuScenes/NDS': 0.4})
    write_json(tmp_path / 'a.log.json', rows, {'config': 'model = dict(\n    type="MVXNet")\n', 'env_info': ''})
    run = Run(str(tmp_path))
    assert run.losses() == {'': ['loss_cls', 'loss_bbox']} and run.config == {}
    assert summary(run) == ([1], [('other', 'pts_bbox_NuScenes/NDS', [0.4])])


def test_iterations_of_an_iteration_based_run_are_not_taken_for_epochs(tmp_path):
    rows = [train_row(epoch, iteration, 0.1) for epoch, iteration in ((1, 50), (1, 100), (2, 150), (2, 200), (3, 250))]
    write_json(tmp_path / 'a.log.json', rows, {})
    run = Run(str(tmp_path))
    assert run.by_iteration and run.iterations is None and run.step(run.train[-1]) == 250


@pytest.mark.parametrize('make, words', [
    (lambda path: path, 'no such run folder'),
    (lambda path: path.mkdir() or path, 'no *.log.json here'),
    (lambda path: path.write_text('hello\n') and path, "no line that mmcv's runner writes"),
])
def test_what_is_no_run_is_said(tmp_path, make, words):
    with pytest.raises(MonitorError, match=words.replace('*', r'\*').replace('.', r'\.')):
        Run(str(make(tmp_path / 'x')))


GARBAGE = {
    'binary': (b'\x89PNG\r\n\x1a\n' + bytes(range(256)) * 20, "begins with b'\\x89PNG"),
    'binary without a line end': (bytes(range(11, 256)) * 20, r"begins with b'\x0b\x0c"),
    'text': (b'hello\nworld\n', "begins with b'hello"),
    'zeros': (bytes(4096), 'holds only zero bytes (the machine lost power?)'),
    'other JSON': (b'{"loss": 1.5}\n{"loss": 1.4}\n', "begins with b'{\"loss"),
    'a list': (b'[1, 2, 3]\n', "begins with b'[1, 2"),
    'UTF-16': (json.dumps(meta()).encode('utf-16') + '\n'.encode('utf-16'), 'begins with'),
}


@pytest.mark.parametrize('kind', GARBAGE)
def test_a_log_that_is_none_is_named_with_what_it_holds(tmp_path, kind):
    content, words = GARBAGE[kind]
    folder = tmp_path / 'run'
    folder.mkdir()
    path = folder / '20261130_080000.log.json'
    path.write_bytes(content)
    for place in (folder, path):
        with pytest.raises(MonitorError) as error:
            Run(str(place))
        assert str(path) in str(error.value) and words in str(error.value) and "no line that mmcv's runner writes" in str(error.value)
    make_run(folder, schedule(upto=(2, 500)), stamp='20261130_090000')  # beside one that can be read it is a mark
    run = Run(str(folder))
    assert len(run.train) == 30 and len(run.problems) == 1 and str(path) in run.problems[0]


@pytest.mark.parametrize('length', [1, 40, -2])
def test_a_log_cut_within_its_first_line_is_said_to_be(tmp_path, length):
    folder = tmp_path / 'run'
    folder.mkdir()
    path = folder / '20261130_080000.log.json'
    whole = json.dumps(meta())
    path.write_text(whole[:length])
    run = Run(str(folder))
    assert run.problems == [f'{path}: is cut within its first line ({len(whole[:length])} bytes): the run was killed as it began to '
                            'write, or this is a part of the file']
    with pytest.raises(MonitorError, match='is cut within its first line'):
        Run(str(path))
    path.write_text(whole)  # the run was just writing it
    run.refresh()
    assert run.problems == [] and run.ranks == 8
    with open(path, 'a') as stream:
        stream.write('\n' + json.dumps(train_row(1, 50, 0.1)) + '\n')
    run.refresh()
    assert run.problems == [] and len(run.train) == 1


def test_an_empty_log_is_a_run_that_starts_and_no_run_alone(tmp_path):
    (tmp_path / 'run').mkdir()
    path = tmp_path / 'run' / 'a.log.json'
    path.touch()
    assert Run(str(path.parent)).problems == []
    with pytest.raises(MonitorError, match='a.log.json: is empty'):
        Run(str(path))


def test_a_log_that_may_not_be_read_is_told(tmp_path):
    path = tmp_path / 'run' / 'a.log.json'
    path.mkdir(parents=True)  # as root no file is closed, but a folder is no file
    with pytest.raises(MonitorError, match=r'a.log.json: cannot be read: Is a directory'):
        Run(str(path.parent))


def test_the_folder_above_the_runs_names_the_runs(tmp_path):
    make_run(tmp_path / 'phase3')
    with pytest.raises(MonitorError, match='phase3'):
        Run(str(tmp_path))


def test_text_log_gives_epoch_length_evaluation_time_and_messages(tmp_path):
    path = tmp_path / 'a.log'
    path.write_text('2026-11-30 08:00:00,001 - mmdet3d - INFO - Epoch [1][50/30895]\tlr: 1e-4\n'
                    '2026-11-30 08:00:01,001 - mmdet3d - WARNING - \n' + '!' * 100 + '\n'
                    'The effective batch is 2 samples\nmore\n'
                    '2026-11-30 08:00:02,001 - mmdet3d - INFO - evaluated in 610.5 s\n'
                    '2026-11-30 08:00:03,001 - mmdet3d - ERROR - ALARM: disk full\n')
    text = TextLog(str(path))
    text.refresh()
    assert (text.iterations, text.evaluation, text.warnings, text.errors) == (30895, 610.5, 1, 1)
    assert text.messages == [('2026-11-30 08:00:01', 'WARNING', 'The effective batch is 2 samples'),
                             ('2026-11-30 08:00:03', 'ERROR', 'ALARM: disk full')]


def test_evaluation_per_class_over_epochs(tmp_path):
    write_json(tmp_path / 'a.log.json', [train_row(1, 50, 0.1), val_row(1, 0.5), train_row(2, 50, 0.2), val_row(2, 0.6)], meta())
    epochs, rows = summary(Run(str(tmp_path)))
    assert epochs == [1, 2]
    table = {(group, label): values for group, label, values in rows}
    assert table['overall', 'NDS'] == pytest.approx([0.6, 0.7]) and table['overall', 'mean IoU'] == [0.5, 0.6]
    assert table['object', 'car'] == pytest.approx([0.51, 0.62])  # mean over the four distances
    assert table['map', 'divider'] == pytest.approx([0.41, 0.52]) and ('map', 'mean') not in table


def test_only_pngs_of_the_run_are_pictures(tmp_path):
    from fake_runs import png
    folder = make_run(tmp_path / 'run')
    (folder / 'pictures').mkdir()
    for i in range(12):
        (folder / 'pictures' / f'{i:02d}.png').write_bytes(png())
    (tmp_path / 'other.png').write_bytes(png())
    found = Run(str(folder)).pictures(8)
    assert len(found) == 8 and all(str(folder) in path for path in found)
