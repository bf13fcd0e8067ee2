"""The detector with the project's heads: shipped tiny configuration, and CenterPoint with the plain map head."""
import importlib
import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
from testing import REPO

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.config import load_config
from mmdet3d_ext.datasets.synthetic.batch import random_batch
from mmdet3d_ext.geometry.grid import BevGrid, GridError
from mmdet3d_ext.models.builder import build_model

spec = importlib.util.spec_from_file_location('small_models', Path(__file__).with_name('test_bevfusion.py'))
small = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small)

LiDARInstance3DBoxes = importlib.import_module('mmdet3d.core.bbox').LiDARInstance3DBoxes  # after the shims of the plugin
RANGE, LIMITS = small.RANGE, [-20.0, -20.0, -10.0, 20.0, 20.0, 10.0]
CENTER = {'type': 'CenterHead', 'in_channels': 12, 'tasks': [['car'], ['pedestrian', 'truck']], 'share_conv_channel': 8,
          'common_heads': {'reg': [2, 2], 'height': [1, 2], 'dim': [3, 2], 'rot': [2, 2], 'vel': [2, 2]},
          'bbox_coder': {'type': 'CenterPointBBoxCoder', 'pc_range': RANGE, 'post_center_range': LIMITS, 'max_num': 40,
                         'score_threshold': 0.1, 'out_size_factor': 8, 'voxel_size': [0.1, 0.1], 'code_size': 9},
          'separate_head': {'type': 'SeparateHead', 'init_bias': -2.19, 'final_kernel': 3},
          'loss_cls': {'type': 'GaussianFocalLoss', 'reduction': 'mean'},
          'loss_bbox': {'type': 'L1Loss', 'reduction': 'mean', 'loss_weight': 0.25}, 'norm_bbox': True,
          'train_cfg': {'point_cloud_range': RANGE, 'grid_size': [256, 192, 1], 'voxel_size': [0.1, 0.1, 8.0],
                        'out_size_factor': 8, 'dense_reg': 1, 'gaussian_overlap': 0.1, 'max_objs': 500, 'min_radius': 2,
                        'code_weights': [1.0] * 8 + [0.2] * 2},
          'test_cfg': {'post_center_limit_range': LIMITS, 'min_radius': [2.0, 0.4], 'score_threshold': 0.1,
                       'out_size_factor': 8, 'voxel_size': [0.1, 0.1], 'nms_type': ['circle', 'rotate'],
                       'pre_max_size': 1000, 'post_max_size': 83, 'nms_thr': 0.2}}
MAP = {'type': 'BEVSegmentationHead', 'in_channels': 12, 'classes': ['road', 'divider'], 'loss': 'focal',
       'grid_transform': {'input_scope': [[-12.8, 12.8, 0.8], [-9.6, 9.6, 0.8]],
                          'output_scope': [[-12, 12, 0.5], [-9, 9, 0.5]]}}


def boxes(*rows):
    return LiDARInstance3DBoxes(torch.tensor(rows, dtype=torch.float32).reshape(-1, 9), box_dim=9, origin=(0.5, 0.5, 0))


def objects(samples):
    """One sample with two boxes, the others with none."""
    found = [boxes([1, 2, -1, 4, 2, 1.6, 0.3, 1, 0], [-6, 5, -1, 0.6, 0.6, 1.7, 0, 0, 0])] + [boxes()] * (samples - 1)
    labels = [torch.tensor([0, 1])] + [torch.zeros(0).long()] * (samples - 1)
    return {'gt_bboxes_3d': found, 'gt_labels_3d': labels}


def check(model, data, classes, map_shape):
    names = None
    for step, points in enumerate(([150, 0], [0, 0], [150, 100])):
        inputs = small.batch(points=points)
        inputs.update(data, **(objects(2) if step != 1 else {'gt_bboxes_3d': [boxes()] * 2,
                                                             'gt_labels_3d': [torch.zeros(0).long()] * 2}))
        losses = model(**inputs)
        names = names or list(losses)
        assert list(losses) == names and all(torch.isfinite(v).all() for v in losses.values())
        assert any(n.startswith('loss/object/') for n in names) and any(n.startswith('loss/map/') for n in names)
        model.zero_grad(set_to_none=True)
        sum(v for k, v in losses.items() if k.startswith('loss/')).backward()
        small.check_gradients(model)
    model.eval()
    with torch.no_grad():
        outputs = model(**{k: v for k, v in inputs.items() if not k.startswith('gt_')})
    assert len(outputs) == 2
    for output in outputs:
        assert output['masks_bev'].shape == (classes, *map_shape) and 0 <= output['masks_bev'].min() <= 1
        assert isinstance(output['boxes_3d'], LiDARInstance3DBoxes) and len(output['boxes_3d']) == len(output['scores_3d'])


