"""Generates a whole data set: maps, scenes, sensor files, tables; parallel, resumable, same options same bytes."""
from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import Dict, List, Optional, Union

import cv2
from tqdm import tqdm

from . import frames, ground, map_json, maps, schema, tables
from .config import GeneratorConfig, resolve
from .sensors.rig import calibrate
from .world import Scene

MARKER = 'synthetic_nuscenes.json'
WORK = '.synthetic_nuscenes_work'
OWN = ('samples', 'sweeps', 'maps')  # folders that the generator fills, besides the one of the tables


def generate(out_dir: Union[str, Path], preset: str = 'tiny', seed: int = 0, workers: int = 1, overwrite: bool = False,
             progress: bool = False, **overrides) -> dict:
    """Write a synthetic data set in the nuScenes v1.0 schema.

    Args:
        out_dir: the data root (``samples/``, ``sweeps/``, ``maps/``, ``v1.0-*/`` are made in it).
        preset: 'tiny', 'demo' or 'mini', see :data:`.config.PRESETS`.
        seed: the same seed and options give the same bytes, whatever the number of workers.
        workers: processes; 1 renders in this process.
        overwrite: replace a data set that this generator wrote with other options.
        progress: show a progress bar on stderr.
        **overrides: options of :class:`.config.GeneratorConfig` that replace the preset's.

    Returns:
        summary: options, counts of every table, annotations per category, scenes, bytes, seconds. An interrupted run is
        continued; a finished data set with the same options is left as it is and its summary is returned.

    Raises:
        ValueError: an option is unknown or out of range.
        FileExistsError: ``out_dir`` holds something else (another data set, or this one with other options and without
            ``overwrite``). A folder that this generator did not write is never deleted.
    """
    config = resolve(preset, seed=seed, **overrides)
    if workers < 1:
        raise ValueError(f'workers: must be at least 1, got {workers}')
    root = Path(out_dir)
    done = _prepare(root, config, overwrite)
    if done is not None:
        return done
    began = time.time()
    threads = cv2.getNumThreads()
    # OpenCV's thread pool does not survive a fork, and threads would only compete with the worker processes.
    cv2.setNumThreads(1)
    try:
        records = _render_all(root, config, workers, progress)
    finally:
        cv2.setNumThreads(threads)
    content = tables.build_tables(config, records)
    folder = root / config.version
    folder.mkdir(exist_ok=True)
    for table, rows in content.items():
        frames.write_atomic(folder / f'{table}.json', json.dumps(rows, indent=0).encode())
    summary = _summary(config, content, records)
    # The marker comes last: where it says "complete", everything is there. Times stay out of the file, so that it is
    # the same for the same options.
    frames.write_atomic(root / MARKER, json.dumps({'digest': config.digest(), 'complete': True, 'summary': summary},
                                                  indent=1, sort_keys=True).encode())
    shutil.rmtree(root / WORK, ignore_errors=True)
    return {**summary, 'root': str(root), 'reused': False, 'seconds': round(time.time() - began, 1)}


def _prepare(root: Path, config: GeneratorConfig, overwrite: bool) -> Optional[dict]:
    """Check and make the folders; the summary if there is nothing to do."""
    if root.exists() and not root.is_dir():
        raise FileExistsError(f'{root} is a file, not a folder')
    marker = _read_marker(root)
    if marker is None and root.exists() and any(root.iterdir()):
        raise FileExistsError(
            f'{root} is not empty and was not written by this generator; nothing in it is touched. Choose an empty folder')
    if marker is not None and marker.get('digest') != config.digest():
        if not overwrite:
            state = 'a finished' if marker.get('complete') else 'an unfinished'
            raise FileExistsError(f'{root} holds {state} synthetic data set with other options; pass overwrite=True '
                                  f'(--overwrite) to replace it, or choose another folder')
        version = marker.get('version') or marker['summary']['version']
        for name in (*OWN, WORK, version):
            shutil.rmtree(root / name, ignore_errors=True)
        (root / MARKER).unlink()
        marker = None
    if marker is not None and marker.get('complete'):
        return {**marker['summary'], 'root': str(root), 'reused': True, 'seconds': 0.0}
    root.mkdir(parents=True, exist_ok=True)
    frames.write_atomic(root / MARKER, json.dumps({'digest': config.digest(), 'complete': False,
                                                   'version': config.version}).encode())
    (root / WORK).mkdir(exist_ok=True)
    for channel in schema.RIG:
        for folder in ('samples', 'sweeps'):
            (root / folder / channel).mkdir(parents=True, exist_ok=True)
    for folder in ('expansion', 'basemap'):
        (root / 'maps' / folder).mkdir(parents=True, exist_ok=True)
    return None


def _read_marker(root: Path) -> Optional[dict]:
    path = root / MARKER
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise FileExistsError(f'{path} is not readable ({error}); remove the folder or choose another one') from error


@lru_cache(maxsize=8)
def _city(location: str, seed: int, blocks: int) -> maps.CityMap:
    return maps.build_city(location, seed, blocks)


@lru_cache(maxsize=2)
def _material(location: str, seed: int, blocks: int):
    return ground.paint(_city(location, seed, blocks))


