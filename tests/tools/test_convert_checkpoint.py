"""``tools/convert_checkpoint.py``: a whole file there and back, and what it refuses."""
import argparse
import importlib.util
import json
import os
import re

import pytest
import torch
from testing import REPO, shared_dir, weights_rule

from mmdet3d_ext.engine.checkpoint import read_checkpoint

NAME = 'nuscenes/det/transfusion/secfpn/lidar/pointpillars.yaml'
SCRIPT = REPO / 'tools' / 'convert_checkpoint.py'
spec = importlib.util.spec_from_file_location('convert_checkpoint', SCRIPT)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)
META = {'epoch': 20, 'iter': 100, 'mmcv_version': '1.4.0'}


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    """A whole model's file as the reference names and trains it, with weights by the fixtures' rule."""
    shapes = json.loads(shared_dir('parity', 'state_dicts.json').read_text())[NAME]
    rule = weights_rule().rule_tensor
    state = {f'module.{name}': rule(name, shape) for name, shape in shapes.items()}
    path = tmp_path_factory.mktemp('reference') / 'lidar.pth'
    torch.save({'meta': META, 'state_dict': state, 'optimizer': {'state': {}}}, path)
    return str(path)


def run(*words):
    return tool.main([str(word) for word in words])


def refused(capsys, *words):
    capsys.readouterr()
    assert run(*words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith('error: ') and 'Traceback' not in shown
    return shown


def test_a_whole_file_there_and_back(source, tmp_path, capsys):
    ours, back = tmp_path / 'new' / 'ours.pth', tmp_path / 'back.pth'
    assert run(source, ours, '--config', REPO / 'configs' / NAME) == 0
    shown = capsys.readouterr().out
    assert re.search(r'weights of .*ours.pth: \d+ tensors matched, 0 missing, 0 of another shape, 0 unexpected', shown)
    assert "4 tensors of box rows converted to the convention of 'ours' (it was written by mmcv 1.4.0" in shown
    assert f'written: {ours}' in shown and os.listdir(tmp_path / 'new') == ['ours.pth']
    content = read_checkpoint(str(ours))
    assert sorted(content) == ['meta', 'state_dict'] and content['meta']['epoch'] == 20
    assert content['meta']['box_convention'] == 'mmdet3d-1.0' and content['meta']['height_target'] == 'top'
    assert run(ours, back, '--to', 'reference') == 0
    state, again = (torch.load(path, weights_only=True)['state_dict'] for path in (source, back))
    assert [f'module.{name}' for name in again] == list(state)
    assert all(torch.equal(again[name], state[f'module.{name}']) for name in again)


def test_what_is_converted_already_is_refused(source, tmp_path, capsys):
    ours = tmp_path / 'ours.pth'
    assert run(source, ours) == 0
    assert "ours.pth is in the convention of 'ours' already (meta.box_convention is mmdet3d-1.0)" in \
        refused(capsys, ours, tmp_path / 'twice.pth')
    assert 'leave out --from reference' in refused(capsys, ours, tmp_path / 'twice.pth', '--from', 'reference')
    assert "is in the convention of 'reference' already (it was written by mmcv" in \
        refused(capsys, source, tmp_path / 'twice.pth', '--to', 'reference')
    assert not (tmp_path / 'twice.pth').exists()


def test_files_are_not_overwritten_by_accident(source, tmp_path, capsys):
    (tmp_path / 'there.pth').write_bytes(b'mine')
    assert 'there.pth exists already; --force' in refused(capsys, source, tmp_path / 'there.pth')
    assert 'exists already; give another name' in refused(capsys, source, source, '--force')
    assert (tmp_path / 'there.pth').read_bytes() == b'mine'
    assert run(source, tmp_path / 'there.pth', '--force') == 0
    assert read_checkpoint(str(tmp_path / 'there.pth'))['meta']['converted_from']['file'] == 'lidar.pth'


def test_bad_files_and_words(source, tmp_path, capsys):
    out = tmp_path / 'out.pth'
    assert 'does not exist' in refused(capsys, tmp_path / 'absent.pth', out)
    (tmp_path / 'cut.pth').write_bytes(open(source, 'rb').read()[:5000])
    assert 'truncated' in refused(capsys, tmp_path / 'cut.pth', out)
    torch.save({'state_dict': {'backbone.w': torch.ones(2)}}, tmp_path / 'other.pth')
    assert 'is no checkpoint of the BEVFusion reference or of this project: its tensors begin with backbone' in \
        refused(capsys, tmp_path / 'other.pth', out)
    torch.save({'state_dict': {}, 'optimizer': {}}, tmp_path / 'empty.pth')
    assert 'holds no weights' in refused(capsys, tmp_path / 'empty.pth', out)
    assert '--too is no option' in refused(capsys, source, out, '--too', 'ours')
    config = REPO / 'configs/nuscenes/seg/camera-bev256d2.yaml'
    assert 'is of another model' in refused(capsys, source, out, '--config', config)
    assert not out.exists()


def test_files_that_could_run_code(source, tmp_path, capsys):
    content = dict(torch.load(source, weights_only=True), meta={**META, 'opinion': argparse.Namespace(good=True)})
    torch.save(content, tmp_path / 'code.pth')
    shown = refused(capsys, tmp_path / 'code.pth', tmp_path / 'out.pth')
    assert 'holds more than weights' in shown and 'argparse.Namespace' in shown and '--allow-unsafe-checkpoint' in shown
    assert run(tmp_path / 'code.pth', tmp_path / 'out.pth', '--allow-unsafe-checkpoint') == 0
    assert 'no plain values were left out' in capsys.readouterr().out
    meta = read_checkpoint(str(tmp_path / 'out.pth'))['meta']
    assert 'opinion' not in meta and meta['epoch'] == 20


def test_averages_and_a_lightning_file(source, tmp_path, capsys):
    state = {name.replace('module.', ''): tensor for name, tensor in torch.load(source, weights_only=True)['state_dict'].items()}
    bias = 'heads.object.prediction_heads.0.heatmap.1.bias'
    both = {'pytorch-lightning_version': '2.1', 'state_dict': {f'model.{name}': tensor for name, tensor in state.items()},
            'ema_state_dict': {**state, bias: state[bias] + 1}}
    torch.save(both, tmp_path / 'both.pth')
    for words, shift in (((), 0), (('--weights', 'ema'), 1)):
        assert run(tmp_path / 'both.pth', tmp_path / 'out.pth', '--force', *words) == 0
        found = read_checkpoint(str(tmp_path / 'out.pth'))['state_dict']
        assert list(found) == list(state) and torch.equal(found[bias], state[bias] + shift)
    assert "these are the file's EMA weights" in capsys.readouterr().out


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as end:
        tool.parser().parse_args(['--help'])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and '--to reference' in shown and 'python tools/convert_checkpoint.py' in shown and '--from' in shown
