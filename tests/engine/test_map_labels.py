"""Map labels and map heads that do not mean the same are refused before the first step."""
from types import SimpleNamespace

import pytest
from torch import nn

from mmdet3d_ext.engine.launch import UserError
from mmdet3d_ext.engine.map_labels import check_map_labels
from mmdet3d_ext.geometry.grid import BevGrid
from mmdet3d_ext.models.heads.segm import BEVSegmentationHead

CLASSES = ['walkway', 'divider']


class LoadBEVSegmentation:
    def __init__(self, bound=(-50.0, 50.0, 0.5), classes=CLASSES):
        self.grid, self.classes = BevGrid.parse(bound, bound), tuple(classes)


def model():
    scopes = dict(input_scope=[[-54, 54, 0.6]] * 2, output_scope=[[-50, 50, 0.5]] * 2)
    return SimpleNamespace(heads=nn.ModuleDict({'map': BEVSegmentationHead(4, scopes, CLASSES), 'object': nn.Identity()}))


def wrapped(step):
    inner = SimpleNamespace(transforms=[object(), step])
    return [inner, SimpleNamespace(dataset=inner),
            SimpleNamespace(datasets=[SimpleNamespace(transforms=[]), SimpleNamespace(dataset=inner)])]


@pytest.mark.parametrize('kind', range(3))
def test_equal_labels_pass_and_others_are_named(kind):
    check_map_labels(model(), wrapped(LoadBEVSegmentation())[kind], evaluation=True)
    with pytest.raises(UserError, match=r"classes are \['walkway', 'divider'\].*labels' are \['divider', 'walkway'\]"):
        check_map_labels(model(), wrapped(LoadBEVSegmentation(classes=CLASSES[::-1]))[kind])
    with pytest.raises(UserError, match=r'output_scope is 200x200 cells.*labels cover 240x240.*LoadBEVSegmentation'):
        check_map_labels(model(), wrapped(LoadBEVSegmentation((-60, 60, 0.5)))[kind])


def test_other_cells_are_an_error_only_in_evaluation():
    finer = wrapped(LoadBEVSegmentation((-50, 50, 0.25)))[0]
    check_map_labels(model(), finer)
    with pytest.raises(UserError, match=r'makes 200x200 cells.*output_scope.*evaluated on 400x400 cells.*LoadBEVSegmentation'):
        check_map_labels(model(), finer, evaluation=True)


def test_nothing_to_compare():
    check_map_labels(nn.Identity(), wrapped(LoadBEVSegmentation())[0])
    check_map_labels(model(), SimpleNamespace(), evaluation=True)
