"""Costs, heatmaps and targets of a batch are those of its samples, each worked out by itself: bit for bit, costs but for rounding."""
import pytest
import torch
from mmcv.ops import box_iou_rotated
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from torch.utils._python_dispatch import TorchDispatchMode

from mmdet3d_ext.models.heads.bbox import assigner as assigner_module
from mmdet3d_ext.models.heads.bbox import head_grid

NAN, INF = float('nan'), float('inf')
ODD = torch.tensor([NAN, INF, -INF, 0.0, -1.0, 1e9, -9.7, -10.3, 9.6, 16.0])  # some of them outside the map by less than a cell
BATCHES = [(3,), (0,), (0, 0), (5, 0, 70, 1), (0, 130, 2), (20, 19, 18, 17), (1, 1)]
CPU = torch.device('cpu')


# ---- one sample at a time --------------------------------------------------------------------------------------------------
def overlaps_of_one(boxes, others):
    """(P, 7), (G, 7) -> (P, G), every pair by the operator for all pairs of two lists."""
    if len(boxes) * len(others) == 0:
        return boxes.new_zeros(len(boxes), len(others))
    columns = [0, 1, 3, 4, 6]
    iou = box_iou_rotated(boxes[:, columns], others[:, columns])
    shared = iou * ((boxes[:, 3] * boxes[:, 4])[:, None] + (others[:, 3] * others[:, 4])[None]) / (1 + iou)
    top = torch.minimum((boxes[:, 2] + boxes[:, 5])[:, None], (others[:, 2] + others[:, 5])[None])
    shared = shared * (top - torch.maximum(boxes[:, 2][:, None], others[:, 2][None])).clamp(min=0)
    return shared / (boxes[:, 3:6].prod(1)[:, None] + others[:, 3:6].prod(1)[None] - shared).clamp(min=1e-8)


def costs_of_one(assigner, boxes, truth, labels, logits, cfg, overlaps=overlaps_of_one):
    """(P, G) cost, (P, G) overlap."""
    safe = boxes[:, :7].nan_to_num(0.0, 1e5, -1e5).clamp(-1e5, 1e5)
    iou = overlaps(safe, truth[:, :7]).nan_to_num(0.0).clamp(0.0, 1.0)
    lo, hi = (torch.tensor(cfg['point_cloud_range'][i:i + 2]) for i in (0, 3))
    distance = torch.cdist((boxes[:, :2] - lo) / (hi - lo), (truth[:, :2] - lo) / (hi - lo), p=1) * assigner.reg_cost.weight
    cost = assigner.cls_cost(logits, labels) + distance - iou * assigner.iou_cost.weight
    return cost + torch.where(boxes[:, :7].isfinite().all(1), 0.0, NAN)[:, None], iou


def heatmap_of_one(shape, cells, radii, labels, valid):
    """(C, X, Y), object by object."""
    heatmap = torch.zeros(shape)
    for cell, radius, label, use in zip(cells, radii, labels, valid, strict=True):
        if use:
            sigma = (2 * radius + 1).float() / 6
            x, y = (torch.arange(size) - at for size, at in zip(shape[1:], cell, strict=True))
            along_x, along_y = (torch.exp(-(t * t) / (2 * sigma * sigma)) * (t.abs() <= radius) for t in (x, y))
            heatmap[label] = torch.maximum(heatmap[label], along_x[:, None] * along_y)
    return heatmap


def each_sample(function, *batched):
    found = [function(*sample) for sample in zip(*batched, strict=True)]
    return tuple(torch.stack(part) for part in zip(*found, strict=True)) if isinstance(found[0], tuple) else torch.stack(found)


@pytest.fixture
def by_sample(monkeypatch):
    """Factory: ``by_sample()``, and from then on costs and heatmaps are made by the functions above."""

    def start():
        monkeypatch.setattr(assigner_module.HungarianAssigner3D, 'costs', lambda self, *args: each_sample(
            lambda *sample: costs_of_one(self, *sample, args[-1]), *args[:-1]))
        monkeypatch.setattr(head_grid, 'draw_gaussians', lambda heatmap, *objects: each_sample(
            lambda *sample: heatmap_of_one(heatmap.shape[1:], *sample), *objects))

    return start


# ---- batches -----------------------------------------------------------------------------------------------------------------
def ground_truth(counts, generator):
    """Boxes on and around the map, some broken, some without velocity; labels that are no class among them."""
    boxes, labels = [], []
    for i, count in enumerate(counts):
        rows = torch.randn(count, 9, generator=generator) * torch.tensor([5.0, 8, 1, 2, 2, 1, 3, 3, 3])
        rows[:, 3:6] = rows[:, 3:6].abs() + 0.2
        odd = ODD[torch.randint(0, len(ODD), (count, 9), generator=generator)]
        rows = torch.where(torch.rand(count, 9, generator=generator) < 0.03, odd, rows)[:, :9 if i % 3 else 7]
        boxes.append(LiDARInstance3DBoxes(rows, box_dim=rows.shape[1]))
        labels.append(torch.randint(-1, 4, (count,), generator=generator))
    return boxes, labels


