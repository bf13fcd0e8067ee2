"""Camera images that arrive as bytes."""
from __future__ import annotations

from typing import Mapping, Sequence

import torch

from ...geometry.on_device import constant


def normalised(img: torch.Tensor, metas: Sequence[Mapping]) -> torch.Tensor:
    """``img`` (B, N, 3, H, W) as float32: uint8 images are normalised on their device, float ones are returned as they are.

    The pipeline's ImageNormalize leaves bytes with ``keep_uint8`` and says in ``img_norm_cfg`` what it left out:
    ``(x / 255 - mean) / std`` per channel.

    Raises:
        ValueError: for uint8 images without ``img_norm_cfg`` in the metas.
    """
    if img.dtype != torch.uint8:
        return img
    settings = metas[0].get('img_norm_cfg') if metas else None
    if settings is None:
        raise ValueError("img is uint8 and the metas do not say how to normalise it; add 'img_norm_cfg' to meta_lis_keys of "
                         'Collect3D, or set keep_uint8 of ImageNormalize to false')
    img = img.float()
    mean, std = (constant(settings[name], img).view(3, 1, 1) for name in ('mean', 'std'))
    return img.div_(255).sub_(mean).div_(std)
