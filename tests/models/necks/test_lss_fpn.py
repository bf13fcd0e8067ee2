"""Necks against the golden fixtures and at the edges."""
import pytest
import torch
from testing import Golden, randn, ruled

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.registry import MODELS

LSSFPN3 = {'type': 'GeneralizedLSSFPN', 'in_channels': [192, 384, 768], 'out_channels': 256, 'start_level': 0, 'num_outs': 3,
           'norm_cfg': {'type': 'BN2d', 'requires_grad': True}, 'act_cfg': {'type': 'ReLU', 'inplace': True},
           'upsample_cfg': {'mode': 'bilinear', 'align_corners': False}}
NORM = {'type': 'BN', 'eps': 1e-3, 'momentum': 0.01}
SECONDFPN = {'type': 'SECONDFPN', 'in_channels': [128, 256], 'out_channels': [256, 256], 'upsample_strides': [1, 2],
             'norm_cfg': NORM, 'upsample_cfg': {'type': 'deconv', 'bias': False}, 'use_conv_for_no_stride': True}
LSSFPN = {'type': 'LSSFPN', 'in_indices': [-1, 0], 'in_channels': [640, 160], 'out_channels': 256, 'scale_factor': 2}


@pytest.fixture(scope='module')
def golden():
    return Golden('necks_fuser_decoder.npz')


@torch.no_grad()
@pytest.mark.parametrize('key, seeds, shapes', [
    ('lssfpn3', (201, 202, 203), [(2, 192, 16, 44), (2, 384, 8, 22), (2, 768, 4, 11)]),
    ('lssfpn3_odd', (204, 205, 206), [(1, 192, 17, 45), (1, 384, 9, 23), (1, 768, 5, 12)]),
])
def test_generalized_lss_fpn_equals_the_fixture(golden, key, seeds, shapes):
    outputs = ruled(MODELS.build(LSSFPN3))([randn(s, shape) for s, shape in zip(seeds, shapes, strict=True)])
    assert len(outputs) == 2
    for i, out in enumerate(outputs):
        golden.check(f'{key}_out{i}', out)


@torch.no_grad()
def test_secondfpn_of_mmdet3d_equals_the_fixture(golden):
    golden.check('secondfpn_given_out0', ruled(MODELS.build(SECONDFPN))([randn(222, (2, 128, 24, 20)), randn(223, (2, 256, 12, 10))])[0])


@torch.no_grad()
def test_lss_fpn_equals_the_fixture(golden):
    levels = [randn(232, (2, 160, 24, 20)), randn(233, (2, 320, 12, 10)), randn(234, (2, 640, 12, 10))]
    golden.check('lssfpn_given_out0', ruled(MODELS.build(LSSFPN))(levels))


def test_every_parameter_of_a_pyramid_of_three_levels_gets_a_gradient():
    neck = MODELS.build({**LSSFPN3, 'in_channels': [8, 8, 8], 'out_channels': 8})
    neck([torch.randn(2, 8, n, n + 2) for n in (12, 6, 3)])[0].sum().backward()
    assert all(p.grad is not None for p in neck.parameters())


def test_errors_name_the_level_and_the_channels():
    with pytest.raises(ValueError, match='level -1 has 3 channels, in_channels says 640'):
        MODELS.build(LSSFPN)([torch.zeros(1, 160, 4, 4), torch.zeros(1, 3, 2, 2)])
    with pytest.raises(ValueError, match='expects 3 levels, got 2'):
        MODELS.build(LSSFPN3)([torch.zeros(1, 192, 4, 4), torch.zeros(1, 384, 2, 2)])
    with pytest.raises(ValueError, match='needs at least two levels of 1'):
        MODELS.build({**LSSFPN3, 'in_channels': [192]})
