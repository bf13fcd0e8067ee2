"""tools/check_config.py: table, exit codes, JSON; and the same check before training begins."""
import importlib.util
import json
import subprocess
import sys

import pytest
from testing import REPO

from mmdet3d_ext.checks import check_config
from mmdet3d_ext.config import load_config
from mmdet3d_ext.engine import config_check
from mmdet3d_ext.engine.launch import UserError

STAGE1, TINY = str(REPO / 'configs/nuscenes/multitask/stage1_600.yaml'), str(REPO / 'configs/synthetic/multitask_tiny.yaml')
WRONG = ['--model.heads.map.grid_transform.output_scope', '[[-50, 50, 0.25], [-50, 50, 0.25]]']

spec = importlib.util.spec_from_file_location('check_config_tool', REPO / 'tools' / 'check_config.py')
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def test_the_table_and_an_accepted_configuration(capsys):
    assert tool.main([STAGE1, '--gpus', '4']) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].split() == ['stage', 'range', 'x', '(/', 'y),', 'm', 'step,', 'm', 'cells', 'channels', 'key', 'from']
    (camera,) = [line for line in lines if line.startswith('map: camera grid')]
    assert '[-54, 54]' in camera and '0.2 ' in camera and '540 x 540' in camera and 'bev.map.cells' in camera and 'stage1_600.yaml' in camera
    assert 'resampled to 270x270' in shown and lines[-1].endswith('stage1_600.yaml: accepted: 0 error(s), 0 warning(s)')


def test_a_refused_configuration(capsys):
    assert tool.main([STAGE1, *WRONG]) == 1
    shown = capsys.readouterr().out
    assert "error: command line: key 'model.heads.map.grid_transform.output_scope'" in shown and '600x600 cells' in shown
    assert '--model.heads.map.grid_transform.output_scope "[[-50, 50, 0.166666666667], [-50, 50, 0.166666666667]]"' in shown
    assert shown.splitlines()[-1].endswith('refused: 1 error(s), 0 warning(s)')


def test_json(capsys):
    assert tool.main([STAGE1, *WRONG, '--json']) == 1
    content = json.loads(capsys.readouterr().out)
    assert content['accepted'] is False and [one['key'] for one in content['errors']] == [WRONG[0][2:]]
    assert content['errors'][0]['write'][WRONG[0][2:]][0] == pytest.approx([-50, 50, 1 / 6])
    assert {row['stage']: row['cells'] for row in content['chain']}['map: fused trunk'] == [270, 270]
    assert tool.main([STAGE1, '--json', '--optimizer.lrr', '1']) == 2
    content = json.loads(capsys.readouterr().out)
    assert not content['accepted'] and "did you mean 'optimizer.lr'" in content['errors'][0]['problem']


def test_a_file_that_does_not_load(capsys, tmp_path):
    assert tool.main([str(tmp_path / 'nowhere.yaml')]) == 2
    assert 'nowhere.yaml' in capsys.readouterr().out


def test_what_cannot_be_loaded_is_a_mistake_in_the_command(capsys):
    for words in (['--optimizer.lrr', '1'], ['--object_classes', '[car, truck'], ['--model.heads.map.aspp_chanels', '8']):
        assert tool.main([TINY, *words]) == 2
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].startswith('error: command line: ') and shown[-1].endswith('multitask_tiny.yaml: refused')
    for words in (['--optimizer.lr', 'abc'], ['--object_classes', '[car, truk]']):
        assert tool.main([TINY, *words]) == 1, 'it is loaded, and refused'
    assert '2 it cannot be loaded' in tool.__doc__


