"""CenterHead: what is right by default, whatever the batch holds."""
import json
import math

import pytest
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from testing import shared_dir

from mmdet3d_ext.registry import MODELS

EMPTY = LiDARInstance3DBoxes(torch.zeros(0, 9), box_dim=9), torch.zeros(0, dtype=torch.long)
KEYS = ['heatmap/task0', 'bbox/task0', 'heatmap/task1', 'bbox/task1']
CPU = torch.device('cpu')


def total(losses):
    return sum(losses.values())


def truth(*samples):
    return [s[0] for s in samples], [s[1] for s in samples]


def ungraded(head):
    return [name for name, p in head.named_parameters() if p.grad is None or not p.grad.isfinite().all()]


# ---------------------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize('content', ['boxes', 'none', 'mixed', 'one task only'])
def test_every_parameter_gets_a_gradient(centerhead, features, scene, content):
    head = centerhead()
    car = scene([(-3.0, 5.0, -1.5, 4.2, 1.8, 1.6, 0.5, 2.0, -1.0)], (0,))
    samples = {'boxes': (scene(), scene()), 'none': (EMPTY, EMPTY), 'mixed': (EMPTY, scene()), 'one task only': (car, EMPTY)}
    losses = head.loss(*truth(*samples[content]), head(features(2)))
    assert list(losses) == KEYS
    assert all(value.requires_grad and value.isfinite() for value in losses.values())
    total(losses).backward()
    assert ungraded(head) == []
    if content == 'none':
        assert losses['bbox/task0'] == 0 and losses['heatmap/task0'] > 0


def test_losses_and_detections_do_not_change_the_predictions(centerhead, features, scene):
    head = centerhead().eval()
    preds = head(features(2))
    before = [{name: value.clone() for name, value in task.items()} for task in preds]
    gt = truth(scene(), scene())
    first, boxes = head.loss(*gt, preds), head.get_bboxes(preds)
    second, again = head.loss(*gt, preds), head.get_bboxes(preds)
    for task, old in zip(preds, before, strict=True):
        assert list(task) == list(old) and all(torch.equal(task[name], old[name]) for name in old)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for a, b in zip(boxes, again, strict=True):
        assert torch.equal(a[0].tensor, b[0].tensor) and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])


def test_unknown_velocity_is_not_trained(centerhead, features, scene):
    head = centerhead()
    nan = float('nan')
    losses = head.loss(*truth(scene([(-3.0, 5.0, -1.5, 4.2, 1.8, 1.6, 0.5, nan, nan)], (0,))), head(features(1)))
    assert all(value.isfinite() for value in losses.values())
    total(losses).backward()
    assert head.task_heads[0].vel[1].weight.grad.abs().max() == 0
    assert head.task_heads[0].rot[1].weight.grad.abs().max() > 0


