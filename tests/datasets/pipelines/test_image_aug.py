"""Images: decoding errors, where a marker goes against img_aug_matrix, normalisation, GridMask."""
import numpy as np
import pytest
import torch
from PIL import Image

from mmdet3d_ext.registry import PIPELINES

AUG = dict(type='ImageAug3D', final_dim=[128, 352], resize_lim=[0.38, 0.55], bot_pct_lim=[0.0, 0.1], rot_lim=[-8, 8],
           rand_flip=True, is_train=True)
NORMALIZE = dict(type='ImageNormalize', mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])


def marked(u, v, width=800, height=450, radius=9):
    """A black image with a white disc whose centre of mass is at continuous pixel (u, v)."""
    yy, xx = np.mgrid[:height, :width] + 0.5
    image = np.zeros((height, width, 3), np.uint8)
    image[(xx - u) ** 2 + (yy - v) ** 2 <= radius ** 2] = 255
    return image


def centre_of_mass(image):
    weight = np.asarray(image)[..., 0].astype(float)
    yy, xx = np.mgrid[:weight.shape[0], :weight.shape[1]] + 0.5
    return np.array([(xx * weight).sum(), (yy * weight).sum()]) / weight.sum()


@pytest.mark.parametrize('pillow', [True, False])
def test_a_marker_goes_where_the_matrix_says(pillow):
    step = PIPELINES.build(AUG)
    errors, flips = [], set()
    for seed in range(60):
        np.random.seed(seed)
        u, v = np.random.default_rng(seed).uniform((150, 230), (650, 400))
        source = Image.fromarray(marked(u, v)) if pillow else marked(u, v)
        data = step(dict(img=[source]))
        expected = (data['img_aug_matrix'][0] @ [u, v, 0, 1])[:2]
        if not (12 < expected[0] < 340 and 12 < expected[1] < 116):
            continue
        errors.append(centre_of_mass(data['img'][0]) - expected)
        flips.add(data['img_aug_matrix'][0][0, 0] < 0)
    # The rotation takes the nearest pixel: up to half a pixel for one image, no bias over many.
    assert len(errors) >= 15 and flips == {True, False}
    assert np.abs(errors).max() < 0.55 and np.abs(np.mean(errors, axis=0)).max() < 0.12


def test_the_matrix_of_whole_pixels_beats_the_drawn_scale_at_the_far_edge():
    """At scale 0.4999 a 801-pixel row becomes 400 pixels: the matrix must say 400 / 801."""
    image = marked(780.5, 430.5, 801, 451, radius=6)
    aug = dict(type='ImageAug3D', final_dim=[225, 400], resize_lim=[0.5008, 0.5008], bot_pct_lim=[0, 0], rot_lim=[0, 0],
               rand_flip=False, is_train=False)
    errors = {}
    for compat in (None, 'reference'):
        data = PIPELINES.build(dict(aug, compat=compat))(dict(img=[image]))
        expected = (data['img_aug_matrix'][0] @ [780.5, 430.5, 0, 1])[:2]
        errors[compat] = np.abs(centre_of_mass(data['img'][0]) - expected).max()
    assert errors[None] < 0.1 < 0.3 < errors['reference']


def test_calibration_is_left_alone_and_inputs_are_not_changed():
    image = np.random.default_rng(0).integers(0, 256, (450, 800, 3), dtype=np.uint8)
    matrix = np.arange(16, dtype=np.float32).reshape(4, 4)
    data = dict(img=[image], lidar2image=[matrix], camera_intrinsics=[matrix], img_aug_matrix=[np.eye(4, dtype=np.float32)])
    before = image.copy(), matrix.copy(), data['img_aug_matrix'][0]
    np.random.seed(0)
    result = PIPELINES.build(AUG)(dict(data))
    np.testing.assert_array_equal(image, before[0])
    np.testing.assert_array_equal(matrix, before[1])
    np.testing.assert_array_equal(before[2], np.eye(4))
    assert result['lidar2image'][0] is matrix and result['img_shape'] == (352, 128)


def test_two_augmentations_compose():
    once = dict(AUG, resize_lim=[0.5, 0.5], final_dim=[200, 380], is_train=False)
    twice = dict(AUG, resize_lim=[0.9, 0.9], final_dim=[100, 300], is_train=False)
    data = dict(img=[marked(420, 300)])
    for cfg in (once, twice):
        data = PIPELINES.build(cfg)(data)
    expected = (data['img_aug_matrix'][0] @ [420, 300, 0, 1])[:2]
    assert np.abs(centre_of_mass(data['img'][0]) - expected).max() < 0.3


def test_images_smaller_than_the_crop_are_padded_with_black():
    data = PIPELINES.build(dict(AUG, resize_lim=[0.2, 0.2], rot_lim=[0, 0], is_train=False))(
        dict(img=[np.full((450, 800, 3), 200, np.uint8)]))
    image = data['img'][0]
    assert image.shape == (128, 352, 3) and image[:, 170:].max() == 0 and image[60:, :150].min() > 190


def test_cameras_of_different_size_each_use_their_own(tmp_path):
    data = PIPELINES.build(dict(AUG, is_train=False))(dict(img=[marked(400, 300), marked(300, 400, 640, 480)]))
    assert data['img'][0].shape == data['img'][1].shape == (128, 352, 3)
    assert data['img_aug_matrix'][0][0, 3] != data['img_aug_matrix'][1][0, 3]