def predictions(head, truth, generator, broken):
    """Random ones, the first of each layer near true boxes so that overlaps count; 1 in 100 numbers is ``broken``, if given."""
    batch, layers, each = len(truth[0]), head.num_decoder_layers, head.num_proposals
    frame, coder = head.bbox_coder.frame, head.bbox_coder

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    at = torch.rand((batch, 2, layers * each), generator=generator) * torch.tensor([12.0, 20.0])[:, None]
    preds = dict(dense_heatmap=noise(batch, 3, 12, 20), heatmap=noise(batch, 3, layers * each) * 3, center=at,
                 height=noise(batch, 1, layers * each), dim=noise(batch, 3, layers * each) * 0.5 + 0.5, rot=noise(batch, 2, layers * each),
                 vel=noise(batch, 2, layers * each))
    known = head_grid.collect_ground_truth(*truth, frame, head.map_shape, 3, CPU)
    near = min(each // 2, known.boxes.shape[1])
    codes = coder.encode(known.boxes[:, :near]).transpose(1, 2)
    for layer in range(layers):
        part = slice(layer * each, layer * each + near)
        for name, rows in dict(center=(0, 2), height=(2, 3), dim=(3, 6), rot=(6, 8)).items():
            preds[name][..., part] = codes[:, slice(*rows)] + 0.1 * noise(batch, rows[1] - rows[0], near)
    for value in preds.values() if broken is not None else ():
        value[torch.rand(value.shape, generator=generator) < 0.01] = broken
    return preds


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f'{name}: {text}')


@pytest.mark.parametrize('compat', [None, 'reference'])
@pytest.mark.parametrize('layers', [1, 2])
@pytest.mark.parametrize('broken', [None, NAN, -INF, 80.0])
def test_transfusion_is_its_samples(transfusion, by_sample, compat, layers, broken):
    head = transfusion(compat, num_decoder_layers=layers, num_proposals=40)
    overlapping, cases = 0, []
    for seed, counts in enumerate(BATCHES):
        generator = torch.Generator().manual_seed(seed)
        truth = ground_truth(counts, generator)
        preds = predictions(head, truth, generator, broken)
        cases.append((truth, preds, head.get_targets(*truth, preds), head.loss(*truth, preds)))
    by_sample()
    for truth, preds, targets, losses in cases:
        assert_same(targets, head.get_targets(*truth, preds))
        assert_same(losses, head.loss(*truth, preds))
        overlapping += int((targets['ious'] > 0.2).sum())
    assert overlapping > 10


@pytest.mark.parametrize('compat', [None, 'reference'])
def test_centerpoint_is_its_samples(centerhead, by_sample, compat):
    head = centerhead(compat)
    batches = [ground_truth(counts, torch.Generator().manual_seed(seed)) for seed, counts in enumerate(BATCHES)]
    found = [head.get_targets(*truth, CPU) for truth in batches]
    by_sample()
    for truth, tasks in zip(batches, found, strict=True):
        for targets, expected in zip(tasks, head.get_targets(*truth, CPU), strict=True):
            assert_same(targets, expected)


def test_costs_are_those_of_each_sample(transfusion):
    check_costs(transfusion(), overlaps_of_one)


@pytest.mark.parametrize('kind', [dict(type='BboxOverlapsNearest3D', coordinate='lidar'), dict(type='BboxOverlaps3D', coordinate='camera')])
def test_other_calculators_see_one_sample_at_a_time(transfusion, kind):
    check_costs(transfusion(train_cfg=dict(assigner=dict(iou_calculator=kind))), assigner_module.build_iou_calculator(kind))


def check_costs(head, overlaps):
    generator = torch.Generator().manual_seed(0)
    truth = ground_truth((4, 0, 19), generator)
    boxes = head_grid.collect_ground_truth(*truth, head.bbox_coder.frame, head.map_shape, 3, CPU).boxes
    predicted = boxes.repeat(1, 2, 1) + 0.1  # velocities may be unknown
    logits, labels = torch.randn(*predicted.shape[:2], 3, generator=generator), torch.randint(0, 3, boxes.shape[:2], generator=generator)
    predicted[0, 3, 2], predicted[2, 5, 6], logits[1, 2, 1] = NAN, INF, NAN
    batched = predicted, boxes, labels, logits
    cost, iou = head.bbox_assigner.costs(*batched, head.train_cfg)
    expected = each_sample(lambda *sample: costs_of_one(head.bbox_assigner, *sample, head.train_cfg, overlaps), *batched)
    assert torch.equal(iou, expected[1]) and (iou > 0).any()
    torch.testing.assert_close(cost, expected[0], rtol=1e-6, atol=1e-7, equal_nan=True)  # where an array ends, the CPU rounds otherwise


class _Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_more_samples_are_no_more_operators(transfusion, monkeypatch):
    """But for those that lay the samples' boxes beside each other, and the overlap's own, which on the CPU reads pair by pair."""
    monkeypatch.setattr(assigner_module, 'box_iou_rotated', lambda boxes, others, aligned: boxes.new_zeros(len(boxes)))
    head = transfusion()

    def calls(samples):
        generator = torch.Generator().manual_seed(0)
        truth = ground_truth((5,) * samples, generator)
        preds = predictions(head, truth, generator, None)
        with _Calls() as seen:
            head.get_targets(*truth, preds)
        return seen.count

    assert calls(8) - calls(4) <= 4 * 5
