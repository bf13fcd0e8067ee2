"""The chain of grids and channels: sensors -> fused trunk -> decoder -> heads -> labels.

Every stage is computed from the configuration; where a value is wrong, the right one is used for the stages after it, so that one
mistake is one error.
"""
from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ..geometry.grid import Axis, BevGrid, GridError
from . import layers
from .bev import origin, remedy, size
from .context import Context, clean, scope_of
from .layers import Map, Misfit

SENSORS = ('camera', 'lidar', 'radar')
ENCODERS = 'model.encoders'


class Lay(NamedTuple):
    """A BEV map: where its cells lie and how many channels it has (None: not known)."""

    grid: BevGrid
    channels: Optional[int]


class Chain(NamedTuple):
    """The maps that the heads get, and the LiDAR voxels' size (None without LiDAR)."""

    sensors: Dict[str, Optional[Lay]]
    trunks: Dict[str, Optional[Lay]]
    voxel: Optional[Tuple[float, float]]


def check_chain(c: Context) -> Optional[Chain]:
    """Check all stages up to the decoder; None for a model that is no BEVFusion."""
    if not isinstance(c.get(ENCODERS), Mapping):
        return None
    present = [sensor for sensor in SENSORS if isinstance(c.get(f'{ENCODERS}.{sensor}'), Mapping)]
    sensors: Dict[str, Optional[Lay]] = {}
    for sensor in present:
        sensors[sensor] = c.attempt(f'{ENCODERS}.{sensor}', lambda s=sensor: _camera(c) if s == 'camera' else _points(c, s))
    fused = _fused(c, sensors)
    trunks: Dict[str, Optional[Lay]] = {}
    decoder = c.get('model.decoder')
    branches = {task: cfg for task, cfg in (c.get('model.branches') or {}).items() if cfg}
    for task in [task for task, head in (c.get('model.heads') or {}).items() if head]:
        if task in branches:
            trunks[task] = _branch(c, task, sensors)
        elif isinstance(decoder, Mapping) and task in decoder:
            trunks[task] = _decode(c, f'model.decoder.{task}', fused, f'decoder ({task})')
        else:
            trunks[task] = _decode(c, 'model.decoder', fused, 'decoder')
    size_ = c.get(f'{ENCODERS}.lidar.voxelize.voxel_size') if 'lidar' in present else None
    return Chain(sensors, trunks, tuple(size_[:2]) if isinstance(size_, list) and len(size_) == 3 else None)


# ---- sensors -----------------------------------------------------------------------------------------------------------
def _camera(c: Context) -> Optional[Lay]:
    base = f'{ENCODERS}.camera.vtransform'
    settings = c.get(base)
    if not isinstance(settings, Mapping):
        return None
    grid = c.grid(base, remedy(c, 'camera', f'{base}.xbound'))
    heights, _ = c.axis(f'{base}.zbound'), c.axis(f'{base}.dbound')
    if grid is None:
        c.broken = True
        return None
    width, out = settings.get('out_channels'), None
    if heights is not None and isinstance(width, int):
        out = width * heights.cells
    c.row('camera grid', grid, origin(c, 'camera', grid, f'{base}.xbound'))
    end = _halved(c, grid, settings.get('downsample', 1), f'{base}.downsample', 'camera')
    if end is not None:
        c.row('camera map', end, f'{base}.downsample', out)
    _image(c, settings)
    return None if end is None else Lay(end, out)


def _halved(c: Context, grid: BevGrid, stride: Any, key: str, branch: str) -> Optional[BevGrid]:
    """The grid after a stride."""
    if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
        c.error(key, f'must be a whole number >= 1, got {stride!r}', {key: 2})
        return None
    try:
        return grid.downsample(stride)
    except GridError:
        cells = [max(1, round(axis.cells / stride)) * stride for axis in (grid.x, grid.y)]
        c.broken = True
        fitting = BevGrid(Axis(grid.x.lo, grid.x.hi, cells[0]), Axis(grid.y.lo, grid.y.hi, cells[1]))
        c.error(key, f'{grid.x.cells}x{grid.y.cells} cells cannot be divided by the stride {stride}: {cells[0]}x{cells[1]} can',
                size(c, branch, fitting, key.rpartition('.')[0] + '.xbound'))
        return fitting.downsample(stride)


