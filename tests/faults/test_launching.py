"""Runs that crash, are stopped, lose their supervisor, or share a machine, through ``tools/launch.py``."""
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from testing import REPO

from mmdet3d_ext.launching import processes, state
from mmdet3d_ext.launching.processes import wait_until

TOOL = [sys.executable, str(REPO / 'tools' / 'launch.py')]
TRAINER = str(REPO / 'tests' / 'faults' / 'toy_trainer.py')


class Runs:
    """Starts runs of the toy trainer and ends what a test left of them."""

    def __init__(self, folder):
        self.folder, self.tokens = folder, []

    def start(self, name='run', ranks=2, launcher='torchpack', words=(), timeout=60, env=None, **config):
        path = self.folder / f'{name}.json'
        path.write_text(json.dumps({'steps': 40, 'every': 10, **config}))
        done = subprocess.run([*TOOL, 'start', str(path), '-n', str(ranks), '--run-dir', str(self.folder / name), '--script', TRAINER,
                               '--skip-checks', '--launcher', launcher if ranks > 1 else 'auto', '--pause', '0.2', *words],
                              capture_output=True, text=True, timeout=timeout, cwd=self.folder, env=env)
        if (self.folder / name / 'launch' / 'state.json').exists():
            self.tokens.append(state.read(str(self.folder / name)).token)
        return done

    def tool(self, *words, timeout=60):
        return subprocess.run([*TOOL, *map(str, words)], capture_output=True, text=True, timeout=timeout, cwd=self.folder)

    def state(self, name='run'):
        return state.read(str(self.folder / name))

    def until(self, phase, name='run', seconds=120):
        assert wait_until(lambda: self.state(name).phase == phase, seconds), self.state(name)
        return self.state(name)

    def until_training(self, name='run', ranks=2):
        """Signals are heard from here on."""
        assert wait_until(lambda: all((self.folder / name / f'seen_{rank}.json').exists() for rank in range(ranks)), 90)

    def weight(self, name='run'):
        newest = max((self.folder / name).glob('iter_*.pth'), key=lambda path: int(path.stem.split('_')[1]))
        return json.loads(newest.read_text())


def expected(steps):
    found = {'step': 0, 'weight': 1}
    while found['step'] < steps:
        found = {'step': found['step'] + 1, 'weight': found['weight'] * 31 % 1000003 + found['step']}
    return found


@pytest.fixture
def runs(tmp_path):
    found = Runs(tmp_path)
    yield found
    for token in found.tokens:
        left = processes.of_run(token)
        processes.kill_run(token)
        assert not left or 'allowed' in vars(found), f'the test left {left}'
    for path in tmp_path.glob('*/launch/state.json'):
        supervisor = state.read(str(path.parents[1])).supervisor
        if state.supervised(str(path.parents[1])):
            processes.send([supervisor], signal.SIGKILL)


@pytest.mark.parametrize('do, words', [('raise', 'rank 1 ended with exit code 1 (ValueError: injected into rank 1)'),
                                       ('kill', 'rank 1 was killed by SIGKILL'),
                                       ('parent', 'killed without a word, rank process included')])
def test_a_crash_restarts_from_the_newest_checkpoint(runs, fault_record, do, words):
    runs.start(faults=[{'rank': 1, 'attempt': 1, 'step': 15, 'do': do}])
    found = runs.until(state.FINISHED)
    assert found.restarts == 1 and len(found.history) == 2 and words in found.last_crash, found
    assert 'rank 0 starts at step' in Path(found.history[1]['log']).read_text()
    start = int(json.loads((runs.folder / 'run' / 'seen_0.json').read_text())['START_STEP'])
    assert start >= 10 and runs.weight() == expected(40)
    how = {'raise': 'raises', 'kill': 'is killed (SIGKILL)', 'parent': 'is killed with the process around it'}[do]
    fault_record(f'a rank {how} under tools/launch.py',
                 'the crash is named, the run is started again from its newest checkpoint and ends with the right weights',
                 'the steps since that checkpoint')


