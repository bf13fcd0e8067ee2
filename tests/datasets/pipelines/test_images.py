"""Decoding and resampling of camera images against Pillow, reduced decoding, and normalisation on the CPU and in the detector."""
import io

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from testing import shared_dir

from mmdet3d_ext.datasets.pipelines.images import EncodedImage, open_image, read_image, resample
from mmdet3d_ext.models.detectors.image_input import normalised
from mmdet3d_ext.registry import PIPELINES

LOAD = dict(type='LoadMultiViewImageFromFiles')
AUG = dict(type='ImageAug3D', final_dim=[128, 352], resize_lim=[0.38, 0.55], bot_pct_lim=[0.0, 0.1], rot_lim=[-8, 8],
           rand_flip=True, is_train=True)
NORMALIZE = dict(type='ImageNormalize', mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])


def picture(width=800, height=450, seed=0):
    """Something like a photograph: large and small structures, and noise."""
    rng = np.random.default_rng(seed)
    image = np.zeros((height, width, 3))
    for size in (4, 16, 64, 256):
        coarse = Image.fromarray(rng.integers(0, 256, (max(2, height * size // 450), max(2, width * size // 450), 3), dtype=np.uint8))
        image += np.asarray(coarse.resize((width, height), Image.BICUBIC), float) / size ** 0.7
    return np.clip(image * 255 / image.max(), 0, 255).astype(np.uint8)


@pytest.mark.parametrize('options', [dict(quality=90), dict(quality=40, subsampling=0), dict(quality=75, progressive=True),
                                     dict(quality=85, optimize=True)])
@pytest.mark.parametrize('size', [(800, 450), (801, 451), (17, 9)])
def test_pixels_are_pillows(tmp_path, options, size):
    path = tmp_path / 'a.jpg'
    Image.fromarray(picture(*size)).save(path, **options)
    np.testing.assert_array_equal(read_image(str(path)), np.asarray(Image.open(path)))
    lazy = open_image(str(path))
    assert isinstance(lazy, EncodedImage) and lazy.size == size
    np.testing.assert_array_equal(np.asarray(lazy), read_image(str(path)))


def test_turned_by_exif_or_with_bytes_behind_or_no_jpeg_at_all(tmp_path):
    image = Image.fromarray(picture(160, 90))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees: calibration is for the sensor's own orientation
    image.save(tmp_path / 'exif.jpg', exif=exif)
    assert read_image(str(tmp_path / 'exif.jpg')).shape == (90, 160, 3)
    image.save(tmp_path / 'plain.jpg')
    (tmp_path / 'behind.jpg').write_bytes((tmp_path / 'plain.jpg').read_bytes() + b'\0\0\0')
    np.testing.assert_array_equal(read_image(str(tmp_path / 'behind.jpg')), read_image(str(tmp_path / 'plain.jpg')))
    image.convert('L').save(tmp_path / 'grey.jpg')
    grey = read_image(str(tmp_path / 'grey.jpg'))
    np.testing.assert_array_equal(grey, np.asarray(Image.open(tmp_path / 'grey.jpg').convert('RGB')))
    image.save(tmp_path / 'a.png')
    assert not isinstance(open_image(str(tmp_path / 'a.png')), EncodedImage)
    np.testing.assert_array_equal(open_image(str(tmp_path / 'a.png')), np.asarray(image))


def test_damaged_files_are_errors_with_reduced_decoding_too(tmp_path):
    step = PIPELINES.build(dict(LOAD, reduced=True))
    buffer = io.BytesIO()
    Image.fromarray(picture(160, 90)).save(buffer, format='jpeg')
    content = buffer.getvalue()
    for name, damaged in (('cut.jpg', content[:len(content) // 2]), ('empty.jpg', b''), ('head.jpg', b'\xff\xd8' + b'x' * 50 + b'\xff\xd9')):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(OSError, match=rf'{name}.*\({len(damaged)} bytes\) cannot be decoded'):
            step(dict(image_paths=[str(tmp_path / name)]))
    at = content.index(b'\xff\xc0') + 5  # height and width in the header
    (tmp_path / 'huge.jpg').write_bytes(content[:at] + b'\xff\xf0\xff\xf0' + content[at + 4:])
    for reduced in (False, True):
        with pytest.raises(OSError, match=r'huge.jpg.*cannot be decoded'):
            PIPELINES.build(dict(LOAD, reduced=reduced))(dict(image_paths=[str(tmp_path / 'huge.jpg')]))
    with pytest.raises(FileNotFoundError, match='absent.jpg'):
        step(dict(image_paths=[str(tmp_path / 'absent.jpg')]))


@pytest.mark.parametrize('seed', range(12))
def test_resampling_a_part_is_pillows_to_one_grey_level(seed):
    rng = np.random.default_rng(seed)
    source = picture(int(rng.integers(300, 1000)), int(rng.integers(200, 600)), seed)
    if seed % 3 == 0:
        source = rng.integers(0, 256, source.shape, dtype=np.uint8)  # noise: the worst case for rounding
    height, width = source.shape[:2]
    # Both axes shrink or both grow, as an augmentation's do: for others Pillow may choose another order of the two passes.
    scale = rng.uniform(0.2, 0.95) if seed % 4 else rng.uniform(1.1, 1.6)
    new = int(width * scale), int(height * scale * rng.uniform(0.95, 1.0))
    left, top = int(rng.integers(0, new[0] - 20)), int(rng.integers(0, new[1] - 20))
    size = int(rng.integers(1, new[0] - left + 1)), int(rng.integers(1, new[1] - top + 1))
    before = source.copy()
    got = resample(source, (width / new[0], height / new[1]), (left, top), size)
    whole = np.asarray(Image.fromarray(source).resize(new, Image.BICUBIC))
    difference = np.abs(whole[top:top + size[1], left:left + size[0]].astype(int) - got)
    assert got.shape == (size[1], size[0], 3) and difference.max() <= (1 if scale < 1 else 2) and (difference > 0).mean() < 0.02
    np.testing.assert_array_equal(source, before)
    source.flags.writeable = False
    np.testing.assert_array_equal(resample(source, (width / new[0], height / new[1]), (left, top), size), got)


@pytest.mark.parametrize('scale', [1.0, 1.015, 1.05, 1.1, 1.7])
def test_a_part_that_is_as_large_as_what_it_is_made_from(scale):
    """torch leaves out the pass along an axis whose length does not change, without a look at the scale that it was given."""
    source = np.random.default_rng(1).integers(0, 256, (90, 160, 3), dtype=np.uint8)
    new = int(160 * scale), int(90 * scale)
    whole = np.asarray(Image.fromarray(source).resize(new, Image.BICUBIC)).astype(int)
    for left in range(0, 60, 7):  # right edges at the source's width
        for top in range(0, 60, 9):
            for height in (1, 7, 90 - top):  # lower edges at the source's, and at every row around what is read
                part = resample(source, (160 / new[0], 90 / new[1]), (left, top), (160 - left, height))
                assert np.abs(whole[top:top + height, left:160] - part).max() <= 2, (left, top, height)
    for top in range(20):
        for bottom in range(30, 80):
            part = resample(source, (160 / new[0], 90 / new[1]), (3, top), (5, bottom - top))
            assert np.abs(whole[top:bottom, 3:8] - part).max() <= 2, (top, bottom)


@pytest.mark.parametrize('compat, levels', [(None, 1), ('reference', 0)])
@pytest.mark.parametrize('scale', [0.2, 0.44, 0.9])
def test_the_augmentation_is_pillows_resize_crop_flip_and_rotate(scale, compat, levels):
    """The whole image resized, then cropped; black where the crop is wider, higher or past the edge."""
    image = picture()
    for final, bottom in (([50, 120], 0.1), ([128, 352], 0.0), ([400, 500], 0.0), ([100, 200], -0.3), ([100, 200], 0.9), ([30, 900], 0.0)):
        step = PIPELINES.build(dict(AUG, final_dim=final, resize_lim=[scale, scale], bot_pct_lim=[bottom, bottom], compat=compat))
        for seed in range(3):
            np.random.seed(seed)
            draw = step.draw(800, 450)
            left, top = draw.crop
            whole = Image.fromarray(image).resize(draw.size, Image.BICUBIC).crop((left, top, left + final[1], top + final[0]))
            whole = (whole.transpose(Image.FLIP_LEFT_RIGHT) if draw.flip else whole).rotate(draw.degrees)
            for given in (image, Image.fromarray(image)):
                np.random.seed(seed)
                found = step(dict(img=[given]))['img'][0]
                assert found.shape == (*final, 3) and found.flags.writeable
                # The rotation takes the nearest pixel of both, so a level's difference stays one.
                assert np.abs(found.astype(int) - np.asarray(whole)).max() <= levels, (final, bottom, seed)


# ------------------------------------------------------------------------------------------------------ reduced decoding

def test_reduction_never_goes_below_what_is_asked_for(tmp_path, monkeypatch):
    path = tmp_path / 'a.jpg'
    Image.fromarray(picture(801, 451)).save(path, quality=90)
    image = open_image(str(path))
    for size, factor, shape in (((401, 226), 1, (451, 801)), ((400, 225), 2, (226, 401)), ((200, 112), 4, (113, 201)),
                                ((100, 56), 8, (57, 101)), ((10, 5), 8, (57, 101)), ((900, 500), 1, (451, 801)),
                                ((100, 300), 1, (451, 801))):
        pixels, found = image.at_least(size)
        assert found == factor and pixels.shape == (*shape, 3)
        with monkeypatch.context() as patch:  # a file that only Pillow can decode
            patch.setattr(cv2, 'imdecode', lambda *_: None)
            pixels, found = image.at_least(size)
        assert found == factor and pixels.shape == (*shape, 3)


@pytest.mark.parametrize('scale', [0.1, 0.23, 0.4, 0.5, 0.52])
def test_a_marker_stays_in_place_when_decoded_reduced(tmp_path, scale):
    yy, xx = np.mgrid[:451, :801] + 0.5
    image = np.zeros((451, 801, 3), np.uint8)
    image[(xx - 640.3) ** 2 + (yy - 350.7) ** 2 <= 40 ** 2] = 255
    path = tmp_path / 'a.jpg'
    Image.fromarray(image).save(path, quality=98)
    data = PIPELINES.build(dict(LOAD, reduced=True))(dict(image_paths=[str(path)]))
    assert data['ori_shape'] == (801, 451)
    step = PIPELINES.build(dict(AUG, final_dim=[int(451 * scale), int(801 * scale)], resize_lim=[scale, scale], bot_pct_lim=[0, 0],
                                is_train=False))
    data = step(data)
    weight = data['img'][0][..., 0].astype(float)
    v, u = np.mgrid[:weight.shape[0], :weight.shape[1]] + 0.5
    centre = np.array([(u * weight).sum(), (v * weight).sum()]) / weight.sum()
    expected = (data['img_aug_matrix'][0] @ [640.3, 350.7, 0, 1])[:2]
    assert np.abs(centre - expected).max() < 0.05


def test_reduced_decoding_differs_little_on_real_images():
    """The tolerance that the documentation states."""
    paths = sorted(map(str, shared_dir('data', 'nuscenes_keyframe').glob('*.jpg')))
    assert len(paths) == 6
    results = []
    for reduced in (False, True):
        np.random.seed(3)
        data = PIPELINES.build(dict(LOAD, reduced=reduced))(dict(image_paths=paths))
        data = PIPELINES.build(dict(AUG, final_dim=[256, 704], resize_lim=[0.44, 0.5], rot_lim=[0, 0]))(data)
        results.append(np.stack(data['img']).astype(int))
    difference = np.abs(results[0] - results[1])
    assert 0 < difference.mean() < 1.0 and np.quantile(difference, 0.99) <= 6
    assert abs((results[0] - results[1]).mean()) < 0.1  # no brighter, no darker


def test_steps_other_than_the_augmentation_see_whole_images(tmp_path):
    Image.fromarray(picture(160, 90)).save(tmp_path / 'a.jpg')
    data = PIPELINES.build(dict(LOAD, reduced=True))(dict(image_paths=[str(tmp_path / 'a.jpg')]))
    lazy = PIPELINES.build(NORMALIZE)(data)['img']
    data = PIPELINES.build(LOAD)(dict(image_paths=[str(tmp_path / 'a.jpg')]))
    assert torch.equal(lazy, PIPELINES.build(NORMALIZE)(data)['img'])


# -------------------------------------------------------------------------------------------------------- normalisation

def test_every_level_is_normalised_as_the_formula_says():
    levels = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    found = PIPELINES.build(NORMALIZE)(dict(img=[levels, levels]))['img']
    mean, std = (torch.tensor(NORMALIZE[name]).view(3, 1, 1) for name in ('mean', 'std'))
    expected = torch.from_numpy(levels.transpose(2, 0, 1).copy()).float().div(255).sub(mean).div(std)
    assert found.shape == (2, 3, 16, 16) and torch.equal(found[0], expected) and torch.equal(found[1], expected)


def test_images_of_different_sizes_and_views():
    image = picture(64, 36)
    found = PIPELINES.build(NORMALIZE)(dict(img=[image, image[:20], image[:, ::-1]]))['img']
    assert [tuple(one.shape) for one in found] == [(3, 36, 64), (3, 20, 64), (3, 36, 64)]
    assert torch.equal(found[2], found[0].flip(2)) and torch.equal(found[1], found[0][:, :20])


def to_batch(image, **options):
    """(1, N, 3, H, W) and metas, through the formatting steps."""
    data = PIPELINES.build(dict(NORMALIZE, **options))(dict(img=[image, image[::-1]]))
    data = PIPELINES.build(dict(type='DefaultFormatBundle3D', classes=['car']))(data)
    data = PIPELINES.build(dict(type='Collect3D', keys=['img'], meta_keys=['lidar_aug_matrix']))(data)
    return data['img'].data[None], [data['metas'].data]


@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def test_normalisation_in_the_detector_gives_the_same_values(device):
    image = np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8)
    expected, metas = to_batch(image)
    small, small_metas = to_batch(image, keep_uint8=True)
    assert small.dtype == torch.uint8 and small.shape == expected.shape == (1, 2, 3, 30, 50)
    before = small.clone()
    found = normalised(small.to(device), small_metas)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(small, before) and found.dtype == torch.float32
    assert normalised(expected, metas) is expected
    if device == 'cpu':
        assert torch.equal(found, expected)


def test_bytes_without_their_norm_are_an_error():
    with pytest.raises(ValueError, match="add 'img_norm_cfg' to meta_lis_keys"):
        normalised(torch.zeros(1, 1, 3, 4, 4, dtype=torch.uint8), [dict(token='a')])


def test_grid_mask_on_bytes_is_the_one_on_floats_to_half_a_level():
    image = picture(100, 60)
    grid = dict(type='GridMask', use_h=True, use_w=True, max_epoch=10, rotate=1, offset=False, ratio=0.5, mode=1, prob=1.0,
                fixed_prob=True)
    found = {}
    for keep in (False, True):
        np.random.seed(2)
        data = PIPELINES.build(grid)(PIPELINES.build(dict(NORMALIZE, keep_uint8=keep))(dict(img=[image, image])))
        assert isinstance(data['img'], torch.Tensor)
        found[keep] = normalised(data['img'][None], [dict(img_norm_cfg=data['img_norm_cfg'])])
    assert (found[False] == 0).any()
    assert (found[True] - found[False]).abs().max() <= 0.5001 / 255 / min(NORMALIZE['std'])
    data = PIPELINES.build(dict(NORMALIZE, keep_uint8=True))(dict(img=[image]))
    with pytest.raises(ValueError, match='keep_uint8'):
        PIPELINES.build(dict(grid, offset=True))(data)
