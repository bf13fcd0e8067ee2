"""Progress, life and health of runs whose truth is known."""
import json
import math
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_runs import CLASSES, make_run, meta, schedule, set_age, train_row, val_row, write_json  # noqa: E402

from mmdet3d_ext.monitor import health as rules
from mmdet3d_ext.monitor.health import BAD, GOOD, INFO, WARN, health
from mmdet3d_ext.monitor.progress import FAILED, FINISHED, RUNNING, SILENT, STARTING, STOPPED, duration, progress
from mmdet3d_ext.monitor.run import Run


def state_of(folder):
    return progress(Run(str(folder)))


def marks_of(folder):
    return {mark.name: mark for mark in health(Run(str(folder)))}


# ---- progress ----------------------------------------------------------------------------------------------------------

def test_eta_throughput_and_data_share(tmp_path):
    found = state_of(make_run(tmp_path / 'run', schedule(upto=(3, 500)), age=5))
    assert (found.epoch, found.iteration, found.epochs, found.iterations) == (3, 500, 4, 1000)
    assert found.fraction == pytest.approx(2500 / 4000)
    assert found.seconds_per_step == 0.5 and found.samples_per_second == pytest.approx(8 * 2 / 0.5)
    assert found.data_share == pytest.approx(0.1)
    # 1500 steps of 0.5 s, and the evaluations of epochs 3 and 4, each as long as the last one (120 s)
    assert found.eta == pytest.approx(1500 * 0.5 + 2 * 120)
    assert found.state == RUNNING and found.due == pytest.approx(25) and 4 < found.age < 20


@pytest.mark.parametrize('age, state', [(10, RUNNING), (70, RUNNING), (80, SILENT), (40000, SILENT)])
def test_a_run_is_silent_when_its_next_line_is_three_times_overdue(tmp_path, age, state):
    """A line is due every 25 s: silent from 75 s on."""
    found = state_of(make_run(tmp_path / 'run', schedule(upto=(2, 500)), age=age))
    assert found.state == state
    if state == SILENT:
        assert duration(found.age) in found.text and 'one is due every 25 s' in found.text and found.eta is None


def test_an_evaluation_may_take_as_long_as_the_last_one(tmp_path):
    rows = [row for row in schedule(upto=(3, 0)) if row != val_row(2, 0.45)]
    assert rows[-1]['mode'] == 'train' and rows[-1]['iter'] == 1000
    folder = make_run(tmp_path / 'run', rows, age=250)  # 75 s + 2 x 120 s
    assert state_of(folder).state == RUNNING and 'evaluation' in state_of(folder).text
    set_age(folder, 400)
    assert state_of(folder).state == SILENT


@pytest.mark.parametrize('rows, first, state', [([], None, STARTING), (schedule(), None, FINISHED)])
def test_before_the_first_line_and_after_the_last(tmp_path, rows, first, state):
    assert state_of(make_run(tmp_path / 'run', rows, age=30)).state == state


def test_a_finished_run_stays_finished(tmp_path):
    assert state_of(make_run(tmp_path / 'run', schedule(), age=1e6)).state == FINISHED


def test_a_run_without_evaluation_is_finished_with_its_last_checkpoint(tmp_path):
    folder = make_run(tmp_path / 'run', [row for row in schedule() if row['mode'] == 'train'])
    assert state_of(folder).state == RUNNING
    (folder / 'epoch_4.pth').write_bytes(b'x')
    set_age(folder, 100)
    assert state_of(folder).state == FINISHED


def test_the_log_of_a_dead_rank_says_why(tmp_path):
    folder = make_run(tmp_path / 'run', schedule(upto=(2, 500)))
    (folder / 'logging').mkdir()
    (folder / 'logging' / '20261130_080000_0.log').write_text('all well\n')
    (folder / 'logging' / '20261130_080000_3.log').write_text('[rank 3] Traceback (most recent call last):\n  File\n'
                                                             '[rank 3] torch.OutOfMemoryError: CUDA out of memory\n')
    (folder / 'logging' / '20261101_080000_1.log').write_text('Traceback (most recent call last):\nyesterday\n')
    set_age(folder, 4000)
    text = state_of(folder).text
    assert '_3.log ends with: [rank 3] torch.OutOfMemoryError' in text and 'yesterday' not in text


@pytest.mark.parametrize('phase, state', [('failed', FAILED), ('stopped', STOPPED), ('finished', FINISHED)])
def test_what_the_launcher_wrote_is_believed(tmp_path, phase, state):
    folder = make_run(tmp_path / 'run', schedule(upto=(2, 500)))
    (folder / 'launch').mkdir()
    (folder / 'launch' / 'state.json').write_text(json.dumps({'phase': phase, 'message': 'rank 1 was killed'}))
    found = state_of(folder)
    assert found.state == state and found.text == 'rank 1 was killed'


