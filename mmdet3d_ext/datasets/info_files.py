"""Info files: reading, checking, box conventions.

An info file is a pickle ``{'infos': [info, ...], 'metadata': {...}}`` of plain Python and NumPy values, written by
``tools/create_data.py`` (fields: docs of :mod:`.nuscenes_converter`). Read as well: the reference's and mmdet3d 1.0's files
(same form, other metadata), mmdet3d 0.x's (older box convention, converted) and mmdet3d >= 1.1's
(``data_list``/``metainfo``, see :mod:`.info_files_v11`).

``gt_boxes`` is (n, 7) in the lidar frame, metres and radians:

* ``mmdet3d-1.0`` (ours): centre x, y, z; length, width, height along the box's own x, y, z; yaw counter-clockwise.
* ``mmdet3d-pre-1.0`` (the reference, mmdet3d < 1.0): centre; width, length, height; -yaw - pi/2.
"""
from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from . import restricted_pickle
from .nuscenes_schema import BOX_CONVENTION, CAMERAS, OLD_BOX_CONVENTION
from .restricted_pickle import PathLike, UnsafePickleError

logger = logging.getLogger('mmdet3d_ext')

FORMAT_VERSION = 1

BASE_FIELDS = ('token', 'lidar_path', 'timestamp', 'sweeps', 'lidar2ego_translation', 'lidar2ego_rotation',
               'ego2global_translation', 'ego2global_rotation')
ANNOTATION_FIELDS = ('gt_boxes', 'gt_names', 'gt_velocity', 'num_lidar_pts', 'valid_flag')
CAMERA_FIELDS = ('data_path', 'cam_intrinsic', 'sensor2lidar_rotation', 'sensor2lidar_translation',
                 'sensor2ego_rotation', 'sensor2ego_translation')

# Lengths and widths of these classes never come close, so they tell the order of the box dimensions.
_LONG_CLASSES = ('car', 'truck', 'bus')
_MIN_BOXES = 5
_AGREEMENT = 0.9

# What other names files use for the conventions.
_CONVENTION_NAMES = {
    BOX_CONVENTION: BOX_CONVENTION,
    OLD_BOX_CONVENTION: OLD_BOX_CONVENTION,
    'mit': OLD_BOX_CONVENTION,
    'reference': OLD_BOX_CONVENTION,
}


class InfoFileError(ValueError):
    """An info file that cannot be used; the message says which file, what is wrong and what to run."""


@dataclass
class InfoFile:
    """A read info file: boxes are in the ``mmdet3d-1.0`` convention, whatever the file held.

    Attributes:
        infos: the samples, sorted by timestamp.
        metadata: the file's own metadata, with ``version`` and ``box_convention``.
        notes: what was recognised or converted, one sentence each.
    """

    path: Path
    infos: List[Dict[str, Any]]
    metadata: Dict[str, Any]
    notes: List[str] = field(default_factory=list)


