"""Recomputation and memory layout: the same losses, gradients and statistics, fewer tensors kept, and clear refusals."""
import copy
import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from mmdet3d_ext.models.builder import build_model
from mmdet3d_ext.models.detectors.memory_switches import is_recomputed, kept_statistics, recompute, units
from mmdet3d_ext.registry import MODELS

spec = importlib.util.spec_from_file_location('small_models', Path(__file__).with_name('test_bevfusion.py'))
small = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small)

SWIN = {'type': 'SwinTransformer', 'embed_dims': 8, 'depths': [2, 2], 'num_heads': [1, 2], 'window_size': 4, 'strides': (4, 2),
        'out_indices': [0, 1], 'drop_path_rate': 0.2, 'init_cfg': None}


def with_swin(**more):
    """The small joint model on a Swin with random depth, and a residual decoder for the map."""
    settings = copy.deepcopy(small.config('camera', 'lidar', **more))
    camera = settings['encoders']['camera']
    camera['backbone'] = dict(SWIN)
    camera['neck']['in_channels'] = [8, 16]
    camera['vtransform'].update(feature_size=[8, 12], type='LSSTransform')
    decoder = {'backbone': {'type': 'GeneralizedResNet', 'in_channels': 7, 'blocks': [[1, 8, 1], [1, 8, 2]]},
               'neck': {'type': 'LSSFPN', 'in_indices': [-1, 0], 'in_channels': [8, 8], 'out_channels': 12, 'scale_factor': 1}}
    settings['decoder'] = {'object': settings['decoder'], 'map': decoder}
    return settings


def run(settings, steps=2):
    """Losses and gradients of the last of some steps, buffers, and bytes that the forward pass saved for the backward."""
    torch.manual_seed(0)
    model = build_model(copy.deepcopy(settings)).train()
    saved = set()

    def pack(t):
        saved.add((t.data_ptr(), t.untyped_storage().nbytes()))
        return t

    for step in range(steps):
        torch.manual_seed(step + 1)
        model.zero_grad()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            losses = model(**small.batch(seed=step))
            total = sum(v for k, v in losses.items() if k.startswith('loss/'))
        kept = sum(size for _, size in saved)
        total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    return model, {k: v.detach() for k, v in losses.items()}, gradients, buffers, kept


@pytest.fixture(scope='module')
def plain():
    return run(with_swin())


@pytest.mark.parametrize('names', [['encoders.camera.backbone'], ['encoders.camera.vtransform'], ['decoder'], ['decoder.map.backbone'],
                                   ['encoders.camera.neck', 'fuser'], ['encoders.lidar.backbone'],
                                   ['encoders.camera.backbone', 'encoders.camera.vtransform', 'decoder', 'fuser']])
def test_recomputation_changes_no_result(plain, names):
    _, losses, gradients, buffers, kept = plain
    model, got, again, after, less = run(with_swin(checkpoint=names))
    assert list(got) == list(losses)
    for name in losses:
        torch.testing.assert_close(got[name], losses[name], rtol=0, atol=0)
    for name in gradients:
        torch.testing.assert_close(again[name], gradients[name], rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f'{name}: {m}')
    for name in buffers:  # running statistics were updated once per step, not twice
        torch.testing.assert_close(after[name], buffers[name], rtol=0, atol=0, msg=lambda m, name=name: f'{name}: {m}')
    assert less < kept
    assert set(model.state_dict()) == set(plain[0].state_dict())


def test_with_cp_of_the_libraries_is_the_same_recomputation(plain):
    settings = with_swin()
    settings['encoders']['camera']['backbone']['with_cp'] = True
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model, losses, gradients, buffers, kept = run(settings)
    assert kept < plain[4]
    blocks = [m for m in model.modules() if type(m).__name__ == 'SwinBlock']
    assert blocks and all(is_recomputed(m) and not m.with_cp for m in blocks)
    for name in plain[2]:
        torch.testing.assert_close(gradients[name], plain[2][name], rtol=1e-5, atol=1e-6)
    for name in plain[3]:
        torch.testing.assert_close(buffers[name], plain[3][name], rtol=0, atol=0)


