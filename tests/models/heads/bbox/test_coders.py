"""Box coders: round trips, filters, and that predictions stay as they were."""
import math

import pytest
import torch

from mmdet3d_ext.models.heads.bbox import CenterPointBBoxCoder, TransFusionBBoxCoder

# a range whose axes differ, so that a swap of x and y cannot go unseen
FRAME = dict(pc_range=[-9.6, -16.0], voxel_size=[0.2, 0.1], out_size_factor=8)
BOXES = torch.tensor([[-3.0, 5.0, -1.5, 4.2, 1.8, 1.6, 0.5, 2.0, -1.0], [4.1, -7.3, -1.7, 0.7, 0.6, 1.7, 3.0, 0.3, 0.4],
                      [9.59, 15.99, 0.0, 8.0, 2.5, 3.0, -3.1, 0.0, 0.0]])


def transfusion_preds(targets):
    """(P, 8 | 10) targets as predictions of one sample."""
    columns = targets.T[None]
    return dict(center=columns[:, 0:2], height=columns[:, 2:3], dim=columns[:, 3:6], rot=columns[:, 6:8],
                vel=columns[:, 8:10] if columns.shape[1] == 10 else None)


@pytest.mark.parametrize('height_target', ['centre', 'top'])
@pytest.mark.parametrize('size', [10, 8])
def test_transfusion_round_trip(height_target, size):
    coder = TransFusionBBoxCoder(**FRAME, code_size=size, height_target=height_target)
    targets = coder.encode(BOXES)
    assert targets.shape == (3, size)
    assert targets[0, 2] == pytest.approx(-1.5 + (0.8 if height_target == 'centre' else 1.6))
    assert targets[0, :2].tolist() == pytest.approx([(-3.0 + 9.6) / 1.6, (5.0 + 16.0) / 0.8], rel=1e-5)
    decoded = coder.decode_boxes(**transfusion_preds(targets))[0]
    assert (decoded - BOXES[:, :size - 1]).abs().max() < 1e-4


def test_transfusion_decode_picks_the_best_class_and_keeps_its_input():
    coder = TransFusionBBoxCoder(**FRAME, code_size=10)
    preds = transfusion_preds(coder.encode(BOXES))
    scores = torch.tensor([[[0.1, 0.2, 0.3], [0.4, 0.1, 0.2]]])
    before = {name: value.clone() for name, value in preds.items()}
    found = coder.decode(scores, preds['rot'], preds['dim'], preds['center'], preds['height'], preds['vel'])[0]
    assert found['labels'].tolist() == [1, 0, 0] and found['scores'].tolist() == pytest.approx([0.4, 0.2, 0.3])
    assert all(torch.equal(preds[name], before[name]) for name in preds)


@pytest.mark.parametrize('compat,threshold,kept', [(None, 0.0, 2), ('reference', 0.0, 3), (None, None, 3), (None, 0.25, 1),
                                                   ('reference', 0.25, 1)])
def test_a_threshold_of_zero_is_a_threshold(compat, threshold, kept):
    coder = TransFusionBBoxCoder(**FRAME, code_size=10, score_threshold=threshold, compat=compat)
    p = transfusion_preds(coder.encode(BOXES))
    scores = torch.tensor([[[0.0, 0.2, 0.3]]])
    assert len(coder.decode(scores, p['rot'], p['dim'], p['center'], p['height'], p['vel'], filter=True)[0]['scores']) == kept


def test_filter_drops_what_is_out_of_range_or_not_finite():
    coder = TransFusionBBoxCoder(**FRAME, code_size=10, post_center_range=[-5, -20, -10, 20, 20, -0.5])
    boxes = torch.cat([BOXES, BOXES[:1], BOXES[:1], BOXES[:1]])
    boxes[1, 0] = -5.01     # x below
    p = transfusion_preds(coder.encode(boxes))  # box 2: bottom z 0 is above -0.5
    p['center'][0, 1, 3] = float('nan')
    p['dim'][0, 0, 4] = 1000.0  # its exponential is infinite
    found = coder.decode(torch.full((1, 1, 6), 0.5), p['rot'], p['dim'], p['center'], p['height'], p['vel'], filter=True)[0]
    assert len(found['bboxes']) == 2 and (found['bboxes'] - BOXES[0]).abs().max() < 1e-4  # rows 0 and 5


