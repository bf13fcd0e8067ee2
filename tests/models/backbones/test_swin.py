"""Our SwinTransformer computes what mmdet's does, keeps less for the backward pass, and holds what published checkpoints hold."""
import copy
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from mmdet.models.backbones.swin import SwinTransformer as MmdetSwin
from testing import Golden, randn, ruled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.engine.memory.as_cuda import cuda_rules
from mmdet3d_ext.engine.memory.plan import _fake_state
from mmdet3d_ext.geometry import on_device
from mmdet3d_ext.models.backbones import SwinTransformer, windows
from mmdet3d_ext.registry import MODELS

SWIN_T = {'type': 'SwinTransformer', 'embed_dims': 96, 'depths': [2, 2, 6, 2], 'num_heads': [3, 6, 12, 24], 'window_size': 7,
          'mlp_ratio': 4, 'qkv_bias': True, 'qk_scale': None, 'drop_rate': 0.0, 'attn_drop_rate': 0.0, 'drop_path_rate': 0.2,
          'patch_norm': True, 'out_indices': [1, 2, 3], 'with_cp': False, 'convert_weights': True}
SMALL = {'embed_dims': 16, 'depths': [2, 2], 'num_heads': [2, 4], 'window_size': 4, 'strides': (4, 2), 'out_indices': [0, 1],
         'drop_path_rate': 0.0}


def pair(dtype=torch.float64, **settings):
    """Ours and mmdet's with the same weights, random in every parameter, in training."""
    torch.manual_seed(0)
    lean = settings.pop('lean', True)
    settings = {**SMALL, **settings}
    ours, theirs = SwinTransformer(lean=lean, **copy.deepcopy(settings)), MmdetSwin(**copy.deepcopy(settings))
    state = {k: torch.randn_like(v) * 0.3 + (1.0 if k.endswith('norm.weight') else 0.0) if v.is_floating_point() else v
             for k, v in theirs.state_dict().items()}
    for model in (ours, theirs):
        model.load_state_dict(state)
        model.to(dtype)
        model.train()
    return ours, theirs


def run(model, x, seed=5, context=nullcontext):
    """Outputs, and gradients of the input and of all parameters for random gradients of the outputs."""
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    with context():
        outs = model(x)
    generator = torch.Generator().manual_seed(7)
    torch.autograd.backward(outs, [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in outs])
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return [o.detach() for o in outs], {'input': x.grad, **gradients}


def assert_same(ours, theirs, rtol=1e-9):
    for i, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        assert a.dtype == b.dtype and (a - b).abs().max() <= rtol * b.abs().max(), f'output {i}'
    assert ours[1].keys() == theirs[1].keys()
    for name, b in theirs[1].items():
        a = ours[1][name]
        assert (a is None) == (b is None), name
        if b is not None:
            assert a.dtype == b.dtype and a.shape == b.shape, name
            assert (a - b).abs().max() <= rtol * b.abs().max(), f'{name}: {(a - b).abs().max():.2e} of {b.abs().max():.2e}'


@torch.no_grad()
@pytest.mark.parametrize('prefix, seed, shape', [('', 901, (2, 3, 128, 176)), ('odd_', 902, (1, 3, 100, 90))])
def test_swin_equals_the_fixture(prefix, seed, shape):
    golden = Golden('swin_backbone.npz')
    model = ruled(MODELS.build(SWIN_T))
    assert type(model) is SwinTransformer
    outputs = model(randn(seed, shape))
    assert len(outputs) == 3
    for i, out in enumerate(outputs):
        golden.check(f'{prefix}out{i}', out)


# Tokens of the first stage per side, in windows of 4: whole windows, one window, less than one, padding on either side, odd.
@pytest.mark.parametrize('tokens', [(8, 16), (4, 4), (3, 2), (8, 10), (9, 12), (7, 5)])
@pytest.mark.parametrize('lean', [True, 'mlp'])
def test_values_and_gradients_are_mmdets(tokens, lean):
    ours, theirs = pair(lean=lean)
    x = randn(1, (2, 3, 4 * tokens[0], 4 * tokens[1])).double()
    assert_same(run(ours, x), run(theirs, x))


@pytest.mark.parametrize('settings', [
    {'window_size': 7, 'depths': [1, 3], 'embed_dims': 12, 'num_heads': [3, 3]}, {'window_size': 3}, {'qkv_bias': False},
    {'qk_scale': 0.2}, {'patch_norm': False}, {'use_abs_pos_embed': True, 'pretrain_img_size': (36, 28)}, {'drop_path_rate': 0.5},
    {'strides': (4, 1)}, {'drop_rate': 0.2}, {'attn_drop_rate': 0.2, 'drop_path_rate': 0.3}, {'act_cfg': {'type': 'ReLU'}},
    {'with_cp': True, 'drop_path_rate': 0.3}], ids=lambda s: next(iter(s)))
