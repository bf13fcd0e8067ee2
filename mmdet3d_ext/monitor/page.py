"""The run as one HTML file: no network, no other file, readable without scripts."""
from __future__ import annotations

import base64
import html
import math
import os
import time
from typing import Iterable, List, Optional, Sequence, Tuple

from ..config.yaml_source import dump_yaml
from . import compare
from .charts import Chart, Curve, svg
from .evaluation import summary
from .health import BAD, DICE_LARGE, DICE_SMALL, FOCAL, GOOD, GRAD_NORM, INFO, WARN, Mark, health, loss_weight
from .page_assets import SCRIPT, STYLE
from .progress import Progress, duration, progress
from .run import Run
from .terminal import number

PICTURE_LIMIT = 8 * 2**20  # bytes of all embedded pictures
PNG = b'\x89PNG\r\n\x1a\n'
WORDS = {GOOD: 'good', INFO: 'not yet', WARN: 'look', BAD: 'bad'}
# A page that shows what a log says must not be able to load or send anything, whatever the log says.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def escape(value: object) -> str:
    return html.escape(str(value))


def page(run: Run, other: Optional[Run] = None, now: Optional[float] = None) -> str:
    """The whole page; ``other``: a run to compare with.

    Returns:
        HTML text: state, health, curves, evaluation, example predictions, differences, configuration.
    """
    now = time.time() if now is None else now
    state = progress(run, now)
    marks = health(run, state)
    sections = [('Health', _health(marks)), ('Curves', _curves(run, other)), ('Evaluation', _evaluation(run, other)),
                ('Example predictions', _pictures(run)), ('Warnings and errors', _messages(run))]
    if other is not None:
        sections.insert(3, (f'Differences from {other.name}', _differences(run, other)))
    sections.append(('Configuration', _configuration(run)))
    sections = [(title, body) for title, body in sections if body]
    links = ''.join(f'<a href="#s{i}">{escape(title)}</a>' for i, (title, _) in enumerate(sections))
    body = ''.join(f'<section id="s{i}"><h2>{escape(title)}</h2>{content}</section>'
                   for i, (title, content) in enumerate(sections))
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{escape(run.name)}: {escape(state.state)}</title><style>{STYLE}</style></head>'
            f'<body><header><h1>{escape(run.name)}</h1>{_head(run, state, now)}<nav>{links}</nav></header>'
            f'<main>{body}</main><script>{SCRIPT}</script></body></html>\n')


# ---- state and health ------------------------------------------------------------------------------------------------

def _head(run: Run, state: Progress, now: float) -> str:
    level = {'running': GOOD, 'finished': GOOD, 'silent': BAD, 'failed': BAD}.get(state.state, INFO)
    facts: List[Tuple[str, str]] = []
    if state.epoch:
        facts.append(('epoch', f'{state.epoch}' + (f' of {state.epochs}' if state.epochs else '')))
        facts.append(('iteration', f'{state.iteration}' + (f' of {state.iterations}' if state.iterations else '')))
    if state.fraction is not None:
        facts.append(('done', f'{state.fraction:.1%}'))
    if state.eta is not None:
        facts.append(('ETA', duration(state.eta)))
    if state.seconds_per_step:
        facts.append(('step', f'{state.seconds_per_step:.3g} s'))
    if state.samples_per_second:
        facts.append(('throughput', f'{state.samples_per_second:.3g} samples/s'))
    if state.data_share is not None:
        facts.append(('data time', f'{state.data_share:.0%}'))
    for name, label, form in (('memory', 'GPU memory', lambda v: f'{v / 1024:.1f} GiB'), ('lr', 'learning rate', '{:.3g}'.format),
                              ('grad_norm', 'grad norm', number), ('loss', 'loss', number)):
        value = run.last(name)
        if value is not None:
            facts.append((label, form(value)))
    if run.ranks:
        facts.append(('ranks', str(run.ranks)))
    if run.meta.get('code_version'):
        facts.append(('code', str(run.meta['code_version'])[:8] + ('+changes' if run.meta.get('code_changes') else '')))
    saved = run.checkpoints()
    if saved:
        facts.append(('newest checkpoint', f'{saved[-1][0]} ({duration(now - saved[-1][1])} old)'))
    cells = ''.join(f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>' for name, value in facts)
    stamp = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))
    return (f'<p class="state {level}">{escape(state.state)}: {escape(state.text)}</p><dl class="facts">{cells}</dl>'
            f'<p class="dim">{escape(run.place)} as of {stamp}</p>')


