"""Detection score: formatting against the reference's export, evaluation against the devkit's own on a whole split."""
import json
import math
import sys

import numpy as np
import pytest
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from pyquaternion import Quaternion
from ranks import in_ranks
from testing import REPO, Golden

sys.path.insert(0, str(REPO / 'tests' / 'datasets'))
import tiny_nuscenes as tiny  # noqa: E402

from mmdet3d_ext.datasets import NuScenesDataset, nuscenes_converter  # noqa: E402
from mmdet3d_ext.datasets.nuscenes_schema import OBJECT_CLASSES  # noqa: E402
from mmdet3d_ext.metrics.nuscenes_detection import NuScenesDetectionMetric  # noqa: E402
from mmdet3d_ext.metrics.nuscenes_results import ATTRIBUTES, _quaternion, global_detections, result_records  # noqa: E402

FAR = dict.fromkeys(OBJECT_CLASSES, 1000.0)


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    root = tiny.write(tmp_path_factory.mktemp('tiny'))
    nuscenes_converter.create_infos(root, root, version='v1.0-mini')
    return root


@pytest.fixture(scope='module')
def sets(root):
    return {split: NuScenesDataset(str(root / f'nuscenes_infos_{split}.pkl'), dataset_root=str(root), test_mode=True)
            for split in ('train', 'val')}


def truth_as_result(dataset, index, noise=0.0):
    """The annotations of a sample as detections."""
    annotations = dataset.get_ann_info(index)
    keep = annotations['gt_labels_3d'] >= 0
    tensor = annotations['gt_bboxes_3d'].tensor[torch.from_numpy(keep)].clone()
    generator = torch.Generator().manual_seed(index)
    tensor[:, :2] += noise * torch.randn(len(tensor), 2, generator=generator)
    scores = 0.5 + 0.5 * torch.rand(len(tensor), generator=generator)
    return dict(boxes_3d=LiDARInstance3DBoxes(tensor, box_dim=9), scores_3d=scores,
                labels_3d=torch.from_numpy(annotations['gt_labels_3d'][keep]))


def metric_for(dataset, out_dir):
    return NuScenesDetectionMetric(dataset.dataset_root, dataset.version, dataset.poses, dataset.CLASSES, out_dir)


def result(boxes, labels=None, scores=None):
    boxes = torch.as_tensor(np.asarray(boxes, np.float32).reshape(-1, 9))
    n = len(boxes)
    return dict(boxes_3d=LiDARInstance3DBoxes(boxes, box_dim=9), scores_3d=torch.full((n,), 0.5) if scores is None else scores,
                labels_3d=torch.zeros(n, dtype=torch.long) if labels is None else torch.as_tensor(labels))


# --------------------------------------------------------------------------------------------------------- formatting

def test_export_matches_the_reference_fixture():
    """The same boxes (given to the reference in its own convention) come out as the same nuScenes boxes in the lidar frame."""
    golden = Golden('data_pipeline.npz')
    old = golden['boxes_in'].astype(np.float64)
    new = old.copy()
    new[:, [3, 4]] = old[:, [4, 3]]
    new[:, 6] = -old[:, 6] - np.pi / 2
    got = global_detections(result(new, scores=torch.linspace(1, 0.5, len(new))), np.eye(4), np.eye(4), OBJECT_CLASSES, FAR)
    assert np.allclose(got['translation'], golden['export_center'], atol=1e-5)
    assert np.allclose(got['size'], golden['export_wlh'], atol=1e-5)
    assert np.allclose(got['velocity'], golden['export_velocity'][:, :2], atol=1e-5)
    same = np.abs((got['rotation'] * golden['export_rotation_wxyz']).sum(1))  # q and -q are one rotation
    assert np.allclose(same, 1, atol=1e-6)


