"""What every program of the project does first: the configuration, then the place among the ranks."""
from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from typing import Any, Iterator, List, Sequence

import torch

from ..config import ConfigError, load_config
from . import launch as launching
from .building import check_number


def load_settings(path: str, overrides: Sequence[str]) -> Any:
    """:func:`mmdet3d_ext.config.load_config`; a mistake in a file or override becomes one clean message.

    What the loader says about values that the reference means differently is shown as one line each, by one rank of a machine.

    Raises:
        UserError: with the loader's message (file, line, key, nearest known key).
    """
    said: List[str] = []
    try:
        with notices(said):
            return load_config(path, list(overrides))
    except ConfigError as error:
        raise launching.UserError(str(error)) from None
    finally:
        _show(said)


@contextlib.contextmanager
def notices(said: List[str]) -> Iterator[None]:
    """The loader's warnings go to ``said``, each once, and not to Python's own printing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        try:
            yield
        finally:
            said += dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, UserWarning))


def _show(said: List[str]) -> None:
    try:
        first = launching.detect().local_rank == 0
    except launching.LaunchError:  # said when the ranks meet
        first = True
    for one in said:
        if first:
            print(f'warning: {one}', file=sys.stderr)


def start(cfg: Any, arguments: argparse.Namespace) -> torch.device:
    """Join the other ranks as configured; returns this rank's device.

    ``dist_params``: ``backend`` (also ``dist_backend``), ``timeout`` and ``stall_timeout`` in seconds (:func:`.launch.start`).
    """
    backend = (cfg.get('dist_params') or {}).get('backend') or cfg.get('dist_backend')
    timeouts = {}
    for key, argument in (('timeout', 'collective_timeout'), ('stall_timeout', 'stall_timeout')):
        if (cfg.get('dist_params') or {}).get(key):
            check_number(cfg, 'dist_params', [key])
            timeouts[argument] = float(cfg['dist_params'][key])
    launch, device = launching.start(backend=backend, start_timeout=arguments.start_timeout, **timeouts)
    if arguments.launcher and launch.is_master:
        print(f'--launcher {arguments.launcher} is not needed: started by {launch.launcher}', file=sys.stderr)
    try:
        import cv2
        cv2.setNumThreads(int(cfg.get('opencv_num_threads') or 0))
    except ImportError:
        pass
    return device
