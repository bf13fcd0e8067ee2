"""The whole panel, with everything and with parts missing; and the program that fills it from a data set."""
import numpy as np
import pytest

from mmdet3d_ext.visualization import BevMap, Boxes, Scene, draw_camera, draw_scene, palette
from mmdet3d_ext.visualization.boxes import project

CAMERAS = ['CAM_FRONT', 'CAM_FRONT_RIGHT', 'CAM_FRONT_LEFT', 'CAM_BACK', 'CAM_BACK_LEFT', 'CAM_BACK_RIGHT']
FORWARD = np.array([[100.0, 80, 0, 0], [0, 45, -100, 0], [0, 1, 0, 0], [0, 0, 0, 1]])   # looks along +y, 160 x 90 pixels
BACKWARD = FORWARD @ np.diag([-1.0, -1, 1, 1])


def scene(**kwargs):
    boxes = np.array([[0.0, 12, -1, 4, 2, 2, 1.57], [0, -12, -1, 4, 2, 2, 0]])
    filled = dict(title='a sample', cameras=CAMERAS, images=[np.full((90, 160, 3), 10 * i, np.uint8) for i in range(6)],
                  image_from_lidar=[FORWARD] * 3 + [BACKWARD] * 3, points=np.random.default_rng(0).normal(0, 10, (500, 5)),
                  truth=Boxes(boxes, ['car', 'truck']), prediction=Boxes(boxes[:1], ['car'], np.array([0.9])),
                  true_map=BevMap(np.ones((1, 10, 10), bool), ['walkway'], (-50, -50, 50, 50)),
                  predicted_map=BevMap(np.full((1, 10, 10), 0.3), ['walkway'], (-50, -50, 50, 50)))
    return Scene(**{**filled, **kwargs})


def has(image, color):
    return (np.abs(image.astype(int) - color).sum(-1) < 30).any()


def test_layout():
    panel = draw_scene(scene(), 720)
    assert panel.dtype == np.uint8 and panel.shape == (24 + 2 * 135 + 22 + 240, 720, 3)
    assert has(panel, palette.TRUTH) and has(panel, palette.PREDICTION)
    rows = [panel[24 + 130, column] for column in (5, 245, 485)], [panel[24 + 265, column] for column in (5, 245, 485)]
    assert [[int(pixel[0]) for pixel in row] for row in rows] == [[20, 0, 10],
                                                                  [50, 30, 40]]  # left, front, right; right, back, left
    ground = panel[-240:]
    assert (ground[5:20, 245:260] == palette.PAPER).all()                              # 0.3 is below the threshold
    assert (ground[5:20, 485:500] == palette.MAP_COLORS['walkway']).all()
    assert (draw_scene(scene(), 720, map_threshold=0.2)[-235:-220, 245:260] == palette.MAP_COLORS['walkway']).all()


def test_camera_shows_only_its_own_boxes():
    full = scene(prediction=None)
    front, back = draw_camera(full, 0), draw_camera(full, 3)
    assert has(front, palette.TRUTH) and has(back, palette.TRUTH)
    only_front = scene(truth=Boxes(full.truth.boxes[:1], ['car']), prediction=None)
    assert has(draw_camera(only_front, 0), palette.TRUTH) and not has(draw_camera(only_front, 3), palette.TRUTH)


@pytest.mark.parametrize('missing', [
    dict(truth=None), dict(prediction=None), dict(true_map=None), dict(predicted_map=None), dict(points=np.zeros((0, 3))),
    dict(cameras=[], images=[], image_from_lidar=[]), dict(truth=Boxes(np.zeros((0, 7)), [])),
    dict(cameras=CAMERAS[:1], images=[np.zeros((9, 16, 3), np.uint8)], image_from_lidar=[FORWARD]),
    dict(cameras=['roof', 'CAM_BACK'], images=[np.zeros((9, 16, 3), np.uint8)] * 2, image_from_lidar=[FORWARD] * 2),
    dict(extent=(-50.0, -20.0, 50.0, 20.0)), dict(extent=(-10.0, -50.0, 10.0, 50.0)),
])
def test_anything_may_be_missing(missing):
    panel = draw_scene(scene(**missing), 360)
    assert panel.shape[1] == 360 and panel.any()
    assert has(panel, palette.PREDICTION) == (missing.get('prediction', True) is not None)


def test_score_threshold():
    boxes = Boxes(np.arange(21.0).reshape(3, 7), ['a', 'b', 'c'], np.array([0.05, 0.1, 0.9]))
    assert boxes.above(0.1).names == ['b', 'c'] and boxes.above(0.1).labels == ['b 0.10', 'c 0.90']
    assert boxes.above(0.95).boxes.shape == (0, 7) and Boxes(boxes.boxes, boxes.names).above(0.95).names == ['a', 'b', 'c']


# ---- the program ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def prepared(synthetic_root, tmp_path_factory):
    from testing import REPO

    from mmdet3d_ext.config import load_config
    from mmdet3d_ext.datasets.nuscenes_converter import create_infos
    files = create_infos(synthetic_root, tmp_path_factory.mktemp('infos'), version='v1.0-mini')
    overrides = ['--dataset_root', f'{synthetic_root}/', '--data.val.ann_file', str(files['val']),
                 '--train_dataset.ann_file', str(files['train'])]
    return load_config(str(REPO / 'configs/synthetic/multitask_tiny.yaml'), overrides)


def test_labels_of_a_data_set_are_drawn(prepared, tmp_path):
    import torch
    from PIL import Image

    from mmdet3d_ext.engine.visualize import Options, make_dataset, make_scene, visualize
    files = visualize(prepared, Options(mode='gt', num=2, out_dir=str(tmp_path), width=720), torch.device('cpu'))
    assert len(files) == 2 and len(set(files)) == 2
    for file in files:
        image = np.asarray(Image.open(file))
        assert image.shape[1] == 720 and has(image, palette.TRUTH)
    scene = make_scene(prepared, make_dataset(prepared, 'train'), 0, None, torch.device('cpu'), 0.1)
    assert len(scene.images) == 6 and len(scene.truth.boxes) == len(scene.truth.names) > 0 and scene.true_map.masks.any()
    # every box with a centre in front of some camera is inside that image's projection: labels and images share their frame
    centres = scene.truth.boxes[:, :3] + [0, 0, 1] * scene.truth.boxes[:, 3:6] / 2
    seen = np.zeros(len(centres), bool)
    for image, matrix in zip(scene.images, scene.image_from_lidar):
        pixels, depth = project(centres, matrix)
        seen |= (depth > 0) & (pixels >= 0).all(1) & (pixels <= [image.shape[1], image.shape[0]]).all(1)
    assert seen.mean() > 0.8


@pytest.mark.parametrize('options, message', [
    (dict(mode='both'), '--mode must be one of'), (dict(mode='pred'), 'needs --checkpoint'), (dict(num=0), '--num must be'),
    (dict(split='night'), r'no data\.night'),
])
def test_wrong_options(prepared, options, message, tmp_path):
    import torch

    from mmdet3d_ext.engine.launch import UserError
    from mmdet3d_ext.engine.visualize import Options, visualize
    with pytest.raises(UserError, match=message):
        visualize(prepared, Options(**{'out_dir': str(tmp_path), **options}), torch.device('cpu'))
    with pytest.raises(UserError, match='data.train .--split. is a list of data sets'):
        visualize({'data': {'train': [{}, {}]}}, Options(split='train'), torch.device('cpu'))
