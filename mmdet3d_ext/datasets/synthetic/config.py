"""What to generate: the options of the generator, their presets and their checks."""
from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Dict, List, Tuple

from . import schema

# Raised whenever the same options give other bytes, so that a half-written older folder is not continued.
FORMAT = 4


SPLITS = {'v1.0-mini': ('mini_train', 'mini_val'), 'v1.0-trainval': ('train', 'val')}


def official_scenes(version: str) -> Dict[str, List[str]]:
    """The devkit's split name -> scene names."""
    from nuscenes.utils import splits
    return {name: list(getattr(splits, name)) for name in SPLITS[version]}


@dataclass(frozen=True)
class GeneratorConfig:
    """Options of :func:`generate`; every one is a flag of ``tools/create_synthetic_nuscenes.py``.

    Attributes:
        version: 'v1.0-mini' (splits mini_train / mini_val) or 'v1.0-trainval' (train / val): which official scene names.
        scenes_train, scenes_val: how many scenes of each split.
        samples_per_scene: key frames per scene (2 Hz; real scenes have about 40).
        sweeps: lidar sweeps before each key frame but the first, 0.05 s apart (real: 9 between two key frames).
        camera_sweeps: images before each key frame but the first, 1/12 s apart (real: 5).
        radar_sweeps: radar scans before each key frame but the first, 1/13 s apart (real: 6).
        image_size: (width, height) in pixels; intrinsics are scaled to it.
        lidar_azimuth_steps: columns per turn (real: about 1084).
        map_blocks: city blocks along each side of a map; a block is about 90 m.
        density: scales the number of traffic participants; 1.0 gives about 60 to 90 boxes per key frame.
        jpeg_quality: 1 to 100.
        seed: everything follows from it.
    """
    version: str = 'v1.0-mini'
    scenes_train: int = 8
    scenes_val: int = 2
    samples_per_scene: int = 40
    sweeps: int = 9
    camera_sweeps: int = 0
    radar_sweeps: int = 6
    image_size: Tuple[int, int] = schema.FULL_IMAGE
    lidar_azimuth_steps: int = 1084
    map_blocks: int = 3
    density: float = 1.0
    jpeg_quality: int = 90
    seed: int = 0

    def __post_init__(self):
        splits = SPLITS.get(self.version)
        if splits is None:
            raise ValueError(f'version: expected one of {sorted(SPLITS)}, got {self.version!r}')
        limits = official_scenes(self.version)
        for name, split in (('scenes_train', splits[0]), ('scenes_val', splits[1])):
            self._check_range(name, 0, len(limits[split]))
        if self.scenes_train + self.scenes_val == 0:
            raise ValueError('scenes_train + scenes_val: at least one scene is needed, got 0')
        self._check_range('samples_per_scene', 1, 400)
        self._check_range('sweeps', 0, int(round(schema.KEY_INTERVAL / schema.SWEEP_INTERVAL)) - 1)
        self._check_range('camera_sweeps', 0, 5)
        self._check_range('radar_sweeps', 0, 6)
        self._check_range('lidar_azimuth_steps', 60, 4096)
        self._check_range('map_blocks', 2, 12)
        self._check_range('jpeg_quality', 1, 100)
        self._check_range('seed', 0, 2 ** 63 - 1)
        width, height = self.image_size
        if not (64 <= width <= 4096 and 36 <= height <= 4096):
            raise ValueError(f'image_size: width must be 64 to 4096 and height 36 to 4096, got {self.image_size}')
        if not 0.0 <= self.density <= 4.0:
            raise ValueError(f'density: must lie in [0, 4], got {self.density}')

    def _check_range(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f'{name}: must be a whole number from {low} to {high}, got {value!r}')

    def scenes(self) -> List[Tuple[str, str]]:
        """The scenes as (name, location), train split first; names are the devkit's."""
        official = official_scenes(self.version)
        train, val = SPLITS[self.version]
        names = list(official[train][:self.scenes_train]) + list(official[val][:self.scenes_val])
        return [(name, schema.MINI_SCENE_LOCATION.get(name, schema.LOCATIONS[index % len(schema.LOCATIONS)]))
                for index, name in enumerate(names)]

    def digest(self) -> str:
        """A hash of every option and of the format's version: equal digests mean equal bytes."""
        text = json.dumps({'format': FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


PRESETS: Dict[str, GeneratorConfig] = {
    # What the real mini set holds: 10 scenes of 40 key frames, full-size sensors (about half an hour on two cores).
    'mini': GeneratorConfig(),
    # Enough for a tiny model to learn from, in about two minutes on two cores.
    'demo': GeneratorConfig(samples_per_scene=20, sweeps=1, radar_sweeps=0, image_size=(480, 270),
                            lidar_azimuth_steps=540),
    # For tests: a few seconds on one core.
    'tiny': GeneratorConfig(scenes_train=2, scenes_val=1, samples_per_scene=3, sweeps=1, radar_sweeps=1,
                            image_size=(320, 180), lidar_azimuth_steps=360, map_blocks=2),
}


def resolve(preset: str, **overrides) -> GeneratorConfig:
    """The preset with some options replaced.

    Raises:
        ValueError: unknown preset or option, or an option out of range (the message names it).
    """
    if preset not in PRESETS:
        raise ValueError(f'preset: expected one of {sorted(PRESETS)}, got {preset!r}')
    known = {field.name for field in fields(GeneratorConfig)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(f'unknown option(s) {unknown}; known are {sorted(known)}')
    if 'image_size' in overrides:
        overrides['image_size'] = tuple(int(value) for value in overrides['image_size'])
    return replace(PRESETS[preset], **overrides)
