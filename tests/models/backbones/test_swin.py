"""mmdet's SwinTransformer is what published BEVFusion checkpoints hold."""
import warnings

import pytest
import torch
from testing import Golden, randn, ruled

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.registry import MODELS

SWIN_T = {'type': 'SwinTransformer', 'embed_dims': 96, 'depths': [2, 2, 6, 2], 'num_heads': [3, 6, 12, 24], 'window_size': 7,
          'mlp_ratio': 4, 'qkv_bias': True, 'qk_scale': None, 'drop_rate': 0.0, 'attn_drop_rate': 0.0, 'drop_path_rate': 0.2,
          'patch_norm': True, 'out_indices': [1, 2, 3], 'with_cp': False, 'convert_weights': True}


@torch.no_grad()
@pytest.mark.parametrize('prefix, seed, shape', [('', 901, (2, 3, 128, 176)), ('odd_', 902, (1, 3, 100, 90))])
def test_swin_equals_the_fixture(prefix, seed, shape):
    golden = Golden('swin_backbone.npz')
    outputs = ruled(MODELS.build(SWIN_T))(randn(seed, shape))
    assert len(outputs) == 3
    for i, out in enumerate(outputs):
        golden.check(f'{prefix}out{i}', out)


@pytest.mark.parametrize('cfg', [
    {**SWIN_T, 'embed_dims': 12, 'depths': [2, 2, 2, 2], 'drop_path_rate': 0.0},
    {'type': 'ResNet', 'depth': 18, 'base_channels': 8, 'stem_channels': 8, 'norm_eval': True, 'out_indices': [1, 2, 3]}])
def test_recomputing_activations_changes_no_gradient_and_warns_of_nothing(cfg):
    gradients = []
    for with_cp in (False, True):
        torch.manual_seed(0)
        model = MODELS.build({**cfg, 'with_cp': with_cp})
        model.train()
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            sum(x.square().mean() for x in model(randn(3, (1, 3, 64, 64)))).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert torch.equal(gradients[1][name], expected), name
