"""The head's map and its ground truth."""
import pytest
import torch

from mmdet3d_ext.models.heads.bbox.head_grid import (
    CellFrame,
    check_feature_map,
    check_keys,
    collect_ground_truth,
    map_shape,
    target_heatmap,
)

FRAME = CellFrame.from_config([-9.6, -16.0, -5.0], [0.2, 0.2, 8.0], 8)
SHAPE = (12, 20)
BOX = [0.0, 0.0, -1.0, 4.0, 2.0, 1.5, 0.3, 1.0, 2.0]


def collect(rows, labels, **kwargs):
    return collect_ground_truth([torch.tensor(rows).reshape(len(labels), -1)], [torch.tensor(labels)], FRAME, SHAPE, 3,
                                torch.device('cpu'), **kwargs)


def changed(**values):
    box = list(BOX)
    for key, value in values.items():
        box[int(key[1:])] = value
    return box


@pytest.mark.parametrize('box,label,usable', [
    (BOX, 0, True), (BOX, 2, True), (BOX, -1, False), (BOX, 3, False),
    (changed(_0=-9.61), 0, False), (changed(_0=-9.59), 0, True), (changed(_0=9.6), 0, False), (changed(_0=9.59), 0, True),
    (changed(_1=-16.01), 0, False), (changed(_1=16.0), 0, False), (changed(_1=15.9), 0, True), (changed(_0=-1e9), 0, False),
    (changed(_3=0.0), 0, False), (changed(_4=-1.0), 0, False), (changed(_5=0.0), 0, False),
    (changed(_2=float('nan')), 0, False), (changed(_6=float('inf')), 0, False), (changed(_0=float('nan')), 0, False),
    (changed(_7=float('nan')), 0, True)])
def test_which_boxes_are_used(box, label, usable):
    truth = collect([box, BOX], [label, 1])
    assert truth.valid.tolist() == [[usable, True]]
    assert truth.boxes[..., :7].isfinite().all() and (truth.boxes[..., 3:6] > 0).all()
    heatmap = target_heatmap(truth, FRAME, SHAPE, 3, 0.1, 2)
    assert heatmap.isfinite().all() and heatmap.eq(1).sum() == 1 + usable


def test_truncation_is_the_reference_only():
    box = changed(_0=-10.4)  # half a cell below the map
    assert not collect([box], [0]).valid.any()
    old = collect([box], [0], truncate=True)
    assert old.valid.all() and old.cells.tolist() == [[[0, 10]]]


def test_padding_and_unknown_velocity():
    short = torch.tensor([BOX[:7]])
    boxes, labels = [short, torch.zeros(0, 9), torch.tensor([BOX, BOX])], [[0], [], [1, 2]]
    truth = collect_ground_truth(boxes, [torch.tensor(t) for t in labels], FRAME, SHAPE, 3, torch.device('cpu'))
    assert truth.valid.tolist() == [[True, False], [False, False], [True, True]]
    assert truth.boxes[0, 0, 7:].isnan().all() and truth.boxes[2, :, 7:].tolist() == [[1.0, 2.0]] * 2


def test_no_boxes_at_all():
    none = [torch.zeros(0, 9)] * 2, [torch.zeros(0).long()] * 2
    truth = collect_ground_truth(*none, FRAME, SHAPE, 3, torch.device('cpu'))
    assert truth.boxes.shape == (2, 0, 9)
    assert target_heatmap(truth, FRAME, SHAPE, 3, 0.1, 2).shape == (2, 3, 12, 20)


def test_cells_are_x_then_y():
    truth = collect([changed(_0=-9.5, _1=15.9)], [1])
    assert truth.cells.tolist() == [[[0, 19]]]
    assert target_heatmap(truth, FRAME, SHAPE, 3, 0.1, 2)[0, 1, 0, 19] == 1


def test_metres_and_cells_are_inverse():
    xy = torch.rand(50, 2) * 100 - 50
    assert (FRAME.to_metres(FRAME.to_cells(xy)) - xy).abs().max() < 1e-4


def test_inputs_are_not_changed():
    boxes = torch.tensor([BOX, changed(_0=-100.0)])
    kept = boxes.clone()
    collect_ground_truth([boxes], [torch.tensor([0, 1])], FRAME, SHAPE, 3, torch.device('cpu'))
    assert torch.equal(boxes, kept)


def test_lengths_must_agree():
    cpu = torch.device('cpu')
    with pytest.raises(ValueError, match=r'gt_bboxes_3d\[0\]: 2 boxes have 1 labels'):
        collect_ground_truth([torch.tensor([BOX, BOX])], [torch.tensor([0])], FRAME, SHAPE, 3, cpu)
    with pytest.raises(ValueError, match='ground truth of 1 samples has labels of 2'):
        collect_ground_truth([torch.tensor([BOX])], [torch.tensor([0])] * 2, FRAME, SHAPE, 3, cpu)


def test_map_shape_checks_range_voxels_and_stride():
    good = dict(point_cloud_range=[-9.6, -16.0, -5.0, 9.6, 16.0, 3.0], voxel_size=[0.2, 0.2, 8.0], grid_size=[96, 160, 1],
                out_size_factor=8)
    assert map_shape(good, 'train_cfg') == SHAPE
    with pytest.raises(ValueError, match=r'grid_size: range \[-16.0, 16.0\] m at 0.2 m is 160 voxels along y, got 161'):
        map_shape(dict(good, grid_size=[96, 161, 1]), 'train_cfg')
    with pytest.raises(ValueError, match='train_cfg.grid_size: 96 voxels along x are not a multiple of 7'):
        map_shape(dict(good, out_size_factor=7), 'train_cfg')
    with pytest.raises(ValueError, match=r'train_cfg.voxel_size \(x\).*does not divide'):
        map_shape(dict(good, voxel_size=[0.21, 0.2, 8.0]), 'train_cfg')


def test_key_errors_name_the_nearest():
    with pytest.raises(KeyError, match="unknown key 'out_size_facto'; did you mean 'out_size_factor'"):
        check_keys(dict(grid_size=1, out_size_facto=8), 'test_cfg', ('grid_size',), ('out_size_factor',))
    with pytest.raises(KeyError, match='train_cfg: missing grid_size'):
        check_keys({}, 'train_cfg', ('grid_size',), ())


def test_feature_map_mismatch():
    with pytest.raises(ValueError, match='the BEV map has 20 x 12 cells, but grid_size / out_size_factor gives 12 x 20'):
        check_feature_map(torch.zeros(1, 4, 20, 12), SHAPE, 'Head')
    with pytest.raises(ValueError, match=r'expected a BEV map \(B, C, X, Y\), got shape \(4, 12, 20\)'):
        check_feature_map(torch.zeros(4, 12, 20), SHAPE, 'Head')
