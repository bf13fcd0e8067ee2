"""Each task's pull on the shared trunk."""
import sys

import pytest
import torch
from testing import REPO

sys.path.insert(0, str(REPO / 'tests' / 'engine'))
from engine_toy import EngineToyDataset, EngineToyModel  # noqa: E402
from mmcv.parallel import collate  # noqa: E402

from mmdet3d_ext.engine.hooks.task_gradients import TaskGradientHook, task_losses, trunk_gradients  # noqa: E402
from mmdet3d_ext.engine.parallel import StepModel  # noqa: E402


def step():
    torch.manual_seed(0)
    model = EngineToyModel()
    data = EngineToyDataset(8)
    return model, StepModel(model, torch.device('cpu')).train_step(collate([data[i] for i in range(4)], 4))


def test_norms_and_cosine_are_those_of_separate_backward_passes():
    model, outputs = step()
    losses = task_losses(outputs['losses'])
    assert list(losses) == ['object', 'map'] and float(sum(losses.values())) == pytest.approx(float(outputs['loss'].detach()))
    found = trunk_gradients(model, losses)
    separate = {}
    for task in losses:
        model, outputs = step()
        task_losses(outputs['losses'])[task].backward()
        separate[task] = torch.cat([p.grad.flatten() for p in model.trunk.parameters()])
    for task, gradient in separate.items():
        assert found[f'stats/{task}/trunk_grad_norm'] == pytest.approx(float(gradient.norm()), rel=1e-5)
    cosine = torch.nn.functional.cosine_similarity(separate['object'], separate['map'], dim=0)
    assert found['stats/object-map/trunk_grad_cos'] == pytest.approx(float(cosine), abs=1e-6)
    assert len(found) == 3


def test_looking_changes_no_gradient():
    model, outputs = step()
    trunk_gradients(model, task_losses(outputs['losses']))
    outputs['loss'].backward()
    plain, outputs = step()
    outputs['loss'].backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters()))


def test_weight_zero_for_one_task_gives_exactly_the_other_tasks_gradient():
    model, outputs = step()
    losses = outputs['losses']
    (losses['loss/object/l2'] + 0.0 * losses['loss/map/drivable_area/focal']).backward()
    only, outputs = step()
    outputs['losses']['loss/object/l2'].backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.trunk.parameters(), only.trunk.parameters()))


def test_one_task_alone_shares_nothing():
    model, outputs = step()
    assert trunk_gradients(model, {'object': outputs['losses']['loss/object/l2']}) == {}
    assert task_losses({'loss_cls': torch.ones(1, requires_grad=True), 'stats/a/b': torch.ones(1, requires_grad=True)}) == {}
    with pytest.raises(ValueError, match='guard.task_gradients must be a whole number'):
        TaskGradientHook(0)


def test_they_are_in_the_log(tmp_path):
    from test_train import json_lines, run
    run(tmp_path, '--max_epochs', 1, guard={'task_gradients': 2})
    lines = [line for line in json_lines(tmp_path) if line.get('mode') == 'train']
    assert all(line['stats/object/trunk_grad_norm'] > 0 and -1 <= line['stats/object-map/trunk_grad_cos'] <= 1 for line in lines)
    plain = tmp_path / 'plain'
    plain.mkdir()
    run(plain, '--max_epochs', 1)
    losses = [[line['loss'] for line in json_lines(folder) if line.get('mode') == 'train'] for folder in (tmp_path, plain)]
    assert losses[0] == losses[1]
