"""CenterPoint's detection head: per task a class heatmap and, at each cell, the box of the object whose centre lies
there (Yin 2021).

Letters: B batch, X, Y map cells, G boxes of a sample (padded), K detections.
"""
from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from mmcv.cnn import ConvModule
from mmcv.runner import BaseModule
from torch import Tensor, nn

from ....geometry.on_device import constant
from ....over_ranks import count_over_ranks
from ....registry import BBOX_CODERS, MODELS
from .head_grid import (
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
from .suppression import circle_nms, rotated_nms

_REGRESSED = ('reg', 'height', 'dim', 'rot', 'vel')
_TRAIN_KEYS = dict(required=('point_cloud_range', 'grid_size', 'voxel_size', 'out_size_factor'),
                   optional=('gaussian_overlap', 'min_radius', 'code_weights', 'dense_reg', 'max_objs', 'dataset'))
_TEST_KEYS = dict(required=(),
                  optional=('post_center_limit_range', 'max_per_img', 'max_pool_nms', 'min_radius', 'score_threshold',
                            'out_size_factor', 'voxel_size', 'pc_range', 'nms_type', 'nms_scale', 'pre_max_size',
                            'post_max_size', 'nms_thr', 'dataset'))


@MODELS.register_module()
class CenterHead(BaseModule):
    """Detection head of CenterPoint.

    ``forward`` gives a list with one dict for each task: ``reg`` (B, 2, X, Y) offset of the centre inside its cell, in
    cells; ``height`` (B, 1, X, Y) metres; ``dim`` (B, 3, X, Y) l, w, h in metres, as logs if ``norm_bbox``; ``rot`` (B,
    2, X, Y) sine and cosine; ``vel`` (B, 2, X, Y) m/s (if ``common_heads`` has it); ``heatmap`` (B, classes of the
    task, X, Y) logits. All float32, also under autocast.

    Args:
        in_channels, share_conv_channel: channels of the BEV map and after the shared convolution.
        tasks: class names, grouped; class indices run through the groups in order.
        common_heads: regressed quantity -> (channels, convolutions): reg, height, dim, rot and optionally vel.
        separate_head: type and options of each task's branches.
        num_heatmap_convs, conv_cfg, norm_cfg, bias: of the convolutions.
        loss_cls, loss_bbox: as mmdet names them.
        norm_bbox: regress the logs of the sizes.
        train_cfg: point_cloud_range, grid_size, voxel_size, out_size_factor; gaussian_overlap (0.1), min_radius (2),
            code_weights (all 1). ``max_objs`` and ``dense_reg`` are accepted and not needed: no object is cut off. Only
            needed for training.
        test_cfg: nms_type (circle, rotate or null; one, or one for each task), min_radius (circle, per task, metres),
            nms_thr (rotate, IoU), nms_scale (rotate: factor on the boxes, one or per task and class), pre_max_size,
            post_max_size, score_threshold and post_center_limit_range (rotate, in addition to the coder's).
        bbox_coder: see :class:`CenterPointBBoxCoder`.
        compat: ``'reference'`` keeps what numbers of the reference depend on: circle suppression compares the *squared*
            distance with ``min_radius`` (4 means 2 m), a score threshold of 0.0 filters nothing, boxes up to one cell below
            the map's lower bounds are trained in its first cells, and losses are divided by this rank's counts instead of
            those over all ranks.

    Raises:
        KeyError, ValueError: for configurations that cannot work; the message names the key.
    """

    _version = STATE_VERSION
    #: Entries of :meth:`loss` that are reported but not minimised.
    statistics = ()

    def __init__(self, in_channels: int, tasks: Sequence[Sequence[str]], bbox_coder: Mapping[str, Any],
                 common_heads: Mapping[str, Sequence[int]], train_cfg: Optional[Mapping[str, Any]] = None,
                 test_cfg: Optional[Mapping[str, Any]] = None, loss_cls: Optional[dict] = None,
                 loss_bbox: Optional[dict] = None,
                 separate_head: Optional[Mapping[str, Any]] = None, share_conv_channel: int = 64, num_heatmap_convs: int = 2,
                 conv_cfg: Optional[dict] = None, norm_cfg: Optional[dict] = None, bias: Union[bool, str] = 'auto',
                 norm_bbox: bool = True, compat: Optional[str] = None, init_cfg: Optional[dict] = None):
        super().__init__(init_cfg)
        missing = [name for name in _REGRESSED[:4] if name not in common_heads]
        if missing:
            raise ValueError(f'common_heads: needs {", ".join(_REGRESSED[:4])} (vel is optional), missing {", ".join(missing)}')
        if not tasks or any(isinstance(task, (str, Mapping)) for task in tasks):
            raise ValueError(f'tasks: needs lists of class names, e.g. [[car], [truck, bus]], got {tasks!r}')
        self.class_names = [list(task) for task in tasks]
        self.num_classes = [len(task) for task in self.class_names]
        self.norm_bbox = norm_bbox
        self.compat = compat
        self.regressed = [name for name in _REGRESSED if name in common_heads]
        self.bbox_coder = BBOX_CODERS.build(bbox_coder, **(dict(compat=compat) if compat is not None else {}))
        size = 9 if 'vel' in self.regressed else 7
        if self.bbox_coder.code_size != size:
            raise ValueError(f'bbox_coder.code_size: common_heads has boxes of {size} numbers, got {self.bbox_coder.code_size}')
        self._configure(train_cfg, test_cfg, size)

        self.loss_cls = MODELS.build(loss_cls or dict(type='GaussianFocalLoss', reduction='mean'))
        self.loss_bbox = MODELS.build(loss_bbox or dict(type='L1Loss', reduction='mean', loss_weight=0.25))
        conv_cfg, norm_cfg = conv_cfg or dict(type='Conv2d'), norm_cfg or dict(type='BN2d')
        self.shared_conv = ConvModule(in_channels, share_conv_channel, 3, padding=1, bias=bias, conv_cfg=conv_cfg,
                                      norm_cfg=norm_cfg)
        separate_head = dict(separate_head or dict(type='SeparateHead', init_bias=-2.19, final_kernel=3))
        self.task_heads = nn.ModuleList()
        for classes in self.num_classes:
            branches = dict(common_heads, heatmap=(classes, num_heatmap_convs))
            self.task_heads.append(MODELS.build(dict(separate_head, in_channels=share_conv_channel, heads=branches)))

    def _configure(self, train_cfg, test_cfg, size: int) -> None:
        self.train_cfg, self.test_cfg = train_cfg, dict(test_cfg) if test_cfg is not None else {}
        self.map_shape = None  # without train_cfg nothing says how large the map is: any is taken
        tasks = len(self.num_classes)
        if train_cfg is not None:
            check_keys(train_cfg, 'train_cfg', **_TRAIN_KEYS)
            self.map_shape = map_shape(train_cfg, 'train_cfg')
        check_frame(self.bbox_coder.frame, train_cfg, test_cfg)
        check_keys(self.test_cfg, 'test_cfg', **_TEST_KEYS)
        self.code_weights = list((train_cfg or {}).get('code_weights') or [1.0] * (size + 1))
        if len(self.code_weights) != size + 1:
            raise ValueError(f'train_cfg.code_weights: needs {size + 1} numbers, got {len(self.code_weights)}')

        self.nms_types = self._per_task('nms_type', None)
        for kind in self.nms_types:
            if kind not in (None, 'circle', 'rotate'):
                raise ValueError(f'test_cfg.nms_type: expected null, circle or rotate, got {kind!r}')
        if 'circle' in self.nms_types:
            radii = self.test_cfg.get('min_radius')
            if radii is None or len(radii) != tasks:
                raise ValueError(f'test_cfg.min_radius: needs one radius for each of the {tasks} tasks, got {radii!r}')
        if 'rotate' in self.nms_types and self.test_cfg.get('nms_thr') is None:
            raise ValueError('test_cfg.nms_thr: rotated suppression needs an IoU threshold')
        scales = self._per_task('nms_scale', 1.0)
        self.nms_scales = [list(scale) if isinstance(scale, (list, tuple)) else [scale] * classes
                           for scale, classes in zip(scales, self.num_classes, strict=True)]
        for scale, classes in zip(self.nms_scales, self.num_classes, strict=True):
            if len(scale) != classes:
                raise ValueError(f'test_cfg.nms_scale: one factor for each class of a task, got {self.test_cfg["nms_scale"]!r}')

    def _per_task(self, key: str, default) -> list:
        value, tasks = self.test_cfg.get(key, default), len(self.num_classes)
        if not isinstance(value, (list, tuple)):
            return [value] * tasks
        if len(value) != tasks:
            raise ValueError(f'test_cfg.{key}: {tasks} tasks need {tasks} entries, got {value!r}')
        return list(value)

    # ------------------------------------------------------------------------------------------------------------
    # forward
    def forward(self, feats: Union[Tensor, Sequence[Tensor]], metas: Optional[Sequence] = None) -> List[Dict[str, Tensor]]:
        """BEV map (B, C_in, X, Y), or a list holding one -> predictions of each task (see the class)."""
        x = single_level(feats, 'CenterHead')
        check_feature_map(x, self.map_shape, 'CenterHead')
        x = self.shared_conv(x)
        return [{name: value.float() for name, value in head(x).items()} for head in self.task_heads]

    # --------------------------------------------------------------------------------------------------------------
    # loss
    @torch.no_grad()
    def get_targets(self, gt_bboxes_3d: Sequence, gt_labels_3d: Sequence[Tensor],
                    device: torch.device) -> List[Dict[str, Tensor]]:
        """What each task should have predicted. Rows of G are the sample's boxes in their own order.

        Returns:
            list[dict]: for each task ``heatmap`` (B, classes, X, Y); ``cells`` (B, G) flat cell x * Y + y; ``boxes``
            (B, G, code size + 1) regression targets, 0 where unknown; ``weights`` the same shape: 1 where a target is
            known and belongs to the task, else 0; ``mask`` (B, G) bool, boxes of the task.
        """
        if self.train_cfg is None:
            raise ValueError('CenterHead: was built without train_cfg, so it has no targets')
        cfg, total = self.train_cfg, sum(self.num_classes)
        frame, shape = self.bbox_coder.frame, self.map_shape
        truth = collect_ground_truth(gt_bboxes_3d, gt_labels_3d, frame, shape, total, device, self.compat == 'reference')
        heatmap = target_heatmap(truth, frame, shape, total, cfg.get('gaussian_overlap', 0.1), cfg.get('min_radius', 2))
        targets = self.bbox_coder.encode(truth.boxes, truth.cells, log_size=self.norm_bbox)
        cells = truth.cells[..., 0] * shape[1] + truth.cells[..., 1]
        known = targets.isfinite()
        targets = torch.where(known, targets, torch.zeros_like(targets))
        results, first = [], 0
        for classes in self.num_classes:
            mask = truth.valid & (truth.labels >= first) & (truth.labels < first + classes)
            results.append(dict(heatmap=heatmap[:, first:first + classes], cells=cells, boxes=targets,
                                weights=(mask[..., None] & known).to(targets.dtype), mask=mask))
            first += classes
        return results

    def loss(self, gt_bboxes_3d: Sequence, gt_labels_3d: Sequence[Tensor],
             preds: Sequence[Mapping[str, Tensor]]) -> Dict[str, Tensor]:
        """Losses of a batch, in float32; ``preds`` is not changed.

        Args:
            gt_bboxes_3d: B ``LiDARInstance3DBoxes``. Boxes outside the map, without size or not finite are ignored, an
                unknown (NaN) velocity is not trained on, and a sample may have no box at all.
            gt_labels_3d: B tensors of class indices; negative ones are ignored.

        Returns:
            dict: ``heatmap/task<i>`` and ``bbox/task<i>`` for each task. The same keys for every batch; each hangs on
                the graph.
        """
        first = preds[0]['heatmap']
        if len(gt_bboxes_3d) != first.shape[0]:
            raise ValueError(f'gt_bboxes_3d: {len(gt_bboxes_3d)} entries for {first.shape[0]} samples')
        losses: Dict[str, Tensor] = {}
        with torch.autocast(first.device.type, enabled=False):
            targets = self.get_targets(gt_bboxes_3d, gt_labels_3d, first.device)
            counts = torch.stack([count for target in targets for count in (target['heatmap'].eq(1).sum(), target['mask'].sum())])
            total, ranks = (counts.float(), 1) if self.compat == 'reference' else count_over_ranks(counts)
            for i, (pred, target) in enumerate(zip(preds, targets, strict=True)):
                heatmap = target['heatmap']
                losses[f'heatmap/task{i}'] = self.loss_cls(
                    clipped_sigmoid(pred['heatmap'].float()), heatmap, avg_factor=total[2 * i].clamp(min=1) / ranks)
                regressed = torch.cat([pred[name].float() for name in self.regressed], 1).flatten(2)      # (B, code, X*Y)
                index = target['cells'][:, None].expand(-1, regressed.shape[1], -1)
                regressed = regressed.gather(2, index).transpose(1, 2)                                    # (B, G, code)
                weights = target['weights'] * constant(self.code_weights, target['weights'])
                losses[f'bbox/task{i}'] = self.loss_bbox(regressed, target['boxes'], weights,
                                                         avg_factor=(total[2 * i + 1] + 1e-4) / ranks)
        return losses

    # ---------------------------------------------------------------------------------------------------------
    # detections
    @torch.no_grad()
    def get_bboxes(self, preds: Sequence[Mapping[str, Tensor]],
                   metas: Optional[Sequence] = None) -> List[Tuple[Any, Tensor, Tensor]]:
        """Detections of all tasks, on the CPU: B tuples of (boxes with bottom z, scores (K,), labels (K,) long). ``preds`` is not
        changed."""
        return self.detections(self.candidates(preds).cpu(), metas)

    @torch.no_grad()
    def candidates(self, preds: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """(B, ``max_num`` of every task, 1 + code + 3) boxes before suppression: the task, then as the coder packs them; the device
        is not waited for."""
        packed = []
        for task, pred in enumerate(preds):
            found = self._task_candidates(pred)
            packed.append(torch.cat([torch.full_like(found[..., :1], task), found], -1))
        return torch.cat(packed, 1)

    def detections(self, candidates: Tensor, metas: Optional[Sequence] = None) -> List[Tuple[Any, Tensor, Tensor]]:
        """What :meth:`get_bboxes` gives, from :meth:`candidates` on the CPU: suppression there saves dozens of waits for the device."""
        metas = sample_metas(metas, len(candidates))
        results = []
        for sample, meta in zip(candidates, metas, strict=True):
            per_task, first = [], 0
            for task, classes in enumerate(self.num_classes):
                found = self.bbox_coder.unpack(sample[sample[:, 0] == task][:, 1:])
                keep = self._suppress(found, task)
                per_task.append((found['bboxes'][keep], found['scores'][keep], found['labels'][keep] + first))
                first += classes
            boxes, scores, labels = (torch.cat(parts) for parts in zip(*per_task, strict=True))
            results.append((box_class(meta)(self.bbox_coder.lower(boxes), box_dim=boxes.shape[-1]), scores, labels))
        return results

    def _task_candidates(self, pred: Mapping[str, Tensor]) -> Tensor:
        """Boxes of one task before suppression (z is the regressed height); see :meth:`CenterPointBBoxCoder.candidates`."""
        pred = {name: value.float() for name, value in pred.items()}
        size = pred['dim'].exp() if self.norm_bbox else pred['dim']
        return self.bbox_coder.candidates(pred['heatmap'].sigmoid(), pred['rot'][:, 0:1], pred['rot'][:, 1:2], pred['height'], size,
                                          pred.get('vel'), reg=pred['reg'])

    def _suppress(self, detections: Mapping[str, Tensor], task: int) -> Tensor:
        """Indices of the detections of one sample and task that stay."""
        boxes, scores, labels = (detections[name] for name in ('bboxes', 'scores', 'labels'))
        kind, cfg = self.nms_types[task], self.test_cfg
        if kind is None:
            return torch.arange(len(scores), device=scores.device)
        if kind == 'circle':
            return circle_nms(boxes[:, :2], scores, cfg['min_radius'][task], cfg.get('post_max_size'),
                              squared=self.compat == 'reference')
        candidates = torch.arange(len(scores), device=scores.device)
        if cfg.get('score_threshold'):  # the coder has dropped the zeros already
            candidates = candidates[scores >= cfg['score_threshold']]
        flat = boxes[candidates][:, [0, 1, 3, 4, 6]]
        flat[:, 2:4] *= constant(self.nms_scales[task], flat)[labels[candidates]][:, None]
        keep = candidates[rotated_nms(flat, scores[candidates], cfg['nms_thr'], cfg.get('pre_max_size'),
                                      cfg.get('post_max_size'))]
        if cfg.get('post_center_limit_range'):
            limits = constant(cfg['post_center_limit_range'], boxes)
            inside = (boxes[keep, :3] >= limits[:3]) & (boxes[keep, :3] <= limits[3:])
            keep = keep[inside.all(1)]
        return keep
