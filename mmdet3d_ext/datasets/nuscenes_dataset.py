"""The nuScenes data set: info file -> samples for the pipelines."""
from __future__ import annotations

import difflib
import logging
import os
import shlex
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
from mmdet3d.core.bbox import Box3DMode, LiDARInstance3DBoxes
from torch.utils.data import Dataset

from ..errors import raised_on_purpose, text_of
from ..registry import DATASETS, PIPELINES
from .epoch_state import EpochState
from .info_files import (
    ANNOTATION_FIELDS,
    BASE_FIELDS,
    InfoFileError,
    check_cameras,
    check_fields,
    create_command,
    load_info_file,
)
from .nuscenes_converter import rotation_matrix
from .nuscenes_schema import CAMERAS, CATEGORY_TO_CLASS, LIDAR, OBJECT_CLASSES, RADARS
from .reader import SampleError, SampleFault, note
from .shared_list import SharedList

logger = logging.getLogger('mmdet3d_ext')

SWEEPS = 'sweeps'  # in data_prefix: past clouds
_MODALITIES = ('use_lidar', 'use_camera', 'use_radar', 'use_map', 'use_external')


@DATASETS.register_module()
class NuScenesDataset(Dataset):
    """Samples of a nuScenes info file.

    ``get_data_info(i)`` gives what the pipelines take, with absolute or root-joined paths and 4x4 matrices named as the
    reference names them (``a2b`` maps a-coordinates to b): ``token, sample_idx, lidar_path, sweeps, timestamp`` (us)
    ``location, ego2global`` (float64) ``lidar2ego, test_mode``; with cameras, lists of N = 6 in the fixed order
    ``image_paths, lidar2camera, camera2lidar, camera2ego, camera_intrinsics, lidar2image`` (float32, at the camera's own time);
    with radar ``radar`` (name -> sweeps); with annotations ``ann_info``.

    Args:
        ann_file: info file of any known form (see :mod:`.info_files`); boxes are converted where they must be.
        pipeline: steps (configurations or callables).
        dataset_root: folder of ``samples/``, ``sweeps/``, ``maps/``.
        object_classes: detection classes in label order; ``None`` for the ten of nuScenes.
        map_classes: if given, every sample must know its map (``location``).
        modality: ``{use_lidar, use_camera, use_radar, use_map, use_external}``; ``None`` for lidar only.
        box_type_3d: ``'LiDAR'``.
        with_velocity: 9 box columns instead of 7. An unknown velocity stays NaN; heads leave it out of the loss.
        use_valid_flag: keep boxes with lidar or radar points (``valid_flag``) instead of those with lidar points.
        load_interval: use every n-th sample in time.
        filter_empty_gt: in training, replace a sample without any box of ``object_classes`` by a random other one. Set false
            to train on such samples too (they carry map labels, and everything here can train on them).
        test_mode: evaluation: no replacement; annotations are optional.
        eval_version: the devkit's evaluation configuration.
        data_prefix: folder of bare file names (mmdet3d >= 1.1 info files), below ``dataset_root``: a mapping of channels, or
            as mmdet3d names them ``pts`` (key frames' clouds) and ``sweeps``, to folders. ``None``: the info file's own folder
            if they lie there, else ``samples/<channel>`` and ``sweeps/LIDAR_TOP``.
        box_convention: only for info files that do not tell theirs.
        compat: ``'reference'`` zeroes unknown velocities and stores the box centre's z as the bottom's, as a checkpoint trained
            with the reference expects.

    Raises:
        InfoFileError, FileNotFoundError: at construction, for a file that lacks what this configuration needs or a wrong root.
    """

    def __init__(self, ann_file: str, pipeline: Optional[Sequence[Union[Mapping, Callable]]] = None,
                 dataset_root: Optional[str] = None, object_classes: Optional[Sequence[str]] = None,
                 map_classes: Optional[Sequence[str]] = None, load_interval: int = 1, with_velocity: bool = True,
                 modality: Optional[Mapping[str, bool]] = None, box_type_3d: str = 'LiDAR', filter_empty_gt: bool = True,
                 test_mode: bool = False, eval_version: str = 'detection_cvpr_2019', use_valid_flag: bool = False,
                 data_prefix: Optional[Mapping[str, str]] = None, box_convention: Optional[str] = None,
                 compat: Optional[str] = None):
        if str(box_type_3d).lower() != 'lidar':
            raise ValueError(f"NuScenesDataset: box_type_3d must be 'LiDAR', got {box_type_3d!r}")
        if not isinstance(load_interval, int) or load_interval < 1:
            raise ValueError(f'NuScenesDataset: load_interval must be a whole number >= 1, got {load_interval!r}')
        self.ann_file = str(ann_file)
        self.dataset_root = None if dataset_root is None else str(dataset_root)
        self.CLASSES = _checked_classes(object_classes)
        self.map_classes = None if map_classes is None else tuple(map_classes)
        self.modality = _checked_modality(modality)
        self.with_velocity = with_velocity
        self.use_valid_flag = use_valid_flag
        self.filter_empty_gt = filter_empty_gt
        self.test_mode = test_mode
        self.load_interval = load_interval
        self.eval_version = eval_version
        self.box_type_3d, self.box_mode_3d = LiDARInstance3DBoxes, Box3DMode.LIDAR
        self.compat = compat
        if self.dataset_root is not None and not os.path.isdir(self.dataset_root):
            raise FileNotFoundError(f'NuScenesDataset: dataset_root {self.dataset_root!r} does not exist (the folder that '
                                    'holds samples/, sweeps/, maps/ and v1.0-*/). Correct it, or put the data there (a synthetic '
                                    f'set: python tools/create_synthetic_nuscenes.py --out {shlex.quote(self.dataset_root)}) and '
                                    f'make the info files with: {create_command(ann_file, self.dataset_root)}')

        loaded = load_info_file(ann_file, box_convention, self.dataset_root)
        infos = loaded.infos[::load_interval]
        if not infos:
            raise InfoFileError(f'info file {ann_file} holds no samples: no scene of this split had its files when it was made')
        self.metadata = loaded.metadata
        self.version = loaded.metadata.get('version', 'v1.0-trainval')
        self._check_infos(infos)
        paths = _PathResolver(self.dataset_root, Path(ann_file).parent, data_prefix, infos)
        unused = [key for key, use in (('radars', 'use_radar'), ('cams', 'use_camera')) if not self.modality[use]]
        infos = [paths.resolve({key: value for key, value in info.items() if key not in unused}) for info in infos]
        if infos and self.modality['use_lidar'] and not os.path.exists(infos[0]['lidar_path']):
            raise FileNotFoundError(f'NuScenesDataset: {infos[0]["lidar_path"]!r}, the first point cloud of {ann_file}, does '
                                    f'not exist; correct dataset_root (now {self.dataset_root!r})')
        self.annotated = all(name in info for info in infos for name in ANNOTATION_FIELDS)
        self._classes_of = [self._labels_in(info) for info in infos] if self.annotated else None
        self.tokens = [info['token'] for info in infos]
        self.data_infos = SharedList(infos)
        self.flag = np.zeros(len(self), dtype=np.uint8)  # mmdet's samplers group by it; all samples are alike
        self.transforms = [step if callable(step) else PIPELINES.build(step) for step in pipeline or ()]
        self.epoch_state = EpochState()

    @staticmethod
    def check_classes(names: Optional[Sequence[str]]) -> Tuple[str, ...]:
        """``object_classes`` as the data set takes them; ValueError names what is unknown or doubled. Needs no data."""
        return _checked_classes(names)

    def _check_infos(self, infos: List[Dict[str, Any]]) -> None:
        check_fields(infos, BASE_FIELDS, self.ann_file, self.dataset_root)
        if self.map_classes:
            check_fields(infos, ('location',), self.ann_file, self.dataset_root)
        if self.modality['use_camera']:
            check_cameras(infos, self.ann_file, root=self.dataset_root)
        if self.modality['use_radar']:
            check_fields(infos, ('radars',), self.ann_file, self.dataset_root)
        if not self.test_mode:
            check_fields(infos, ANNOTATION_FIELDS, self.ann_file, self.dataset_root)

    # ------------------------------------------------------------------------------------------------------ samples

    def __len__(self) -> int:
        return len(self.data_infos)

    def __getitem__(self, index: int) -> Any:
        if self.epoch_state.enter():
            self._start_epoch()
        if self.test_mode or not self.filter_empty_gt:
            return self.load_sample(index)
        for _ in range(1000):
            if self._classes_of[index]:
                sample = self.load_sample(index, may_be_empty=True)
                if sample is not None:
                    return sample
            index = int(np.random.randint(len(self)))
        raise SampleError(f'{self.ann_file}: 1000 random samples in a row are without boxes of {self.CLASSES} (after the '
                          f'pipeline); set filter_empty_gt: false to train on samples without boxes')

    def load_sample(self, index: int, may_be_empty: bool = False) -> Any:
        """Sample ``index`` through the pipeline.

        ``may_be_empty``: return ``None`` if the pipeline gives none or removes all boxes.

        Raises:
            SampleError: naming the sample, the pipeline step and its error (which names the file).
        """
        note(f'sample {self.tokens[index]} (index {index} of {self.ann_file})')
        data = self.get_data_info(index)
        step = None
        try:
            for step in self.transforms:
                data = step(data)
                if data is None:
                    break
        except Exception as error:
            kind = SampleError if isinstance(error, OSError) or raised_on_purpose(error) else SampleFault
            raise kind(f'sample {self.tokens[index]} (index {index} of {self.ann_file}), step {type(step).__name__}: '
                       f'{text_of(error)}') from error
        if may_be_empty:
            return data if data is not None and _has_labels(data) else None
        if data is None:
            raise SampleError(f'sample {self.tokens[index]} (index {index} of {self.ann_file}): the step '
                              f'{type(step).__name__} gave nothing')
        return data

    def get_data_info(self, index: int) -> Dict[str, Any]:
        """What the pipelines take (keys: see the class)."""
        info = self.data_infos[index]
        data = {
            'token': info['token'],
            'sample_idx': info['token'],
            'lidar_path': info['lidar_path'],
            'sweeps': info['sweeps'],
            'timestamp': info['timestamp'],
            'location': info.get('location'),
            'prev_token': info.get('prev_token'),
            'test_mode': self.test_mode,
            'ego2global': _matrix(info, 'ego2global').astype(np.float64),
            'lidar2ego': _matrix(info, 'lidar2ego').astype(np.float32),
            'box_type_3d': self.box_type_3d,
            'box_mode_3d': self.box_mode_3d,
            **{name: [] for name in ('img_fields', 'bbox3d_fields', 'pts_mask_fields', 'pts_seg_fields', 'bbox_fields',
                                     'mask_fields', 'seg_fields')},
        }
        if self.modality['use_camera']:
            data.update(_camera_matrices(info))
        if self.modality['use_radar']:
            data['radar'] = info['radars']
        if self.annotated:
            data['ann_info'] = self._annotations(info)
        return data

    def get_ann_info(self, index: int) -> Dict[str, Any]:
        """``gt_bboxes_3d`` (LiDARInstance3DBoxes), ``gt_labels_3d`` (n,) int64 (-1: none of the classes), ``gt_names`` (n,)."""
        return self._annotations(self.data_infos[index])

    def _annotations(self, info: Mapping[str, Any]) -> Dict[str, Any]:
        mask = self._kept(info)
        boxes = np.asarray(info['gt_boxes'], dtype=np.float64).reshape(-1, 7)[mask]
        names = np.asarray(info['gt_names'])[mask]
        labels = np.array([self.CLASSES.index(name) if name in self.CLASSES else -1 for name in names], dtype=np.int64)
        if self.with_velocity:
            velocity = np.asarray(info['gt_velocity'], dtype=np.float64).reshape(-1, 2)[mask]
            if self.compat == 'reference':
                velocity = np.where(np.isnan(velocity).any(axis=1, keepdims=True), 0.0, velocity)
            boxes = np.concatenate([boxes, velocity], axis=1)
        # The reference takes the centre's z for the bottom's; its checkpoints were trained with heights half a box higher.
        origin = (0.5, 0.5, 0.0) if self.compat == 'reference' else (0.5, 0.5, 0.5)
        return {
            'gt_bboxes_3d': LiDARInstance3DBoxes(boxes.astype(np.float32), box_dim=boxes.shape[1], origin=origin),
            'gt_labels_3d': labels,
            'gt_names': names,
        }

    def _kept(self, info: Mapping[str, Any]) -> np.ndarray:
        """(n,) bool: boxes that somebody could see."""
        flag = info['valid_flag'] if self.use_valid_flag else np.asarray(info['num_lidar_pts']) > 0
        return np.asarray(flag, dtype=bool)

    def _labels_in(self, info: Mapping[str, Any]) -> Tuple[int, ...]:
        names = set(np.asarray(info['gt_names'])[self._kept(info)].tolist())
        return tuple(label for label, name in enumerate(self.CLASSES) if name in names)

    def get_cat_ids(self, index: int) -> List[int]:
        """Labels that occur in a sample (for class-balanced resampling), of the boxes that training uses."""
        if self._classes_of is None:
            raise InfoFileError(f'{self.ann_file} has no annotations')
        return list(self._classes_of[index])

    @property
    def poses(self) -> Dict[str, Tuple[np.ndarray, np.ndarray]]:
        """token -> (lidar2ego, ego2global), 4x4 float64: what bringing detections to the global frame needs."""
        return {info['token']: (_matrix(info, 'lidar2ego'), _matrix(info, 'ego2global')) for info in self.data_infos}

    # ------------------------------------------------------------------------------------------------------- epochs

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to steps that change over training (``set_epoch``), in all loader workers."""
        self.epoch_state.set_epoch(epoch)

    def _start_epoch(self) -> None:
        for step in self.transforms:
            if hasattr(step, 'set_epoch'):
                step.set_epoch(self.epoch_state.epoch)

    def __repr__(self) -> str:
        return f'NuScenesDataset({self.ann_file}: {len(self)} samples of {self.version}, test_mode={self.test_mode})'


class _PathResolver:
    """Paths of an info file -> paths that can be opened.

    Files hold paths relative to the data root (ours), with a root in front (mmdet3d, the reference: ``./data/nuscenes/samples/
    ...``) or bare names (mmdet3d >= 1.1).
    """

    def __init__(self, root: Optional[str], info_folder: Path, prefix: Optional[Mapping[str, str]], infos: Sequence[Mapping]):
        self.root, self.info_folder = root, str(info_folder)
        self.prefix = {{'pts': LIDAR}.get(channel, channel): folder for channel, folder in (prefix or {}).items()}
        for channel in self.prefix:
            if channel not in (LIDAR, SWEEPS, *CAMERAS, *RADARS):
                raise ValueError(f'NuScenesDataset: data_prefix names the unknown channel {channel!r}; known are pts, sweeps, '
                                 f'{", ".join((LIDAR, *CAMERAS, *RADARS))}')
        self.beside = bool(infos) and prefix is None and (Path(info_folder) / infos[0]['lidar_path']).is_file()

    def resolve(self, info: Mapping[str, Any]) -> Dict[str, Any]:
        info = dict(info, lidar_path=self._path(info['lidar_path'], LIDAR))
        info['sweeps'] = [dict(sweep, data_path=self._path(sweep['data_path'], SWEEPS)) for sweep in info['sweeps']]
        if 'cams' in info:
            info['cams'] = {name: dict(entry, data_path=self._path(entry['data_path'], name))
                            for name, entry in info['cams'].items()}
        if 'radars' in info:
            info['radars'] = {name: [dict(entry, data_path=self._path(entry['data_path'], name)) for entry in entries]
                              for name, entries in info['radars'].items()}
        return info

    def _path(self, path: str, channel: str) -> str:
        path = str(path)
        if '/' not in path:
            if self.beside:
                return os.path.join(self.info_folder, path)
            usual = f'sweeps/{LIDAR}' if channel == SWEEPS else f'samples/{channel}'
            return os.path.join(self.root or '', self.prefix.get(channel, usual), path)
        at = max(f'/{path}'.rfind(part) for part in ('/samples/', '/sweeps/'))  # the last one: a folder of the root may be called so
        if at >= 0:  # with or without another machine's root in front
            return path if self.root is None else os.path.join(self.root, path[at:])
        return path if os.path.isabs(path) or self.root is None else os.path.join(self.root, path)


def _camera_matrices(info: Mapping[str, Any]) -> Dict[str, List]:
    out: Dict[str, List] = {name: [] for name in ('image_paths', 'lidar2camera', 'camera2lidar', 'camera2ego',
                                                  'camera_intrinsics', 'lidar2image')}
    for camera in CAMERAS:
        entry = info['cams'][camera]
        camera2lidar, intrinsics = np.eye(4), np.eye(4)
        camera2lidar[:3, :3] = entry['sensor2lidar_rotation']
        camera2lidar[:3, 3] = entry['sensor2lidar_translation']
        intrinsics[:3, :3] = entry['cam_intrinsic']
        lidar2camera = np.linalg.inv(camera2lidar)
        out['image_paths'].append(entry['data_path'])
        out['lidar2camera'].append(lidar2camera.astype(np.float32))
        out['camera2lidar'].append(camera2lidar.astype(np.float32))
        out['camera2ego'].append(_matrix(entry, 'sensor2ego').astype(np.float32))
        out['camera_intrinsics'].append(intrinsics.astype(np.float32))
        out['lidar2image'].append((intrinsics @ lidar2camera).astype(np.float32))
    return out


def _matrix(record: Mapping[str, Any], prefix: str) -> np.ndarray:
    """(4, 4) float64 of ``<prefix>_rotation`` (quaternion w, x, y, z) and ``<prefix>_translation``."""
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = rotation_matrix(record[f'{prefix}_rotation']), record[f'{prefix}_translation']
    return matrix


def _has_labels(data: Mapping[str, Any]) -> bool:
    """Whether a formatted sample still has a box of the classes (a pipeline without boxes has nothing to lack)."""
    labels = data.get('gt_labels_3d')
    if labels is None:
        return True
    labels = np.asarray(getattr(labels, 'data', labels) if not isinstance(labels, np.ndarray) else labels)
    return bool((labels >= 0).any())


def _checked_classes(names: Optional[Sequence[str]]) -> Tuple[str, ...]:
    if names is None:
        return OBJECT_CLASSES
    if isinstance(names, str) or not names:
        raise ValueError(f'NuScenesDataset: object_classes must be a list of class names, got {names!r} (null: the ten of '
                         'nuScenes)')
    known = {*OBJECT_CLASSES, *CATEGORY_TO_CLASS}
    for name in names:
        # A name with a dot is a nuScenes category outside the ten classes, such as "animal" or "vehicle.emergency.police".
        if name not in known and '.' not in str(name) and name != 'animal':
            near = difflib.get_close_matches(str(name), sorted(OBJECT_CLASSES), n=1)
            hint = f'; did you mean {near[0]!r}?' if near else f' (known: {", ".join(OBJECT_CLASSES)})'
            raise ValueError(f'NuScenesDataset: object_classes holds the unknown class {name!r}{hint}')
    if len(set(names)) != len(names):
        raise ValueError(f'NuScenesDataset: object_classes names a class twice: {list(names)}')
    return tuple(names)


def _checked_modality(modality: Optional[Mapping[str, bool]]) -> Dict[str, bool]:
    out = dict.fromkeys(_MODALITIES, False)
    if modality is None:
        out['use_lidar'] = True
        return out
    for name, value in modality.items():
        if name not in out:
            near = difflib.get_close_matches(str(name), _MODALITIES, n=1)
            hint = f'; did you mean {near[0]!r}?' if near else ''
            raise ValueError(f'NuScenesDataset: modality has the unknown key {name!r}{hint}')
        out[name] = bool(value)
    return out
