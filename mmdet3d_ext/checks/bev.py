"""The ``bev`` block: one size per branch, and whether what is built from it still follows it."""
from __future__ import annotations

import difflib
import math
from typing import Any, Callable, Dict, Mapping, Optional

from ..geometry.grid import BevGrid
from .context import Context, clean, scope_of

BRANCHES = {'lidar': ('step', 'cells', 'height'), 'camera': ('step', 'cells', 'stride'), 'fused': ('step', 'cells'),
            'map': ('step', 'cells', 'stride'), 'labels': ('x', 'y', 'step', 'cells')}
OPTIONAL = ('fused', 'map')  # branches that a model may do without


def check_bev(c: Context) -> None:
    """Keys, ranges and sizes of ``bev``; then each size against the value that the model really gets."""
    bev = c.get('bev')
    if bev is None:
        return
    if not isinstance(bev, Mapping):
        c.error('bev', f'must be a mapping of x, y, z and {list(BRANCHES)}, got {bev!r}')
        return
    _known(c, 'bev', bev, ('x', 'y', 'z', *BRANCHES))
    for key in ('bev.x', 'bev.y', 'bev.z', 'bev.labels.x', 'bev.labels.y'):
        if c.has(key) and not _is_range(c.get(key)):
            c.error(key, f'must be [lower, upper] in metres, got {c.get(key)!r}')
            return
    for name, keys in BRANCHES.items():
        branch = bev.get(name)
        if isinstance(branch, Mapping):
            _known(c, f'bev.{name}', branch, keys)
            _one_size(c, name, branch)
    _still_followed(c)


def _known(c: Context, key: str, section: Mapping[str, Any], names) -> None:
    for name in section:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            c.error(f'{key}.{name}', f'is not known and has no effect{f"; did you mean {key}.{near[0]}?" if near else ""}')


