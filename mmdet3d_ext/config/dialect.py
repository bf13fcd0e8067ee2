"""What the reference's configurations mean differently here: each said in one line with the replacement, and put right where
only one meaning is possible.

The keys are the reference's, so a tree written for it loads as it is. This module looks at a resolved configuration for values
that would be accepted and silently mean something else.
"""
from __future__ import annotations

import inspect
import warnings
from typing import Any, Iterator, List, Mapping, Optional, Set, Tuple

from . import schema

# CenterPoint's radii as the reference writes them: squares of metres.
SQUARED_RADII = [4, 12, 10, 1, 0.85, 0.175]
# nuScenes' classes in the order that a TransFusion head without class_names assumes.
USUAL_CLASSES = ['car', 'truck', 'construction_vehicle', 'bus', 'trailer', 'barrier', 'motorcycle', 'bicycle', 'pedestrian',
                 'traffic_cone']
# Section -> (keys without effect, why).
WITHOUT_EFFECT = {
    'data': (('test_dataloader',), 'all evaluation reads as data.val_dataloader says'),
    'evaluation': (('metric', 'metrics', 'metric_options', 'eval', 'by_epoch', 'dynamic_intervals', 'out_dir', 'jsonfile_prefix', 'show',
                    'gpu_collect', 'less_keys', 'greater_keys', 'num_samples'),
                   'every task is evaluated, every evaluation.interval epochs, and evaluation.rule says which scores are better'),
    'model.heads.object.train_cfg': (('dense_reg', 'max_objs'), 'no object of a sample is cut off'),
    'model.heads.object.test_cfg': (('max_per_img', 'max_pool_nms'), 'bbox_coder.max_num and post_max_size limit the boxes'),
}


def translate(cfg: Any) -> None:
    """Adapt ``cfg`` (a resolved :class:`~.config.Config`) in place, with one warning for each difference."""
    for check in (_test_mode, _schedules, _radar, _radii, _sweeps, _paste, _jitter, _without_effect, _class_order, _evaluation,
                  _sync_bn, _test_grid):
        for key, message in check(cfg):
            # From load_config's caller's point of view: that is who can do something about it.
            warnings.warn(f'{cfg.where(key)}: {message}', stacklevel=4)


Finding = Tuple[str, str]


def _test_mode(cfg: Any) -> Iterator[Finding]:
    """Without it the data set replaces samples without boxes, and sweeps are drawn at random."""
    for part in ('val', 'test'):
        data = cfg.select(f'data.{part}')
        if isinstance(data, Mapping) and data.get('test_mode') is False:
            data['test_mode'] = True
            yield f'data.{part}.test_mode', 'is taken as true: evaluation takes every sample once, with its newest sweeps'


def _schedules(cfg: Any) -> Iterator[Finding]:
    """Files merge key by key, so a policy inherits arguments of another one, which mmcv refuses."""
    for section, hook in (('lr_config', 'LrUpdaterHook'), ('momentum_config', 'MomentumUpdaterHook')):
        settings = cfg.get(section)
        if not isinstance(settings, Mapping) or not isinstance(settings.get('policy'), str):
            continue
        allowed = _hook_arguments(settings['policy'], hook)
        own = cfg.source_of(f'{section}.policy')
        for key in [key for key in settings if allowed is not None and key not in allowed]:
            if cfg.source_of(f'{section}.{key}') != own:  # in the same file it is a mistake, and mmcv says so
                where = f'{section}.{key}'
                yield where, f'belongs to another policy than {settings["policy"]!r} and is left out'
                del settings[key]


def _hook_arguments(policy: str, kind: str) -> Optional[Set[str]]:
    try:
        from mmcv.runner import HOOKS
    except ImportError:
        return None
    cls = HOOKS.get((policy.title() if policy == policy.lower() else policy) + kind)
    if cls is None:
        return None
    names = {'policy'}
    for base in inspect.getmro(cls):
        if '__init__' in base.__dict__:
            names |= set(inspect.signature(base.__init__).parameters)
    return names


def _radar(cfg: Any) -> Iterator[Finding]:
    """The reference reads radar whatever ``input_modality`` says; here that key decides."""
    if not cfg.select('model.encoders.radar'):
        return
    for key in ('data.train.dataset', 'data.train', 'data.val', 'data.test'):
        data = cfg.select(key)
        modality = data.get('modality') if isinstance(data, Mapping) else None
        if isinstance(modality, Mapping) and not modality.get('use_radar') and _step(data, 'LoadRadarPointsMultiSweeps'):
            modality['use_radar'] = True
            yield f'{key}.modality', 'is taken with use_radar: true for model.encoders.radar; write it in input_modality'


