"""Assertion helpers and fixtures' locations shared by the tests."""
from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch

REPO = Path(__file__).resolve().parents[1]


def shared_dir(*parts: str) -> Path:
    """A path in the optional ``shared`` folder beside the checkout (or ``$MMDET3D_EXT_SHARED``); skips the test without it."""
    for root in (os.environ.get('MMDET3D_EXT_SHARED'), REPO / 'shared', REPO.parent / 'shared'):
        if root and Path(root, *parts).exists():
            return Path(root, *parts)
    pytest.skip(f'needs {"/".join(("shared",) + parts)}, which is not beside this checkout')


class Golden:
    """One parity fixture file: whole arrays and the sub-sampled form (``__shape/__stride/__sub/__stats``)."""

    def __init__(self, name: str):
        self.data = np.load(shared_dir('parity', name), allow_pickle=False)

    def __getitem__(self, key: str) -> np.ndarray:
        return self.data[key]

    def __contains__(self, key: str) -> bool:
        return key in self.data or f'{key}__shape' in self.data

    def check(self, key: str, actual, rtol: float = 1e-5) -> None:
        """Assert that ``actual`` equals the stored tensor: max difference <= ``rtol`` of the largest magnitude."""
        actual = actual.detach().cpu().numpy() if isinstance(actual, torch.Tensor) else np.asarray(actual)
        if key in self.data:
            expected, got = self.data[key], actual
            assert expected.shape == got.shape, f'{key}: shape {got.shape}, expected {expected.shape}'
        else:
            shape = tuple(self.data[f'{key}__shape'])
            assert actual.shape == shape, f'{key}: shape {actual.shape}, expected {shape}'
            strides = self.data[f'{key}__stride']
            expected, got = self.data[f'{key}__sub'], actual[tuple(slice(None, None, int(s)) for s in strides)]
            stats = self.data[f'{key}__stats']
            total = np.abs(actual.astype(np.float64)).sum()
            assert abs(total - stats[2]) <= rtol * max(abs(stats[2]), 1e-12), f'{key}: abs sum {total}, expected {stats[2]}'
        if expected.dtype.kind in 'biu':
            assert np.array_equal(expected, got), f'{key}: {np.sum(expected != got)} of {expected.size} values differ'
            return
        scale = max(np.abs(expected).max(initial=0.0), 1e-12)
        worst = np.abs(expected.astype(np.float64) - got.astype(np.float64)).max(initial=0.0)
        assert np.isfinite(got).all() and worst <= rtol * scale, f'{key}: max difference {worst:.3e} of {scale:.3e}'


def weights_rule():
    """The module that gives deterministic weights by tensor name (``shared/parity/weights_rule.py``)."""
    spec = importlib.util.spec_from_file_location('weights_rule', shared_dir('parity', 'weights_rule.py'))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ruled(model):
    """The model, in evaluation, with the weights that the fixtures were made with."""
    model.load_state_dict(weights_rule().ruled_state_dict(model.state_dict()))
    model.eval()  # of mmdet's backbones it returns nothing
    return model


def load_as_reference(head, state) -> None:
    """Give a detection head the reference's weights by the way that a user's file takes (:func:`load_weights`)."""
    from mmdet3d_ext.engine.checkpoint import load_weights
    model = torch.nn.Module()
    model.heads = torch.nn.ModuleDict({'object': head})
    content = {'state_dict': {f'heads.object.{key}': value for key, value in state.items()}, 'meta': {'mmcv_version': '1.4.0'}}
    report = load_weights(model, 'reference.pth', content=content, complete=True)
    assert report.swapped and not report.unexpected


def randn(seed: int, shape) -> torch.Tensor:
    """``torch.randn`` from a CPU generator with this seed (the fixtures' input rule)."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def rand(seed: int, shape) -> torch.Tensor:
    """``torch.rand`` from a CPU generator with this seed (the fixtures' input rule)."""
    return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed))
