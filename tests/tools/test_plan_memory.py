"""tools/plan_memory.py from the command line."""
import importlib.util
import json
import subprocess
import sys

import pytest
from testing import REPO

spec = importlib.util.spec_from_file_location('plan_memory', REPO / 'tools' / 'plan_memory.py')
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)
TINY = 'configs/synthetic/multitask_tiny.yaml'


def test_a_plan_and_its_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(REPO)
    out = tmp_path / 'plan.json'
    assert tool.main([TINY, '--batch', '1', '--precision', 'fp16', '--points', '2000', '--gpus', '8', '--no-switches', '--json', str(out),
                      '--model.checkpoint', '[decoder]']) == 0
    text = capsys.readouterr().out
    assert 'peak' in text and '1 sample(s) per GPU in fp16' in text and 'activations by part' in text
    assert 'more GPUs do not lower the memory per GPU' in text
    assert '141 GB' in text and 'up to' in text
    content = json.loads(out.read_text())
    assert content['overrides'] == ['--model.checkpoint', '[decoder]'] and content['switches'] == []
    assert content['plan']['gpus'] == 8 and content['plan']['kinds']['buckets'] > 0
    assert sum(content['plan']['kinds'].values()) == pytest.approx(content['plan']['peak_mib'], abs=1)


def test_mistakes_are_one_message(capsys, monkeypatch):
    monkeypatch.chdir(REPO)
    assert tool.main([TINY, '--points', '2000', '--model.heads.map.in_channels', '3', '--no-switches']) == 2
    error = capsys.readouterr().err
    assert "key 'model.heads.map.in_channels': is 3, the decoder gives" in error and 'Traceback' not in error
    assert tool.main([TINY, '--model.checkpoint', '[decoder.nack]', '--no-switches']) == 2
    assert "there is no part named 'decoder.nack'" in capsys.readouterr().err


@pytest.mark.parametrize('words, said', [
    (['--batch', '0'], "must be a whole number >= 1, got '0'"), (['--points', '-5'], "must be a whole number >= 1, got '-5'"),
    (['--gpus', 'two'], "must be a whole number >= 1, got 'two'"), (['--voxels', '1.5'], "must be a whole number >= 1, got '1.5'")])
def test_numbers_of_things_are_at_least_one(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        tool.main([TINY, *words])
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize('words, said', [
    (['--data.samples_per_gpu', 'null'], "key 'data.samples_per_gpu'"), (['--optimizer.lr', 'null'], "key 'optimizer.lr'"),
    (['--json', 'nowhere/plan.json'], '--json nowhere/plan.json: its folder does not exist')])
def test_what_cannot_be_planned_is_one_message(words, said, capsys, monkeypatch):
    monkeypatch.chdir(REPO)
    assert tool.main([TINY, '--points', '2000', '--no-switches', *words]) == 2
    error = capsys.readouterr().err
    assert said in error and 'Traceback' not in error


def test_help_names_what_users_expect():
    text = subprocess.run([sys.executable, str(REPO / 'tools' / 'plan_memory.py'), '--help'], capture_output=True, text=True,
                          check=True).stdout
    assert 'plan_memory.py configs/nuscenes/multitask/phase3_400.yaml' in text and 'More GPUs do not lower the memory' in text
