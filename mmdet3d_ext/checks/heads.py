"""Heads against the maps that they get, the classes that they are trained on, and the labels of the pipelines."""
from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ..geometry.grid import BevGrid
from ..models.heads.segm.enhanced import STAGES
from ..models.losses.segmentation import RESAMPLE_MODES
from .bev import origin, remedy, size
from .context import Context, scope_of
from .grids import Chain, Lay
from .pipelines import Step, label_steps


def check_heads(c: Context, chain: Chain) -> None:
    """Every head: channels, grid, classes."""
    for task, head in (c.get('model.heads') or {}).items():
        if not isinstance(head, Mapping):
            continue
        key, lay = f'model.heads.{task}', chain.trunks.get(task)
        if lay is not None and lay.channels is not None and isinstance(head.get('in_channels'), int) \
                and head['in_channels'] != lay.channels:
            c.error(f'{key}.in_channels', f'is {head["in_channels"]}, the decoder gives {lay.channels} channels',
                    {f'{key}.in_channels': lay.channels})
        if isinstance(head.get('grid_transform'), Mapping):
            _map_head(c, key, head, lay)
        elif isinstance(head.get('bbox_coder'), Mapping):
            _object_head(c, key, head, lay, chain.voxel)
    for task in c.get('model.loss_scale') or {}:
        if not c.get(f'model.heads.{task}'):
            c.warn(f'model.loss_scale.{task}', f'has no effect: model.heads has no {task!r}')


# ---- detection ---------------------------------------------------------------------------------------------------------
def _object_head(c: Context, key: str, head: Mapping[str, Any], lay: Optional[Lay], voxel: Optional[Tuple[float, float]]) -> None:
    _object_classes(c, key, head)
    train = head.get('train_cfg') or {}
    size_ = voxel or (tuple(train['voxel_size'][:2]) if isinstance(train.get('voxel_size'), list) else None)
    if lay is None or size_ is None:
        return
    grid = lay.grid
    cells = [_whole(axis.length / own) for axis, own in zip((grid.x, grid.y), size_)]
    ratio = [axis.step / own for axis, own in zip((grid.x, grid.y), size_)]
    factor = _whole(ratio[0])
    if factor is None or _whole(ratio[1]) != factor:
        c.error(f'{key}.train_cfg.out_size_factor', f'cannot be right: the decoder gives cells of {grid.x.step:.6g} x {grid.y.step:.6g} m, '
                f'which are {ratio[0]:.6g} x {ratio[1]:.6g} voxels of {size_[0]:g} x {size_[1]:g} m, no whole number. A detection head '
                'works on cells of whole voxels: keep its trunk on such a grid and give the map a trunk of its own (bev.map)')
        return
    common = factor_key(c, head, factor)
    low, high = [grid.x.lo, grid.y.lo], [grid.x.hi, grid.y.hi]
    for part in ('train_cfg', 'test_cfg', 'bbox_coder'):
        settings = head.get(part)
        if not isinstance(settings, Mapping):
            continue
        place = f'{key}.{part}'
        if settings.get('out_size_factor', factor) != factor:
            c.error(f'{place}.out_size_factor', f'is {settings["out_size_factor"]}, but the decoder gives {grid.x.cells}x'
                    f'{grid.y.cells} cells of {grid.x.step:.6g} m, {factor} voxels of {size_[0]:g} m each; boxes would be misplaced',
                    {common or f'{place}.out_size_factor': factor})
        if isinstance(settings.get('voxel_size'), list) and not _same(settings['voxel_size'][:2], size_):
            wanted = [*size_, *settings['voxel_size'][2:]]
            c.error(f'{place}.voxel_size', f'is {settings["voxel_size"]}, the encoder\'s voxels are {list(size_)} m',
                    {f'{place}.voxel_size': wanted})
        for name in ('pc_range', 'point_cloud_range'):
            found = settings.get(name)
            if not isinstance(found, list):
                continue
            expected = low if len(found) < 6 else [*low, found[2], *high, found[5]]
            if not _same(found[:2] if len(found) < 6 else found, expected):
                c.metres(f'{place}.{name}', f'is {found}, but the map that the head gets covers x {[low[0], high[0]]}, y '
                         f'{[low[1], high[1]]} m', {f'{place}.{name}': [*expected, *found[len(expected):]]})
        if isinstance(settings.get('grid_size'), list) and None not in cells and list(settings['grid_size'][:2]) != cells:
            c.error(f'{place}.grid_size', f'is {settings["grid_size"]}, but {grid.x.length:g} x {grid.y.length:g} m hold {cells[0]}x{cells[1]} '
                    f'voxels of {size_[0]:g} m', {f'{place}.grid_size': [*cells, *settings['grid_size'][2:]]})


