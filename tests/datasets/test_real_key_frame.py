"""A real nuScenes key frame in mmdet3d >= 1.1's form through the shipped pipelines: after all augmentation the annotated points are
inside the annotated boxes, and the boxes lie on the images."""
import numpy as np
import pytest
import torch
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from testing import REPO, shared_dir

from mmdet3d_ext.config import load_config
from mmdet3d_ext.datasets import build_dataset
from mmdet3d_ext.datasets.info_files import InfoFileError, load_info_file
from mmdet3d_ext.datasets.pipelines.paste import points_in_boxes

CONFIG = str(REPO / 'configs/nuscenes/det/transfusion/secfpn/camera+lidar/swint_v0p075/convfuser.yaml')


@pytest.fixture
def folder():
    return shared_dir('data', 'nuscenes_keyframe')


def dataset(folder, part, **changes):
    """The shipped configuration's data set with the key frame as its info file; no past sweeps stand in for the missing ones."""
    cfg = load_config(CONFIG, ['--dataset_root', f'{folder}/']).to_dict()
    settings = {'train': cfg['train_dataset'], 'val': cfg['data']['val']}[part]
    for step in settings['pipeline']:
        if step['type'] == 'LoadPointsFromMultiSweeps':
            step.update(pad_empty_sweeps=False, remove_close=False)
    (info,) = folder.glob('*.pkl')
    return build_dataset({**settings, 'ann_file': str(info), **changes})


@pytest.mark.parametrize('part', ['train', 'val'])
@pytest.mark.parametrize('seed', [0, 1])
def test_points_are_inside_the_boxes_after_the_whole_pipeline(folder, part, seed):
    data = dataset(folder, part)
    np.random.seed(seed)
    sample = data.load_sample(0)
    boxes, labels = sample['gt_bboxes_3d'].data, sample['gt_labels_3d'].data
    points = sample['points'].data.numpy()
    info = load_info_file(data.ann_file).infos[0]
    stated = np.asarray(info['num_lidar_pts'])
    kept = np.asarray(info['valid_flag']) & np.isin(info['gt_names'], data.CLASSES)
    matrix = sample['lidar_aug_matrix'].data.numpy().astype(np.float64)
    centres = np.c_[info['gt_boxes'][:, :3], np.ones(len(kept))] @ matrix.T
    found = counted = 0
    for index in np.flatnonzero(kept & (stated >= 10)):  # each annotated box by its moved centre
        gaps = np.linalg.norm(boxes.gravity_center.numpy() - centres[index, :3], axis=1)
        if gaps.min() > 0.01:  # outside the range after augmentation
            continue
        box = boxes[int(gaps.argmin())]
        assert data.CLASSES[labels[int(gaps.argmin())]] == info['gt_names'][index]
        inside = int(points_in_boxes(points, box).sum())
        lowered = LiDARInstance3DBoxes(box.tensor - torch.tensor([0, 0, 1, 0, 0, 0, 0, 0, 0.]) * box.tensor[:, 5:6] / 2, box_dim=9)
        assert abs(inside - stated[index]) <= max(3, 0.15 * stated[index]), (info['gt_names'][index], inside, stated[index])
        found, counted = found + 1, counted + (inside > points_in_boxes(points, lowered).sum())
    assert found >= 8 and counted >= 0.9 * found, 'half a height lower there are fewer points'
    if part == 'train':
        assert not np.allclose(matrix, np.eye(4))


def test_boxes_lie_on_the_augmented_images(folder):
    """A third of the points inside boxes are seen by cameras: the image, scene and camera matrices belong together."""
    np.random.seed(0)
    sample = dataset(folder, 'train').load_sample(0)
    points = sample['points'].data.numpy()
    inside = points[points_in_boxes(points, sample['gt_bboxes_3d'].data)][:, :3].astype(np.float64)
    original = (np.c_[inside, np.ones(len(inside))] @ np.linalg.inv(sample['lidar_aug_matrix'].data.numpy().astype(np.float64)).T)
    height, width = sample['img'].data.shape[-2:]
    seen = np.zeros(len(inside), bool)
    for projection, image in zip(sample['lidar2image'].data.numpy(), sample['img_aug_matrix'].data.numpy(), strict=True):
        uvd = original @ projection.T
        pixel = (uvd[:, :2] / uvd[:, 2:3]) @ image[:2, :2].T + image[:2, 3]
        seen |= (uvd[:, 2] > 0) & (pixel >= 0).all(1) & (pixel < [width, height]).all(1)
    assert len(inside) > 500 and seen.mean() > 0.33


@pytest.mark.parametrize('changes, message', [
    ({'map_classes': ['divider']}, "field 'location' is missing in 1 of 1 samples .*create_data.py fill-location"),
    ({'modality': {'use_lidar': True, 'use_camera': True, 'use_radar': True}}, "field 'radars' is missing .*create_data.py nuscenes"),
])
def test_what_that_form_does_not_have_is_named(folder, changes, message):
    with pytest.raises(InfoFileError, match=message):
        dataset(folder, 'train', **changes)
