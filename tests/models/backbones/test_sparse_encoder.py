"""Sparse encoder: golden fixtures, kernel layouts, and clouds with (almost) nothing in them."""
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from testing import REPO, Golden, ruled

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.models.backbones import sparse_layers
from mmdet3d_ext.models.backbones.sparse_layers import kernel_to_memory
from mmdet3d_ext.registry import MODELS

BASICBLOCK = {'type': 'SparseEncoder', 'in_channels': 5, 'sparse_shape': [144, 112, 41], 'output_channels': 128,
              'order': ['conv', 'norm', 'act'], 'encoder_channels': [[16, 16, 32], [32, 32, 64], [64, 64, 128], [128, 128]],
              'encoder_paddings': [[0, 0, 1], [0, 0, 1], [0, 0, [1, 1, 0]], [0, 0]], 'block_type': 'basicblock'}
CONV_MODULE = {'type': 'SparseEncoder', 'in_channels': 5, 'sparse_shape': [144, 112, 41], 'output_channels': 128,
               'encoder_channels': [[16], [32, 32, 32], [64, 64, 64], [64, 64, 64]],
               'encoder_paddings': [[1], [1, 1, 1], [1, 1, 1], [[1, 1, 0], 1, 1]], 'block_type': 'conv_module'}
SMALL = {**BASICBLOCK, 'sparse_shape': [32, 24, 41], 'output_channels': 8,
         'encoder_channels': [[4, 4, 8], [8, 8, 8], [8, 8, 8], [8, 8]], 'base_channels': 4}


@pytest.fixture(scope='module')
def golden():
    return Golden('voxelize_sparse_encoder.npz')


def check_occupied(golden, key, out):
    occupied = np.unpackbits(golden[key])[:out[:, 0].numel()].astype(bool).reshape(out[:, 0].shape)
    assert np.array_equal((out != 0).any(1).numpy(), occupied)


@torch.no_grad()
@pytest.mark.parametrize('name, cfg', [('basicblock', BASICBLOCK), ('conv_module', CONV_MODULE)])
def test_encoder_equals_the_fixture(golden, name, cfg):
    encoder = ruled(MODELS.build(cfg))
    out = encoder(torch.from_numpy(golden['enc_features_scaled']), torch.from_numpy(golden['enc_coords']), 2)
    golden.check(f'{name}_out', out)
    check_occupied(golden, f'{name}_occupied', out)
    assert encoder.bev_shape == tuple(out.shape[2:]) and encoder.out_channels == out.shape[1]


@torch.no_grad()
def test_encoder_equals_the_fixture_on_given_voxels(golden):
    out = ruled(MODELS.build(BASICBLOCK))(torch.from_numpy(golden['given_features']), torch.from_numpy(golden['given_coords']), 2)
    golden.check('given_out', out)
    check_occupied(golden, 'given_occupied', out)


def test_state_dict_has_the_checkpoint_layout_and_round_trips():
    encoder = MODELS.build(SMALL)
    state = {k: v.clone() for k, v in encoder.state_dict().items()}
    assert state['conv_input.0.weight'].shape == (3, 3, 3, 5, 4)
    assert state['conv_out.0.weight'].shape == (1, 1, 3, 8, 8)
    assert encoder.conv_input[0].weight.shape == (4, 3, 3, 3, 5)
    other = MODELS.build(SMALL)
    other.load_state_dict(state)
    for name, parameter in encoder.named_parameters():
        assert torch.equal(parameter, dict(other.named_parameters())[name]), name
    # spconv 2's own layout is taken as well
    key = 'encoder_layers.encoder_layer1.2.0.weight'
    state[key] = state[key].permute(4, 0, 1, 2, 3)
    third = MODELS.build(SMALL)
    third.load_state_dict(state)
    assert torch.equal(third.encoder_layers.encoder_layer1[2][0].weight, encoder.encoder_layers.encoder_layer1[2][0].weight)


def test_an_ambiguous_kernel_is_taken_in_the_checkpoint_layout():
    kernel = torch.arange(3.0**5).view(3, 3, 3, 3, 3)
    assert torch.equal(kernel_to_memory(kernel, kernel.shape), kernel.permute(4, 0, 1, 2, 3))