def _image(c: Context, transform: Mapping[str, Any]) -> None:
    """Image size, backbone, neck and view transform must fit."""
    base = f'{ENCODERS}.camera'
    image = transform.get('image_size')
    if not isinstance(image, list) or len(image) != 2:
        return
    levels = c.attempt(f'{base}.backbone', lambda: layers.image_levels(c.get(f'{base}.backbone') or {}, image))
    if levels is None:
        return
    out = _through(c, f'{base}.neck', lambda cfg: layers.neck(cfg, levels))
    if not out:
        return
    first, features = out[0], transform.get('feature_size')
    if isinstance(features, list) and tuple(features) != first.size:
        c.error(f'{base}.vtransform.feature_size', f'is {features}, but images of {image} leave the backbone and the neck with '
                f'{list(first.size)} features', {f'{base}.vtransform.feature_size': list(first.size)})
    if first.channels is not None and transform.get('in_channels') != first.channels:
        c.error(f'{base}.vtransform.in_channels', f'is {transform.get("in_channels")}, the neck gives {first.channels} channels',
                {f'{base}.vtransform.in_channels': first.channels})


def _points(c: Context, sensor: str) -> Optional[Lay]:
    base = f'{ENCODERS}.{sensor}'
    bounds, voxel = c.get(f'{base}.voxelize.point_cloud_range'), c.get(f'{base}.voxelize.voxel_size')
    for key, value, count in (('point_cloud_range', bounds, 6), ('voxel_size', voxel, 3)):
        if not isinstance(value, list) or len(value) != count:
            c.error(f'{base}.voxelize.{key}', f'must be a list of {count} numbers, got {value!r}')
            return None
    backbone, key = dict(c.get(f'{base}.backbone') or {}), f'{base}.voxelize.voxel_size'
    stride = layers.point_stride(backbone)

    def write(index: int, step: float) -> Mapping[str, Any]:
        if index < 2:  # a step whose cells the encoder's stride divides, too
            length = bounds[index + 3] - bounds[index]
            step = clean(length / (stride * max(1, round(length / voxel[index] / stride))))
        name = 'bev.lidar.height' if index == 2 else 'bev.lidar.step'
        if sensor == 'lidar' and c.get(name) == voxel[index]:
            return {name: step}
        return {key: [step if i == index or (index < 2 and i < 2) else v for i, v in enumerate(voxel)]}

    axes = [c.axis(key, [bounds[i], bounds[i + 3], voxel[i]], lambda step, i=i: write(i, step)) for i in range(3)]
    if None in axes:
        c.broken = True
        return None
    grid, cells = BevGrid(axes[0], axes[1]), [axis.cells for axis in axes]
    for index in (0, 1):
        if cells[index] % stride:
            c.broken = True
            c.error(key, f'{cells[index]} voxels along {"xy"[index]} cannot be divided by the encoder\'s stride {stride}',
                    write(index, voxel[index]))
            return None
    c.row(f'{sensor} voxels', grid, origin(c, 'lidar', grid, key) if sensor == 'lidar' else key)
    _canvas(c, base, backbone, cells)
    _pillar_net(c, base, backbone, bounds, voxel)
    found = c.attempt(f'{base}.backbone', lambda: _layer(layers.point_encoder, backbone))
    if isinstance(found, Misfit):
        _report(c, f'{base}.backbone', found)
        return None
    if found is None:
        c.report.notes.append(f'{base}.backbone: the cells after {backbone.get("type")!r} are not known before it runs; what '
                              'follows is not checked')
        return None
    end = BevGrid(Axis(grid.x.lo, grid.x.hi, found.size[0]), Axis(grid.y.lo, grid.y.hi, found.size[1]))
    c.row(f'{sensor} map', end, f'{base}.backbone', found.channels)
    return Lay(end, found.channels)


def _canvas(c: Context, base: str, backbone: Dict[str, Any], cells: List[int]) -> None:
    """``sparse_shape`` or the scatter's ``output_shape`` holds the voxel grid; what is wrong is put right in ``backbone``."""
    text = f'{base}.voxelize makes {cells[0]}x{cells[1]}x{cells[2]} voxels (x, y, z)'
    if 'sparse_shape' in backbone:
        shape, wanted, key = backbone['sparse_shape'], [*cells[:2], cells[2] + 1], f'{base}.backbone.sparse_shape'
        fits = isinstance(shape, list) and len(shape) == 3 and shape[:2] == cells[:2] and shape[2] >= cells[2]
        if not fits:
            c.error(key, f'is {shape}, but {text}', {key: wanted})
            backbone['sparse_shape'] = wanted
    scatter = backbone.get('pts_middle_encoder')
    if isinstance(scatter, Mapping) and 'output_shape' in scatter and list(scatter['output_shape']) != cells[:2]:
        key = f'{base}.backbone.pts_middle_encoder.output_shape'
        c.error(key, f'is {scatter["output_shape"]}, but {text}', {key: cells[:2]})
        backbone['pts_middle_encoder'] = {**scatter, 'output_shape': cells[:2]}


