"""The stages file of ``tools/train_progressive.py``: which trainings follow each other, and what each must reach.

::

    run_dir: runs/progressive            # one folder per stage below it, and progressive.json
    load_from: detector.pth              # weights of the first stage; leave out for none
    metric: map/mean/iou@max             # whose best epoch goes on to the next stage
    stages:
      - name: stage1
        config: configs/nuscenes/multitask/stage1_600.yaml
        ranks: 4                         # processes; also gpus: "4,5,6,7", launcher: torchrun, max_restarts: 3
        weights: auto                    # of the checkpoint before: auto (those that were evaluated), ema or raw
        optimizer: reset                 # or keep: its moments, as far as names and shapes are the same
        overrides: {data: {workers_per_gpu: 8}}   # not load_from, resume_from, run_dir: the order gives them
        gates:                           # to go on to the next stage, at the best epoch
          - {metric: map/divider/iou@max, at_least: 0.28, advice: what to adjust}

Paths are relative to the working folder, as those of every tool.
"""
from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ..config.errors import ConfigError, hint
from ..config.yaml_source import load_yaml
from .state import LaunchToolError

PLAN_KEYS = ('run_dir', 'load_from', 'metric', 'stages')
STAGE_KEYS = ('name', 'config', 'ranks', 'gpus', 'launcher', 'max_restarts', 'metric', 'rule', 'weights', 'optimizer', 'overrides',
              'gates')
GATE_KEYS = ('metric', 'at_least', 'at_most', 'advice')
OWN = ('run_dir', 'work_dir', 'load_from', 'resume_from', 'auto_resume')  # keys of a configuration that the order of the stages gives
CHOICES = {'weights': ('auto', 'ema', 'raw'), 'optimizer': ('reset', 'keep'), 'rule': (None, 'greater', 'less'),
           'launcher': ('auto', 'torchpack', 'torchrun')}


@dataclass(frozen=True)
class Gate:
    """A bound on a metric of the stage's best epoch; exactly one of ``at_least`` and ``at_most`` is set."""

    metric: str
    at_least: Optional[float] = None
    at_most: Optional[float] = None
    advice: str = ''

    def passes(self, value: float) -> bool:
        """NaN passes nothing."""
        return value >= self.at_least if self.at_least is not None else value <= self.at_most

    def __str__(self) -> str:
        return f'{self.metric} {">=" if self.at_least is not None else "<="} {self.bound:g}'

    @property
    def bound(self) -> float:
        return self.at_least if self.at_least is not None else self.at_most


@dataclass(frozen=True)
class Stage:
    """One training. ``overrides``: words of the command line, ``--key value ...``."""

    name: str
    config: str
    run_dir: str
    metric: str
    ranks: int = 1
    gpus: Optional[str] = None
    launcher: str = 'auto'
    max_restarts: int = 3
    rule: Optional[str] = None
    weights: str = 'auto'
    optimizer: str = 'reset'
    overrides: Tuple[str, ...] = ()
    gates: Tuple[Gate, ...] = ()

    def settings(self) -> List[str]:
        """The words for the configuration: what the file says, and the metric whose best epoch is kept."""
        rule = ['--evaluation.rule', self.rule] if self.rule else []
        return [*self.overrides, '--evaluation.save_best', self.metric, *rule]

    def words(self, load_from: Optional[str]) -> List[str]:
        """What ``tools/train.py`` gets after the configuration and the run folder. The same words start and continue."""
        start = ['--load_from', load_from, '--load-weights', self.weights] if load_from else []
        start += ['--load-optimizer'] if load_from and self.optimizer == 'keep' else []
        return [*start, '--resume_from', 'auto', *self.settings()]

    def fingerprint(self, config_hash: str) -> str:
        """Changes with everything that the stage's result depends on, and not with gates, GPUs or launchers."""
        kept = [config_hash, self.settings(), self.ranks, self.weights, self.optimizer, self.run_dir]
        return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """A stages file. ``load_from``: the first stage's start, an absolute path or None."""

    file: str
    run_dir: str
    load_from: Optional[str]
    stages: Tuple[Stage, ...]

    def stage(self, name: str) -> int:
        """Index of a stage.

        Raises:
            LaunchToolError: naming the nearest one.
        """
        names = [stage.name for stage in self.stages]
        if name not in names:
            raise LaunchToolError(f'{self.file} has no stage {name!r}{hint(name, names)}; it has {", ".join(names)}')
        return names.index(name)