def test_a_restart_that_is_waited_for_is_told(tmp_path):
    folder = make_run(tmp_path / 'run', schedule(upto=(2, 500)))
    (folder / 'launch').mkdir()
    (folder / 'launch' / 'state.json').write_text(json.dumps({'phase': 'waiting', 'message': 'rank 1 raised. Restart 2 in 4 s',
                                                              'restarts': 2, 'last_crash': 'rank 1 raised'}))
    assert state_of(folder).state == RUNNING and 'Restart 2 in 4 s' in state_of(folder).text
    assert marks_of(folder)['restarts'].level == WARN and 'rank 1 raised' in marks_of(folder)['restarts'].text
    set_age(folder, 4000)
    assert state_of(folder).state == SILENT  # the launcher itself is gone


def test_the_references_log_has_a_speed_but_no_end(tmp_path):
    path = tmp_path / 'x.log.json'
    write_json(path, schedule(upto=(2, 500)), {})
    found = state_of(path)
    assert found.seconds_per_step == 0.5 and found.eta is None and found.samples_per_second is None and found.fraction is None


@pytest.mark.parametrize('seconds, text', [(4.21, '4.2 s'), (59.6, '1 min 0 s'), (3599, '59 min 59 s'), (3600, '1 h 0 min'),
                                           (691200, '8 d 0 h'), (None, 'unknown'), (math.nan, 'unknown'), (-3, '0.0 s')])
def test_durations(seconds, text):
    assert duration(seconds) == text


# ---- health ------------------------------------------------------------------------------------------------------------

def constant(upto=(2, 500), **values):
    rows = schedule(upto=upto)
    for row in rows:
        if row['mode'] == 'train':
            row.update(values)
    return rows


@pytest.mark.parametrize('label, dice, level', [
    ('drivable_area', 0.39, GOOD), ('drivable_area', 0.41, WARN), ('ped_crossing', 0.39, GOOD), ('walkway', 0.5, WARN),
    ('stop_line', 0.89, GOOD), ('stop_line', 0.91, WARN), ('carpark_area', 0.6, GOOD), ('divider', 0.95, WARN)])
def test_dice_thresholds_for_large_and_small_classes(tmp_path, label, dice, level):
    folder = make_run(tmp_path / 'run', constant(**{f'stats/map/{label}/dice_score': 1 - dice}))
    mark = marks_of(folder)[f'map/{label}/dice']
    assert mark.level == level and mark.value == pytest.approx(dice)


def test_losses_are_judged_before_class_weights(tmp_path):
    """The divider's weight is 4: a logged focal loss of 0.16 is one of 0.04."""
    mark = marks_of(make_run(tmp_path / 'run', constant(**{'loss/map/divider/focal': 0.16})))['map/divider/focal']
    assert mark.value == pytest.approx(0.04) and mark.level == GOOD
    mark = marks_of(make_run(tmp_path / 'run2', constant(**{'loss/map/walkway/focal': 0.16})))['map/walkway/focal']
    assert mark.value == pytest.approx(0.16) and mark.level == WARN


def test_the_logged_dice_is_used_where_no_score_is_logged(tmp_path):
    rows = [{k: v for k, v in row.items() if not k.startswith('stats/map')} for row in constant()]
    for row in rows:
        if row['mode'] == 'train':
            row['loss/map/divider/dice'] = 4 * 0.8
    assert marks_of(make_run(tmp_path / 'run', rows))['map/divider/dice'].value == pytest.approx(0.8)


@pytest.mark.parametrize('norm, level', [(19.9, GOOD), (20.1, WARN), (math.nan, WARN), (math.inf, WARN)])
def test_gradient_norm(tmp_path, norm, level):
    assert marks_of(make_run(tmp_path / 'run', constant(grad_norm=norm)))['gradient norm'].level == level


def test_one_spike_does_not_make_a_run_sick(tmp_path):
    rows = constant(grad_norm=12.0)
    rows[-3]['grad_norm'] = 900.0
    assert marks_of(make_run(tmp_path / 'run', rows))['gradient norm'].level == GOOD


def test_early_in_the_schedule_values_are_not_there_yet(tmp_path):
    marks = marks_of(make_run(tmp_path / 'run', constant(upto=(1, 300), grad_norm=50.0)))
    assert marks['gradient norm'].level == INFO and marks['map/drivable_area/dice'].level == INFO


