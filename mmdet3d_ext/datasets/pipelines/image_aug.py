"""Image resizing, cropping, flipping, rotation; normalisation; GridMask."""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np
import torch
from PIL import Image

from ...geometry.transforms import image_augmentation
from ...registry import PIPELINES
from .common import as_rgb_array, check_compat
from .images import EncodedImage, resample


class ImageDraw(NamedTuple):
    """One image's augmentation: drawn ``scale``, new ``size`` (W, H), ``crop`` corner (left, top), ``flip``, ``degrees``."""

    scale: float
    size: Tuple[int, int]
    crop: Tuple[int, int]
    flip: bool
    degrees: float


@PIPELINES.register_module()
class ImageAug3D:
    """Resize, crop to ``final_dim``, flip and rotate each camera image by a draw of its own, and record ``img_aug_matrix``.

    Draw order per image from numpy's global generator: scale, bottom crop fraction, left crop fraction, flip (only if
    ``rand_flip``), angle. Test mode draws nothing: mean scale, mean bottom crop, horizontally centred, no flip, no turn.
    Resizing is Pillow's bicubic (the filter of the published models), to one grey level; with ``compat='reference'`` it is Pillow
    itself, several times slower. The rotation takes the nearest pixel; what lies outside the image is black. Images may be RGB
    arrays (H, W, 3) uint8, Pillow images or :class:`.images.EncodedImage`; the result is a list of (H, W, 3) uint8 arrays.

    ``img_aug_matrix`` (N matrices, 4x4 float32) maps pixel positions (u, v, depth, 1) of the original image to the new one,
    multiplied from the left to what is already there. The image is resized to whole pixels (``int(W * scale)``), and the
    matrix holds what was really done; with ``compat='reference'`` it holds the drawn scale (up to a pixel off at the far
    edge).

    Args:
        final_dim: (H, W) of the result.
        resize_lim: (low, high) scale. bot_pct_lim: (low, high) fraction of the resized height cut off at the bottom.
        rot_lim: (low, high) degrees, counter-clockwise as seen. rand_flip: flip with probability 1/2.
        is_train: whether to draw.
    """

    def __init__(self, final_dim: Sequence[int], resize_lim: Sequence[float], bot_pct_lim: Sequence[float],
                 rot_lim: Sequence[float], rand_flip: bool, is_train: bool, compat: Optional[str] = None):
        self.compat = check_compat(compat, self)
        if len(final_dim) != 2 or min(final_dim) < 1:
            raise ValueError(f'ImageAug3D: final_dim is (height, width) in pixels, got {final_dim!r}')
        for name, limits in (('resize_lim', resize_lim), ('bot_pct_lim', bot_pct_lim), ('rot_lim', rot_lim)):
            if len(limits) != 2 or limits[0] > limits[1]:
                raise ValueError(f'ImageAug3D: {name} is (low, high), got {limits!r}')
        if resize_lim[0] <= 0:
            raise ValueError(f'ImageAug3D: resize_lim must be positive, got {resize_lim!r}')
        self.final_dim = (int(final_dim[0]), int(final_dim[1]))
        self.resize_lim = tuple(resize_lim)
        self.bot_pct_lim = tuple(bot_pct_lim)
        self.rot_lim = tuple(rot_lim)
        self.rand_flip = rand_flip
        self.is_train = is_train

    def draw(self, width: int, height: int) -> ImageDraw:
        """The augmentation of the next image of this size (pixels)."""
        final_height, final_width = self.final_dim
        scale = np.random.uniform(*self.resize_lim) if self.is_train else float(np.mean(self.resize_lim))
        size = (int(width * scale), int(height * scale))
        if min(size) < 1:
            raise ValueError(f'ImageAug3D: a {width}x{height} image at scale {scale:g} has no pixel left')
        bottom = np.random.uniform(*self.bot_pct_lim) if self.is_train else float(np.mean(self.bot_pct_lim))
        top = int((1 - bottom) * size[1]) - final_height
        slack = max(0, size[0] - final_width)
        if not self.is_train:
            return ImageDraw(scale, size, (int(slack / 2), top), False, 0.0)
        left = int(np.random.uniform(0, slack))
        flip = bool(self.rand_flip and np.random.choice([0, 1]))
        return ImageDraw(scale, size, (left, top), flip, float(np.random.uniform(*self.rot_lim)))

    def apply(self, image: Any, draw: ImageDraw) -> np.ndarray:
        """``(H, W, 3)`` uint8 of the augmented image; ``image`` is one of what :meth:`__call__` takes."""
        final_height, final_width = self.final_dim
        left, top = draw.crop
        right, bottom = left + final_width, top + final_height
        width, height = draw.size
        # The part of the crop that the resized image covers; around it is black.
        inside = (max(left, 0), max(top, 0), min(right, width), min(bottom, height))
        if inside[0] >= inside[2] or inside[1] >= inside[3]:
            part = np.zeros((final_height, final_width, 3), np.uint8)
        elif self.compat == 'reference':
            whole = image if isinstance(image, Image.Image) else Image.fromarray(as_rgb_array(image))
            part = np.asarray(whole.resize(draw.size, Image.BICUBIC).crop((left, top, right, bottom)))
        else:
            pixels, factor = image.at_least(draw.size) if isinstance(image, EncodedImage) else (as_rgb_array(image), 1)
            step = [old / (factor * new) for old, new in zip(_size(image), draw.size)]
            part = resample(pixels, step, inside[:2], (inside[2] - inside[0], inside[3] - inside[1]))
            if inside != (left, top, right, bottom):
                part = cv2.copyMakeBorder(part, inside[1] - top, bottom - inside[3], inside[0] - left, right - inside[2],
                                          cv2.BORDER_CONSTANT)
        if draw.flip:
            part = cv2.flip(part, 1)
        if draw.degrees:
            part = np.asarray(Image.fromarray(np.ascontiguousarray(part)).rotate(draw.degrees))
        return np.array(part)  # a writable copy

    def matrix(self, width: int, height: int, draw: ImageDraw) -> np.ndarray:
        """``augmented_from_image`` (4, 4) float64 for an original image of this size."""
        scale = (draw.size[0] / width, draw.size[1] / height)
        if self.compat == 'reference':
            scale = (draw.scale, draw.scale)
        return image_augmentation(scale, draw.crop, self.final_dim, draw.flip, draw.degrees)

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        if data.get('img') is None:
            return data
        images, matrices = [], []
        before = data.get('img_aug_matrix') or [np.eye(4)] * len(data['img'])
        for image, earlier in zip(data['img'], before):
            width, height = _size(image)
            draw = self.draw(width, height)
            images.append(self.apply(image, draw))
            matrices.append((self.matrix(width, height, draw) @ np.asarray(earlier, np.float64)).astype(np.float32))
        data['img'] = images
        data['img_aug_matrix'] = matrices
        data['img_shape'] = data['pad_shape'] = (self.final_dim[1], self.final_dim[0])
        return data


