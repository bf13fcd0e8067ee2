"""Fusers against the golden fixture, their names, and mismatched maps."""
import pytest
import torch
from testing import Golden, randn, ruled

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.registry import MODELS


@torch.no_grad()
def test_conv_fuser_equals_the_fixture():
    fuser = MODELS.build({'type': 'ConvFuser', 'in_channels': [80, 256], 'out_channels': 256})
    assert set(fuser.state_dict()) == {'0.weight', *(f'1.{n}' for n in ('weight', 'bias', 'running_mean', 'running_var',
                                                                        'num_batches_tracked'))}
    out = ruled(fuser)([randn(211, (2, 80, 20, 16)), randn(212, (2, 256, 20, 16))])
    Golden('necks_fuser_decoder.npz').check('convfuser_out0', out)


def test_add_fuser_is_the_mean_and_drops_a_sensor_without_dropping_its_parameters():
    fuser = MODELS.build({'type': 'AddFuser', 'in_channels': [2, 3], 'out_channels': 4, 'dropout': 1.0})
    maps = [torch.randn(2, 2, 5, 6), torch.randn(2, 3, 5, 6)]
    with torch.no_grad():
        parts = [t(x) for t, x in zip(fuser.eval().transforms, maps, strict=True)]
        torch.testing.assert_close(fuser(maps), (parts[0] + parts[1]) / 2)
    fuser.train()
    for norm in (fuser.transforms[0][1], fuser.transforms[1][1]):
        norm.eval()  # so that the parts below are comparable
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        out = fuser(maps)
        matches = [i for i, part in enumerate(parts) if torch.allclose(out, part, atol=1e-5)]
        assert len(matches) == 1, 'with dropout 1 exactly one sensor remains'
        seen.add(matches[0])
    assert seen == {0, 1}
    out.sum().backward()
    assert all(p.grad is not None for p in fuser.parameters())


@pytest.mark.parametrize('kind', ['ConvFuser', 'AddFuser'])
def test_mismatched_maps_are_named(kind):
    fuser = MODELS.build({'type': kind, 'in_channels': [2, 3], 'out_channels': 4})
    with pytest.raises(ValueError, match=r'differ in size: \[\(5, 6\), \(5, 7\)\]'):
        fuser([torch.zeros(1, 2, 5, 6), torch.zeros(1, 3, 5, 7)])
    with pytest.raises(ValueError, match='map 1 has 4 channels, in_channels says 3'):
        fuser([torch.zeros(1, 2, 5, 6), torch.zeros(1, 4, 5, 6)])
    with pytest.raises(ValueError, match='expects 2 BEV maps, got 1'):
        fuser([torch.zeros(1, 2, 5, 6)])
