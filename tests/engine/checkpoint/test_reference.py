"""Files of the BEVFusion reference: whose a file is, exact ways there and back, the same boxes after loading."""
import importlib.util
import json
import logging
import math
import zlib

import pytest
import torch
from small_heads import CENTERPOINT, TRANSFUSION, bev_map, merged, small_head
from testing import REPO, shared_dir, weights_rule
from torch import nn

from mmdet3d_ext.engine import checkpoint as files
from mmdet3d_ext.engine.checkpoint import CheckpointError, load_weights, read_checkpoint, reference
from mmdet3d_ext.engine.run_dir import BOX_CONVENTION as MARK
from mmdet3d_ext.models.builder import build_model
from mmdet3d_ext.models.heads.bbox import swap_box_convention

ALL = {'bbox_coder': {'post_center_range': None, 'score_threshold': None}}  # nothing is dropped: equally long lists
HEADS = {'transfusion': merged(TRANSFUSION, ALL),
         'centerpoint': merged(CENTERPOINT, {**ALL, 'test_cfg': {'nms_type': None, 'score_threshold': 0.0,
                                                                 'post_center_limit_range': None}})}
MMCV = {'epoch': 20, 'iter': 100, 'mmcv_version': '1.4.0', 'time': 'then'}


class Detector(nn.Module):
    """A model that is a detection head: names as in a whole model."""

    def __init__(self, kind='transfusion', compat=None, **changes):
        super().__init__()
        self.heads = nn.ModuleDict({'object': small_head(HEADS[kind], compat, **changes)})
        self.eval()

    def boxes(self):
        with torch.no_grad():
            found = self.heads['object'].get_bboxes(self.heads['object'](bev_map(1)))
        return found[0][0].tensor, found[0][1]


def reference_file(model, path, meta=MMCV):
    """The model's weights as if they were trained by the reference: no version beside them, its own meta data."""
    torch.save({'meta': dict(meta), 'state_dict': dict(model.state_dict())}, path)
    return str(path)


def gap(ours, theirs):
    """Largest difference between boxes, angles up to whole turns."""
    difference = ours - theirs
    difference[:, 6] = torch.sin(difference[:, 6] / 2)
    return float(difference.abs().max())


# ---- whose a file is -------------------------------------------------------------------------------------------------

def frustum(first):
    """(D, H, W, 3) pixel positions that start at ``first`` with a pitch of 8."""
    result = torch.zeros(2, 3, 4, 3)
    result[..., 0] = first + 8.0 * torch.arange(4)
    return result


def test_whose_a_file_is():
    model = Detector()
    plain, versioned = dict(model.state_dict()), model.state_dict()
    at_centres, at_border = ({**plain, 'encoders.camera.vtransform.frustum': frustum(first)} for first in (4.0, 0.0))
    old = model.state_dict()
    old._metadata['heads.object'] = {'version': 1}
    for content, state, name, certain in (
            ({'meta': {'box_convention': MARK}}, plain, 'ours', True), ({'meta': {'box_convention': 'mmdet3d-1.0'}}, old, 'ours', True),
            ({'meta': {'box_convention': 'mmdet3d-pre-1.0'}}, versioned, 'reference', True),
            ({}, versioned, 'ours', True), ({'meta': MMCV}, versioned, 'ours', True), ({}, old, 'reference', True),
            ({'meta': MMCV}, plain, 'reference', True), ({'meta': MMCV}, at_border, 'reference', True),
            ({}, at_centres, 'ours', True), ({}, plain, 'reference', False), ({}, at_border, 'reference', False)):
        found = files.find_origin(content, state, 'f.pth')
        assert (found.name, found.certain) == (name, certain), found
    for stated in ('ours', 'reference'):
        assert files.find_origin({'meta': MMCV}, at_centres, 'f.pth', stated).name == stated


def test_signs_that_contradict_each_other_are_refused():
    plain = dict(Detector().state_dict())
    at_centres = {**plain, 'encoders.camera.vtransform.frustum': frustum(4.0)}
    with pytest.raises(CheckpointError, match=r'f.pth: it cannot be told.*cell centres.*mmcv 1.4.0.*--checkpoint-origin reference.*ours'):
        files.find_origin({'meta': MMCV}, at_centres, 'f.pth')
    with pytest.raises(CheckpointError, match="its meta.box_convention is 'mmdet3d-1.0'.*leave out --checkpoint-origin reference"):
        files.find_origin({'meta': {'box_convention': MARK}}, plain, 'f.pth', 'reference')
    with pytest.raises(CheckpointError, match="meta.box_convention is 'kitti', known are mmdet3d-1.0 and mmdet3d-pre-1.0"):
        files.find_origin({'meta': {'box_convention': 'kitti'}}, plain, 'f.pth')
    with pytest.raises(CheckpointError, match='expected one of auto, ours, reference'):
        files.find_origin({}, plain, 'f.pth', 'mit')


