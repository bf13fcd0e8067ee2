"""An optimizer's moments across stages, by name."""
import logging

import pytest
import torch
from torch import nn

from mmdet3d_ext.engine import checkpoint as files

LOGGER = logging.getLogger('test')


def model(width, extra=False):
    torch.manual_seed(width + extra)
    found = nn.Sequential()
    found.add_module('first', nn.Linear(3, 4))
    if extra:
        found.add_module('new', nn.Linear(4, 4))
    found.add_module('last', nn.Linear(4, width))
    return found


def trained(width, kind=torch.optim.AdamW):
    one = model(width)
    optimizer = kind([{'params': [p]} for p in reversed(list(one.parameters()))], lr=0.1)  # another order than the model's
    for _ in range(3):
        optimizer.zero_grad()
        one(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    return one, optimizer


def save(path, one, optimizer, content=()):
    files.write_atomic({'state_dict': one.state_dict(), 'optimizer': optimizer.state_dict(), 'meta': {},
                        'optimizer_info': files.optimizer_info(optimizer, one), **dict(content)}, str(path))
    return str(path)


def load(path, one, optimizer, loaded=None):
    return files.keep_optimizer(optimizer, one, path, loaded or [name for name, _ in one.named_parameters()], LOGGER)


def test_moments_follow_names_not_numbers(tmp_path):
    old, before = trained(5)
    path = save(tmp_path / 'a.pth', old, before)
    new = model(5, extra=True)
    optimizer = torch.optim.AdamW(new.parameters(), lr=0.3)
    kept = load(path, new, optimizer)
    assert kept == ['first.weight', 'first.bias', 'last.weight', 'last.bias']
    own = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        if name.startswith('new'):
            assert parameter not in optimizer.state
            continue
        for key in ('exp_avg', 'exp_avg_sq', 'step'):
            assert torch.equal(optimizer.state[parameter][key], before.state[own[name]][key]), (name, key)
    assert optimizer.param_groups[0]['lr'] == 0.3
    new(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[new.new.weight]['step'] == 1 and optimizer.state[new.first.weight]['step'] == 4


def test_another_shape_or_a_weight_that_was_not_loaded_begins_without(tmp_path):
    old, before = trained(5)
    path = save(tmp_path / 'a.pth', old, before)
    new = model(6)
    optimizer = torch.optim.AdamW(new.parameters())
    assert load(path, new, optimizer, ['first.weight', 'last.weight', 'last.bias']) == ['first.weight']


@pytest.mark.parametrize('change, text', [({'optimizer': None}, 'holds no optimizer'), ({'optimizer_info': None}, 'does not name'),
                                          ({'optimizer_info': {'type': 'SGD', 'names': []}}, 'is of the optimizer SGD')])
def test_what_cannot_be_kept_is_refused(tmp_path, change, text):
    path = save(tmp_path / 'a.pth', *trained(5), change)
    new = model(5)
    with pytest.raises(files.CheckpointError, match=text):
        load(path, new, torch.optim.AdamW(new.parameters()))


def test_fused_updates_have_their_step_counts_beside_the_parameters(tmp_path):
    path = save(tmp_path / 'a.pth', *trained(5))
    new = model(5).to('meta')  # in place of a GPU, where fused updates read counts from
    optimizer = torch.optim.AdamW(new.parameters())
    load(path, new, optimizer)
    assert {state['step'].device.type for state in optimizer.state.values()} == {'cpu'}
    optimizer.param_groups[0]['fused'] = True
    load(path, new, optimizer)
    assert {state['step'].device.type for state in optimizer.state.values()} == {'meta'}


@pytest.mark.parametrize('then, now', [(None, True), (True, None), (True, False), (False, True)])
def test_the_choice_of_kernels_is_this_runs_not_the_checkpoints(then, now):
    one, _ = trained(5)
    before, after = (torch.optim.AdamW(one.parameters(), lr=lr, fused=fused) for lr, fused in ((0.1, then), (0.2, now)))
    for optimizer in (before, after):
        one(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    saved = before.state_dict()
    after.load_state_dict(files.with_own_kernels(saved, after))
    assert after.param_groups[0]['fused'] is now and after.param_groups[0]['lr'] == 0.1
    assert saved['param_groups'][0]['fused'] is then, 'the checkpoint is not changed'
    after.step()
    assert {int(state['step']) for state in after.state.values()} == {2}
    saved['param_groups'].append(dict(saved['param_groups'][0]))
    with pytest.raises(ValueError, match='different number of parameter groups'):
        after.load_state_dict(files.with_own_kernels(saved, after))


@pytest.mark.gpu
def test_moments_of_another_stage_are_gone_on_with_by_fused_updates(tmp_path):
    path = save(tmp_path / 'a.pth', *trained(5))
    new = model(5).cuda()
    optimizer = torch.optim.AdamW(new.parameters(), fused=True)
    load(path, new, optimizer)
    new(torch.ones(2, 3).cuda()).square().sum().backward()
    optimizer.step()
    assert {int(state['step']) for state in optimizer.state.values()} == {4}
