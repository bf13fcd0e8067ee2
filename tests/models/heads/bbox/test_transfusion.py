"""TransFusionHead: what is right by default, whatever the batch holds."""
import json
import logging
import math

import pytest
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from testing import shared_dir

from mmdet3d_ext.registry import MODELS

EMPTY = LiDARInstance3DBoxes(torch.zeros(0, 9), box_dim=9), torch.zeros(0, dtype=torch.long)
LOSSES = ['loss_heatmap', 'layer_-1_loss_cls', 'layer_-1_loss_bbox']


def total(losses):
    return sum(value for name, value in losses.items() if 'loss' in name)


def clone(preds):
    return {name: value.clone() for name, value in preds.items()}


def ungraded(head):
    return [name for name, p in head.named_parameters() if p.grad is None or not p.grad.isfinite().all()]


def truth(*samples):
    return [s[0] for s in samples], [s[1] for s in samples]


# ---------------------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize('layers', [1, 3])
@pytest.mark.parametrize('content', ['boxes', 'none', 'mixed'])
def test_every_parameter_gets_a_gradient(transfusion, features, scene, layers, content):
    head = transfusion(num_decoder_layers=layers)
    samples = {'boxes': (scene(), scene()), 'none': (EMPTY, EMPTY), 'mixed': (EMPTY, scene())}[content]
    losses = head.loss(*truth(*samples), head(features(2)))
    assert all(losses[name].requires_grad and losses[name].isfinite() for name in losses if 'loss' in name)
    assert not losses['matched_ious'].requires_grad
    total(losses).backward()
    assert ungraded(head) == []
    assert head.heatmap_head[1].bias.grad.abs().max() > 0


def test_the_same_keys_in_the_same_order_for_every_batch(transfusion, features, scene):
    head = transfusion(num_decoder_layers=2)
    expected = ['loss_heatmap', 'layer_0_loss_cls', 'layer_0_loss_bbox', *LOSSES[1:], 'matched_ious']
    for sample in (scene(), EMPTY):
        assert list(head.loss(*truth(sample), head(features(1)))) == expected
    assert head.statistics == ('matched_ious',)


