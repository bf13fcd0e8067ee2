"""The optimizer step: accumulation, clipping, loss scaling, and that nothing non-finite reaches the weights."""
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmdet3d_ext.engine.hooks.guard import Guard, NonFiniteError
from mmdet3d_ext.engine.hooks.optimizer import GuardedOptimizerHook, make_scaler, total_norm


class Log:
    def __init__(self):
        self.values = {}

    def update(self, values, count=1):
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)


class Runner:
    """What the hook uses of a runner, around any module and loss."""

    def __init__(self, hook, model=None, optimizer=None, steps=4):
        self.model = model or nn.Linear(3, 1)
        self.optimizer = optimizer or torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data_loader = range(steps)
        self.log_buffer, self.logger = Log(), logging.getLogger('hook-test')
        self.epoch, self.iter, self.rank, self.hook = 0, 0, 0, hook
        self.data_batch = {'metas': SimpleNamespace(data=[[{'token': 'abc'}]])}
        hook.before_run(self)

    def publish(self, extra=()):
        self.outputs['log_vars'] = {'loss/a': float(self.outputs['loss']), 'loss': float(self.outputs['loss'])}
        return [float(e) for e in extra]

    def step(self, loss_of, index=0):
        self.inner_iter = index
        self.hook.before_train_iter(self)
        loss = loss_of(self.model)
        self.outputs = {'loss': loss, 'num_samples': 1, 'log_names': ['loss/a', 'loss'],
                        'local_values': torch.stack([loss.detach(), loss.detach()])}
        self.hook.after_train_iter(self)
        self.iter += 1
        return self.stepped


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


@pytest.mark.parametrize('cumulative, sizes', [(2, [2, 2]), (3, [3, 1]), (4, [4]), (8, [4])])
def test_accumulation_equals_the_mean_over_a_big_batch(cumulative, sizes):
    torch.manual_seed(0)
    data, model, reference = torch.randn(4, 3, dtype=torch.float64), nn.Linear(3, 1).double(), nn.Linear(3, 1).double()
    reference.load_state_dict(model.state_dict())
    runner = Runner(GuardedOptimizerHook(cumulative_iters=cumulative), model)
    stepped = [runner.step(lambda m, x=data[i]: m(x).pow(2).sum(), i) for i in range(4)]
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    begin = 0
    for size in sizes:
        plain.zero_grad()
        reference(data[begin:begin + size]).pow(2).sum(1).mean().backward()
        plain.step()
        begin += size
    assert torch.allclose(weights(model), weights(reference), rtol=1e-12)
    assert sum(stepped) == len(sizes) and stepped[-1]


def test_clipping_equals_torch_and_logs_the_norm_before():
    torch.manual_seed(0)
    model, reference = nn.Linear(3, 1), nn.Linear(3, 1)
    reference.load_state_dict(model.state_dict())
    x = 50 * torch.randn(3)
    runner = Runner(GuardedOptimizerHook(grad_clip={'max_norm': 0.5, 'norm_type': 2}), model)
    runner.step(lambda m: m(x).sum())
    reference(x).sum().backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert torch.allclose(weights(model), weights(reference), rtol=1e-5)
    assert runner.log_buffer.values['grad_norm'] == [pytest.approx(float(norm), rel=1e-5)]
    assert float(norm) > 0.5


@pytest.mark.parametrize('value', [float('inf'), float('-inf'), float('nan')])
@pytest.mark.parametrize('where', ['loss', 'gradient'])
def test_nothing_non_finite_reaches_the_weights(value, where, caplog):
    hook = GuardedOptimizerHook(grad_clip={'max_norm': 35})
    runner = Runner(hook, optimizer=None)
    runner.optimizer = torch.optim.AdamW(runner.model.parameters(), lr=0.1)
    x = torch.ones(3)
    assert runner.step(lambda m: m(x).sum())
    before = weights(runner.model)
    moments = [s['exp_avg'].clone() for s in runner.optimizer.state.values()]

    def bad(m):
        if where == 'loss':
            return m(x).sum() * value
        out = m(x).sum()
        out.register_hook(lambda g: g * value)
        return out

    with caplog.at_level(logging.INFO, 'hook-test'):
        assert not runner.step(bad)
    assert torch.equal(weights(runner.model), before) and torch.isfinite(before).all()
    assert all(torch.equal(a, s['exp_avg']) for a, s in zip(moments, runner.optimizer.state.values()))
    assert hook.counts == {'steps': 1, 'scaler_skips': 0, 'nonfinite_skips': 1}
    text = caplog.text
    assert 'step skipped on all ranks' in text and 'scaler' not in text
    assert ('non-finite loss (loss/a' in text and "['abc']" in text) if where == 'loss' else 'the losses are finite' in text
    assert len(runner.log_buffer.values['grad_norm']) == 1  # the average leaves skipped steps out
    assert runner.step(lambda m: m(x).sum()) and hook.consecutive == 0
    assert all(p.grad is None for p in runner.model.parameters())