def test_targets_by_hand(centerhead, scene):
    head = centerhead()
    boxes, labels = scene([(-3.0, 5.0, -1.5, 4.2, 1.8, 1.6, 0.5, 2.0, -1.0), (8.5, -15.5, -1.0, 0.7, 0.6, 1.7, 2.0, 0.3, 0.4),
                           (50.0, 0.0, -1.0, 0.7, 0.6, 1.7, 2.0, 0.3, 0.4)], (0, 2, 0))
    car, other = head.get_targets([boxes], [labels], CPU)
    assert car['mask'].tolist() == [[True, False, False]] and other['mask'].tolist() == [[False, True, False]]
    x, y = (-3.0 + 9.6) / 1.6, (5.0 + 16.0) / 1.6
    assert car['cells'][0, 0] == int(x) * 20 + int(y)
    sizes = [math.log(v) for v in (4.2, 1.8, 1.6)]
    expected = [x - int(x), y - int(y), -1.5 + 0.8, *sizes, math.sin(0.5), math.cos(0.5), 2.0, -1.0]
    assert car['boxes'][0, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert car['weights'][0].sum(1).tolist() == [10.0, 0.0, 0.0]
    assert other['cells'][0, 1] == 11 * 20 + 0 and other['heatmap'].shape == (1, 2, 12, 20)
    assert other['heatmap'][0, 1, 11, 0] == 1 and other['heatmap'][0, 0].sum() == 0
    assert car['heatmap'].eq(1).sum() == 1


def test_boxes_below_the_map_are_not_trained(centerhead, scene):
    low = scene([(-10.0, 5.0, -1.5, 4.2, 1.8, 1.6, 0.5, 2.0, -1.0)], (0,))
    assert not centerhead().get_targets(*truth(low), CPU)[0]['mask'].any()
    assert centerhead('reference').get_targets(*truth(low), CPU)[0]['mask'].all()


def test_plain_sizes(centerhead, scene):
    head = centerhead(norm_bbox=False).eval()
    target = head.get_targets(*truth(scene()), CPU)[0]
    assert target['boxes'][0, 0, 3:6].tolist() == pytest.approx([4.2, 1.8, 1.6])
    preds = crafted(head, [(0.0, 0.0, 0, 0, 0.9)])
    preds[0]['dim'] = preds[0]['dim'].exp()
    assert head.get_bboxes(preds)[0][0].tensor[0, 2:6].tolist() == pytest.approx([-1.0, 4.0, 2.0, 1.6])


def test_nan_features_give_a_nan_loss_and_no_detections(centerhead, features, scene):
    head = centerhead().eval()
    x = features(2)
    x[1] = float('nan')
    assert not total(head.loss(*truth(scene(), scene()), head(x))).isfinite()
    found = head.get_bboxes(head(x))
    assert len(found) == 2 and len(found[1][1]) == 0


def test_autocast_keeps_predictions_and_losses_in_float32(centerhead, features, scene):
    head = centerhead()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        preds = head(features(2))
        losses = head.loss(*truth(scene(), EMPTY), preds)
    assert all(value.dtype == torch.float32 for task in preds for value in task.values())
    assert all(value.dtype == torch.float32 and value.isfinite() for value in losses.values())
    total(losses).backward()
    assert ungraded(head) == []


# ------------------------------------------------------------------------------------------------------------------ batches
def test_a_batch_of_three_is_three_batches_of_one(centerhead, features, scene):
    head = centerhead(bbox_coder=dict(score_threshold=None), test_cfg=dict(score_threshold=0.0)).eval()
    x = features(3)
    samples = [scene(), EMPTY, scene([(2.0, 2.0, -1.0, 4.0, 2.0, 1.5, 0.1, 0.0, 0.0)], (2,))]
    with torch.no_grad():
        together, alone = head(x), [head(x[i:i + 1]) for i in range(3)]
        found = head.get_bboxes(together, [{}] * 3)
        for i in range(3):
            boxes, scores, labels = head.get_bboxes(alone[i], [{}])[0]
            assert len(scores) > 10 and torch.allclose(found[i][1], scores, atol=1e-5)
            assert torch.allclose(found[i][0].tensor, boxes.tensor, atol=1e-3) and torch.equal(found[i][2], labels)
    batch = head.get_targets(*truth(*samples), CPU)
    for i in range(3):
        for task, single in enumerate(head.get_targets(*truth(samples[i]), CPU)):
            assert torch.equal(batch[task]['heatmap'][i:i + 1], single['heatmap'])
            assert torch.equal(batch[task]['weights'][i, :len(samples[i][1])], single['weights'][0])


def test_wrong_numbers_of_samples_are_refused(centerhead, features, scene):
    head = centerhead().eval()
    preds = head(features(2))
    with pytest.raises(ValueError, match='gt_bboxes_3d: 1 entries for 2 samples'):
        head.loss(*truth(scene()), preds)
    with pytest.raises(ValueError, match='metas: 3 entries for 2 samples'):
        head.get_bboxes(preds, [{}] * 3)


# --------------------------------------------------------------------------------------------------------------- detections
def crafted(head, places):
    """Predictions of one sample: (x, y, task, class within the task, probability) -> a 4 x 2 x 1.6 m box on z = -1."""
    preds = []
    for classes in head.num_classes:
        preds.append(dict(reg=torch.zeros(1, 2, 12, 20), height=torch.full((1, 1, 12, 20), -0.2), vel=torch.zeros(1, 2, 12, 20),
                          dim=torch.tensor([4.0, 2.0, 1.6]).log().view(1, 3, 1, 1).repeat(1, 1, 12, 20),
                          rot=torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).repeat(1, 1, 12, 20),
                          heatmap=torch.full((1, classes, 12, 20), -20.0)))
    for x, y, task, label, probability in places:
        cell = head.bbox_coder.frame.to_cells(torch.tensor([float(x), float(y)]))
        i, j = (int(v) for v in cell.floor())
        preds[task]['reg'][0, :, i, j] = cell - cell.floor()
        preds[task]['heatmap'][0, label, i, j] = math.log(probability / (1 - probability))
    return preds