def test_it_gives_up_after_crashes_without_progress(runs, fault_record):
    runs.start(words=['--max-restarts', '2'], faults=[{'rank': 0, 'step': 5, 'do': 'raise'}])
    found = runs.until(state.FAILED)
    assert len(found.history) == 3 and 'Not restarted: 3 crash(es) without a new checkpoint' in found.message
    status = runs.tool('status', 'run')
    assert status.returncode == 3 and 'ValueError: injected into rank 0' in status.stdout
    fault_record('a run that crashes at the same step again and again', 'given up after 2 restarts without a new checkpoint')


def test_crashes_with_progress_in_between_are_not_counted(runs):
    faults = [{'rank': 0, 'attempt': n, 'step': 10 * n + 5, 'do': 'kill'} for n in (1, 2, 3)]
    runs.start(words=['--max-restarts', '1'], faults=faults)
    found = runs.until(state.FINISHED)
    assert found.restarts == 3 and runs.weight() == expected(40)


def test_stop_writes_a_checkpoint_and_ends(runs, fault_record):
    """The saving takes 3 s and mpirun kills the others 1 s after one rank has ended: nothing may be cut off."""
    started = runs.start(steps=10000, every=5000, saving=3.0)
    assert started.returncode == 0 and 'running: 2 process(es)' in started.stdout, started
    runs.until_training()
    done = runs.tool('stop', 'run')
    assert done.returncode == 0 and done.stdout.startswith('stopped: stopped; the newest checkpoint is'), done
    found = runs.weight()
    assert 0 < found['step'] < 10000 and found == expected(found['step'])
    log = (runs.folder / 'run' / 'launch' / 'attempt_001' / 'launcher.log').read_text()
    assert 'rank 0 stopped at step' in log and 'non-zero' not in log
    assert runs.state().phase == state.STOPPED and processes.of_run(runs.tokens[0]) == []
    again = runs.tool('stop', 'run')
    assert again.returncode == 0 and 'does not run' in again.stdout
    fault_record('tools/launch.py stop', 'the ranks write a checkpoint and end; the launcher does not cut them off')


def test_a_stopped_run_goes_on_only_if_told_to(runs):
    runs.start(steps=2000, every=5000)
    runs.until_training()
    runs.tool('stop', 'run')
    step = runs.weight()['step']
    refused = runs.start(steps=2000, every=5000)
    assert refused.returncode == 2 and '--resume_from auto' in refused.stderr and '--fresh' in refused.stderr
    runs.start(words=['--resume_from', 'auto'], steps=step + 10, every=1000)
    runs.until(state.FINISHED)
    assert runs.weight() == expected(step + 10)
    assert (runs.folder / 'run' / 'launch' / 'previous_1' / 'attempt_001' / 'launcher.log').exists()


def test_two_runs_at_a_time_do_not_touch_each_other(runs, fault_record):
    runs.start('one', steps=10000)
    runs.start('two', launcher='torchrun', steps=10000)
    runs.start('three', ranks=1, steps=60, seconds=0.2)
    assert {runs.state(name).launcher for name in ('one', 'two', 'three')} == {'torchpack', 'torchrun', 'python'}
    second = runs.start('one', steps=1)
    assert second.returncode == 2 and 'a run lives there' in second.stderr
    runs.until_training('one')
    runs.until_training('two')
    assert runs.tool('stop', 'one').returncode == 0
    assert runs.state('two').phase == state.RUNNING and runs.state('three').phase == state.RUNNING
    seen = [json.loads((runs.folder / name / 'seen_0.json').read_text()) for name in ('one', 'two')]
    assert seen[0]['MASTER_HOST'].split(':')[1] != seen[1]['MASTER_PORT']
    assert runs.tool('stop', 'two', '--now').returncode == 0
    assert runs.until(state.FINISHED, 'three').restarts == 0
    assert runs.state('two').phase == state.STOPPED and 'without a last checkpoint' in runs.state('two').message
    fault_record('two runs on one machine, one is stopped or killed', 'the other goes on; ports and folders are their own')


