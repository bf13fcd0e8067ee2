"""A sensor's map on the grid where the sensors meet."""
import pytest
import torch

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.geometry import BevGrid
from mmdet3d_ext.geometry.resample import apply_weights, cell_weights
from mmdet3d_ext.models.fusers.resample import BEVResample

COARSE, FINE = BevGrid.parse([-54, 54, 6.0], [-27, 27, 6.0]), BevGrid.parse([-54, 54, 4.0], [-27, 27, 3.0])


@pytest.mark.parametrize('source, target', [(COARSE, FINE), (FINE, COARSE)])
def test_maps_go_both_ways_in_metres(source, target):
    layer = BEVResample(source, target, 'lidar BEV map')
    assert not layer.state_dict() and not list(layer.parameters())
    x = torch.randn(2, 3, *source.shape, requires_grad=True)
    out = layer(x)
    expected = apply_weights(x, cell_weights(source.x, target.x).float(), cell_weights(source.y, target.y).float())
    assert out.shape == (2, 3, *target.shape) and torch.equal(out, expected)
    out.sum().backward()
    assert torch.isfinite(x.grad).all() and (x.grad > 0).all()
    ramp = (source.x.lo + (torch.arange(source.x.cells) + 0.5) * source.x.step)[None, None, :, None].expand(1, 1, *source.shape)
    moved = layer(ramp)[0, 0, :, 0]
    centres = target.x.lo + (torch.arange(target.x.cells) + 0.5) * target.x.step
    torch.testing.assert_close(moved[1:-1], centres[1:-1], rtol=1e-5, atol=1e-4)


def test_equal_grids_pass_the_map_on():
    x = torch.randn(1, 2, *COARSE.shape)
    assert BEVResample(COARSE, COARSE)(x) is x


def test_another_map_is_refused():
    with pytest.raises(ValueError, match='camera BEV map: has 18x10 cells, its grid is 18x9 cells'):
        BEVResample(COARSE, FINE, 'camera BEV map')(torch.zeros(1, 2, 18, 10))


def test_half_precision_stays_half_under_autocast():
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert BEVResample(COARSE, FINE)(torch.randn(1, 2, *COARSE.shape).bfloat16()).dtype == torch.bfloat16
