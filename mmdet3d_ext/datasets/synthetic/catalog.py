"""What things look like: every object is an upright box (the annotation) filled with smaller boxes (what sensors see).

A part is a row of :data:`PART`: centre (x forward, y left, z up from the object's base) and full size in metres in the object's
frame, colour, lidar intensity and a surface pattern. No part leaves its object's box.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

import numpy as np

PART = np.dtype([('centre', 'f8', 3), ('size', 'f8', 3), ('colour', 'f4', 3), ('intensity', 'f4'), ('pattern', 'i4')])
PLAIN, WINDOWS, STRIPES, LEAVES, SHADOW = range(5)

CLEARANCE = np.array([0.06, 0.06, 0.03])  # m, length, width and height together

GLASS = (38, 46, 56)
TYRE = (24, 24, 26)
PAINTS = ((176, 28, 30), (28, 64, 150), (222, 222, 226), (46, 48, 54), (150, 154, 160), (24, 98, 62), (200, 170, 60),
          (92, 36, 70), (236, 236, 238), (18, 20, 24))
CLOTHES = ((180, 60, 50), (50, 80, 160), (220, 200, 90), (60, 60, 66), (230, 230, 230), (90, 140, 80), (150, 90, 150))
SKIN = (200, 160, 130)


@dataclass(frozen=True)
class Kind:
    """Category name and mean size (length, width, height) in metres with its relative spread."""
    category: str
    size: Tuple[float, float, float]
    spread: float


KINDS: Dict[str, Kind] = {
    'car': Kind('vehicle.car', (4.6, 1.92, 1.68), 0.06),
    'truck': Kind('vehicle.truck', (7.2, 2.5, 3.0), 0.08),
    'bus': Kind('vehicle.bus.rigid', (11.2, 2.9, 3.45), 0.04),
    'bendy_bus': Kind('vehicle.bus.bendy', (9.0, 2.9, 3.35), 0.03),
    'trailer': Kind('vehicle.trailer', (10.5, 2.7, 3.8), 0.08),
    'construction_vehicle': Kind('vehicle.construction', (6.2, 2.7, 3.1), 0.08),
    'motorcycle': Kind('vehicle.motorcycle', (2.1, 0.8, 1.5), 0.05),
    'bicycle': Kind('vehicle.bicycle', (1.75, 0.62, 1.35), 0.05),
    'adult': Kind('human.pedestrian.adult', (0.72, 0.68, 1.76), 0.06),
    'child': Kind('human.pedestrian.child', (0.55, 0.52, 1.3), 0.06),
    'construction_worker': Kind('human.pedestrian.construction_worker', (0.74, 0.72, 1.78), 0.04),
    'cone': Kind('movable_object.trafficcone', (0.42, 0.42, 1.0), 0.06),
    'barrier': Kind('movable_object.barrier', (0.5, 2.4, 1.0), 0.04),
    'debris': Kind('movable_object.debris', (0.9, 0.7, 0.5), 0.1),
    'ambulance': Kind('vehicle.emergency.ambulance', (6.0, 2.2, 2.6), 0.03),
}


def sample_size(kind: str, rng: np.random.Generator) -> np.ndarray:
    """A (length, width, height) of this kind, metres, to the millimetre as in the tables."""
    base = np.array(KINDS[kind].size)
    factor = 1.0 + KINDS[kind].spread * np.clip(rng.standard_normal(3), -2, 2)
    return np.round(base * factor, 3)


class _Builder:
    """Collects parts given as fractions of the object's box: x, y in [-1, 1] from the middle, z in [0, 1] from the base."""

    def __init__(self, size: np.ndarray):
        self.size = np.asarray(size, float)
        self.rows: List[tuple] = []

    def box(self, x: Sequence[float], y: Sequence[float], z: Sequence[float], colour, intensity=30.0, pattern=PLAIN):
        low = np.array([x[0] / 2, y[0] / 2, z[0]]) * self.size
        high = np.array([x[1] / 2, y[1] / 2, z[1]]) * self.size
        self.rows.append(((low + high) / 2, high - low, colour, intensity, pattern))

    def shadow(self) -> None:
        """A dark patch on the ground below; cameras see it, lidar and radar do not."""
        self.rows.append(((0, 0, 0.004), (self.size[0] * 1.02, self.size[1] * 1.08, 0.008), (22, 22, 24), 0.0, SHADOW))

    def done(self) -> np.ndarray:
        return np.array(self.rows, dtype=PART)


def _car(b: _Builder, rng) -> None:
    paint = PAINTS[rng.integers(len(PAINTS))]
    b.shadow()
    b.box((-0.985, 0.985), (-1, 1), (0.16, 0.56), paint, 34)
    b.box((-0.88, -0.5), (-0.97, 0.97), (0.0, 0.3), TYRE, 4)
    b.box((0.46, 0.84), (-0.97, 0.97), (0.0, 0.3), TYRE, 4)
    b.box((-0.82, 0.36), (-0.86, 0.86), (0.56, 0.9), GLASS, 12)
    b.box((-0.7, 0.16), (-0.84, 0.84), (0.9, 1.0), paint, 34)
    _lamps(b, 0.34, 0.48, 0.62, 0.96)


