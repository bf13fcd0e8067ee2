"""Names: every ``type`` is one that its registry knows, and every class one that the data have. Nothing of the model is built."""
from __future__ import annotations

import re
from typing import Any, Iterator, List, Mapping, Optional, Sequence, Tuple

from ..config.errors import nearest
from ..config.schema import constructor_arguments
from ..errors import text_of
from ..geometry.grid import GridError
from .context import OTHER_KIND, Context, nodes
from .pipelines import SENSOR_ARGUMENTS, dataset_keys

# What the project's models build at these keys; other mappings with a type (layers, initialisations, post-processing) are left to
# building.
MODEL_PARTS = re.compile(r'model|.*\.(backbone|neck|vtransform|fuser|separate_head|pts_\w+_encoder|loss_\w+)|model\.heads\.\w+')
OTHER_PARTS = ((re.compile(r'.*\.bbox_coder'), 'BBOX_CODERS'), (re.compile(r'.*\.assigner'), 'BBOX_ASSIGNERS'),
               (re.compile(r'.*\.(cls|reg|iou)_cost'), 'MATCH_COSTS'), (MODEL_PARTS, 'MODELS'))
# Steps whose constructor reads no file and says by itself what is wrong with its values.
FREE_OF_DATA = ('LoadPointsFromFile', 'LoadPointsFromMultiSweeps', 'LoadBEVSegmentation')
OPTIMIZER_HOOKS = (None, 'OptimizerHook', 'Fp16OptimizerHook', 'GradientCumulativeOptimizerHook', 'GradientCumulativeFp16OptimizerHook',
                   'GuardedOptimizerHook')  # what our own hook stands for
RUNNERS_OF_MMCV = ('CustomEpochBasedRunner', 'EpochBasedRunner')  # both mean ours


def unknown(kind: Any, known: Sequence[str]) -> Optional[str]:
    """What to say of a name that is none of ``known``."""
    if kind in known:
        return None
    near = nearest(kind, known)
    return f'{kind!r} is not known' + (f'; did you mean {near!r}?' if near else '')


def runner_problem(kind: Any) -> Optional[str]:
    """Runners count epochs here: ours, one derived from it, or mmcv's name of it."""
    from mmcv.runner import RUNNERS
    ours, cls = (RUNNERS.get(name) if isinstance(name, str) else None for name in (RUNNERS_OF_MMCV[0], kind))
    if kind in RUNNERS_OF_MMCV or (cls is not None and (ours is None or issubclass(cls, ours))):
        return None
    return f'{kind!r} is not an epoch runner of this project; use {RUNNERS_OF_MMCV[0]}'


def check_types(c: Context) -> None:
    """Unknown types, with the line that building them would give.

    Hooks are looked at where the engine, which has some of its own, is imported: :mod:`mmdet3d_ext.engine.config_check` does so.
    """
    from .. import registry
    said = set()
    for key, settings, name in _parts(c):
        kind = settings.get('type')
        problem = getattr(registry, name).problem(kind) if isinstance(kind, str) else None
        if problem and problem not in said:  # training and validation name one type in two places
            said.add(problem)
            c.error(_written(c, f'{key}.type'), problem)
    _schedule_types(c)


def check_classes(c: Context) -> None:
    """Names of classes and values of loading steps, by the rules of the data set and of the steps themselves."""
    from ..registry import DATASETS, PIPELINES, profile
    said = set()

    def refuse(key: str, error: Exception) -> None:
        if key not in said:
            said.add(key)
            c.error(key, text_of(error))

    for key in _data_sets(c):
        kind, names = c.get(f'{key}.type'), c.get(f'{key}.object_classes')
        rule = getattr(DATASETS.get(kind), 'check_classes', None) if isinstance(kind, str) else None
        if rule is not None:
            try:
                rule(names)
            except OTHER_KIND as error:
                refuse(_root(c, 'object_classes', f'{key}.object_classes'), error)
        for step, settings in _steps(c, key):
            kind = settings.get('type')
            if kind not in FREE_OF_DATA or not set(settings) <= {'type', *(constructor_arguments(kind) or ())}:
                continue
            try:
                with profile('reference' if c.reference else None):
                    PIPELINES.build(dict(settings))
            except GridError:
                pass  # the chain of grids names it
            except OTHER_KIND as error:
                name = _blamed(settings, text_of(error))
                root = SENSOR_ARGUMENTS[kind].get(name or '')
                refuse(_root(c, root, f'{step}.{name}') if name else step, error)
    if c.get('load_augmented') is not None:  # whether or not a step reads it: nobody writes it to have nothing happen
        try:
            PIPELINES.build({'type': 'LoadPointsFromFile', 'coord_type': 'LIDAR', 'load_augmented': c.get('load_augmented')})
        except ValueError as error:
            refuse('load_augmented', error)