def load_info_file(path: PathLike, box_convention: Optional[str] = None, root: Optional[PathLike] = None) -> InfoFile:
    """Read an info file of any known form, without running anything that it might contain.

    Args:
        path: the pickle.
        box_convention: how to read its boxes where the file does not say it and cannot be recognised
            (``'mmdet3d-1.0'`` or ``'mmdet3d-pre-1.0'``).
        root: the data root, for the command in messages.

    Raises:
        FileNotFoundError: with the command that makes the file.
        InfoFileError: for an unsafe, cut-off or unknown file, or boxes whose convention cannot be told.
    """
    path = Path(path)
    if not path.is_file():
        radar = f' (one file holds all sensors here: write {path.name[:-10]}.pkl)' if path.name.endswith('_radar.pkl') else ''
        stuck = _stuck_to(path, root)
        if stuck is not None:
            raise FileNotFoundError(f'info file {path} does not exist, {stuck} does: dataset_root lacks its "/" at the end')
        raise FileNotFoundError(f'info file {path} does not exist{radar}. Make it with: {create_command(path, root)}')
    try:
        data = restricted_pickle.load(path)
    except UnsafePickleError as error:
        raise InfoFileError(f'refused to load an info file: {error}. Make it anew with tools/create_data.py') from None
    except ValueError as error:
        raise InfoFileError(f'info file {error}. Make it anew with tools/create_data.py') from None

    notes: List[str] = []
    if isinstance(data, Mapping) and 'data_list' in data and 'metainfo' in data:
        from .info_files_v11 import convert_data_list
        infos, metadata = convert_data_list(data, path)
        notes.append('mmdet3d >= 1.1 form (data_list, metainfo)')
    elif isinstance(data, Mapping) and 'infos' in data:
        infos, metadata = list(data['infos'] or ()), data.get('metadata') or {}
    elif isinstance(data, list) and all(isinstance(info, Mapping) and 'token' in info for info in data):
        infos, metadata = list(data), {}
    else:
        keys = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise InfoFileError(f'info file {path}: expected {{infos, metadata}} or {{data_list, metainfo}}, found {keys}')

    if not isinstance(metadata, Mapping) or not all(isinstance(info, Mapping) for info in infos):
        raise InfoFileError(f'info file {path}: every sample of infos and the metadata must be mappings. Make it anew with '
                            'tools/create_data.py')
    metadata, infos = dict(metadata), [{key: value for key, value in info.items() if value is not None} for info in infos]
    check_boxes(infos, path)
    infos = [_seven_columns(info) for info in infos]
    newer = metadata.get('info_format')
    if isinstance(newer, int) and newer > FORMAT_VERSION:
        raise InfoFileError(f'info file {path} has format {newer}, this version reads up to {FORMAT_VERSION}: update '
                            f'mmdet3d_ext or make the file anew')
    convention, note = _decide_convention(infos, metadata, box_convention, path)
    notes.append(note)
    if convention == OLD_BOX_CONVENTION:
        infos = [_converted(info) for info in infos]
        notes.append(f'boxes converted to {BOX_CONVENTION}')
        logger.warning('%s: %s; boxes are converted to %s while loading', path, note, BOX_CONVENTION)
    metadata['box_convention'] = BOX_CONVENTION
    check_fields(infos, ('token', 'timestamp'), path)
    infos.sort(key=lambda info: info['timestamp'])
    return InfoFile(path=path, infos=infos, metadata=metadata, notes=notes)


def create_command(path: PathLike, root: Optional[PathLike] = None) -> str:
    """The command that makes the info file ``path`` (and its split's others) from the data at ``root``."""
    path = Path(path)
    versions = sorted(found.name for found in Path(root).glob('v1.0-*') if found.is_dir()) if root is not None else []
    version = versions[0] if len(versions) == 1 else 'v1.0-trainval'  # with several the tool's default
    words = ['--root-path', _root_word(root), '--out-dir', shlex.quote(str(path.parent)), '--extra-tag', shlex.quote(_tag_of(path))]
    return ' '.join(['python tools/create_data.py nuscenes', *words, '--version', version])


def _stuck_to(path: Path, root: Optional[PathLike]) -> Optional[Path]:
    """The file that was meant where a configuration joined ``root`` and a name without the slash between them."""
    text, before = str(path), str(Path(root or ''))
    rest = text[len(before):]
    if root is None or not text.startswith(before) or rest[:1] in ('', '/'):
        return None
    return Path(before, rest) if Path(before, rest).is_file() else None


def _root_word(root: Optional[PathLike]) -> str:
    return '<data root>' if root is None else shlex.quote(str(root))


def _tag_of(path: Path) -> str:
    return path.name.split('_infos_')[0] if '_infos_' in path.name else 'nuscenes'


# ---------------------------------------------------------------------------------------------------- conventions