def test_losses_and_detections_do_not_change_the_predictions(transfusion, features, scene):
    head = transfusion().eval()
    preds = head(features(2))
    before, gt = clone(preds), truth(scene(), scene())
    first = head.loss(*gt, preds)
    boxes = head.get_bboxes(preds)
    second, again = head.loss(*gt, preds), head.get_bboxes(preds)
    assert all(torch.equal(preds[name], before[name]) for name in before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for a, b in zip(boxes, again, strict=True):
        assert torch.equal(a[0].tensor, b[0].tensor) and torch.equal(a[1], b[1])


def test_no_box_trains_every_query_as_background(transfusion, features):
    head = transfusion()
    targets = head.get_targets(*truth(EMPTY), head(features(1)))
    assert (targets['labels'] == 3).all() and targets['bbox_weights'].abs().sum() == 0 and targets['heatmap'].abs().sum() == 0
    assert targets['num_pos'].tolist() == [0] and targets['matched_ious'] == 0
    losses = head.loss(*truth(EMPTY), head(features(1)))
    assert losses['layer_-1_loss_bbox'] == 0 and losses['loss_heatmap'] > 0


def test_boxes_outside_the_map_are_not_trained(transfusion, features, scene):
    head = transfusion().eval()
    rows = [(-3.0, 5.0, -1.5, 4.2, 1.8, 1.6, 0.5, 2.0, -1.0), (9.7, 0.0, -1.5, 4.2, 1.8, 1.6, 0.5, 2.0, -1.0),
            (0.0, -50.0, -1.5, 4.2, 1.8, 1.6, 0.5, 2.0, -1.0)]
    preds = head(features(1))
    with_outside = head.loss(*truth(scene(rows, (0, 0, 1))), preds)
    inside_only = head.loss(*truth(scene(rows[:1], (0,))), preds)
    assert all(torch.equal(with_outside[name], inside_only[name]) for name in inside_only)


def test_unknown_velocity_is_not_trained(transfusion, features, scene):
    head = transfusion()
    nan = float('nan')
    losses = head.loss(*truth(scene([(-3.0, 5.0, -1.5, 4.2, 1.8, 1.6, 0.5, nan, nan)], (0,))), head(features(1)))
    assert all(value.isfinite() for value in losses.values())
    total(losses).backward()
    branch = head.prediction_heads[0]
    assert branch.vel[1].weight.grad.abs().max() == 0 and branch.rot[1].weight.grad.abs().max() > 0
    # boxes without velocity columns mean the same
    seven = scene([(-3.0, 5.0, -1.5, 4.2, 1.8, 1.6, 0.5)], (0,))
    again = head.loss(*truth(seven), head(features(1)))
    assert all(torch.allclose(again[name], losses[name]) for name in losses)


def test_each_layer_is_normalised_by_its_own_matches(transfusion, features, scene):
    """The same losses with the old normalisation are smaller by the number of layers."""
    ours, old = transfusion(num_decoder_layers=2).eval(), transfusion('reference', num_decoder_layers=2).eval()
    old.load_state_dict(ours.state_dict())
    preds = ours(features(2))
    a, b = (head.loss(*truth(scene(), scene()), preds) for head in (ours, old))
    for layer in ('layer_0', 'layer_-1'):
        for kind in ('cls', 'bbox'):
            assert a[f'{layer}_loss_{kind}'].item() == pytest.approx(2 * b[f'{layer}_loss_{kind}'].item(), rel=1e-5)


@pytest.mark.parametrize('layers', [1, 2])
def test_nan_features_give_a_nan_loss_and_a_message_not_a_crash(transfusion, features, scene, caplog, layers):
    head = transfusion(num_decoder_layers=layers).eval()
    x = features(2)
    x[1] = float('nan')
    with caplog.at_level(logging.WARNING):
        losses = head.loss(*truth(scene(), scene()), head(x))
    assert not total(losses).isfinite()
    assert '12 of 12 queries of sample 1' in caplog.text
    clean = head.loss(*truth(scene()), head(x[:1]))
    assert total(clean).isfinite()
    with torch.no_grad():
        results = head.get_bboxes(head(x))
    assert len(results[0][1]) > 0 and len(results[1][1]) == 0  # the broken sample has no detections


@pytest.mark.parametrize('branch', ['center', 'height', 'dim', 'rot', 'vel', 'heatmap', 'dense_heatmap'])
def test_one_nan_anywhere_is_seen_in_the_loss(transfusion, features, scene, branch):
    head = transfusion().eval()
    preds = head(features(1))
    preds[branch] = preds[branch].clone()
    preds[branch].view(-1)[5] = float('nan')
    assert not total(head.loss(*truth(scene()), preds)).isfinite()


def test_more_boxes_than_queries(transfusion, features, scene):
    head = transfusion(num_proposals=2)
    targets = head.get_targets(*truth(scene()), head(features(1)))
    assert targets['num_pos'].tolist() == [2] and (targets['labels'] < 3).all()


def test_positive_weight_and_class_weights(transfusion, features, scene):
    head = transfusion(train_cfg=dict(pos_weight=3.0))
    targets = head.get_targets(*truth(scene()), head(features(1)))
    assert targets['label_weights'][targets['labels'] < 3].tolist() == [3.0] * 3
    assert targets['label_weights'][targets['labels'] == 3].unique().tolist() == [1.0]


@pytest.mark.parametrize('dtype', [torch.bfloat16])
def test_autocast_keeps_predictions_and_losses_in_float32(transfusion, features, scene, dtype):
    head = transfusion()
    with torch.autocast('cpu', dtype=dtype):
        preds = head(features(2))
        losses = head.loss(*truth(scene(), EMPTY), preds)
    assert all(value.dtype in (torch.float32, torch.int64) for value in preds.values())
    assert all(value.dtype == torch.float32 and value.isfinite() for value in losses.values())
    total(losses).backward()
    assert ungraded(head) == []


# ------------------------------------------------------------------------------------------------------------------ batches
def test_a_batch_of_three_is_three_batches_of_one(transfusion, features, scene):
    head = transfusion(num_decoder_layers=2).eval()
    x = features(3)
    with torch.no_grad():
        together = head(x)
        alone = [head(x[i:i + 1]) for i in range(3)]
        for name in together:
            assert torch.allclose(together[name], torch.cat([a[name] for a in alone]), atol=1e-5), name
        found = head.get_bboxes(together, [{}] * 3)
        assert len(found) == 3
        for i, (boxes, scores, labels) in enumerate(found):
            one = head.get_bboxes(alone[i], [{}])[0]
            assert torch.allclose(boxes.tensor, one[0].tensor, atol=1e-4) and torch.allclose(scores, one[1], atol=1e-5)
            assert torch.equal(labels, one[2]) and labels.dtype == torch.long
    samples = [scene(), EMPTY, scene([(2.0, 2.0, -1.0, 4.0, 2.0, 1.5, 0.1, 0.0, 0.0)], (2,))]
    batch = head.get_targets(*truth(*samples), together)
    for i in range(3):
        single = head.get_targets(*truth(samples[i]), alone[i])
        for name in ('labels', 'bbox_targets', 'bbox_weights', 'heatmap', 'label_weights'):
            assert torch.allclose(batch[name][i:i + 1].float(), single[name].float(), atol=1e-5), name


def test_wrong_numbers_of_samples_are_refused(transfusion, features, scene):
    head = transfusion().eval()
    preds = head(features(2))
    with pytest.raises(ValueError, match='gt_bboxes_3d: 1 entries for 2 samples'):
        head.loss(*truth(scene()), preds)
    with pytest.raises(ValueError, match='metas: 1 entries for 2 samples'):
        head.get_bboxes(preds, [{}])


def test_the_box_class_comes_from_the_sample(transfusion, features):
    class Special(LiDARInstance3DBoxes):
        pass
    head = transfusion().eval()
    found = head.get_bboxes(head(features(2)), [dict(box_type_3d=Special), dict(box_type_3d='LiDAR')])
    assert type(found[0][0]) is Special and type(found[1][0]) is LiDARInstance3DBoxes
    assert type(head.get_bboxes(head(features(1)))[0][0]) is LiDARInstance3DBoxes


# ------------------------------------------------------------------------------------------------------------------ queries
def peaks_at(*places, shape=(1, 3, 12, 20)):
    logits = torch.full(shape, -5.0)
    for label, x, y, value in places:
        logits[0, label, x, y] = value
    return logits


@pytest.mark.parametrize('cell', [(0, 7), (11, 3), (5, 0), (2, 19), (0, 0), (11, 19)])
def test_border_cells_are_proposed(transfusion, cell):
    logits = peaks_at((0, *cell, 2.0), (2, 6, 6, 1.0))
    labels, cells, scores = transfusion().propose(logits)
    assert (labels[0, 0].item(), cells[0, 0].item()) == (0, cell[0] * 20 + cell[1])
    assert scores[0, 0, 0] == pytest.approx(torch.tensor(2.0).sigmoid().item())
    labels, cells, _ = transfusion('reference').propose(logits)  # the reference never proposes them
    assert (labels[0, 0].item(), cells[0, 0].item()) == (2, 6 * 20 + 6)


@pytest.mark.parametrize('kernel', [1, 3, 5])
def test_kernel_sizes(transfusion, kernel):
    # a strong peak, a weaker neighbour 1 cell away, another 2 cells away
    logits = peaks_at((0, 5, 5, 3.0), (0, 5, 6, 2.0), (0, 5, 7, 1.0))
    _, cells, scores = transfusion(nms_kernel_size=kernel).propose(logits)
    own = scores[0, 0]
    assert cells[0, 0] == 105 and own[0] > 0.9
    if kernel == 1:
        assert cells[0, :3].tolist() == [105, 106, 107]
    else:
        assert 106 not in cells[0][own > 0.01].tolist()


def test_suppressed_cells_score_zero_but_fill_up_the_queries(transfusion):
    logits = peaks_at((0, 5, 5, 3.0), (0, 5, 6, 2.0))
    logits -= torch.arange(720).view(1, 3, 12, 20) * 1e-3  # one slope: the first cell of each class is its only other maximum
    labels, cells, scores = transfusion(num_proposals=12).propose(logits)
    own = scores.gather(1, labels[:, None])[0, 0]
    assert (own[:4] > 0).all() and (own[4:] == 0).all()
    assert len(set(zip(labels[0].tolist(), cells[0].tolist(), strict=True))) == 12
    assert cells[0, 4] == 106  # the best of those that are no maximum comes first


def test_small_classes_skip_the_test_for_a_maximum(transfusion):
    """By data set with its usual classes, by name, or as given."""
    assert transfusion().no_local_max == []  # three classes of nuScenes: no order is assumed
    assert transfusion(class_names=['car', 'pedestrian', 'truck']).no_local_max == [1]
    assert transfusion(class_names=['traffic_cone', 'car', 'pedestrian']).no_local_max == [2, 0]
    assert transfusion(no_local_max_classes=[2]).no_local_max == [2]
    assert transfusion(class_names=['a', 'b', 'c'], no_local_max_classes=['b']).no_local_max == [1]
    ten = transfusion(num_classes=10)
    assert ten.no_local_max == [8, 9] and ten.nms_radius == {8: 0.175, 9: 0.175}
    waymo = transfusion(test_cfg=dict(dataset='Waymo'), train_cfg=dict(dataset='Waymo'))
    assert waymo.no_local_max == [1, 2] and waymo.nms_radius == {0: 0.7, 1: 0.7, 2: 0.7}

    logits = peaks_at((1, 5, 5, 3.0), (1, 5, 6, 2.0))
    assert transfusion(no_local_max_classes=[1]).propose(logits)[1][0, :2].tolist() == [105, 106]
    assert 106 not in transfusion().propose(logits)[1][0, :2].tolist()


def test_a_map_with_fewer_cells_than_queries_is_refused(transfusion, features):
    with pytest.raises(ValueError, match=r'num_proposals: 721 queries, but the map has only 720 \(class, cell\) pairs'):
        transfusion(num_proposals=721)(features(1))


# --------------------------------------------------------------------------------------------------------------- detections
def crafted(head, places):
    """Predictions whose queries say exactly: (x, y metres, class, score)."""
    count = head.num_proposals
    preds = dict(heatmap=torch.full((1, 3, count), -20.0), center=torch.zeros(1, 2, count), height=torch.zeros(1, 1, count),
                 dim=torch.zeros(1, 3, count), rot=torch.zeros(1, 2, count), vel=torch.zeros(1, 2, count),
                 query_labels=torch.zeros(1, count, dtype=torch.long), query_heatmap_score=torch.zeros(1, 3, count))
    preds['rot'][:, 1] = 1.0
    for i, (x, y, label, score) in enumerate(places):
        preds['center'][0, :, i] = head.bbox_coder.frame.to_cells(torch.tensor([float(x), float(y)]))
        preds['query_labels'][0, i] = label
        preds['heatmap'][0, label, i] = 20.0
        preds['query_heatmap_score'][0, label, i] = score
    return preds


def test_a_score_of_zero_is_no_detection(transfusion):
    head = transfusion()
    places = [(0, 0, 0, 0.5), (3, 3, 1, 0.4)]
    assert len(head.get_bboxes(crafted(head, places))[0][1]) == 2
    assert len(transfusion('reference').get_bboxes(crafted(head, places))[0][1]) == 12


def test_decoded_box_stands_on_its_bottom(transfusion):
    head = transfusion()
    preds = crafted(head, [(1.0, 2.0, 2, 0.5)])
    preds['height'][0, 0, 0] = 0.3
    preds['dim'][0, :, 0] = torch.tensor([4.0, 2.0, 1.6]).log()
    preds['rot'][0, :, 0] = torch.tensor([math.sin(0.7), math.cos(0.7)])
    preds['vel'][0, :, 0] = torch.tensor([3.0, -1.0])
    boxes, _, labels = head.get_bboxes(preds)[0]
    assert boxes.tensor[0].tolist() == pytest.approx([1.0, 2.0, 0.3 - 0.8, 4.0, 2.0, 1.6, 0.7, 3.0, -1.0], abs=1e-5)
    assert boxes.gravity_center[0, 2] == pytest.approx(0.3, abs=1e-6) and labels.tolist() == [2]


@pytest.mark.parametrize('compat,kept', [(None, [0.5, 0.4]), ('reference', [0.5, 0.4, 0.3])])
def test_circle_suppression_is_in_metres(transfusion, compat, kept):
    """Centres 0, 1.5 m and 0.9 m apart, radius 1.2: squared, 0.81 is within 1.2 as well, and 1.44 would not be."""
    head = transfusion(compat, test_cfg=dict(nms_type='circle', nms_radius={1: 1.5 if compat else 1.2}))
    places = [(0, 0, 1, 0.5), (0, 1.25, 1, 0.4), (0, 0.9 if not compat else -1.3, 1, 0.3), (0, 0.1, 0, 0.0)]
    found = head.get_bboxes(crafted(head, places))[0][1]
    assert found[found > 0].tolist() == pytest.approx(kept)


def test_suppression_is_class_by_class(transfusion):
    places = [(0, 0, 0, 0.5), (0.1, 0, 0, 0.4), (0.2, 0, 1, 0.3), (0.3, 0, 1, 0.2)]
    for kind in ('circle', 'rotate'):
        head = transfusion(test_cfg=dict(nms_type=kind, nms_radius={1: 0.5}))
        _, scores, labels = head.get_bboxes(crafted(head, places))[0]
        assert labels.tolist() == [0, 0, 1] and scores.tolist() == pytest.approx([0.5, 0.4, 0.3])


# ------------------------------------------------------------------------------------------------------------ configuration
@pytest.mark.parametrize('changes,error,message', [
    (dict(nms_kernel_size=2), ValueError, 'nms_kernel_size: must be odd and positive, got 2'),
    (dict(num_decoder_layers=2, auxiliary=False), ValueError, 'auxiliary: must be true with more than one decoder layer'),
    (dict(num_heads=5), ValueError, 'num_heads: must divide the 32 hidden channels, got 5'),
    (dict(activation='swish'), ValueError, "activation: expected one of .*got 'swish'"),
    (dict(loss_cls=dict(type='GaussianFocalLoss')), ValueError, 'loss_cls: needs use_sigmoid: true'),
    (dict(common_heads=dict(rot=...)), ValueError, 'common_heads: .*missing rot'),
    (dict(common_heads=dict(vel=...)), ValueError, 'bbox_coder.code_size: common_heads regresses 8 numbers, got 10'),
    (dict(train_cfg=dict(code_weights=[1.0] * 8)), ValueError, 'train_cfg.code_weights: needs 10 numbers, got 8'),
    (dict(train_cfg=dict(min_radios=3)), KeyError, "train_cfg: unknown key 'min_radios'; did you mean 'min_radius'"),
    (dict(train_cfg=dict(assigner=...)), KeyError, 'train_cfg: missing assigner'),
    (dict(test_cfg=dict(nms_type='soft')), ValueError, "test_cfg.nms_type: expected null, circle or rotate, got 'soft'"),
    (dict(test_cfg=dict(out_size_factor=4)), ValueError, r'test_cfg.out_size_factor: the box coder has \[8\], got 4'),
    (dict(test_cfg=dict(pc_range=[-9.6, -9.6])), ValueError, r'test_cfg.pc_range: .*\[-9.6, -16.0\], got \[-9.6, -9.6\]'),
    (dict(bbox_coder=dict(voxel_size=[0.1, 0.2])), ValueError, r'train_cfg.voxel_size: .* has \[0.1, 0.2\], got'),
    (dict(class_names=['car']), ValueError, 'class_names: num_classes is 3, got 1 names'),
    (dict(no_local_max_classes=['cow'], class_names=['a', 'b', 'c']), ValueError, "no_local_max_classes: 'cow' is not among"),
    (dict(test_cfg=dict(nms_radius={7: 1.0})), ValueError, r'test_cfg.nms_radius: class index must lie in \[0, 3\), got 7'),
    (dict(num_proposal=3), TypeError, "takes no argument 'num_proposal'; did you mean 'num_proposals'")])
def test_bad_configuration(transfusion, changes, error, message):
    with pytest.raises(error, match=message):
        transfusion(**changes)


def test_without_velocity(transfusion, features, scene):
    coder = dict(code_size=8)
    head = transfusion(common_heads=dict(vel=...), bbox_coder=coder, train_cfg=dict(code_weights=[1.0] * 8))
    total(head.loss(*truth(scene()), head(features(1)))).backward()
    assert ungraded(head) == []
    assert head.eval().get_bboxes(head(features(1)))[0][0].tensor.shape[1] == 7


def test_inference_needs_no_train_cfg(transfusion, features, scene):
    head = transfusion(train_cfg=...) .eval()
    preds = head([features(1)])  # a list with one level is taken as well
    assert len(head.get_bboxes(preds)) == 1
    with pytest.raises(ValueError, match='was built without train_cfg'):
        head.loss(*truth(scene()), preds)
    with pytest.raises(ValueError, match='takes one feature level, got 2'):
        head([features(1)] * 2)


def test_another_grid_in_test_cfg_is_reported_and_not_used(transfusion, features, caplog):
    head = transfusion(test_cfg=dict(grid_size=[1024, 1024, 1]))
    assert head.map_shape == (12, 20) and 'test_cfg.grid_size [1024, 1024, 1] is not used' in caplog.text
    head(features(2))


def test_initial_scores_follow_the_prior(transfusion, features):
    preds = transfusion()(features(4))
    for name in ('dense_heatmap', 'heatmap'):
        assert 0.05 < preds[name].sigmoid().mean() < 0.2 and preds[name].sigmoid().max() < 0.6
    assert all(m.momentum == 0.1 for m in transfusion().modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm))


