"""Reading log files that are still being written: whole lines only, each once."""
from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

NOT_VALUES = ('mode', 'epoch', 'iter')
# Of the first line of mmcv's logs, which has no mode: what its, mmdet3d's and our training write there.
DESCRIPTION = {'env_info', 'config', 'seed', 'exp_name', 'mmcv_version', 'hook_msgs', 'CLASSES', 'PALETTE', 'versions', 'world_size'}
MOST = 10 ** 9  # epochs or iterations: no run has more
HEAD = 32  # bytes of a file that a message shows


class MonitorError(Exception):
    """A run that cannot be shown; the message says what was looked for and what to do."""


class Row(NamedTuple):
    """One logged line: ``iter`` counts from 1 within ``epoch`` (which counts from 1; 0: before training)."""

    epoch: int
    iter: int
    values: Dict[str, float]

    @property
    def place(self) -> Tuple[int, int]:
        return self.epoch, self.iter


class LineFollower:
    """The complete lines that were added to a file since the last call; ``tail`` is what follows the last line's end.

    A file that got shorter was written anew: :meth:`read` then starts from its beginning and ``rewound`` is True. ``size`` and
    ``head``: bytes of the file, and the first of them; ``error``: why it cannot be read although it is there.
    """

    def __init__(self, path: str):
        self.path, self.offset, self.tail, self.rewound = path, 0, '', False
        self.size, self.head, self.error = 0, b'', ''

    def read(self) -> List[str]:
        try:
            with open(self.path, 'rb') as stream:
                self.size = os.fstat(stream.fileno()).st_size
                self.rewound = self.size < self.offset
                if self.rewound:
                    self.offset = 0
                self.head = stream.read(HEAD)
                stream.seek(self.offset)
                data = stream.read()
            self.error = ''
        except FileNotFoundError:  # moved aside or not there yet
            return []
        except OSError as error:
            self.error = error.strerror or str(error)
            return []
        end = data.rfind(b'\n') + 1
        self.offset += end
        self.tail = _text(data[end:])
        return [_text(line) for line in data[:end].split(b'\n')[:-1]]


def _text(data: bytes) -> str:
    return data.decode('utf-8', errors='replace').strip('\0\r')  # a machine that lost power leaves zero bytes


class JsonLog:
    """One ``.log.json``: the run's description (first line), training and evaluation rows.

    ``broken`` counts complete lines that are no line of such a log; ``partial`` says whether the last line is incomplete.
    """

    def __init__(self, path: str):
        self.path = path
        self.follower = LineFollower(path)
        self._clear()

    def _clear(self) -> None:
        self.meta: Dict[str, Any] = {}
        self._train: List[Row] = []
        self._val: List[Row] = []
        self.broken, self.partial, self._last = 0, False, None
        self._good, self._tail = 0, 'empty'  # lines that are what they should be; what the file ends with

    def refresh(self) -> None:
        lines = self.follower.read()
        if self.follower.rewound:
            self._clear()
        for line in lines:
            kind, row = self._parse(line)
            if kind in ('train', 'val'):
                (self._train if kind == 'train' else self._val).append(row)
            self.broken += kind == 'broken'
            self._good += kind not in ('broken', 'empty')
        kind, row = self._parse(self.follower.tail)
        self.partial, self._tail = kind == 'broken', kind
        self._last = (kind, row) if kind in ('train', 'val') else None  # whole, only its line's end is missing

    def _parse(self, line: str) -> Tuple[str, Optional[Row]]:
        if not line.strip():
            return 'empty', None
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            return 'broken', None
        if not isinstance(data, dict):
            return 'broken', None
        if 'mode' not in data:
            if data and DESCRIPTION.isdisjoint(data):
                return 'broken', None
            self.meta = self.meta or data
            return 'meta', None
        try:
            row = Row(int(data.get('epoch', 1)), int(data.get('iter', 0)), _numbers(data))
        except (TypeError, ValueError, OverflowError):
            return 'broken', None
        if not (0 <= row.epoch < MOST and 0 <= row.iter < MOST):
            return 'broken', None
        return ('train' if data['mode'] == 'train' else 'val'), row

    @property
    def cut_at_once(self) -> bool:
        """Whether the file ends within its first line."""
        begun = self.follower.head.lstrip().startswith(b'{')
        return self.partial and not self.broken and not self._good and begun

    @property
    def problem(self) -> str:
        """Why the file tells nothing although it is not empty, with its path; '' if there is nothing to say."""
        found = self.follower
        if found.error:
            return f'{self.path}: cannot be read: {found.error}'
        if not found.size or self._good or self._tail in ('train', 'val', 'meta'):
            return ''
        if self.cut_at_once:
            return (f'{self.path}: is cut within its first line ({found.size} bytes): the run was killed as it began to write, or '
                    'this is a part of the file')
        what = 'holds only zero bytes (the machine lost power?)' if not found.head.strip(b'\0') else f'begins with {found.head!r}'
        return f'{self.path}: holds no line that mmcv\'s runner writes, so it is no .log.json, or a damaged one; it {what}'

    @property
    def train(self) -> List[Row]:
        return self._train + ([self._last[1]] if self._last and self._last[0] == 'train' else [])

    @property
    def val(self) -> List[Row]:
        return self._val + ([self._last[1]] if self._last and self._last[0] == 'val' else [])


