"""TransFusion's detection head (Bai et al. 2022): the best cells of a class heatmap become queries of a transformer decoder.

Letters: B batch, C classes, P proposals (queries) per layer, L decoder layers, X, Y map cells, G boxes of a sample.
"""
from __future__ import annotations

import logging
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from mmcv.cnn import ConvModule, build_conv_layer
from mmcv.runner import BaseModule
from torch import Tensor, nn

from ....geometry.on_device import Arriving, constant
from ....over_ranks import count_over_ranks
from ....registry import BBOX_ASSIGNERS, BBOX_CODERS, MODELS
from .assigner import layer_slices
from .head_grid import (
    GroundTruth,
    box_class,
    check_feature_map,
    check_frame,
    check_keys,
    clipped_sigmoid,
    collect_ground_truth,
    map_shape,
    sample_metas,
    single_level,
    target_heatmap,
)
from .legacy import STATE_VERSION
from .separate_head import SeparateHead
from .suppression import circle_nms, rotated_nms
from .transformer import TransformerDecoderLayer

# What a data set implies: its number of classes and the usual index of those that are treated apart; which of them skip
# the local-maximum test on the heatmap (small objects stand closer together than one kernel); suppression radii where
# there are any.
_DATASETS = {
    'nuscenes': dict(num_classes=10, index=dict(pedestrian=8, traffic_cone=9), small=('pedestrian', 'traffic_cone'),
                     radius=dict(pedestrian=0.175, traffic_cone=0.175)),
    'waymo': dict(num_classes=3, index=dict(Car=0, Pedestrian=1, Cyclist=2), small=('Pedestrian', 'Cyclist'),
                  radius=dict(Car=0.7, Pedestrian=0.7, Cyclist=0.7)),
}

_LOGGER = logging.getLogger('mmdet3d_ext.models.heads.bbox')
_REGRESSED = ('center', 'height', 'dim', 'rot', 'vel')
_TRAIN_KEYS = dict(required=('point_cloud_range', 'grid_size', 'voxel_size', 'out_size_factor', 'assigner'),
                   optional=('dataset', 'gaussian_overlap', 'min_radius', 'pos_weight', 'code_weights'))
_TEST_KEYS = dict(required=('grid_size', 'out_size_factor'),
                  optional=('dataset', 'voxel_size', 'pc_range', 'nms_type', 'pre_maxsize', 'post_maxsize', 'pre_max_size',
                            'post_max_size', 'nms_radius'))


class Matching(NamedTuple):
    """A matching that was started: the batch's true boxes; overlaps (B, L*P, G) and the costs on their way to the CPU, None of both
    where no sample has a box."""

    truth: GroundTruth
    overlap: Optional[Tensor] = None
    costs: Optional[Arriving] = None