def test_labels_run_through_the_tasks_and_boxes_stand_on_their_bottom(centerhead):
    head = centerhead()
    places = [(-3.0, 5.0, 1, 1, 0.9), (4.0, -6.0, 0, 0, 0.8), (0.0, 12.0, 1, 0, 0.7), (0.0, 0.0, 0, 0, 0.05)]
    boxes, scores, labels = head.get_bboxes(crafted(head, places))[0]
    assert labels.tolist() == [0, 2, 1] and scores.tolist() == pytest.approx([0.8, 0.9, 0.7], abs=1e-5)
    assert boxes.tensor[1].tolist() == pytest.approx([-3.0, 5.0, -1.0, 4.0, 2.0, 1.6, 0, 0, 0], abs=1e-4)
    assert boxes.gravity_center[:, 2].tolist() == pytest.approx([-0.2] * 3, abs=1e-6)


@pytest.mark.parametrize('compat,kept', [(None, 1), ('reference', 2)])
def test_circle_suppression_is_in_metres(centerhead, compat, kept):
    head = centerhead(compat, test_cfg=dict(min_radius=[4.0, 0.4]))
    places = [(0.0, 0.0, 0, 0, 0.9), (3.0, 0.0, 0, 0, 0.8)]  # 3 m apart: within 4 m, but 9 m^2 is above 4
    assert len(head.get_bboxes(crafted(head, places))[0][1]) == kept


def test_rotated_suppression_and_its_scale(centerhead):
    places = [(0.0, 0.0, 1, 0, 0.9), (1.7, 0.0, 1, 0, 0.8), (0.0, 4.0, 1, 0, 0.7)]  # the first two overlap by 0.40
    assert len(centerhead().get_bboxes(crafted(centerhead(), places))[0][1]) == 2
    assert len(centerhead(test_cfg=dict(nms_thr=0.5)).get_bboxes(crafted(centerhead(), places))[0][1]) == 3
    wide = centerhead(test_cfg=dict(nms_scale=[[1.0], [4.0, 1.0]]))  # 8 m wide: the third overlaps as well
    found = wide.get_bboxes(crafted(wide, places))[0]
    assert len(found[1]) == 1 and found[0].tensor[0, 3:5].tolist() == pytest.approx([4.0, 2.0])  # the box itself is not scaled


def test_no_suppression(centerhead):
    head = centerhead(test_cfg=dict(nms_type=None))
    places = [(0.0, 0.0, 0, 0, 0.9), (1.7, 0.0, 0, 0, 0.8)]
    assert len(head.get_bboxes(crafted(head, places))[0][1]) == 2


