"""A batch that was kept gives the same step again, with everything that a real batch holds."""
import sys

import numpy as np
import pytest
import torch
from mmdet3d.core.bbox import Box3DMode, LiDARInstance3DBoxes
from mmdet3d.core.points import LiDARPoints
from testing import REPO

sys.path.insert(0, str(REPO / 'tests' / 'engine'))
from engine_toy import EngineToyDataset, EngineToyModel, write_config  # noqa: E402
from mmcv.parallel import collate  # noqa: E402

from mmdet3d_ext.config import load_config  # noqa: E402
from mmdet3d_ext.datasets.epoch_state import random_state, seed_process, set_random_state  # noqa: E402
from mmdet3d_ext.engine.checkpoint import CheckpointError  # noqa: E402
from mmdet3d_ext.engine.diagnosis import Finding, trace  # noqa: E402
from mmdet3d_ext.engine.parallel import StepModel, unpack_batch  # noqa: E402
from mmdet3d_ext.engine.replay import decode, encode, read_batch, replay, report, write_batch  # noqa: E402

CPU = torch.device('cpu')


def test_everything_in_a_batch_survives(tmp_path):
    boxes = LiDARInstance3DBoxes(torch.randn(3, 9), box_dim=9)
    points = LiDARPoints(torch.randn(4, 5), points_dim=5, attribute_dims={'intensity': 3})
    value = {'t': torch.arange(3, dtype=torch.int16), 'list': [boxes, points], 'tuple': (1, 2.5, None, True, 'x', b'y'),
             'array': np.arange(6, dtype='<u2').reshape(2, 3), 'empty': np.zeros((0, 3), np.float32), 'scalar': np.float32(2.5),
             'mode': Box3DMode.LIDAR, 'class': LiDARInstance3DBoxes, 'names': np.array(['a', 'b']), 'nested': {3: {'k': [[]]}},
             'half': torch.ones(2, dtype=torch.bfloat16)}
    torch.save(encode(value), tmp_path / 'x.pth')
    back = decode(torch.load(tmp_path / 'x.pth', weights_only=True))
    assert list(back) == list(value) and torch.equal(back['t'], value['t']) and back['t'].dtype == torch.int16
    assert type(back['list'][0]) is LiDARInstance3DBoxes and torch.equal(back['list'][0].tensor, boxes.tensor)
    assert type(back['list'][1]) is LiDARPoints and back['list'][1].attribute_dims == {'intensity': 3}
    assert back['tuple'] == value['tuple'] and back['scalar'] == 2.5 and back['nested'] == value['nested']
    for key in ('array', 'empty'):
        assert np.array_equal(back[key], value[key]) and back[key].dtype == value[key].dtype
    back['array'][0, 0] = 7  # writable
    assert back['mode'] is Box3DMode.LIDAR and back['class'] is LiDARInstance3DBoxes and torch.equal(back['half'], value['half'])
    assert back['names'] == repr(value['names'])


def test_a_forged_name_is_refused():
    with pytest.raises(CheckpointError, match="holds a 'system', which is not known"):
        decode({'__kind__': 'class', 'name': 'system'})
    with pytest.raises(CheckpointError, match="unknown kind 'call'"):
        decode({'__kind__': 'call'})


@pytest.fixture
def kept(tmp_path):
    """A step of the toy model with dropout on a batch that holds NaN."""
    config = load_config(write_config(tmp_path, model={'type': 'EngineToyModel', 'dropout': 0.5}))
    data = EngineToyDataset(8, poison=[5])
    batch = collate([data[i] for i in (2, 5)], 2)
    step = StepModel(EngineToyModel(dropout=0.5), CPU)
    seed_process(11)
    random = random_state()
    finding = trace(step.module, lambda: step.losses_alone(batch), unpack_batch(batch, CPU), ['token-2', 'token-5'])
    path = str(tmp_path / 'bad_batches' / 'one.pth')
    write_batch(path, step, batch, random, {'config': config.dump()}, finding, 'epoch 1, iteration 3', ['token-2', 'token-5'])
    return path, step, batch, random


def test_replay_gives_the_same_step(kept):
    path, step, batch, random = kept
    content, finding = replay(path, CPU)
    assert finding.inputs == ['value of sample token-5 (4 values)'] == list(finding.inputs)
    assert set(finding.bad_losses) == {'loss/object/l2', 'loss/map/drivable_area/focal'}
    text = report(content, finding, 'float32')
    assert 'samples token-2, token-5' in text and 'value of sample token-5' in text and text.count('nan') >= 4


def test_replay_is_exact_where_it_is_finite(kept):
    path, step, batch, random = kept
    good = collate([EngineToyDataset(8)[i] for i in (2, 3)], 2)
    set_random_state(random)
    finding = trace(step.module, lambda: step.losses_alone(good), {}, ())
    write_batch(path, step, good, random, {'config': read_batch(path)['config']}, finding, 'here', ['token-2', 'token-3'])
    torch.manual_seed(99)
    content, again = replay(path, CPU)
    assert again.losses == content['losses'] == finding.losses and not again.found  # dropout included


def test_the_tool(kept, tmp_path, capsys):
    from test_train import run  # noqa: F401  (the toys are registered)
    sys.path.insert(0, str(REPO / 'tools'))
    import importlib.util
    spec = importlib.util.spec_from_file_location('replay_tool', REPO / 'tools' / 'replay.py')
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.main([kept[0], '--device', 'cpu']) == 4
    assert 'the batch itself holds non-finite values' in capsys.readouterr().out
    assert tool.main([kept[0], '--device', 'cpu', '--precision', 'bfloat16']) == 4
    assert 'now, in bfloat16' in capsys.readouterr().out
    other = tmp_path / 'other.pth'
    torch.save({'state_dict': {}}, other)
    assert tool.main([str(other)]) == 2 and 'is no batch that training kept' in capsys.readouterr().err
    assert tool.main([str(tmp_path / 'none.pth')]) == 2


def test_weights_of_another_model_are_refused(kept):
    with pytest.raises(CheckpointError, match='its weights do not fit the model'):
        replay(kept[0], CPU, model=EngineToyModel(width=8, stray=True))
    with pytest.raises(ValueError, match='precision must be one of'):
        replay(kept[0], CPU, precision='fp8')
    assert Finding().losses == {}