def test_with_other_settings_too(settings):
    """Random depth and dropout included: the same draws in the same order."""
    ours, theirs = pair(**settings)
    x = randn(2, (3, 3, 36, 28)).double()
    assert_same(run(ours, x), run(theirs, x))


def test_in_float32_and_a_second_time():
    ours, theirs = pair(torch.float32, drop_path_rate=0.2)
    for seed in (1, 2):
        x = randn(seed, (2, 3, 36, 40))
        assert_same(run(ours, x, seed), run(theirs, x, seed), rtol=2e-5)


def test_two_forward_passes_before_the_backward_passes():
    ours, theirs = pair()
    a, b = (randn(seed, (2, 3, 32, size)).double() for seed, size in ((1, 32), (2, 36)))

    def both(model):
        sum(o.square().mean() for x in (a, b) for o in model(x)).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    found, expected = both(ours), both(theirs)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('dtype, limit', [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_under_autocast_it_is_as_close_to_the_truth_as_mmdets(dtype, limit):
    ours, theirs = pair(torch.float32, lean='mlp')
    x = randn(3, (2, 3, 36, 40))
    truth = run(theirs, x)
    context = lambda: torch.autocast('cpu', dtype)  # noqa: E731
    found, usual = run(ours, x, context=context), run(theirs, x, context=context)

    def off(got, name=None):
        got, expected = (got[1][name], truth[1][name]) if name else (got[0][-1], truth[0][-1])
        return (got - expected).norm() / expected.norm()

    assert found[0][0].dtype == usual[0][0].dtype
    assert off(found) <= max(1.5 * off(usual), limit)
    for name in truth[1]:
        if truth[1][name] is not None:
            assert found[1][name].dtype == torch.float32
            assert off(found, name) <= max(2 * off(usual, name), limit), (name, off(found, name), off(usual, name))


def test_evaluation_frozen_stages_and_inference_mode():
    ours, theirs = pair(torch.float32, drop_path_rate=0.5, frozen_stages=1)
    x = randn(4, (2, 3, 36, 40))
    outs, frozen = run(ours, x)
    assert frozen['stages.0.blocks.0.attn.w_msa.qkv.weight'] is None and frozen['patch_embed.projection.weight'] is None
    assert_same((outs, frozen), run(theirs, x), rtol=2e-5)
    ours.eval(), theirs.eval()
    windows._TABLES.clear()
    with torch.inference_mode():
        inferred = ours(x)
    with torch.no_grad():
        for a, b, c in zip(ours(x), theirs(x), inferred, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            assert torch.equal(a, c)
    assert_same(run(ours, x), run(theirs, x), rtol=2e-5)  # tables that were made under inference_mode serve training


def test_only_some_parameters_trained():
    ours, theirs = pair()
    for model in (ours, theirs):
        for name, p in model.named_parameters():
            p.requires_grad_('relative_position_bias_table' in name or 'norm1' in name or name.endswith('fc.bias'))
    x = randn(4, (2, 3, 36, 40)).double()
    assert_same(run(ours, x), run(theirs, x))


def test_in_deterministic_mode_and_within_data_parallel_training(tmp_path):
    ours, theirs = pair(torch.float32, drop_path_rate=0.2)
    x = randn(4, (2, 3, 36, 40))
    expected = run(theirs, x)
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/group', rank=0, world_size=1)
    torch.use_deterministic_algorithms(True)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(ours)
        outs, gradients = run(parallel, x)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.distributed.destroy_process_group()
    assert_same((outs, {name.removeprefix('module.'): grad for name, grad in gradients.items()}), expected, rtol=2e-5)


def test_in_half_precision_throughout():
    """Parameters and images in bfloat16, without autocast; mmdet's mask is in float32 and ends that with an error."""
    ours, theirs = pair(torch.bfloat16)
    x = randn(4, (2, 3, 36, 40)).bfloat16()
    (found, gradients), (truth, expected) = run(ours, x), run(theirs.float(), x.float())
    for a, b in zip(found, truth, strict=True):
        assert a.dtype == torch.bfloat16 and (a - b).norm() <= 0.03 * b.norm()
    for name, a in gradients.items():
        assert a.dtype == torch.bfloat16 and (a - expected[name]).norm() <= 0.1 * expected[name].norm(), name


def test_state_dict_initialisation_and_checkpoints_are_mmdets(tmp_path):
    settings = {k: v for k, v in SWIN_T.items() if k != 'type'}
    torch.manual_seed(1)
    ours = SwinTransformer(**settings)
    ours.init_weights()
    torch.manual_seed(1)
    theirs = MmdetSwin(**settings)
    theirs.init_weights()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name

    # As the published file names and orders it: blocks in layers, qkv and fc1, merging in another order.
    state = {'patch_embed.proj.weight': torch.randn(16, 3, 4, 4), 'layers.0.blocks.1.attn.qkv.weight': torch.randn(48, 16),
             'layers.0.blocks.1.attn.relative_position_bias_table': torch.randn(169, 2),
             'layers.0.blocks.0.mlp.fc1.bias': torch.randn(64), 'layers.0.downsample.reduction.weight': torch.randn(32, 64),
             'layers.0.downsample.norm.weight': torch.randn(64)}
    torch.save({'model': state}, tmp_path / 'swin.pth')
    models = []
    for cls in (SwinTransformer, MmdetSwin):
        from mmcv import ConfigDict
        init = ConfigDict(type='Pretrained', checkpoint=str(tmp_path / 'swin.pth'))
        torch.manual_seed(2)
        models.append(cls(**SMALL, convert_weights=True, init_cfg=init))  # the table is resized from windows of 7 to 4
        models[-1].init_weights()
    found, expected = (m.state_dict() for m in models)
    assert torch.equal(found['stages.0.blocks.1.attn.w_msa.qkv.weight'], state['layers.0.blocks.1.attn.qkv.weight'])
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_it_is_ours_in_every_registry_of_ours_and_mmdet_keeps_its_own():
    from mmdet.models.builder import BACKBONES
    assert MODELS.get('SwinTransformer') is SwinTransformer and BACKBONES.get('SwinTransformer') is MmdetSwin
    assert type(MODELS.build({'type': 'SwinTransformer', **SMALL, 'lean': False}).stages[0].blocks[0]).__module__.startswith('mmdet.')
    with pytest.raises(ValueError, match="lean must be true, false or mlp, got 'all'"):
        MODELS.build({'type': 'SwinTransformer', **SMALL, 'lean': 'all'})
    with pytest.raises(TypeError, match="takes no argument 'window_sizes'; did you mean 'window_size'"):
        MODELS.build({'type': 'SwinTransformer', 'window_sizes': 7})


def kept_bytes(model, x, dtype=None):
    """Bytes that the forward pass saves for the backward, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    saved = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            saved[t.untyped_storage().data_ptr()] = (t.untyped_storage().nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast('cpu', dtype, enabled=dtype is not None):
        outs = model(x)
    assert outs[0].requires_grad
    return sum(size for size, _ in saved.values())


@pytest.mark.parametrize('lean, dtype, most', [(True, None, 0.52), ('mlp', None, 0.35), (True, torch.bfloat16, 0.43),
                                               ('mlp', torch.bfloat16, 0.29)])
def test_it_keeps_half_of_what_mmdet_keeps_or_less(lean, dtype, most):
    size = dict(window_size=7, embed_dims=32, num_heads=[1, 2], drop_path_rate=0.2)
    ours, theirs = pair(torch.float32, lean=lean, **size)
    x = randn(1, (2, 3, 128, 128))
    assert kept_bytes(ours, x, dtype) <= most * kept_bytes(theirs, x, dtype)


def test_what_is_kept_is_what_the_layers_say():
    ours, _ = pair(torch.float32)
    block, tokens, channels = ours.stages[0].blocks[1], 2 * 9 * 10, 16
    x = randn(1, (2, 90, channels)).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        block(x, (9, 10))
    own = {p.data_ptr() for p in block.parameters()}
    values = sum(t.numel() for t in saved if t.data_ptr() not in own)
    assert values <= (10 * channels + 2) * tokens + 5 * channels  # normalised twice, qkv, result, hidden; statistics


class Count(TorchDispatchMode):
    """Counts operators, views left out: on a GPU each is at least one kernel."""

    VIEWS = set('''view _unsafe_view transpose t permute expand slice select unbind as_strided detach unsqueeze alias empty new_empty
        empty_like _reshape_alias split squeeze lift_fresh device promote_types'''.split())

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name.partition('::')[2] not in self.VIEWS
        return func(*args, **(kwargs or {}))


def test_a_training_step_calls_fewer_operators_than_mmdets():
    counts = []
    for model in pair(torch.float32, depths=[2, 6], drop_path_rate=0.2):
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        _fake_state(model, fake)
        with cuda_rules(), fake:  # the operators that run on a GPU
            x = torch.randn(2, 3, 36, 40)
            with Count() as forward, torch.autocast('cpu', torch.float16):
                outs = model(x)
            with Count() as backward:
                sum(o.sum() for o in outs).backward()
        counts.append((forward.count, backward.count))
    ours, theirs = counts
    assert ours[0] <= 0.65 * theirs[0] and ours[1] <= 1.1 * theirs[1], counts


def test_relative_positions_are_mmdets_buffer():
    for edge in (2, 4, 7):
        model = MmdetSwin(**{**SMALL, 'window_size': edge})
        assert np.array_equal(windows.relative_positions(edge), model.stages[0].blocks[0].attn.w_msa.relative_position_index.numpy())


def test_tables_lead_there_and_back():
    grid = windows.windows(2, (5, 9), 4, 2, torch.device('cpu'))
    tokens = torch.arange(2 * 45)
    there = torch.cat([tokens, tokens.new_tensor([-1])])[grid.to_windows]
    assert torch.equal(there[grid.to_map[:-1]], tokens) and (there == -1).sum() == 2 * (8 * 12 - 45)
    assert there[grid.to_map[-1]] == -1
    rows = torch.arange(3 * 90)
    there = torch.cat([rows, rows.new_tensor([-1, -2, -3])])[grid.qkv_to_windows]
    assert torch.equal(there[grid.qkv_to_map], rows)
    assert torch.equal(there[grid.padding].view(-1, 3), rows.new_tensor([-1, -2, -3]).expand(len(grid.padding) // 3, 3))
    assert len(grid.padding) == (there < 0).sum()
    assert windows.windows(2, (5, 9), 4, 2, torch.device('cpu')) is grid


def test_tables_made_while_tensors_are_watched_do_not_outlive_it():
    windows._TABLES.clear()
    with Count():
        assert on_device.traced()
        windows.windows(1, (4, 4), 4, 0, torch.device('cpu'))
    assert not windows._TABLES


@pytest.mark.parametrize('dtype, width', [(torch.float32, 4), (torch.float32, 3), (torch.bfloat16, 8), (torch.bfloat16, 4)])
def test_rows_are_moved_whole(dtype, width):
    rows = torch.randn(10, width).to(dtype)
    index = torch.tensor([3, 3, 0, 9], dtype=torch.int32)
    assert torch.equal(windows.take_rows(rows, index), rows[index.long()])


def test_gradients_in_one_buffer_are_not_copied():
    grid = windows.windows(2, (4, 8), 4, 0, torch.device('cpu'))
    buffer = torch.randn(2, 16, 3, grid.count * 2, 8)
    like = torch.empty(2 * 16 * 3 * grid.count, 16)
    parts = [buffer.select(2, i).transpose(1, 2) for i in range(3)]
    found = windows._one_buffer(parts, like)
    assert found.data_ptr() == buffer.data_ptr() and torch.equal(found, buffer.view_as(like))
    for other in ([p.clone() for p in parts], parts[::-1], [parts[0], parts[2], parts[1]]):
        found = windows._one_buffer(other, like)
        assert torch.equal(found, torch.stack([p.transpose(1, 2) for p in other], 2).view_as(like))


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


@pytest.mark.gpu
@pytest.mark.parametrize('dtype, limit', [(None, 3e-5), (torch.float16, 0.004), (torch.bfloat16, 0.03)])
def test_on_a_gpu_the_fused_attention_gives_the_same(dtype, limit, monkeypatch):
    """As close to float64 as mmdet's own layers on the GPU are; and the attention's gradients come in one buffer."""
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)
    ours, theirs = pair(torch.float32, window_size=7, embed_dims=96, num_heads=[3, 6], lean='mlp')
    x = randn(3, (2, 3, 36, 100))
    truth = run(theirs.double(), x.double())
    context = (lambda: torch.autocast('cuda', dtype)) if dtype else nullcontext
    usual = run(theirs.float().cuda(), x.cuda(), context=context)
    copies, stack = [], torch.stack
    monkeypatch.setattr(torch, 'stack', lambda *a, **k: copies.append(a) or stack(*a, **k))
    found = run(ours.cuda(), x.cuda(), context=context)
    assert not copies

    def off(got, expected):
        return ((got.cpu().double() - expected).norm() / expected.norm()).item()

    for a, b, expected in zip(found[0], usual[0], truth[0], strict=True):
        assert off(a, expected) <= max(1.5 * off(b, expected), limit)
    for name, expected in truth[1].items():
        a, b = off(found[1][name], expected), off(usual[1][name], expected)
        assert a <= max(2 * b, limit), (name, a, b)


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_steps_repeat_bitwise(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'deterministic', True)  # of the patches' convolution
    ours, _ = pair(torch.float32, window_size=7, embed_dims=96, num_heads=[3, 6], drop_path_rate=0.2)
    ours.cuda()
    x = randn(3, (2, 3, 36, 100)).cuda()

    def step():
        torch.manual_seed(1)
        with torch.autocast('cuda', torch.float16):
            outs = ours(x)
        sum(o.float().square().mean() for o in outs).backward()
        gradients = [p.grad for p in ours.parameters()]
        ours.zero_grad(set_to_none=True)
        return gradients

    first = step()
    torch.cuda.set_sync_debug_mode('error')
    try:
        again = step()
    finally:
        torch.cuda.set_sync_debug_mode('default')
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