def read_plan(file: str) -> Plan:
    """Read and check a stages file.

    Raises:
        LaunchToolError: naming file, line and key, the rule and the value.
    """
    try:
        data, lines = load_yaml(os.path.abspath(file))
    except ConfigError as error:
        raise LaunchToolError(str(error)) from None

    def wrong(path: Sequence[Any], text: str) -> LaunchToolError:
        place = next((lines[tuple(path[:n])] for n in range(len(path), 0, -1) if tuple(path[:n]) in lines), file)
        return LaunchToolError(f'{place}: {text}')

    def known(found: Mapping[str, Any], names: Sequence[str], path: Sequence[Any]) -> None:
        for key in found:
            if key not in names:
                raise wrong((*path, key), f'key {key!r} is not known here{hint(key, names)}')

    def text(found: Mapping[str, Any], key: str, path: Sequence[Any], default: Any = None) -> Any:
        value = found.get(key, default)
        if value is not None and (not isinstance(value, str) or not value):
            raise wrong((*path, key), f'key {key!r} must be a text, got {value!r}')
        return value

    known(data, PLAN_KEYS, ())
    if not isinstance(data.get('stages'), list) or not data['stages']:
        raise wrong(('stages',), "key 'stages' must be a list of at least one stage")
    run_dir = os.path.abspath(text(data, 'run_dir', (), 'runs/progressive'))
    start = text(data, 'load_from', ())
    if start and not os.path.isfile(start):
        raise wrong(('load_from',), f'checkpoint {start} does not exist')
    stages: List[Stage] = []
    for number, found in enumerate(data['stages']):
        path = ('stages', number)
        if not isinstance(found, dict):
            raise wrong(path, f'stage {number + 1} must be a mapping with name and config, got {found!r}')
        known(found, STAGE_KEYS, path)
        name, config, metric = text(found, 'name', path), text(found, 'config', path), text(found, 'metric', path, data.get('metric'))
        for key, value in (('name', name), ('config', config), ('metric', metric)):
            if value is None:
                raise wrong(path, f'stage {number + 1} has no {key!r}')
        if not re.fullmatch(r'[A-Za-z0-9][\w.-]*', name) or name in (stage.name for stage in stages):
            raise wrong((*path, 'name'), f'key name must be a folder\'s name that no other stage has, got {name!r}')
        if not os.path.isfile(config):
            raise wrong((*path, 'config'), f'configuration {config} does not exist')
        numbers = {key: found.get(key, default) for key, default in (('ranks', 1), ('max_restarts', 3))}
        for key, value in numbers.items():
            least = 1 if key == 'ranks' else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise wrong((*path, key), f'key {key!r} must be a whole number >= {least}, got {value!r}')
        choices = {key: found.get(key, options[0]) for key, options in CHOICES.items()}
        for key, value in choices.items():
            if value not in CHOICES[key]:
                raise wrong((*path, key), f'key {key!r} must be one of {", ".join(str(o) for o in CHOICES[key] if o)}, got {value!r}')
        gpus = found.get('gpus')
        gpus = None if gpus is None else ','.join(map(str, gpus)) if isinstance(gpus, list) else str(gpus)
        overrides = found.get('overrides') or {}
        if not isinstance(overrides, dict):
            raise wrong((*path, 'overrides'), f'key overrides must be a mapping such as {{data: {{workers_per_gpu: 8}}}}, got {overrides!r}')
        for key in overrides:
            if key in OWN:
                raise wrong((*path, 'overrides', key), f'key {key!r} cannot be an override: a stage has its folder below run_dir and starts '
                                                       'from the stage before it, the first one from load_from at the top of this file')
        gates = []
        if not isinstance(found.get('gates') or [], list):
            raise wrong((*path, 'gates'), f'key gates must be a list, got {found["gates"]!r}')
        for index, one in enumerate(found.get('gates') or []):
            here = (*path, 'gates', index)
            bounds = [one[key] for key in ('at_least', 'at_most') if key in one] if isinstance(one, dict) else []
            if not isinstance(one, dict) or not text(one, 'metric', here) or len(bounds) != 1 or isinstance(bounds[0], bool) \
                    or not isinstance(bounds[0], (int, float)) or not math.isfinite(bounds[0]):
                raise wrong(here, f'a gate is {{metric: M, at_least: number}} (or at_most), got {one!r}')
            known(one, GATE_KEYS, here)
            gates.append(Gate(**one))
        stages.append(Stage(name, config, os.path.join(run_dir, name), metric, gpus=gpus, overrides=tuple(_words(overrides)),
                            gates=tuple(gates), **numbers, **choices))
    if stages[0].optimizer == 'keep' and not start:
        raise wrong(('stages', 0, 'optimizer'), 'the first stage has no checkpoint to keep an optimizer from: give load_from, or reset')
    return Plan(os.path.abspath(file), run_dir, os.path.abspath(start) if start else None, tuple(stages))


