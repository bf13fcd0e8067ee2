"""The run folder, its name, and what identifies a run: code, configuration, versions."""
from __future__ import annotations

import functools
import glob
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

import torch
import torch.distributed as dist

from ..errors import text_of

BOX_CONVENTION = 'mmdet3d-1.0: x, y, z_bottom, l, w, h, yaw (counter-clockwise, 0 along +x)'
# Where a run goes and from where it continues do not change what it computes.
NOT_HASHED = ('run_dir', 'work_dir', 'resume_from', 'auto_resume', 'launcher')


def to_plain(cfg: Any) -> Any:
    """A configuration as plain dicts and lists."""
    if isinstance(cfg, Mapping):
        return {k: to_plain(v) for k, v in cfg.items()}
    if isinstance(cfg, (list, tuple)):
        return [to_plain(v) for v in cfg]
    return cfg


def config_hash(cfg: Mapping[str, Any]) -> str:
    """SHA-256 of the configuration as sorted JSON, without the keys that only say where a run is kept."""
    kept = {k: v for k, v in to_plain(cfg).items() if k not in NOT_HASHED}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


@functools.lru_cache(maxsize=None)
def code_version() -> Dict[str, Any]:
    """``commit`` of the checkout that this package runs from, and ``changes``: a hash of uncommitted edits, or None.

    Without git (an installed package) ``commit`` is a hash of the package's own source files.
    """
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> Optional[str]:
        try:
            done = subprocess.run(['git', '-C', str(root), *words], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git('rev-parse', 'HEAD')
    if commit:
        edits = git('diff', 'HEAD', '--', 'mmdet3d_ext', 'csrc', 'tools') or ''
        return {'commit': commit.strip(), 'changes': hashlib.sha256(edits.encode()).hexdigest()[:8] if edits else None}
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parents[1].rglob('*.py')):
        digest.update(path.read_bytes())
    return {'commit': digest.hexdigest(), 'changes': 'no git'}


def default_run_dir(cfg: Mapping[str, Any]) -> str:
    """``runs/run-<commit8>-<config hash8>`` in the working directory."""
    return os.path.join('runs', f'run-{code_version()["commit"][:8]}-{config_hash(cfg)[:8]}')


def prepare(run_dir: str, cfg: Mapping[str, Any], resuming: bool) -> Tuple[str, str, Optional[str]]:
    """Make the run folder (rank 0) and agree on a time stamp (all ranks).

    Results of an earlier run in the same folder are moved aside, never overwritten.

    Returns:
        the absolute folder, the stamp ``YYYYmmdd_HHMMSS``, and the folder that earlier results were moved to, or None.
    """
    run_dir = os.path.abspath(run_dir)
    rank = dist.get_rank() if dist.is_initialized() else 0
    shared = [None, None, None]
    if rank == 0:
        try:
            os.makedirs(run_dir, exist_ok=True)
            stamp = time.strftime('%Y%m%d_%H%M%S', time.localtime())
            while os.path.exists(os.path.join(run_dir, f'{stamp}.log')):  # two starts within one second
                time.sleep(0.2)
                stamp = time.strftime('%Y%m%d_%H%M%S', time.localtime())
            moved = None if resuming else _move_aside(run_dir, stamp)
            with open(os.path.join(run_dir, 'configs.yaml'), 'w', encoding='utf-8') as stream:
                stream.write(dump_config(cfg))
            shared = [stamp, moved, None]
        except OSError as error:
            shared[2] = f'cannot write the run folder: {text_of(error)}; give another one with --run-dir'
    if dist.is_initialized():
        dist.broadcast_object_list(shared, src=0)
    if shared[2]:
        from .launch import UserError
        raise UserError(shared[2])
    return run_dir, shared[0], shared[1]


def _move_aside(run_dir: str, stamp: str) -> Optional[str]:
    files = [path for pattern in ('epoch_*.pth', 'best_*', 'latest.pth', 'iter_*.pth', 'before_spike_*.pth', 'bad_batches',
                                  'metrics', 'tf_logs', 'best.json', 'metrics.json', 'configs.yaml', 'eval', '*.log', '*.log.json')
             for path in glob.glob(os.path.join(glob.escape(run_dir), pattern))]
    if not any(path.endswith('.pth') for path in files):
        return None
    target = os.path.join(run_dir, f'previous_{stamp}')
    os.makedirs(target, exist_ok=True)
    for path in files:
        os.rename(path, os.path.join(target, os.path.basename(path)))
    return target


def moved_to(path: str, run_dir: str, moved: Optional[str]) -> str:
    """Where a file is after :func:`prepare`: one of the run folder may have been ``moved`` with the earlier run's."""
    folder, name = os.path.split(os.path.abspath(path))
    if moved is None or os.path.realpath(folder) != os.path.realpath(run_dir) or not os.path.lexists(os.path.join(moved, name)):
        return path
    return os.path.join(moved, name)


def dump_config(cfg: Any) -> str:
    """The resolved configuration as YAML, which the configuration loader reads back."""
    from ..config import Config
    return (cfg if isinstance(cfg, Config) else Config(to_plain(cfg))).dump()


@functools.lru_cache(maxsize=None)
def environment() -> Dict[str, str]:
    """Versions of everything that a result may depend on."""
    found = {'python': sys.version.split()[0], 'platform': platform.platform(), 'torch': torch.__version__,
             'cuda': str(torch.version.cuda),
             'cudnn': str(torch.backends.cudnn.version() if torch.cuda.is_available() else None)}
    from importlib import metadata
    for name in ('mmdet3d-ext', 'mmcv-full', 'mmdet', 'mmsegmentation', 'mmdet3d', 'nuscenes-devkit', 'numpy', 'torchvision',
                 'spconv', 'spconv-cu126', 'torchpack'):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    if 'mmdet3d-ext' not in found:
        from .. import __version__
        found['mmdet3d-ext'] = __version__
    if torch.cuda.is_available():
        found['gpu'] = torch.cuda.get_device_name()
    return found


def build_meta(cfg: Mapping[str, Any], seed: int, world_size: int) -> Dict[str, Any]:
    """What every checkpoint says about its run (plain types; the first line of the JSON log has it too)."""
    code = code_version()
    return {
        'exp_name': os.path.basename(str(getattr(cfg, 'filename', '') or 'config')), 'config': dump_config(cfg),
        'config_hash': config_hash(cfg)[:8], 'code_version': code['commit'], 'code_changes': code['changes'],
        'env_info': ', '.join(f'{k}: {v}' for k, v in environment().items()), 'versions': dict(environment()), 'seed': seed,
        'CLASSES': list(cfg.get('object_classes') or []), 'map_classes': list(cfg.get('map_classes') or []), 'PALETTE': None,
        'box_convention': BOX_CONVENTION, 'compat': cfg.get('compat'), 'world_size': world_size,
    }


def warn_about_origin(meta: Mapping[str, Any], mine: Mapping[str, Any], path: str, logger: logging.Logger) -> None:
    """Say where a checkpoint's code, configuration or classes differ from this run's (boxes are converted on loading)."""
    for key, what in (('CLASSES', 'object classes'), ('map_classes', 'map classes'), ('compat', 'compatibility profile'),
                      ('code_version', 'code version'), ('config_hash', 'configuration')):
        theirs, ours = meta.get(key), mine.get(key)
        if key in meta and theirs != ours and (theirs or ours):
            short = (lambda v: str(v)[:8]) if key == 'code_version' else str
            logger.warning('%s: its %s is %s, here it is %s', path, what, short(theirs), short(ours))
