"""Camera images from files, and the resampling of the part of them that an augmentation keeps."""
from __future__ import annotations

import io
import os
from typing import Any, Optional, Tuple, Union

import cv2
import numpy as np
import torch
from PIL import Image

# Whole JPEG files begin and end with these markers.
JPEG_BEGIN, JPEG_END = b'\xff\xd8', b'\xff\xd9'
# libjpeg-turbo can decode to a half, a quarter or an eighth of the size, which skips most of the inverse transform.
REDUCED = {1: cv2.IMREAD_COLOR, 2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4, 8: cv2.IMREAD_REDUCED_COLOR_8}
MOST_PIXELS = 2 ** 27  # of a JPEG file; OpenCV would ask for whatever memory a damaged header names
# What Pillow raises for files that are damaged.
DAMAGED = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
BICUBIC_REACH = 2.0  # pixels of the coarser of the two grids


def read_image(path: str) -> np.ndarray:
    """The decoded image, ``(H, W, 3)`` uint8 RGB.

    JPEG files go through OpenCV's libjpeg-turbo (the pixels are those that Pillow gives), all others through Pillow, and so do
    JPEG files that are cut off: OpenCV would fill what is missing with grey.

    Raises:
        FileNotFoundError: if there is no such file.
        OSError: if it cannot be decoded to the end; the message names the file and its size.
    """
    return np.asarray(open_image(path))


class EncodedImage:
    """A whole JPEG file in memory, decoded when its pixels are asked for.

    Attributes:
        path: of the file. size: (W, H) in pixels.
    """

    def __init__(self, content: np.ndarray, path: str, size: Tuple[int, int]):
        self._content, self.path, self.size = content, path, size

    def at_least(self, size: Tuple[int, int]) -> Tuple[np.ndarray, int]:
        """The smallest decoded image (H, W, 3) that is not smaller than ``size`` (W, H), and its factor of reduction.

        A pixel of it covers factor x factor pixels of the file, the last row and column possibly less.
        """
        factor = max(f for f in REDUCED if f == 1 or (self.size[0] >= f * size[0] and self.size[1] >= f * size[1]))
        return _decode(self._content, self.path, factor), factor

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> np.ndarray:
        return np.asarray(_decode(self._content, self.path), dtype=dtype)


def open_image(path: str) -> Union[EncodedImage, np.ndarray]:
    """A whole JPEG file undecoded; any other image decoded as by :func:`read_image`, with the same errors."""
    content = _content(path)
    if not _is_whole_jpeg(content):
        return _decode(content, path)
    try:
        with Image.open(io.BytesIO(content)) as image:  # reads the header
            width, height = image.size
        if width * height > MOST_PIXELS:
            raise ValueError(f'its header says {width} x {height} pixels')
        return EncodedImage(content, path, (width, height))
    except DAMAGED as error:
        raise _damaged(content, path, error) from error


def resample(image: np.ndarray, step: Tuple[float, float], corner: Tuple[int, int], size: Tuple[int, int]) -> np.ndarray:
    """A part of the resized image, ``(h, w, 3)`` uint8, without the rest being computed.

    Pillow's bicubic filter with its antialiasing, as torch has it for 8-bit images in vector instructions: equal to one grey level
    (weights of 16 bits), several times faster.

    Args:
        image: (H, W, 3) uint8.
        step: pixels of ``image`` per new pixel along x and y.
        corner: (left, top) of the part in the resized image; the part must lie inside.
        size: (w, h) of the part.
    """
    (step_x, step_y), (left, top), (width, height) = step, corner, size
    rows = image.shape[0]
    reach = BICUBIC_REACH * max(step_y, 1.0)
    first = max(0, int((top + 0.5) * step_y - reach) - 1)
    last = min(rows, int((top + height - 0.5) * step_y + reach) + 2)
    # The public interpolate() cannot take a scale and a size, so its operator is called: new pixels are then counted from the
    # image's corner, whatever is left out behind. Rows before the first needed one are not filled and not used.
    operator = torch.ops.aten._upsample_bicubic2d_aa
    needed = image[first:last]
    source = torch.from_numpy(needed if needed.flags.writeable else needed.copy()).permute(2, 0, 1)[None]
    # Where an axis has as many pixels afterwards as before, torch copies it, whatever the scale: then one more is asked for.
    columns = left + width + (left + width == image.shape[1])
    wide = torch.empty((1, last, columns, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    operator.out(source, [last - first, columns], False, None, 1 / step_x, out=wide[:, :, first:])
    done = operator(wide, [top + height + (top + height == last), columns], False, 1 / step_y, None)
    return done[0, :, top:top + height, left:left + width].permute(1, 2, 0).numpy()


def _content(path: str) -> np.ndarray:
    try:
        return np.fromfile(path, dtype=np.uint8)
    except FileNotFoundError:
        raise FileNotFoundError(f'image {path!r} does not exist; check dataset_root and that all blobs are unpacked') from None


def _is_whole_jpeg(content: np.ndarray) -> bool:
    return len(content) > 4 and content[:2].tobytes() == JPEG_BEGIN and content[-2:].tobytes() == JPEG_END


def _decode(content: np.ndarray, path: str, factor: int = 1) -> np.ndarray:
    if _is_whole_jpeg(content):
        image = cv2.imdecode(content, REDUCED[factor] | cv2.IMREAD_IGNORE_ORIENTATION)
        if image is not None:
            return cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)
    try:
        with Image.open(io.BytesIO(content)) as image:
            return np.array(image.convert('RGB').reduce(factor))
    except DAMAGED as error:
        raise _damaged(content, path, error) from error


def _damaged(content: np.ndarray, path: str, error: Exception) -> OSError:
    size = os.path.getsize(path) if os.path.isfile(path) else len(content)
    return OSError(f'image {path!r} ({size} bytes) cannot be decoded: {error}. The file is damaged or cut off; copy it again')
