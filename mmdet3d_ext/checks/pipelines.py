"""Pipelines: training and validation see the same sensors, and the model gets what it reads."""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from .context import Context

ENCODERS = 'model.encoders'
INPUTS = {'camera': 'img', 'lidar': 'points', 'radar': 'radar'}
# Step -> arguments that say what a sensor is, and the root key (None: none) that gives both pipelines the same value.
SENSOR_ARGUMENTS: Dict[str, Dict[str, Optional[str]]] = {
    'LoadPointsFromFile': {'load_dim': 'load_dim', 'use_dim': 'use_dim', 'reduce_beams': 'reduce_beams',
                           'load_augmented': 'load_augmented'},
    'LoadPointsFromMultiSweeps': {'sweeps_num': 'sweeps_num', 'load_dim': 'load_dim', 'use_dim': 'use_dim',
                                  'reduce_beams': 'reduce_beams', 'remove_close': None, 'pad_empty_sweeps': None},
    'LoadRadarPointsMultiSweeps': {'sweeps_num': 'radar_sweeps', 'use_dim': 'radar_use_dims', 'max_num': 'radar_max_points',
                                   'compensate_velocity': 'radar_compensate_velocity', 'filtering': 'radar_filtering',
                                   'normalize': 'radar_normalize'},
    'ImageAug3D': {'final_dim': 'image_size'},
    'ImageNormalize': {'mean': 'image_mean', 'std': 'image_std'},
    'PointsRangeFilter': {'point_cloud_range': 'point_cloud_range'},
    'LoadBEVSegmentation': {'classes': 'map_classes', 'line_width': 'line_width'},
    'DefaultFormatBundle3D': {'classes': 'object_classes'},
}
LIDAR_STEPS = ('LoadPointsFromFile', 'LoadPointsFromMultiSweeps')
DEPTH_LOSS = ('AwareBEVDepth', 'AwareDBEVDepth')
DEPTH_FROM_POINTS = ('DepthLSSTransform', 'AwareDBEVDepth')


class Step(NamedTuple):
    """A pipeline step and the dotted key where it stands."""

    key: str
    settings: Mapping[str, Any]


def dataset_keys(c: Context, part: str) -> List[str]:
    """Dotted keys of the innermost data sets of ``data.<part>``."""
    found, open_ = [], [f'data.{part}']
    while open_:
        key = open_.pop(0)
        settings = c.get(key)
        if isinstance(settings, list):
            open_ += [f'{key}.{i}' for i in range(len(settings))]
        elif isinstance(settings, Mapping):
            if isinstance(settings.get('dataset'), (Mapping, list)):
                open_.append(f'{key}.dataset')
            elif isinstance(settings.get('datasets'), list):
                open_.append(f'{key}.datasets')
            else:
                found.append(key)
    return found


def steps(c: Context, dataset: str) -> List[Step]:
    pipeline = c.get(f'{dataset}.pipeline')
    return [Step(f'{dataset}.pipeline.{i}', step) for i, step in enumerate(pipeline) if isinstance(step, Mapping)] \
        if isinstance(pipeline, list) else []


def pipelines(c: Context) -> Iterator[Tuple[str, List[Step]]]:
    """(``train``, ``val`` or ``test``, steps) of every data set that has a pipeline; a test set equal to val is left out."""
    for part in ('train', 'val', 'test'):
        if part == 'test' and c.get('data.test') == c.get('data.val'):
            continue
        for key in dataset_keys(c, part):
            found = steps(c, key)
            if found:
                yield part, found


def label_steps(c: Context) -> Iterator[Tuple[str, Step]]:
    """(``train`` ..., step) of every map label step."""
    for part, found in pipelines(c):
        for step in found:
            if step.settings.get('type') == 'LoadBEVSegmentation':
                yield part, step


def _find(found: List[Step], kind: str) -> Optional[Step]:
    return next((step for step in found if step.settings.get('type') == kind), None)


def check_pipelines(c: Context) -> None:
    """Compare the pipelines with each other and with what the model reads."""
    every = list(pipelines(c))
    train = next((found for part, found in every if part == 'train'), None)
    for part, found in every:
        if part != 'train' and train is not None:
            _same_sensors(c, train, found, part)
        if isinstance(c.get(ENCODERS), Mapping):
            _fits_model(c, part, found)
    for part in ('train', 'val', 'test'):
        for key in dataset_keys(c, part):
            _data_set(c, key)


def _reads_lidar(c: Context) -> bool:
    """Whether predictions depend on LiDAR points; depth to learn from is there in training alone."""
    camera = c.get(f'{ENCODERS}.camera.vtransform')
    drawn = isinstance(camera, Mapping) and camera.get('type') in DEPTH_FROM_POINTS and camera.get('use_points') != 'radar'
    return bool(c.get(f'{ENCODERS}.lidar')) or drawn or not isinstance(c.get(ENCODERS), Mapping)