@pytest.mark.parametrize('compat,kept', [(None, 2), ('reference', 40)])
def test_a_threshold_of_zero_is_a_threshold(centerhead, compat, kept):
    """Probabilities that underflow to exactly zero are dropped; the reference takes a threshold of 0.0 for none."""
    head = centerhead(compat, bbox_coder=dict(score_threshold=0.0), test_cfg=dict(nms_type=None, score_threshold=0.0))
    preds = crafted(head, [(0.0, 0.0, 0, 0, 0.9), (3.0, 3.0, 0, 0, 0.5)])
    for task in preds:
        task['heatmap'][task['heatmap'] == -20] = -200.0
    assert (head.get_bboxes(preds)[0][2] == 0).sum() == kept


# ------------------------------------------------------------------------------------------------------------ configuration
@pytest.mark.parametrize('changes,error,message', [
    (dict(tasks=['car', 'truck']), ValueError, 'tasks: needs lists of class names'),
    (dict(common_heads=dict(reg=...)), ValueError, 'common_heads: .*missing reg'),
    (dict(bbox_coder=dict(code_size=7)), ValueError, 'code_size: common_heads has boxes of 9 numbers, got 7'),
    (dict(train_cfg=dict(code_weights=[1.0])), ValueError, 'train_cfg.code_weights: needs 10 numbers, got 1'),
    (dict(test_cfg=dict(nms_type=['circle'])), ValueError, r"test_cfg.nms_type: 2 tasks need 2 entries, got \['circle'\]"),
    (dict(test_cfg=dict(nms_type='soft')), ValueError, "test_cfg.nms_type: expected null, circle or rotate, got 'soft'"),
    (dict(test_cfg=dict(min_radius=[1.0])), ValueError, r'min_radius: needs one radius for each of the 2 tasks, got \[1.0\]'),
    (dict(test_cfg=dict(nms_thr=...)), ValueError, 'test_cfg.nms_thr: rotated suppression needs an IoU threshold'),
    (dict(test_cfg=dict(nms_scale=[[1.0], [1.0]])), ValueError, 'test_cfg.nms_scale: one factor for each class of a task'),
    (dict(test_cfg=dict(post_max_sise=3)), KeyError, "test_cfg: unknown key 'post_max_sise'; did you mean 'post_max_size'"),
    (dict(bbox_coder=dict(out_size_factor=4)), ValueError, r'train_cfg.out_size_factor: the box coder has \[4\], got 8'),
    (dict(train_cfg=dict(grid_size=...)), KeyError, 'train_cfg: missing grid_size'),
    (dict(separate_head=dict(type='SeparateHed')), KeyError, "unknown model type 'SeparateHed'; did you mean 'SeparateHead'")])
def test_bad_configuration(centerhead, changes, error, message):
    with pytest.raises(error, match=message):
        centerhead(**changes)


def test_without_velocity(centerhead, features, scene):
    head = centerhead(common_heads=dict(vel=...), bbox_coder=dict(code_size=7), train_cfg=dict(code_weights=[1.0] * 8))
    total(head.loss(*truth(scene()), head(features(1)))).backward()
    assert ungraded(head) == []
    assert head.eval().get_bboxes(head(features(1)))[0][0].tensor.shape[1] == 7


def test_inference_needs_no_train_cfg(centerhead, features, scene):
    head = centerhead(train_cfg=...).eval()
    preds = head([features(1)])
    assert len(head.get_bboxes(preds)) == 1
    with pytest.raises(ValueError, match='was built without train_cfg'):
        head.loss(*truth(scene()), preds)


def test_one_convolution_branches_take_the_shared_channels(centerhead, features):
    head = centerhead(common_heads=dict(height=[1, 1]), share_conv_channel=24)
    assert head.task_heads[0].height[0].weight.shape == (1, 24, 3, 3)
    assert head(features(1))[0]['height'].shape == (1, 1, 12, 20)


