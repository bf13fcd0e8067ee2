"""The resampler between BEV grids: golden numbers, metric correctness, and the errors for scopes that do not fit."""
import pytest
import torch
import torch.nn.functional as F
from testing import Golden, randn

from mmdet3d_ext.geometry.grid import BevGrid, GridError
from mmdet3d_ext.models.heads.segm import BEVGridTransform

SQUARE = [[-51.2, 51.2, 0.8], [-51.2, 51.2, 0.8]]
LABELS = [[-50.0, 50.0, 0.5], [-50.0, 50.0, 0.5]]


@pytest.fixture(scope='module')
def golden():
    return Golden('bev_grid_and_segm_head.npz')


def test_golden_square_rectangular_and_prescaled(golden):
    golden.check('grid_out', BEVGridTransform(SQUARE, LABELS)(randn(101, (2, 3, 128, 128))))
    rect = BEVGridTransform([[-51.2, 51.2, 1.6], [-38.4, 38.4, 1.6]], [[-50, 50, 1], [-30, 40, 0.5]])
    golden.check('rect_out', rect(torch.from_numpy(golden['rect_in'])))
    golden.check('prescale_out', BEVGridTransform(SQUARE, LABELS, prescale_factor=4)(torch.from_numpy(golden['prescale_in'])))


def test_golden_impulse(golden):
    x = torch.zeros(1, 1, 128, 128)
    x[0, 0, 100, 20] = 1
    out = BEVGridTransform(SQUARE, LABELS)(x)[0, 0]
    assert divmod(out.argmax().item(), 200) == tuple(golden['impulse_out_argmax'])
    golden.check('impulse_out_window', out[150:160, 25:40])


def by_coordinates(x, source: BevGrid, target: BevGrid):
    """The textbook form: coordinates and grid_sample in float64."""
    axes = []
    for a, b in ((source.x, target.x), (source.y, target.y)):
        centres = b.lo + (torch.arange(b.cells, dtype=torch.float64) + 0.5) * b.step
        axes.append((centres - a.lo) / (a.hi - a.lo) * 2 - 1)
    u, v = torch.meshgrid(*axes, indexing='ij')
    grid = torch.stack([v, u], -1)[None].expand(x.shape[0], -1, -1, -1)
    return F.grid_sample(x.double(), grid, mode='bilinear', padding_mode='zeros', align_corners=False)