@pytest.mark.parametrize('wrong, word', [(dict(final_dim=[256]), 'final_dim'), (dict(resize_lim=[0.5, 0.4]), 'resize_lim'),
                                         (dict(resize_lim=[0, 1]), 'positive'), (dict(compat='old'), 'compat')])
def test_wrong_arguments(wrong, word):
    with pytest.raises(ValueError, match=word):
        PIPELINES.build(dict(AUG, **wrong))


def test_normalisation_and_the_uint8_option():
    image = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    data = PIPELINES.build(NORMALIZE)(dict(img=[image, Image.fromarray(image)]))
    expected = ((image / 255.0 - NORMALIZE['mean']) / NORMALIZE['std']).transpose(2, 0, 1)
    for tensor in data['img']:
        assert tensor.dtype == torch.float32
        np.testing.assert_allclose(tensor.numpy(), expected, atol=1e-6)
    assert data['img_norm_cfg']['applied']
    data = PIPELINES.build(dict(NORMALIZE, keep_uint8=True))(dict(img=[image]))
    assert data['img'][0].dtype == torch.uint8 and not data['img_norm_cfg']['applied']
    np.testing.assert_array_equal(data['img'][0].numpy(), image.transpose(2, 0, 1))


def test_normalisation_refuses_floats_and_0_to_255_means():
    with pytest.raises(TypeError, match='uint8'):
        PIPELINES.build(NORMALIZE)(dict(img=[np.zeros((4, 4, 3), np.float32)]))
    with pytest.raises(ValueError, match='0..1'):
        PIPELINES.build(dict(type='ImageNormalize', mean=[123.7, 116.3, 103.5], std=[58.4, 57.1, 57.4]))


GRID = dict(type='GridMask', use_h=True, use_w=True, max_epoch=10, rotate=1, offset=False, ratio=0.5, mode=1, prob=1.0,
            fixed_prob=True)


def test_grid_mask_is_the_same_before_and_after_normalisation():
    image = np.random.default_rng(0).integers(1, 256, (60, 100, 3), dtype=np.uint8)
    zero_mean = dict(type='ImageNormalize', mean=[0.0, 0.0, 0.0], std=[1.0, 1.0, 1.0])
    for seed in range(5):
        np.random.seed(seed)
        before = PIPELINES.build(zero_mean)(PIPELINES.build(GRID)(dict(img=[image, image])))['img']
        np.random.seed(seed)
        after = PIPELINES.build(GRID)(PIPELINES.build(zero_mean)(dict(img=[image, image])))['img']
        blank = before[0] == 0
        assert before[0].shape == (3, 60, 100) and 0 < blank.float().mean() < 1
        torch.testing.assert_close(before[0], after[0])
        torch.testing.assert_close(before[1], before[0])
        assert (blank == blank[:1]).all()
    assert image.min() >= 1  # the input is not blanked


@pytest.mark.parametrize('use_h', [True, False])
def test_grid_mask_stripes_lie_along_the_right_axis(use_h):
    step = PIPELINES.build(dict(GRID, use_h=use_h, use_w=not use_h, mode=0))
    np.random.seed(3)
    image = PIPELINES.build(NORMALIZE)(dict(img=[np.full((40, 90, 3), 255, np.uint8)]))
    blank = step(image)['img'][0][0] == 0
    rows_equal = bool((blank == blank[:, :1]).all())
    columns_equal = bool((blank == blank[:1]).all())
    assert blank.any() and not blank.all() and (rows_equal, columns_equal) == (use_h, not use_h)


def test_grid_mask_probability_grows_with_the_epoch():
    step = PIPELINES.build(dict(GRID, fixed_prob=False, prob=0.8))
    for epoch, expected in ((0, 0.0), (5, 0.4), (10, 0.8), (20, 0.8)):
        step.set_epoch(epoch)
        assert step.prob == pytest.approx(expected)
    step.set_epoch(0)
    image = np.ones((30, 30, 3), np.uint8)
    assert all(step(dict(img=[image]))['img'][0] is image for _ in range(20))
    fixed = PIPELINES.build(dict(GRID, prob=0.0))
    fixed.set_epoch(9)
    assert fixed.prob == 0.0


def test_grid_mask_random_ratio_rotation_and_noise():
    np.random.seed(0)
    image = torch.ones(3, 50, 70)
    result = PIPELINES.build(dict(GRID, ratio=1, rotate=30, offset=True, mode=0))(dict(img=[image]))['img'][0]
    assert result.shape == image.shape and ((result != 1).any() and (result == 1).any())
    assert result.abs().max() <= 1 and (image == 1).all()
    with pytest.raises(ValueError, match='after ImageNormalize'):
        PIPELINES.build(dict(GRID, offset=True))(dict(img=[np.ones((9, 9, 3), np.uint8)]))


def test_samples_without_images_pass():
    for cfg in (AUG, NORMALIZE, GRID, dict(type='LoadMultiViewImageFromFiles')):
        data = dict(token='a')
        assert PIPELINES.build(cfg)(data) == dict(token='a')
