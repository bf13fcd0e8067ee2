"""``tools/train_progressive.py``: order, gates, kills at any point, changed files, mistakes; on a toy trainer without torch."""
import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from testing import REPO

from mmdet3d_ext.launching import processes, progressive, state
from mmdet3d_ext.launching.processes import wait_until
from mmdet3d_ext.launching.stages import Facts, Gate, check_plan, read_plan
from mmdet3d_ext.launching.state import LaunchToolError

TOOL = [sys.executable, str(REPO / 'tools' / 'train_progressive.py')]
TRAINER = str(REPO / 'tests' / 'faults' / 'toy_stages.py')
COARSE = {'miou': [0.2, 0.5, 0.4], 'stop_line': [0.1, 0.36, 0.2]}
FINE = {'miou': [0.3, 0.4, 0.6], 'stop_line': [0.3, 0.3, 0.4]}


class Bench:
    """A stages file of toy trainings in a folder; ends what a test leaves."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        self.configs = {'coarse': {'metrics': COARSE}, 'fine': {'metrics': FINE}}
        self.plan = {'run_dir': 'runs', 'metric': 'miou', 'stages': [
            {'name': 'coarse', 'config': 'coarse.json', 'gates': [{'metric': 'stop_line', 'at_least': 0.35, 'advice': 'More weight.'}]},
            {'name': 'fine', 'config': 'fine.json', 'overrides': {'data': {'workers_per_gpu': 2}}}]}

    def write(self):
        for name, config in self.configs.items():
            (self.folder / f'{name}.json').write_text(json.dumps(config))
        (self.folder / 'stages.yaml').write_text(yaml.safe_dump(self.plan))

    def words(self, *words):
        return [*TOOL, 'stages.yaml', '--skip-checks', '--script', TRAINER, '--poll', '0.1', *words]

    def run(self, *words):
        self.write()
        return subprocess.run(self.words(*words), capture_output=True, text=True, timeout=90, cwd=self.folder)

    def begin(self):
        self.write()
        # A shell starts what it runs in the background (nohup, CI) deaf to SIGINT, and its children inherit that.
        self.started.append(subprocess.Popen(self.words(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder,
                                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)))
        return self.started[-1]

    def table(self):
        return subprocess.run(self.words('--status'), capture_output=True, text=True, timeout=30, cwd=self.folder).stdout

    def starts(self, name):
        return [json.loads(line) for line in (self.folder / 'runs' / name / 'starts.txt').read_text().splitlines()]

    def history(self, name):
        best = json.loads((self.folder / 'runs' / name / 'best.json').read_text())
        return json.loads((self.folder / 'runs' / name / best['file']).read_text())['history']

    def supervisor(self, name):
        return state.read(str(self.folder / 'runs' / name))


@pytest.fixture
def bench(tmp_path):
    found = Bench(tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.wait()
    for path in tmp_path.glob('runs/*/launch/state.json'):
        run = state.read(str(path.parents[1]))
        if state.supervised(run.run_dir):
            processes.send([run.supervisor], signal.SIGKILL)
        processes.kill_run(run.token)


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """The table and the last weights of a training that nothing disturbed."""
    found = Bench(tmp_path_factory.mktemp('undisturbed'))
    done = found.run()
    assert done.returncode == 0, done
    return found.table(), found.history('fine')


def test_each_stage_starts_from_the_best_checkpoint_before_it(bench, undisturbed):
    table, history = undisturbed
    assert history == [['nothing', 1, 2], 1, 2, 3], 'from epoch 2 of the first, which was the best; not from its last one'
    rows = [line.split() for line in table.splitlines()]
    assert rows[1][:7] == ['coarse', 'done', 'initial', 'weights', 'coarse/best_2.pth', '2', 'miou'] and 'passed' in rows[1]
    assert rows[2][:4] == ['fine', 'done', 'coarse/best_2.pth', 'fine/best_3.pth'] and '0.6000' in rows[2]
    done = bench.run()
    assert done.returncode == 0 and len(bench.starts('coarse')) == len(bench.starts('fine')) == 1
    assert bench.starts('fine')[0][4] == ['--data.workers_per_gpu', '2']
    assert bench.run().returncode == 0 and len(bench.starts('fine')) == 1, 'nothing is left to do'


def test_a_gate_stops_with_advice_and_may_be_lowered(bench):
    bench.plan['stages'][0]['gates'][0]['at_least'] = 0.4
    done = bench.run()
    assert done.returncode == progressive.EXIT_GATE
    assert 'fine is not started' in done.stdout and 'stop_line is 0.3600, it must be >= 0.4. More weight.' in done.stdout
    assert 'NOT MET' in bench.table() and not (bench.folder / 'runs' / 'fine').exists()
    bench.plan['stages'][0]['gates'][0]['at_least'] = 0.35
    done = bench.run()
    assert done.returncode == 0 and len(bench.starts('coarse')) == 1, 'a gate is no reason to train again'


def test_what_is_said_of_weights_and_optimizer_arrives(bench):
    bench.plan['stages'][1].update(weights='raw', optimizer='keep', ranks=2, launcher='torchrun')
    assert bench.run().returncode == 0
    (one, two) = bench.starts('fine')
    assert one[1].endswith('coarse/best_2.pth') and one[2:4] == ['raw', True] == two[2:4]


@pytest.mark.parametrize('victims', ['command', 'command and supervisor', 'everything'])
def test_killed_in_the_middle_of_a_stage(bench, undisturbed, victims):
    bench.configs['coarse']['seconds'] = bench.configs['fine']['seconds'] = 0.4
    process = bench.begin()
    path = bench.folder / 'runs' / 'fine' / 'epoch_1.pth'
    assert wait_until(path.exists, 40)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if victims != 'command':
        run = bench.supervisor('fine')
        os.kill(run.supervisor, signal.SIGKILL)
        if victims == 'everything':
            processes.kill_run(run.token)
    done = bench.run()
    assert done.returncode == 0, done
    assert (bench.table(), bench.history('fine')) == undisturbed
    assert len(bench.starts('coarse')) == 1 and len(bench.starts('fine')) == (1 if victims == 'command' else 2)


@pytest.mark.parametrize('moment', ['before the start', 'after the end', 'after the result'])
def test_killed_between_stages(bench, undisturbed, moment):
    """The command is killed at the write of its state that comes at the moment."""
    bench.write()
    number = {'before the start': 2, 'after the end': 3, 'after the result': 5}[moment]
    code = ('import os, sys; sys.argv[0] = sys.path[0] + "/train_progressive.py"\n'
            'import train_progressive, _light; _light.use_package()\n'
            'from mmdet3d_ext.launching import progressive\n'
            'write, count = progressive.Progress.write, []\n'
            'def dying(self):\n'
            '    count.append(1)\n'
            f'    if len(count) == {number}: os.kill(os.getpid(), 9)\n'
            '    write(self)\n'
            'progressive.Progress.write = dying\n'
            'sys.exit(train_progressive.main())\n')
    done = subprocess.run([sys.executable, '-c', code, *bench.words()[2:]], env=dict(os.environ, PYTHONPATH=str(REPO / 'tools')),
                          cwd=bench.folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done
    done = bench.run()
    assert done.returncode == 0, done
    assert (bench.table(), bench.history('fine')) == undisturbed
    assert len(bench.starts('coarse')) == len(bench.starts('fine')) == 1


def test_a_crash_inside_a_stage_is_the_supervisors(bench, undisturbed):
    bench.configs['coarse']['die_at'] = 3
    assert bench.run().returncode == 0
    assert bench.history('fine') == undisturbed[1] and [row[0] for row in bench.starts('coarse')] == [0, 2]


def test_asked_to_stop_it_writes_and_goes_on_later(bench, undisturbed):
    bench.configs['coarse']['seconds'] = 0.4
    process = bench.begin()
    assert wait_until((bench.folder / 'runs' / 'coarse' / 'epoch_1.pth').exists, 40)
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 75 and 'The same command goes on' in text, text
    assert not state.supervised(str(bench.folder / 'runs' / 'coarse'))
    assert bench.run().returncode == 0 and (bench.table(), bench.history('fine')) == undisturbed


def test_a_signal_that_comes_twice_is_one(bench, undisturbed):
    """As ``timeout`` sends it: to the program, then to its group. The stage is stopped all the same."""
    bench.configs['coarse']['seconds'] = 0.4
    process = bench.begin()
    assert wait_until((bench.folder / 'runs' / 'coarse' / 'epoch_1.pth').exists, 40)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.15)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 75 and 'The same command goes on' in text, text
    assert not state.supervised(str(bench.folder / 'runs' / 'coarse'))
    assert bench.run().returncode == 0 and (bench.table(), bench.history('fine')) == undisturbed


def test_two_at_once(bench):
    bench.configs['coarse']['seconds'] = 0.5
    bench.begin()
    assert wait_until((bench.folder / 'runs' / 'coarse' / 'starts.txt').exists, 40)
    done = bench.run()
    assert done.returncode == 2 and 'at work there already' in done.stderr


def test_a_changed_stage_is_noticed(bench):
    assert bench.run().returncode == 0
    bench.configs['fine']['epochs'] = 2
    done = bench.run()
    assert done.returncode == 2 and 'stage fine has begun with other settings' in done.stderr and '--again fine' in done.stderr
    done = bench.run('--again', 'fine')
    assert done.returncode == 0 and len(bench.starts('fine')) == 1 and (bench.folder / 'runs' / 'fine.previous_1').is_dir()
    assert len(bench.starts('coarse')) == 1
    bench.plan['stages'].reverse()
    done = bench.run()
    assert done.returncode == 2 and 'ran in this order' in done.stderr
    bench.plan['stages'].reverse()
    done = bench.run('--again', 'fein')
    assert done.returncode == 2 and "did you mean 'fine'" in done.stderr


def test_what_has_not_begun_may_change(bench):
    bench.plan['stages'][0]['gates'][0]['at_least'] = 0.4
    assert bench.run().returncode == progressive.EXIT_GATE
    bench.configs['fine']['epochs'] = 2
    bench.plan['stages'][0]['gates'] = []
    done = bench.run()
    assert done.returncode == 0 and 'fine has changed; it has not begun yet' in done.stdout


def test_missing_metrics_name_the_nearest(bench):
    bench.plan['metric'] = 'mioo'
    done = bench.run()
    assert done.returncode == 2 and "no metric 'mioo'; did you mean 'miou'?" in done.stdout, done
    bench.plan['metric'], bench.plan['stages'][0]['gates'][0]['metric'] = 'miou', 'stopline'
    done = bench.run('--again', 'coarse')
    assert done.returncode == 2 and "no metric 'stopline'; did you mean 'stop_line'?" in done.stdout, done


def test_a_score_that_is_never_a_number(bench):
    bench.configs['coarse']['metrics'] = {'miou': [float('nan')] * 3, 'stop_line': [0.5] * 3}
    done = bench.run()
    assert done.returncode == 1 and 'NaN each time' in done.stdout, done


def test_a_best_checkpoint_that_is_gone(bench):
    assert bench.run().returncode == 0
    (bench.folder / 'runs' / 'fine' / 'best_3.pth').unlink()
    done = bench.run()
    assert done.returncode == 2 and 'is gone' in done.stdout


# ---- the file ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('change, text', [
    (lambda p: p.update(metrik='x'), "key 'metrik' is not known here; did you mean 'metric'?"),
    (lambda p: p['stages'][0].update(wieghts='ema'), "did you mean 'weights'?"),
    (lambda p: p['stages'][0].update(weights='mean'), "key 'weights' must be one of auto, ema, raw, got 'mean'"),
    (lambda p: p['stages'][0].update(ranks=0), "key 'ranks' must be a whole number >= 1, got 0"),
    (lambda p: p['stages'][0].update(config='nowhere.yaml'), 'configuration nowhere.yaml does not exist'),
    (lambda p: p['stages'][0].update(optimizer='keep'), 'no checkpoint to keep an optimizer from'),
    (lambda p: p['stages'][1].update(name='coarse'), "no other stage has, got 'coarse'"),
    (lambda p: p['stages'][1].update(gates=[{'metric': 'a'}]), 'a gate is {metric: M, at_least: number}'),
    (lambda p: p['stages'][1].update(gates=[{'metric': 'a', 'at_least': float('nan')}]), 'a gate is {metric: M, at_least: number}'),
    (lambda p: p['stages'][1].update(gates=5), 'key gates must be a list, got 5'),
    (lambda p: p['stages'][1].update(overrides={'load_from': 'x.pth'}), "key 'load_from' cannot be an override"),
    (lambda p: p.pop('metric'), "stage 1 has no 'metric'"),
    (lambda p: p.update(load_from='nothing.pth'), 'checkpoint nothing.pth does not exist'),
    (lambda p: p.update(stages=[]), 'a list of at least one stage')])
def test_mistakes_in_the_file(bench, change, text, monkeypatch):
    monkeypatch.chdir(bench.folder)
    change(bench.plan)
    bench.write()
    with pytest.raises(LaunchToolError) as error:
        read_plan('stages.yaml')
    assert text in str(error.value) and 'stages.yaml' in str(error.value)


def test_what_a_plan_is_checked_for(bench, monkeypatch):
    monkeypatch.chdir(bench.folder)
    bench.plan['stages'][1]['weights'] = 'ema'
    bench.write()
    plan = read_plan('stages.yaml')
    problems = check_plan(plan, {'coarse': Facts('a', ('miou', 'stop_lines'), averages=False), 'fine': Facts('b', ('miou',),
                                                                                                              problems=('key x is wrong',))})
    assert len(problems) == 3 and "no metric 'stop_line'; did you mean 'stop_lines'?" in problems[0]
    assert 'keeps no averages' in ' '.join(problems) and 'stage fine: key x is wrong' in problems


def test_gates():
    assert Gate('x', at_least=0.35).passes(0.35) and not Gate('x', at_least=0.35).passes(float('nan'))
    assert Gate('x', at_most=1.0).passes(1.0) and not Gate('x', at_most=1.0).passes(1.1)


def test_the_shipped_stages_can_start(tmp_path):
    """All three configurations are checked, with the metrics of the seed's gates; a wrong one is found before anything starts."""
    done = subprocess.run([*TOOL, 'stages/nuscenes_multitask.yaml', '--dry-run'], capture_output=True, text=True, timeout=90, cwd=REPO)
    assert done.returncode == 0 and 'phase3_400, stage1_600, stage2_800' in done.stdout, done
    shipped = yaml.safe_load((REPO / 'stages' / 'nuscenes_multitask.yaml').read_text())
    assert {(g['metric'], g['at_least']) for g in shipped['stages'][1]['gates']} == {('map/stop_line/iou@max', 0.35),
                                                                                     ('map/divider/iou@max', 0.28)}
    shipped['run_dir'] = str(tmp_path / 'runs')
    shipped['stages'][1]['gates'][0]['metric'] = 'map/stop_lane/iou@max'
    shipped['stages'][0]['overrides'] = {'model': {'checkpoint': ['heads.mapp']}}
    shipped['stages'][2]['overrides'] = {'bev': {'labels': {'cells': 799}}}
    (tmp_path / 'stages.yaml').write_text(yaml.safe_dump(shipped))
    done = subprocess.run([*TOOL, str(tmp_path / 'stages.yaml')], capture_output=True, text=True, timeout=90, cwd=REPO)
    assert done.returncode == 2 and "did you mean 'map/stop_line/iou@max'" in done.stderr and 'nothing was started' in done.stderr, done
    assert "stage phase3_400: model.checkpoint: there is no part named 'heads.mapp'" in done.stderr, 'what only building it shows'
    assert not (tmp_path / 'runs').exists()