def _numbers(data: Dict[str, Any]) -> Dict[str, float]:
    """The numeric values; of several optimizers' learning rates the first one."""
    found = {}
    for name, value in data.items():
        if name in NOT_VALUES:
            continue
        if name == 'lr' and isinstance(value, dict) and value:
            value = next(iter(value.values()))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = float(value)
    return found


def join(logs: List[JsonLog]) -> Tuple[List[Row], List[Row], List[Tuple[int, int]]]:
    """Rows of a run that was resumed, oldest log first: what a later log trained again replaces what was lost.

    Returns:
        training rows, evaluation rows, and the places (epoch, iter) at which later logs go on.
    """
    train: List[Row] = []
    val: List[Row] = []
    joints: List[Tuple[int, int]] = []
    for log in logs:
        new = log.train
        if new and train:
            first = new[0].place
            train = [row for row in train if row.place < first]
            val = [row for row in val if row.epoch < first[0]]
            joints.append(first)
        train += new
        val = [row for row in val if row.epoch not in {later.epoch for later in log.val}] + log.val
    return train, val, joints


_LINE = re.compile(r'^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,\d+)? - (?:rank \d+ - )?(\S+) - (DEBUG|INFO|WARNING|ERROR|CRITICAL) - (.*)')
_EPOCH = re.compile(r'^Epoch \[\d+\]\[\d+/(\d+)\]')
_EVALUATED = re.compile(r'^evaluated in ([\d.]+) s')
_RULE = re.compile(r'^[!=\-\s]*$')


@dataclass
class TextLog:
    """What only the text log beside the JSON one says.

    Args:
        path: ``<time>.log``.

    ``messages``: (time, level, first telling line) of warnings and errors, the newest ``keep``; ``evaluation``: seconds that the
    last evaluation took.
    """

    path: str
    keep: int = 200
    iterations: Optional[int] = None
    evaluation: Optional[float] = None
    warnings: int = 0
    errors: int = 0
    messages: List[Tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.follower = LineFollower(self.path)
        self._open = False  # the message so far is only a rule or empty: its text is in the lines that follow

    def refresh(self) -> None:
        for line in self.follower.read():
            self._take(line)

    def _take(self, line: str) -> None:
        match = _LINE.match(line)
        if not match:
            if self._open and not _RULE.match(line):
                time, level, _ = self.messages[-1]
                self.messages[-1] = (time, level, line.strip())
                self._open = False
            return
        time, _, level, text = match.groups()
        self._open = False
        if level in ('WARNING', 'ERROR', 'CRITICAL'):
            if level == 'WARNING':
                self.warnings += 1
            else:
                self.errors += 1
            self.messages = (self.messages + [(time, level, text.strip())])[-self.keep:]
            self._open = bool(_RULE.match(text))
            return
        found = _EPOCH.match(text)
        if found:
            self.iterations = int(found.group(1))
        found = _EVALUATED.match(text)
        if found:
            self.evaluation = float(found.group(1))


def finite(values: List[Optional[float]]) -> List[float]:
    """The finite ones."""
    return [value for value in values if value is not None and math.isfinite(value)]