def _lamps(b: _Builder, low: float, high: float, inner: float, outer: float) -> None:
    for side in (-1, 1):
        span = sorted((side * inner, side * outer))
        # Before the body's faces: two surfaces in one plane would speckle.
        b.box((0.96, 1), span, (low, high), (250, 246, 220), 90)
        b.box((-1, -0.96), span, (low, high), (200, 16, 16), 120)


def _truck(b: _Builder, rng) -> None:
    b.shadow()
    cab, cargo = PAINTS[rng.integers(len(PAINTS))], ((206, 206, 200), (120, 130, 140), (170, 130, 70))[rng.integers(3)]
    b.box((0.5, 0.985), (-0.96, 0.96), (0.16, 0.78), cab, 34)
    b.box((0.9, 1), (-0.84, 0.84), (0.48, 0.72), GLASS, 12)
    b.box((-1, 0.46), (-1, 1), (0.3, 1.0), cargo, 42)
    b.box((-0.98, 0.9), (-0.7, 0.7), (0.16, 0.3), (50, 50, 54), 12)
    for x in ((-0.9, -0.64), (-0.56, -0.3), (0.6, 0.86)):
        b.box(x, (-0.95, 0.95), (0.0, 0.3), TYRE, 4)
    _lamps(b, 0.2, 0.28, 0.6, 0.92)


def _bus(b: _Builder, rng) -> None:
    b.shadow()
    paint = ((198, 40, 44), (40, 120, 90), (230, 226, 214), (40, 70, 150))[rng.integers(4)]
    b.box((-0.99, 0.99), (-0.98, 0.98), (0.1, 0.48), paint, 36)
    b.box((-0.985, 1), (-1, 1), (0.48, 0.8), GLASS, 14)
    b.box((-1, 1), (-0.98, 0.98), (0.8, 1.0), paint, 36)
    for x in ((-0.72, -0.5), (0.5, 0.72)):
        b.box(x, (-1, 1), (0.0, 0.26), TYRE, 4)
    _lamps(b, 0.18, 0.26, 0.66, 0.94)


def _trailer(b: _Builder, rng) -> None:
    b.shadow()
    cargo = ((190, 194, 196), (60, 84, 140), (180, 90, 50), (110, 150, 90))[rng.integers(4)]
    b.box((-1, 1), (-1, 1), (0.32, 1.0), cargo, 46, WINDOWS if rng.random() < 0.3 else PLAIN)
    b.box((-0.98, 0.98), (-0.5, 0.5), (0.2, 0.32), (46, 46, 50), 10)
    for x in ((-0.94, -0.78), (-0.72, -0.56), (-0.5, -0.34)):
        b.box(x, (-0.95, 0.95), (0.0, 0.26), TYRE, 4)
    b.box((0.6, 0.64), (-0.5, 0.5), (0.0, 0.3), (60, 60, 64), 10)


def _construction(b: _Builder) -> None:
    b.shadow()
    yellow = (226, 166, 26)
    b.box((-0.98, 0.5), (-1, -0.6), (0.0, 0.3), (44, 44, 46), 8)
    b.box((-0.98, 0.5), (0.6, 1), (0.0, 0.3), (44, 44, 46), 8)
    b.box((-1, 0.36), (-0.84, 0.84), (0.28, 0.58), yellow, 52)
    b.box((-0.2, 0.36), (-0.8, 0.1), (0.58, 0.95), GLASS, 14)
    b.box((-0.24, 0.4), (-0.84, 0.14), (0.95, 1.0), yellow, 52)
    b.box((0.2, 0.86), (0.2, 0.5), (0.7, 0.86), yellow, 52)
    b.box((0.72, 0.88), (0.2, 0.5), (0.16, 0.8), yellow, 52)
    b.box((0.66, 1), (-0.3, 0.9), (0.02, 0.24), (70, 70, 74), 30)


def _cycle(b: _Builder, rng, rider: bool, motor: bool) -> None:
    frame = PAINTS[rng.integers(len(PAINTS))]
    top = 0.6 if rider else 0.72
    width = 0.5 if motor else 0.14
    for x in ((-1, -0.42), (0.42, 1)):
        b.box(x, (-0.22 if motor else -0.12, 0.22 if motor else 0.12), (0.0, top * 0.72), TYRE, 6)
    b.box((-0.6, 0.6), (-width, width), (top * 0.42, top * 0.82), frame, 40)
    b.box((0.38, 0.54), (-1, 1), (top * 0.86, top), (70, 70, 74), 30)
    if rider:
        cloth = CLOTHES[rng.integers(len(CLOTHES))]
        b.box((-0.34, 0.16), (-0.62, 0.62), (0.42, 0.84), cloth, 26)
        b.box((-0.2, 0.1), (-0.3, 0.3), (0.84, 1.0), (30, 30, 34) if motor else (220, 220, 60), 26)
    else:
        b.box((-0.5, -0.2), (-0.36, 0.36), (top * 0.86, 1.0), (40, 34, 30), 16)


