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
from mmdet3d_ext.registry import MODELS  # noqa: E402


@MODELS.register_module()
class ToyWithGrid(EngineToyModel):
    """The toy with the camera's grid constants."""

    def __init__(self, step=0.3):
        super().__init__()
        self.vtransform = torch.nn.Module()
        for name, values in (('dx', [step, step, 20.0]), ('bx', [-54 + step / 2] * 2 + [0.0]), ('nx', [round(108 / step)] * 2 + [1])):
            self.vtransform.register_buffer(name, torch.tensor(values))


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
    assert 'not in the file: heads.map (2 tensors)' in text
    assert 'INFO - weights of 2 files: 6 tensors matched, 0 missing, 0 of another shape, 0 unexpected' in text
    assert 'nothing loaded' not in text and not [line for line in text.split('\n') if 'WARNING - weights of' in line]


def test_the_second_file_is_checked_too(tmp_path, capsys):
    first = single_task(tmp_path / 'det.pth', 2.0, 'object')
    torch.save({'state_dict': {'other.weight': torch.ones(3)}}, tmp_path / 'other.pth')
    code = tool('train').main([write_config(tmp_path), '--run-dir', str(tmp_path / 'run'), *STILL, '--load_from',
                               f'{first},{tmp_path}/other.pth'])
    shown = capsys.readouterr().err
    assert code == 2 and 'other.pth is of another model: 0 of its 1 tensors' in shown and 'Traceback' not in shown


def test_a_new_stage_has_its_own_grid_and_a_run_keeps_its_grid(tmp_path, capsys):
    """0.3 m -> 0.2 m: as a new stage the configuration's 540 cells stay, resuming is refused."""
    train, first, second = tool('train'), tmp_path / 'first', tmp_path / 'second'
    old, new = (write_config(tmp_path, f'{step}.yaml', model={'type': 'ToyWithGrid', 'step': step}) for step in (0.3, 0.2))
    assert train.main([old, '--run-dir', str(first), *STILL]) == 0
    assert train.main([new, '--run-dir', str(second), *STILL, '--load_from', str(first / 'latest.pth')]) == 0
    state = read_checkpoint(str(second / 'latest.pth'))['state_dict']
    assert state['vtransform.nx'].tolist() == [540, 540, 1] and float(state['vtransform.dx'][0]) == pytest.approx(0.2)
    assert 'grid, not loaded: vtransform.dx, vtransform.bx, vtransform.nx' in next(second.glob('*.log')).read_text()
    capsys.readouterr()
    assert train.main([new, '--run-dir', str(first), '--resume_from', str(first / 'epoch_1.pth')]) == 2
    shown = capsys.readouterr().err
    assert 'epoch_1.pth was trained on another camera grid: the file has 360 x 360 cells of 0.3 m from (-54, -54) m, the ' \
           'configuration 540 x 540 cells of 0.2 m' in shown and '--load_from' in shown


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
