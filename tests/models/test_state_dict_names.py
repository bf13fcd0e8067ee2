"""Names and shapes of encoders, fuser and decoder equal those of published checkpoints, for all 14 models."""
import importlib.util
import json
import warnings
from pathlib import Path

import pytest
from testing import shared_dir

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.models.builder import build_model


def sibling(name):
    path = Path(__file__).with_name(f'{name}.py')
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONFIGS = sibling('reference_configs')
HEADS = sibling('dummy_heads')


@pytest.mark.parametrize('name', list(CONFIGS.CONFIGS))
def test_names_and_shapes_of_a_published_model(name):
    published = json.loads(shared_dir('parity', 'state_dicts.json').read_text())[name]
    expected = {key: tuple(shape) for key, shape in published.items() if not key.startswith('heads.')}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', UserWarning)  # two of them are templates without encoder or fuser
        model = build_model(CONFIGS.model_config(name, {'map': {'type': HEADS.DummyMapHead, 'in_channels': 4}}))
    got = {key: tuple(value.shape) for key, value in model.state_dict().items() if not key.startswith('heads.')}
    assert got.keys() == expected.keys()
    assert got == expected
    assert all(p.requires_grad for n, p in model.named_parameters()), 'grid constants are no parameters to optimise'


def test_models_without_sensor_or_fuser_can_be_built_and_say_that_they_cannot_run():
    for name, word in ((CONFIGS.T + 'lidar/default.yaml', 'names no sensor'),
                       (CONFIGS.T + 'camera+lidar/swint_v0p075/default.yaml', 'model.fuser is null')):
        with pytest.warns(UserWarning, match=word):
            build_model(CONFIGS.model_config(name, {'map': {'type': HEADS.DummyMapHead, 'in_channels': 4}}))