def test_the_version_of_a_head_survives_a_file_and_a_wrapper(tmp_path):
    model, target = Detector(), Detector()
    wrapped = nn.Module()
    wrapped.module = model
    torch.save(wrapped.state_dict(), tmp_path / 'bare.pth')  # by hand, without any meta data
    report = load_weights(target, str(tmp_path / 'bare.pth'), complete=True)
    assert report.swapped == [] and gap(target.boxes()[0], model.boxes()[0]) == 0


def test_a_file_that_says_nothing_is_warned_about(tmp_path, caplog):
    model, target = Detector(), Detector()
    torch.save(dict(model.state_dict()), tmp_path / 'bare.pth')
    with caplog.at_level('WARNING', 'load'):
        report = load_weights(target, str(tmp_path / 'bare.pth'), logger=logging.getLogger('load'))
    assert report.swapped and 'taken for a file of the BEVFusion reference; --checkpoint-origin ours takes' in caplog.text
    caplog.clear()
    report = load_weights(target, str(tmp_path / 'bare.pth'), logger=logging.getLogger('load'), origin='ours')
    assert report.swapped == [] and caplog.text == '' and gap(target.boxes()[0], model.boxes()[0]) == 0


def test_models_without_these_heads_are_not_asked(tmp_path):
    model = nn.Module()
    model.encoders = nn.Linear(2, 2)
    torch.save({**dict(Detector().state_dict()), **model.state_dict()}, tmp_path / 'det.pth')
    report = load_weights(model, str(tmp_path / 'det.pth'), allow_partial=True)  # only its trunk is wanted
    assert report.matched == ['encoders.weight', 'encoders.bias'] and report.swapped == [] and report.notes == []


# ---- the same boxes --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('kind', HEADS)
def test_a_reference_file_gives_the_same_boxes(tmp_path, kind):
    """``before`` decodes the file's numbers as they are, that is in the reference's convention."""
    before, after = Detector(kind, 'reference'), Detector(kind, 'reference')
    report = load_weights(after, reference_file(before, tmp_path / 'ref.pth'), complete=True)
    assert report.swapped == reference.box_rows(before.state_dict()) and 'box rows converted' in report.text()
    (old, old_scores), (new, scores) = before.boxes(), after.boxes()
    assert len(old) and torch.equal(scores, old_scores) and gap(new, swap_box_convention(old)) < 1e-4
    assert not torch.equal(old[:, 3:5], new[:, 3:5])


def test_a_whole_model_gives_the_same_boxes_and_maps(tmp_path):
    """Cameras and LiDAR with spconv 2's kernels and a wrapper's prefix in the file; ``before`` decodes it as it is."""
    spec = importlib.util.spec_from_file_location('real_heads', REPO / 'tests/models/detectors/test_with_real_heads.py')
    real = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(real)
    config = {**real.small.config('camera', 'lidar'), 'heads': {'object': real.CENTER, 'map': real.MAP}}
    before, after = (build_model(config, 'reference').eval() for _ in range(2))
    state = weights_rule().ruled_state_dict(before.state_dict())
    before.load_state_dict(state)
    kernels = [name for name, tensor in state.items() if tensor.dim() == 5]
    state = {f'module.{name}': tensor.movedim(-1, 0) if name in kernels else tensor for name, tensor in state.items()}
    torch.save({'meta': MMCV, 'state_dict': state}, tmp_path / 'ref.pth')
    report = load_weights(after, str(tmp_path / 'ref.pth'), complete=True)
    assert sorted(report.relaid) == sorted(kernels) and len(kernels) == 21 and len(report.swapped) == 8
    inputs = {key: value for key, value in real.small.batch().items() if not key.startswith('gt_')}
    with torch.no_grad():
        outputs = zip(before(**inputs), after(**inputs), strict=True)
    for old, new in outputs:
        assert torch.equal(old['masks_bev'], new['masks_bev']) and torch.equal(old['scores_3d'], new['scores_3d'])
        assert len(new['boxes_3d']) and gap(new['boxes_3d'].tensor, swap_box_convention(old['boxes_3d'].tensor)) < 1e-4


