"""The BEVFusion detector: sensors' encoders -> fuser -> BEV decoder -> task heads.

Letters: B batch, N cameras, P points, C channels, X/Y BEV cells (first axis lidar x, second lidar y).
"""
from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections import OrderedDict
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
from mmcv import ConfigDict
from mmcv.utils.logging import logger_initialized
from torch import nn

from ...geometry.grid import parse_scope
from ...geometry.on_device import download
from ...registry import MODELS
from ..voxel import build_voxelizer
from .grid_check import check_same_grid, check_voxel_grid, sensor_grid
from .image_input import normalised
from .memory_switches import apply_channels_last, apply_checkpoint
from .trunks import MAIN, Branch, fuse, resamplers, start_from_main

SENSORS = ('camera', 'lidar', 'radar')  # the order in which the fuser gets their maps
ENCODER_PARTS = {'camera': ('backbone', 'neck', 'vtransform'),
                 'lidar': ('voxelize', 'backbone', 'voxelize_reduce'),
                 'radar': ('voxelize', 'backbone', 'voxelize_reduce')}
INPUTS = {'camera': 'img', 'lidar': 'points', 'radar': 'radar'}
MATRICES = ('camera_intrinsics', 'camera2ego', 'lidar2ego', 'lidar2camera', 'camera2lidar', 'lidar2image', 'img_aug_matrix',
            'lidar_aug_matrix')


def _present(section: Optional[Mapping], name: str) -> Dict[str, Any]:
    """The members of a configuration section that are not null."""
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise TypeError(f'{name} must be a mapping, got {section!r}')
    return {key: value for key, value in section.items() if value is not None}


def _check_keys(section: Mapping, known: Sequence[str], name: str) -> None:
    for key in section:
        if key not in known:
            raise ValueError(f'{name}: unknown key {key!r}, expected some of {list(known)}')


def _need(section: Mapping, key: str, name: str) -> Any:
    if key not in section:
        raise ValueError(f'{name}: the key {key!r} is missing')
    return section[key]


def _together(head: nn.Module, *methods: str) -> bool:
    """Whether one class defines all these methods of a head: what was split into steps is whole again where a subclass has another one."""
    definers = {next((cls for cls in type(head).__mro__ if name in vars(cls)), None) for name in methods}
    return len(definers) == 1 and None not in definers


def _decodes_in_two_steps(head: nn.Module) -> bool:
    """Whether its ``get_bboxes`` is nothing but ``detections(candidates(...))``."""
    return _together(head, 'candidates', 'get_bboxes')


def _matches_in_two_steps(head: nn.Module) -> bool:
    """Whether its ``loss`` takes a matching that was started before."""
    return _together(head, 'start_matching', 'get_targets', 'loss')