@MODELS.register_module()
class TransFusionHead(BaseModule):
    """Detection head of TransFusion and BEVFusion.

    ``forward`` gives a dict: ``dense_heatmap`` (B, C, X, Y) logits; ``query_labels`` (B, P) class of each query;
    ``query_heatmap_score`` (B, C, P) heatmap probabilities at the query's cell (0 where the cell is no local maximum);
    and, with all L layers one after the other on the last axis (the last layer last), ``heatmap`` (B, C, L*P) class
    logits, ``center`` (B, 2, L*P) in map cells, ``height`` (B, 1, L*P) metres, ``dim`` (B, 3, L*P) logs of l, w, h,
    ``rot`` (B, 2, L*P) sine and cosine, ``vel`` (B, 2, L*P) m/s. All of them are float32, also under autocast.

    Args:
        num_proposals: P.
        auxiliary: supervise every decoder layer. Must stay true with more than one layer: nothing else would train the
            inner ones.
        in_channels, hidden_channel: channels of the BEV map and of the queries.
        num_classes: C.
        num_decoder_layers, num_heads, ffn_channel, dropout, activation: the transformer decoder.
        nms_kernel_size: a cell becomes a query if it is the largest of this (odd) neighbourhood; 1 takes any cell.
        bn_momentum: of every batch norm in the head.
        common_heads: regressed quantity -> (channels, convolutions): center, height, dim, rot and optionally vel.
        num_heatmap_convs, conv_cfg, norm_cfg, bias: of the prediction branches.
        loss_cls: on class logits; needs ``use_sigmoid: true``. loss_bbox, loss_heatmap: as mmdet names them.
        train_cfg: point_cloud_range, grid_size, voxel_size, out_size_factor, assigner; gaussian_overlap (0.1),
            min_radius (2), pos_weight (-1: 1), code_weights (all 1). Only needed for training.
        test_cfg: grid_size, out_size_factor; dataset; nms_type (null, circle, rotate), pre_maxsize, post_maxsize,
            nms_radius {class name or index: metres for circle, IoU for rotate} (default: what ``dataset`` implies).
        bbox_coder: see :class:`TransFusionBBoxCoder`.
        class_names: the C class names; small classes and suppression radii are then found by name. Without it
            ``dataset`` with its usual number of classes is assumed to have its usual order (nuScenes: 8 pedestrian, 9
            traffic cone).
        no_local_max_classes: names or indices of the classes that skip the local-maximum test (default: what
            ``dataset`` implies).
        init_bias: initial bias of class logits and of the dense heatmap; -2.19 is a prior of 0.1.
        compat: ``'reference'`` keeps what numbers of the reference depend on: border cells never become queries; class
            and box losses are divided by the matches of *all* layers, and all losses by the counts of this rank, not those
            over all ranks; circle suppression compares the squared distance and keeps 83 boxes per class; a score
            threshold of 0.0 filters nothing; boxes up to one cell below the map's lower bounds are drawn in its first cells.

    Raises:
        KeyError, ValueError: for configurations that cannot work; the message names the key.
    """

    _version = STATE_VERSION
    #: Entries of :meth:`loss` that are reported but not minimised.
    statistics = ('matched_ious',)

    def __init__(self, num_proposals: int = 128, auxiliary: bool = True, in_channels: int = 384, hidden_channel: int = 128,
                 num_classes: int = 4, num_decoder_layers: int = 3, num_heads: int = 8, nms_kernel_size: int = 1,
                 ffn_channel: int = 256, dropout: float = 0.1, bn_momentum: float = 0.1, activation: str = 'relu',
                 common_heads: Optional[Mapping[str, Sequence[int]]] = None, num_heatmap_convs: int = 2,
                 conv_cfg: Optional[dict] = None, norm_cfg: Optional[dict] = None, bias: Union[bool, str] = 'auto',
                 loss_cls: Optional[dict] = None, loss_bbox: Optional[dict] = None, loss_heatmap: Optional[dict] = None,
                 train_cfg: Optional[Mapping[str, Any]] = None, test_cfg: Optional[Mapping[str, Any]] = None,
                 bbox_coder: Optional[dict] = None, class_names: Optional[Sequence[str]] = None,
                 no_local_max_classes: Optional[Sequence[Union[int, str]]] = None, init_bias: float = -2.19,
                 compat: Optional[str] = None, init_cfg: Optional[dict] = None):
        super().__init__(init_cfg)
        loss_cls = dict(loss_cls or dict(type='FocalLoss', use_sigmoid=True, gamma=2.0, alpha=0.25))
        self._check(num_decoder_layers, auxiliary, nms_kernel_size, loss_cls, common_heads, class_names, num_classes,
                    bbox_coder)
        self.num_proposals = num_proposals
        self.auxiliary = auxiliary
        self.num_classes = num_classes
        self.num_decoder_layers = num_decoder_layers
        self.nms_kernel_size = nms_kernel_size
        self.bn_momentum = bn_momentum
        self.init_bias = init_bias
        self.compat = compat
        self.class_names = None if class_names is None else list(class_names)
        self.regressed = [name for name in _REGRESSED if name in common_heads]
        self._configure(train_cfg, test_cfg, bbox_coder, no_local_max_classes)

        self.loss_cls = MODELS.build(loss_cls)
        self.loss_bbox = MODELS.build(loss_bbox or dict(type='L1Loss', reduction='mean'))
        self.loss_heatmap = MODELS.build(loss_heatmap or dict(type='GaussianFocalLoss', reduction='mean'))

        self.shared_conv = nn.Conv2d(in_channels, hidden_channel, 3, padding=1, bias=bool(bias))
        self.heatmap_head = nn.Sequential(
            ConvModule(hidden_channel, hidden_channel, 3, padding=1, bias=bias, norm_cfg=dict(type='BN2d')),
            build_conv_layer(dict(type='Conv2d'), hidden_channel, num_classes, 3, padding=1, bias=True))
        self.class_encoding = nn.Conv1d(num_classes, hidden_channel, 1)
        self.decoder = nn.ModuleList(
            TransformerDecoderLayer(hidden_channel, num_heads, ffn_channel, dropout, activation)
            for _ in range(num_decoder_layers))
        branches = dict(common_heads, heatmap=(num_classes, num_heatmap_convs))
        self.prediction_heads = nn.ModuleList(
            SeparateHead(hidden_channel, branches, init_bias=init_bias, conv_cfg=conv_cfg or dict(type='Conv1d'),
                         norm_cfg=norm_cfg or dict(type='BN1d'), bias=bias) for _ in range(num_decoder_layers))
        self._reset()

    @staticmethod
    def _check(layers, auxiliary, kernel, loss_cls, common_heads, class_names, num_classes, bbox_coder) -> None:
        if layers < 1:
            raise ValueError(f'num_decoder_layers: needs at least one, got {layers}')
        if layers > 1 and not auxiliary:
            raise ValueError('auxiliary: must be true with more than one decoder layer: the inner layers place the queries of '
                             'the next one, and nothing else trains them')
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f'nms_kernel_size: must be odd and positive, got {kernel}')
        if not loss_cls.get('use_sigmoid', False):
            raise ValueError('loss_cls: needs use_sigmoid: true (class scores are independent sigmoids)')
        missing = [name for name in _REGRESSED[:4] if name not in (common_heads or {})]
        if missing:
            raise ValueError(f'common_heads: needs {", ".join(_REGRESSED[:4])} (vel is optional), missing {", ".join(missing)}')
        if class_names is not None and len(class_names) != num_classes:
            raise ValueError(f'class_names: num_classes is {num_classes}, got {len(class_names)} names')
        if bbox_coder is None:
            raise ValueError('bbox_coder: is needed (type: TransFusionBBoxCoder)')

    def _configure(self, train_cfg, test_cfg, bbox_coder, no_local_max_classes) -> None:
        """Read the three configuration blocks that decide about the map, the matching and the suppression."""
        if train_cfg is None and test_cfg is None:
            raise ValueError('train_cfg, test_cfg: at least one is needed')
        self.train_cfg, self.test_cfg = train_cfg, dict(test_cfg) if test_cfg is not None else {}
        if train_cfg is not None:
            check_keys(train_cfg, 'train_cfg', **_TRAIN_KEYS)
            self.map_shape = map_shape(train_cfg, 'train_cfg')
            self.bbox_assigner = BBOX_ASSIGNERS.build(train_cfg['assigner'])
        if test_cfg is not None:
            check_keys(test_cfg, 'test_cfg', **_TEST_KEYS)
            if train_cfg is None:
                self.map_shape = map_shape(test_cfg, 'test_cfg')
            elif list(test_cfg['grid_size'][:2]) != list(train_cfg['grid_size'][:2]):
                # The reference's PointPillars configuration leaves another model's grid in its test_cfg.
                _LOGGER.warning('TransFusionHead: test_cfg.grid_size %s is not used; train_cfg.grid_size %s, which fits '
                                'point_cloud_range and voxel_size, is', test_cfg['grid_size'], train_cfg['grid_size'])
        nms_type = self.test_cfg.get('nms_type')
        if nms_type not in (None, 'circle', 'rotate'):
            raise ValueError(f'test_cfg.nms_type: expected null, circle or rotate, got {nms_type!r}')

        extra = dict(compat=self.compat) if self.compat is not None else {}
        self.bbox_coder = BBOX_CODERS.build(bbox_coder, **extra)
        check_frame(self.bbox_coder.frame, train_cfg, test_cfg)
        size = 10 if 'vel' in self.regressed else 8
        if self.bbox_coder.code_size != size:
            raise ValueError(f'bbox_coder.code_size: common_heads regresses {size} numbers, got {self.bbox_coder.code_size}')
        weights = list((train_cfg or {}).get('code_weights') or [1.0] * size)
        if len(weights) != size:
            raise ValueError(f'train_cfg.code_weights: needs {size} numbers, got {len(weights)}')
        self.code_weights = weights

        dataset = str(self.test_cfg.get('dataset') or (train_cfg or {}).get('dataset') or '').lower()
        if no_local_max_classes is None:
            self.no_local_max = list(self._implied(dataset, 'small'))
        else:
            self.no_local_max = [self._class_index(c, 'no_local_max_classes') for c in no_local_max_classes]
        given = self.test_cfg.get('nms_radius')
        if given is None:
            self.nms_radius = self._implied(dataset, 'radius')
        else:
            self.nms_radius = {self._class_index(c, 'test_cfg.nms_radius'): float(radius) for c, radius in given.items()}

    def _implied(self, dataset: str, what: str) -> Dict[int, float]:
        """Our class index -> radius, for the classes that ``dataset`` treats apart.

        Classes are found by ``class_names``; without them by the data set's usual order, if our number of classes is
        its usual one.
        """
        known = _DATASETS.get(dataset)
        if known is None or (self.class_names is None and self.num_classes != known['num_classes']):
            return {}
        order = self.class_names if self.class_names is not None else None
        index = known['index'] if order is None else {name: order.index(name) for name in known['index'] if name in order}
        return {index[name]: known['radius'][name] for name in known[what] if name in index}

    def _class_index(self, wanted: Union[int, str], key: str) -> int:
        if isinstance(wanted, str):
            if self.class_names is None or wanted not in self.class_names:
                raise ValueError(f'{key}: {wanted!r} is not among class_names {self.class_names}')
            return self.class_names.index(wanted)
        if not 0 <= int(wanted) < self.num_classes:
            raise ValueError(f'{key}: class index must lie in [0, {self.num_classes}), got {wanted}')
        return int(wanted)

    def init_weights(self) -> None:
        """Xavier for the decoder, the branches' own rule, a prior of sigmoid(init_bias) for the dense heatmap, batch
        norm momentum."""
        super().init_weights()
        self._reset()

    def _reset(self) -> None:
        for parameter in self.decoder.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        nn.init.constant_(self.heatmap_head[-1].bias, self.init_bias)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = self.bn_momentum

    # ------------------------------------------------------------------------------------------------------------
    # forward
    def forward(self, feats: Union[Tensor, Sequence[Tensor]], metas: Optional[Sequence] = None) -> Dict[str, Tensor]:
        """BEV map (B, C_in, X, Y), or a list holding one -> predictions (see the class)."""
        x = single_level(feats, 'TransFusionHead')
        check_feature_map(x, self.map_shape, 'TransFusionHead')
        features = self.shared_conv(x)                                                       # (B, H, X, Y)
        dense = self.heatmap_head(features).float()                                          # (B, C, X, Y)
        labels, cells, scores = self.propose(dense.detach())
        flat = features.flatten(2).transpose(1, 2)                                           # (B, X*Y, H)
        query = flat.gather(1, cells[..., None].expand(-1, -1, flat.shape[-1]))              # (B, P, H)
        one_hot = self._is_class(labels).float()
        query = query + self.class_encoding(one_hot).transpose(1, 2)

        positions = self._cell_centers(x.device)                                             # (1, X*Y, 2)
        query_pos = positions[0][cells]                                                      # (B, P, 2)
        per_layer: List[Dict[str, Tensor]] = []
        for layer, branch in zip(self.decoder, self.prediction_heads, strict=True):
            query = layer(query, flat, query_pos, positions)
            result = {name: value.float() for name, value in branch(query.transpose(1, 2)).items()}
            result['center'] = result['center'] + query_pos.transpose(1, 2)
            per_layer.append(result)
            query_pos = result['center'].detach().transpose(1, 2)
        preds = {name: torch.cat([result[name] for result in per_layer], -1) for name in per_layer[0]}
        preds.update(dense_heatmap=dense, query_labels=labels, query_heatmap_score=scores)
        return preds

    @torch.no_grad()
    def propose(self, logits: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Choose the queries: local maxima of the heatmap first, best score first.

        Returns:
            tuple[Tensor, Tensor, Tensor]: (B, P) class; (B, P) flat cell x * Y + y; (B, C, P) probabilities at the
            cell, 0 where a class has no local maximum there.
        """
        heat = logits.sigmoid()
        y_cells = heat.shape[-1]
        peaks = heat == self._neighbourhood_max(heat)
        if self.no_local_max:
            peaks = peaks | constant([float(c in self.no_local_max) for c in range(self.num_classes)], heat).bool()[:, None, None]
        # Cells that are no maximum come after all that are, by their score: a map with fewer maxima than queries still
        # gives P of them.
        rank = torch.where(peaks, heat, heat - 1.0).flatten(1)
        if rank.shape[1] < self.num_proposals:
            raise ValueError(f'num_proposals: {self.num_proposals} queries, but the map has only {rank.shape[1]} (class, cell) '
                             'pairs')
        index = rank.topk(self.num_proposals, dim=1).indices
        area = heat.shape[-2] * y_cells
        cells = index % area
        scores = (heat * peaks).flatten(2).gather(2, cells[:, None].expand(-1, self.num_classes, -1))
        return torch.div(index, area, rounding_mode='floor'), cells, scores

    def _is_class(self, labels: Tensor) -> Tensor:
        """(B, P) classes -> (B, C, P) bool (``F.one_hot`` would make the host look at them)."""
        return labels[:, None] == torch.arange(self.num_classes, device=labels.device)[:, None]

    def _neighbourhood_max(self, heat: Tensor) -> Tensor:
        kernel, pad = self.nms_kernel_size, self.nms_kernel_size // 2
        if self.compat == 'reference' and pad:
            inner = F.max_pool2d(heat, kernel, stride=1)
            return F.pad(inner, (pad, pad, pad, pad), value=0.0)
        return F.max_pool2d(heat, kernel, stride=1, padding=pad)

    def _cell_centers(self, device: torch.device) -> Tensor:
        """(1, X*Y, 2) positions of the cells' centres, in cells; x is the slow index."""
        x_cells, y_cells = self.map_shape
        grid = torch.meshgrid(torch.arange(x_cells, device=device), torch.arange(y_cells, device=device), indexing='ij')
        return (torch.stack(grid, -1).reshape(1, -1, 2) + 0.5).float()

    # --------------------------------------------------------------------------------------------------------------
    # loss
    @torch.no_grad()
    def start_matching(self, gt_bboxes_3d: Sequence, gt_labels_3d: Sequence[Tensor], preds: Mapping[str, Tensor]) -> Matching:
        """Queue the costs of all pairs and their way to the CPU, without waiting for them.

        The assignment is the host's work. What is queued on the device between this and :meth:`loss`, another head for example,
        keeps it busy meanwhile.
        """
        if self.train_cfg is None:
            raise ValueError('TransFusionHead: was built without train_cfg, so it has no targets')
        with torch.autocast(preds['center'].device.type, enabled=False):
            preds = {name: preds[name].detach().float() for name in ('heatmap', *self.regressed)}
            boxes = self.bbox_coder.decode_boxes(*[preds[name] for name in _REGRESSED[:4]])      # (B, L*P, 7)
            if len(gt_bboxes_3d) != len(boxes):
                raise ValueError(f'gt_bboxes_3d: {len(gt_bboxes_3d)} entries for {len(boxes)} samples')
            truth = collect_ground_truth(gt_bboxes_3d, gt_labels_3d, self.bbox_coder.frame, self.map_shape, self.num_classes, boxes.device,
                                         self.compat == 'reference')
            if truth.boxes.shape[1] == 0:
                return Matching(truth)
            labels = truth.labels.clamp(0, self.num_classes - 1)
            cost, overlap = self.bbox_assigner.costs(boxes, truth.boxes, labels, preds['heatmap'].transpose(1, 2), self.train_cfg)
            return Matching(truth, overlap, self.bbox_assigner.send(cost.unflatten(1, (self.num_decoder_layers, -1)), truth.valid))

    @torch.no_grad()
    def get_targets(self, gt_bboxes_3d: Sequence, gt_labels_3d: Sequence[Tensor], preds: Mapping[str, Tensor],
                    started: Optional[Matching] = None) -> Dict[str, Tensor]:
        """Match predictions and ground truth, and lay out what each query should have said.

        Args:
            started: what :meth:`start_matching` gave for these arguments, where it was called before.

        Returns:
            dict: ``labels`` (B, L*P) class, C for background; ``label_weights`` (B, L*P); ``bbox_targets``,
                ``bbox_weights`` (B, L*P,
            code size), 0 for background and for an unknown velocity; ``ious`` (B, L*P) overlap of matched queries, else
            0; ``num_pos`` (L,) matches per layer; ``matched_ious`` () mean overlap of the matches, over samples that
            have any; ``heatmap`` (B, C, X, Y).
        """
        truth, overlap, sent = started or self.start_matching(gt_bboxes_3d, gt_labels_3d, preds)
        cfg, layers, size = self.train_cfg, self.num_decoder_layers, self.bbox_coder.code_size
        batch, _, total = preds['center'].shape
        # All that the matches have no part in is queued before the host waits for the costs.
        heatmap = target_heatmap(truth, self.bbox_coder.frame, self.map_shape, self.num_classes, cfg.get('gaussian_overlap', 0.1),
                                 cfg.get('min_radius', 2))
        labels = truth.labels.new_full((batch, total), self.num_classes)
        targets = truth.boxes.new_zeros((batch, total, size))
        weights, ious = torch.zeros_like(targets), truth.boxes.new_zeros((batch, total))
        matched = torch.zeros_like(labels, dtype=torch.bool)
        if sent is not None:
            encoded = self.bbox_coder.encode(truth.boxes)
            picked = self.bbox_assigner.solve(sent, overlap.device).flatten(1)
            matched, picked = picked >= 0, picked.clamp(min=0)
            labels = torch.where(matched, truth.labels.gather(1, picked), labels)
            encoded = encoded.gather(1, picked[..., None].expand(-1, -1, size))
            known = matched[..., None] & encoded.isfinite()
            targets, weights = torch.where(known, encoded, targets), known.to(targets.dtype)
            ious = torch.where(matched, overlap.gather(2, picked[..., None]).squeeze(-1), ious)

        pos_weight = float(cfg.get('pos_weight', -1))
        label_weights = torch.where(matched, pos_weight if pos_weight > 0 else 1.0, 1.0).to(targets.dtype)
        matches = matched.sum(1)
        per_sample = ious.sum(1) / matches.clamp(min=1)
        return dict(labels=labels, label_weights=label_weights, bbox_targets=targets, bbox_weights=weights, ious=ious,
                    num_pos=matched.unflatten(1, (layers, -1)).sum((0, 2)),
                    matched_ious=per_sample.sum() / (matches > 0).sum().clamp(min=1), heatmap=heatmap)

    def loss(self, gt_bboxes_3d: Sequence, gt_labels_3d: Sequence[Tensor], preds: Mapping[str, Tensor],
             started: Optional[Matching] = None) -> Dict[str, Tensor]:
        """Losses of a batch, in float32; ``preds`` is not changed.

        Args:
            gt_bboxes_3d: B ``LiDARInstance3DBoxes``. Boxes outside the map, without size or not finite are ignored, an
                unknown (NaN) velocity is not trained on, and a sample may have no box at all.
            gt_labels_3d: B tensors of class indices; negative ones are ignored.
            started: what :meth:`start_matching` gave for the same arguments, if the device was to have other work meanwhile.

        Returns:
            dict: ``loss_heatmap``; ``layer_<i>_loss_cls`` and ``layer_<i>_loss_bbox`` for each layer, the last one
                called -1; and the
            statistic ``matched_ious``. The same keys for every batch; every loss hangs on the graph.
        """
        with torch.autocast(preds['center'].device.type, enabled=False):
            preds = {name: value.float() if value.is_floating_point() else value for name, value in preds.items()}
            targets = self.get_targets(gt_bboxes_3d, gt_labels_3d, preds, *([] if started is None else [started]))
            heatmap = targets['heatmap']
            counts = torch.cat([heatmap.eq(1).sum().view(1), targets['num_pos']])
            total, ranks = (counts.float(), 1) if self.compat == 'reference' else count_over_ranks(counts)
            peaks, *layer_matches = (total.clamp(min=1) / ranks).unbind()
            losses = dict(loss_heatmap=self.loss_heatmap(clipped_sigmoid(preds['dense_heatmap']), heatmap, avg_factor=peaks))

            regressed = torch.cat([preds[name] for name in self.regressed], 1).transpose(1, 2)  # (B, L*P, code size)
            weights = targets['bbox_weights'] * constant(self.code_weights, targets['bbox_weights'])
            for layer, part in enumerate(layer_slices(regressed.shape[1], self.num_decoder_layers)):
                last = layer == self.num_decoder_layers - 1
                name = 'layer_-1' if last else f'layer_{layer}'
                matches = total[1:].sum().clamp(min=1) if self.compat == 'reference' else layer_matches[layer]
                logits = preds['heatmap'][..., part].transpose(1, 2).flatten(0, 1)            # (B*P, C)
                losses[f'{name}_loss_cls'] = self.loss_cls(
                    logits, targets['labels'][:, part].flatten(), targets['label_weights'][:, part].flatten(),
                    avg_factor=matches)
                losses[f'{name}_loss_bbox'] = self.loss_bbox(
                    regressed[:, part], targets['bbox_targets'][:, part], weights[:, part], avg_factor=matches)
            losses['matched_ious'] = targets['matched_ious']
        return losses

    # ---------------------------------------------------------------------------------------------------------
    # detections
    @torch.no_grad()
    def get_bboxes(self, preds: Mapping[str, Tensor], metas: Optional[Sequence] = None) -> List[Tuple[Any, Tensor, Tensor]]:
        """Detections of the last layer, on the CPU: B tuples of (boxes with bottom z, scores (K,), labels (K,) long). ``preds`` is
        not changed.

        The score is the class probability times the heatmap's at the query, for the query's own class only.
        """
        return self.detections(self.candidates(preds).cpu(), metas)

    @torch.no_grad()
    def candidates(self, preds: Mapping[str, Tensor]) -> Tensor:
        """(B, P, code + 3) boxes before suppression as the coder packs them; the device is not waited for."""
        last = {name: preds[name].float()[..., -self.num_proposals:] for name in ('heatmap', *self.regressed)}
        own = self._is_class(preds['query_labels'])
        scores = last['heatmap'].sigmoid() * preds['query_heatmap_score'].float() * own
        return self.bbox_coder.candidates(scores, last['rot'], last['dim'], last['center'], last['height'], last.get('vel'), filter=True)

    def detections(self, candidates: Tensor, metas: Optional[Sequence] = None) -> List[Tuple[Any, Tensor, Tensor]]:
        """What :meth:`get_bboxes` gives, from :meth:`candidates` on the CPU: a few hundred boxes are faster suppressed there than
        launched for."""
        metas = sample_metas(metas, len(candidates))
        results = []
        for sample, meta in zip(candidates, metas, strict=True):
            found = self.bbox_coder.unpack(sample)
            keep = self._suppress(found)
            boxes = found['bboxes'][keep]
            boxes = box_class(meta)(boxes, box_dim=boxes.shape[-1])
            results.append((boxes, found['scores'][keep], found['labels'][keep]))
        return results

    def _suppress(self, detections: Mapping[str, Tensor]) -> Tensor:
        """(K,) bool, which detections stay after the suppression that ``test_cfg`` asks for, class by class."""
        boxes, scores, labels = (detections[name] for name in ('bboxes', 'scores', 'labels'))
        keep = torch.ones_like(labels, dtype=torch.bool)
        kind = self.test_cfg.get('nms_type')
        if kind is None:
            return keep
        before = self.test_cfg.get('pre_maxsize', self.test_cfg.get('pre_max_size'))
        after = self.test_cfg.get('post_maxsize', self.test_cfg.get('post_max_size'))
        old = self.compat == 'reference'
        for label, radius in self.nms_radius.items():
            members = (labels == label).nonzero().flatten()
            if radius <= 0 or len(members) == 0:
                continue
            if kind == 'circle':
                most = 83 if old and after is None else after
                stay = circle_nms(boxes[members, :2], scores[members], radius, most, squared=old)
            else:
                stay = rotated_nms(boxes[members][:, [0, 1, 3, 4, 6]], scores[members], radius, before, after)
            keep[members] = False
            keep[members[stay]] = True
        return keep
