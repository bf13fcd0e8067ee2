"""What layers do to a map's cells and channels, from their configuration alone: no module is built.

A function returns None for what it does not know (another type, a missing argument); what follows is then not checked.
Letters: X/Y cells, H/W image features, C channels.
"""
from __future__ import annotations

from typing import Any, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..models.backbones.sparse_encoder import conv_output_shape

RESNET_EXPANSION = {18: 1, 34: 1, 50: 4, 101: 4, 152: 4}


class Map(NamedTuple):
    """Channels and the two sizes of a feature map."""

    channels: Optional[int]
    size: Tuple[int, int]


class Misfit(ValueError):
    """Two parts that cannot work together: ``argument`` (dotted, below the part) should be ``write``."""

    def __init__(self, argument: str, problem: str, write: Any = None):
        super().__init__(problem)
        self.argument, self.problem, self.write = argument, problem, write


def sparse_encoder(cfg: Mapping[str, Any]) -> Optional[Map]:
    """SparseEncoder: its BEV map; z cells are folded into channels (mirrors ``models/backbones/sparse_encoder.py``)."""
    shape = list(cfg.get('sparse_shape') or ())
    channels, paddings = cfg.get('encoder_channels'), cfg.get('encoder_paddings')
    if len(shape) != 3 or channels is None or paddings is None:
        return None
    if [len(c) for c in channels] != [len(p) for p in paddings]:
        raise Misfit('encoder_paddings', f'has {[len(p) for p in paddings]} entries per stage, encoder_channels '
                                         f'{[len(c) for c in channels]}')
    basic = cfg.get('block_type', 'conv_module') == 'basicblock'
    for stage, padding in enumerate(paddings):
        for j, pad in enumerate(padding):
            if (j == len(padding) - 1 and stage != len(paddings) - 1) if basic else (j == 0 and stage != 0):
                shape = conv_output_shape(shape, 3, 2, pad)
    shape = conv_output_shape(shape, (1, 1, 3), (1, 1, 2), 0)
    if min(shape) < 1:
        raise Misfit('sparse_shape', f'{list(cfg["sparse_shape"])} is too small: nothing is left after the strides')
    return Map(cfg.get('output_channels', 128) * shape[2], (shape[0], shape[1]))


def point_stride(cfg: Mapping[str, Any]) -> int:
    """Voxels per cell of a point encoder's BEV map."""
    return 2 ** (len(cfg.get('encoder_channels') or [()]) - 1) if cfg.get('type') == 'SparseEncoder' else 1


def pillars(cfg: Mapping[str, Any]) -> Optional[Map]:
    """PointPillarsEncoder, RadarEncoder: the canvas that pillars are put on."""
    scatter = cfg.get('pts_middle_encoder') or {}
    shape = scatter.get('output_shape')
    if cfg.get('pts_bev_encoder') is not None or shape is None:
        return None
    widths = (cfg.get('pts_voxel_encoder') or {}).get('feat_channels')
    channels = scatter.get('in_channels', 64)
    if widths and widths[-1] != channels:
        raise Misfit('pts_middle_encoder.in_channels', f'is {channels}, pts_voxel_encoder.feat_channels ends with {widths[-1]}',
                     widths[-1])
    return Map(channels, (int(shape[0]), int(shape[1])))


def point_encoder(cfg: Mapping[str, Any]) -> Optional[Map]:
    """A LiDAR or radar backbone."""
    kind = cfg.get('type')
    if kind == 'SparseEncoder':
        return sparse_encoder(cfg)
    return pillars(cfg) if kind in ('PointPillarsEncoder', 'RadarEncoder') else None


