"""Everything together on the generated data set: tool, data set, pipeline with pasting, CBGS, loader, both metrics."""
import json

import numpy as np
import pytest
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from testing import REPO

from mmdet3d_ext.datasets import build_dataloader, build_dataset
from mmdet3d_ext.datasets.gt_database import create_gt_database, load_points_with_sweeps, points_in_box
from mmdet3d_ext.datasets.info_files import load_info_file, recognise_convention
from mmdet3d_ext.datasets.nuscenes_converter import check_map_expansion, create_infos
from mmdet3d_ext.datasets.nuscenes_schema import MAP_CLASSES, OBJECT_CLASSES
from mmdet3d_ext.geometry.grid import BevGrid
from mmdet3d_ext.metrics import BevMapIoU, NuScenesDetectionMetric

RANGE = [-51.2, -51.2, -5.0, 51.2, 51.2, 3.0]
BOUND = [-50.0, 50.0, 0.5]


@pytest.fixture(scope='module')
def infos(synthetic_root, tmp_path_factory):
    out = tmp_path_factory.mktemp('infos')
    written = create_infos(synthetic_root, out, version='v1.0-mini')
    create_gt_database(written['train'], synthetic_root, out)
    return out


def pipeline(root, infos, train):
    load = dict(type='LoadPointsFromFile', coord_type='LIDAR', load_dim=5, use_dim=5)
    steps = [
        dict(type='LoadMultiViewImageFromFiles', to_float32=True), load,
        dict(type='LoadPointsFromMultiSweeps', sweeps_num=2, load_dim=5, use_dim=5, pad_empty_sweeps=True, remove_close=True),
        dict(type='LoadAnnotations3D', with_bbox_3d=True, with_label_3d=True),
    ]
    if train:
        steps.append(dict(type='ObjectPaste', db_sampler=dict(
            info_path=str(infos / 'nuscenes_dbinfos_train.pkl'), dataset_root=str(infos), rate=1.0,
            classes=list(OBJECT_CLASSES), prepare=dict(filter_by_difficulty=[-1], filter_by_min_points=dict(car=5)),
            sample_groups=dict(car=12, truck=4, bus=4), points_loader=load)))
    return steps + [
        dict(type='ImageAug3D', final_dim=[64, 176], resize_lim=[0.3, 0.3], bot_pct_lim=[0, 0], rot_lim=[0, 0], rand_flip=False,
             is_train=False),
        dict(type='GlobalRotScaleTrans', resize_lim=[0.95, 1.05] if train else [1, 1], rot_lim=[-0.3, 0.3] if train else [0, 0],
             trans_lim=0.0, is_train=train),
        dict(type='LoadBEVSegmentation', dataset_root=str(root), xbound=BOUND, ybound=BOUND, classes=list(MAP_CLASSES)),
        dict(type='PointsRangeFilter', point_cloud_range=RANGE), dict(type='ObjectRangeFilter', point_cloud_range=RANGE),
        dict(type='ObjectNameFilter', classes=list(OBJECT_CLASSES)),
        dict(type='ImageNormalize', mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        dict(type='DefaultFormatBundle3D', classes=list(OBJECT_CLASSES)),
        dict(type='Collect3D', keys=['img', 'points', 'gt_bboxes_3d', 'gt_labels_3d', 'gt_masks_bev']),
    ]


def config(root, infos, split, **changes):
    return dict(type='NuScenesDataset', ann_file=str(infos / f'nuscenes_infos_{split}.pkl'), dataset_root=str(root),
                pipeline=pipeline(root, infos, split == 'train'), object_classes=list(OBJECT_CLASSES),
                map_classes=list(MAP_CLASSES), modality=dict(use_lidar=True, use_camera=True), use_valid_flag=True,
                test_mode=split != 'train', **changes)


def test_annotation_counts_are_met_inside_the_converted_boxes(synthetic_root, infos):
    """Convention, frame and centre at once: the tables' point counts are counted again inside `gt_boxes`."""
    loaded = load_info_file(infos / 'nuscenes_infos_train.pkl')
    assert recognise_convention(loaded.infos)[0] == 'mmdet3d-1.0'
    assert check_map_expansion(synthetic_root, sorted({info['location'] for info in loaded.infos})) == []
    counted, stated = [], []
    for info in loaded.infos[:3]:
        points = load_points_with_sweeps(info, synthetic_root, 0)
        for box, number in zip(info['gt_boxes'], info['num_lidar_pts']):
            counted.append(points_in_box(points[:, :3], box).sum())
            stated.append(number)
    counted, stated = np.array(counted), np.array(stated)
    assert stated.sum() > 200 and np.abs(counted - stated).sum() <= 0.05 * stated.sum()


def test_training_batches(synthetic_root, infos):
    dataset = build_dataset(dict(type='CBGSDataset', dataset=config(synthetic_root, infos, 'train')))
    loader = build_dataloader(dataset, 2, 0, seed=0, num_replicas=1, rank=0)
    loader.sampler.set_epoch(0)
    batch = next(iter(loader))
    assert batch['img'].data[0].shape == (2, 6, 3, 64, 176) and batch['gt_masks_bev'].data[0].shape == (2, 6, 200, 200)
    assert 0 < batch['gt_masks_bev'].data[0].float().mean() < 1
    boxes, labels = batch['gt_bboxes_3d'].data[0], batch['gt_labels_3d'].data[0]
    assert [len(b) for b in boxes] == [len(n) for n in labels] and all((n >= 0).all() for n in labels)
    assert all(meta['location'] for meta in batch['metas'].data[0])
    dataset = build_dataset(dict(type='CBGSDataset', dataset=config(synthetic_root, infos, 'train')))
    again = build_dataloader(dataset, 2, 0, seed=0, num_replicas=1, rank=0)
    again.sampler.set_epoch(0)
    repeat = next(iter(again))
    assert all(torch.equal(a, b) for a, b in zip(batch['points'].data[0], repeat['points'].data[0])), 'seeded'
    again.sampler.set_epoch(1)
    other = next(iter(again))
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(batch['points'].data[0], other['points'].data[0]))