def test_a_fixed_scale_searches_nothing(caplog):
    """No later step would fit, so the guard must count what a scaler's search would excuse."""
    runner = Runner(GuardedOptimizerHook(scaler=make_scaler(512.0, 'cpu'), guard=Guard(max_consecutive=3)))

    def overflows(m):
        out = m(torch.ones(3)).sum()
        out.register_hook(lambda g: g * float('inf'))
        return out

    runner.step(overflows), runner.step(overflows)
    with pytest.raises(NonFiniteError, match='the losses are finite.* at the fixed loss scale 512 .*in 3 steps in a row'):
        runner.step(overflows)
    assert runner.hook.counts == {'steps': 0, 'scaler_skips': 0, 'nonfinite_skips': 3} and 'search' not in caplog.text


def test_too_many_in_a_row_stop_the_run():
    runner = Runner(GuardedOptimizerHook(guard=Guard(max_consecutive=3)))
    bad = lambda m: m(torch.ones(3)).sum() * float('nan')  # noqa: E731
    runner.step(bad), runner.step(bad)
    with pytest.raises(NonFiniteError, match='in 3 steps in a row'):
        runner.step(bad)


def test_the_scalers_search_is_told_from_divergence(caplog):
    """Gradients that overflow only because of the scale: it halves until they fit; the loss stays finite."""
    hook = GuardedOptimizerHook(scaler=make_scaler({'init_scale': 2.0 ** 10, 'growth_interval': 2}, 'cpu'))
    runner = Runner(hook)

    def fits_below(limit):
        def loss_of(m):
            out = m(torch.ones(3)).sum()
            out.register_hook(lambda g: torch.where(g.abs() > limit, torch.full_like(g, float('inf')), g))
            return out
        return loss_of

    before = weights(runner.model)
    with caplog.at_level(logging.INFO, 'hook-test'):
        stepped = [runner.step(fits_below(2.0 ** 8)) for _ in range(3)]
    assert stepped == [False, False, True] and hook.scaler.get_scale() == 2.0 ** 8
    assert 'loss scale now 512 (the scaler\'s normal search)' in caplog.text and 'WARNING' not in caplog.text
    assert hook.counts == {'steps': 1, 'scaler_skips': 2, 'nonfinite_skips': 0}
    # the update is the unscaled gradient's, and the scale grows again after growth_interval good steps
    assert torch.allclose(before - weights(runner.model), torch.full((4,), 0.1), atol=1e-6)
    runner.step(fits_below(2.0 ** 9))
    assert hook.scaler.get_scale() == 2.0 ** 9
    caplog.clear()
    with caplog.at_level(logging.INFO, 'hook-test'):
        runner.step(lambda m: m(torch.ones(3)).sum() * float('nan'))
    assert 'non-finite loss' in caplog.text and hook.counts['nonfinite_skips'] == 1
    state = hook.state_dict()
    other = GuardedOptimizerHook(scaler=make_scaler('dynamic', 'cpu'))
    other.load_state_dict(state)
    assert other.scaler.get_scale() == hook.scaler.get_scale() and other.counts == hook.counts


def test_scales_that_mmcv_users_write():
    assert make_scaler('dynamic', 'cpu').get_scale() == 65536.0 and make_scaler(512.0, 'cpu').get_scale() == 512.0
    assert make_scaler({'growth_interval': 7}, 'cpu').get_growth_interval() == 7
    for wrong in ({'grow': 1}, [1], 'fixed'):
        with pytest.raises(ValueError, match='loss_scale'):
            make_scaler(wrong, 'cpu')


