"""Small convolutional branches, one per regressed quantity, on a feature map (2-D) or on a list of queries (1-D)."""
from __future__ import annotations

from typing import Dict, Mapping, Optional, Sequence

from mmcv.cnn import ConvModule, build_conv_layer
from mmcv.runner import BaseModule
from torch import Tensor, nn

from ....registry import MODELS


@MODELS.register_module()
class SeparateHead(BaseModule):
    """One branch of ``num_conv`` convolutions for each entry of ``heads``; parameters are called
    ``<entry>.<index>...``.

    Args:
        in_channels: C of the input.
        heads: entry name -> (output channels, number of convolutions), e.g. ``{'reg': (2, 2), 'heatmap': (10, 2)}``.
        head_conv: channels between the convolutions.
        final_kernel: kernel size of every convolution (the reference's name for it).
        init_bias: initial bias of the ``heatmap`` branch; -2.19 makes sigmoid(-2.19) = 0.1, the prior of CenterNet.
        conv_cfg, norm_cfg, bias: as in ``mmcv.cnn.ConvModule``.
    """

    def __init__(self, in_channels: int, heads: Mapping[str, Sequence[int]], head_conv: int = 64, final_kernel: int = 1,
                 init_bias: float = -2.19, conv_cfg: Optional[dict] = None, norm_cfg: Optional[dict] = None,
                 bias='auto', init_cfg: Optional[dict] = None):
        super().__init__(init_cfg)
        conv_cfg = dict(conv_cfg or dict(type='Conv2d'))
        norm_cfg = dict(norm_cfg or dict(type='BN2d'))
        self.entries = list(heads)
        self.init_bias = init_bias
        for name, (out_channels, num_conv) in heads.items():
            if num_conv < 1:
                raise ValueError(f'heads.{name}: needs at least one convolution, got {num_conv}')
            layers, channels = [], in_channels
            for _ in range(num_conv - 1):
                layers.append(ConvModule(channels, head_conv, final_kernel, padding=final_kernel // 2, bias=bias,
                                         conv_cfg=conv_cfg, norm_cfg=norm_cfg))
                channels = head_conv
            layers.append(build_conv_layer(conv_cfg, channels, out_channels, final_kernel, padding=final_kernel // 2))
            setattr(self, name, nn.Sequential(*layers))
        self._reset()

    def init_weights(self) -> None:
        """The last layers anew: weights scaled by their fan-in, zero biases, ``init_bias`` for the heatmap.

        The reference scales by the fan-out, which for one or two output channels makes logits so large that the prior is lost.
        """
        super().init_weights()
        self._reset()

    def _reset(self) -> None:
        for name in self.entries:
            last = getattr(self, name)[-1]
            last.reset_parameters()
            nn.init.constant_(last.bias, self.init_bias if name == 'heatmap' else 0.0)

    def forward(self, x: Tensor) -> Dict[str, Tensor]:
        """``x``: (B, C, X, Y) or (B, C, P) -> entry name -> (B, channels, X, Y) or (B, channels, P)."""
        return {name: getattr(self, name)(x) for name in self.entries}
