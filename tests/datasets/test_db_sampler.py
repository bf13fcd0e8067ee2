"""Choosing objects of the ground-truth database."""
import copy

import numpy as np
import pytest
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from shapely.geometry import Polygon

from mmdet3d_ext.datasets import restricted_pickle
from mmdet3d_ext.datasets.db_sampler import DataBaseSampler, corners_bev, draw_different, overlaps_bev
from mmdet3d_ext.datasets.info_files import InfoFileError

CLASSES = ('car', 'truck', 'pedestrian')


def database(folder, cars=12, people=6, spread=60.0, convention='mmdet3d-1.0', **changes):
    """Cars along x, far from each other; each with 3 + i points, at multiples of 0.1 from the bottom centre."""
    entries = {'car': [], 'truck': [], 'pedestrian': []}
    (folder / 'db').mkdir(exist_ok=True)
    for name, count, dims in (('car', cars, (4.5, 1.9, 1.6)), ('pedestrian', people, (0.7, 0.6, 1.8))):
        for i in range(count):
            x = spread * (i / max(1, count - 1) - 0.5) if name == 'car' else i * 2.0
            box = np.array([x, 5.0 if name == 'car' else -20.0, -1.8, *dims, 0.3, 1.0, np.nan], dtype=np.float32)
            points = np.full((3 + i, 5), 0.1, dtype=np.float32) * np.arange(3 + i)[:, None].astype(np.float32)
            path = f'db/{name}{i}.bin'
            points.astype(np.float32).tofile(folder / path)
            entry = dict(name=name, path=path, image_idx=f't{i}', gt_idx=i, box3d_lidar=box, num_points_in_gt=3 + i,
                         difficulty=i % 2, group_id=i, **changes)
            if convention:
                entry['box_convention'] = convention
            entries[name].append(entry)
    restricted_pickle.save(entries, folder / 'x_dbinfos_train.pkl')
    return folder


def make(folder, **kwargs):
    kwargs = {'rate': 1.0, 'sample_groups': {'car': 4}, 'classes': CLASSES, **kwargs}
    return DataBaseSampler(str(folder / 'x_dbinfos_train.pkl'), str(folder), **kwargs)


# --------------------------------------------------------------------------------------------------------------- draws

def test_draws_are_different_and_every_entry_comes_about_equally_often():
    np.random.seed(0)
    draws = [draw_different(5, 3) for _ in range(2000)]
    assert all(len(draw) == len(set(draw.tolist())) == 3 for draw in draws)
    counts = np.bincount(np.concatenate(draws), minlength=5)
    assert counts.sum() == 6000 and np.abs(counts - 1200).max() < 4 * np.sqrt(2000 * 0.6 * 0.4), 'four standard deviations'
    assert len(draw_different(5, 9)) == 5 and len(draw_different(5, 0)) == 0


# ---------------------------------------------------------------------------------------------------------- collisions

def test_overlap_matches_polygon_areas():
    rng = np.random.default_rng(0)
    boxes = np.column_stack([rng.uniform(-4, 4, (60, 2)), rng.uniform(-1, 1, 60), rng.uniform(0.3, 5, (60, 3)),
                             rng.uniform(-7, 7, 60)])
    got = overlaps_bev(boxes[:30], boxes[30:])
    polygons = [Polygon(corners) for corners in corners_bev(boxes)]
    expected = np.array([[a.intersection(b).area > 1e-9 for b in polygons[30:]] for a in polygons[:30]])
    assert 100 < expected.sum() < 800 and np.array_equal(got, expected)


def test_corners_agree_with_mmdet3d():
    rng = np.random.default_rng(2)
    columns = rng.uniform(-4, 4, (20, 3)), rng.uniform(0.3, 5, (20, 3)), rng.uniform(-3, 3, 20)
    boxes = np.column_stack(columns).astype(np.float32)
    theirs = LiDARInstance3DBoxes(boxes).corners[:, [0, 3, 7, 4], :2].numpy()
    ours = corners_bev(boxes)
    for a, b in zip(ours, theirs):
        assert all(np.min(np.linalg.norm(b - corner, axis=1)) < 1e-4 for corner in a)


def test_touching_boxes_and_no_boxes():
    a = np.array([[0, 0, 0, 2, 2, 1, 0.0]])
    assert not overlaps_bev(a, a + [2, 0, 0, 0, 0, 0, 0]).any() and overlaps_bev(a, a + [1.9, 0, 0, 0, 0, 0, 0]).all()
    assert overlaps_bev(a, a).all(), 'a box overlaps itself'
    assert overlaps_bev(a, np.zeros((0, 7))).shape == (1, 0)


# ------------------------------------------------------------------------------------------------------------ sampling

