"""Trunks: grids on which the sensors' BEV maps are fused, and branches that give a task a trunk on a grid of its own.

Letters: B batch, C channels, X/Y BEV cells.
"""
from __future__ import annotations

import logging
from typing import Any, Callable, Dict, Iterator, List, Mapping, MutableMapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ...geometry.grid import Axis, BevGrid, GridError, parse_scope
from ...registry import MODELS
from ..fusers.resample import BEVResample
from .grid_check import sensor_grid

MAIN = 'main'  # name of the trunk that tasks without a branch share
BRANCH_KEYS = ('grid', 'camera', 'fuser', 'decoder')
CAMERA = 'encoders.camera.vtransform'
logger = logging.getLogger('mmdet3d')


def end_grid(sensor: str, encoder: nn.ModuleDict) -> BevGrid:
    """The cells that an encoder's BEV map has, in metres.

    Raises:
        GridError: if they cannot be known before it has run.
    """
    found = sensor_grid(sensor, encoder)
    if found.shape is None:
        raise GridError(f'model.encoders.{sensor}: the cells of its BEV map are not known before it runs, so it cannot be brought '
                        'to another grid; leave model.fused_grid and model.branches out, or its last encoder')
    x, y = found.grid.x, found.grid.y
    return BevGrid(Axis(x.lo, x.hi, found.shape[0]), Axis(y.lo, y.hi, found.shape[1]))


def resamplers(encoders: Mapping[str, nn.ModuleDict], target: BevGrid, key: str,
               camera: Optional[BevGrid] = None) -> nn.ModuleDict:
    """One :class:`BEVResample` per sensor, to ``target``.

    Args:
        key: configuration key of the target, for errors.
        camera: the grid of the camera's map, if not its main one.

    Raises:
        GridError: if a sensor and the target cover different metres.
    """
    found = {}
    for sensor, encoder in encoders.items():
        source = camera if sensor == 'camera' and camera is not None else end_grid(sensor, encoder)
        if not source.same_scope(target):
            raise GridError(f'{key} is {target}, but the BEV map of the {sensor} covers {source}: both must cover the same metres')
        found[sensor] = BEVResample(source, target, f'{sensor} BEV map')
    return nn.ModuleDict(found)


class Branch(nn.Module):
    """Fuser and decoder of one task on a grid of its own, with weights of its own.

    A task that keeps the main trunk is not touched by what another task's branch does: its features, its norm statistics and
    so its results are the same with and without the branch.

    Args:
        task: name of the head.
        cfg: ``grid`` (scope of the fused map), ``camera`` (``{xbound, ybound, downsample}``: the view transform pools on this
            grid, too; without it the camera's main map is resampled), ``fuser`` and ``decoder`` (default: the model's).
        encoders: the model's encoders; the camera's view transform gets the further grid.
        fuser, decoder: the model's own settings.
        build_decoder: makes ``{backbone, neck}`` modules from settings and their key.
    """

    def __init__(self, task: str, cfg: Mapping[str, Any], encoders: Mapping[str, nn.ModuleDict], fuser: Optional[Mapping],
                 decoder: Mapping[str, Any], build_decoder: Callable[[Dict[str, Any], str], nn.ModuleDict]):
        super().__init__()
        key = f'model.branches.{task}'
        if not isinstance(cfg, Mapping):
            raise TypeError(f'{key} must be a mapping of {list(BRANCH_KEYS)}, got {cfg!r}')
        for name in cfg:
            if name not in BRANCH_KEYS:
                raise ValueError(f'{key}: unknown key {name!r}, expected some of {list(BRANCH_KEYS)}')
        if cfg.get('grid') is None:
            raise ValueError(f'{key}.grid is missing: the [x axis, y axis] on which the sensors are fused for this task')
        self.grid = parse_scope(cfg['grid'], f'{key}.grid')
        camera = None
        if cfg.get('camera') is not None:
            if 'camera' not in encoders:
                raise ValueError(f'{key}.camera gives a grid to a camera encoder, but model.encoders.camera is null')
            camera = encoders['camera']['vtransform'].add_grid(task, **cfg['camera'])
        self.resample = resamplers(encoders, self.grid, f'{key}.grid', camera)
        fuser = cfg.get('fuser') or fuser
        self.fuser = None if fuser is None else MODELS.build(fuser)
        settings = cfg.get('decoder') or decoder
        if 'backbone' not in settings:
            raise ValueError(f'{key}: give it a decoder {{backbone, neck}}, or model one that all tasks share')
        self.decoder = build_decoder(dict(settings), f'{key}.decoder')


def fuse(fuser: Optional[nn.Module], resample: Optional[nn.ModuleDict], maps: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The sensors' maps (B, C_i, X, Y) as one (B, C, X, Y).

    Raises:
        ValueError: if the maps differ in size and nothing resamples them, or there are several and no fuser.
    """
    if resample is not None:
        maps = {sensor: resample[sensor](x) for sensor, x in maps.items()}
    sizes = {sensor: tuple(x.shape[-2:]) for sensor, x in maps.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f'the BEV maps of the sensors differ in size: {sizes}; align encoders.camera.vtransform.xbound/'
                         'ybound/downsample with the voxel size, range and stride of the others, or declare the grid on which '
                         'they are fused (model.fused_grid)')
    if fuser is not None:
        return fuser(list(maps.values()))
    if len(maps) > 1:
        raise ValueError(f'model.fuser is null, but there are {len(maps)} sensors: {list(maps)}')
    return next(iter(maps.values()))


def start_from_main(tasks: Sequence[str], state: MutableMapping[str, torch.Tensor], own: Mapping[str, torch.Tensor],
                    prefix: str = '') -> Dict[str, List[str]]:
    """Give branches that a state dict does not know the weights of its main trunk, where the shapes agree.

    So the checkpoint of a model without branches (a coarser stage) starts one with branches.

    Args:
        state: the state dict that is being loaded; gets the further entries.
        own: the model's.
        prefix: of the model's names in ``state``.

    Returns:
        Part of a branch -> the names that were set, for a report.
    """
    started: Dict[str, List[str]] = {}
    for task in tasks:
        for target, source in _parts(task):
            if any(name.startswith(prefix + target) for name in state):
                continue
            names = [name for name in own if name.startswith(target)]
            found = {name: state.get(prefix + source + name[len(target):]) for name in names}
            if names and all(value is not None and value.shape == own[name].shape for name, value in found.items()):
                state.update({prefix + name: value for name, value in found.items()})
                started[target.rstrip('.')] = names
                logger.info('%s starts from the file\'s %s (%d tensors)', target.rstrip('.'), source.rstrip('.'), len(names))
    return started


def _parts(task: str) -> Iterator[Tuple[str, str]]:
    yield f'branches.{task}.fuser.', 'fuser.'
    yield f'branches.{task}.decoder.', 'decoder.'
    yield f'{CAMERA}.extra_downsample.{task}.', f'{CAMERA}.downsample.'
