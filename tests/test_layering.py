"""The dependency rule: data -> encoders -> fuser -> decoder -> heads -> losses / metrics, over a floor; no sibling imports."""
import ast

import pytest
from testing import REPO

PACKAGE = REPO / 'mmdet3d_ext'
FLOOR = {'errors', 'compat', 'registry', 'geometry', 'config', 'ops', 'over_ranks'}
# A unit is a stage's folder; it may import the floor, itself, and what is listed here.
MAY_IMPORT = {
    'errors': set(),
    'compat': set(),
    'registry': {'compat'},
    'geometry': set(),
    'over_ranks': set(),
    'config': {'geometry', 'registry', 'compat'},
    'ops': {'geometry', 'compat'},
    # What a configuration would build, by arithmetic: it reads constants of the models and metrics and builds none.
    'checks': FLOOR | {'metrics', 'models.backbones', 'models.heads', 'models.losses'},
    'datasets': FLOOR,
    'metrics': FLOOR,
    'visualization': FLOOR,
    'monitor': FLOOR,
    'launching': FLOOR,
    'doctor': set(),
    'models.backbones': FLOOR,
    'models.necks': FLOOR,
    'models.vtransforms': FLOOR,
    'models.voxel': FLOOR,
    'models.fusers': FLOOR,
    'models.losses': FLOOR,
    'models.heads': FLOOR | {'models.losses'},
    'models.detectors': FLOOR | {'models.backbones', 'models.necks', 'models.vtransforms', 'models.voxel', 'models.fusers'},
    'models.builder': FLOOR,
}
ASSEMBLY = {'engine', 'models', ''}  # see several stages by purpose


def unit_of(module: str) -> str:
    """The unit that a dotted module path (below the package) belongs to."""
    parts = module.split('.')
    if parts[0] == 'models' and len(parts) > 1:
        return '.'.join(parts[:2])
    return parts[0]


def imported_units(path, module: str):
    """(line, unit) of every import of this package in a source file."""
    package = module.split('.') if path.name == '__init__.py' else module.split('.')[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[:len(package) - (node.level - 1)]
                stem = base + (node.module.split('.') if node.module else [])
                names = [stem + [alias.name] for alias in node.names] if len(stem) < 2 else [stem + [node.names[0].name]]
            elif (node.module or '').split('.')[0] == 'mmdet3d_ext':
                stem = node.module.split('.')[1:]
                names = [stem + [alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split('.')[1:] for alias in node.names if alias.name.split('.')[0] == 'mmdet3d_ext']
        for name in names:
            if name:
                yield node.lineno, unit_of('.'.join(name))


def violations(path, module: str):
    own = unit_of(module) if module else ''
    if own in ASSEMBLY:
        return []
    allowed = MAY_IMPORT[own] | {own}
    return [f'{path.relative_to(REPO)}:{line}: {own} imports {unit}' for line, unit in imported_units(path, module)
            if unit not in allowed and exists(unit)]


def exists(unit: str) -> bool:
    """Whether a unit is a folder or a file of the package (and not a name that a package defines)."""
    place = PACKAGE / unit.replace('.', '/')
    return place.exists() or place.with_suffix('.py').exists()


def test_every_import_follows_the_rule():
    found = []
    for path in sorted(PACKAGE.rglob('*.py')):
        relative = path.relative_to(PACKAGE).with_suffix('')
        parts = relative.parts[:-1] if relative.name == '__init__' else relative.parts
        found += violations(path, '.'.join(parts))
    assert not found, '\n'.join(found)


@pytest.mark.parametrize('source, module', [
    ('from ..heads import bbox', 'models.necks.fpn'),
    ('from mmdet3d_ext.datasets import pipelines', 'models.heads.bbox.head'),
    ('import mmdet3d_ext.engine', 'metrics.iou'),
    ('from ...models import losses', 'datasets.pipelines.loading'),
])
def test_a_forbidden_import_is_found(tmp_path, monkeypatch, source, module):
    path = tmp_path / (module.split('.')[-1] + '.py')
    path.write_text(source + '\n')
    monkeypatch.setitem(globals(), 'REPO', tmp_path)
    assert violations(path, module)