def test_fills_up_to_the_wanted_number(tmp_path):
    np.random.seed(0)
    sampler = make(database(tmp_path))
    boxes = np.array([[0.0, -30, -1.8, 4, 2, 1.5, 0, 0, 0]], dtype=np.float32)
    out = sampler.sample_all(boxes, np.array([0]))
    assert out['gt_labels_3d'].tolist() == [0, 0, 0] and out['gt_bboxes_3d'].shape == (3, 9)
    assert out['points'].shape == (out['point_counts'].sum(), 5) and out['points'].dtype == np.float32
    assert np.isnan(out['gt_bboxes_3d'][:, 8]).all(), 'unknown velocity stays unknown'
    assert sampler.sample_all(np.repeat(boxes, 4, 0), np.zeros(4, int)) is None
    assert make(tmp_path, rate=0.5).sample_all(np.zeros((0, 9)), np.zeros(0))['gt_labels_3d'].tolist() == [0, 0]


def test_points_stand_at_the_box(tmp_path):
    np.random.seed(0)
    out = make(database(tmp_path)).sample_all(np.zeros((0, 9), np.float32), np.zeros(0, int))
    start = 0
    for box, count in zip(out['gt_bboxes_3d'], out['point_counts']):
        expected = box[:3] + 0.1 * np.arange(count)[:, None] * np.ones(3)
        assert np.allclose(out['points'][start:start + count, :3], expected, atol=1e-5)
        start += count


def test_nothing_pasted_overlaps(tmp_path):
    np.random.seed(3)
    sampler = make(database(tmp_path, cars=30, spread=30.0), sample_groups={'car': 15, 'pedestrian': 5})
    gt = np.array([[2.0, 5, -1.8, 6, 4, 2, 1.0, 0, 0]], dtype=np.float32)
    for _ in range(10):
        out = sampler.sample_all(gt, np.array([1]))
        everything = np.concatenate([gt, out['gt_bboxes_3d']])
        hits = overlaps_bev(everything, everything)
        assert hits.sum() == len(everything), 'only with itself'
        assert 0 < (out['gt_labels_3d'] == 0).sum() < 15


def test_neither_arguments_nor_database_change(tmp_path):
    np.random.seed(0)
    sampler = make(database(tmp_path))
    before = copy.deepcopy(sampler.db_infos)
    gt, labels = np.array([[0.0, -30, -1.8, 4, 2, 1.5, 0, 0, 0]], dtype=np.float32), np.array([0])
    gt_copy = gt.copy()
    out = sampler.sample_all(gt, labels)
    out['gt_bboxes_3d'] += 100
    out['points'] += 100
    assert np.array_equal(gt, gt_copy) and labels.tolist() == [0]
    for name in before:
        for a, b in zip(before[name], sampler.db_infos[name]):
            assert np.array_equal(a['box3d_lidar'], b['box3d_lidar'], equal_nan=True)


def test_box_objects_and_boxes_without_velocity(tmp_path):
    np.random.seed(0)
    sampler = make(database(tmp_path))
    out = sampler.sample_all(LiDARInstance3DBoxes(np.zeros((0, 9), np.float32), box_dim=9), np.zeros(0, int))
    assert out['gt_bboxes_3d'].shape[1] == 9
    out = sampler.sample_all(np.array([[0.0, -30, -1.8, 4, 2, 1.5, 0]]), np.array([1]))
    assert out['gt_bboxes_3d'].shape == (4, 7) and np.isfinite(out['gt_bboxes_3d']).all()


def test_reference_profile_lifts_the_boxes_but_not_the_points(tmp_path):
    database(tmp_path)
    outs = []
    for compat in (None, 'reference'):
        np.random.seed(0)
        outs.append(make(tmp_path, compat=compat).sample_all(np.zeros((0, 9)), np.zeros(0)))
    ours, old = outs
    assert np.allclose(old['gt_bboxes_3d'][:, 2], ours['gt_bboxes_3d'][:, 2] + ours['gt_bboxes_3d'][:, 5] / 2)
    assert np.array_equal(old['points'], ours['points']) and (old['gt_bboxes_3d'][:, 8] == 0).all()


def test_prepare_filters(tmp_path):
    folder = database(tmp_path)
    sampler = make(folder, prepare=dict(filter_by_difficulty=[1], filter_by_min_points=dict(car=8)))
    assert [entry['num_points_in_gt'] for entry in sampler.db_infos['car']] == [9, 11, 13]
    assert len(sampler.db_infos['pedestrian']) == 3
    with pytest.raises(ValueError, match="unknown key 'filter_by_minpoints'"):
        make(folder, prepare=dict(filter_by_minpoints={}))
    with pytest.raises(ValueError, match="sample_groups names 'tram'"):
        make(folder, sample_groups=dict(tram=2))