def factor_key(c: Context, head: Mapping[str, Any], factor: int) -> Optional[str]:
    """``out_size_factor`` at the root, if the head's three places follow it and it is wrong."""
    root = c.get('out_size_factor')
    found = [head[part].get('out_size_factor') for part in ('train_cfg', 'test_cfg', 'bbox_coder')
             if isinstance(head.get(part), Mapping)]
    return 'out_size_factor' if root is not None and root != factor and all(value in (root, None) for value in found) else None


def _object_classes(c: Context, key: str, head: Mapping[str, Any]) -> None:
    names = c.get('object_classes')
    if not isinstance(names, list):
        return
    if head.get('num_classes') is not None and head['num_classes'] != len(names):
        c.error(f'{key}.num_classes', f'{key} has {head["num_classes"]} classes, but the data set labels {len(names)}: {names} '
                '(object_classes)', {f'{key}.num_classes': len(names)})
    if isinstance(head.get('class_names'), list) and head['class_names'] != names:
        c.error(f'{key}.class_names', f'is {head["class_names"]}, the labels are numbered by object_classes {names}',
                {f'{key}.class_names': names})
    if isinstance(head.get('tasks'), list):
        flat: List[Any] = []
        for one in head['tasks']:
            flat += one.get('class_names', []) if isinstance(one, Mapping) else one
        if flat != names:
            c.error(f'{key}.tasks', f'names the classes {flat}, the labels are numbered by object_classes {names}: both must hold '
                    'the same names in the same order')


# ---- map ---------------------------------------------------------------------------------------------------------------
def _map_head(c: Context, key: str, head: Mapping[str, Any], lay: Optional[Lay]) -> None:
    out = c.scope(f'{key}.grid_transform.output_scope', remedy(c, 'labels', f'{key}.grid_transform.output_scope.0'))
    own = None if c.broken else c.scope(f'{key}.grid_transform.input_scope')
    if own is not None and lay is not None:
        _input(c, f'{key}.grid_transform.input_scope', own, lay.grid, head['grid_transform'].get('prescale_factor', 1))
    if out is not None:
        c.row('map output', out, origin(c, 'labels', out, f'{key}.grid_transform.output_scope'), len(head.get('classes') or ()))
        if lay is not None:
            _inside(c, f'{key}.grid_transform.output_scope', out, lay.grid)
        _labels(c, f'{key}.grid_transform.output_scope', out, head.get('classes'), f'{key}.classes')
    _settings(c, key, head)


def _input(c: Context, key: str, own: BevGrid, trunk: BevGrid, prescale: Any) -> None:
    wanted = {key: scope_of(trunk)}
    if not own.same_scope(trunk):
        c.metres(key, f'{key} is {own}, but the trunk\'s BEV map covers {trunk}: the map would be scaled by '
                 f'{own.x.length / trunk.x.length:.4g}. Align it with point_cloud_range', wanted)
        return
    shapes = [own.shape]
    if isinstance(prescale, (int, float)) and prescale not in (0, 1) and all((n / prescale).is_integer() for n in own.shape):
        shapes.append(tuple(int(n / prescale) for n in own.shape))
    if trunk.shape not in shapes:
        c.metres(key, f'the BEV map that reaches the map head has {trunk.x.cells}x{trunk.y.cells} cells, but {key} describes {own}', wanted)


def _inside(c: Context, key: str, out: BevGrid, trunk: BevGrid) -> None:
    beyond = max(trunk.x.lo - out.x.lo, trunk.y.lo - out.y.lo, out.x.hi - trunk.x.hi, out.y.hi - trunk.y.hi)
    if beyond > 1e-3:
        c.warn(key, f'reaches {beyond:g} m beyond the trunk\'s map ({trunk}): nothing is seen there')