def image_levels(cfg: Mapping[str, Any], size: Sequence[int]) -> Optional[List[Map]]:
    """An image backbone's outputs, finest first."""
    kind = cfg.get('type')
    if kind == 'SwinTransformer':
        depths = cfg.get('depths', (2, 2, 6, 2))
        strides = list(cfg.get('strides', (4, 2, 2, 2)))
        indices, width, stride, found = cfg.get('out_indices', (0, 1, 2, 3)), cfg.get('embed_dims', 96), 1, []
        for index in range(len(depths)):
            stride *= strides[index]
            found.append(Map(width * 2 ** index, tuple(-(-n // stride) for n in size)))
        return [found[i] for i in indices] if max(indices) < len(found) else None
    if kind == 'ResNet' and cfg.get('depth') in RESNET_EXPANSION:
        stages, base = cfg.get('num_stages', 4), cfg.get('base_channels', 64)
        strides, indices = list(cfg.get('strides', (1, 2, 2, 2))), cfg.get('out_indices', (0, 1, 2, 3))
        size = tuple((n + 3) // 4 for n in size)  # stem and max pooling, each halving upwards
        found = []
        for index in range(stages):
            size = tuple(-(-n // strides[index]) for n in size)
            found.append(Map(base * 2 ** index * RESNET_EXPANSION[cfg['depth']], size))
        return [found[i] for i in indices] if max(indices) < stages else None
    return None


def _same_channels(cfg: Mapping[str, Any], levels: Sequence[Map], argument: str = 'in_channels') -> None:
    """Raise :class:`Misfit` unless ``cfg[argument]`` are the channels of ``levels``."""
    expected = [level.channels for level in levels]
    found = cfg.get(argument)
    if found is not None and None not in expected and list(found) != expected:
        raise Misfit(argument, f'is {list(found)}, the part before it gives {expected} channels', expected)


def neck(cfg: Optional[Mapping[str, Any]], levels: Optional[Sequence[Map]]) -> Optional[List[Map]]:
    """A neck's outputs. Without one (None) the levels pass.

    Raises:
        Misfit: if its ``in_channels`` are not the levels' or its levels end on different cells.
    """
    if cfg is None or levels is None:
        return None if levels is None else list(levels)
    kind = cfg.get('type')
    if kind == 'GeneralizedLSSFPN':
        _same_channels(cfg, levels)
        start, end = cfg.get('start_level', 0), cfg.get('end_level', -1)
        last = len(levels) - 1 if end == -1 else end
        return [Map(cfg.get('out_channels'), level.size) for level in levels[start:last]]
    if kind == 'SECONDFPN':
        _same_channels(cfg, levels)
        strides, widths = list(cfg.get('upsample_strides', ())), list(cfg.get('out_channels', ()))
        if not len(strides) == len(widths) == len(levels):
            raise Misfit('upsample_strides', f'in_channels, out_channels and upsample_strides must have {len(levels)} entries')
        sizes = [tuple(int(n * s) if s >= 1 else n // round(1 / s) for n in level.size) for s, level in zip(strides, levels)]
        if len(set(sizes)) > 1:
            fitting = [_plain(sizes[0][0] / level.size[0]) for level in levels]
            raise Misfit('upsample_strides', f'{strides} bring the levels {[level.size for level in levels]} to different cells '
                                             f'{sizes}', fitting)
        return [Map(sum(widths), sizes[0])]
    if kind == 'LSSFPN':
        chosen = [levels[i] for i in cfg.get('in_indices', ()) if -len(levels) <= i < len(levels)]
        if len(chosen) != 2:
            raise Misfit('in_indices', f'must name two of the {len(levels)} levels, got {cfg.get("in_indices")}')
        _same_channels(cfg, chosen)
        factor = cfg.get('scale_factor', 1)
        return [Map(cfg.get('out_channels'), tuple(int(n * factor) for n in chosen[1].size))]
    return None


def _plain(value: float) -> Any:
    return int(value) if float(value).is_integer() else value


def bev_levels(cfg: Mapping[str, Any], x: Map) -> Optional[List[Map]]:
    """A BEV backbone's outputs for the fused map ``x``.

    Raises:
        Misfit: if its ``in_channels`` are not those of ``x``.
    """
    kind = cfg.get('type')
    if kind not in ('SECOND', 'GeneralizedResNet'):
        return None
    found = cfg.get('in_channels')
    if found is not None and x.channels is not None and found != x.channels:
        raise Misfit('in_channels', f'is {found}, the part before it gives {x.channels} channels', x.channels)
    if kind == 'SECOND':
        steps = list(zip(cfg.get('out_channels', (128, 128, 256)), cfg.get('layer_strides', (2, 2, 2))))
    else:
        steps = [(spec[1], spec[2]) for spec in cfg.get('blocks', ())]
    levels, size = [], x.size
    for channels, stride in steps:
        size = tuple(-(-n // stride) for n in size)
        levels.append(Map(channels, size))
    return levels