@pytest.mark.parametrize('kind', HEADS)
def test_heights_follow_the_file(tmp_path, kind, caplog):
    """The reference's heads predict the top: half a height lower than it decodes them, unless its numbers are wanted."""
    path = reference_file(Detector(kind), tmp_path / 'ref.pth')
    loaded = {compat: Detector(kind, compat) for compat in (None, 'reference')}
    reports = {compat: load_weights(model, path) for compat, model in loaded.items()}
    coder = loaded[None].heads['object'].bbox_coder
    assert coder.height_target == 'top' and loaded['reference'].heads['object'].bbox_coder.height_target == 'centre'
    right, high = loaded[None].boxes()[0], loaded['reference'].boxes()[0]
    assert len(right) == len(high) > 5 and torch.allclose(right[:, 2] + right[:, 5] / 2, high[:, 2], atol=1e-4)
    assert 'decoded so (height_target: top)' in reports[None].text() and 'half a height too high' in reports['reference'].text()
    assert files.model_meta(loaded[None]) == files.model_meta(loaded['reference']) == {'height_target': 'top'}

    # Trained on here, the new file says so itself, whatever the configuration of the model that reads it.
    own = tmp_path / 'own.pth'
    torch.save({'meta': {'box_convention': MARK, **files.model_meta(loaded[None])}, 'state_dict': loaded[None].state_dict()}, own)
    again = Detector(kind)
    assert again.heads['object'].bbox_coder.height_target == 'centre' and files.model_meta(again) == {'height_target': 'centre'}
    assert load_weights(again, str(own)).swapped == []
    assert gap(again.boxes()[0], right) == 0

    explicit = Detector(kind, bbox_coder=dict(height_target='centre'))
    with caplog.at_level('WARNING', 'load'):
        load_weights(explicit, str(own), logger=logging.getLogger('load'))
    assert explicit.heads['object'].bbox_coder.height_target == 'centre'
    assert "height of a box's top, the configuration decodes centre" in caplog.text and 'height_target' in caplog.text


def test_targets_of_training_follow_the_height():
    from mmdet3d_ext.registry import BBOX_CODERS
    coder = BBOX_CODERS.build(TRANSFUSION['bbox_coder'])
    box = torch.tensor([[1.0, 2.0, -1.5, 4.0, 2.0, 1.6, 0.3, 0.0, 0.0]])
    heights = {}
    for target in ('centre', 'top'):
        assert coder.follow_weights(target)
        heights[target] = float(coder.encode(box)[0, 2])
    assert heights == pytest.approx({'centre': -0.7, 'top': 0.1}, abs=1e-6)
    with pytest.raises(ValueError, match="expected one of .'centre', 'top'., got 'bottom'"):
        coder.follow_weights('bottom')


def test_a_reference_run_is_not_resumed():
    model = Detector()
    state = dict(model.state_dict())
    for meta in (MMCV, {'epoch': 1, 'iter': 2}):
        with pytest.raises(CheckpointError, match='f.pth is not a checkpoint of a run of this project.*reference.*--load_from'):
            files.check_same_run(model, {'meta': meta}, state, 'f.pth')
    files.check_same_run(model, {'meta': {'box_convention': MARK}}, state, 'f.pth')


def test_checkpoints_of_a_run_say_what_their_heads_predict(tmp_path):
    from mmdet3d_ext.engine.runner import CustomEpochBasedRunner
    model = Detector()
    load_weights(model, reference_file(model, tmp_path / 'ref.pth'))
    model.train_step = lambda *args: None
    runner = CustomEpochBasedRunner(model, work_dir=str(tmp_path), logger=logging.getLogger('load'), meta={'box_convention': MARK},
                                    max_epochs=1)
    runner.data_loader = [0]
    meta = read_checkpoint(runner.save_checkpoint(str(tmp_path)))['meta']
    assert meta['height_target'] == 'top' and meta['box_convention'] == MARK


# ---- there and back --------------------------------------------------------------------------------------------------

def published():
    """Configuration -> name -> shape, of the reference's 14 models."""
    return json.loads(shared_dir('parity', 'state_dicts.json').read_text())


def ruled(shapes):
    """Weights by the rule for all that a conversion could touch (heads, sparse kernels); a number by name for the others."""
    rule = weights_rule().rule_tensor
    state = {}
    for name, shape in shapes.items():
        if name.startswith('heads.') or len(shape) == 5:
            state[name] = rule(name, shape)
        else:
            state[name] = torch.tensor(float(zlib.crc32(name.encode()) % 4096)).expand(shape)
    return state