def test_centerpoint_and_the_plain_map_head_on_a_map_that_is_not_square():
    model = build_model({**small.config('camera', 'lidar'), 'heads': {'object': CENTER, 'map': MAP}})
    model.init_weights()
    check(model, {'gt_masks_bev': (torch.rand(2, 2, 48, 36) < 0.3).long()}, 2, (48, 36))


def test_the_tiny_configuration():
    cfg = load_config(str(REPO / 'configs/synthetic/multitask_tiny.yaml'), [])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model = build_model(plain(cfg['model']))
    model.init_weights()
    height, width = cfg['image_size']
    classes, cells = len(cfg['map_classes']), BevGrid.parse(*plain(cfg['map_bound'])).shape
    data = {'img': torch.rand(2, 2, 3, height, width), 'gt_masks_bev': (torch.rand(2, classes, *cells) < 0.2).long()}
    check(model, data, classes, cells)


@pytest.fixture
def tiny_step():
    """The tiny model in training mode without random masks, and a batch: fresh models of the same weights for each call."""
    cfg = load_config(str(REPO / 'configs' / 'synthetic' / 'multitask_tiny.yaml'), ['--model.heads.object.dropout', '0'])
    batch = random_batch(plain(cfg), 2, torch.device('cpu'), points=2000)

    def make(**changes):
        torch.manual_seed(0)
        model = build_model({**plain(cfg['model']), **changes})
        model.init_weights()
        return model.train()

    return make, batch


def losses_and_gradients(model, batch):
    torch.manual_seed(1)
    losses = model(**batch)
    sum(value for name, value in losses.items() if name.startswith('loss/')).backward()
    return losses, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize('frozen', ['heads.object', 'heads.map'])
def test_a_frozen_head_still_says_its_losses(tiny_step, frozen):
    """The trunk learns from them."""
    make, batch = tiny_step
    model = make(freeze=[frozen])
    head, other = (model.heads[name] for name in (('object', 'map') if frozen == 'heads.object' else ('map', 'object')))
    before = {name: value.clone() for name, value in head.state_dict().items()}
    losses, gradients = losses_and_gradients(model, batch)
    assert list(losses) == list(losses_and_gradients(make(), batch)[0])
    assert all((gradient is None) == name.startswith(frozen) for name, gradient in gradients.items())
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
    assert other.training and not any(m.training for m in head.modules() if m is not head)
    with torch.no_grad():
        assert set(model.eval()(**batch)[0]) == {'boxes_3d', 'scores_3d', 'labels_3d', 'masks_bev'}


def test_other_heads_work_while_the_host_matches_boxes(tiny_step):
    """Same values, names and order as one head after the other."""
    make, batch = tiny_step
    model, calls = make(), []
    detection, segmentation = model.heads['object'], model.heads['map']

    def watched(call, name):
        def spy(*args):
            calls.append((name, len(args)))
            return call(*args)
        return spy

    for head, name in ((detection, 'start_matching'), (detection, 'loss'), (segmentation, 'forward')):
        setattr(head, name, watched(getattr(head, name), name))
    losses, gradients = losses_and_gradients(model, batch)
    assert calls == [('start_matching', 3), ('forward', 2), ('loss', 4)]

    model = make()

    class Whole(type(model.heads['object'])):
        def loss(self, boxes, labels, preds):  # as somebody's own head may have it
            return super().loss(boxes, labels, preds)

    model.heads['object'].__class__ = Whole
    expected, whole = losses_and_gradients(model, batch)
    assert list(losses) == list(expected) and any(name.startswith('loss/map') for name in losses)
    assert all(torch.equal(losses[name], expected[name]) for name in losses)
    assert all(torch.equal(gradients[name], whole[name]) for name in gradients)


def plain(value):
    if hasattr(value, 'items'):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def test_a_map_head_for_other_metres_than_the_trunk_is_refused():
    wrong = {**MAP, 'grid_transform': {**MAP['grid_transform'], 'input_scope': [[-13.5, 13.5, 0.84375], [-9.6, 9.6, 0.8]]}}
    with pytest.raises(GridError, match='grid_transform.input_scope'):
        build_model({**small.config('lidar'), 'heads': {'map': wrong}})