def test_limits_follow_the_boxes():
    """They are numbers of the configuration, not a tensor that stays where (and as) the first boxes were."""
    limits = [-5.0, -20.0, -10.0, 20.0, 20.0, -0.5]
    coder = TransFusionBBoxCoder(**FRAME, code_size=10, post_center_range=limits)
    for kind in (torch.float32, torch.float64, torch.float32):
        boxes = BOXES.to(kind)
        assert coder.keep(boxes, torch.ones(3, dtype=kind)).tolist() == [True, True, False]
        assert coder.post_center_range == limits and all(type(value) is float for value in coder.post_center_range)
    assert coder.keep(BOXES.to('meta'), torch.ones(3, device='meta')).device.type == 'meta'


def center_maps(coder, boxes, labels, scores, shape, classes):
    """Maps that say: these boxes, at their cells."""
    x_cells, y_cells = shape
    cells = coder.frame.to_cells(boxes[:, :2]).floor().long()
    targets = coder.encode(boxes, cells)
    maps = torch.zeros(1, coder.code_size + 1, x_cells, y_cells)
    heat = torch.full((1, classes, x_cells, y_cells), 0.01)
    for cell, target, label, score in zip(cells, targets, labels, scores, strict=True):
        maps[0, :, cell[0], cell[1]] = target
        heat[0, label, cell[0], cell[1]] = score
    return heat, maps


@pytest.mark.parametrize('height_target', ['centre', 'top'])
@pytest.mark.parametrize('size', [9, 7])
def test_centerpoint_round_trip(height_target, size):
    coder = CenterPointBBoxCoder(**FRAME, max_num=500, score_threshold=0.1, code_size=size, height_target=height_target,
                                 post_center_range=[-20, -20, -10, 20, 20, 10])
    labels, scores = [1, 0, 1], [0.5, 0.9, 0.7]
    heat, maps = center_maps(coder, BOXES, labels, scores, (12, 40), 2)
    kept = heat.clone(), maps.clone()
    velocity = maps[:, 8:10] if size == 9 else None
    found = coder.decode(heat, maps[:, 6:7], maps[:, 7:8], maps[:, 2:3], maps[:, 3:6].exp(), velocity, reg=maps[:, 0:2])[0]
    assert torch.equal(kept[0], heat) and torch.equal(kept[1], maps)
    assert found['labels'].tolist() == [0, 1, 1] and found['scores'].tolist() == pytest.approx([0.9, 0.7, 0.5])
    boxes = coder.lower(found['bboxes'])
    assert (boxes - BOXES[[1, 2, 0], :size]).abs().max() < 1e-4
    assert not torch.equal(found['bboxes'], boxes)  # lower() works on a copy


def test_centerpoint_without_offsets_means_the_middle_of_the_cell():
    coder = CenterPointBBoxCoder(**FRAME, max_num=1)
    heat, maps = center_maps(coder, BOXES[:1], [0], [0.9], (12, 40), 1)
    found = coder.decode(heat, maps[:, 6:7], maps[:, 7:8], maps[:, 2:3], maps[:, 3:6].exp(), None)[0]
    assert found['bboxes'][0, :2].tolist() == pytest.approx([-9.6 + 4.5 * 1.6, -16.0 + 26.5 * 0.8], rel=1e-5)


def test_centerpoint_takes_a_map_smaller_than_max_num():
    coder = CenterPointBBoxCoder(**FRAME, max_num=500)
    heat = torch.rand(2, 2, 3, 5)
    ones = torch.ones(2, 1, 3, 5)
    found = coder.decode(heat, ones, ones, ones, torch.ones(2, 3, 3, 5), None)
    assert [len(f['scores']) for f in found] == [30, 30]
    for i in range(2):
        assert torch.equal(found[i]['scores'], heat[i].flatten().sort(descending=True).values)


def test_yaw_survives_the_branch_cut():
    coder = TransFusionBBoxCoder(**FRAME, code_size=10)
    for yaw in (math.pi - 1e-3, -math.pi + 1e-3, 0.0, math.pi / 2):
        box = BOXES[:1].clone()
        box[0, 6] = yaw
        assert coder.decode_boxes(**transfusion_preds(coder.encode(box)))[0, 0, 6] == pytest.approx(yaw, abs=1e-5)


@pytest.mark.parametrize('build,changes,message', [
    (TransFusionBBoxCoder, dict(code_size=9), 'bbox_coder.code_size: 10 with velocity, 8 without, got 9'),
    (CenterPointBBoxCoder, dict(code_size=10), 'bbox_coder.code_size: 9 with velocity, 7 without, got 10'),
    (TransFusionBBoxCoder, dict(height_target='bottom'), "height_target: expected one of .*got 'bottom'"),
    (TransFusionBBoxCoder, dict(post_center_range=[1, 2, 3]), r'post_center_range: needs 6 numbers .*got \[1, 2, 3\]')])
def test_bad_configuration(build, changes, message):
    with pytest.raises(ValueError, match=message):
        build(**FRAME, **changes)
