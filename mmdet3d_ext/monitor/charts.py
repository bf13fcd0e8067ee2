"""Line charts as inline SVG: drawn here, so that a page shows them with scripts switched off."""
from __future__ import annotations

import html
import json
import math
from dataclasses import dataclass, field
from typing import List, Optional, Sequence, Tuple

# Colours that people with any colour vision tell apart (Okabe and Ito), readable on white and on black.
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#8c6d1f', '#7f7f7f')
WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 34
LARGEST = 1e100
MOST_POINTS = 500  # per curve: more would not be seen


@dataclass
class Curve:
    """One line: ``steps`` and ``values`` of equal length; ``dashed`` for the run that is compared with."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    dashed: bool = False
    colour: Optional[int] = None

    def __post_init__(self) -> None:
        """Values that no axis could show (of a run that has diverged, a damaged log) are gaps, like infinite ones, or 0."""
        self.values = [value if not math.isfinite(value) or 1 / LARGEST < abs(value) < LARGEST else
                       math.copysign(math.inf, value) if abs(value) > 1 else 0.0 for value in self.values]


@dataclass
class Chart:
    """Curves over one time axis. ``whole``: only whole steps exist; ``limits``: thresholds to draw; ``joints``:
    steps at which the run was resumed."""

    title: str
    curves: List[Curve]
    unit: str = 'epoch'
    log: bool = False
    whole: bool = False
    limits: List[Tuple[str, float]] = field(default_factory=list)
    joints: Sequence[float] = ()


def thin(steps: Sequence[float], values: Sequence[float], most: int = MOST_POINTS) -> Tuple[List[float], List[float]]:
    """At most about ``most`` points: of every stretch the lowest and the highest value, so that no spike is lost."""
    if len(values) <= most:
        return list(steps), list(values)
    stretch = math.ceil(len(values) / (most // 2))
    chosen: List[int] = []
    for start in range(0, len(values), stretch):
        indices = range(start, min(start + stretch, len(values)))
        broken = [i for i in indices if not math.isfinite(values[i])]
        whole = [i for i in indices if math.isfinite(values[i])]
        picked = {min(whole, key=values.__getitem__), max(whole, key=values.__getitem__)} if whole else set()
        chosen += sorted(picked | set(broken[:1]))
    return [steps[i] for i in chosen], [values[i] for i in chosen]


def ticks(low: float, high: float, count: int = 5) -> List[float]:
    """Round numbers within [low, high], about ``count``."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, int(math.floor(high / step + 1e-9)) + 1)]


def text_of(value: float) -> str:
    """A number on an axis or in a label."""
    if value == 0:
        return '0'
    if abs(value) < 1e-3 or abs(value) >= 1e5:
        mantissa, _, exponent = f'{value:.3g}'.partition('e')
        return f'{mantissa}e{int(exponent)}' if exponent else mantissa
    return f'{value:.4g}'


class _Scale:
    """Data to pixels."""

    def __init__(self, chart: Chart):
        steps = [s for curve in chart.curves for s, v in zip(curve.steps, curve.values) if math.isfinite(v)]
        values = [v for curve in chart.curves for v in curve.values if math.isfinite(v) and (v > 0 or not chart.log)]
        self.empty = not steps or not values
        if self.empty:
            return
        values += [value for _, value in chart.limits if value > 0 or not chart.log]
        self.log = chart.log
        self.x0, self.x1 = min(steps), max(steps)
        low, high = min(values), max(values)
        if chart.log:
            low, high = math.log10(low), math.log10(high)
        elif low > 0 and low < 0.4 * high:
            low = 0.0
        if self.x1 <= self.x0:
            self.x0, self.x1 = self.x0 - 0.5, self.x0 + 0.5
        margin = (high - low) * 0.05 or abs(high) * 0.1 or 0.5
        self.y0, self.y1 = (low if low == 0.0 and not chart.log else low - margin), high + margin

    def x(self, step: float) -> float:
        return LEFT + (step - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def y_ticks(self) -> List[float]:
        if not self.log:
            return ticks(self.y0, self.y1)
        powers = [p for p in range(math.floor(self.y0), math.ceil(self.y1) + 1) if self.y0 <= p <= self.y1]
        if len(powers) >= 2:
            return [10.0 ** p for p in powers[::max(1, len(powers) // 6)]]
        return [v for v in ticks(10.0 ** self.y0, 10.0 ** self.y1) if v > 0]


def svg(chart: Chart, number: int) -> str:
    """The chart as a ``<figure>`` with its legend; ``number`` tells it from the others on the page.

    Points carry no marks; the page's script shows values under the pointer from ``data-points``.
    """
    scale = _Scale(chart)
    title = html.escape(chart.title)
    if scale.empty:
        return f'<figure class="chart"><figcaption>{title}</figcaption><p class="dim">nothing logged</p></figure>'
    bottom = HEIGHT - BOTTOM
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}" data-chart="{number}">']
    for value in scale.y_ticks():
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                     f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{text_of(value)}</text>')
    for value in ticks(scale.x0, scale.x1, 6):
        if chart.whole and value != int(value):
            continue
        x = scale.x(value)
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
                     f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{text_of(value)}</text>')
    parts.append(f'<text class="unit" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{html.escape(chart.unit)}</text>')
    for joint in chart.joints:
        if scale.x0 <= joint <= scale.x1:
            parts.append(f'<line class="joint" x1="{scale.x(joint):.1f}" x2="{scale.x(joint):.1f}" y1="{TOP}" y2="{bottom}">'
                         f'<title>resumed here</title></line>')
    for label, value in chart.limits:
        if not (chart.log and value <= 0):
            y = scale.y(value)
            parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}">'
                         f'<title>{html.escape(label)} {text_of(value)}</title></line>')
    legend = []
    for index, curve in enumerate(chart.curves):
        drawn, points = _path(curve, scale)
        if not drawn:
            continue
        colour = COLOURS[(index if curve.colour is None else curve.colour) % len(COLOURS)]
        label = html.escape(curve.label)
        dash = ' stroke-dasharray="5 3"' if curve.dashed else ''
        parts.append(f'<path class="curve" data-curve="{index}" data-label="{label}" d="{drawn}" stroke="{colour}"{dash} '
                     f'data-points="{html.escape(json.dumps(points))}"/>')
        legend.append(f'<button type="button" class="key" data-chart="{number}" data-curve="{index}" aria-pressed="true">'
                      f'<i style="border-top:2px {"dashed" if curve.dashed else "solid"} {colour}"></i>{label}</button>')
    parts.append('</svg>')
    return (f'<figure class="chart"><figcaption>{title}{" (log scale)" if chart.log else ""}</figcaption>{"".join(parts)}'
            f'<div class="legend">{"".join(legend)}</div></figure>')


def _path(curve: Curve, scale: _Scale) -> Tuple[str, List[List[float]]]:
    """SVG path data, and the points as [pixel x, pixel y, step, value]; a non-finite value interrupts the line."""
    steps, values = thin(curve.steps, curve.values)
    commands: List[str] = []
    points: List[List[float]] = []
    drawing = False
    for step, value in zip(steps, values):
        if not math.isfinite(value) or (scale.log and value <= 0):
            drawing = False
            continue
        x, y = round(scale.x(step), 1), round(scale.y(value), 1)
        commands.append(f'{"L" if drawing else "M"}{x} {y}')
        if not drawing:
            commands.append('h0')  # a single point is a dot (round line caps)
        points.append([x, y, round(step, 4), float(f'{value:.5g}')])
        drawing = True
    return ''.join(commands), points
