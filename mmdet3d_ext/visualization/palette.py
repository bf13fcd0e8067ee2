"""Colours, RGB in 0..255."""
from __future__ import annotations

from typing import Dict, Sequence, Tuple

Color = Tuple[int, int, int]

BACKGROUND: Color = (24, 26, 30)
PAPER: Color = (240, 240, 240)
TEXT: Color = (235, 235, 235)
FAINT: Color = (70, 74, 82)
TRUTH: Color = (60, 200, 90)        # ground-truth boxes
PREDICTION: Color = (255, 150, 30)  # predicted boxes
EGO: Color = (90, 170, 255)

# Areas in muted tones, lines and crossings in strong ones, so that what lies on top stays readable.
MAP_COLORS: Dict[str, Color] = {
    'drivable_area': (166, 206, 227),
    'drivable_area*': (146, 186, 207),
    'ped_crossing': (251, 154, 153),
    'walkway': (202, 178, 214),
    'stop_line': (227, 26, 28),
    'carpark_area': (253, 191, 111),
    'divider': (31, 98, 180),
    'road_divider': (31, 98, 180),
    'lane_divider': (80, 150, 220),
}
_OTHERS: Sequence[Color] = ((51, 160, 44), (177, 89, 40), (178, 223, 138), (106, 61, 154), (255, 127, 0), (128, 128, 0))


def map_colors(classes: Sequence[str]) -> Dict[str, Color]:
    """A colour for every map class, also for names that are not nuScenes'."""
    unknown = [name for name in classes if name not in MAP_COLORS]
    return {name: MAP_COLORS.get(name) or _OTHERS[unknown.index(name) % len(_OTHERS)] for name in classes}
