"""Batches out of DataContainers, totals of losses, the wrapper in one process."""
import pytest
import torch
from mmcv.parallel import DataContainer, collate, is_module_wrapper
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from torch import nn

from mmdet3d_ext.engine.parallel import StepModel, batch_size, sum_losses, unpack_batch

CPU = torch.device('cpu')


def sample(index):
    return {'img': DataContainer(torch.full((2, 3), float(index)), stack=True, pad_dims=None),
            'points': DataContainer(torch.full((index, 5), 1.0), stack=False),
            'gt_bboxes_3d': DataContainer(LiDARInstance3DBoxes(torch.rand(index, 9), box_dim=9), cpu_only=True),
            'metas': DataContainer({'token': str(index)}, cpu_only=True), 'plain': torch.tensor(index)}


@pytest.mark.parametrize('chunk', [1, 2, 3])  # mmcv's collate cuts a batch into chunks of samples_per_gpu
def test_unpack_joins_chunks(chunk):
    batch = unpack_batch(collate([sample(i) for i in range(3)], samples_per_gpu=chunk), CPU)
    assert batch['img'].shape == (3, 2, 3) and batch['img'][:, 0, 0].tolist() == [0, 1, 2]
    assert [len(p) for p in batch['points']] == [0, 1, 2]
    assert [len(b) for b in batch['gt_bboxes_3d']] == [0, 1, 2]
    assert [m['token'] for m in batch['metas']] == ['0', '1', '2'] and batch['plain'].tolist() == [0, 1, 2]
    assert batch_size(batch) == 3


def test_total_is_the_sum_of_loss_names_only():
    losses = {'loss/object/a': torch.tensor(1.0, requires_grad=True), 'stats/map/dice_loss_like': torch.tensor(100.0),
              'loss/map/b': torch.tensor([2.0, 4.0], requires_grad=True), 'matched': 7}
    total, names, values = sum_losses(losses)
    assert float(total) == 4.0 and total.requires_grad
    assert names == ['loss/object/a', 'stats/map/dice_loss_like', 'loss/map/b', 'matched', 'loss']
    assert [float(v) for v in values] == [1.0, 100.0, 3.0, 7.0, 4.0] and not any(v.requires_grad for v in values)


def test_total_of_an_mmdet_model_and_what_is_no_loss():
    total, _, _ = sum_losses({'loss_cls': [torch.tensor(1.0), torch.tensor(2.0)], 'acc': torch.tensor(5.0)})
    assert float(total) == 3.0
    with pytest.raises(ValueError, match='no loss'):
        sum_losses({'acc': torch.tensor(1.0)})
    with pytest.raises(TypeError, match='dict of losses, got Tensor'):
        sum_losses(torch.tensor(1.0))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.seen = None

    def forward(self, img, metas=None, **rest):
        x = self.layer(img).mean(dim=(1, 2))
        self.seen = x.dtype
        return {'loss/a': x.float().sum()} if self.training else [{'v': v} for v in x]


def test_wrapper_is_looked_through_and_steps():
    model = StepModel(Tiny(), CPU, torch.bfloat16)
    assert is_module_wrapper(model) and [n for n, _ in model.named_parameters()] == ['module.layer.weight', 'module.layer.bias']
    batch = collate([sample(i) for i in range(3)], samples_per_gpu=3)
    out = model.train_step(batch, None)
    assert out['num_samples'] == 3 and out['log_names'] == ['loss/a', 'loss'] and out['log_values'].dtype == torch.float32
    assert model.module.seen == torch.bfloat16  # autocast reaches the model
    out['loss'].backward()
    assert model.module.layer.weight.grad is not None
    model.eval()
    assert not model.module.training and len(model(batch)) == 3 and len(model.val_step(batch)['results']) == 3
    assert model.module.seen == torch.float32