def _written(c: Context, key: str) -> str:
    """The root key that gives ``key``, a part of a data set, its value (``train_pipeline.3.type``), if there is one."""
    part = re.fullmatch(r'data\.(\w+)(?:\.datasets?|\.\d+)*\.(?:(type)|pipeline\.(.+))', key)
    if part is None:
        return key
    named = ('train',) if part[1] == 'train' else ('test', 'val', 'evaluation')
    roots = ['dataset_type'] if part[2] else [f'{name}_pipeline.{part[3]}' for name in named]
    return next((root for root in roots if c.has(root) and c.get(root) == c.get(key)), key)


def _root(c: Context, root: Optional[str], key: str) -> str:
    """``root`` where it gives ``key`` its value, as in the shipped pipelines."""
    return root if root and c.has(root) and c.get(root) == c.get(key) else _written(c, key)


def _blamed(settings: Mapping[str, Any], text: str) -> Optional[str]:
    """The argument that a message is about: the first that it names, else one that holds a value that it quotes."""
    text = text.partition(': ')[2] or text
    places = {name: found.start() for name in settings if (found := re.search(rf'\b{re.escape(str(name))}\b', text)) and name != 'type'}
    if places:
        return min(places, key=places.get)
    return next((name for name, value in settings.items() if isinstance(value, list) and any(f' {one!r}' in text for one in value)), None)


def _parts(c: Context) -> Iterator[Tuple[str, Mapping[str, Any], str]]:
    """(key, settings, name of the registry) of what is built."""
    for key, settings in nodes(c.get('model'), 'model'):
        name = next((name for pattern, name in OTHER_PARTS if pattern.fullmatch(key)), None)
        if name and 'type' in settings:
            yield key, settings, name
    for part in _kept(c):
        for key, settings in nodes(c.get(f'data.{part}'), f'data.{part}'):
            if re.fullmatch(rf'data\.{part}(\.datasets?|\.\d+)*', key):
                yield key, settings, 'DATASETS'
    for key in _data_sets(c):
        for step, settings in _steps(c, key):
            yield step, settings, 'PIPELINES'
            if isinstance(settings.get('points_loader'), Mapping):
                yield f'{step}.points_loader', settings['points_loader'], 'PIPELINES'


def _kept(c: Context) -> List[str]:
    return [part for part in ('train', 'val', 'test') if part != 'test' or c.get('data.test') != c.get('data.val')]


def _data_sets(c: Context) -> Iterator[str]:
    for part in _kept(c):
        yield from (key for key in dataset_keys(c, part) if isinstance(c.get(key), Mapping))


def _steps(c: Context, dataset: str) -> Iterator[Tuple[str, Mapping[str, Any]]]:
    found = c.get(f'{dataset}.pipeline')
    for number, step in enumerate(found if isinstance(found, list) else ()):
        if isinstance(step, Mapping):
            yield f'{dataset}.pipeline.{number}', step


def _schedule_types(c: Context) -> None:
    from mmcv.runner import HOOKS, OPTIMIZERS

    def check(key: str, kind: Any, known: Sequence[str]) -> None:
        problem = unknown(kind, known)
        if problem:
            c.error(key, problem)

    if c.get('optimizer.type') is not None:
        check('optimizer.type', c.get('optimizer.type'), list(OPTIMIZERS.module_dict))
    hooks = list(HOOKS.module_dict)
    for key in ('log_config.hooks', 'custom_hooks') if 'GuardedOptimizerHook' in hooks else ():  # the engine's are among them
        value = c.get(key)
        for number, hook in enumerate(value if isinstance(value, list) else ()):
            check(f'{key}.{number}', hook.get('type') if isinstance(hook, Mapping) else hook, hooks)
    for key, ending in (('lr_config', 'LrUpdaterHook'), ('momentum_config', 'MomentumUpdaterHook')):
        policy = c.get(f'{key}.policy')
        if policy is not None:
            names = [name[:-len(ending)] for name in hooks if name.endswith(ending) and name != ending]
            check(f'{key}.policy', policy, names + [name.lower() for name in names])
    if c.get('optimizer_config.type') not in OPTIMIZER_HOOKS:
        check('optimizer_config.type', c.get('optimizer_config.type'), hooks)
    problem = runner_problem(c.get('runner.type', RUNNERS_OF_MMCV[0]))
    if problem:
        c.error('runner.type', problem)
