"""The streaming evaluation around the metrics: what is counted, what is left out, what the table says."""
import logging
import resource
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmdet3d_ext.engine.evaluate import DetectionEvaluator, MapEvaluator, build_evaluators, evaluate, table, write_metrics
from mmdet3d_ext.engine.launch import UserError
from mmdet3d_ext.engine.test import Options, _write_results
from mmdet3d_ext.engine.test import test as evaluate_checkpoint
from mmdet3d_ext.geometry.grid import BevGrid
from mmdet3d_ext.metrics import BevMapIoU
from mmdet3d_ext.metrics.nuscenes_detection import RESULTS

CPU = torch.device('cpu')
GRID = BevGrid.parse([-4, 4, 1.0], [-2, 2, 1.0])


class Maps(nn.Module):
    """Predicts the labels with a fixed share of wrong cells: iou is known."""

    def forward(self, gt_masks_bev=None, wrong=None, metas=None):
        out = gt_masks_bev.float()
        return [{'masks_bev': (mask - w).abs()} for mask, w in zip(out, wrong.float())]


def batches(samples, size, with_labels=True):
    generator = torch.Generator().manual_seed(0)
    for begin in range(0, samples, size):
        n = min(size, samples - begin)
        labels = (torch.rand(n, 2, 8, 4, generator=generator) > 0.5).to(torch.uint8)
        wrong = (torch.rand(n, 2, 8, 4, generator=generator) > 0.8).to(torch.uint8)
        yield {'gt_masks_bev': labels, 'wrong': wrong, 'metas': [{'token': f't{begin + i}'} for i in range(n)]}


def test_counts_equal_an_integer_reference_and_the_last_batch_counts_once():
    evaluator = MapEvaluator(BevMapIoU(('a', 'b'), GRID))
    found = evaluate(Maps(), list(batches(7, 3)), [evaluator], CPU, expected=7, progress=False)
    labels, wrong = (torch.cat([b[k] for b in batches(7, 3)]).bool() for k in ('gt_masks_bev', 'wrong'))
    predicted = labels ^ wrong
    for index, name in enumerate('ab'):
        hits, union = (predicted & labels)[:, index].sum(), (predicted | labels)[:, index].sum()
        assert found[f'map/{name}/iou@0.50'] == pytest.approx(float(hits / union), rel=1e-6)
    assert 'map_ref/mean/iou@max' in found and evaluator.table().startswith('Map IoU, native grid')


def test_memory_does_not_grow_with_the_number_of_samples():
    big = BevGrid.parse([-50, 50, 0.25], [-50, 50, 0.25])

    class Constant(nn.Module):
        def forward(self, gt_masks_bev=None, metas=None):
            return [{'masks_bev': mask.float()} for mask in gt_masks_bev]

    def run(samples):
        stream = ({'gt_masks_bev': torch.ones(1, 1, 400, 400, dtype=torch.uint8), 'metas': [{'token': f's{samples}-{i}'}]}
                  for i in range(samples))
        evaluate(Constant(), stream, [MapEvaluator(BevMapIoU(('a',), big))], CPU, progress=False)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB

    first = run(5)
    assert run(150) - first < 40  # 150 samples of predictions and labels kept would be 110 MiB


def test_a_task_that_the_model_does_not_have_is_left_out():
    boxes = DetectionEvaluator(SimpleNamespace(update=None, compute=None, table=''))
    found = evaluate(Maps(), list(batches(2, 1)), [boxes, MapEvaluator(BevMapIoU(('a', 'b'), GRID))], CPU, progress=False)
    assert found and all(key.startswith(('map/', 'map_ref/')) for key in found)


def test_wrong_outputs_and_missing_labels_are_explained():
    class Short(nn.Module):
        def forward(self, gt_masks_bev=None, wrong=None, metas=None):
            return [{'masks_bev': gt_masks_bev[0].float()}]

    with pytest.raises(RuntimeError, match='1 results for 2 samples'):
        evaluate(Short(), list(batches(2, 2)), [], CPU, progress=False)
    with pytest.raises(RuntimeError, match='one dict per sample, got Tensor'):
        evaluate(nn.Identity(), [{'input': torch.ones(1, 1)}], [], CPU, progress=False)
    evaluator = MapEvaluator(BevMapIoU(('a', 'b'), GRID))
    with pytest.raises(UserError, match='no map labels: add LoadBEVSegmentation'):
        evaluator.update({'masks_bev': torch.rand(2, 8, 4)}, {'metas': [{'token': 'a'}]}, 0)


