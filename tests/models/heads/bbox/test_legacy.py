"""The older box convention: the same physical boxes, and heads that say the same about them."""
import math

import pytest
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes

from mmdet3d_ext.models.heads.bbox import swap_box_convention, swap_head_convention


def legacy_corners(box):
    """Ground-plane corners by the definition of the older convention: w along own x, l along own y, yaw clockwise."""
    x, y, _, w, length, _, yaw = box[:7]
    c, s = math.cos(yaw), math.sin(yaw)
    return [(x + a * c + b * s, y - a * s + b * c) for a, b in
            [(-w / 2, -length / 2), (w / 2, -length / 2), (w / 2, length / 2), (-w / 2, length / 2)]]


def test_boxes_are_the_same_solids_and_heading():
    old = torch.tensor([[1.0, 2.0, -1.0, 1.8, 4.5, 1.6, 0.7, 3.0, 1.0], [-4.0, 0.0, 0.0, 2.0, 9.0, 3.0, -2.9, 0.0, 0.0]])
    new = swap_box_convention(old)
    assert new[0, 3:6].tolist() == pytest.approx([4.5, 1.8, 1.6])
    corners = LiDARInstance3DBoxes(new, box_dim=9).corners
    for i in range(len(old)):
        ground = {(round(float(x), 3), round(float(y), 3)) for x, y, _ in corners[i]}
        assert ground == {(round(x, 3), round(y, 3)) for x, y in legacy_corners(old[i].tolist())}
        heading = (-math.sin(old[i, 6]), -math.cos(old[i, 6]))  # the older box drives along its own -y
        assert (math.cos(new[i, 6]), math.sin(new[i, 6])) == pytest.approx(heading, abs=1e-6)
    assert torch.equal(new[:, 7:], old[:, 7:]) and torch.equal(new[:, :3], old[:, :3])


def test_boxes_round_trip():
    boxes = torch.randn(20, 9)
    assert (swap_box_convention(swap_box_convention(boxes)) - boxes).abs().max() < 1e-6


def test_only_the_last_regression_layers_change(transfusion, centerhead):
    for head, prefix in ((transfusion(), 'heads.object.'), (centerhead(), '')):
        state = {prefix + name: tensor for name, tensor in head.state_dict().items()}
        swapped = swap_head_convention(state)
        assert list(swapped) == list(state)
        changed = {name for name in state if not torch.equal(state[name], swapped[name])}
        assert all('.dim.1.' in name or '.rot.1.' in name for name in changed)
        assert any('.dim.1.weight' in name for name in changed) and any('.rot.1.weight' in name for name in changed)
        again = swap_head_convention(swapped)
        assert all(torch.equal(again[name], state[name]) for name in state)


def test_a_converted_head_means_the_same_boxes(transfusion, features):
    head = transfusion().eval()
    with torch.no_grad():
        before = head(features(2))
        head.load_state_dict(swap_head_convention(head.state_dict()))
        after = head(features(2))
    decode = [head.bbox_coder.decode_boxes(p['center'], p['height'], p['dim'], p['rot'], p['vel']) for p in (before, after)]
    gap = swap_box_convention(decode[0]) - decode[1]
    gap[..., 6] = torch.sin(gap[..., 6] / 2)  # the same angle up to whole turns
    assert gap.abs().max() < 1e-4


def test_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r'prediction_heads\.0\.dim\.1\.bias: expected 3 outputs, got shape \(4,\)'):
        swap_head_convention({'prediction_heads.0.dim.1.bias': torch.zeros(4)})
