"""``load_from`` as users write it: one file, several, a list in the configuration; the options of the command line."""
import importlib.util
import sys

import pytest
import torch
from testing import REPO

sys.path.insert(0, str(REPO / 'tests' / 'engine'))
from engine_toy import EngineToyModel, write_config  # noqa: E402

from mmdet3d_ext.engine import cli  # noqa: E402
from mmdet3d_ext.engine.checkpoint import read_checkpoint  # noqa: E402

STILL = ('--max_epochs', '1', '--no-validate', '--optimizer.lr', '0.0', '--optimizer.weight_decay', '0.0')


def tool(name):
    spec = importlib.util.spec_from_file_location(f'load_from_{name}', REPO / 'tools' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def single_task(path, value, task):
    """The file of a model that has one task only."""
    state = {name: torch.full_like(tensor, value) for name, tensor in EngineToyModel().state_dict().items()
             if name.startswith(('trunk.', f'heads.{task}.'))}
    torch.save({'state_dict': state}, path)
    return str(path)


@pytest.mark.parametrize('form', ['commas', 'brackets', 'list'])
def test_several_files_seed_a_model(tmp_path, form):
    paths = [single_task(tmp_path / 'det.pth', 2.0, 'object'), single_task(tmp_path / 'seg.pth', 3.0, 'map')]
    config = write_config(tmp_path, **({'load_from': paths} if form == 'list' else {}))
    words = {'commas': ['--load_from', ','.join(paths)], 'brackets': ['--load_from', f'[{", ".join(paths)}]'], 'list': []}[form]
    run = tmp_path / 'run'
    assert tool('train').main([config, '--run-dir', str(run), *STILL, *words]) == 0
    state = read_checkpoint(str(run / 'latest.pth'))['state_dict']
    assert {name: float(tensor.mean()) for name, tensor in state.items()} == {
        'trunk.0.weight': 2, 'trunk.0.bias': 2, 'heads.object.weight': 2, 'heads.object.bias': 2, 'heads.map.weight': 3,
        'heads.map.bias': 3}
    text = next(run.glob('*.log')).read_text()
    assert 'new, not in the file: heads.map (2 tensors)' in text and '2 files gave 6 tensors, 0 keep their initial values' in text


def test_the_second_file_is_checked_too(tmp_path, capsys):
    first = single_task(tmp_path / 'det.pth', 2.0, 'object')
    torch.save({'state_dict': {'other.weight': torch.ones(3)}}, tmp_path / 'other.pth')
    code = tool('train').main([write_config(tmp_path), '--run-dir', str(tmp_path / 'run'), *STILL, '--load_from',
                               f'{first},{tmp_path}/other.pth'])
    shown = capsys.readouterr().err
    assert code == 2 and 'other.pth is of another model: 0 of its 1 tensors' in shown and 'Traceback' not in shown


@pytest.mark.parametrize('name, words', [('train', ['c.yaml']), ('test', ['c.yaml', 'x.pth']), ('visualize', ['c.yaml'])])
def test_the_origin_is_an_option_of_every_tool(name, words, capsys):
    from importlib import import_module
    module = tool(name)
    arguments, rest = cli.split(module.parser(), [*words, '--checkpoint-origin', 'reference'])
    assert arguments.checkpoint_origin == 'reference' and rest == []
    assert 'checkpoint_origin' in import_module(f'mmdet3d_ext.engine.{name}').Options.__dataclass_fields__
    with pytest.raises(SystemExit):
        cli.split(module.parser(), [*words, '--checkpoint-origin', 'theirs'])
    assert 'invalid choice' in capsys.readouterr().err
