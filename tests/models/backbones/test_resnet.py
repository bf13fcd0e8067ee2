"""BEV backbones against the golden fixtures."""
import pytest
import torch
from testing import Golden, randn, ruled

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.registry import MODELS

NORM = {'type': 'BN', 'eps': 1e-3, 'momentum': 0.01}
SECOND = {'type': 'SECOND', 'in_channels': 256, 'out_channels': [128, 256], 'layer_nums': [5, 5], 'layer_strides': [1, 2],
          'norm_cfg': NORM, 'conv_cfg': {'type': 'Conv2d', 'bias': False}}
SECONDFPN = {'type': 'SECONDFPN', 'in_channels': [128, 256], 'out_channels': [256, 256], 'upsample_strides': [1, 2],
             'norm_cfg': NORM, 'upsample_cfg': {'type': 'deconv', 'bias': False}, 'use_conv_for_no_stride': True}
RESNET = {'type': 'GeneralizedResNet', 'in_channels': 80, 'blocks': [[2, 160, 2], [2, 320, 2], [2, 640, 1]]}
LSSFPN = {'type': 'LSSFPN', 'in_indices': [-1, 0], 'in_channels': [640, 160], 'out_channels': 256, 'scale_factor': 2}


@pytest.fixture(scope='module')
def golden():
    return Golden('necks_fuser_decoder.npz')


@torch.no_grad()
def test_second_with_its_neck_equals_the_fixture(golden):
    outputs = ruled(MODELS.build(SECOND))(randn(221, (2, 256, 24, 20)))
    assert [out.shape[1] for out in outputs] == SECOND['out_channels']
    for i, out in enumerate(outputs):
        golden.check(f'second_out{i}', out)
    golden.check('second_secondfpn_out0', ruled(MODELS.build(SECONDFPN))(outputs)[0])


@torch.no_grad()
def test_generalized_resnet_with_its_neck_equals_the_fixture(golden):
    outputs = ruled(MODELS.build(RESNET))(randn(231, (2, 80, 48, 40)))
    assert [out.shape[1] for out in outputs] == [channels for _, channels, _ in RESNET['blocks']]
    for i, out in enumerate(outputs):
        golden.check(f'genresnet_out{i}', out)
    golden.check('genresnet_lssfpn_out0', ruled(MODELS.build(LSSFPN))(outputs))


def test_a_malformed_stage_is_named():
    with pytest.raises(ValueError, match=r'blocks\[1\] must be \[count, channels, stride\]'):
        MODELS.build({'type': 'GeneralizedResNet', 'in_channels': 4, 'blocks': [[1, 4, 1], [1, 4]]})
