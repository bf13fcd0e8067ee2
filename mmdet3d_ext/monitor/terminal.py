"""The terminal view: one screen of text, the same on a screen of any width."""
from __future__ import annotations

import math
import sys
import time
from typing import Iterable, List, Optional, Sequence, TextIO

from .evaluation import summary
from .health import BAD, GOOD, INFO, WARN, Mark, health
from .progress import FAILED, FINISHED, RUNNING, SILENT, STOPPED, Progress, duration, progress
from .records import finite
from .run import Run

BLOCKS = '▁▂▃▄▅▆▇█'
PLAIN_BLOCKS = '_.-=+*#@'
SIGNS = {GOOD: '✓', INFO: '·', WARN: '!', BAD: '✗'}
PLAIN_SIGNS = {GOOD: 'ok', INFO: '..', WARN: '!', BAD: 'XX'}
COLOURS = {GOOD: '32', INFO: '90', WARN: '33', BAD: '31', 'title': '1', 'dim': '90'}
CLEAR = '\033[H\033[2J\033[3J'
EPOCHS_SHOWN = 6


class Style:
    """What the terminal can show: colours, block characters, columns."""

    def __init__(self, colour: bool = False, unicode: bool = True, width: int = 100):
        self.colour, self.unicode, self.width = colour, unicode, max(60, width)

    @classmethod
    def of(cls, stream: TextIO, width: Optional[int] = None) -> 'Style':
        """The style for ``stream``: plain text if it is no terminal or cannot encode the marks."""
        import os
        import shutil
        terminal = stream.isatty()
        try:
            (BLOCKS + '✓✗·').encode(stream.encoding or 'ascii')
            unicode = True
        except (UnicodeEncodeError, LookupError):
            unicode = False
        colour = terminal and os.environ.get('TERM') != 'dumb' and 'NO_COLOR' not in os.environ
        return cls(colour, unicode, width or shutil.get_terminal_size((100, 40)).columns)

    def paint(self, text: str, kind: str) -> str:
        return f'\033[{COLOURS[kind]}m{text}\033[0m' if self.colour else text

    def sign(self, level: str) -> str:
        return self.paint((SIGNS if self.unicode else PLAIN_SIGNS)[level], level)

    def spark(self, values: Sequence[float], width: int = 20) -> str:
        """A curve of ``width`` characters; non-finite values are ``x``."""
        if not values:
            return ''
        count = min(width, len(values))
        parts = [values[i * len(values) // count:max((i + 1) * len(values) // count, i * len(values) // count + 1)]
                 for i in range(count)]
        means = [sum(finite(part)) / len(finite(part)) if finite(part) else float('nan') for part in parts]
        good = finite(means)
        low, high = (min(good), max(good)) if good else (0.0, 0.0)
        blocks = BLOCKS if self.unicode else PLAIN_BLOCKS
        return ''.join('x' if not math.isfinite(v) else blocks[int((v - low) / (high - low) * 7.999)] if high > low else blocks[0]
                       for v in means)


def number(value: Optional[float]) -> str:
    """At most seven characters."""
    if value is None:
        return '-'
    if not math.isfinite(value):
        return str(value)
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f'{value:.1e}'
    return f'{value:.4f}' if abs(value) < 10 else f'{value:.2f}'


def render(run: Run, style: Style, now: Optional[float] = None) -> str:
    """The whole view as text."""
    state = progress(run, now)
    marks = health(run, state)
    lines = _head(run, state, style) + _speed(run, state, style)
    lines += _losses(run, style, {mark.name: mark for mark in marks})
    lines += _evaluations(run, style) + _health(marks, style) + _messages(run, style)
    return '\n'.join(lines) + '\n'


def _head(run: Run, state: Progress, style: Style) -> List[str]:
    what = [run.name]
    if run.meta.get('exp_name'):
        what.append(str(run.meta['exp_name']))
    if run.meta.get('code_version'):
        what.append(f'code {str(run.meta["code_version"])[:8]}' + ('+changes' if run.meta.get('code_changes') else ''))
    batch = run.setting('data.samples_per_gpu')
    if run.ranks:
        what.append(f'{run.ranks} rank(s)' + (f' x {batch} samples' if batch else ''))
    level = {RUNNING: GOOD, FINISHED: GOOD, SILENT: BAD, FAILED: BAD}.get(state.state, INFO)
    lines = [style.paint('  '.join(what), 'title'), f'{style.paint(state.state, level)}: {state.text}']
    if state.epoch:
        place = f'epoch {state.epoch}' + (f'/{state.epochs}' if state.epochs else '')
        place += f', iteration {state.iteration}' + (f'/{state.iterations}' if state.iterations else '')
        if state.fraction is not None:
            place += f'  {_bar(state.fraction, style)} {state.fraction:.1%}'
        lines.append(place)
    if state.eta is not None:
        end = time.strftime('%a %d %b %H:%M', time.localtime(time.time() + state.eta))
        lines.append(f'ETA {duration(state.eta)} ({end})')
    saved = run.checkpoints()
    if saved:
        lines.append(f'newest checkpoint {saved[-1][0]}, {duration(time.time() - saved[-1][1])} old, {saved[-1][2] / 2**20:.0f} MiB')
    return lines


def _bar(fraction: float, style: Style, width: int = 24) -> str:
    full = int(fraction * width)
    return ('█' * full + '░' * (width - full)) if style.unicode else '[' + '#' * full + '-' * (width - full) + ']'


def _speed(run: Run, state: Progress, style: Style) -> List[str]:
    parts = []
    if state.seconds_per_step:
        parts.append(f'{state.seconds_per_step:.3g} s/iteration')
    if state.samples_per_second:
        parts.append(f'{state.samples_per_second:.3g} samples/s')
    if state.data_share is not None:
        parts.append(f'data {state.data_share:.0%}')
    memory = run.last('memory')
    if memory:
        parts.append(f'GPU memory {memory / 1024:.1f} GiB')
    learning = run.last('lr')
    if learning is not None:
        parts.append(f'lr {learning:.3g}')
    gradient = run.last('grad_norm')
    if gradient is not None:
        parts.append(f'grad norm {number(gradient)} {style.spark(run.series("grad_norm")[1], 12)}')
    return ['  '.join(parts)] if parts else []


def _losses(run: Run, style: Style, marks: dict) -> List[str]:
    if not run.train:
        return []
    lines = ['', style.paint(f'{"loss":<34}{"now":>9}{"first":>9}   curve', 'title')]
    if run.last('loss') is not None:
        lines.append(_curve(run, 'loss', 'total', style))
    classes = run.map_losses()
    in_table = {name for kinds in classes.values() for kind, name in kinds.items()}
    for task, names in run.losses().items():
        if task:
            lines.append(style.paint(task, 'dim'))
        lines += [_curve(run, name, '  ' + name.split('/')[-1] if task else name, style)
                  for name in names if name not in in_table]
        if task == 'map' and classes:
            lines += _classes(run, classes, style, marks)
    return lines


def _curve(run: Run, name: str, label: str, style: Style) -> str:
    values = run.series(name)[1]
    first = finite(values[:3])
    return (f'{label[:33]:<34}{number(run.last(name)):>9}{number(first[0] if first else None):>9}   '
            f'{style.spark(values, min(40, style.width - 57))}')


def _classes(run: Run, classes: dict, style: Style, marks: dict) -> List[str]:
    extra = [kind for kind in dict.fromkeys(kind for kinds in classes.values() for kind in kinds)
             if kind not in ('focal', 'dice')]
    lines = [style.paint(f'  {"class":<18}{"focal":>10}  {"dice":>10}' + ''.join(f'{kind[:10]:>11}' for kind in extra), 'dim')]
    for label, kinds in classes.items():
        cells = ''
        for kind in ('focal', 'dice'):
            mark: Optional[Mark] = marks.get(f'map/{label}/{kind}')
            shown = number(run.last(kinds[kind])) if kind in kinds else '-'
            cells += f'{shown:>9} {style.sign(mark.level) if mark else " "} '
        cells += ''.join(f'{number(run.last(kinds[kind])) if kind in kinds else "-":>11}' for kind in extra)
        lines.append(f'  {label[:17]:<18}{cells}  {style.spark(run.series(next(iter(kinds.values())))[1], 16)}')
    return lines


def _evaluations(run: Run, style: Style) -> List[str]:
    epochs, rows = summary(run)
    if not rows:
        return []
    epochs = epochs[-EPOCHS_SHOWN:]
    lines = ['', style.paint(f'{"evaluation after epoch":<26}' + ''.join(f'{epoch:>9}' for epoch in epochs), 'title')]
    group = None
    for kind, label, values in rows[:40]:
        if kind != group and kind != 'overall':
            lines.append(style.paint({'object': 'AP', 'map': 'IoU'}.get(kind, kind), 'dim'))
        group = kind
        lines.append(f'  {label[:23]:<24}' + ''.join(f'{value:>9.4f}' if math.isfinite(value) else f'{"-":>9}'
                                                     for value in values[-EPOCHS_SHOWN:]))
    return lines


def _health(marks: Iterable[Mark], style: Style) -> List[str]:
    lines = ['', style.paint('health', 'title')]
    well: List[str] = []
    for mark in marks:
        if mark.level == GOOD:
            well.append(mark.name)
        else:
            lines += _wrap(f'{mark.name}: {mark.text}', f'{style.sign(mark.level)} ', style.width)
    if well:
        lines += _wrap(', '.join(well), f'{style.sign(GOOD)} ', style.width)
    return lines


def _messages(run: Run, style: Style, most: int = 5) -> List[str]:
    messages = run.messages()[-most:]
    if not messages:
        return []
    lines = ['', style.paint('last warnings and errors in the log', 'title')]
    for when, level, text in messages:
        lines.append(f'{when} {level} {text}'[:style.width])
    return lines


def _wrap(text: str, first: str, width: int) -> List[str]:
    import textwrap
    lines = textwrap.wrap(text, max(40, width - 3), break_on_hyphens=False) or ['']
    return [first + lines[0]] + ['  ' + line for line in lines[1:]]


def follow(run: Run, seconds: float, stream: Optional[TextIO] = None, rounds: Optional[int] = None) -> None:
    """Show the view again every ``seconds`` until the run has ended (``rounds``: at most so many times)."""
    stream = stream or sys.stdout
    shown = 0
    while True:
        style = Style.of(stream)
        text = render(run, style)
        stream.write((CLEAR if stream.isatty() else '\n' if shown else '') + text)
        stream.flush()
        shown += 1
        if progress(run).state in (FINISHED, FAILED, STOPPED) or (rounds is not None and shown >= rounds):
            return
        time.sleep(seconds)
        run.refresh()