def _radii(cfg: Any) -> Iterator[Finding]:
    key = 'model.heads.object.test_cfg'
    test = cfg.select(key)
    if isinstance(test, Mapping) and test.get('min_radius') == SQUARED_RADII and cfg.get('compat') != 'reference' \
            and 'circle' in _listed(test.get('nms_type')):
        metres = [round(value ** 0.5, 3) for value in SQUARED_RADII]
        yield f'{key}.min_radius', (f'is in metres here, the reference compares squares. Write {metres} for the same '
                                    'suppression (or compat: reference)')


def _sweeps(cfg: Any) -> Iterator[Finding]:
    """A model that is trained on one density and tested on another one loses accuracy without a word."""
    found = [step['sweeps_num'] if step else None for step in
             (_step({'pipeline': cfg.get(name)}, 'LoadPointsFromMultiSweeps') for name in ('train_pipeline', 'test_pipeline'))]
    if None not in found and found[0] != found[1] and cfg.select('model.encoders.lidar'):
        yield 'train_pipeline', f'reads {found[0]} LiDAR sweeps, test_pipeline {found[1]}; write the same sweeps_num'


def _paste(cfg: Any) -> Iterator[Finding]:
    step = _step({'pipeline': cfg.get('train_pipeline')}, 'ObjectPaste')
    stop = step.get('stop_epoch') if step else -1
    if cfg.select('model.encoders.camera') and (stop is None or stop > 0):
        yield 'gt_paste_stop_epoch', (f'is {stop}: objects are pasted into points and boxes, and no camera sees them; write -1 '
                                      'for models with cameras')


def _jitter(cfg: Any) -> Iterator[Finding]:
    if cfg.get('radar_jitter'):
        yield 'radar_jitter', 'has no effect (nothing reads it in the reference either); leave it out'


def _without_effect(cfg: Any) -> Iterator[Finding]:
    for key, reason in schema.IGNORED.items():
        if cfg.get(key) is not None:
            yield key, f'has no effect: {reason}; leave it out'
    for section, (keys, reason) in WITHOUT_EFFECT.items():
        settings = cfg.select(section)
        found = [key for key in keys if isinstance(settings, Mapping) and key in settings]
        if found:
            yield f'{section}.{found[0]}', f'has no effect{_besides(found[1:])}: {reason}; leave it out'


def _besides(keys: List[str]) -> str:
    return f', like {", ".join(keys)}' if keys else ''


def _class_order(cfg: Any) -> Iterator[Finding]:
    """The reference knows pedestrians and cones by their numbers, whatever object_classes says."""
    key = 'model.heads.object'
    head, classes = cfg.select(key), cfg.get('object_classes')
    if isinstance(head, Mapping) and head.get('type') == 'TransFusionHead' and isinstance(classes, list) \
            and head.get('class_names') is None and head.get('num_classes') == len(classes) and classes != USUAL_CLASSES \
            and len(classes) == len(USUAL_CLASSES):
        head['class_names'] = list(classes)
        yield 'object_classes', (f'has an order of its own: {key}.class_names is taken from it, so that pedestrians and cones '
                                 'are found by name; write it there')


def _test_grid(cfg: Any) -> Iterator[Finding]:
    """The reference's PointPillars leaves another model's grid in its test_cfg, where nothing reads it."""
    key = 'model.heads.object'
    train, test = (cfg.select(f'{key}.{part}') for part in ('train_cfg', 'test_cfg'))
    if not isinstance(train, Mapping) or not isinstance(test, Mapping):
        return
    right, given = train.get('grid_size'), test.get('grid_size')
    if isinstance(right, list) and isinstance(given, list) and given[:2] != right[:2] \
            and _rank(cfg, f'{key}.train_cfg.grid_size') > _rank(cfg, f'{key}.test_cfg.grid_size'):
        test['grid_size'] = list(right)
        yield f'{key}.test_cfg.grid_size', f'is taken as {right}, like train_cfg.grid_size: both are the same map; write it there'


def _evaluation(cfg: Any) -> Iterator[Finding]:
    own, validated = cfg.select('evaluation.pipeline'), cfg.select('data.val.pipeline')
    if own is not None and validated is not None and own != validated:
        yield 'evaluation.pipeline', 'has no effect: validation runs data.val.pipeline; write it there'


def _sync_bn(cfg: Any) -> Iterator[Finding]:
    exclude = cfg.select('sync_bn.exclude') if isinstance(cfg.get('sync_bn'), Mapping) else None
    if exclude:
        yield 'sync_bn.exclude', f'has no effect: all batch norms are synchronised, {exclude} too; write sync_bn: true or false'


def _rank(cfg: Any, key: str) -> int:
    """How late a key was written: the position of its file, after all files for the command line."""
    source = cfg.source_of(key)
    return cfg.files.index(source) if source in cfg.files else len(cfg.files)


def _step(data: Mapping[str, Any], kind: str) -> Optional[Mapping[str, Any]]:
    """The first pipeline step of that type."""
    for step in data.get('pipeline') or ():
        if isinstance(step, Mapping) and step.get('type') == kind:
            return step
    return None


def _listed(value: Any) -> List[Any]:
    return value if isinstance(value, list) else [value]
