"""The files that benchmarks/data.py reads: a small data set in the nuScenes schema with sensors of full size."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Dict, List, Optional

import numpy as np
from PIL import Image

from mmdet3d_ext.datasets.gt_database import create_gt_database
from mmdet3d_ext.datasets.nuscenes_converter import create_infos
from mmdet3d_ext.datasets.synthetic import generate

FULL = (1600, 900)
TILES = 4  # copies of the generated map along each side
DONE = 'benchmark_data.json'
LAYERS = ('drivable_area', 'road_segment', 'lane', 'ped_crossing', 'walkway', 'stop_line', 'carpark_area', 'road_divider',
          'lane_divider')


def prepare(root: Path, keyframe: Optional[Path] = None) -> str:
    """Make the data under ``root`` unless they are there; returns one sentence that says what they are."""
    done = root / DONE
    if done.is_file():
        return json.loads(done.read_text())['about']
    print(f'making data in {root} (about a minute)', flush=True)
    generate(root, 'mini', workers=os.cpu_count() or 1, progress=True, scenes_train=1, scenes_val=1, samples_per_scene=3,
             radar_sweeps=0, image_size=(320, 180))
    written = create_infos(root, root, version='v1.0-mini')
    create_gt_database(written['train'], root, root)
    real = real_files(keyframe)
    images, clouds = _replace_images(root, real), _replace_clouds(root, real)
    counts = {path.stem: tile(path) for path in sorted((root / 'maps' / 'expansion').glob('*.json'))}
    about = f'{images}; {clouds}; maps of {min(counts.values())} to {max(counts.values())} polygons and lines of these layers.'
    done.write_text(json.dumps(dict(about=about, maps=counts)))
    return about


def real_files(folder: Optional[Path]) -> Dict[str, Path]:
    """Channel -> a real file of one key frame, where there is one."""
    beside = Path(__file__).resolve().parents[2] / 'shared'
    for base in [folder] if folder else [Path(os.environ.get('MMDET3D_EXT_SHARED', beside)) / 'data' / 'nuscenes_keyframe', ]:
        found = {path.name.split('__')[1]: path for path in base.glob('*__*__*') if path.suffix in ('.jpg', '.bin')}
        if found:
            return found
    return {}


def _replace_images(root: Path, real: Dict[str, Path]) -> str:
    files = sorted((root / 'samples').glob('CAM_*/*.jpg'))
    noise = np.random.default_rng(0).normal(0, 6, (FULL[1], FULL[0], 1))
    for path in files:
        source = real.get(path.parent.name)
        if source is not None:
            shutil.copy(source, path)
            continue
        large = np.asarray(Image.open(path).convert('RGB').resize(FULL, Image.BICUBIC)) + noise  # a flat image would decode too fast
        Image.fromarray(large.clip(0, 255).astype(np.uint8)).save(path, quality=85)
    mean = np.mean([path.stat().st_size for path in files]) / 1024
    return f'Six {"real" if real else "synthetic"} images of {FULL[0]} x {FULL[1]}, {mean:.0f} KiB on average'


def _replace_clouds(root: Path, real: Dict[str, Path]) -> str:
    files = [path for path in root.glob('s*/LIDAR_TOP/*.bin')]
    if 'LIDAR_TOP' in real:
        for path in files:
            shutil.copy(real['LIDAR_TOP'], path)
    points = np.mean([path.stat().st_size / 20 for path in files])
    return f'key frame and nine sweeps of {points:,.0f} {"real" if "LIDAR_TOP" in real else "synthetic"} points'


def tile(path: Path, times: int = TILES) -> int:
    """Repeat a map-expansion file ``times`` times along x and y; returns the number of polygons and lines in the layers of labels.

    The first copy stays where it is, so that the surroundings of the samples do not change.
    """
    content = json.loads(path.read_text())
    nodes = np.array([[node['x'], node['y']] for node in content['node']])
    step = np.ceil(nodes.max(0) - nodes.min(0)) + 1
    whole = {name: list(value) if isinstance(value, list) else value for name, value in content.items()}
    for i in range(times):
        for j in range(times):
            if i or j:
                _append(whole, content, f'-{i}-{j}', step * (i, j))
    if 'canvas_edge' in whole:
        whole['canvas_edge'] = [float(edge) * times for edge in content['canvas_edge']]
    path.write_text(json.dumps(whole))
    return sum(len(whole[name]) for name in LAYERS)


def _append(whole: dict, content: dict, mark: str, shift: np.ndarray) -> None:
    for node in content['node']:
        whole['node'].append(dict(token=node['token'] + mark, x=node['x'] + shift[0], y=node['y'] + shift[1]))

    def marked(tokens: List[str]) -> List[str]:
        return [token + mark for token in tokens]

    for line in content['line']:
        whole['line'].append(dict(token=line['token'] + mark, node_tokens=marked(line['node_tokens'])))
    for polygon in content['polygon']:
        holes = [dict(node_tokens=marked(hole['node_tokens'])) for hole in polygon['holes']]
        whole['polygon'].append(dict(token=polygon['token'] + mark, exterior_node_tokens=marked(polygon['exterior_node_tokens']),
                                     holes=holes))
    for layer in LAYERS:
        for record in content[layer]:
            copy = dict(record, token=record['token'] + mark)
            for key in ('polygon_token', 'line_token'):
                if key in copy:
                    copy[key] += mark
            if 'polygon_tokens' in copy:
                copy['polygon_tokens'] = marked(copy['polygon_tokens'])
            whole[layer].append(copy)