def test_initial_scores_follow_the_prior(centerhead, features):
    head = centerhead()
    for task in head(features(4)):
        assert 0.05 < task['heatmap'].sigmoid().mean() < 0.2 and task['heatmap'].sigmoid().max() < 0.6
    assert all((task.heatmap[-1].bias == -2.19).all() for task in head.task_heads)
    head.init_weights()
    assert all((task.heatmap[-1].bias == -2.19).all() for task in head.task_heads)


def test_parameter_names(centerhead):
    with open(shared_dir('parity', 'state_dicts.json')) as file:
        model = json.load(file)['nuscenes/det/centerhead/lssfpn/camera/256x704/swint/default.yaml']
    expected = {key[len('heads.object.'):]: tuple(shape) for key, shape in model.items() if key.startswith('heads.object.')}
    tasks = [['car'], ['truck', 'construction_vehicle'], ['bus', 'trailer'], ['barrier'], ['motorcycle', 'bicycle'],
             ['pedestrian', 'traffic_cone']]
    head = centerhead(in_channels=256, share_conv_channel=64, tasks=tasks, test_cfg=dict(nms_type='rotate'))
    assert {key: tuple(value.shape) for key, value in head.state_dict().items()} == expected


def test_registered_under_the_reference_names():
    from mmdet3d_ext.models.heads.bbox import CenterHead, SeparateHead
    assert MODELS.get('CenterHead') is CenterHead and MODELS.get('SeparateHead') is SeparateHead


# ----------------------------------------------------------------------------------------------------------------- learning
def overfit(head, features, scene, steps, device='cpu'):
    """Train on two samples, one of them empty of boxes; give the losses and the detections."""
    head, x, gt = head.to(device), features(2).to(device), truth(scene(), EMPTY)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    history = []
    for _ in range(steps):
        loss = total(head.loss(*gt, head(x)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 35)
        optimizer.step()
        schedule.step()
        history.append(loss.item())
    head.eval()
    with torch.no_grad():
        return history, head.get_bboxes(head(x))


def check_overfit(history, found, scene):
    assert history[-1] < 0.1 < history[0]
    boxes, scores, labels = (t.cpu() for t in (found[0][0].tensor, *found[0][1:]))
    expected, classes = scene()
    assert labels[scores > 0.3].sort().values.tolist() == classes.sort().values.tolist()  # these, and nothing else
    for box, label in zip(expected.tensor, classes, strict=True):
        best = boxes[(labels == label) & (scores > 0.3)][0]
        assert (best[:2] - box[:2]).norm() < 0.3 and (best[2] - box[2]).abs() < 0.2
        assert (best[3:6] / box[3:6] - 1).abs().max() < 0.15 and abs(math.sin((best[6] - box[6]).item() / 2)) < 0.1
    assert (found[1][1] < 0.2).all()


def test_overfits_one_batch(centerhead, features, scene):
    check_overfit(*overfit(centerhead(), features, scene, 60), scene)


@pytest.mark.gpu
def test_overfits_one_batch_on_the_gpu(centerhead, features, scene):
    check_overfit(*overfit(centerhead(), features, scene, 60, 'cuda'), scene)


@pytest.mark.gpu
def test_gpu_equals_cpu(centerhead, features, scene):
    head = centerhead().eval()
    x, gt = features(2), truth(scene(), EMPTY)
    expected, found = head.loss(*gt, head(x)), head.get_bboxes(head(x))
    head = head.cuda()
    losses, boxes = head.loss(*gt, head(x.cuda())), head.get_bboxes(head(x.cuda()))
    for name in expected:
        assert losses[name].item() == pytest.approx(expected[name].item(), rel=1e-3, abs=1e-6), name
    assert [len(b[1]) for b in boxes] == [len(b[1]) for b in found]
    with torch.autocast('cuda', dtype=torch.float16):
        half = head.loss(*gt, head(x.cuda()))
    assert all(value.dtype == torch.float32 and value.isfinite() for value in half.values())