def test_global_frame_matches_the_devkits_box():
    from nuscenes.utils.data_classes import Box
    rng = np.random.default_rng(0)
    boxes = np.column_stack([rng.uniform(-30, 30, (25, 2)), rng.uniform(-2, 1, 25), rng.uniform(0.5, 5, (25, 3)),
                             rng.uniform(-4, 4, 25), rng.uniform(-9, 9, (25, 2))]).astype(np.float32)
    lidar2ego, ego2global = np.eye(4), np.eye(4)
    poses = []
    for matrix in (lidar2ego, ego2global):
        rotation, translation = Quaternion(rng.normal(size=4)).normalised, rng.uniform(-2, 2, 3)
        matrix[:3, :3], matrix[:3, 3] = rotation.rotation_matrix, translation
        poses.append((rotation, translation))
    got = global_detections(result(boxes, scores=torch.linspace(1, 0.5, 25)), lidar2ego, ego2global, OBJECT_CLASSES, FAR)
    for i, row in enumerate(boxes.astype(np.float64)):
        box = Box([row[0], row[1], row[2] + row[5] / 2], [row[4], row[3], row[5]], Quaternion(axis=[0, 0, 1], radians=row[6]),
                  velocity=(row[7], row[8], 0.0))
        for rotation, translation in poses:
            box.rotate(rotation)
            box.translate(translation)
        assert np.allclose(got['translation'][i], box.center, atol=1e-5) and np.allclose(got['size'][i], box.wlh, atol=1e-6)
        assert abs(np.dot(got['rotation'][i], box.orientation.elements)) == pytest.approx(1, abs=1e-9)
        assert np.allclose(got['velocity'][i], box.velocity[:2], atol=1e-5)


def test_quaternion_of_every_kind_of_rotation():
    rng = np.random.default_rng(1)
    quaternions = [*np.eye(4), *rng.normal(size=(200, 4)), [1e-9, 1, 1, 1], [0, 0, 1, 1], [1, 1e-8, 0, 0]]
    for q in quaternions:
        q = np.array(q) / np.linalg.norm(q)
        assert abs(np.dot(_quaternion(Quaternion(q).rotation_matrix), q)) == pytest.approx(1, abs=1e-12)


def test_order_limit_range_and_broken_boxes():
    boxes = np.zeros((6, 9), np.float32)
    boxes[:, 3:6] = 1
    boxes[:, 0] = [10, 49, 51, 5, 6, 7]
    boxes[3, 6] = np.nan
    boxes[4, 8] = np.inf
    scores = torch.tensor([0.1, 0.9, 0.99, 0.5, 0.5, 0.7])
    limits = dict.fromkeys(OBJECT_CLASSES, 50.0)
    got = global_detections(result(boxes, scores=scores), np.eye(4), np.eye(4), OBJECT_CLASSES, limits)
    assert np.allclose(got['score'], [0.9, 0.7, 0.1]) and got['translation'][:, 0].tolist() == [49, 7, 10]
    assert got['dropped'] == 2
    few = global_detections(result(boxes, scores=scores), np.eye(4), np.eye(4), OBJECT_CLASSES, limits, max_boxes=2)
    assert np.allclose(few['score'], [0.9, 0.7])
    # the range is measured from the ego frame's origin
    shift = np.eye(4)
    shift[0, 3] = 1.5
    assert len(global_detections(result(boxes, scores=scores), shift, np.eye(4), OBJECT_CLASSES, limits)['score']) == 2
    assert len(global_detections(result(np.zeros((0, 9))), np.eye(4), np.eye(4), OBJECT_CLASSES, limits)['score']) == 0


def test_bad_detections_are_named():
    with pytest.raises(ValueError, match='labels must lie in .0, 10., got 10 to 10'):
        global_detections(result(np.ones((1, 9)), labels=[10]), np.eye(4), np.eye(4), OBJECT_CLASSES, FAR)
    with pytest.raises(ValueError, match='1 boxes, 2 scores'):
        global_detections(result(np.ones((1, 9)), scores=torch.ones(2)), np.eye(4), np.eye(4), OBJECT_CLASSES, FAR)


def test_attributes_follow_the_speed_and_are_the_devkits():
    from nuscenes.eval.detection.constants import ATTRIBUTE_NAMES
    from nuscenes.eval.detection.utils import detection_name_to_rel_attributes
    assert set(ATTRIBUTES) == set(OBJECT_CLASSES)
    for label, name in enumerate(OBJECT_CLASSES):
        boxes = np.ones((2, 9), np.float32)
        boxes[:, 7:] = [[0.3, 0], [0.1, 0.1]]
        found = global_detections(result(boxes, labels=[label, label]), np.eye(4), np.eye(4), OBJECT_CLASSES, FAR)
        records = result_records('t', found, OBJECT_CLASSES)
        assert [record['attribute_name'] for record in records] == list(ATTRIBUTES[name])
        for attribute in ATTRIBUTES[name]:
            allowed = detection_name_to_rel_attributes(name)
            assert attribute in ATTRIBUTE_NAMES and attribute in allowed if allowed else attribute == ''
    assert ATTRIBUTES['pedestrian'] == ('pedestrian.moving', 'pedestrian.standing')
    assert ATTRIBUTES['bus'][1] == 'vehicle.stopped'