@pytest.mark.parametrize('names', [True, ['decoder', 'fuser']])
def test_channels_last_changes_the_layout_only(plain, names):
    model, losses, gradients, _, _ = run(with_swin(channels_last=names))
    for name in plain[1]:
        torch.testing.assert_close(losses[name], plain[1][name], rtol=1e-4, atol=1e-5)
    for name in plain[2]:
        torch.testing.assert_close(gradients[name], plain[2][name], rtol=1e-3, atol=1e-4)
    weight = model.decoder['object']['backbone'].blocks[0][0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    state = model.state_dict()
    fresh = build_model(with_swin())
    fresh.load_state_dict(state)
    for (name, a), b in zip(fresh.state_dict().items(), state.values(), strict=True):
        assert torch.equal(a, b), name


def test_recomputed_parts_in_evaluation_and_copies():
    model = build_model(with_swin(checkpoint=['decoder', 'encoders.camera.backbone'])).eval()
    twin = build_model(with_swin()).eval()
    twin.load_state_dict(model.state_dict())
    batch = small.batch()
    with torch.no_grad():
        a, b = model(**batch), twin(**batch)
    assert torch.equal(a[0]['masks_bev'], b[0]['masks_bev'])
    clone = copy.deepcopy(model)
    layer, copied = model.decoder['object']['backbone'].blocks[0], clone.decoder['object']['backbone'].blocks[0]
    assert is_recomputed(copied) and copied[0].weight is not layer[0].weight
    assert isinstance(layer, nn.Sequential) and type(layer).__name__ == 'Sequential'


def test_frozen_parts_are_not_recomputed():
    model = build_model(with_swin(checkpoint=['encoders.camera.backbone'], freeze=['encoders.camera.backbone'])).train()
    assert not model.encoders['camera']['backbone'].training
    losses = model(**small.batch())
    sum(v for k, v in losses.items() if k.startswith('loss/')).backward()


def test_units_are_blocks_or_chains():
    model = build_model(with_swin())
    swin = model.encoders['camera']['backbone']
    assert {type(m).__name__ for m in units(swin)} == {'SwinBlock'} and len(units(swin)) == 4
    assert units(model.decoder['object']['backbone']) == list(model.decoder['object']['backbone'].blocks)
    assert units(model.fuser) == [model.fuser]
    assert units(model.encoders['lidar']['backbone']) == [model.encoders['lidar']['backbone']]
    assert len(units(model.decoder)) == 2 + 2 + 2 + 1


def test_the_map_head_decides_for_itself():
    head = dict(type='EnhancedBEVSegmentationHead', in_channels=12, classes=['a', 'b'], aspp_channels=8, decoder_channels=[8],
                grid_transform=dict(input_scope=[[-12.8, 12.8, 0.8], [-9.6, 9.6, 0.8]], output_scope=[[-10, 10, 1.0], [-9, 9, 0.9]]))
    settings = small.config('camera', 'lidar', heads=('object',), checkpoint=['heads.map'])
    settings['heads']['map'] = head
    model = build_model(settings)
    assert model.heads['map'].checkpointed == {'aspp', 'attention', 'decoder'}


@pytest.mark.parametrize('key, value, words', [
    ('checkpoint', ['decoder.nack'], ("model.checkpoint: there is no part named 'decoder.nack'", 'decoder.backbone')),
    ('checkpoint', 'decoder', ('model.checkpoint: write a list',)),
    ('checkpoint', [3], ('model.checkpoint: write a list',)),
    ('channels_last', ['heads.car'], ("model.channels_last: there is no part named 'heads.car'",)),
    ('channels_last', 'decoder', ('model.channels_last: write true, false or a list',))])
def test_wrong_names_are_refused(key, value, words):
    with pytest.raises(ValueError) as caught:
        build_model(small.config('camera', **{key: value}))
    for word in words:
        assert word in str(caught.value)


def test_kept_statistics_with_every_kind_of_momentum():
    for momentum in (0.1, None, 1.0):
        norm = nn.BatchNorm2d(3, momentum=momentum)
        norm(torch.randn(2, 3, 4, 4))
        before = {name: b.clone() for name, b in norm.named_buffers()}
        with kept_statistics(norm):
            norm(torch.randn(2, 3, 4, 4))
        assert norm.momentum == momentum
        for name, b in norm.named_buffers():
            assert torch.equal(b, before[name]), name
        norm(torch.randn(2, 3, 4, 4))
        assert norm.num_batches_tracked == 2


def test_an_error_in_a_recomputed_part_leaves_it_as_it_was():
    norm = nn.Sequential(nn.BatchNorm2d(3))
    recompute(norm)
    with pytest.raises(RuntimeError), kept_statistics(norm):
        raise RuntimeError
    assert norm[0].momentum == 0.1 and norm[0].num_batches_tracked is not None
    recompute(norm)  # twice is once
    assert type(norm).__mro__.count(type(norm).__mro__[1]) == 1


def test_the_arguments_are_known_to_the_builder():
    assert MODELS.get('BEVFusion') is not None