def _health(marks: Sequence[Mark]) -> str:
    rows = ''.join(f'<tr><td><span class="mark {mark.level}">{WORDS[mark.level]}</span></td><td>{escape(mark.name)}</td>'
                   f'<td>{escape(mark.text)}</td></tr>' for mark in marks)
    return (f'<table class="health"><tbody>{rows}</tbody></table><p class="dim">Thresholds: dice loss &lt; {DICE_LARGE} for large '
            f'and &lt; {DICE_SMALL} for small map classes, focal loss &lt; {FOCAL}, gradient norm &lt; {GRAD_NORM:g}; losses before '
            'class weights, medians of the last ten lines. &ldquo;Not yet&rdquo;: early in the schedule.</p>')


# ---- curves ----------------------------------------------------------------------------------------------------------

def _curves(run: Run, other: Optional[Run]) -> str:
    charts = list(_charts(run, other))
    return '<div class="charts">' + ''.join(svg(chart, i) for i, chart in enumerate(charts)) + '</div>' if charts else ''


def _charts(run: Run, other: Optional[Run]) -> Iterable[Chart]:
    if not run.train:
        return
    unit = run.step_unit
    joints = []
    if run.iterations and not run.by_iteration:
        joints = [epoch - 1 + iteration / run.iterations for epoch, iteration in run.joints]

    def series(of: Run, name: str, label: str, kind: str) -> Tuple[List[float], List[float]]:
        places, values = of.series(name)
        weight = loss_weight(of, label, kind) if kind else 1.0  # the limits, and another run, are only comparable without it
        return places, [value / weight for value in values] if weight > 0 else values

    def chart(title: str, names: Sequence[Tuple[str, str]], kind: str = '', **more) -> Chart:
        curves = []
        for index, (name, label) in enumerate(names):
            curves.append(Curve(label, *series(run, name, label, kind), colour=index))
            if other is not None and other.step_unit == unit and other.last(name) is not None:
                curves.append(Curve(f'{label} ({other.name})', *series(other, name, label, kind), dashed=True, colour=index))
        return Chart(title, curves, unit=unit, joints=joints, **more)

    if run.last('loss') is not None:
        yield chart('Total loss', [('loss', 'loss')], log=True)
    table = run.map_losses()
    in_table = {name for kinds in table.values() for name in kinds.values()}
    for task, names in run.losses().items():
        rest = [name for name in names if name not in in_table]
        if rest:
            yield chart(f'{task or "other"} losses'.capitalize(), [(name, name.split('/')[-1]) for name in rest], log=True)
    for kind in dict.fromkeys(kind for kinds in table.values() for kind in kinds):
        limits = {'focal': [('focal', FOCAL)], 'dice': [('large classes', DICE_LARGE), ('small classes', DICE_SMALL)]}
        before = ', before weights' if kind in limits else ''
        yield chart(f'Map: {kind} loss per class{before}', [(kinds[kind], label) for label, kinds in table.items() if kind in kinds],
                    kind if kind in limits else '', log=kind.endswith('focal'), limits=limits.get(kind, []))
    scores = [(name, name.split('/')[2]) for name in run.names('stats/map/') if name.endswith('/dice_score')]
    if scores:
        yield chart('Map: dice score per class (1 is perfect)', scores)
    others = [name for name in run.names('stats/') if not name.endswith('/dice_score')]
    if others:
        yield chart('Statistics', [(name, name[len('stats/'):]) for name in others])
    if run.last('grad_norm') is not None:
        yield chart('Gradient norm', [('grad_norm', 'gradient norm')], log=True, limits=[('stable', GRAD_NORM)])
    if run.last('lr') is not None:
        yield chart('Learning rate', [('lr', 'learning rate')])
    if run.last('time') is not None:
        yield chart('Seconds per iteration', [(name, label) for name, label in (('time', 'step'), ('data_time', 'of it waiting '
                                              'for data')) if run.last(name) is not None])
    if run.last('memory') is not None:
        yield chart('GPU memory (MiB)', [('memory', 'memory')])


# ---- evaluation ------------------------------------------------------------------------------------------------------

def _evaluation(run: Run, other: Optional[Run]) -> str:
    epochs, rows = summary(run)
    if not rows:
        return ''
    other_epochs, other_rows = summary(other) if other is not None else ([], [])
    theirs = {(group, label): values for group, label, values in other_rows}
    charts = []
    titles = {'overall': 'NDS, mAP, mean IoU', 'object': 'AP per class', 'map': 'IoU per map class', 'other': 'Metrics'}
    for group, title in titles.items():
        curves = []
        for index, (label, values) in enumerate([(label, values) for kind, label, values in rows if kind == group]):
            curves.append(Curve(label, epochs, values, colour=index))
            if (group, label) in theirs:
                curves.append(Curve(f'{label} ({other.name})', other_epochs, theirs[group, label], dashed=True, colour=index))
        if curves and group != 'other':
            charts.append(svg(Chart(title, curves, whole=True), 100 + len(charts)))
    head = ''.join(f'<th>{epoch}</th>' for epoch in epochs)
    words = {'object': 'AP ', 'map': 'IoU '}
    body = ''.join(f'<tr><th>{words.get(group, "")}{escape(label)}</th>{_cells(values)}</tr>' for group, label, values in rows)
    return (f'<div class="charts">{"".join(charts)}</div><div class="wide"><table class="numbers"><thead><tr><th>after epoch</th>'
            f'{head}</tr></thead><tbody>{body}</tbody></table></div><p class="dim">AP: mean over the devkit\'s distances. IoU: at '
            'each class\'s best threshold, native grid. Bold: best epoch.</p>')