def _pillar_net(c: Context, base: str, backbone: Mapping[str, Any], bounds: list, voxel: list) -> None:
    net = backbone.get('pts_voxel_encoder')
    for name, value in (('point_cloud_range', bounds), ('voxel_size', voxel)):
        if isinstance(net, Mapping) and name in net and list(net[name]) != list(value):
            key = f'{base}.backbone.pts_voxel_encoder.{name}'
            c.error(key, f'is {net[name]}, {base}.voxelize.{name} is {value}', {key: list(value)})


# ---- trunk -------------------------------------------------------------------------------------------------------------
def _fused(c: Context, sensors: Mapping[str, Optional[Lay]]) -> Optional[Lay]:
    if not sensors:
        return None
    known = {sensor: lay for sensor, lay in sensors.items() if lay is not None}
    if not known or c.broken:
        return None
    if c.get('model.fused_grid') is not None:
        target = c.scope('model.fused_grid', remedy(c, 'fused', 'model.fused_grid.0'))
        if target is None:
            c.broken = True
            return None
        c.row('fused trunk', target, origin(c, 'fused', target, 'model.fused_grid'))
        return Lay(_reaches(c, sensors, target, 'model.fused_grid'), _fuser(c, 'model.fuser', sensors))
    leader = 'lidar' if 'lidar' in known else next(iter(known))
    grid = known[leader].grid
    for sensor, lay in known.items():
        _same_cells(c, sensor, lay.grid, leader, grid)
    c.row('fused trunk', grid, f'{ENCODERS}.{leader}')
    return Lay(grid, _fuser(c, 'model.fuser', sensors))


def _same_cells(c: Context, sensor: str, own: BevGrid, leader: str, grid: BevGrid) -> None:
    names = {'camera': 'vtransform.xbound/ybound/downsample', 'lidar': 'voxelize.voxel_size', 'radar': 'voxelize.voxel_size'}
    key = f'{ENCODERS}.{sensor}.' + ('vtransform.xbound' if sensor == 'camera' else 'voxelize.voxel_size')
    both = '; '.join(f'{name}: {g.x.cells}x{g.y.cells} cells of {g.x.step:.6g} m over x [{g.x.lo:g}, {g.x.hi:g}], y [{g.y.lo:g}, '
                     f'{g.y.hi:g}] m ({ENCODERS}.{name}.{names[name]})' for name, g in ((sensor, own), (leader, grid)))
    if not own.same_scope(grid):
        write = {}
        if sensor == 'camera':
            write = {f'{ENCODERS}.camera.vtransform.{axis}bound': bound for axis, bound in zip('xy', scope_of(_before(c, grid)))}
        c.metres(key, f'the BEV maps of the sensors cover different metres. {both}', write)
    elif own.shape != grid.shape:
        write = size(c, 'camera', _before(c, grid), f'{ENCODERS}.camera.vtransform.xbound') if sensor == 'camera' else {}
        c.error(key, f'the BEV maps of the sensors cannot be fused, their cells differ. {both}. Align these keys, or declare the grid '
                     'on which they meet (bev.fused.step), then each sensor is resampled to it', write)


def _before(c: Context, grid: BevGrid) -> BevGrid:
    """The view transform's grid that its stride takes to ``grid``."""
    stride = c.get(f'{ENCODERS}.camera.vtransform.downsample', 1)
    return BevGrid(*(Axis(axis.lo, axis.hi, axis.cells * stride) for axis in (grid.x, grid.y)))


def _reaches(c: Context, sensors: Mapping[str, Optional[Lay]], target: BevGrid, key: str,
             camera: Optional[BevGrid] = None) -> BevGrid:
    """``target``, or a sensor's own grid where it does not cover the same metres."""
    for sensor, lay in sensors.items():
        own = camera if sensor == 'camera' and camera is not None else lay and lay.grid
        if own is None:
            continue
        if not own.same_scope(target):
            leader = sensors.get('lidar') or lay
            own = camera if camera is not None else leader.grid if leader else own
            c.error(key, f'is {target}, but the BEV map of the {sensor} covers {own}: both must cover the same metres',
                    {key: scope_of(own)})
            return own
        if own.shape != target.shape:
            c.report.notes.append(f'{key}: the {sensor}\'s {own.x.cells}x{own.y.cells} cells are resampled to '
                                  f'{target.x.cells}x{target.y.cells}')
    return target