# --------------------------------------------------------------------------------------------------------- evaluation

def test_equals_the_unchanged_devkit_on_a_whole_split(root, sets, tmp_path):
    from nuscenes.eval.common.config import config_factory
    from nuscenes.eval.detection.evaluate import DetectionEval
    from nuscenes.nuscenes import NuScenes
    dataset = sets['val']
    metric = metric_for(dataset, tmp_path / 'ours')
    for i in range(len(dataset)):
        metric.update(dataset.tokens[i], truth_as_result(dataset, i, noise=0.6))
    scores = metric.compute()
    theirs = DetectionEval(NuScenes('v1.0-mini', str(root), verbose=False), config_factory('detection_cvpr_2019'),
                           str(tmp_path / 'ours' / 'results_nusc.json'), 'mini_val', str(tmp_path / 'theirs'), verbose=False)
    summary = theirs.evaluate()[0].serialize()
    assert scores['object/nds'] == summary['nd_score'] and scores['object/map'] == summary['mean_ap']
    assert 0.05 < scores['object/map'] < 0.399, 'noise makes it worse than perfect'
    for name in OBJECT_CLASSES:
        for distance in ('0.5', '1.0', '2.0', '4.0'):
            expected = summary['label_aps'][name][float(distance)]
            assert scores[f'object/{name}_ap_dist_{distance}'] == pytest.approx(expected, abs=5e-5)
        for error, value in summary['label_tp_errors'][name].items():
            assert scores[f'object/{name}_{error}'] == pytest.approx(value, abs=5e-5, nan_ok=True)
    for error, short in (('trans_err', 'mATE'), ('vel_err', 'mAVE'), ('attr_err', 'mAAE')):
        assert scores[f'object/{short}'] == pytest.approx(summary['tp_errors'][error], abs=5e-5)
    ours = json.loads((tmp_path / 'ours' / 'metrics_summary.json').read_text())
    assert ours['nd_score'] == summary['nd_score'] and ours['samples'] == 3
    assert 'mAP: ' in metric.table and 'NDS: ' in metric.table and metric.table.splitlines()[-1].split()[0] in OBJECT_CLASSES


def test_perfect_detections_of_any_subset_score_fully(sets, tmp_path):
    """Samples of both splits together, as no official split has them."""
    train, val = sets['train'], sets['val']
    metric = NuScenesDetectionMetric(val.dataset_root, val.version, {**train.poses, **val.poses}, val.CLASSES, tmp_path)
    for dataset, index in ((train, 2), (val, 0)):
        metric.update(dataset.tokens[index], truth_as_result(dataset, index))
    scores = metric.compute()
    for name in ('car', 'truck', 'pedestrian', 'traffic_cone'):
        assert scores[f'object/{name}_ap_dist_0.5'] == pytest.approx(1.0, abs=1e-3), name
        assert scores[f'object/{name}_trans_err'] < 1e-3 and scores[f'object/{name}_scale_err'] < 1e-3
    assert scores['object/car_vel_err'] < 0.01 and scores['object/car_orient_err'] < 1e-3 and scores['object/car_attr_err'] == 0
    assert scores['object/map'] == pytest.approx(0.4, abs=1e-3), 'four of ten classes occur'
    assert math.isnan(scores['object/traffic_cone_vel_err'])
    assert len(json.loads((tmp_path / 'results_nusc.json').read_text())['results']) == 2


@pytest.mark.parametrize('classes', [OBJECT_CLASSES, ('pedestrian', 'car')])
def test_means_over_classes_that_the_model_does_not_have_are_explained(root, tmp_path, classes):
    dataset = NuScenesDataset(str(root / 'nuscenes_infos_val.pkl'), dataset_root=str(root), test_mode=True, object_classes=classes)
    metric = metric_for(dataset, tmp_path)
    metric.update(dataset.tokens[0], truth_as_result(dataset, 0))
    scores = metric.compute()
    assert scores['object/car_ap_dist_0.5'] == pytest.approx(1.0, abs=1e-3)
    assert ('does not detect truck, bus, ' in metric.table) == ('means over the 10 classes' in metric.table) == (len(classes) == 2)
    if len(classes) == 2:
        assert scores['object/map'] == pytest.approx(0.2, abs=1e-3) and not any('truck' in key for key in scores)