def swap_box_convention(boxes: np.ndarray) -> np.ndarray:
    """(n, 7+) boxes of the older convention in ``mmdet3d-1.0``'s, or back: (w, l, h, -yaw - pi/2) <-> (l, w, h, yaw).

    The map is its own inverse. Yaw comes out in [-pi, pi); columns after it are kept.
    """
    boxes = np.asarray(boxes)
    out = boxes.copy()
    out[:, 3], out[:, 4] = boxes[:, 4], boxes[:, 3]
    yaw = -boxes[:, 6] - np.pi / 2
    out[:, 6] = (yaw + np.pi) % (2 * np.pi) - np.pi
    return out


def length_first_votes(names: Iterable[str], dims: np.ndarray) -> Tuple[int, int]:
    """(boxes whose first dimension is the longer one, boxes looked at), for classes that are clearly longer than wide."""
    names, dims = np.asarray(names), np.asarray(dims, dtype=np.float64)
    chosen = np.isin(names, _LONG_CLASSES) if len(names) else np.zeros(0, bool)
    return int((dims[chosen, 0] > dims[chosen, 1]).sum()), int(chosen.sum())


def recognise_convention(infos: Sequence[Mapping[str, Any]], limit: int = 5000) -> Tuple[Optional[str], str]:
    """Tell the box convention from the boxes themselves: ``(convention or None, the evidence)``.

    Cars, trucks and buses are longer than wide: with ``mmdet3d-1.0`` the first dimension is the longer one. At least 5 such
    boxes must be there and 90% of them agree; samples are spread over the file until ``limit`` boxes were seen.
    """
    longer = total = 0
    stride = max(1, len(infos) // 2000)
    for info in infos[::stride]:
        boxes = info.get('gt_boxes')
        if boxes is None or len(boxes) == 0:
            continue
        more, seen = length_first_votes(info.get('gt_names', ()), np.asarray(boxes)[:, 3:6])
        longer, total = longer + more, total + seen
        if total >= limit:
            break
    evidence = f'{longer} of {total} cars, trucks and buses are longer along the first box dimension'
    if total >= _MIN_BOXES and longer >= _AGREEMENT * total:
        return BOX_CONVENTION, evidence
    if total >= _MIN_BOXES and longer <= (1 - _AGREEMENT) * total:
        return OLD_BOX_CONVENTION, evidence
    return None, evidence


def _decide_convention(infos: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any], asked: Optional[str],
                       path: Path) -> Tuple[str, str]:
    """The convention of a file by its metadata, else by its boxes, else as ``asked``; contradictions are refused."""
    known = ', '.join(sorted({BOX_CONVENTION, OLD_BOX_CONVENTION}))
    if asked is not None and asked not in _CONVENTION_NAMES:
        raise InfoFileError(f'box_convention: unknown convention {asked!r}, expected one of {known}')
    stated = metadata.get('box_convention')
    if stated is not None and stated not in _CONVENTION_NAMES:
        raise InfoFileError(f'info file {path}: its metadata names the unknown box convention {stated!r} (known: {known}). '
                            f'Make it anew with tools/create_data.py')
    seen, evidence = recognise_convention(infos)
    given = _CONVENTION_NAMES[stated] if stated is not None else _CONVENTION_NAMES[asked] if asked is not None else None
    source = 'metadata' if stated is not None else 'the box_convention argument'
    if stated is not None and asked is not None and _CONVENTION_NAMES[asked] != given:
        raise InfoFileError(f'info file {path}: its metadata says {stated!r}, the box_convention argument {asked!r}')
    if given is not None:
        if seen is not None and seen != given:
            raise InfoFileError(f'info file {path}: {source} says its boxes are {given}, but {evidence}, as in {seen}. '
                                f'Make it anew with tools/create_data.py')
        return given, f'boxes are {given} (by {source})'
    if seen is not None:
        return seen, f'boxes are {seen} (recognised: {evidence})'
    if not any(len(info.get('gt_boxes', ())) for info in infos):
        return BOX_CONVENTION, 'no boxes, so no box convention'
    raise InfoFileError(f'info file {path}: it does not say its box convention and it cannot be told from the boxes '
                        f'({evidence}; at least {_MIN_BOXES} and {_AGREEMENT:.0%} agreement are needed). Make it anew with '
                        f'tools/create_data.py, or set box_convention to one of {known}')