def _fuser(c: Context, key: str, sensors: Mapping[str, Optional[Lay]]) -> Optional[int]:
    """Channels of the fused map."""
    fuser = c.get(key)
    if fuser is None:
        if len(sensors) > 1:
            c.error(key, f'is null, but the model has {len(sensors)} sensors: {list(sensors)}', {f'{key}.type': 'ConvFuser'})
            return None
        lay = next(iter(sensors.values()))
        return lay.channels if lay is not None else None
    found = [lay.channels if lay is not None else None for lay in sensors.values()]
    given = fuser.get('in_channels')
    if isinstance(given, list):
        if len(given) != len(found) or any(a != b for a, b in zip(given, found) if b is not None):
            expected = [b if b is not None else (given[i] if i < len(given) else 0) for i, b in enumerate(found)]
            c.error(f'{key}.in_channels', f'is {given}, the BEV maps of {list(sensors)} have {expected} channels',
                    {f'{key}.in_channels': expected})
    return fuser.get('out_channels')


def _branch(c: Context, task: str, sensors: Mapping[str, Optional[Lay]]) -> Optional[Lay]:
    """The trunk of a task of its own."""
    key = f'model.branches.{task}'
    camera = None
    if c.get(f'{key}.camera') is not None:
        if 'camera' not in sensors:
            c.error(f'{key}.camera', f'gives a grid to a camera encoder, but {ENCODERS}.camera is null', {f'{key}.camera': None})
        grid = c.grid(f'{key}.camera', remedy(c, 'map', f'{key}.camera.xbound'))
        c.broken |= grid is None
        if grid is not None:
            c.row(f'{task}: camera grid', grid, origin(c, 'map', grid, f'{key}.camera.xbound'))
            camera = _halved(c, grid, c.get(f'{key}.camera.downsample', 1), f'{key}.camera.downsample', 'map')
    target = None if c.broken else c.scope(f'{key}.grid')
    if target is None:
        return None
    c.row(f'{task}: fused trunk', target, f'{key}.grid')
    target = _reaches(c, sensors, target, f'{key}.grid', camera)
    own = f'{key}.fuser' if c.get(f'{key}.fuser') else 'model.fuser'
    fused = Lay(target, _fuser(c, own, sensors))
    return _decode(c, f'{key}.decoder' if c.get(f'{key}.decoder') else 'model.decoder', fused, f'{task}: decoder')


def _decode(c: Context, key: str, fused: Optional[Lay], stage: str) -> Optional[Lay]:
    if fused is None or not isinstance(c.get(key), Mapping):
        return None
    start = Map(fused.channels, fused.grid.shape)
    levels = _through(c, f'{key}.backbone', lambda cfg: layers.bev_levels(cfg, start))
    if levels is None:
        c.report.notes.append(f'{key}.backbone: what {c.get(f"{key}.backbone.type")!r} does to the cells is not known; what '
                              'follows is not checked')
        return None
    out = _through(c, f'{key}.neck', lambda cfg: layers.neck(cfg, levels))
    if not out:
        return None
    last, grid = out[-1], fused.grid
    end = BevGrid(Axis(grid.x.lo, grid.x.hi, last.size[0]), Axis(grid.y.lo, grid.y.hi, last.size[1]))
    if not any(row.stage == stage for row in c.report.rows):
        c.row(stage, end, key, last.channels)
    return Lay(end, last.channels)


def _through(c: Context, key: str, layer) -> Optional[List[Map]]:
    """``layer(settings at key)``; a misfit becomes an error and is put right, up to three times."""
    settings = c.get(key)
    for _ in range(3):
        found = c.attempt(key, lambda given=settings: _layer(layer, given))
        if not isinstance(found, Misfit):
            return found
        _report(c, key, found)
        if found.write is None:
            return None
        settings = {**settings, found.argument: found.write}
    return None


def _layer(layer, settings):
    """``layer(settings)``, or the misfit that it raises."""
    try:
        return layer(settings)
    except Misfit as misfit:
        return misfit


def _report(c: Context, key: str, misfit: Misfit) -> None:
    name = f'{key}.{misfit.argument}'
    c.error(name, misfit.problem, {} if misfit.write is None else {name: misfit.write})