def _is_range(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_number(v) for v in value) and value[1] > value[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _length(c: Context, name: str) -> Optional[float]:
    bounds = c.get('bev.labels.x' if name == 'labels' else 'bev.x')
    return bounds[1] - bounds[0] if _is_range(bounds) else None


def _one_size(c: Context, name: str, branch: Mapping[str, Any]) -> None:
    step, cells, key = branch.get('step'), branch.get('cells'), f'bev.{name}'
    length = _length(c, name)
    if step is None and cells is None:
        if name not in OPTIONAL:
            c.error(f'{key}.step', f'and {key}.cells are both null: give one of them')
        return
    if cells is not None and (isinstance(cells, bool) or not isinstance(cells, int) or cells < 1):
        c.error(f'{key}.cells', f'must be a whole number >= 1 (cells along x), got {cells!r}')
    elif step is not None and (not _is_number(step) or step <= 0):
        c.error(f'{key}.step', f'must be a number of metres > 0, got {step!r}')
    elif step is not None and cells is not None and length and abs(length / step - cells) > 1e-3:
        # The step decides in the expressions, so a later count of cells would have no effect.
        cells_later = c.rank(f'{key}.cells') >= c.rank(f'{key}.step')
        wrong, other = ('step', 'cells') if cells_later else ('cells', 'step')
        c.error(f'{key}.{wrong}', f'is {branch[wrong]}, but {key}.{other} is {branch[other]} ({length / cells:.6g} m / '
                                  f'{length / step:.6g} cells): they contradict each other', {f'{key}.{wrong}': None})


def _expected_step(c: Context, name: str) -> Optional[float]:
    step, cells, length = c.get(f'bev.{name}.step'), c.get(f'bev.{name}.cells'), _length(c, name)
    if _is_number(step) and step > 0:
        return step
    return length / cells if isinstance(cells, int) and cells > 0 and length else None


def _still_followed(c: Context) -> None:
    pcr, voxel = c.get('point_cloud_range'), c.get('voxel_size')
    if isinstance(pcr, list) and len(pcr) == 6:
        for index, axis in enumerate('xyz'):
            _follows(c, f'bev.{axis}', 'point_cloud_range', [pcr[index], pcr[index + 3]], c.get(f'bev.{axis}'))
    if isinstance(voxel, list) and len(voxel) == 3:
        _follows(c, size_key(c, 'lidar'), 'voxel_size', voxel[0], _expected_step(c, 'lidar'))
        _follows(c, 'bev.lidar.height', 'voxel_size', voxel[2], c.get('bev.lidar.height'))
    bound = c.get('map_bound')
    if isinstance(bound, list) and len(bound) == 2 and all(isinstance(b, list) and len(b) == 3 for b in bound):
        for axis, own in zip('xy', bound):
            _follows(c, f'bev.labels.{axis}', 'map_bound', own[:2], c.get(f'bev.labels.{axis}'))
        _follows(c, size_key(c, 'labels'), 'map_bound', bound[0][2], _expected_step(c, 'labels'))
    camera = 'model.encoders.camera.vtransform'
    xbound = c.get(f'{camera}.xbound')
    if isinstance(xbound, list) and len(xbound) == 3:
        _follows(c, size_key(c, 'camera'), f'{camera}.xbound', xbound[2], _expected_step(c, 'camera'), 'camera_step')
        _follows(c, 'bev.camera.stride', f'{camera}.downsample', c.get(f'{camera}.downsample', 1), c.get('bev.camera.stride'))
    several = sum(bool(encoder) for encoder in (c.get('model.encoders') or {}).values()) > 1
    for name, key, used in (('fused', 'model.fused_grid', several), ('map', 'model.branches.map', c.get('model.heads.map'))):
        if used and _expected_step(c, name) is not None and c.get(key) is None:
            c.error(size_key(c, name), f'is set, but {key} is null, so nothing follows it; write {key.rpartition(".map")[0] or key}: '
                                       f'"${{templates.{"branches" if name == "map" else "fused_grid"}}}" in the file')


def _follows(c: Context, key: str, actual_key: str, actual: Any, expected: Any, via: Optional[str] = None) -> None:
    """An error where ``key`` was written last and has no effect, a warning where ``actual_key`` was overridden after it."""
    if expected is None or actual is None or _close(expected, actual):
        return
    shown = via if via and c.has(via) and _close(c.get(via), actual) else actual_key
    text = f'is {c.get(key)!r}, but {shown} is {_short(c.get(shown))} ({c.source(shown)}), which is what counts'
    value = actual
    if key.endswith('.cells'):
        value = round(_length(c, key.split('.')[1]) / actual)
    if c.rank(key) >= c.rank(shown):
        c.error(key, f'{text}: nothing follows {key}. Leave {shown} out', {key: value})
    else:
        c.warn(key, f'{text}; other keys may still follow {key}', {key: value})


def _short(value: Any) -> str:
    return str([clean(v) if isinstance(v, float) else v for v in value] if isinstance(value, list) else value)


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_close(x, y) for x, y in zip(a, b))
    return _is_number(a) and _is_number(b) and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def size_key(c: Context, name: str) -> str:
    """``bev.<name>.cells`` where the branch gives its cells, else ``bev.<name>.step``."""
    by_cells = c.get(f'bev.{name}.cells') is not None and c.get(f'bev.{name}.step') is None
    return f'bev.{name}.{"cells" if by_cells else "step"}'


def size(c: Context, name: str, grid: BevGrid, key: str) -> Dict[str, Any]:
    """What to write so that the branch ``name`` has this grid: to ``bev`` where the present axis (at ``key``) follows it, else to what
    it follows instead."""
    present = c.get(f'{key}.2')
    expected = _expected_step(c, name)
    if expected is not None and present is not None and _close(expected, present):
        own = size_key(c, name)
        return {own: grid.x.cells if own.endswith('cells') else clean(grid.x.step)}
    if name == 'camera' and c.has('camera_step') and _close(c.get('camera_step'), present):
        return {'camera_step': clean(grid.x.step)}
    if name == 'labels' and c.has('map_bound.0.2') and _close(c.get('map_bound.0.2'), present):
        return {'map_bound': scope_of(grid)}
    return {key: scope_of(grid)[0]}


def remedy(c: Context, name: str, key: str) -> Optional[Callable[[float], Dict[str, Any]]]:
    """Where to write a corrected step of the axis at ``key``: to ``bev.<name>.step`` or ``map_bound`` if the axis follows it; None: to
    the axis itself."""
    present = c.get(f'{key}.2')
    own = c.get(f'bev.{name}.step')
    if own is not None and _close(own, present):
        return lambda step: {f'bev.{name}.step': step}
    bound = c.get('map_bound')
    if name == 'labels' and isinstance(bound, list) and _close(c.get('map_bound.0.2'), present):
        return lambda step: {'map_bound': [[*axis[:2], step] for axis in bound]}
    return None


def origin(c: Context, name: str, grid: BevGrid, key: str) -> str:
    """The key of ``bev`` that this grid comes from; ``key`` itself where something else decides."""
    expected = _expected_step(c, name)
    return size_key(c, name) if expected is not None and _close(expected, grid.x.step) else key
