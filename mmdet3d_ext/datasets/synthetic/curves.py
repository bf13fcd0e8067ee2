"""Plane geometry: polylines by arc length, Bezier curves, the devkit's "arcline paths" (Dubins paths), rectangles.

A polyline is an (P, 2) float array in metres, in map coordinates (x east, y north); angles are radians, counter-clockwise.
"""
from __future__ import annotations

from typing import List, Optional, Tuple

import numpy as np
import shapely

Pose = Tuple[float, float, float]


class Polyline:
    """A polyline that is looked up by arc length ``s`` (metres from its start)."""

    def __init__(self, points: np.ndarray):
        self.points = np.asarray(points, dtype=np.float64)
        steps = np.diff(self.points, axis=0)
        self.s = np.concatenate([[0.0], np.cumsum(np.hypot(steps[:, 0], steps[:, 1]))])
        # Tangents at the vertices (not per segment), so that headings along a curve are continuous.
        tangent = np.gradient(self.points, axis=0)
        self._heading = np.unwrap(np.arctan2(tangent[:, 1], tangent[:, 0]))

    @property
    def length(self) -> float:
        return float(self.s[-1])

    def position(self, s) -> np.ndarray:
        """Points at arc lengths ``s`` (...,) -> (..., 2); clamped to the ends."""
        return np.stack([np.interp(s, self.s, self.points[:, 0]), np.interp(s, self.s, self.points[:, 1])], axis=-1)

    def heading(self, s) -> np.ndarray:
        """Direction of travel at arc lengths ``s``, radians."""
        return np.interp(s, self.s, self._heading)

    def offset(self, s, lateral) -> np.ndarray:
        """Points ``lateral`` metres to the left of the curve at arc lengths ``s``; the two broadcast."""
        heading = self.heading(s)
        normal = np.stack([-np.sin(heading), np.cos(heading)], axis=-1)
        return self.position(s) + np.asarray(lateral)[..., None] * normal

    def stations(self, start: float, end: float, step: float = 2.0) -> np.ndarray:
        """Arc lengths from ``start`` to ``end`` (either order), at most ``step`` apart, both ends included."""
        return np.linspace(start, end, max(2, int(np.ceil(abs(end - start) / step)) + 1))

    def trimmed(self, start: float, end: float) -> 'Polyline':
        """The part between two arc lengths."""
        return Polyline(self.position(self.stations(start, end)))


def bezier(controls: np.ndarray, count: int) -> np.ndarray:
    """``count`` points of the quadratic or cubic Bezier curve with these (3 or 4, 2) control points."""
    t = np.linspace(0.0, 1.0, count)[:, None]
    c = np.asarray(controls, dtype=np.float64)
    if len(c) == 3:
        return (1 - t) ** 2 * c[0] + 2 * t * (1 - t) * c[1] + t ** 2 * c[2]
    return (1 - t) ** 3 * c[0] + 3 * t * (1 - t) ** 2 * c[1] + 3 * t ** 2 * (1 - t) * c[2] + t ** 3 * c[3]


def join(start: Pose, end: Pose, step: float = 1.0) -> np.ndarray:
    """A smooth curve from one pose to another (cubic Bezier), sampled about every ``step`` metres."""
    a, b = np.array(start[:2]), np.array(end[:2])
    reach = 0.38 * np.hypot(*(b - a))
    controls = [a, a + reach * np.array([np.cos(start[2]), np.sin(start[2])]),
                b - reach * np.array([np.cos(end[2]), np.sin(end[2])]), b]
    return bezier(np.array(controls), max(6, int(np.hypot(*(b - a)) / step) + 2))