@lru_cache(maxsize=2)
def _ground(location: str, seed: int, blocks: int) -> ground.Ground:
    return ground.build_ground(_city(location, seed, blocks), _material(location, seed, blocks), seed)


@lru_cache(maxsize=4)
def _scene(name: str, location: str, config: GeneratorConfig) -> Scene:
    return Scene(name, _city(location, config.seed, config.map_blocks), config)


def _log(name: str, location: str, seed: int) -> Dict[str, object]:
    """Name, date and first timestamp (microseconds) of the log of one scene."""
    number = int(name.split('-')[1])
    moment = datetime(2018, 7, 2, 9, tzinfo=timezone.utc) + timedelta(days=number % 90, minutes=37 * (number % 13) + seed % 7)
    car = 'n008' if location == 'boston-seaport' else 'n015'
    return {'log': f'{car}-{moment:%Y-%m-%d-%H-%M-%S}-synthetic-{number:04d}', 'date': f'{moment:%Y-%m-%d}',
            'start': int(moment.timestamp()) * 1_000_000 + 150_000}


def _map_job(root: str, location: str, config: GeneratorConfig) -> None:
    """Write the files of one map."""
    folder = Path(root) / 'maps'
    targets = {folder / 'expansion' / f'{location}.json': None, folder / 'basemap' / f'{location}.png': None,
               folder / f'{schema.SEMANTIC_PRIOR[location]}.png': None}
    if all(path.exists() for path in targets):
        return
    key = (location, config.seed, config.map_blocks)
    city = _city(*key)
    content = [json.dumps(map_json.expansion_tables(city, config.seed)).encode(),
               cv2.imencode('.png', ground.basemap(_material(*key)))[1].tobytes(),
               cv2.imencode('.png', ground.semantic_prior(city))[1].tobytes()]
    for path, data in zip(targets, content):
        frames.write_atomic(path, data)


def _frame_job(root: str, name: str, location: str, config: GeneratorConfig, sample: int) -> None:
    """Render one key frame, unless an earlier run has done so; the result goes to the work folder."""
    result = Path(root) / WORK / f'{name}_{sample:04d}.json'
    if result.exists():
        return
    log = _log(name, location, config.seed)
    readings = frames.shots(config, log['log'], log['start'], sample)
    found = frames.render(Path(root), config, _scene(name, location, config), _ground(location, config.seed, config.map_blocks),
                          calibrate(config.seed, log['log'], config.image_size), readings, sample)
    frames.write_atomic(result, json.dumps(found).encode())


def _render_all(root: Path, config: GeneratorConfig, workers: int, progress: bool) -> List[tables.SceneRecord]:
    scenes = config.scenes()
    jobs = [(_map_job, (str(root), location, config)) for location in schema.LOCATIONS]
    # Frames of one location follow each other, so that a worker's cached map and scene serve many of them.
    for name, location in sorted(scenes, key=lambda item: (schema.LOCATIONS.index(item[1]), item[0])):
        jobs += [(_frame_job, (str(root), name, location, config, k)) for k in range(config.samples_per_scene)]
    with tqdm(total=len(jobs), desc=f'synthetic {config.version}', unit='frame', disable=not progress) as bar:
        if workers == 1:
            for job, arguments in jobs:
                job(*arguments)
                bar.update()
        else:
            _in_parallel(jobs, workers, bar)
    records = []
    for name, location in scenes:
        log = _log(name, location, config.seed)
        shots = [frames.shots(config, log['log'], log['start'], k) for k in range(config.samples_per_scene)]
        found = [json.loads((root / WORK / f'{name}_{k:04d}.json').read_text()) for k in range(config.samples_per_scene)]
        records.append(tables.SceneRecord(_scene(name, location, config), location, log['log'], log['date'],
                                          calibrate(config.seed, log['log'], config.image_size), shots, found))
    return records


def _in_parallel(jobs, workers: int, bar) -> None:
    # Forked workers start at once; a fresh interpreter in each would import mmdet3d again. They inherit the
    # one-thread setting of OpenCV, and numpy's threads are not used before the fork in a way that they would miss.
    context = multiprocessing.get_context('fork' if os.name == 'posix' else 'spawn')
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        pending = [pool.submit(job, *arguments) for job, arguments in jobs]
        try:
            for future in as_completed(pending):
                future.result()
                bar.update()
        except BaseException:
            for future in pending:
                future.cancel()
            raise


def _summary(config: GeneratorConfig, content: Dict[str, List[dict]], records: List[tables.SceneRecord]) -> dict:
    category = {row['token']: row['name'] for row in content['category']}
    of_instance = {row['token']: category[row['category_token']] for row in content['instance']}
    counts = Counter(of_instance[row['instance_token']] for row in content['sample_annotation'])
    return {'version': config.version, 'options': asdict(config),
            'scenes': [{'name': record.scene.name, 'location': record.location} for record in records],
            'tables': {name: len(rows) for name, rows in content.items()},
            'annotations': dict(sorted(counts.items())),
            'lidar_points': sum(row['num_lidar_pts'] for row in content['sample_annotation'])}
