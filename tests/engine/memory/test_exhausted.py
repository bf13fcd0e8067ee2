"""Out of GPU memory: where, what the plan is, three things to turn; raised by hand, as a CPU has no such error."""
import sys

import pytest
import torch
from testing import REPO

sys.path.insert(0, str(REPO / 'tests' / 'engine'))
from engine_toy import EngineToyModel, write_config  # noqa: E402

from mmdet3d_ext.config import load_config  # noqa: E402
from mmdet3d_ext.datasets.synthetic.batch import random_batch  # noqa: E402
from mmdet3d_ext.engine.building import running  # noqa: E402
from mmdet3d_ext.engine.launch import UserError  # noqa: E402
from mmdet3d_ext.engine.memory.plan import SAME_ON_EVERY_GPU  # noqa: E402
from mmdet3d_ext.engine.run_dir import to_plain  # noqa: E402
from mmdet3d_ext.engine.train import Options, make_model, train  # noqa: E402

TEXT = 'CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 31.74 GiB\nmore lines'


def exhausted(*args):
    raise torch.cuda.OutOfMemoryError(TEXT)


def test_in_the_forward_pass_of_a_part():
    cfg = load_config(str(REPO / 'configs' / 'synthetic' / 'multitask_tiny.yaml'), ['--data.samples_per_gpu', '1'])
    model = make_model(to_plain(cfg)).train()
    model.heads['map'].aspp.register_forward_pre_hook(exhausted)
    batch = random_batch(to_plain(cfg), 1, torch.device('cpu'), points=2000)
    with pytest.raises(UserError) as caught, running(model, cfg):
        model(**batch)
    text = str(caught.value)
    first, *rest = text.splitlines()
    assert first.startswith('out of GPU memory in model.heads.map.aspp (ASPP): CUDA out of memory. Tried to allocate 2.00 GiB.')
    assert rest[0].startswith('Planned: peak ') and 'heads.' in rest[0] and 'encoders.' in rest[0]
    turned = [line for line in rest if line.startswith('  --')]
    assert len(turned) == 3 and all(' saves ' in line and 'GiB' in line for line in turned)
    assert SAME_ON_EVERY_GPU in text and 'tools/plan_memory.py' in text and 'more lines' not in text


class _Exhausting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        exhausted()


@pytest.mark.parametrize('place, words', [('forward', 'out of GPU memory in model.trunk (Sequential): CUDA'),
                                          ('backward', 'out of GPU memory in the backward pass: CUDA'),
                                          ('step', 'out of GPU memory in the optimizer step: CUDA')])
def test_in_a_training_run(tmp_path, monkeypatch, place, words):
    """The run's own error reaches the user with switches, although this model cannot be planned."""
    def step(self):
        exhausted()

    if place == 'step':
        monkeypatch.setattr(torch.optim.AdamW, 'step', step)
    original = EngineToyModel.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if place == 'forward':
            self.trunk.register_forward_pre_hook(exhausted)
        if place == 'backward':
            self.trunk.register_forward_hook(lambda module, args, out: _Exhausting.apply(out))

    monkeypatch.setattr(EngineToyModel, '__init__', init)
    cfg = load_config(write_config(tmp_path), [])
    with pytest.raises(UserError) as caught:
        train(cfg, Options(run_dir=str(tmp_path / 'run'), validate=False))
    text = str(caught.value)
    assert words in text
    assert 'No plan could be made' in text and '--amp.dtype fp16' in text
    assert '--data.samples_per_gpu 1 --optimizer_config.cumulative_iters 2' in text and '--optimizer.type SGD' in text


def test_outside_training_it_stays_short():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UserError, match='^out of GPU memory: CUDA out of memory.*fewer samples at a time') as caught, running(model):
        exhausted()
    assert '\n' not in str(caught.value)