def test_no_detection_at_all_is_a_score_of_zero(sets, tmp_path):
    dataset = sets['val']
    metric = metric_for(dataset, tmp_path)
    metric.update(dataset.tokens[0], result(np.zeros((0, 9))))
    assert metric.compute()['object/map'] == 0.0
    with pytest.raises(ValueError, match='no sample was evaluated'):
        metric_for(dataset, tmp_path).compute()


def test_sample_without_detections_counts_its_ground_truth(sets, tmp_path):
    dataset = sets['val']
    metric = metric_for(dataset, tmp_path)
    metric.update(dataset.tokens[0], truth_as_result(dataset, 0))
    metric.update(dataset.tokens[1], result(np.zeros((0, 9))))
    assert metric.compute()['object/car_ap_dist_0.5'] == pytest.approx(0.45, abs=0.1), 'half of the cars are missed'


def test_second_result_of_a_sample_is_ignored_and_strangers_are_refused(sets, tmp_path):
    dataset = sets['val']
    metric = metric_for(dataset, tmp_path)
    metric.update(dataset.tokens[0], truth_as_result(dataset, 0))
    metric.update(dataset.tokens[0], result(np.zeros((0, 9))))
    assert metric.compute()['object/car_ap_dist_0.5'] == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(KeyError, match='nowhere is not in the evaluated data set'):
        metric.update('nowhere', result(np.zeros((0, 9))))
    with pytest.raises(ValueError, match="'tram' is no class of detection_cvpr_2019"):
        NuScenesDetectionMetric('x', 'v1.0-mini', {}, ['tram'])


def test_broken_boxes_are_left_out_with_a_warning(sets, tmp_path):
    dataset = sets['val']
    metric = metric_for(dataset, tmp_path)
    found = truth_as_result(dataset, 0)
    found['boxes_3d'].tensor[0, 0] = np.nan
    metric.update(dataset.tokens[0], found)
    with pytest.warns(UserWarning, match='1 boxes with non-finite values in 1 samples'):
        assert metric.compute()['object/map'] < 0.4


def test_split_without_annotations_writes_the_submission(root, sets, tmp_path):
    import shutil
    other = tmp_path / 'data'
    shutil.copytree(root / 'v1.0-mini', other / 'v1.0-mini')
    shutil.copytree(root / 'maps', other / 'maps')
    for name in ('sample_annotation', 'instance'):
        (other / 'v1.0-mini' / f'{name}.json').write_text('[]')
    dataset = sets['val']
    metric = NuScenesDetectionMetric(str(other), 'v1.0-mini', dataset.poses, dataset.CLASSES, tmp_path / 'out',
                                     modality={'use_lidar': True})
    metric.update(dataset.tokens[0], truth_as_result(dataset, 0))
    with pytest.raises(ValueError, match='has no annotations to evaluate against; .*results_nusc.json can be submitted'):
        metric.compute()
    content = json.loads(metric.format().read_text())
    assert content['meta']['use_lidar'] is True and content['meta']['use_camera'] is False
    with pytest.raises(FileNotFoundError, match='v1.0-mini missing'):
        absent = NuScenesDetectionMetric(str(tmp_path), 'v1.0-mini', dataset.poses, dataset.CLASSES, tmp_path / 'out')
        absent.update(dataset.tokens[0], truth_as_result(dataset, 0))
        absent.compute()


def test_ranks_evaluate_together(sets, tmp_path):
    dataset = sets['val']
    results = [truth_as_result(dataset, i, noise=0.6) for i in range(3)]

    def work(rank):
        metric = metric_for(dataset, tmp_path / 'ranks')
        for i in [0, 1, 2, 0][rank::2]:  # the first sample on both ranks
            metric.update(dataset.tokens[i], results[i])
        return metric.compute()

    single = metric_for(dataset, tmp_path / 'single')
    for i in range(3):
        single.update(dataset.tokens[i], results[i])
    expected = single.compute()
    for scores in in_ranks(work, tmp_path):
        assert scores.keys() == expected.keys()
        assert all(scores[key] == expected[key] or math.isnan(expected[key]) for key in expected)