def test_class_without_entries_is_no_error(tmp_path, caplog):
    sampler = make(database(tmp_path), sample_groups={'truck': 3, 'pedestrian': 2})
    assert any("no usable 'truck'" in record.message for record in caplog.records)
    assert set(sampler.sample_all(np.zeros((0, 9)), np.zeros(0))['gt_labels_3d']) == {2}


def test_database_without_any_object_is_no_error(tmp_path, caplog):
    sampler = make(database(tmp_path, cars=0, people=0))
    assert sampler.sample_all(np.zeros((0, 9)), np.zeros(0)) is None and "no usable 'car'" in caplog.text


def test_draws_depend_on_the_generator_only(tmp_path):
    sampler = make(database(tmp_path))

    def draw():
        np.random.seed(4)
        return sampler.sample_all(np.zeros((0, 9)), np.zeros(0))['gt_bboxes_3d'][:, 0].tolist()

    first = draw()
    sampler.sample_all(np.zeros((0, 9)), np.zeros(0))
    assert draw() == first


def test_points_loader_of_the_reference_configuration(tmp_path):
    loader = dict(type='LoadPointsFromFile', coord_type='LIDAR', load_dim=5, use_dim=[0, 1, 2, 3, 4])
    database(tmp_path)
    outs = []
    for points_loader in (None, loader):
        np.random.seed(0)
        outs.append(make(tmp_path, points_loader=points_loader).sample_all(np.zeros((0, 9)), np.zeros(0)))
    assert np.array_equal(outs[0]['points'], outs[1]['points'])


def test_database_of_the_older_convention_is_refused(tmp_path):
    database(tmp_path, convention=None)
    entries = restricted_pickle.load(tmp_path / 'x_dbinfos_train.pkl')
    assert make(tmp_path).sample_all(np.zeros((0, 9)), np.zeros(0)) is not None, 'recognised as new by the cars'
    for entry in entries['car']:
        entry['box3d_lidar'][[3, 4]] = entry['box3d_lidar'][[4, 3]]
    restricted_pickle.save(entries, tmp_path / 'x_dbinfos_train.pkl')
    with pytest.raises(InfoFileError, match='before mmdet3d 1.0, and such databases .* half a height too high .*0 of 12'):
        make(tmp_path)
    entries['car'] = []
    restricted_pickle.save(entries, tmp_path / 'x_dbinfos_train.pkl')
    with pytest.raises(InfoFileError, match='convention cannot be told'):
        make(tmp_path)


def test_missing_or_damaged_database(tmp_path):
    with pytest.raises(FileNotFoundError, match='create_data.py nuscenes, or remove the ObjectPaste step'):
        make(tmp_path)
    (tmp_path / 'x_dbinfos_train.pkl').write_bytes(b'\x80\x04')
    with pytest.raises(InfoFileError, match='not a complete pickle'):
        make(tmp_path)
    database(tmp_path)
    (tmp_path / 'db' / 'car0.bin').write_bytes(b'123')
    with pytest.raises(ValueError, match='car0.bin.*cut off'):
        make(tmp_path, sample_groups={'car': 12}).sample_all(np.zeros((0, 9)), np.zeros(0))


def test_object_paste_step_takes_it(tmp_path):
    from mmdet3d.core.points import LiDARPoints

    from mmdet3d_ext.registry import PIPELINES
    np.random.seed(0)
    database(tmp_path)
    step = PIPELINES.build(dict(type='ObjectPaste', db_sampler=dict(
        info_path=str(tmp_path / 'x_dbinfos_train.pkl'), dataset_root=str(tmp_path), rate=1.0, classes=list(CLASSES),
        sample_groups={'car': 3})))
    data = dict(points=LiDARPoints(np.zeros((2, 5), np.float32), points_dim=5), gt_labels_3d=np.array([1]),
                gt_bboxes_3d=LiDARInstance3DBoxes(np.array([[0, -30, 0, 4, 2, 1, 0, 0, 0]], np.float32), box_dim=9))
    out = step(data)
    assert out['gt_labels_3d'].tolist() == [1, 0, 0, 0] and out['gt_bboxes_3d'].tensor.shape == (4, 9)
    assert len(out['points']) > 2


def test_profile_reaches_a_sampler_that_a_step_builds(tmp_path):
    from mmdet3d_ext.registry import PIPELINES, profile
    database(tmp_path)
    cfg = dict(type='ObjectPaste', db_sampler=dict(info_path=str(tmp_path / 'x_dbinfos_train.pkl'), classes=list(CLASSES)))
    with profile('reference'):
        assert PIPELINES.build(cfg).db_sampler.compat == 'reference'
    assert PIPELINES.build(cfg).db_sampler.compat is None