def _size(image: Any) -> Tuple[int, int]:
    """(W, H) of any form of image."""
    if isinstance(image, (Image.Image, EncodedImage)):
        return image.size
    return image.shape[1], image.shape[0]


@PIPELINES.register_module()
class ImageNormalize:
    """Images to float32 ``(N, 3, H, W)``: ``(x / 255 - mean) / std`` per RGB channel; ``img_norm_cfg`` says what was done.

    Images of different sizes become a list of tensors (3, H, W).

    Args:
        mean, std: per channel, on the 0..1 scale.
        keep_uint8: only reorder to (N, 3, H, W) uint8 and leave the arithmetic to the model, which finds it in ``img_norm_cfg`` of
            the metas and gives the same values: a quarter of the memory to move, and less to compute here.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], keep_uint8: bool = False):
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ValueError(f'ImageNormalize: mean and std are three values for R, G, B with std > 0, got {mean}, {std}')
        if max(mean) > 1:
            raise ValueError(f'ImageNormalize: mean and std are on the 0..1 scale, got mean {list(mean)}; divide by 255')
        self.mean = tuple(float(m) for m in mean)
        self.std = tuple(float(s) for s in std)
        self.keep_uint8 = keep_uint8
        levels = torch.arange(256, dtype=torch.float32).div_(255)
        # What each of the 256 levels becomes, per channel.
        self.table = levels.sub(torch.tensor(self.mean)[:, None]).div_(torch.tensor(self.std)[:, None]).numpy()

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        if data.get('img') is None:
            return data
        arrays = [as_rgb_array(image) for image in data['img']]
        for array in arrays:
            if array.dtype != np.uint8:
                raise TypeError(f'ImageNormalize: expected uint8 images, got {array.dtype}; is it in the pipeline twice?')
        if len({array.shape for array in arrays}) == 1:
            data['img'] = self._planes(arrays)
        else:
            data['img'] = [self._planes([array])[0] for array in arrays]
        data['img_norm_cfg'] = dict(mean=self.mean, std=self.std, to_rgb=True, applied=not self.keep_uint8)
        return data

    def _planes(self, arrays: List[np.ndarray]) -> torch.Tensor:
        height, width = arrays[0].shape[:2]
        planes = np.empty((len(arrays), 3, height, width), np.uint8 if self.keep_uint8 else np.float32)
        for array, image in zip(arrays, planes):
            array = np.ascontiguousarray(array)
            for channel, plane in enumerate(image):
                if self.keep_uint8:
                    cv2.extractChannel(array, channel, dst=plane)
                else:
                    cv2.LUT(cv2.extractChannel(array, channel), self.table[channel], dst=plane)
        return torch.from_numpy(planes)


@PIPELINES.register_module()
class GridMask:
    """Blank a regular grid of stripes in all images of a sample (the same mask for each camera).

    Chen et al., "GridMask Data Augmentation" (arXiv:2001.04086). Works on (H, W, 3) arrays before ImageNormalize (blank =
    black) and on (3, H, W) tensors after it (blank = the mean colour; of its nearest 8-bit value if ImageNormalize keeps uint8).
    Every draw comes from numpy's global generator.

    Args:
        use_h, use_w: stripes along the height / the width.
        max_epoch: the probability grows linearly to ``prob`` in this epoch (unless ``fixed_prob``).
        rotate: angles 0 .. rotate - 1 degrees are drawn.
        offset: fill blanks with noise of [-1, 1] instead of zero (after ImageNormalize only).
        ratio: part of the period that one stripe takes (1: random).
        mode: 0 blanks the stripes, 1 keeps only them.
        prob: probability to act.
        fixed_prob: the same probability in every epoch.
    """

    def __init__(self, use_h: bool, use_w: bool, max_epoch: int, rotate: int = 1, offset: bool = False, ratio: float = 0.5,
                 mode: int = 0, prob: float = 1.0, fixed_prob: bool = False):
        if mode not in (0, 1):
            raise ValueError(f'GridMask: mode must be 0 or 1, got {mode!r}')
        self.use_h = use_h
        self.use_w = use_w
        self.max_epoch = max_epoch
        self.rotate = rotate
        self.offset = offset
        self.ratio = ratio
        self.mode = mode
        self.final_prob = prob
        self.prob = prob
        self.fixed_prob = fixed_prob

    def set_epoch(self, epoch: int) -> None:
        """Tell the step the epoch (from 0), for the growing probability."""
        if not self.fixed_prob:
            self.prob = self.final_prob * min(1.0, epoch / max(1, self.max_epoch))

    def mask(self, height: int, width: int) -> np.ndarray:
        """A drawn ``(H, W)`` uint8 mask, 0 where to blank."""
        padded_height, padded_width = int(1.5 * height), int(1.5 * width)  # room to rotate
        period = np.random.randint(2, max(3, min(height, width)))
        if self.ratio == 1:
            stripe = np.random.randint(1, period)
        else:
            stripe = min(max(int(period * self.ratio + 0.5), 1), period - 1)
        mask = np.ones((padded_height, padded_width), np.uint8)
        start_h, start_w = np.random.randint(period), np.random.randint(period)
        if self.use_h:
            mask[(np.arange(padded_height) - start_h) % period < stripe] = 0
        if self.use_w:
            mask[:, (np.arange(padded_width) - start_w) % period < stripe] = 0
        degrees = np.random.randint(max(1, self.rotate))
        if degrees:
            mask = np.asarray(Image.fromarray(mask).rotate(degrees))
        top, left = (padded_height - height) // 2, (padded_width - width) // 2
        mask = mask[top:top + height, left:left + width]
        return 1 - mask if self.mode == 1 else mask

    @staticmethod
    def _mean_colour(data: Dict[str, Any], keep: torch.Tensor) -> torch.Tensor:
        """(3, H, W) uint8: the mean colour where ``keep`` is 0."""
        mean = torch.tensor(data['img_norm_cfg']['mean']).mul(255).round().to(torch.uint8)
        return mean.view(3, 1, 1) * (1 - keep)

    def __call__(self, data: Dict[str, Any]) -> Dict[str, Any]:
        if data.get('img') is None or np.random.rand() >= self.prob:
            return data
        first = data['img'][0]
        channels_first = isinstance(first, torch.Tensor)
        if not channels_first:
            data['img'] = [as_rgb_array(image) for image in data['img']]
            first = data['img'][0]
        height, width = first.shape[1:] if channels_first else first.shape[:2]
        mask = self.mask(height, width)
        noise = None
        if self.offset:
            if not channels_first:
                raise ValueError('GridMask: offset=True fills with noise around zero; put it after ImageNormalize')
            if first.dtype == torch.uint8:
                raise ValueError('GridMask: offset=True fills with noise around zero, which 8-bit images cannot hold; set '
                                 'keep_uint8 of ImageNormalize to false')
            noise = torch.from_numpy(2 * (np.random.rand(height, width) - 0.5) * (1 - mask)).to(first.dtype)
        if channels_first:
            keep = torch.from_numpy(np.ascontiguousarray(mask))
            blank = self._mean_colour(data, keep) if first.dtype == torch.uint8 else 0 if noise is None else noise
            images = [image * keep.to(image.dtype) + blank for image in data['img']]
            data['img'] = torch.stack(images) if isinstance(data['img'], torch.Tensor) else images
        else:
            data['img'] = [image * mask[:, :, None].astype(image.dtype) for image in data['img']]
        return data
