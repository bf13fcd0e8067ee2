"""A run as its folder tells it: rows, description, configuration, evaluation, files."""
from __future__ import annotations

import glob
import json
import os
import re
import statistics
from typing import Any, Dict, List, Mapping, Optional, Tuple

import yaml

from ..config import ConfigError
from ..config.yaml_source import Loader, load_yaml
from .records import MOST, JsonLog, MonitorError, Row, TextLog, finite, join

MAX_KEYS = 100_000  # of a configuration, which may be a file that somebody else wrote
PICTURES = ('pictures', 'viz', 'visualizations', 'predictions', 'eval')  # where the tools write pictures, below the run folder


class Run:
    """Everything that can be said about a run from its folder (or from one ``.log.json``). :meth:`refresh` reads what is new.

    ``problems``: what is wrong with log files that tell nothing, each with its path.

    Raises:
        MonitorError: no such place, or nothing there that a run writes.
    """

    def __init__(self, place: str):
        self.place = os.path.abspath(place)
        self.single = os.path.isfile(self.place)
        if not os.path.exists(self.place):
            raise MonitorError(f'{place}: no such run folder or log; give the folder that training wrote (--run-dir), or a '
                               '.log.json file')
        self.folder = os.path.dirname(self.place) if self.single else self.place
        self.logs: Dict[str, JsonLog] = {}
        self.texts: Dict[str, TextLog] = {}
        self.refresh()
        if self.single and not self._ordered()[0].meta and not self.train and not self.val:
            raise MonitorError(next(iter(self.problems), f'{place}: is empty; give the .log.json of a run'))

    def refresh(self) -> None:
        """Read what was added since the last call."""
        paths = [self.place] if self.single else sorted(glob.glob(os.path.join(glob.escape(self.folder), '*.log.json')))
        if not paths and not os.path.isdir(os.path.join(self.folder, 'launch')):
            near = sorted(glob.glob(os.path.join(glob.escape(self.folder), '*', '*.log.json')))
            hint = f'; {os.path.dirname(near[-1])} holds one' if near else ''
            raise MonitorError(f'{self.folder}: no *.log.json here, so no run was written to this folder{hint}')
        for path in paths:
            if path not in self.logs:
                self.logs[path] = JsonLog(path)
                text = path[:-len('.json')] if path.endswith('.log.json') else ''
                self.texts[path] = TextLog(text)
            self.logs[path].refresh()
            self.texts[path].refresh()
        for path in set(self.logs) - set(paths):  # moved aside by a new run
            del self.logs[path], self.texts[path]
        self.problems = [log.problem for log in self._ordered() if log.problem]
        told = any(not log.problem or log.cut_at_once for log in self.logs.values())
        if self.logs and not told and not os.path.isdir(os.path.join(self.folder, 'launch')):
            raise MonitorError('; '.join(self.problems[-3:]))
        self.train, self.val, self.joints = join(self._ordered())
        self._measure()
        self.launch = self._launch_state()

    def _ordered(self) -> List[JsonLog]:
        return [self.logs[path] for path in sorted(self.logs)]

    def _launch_state(self) -> Mapping[str, Any]:
        """What ``tools/launch.py`` wrote about this run, or an empty mapping."""
        try:
            with open(os.path.join(self.folder, 'launch', 'state.json'), encoding='utf-8') as stream:
                state = json.load(stream)
            return state if isinstance(state, dict) and not self.single else {}
        except (OSError, ValueError):
            return {}

    # ---- description ------------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        return os.path.basename(self.folder if not self.single else self.place)

    @property
    def meta(self) -> Dict[str, Any]:
        """The first line of the newest log (empty for the reference's)."""
        return next((log.meta for log in reversed(self._ordered()) if log.meta), {})

    @property
    def config(self) -> Dict[str, Any]:
        """The resolved configuration: from the log itself, else ``configs.yaml`` beside it; empty if neither can be read."""
        text = self.meta.get('config')
        if isinstance(text, str):
            try:
                found = yaml.load(text, Loader=Loader)  # a SafeLoader
                if isinstance(found, dict) and _bounded(found):
                    return found
            except (yaml.YAMLError, ValueError, RecursionError):
                pass
        path = os.path.join(self.folder, 'configs.yaml')
        if os.path.isfile(path):
            try:
                return load_yaml(path)[0]
            except ConfigError:
                pass
        return {}

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the configuration by its dotted name."""
        value: Any = self._cached_config()
        for part in key.split('.'):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        huge = isinstance(value, int) and abs(value) > MOST  # no setting is, and arithmetic with it would fail
        return default if value is None or huge else value

    def _cached_config(self) -> Dict[str, Any]:
        key = tuple(path for path, log in self.logs.items() if log.meta)
        if getattr(self, '_config_key', None) != key:
            self._config_key, self._config = key, self.config
        return self._config

    @property
    def ranks(self) -> Optional[int]:
        value = self.meta.get('world_size')
        return value if isinstance(value, int) and 0 < value < MOST else None

    # ---- size and place -----------------------------------------------------------------------------------------------
    def _measure(self) -> None:
        """``by_iteration``: whether ``iter`` counts through the whole run (mmcv's IterBasedRunner) instead of within the epoch.
        ``iterations``: per epoch; from the text log, else the longest finished epoch in the rows; None while unknown."""
        turns = [(row.iter, later.iter) for row, later in zip(self.train, self.train[1:]) if later.epoch > row.epoch]
        self.by_iteration = bool(turns) and all(later > earlier for earlier, later in turns)
        told = [self.texts[path].iterations for path in sorted(self.texts) if self.texts[path].iterations]
        if told:
            self.iterations: Optional[int] = told[-1]
            return
        over = max([row.epoch for row in self.val] + [self.train[-1].epoch - 1 if self.train else 0])
        ended = [row.iter for row in self.train if row.epoch <= over]
        self.iterations = max(ended) if ended and not self.by_iteration else None

    @property
    def epochs(self) -> Optional[int]:
        """Epochs of the whole schedule, from the configuration."""
        for key in ('max_epochs', 'runner.max_epochs', 'total_epochs'):
            value = self.setting(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    @property
    def interval(self) -> int:
        """Iterations between two logged lines."""
        steps = [later.iter - row.iter for row, later in zip(self.train, self.train[1:])
                 if later.epoch == row.epoch and later.iter > row.iter]
        if steps:
            return int(statistics.median(steps))
        value = self.setting('log_config.interval', 50)
        return min(value, self.iterations or value) if isinstance(value, int) and value > 0 else 50

    def step(self, row: Row) -> float:
        """Place of a training row on the time axis, in epochs if their length is known, else in iterations."""
        if self.iterations and not self.by_iteration:
            return row.epoch - 1 + row.iter / self.iterations
        return float(row.iter)

    @property
    def step_unit(self) -> str:
        return 'epoch' if self.iterations and not self.by_iteration else 'iteration'

    # ---- values -------------------------------------------------------------------------------------------------------
    def names(self, prefix: str = '') -> List[str]:
        """Names of logged training values that begin with ``prefix``, in the order of the log."""
        found: Dict[str, None] = {}
        for row in self.train[:3] + self.train[-3:]:
            found.update(dict.fromkeys(name for name in row.values if name.startswith(prefix)))
        return list(found)

    def series(self, name: str) -> Tuple[List[float], List[float]]:
        """(steps, values) of one logged training value; values may be NaN or infinite."""
        rows = [row for row in self.train if name in row.values]
        return [self.step(row) for row in rows], [row.values[name] for row in rows]

    def recent(self, name: str, rows: int = 10) -> Optional[float]:
        """Median of the last ``rows`` finite values, or None."""
        values = finite([row.values.get(name) for row in self.train[-rows:]])
        return statistics.median(values) if values else None

    def last(self, name: str) -> Optional[float]:
        """The newest value, which may be NaN; None if it was never logged."""
        return next((row.values[name] for row in reversed(self.train) if name in row.values), None)

    def losses(self) -> Dict[str, List[str]]:
        """Names of the logged losses by task: ``loss/<task>/...``; losses without a task (mmdet3d's) are under ''."""
        found: Dict[str, List[str]] = {}
        for name in self.names():
            parts = name.split('/')
            if parts[0] == 'loss' and len(parts) > 2:
                found.setdefault(parts[1], []).append(name)
            elif name != 'loss' and 'loss' in name and parts[0] != 'stats':
                found.setdefault('', []).append(name)
        return found

    def map_losses(self) -> Dict[str, Dict[str, str]]:
        """class -> kind (focal, dice, ...) -> name, of the map head's losses."""
        found: Dict[str, Dict[str, str]] = {}
        for name in self.names('loss/map/'):
            parts = name.split('/')
            if len(parts) == 4:
                found.setdefault(parts[2], {})[parts[3]] = name
        return found

    # ---- files --------------------------------------------------------------------------------------------------------
    def written(self) -> Optional[float]:
        """When the newest log file was last written (seconds since 1970)."""
        times = []
        for path in list(self.logs) + [text.path for text in self.texts.values() if text.path]:
            try:
                times.append(os.stat(path).st_mtime)
            except OSError:
                pass
        return max(times) if times else None

    def checkpoints(self) -> List[Tuple[str, float, int]]:
        """(name, time, bytes) of the checkpoints, oldest first; links are left out."""
        found = []
        for path in glob.glob(os.path.join(glob.escape(self.folder), '*.pth')):
            try:
                if not os.path.islink(path):
                    status = os.stat(path)
                    found.append((os.path.basename(path), status.st_mtime, status.st_size))
            except OSError:
                pass
        return sorted(found, key=lambda item: item[1])

    def pictures(self, most: int = 8) -> List[str]:
        """The newest PNG files that the run's folder holds, at most ``most``."""
        if self.single:
            return []
        found = []
        for place in ('', *PICTURES):
            for pattern in ('*.png', os.path.join('**', '*.png') if place else ''):
                if pattern:
                    found += glob.glob(os.path.join(glob.escape(self.folder), place, pattern), recursive=True)
        found = sorted(set(found), key=lambda path: (-_modified(path), path))[:most]
        return sorted(found)

    def messages(self) -> List[Tuple[str, str, str]]:
        """(time, level, text) of warnings and errors over all parts of the run, oldest first."""
        return [item for path in sorted(self.texts) for item in self.texts[path].messages]

    def rank_errors(self) -> List[Tuple[str, str]]:
        """(file, last line of the traceback) of every rank of the newest start whose log ends in an error."""
        found = []
        paths = glob.glob(os.path.join(glob.escape(self.folder), 'logging', '*.log')) if not self.single else []
        newest = max((_stamp(path) for path in paths), default='')
        for path in sorted(paths):
            if _stamp(path) != newest:
                continue
            try:
                with open(path, 'rb') as stream:
                    stream.seek(max(0, os.fstat(stream.fileno()).st_size - 65536))
                    lines = stream.read().decode('utf-8', errors='replace').rstrip().split('\n')
            except OSError:
                continue
            if any('Traceback (most recent call last)' in line for line in lines):
                found.append((path, lines[-1].strip()))
        return found


def _bounded(value: Any, most: int = MAX_KEYS) -> bool:
    """Whether nested data has at most ``most`` values. Aliases of YAML make a few lines into billions."""
    todo, count = [value], 0
    while todo and count <= most:
        item = todo.pop()
        count += 1
        todo += item.values() if isinstance(item, Mapping) else item if isinstance(item, list) else ()
    return count <= most


def _stamp(path: str) -> str:
    match = re.match(r'\d{8}_\d{6}', os.path.basename(path))
    return match.group() if match else ''


def _modified(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