@pytest.mark.parametrize('name', ['camera+lidar/swint_v0p075/convfuser', 'lidar/pointpillars'])
def test_parameter_names(transfusion, name):
    with open(shared_dir('parity', 'state_dicts.json')) as file:
        model = json.load(file)[f'nuscenes/det/transfusion/secfpn/{name}.yaml']
    expected = {key[len('heads.object.'):]: tuple(shape) for key, shape in model.items() if key.startswith('heads.object.')}
    head = transfusion(in_channels=expected['shared_conv.weight'][1], hidden_channel=128, num_classes=10, num_heads=8,
                       ffn_channel=256)
    assert {key: tuple(value.shape) for key, value in head.state_dict().items()} == expected


# ----------------------------------------------------------------------------------------------------------------- learning
def overfit(head, features, scene, steps, device='cpu'):
    """Train on two samples, one of them empty of boxes; give the losses and the detections of the first."""
    head, x = head.to(device), features(2).to(device)
    gt = truth(scene(), EMPTY)
    optimizer = torch.optim.AdamW(head.parameters(), lr=4e-3)
    # down to zero, so that the batch norms' running statistics are those of the final weights
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    history = []
    for _ in range(steps):
        losses = head.loss(*gt, head(x))
        optimizer.zero_grad()
        total(losses).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 35)
        optimizer.step()
        schedule.step()
        history.append(total(losses).item())
    head.eval()
    with torch.no_grad():
        return history, head.get_bboxes(head(x))


