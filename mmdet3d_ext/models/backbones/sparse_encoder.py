"""Sparse 3-D convolution encoder of the LiDAR branch.

Letters: V occupied voxels, B batch, C channels, X/Y/Z cells. Voxel coordinates are (batch, x, y, z).
"""
from __future__ import annotations

import contextlib
from typing import Optional, Sequence, Tuple, Union

import torch
from mmcv.utils import to_ntuple
from torch import nn

from ...geometry.on_device import upload
from ...registry import MODELS
from .sparse_layers import allow_tf32, conv_unit, sparse

# Below this many voxels a batch may leave a layer without any site, or a norm layer with a single value: then a helper
# sample is added (see SparseEncoder.forward). Real batches hold tens of thousands.
FEW_VOXELS = 64

_triple = to_ntuple(3)


def conv_output_shape(shape: Sequence[int], kernel, stride, padding) -> Tuple[int, ...]:
    """Cells along each axis after a convolution."""
    return tuple((n + 2 * p - k) // s + 1 for n, k, s, p in
                 zip(shape, _triple(kernel), _triple(stride), _triple(padding), strict=True))


@MODELS.register_module()
class SparseEncoder(nn.Module):
    """Voxels -> BEV map, with all axes in (x, y, z) order.

    Structure and parameter names are those of BEVFusion checkpoints: ``conv_input``, ``encoder_layers.encoder_layer<i>``
    and ``conv_out`` (kernel (1, 1, 3), stride (1, 1, 2), works on z). The remaining z cells are folded into channels:
    channel index = ``c * Z + z``.

    Args:
        in_channels: features per voxel.
        sparse_shape: cells along (x, y, z). z usually has one cell more than the voxel grid.
        order: order of convolution, norm and activation; pre-activation if it does not start with ``conv``.
        norm_cfg: norm layer (default: BN1d, eps 1e-3, momentum 0.01, as in SECOND).
        base_channels, output_channels: channels after ``conv_input`` and after ``conv_out``.
        encoder_channels: channels of each block, per stage.
        encoder_paddings: padding of each block, per stage; one number or one per (x, y, z). Submanifold convolutions
            ignore it: they always pad by half the kernel.
        block_type: ``conv_module`` (each stage but the first starts with a strided convolution) or ``basicblock``
            (residual blocks; each stage but the last ends with a strided convolution).
        fp16: let autocast run the convolutions in half precision. Default: off, everything is float32 under AMP.
    """

    def __init__(self, in_channels: int, sparse_shape: Sequence[int], order: Sequence[str] = ('conv', 'norm', 'act'),
                 norm_cfg: Optional[dict] = None, base_channels: int = 16, output_channels: int = 128,
                 encoder_channels: Sequence[Sequence[int]] = ((16, ), (32, 32, 32), (64, 64, 64), (64, 64, 64)),
                 encoder_paddings: Sequence[Sequence[Union[int, Sequence[int]]]] = ((1, ), (1, 1, 1), (1, 1, 1),
                                                                                    ((1, 1, 0), 1, 1)),
                 block_type: str = 'conv_module', fp16: bool = False):
        super().__init__()
        if block_type not in ('conv_module', 'basicblock'):
            raise ValueError(f"SparseEncoder: block_type must be 'conv_module' or 'basicblock', got {block_type!r}")
        if sorted(order) != ['act', 'conv', 'norm']:
            raise ValueError(f"SparseEncoder: order must be a permutation of ('conv', 'norm', 'act'), got {order!r}")
        if len(sparse_shape) != 3:
            raise ValueError(f'SparseEncoder: sparse_shape must be cells along (x, y, z), got {sparse_shape!r}')
        self.in_channels = in_channels
        self.sparse_shape = tuple(int(n) for n in sparse_shape)
        self.order = tuple(order)
        self.norm_cfg = dict(norm_cfg or {'type': 'BN1d', 'eps': 1e-3, 'momentum': 0.01})
        self.fp16 = fp16

        first = self.order if self.order[0] == 'conv' else ('conv', )
        self.conv_input = conv_unit('SubMConv3d', in_channels, base_channels, 3, self.norm_cfg, first, 'subm1')
        shape, channels = self.sparse_shape, base_channels
        self.encoder_layers = sparse().Sequential()
        for stage, (widths, paddings) in enumerate(zip(encoder_channels, encoder_paddings, strict=True)):
            blocks = []
            for j, (width, padding) in enumerate(zip(widths, paddings, strict=True)):
                if block_type == 'basicblock':
                    strided = j == len(widths) - 1 and stage != len(encoder_channels) - 1
                else:
                    strided = j == 0 and stage != 0
                if strided:
                    blocks.append(conv_unit('SparseConv3d', channels, width, 3, self.norm_cfg, self.order,
                                            f'spconv{stage + 1}', stride=2, padding=_triple(padding)))
                    shape = conv_output_shape(shape, 3, 2, padding)
                elif block_type == 'basicblock':
                    if width != channels:
                        first = '; or set base_channels' if stage == j == 0 else ''
                        raise ValueError(f'SparseEncoder: encoder_channels[{stage}][{j}] = {width}, but a residual block '
                                         f'keeps its {channels} input channels{first}')
                    blocks.append(sparse().Block(width, self.norm_cfg, f'subm{stage + 1}'))
                else:
                    blocks.append(conv_unit('SubMConv3d', channels, width, 3, self.norm_cfg, self.order,
                                            f'subm{stage + 1}m'))
                channels = width
            self.encoder_layers.add_module(f'encoder_layer{stage + 1}', sparse().Sequential(*blocks))
        self.conv_out = conv_unit('SparseConv3d', channels, output_channels, (1, 1, 3), self.norm_cfg, self.order,
                                  'spconv_out', stride=(1, 1, 2))
        self.output_shape = conv_output_shape(shape, (1, 1, 3), (1, 1, 2), 0)
        if min(self.output_shape) < 1:
            raise ValueError(f'SparseEncoder: sparse_shape {self.sparse_shape} is too small, nothing is left after the '
                             f'strides: {self.output_shape}')
        self.out_channels = output_channels * self.output_shape[2]

    @property
    def bev_shape(self) -> Tuple[int, int]:
        """(X, Y) cells of the BEV map."""
        return self.output_shape[:2]

    def forward(self, voxel_features: torch.Tensor, coords: torch.Tensor, batch_size: int, sizes=None) -> torch.Tensor:
        """Encode a batch.

        Args:
            voxel_features: (V, in_channels).
            coords: (V, 4) integers (batch, x, y, z). V may be 0, and samples may have no voxel.
            batch_size: number of samples; never derived from ``coords``.
            sizes: points per voxel, not used.

        Returns:
            (batch_size, output_channels * Z', X', Y'), zero where no voxel reaches.
        """
        device = voxel_features.device
        with contextlib.nullcontext() if self.fp16 else torch.autocast(device.type, enabled=False):
            features, coords = voxel_features.float(), coords.int()
            samples = batch_size
            if len(coords) < FEW_VOXELS:
                # Norm layers and spconv cannot work on (almost) nothing, and skipping the layers would leave parameters
                # without gradients and ranks out of step. A helper sample behind the last one keeps every layer
                # busy; it is cut off the result, so the real samples are the same as without it.
                features, coords = self._with_helper_sample(features, coords, batch_size)
                samples += 1
            allow_tf32(torch.backends.cuda.matmul.allow_tf32)  # they are matrix products
            x = sparse().Tensor(features.contiguous(), coords.contiguous(), list(self.sparse_shape), samples)
            x = self.conv_input(x)
            x = self.encoder_layers(x)
            x = self.conv_out(x).dense()[:batch_size]  # (B, C, X, Y, Z)
        x = x.permute(0, 1, 4, 2, 3)
        return x.flatten(1, 2).contiguous()  # (B, C * Z, X, Y)

    def _with_helper_sample(self, features: torch.Tensor, coords: torch.Tensor, batch_size: int):
        """Append two full z columns of zero features as sample ``batch_size``, far enough apart to stay two sites."""
        nx, ny, nz = self.sparse_shape
        columns = sorted({(nx // 4, ny // 4), ((3 * nx) // 4, (3 * ny) // 4)})
        helper = torch.tensor([(batch_size, x, y, z) for x, y in columns for z in range(nz)], dtype=coords.dtype)
        zeros = features.new_zeros(len(helper), features.shape[1])
        return torch.cat([features, zeros]), torch.cat([coords, upload(helper, coords.device)])
