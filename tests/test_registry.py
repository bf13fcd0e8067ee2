"""The layered registries: own names first, mmdet3d's kept, errors that name the nearest name."""
import mmdet3d.models.builder as mmdet3d_models
import pytest
from mmcv.utils import Registry

from mmdet3d_ext.registry import MODELS, LayeredRegistry, profile


@pytest.fixture
def layered():
    base = Registry('base')

    @base.register_module()
    class Theirs:
        pass

    @base.register_module(name='Shared')
    class SharedTheirs:
        pass

    registry = LayeredRegistry('part', [base], publish=base)

    @registry.register_module(name='Shared')
    class SharedOurs:
        def __init__(self, width=1, compat=None):
            self.width, self.compat = width, compat

    return registry, base, SharedOurs, SharedTheirs


def test_own_name_wins_and_the_other_library_keeps_its_class(layered):
    registry, base, ours, theirs = layered
    assert registry.get('Shared') is ours and base.get('Shared') is theirs
    assert registry.get('Theirs') is base.get('Theirs')


def test_a_free_name_is_published(layered):
    registry, base, *_ = layered

    @registry.register_module()
    class Fresh:
        pass

    assert base.get('Fresh') is Fresh


def test_unknown_type_and_argument_name_the_nearest(layered):
    registry, *_ = layered
    with pytest.raises(KeyError, match="unknown part type 'Share'; did you mean 'Shared'"):
        registry.build({'type': 'Share'})
    with pytest.raises(TypeError, match="takes no argument 'widht'; did you mean 'width'"):
        registry.build({'type': 'Shared', 'widht': 3})
    with pytest.raises(TypeError, match='a mapping with the key "type"'):
        registry.build({'width': 3})


def test_the_profile_reaches_the_classes_that_take_it(layered):
    registry, *_ = layered
    with profile('reference'):
        assert registry.build({'type': 'Shared'}).compat == 'reference'
        assert registry.build({'type': 'Shared', 'compat': None}).compat is None
    assert registry.build({'type': 'Shared'}).compat is None
    with pytest.raises(ValueError, match='unknown profile'), profile('old'):
        pass


def test_mmdet3d_classes_are_found_and_not_replaced():
    assert MODELS.get('SECOND') is not None
    theirs = mmdet3d_models.BACKBONES.get('SparseEncoder')
    assert theirs is not None and theirs.__module__.startswith('mmdet3d.')


def test_registering_a_name_twice_is_refused(layered):
    registry, *_ = layered
    with pytest.raises(KeyError, match='registered twice'):
        registry.register_module(name='Shared')(type('Other', (), {}))


@pytest.mark.parametrize('kind, answer', [('VoVNet', 'use ResNet or SwinTransformer'),
                                          ('BEVFusionSparseEncoder', 'called SparseEncoder here')])
def test_a_renamed_or_missing_type_names_its_replacement(kind, answer):
    with pytest.raises(KeyError, match=f"model type '{kind}': .*{answer}"):
        MODELS.build({'type': kind})


def test_replacements_exist_and_replace_nothing_that_is_there():
    import inspect

    from mmdet3d_ext.registry import DATASETS, PIPELINES, REPLACED, REPLACED_ARGUMENTS
    for kind, answer in REPLACED.items():
        assert MODELS.get(kind) is None and PIPELINES.get(kind) is None, kind
        if answer.startswith('called '):
            name = answer.split()[1]
            assert MODELS.get(name) or PIPELINES.get(name), name
    for (kind, argument), answer in REPLACED_ARGUMENTS.items():
        cls = MODELS.get(kind) or PIPELINES.get(kind) or DATASETS.get(kind)
        taken = inspect.signature(cls.__init__).parameters
        assert argument not in taken, (kind, argument)
        if answer.startswith('called ') and '.' not in answer:
            assert answer.split()[1] in taken, (kind, argument)


def test_an_argument_without_meaning_is_named():
    with pytest.raises(TypeError, match="CenterHead: 'dequity_eta': .*leave it out"):
        MODELS.build({'type': 'CenterHead', 'dequity_eta': 0.3})
    with pytest.raises(TypeError, match="BEVFusion: 'pts_backbone': called model.decoder.backbone here"):
        MODELS.build({'type': 'BEVFusion', 'encoders': None, 'pts_backbone': {}})