def test_pasted_points_lie_in_their_boxes(synthetic_root, infos):
    dataset = build_dataset(config(synthetic_root, infos, 'train'))
    paste = next(step for step in dataset.transforms if type(step).__name__ == 'ObjectPaste')
    np.random.seed(0)
    gt = dataset.get_ann_info(0)
    out = paste.db_sampler.sample_all(gt['gt_bboxes_3d'], gt['gt_labels_3d'])
    start, inside = 0, []
    for box, count in zip(out['gt_bboxes_3d'], out['point_counts']):
        centred = box[:7].astype(np.float64) + [0, 0, box[5] / 2, 0, 0, 0, 0]
        centred[3:6] += 2e-3  # float32 storage
        inside.append(points_in_box(out['points'][start:start + count, :3], centred).mean())
        start += count
    assert len(inside) >= 3 and min(inside) == 1.0


def test_perfect_predictions_through_the_evaluation_loader(synthetic_root, infos, tmp_path):
    dataset = build_dataset(config(synthetic_root, infos, 'val'))
    detection = NuScenesDetectionMetric(dataset.dataset_root, dataset.version, dataset.poses, dataset.CLASSES, tmp_path)
    maps = BevMapIoU(MAP_CLASSES, BevGrid.parse(BOUND, BOUND))
    present = set()
    for batch in build_dataloader(dataset, 2, 0, shuffle=False, num_replicas=1, rank=0):
        for i, meta in enumerate(batch['metas'].data[0]):
            boxes, labels = batch['gt_bboxes_3d'].data[0][i], batch['gt_labels_3d'].data[0][i]
            tensor = boxes.tensor.clone()
            tensor[:, 7:] = torch.nan_to_num(tensor[:, 7:])
            detection.update(meta['token'], dict(boxes_3d=LiDARInstance3DBoxes(tensor, box_dim=9), labels_3d=labels,
                                                 scores_3d=torch.ones(len(labels))))
            truth = batch['gt_masks_bev'].data[0][i]
            maps.update(meta['token'], truth.float(), truth)
            present.update(labels.tolist())
    scores = {**detection.compute(), **maps.compute()}
    assert scores['map/mean/iou@max'] == pytest.approx(1.0) and scores['map_ref/mean/iou@max'] == pytest.approx(1.0)
    precisions = [scores[f'object/{OBJECT_CLASSES[label]}_ap_dist_1.0'] for label in present]
    # A box at the edge of its class's range may fall on either side of it; the devkit ignores bicycles in racks.
    assert np.mean(precisions) > 0.9, scores
    summary = json.loads((tmp_path / 'metrics_summary.json').read_text())
    assert summary['nd_score'] == scores['object/nds'] > 0.5


def test_images_as_bytes_give_the_same_losses(synthetic_root, infos):
    """``image_uint8``: from the files to the losses, with a configuration as it is shipped."""
    from mmdet3d_ext.config import load_config
    from mmdet3d_ext.engine.parallel import unpack_batch
    from mmdet3d_ext.engine.train import make_loader, make_model
    losses = {}
    for key in ('false', 'true'):
        cfg = load_config(str(REPO / 'configs/synthetic/multitask_tiny.yaml'), [
            '--dataset_root', f'{synthetic_root}/', '--train_dataset.ann_file', str(infos / 'nuscenes_infos_train.pkl'),
            '--augment2d.resize', '[[0.8, 1.0], [0.9, 0.9]]', '--image_uint8', key])
        torch.manual_seed(0)
        model = make_model(cfg).train()
        batch = next(iter(make_loader(cfg, cfg.data.train, 0, train=True)))
        assert batch['img'].data[0].dtype == (torch.uint8 if key == 'true' else torch.float32)
        torch.manual_seed(1)
        losses[key] = model(**unpack_batch(batch, torch.device('cpu')))
    assert len(losses['true']) > 5
    for name, value in losses['false'].items():
        torch.testing.assert_close(losses['true'][name], value, rtol=1e-5, atol=1e-6)