def test_every_published_model_there_and_back():
    changed = {}
    for name, shapes in published().items():
        state = ruled(shapes)
        content, lines = files.convert({'meta': MMCV}, state, 'ref.pth', 'ours')
        ours = content['state_dict']
        assert list(ours) == list(state) and all(ours[key].shape == tensor.shape for key, tensor in state.items())
        changed[name] = [key for key in state if not torch.equal(ours[key], state[key])]
        assert changed[name] == reference.box_rows(state)
        back, _ = files.convert(content, ours, 'ours.pth', 'reference')
        assert list(back['state_dict']) == list(state)
        assert all(torch.equal(back['state_dict'][key], tensor) for key, tensor in state.items())
        assert content['meta']['box_convention'] == 'mmdet3d-1.0' and content['meta']['epoch'] == 20
        assert back['meta']['box_convention'] == 'mmdet3d-pre-1.0'
        # a second conversion is refused, whichever way
        for again, to in ((content, 'ours'), (back, 'reference')):
            if changed[name]:
                with pytest.raises(CheckpointError, match=f"is in the convention of '{to}' already .*box_convention"):
                    files.convert(again, again['state_dict'], 'f.pth', to)
    heads = {name: len(keys) for name, keys in changed.items()}
    assert all((count > 0) == ('/det/' in name) for name, count in heads.items())
    assert {count for name, count in heads.items() if '/centerhead/' in name} == {24}  # six tasks, dim and rot, weight and bias
    assert {count for name, count in heads.items() if '/transfusion/' in name} == {4}


def test_kernels_of_spconv_2_are_written_in_the_layout_of_files():
    shapes = published()['nuscenes/det/transfusion/secfpn/lidar/voxelnet_0p075.yaml']
    state = ruled(shapes)
    kernels = [name for name, shape in shapes.items() if len(shape) == 5]
    second = {name: t.movedim(-1, 0).contiguous() if name in kernels else t for name, t in state.items()}
    content, lines = files.convert({'meta': MMCV}, second, 'ref.pth', 'ours')
    assert len(kernels) == 21 and any('21 sparse convolution kernels' in line for line in lines)
    assert all(torch.equal(content['state_dict'][name], state[name]) for name in kernels)


def test_other_families_are_named():
    for state, words in (({'pts_middle_encoder.w': torch.ones(1), 'bbox_head.w': torch.ones(1)},
                          "begin with bbox_head, pts_middle_encoder .as in mmdet3d 1.x's BEVFusion project"),
                         ({'decoder.layers.w': torch.ones(1)}, 'its tensors begin with decoder, expected encoders')):
        with pytest.raises(CheckpointError, match=words):
            files.convert({}, state, 'f.pth', 'ours')
        with pytest.raises(CheckpointError, match=f'(?s)of another model.*{words}'):
            load_weights(Detector(), 'f.pth', content={'state_dict': state})
    rows = {'heads.object.prediction_heads.0.rot.1.bias': torch.ones(4)}
    with pytest.raises(CheckpointError, match=r'f.pth: heads.*rot.1.bias: expected 2 outputs, got shape \(4,\)'):
        load_weights(Detector(), 'f.pth', content={'state_dict': rows})


def test_angles_are_those_of_the_definition(tmp_path):
    """(sin, cos) of yaw_ours = -yaw_theirs - pi / 2, and width and length change places: an arithmetic check of the rows."""
    model = Detector()
    head = model.heads['object'].prediction_heads[0]
    yaw, size = 0.7, torch.tensor([1.9, 4.6, 1.7])  # theirs: w, l, h
    with torch.no_grad():
        for branch, bias in ((head.rot, torch.tensor([math.sin(yaw), math.cos(yaw)])), (head.dim, size.log())):
            branch[-1].weight.zero_()
            branch[-1].bias.copy_(bias)
    target = Detector()
    load_weights(target, reference_file(model, tmp_path / 'ref.pth'))
    boxes = target.boxes()[0]
    assert torch.allclose(boxes[:, 3:6], torch.tensor([4.6, 1.9, 1.7]), atol=1e-5)
    assert torch.allclose(torch.sin(boxes[:, 6] - (-yaw - math.pi / 2)), torch.zeros(len(boxes)), atol=1e-6)
    assert torch.cos(boxes[:, 6] - (-yaw - math.pi / 2)).min() > 0.999


def test_a_file_written_for_the_reference_loads_without_a_word(tmp_path):
    """Converted back, a file is marked: it comes in again as it went out."""
    model, target = Detector(), Detector()
    content, _ = files.convert({'meta': {'box_convention': MARK, 'height_target': 'centre'}}, model.state_dict(), 'f.pth', 'reference')
    files.write_atomic(files.plain(content), str(tmp_path / 'back.pth'))
    assert read_checkpoint(str(tmp_path / 'back.pth'))['meta']['converted_from'] == {'file': 'f.pth', 'origin': 'ours'}
    report = load_weights(target, str(tmp_path / 'back.pth'), complete=True)
    assert report.swapped and target.heads['object'].bbox_coder.height_target == 'centre'
    assert all(torch.equal(tensor, target.state_dict()[name]) for name, tensor in model.state_dict().items())
