"""The command lines of tools/train.py and tools/test.py: words, messages, exit codes."""
import argparse
import importlib.util
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from testing import REPO

sys.path.insert(0, str(REPO / 'tests' / 'engine'))
from engine_toy import write_config  # noqa: E402

from mmdet3d_ext.engine import cli  # noqa: E402
from mmdet3d_ext.engine.checkpoint import read_checkpoint  # noqa: E402


def load(name):
    spec = importlib.util.spec_from_file_location(f'tool_{name}', REPO / 'tools' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRAIN, TEST = load('train'), load('test')


@pytest.mark.parametrize('words, expected, overrides', [
    (['c.yaml'], dict(config='c.yaml', run_dir=None, validate=True), []),
    (['c.yaml', '--run-dir', 'd', '--max_epochs', '1'], dict(run_dir='d'), ['--max_epochs', '1']),
    (['c.yaml', '--work-dir=d', '--optimizer.lr=1e-4', '--no-validate'], dict(run_dir='d', validate=False),
     ['--optimizer.lr=1e-4']),
    # a list that lost its quotes, a negative number, an own option after it
    (['c.yaml', '--voxel_size', '[0.1,', '-0.1,', '0.2]', '--seed', '3'], dict(seed=3),
     ['--voxel_size', '[0.1,', '-0.1,', '0.2]']),
    (['c.yaml', '--cfg-options', 'a.b=1', 'c=2', '--resume-from', 'auto'], dict(resume_from='auto'), ['a.b=1', 'c=2']),
    (['c.yaml', '--amp.dtype', 'bf16', '--amp'], dict(amp=True), ['--amp.dtype', 'bf16']),
    (['c.yaml', '--load_from', 'a.pth', '--local-rank=1', '--launcher', 'pytorch'],
     dict(load_from='a.pth', launcher='pytorch'), []),
    # without dashes: an override, unless it is an option's value
    (['c.yaml', 'max_epochs=3', '--run-dir', 'a=b', 'optimizer.lr=1e-4', '--amp', 'x=[1,', '2]'], dict(run_dir='a=b', amp=True),
     ['max_epochs=3', 'optimizer.lr=1e-4', 'x=[1,', '2]']),
])
def test_words_of_train(words, expected, overrides):
    arguments, rest = cli.split(TRAIN.parser(), words)
    assert rest == overrides
    for name, value in expected.items():
        assert getattr(arguments, name) == value


def test_a_file_with_an_equals_sign_is_no_override(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'lr=3.yaml').touch()
    arguments, rest = cli.split(TRAIN.parser(), ['lr=3.yaml', 'seed=3'])
    assert arguments.config == 'lr=3.yaml' and rest == ['seed=3']


def test_words_of_test():
    words = ['c.yaml', 'x.pth', '--eval', 'bbox', 'map', '--out', 'r.pkl', '--voxel_size', '[1]']
    arguments, rest = cli.split(TEST.parser(), words)
    found = (arguments.config, arguments.checkpoint, arguments.eval, arguments.out)
    assert found == ('c.yaml', 'x.pth', ['bbox', 'map'], 'r.pkl')
    assert rest == ['--voxel_size', '[1]'] and isinstance(arguments, argparse.Namespace)


@pytest.mark.parametrize('tool', [TRAIN, TEST])
def test_help_shows_examples(tool, capsys):
    with pytest.raises(SystemExit) as ended:
        tool.main(['--help'])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert 'torchpack dist-run -np 8 python tools/' in text and '--any.key value' in text and 'Exit codes' in text


@pytest.mark.parametrize('words, message', [
    (['--optimzer.lr', '1'], "unknown key 'optimzer' at the top; did you mean 'optimizer'"),
    (['--load_from', 'nope.pth'], 'checkpoint nope.pth does not exist'),
    (['--resume_from', 'nope.pth'], 'checkpoint nope.pth does not exist'),
    (['--amp.dtype', 'fp8'], "amp.dtype': 'fp8' is not one of fp16, bf16, fp32"),
])
def test_mistakes_are_one_clean_line(tmp_path, capsys, words, message):
    code = TRAIN.main([write_config(tmp_path), '--run-dir', str(tmp_path / 'run'), *words])
    shown = capsys.readouterr().err
    assert code == 2 and 'Traceback' not in shown
    (line,) = [text for text in shown.splitlines() if text.startswith('error: ')]
    assert message in line


def test_a_missing_configuration_file(capsys):
    assert TRAIN.main(['nope.yaml']) == 2
    assert 'nope.yaml' in capsys.readouterr().err.splitlines()[-1]


def test_train_then_test(tmp_path, capsys):
    config, run = write_config(tmp_path, ema={'decay': 0.5}), tmp_path / 'run'
    assert TRAIN.main([config, '--run-dir', str(run), '--max_epochs', '1', '--launcher', 'pytorch']) == 0
    assert '--launcher pytorch is not needed' in capsys.readouterr().err
    trained = json.loads((run / 'metrics.json').read_text())
    latest = str(run / 'latest.pth')
    scores = {}
    for weights in ('auto', 'ema', 'raw'):
        assert TEST.main([config, latest, '--weights', weights, '--out-dir', str(tmp_path / weights)]) == 0
        scores[weights] = json.loads((tmp_path / weights / 'metrics.json').read_text())
    shown = capsys.readouterr()
    assert f'metrics: {tmp_path / "raw" / "metrics.json"}' in shown.out and 'toy/mse' in shown.out
    assert scores['auto'] == scores['ema'] == pytest.approx(trained)  # the weights that training evaluated
    assert scores['raw']['toy/mse'] != scores['ema']['toy/mse']
    assert TEST.main([config, latest]) == 0 and (run / 'eval_latest' / 'metrics.json').exists()
    assert TEST.main([config, latest, '--fuse-conv-bn', '--out-dir', str(tmp_path / 'folded')]) == 0  # this model has no norms
    assert json.loads((tmp_path / 'folded' / 'metrics.json').read_text()) == pytest.approx(trained)
    assert TEST.main([config, 'none', '--out-dir', str(tmp_path / 'none')]) == 0
    untrained = json.loads((tmp_path / 'none' / 'metrics.json').read_text())
    assert untrained['toy/count'] == 5 and untrained['toy/mse'] != scores['raw']['toy/mse']


@pytest.mark.parametrize('words, message', [
    (['--eval', 'box'], "--eval: unknown 'box'; it takes bbox"), (['--out', 'r.txt'], '--out must end with .pkl'),
    (['--eval', 'map'], "nothing was evaluated: the model's output holds nothing for --eval map"),
    (['--model.width', '9'], 'is of another model: 2 of its 6 tensors'),
    (['--allow_tf32', 'yes'], "key allow_tf32 must be true, false or null, got 'yes'"),
])
def test_mistakes_in_testing(tmp_path, capsys, words, message):
    config = write_config(tmp_path)
    from engine_toy import EngineToyModel
    torch.save({'state_dict': EngineToyModel().state_dict()}, tmp_path / 'c.pth')
    assert TEST.main([config, str(tmp_path / 'c.pth'), '--out-dir', str(tmp_path / 'e'), *words]) == 2
    shown = capsys.readouterr().err
    assert message in shown and 'Traceback' not in shown


def test_a_checkpoint_of_another_model_or_half_a_file(tmp_path, capsys):
    config = write_config(tmp_path)
    torch.save({'state_dict': {f'blocks.{i}.weight': torch.ones(3) for i in range(9)}}, tmp_path / 'other.pth')
    (tmp_path / 'half.pth').write_bytes((tmp_path / 'other.pth').read_bytes()[:300])
    torch.save({'state_dict': {}, 'meta': argparse.Namespace(a=1)}, tmp_path / 'namespace.pth')
    for name, message in (('other', 'is of another model: 0 of its 9 tensors'), ('half', 'is not a readable checkpoint'),
                          ('namespace', 'argparse.Namespace')):
        assert TEST.main([config, str(tmp_path / f'{name}.pth'), '--out-dir', str(tmp_path / 'e')]) == 2
        assert message in capsys.readouterr().err
        assert TRAIN.main([config, '--load_from', str(tmp_path / f'{name}.pth'), '--run-dir', str(tmp_path / 'run')]) == 2
        assert message in capsys.readouterr().err


def test_exit_code_says_that_the_last_checkpoint_is_missing(tmp_path, monkeypatch):
    from mmdet3d_ext.engine import runner
    from mmdet3d_ext.engine.checkpoint import CheckpointWriteError

    def full(content, path):
        raise CheckpointWriteError(f'cannot write {path}: no space left')

    monkeypatch.setattr(runner.files, 'write_atomic', full)
    assert TRAIN.main([write_config(tmp_path), '--run-dir', str(tmp_path / 'run'), '--max_epochs', '1']) == 3
    assert not [name for name in os.listdir(tmp_path / 'run') if name.endswith('.pth')]


def test_the_scripts_run_from_any_folder_without_installation(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    done = subprocess.run([sys.executable, str(REPO / 'tools' / 'train.py'), 'nope.yaml'], cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and 'error: ' in done.stderr.splitlines()[-1] and 'Traceback' not in done.stderr


def test_detections_are_written_for_other_programs(tmp_path):
    """``--out F.pkl`` through the collector, without a model: boxes per sample, maps never."""
    from mmdet3d.core.bbox import LiDARInstance3DBoxes

    from mmdet3d_ext.engine.evaluate import ResultCollector
    from mmdet3d_ext.engine.test import _write_results
    collector = ResultCollector()
    output = {'boxes_3d': LiDARInstance3DBoxes(torch.rand(2, 9), box_dim=9), 'scores_3d': torch.rand(2),
              'labels_3d': torch.tensor([0, 1]), 'masks_bev': torch.rand(1, 4, 4)}
    assert collector.update(output, {'metas': [{'token': 'a'}]}, 0) and not collector.update({'masks_bev': 1}, {}, 0)
    collector.compute()
    import logging
    _write_results(str(tmp_path / 'r.pkl'), collector, str(tmp_path), logging.getLogger('x'))
    (found,) = pickle.loads((tmp_path / 'r.pkl').read_bytes())
    assert found['token'] == 'a' and found['boxes_3d'].shape == (2, 9) and 'masks_bev' not in found


def test_checkpoints_of_the_run_can_be_read_safely(tmp_path):
    assert TRAIN.main([write_config(tmp_path), '--run-dir', str(tmp_path / 'run'), '--max_epochs', '1', '--no-validate']) == 0
    content = read_checkpoint(str(tmp_path / 'run' / 'latest.pth'))
    assert content['meta']['epoch'] == 1 and not (tmp_path / 'run' / 'metrics').exists()