def check_overfit(history, found, scene, last):
    assert history[-1] < last < history[0]
    boxes, scores, labels = (t.cpu() for t in (found[0][0].tensor, *found[0][1:]))
    expected, classes = scene()
    for box, label in zip(expected.tensor, classes, strict=True):
        near = [(s.item(), b) for b, s, c in zip(boxes, scores, labels, strict=True)
                if c == label and (b[:2] - box[:2]).norm() < 0.5]
        assert near, f'{box} was not found'
        score, best = max(near, key=lambda pair: pair[0])
        assert score > 0.3
        assert (best[3:6] / box[3:6] - 1).abs().max() < 0.15 and (best[2] - box[2]).abs() < 0.3
        assert abs(math.sin((best[6] - box[6]).item() / 2)) < 0.1
    assert (found[1][1] < 0.2).all()  # the empty sample stays empty


def test_overfits_one_batch(transfusion, features, scene):
    history, found = overfit(transfusion(class_names=['car', 'pedestrian', 'truck']), features, scene, 80)
    check_overfit(history, found, scene, 0.1)


@pytest.mark.gpu
def test_overfits_one_batch_on_the_gpu(transfusion, features, scene):
    history, found = overfit(transfusion(class_names=['car', 'pedestrian', 'truck']), features, scene, 80, 'cuda')
    check_overfit(history, found, scene, 0.1)


