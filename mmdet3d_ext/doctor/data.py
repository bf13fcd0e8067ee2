"""nuScenes folders, the map expansion's versions, what info files hold. By the converter's and the reader's own rules."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from .options import Options
from .probe import ask
from .report import OK, PROBLEM, SKIPPED, WARNING, Finding

FILES_LOOKED_AT = 40  # samples whose sensor files must exist, spread over an info file

# These modules need NumPy, but neither torch nor mmcv: only the folders' own __init__ files would import them.
_LIGHT = '''
import logging
logging.disable(logging.CRITICAL)
from pathlib import Path
from _light import use_package
use_package("mmdet3d_ext")
datasets = type(sys)("mmdet3d_ext.datasets")
datasets.__path__ = [str(Path(sys.modules["mmdet3d_ext"].__path__[0], "datasets"))]
sys.modules["mmdet3d_ext.datasets"] = datasets
'''
_ROOT = _LIGHT + '''
from mmdet3d_ext.datasets import nuscenes_converter as converter
from mmdet3d_ext.datasets.nuscenes_schema import LOCATIONS
root, version, locations = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",") if sys.argv[3] else []
if not version:
    found = sorted(path.name for path in root.glob("v1.0-*") if path.is_dir())
    version = "v1.0-trainval" if "v1.0-trainval" in found or not found else found[0]
say(version=version)
try:
    converter.check_data_root(root, version)
    say(root=None)
except Exception as error:
    say(root=str(error))
maps = root / "maps" / "expansion"
say(versions={path.stem: converter._map_version(path) for path in sorted(maps.glob("*.json"))} if maps.is_dir() else {})
say(maps=converter.check_map_expansion(root, locations or LOCATIONS))
'''
_INFO = _LIGHT + '''
from mmdet3d_ext.datasets import info_files
path, root, with_maps, number = sys.argv[1], sys.argv[2], sys.argv[3] == "1", int(sys.argv[4])
try:
    found = info_files.load_info_file(path)
except Exception as error:
    say(error=str(error))
    sys.exit(0)
infos = found.infos
say(samples=len(infos), notes=found.notes, version=found.metadata.get("version"),
    locations=sorted({info["location"] for info in infos if info.get("location")}))
problems = []
checks = [lambda: info_files.check_fields(infos, info_files.BASE_FIELDS, path), lambda: info_files.check_cameras(infos, path)]
if "test" not in str(found.metadata.get("version")):
    checks.append(lambda: info_files.check_fields(infos, info_files.ANNOTATION_FIELDS, path))
if with_maps:
    checks.append(lambda: info_files.check_fields(infos, ("location",), path))
for check in checks:
    try:
        check()
    except Exception as error:
        problems.append(str(error))
say(problems=problems)
places = [Path(root)] if root else []
missing, looked = [], 0
for info in infos[::max(1, len(infos) // number)]:
    for name in [info.get("lidar_path"), *(camera.get("data_path") for camera in (info.get("cams") or {}).values())]:
        if name:
            looked += 1
            if not any(os.path.exists(candidate) for candidate in [name, *(place / name for place in places)]):
                missing.append(name)
say(looked=looked, missing=missing[:20], number_missing=len(missing))
'''


def check(options: Options) -> Iterator[Finding]:
    """All of this group."""
    roots = [options.data_root] if options.data_root else list(options.settings.get('data_roots') or [])
    infos = options.info_files or list(options.settings.get('info_files') or [])
    if not roots and not infos:
        yield Finding('data', SKIPPED, 'no configuration and no --data-root given')
        return
    roots = list(dict.fromkeys(str(Path(root)) for root in roots))
    with_maps = bool(options.settings.get('map_labels', True))
    locations: List[str] = []
    answers: Dict[str, Dict[str, Any]] = {}
    for path in dict.fromkeys(infos):
        answer = ask(_INFO, options.timeout * 3, arguments=[path, roots[0] if roots else '', str(int(with_maps)), str(FILES_LOOKED_AT)])
        answers[path] = answer.merged() or {'error': answer.last_line()}
        locations += answers[path].get('locations') or []
    for root in roots:
        yield from check_root(root, options.version, sorted(set(locations)), with_maps, options.timeout * 3)
    for path, said in answers.items():
        yield check_info_file(path, said, roots)


def check_root(root: str, version: Optional[str], locations: List[str], with_maps: bool, timeout: float) -> Iterator[Finding]:
    """Folders and tables of a data root, and the version of each map file."""
    answer = ask(_ROOT, timeout, arguments=[root, version or '', ','.join(locations)])
    said = answer.merged()
    if 'root' not in said:
        yield Finding('data root', PROBLEM, f'{root} could not be looked at: {answer.last_line()}', 'correct --data-root or dataset_root')
        return
    if said['root']:
        yield Finding('data root', PROBLEM, said['root'], 'unpack the archives that it names, or correct dataset_root (--data-root); '
                      'without nuScenes: python tools/create_synthetic_nuscenes.py', said)
    else:
        yield Finding('data root', OK, f'{root}: {said["version"]}, all tables', data=said)
    if not Path(root).is_dir():
        return
    if not with_maps:
        yield Finding('map expansion', SKIPPED, 'the configuration draws no map labels')
        return
    versions = ', '.join(f'{name} {found or "without a version"}' for name, found in (said.get('versions') or {}).items())
    if 'maps' not in said:
        yield Finding('map expansion', PROBLEM, f'{root}/maps/expansion could not be read: {answer.last_line()}',
                      'unpack nuScenes-map-expansion-v1.3 again', said)
    elif said['maps']:
        yield Finding('map expansion', PROBLEM, f'{root}: {"; ".join(said["maps"])}' + (f' (found: {versions})' if versions else ''),
                      'download nuScenes-map-expansion-v1.3 and unpack it so that maps/expansion/<location>.json exist', said)
    else:
        yield Finding('map expansion', OK, f'{root}/maps/expansion: {versions}', data=said)


def check_info_file(path: str, said: Dict[str, Any], roots: List[str]) -> Finding:
    """Form, box convention, fields and (a part of the) sensor files of one info file."""
    name = f'info file {Path(path).name}'
    if 'error' in said:
        return Finding(name, PROBLEM, said['error'], 'make it with python tools/create_data.py nuscenes (--help tells how)', said)
    text = f'{path}: {said["samples"]} samples ({said.get("version") or "no version"}); {"; ".join(said["notes"])}'
    if said.get('problems'):
        return Finding(name, PROBLEM, ' '.join(said['problems']), 'run the command that the message names', said)
    if said.get('missing'):
        return Finding(name, PROBLEM, f'{text}. {said["number_missing"]} of {said["looked"]} sensor files looked at are missing; first '
                       f'{said["missing"][0]}', f'unpack the missing archives, or correct dataset_root (now {", ".join(roots) or "none"})',
                       said)
    if not said['samples']:
        return Finding(name, WARNING, f'{text}: nothing to train on', 'make it anew with tools/create_data.py', said)
    return Finding(name, OK, f'{text}; {said["looked"]} sensor files looked at, all there', data=said)