def test_one_run_on_two_machines_has_a_supervisor_on_each(runs):
    """Both are this machine here; the folder is shared, as on a cluster."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    nodes = [dict(os.environ, NNODES='2', NODE_RANK=str(node), MASTER_ADDR='127.0.0.1', PORT=port) for node in (0, 1)]
    path = runs.folder / 'c.json'
    path.write_text(json.dumps({'steps': 20}))
    started = [subprocess.Popen([*TOOL, 'start', str(path), '-n', '1', '--run-dir', str(runs.folder / 'run'), '--script', TRAINER,
                                 '--skip-checks', '--foreground'], env=env, stderr=subprocess.PIPE, text=True) for env in nodes]
    said = [process.communicate(timeout=100)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    for node, folder in enumerate(('launch', 'launch_node1')):
        assert (runs.folder / 'run' / folder / 'attempt_001' / f'rank_{node}.json').exists()
        assert json.loads((runs.folder / 'run' / f'seen_{node}.json').read_text())['WORLD_SIZE'] == '2'
    status = subprocess.run([*TOOL, 'status', str(runs.folder / 'run')], env=nodes[1], capture_output=True, text=True)
    assert status.returncode == 0 and 'rank 1: ended with 0' in status.stdout


@pytest.mark.parametrize('do, code, words', [('mistake', 2, 'something to correct'), ('full', 3, 'could not be written'),
                                             ('diverged', 4, 'stopped itself')])
def test_what_a_restart_cannot_mend_is_not_restarted(runs, do, code, words):
    done = runs.start(words=['--foreground'], faults=[{'rank': rank, 'step': 3, 'do': do} for rank in (0, 1)])
    found = runs.state()
    assert done.returncode == code and len(found.history) == 1 and found.phase == state.FAILED and words in found.message


def test_foreground_shows_the_run_and_ctrl_c_stops_it_in_order(runs):
    path = runs.folder / 'c.json'
    path.write_text(json.dumps({'steps': 10000, 'every': 5000}))
    process = subprocess.Popen([*TOOL, 'start', str(path), '-n', '2', '--run-dir', str(runs.folder / 'run'), '--script', TRAINER,
                                '--skip-checks', '--foreground'], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    seen = ''
    while 'rank 0 starts at step 0' not in seen or 'running:' not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    runs.tokens.append(runs.state().token)
    runs.until_training()
    os.killpg(process.pid, signal.SIGINT)  # what the terminal does
    seen += process.stderr.read()
    assert process.wait(30) == 75 and 'stopped: stopped; the newest checkpoint is' in seen, seen
    assert runs.weight()['step'] > 0


def kill_supervisor(runs):
    processes.send([runs.state().supervisor], signal.SIGKILL)
    assert wait_until(lambda: not state.supervised(str(runs.folder / 'run')), 5)


@pytest.mark.parametrize('ranks', [1, 2])
def test_a_killed_supervisor_is_told_and_its_run_can_still_be_stopped(runs, fault_record, ranks):
    runs.start(ranks=ranks, steps=10000, every=5000)
    runs.until_training(ranks=ranks)
    kill_supervisor(runs)
    status = runs.tool('status', 'run')
    assert status.returncode == 0 and 'unsupervised: the supervisor was killed' in status.stdout, 'the run lives'
    assert 'attempt 1: running, ' in status.stdout and '(ended)' in status.stdout
    assert runs.tool('status', '.').returncode == 0
    refused = runs.start(words=['--resume_from', 'auto'])
    assert refused.returncode == 2 and 'still live there' in refused.stderr
    done = runs.tool('stop', 'run')
    assert done.returncode == 0 and runs.weight()['step'] > 0 and processes.of_run(runs.tokens[0]) == []
    assert done.stdout.startswith(f'stopped: stopped; the newest checkpoint is {runs.folder}/run/iter_{runs.weight()["step"]}.pth'), done
    status = runs.tool('status', 'run')
    assert status.returncode == 3 and 'run  stopped: stopped; the newest checkpoint is' in status.stdout
    assert 'running' not in status.stdout and 'attempt 1: stopped, ' in status.stdout and 'rank 0: ended with 75' in status.stdout
    step = runs.weight()['step']
    runs.start(ranks=ranks, words=['--resume_from', 'auto'], steps=step + 5, every=1000)
    runs.until(state.FINISHED)
    assert runs.weight() == expected(step + 5)
    fault_record('the supervisor is killed', 'the ranks train on; status says so, stop still writes a checkpoint and names it')


@pytest.mark.parametrize('how, phase, code, words', [
    ('end', 'finished', 0, 'trained to the end; the newest checkpoint is'),
    ('crash', 'failed', 3, 'rank 1 ended with exit code 1; the newest checkpoint is'),
    ('signal', 'stopped', 3, 'stopped; the newest checkpoint is'),
    ('gone', 'failed', 3, 'the supervisor and its ranks are gone (the machine restarted?)')])
def test_the_end_of_a_run_without_supervisor_is_told_all_the_same(runs, how, phase, code, words):
    runs.start(steps=60 if how == 'end' else 10000, every=5,
               faults=[{'rank': 1, 'step': 40, 'do': 'raise'}] if how == 'crash' else [])
    runs.until_training()
    kill_supervisor(runs)
    if how == 'signal':
        processes.send([record['pid'] for record in state.records(state.attempt_dir(str(runs.folder / 'run'), 1), 2).values()],
                       signal.SIGTERM)
    if how == 'gone':
        assert processes.kill_run(runs.tokens[0]) == []
    assert wait_until(lambda: not processes.of_run(runs.tokens[0]), 30)
    status = runs.tool('status', 'run')
    assert status.returncode == code and f'run  {phase}: {words}' in status.stdout, status.stdout
    assert 'running,' not in status.stdout and 'nobody saw its end' in status.stdout
    done = runs.tool('stop', 'run')
    assert done.returncode == 0 and f'does not run ({phase}: {words}' in done.stdout


def test_a_supervisor_that_is_killed_while_it_stops_the_run(runs):
    """stop goes on alone, within its time."""
    runs.start(steps=10000, every=5000, saving=2.0)
    runs.until_training()
    stopping = subprocess.Popen([*TOOL, 'stop', 'run'], cwd=runs.folder, stdout=subprocess.PIPE, text=True)
    runs.until(state.STOPPING)
    kill_supervisor(runs)
    assert stopping.communicate(timeout=30)[0].startswith('stopped: stopped; the newest checkpoint is') and stopping.returncode == 0
    assert runs.weight()['step'] > 0 and processes.of_run(runs.tokens[0]) == []


def test_stop_now_without_a_supervisor(runs):
    runs.start(steps=10000, every=5)
    runs.until_training()
    assert wait_until(lambda: any((runs.folder / 'run').glob('iter_*.pth')), 60)
    kill_supervisor(runs)
    done = runs.tool('stop', 'run', '--now')
    assert done.returncode == 0 and done.stdout.startswith('stopped: stopped without a last checkpoint; the newest checkpoint is'), done
    assert processes.of_run(runs.tokens[0]) == []


def test_an_attempt_that_cannot_be_started_is_tried_again(tmp_path, monkeypatch):
    """A full disk at the moment of a restart must not end the supervisor."""
    from mmdet3d_ext.launching import launchers, supervisor
    run_dir = str(tmp_path / 'run')
    os.close(state.take_lock(run_dir))
    description = state.State(run_dir, 'token-of-nobody', socket.gethostname(), 1, 'python', 'test', [sys.executable, '-c', 'pass'], {}, 3)
    written, tries = launchers.write_plan, []

    def full(*arguments, **keywords):
        tries.append(1)
        if len(tries) < 3:
            raise OSError(28, 'No space left on device', f'{run_dir}/launch/attempt_001/plan.json')
        return written(*arguments, **keywords)

    monkeypatch.setattr(supervisor, 'write_plan', full)
    monkeypatch.setattr(supervisor.Supervisor, '_catch_signals', lambda self: None)
    watcher = supervisor.Supervisor(description, launchers.Choice('python', ''), supervisor.ExitCodes(stopped=75), first_pause=0.05)
    assert watcher.run() == 0 and len(description.history) == 3 and description.phase == state.FINISHED
    assert 'python could not be started' in description.last_crash and 'No space left on device' in description.last_crash


def test_what_a_dead_rank_leaves_behind_is_cleared_away(runs, fault_record):
    """A process in a session of its own, as loader workers of a killed rank may be."""
    runs.start(faults=[{'rank': 1, 'attempt': 1, 'step': 12, 'do': 'orphan'}])
    found = runs.until(state.FINISHED)
    assert found.restarts == 1 and processes.of_run(found.token) == []
    assert 'still there after it ended: killed' in (runs.folder / 'run' / 'launch' / 'launch.log').read_text()
    fault_record('a killed rank leaves processes behind', 'they are found by their environment and killed before the restart')


def test_a_run_that_does_not_answer_is_left_alone_until_told_otherwise(runs, fault_record):
    runs.start(steps=10000, faults=[{'rank': rank, 'step': 2, 'do': 'deaf'} for rank in (0, 1)])
    runs.until_training()
    time.sleep(0.5)
    done = runs.tool('stop', 'run', '--timeout', '2')
    assert done.returncode == 1 and 'left alone' in done.stderr and 'stop --now' in done.stderr
    assert runs.state().phase == state.STOPPING
    done = runs.tool('stop', 'run', '--now')
    assert done.returncode == 0 and processes.of_run(runs.tokens[0]) == []
    fault_record('a run that hangs is to be stopped', 'stop says that it does not answer; stop --now ends its processes and no others')


@pytest.mark.parametrize('when', ['training', 'importing'])
def test_a_signal_from_outside_stops_the_run_without_a_restart(runs, fault_record, when):
    """Slurm's preemption reaches the ranks, not the supervisor."""
    runs.start(steps=10000, every=5000, importing=20.0 if when == 'importing' else 0.0)
    if when == 'training':
        runs.until_training()
    for record in state.records(state.attempt_dir(str(runs.folder / 'run'), 1), 2).values():
        os.kill(record['pid'], signal.SIGTERM)
    found = runs.until(state.STOPPED)
    assert found.restarts == 0 and 'stopped by a signal to a rank' in found.message
    if when == 'training':
        assert runs.weight()['step'] > 0
    else:
        assert 'without a last checkpoint; there is no checkpoint' in found.message
    fault_record(f'SIGTERM to the ranks of a supervised run (preemption) while {when}',
                 'they write a checkpoint; the run counts as stopped' if when == 'training' else 'the run counts as stopped')