def _labels(c: Context, key: str, out: BevGrid, classes: Any, classes_key: str) -> None:
    """Output and labels must have the same metres and cells in training and validation, and the same classes."""
    found: Dict[str, Tuple[Step, BevGrid]] = {}
    same_classes = True
    for name, step in label_steps(c):
        grid = c.grid(step.key, remedy(c, 'labels', f'{step.key}.xbound'))
        if not any(row.stage == f'labels ({name})' for row in c.report.rows) and grid is not None:
            c.row(f'labels ({name})', grid, origin(c, 'labels', grid, f'{step.key}.xbound'), len(step.settings.get('classes') or ()))
        if grid is not None:
            found[name] = (step, grid)
        names = step.settings.get('classes')
        if same_classes and isinstance(classes, list) and isinstance(names, list) and classes != names:
            same_classes = False
            c.error(classes_key, f'the map head\'s classes are {classes} ({classes_key}), the labels\' are {names} ({step.key}.classes, '
                    'LoadBEVSegmentation); they must be the same in the same order', {classes_key: names})
    grids = [grid for _, grid in found.values()]
    agree = all(_equal(grid, grids[0]) for grid in grids)
    for step, grid in found.values():
        if _equal(grid, out):
            continue
        text = (f'{key} is {out}, but the labels cover {grid} (xbound/ybound of LoadBEVSegmentation, {step.key})')
        if agree:
            write = {key: scope_of(grid)} if c.rank(key) >= c.rank(f'{step.key}.xbound') else size(c, 'labels', out, f'{step.key}.xbound')
            c.error(key, f'{text}. Output and labels must be the same cells', write)
            return
        c.error(f'{step.key}.xbound', f'{text}; the other pipeline\'s labels are right', {
            f'{step.key}.xbound': scope_of(out)[0], f'{step.key}.ybound': scope_of(out)[1]})


def _settings(c: Context, key: str, head: Mapping[str, Any]) -> None:
    """Values of the map head that would fail when it is built or, worse, later."""
    names = head.get('classes') or []
    weights = head.get('class_weights')
    if isinstance(weights, Mapping):
        for name in weights:
            if name not in names:
                c.error(f'{key}.class_weights.{name}', f'weights a class that the head does not have; its classes are {names}')
    elif isinstance(weights, list) and len(weights) != len(names):
        c.error(f'{key}.class_weights', f'has {len(weights)} values for {len(names)} classes')
    mode = head.get('target_resample', 'max')
    if mode not in RESAMPLE_MODES:
        c.error(f'{key}.target_resample', f'is {mode!r}: labels are whole numbers and are brought to the size of the auxiliary output by '
                f'one of {list(RESAMPLE_MODES)}', {f'{key}.target_resample': 'max'})
    widths = head.get('decoder_channels')
    if widths is not None and (not isinstance(widths, list) or not widths or
                               any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in widths)):
        c.error(f'{key}.decoder_channels', f'must be a list of channels, one per layer, got {widths!r}',
                {f'{key}.decoder_channels': [256, 128]})
    stages = head.get('use_checkpoint')
    for stage in stages if isinstance(stages, list) else ():
        if stage not in STAGES:
            c.error(f'{key}.use_checkpoint', f'names {stage!r}; there are {list(STAGES)}', {f'{key}.use_checkpoint': True})
    if head.get('aux_weight') is not None and not head.get('deep_supervision', False):
        c.warn(f'{key}.aux_weight', 'has no effect without deep_supervision')


# ---- numbers -----------------------------------------------------------------------------------------------------------
def _equal(a: BevGrid, b: BevGrid) -> bool:
    return a.shape == b.shape and a.same_scope(b)


def _whole(value: float) -> Optional[int]:
    return int(round(value)) if value > 0.5 and math.isclose(value, round(value), rel_tol=1e-5) else None


def _same(a, b) -> bool:
    return len(a) == len(b) and all(isinstance(x, (int, float)) and math.isclose(x, y, abs_tol=1e-6) for x, y in zip(a, b))