def _cells(values: Sequence[float]) -> str:
    good = [value for value in values if math.isfinite(value)]
    best = max(good) if len(good) > 1 else None
    return ''.join('<td>-</td>' if not math.isfinite(value) else
                   f'<td>{"<b>" if value == best else ""}{value:.4f}{"</b>" if value == best else ""}</td>' for value in values)


# ---- pictures, messages ----------------------------------------------------------------------------------------------

def _pictures(run: Run) -> str:
    found, total = [], 0
    for path in run.pictures():
        try:
            if os.path.getsize(path) + total > PICTURE_LIMIT:
                continue
            with open(path, 'rb') as stream:
                data = stream.read()
        except OSError:
            continue
        if not data.startswith(PNG):
            continue
        total += len(data)
        name = escape(os.path.relpath(path, run.folder))
        found.append(f'<figure class="picture"><img alt="{name}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
                     f'<figcaption>{name}</figcaption></figure>')
    if found:
        return ''.join(found)
    return ('<p class="dim">No pictures in the run folder. <code>tools/visualize.py CONFIG --mode pred --checkpoint '
            f'{escape(os.path.join(run.folder, "latest.pth"))} --num 4 --out-dir {escape(os.path.join(run.folder, "pictures"))}'
            '</code> draws some.</p>')


def _messages(run: Run) -> str:
    messages = run.messages()[-50:]
    rows = ''.join(f'<tr><td>{escape(when)}</td><td>{escape(level)}</td><td>{escape(text)}</td></tr>'
                   for when, level, text in reversed(messages))
    errors = ''.join(f'<p><b>{escape(path)}</b> ends with <code>{escape(text)}</code></p>' for path, text in run.rank_errors())
    return errors + (f'<div class="wide"><table><tbody>{rows}</tbody></table></div>' if rows else '')


# ---- configuration and differences -----------------------------------------------------------------------------------

def _configuration(run: Run) -> str:
    config = run.config
    if not config:
        return '<p class="dim">Neither the log nor a configs.yaml beside it holds the configuration.</p>'
    leaves = compare.flatten(config)
    return (f'<input id="filter" type="search" placeholder="filter {len(leaves)} keys" aria-label="filter keys">'
            '<details open><summary>as YAML</summary><pre id="config">'
            + ''.join(f'<span>{escape(line)}\n</span>' for line in dump_yaml(config).rstrip('\n').split('\n')) + '</pre></details>')


def _differences(run: Run, other: Run) -> str:
    parts = []
    for title, found in (('Configuration', compare.settings(run, other)), ('Code, seed, versions', compare.origins(run, other))):
        if not found:
            known = title != 'Configuration' or (run.config and other.config)
            parts.append(f'<h3>{title}</h3><p class="dim">{"no difference" if known else "not known for both runs"}</p>')
            continue
        rows = ''.join(f'<tr><th>{escape(key)}</th><td>{escape(mine)}</td><td>{escape(theirs)}</td></tr>'
                       for key, mine, theirs in found)
        parts.append(f'<h3>{title}</h3><div class="wide"><table class="difference"><thead><tr><th>key</th><th>{escape(run.name)}</th>'
                     f'<th>{escape(other.name)}</th></tr></thead><tbody>{rows}</tbody></table></div>')
    numbers = [(name, mine, theirs) for name, mine, theirs in compare.results(run, other) if _told(name)]
    if numbers:
        rows = ''.join(f'<tr><th>{escape(name)}</th><td>{number(mine)}</td><td>{number(theirs)}</td><td>{mine - theirs:+.4f}</td></tr>'
                       for name, mine, theirs in numbers)
        parts.append('<h3>Results at the newest common epoch</h3><div class="wide"><table class="numbers"><thead><tr><th>metric</th>'
                     f'<th>{escape(run.name)}</th><th>{escape(other.name)}</th><th>difference</th></tr></thead><tbody>{rows}</tbody>'
                     '</table></div>')
    return ''.join(parts)


def _told(name: str) -> bool:
    """Whether a metric is among those that people compare: no single distances, thresholds or errors per class."""
    return name in ('object/nds', 'object/map') or name.endswith('iou@max') or not name.startswith(('object/', 'map/', 'map_ref/'))
