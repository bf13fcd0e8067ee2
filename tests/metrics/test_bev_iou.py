"""Streaming map score against the reference's numbers and slow counting."""
import math
import resource

import numpy as np
import pytest
import torch
from ranks import in_ranks
from testing import Golden

from mmdet3d_ext.geometry.grid import Axis, BevGrid
from mmdet3d_ext.metrics.bev_iou import THRESHOLDS, BevMapIoU, overlap_weights, reference_grid

CLASSES = ('drivable_area', 'ped_crossing', 'walkway', 'stop_line', 'carpark_area', 'divider')


def grid(cells, extent=50.0):
    axis = Axis(-extent, extent, cells)
    return BevGrid(axis, axis)


def fill(metric, samples):
    for token, (probabilities, labels) in samples.items():
        metric.update(token, torch.as_tensor(probabilities), torch.as_tensor(labels))
    return metric.compute()


def random_samples(n, classes=2, cells=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {f't{i}': (torch.rand(classes, cells, cells, generator=generator),
                      torch.rand(classes, cells, cells, generator=generator) < 0.3) for i in range(n)}


def slow(samples, index, threshold):
    tp = fp = fn = 0
    for probabilities, labels in samples.values():
        predicted = np.asarray(probabilities[index], np.float32) >= np.float32(threshold)
        truth = np.asarray(labels[index]).astype(bool)
        tp, fp, fn = tp + (predicted & truth).sum(), fp + (predicted & ~truth).sum(), fn + (~predicted & truth).sum()
    return tp / (tp + fp + fn + 1e-7)


# ------------------------------------------------------------------------------------------------------------ numbers

def test_reference_fixture():
    golden = Golden('data_pipeline.npz')
    samples = {str(i): (golden[f'eval_pred{i}'], golden[f'eval_label{i}']) for i in range(4)}
    scores = fill(BevMapIoU(CLASSES, compat='reference'), samples)
    keys, values = golden['eval_keys'].tolist(), golden['eval_values']
    assert set(keys) == set(scores)
    for key, value in zip(keys, values):
        assert scores[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key
    # the fixture has no class without ground truth, or ours would differ there
    ours = fill(BevMapIoU(CLASSES), samples)
    for index, name in enumerate(CLASSES):
        occurs = any(golden[f'eval_label{i}'][index].any() for i in range(4))
        assert math.isnan(ours[f'map/{name}/iou@max']) == (not occurs)


def test_equals_slow_counting_and_is_streaming():
    samples = random_samples(5)
    scores = fill(BevMapIoU(['a', 'b']), samples)
    for index, name in enumerate('ab'):
        for threshold in THRESHOLDS:
            assert scores[f'map/{name}/iou@{threshold:.2f}'] == pytest.approx(slow(samples, index, threshold), rel=1e-12)
    assert scores['map/mean/iou@max'] == pytest.approx((scores['map/a/iou@max'] + scores['map/b/iou@max']) / 2)


def test_a_probability_equal_to_the_threshold_is_predicted():
    labels = torch.ones(1, 1, len(THRESHOLDS))
    scores = fill(BevMapIoU(['a']), {'t': (torch.tensor(THRESHOLDS, dtype=torch.float32)[None, None], labels)})
    n = len(THRESHOLDS)
    for k, threshold in enumerate(THRESHOLDS):
        assert scores[f'map/a/iou@{threshold:.2f}'] == pytest.approx((n - k) / n)


def test_two_classes_with_known_best_thresholds():
    """Class a is best at 0.40 and class b at 0.60: `iou@max` takes each class's own best, so it beats any common threshold."""
    def column(truth, probability, count):
        return [(truth, probability)] * count

    a = column(1, 0.42, 60) + column(0, 0.37, 40) + column(1, 0.9, 40) + column(0, 0.1, 60)
    b = column(0, 0.57, 60) + column(1, 0.62, 60) + column(0, 0.1, 40) + column(1, 0.62, 40)
    cells = torch.tensor([a, b], dtype=torch.float64)
    scores = fill(BevMapIoU(['a', 'b']), {'t': (cells[..., 1].float().reshape(2, 20, 10), cells[..., 0].reshape(2, 20, 10))})
    for name, best in (('a', '0.40'), ('b', '0.60')):
        values = {key: scores[f'map/{name}/iou@{key}'] for key in (f'{t:.2f}' for t in THRESHOLDS)}
        assert max(values, key=values.get) == best and values[best] == pytest.approx(1.0)
        assert scores[f'map/{name}/iou@max'] == values[best] > values['0.50']
    common = max((scores[f'map/a/iou@{t:.2f}'] + scores[f'map/b/iou@{t:.2f}']) / 2 for t in THRESHOLDS)
    assert scores['map/mean/iou@max'] == pytest.approx(1.0) and common < 1.0


def test_class_without_ground_truth():
    samples = {'t': (torch.full((2, 4, 4), 0.9), torch.stack([torch.ones(4, 4), torch.zeros(4, 4)]))}
    metric = BevMapIoU(['a', 'b'])
    scores = fill(metric, samples)
    assert math.isnan(scores['map/b/iou@0.50']) and scores['map/mean/iou@max'] == pytest.approx(1.0)
    assert metric.notes() == ['b: no ground truth in the evaluated samples, so the class is left out of the mean']
    old = BevMapIoU(['a', 'b'], compat='reference')
    scores = fill(old, samples)
    assert scores['map/b/iou@max'] == 0 and scores['map/mean/iou@max'] == pytest.approx(0.5) and 'counts as 0' in old.notes()[0]
    assert math.isnan(BevMapIoU(['a']).compute()['map/mean/iou@max'])


@pytest.mark.parametrize('dtype', [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32])
def test_label_types(dtype):
    samples = random_samples(1)
    probabilities, labels = samples['t0']
    expected = fill(BevMapIoU(['a', 'b']), samples)
    assert fill(BevMapIoU(['a', 'b']), {'t0': (probabilities, labels.to(dtype))}) == expected


def test_half_precision_predictions_and_views():
    probabilities, labels = random_samples(1)['t0']
    expected = fill(BevMapIoU(['a', 'b']), {'t': (probabilities.half().float(), labels)})
    assert fill(BevMapIoU(['a', 'b']), {'t': (probabilities.half(), labels)}) == expected
    turned = probabilities.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    assert fill(BevMapIoU(['a', 'b']), {'t': (turned, labels)}) == fill(BevMapIoU(['a', 'b']), {'t': (probabilities, labels)})


def test_a_sample_counts_once():
    samples = random_samples(3)
    metric = BevMapIoU(['a', 'b'])
    expected = fill(metric, samples)
    assert metric.update('t1', *samples['t1']) is False
    assert metric.compute() == expected and metric.samples() == 3
    metric.reset()
    assert metric.samples() == 0 and metric.update('t1', *samples['t1'])


def test_nan_counts_as_not_predicted_and_is_said():
    probabilities, labels = torch.full((1, 2, 2), 0.9), torch.ones(1, 2, 2)
    probabilities[0, 0, 0] = math.nan
    metric = BevMapIoU(['a'])
    with pytest.warns(UserWarning, match='1 predicted probabilities of sample t are NaN'):
        metric.update('t', probabilities, labels)
    assert metric.compute()['map/a/iou@0.50'] == pytest.approx(0.75) and 'NaN' in metric.notes()[0]


@pytest.mark.parametrize('probabilities, labels, message', [
    (torch.zeros(3, 4, 4), torch.zeros(3, 4, 4), r'must be \(2 classes, X, Y\), got \(3, 4, 4\)'),
    (torch.zeros(2, 4, 4), torch.zeros(2, 4, 5), r'predictions \(2, 4, 4\) and labels \(2, 4, 5\) differ; .*output_scope'),
    (torch.zeros(2, 5, 4), torch.zeros(2, 5, 4), r'predictions have \(5, 4\) cells, the grid is 4x4 cells'),
    (torch.zeros(2, 4, 4, dtype=torch.int64), torch.zeros(2, 4, 4), 'must be probabilities'),
])
def test_shapes_are_checked(probabilities, labels, message):
    with pytest.raises(ValueError, match=message):
        BevMapIoU(['a', 'b'], grid(4)).update('t', probabilities, labels)


# ----------------------------------------------------------------------------------------------------- reference grid

def test_same_grid_gives_the_same_numbers():
    samples = random_samples(2, cells=200)
    scores = fill(BevMapIoU(['a', 'b'], grid(200)), samples)
    for key, value in scores.items():
        if key.startswith('map/'):
            assert scores[key.replace('map/', 'map_ref/', 1)] == value


@pytest.mark.parametrize('factor', [2, 3, 4])
def test_finer_grid_is_averaged_over_whole_cells(factor):
    generator = torch.Generator().manual_seed(factor)
    cells = 200 * factor
    probabilities = torch.rand(1, cells, cells, generator=generator)
    labels = torch.rand(1, cells, cells, generator=generator) < 0.5
    metric = BevMapIoU(['a'], grid(cells))
    averaged, truth = metric._to_reference(probabilities, labels)
    blocks = probabilities.reshape(200, factor, 200, factor).mean((1, 3))
    counts = labels.reshape(200, factor, 200, factor).sum((1, 3))
    assert torch.allclose(averaged[0], blocks, atol=1e-6)
    assert torch.equal(truth[0], 2 * counts >= factor ** 2)
    any_part = BevMapIoU(['a'], grid(cells), reference_labels='max')
    assert torch.equal(any_part._to_reference(probabilities, labels)[1][0], counts > 0)


def test_grid_that_does_not_nest_is_weighted_by_area():
    probabilities = torch.zeros(1, 500, 500)
    probabilities[0, 2, 0] = 1.0  # native cells of 0.2 m: [0.4, 0.6) is shared by the reference cells [0, 0.5) and [0.5, 1.0)
    metric = BevMapIoU(['a'], grid(500))
    averaged, _ = metric._to_reference(probabilities, probabilities > 0.5)
    # 0.1 m of 0.5 m along x in each, 0.2 m of 0.5 m along y
    assert averaged[0, 0, 0] == pytest.approx(0.2 * 0.4, rel=1e-5) and averaged[0, 1, 0] == pytest.approx(0.2 * 0.4, rel=1e-5)
    assert averaged[0].sum() == pytest.approx(0.16, rel=1e-5)


def test_a_metric_divider_keeps_its_width():
    """1.0 m wide at 0.125 m cells is two reference cells wide by area, three by any-part unless it lies on the lattice."""
    labels = torch.zeros(1, 800, 800)
    labels[0, 402:410] = 1  # x in [0.25, 1.25)
    area = BevMapIoU(['a'], grid(800))._to_reference(labels, labels > 0)[1][0, :, 0].sum()
    widest = BevMapIoU(['a'], grid(800), reference_labels='max')._to_reference(labels, labels > 0)[1][0, :, 0].sum()
    assert (int(area), int(widest)) == (3, 3)  # half of the first and of the last cell: both limits count
    shifted = torch.zeros(1, 800, 800)
    shifted[0, 401:409] = 1  # x in [0.125, 1.125): a quarter and three quarters
    assert int(BevMapIoU(['a'], grid(800))._to_reference(shifted, shifted > 0)[1][0, :, 0].sum()) == 2


def test_axes_are_not_swapped_on_a_non_square_grid():
    native = BevGrid(Axis(-50, 50, 400), Axis(-20, 30, 100))
    metric = BevMapIoU(['a'], native)
    assert metric.reference_grid.shape == (200, 100) and metric.reference_grid.extent == (-50, -20, 50, 30)
    labels = torch.zeros(1, 400, 100)
    labels[0, 10:12, 40] = 1
    truth = metric._to_reference(labels, labels > 0)[1][0]
    assert truth.nonzero().tolist() == [[5, 40]]


def test_reference_grid_of_other_extents():
    assert reference_grid(grid(100, 54)).extent == (-50, -50, 50, 50)
    assert reference_grid(grid(200, 50)).shape == (200, 200)
    assert reference_grid(BevGrid(Axis(-10.2, 10.3, 41), Axis(-25, 25, 50))).extent == (-10, -25, 10, 25)
    assert reference_grid(grid(4, 0.2)) is None
    assert 'map_ref/mean/iou@max' not in BevMapIoU(['a'], grid(4, 0.2)).compute()


def test_weights_sum_to_one():
    for cells in (100, 150, 200, 333, 600, 800):
        weights = overlap_weights(reference_grid(grid(cells)).x, grid(cells).x)
        assert torch.allclose(weights.sum(1), torch.ones(200), atol=1e-5) and (weights >= 0).all()


# ------------------------------------------------------------------------------------------------------------- memory

def test_memory_does_not_grow_with_the_number_of_samples():
    cells, classes = 800, 6
    metric = BevMapIoU(CLASSES, grid(cells))
    probabilities, labels = torch.rand(classes, cells, cells), torch.rand(classes, cells, cells) < 0.1
    for i in range(3):
        metric.update(f'warm{i}', probabilities, labels)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(6):
        metric.update(f't{i}', probabilities, labels)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # keeping them would take 6 x 15 MB of predictions and 6 x 4 MB of labels
    assert grown < 40 * 1024, f'{grown / 1024:.0f} MiB'
    kept = sum(t.numel() * t.element_size() for t in metric._recent.values())
    assert kept < 64 * 1024 and metric.samples() == 9


def test_table_names_both_grids():
    metric = BevMapIoU(['a', 'b'], grid(400))
    text = metric.table(fill(metric, random_samples(1, cells=400)))
    assert 'native grid (400x400 cells' in text and 'reference grid (200x200 cells' in text and '0.35' in text


# -------------------------------------------------------------------------------------------------------------- ranks

def _padded(rank):
    """7 samples as a filling sampler hands them out to 3 ranks: the last two repeat the first two."""
    samples = list(random_samples(7, cells=16).values())
    metric = BevMapIoU(['a', 'b'])
    for index in [*range(7), 0, 1][rank::3]:
        metric.update(f't{index}', *samples[index])
    return {**metric.compute(), 'samples': metric.samples()}


def _early_repeat(rank):
    """A sample that two ranks evaluated long before the end: nobody can take it back any more."""
    probabilities, labels = random_samples(1, cells=4)['t0']
    metric = BevMapIoU(['a', 'b'])
    for index in range(40):
        metric.update('same' if index == 0 else f'{rank}-{index}', probabilities, labels)
    try:
        metric.compute()
    except RuntimeError as error:
        return str(error)


def test_exact_over_ranks_with_a_filled_up_last_batch(tmp_path):
    expected = fill(BevMapIoU(['a', 'b']), random_samples(7, cells=16))
    for scores in in_ranks(_padded, tmp_path, 3):
        assert {key: value for key, value in scores.items() if key != 'samples'} == expected and scores['samples'] == 7


def test_repeat_that_cannot_be_taken_back_is_an_error(tmp_path):
    assert all('evaluated the same sample' in outcome for outcome in in_ranks(_early_repeat, tmp_path))