def _dubins(start: Pose, end: Pose, radius: float) -> Optional[Tuple[str, List[float]]]:
    """The shortest turn-straight-turn path (Dubins 1957, words LSL, RSR, LSR, RSL) as word and three lengths in metres."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    d = np.hypot(dx, dy) / radius
    theta = np.arctan2(dy, dx)
    a, b = (start[2] - theta) % (2 * np.pi), (end[2] - theta) % (2 * np.pi)
    sa, sb, ca, cb, cab = np.sin(a), np.sin(b), np.cos(a), np.cos(b), np.cos(a - b)
    words = []
    square = 2 + d * d - 2 * cab + 2 * d * (sa - sb)
    if square >= 0:
        angle = np.arctan2(cb - ca, d + sa - sb)
        words.append(('LSL', -a + angle, np.sqrt(square), b - angle))
    square = 2 + d * d - 2 * cab + 2 * d * (sb - sa)
    if square >= 0:
        angle = np.arctan2(ca - cb, d - sa + sb)
        words.append(('RSR', a - angle, np.sqrt(square), -b + angle))
    square = -2 + d * d + 2 * cab + 2 * d * (sa + sb)
    if square >= 0:
        p = np.sqrt(square)
        angle = np.arctan2(-ca - cb, d + sa + sb) - np.arctan2(-2.0, p)
        words.append(('LSR', -a + angle, p, -b + angle))
    square = -2 + d * d + 2 * cab - 2 * d * (sa + sb)
    if square >= 0:
        p = np.sqrt(square)
        angle = np.arctan2(ca + cb, d - sa - sb) - np.arctan2(2.0, p)
        words.append(('RSL', a - angle, p, b - angle))
    best = None
    for word, first, straight, last in words:
        # A full turn that is a rounding error away from no turn at all is no turn.
        first, last = [0.0 if 2 * np.pi - turn % (2 * np.pi) < 1e-6 else turn % (2 * np.pi) for turn in (first, last)]
        lengths = [first * radius, straight * radius, last * radius]
        if best is None or sum(lengths) < sum(best[1]):
            best = (word, [float(value) for value in lengths])
    return best


def arcline_path(line: Polyline, piece: float = 6.0) -> List[dict]:
    """The records of ``arcline_path_3`` that follow a polyline: Dubins paths of at most ``piece`` metres each.

    A straight line gives one piece. Each record holds start_pose, end_pose (x, y, yaw), shape, radius (m) and
    segment_length (three lengths in metres).
    """
    spread = np.ptp(line.heading(line.s))
    # Short pieces where the line turns much: at most a quarter of a radian (14 degrees) in each.
    count = 1 if spread < 1e-3 else int(np.ceil(max(line.length / piece, spread / 0.25)))
    stations = np.linspace(0.0, line.length, count + 1)
    headings = line.heading(stations)
    poses = [(float(x), float(y), float(h)) for (x, y), h in zip(line.position(stations), headings)]
    records = []
    for start, end, length in zip(poses[:-1], poses[1:], np.diff(stations)):
        turn = abs(end[2] - start[2])
        radius = float(np.clip(0.4 * length / max(turn, 1e-3), 1.0, 500.0))
        path = _dubins(start, end, radius)
        # Too large a radius for the piece makes a loop; halve it until the path is about as long as the piece.
        while (path is None or sum(path[1]) > 1.3 * length) and radius > 0.05:
            radius *= 0.5
            path = _dubins(start, end, radius)
        shape, lengths = path
        records.append({'start_pose': list(start), 'end_pose': list(end), 'shape': shape, 'radius': radius,
                        'segment_length': lengths})
    return records


def rectangles(poses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Shapely rectangles with centres and yaws (A, 3) and (length, width) (A, 2)."""
    corners = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]]) * 0.5
    local = corners[None] * sizes[:, None]
    c, s = np.cos(poses[:, 2])[:, None], np.sin(poses[:, 2])[:, None]
    world = np.stack([poses[:, :1] + c * local[..., 0] - s * local[..., 1],
                      poses[:, 1:2] + s * local[..., 0] + c * local[..., 1]], axis=-1)
    return shapely.polygons(world)