def _person(b: _Builder, rng, vest: bool) -> None:
    torso = (240, 130, 20) if vest else CLOTHES[rng.integers(len(CLOTHES))]
    legs = ((40, 44, 60), (70, 66, 60), (30, 30, 34))[rng.integers(3)]
    # In mid-stride.
    b.box((0.0, 1), (-0.56, -0.08), (0.0, 0.3), legs, 14)
    b.box((-1, 0.0), (0.08, 0.56), (0.0, 0.3), legs, 14)
    b.box((-0.42, 0.42), (-0.56, 0.56), (0.28, 0.5), legs, 14)
    b.box((-0.5, 0.5), (-0.66, 0.66), (0.46, 0.84), torso, 120 if vest else 26)
    b.box((-0.2, 0.2), (-1, -0.68), (0.44, 0.8), torso, 26)
    b.box((-0.2, 0.2), (0.68, 1), (0.44, 0.8), torso, 26)
    b.box((-0.32, 0.36), (-0.32, 0.32), (0.85, 1.0), (240, 220, 40) if vest else SKIN, 28)


def _cone(b: _Builder) -> None:
    b.box((-1, 1), (-1, 1), (0.0, 0.06), (220, 90, 20), 40)
    for low, high, half, colour, intensity in ((0.06, 0.36, 0.7, (236, 96, 20), 60), (0.36, 0.56, 0.54, (244, 244, 244), 200),
                                               (0.56, 0.78, 0.38, (236, 96, 20), 60), (0.78, 1.0, 0.22, (236, 96, 20), 60)):
        b.box((-half, half), (-half, half), (low, high), colour, intensity)


def _barrier(b: _Builder) -> None:
    for y in ((-0.96, -0.8), (0.8, 0.96)):
        b.box((-1, 1), y, (0.0, 0.12), (90, 90, 94), 20)
        b.box((-0.2, 0.2), y, (0.0, 1.0), (150, 150, 150), 30)
    b.box((-0.3, 0.3), (-1, 1), (0.3, 0.58), (210, 30, 30), 140, STRIPES)
    b.box((-0.3, 0.3), (-1, 1), (0.68, 0.96), (210, 30, 30), 140, STRIPES)


def build_parts(kind: str, size: np.ndarray, rng: np.random.Generator, rider: bool = False) -> np.ndarray:
    """The parts of one object of this kind: (P,) array of :data:`PART`.

    They stay :data:`CLEARANCE` inside of the box, as annotators draw boxes that hold the noisy points too.
    """
    b = _Builder(size - CLEARANCE)
    if kind == 'car':
        _car(b, rng)
    elif kind in ('truck', 'ambulance'):
        _truck(b, rng)
    elif kind in ('bus', 'bendy_bus'):
        _bus(b, rng)
    elif kind == 'trailer':
        _trailer(b, rng)
    elif kind == 'construction_vehicle':
        _construction(b)
    elif kind in ('bicycle', 'motorcycle'):
        _cycle(b, rng, rider, kind == 'motorcycle')
    elif kind in ('adult', 'child', 'construction_worker'):
        _person(b, rng, kind == 'construction_worker')
    elif kind == 'cone':
        _cone(b)
    elif kind == 'barrier':
        _barrier(b)
    elif kind == 'debris':
        b.box((-1, 1), (-1, 1), (0, 1), (110, 90, 70), 20)
    else:
        raise ValueError(f'unknown kind {kind!r}; known are {sorted(KINDS)}')
    return b.done()


def build_solid(kind: str, size: Sequence[float], tone: float) -> np.ndarray:
    """The parts of background: 'building', 'tree', 'pole' or 'light'."""
    b = _Builder(np.asarray(size))
    if kind == 'building':
        palette = np.array(((150, 120, 100), (170, 166, 158), (120, 128, 140), (190, 170, 140), (140, 90, 76)), float)
        colour = palette[int(tone * 4.999)] * (0.85 + 0.3 * ((tone * 7.3) % 1.0))
        b.box((-1, 1), (-1, 1), (0, 1), tuple(np.minimum(colour, 255)), 26 + 20 * tone, WINDOWS)
    elif kind == 'tree':
        b.box((-0.14, 0.14), (-0.14, 0.14), (0, 0.45), (84, 62, 44), 16)
        b.box((-1, 1), (-1, 1), (0.4, 0.9), (46 * tone, 92 * tone, 40 * tone), 18, LEAVES)
        b.box((-0.6, 0.6), (-0.6, 0.6), (0.9, 1), (46 * tone, 92 * tone, 40 * tone), 18, LEAVES)
    elif kind == 'pole':
        b.box((-0.6, 0.6), (-0.6, 0.6), (0, 0.97), (120, 122, 126), 34)
        b.box((-1, 1), (-1, 1), (0.97, 1), (220, 220, 210), 40)
    elif kind == 'light':
        b.box((-0.4, 0.4), (-0.4, 0.4), (0, 0.75), (70, 72, 76), 30)
        b.box((-1, 1), (-1, 1), (0.75, 1), (30, 30, 32), 24)
    else:
        raise ValueError(f'unknown background kind {kind!r}')
    return b.done()