def test_a_non_finite_loss_is_named(tmp_path):
    rows = constant()
    rows[-2]['loss/map/stop_line/focal'] = math.nan
    mark = marks_of(make_run(tmp_path / 'run', rows))['finite values']
    assert mark.level == BAD and 'loss/map/stop_line/focal' in mark.text


def test_skipped_steps_are_counted_where_the_means_are_finite(tmp_path):
    rows = constant()
    rows[-2]['nonfinite_steps'], rows[-5]['nonfinite_steps'] = 2, 1
    mark = marks_of(make_run(tmp_path / 'run', rows))['finite values']
    assert mark.level == WARN and mark.value == 3 and '3 step(s) of the last 10 lines' in mark.text


def test_what_is_wrong_with_the_log_files_is_a_mark(tmp_path):
    folder = make_run(tmp_path / 'run', schedule(upto=(2, 500)), age=9999)
    path = folder / '20261130_080000.log.json'
    path.write_text(path.read_text()[:-30])
    (folder / '20261130_090000.log.json').write_bytes(b'\x00\x01\x02\n')
    set_age(folder, 9999)
    mark = marks_of(folder)['log']
    assert mark.level == WARN and f'{path}: its last line is cut' in mark.text
    assert "20261130_090000.log.json: holds no line that mmcv's runner writes" in mark.text
    set_age(folder, 1)
    assert 'its last line is cut' not in marks_of(folder)['log'].text, 'it is being written'


def test_a_run_that_died_in_its_first_line_is_told(tmp_path):
    folder = tmp_path / 'run'
    folder.mkdir()
    (folder / 'a.log.json').write_text('{"exp_name": "x.ya')
    for age, state in ((5, STARTING), (3000, SILENT)):
        set_age(folder, age)
        found = state_of(folder)
        assert found.state == state and 'a.log.json: is cut within its first line (18 bytes)' in found.text
        assert marks_of(folder)['log'].level == WARN


def test_a_rising_loss_is_seen(tmp_path):
    rows = schedule(upto=(3, 500))
    falling = marks_of(make_run(tmp_path / 'a', rows))['total loss']
    for row in rows[-10:]:
        row['loss'] *= 3
    assert falling.level == GOOD and marks_of(make_run(tmp_path / 'b', rows))['total loss'].level == WARN


def test_waiting_for_data_alarms_errors_broken_lines(tmp_path):
    folder = make_run(tmp_path / 'run', constant(data_time=0.3), extra=[
        '2026-11-30 09:00:00,000 - mmdet3d - ERROR - ALARM: cannot write the checkpoint: No space left on device',
        '2026-11-30 09:01:00,000 - mmdet3d - WARNING - harmless'])
    path = folder / '20261130_080000.log.json'
    path.write_text(path.read_text() + 'garbage\n')
    marks = marks_of(folder)
    assert marks['data time'].level == WARN and '60%' in marks['data time'].text
    assert marks['alarms'].level == BAD and 'No space left' in marks['alarms'].text
    assert marks['log'].level == WARN and 'errors' not in marks


def test_a_missing_checkpoint_is_noticed(tmp_path):
    folder = make_run(tmp_path / 'run', schedule(upto=(4, 500)))
    (folder / 'epoch_1.pth').write_bytes(b'x')
    assert 'checkpoints' not in marks_of(folder)
    import os
    then = time.time() - 2.5 * 1000 * 0.5
    os.utime(folder / 'epoch_1.pth', (then, then))
    assert marks_of(folder)['checkpoints'].level == WARN


def test_a_class_without_a_known_threshold_is_not_judged(tmp_path):
    rows = [{'mode': 'train', 'epoch': 1, 'iter': i, 'lr': 0.1, 'loss/map/lane/dice': 0.99, 'loss/map/lane/xent': 0.5, 'loss': 1.5,
             'time': 1.0} for i in range(1, 10)]
    write_json(tmp_path / 'a.log.json', rows, meta())
    marks = marks_of(tmp_path)
    assert marks['map/lane/dice'].level == INFO and 'map/lane/focal' not in marks


def test_a_good_run_has_only_good_marks(tmp_path):
    rows = schedule(upto=(4, 900))
    found = health(Run(str(make_run(tmp_path / 'run', rows))))
    assert rules.worst(found) == GOOD, [mark for mark in found if mark.level != GOOD]
    assert len([mark for mark in found if mark.name.startswith('map/')]) == 2 * len(CLASSES)


def test_a_resumed_runs_rows_are_judged_once(tmp_path):
    write_json(tmp_path / '1.log.json', [train_row(1, 50, 0.1, loss=math.nan)], meta())
    write_json(tmp_path / '2.log.json', [train_row(1, 50, 0.1)], meta())
    assert marks_of(tmp_path)['finite values'].level == GOOD
