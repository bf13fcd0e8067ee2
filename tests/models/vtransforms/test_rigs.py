"""Geometry kept for a fixed rig: exactly the same maps, looked up by every bit of the matrices, bounded, off in training."""
import copy
import importlib.util
import pickle
from pathlib import Path

import pytest
import torch

from mmdet3d_ext.models.builder import build_model
from mmdet3d_ext.models.vtransforms.rigs import RIG_MATRICES, RigCache, rig_key


def beside(name):
    """The module of another test file in this folder, for its small batches."""
    spec = importlib.util.spec_from_file_location(f'{name}_for_rigs', Path(__file__).with_name(f'{name}.py'))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


base, depth = beside('test_base'), beside('test_bevdepth')
KINDS = {
    'lss': (base.CFG, base.batch),
    'depth-aware': ({**base.CFG, 'type': 'DepthLSSTransform'}, base.batch),
    'bevdepth': (depth.CFG, depth.batch),
    'refined': ({**depth.CFG, 'bevdepth_refine': True}, depth.batch),
}


def made(kind, compat=None):
    torch.manual_seed(1)
    cfg, batch = KINDS[kind]
    model, inputs = build_model(cfg, compat=compat).eval(), batch()
    samples, cameras = inputs['camera2lidar'].shape[:2]
    points = [torch.randn(50, 5) * 4 for _ in range(samples)]
    return model, dict(inputs, points=points), [torch.randn(samples, cameras, 6, *cfg['feature_size']) for _ in range(2)]


@torch.no_grad()
@pytest.mark.parametrize('compat', [None, 'reference'])
@pytest.mark.parametrize('kind', KINDS)
def test_exactly_the_same_maps(kind, compat):
    model, inputs, frames = made(kind, compat)
    model.add_grid('map', [-9.6, 9.6, 0.4], [-6.4, 6.4, 0.4], 2)
    plain = [model(x, **inputs) for x in frames]
    model.cache_rigs(2)
    for _ in range(2):
        for x, want in zip(frames, plain, strict=True):
            found = model(x, **inputs)
            assert found.keys() == want.keys() and all(torch.equal(found[key], want[key]) for key in want)
    assert (model.rigs.misses, model.rigs.hits, len(model.rigs)) == (1, 3, 1)


@torch.no_grad()
@pytest.mark.parametrize('name', RIG_MATRICES)
def test_one_bit_of_a_matrix_is_another_rig(name):
    model, inputs, (x, _) = made('lss')
    model.cache_rigs(4)
    first = model(x, **inputs)
    moved = dict(inputs, **{name: inputs[name].clone()})
    place = (-1, *[-1] * (inputs[name].dim() - 3), 0, 0)
    moved[name][place] = torch.nextafter(moved[name][place], torch.tensor(9.0))
    assert rig_key(moved) != rig_key(inputs)
    model(x, **moved)
    assert model.rigs.misses == 2 and torch.equal(model(x, **inputs), first) and model.rigs.hits == 1
    far = dict(inputs, **{name: inputs[name].clone()})
    far[name][place] *= 1.5
    found = model(x, **far)
    model.cache_rigs(0)
    assert torch.equal(found, model(x, **far)) and not torch.equal(found, first)


@torch.no_grad()
def test_the_key_may_be_taken_before_and_batches_of_other_sizes_differ():
    model, inputs, (x, _) = made('lss')
    assert model.rig(inputs) is None, 'off unless asked for'
    model.cache_rigs(2)
    want = model(x, **inputs)
    assert torch.equal(model(x, rig=model.rig(inputs), **inputs), want) and model.rigs.hits == 1
    one = {key: value[:1] for key, value in inputs.items()}
    torch.testing.assert_close(model(x[:1], **one), want[:1])
    assert model.rigs.misses == 2
    assert rig_key({**inputs, 'camera2lidar': None}) is None


def test_bounded_and_the_rig_unused_for_longest_goes():
    cache, made_for = RigCache(2), []
    for key in ('a', 'b', 'a', 'c', 'a', 'b'):
        assert cache.get(key, lambda: made_for.append(key) or key) == key  # noqa: B023
    assert made_for == ['a', 'b', 'c', 'b'] and len(cache) == 2 and (cache.hits, cache.misses) == (2, 4)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match='at least one'):
            RigCache(wrong)


def test_off_in_training_and_not_copied():
    model, inputs, (x, _) = made('lss')
    model.cache_rigs(2)
    model.train()
    x.requires_grad_()
    model(x, **inputs).sum().backward()
    assert model.rigs.misses == 0 and x.grad.abs().sum() > 0
    model.eval()
    with torch.no_grad():
        model(x, **inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.rigs.most == 2 and len(other.rigs) == 0 and len(model.rigs) == 1
    model.add_grid('map', [-9.6, 9.6, 0.4], [-6.4, 6.4, 0.4], 2)
    assert len(model.rigs) == 0, 'another grid needs plans of its own'


@pytest.mark.parametrize('kind', KINDS)
def test_kept_in_inference_mode_and_used_with_gradients(kind):
    model, inputs, (x, _) = made(kind)
    model.cache_rigs(2)
    with torch.inference_mode():
        want = model(x, **inputs)
    x.requires_grad_()
    found = model(x, **inputs)
    found.sum().backward()
    assert model.rigs.hits == 1 and torch.equal(found, want) and x.grad.abs().sum() > 0