@pytest.mark.parametrize('source, target', [
    ([[-54, 54, 0.6], [-54, 54, 0.6]], [[-50, 50, 0.25], [-50, 50, 0.25]]),
    ([[0, 10, 1], [-4, 4, 2]], [[-3, 14, 0.5], [-9, 9, 1]]),            # larger than the input: zeros around
    ([[0, 3, 1], [0, 5, 1]], [[0, 3, 3], [0, 5, 5]]),                   # one output cell
    ([[0, 1, 1], [0, 1, 1]], [{'range': [0, 1], 'cells': 7}, [0, 1, 0.25]]),
    ([[0, 10, 1], [0, 10, 1]], [[20, 30, 1], [0, 10, 1]]),              # no overlap at all
    ([[0, 10, 1], [0, 8, 1]], [[0, 10, 1], [0, 8, 1]]),                 # identity
])
def test_equals_sampling_by_coordinates(source, target):
    a, b = BevGrid.parse(*source), BevGrid.parse(*target)
    x = randn(1, (2, 3, *a.shape))
    out = BEVGridTransform(source, target)(x)
    assert out.shape == (2, 3, *b.shape) and out.is_contiguous()
    # float32 positions are off by about 1e-5 of a cell; neighbours of a random map differ by up to 5
    torch.testing.assert_close(out.double(), by_coordinates(x, a, b), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize('trunk', [[[-54, 54, 0.6], [-54, 54, 0.6]], [[-51.2, 51.2, 0.8], [-51.2, 51.2, 0.8]],
                                   [[-54, 54, 0.3], [-30, 30, 0.6]]])
def test_a_hot_cell_keeps_its_metres(trunk):
    grid = BevGrid.parse(*trunk)
    x = torch.zeros(1, 1, *grid.shape)
    i, j = int((30 - grid.x.lo) / grid.x.step), int((-12 - grid.y.lo) / grid.y.step)
    x[0, 0, i, j] = 1
    out = BEVGridTransform(trunk, [[-50, 50, 0.25], [-25, 25, 0.25]])(x)[0, 0]
    weight = out / out.sum()
    centre_x = (weight.sum(1) * (-50 + 0.25 * (torch.arange(400) + 0.5))).sum()
    centre_y = (weight.sum(0) * (-25 + 0.25 * (torch.arange(200) + 0.5))).sum()
    # half a trunk cell from its centre to the point, half an output cell because the footprint is sampled
    assert abs(centre_x - 30) <= grid.x.step / 2 + 0.125 and abs(centre_y + 12) <= grid.y.step / 2 + 0.125


def test_constant_maps_stay_constant_inside():
    out = BEVGridTransform(SQUARE, LABELS)(torch.ones(1, 1, 128, 128))
    torch.testing.assert_close(out, torch.ones(1, 1, 200, 200))


def test_input_that_contradicts_the_scope():
    transform = BEVGridTransform(SQUARE, LABELS)
    with pytest.raises(ValueError,
                       match=r'has 180x180 cells, but model\.heads\.map\.grid_transform\.input_scope describes 128x128'):
        transform(torch.zeros(1, 1, 180, 180))
    relaxed = BEVGridTransform(SQUARE, LABELS, compat='reference')
    x = randn(2, (1, 2, 180, 180))
    with pytest.warns(UserWarning, match='180x180'):
        out = relaxed(x)
    scope = BevGrid.parse({'range': [-51.2, 51.2], 'cells': 180}, {'range': [-51.2, 51.2], 'cells': 180})
    torch.testing.assert_close(out.double(), by_coordinates(x, scope, BevGrid.parse(*LABELS)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize('scopes, error, message', [
    ((SQUARE, [[-50, 50, 0.167], [-50, 50, 0.167]]), GridError, r'output_scope.*cell count 600'),
    ((SQUARE, [-50, 50, 0.5]), ValueError, r'output_scope: write'),
    (('abc', LABELS), ValueError, r'input_scope: write'),
    (([[5, -5, 1], [0, 1, 1]], LABELS), GridError, r'input_scope \(x\)'),
])
def test_bad_scopes_name_their_key(scopes, error, message):
    with pytest.raises(error, match=message):
        BEVGridTransform(*scopes)
    with pytest.raises(ValueError, match='prescale_factor'):
        BEVGridTransform(SQUARE, LABELS, prescale_factor=0)


def test_no_state_and_gradient():
    transform = BEVGridTransform([[0, 4, 1], [0, 6, 1]], [[-1, 5, 0.5], [1, 6, 0.5]]).double()
    assert not transform.state_dict() and not list(transform.parameters())
    transform._make_buffers((4, 6))
    assert torch.autograd.gradcheck(transform, (randn(3, (2, 2, 4, 6)).double().requires_grad_(),))


def test_half_precision_under_autocast():
    transform = BEVGridTransform(SQUARE, LABELS)
    x = randn(4, (1, 4, 128, 128))
    with torch.autocast('cpu', torch.bfloat16):
        out = transform(x)
    assert out.dtype == torch.bfloat16
    assert (out.float() - transform(x)).abs().max() <= 2 ** -7 * x.abs().max()  # weights and values have 8 bits


@pytest.mark.slow
def test_compiles_in_one_graph():
    transform = BEVGridTransform([[0, 8, 1], [0, 6, 1]], [[0, 8, 0.5], [0, 6, 0.5]])
    x = randn(5, (1, 2, 8, 6))
    torch.testing.assert_close(torch.compile(transform, fullgraph=True, backend='eager')(x), transform(x))