@pytest.mark.gpu
def test_gpu_equals_cpu(transfusion, features, scene):
    head = transfusion(num_decoder_layers=2, nms_kernel_size=3).eval()
    x, gt = features(2), truth(scene(), EMPTY)
    cpu = head(x)
    expected = head.loss(*gt, cpu)
    head = head.cuda()
    preds = head(x.cuda())
    losses = head.loss(*gt, preds)
    for name in expected:
        assert losses[name].item() == pytest.approx(expected[name].item(), rel=1e-3), name
    with torch.autocast('cuda', dtype=torch.float16):
        half = head.loss(*gt, head(x.cuda()))
    assert all(value.dtype == torch.float32 and value.isfinite() for value in half.values())


@pytest.mark.gpu
def test_the_loss_waits_for_the_device_once(transfusion, features, scene):
    """Matching moves the costs of all samples to the host."""
    head = transfusion().cuda()
    x = features(4).cuda()
    boxes, labels = truth(*[scene() for _ in range(4)])
    boxes, labels = [b.to('cuda') for b in boxes], [t.cuda() for t in labels]
    head.loss(boxes, labels, head(x))
    preds = head(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        head.loss(boxes, labels, preds)
    to_host = [event for event in trace.events() if 'Memcpy DtoH' in event.name]
    assert len(to_host) == 1, [event.name for event in to_host]


def test_registered_under_the_reference_name():
    from mmdet3d_ext.models.heads.bbox import TransFusionHead
    assert MODELS.get('TransFusionHead') is TransFusionHead