def test_the_state_file(tmp_path):
    """Written whole or not at all, and read back."""
    progress = progressive.Progress(str(tmp_path))
    progress.records = {'a': progressive.Record('a', best='x.pth', score=0.5, started=time.time())}
    progress.write()
    assert progressive.Progress(str(tmp_path)).records == progress.records
    for text in ('{"plan": ', '[]', '{"plan": null, "stages": []}', '{"plan": {}, "stages": [{"phase": "done"}]}',
                 '{"plan": {}, "stages": [{"name": "a", "gates": null}]}', '{"plan": {}, "stages": [{"name": "a", "fase": "done"}]}'):
        (tmp_path / 'progressive.json').write_text(text)
        with pytest.raises(LaunchToolError, match='cannot be read'):
            progressive.Progress(str(tmp_path))


def test_a_run_folder_that_cannot_be_used(bench):
    (bench.folder / 'runs').touch()
    done = bench.run()
    assert done.returncode == 2 and 'runs is no folder' in done.stderr and 'Traceback' not in done.stderr, done


def test_a_full_disk_is_said_and_the_command_goes_on_later(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, 'No space left on device')
    progress = progressive.Progress(str(tmp_path))
    progress.write()
    before = progress.path
    monkeypatch.setattr(progressive.os, 'fsync', full)
    progress.records = {'a': progressive.Record('a')}
    with pytest.raises(LaunchToolError, match='progressive.json cannot be written: No space left on device'):
        progress.write()
    assert progressive.Progress(str(tmp_path)).records == {} and os.path.exists(before), 'the file is the one from before'


def test_a_stage_is_not_begun_anew_under_ranks_that_still_write(bench):
    """Command and supervisor were killed, the rank was not: its folder is not moved away from under it."""
    bench.configs['coarse']['seconds'] = 1.0
    process = bench.begin()
    assert wait_until((bench.folder / 'runs' / 'coarse' / 'epoch_1.pth').exists, 40)
    process.kill()
    process.wait()
    run = bench.supervisor('coarse')
    os.kill(run.supervisor, signal.SIGKILL)
    done = bench.run('--again', 'coarse')
    assert done.returncode == 2 and 'a run lives in' in done.stdout and not (bench.folder / 'runs' / 'coarse.previous_1').exists(), done
    processes.kill_run(run.token)
    bench.configs['coarse']['seconds'] = 0.0
    done = bench.run('--again', 'coarse')
    assert done.returncode == 0 and (bench.folder / 'runs' / 'coarse.previous_1').is_dir(), done