def test_a_parameter_without_gradient_is_named(caplog):
    model = nn.Sequential(nn.Linear(3, 1))
    model.stray = nn.Parameter(torch.zeros(1))
    runner = Runner(GuardedOptimizerHook(), model)
    with caplog.at_level(logging.WARNING, 'hook-test'):
        runner.step(lambda m: m(torch.ones(3)).sum())
    assert '1 trainable parameters got no gradient in the first step: stray' in caplog.text
    model.distributed, model.find_unused_parameters = True, False
    runner = Runner(GuardedOptimizerHook(), model)
    with pytest.raises(RuntimeError, match='stray.*find_unused_parameters: true'):
        runner.step(lambda m: m(torch.ones(3)).sum())


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match='cumulative_iters'):
        GuardedOptimizerHook(cumulative_iters=0)
    with pytest.raises(ValueError, match="unknown keys \\['max_nrom'\\]"):
        GuardedOptimizerHook(grad_clip={'max_norm': 1, 'max_nrom': 3})


def test_total_norm():
    grads = [torch.tensor([3.0]), torch.tensor([[4.0]], dtype=torch.float16)]
    assert float(total_norm(grads)) == 5.0 and float(total_norm([])) == 0.0
    assert float(total_norm(grads, float('inf'))) == 4.0


# ---- the guard ---------------------------------------------------------------------------------------------------------

def test_a_non_finite_loss_with_finite_gradients_is_skipped_too():
    runner = Runner(GuardedOptimizerHook())
    before = weights(runner.model)
    assert not runner.step(lambda m: m(torch.ones(3)).sum() + float('inf'))
    assert torch.equal(weights(runner.model), before)


def test_a_bad_step_in_a_group_spoils_the_group_and_only_that():
    runner = Runner(GuardedOptimizerHook(cumulative_iters=2))
    fine, bad = (lambda m: m(torch.ones(3)).sum()), (lambda m: m(torch.ones(3)).sum() + float('nan'))
    before = weights(runner.model)
    assert [runner.step(loss, i) for i, loss in enumerate((bad, fine))] == [False, False]
    assert torch.equal(weights(runner.model), before)
    assert [runner.step(fine, i) for i in (2, 3)] == [False, True]


def with_statistics():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    runner = Runner(GuardedOptimizerHook(), model)
    data = torch.randn(6, 3)
    assert runner.step(lambda m: m(data).pow(2).mean())
    return runner, data, [model[1].running_mean.clone(), model[1].running_var.clone()]


def test_statistics_are_as_before_a_skipped_step():
    runner, data, kept = with_statistics()
    data = data.clone()
    data[2, 1] = float('inf')
    assert not runner.step(lambda m: m(data).pow(2).mean())
    assert torch.equal(runner.model[1].running_mean, kept[0]) and torch.equal(runner.model[1].running_var, kept[1])
    assert runner.step(lambda m: m(torch.randn(6, 3)).pow(2).mean())
    assert not torch.equal(runner.model[1].running_mean, kept[0])


def test_statistics_that_no_loss_sees_are_put_back_alone(caplog):
    """A part of the batch that the loss leaves out: loss and gradient are finite, the running mean is not."""
    runner, data, kept = with_statistics()

    def loss(m):
        m[1](torch.full((2, 4), float('inf')))
        return m(data).pow(2).mean()

    with caplog.at_level(logging.ERROR, 'hook-test'):
        assert runner.step(loss)
    assert "BatchNorm statistics became non-finite for samples ['abc'] although loss and gradient are finite" in caplog.text
    assert torch.equal(runner.model[1].running_mean, kept[0]) and torch.equal(runner.model[1].running_var, kept[1])


def test_one_copy_to_the_host_per_step():
    """Whatever the guard looks at travels with the norm."""
    runner, data, _ = with_statistics()
    sent = []
    publish = runner.publish
    runner.publish = lambda extra=(): (sent.append(len(extra)), publish(extra))[1]
    runner.step(lambda m: m(data).pow(2).mean())
    assert sent == [2]


@pytest.mark.parametrize('wrong, message', [
    ({'action': 'retry'}, "guard.action must be one of .* got 'retry'"), ({'max_consecutive': 0}, 'guard.max_consecutive must be'),
    ({'lr_factor': 2}, 'guard.lr_factor must be'), ({'spike': {'facto': 3}}, "guard.spike: unknown keys \\['facto'\\]"),
    ({'spike': {'factor': 1}}, 'guard.spike.factor must be'), ({'spike': {'window': 1}}, 'guard.spike.window must be'),
    ({'save_batches': True}, 'guard.save_batches must be')])
def test_wrong_guard_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Guard(**wrong)