def test_a_kernel_of_another_model_is_an_error():
    state = MODELS.build(SMALL).state_dict()
    state['conv_out.0.weight'] = torch.zeros(1, 1, 3, 8, 9)
    with pytest.raises(RuntimeError, match='conv_out.0.weight'):
        MODELS.build(SMALL).load_state_dict(state)


def voxels(count, seed=0, batch=1):
    rng = np.random.default_rng(seed)
    flat = rng.choice(32 * 24 * 40, count, replace=False)
    coords = np.stack([rng.integers(0, batch, count), flat // (24 * 40), flat // 40 % 24, flat % 40], 1)
    return torch.from_numpy(rng.normal(size=(count, 5)).astype(np.float32)), torch.from_numpy(coords).int()


@pytest.mark.parametrize('mode', ['train', 'eval'])
@pytest.mark.parametrize('count', [0, 1, 2, 63, 64, 65])
def test_few_voxels_run_forward_and_backward_with_a_gradient_everywhere(mode, count):
    encoder = getattr(MODELS.build(SMALL), mode)()
    out = encoder(*voxels(count), 2)
    assert out.shape == (2, 8 * 2, 4, 3) and torch.isfinite(out).all()
    assert (out[1] == 0).all(), 'the empty last sample stays, and is zero'
    out.square().sum().backward()
    for name, p in encoder.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name


@torch.no_grad()
def test_the_helper_sample_does_not_change_the_real_ones():
    encoder = ruled(MODELS.build(SMALL))
    few, coords = voxels(20)
    more, other = voxels(100, seed=1)
    other[:, 0] = 1
    together = encoder(torch.cat([few, more]), torch.cat([coords, other]), 2)  # 120 voxels: no helper
    torch.testing.assert_close(encoder(few, coords, 1), together[:1], rtol=1e-5, atol=1e-6)
    assert together[0].abs().sum() > 0


@torch.no_grad()
def test_one_voxel_moves_along_the_axis_it_is_moved_on():
    encoder = ruled(MODELS.build(SMALL))
    for axis, index in ((1, 2), (2, 3)):
        coords = torch.tensor([[0, 3, 3, 10]], dtype=torch.int32)
        coords[0, axis] = 20
        hit = (encoder(torch.ones(1, 5), coords, 1)[0] != 0).any(0).nonzero().float().mean(0)
        low = (encoder(torch.ones(1, 5), torch.tensor([[0, 3, 3, 10]], dtype=torch.int32), 1)[0] != 0).any(0).nonzero().float()
        moved = hit - low.mean(0)
        assert moved[axis - 1] > 1 and moved[2 - axis] == 0, (index, moved)


def test_float32_under_autocast():
    encoder = MODELS.build(SMALL).eval()
    features, coords = voxels(100)
    with torch.no_grad(), torch.autocast('cpu', dtype=torch.bfloat16):
        out = encoder(features, coords, 1)
    assert out.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(out, encoder(features, coords, 1))


def test_configuration_errors_are_named():
    with pytest.raises(ValueError, match="block_type must be 'conv_module' or 'basicblock', got 'x'"):
        MODELS.build({**SMALL, 'block_type': 'x'})
    with pytest.raises(ValueError, match='is too small'):
        MODELS.build({**SMALL, 'sparse_shape': [32, 24, 8]})
    with pytest.raises(ValueError, match='keeps its 4 input channels'):
        MODELS.build({**SMALL, 'encoder_channels': [[8, 8, 8], [8, 8, 8], [8, 8, 8], [8, 8]]})


def test_spconv_is_imported_only_by_the_encoder_and_its_absence_is_explained():
    code = ("import sys\n"
            "class Block:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name.split('.')[0] == 'spconv': raise ImportError('blocked')\n"
            "sys.meta_path.insert(0, Block())\n"
            "import mmdet3d_ext\n"
            "from mmdet3d_ext.registry import MODELS\n"
            "MODELS.build({'type': 'GeneralizedResNet', 'in_channels': 4, 'blocks': [[1, 4, 1]]})\n"
            "try: MODELS.build({'type': 'SparseEncoder', 'in_channels': 5, 'sparse_shape': [32, 32, 41]})\n"
            "except ImportError as error: print('SAID', error)\n")
    result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=REPO, timeout=120)
    assert 'SAID SparseEncoder needs spconv 2: install "spconv" (CPU) or "spconv-cu126" (GPU)' in result.stdout, result.stderr


@pytest.mark.gpu
def test_gpu_equals_cpu():
    encoder = ruled(MODELS.build(SMALL))
    features, coords = voxels(500, batch=2)
    with torch.no_grad():
        expected = encoder(features, coords, 2)
        got = encoder.cuda()(features.cuda(), coords.cuda(), 2).cpu()
    # float32 sums in another order; spconv may use TF32 tensor cores (10 bits of mantissa)
    assert (got - expected).abs().max() <= 5e-3 * expected.abs().max()


def test_each_setting_of_tf32_has_choices_of_its_own(monkeypatch):
    """spconv keeps the kernel that it chose for a shape, whatever was allowed then."""
    real = sparse_layers.sparse()
    ops = types.SimpleNamespace(GEMM_CPP='gemm', CONV_CPP='conv')
    fake = types.SimpleNamespace(**{**vars(real), 'ops': ops, 'constants': types.SimpleNamespace()})
    monkeypatch.setattr(sparse_layers, 'sparse', lambda: fake)
    monkeypatch.setattr(sparse_layers, '_new_tuners', lambda: ('new gemm', 'new conv'))
    monkeypatch.setattr(sparse_layers, '_TUNERS', {})
    seen = []
    for allowed in (False, False, True, False, True):
        sparse_layers.allow_tf32(allowed)
        seen.append((fake.constants.SPCONV_ALLOW_TF32, ops.GEMM_CPP, ops.CONV_CPP))
    old, new = (False, 'gemm', 'conv'), (True, 'new gemm', 'new conv')
    assert seen == [old, old, new, old, new]


@pytest.mark.gpu
@torch.no_grad()
def test_tf32_ends_with_its_setting(monkeypatch):
    encoder = ruled(MODELS.build(BASICBLOCK)).cuda()
    features, coords = (t.cuda() for t in voxels(3000, batch=2))
    monkeypatch.setattr(sparse_layers, '_TUNERS', {})
    results = []
    for allowed in (True, False, True):
        monkeypatch.setattr(torch.backends.cuda.matmul, 'allow_tf32', allowed)
        results.append(encoder(features, coords, 2))
    exact = encoder.cpu()(features.cpu(), coords.cpu(), 2).cuda()
    off = [(result - exact).abs().max() / exact.abs().max() for result in results]
    assert off[1] < 1e-4, off  # a layer in TF32 is off by more


@torch.no_grad()
def test_several_threads_lose_no_sums():
    """spconv's CPU kernel that adds rows races with itself; the shim keeps every sum (integers, so exact in any order)."""
    import spconv.pytorch as spconv
    generator = torch.Generator().manual_seed(0)
    cells = torch.unique(torch.randint(0, 24, (4000, 3), generator=generator), dim=0)
    coords = torch.cat([torch.zeros(len(cells), 1, dtype=torch.long), cells], 1).int()
    features = torch.randint(-4, 5, (len(coords), 16), generator=generator).float()
    conv = spconv.SubMConv3d(16, 16, 3, bias=False)
    conv.weight.copy_(torch.randint(-2, 3, conv.weight.shape, generator=generator).float())
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2, 2, 4, 4):
            torch.set_num_threads(threads)
            results.append(conv(spconv.SparseConvTensor(features, coords, [24, 24, 24], 1)).features)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


@torch.no_grad()
def test_a_call_on_the_cpu_leaves_the_layer_as_other_threads_see_it(monkeypatch):
    import spconv.pytorch as spconv

    from mmdet3d_ext.models.backbones.sparse_layers import sparse
    layer, seen = sparse().SubMConv3d(4, 4, 3, bias=True), []
    layer.algo = spconv.ConvAlgo.MaskImplicitGemm  # what spconv's CUDA build chooses
    real = spconv.conv.SparseConvolution._conv_forward

    def watched(self, *args, **kwargs):
        seen.append((self.algo, layer.algo))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(spconv.conv.SparseConvolution, '_conv_forward', watched)
    features, coords = voxels(50)
    layer(spconv.SparseConvTensor(features[:, :4].contiguous(), coords, [32, 24, 41], 1))
    assert seen == [(spconv.ConvAlgo.Native, spconv.ConvAlgo.MaskImplicitGemm)]