def test_stop_during_the_pause_before_a_restart(runs):
    runs.start(words=['--pause', '30'], faults=[{'rank': 0, 'step': 12, 'do': 'kill'}])
    runs.until(state.WAITING)
    done = runs.tool('stop', 'run')
    assert done.returncode == 0 and 'stopped while waiting for a restart' in done.stdout


@pytest.mark.slow
def test_a_short_soak_of_the_real_trainer(tmp_path, fault_record):
    """Random strikes at two ranks for some seconds; tests/faults/soak.py does it for as long as one likes."""
    done = subprocess.run([sys.executable, str(REPO / 'tests' / 'faults' / 'soak.py'), '--minutes', '0.3', '--seed', '1', '--out',
                           str(tmp_path / 'soak')], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / 'soak' / 'report.json').read_text())
    assert report['bitwise equal'] and sum(report['strikes'].values()) >= 1
    fault_record(f'soak of the real trainer: {", ".join(report["strikes"])}', 'restarted each time; at the end weights, averages and '
                 'optimizer are bitwise those of a run left alone')


def test_a_doubled_signal_is_one_also_after_what_it_broke_off(monkeypatch):
    """The second one of ``timeout`` may come when everything has been stopped already."""
    monkeypatch.setattr(processes, 'ECHO', 0.5)
    kept = []
    before = signal.signal(signal.SIGTERM, lambda *_: kept.append('the program\'s own'))
    try:
        with pytest.raises(KeyboardInterrupt), processes.interruptible():
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert not kept
        time.sleep(0.6)
        signal.raise_signal(signal.SIGTERM)
        assert kept == ['the program\'s own']
        with processes.interruptible():
            pass
        signal.raise_signal(signal.SIGTERM)
        assert len(kept) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_doubled_signal_does_not_change_how_a_program_ends():
    """Its exit code is what a caller goes by; the interpreter has taken its handlers away when the second signal comes."""
    program = """if True:
        import os, signal, sys
        sys.path.insert(0, 'tools')
        import _light
        _light.use_package()
        from mmdet3d_ext.launching.processes import interruptible
        class Late:
            def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):  # within the interpreter's end
                kill(pid, number)
        sys.late = Late()
        try:
            with interruptible():
                signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            sys.exit(75)
        """
    done = subprocess.run([sys.executable, '-c', program], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75, (done.returncode, done.stderr)
