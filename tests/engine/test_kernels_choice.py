"""Which kernels a process may use: cuDNN's search, TF32, and the fused update of the weights."""
import logging

import pytest
import torch
from torch import nn

from mmdet3d_ext.engine.amp import choose_kernels
from mmdet3d_ext.engine.launch import UserError
from mmdet3d_ext.engine.train import make_optimizer

LOGGER = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def as_before():
    kept = torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = kept


@pytest.mark.parametrize('given, products, convolutions', [(None, False, True), (True, True, True), (False, False, False)])
def test_tf32(given, products, convolutions):
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True  # torch's default
    choose_kernels({'allow_tf32': given, 'cudnn_benchmark': True})
    assert torch.backends.cuda.matmul.allow_tf32 is products and torch.backends.cudnn.allow_tf32 is convolutions
    assert torch.backends.cudnn.benchmark
    choose_kernels({})
    assert not torch.backends.cudnn.benchmark


def test_a_wrong_value_is_named():
    with pytest.raises(UserError, match="allow_tf32 must be true, false or null, got 'yes'"):
        choose_kernels({'allow_tf32': 'yes'})


def optimizer(model, **settings):
    return make_optimizer({'optimizer': dict(type='AdamW', lr=0.1, **settings)}, model, LOGGER, 1)


def test_updates_are_not_fused_on_the_cpu():
    assert not optimizer(nn.Linear(2, 2)).param_groups[0].get('fused')


@pytest.mark.gpu
def test_updates_are_fused_on_a_gpu_unless_said_otherwise():
    model = nn.Linear(2, 2).cuda()
    assert optimizer(model).param_groups[0]['fused']
    assert not optimizer(model, fused=False).param_groups[0]['fused']
    assert not optimizer(model, foreach=True).param_groups[0].get('fused')


@pytest.mark.gpu
def test_the_fused_update_is_the_plain_one():
    torch.manual_seed(0)
    plain = nn.Linear(40, 30).double().cuda()
    fused = nn.Linear(40, 30).double().cuda()
    fused.load_state_dict(plain.state_dict())
    steps = optimizer(plain, foreach=False), optimizer(fused)
    for _ in range(5):
        x = torch.randn(7, 40, dtype=torch.float64, device='cuda')
        for model, step in zip((plain, fused), steps):
            step.zero_grad()
            model(x).square().sum().backward()
            step.step()
    torch.testing.assert_close(fused.weight, plain.weight)


@pytest.mark.gpu
def test_sparse_convolutions_follow_the_matrix_products():
    pytest.importorskip('spconv')
    from spconv import constants

    from mmdet3d_ext.models.backbones import SparseEncoder
    encoder = SparseEncoder(4, [64, 64, 41]).cuda()
    voxels, coords = torch.randn(30, 4, device='cuda'), torch.randint(0, 16, (30, 4), device='cuda', dtype=torch.int32)
    coords[:, 0] = 0
    coords = coords.unique(dim=0)
    for allowed in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        encoder(voxels[:len(coords)], coords, 1)
        assert constants.SPCONV_ALLOW_TF32 is allowed
