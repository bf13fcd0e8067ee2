"""Errors that the user can correct become one message with the configuration's key; their traceback goes to the log.

A ``raise`` of this package, while something is built or run, is for the user; an error inside a call is a fault.
"""
from __future__ import annotations

import contextlib
import errno
import re
from typing import Any, Iterator, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from ..checks.values import number_problem, whole_problem
from ..datasets.info_files import InfoFileError
from ..datasets.nuscenes_dataset import SampleError, SampleFault
from ..errors import RankZeroError, frames, raised_on_purpose, text_of
from .checkpoint import CheckpointError
from .launch import UserError

BUILDERS = ('build', 'build_from_cfg')  # of registries; their local ``cfg`` is what was being built
SHAPE_ERRORS = re.compile(r'expected input.* to have \d+ channels|shapes cannot be multiplied|size of tensor a .* must match|'
                          r'Given normalized_shape|Expected more than 1 value per channel|num_channels|running_mean should|'
                          r'Sizes of tensors must match|but got weight of size')
DISK_ERRORS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR,
               errno.EEXIST, errno.ENAMETOOLONG, errno.EFBIG, errno.EIO)


@contextlib.contextmanager
def building(key: str, cfg: Optional[Mapping[str, Any]] = None, section: Any = None) -> Iterator[None]:
    """Errors while something is built from the configuration (a missing file, a wrong argument) become one clean message.

    Args:
        key: of what is built, for example ``model``; the message names the inner key that failed where it can be told.
        cfg: the whole configuration, to name the file that holds the key.
        section: the value of ``key`` as plain dicts and lists.

    Raises:
        UserError: naming the key and the error.
    """
    try:
        yield
    except RankZeroError:
        raise
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, AssertionError, AttributeError, IndexError) as error:
        text = text_of(error)
        place = _place(error, key, section, cfg, text)
        raise UserError(text if text.startswith((place, f'key {place}', f'{key}.')) else f'{place}: {text}') from error


def _place(error: BaseException, key: str, section: Any, cfg: Optional[Mapping[str, Any]], text: str) -> str:
    """The dotted key of the innermost mapping that was being built, with its file where a single value is to blame."""
    found: Tuple[Any, ...] = ()
    inner: Any = section
    for frame, _ in frames(error):
        wanted = frame.f_locals.get('cfg') if frame.f_code.co_name in BUILDERS else None
        path = _find(section, wanted, exact=True) or _find(section, wanted) if isinstance(wanted, Mapping) else None
        if path is not None:
            found, inner = path, wanted
    blamed = _blamed(inner, text)
    path = '.'.join(map(str, [key, *found, *([blamed] if blamed else [])]))
    return cfg.where(path) if blamed and hasattr(cfg, 'where') else path


def _find(node: Any, wanted: Mapping[str, Any], path: Tuple[Any, ...] = (), exact: bool = False) -> Optional[Tuple[Any, ...]]:
    """Where ``wanted`` lies below ``node``: the same mapping, or (not ``exact``) one that a builder filled in."""
    if isinstance(node, Mapping):
        if node == wanted or not exact and 'type' in node and node['type'] == wanted.get('type') and all(
                k in wanted and (wanted[k] == v or isinstance(v, (Mapping, list))) for k, v in node.items()):
            return path
        items: Any = node.items()
    else:
        items = enumerate(node) if isinstance(node, (list, tuple)) else ()
    for name, value in items:
        found = _find(value, wanted, (*path, name), exact)
        if found is not None:
            return found
    return None


def _blamed(mapping: Any, text: str) -> Optional[str]:
    if not isinstance(mapping, Mapping):
        return None
    if re.search(rf'unknown [\w ]+ type {re.escape(repr(mapping.get("type")))}', text):
        return 'type'
    argument = re.search(r"takes no argument '(\w+)'|unexpected keyword argument '(\w+)'", text)
    name = argument and (argument[1] or argument[2])
    return name if name in mapping else None


def check_number(cfg: Mapping[str, Any], section: str, names: Sequence[str]) -> None:
    """Each of ``names`` that ``cfg[section]`` holds must be a finite number >= 0.

    Raises:
        UserError: naming the key, its file and its value.
    """
    for name in names:
        if name not in (cfg.get(section) or {}):
            continue
        problem = number_problem(cfg[section][name])
        if problem:
            raise UserError(f'{where(cfg, f"{section}.{name}")}: {problem}')


def check_whole(cfg: Mapping[str, Any], key: str, least: int) -> None:
    """The value of the dotted ``key``, if it is there and not null, must be a whole number >= ``least``."""
    node: Any = cfg
    for part in key.split('.'):
        node = node.get(part) if isinstance(node, Mapping) else None
    problem = whole_problem(node, least) if node is not None else None
    if problem:
        raise UserError(f'{where(cfg, key)}: {problem}')


def where(cfg: Mapping[str, Any], key: str) -> str:
    """``<file>:<line>: key 'a.b'`` as far as the configuration knows it."""
    return cfg.where(key) if hasattr(cfg, 'where') else f'key {key!r}'


@contextlib.contextmanager
def running(model: nn.Module, cfg: Optional[Mapping[str, Any]] = None) -> Iterator[None]:
    """Errors of the model's step that come from its configuration (channels, grids, memory) become one message.

    Args:
        cfg: of a training run: a step that is out of memory is answered with the memory plan and what to turn.

    Raises:
        UserError: naming the module and the error.
    """
    try:
        yield
    except (RankZeroError, SampleError, InfoFileError, CheckpointError):
        raise
    except (ValueError, RuntimeError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            text = f'out of GPU memory{in_module(error, model) or _pass(error)}: {str(error).splitlines()[0]} {_memory_advice(cfg)}'
        elif isinstance(error, ValueError) and raised_on_purpose(error):
            text = str(error)
        elif SHAPE_ERRORS.search(str(error)):
            text = (f'the parts of the model do not fit{in_module(error, model)}: {str(error).splitlines()[0]}. Align its '
                    'channels and sizes with the part before it')
        else:
            raise
        raise UserError(text) from error


def in_module(error: BaseException, model: nn.Module) -> str:
    """`` in model.<name> (<type>)`` of the innermost module that an error came through; '' if it came through none."""
    names = {id(module): name for name, module in model.named_modules()}
    found: Union[str, None] = None
    for frame, _ in frames(error):
        module = frame.f_locals.get('self')
        if isinstance(module, nn.Module) and names.get(id(module)):
            found = f' in model.{names[id(module)]} ({type(module).__name__})'
    return found or ''


def _pass(error: BaseException) -> str:
    """Where in the step an error is that no module raised."""
    names = [frame.f_code.co_name for frame, _ in frames(error)]
    return ' in the backward pass' if 'backward' in names else ' in the optimizer step' if 'step' in names else ''


def _memory_advice(cfg: Optional[Mapping[str, Any]]) -> str:
    if cfg is None:
        return 'Run it on fewer samples at a time, or on a GPU with more memory'
    from .memory.exhausted import advice  # it builds models, as this module's users do
    return '\n' + advice(cfg)


@contextlib.contextmanager
def correctable() -> Iterator[None]:
    """Around a whole program: damaged or missing files, other models' checkpoints and full disks become one message.

    Raises:
        UserError: with the error's text.
    """
    try:
        yield
    except SampleFault:
        raise
    except (CheckpointError, SampleError, InfoFileError) as error:
        raise UserError(text_of(error)) from error
    except OSError as error:
        if error.errno not in DISK_ERRORS and not raised_on_purpose(error):
            raise
        raise UserError(text_of(error)) from error