def _same_sensors(c: Context, train: List[Step], other: List[Step], part: str) -> None:
    for kind, arguments in SENSOR_ARGUMENTS.items():
        a, b = _find(train, kind), _find(other, kind)
        if a is None or b is None or kind in LIDAR_STEPS and not _reads_lidar(c):
            continue
        for name, root in arguments.items():
            if a.settings.get(name) == b.settings.get(name):
                continue
            # The reference trains its detectors on the key frame and tests them on ten sweeps: a tree written for it (which has no
            # bev block) keeps its recipe and is warned, as under the reference's profile.
            recipe = c.reference or name == 'sweeps_num' and not c.has('bev')
            report = c.warn if recipe else c.error
            later = c.rank(f'{b.key}.{name}') - c.rank(f'{a.key}.{name}')
            if later == 0 and name == 'sweeps_num':  # nobody means to throw clouds away
                later = a.settings.get(name, 0) - b.settings.get(name, 0)
            changed, right = (b, a) if later >= 0 else (a, b)
            both = f'; {root} at the root sets both' if root and c.has(root) else ''
            report(f'{changed.key}.{name}', f'{kind} has {name} {a.settings.get(name)} in training ({a.key}) and {b.settings.get(name)} in '
                   f'{"validation" if part == "val" else "test"} ({b.key}){both}', {f'{changed.key}.{name}': right.settings.get(name)})


def _fits_model(c: Context, part: str, found: List[Step]) -> None:
    collect = _find(found, 'Collect3D')
    collected = list((collect.settings.get('keys') or ()) if collect else ())
    if collect is not None:
        for sensor, name in INPUTS.items():
            if c.get(f'{ENCODERS}.{sensor}') and name not in collected:
                c.error(f'{collect.key}.keys', f'lacks {name!r}, which the {sensor} encoder reads', {f'{collect.key}.keys': [*collected, name]})
        if part == 'train' and c.get('model.heads.map') and 'gt_masks_bev' not in collected:
            c.error(f'{collect.key}.keys', 'lacks \'gt_masks_bev\', which the map head trains on (map_labels: true)',
                    {'map_labels': True} if c.get('map_labels') is False else {f'{collect.key}.keys': [*collected, 'gt_masks_bev']})
    if part == 'val' and c.get('model.heads.map') and _find(found, 'LoadBEVSegmentation') is None:
        c.warn('data.val.pipeline', 'has no LoadBEVSegmentation: the map is predicted and not evaluated')
    _image(c, found)
    _points(c, found)
    camera = c.get(f'{ENCODERS}.camera.vtransform')
    if part == 'train' and isinstance(camera, Mapping) and camera.get('type') in DEPTH_LOSS and camera.get('depth_loss_factor', 3.0) > 0 \
            and _find(found, 'GTDepth') is None:
        c.error('depth_labels', f'is {c.get("depth_labels")!r}, but {camera["type"]} learns depth: its pipeline needs GTDepth',
                {'depth_labels': True})
    if isinstance(camera, Mapping) and camera.get('type') in DEPTH_FROM_POINTS and collect is not None:
        wanted = 'radar' if camera.get('use_points') == 'radar' else 'points'
        if wanted not in collected:
            c.error(f'{collect.key}.keys', f'lacks {wanted!r}, from which {camera["type"]} draws depth',
                    {f'{collect.key}.keys': [*collected, wanted]})


def _image(c: Context, found: List[Step]) -> None:
    augment, image = _find(found, 'ImageAug3D'), c.get(f'{ENCODERS}.camera.vtransform.image_size')
    if augment is None or image is None:
        return
    key, final = f'{augment.key}.final_dim', augment.settings.get('final_dim')
    if list(final or ()) != list(image):
        c.error(key, f'is {final}, but {ENCODERS}.camera.vtransform.image_size is {image}: the view transform would project to '
                'other pixels', {key: list(image)})


def _points(c: Context, found: List[Step]) -> None:
    base = f'{ENCODERS}.lidar'
    if not c.get(base):
        return
    step = _find(found, 'LoadPointsFromMultiSweeps') or _find(found, 'LoadPointsFromFile')
    if step is not None:
        use = step.settings.get('use_dim')
        count = use if isinstance(use, int) else len(use) if isinstance(use, list) else None
        key = f'{base}.backbone.in_channels'
        if not c.has(key):
            key = f'{base}.backbone.pts_voxel_encoder.in_channels'
        if count is not None and c.get(key, count) != count:
            c.error(key, f'is {c.get(key)}, but {step.key}.use_dim reads {count} values per point', {key: count})
    filter_, bounds = _find(found, 'PointsRangeFilter'), c.get(f'{base}.voxelize.point_cloud_range')
    if filter_ is not None and bounds is not None:
        key = f'{filter_.key}.point_cloud_range'
        if list(filter_.settings.get('point_cloud_range') or ()) != list(bounds):
            c.metres(key, f'is {filter_.settings.get("point_cloud_range")}, but {base}.voxelize.point_cloud_range is {bounds}: points that '
                     'the encoder expects are cut off, or others are kept for nothing', {key: list(bounds)})


def _data_set(c: Context, key: str) -> None:
    settings = c.get(key) or {}
    modality = settings.get('modality')
    for sensor in INPUTS:
        if c.get(f'{ENCODERS}.{sensor}') and isinstance(modality, Mapping) and modality.get(f'use_{sensor}') is False:
            c.error(f'{key}.modality.use_{sensor}', f'is false, but the model has a {sensor} encoder',
                    {f'input_modality.use_{sensor}': True} if c.get(f'input_modality.use_{sensor}') is False
                    else {f'{key}.modality.use_{sensor}': True})
    for name in ('object_classes', 'map_classes'):
        own, root = settings.get(name), c.get(name)
        if isinstance(own, list) and isinstance(root, list) and own != root:
            c.error(f'{key}.{name}', f'is {own}, {name} at the root is {root}', {f'{key}.{name}': root})