def test_a_notice_of_the_loader_is_shown_once_and_counted(tmp_path):
    words = ['--total_epochs', '10', '--data.test.test_mode', 'false', '--allow-new']
    found = subprocess.run([sys.executable, str(REPO / 'tools/check_config.py'), TINY, *words], cwd=tmp_path, capture_output=True, text=True,
                           timeout=120, env={'PATH': '/usr/bin:/bin', 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1'})
    lines = found.stdout.splitlines()
    assert found.returncode == 0 and 'UserWarning' not in found.stderr and 'sys.exit' not in found.stderr, found.stderr
    assert lines.count('warning: command line: --total_epochs is called --max_epochs here; taken as such') == 1
    assert len([line for line in lines if line.startswith("warning: command line: key 'data.test.test_mode': is taken as true")]) == 1
    assert lines[-1].endswith('accepted: 0 error(s), 2 warning(s)')


def test_notices_have_their_key_in_json(capsys):
    assert tool.main([TINY, '--data.test.test_mode', 'false', '--json']) == 0
    (warning,) = json.loads(capsys.readouterr().out)['warnings']
    assert warning['key'] == 'data.test.test_mode' and warning['place'] == "command line: key 'data.test.test_mode'"


@pytest.mark.parametrize('words', [['--gpus', '0'], ['--gpus', '-4'], ['--memory', 'nan'], ['--memory', '0'], ['--memory', 'much']])
def test_numbers_that_are_none(words, capsys):
    with pytest.raises(SystemExit) as ended:
        tool.main([TINY, *words])
    assert ended.value.code == 2 and f'got {words[1]!r}' in capsys.readouterr().err


def test_a_batch_against_the_recipe(capsys):
    assert tool.main([str(REPO / 'configs/nuscenes/multitask/phase3_400.yaml'), '--data.samples_per_gpu', '1', '--gpus', '1']) == 1
    assert "key 'optimizer.lr'" in capsys.readouterr().out


def test_from_another_folder_without_a_gpu(tmp_path):
    found = subprocess.run([sys.executable, str(REPO / 'tools/check_config.py'), TINY], cwd=tmp_path, capture_output=True, text=True,
                           timeout=120, env={'PATH': '/usr/bin:/bin', 'CUDA_VISIBLE_DEVICES': ''})
    assert found.returncode == 0, found.stderr
    assert 'labels (val)' in found.stdout and 'accepted' in found.stdout


# ---- before training ---------------------------------------------------------------------------------------------------------
def test_training_is_refused_with_every_error_in_one_message():
    cfg = load_config(STAGE1, [*WRONG, '--runner.max_epochs', '20'])
    with pytest.raises(UserError) as caught:
        config_check.refuse_inconsistent(cfg, 4)
    text = str(caught.value)
    assert len(text.splitlines()) == 2 and 'output_scope' in text and 'runner.max_epochs' in text
    assert not config_check.refuse_inconsistent(load_config(STAGE1), 4).findings


def test_a_wrong_type_is_known_before_the_data_are_looked_for(tmp_path, capsys):
    from mmdet3d_ext.engine import train
    for words, piece in ((['--model.encoders.camera.backbone.type', 'VoVNet'], "model type 'VoVNet'"),
                         (['--optimizer.type', 'AdamWW'], 'AdamW'), (['--train_pipeline.3.type', 'ImageAg3D'], 'ImageAug3D'),
                         (['--load_augmented', 'mvp'], 'load_augmented')):
        cfg = load_config(TINY, ['--dataset_root', f'{tmp_path}/nowhere/', *words])
        with pytest.raises(UserError, match=piece) as caught:
            train.train(cfg, train.Options(run_dir=str(tmp_path / 'run')))
        assert 'nowhere' not in str(caught.value) and not (tmp_path / 'run').exists()
        assert tool.main([TINY, *words]) == 1
        assert f'error: {caught.value}' in capsys.readouterr().out.splitlines(), 'the line of training'


# ---- what needs more than the configuration -----------------------------------------------------------------------------------
def test_memory_that_a_card_does_not_have():
    cfg = load_config(TINY)
    report = check_config(cfg)
    config_check.add_memory(report, cfg, 80.0)
    assert not report.errors and any(note.startswith('peak ') for note in report.notes)
    config_check.add_memory(report, cfg, 0.01)
    (error,) = report.errors
    assert error.key == 'data.samples_per_gpu' and 'more GPUs do not change that' in error.problem
    assert error.write == {'data.samples_per_gpu': 1}


def test_the_environments_problems_have_a_key_each(monkeypatch):
    """Four of the eight problems on record: a library's missing link, library paths, bytecode, shared memory. Memory stands above, the other
    three (shapes of output and labels, interpolation of labels, epochs of a copied file) in tests/checks/test_broken.py."""
    from mmdet3d_ext import doctor
    from mmdet3d_ext.doctor import Finding
    found = [Finding('mmcv library', 'problem', 'libtorch_cuda_cu.so is missing', 'build mmcv for this torch'),
             Finding('LD_LIBRARY_PATH', 'problem', 'libcudart is not found', 'export it'),
             Finding('shared memory', 'problem', '/dev/shm cannot be written', 'docker run --shm-size=16g'),
             Finding('stale bytecode', 'warning', 'a cache is never compared', 'delete it'), Finding('python', 'ok', '3.11')]
    monkeypatch.setattr(doctor, 'examine', lambda options, groups: iter(found))
    report = check_config(load_config(TINY))
    config_check.add_environment(report, TINY, [])
    assert [one.key for one in report.errors] == ['environment.mmcv library', 'environment.LD_LIBRARY_PATH', 'environment.shared memory']
    assert [one.key for one in report.warnings] == ['environment.stale bytecode'] and 'delete it' in str(report.warnings[0])