def _words(overrides: Mapping[str, Any], prefix: str = '') -> List[str]:
    """``{data: {workers_per_gpu: 8}}`` as ``--data.workers_per_gpu 8``: only what is named is replaced."""
    words: List[str] = []
    for key, value in overrides.items():
        if isinstance(value, dict) and value:
            words += _words(value, f'{prefix}{key}.')
        else:
            words += [f'--{prefix}{key}', value if isinstance(value, str) else json.dumps(value)]
    return words


@dataclass(frozen=True)
class Facts:
    """What is known of a stage's configuration before it runs: see ``facts`` of ``tools/train_progressive.py``.

    ``metrics``: names that its evaluation gives, None where that is not known; ``problems``: why it must not start.
    """

    config_hash: str
    metrics: Optional[Tuple[str, ...]] = None
    averages: bool = True
    problems: Tuple[str, ...] = ()


def check_plan(plan: Plan, facts: Mapping[str, Facts]) -> List[str]:
    """Everything that would stop a later stage, found before the first one starts."""
    problems: List[str] = []
    for number, stage in enumerate(plan.stages):
        known = facts[stage.name]
        problems += [f'stage {stage.name}: {text}' for text in known.problems]
        if known.metrics is not None:
            for metric in dict.fromkeys([stage.metric, *(gate.metric for gate in stage.gates)]):
                if metric not in known.metrics:
                    problems.append(f'stage {stage.name}: its evaluation has no metric {metric!r}{hint(metric, known.metrics)}')
        if stage.weights == 'ema' and number and not facts[plan.stages[number - 1].name].averages:
            problems.append(f'stage {stage.name}: weights: ema, but {plan.stages[number - 1].name} keeps no averages; add '
                            '"overrides: {ema: {decay: 0.999}}" there')
    return problems


def nearest_metric(metric: str, found: Mapping[str, Any]) -> str:
    """A hint for a metric that an evaluation did not give."""
    return hint(metric, found) or f'; there are {", ".join(sorted(found)[:12])}'


def as_dict(plan: Plan) -> Dict[str, Any]:
    """What ``progressive.json`` keeps of a plan, for people."""
    return {'file': plan.file, 'load_from': plan.load_from, 'order': [stage.name for stage in plan.stages]}