def test_mode_of_the_model_is_put_back():
    model = Maps().train()
    evaluate(model, list(batches(1, 1)), [], CPU, progress=False)
    assert model.training
    evaluate(model.eval(), list(batches(1, 1)), [], CPU, progress=False)
    assert not model.training


def test_choice_of_evaluators():
    data = SimpleNamespace(evaluators=lambda folder: [SimpleNamespace(task='object'), SimpleNamespace(task='map')])
    assert [e.task for e in build_evaluators({}, data, '.')] == ['object', 'map']
    assert [e.task for e in build_evaluators({}, data, '.', ['map'])] == ['map']


def test_a_data_set_without_what_an_evaluation_needs_is_named():
    reader = SimpleNamespace(dataset=torch.utils.data.ConcatDataset([[1], [2]]))
    with pytest.raises(UserError, match='a ConcatDataset cannot be evaluated: give one data set'):
        build_evaluators({}, reader, '.')


def test_samples_are_told_by_their_tokens():
    evaluator, label = MapEvaluator(BevMapIoU(('a',), None)), torch.ones(1, 1, 4, 4)
    batch = {'gt_masks_bev': label, 'metas': [{'sample_idx': 's'}]}
    assert evaluator.update({'masks_bev': label[0]}, batch, 0) and evaluator.update({'masks_bev': label[0]}, batch, 0)
    assert evaluator.metric.samples() == 1
    with pytest.raises(UserError, match=r"metas hold \['filename'\].: add token to meta_lis_keys of Collect3D"):
        evaluator.update({'masks_bev': label[0]}, dict(batch, metas=[{'filename': 'x'}]), 0)


def test_a_result_file_is_never_that_of_an_earlier_evaluation(tmp_path):
    (tmp_path / RESULTS).write_text('of another model')
    out, scored = str(tmp_path / 'out.json'), SimpleNamespace(compute=lambda: {'object/nds': 1.0}, out_dir=tmp_path)
    evaluator = DetectionEvaluator(scored)
    with pytest.raises(UserError, match='the model gave no detections to write'):
        _write_results(out, None, [evaluator], logging.getLogger('x'))
    assert evaluator.compute() == {'object/nds': 1.0}
    _write_results(out, None, [SimpleNamespace(), evaluator], logging.getLogger('x'))
    assert (tmp_path / 'out.json').read_text() == 'of another model'  # now it is this one's
    (tmp_path / 'link.json').symlink_to(tmp_path / RESULTS)
    _write_results(str(tmp_path / 'link.json'), None, [evaluator], logging.getLogger('x'))
    with pytest.raises(UserError, match='hold detections, which --eval map leaves out'):
        evaluate_checkpoint({}, Options('none', eval=['map'], out=out), CPU)


def test_thresholds_of_the_configuration(monkeypatch):
    from mmdet3d_ext.engine import evaluate as module
    monkeypatch.setattr(module, 'NuScenesDetectionMetric', lambda *_: None)
    step = type('LoadBEVSegmentation', (), {'classes': ('a', 'b'), 'grid': GRID})()
    data = SimpleNamespace(transforms=[step], dataset_root='', version='', poses=None, CLASSES=(), eval_version=None, modality=None)
    for cfg, wanted in (({}, 7), ({'evaluation': None}, 7), ({'evaluation': {'thresholds': [0.1, 0.5]}}, 2)):
        metric = build_evaluators(cfg, data, '.')[1].metric
        assert len(metric.thresholds) == wanted
    metric.update('x', torch.full((2, *GRID.shape), 0.2), torch.ones(2, *GRID.shape))
    found = metric.compute()
    assert found['map/a/iou@0.10'] == pytest.approx(1) and found['map/a/iou@0.50'] == 0 and found['map/a/iou@max'] == pytest.approx(1)


def test_table_and_file(tmp_path):
    metrics = {'object/nds': 0.25, 'object/map': 0.125, 'map/drivable_area/iou@max': 0.5, 'map/mean/iou@max': 0.5,
               'map_ref/drivable_area/iou@max': float('nan'), 'map_ref/mean/iou@max': 0.75}
    lines = table(metrics).splitlines()
    assert lines[1].split() == ['NDS', '0.2500'] and lines[2].split() == ['mAP', '0.1250']
    assert [line.split() for line in lines[-2:]] == [['drivable_area', '0.5000', '-'], ['mean', '0.5000', '0.7500']]
    write_metrics(metrics, str(tmp_path / 'deep' / 'metrics.json'))
    import json
    assert json.loads((tmp_path / 'deep' / 'metrics.json').read_text())['object/nds'] == 0.25