@contextlib.contextmanager
def _quiet_initialisation() -> Iterator[None]:
    """Without mmcv's line for every block (``initialize BasicBlock with init_cfg ...``); files that are loaded are still said."""
    logger = logging.getLogger(next(iter(logger_initialized), 'mmcv'))  # as mmcv's BaseModule chooses it

    def wanted(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or not str(record.msg).startswith('initialize ')

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


@MODELS.register_module()
class BEVFusion(nn.Module):
    """Multitask bird's-eye-view model from any set of cameras, LiDAR and radar (BEVFusion, Liu et al. 2023).

    Members that are null in the configuration are left out. Parameters are named ``encoders.<sensor>.<part>``, ``fuser``,
    ``decoder.<part>`` and ``heads.<task>``.

    Args:
        encoders: ``camera: {backbone, neck, vtransform}``, ``lidar`` and ``radar: {voxelize, backbone,
            voxelize_reduce}`` (``voxelize_reduce``: average the points of each voxel, default true).
        decoder: ``{backbone, neck}`` shared by all tasks, or one such mapping per task (``{object: {backbone, neck},
            map: {backbone, neck}}``); then there is no shared decoder.
        heads: ``object`` (has ``get_bboxes``) and ``map`` heads by task name.
        fuser: needed with more than one sensor, applied with a single one too if given.
        fused_grid: ``[x axis, y axis]`` on which the sensors' maps are fused; a sensor that ends on other cells of the same
            metres is resampled. Without it all sensors must end on the same cells.
        branches: a trunk of its own for a task (:class:`~.trunks.Branch`), on a grid of its own: ``{map: {grid, camera}}``. The
            other tasks keep the main trunk and are not touched.
        loss_scale: weight of each task's losses (default 1).
        freeze: names of parts (``encoders.lidar``, ``decoder.backbone`` ...) that are kept as loaded: no gradients, norm
            layers in evaluation mode.
        checkpoint: names of parts (``encoders.camera.backbone``, ``encoders.camera.vtransform``, ``decoder``, ``heads.map`` ...)
            whose activations are recomputed in the backward pass instead of kept: the same losses and gradients, less memory,
            more time.
        channels_last: names of parts whose convolutions work in channels-last order, or true for all: the same values; faster
            and with less workspace on GPUs in half precision.
        compat: ``'reference'`` to reproduce trained BEVFusion checkpoints; see the parts for what it changes.

    A batch without a single point, without boxes or without any map trains like any other: all parameters stay in the graph
    and the losses have the same names in the same order, so DistributedDataParallel needs no search for unused ones.
    """

    def __init__(self, encoders: Mapping, decoder: Mapping, heads: Mapping, fuser: Optional[Mapping] = None,
                 loss_scale: Optional[Mapping[str, float]] = None, freeze: Sequence[str] = (),
                 compat: Optional[str] = None, fused_grid: Optional[Sequence] = None,
                 branches: Optional[Mapping[str, Mapping]] = None, checkpoint: Sequence[str] = (),
                 channels_last: Union[bool, Sequence[str]] = False):
        super().__init__()
        encoders = _present(encoders, 'model.encoders')
        _check_keys(encoders, SENSORS, 'model.encoders')
        self.encoders = nn.ModuleDict()
        for sensor in SENSORS:
            if sensor in encoders:
                self.encoders[sensor] = self._build_encoder(sensor, encoders[sensor])
        if not self.encoders:
            warnings.warn('model.encoders names no sensor: this model can be built but not run', stacklevel=2)
        self.trunk_grid = None if fused_grid is None else parse_scope(fused_grid, 'model.fused_grid')
        if self.trunk_grid is None:
            check_same_grid(self.encoders, compat)
            self.resample = None
        else:
            self.resample = resamplers(self.encoders, self.trunk_grid, 'model.fused_grid')

        self.fuser = None if fuser is None else MODELS.build(fuser)
        if self.fuser is None and len(self.encoders) > 1:
            warnings.warn(f'model.fuser is null with sensors {list(self.encoders)}: this model can be built but not run',
                          stacklevel=2)

        heads = _present(heads, 'model.heads')
        if not heads:
            raise ValueError('model.heads names no task')
        self.heads = nn.ModuleDict({task: MODELS.build(cfg) for task, cfg in heads.items()})
        decoder = _present(decoder, 'model.decoder')
        self.decoder = self._build_decoder(decoder)
        self.shared_decoder = 'backbone' in self.decoder
        self.branches = nn.ModuleDict()
        for task, cfg in _present(branches, 'model.branches').items():
            if task not in self.heads:
                raise ValueError(f'model.branches: there is no head {task!r}, model.heads has {list(self.heads)}')
            self.branches[task] = Branch(task, cfg, self.encoders, fuser, decoder, self._build_trunk)
        if set(self.branches) == set(self.heads):
            raise ValueError(f'model.branches gives every head {list(self.heads)} a trunk of its own, so the main one would train '
                             'for nothing: set the main grids instead and leave one branch out')
        self._check_heads()

        self.loss_scale = {task: 1.0 for task in self.heads}
        for task, weight in _present(loss_scale, 'model.loss_scale').items():
            if task not in self.loss_scale and task not in ('object', 'map'):
                raise ValueError(f'model.loss_scale: unknown task {task!r}, model.heads has {list(self.heads)}')
            if task in self.loss_scale:
                self.loss_scale[task] = float(weight)
        self.frozen: List[nn.Module] = []
        for name in freeze:
            self._freeze(name)
        apply_checkpoint(self, checkpoint or ())
        apply_channels_last(self, channels_last or False)

    def _check_heads(self) -> None:
        """Compare what each head expects with the metres of its trunk."""
        if not self.encoders:
            return
        trunk = self.trunk_grid or sensor_grid(*next(iter(self.encoders.items()))).grid
        for task, head in self.heads.items():
            if hasattr(head, 'check_trunk'):
                head.check_trunk(self.branches[task].grid if task in self.branches else trunk)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if self.branches:
            start_from_main(list(self.branches), state_dict, self.state_dict(), prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _build_encoder(self, sensor: str, cfg: Mapping) -> nn.ModuleDict:
        name = f'model.encoders.{sensor}'
        cfg = _present(cfg, name)
        _check_keys(cfg, ENCODER_PARTS[sensor], name)
        if sensor == 'camera':
            parts = {'backbone': MODELS.build(_need(cfg, 'backbone', name))}
            if 'neck' in cfg:
                parts['neck'] = MODELS.build(cfg['neck'])
            parts['vtransform'] = MODELS.build(_need(cfg, 'vtransform', name))
            return nn.ModuleDict(parts)
        encoder = nn.ModuleDict({
            'voxelize': build_voxelizer(_need(cfg, 'voxelize', name), cfg.get('voxelize_reduce', True), f'{name}.voxelize'),
            'backbone': MODELS.build(_need(cfg, 'backbone', name))})
        check_voxel_grid(sensor, encoder)
        return encoder

    def _build_decoder(self, cfg: Dict[str, Any]) -> nn.ModuleDict:
        if 'backbone' in cfg or 'neck' in cfg:
            return self._build_trunk(cfg, 'model.decoder')
        missing, extra = set(self.heads) - set(cfg), set(cfg) - set(self.heads)
        if missing or extra:
            raise ValueError(f'model.decoder: write {{backbone, neck}} to share one decoder, or one such mapping per task of '
                             f'model.heads {sorted(self.heads)}; got the keys {sorted(cfg)}')
        return nn.ModuleDict({task: self._build_trunk(_present(cfg[task], f'model.decoder.{task}'), f'model.decoder.{task}')
                              for task in self.heads})

    @staticmethod
    def _build_trunk(cfg: Dict[str, Any], name: str) -> nn.ModuleDict:
        _check_keys(cfg, ('backbone', 'neck'), name)
        parts = {'backbone': MODELS.build(_need(cfg, 'backbone', name))}
        if 'neck' in cfg:
            parts['neck'] = MODELS.build(cfg['neck'])
        return nn.ModuleDict(parts)

    def _freeze(self, name: str) -> None:
        try:
            part = self.get_submodule(name)
        except AttributeError:
            raise ValueError(f'model.freeze: there is no part named {name!r} in this model') from None
        part.requires_grad_(False)
        self.frozen.append(part)

    def train(self, mode: bool = True) -> 'BEVFusion':
        """Set the mode; frozen parts stay in evaluation mode."""
        super().train(mode)
        for part in getattr(self, 'frozen', ()):
            part.eval()
        for head in getattr(self, 'heads', nn.ModuleDict()).values():
            if not hasattr(head, 'get_bboxes'):
                head.training = mode  # its own flag says losses or predictions; the layers of a frozen one stay in evaluation mode
        return self

    def init_weights(self) -> None:
        """Initialise every part that has ``init_weights``, loading pretrained files named by ``init_cfg``.

        Not done by the constructor, so that a model can be built without its files.

        Raises:
            RuntimeError: if a file cannot be loaded; names the part's configuration key.
        """
        with _quiet_initialisation():
            self._init_below(self, 'model')

    def _init_below(self, module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            path = f'{name}.{key}'
            if not hasattr(child, 'init_weights'):
                self._init_below(child, path)
                continue
            # mmcv's base class would log one paragraph per parameter, thousands of lines.
            child._dump_init_info = lambda *args, **kwargs: None
            if isinstance(getattr(child, 'init_cfg', None), dict):
                child.init_cfg = ConfigDict(child.init_cfg)  # mmdet's Swin reads init_cfg.checkpoint as an attribute
            try:
                child.init_weights()
            except Exception as error:
                init_cfg = getattr(child, 'init_cfg', None)
                if isinstance(init_cfg, Mapping) and 'checkpoint' in init_cfg:
                    raise RuntimeError(f'{path}.init_cfg.checkpoint: cannot load {init_cfg["checkpoint"]!r}: {error}. Give a '
                                       f'local file, or {path}.init_cfg: null to start without') from error
                raise
            finally:
                del child._dump_init_info

    # ------------------------------------------------------------------ features

    def extract_camera(self, batch: Mapping[str, Any]) -> Any:
        """img (B, N, 3, H, W) and matrices -> (B, C, X, Y), or that and the depth loss; with branches a mapping of maps in its
        place (:meth:`BaseTransform.on_grids`)."""
        encoder, img = self.encoders['camera'], normalised(batch['img'], batch.get('metas'))
        if img.dim() != 5:
            raise ValueError(f'img must be (B, N, 3, H, W), got {tuple(img.shape)}')
        matrices = {key: batch.get(key) for key in MATRICES}
        rig = batch.get('rig')
        if rig is None and hasattr(encoder['vtransform'], 'rig'):
            rig = encoder['vtransform'].rig(matrices)  # now: later the host would wait for the backbone to read them
        x = encoder['backbone'](img.flatten(0, 1))
        if 'neck' in encoder:
            x = encoder['neck'](x)
        if isinstance(x, (list, tuple)):
            x = x[0]
        return encoder['vtransform'](x.unflatten(0, img.shape[:2]), points=batch.get('points'), radar=batch.get('radar'),
                                     depths=batch.get('depths'), metas=batch.get('metas'), rig=rig, **matrices)

    def extract_points(self, sensor: str, clouds: List[torch.Tensor], batch_size: int) -> torch.Tensor:
        """Clouds list[B] of (P, F) -> (B, C, X, Y)."""
        if len(clouds) != batch_size:
            raise ValueError(f'{INPUTS[sensor]} holds {len(clouds)} clouds for {batch_size} samples')
        encoder = self.encoders[sensor]
        features, coords, sizes = encoder['voxelize'](clouds)
        return encoder['backbone'](features, coords, batch_size, sizes=sizes)

    def extract(self, batch: Mapping[str, Any], batch_size: int) -> Tuple[Dict[str, torch.Tensor], Dict[str, torch.Tensor]]:
        """The fused BEV map (B, C, X, Y) of every trunk (``main`` and the tasks with a branch), and auxiliary losses by name
        (none in evaluation)."""
        found, losses = {}, {}
        for sensor in self.encoders:
            key = INPUTS[sensor]
            if batch.get(key) is None:
                raise ValueError(f'the model has a {sensor} encoder, but the batch has no {key!r}; collect it in the '
                                 f'pipeline, or set model.encoders.{sensor}: null')
            if sensor == 'camera':
                x = self.extract_camera(batch)
                if isinstance(x, tuple):
                    x, losses['depth'] = x
            else:
                x = self.extract_points(sensor, batch[key], batch_size)
            found[sensor] = x if isinstance(x, dict) else {None: x}
            if found[sensor][None].shape[0] != batch_size:
                raise ValueError(f'{key} holds {found[sensor][None].shape[0]} samples, metas {batch_size}')
        if not found:
            raise ValueError('model.encoders names no sensor: nothing to run')
        fused = {MAIN: fuse(self.fuser, self.resample, {sensor: maps[None] for sensor, maps in found.items()})}
        for task, branch in self.branches.items():
            fused[task] = fuse(branch.fuser, branch.resample, {s: maps.get(task, maps[None]) for s, maps in found.items()})
        return fused, losses

    @staticmethod
    def _decode(trunk: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        x = trunk['backbone'](x)
        if 'neck' in trunk:
            x = trunk['neck'](x)
        if isinstance(x, (list, tuple)):
            if len(x) != 1 and 'neck' in trunk:
                raise ValueError(f'model.decoder.neck returns {len(x)} maps, heads take one')
            x = x[-1]
        return x

    def decode(self, fused: Mapping[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """Fused maps by trunk -> the map that each task's head gets."""
        shared = self._decode(self.decoder, fused[MAIN]) if self.shared_decoder else None
        maps = {}
        for task in self.heads:
            if task in self.branches:
                maps[task] = self._decode(self.branches[task].decoder, fused[task])
            else:
                maps[task] = shared if self.shared_decoder else self._decode(self.decoder[task], fused[MAIN])
        return maps

    # ------------------------------------------------------------------ forward

    def forward(self, metas: Optional[List[dict]] = None, return_loss: Optional[bool] = None, **batch):
        """Losses in training mode, predictions in evaluation mode.

        Args:
            metas: list[B] of dict; its length is the batch size.
            return_loss: ignored (mmcv's convention); the module's mode decides.
            batch: ``img`` (B, N, 3, H, W) normalised, or uint8 with ``img_norm_cfg`` in the metas; ``points`` and ``radar``
                list[B] of (P, F); the matrices ``camera_intrinsics, camera2ego, lidar2camera, camera2lidar, lidar2image,
                img_aug_matrix`` (B, N, 4, 4) and ``lidar2ego, lidar_aug_matrix`` (B, 4, 4); in training ``gt_bboxes_3d`` and
                ``gt_labels_3d`` list[B], ``gt_masks_bev`` (B, classes, X, Y), ``depths``. Others are ignored.

        Returns:
            Training: ordered dict of ``loss/<task>/<name>`` (times the task's weight) and ``stats/<task>/<name>``.
            Evaluation: list[B] of dict with ``boxes_3d, scores_3d, labels_3d`` and ``masks_bev`` (classes, X, Y)
            probabilities, as far as there are heads for them, on the CPU.
        """
        if not metas:
            raise ValueError('the batch has no metas, whose length is the batch size')
        batch['metas'] = metas
        fused, auxiliary = self.extract(batch, len(metas))
        maps = self.decode(fused)
        if self.training:
            return self._losses(maps, auxiliary, batch)
        return self._predictions(maps, metas)

    def _losses(self, maps: Dict[str, torch.Tensor], auxiliary: Dict[str, torch.Tensor], batch: Mapping[str, Any]):
        found: Dict[str, Mapping[str, torch.Tensor]] = {}
        unfinished: Dict[str, Callable[[], Mapping[str, torch.Tensor]]] = {}
        for task, head in self.heads.items():
            detects = hasattr(head, 'get_bboxes')
            for key in ('gt_bboxes_3d', 'gt_labels_3d') if detects else ('gt_masks_bev', ):
                if batch.get(key) is None:
                    raise ValueError(f'model.heads.{task} trains on {key!r}, which the batch does not have')
            if detects:
                matter = [batch['gt_bboxes_3d'], batch['gt_labels_3d'], head(maps[task], batch['metas'])]
                if _matches_in_two_steps(head):
                    matter.append(head.start_matching(*matter))
                unfinished[task] = functools.partial(head.loss, *matter)
            else:
                found[task] = head(maps[task], batch['gt_masks_bev'])
        for task, losses in unfinished.items():  # the device has the other heads' work while the host matches boxes
            found[task] = losses()
        outputs = OrderedDict()
        for task in self.heads:
            for name, value in found[task].items():
                if value.requires_grad:
                    outputs[f'loss/{task}/{name}'] = value * self.loss_scale[task]
                else:
                    outputs[f'stats/{task}/{name}'] = value
        for name, value in auxiliary.items():
            outputs[f'loss/{name}'] = value
        return outputs

    def _predictions(self, maps: Dict[str, torch.Tensor], metas: List[dict]) -> List[dict]:
        outputs: List[dict] = [{} for _ in metas]
        queued: Dict[str, torch.Tensor] = {}
        for task, head in self.heads.items():
            if _decodes_in_two_steps(head):
                queued[task] = head.candidates(head(maps[task], metas))
            elif hasattr(head, 'get_bboxes'):
                self._add_boxes(outputs, head.get_bboxes(head(maps[task], metas), metas))
            else:
                queued[task] = head(maps[task]).float()
        # Everything is queued before the host waits, once, for all results.
        for task, result in zip(queued, download(list(queued.values())), strict=True):
            if _decodes_in_two_steps(self.heads[task]):
                self._add_boxes(outputs, self.heads[task].detections(result, metas))
            else:
                for output, probabilities in zip(outputs, result, strict=True):
                    output['masks_bev'] = probabilities
        return outputs

    @staticmethod
    def _add_boxes(outputs: List[dict], found: Sequence[Tuple]) -> None:
        for output, (boxes, scores, labels) in zip(outputs, found, strict=True):
            output.update(boxes_3d=boxes.to('cpu'), scores_3d=scores.cpu(), labels_3d=labels.cpu())

    # ------------------------------------------------------------------ mmcv runner

    def train_step(self, data: Mapping[str, Any], optimizer=None) -> dict:
        """One forward pass for mmcv's runner: ``{loss, log_vars, num_samples}``."""
        losses = self(**data)
        loss, log_vars = self._parse_losses(losses)
        return {'loss': loss, 'log_vars': log_vars, 'num_samples': len(data['metas'])}

    def val_step(self, data: Mapping[str, Any], optimizer=None) -> dict:
        """Predictions for mmcv's runner: ``{outputs, log_vars, num_samples}`` (no losses: heads have none in this mode)."""
        return {'outputs': self(**data), 'log_vars': OrderedDict(), 'num_samples': len(data['metas'])}

    @staticmethod
    def _parse_losses(losses: Mapping[str, torch.Tensor]):
        """The total (sum of what is named ``loss/...``) and all values as floats, averaged over ranks.

        One reduction and one copy to the CPU for all values together.
        """
        total = sum(value.float().mean() for name, value in losses.items() if name.startswith('loss/'))
        values = [value.detach().float().mean() for value in losses.values()]
        packed = torch.stack([*values, total.detach()])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(packed.div_(dist.get_world_size()))
        return total, OrderedDict(zip([*losses, 'loss'], packed.tolist(), strict=True))