def _seven_columns(info: Dict[str, Any]) -> Dict[str, Any]:
    """Some files keep the velocity in ``gt_boxes``, too; it is read from ``gt_velocity``."""
    boxes = np.shape(info.get('gt_boxes', ()))
    return info if boxes[1:] == (7,) or not boxes[0] else dict(info, gt_boxes=np.asarray(info['gt_boxes'])[:, :7])


def _converted(info: Mapping[str, Any]) -> Dict[str, Any]:
    info = dict(info)
    if len(info.get('gt_boxes', ())):
        info['gt_boxes'] = swap_box_convention(np.asarray(info['gt_boxes'], dtype=np.float64))
    return info


# ------------------------------------------------------------------------------------------------------- checking

def check_fields(infos: Sequence[Mapping[str, Any]], fields: Sequence[str], path: PathLike, root: Optional[PathLike] = None) -> None:
    """Every info must hold every one of ``fields``; ``root``: the data root, for the command in messages.

    Raises:
        InfoFileError: naming the first info and field that is missing, how many lack it, and the command that fills it.
    """
    for name in fields:
        lacking = [i for i, info in enumerate(infos) if name not in info]
        if lacking:
            token = infos[lacking[0]].get('token', '?')
            raise InfoFileError(f'info file {path}: the field {name!r} is missing in {len(lacking)} of {len(infos)} samples '
                                f'(first: index {lacking[0]}, token {token}). {_remedy(name, Path(path), root)}')


def check_boxes(infos: Sequence[Mapping[str, Any]], path: PathLike) -> None:
    """The annotations that an info holds must be one row per box: ``gt_boxes`` (n, 7 or more), the others n.

    Raises:
        InfoFileError: naming the sample, the field and its shape.
    """
    for index, info in enumerate(infos):
        if 'gt_boxes' not in info:
            continue
        boxes = np.shape(info['gt_boxes'])
        where = f'info file {path}: index {index}, token {info.get("token", "?")}: '
        if boxes[:1] != (0,) and (len(boxes) != 2 or boxes[1] < 7):
            raise InfoFileError(f'{where}gt_boxes must be (n, 7): x, y, z, l, w, h, yaw; its shape is {boxes}. '
                                f'{_remedy("gt_boxes", Path(path))}')
        for name in ANNOTATION_FIELDS:
            if name in info and np.shape(info[name])[:1] != boxes[:1]:
                raise InfoFileError(f'{where}{name} has {"x".join(map(str, np.shape(info[name]))) or "no"} entries for {boxes[0]} '
                                    f'boxes. {_remedy(name, Path(path))}')


def check_cameras(infos: Sequence[Mapping[str, Any]], path: PathLike, cameras: Sequence[str] = CAMERAS,
                  root: Optional[PathLike] = None) -> None:
    """Every info must hold all ``cameras`` with path, intrinsics and poses (errors as :func:`check_fields`)."""
    check_fields(infos, ('cams',), path, root)
    for index, info in enumerate(infos):
        for camera in cameras:
            entry = info['cams'].get(camera)
            missing = [camera] if entry is None else [f'{camera}.{name}' for name in CAMERA_FIELDS if name not in entry]
            if missing:
                raise InfoFileError(f'info file {path}: cams.{missing[0]} is missing (index {index}, token '
                                    f'{info.get("token", "?")}). {_remedy("cams", Path(path), root)}')


def _remedy(name: str, path: Path, root: Optional[PathLike] = None) -> str:
    if name == 'location':
        return ('Map labels need it; fill it from the tables with: python tools/create_data.py fill-location '
                f'--root-path {_root_word(root)} --info-file {shlex.quote(str(path))}')
    if name in ANNOTATION_FIELDS:
        return ('The annotated splits need it (test_mode: true for data without annotations). Make the file anew with: '
                f'{create_command(path, root)}')
    return f'Make the file anew with: {create_command(path, root)}'
