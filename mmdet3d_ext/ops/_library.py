"""Loads the compiled operators, and says what to do when that is impossible.

``mmdet3d_ext.ops`` can always be imported; the first *use* of an operator raises :class:`OpsUnavailableError` if the library
is missing or was built for another torch.
"""

from __future__ import annotations

import mmap
import re
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Callable, Dict, Optional, Set, Tuple

import torch

REBUILD = 'Build it for this torch with: pip install --no-build-isolation --no-deps -e .   (in the checkout of mmdet3d_ext)'
_MARKER = re.compile(rb'mmdet3d_ext-build\{([^}\0]*)\}')


class OpsUnavailableError(ImportError):
    """The compiled operators are missing, or do not fit the running torch."""


def library_path() -> Path:
    """Where the library for this Python lies, whether it exists or not."""
    return Path(__file__).resolve().parents[1] / f'_C{EXTENSION_SUFFIXES[0]}'


def read_build_info(path: Path) -> Dict[str, str]:
    """``{'torch', 'cuda', 'archs'}`` recorded in a library, without loading it; empty if there is no record."""
    with open(path, 'rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = _MARKER.search(data)
        record = found.group(1).decode() if found else ''
    return dict(item.split('=', 1) for item in record.split(';')) if record else {}


def _minor(version: str) -> str:
    return '.'.join(version.split('+')[0].split('.')[:2])


def check_build(path: Path, torch_version: str, torch_cuda: Optional[str]) -> Dict[str, str]:
    """The record of the library at ``path`` if this torch can load it.

    Raises:
        OpsUnavailableError: if it is missing, unreadable, or built for another torch.
    """
    if not path.exists():
        raise OpsUnavailableError(f'the compiled operators of mmdet3d_ext are missing: {path} does not exist. {REBUILD}')
    info = read_build_info(path) if path.stat().st_size else {}
    if not info:
        raise OpsUnavailableError(f'{path} is not a library of mmdet3d_ext (it holds no build record). {REBUILD}')
    if _minor(info['torch']) != _minor(torch_version):
        raise OpsUnavailableError(f'{path} was built for torch {info["torch"]}, this is torch {torch_version}. {REBUILD}')
    if info['cuda'] and info['cuda'].split('.')[0] != (torch_cuda or 'none').split('.')[0]:
        raise OpsUnavailableError(
            f'{path} was built for CUDA {info["cuda"]}, this torch has CUDA {torch_cuda or "none"}. {REBUILD}'
        )
    return info


def _load() -> Optional[OpsUnavailableError]:
    path = library_path()
    try:
        check_build(path, torch.__version__, torch.version.cuda)
        torch.ops.load_library(str(path))
    except OpsUnavailableError as error:
        return error
    except OSError as error:
        return OpsUnavailableError(f'{path} could not be loaded: {error}. {REBUILD}')
    return None


_failure = _load()


def available() -> bool:
    """Whether the operators are loaded."""
    return _failure is None


def build_info() -> Dict[str, str]:
    """What the loaded library was built for: ``torch``, ``cuda`` (empty: CPU kernels only), ``archs`` (space separated)."""
    require()
    return read_build_info(library_path())


def require(tensor: Optional[torch.Tensor] = None) -> None:
    """Raise :class:`OpsUnavailableError` unless the operators can run (on the device of ``tensor``)."""
    if _failure is not None:
        raise _failure
    if tensor is not None and tensor.is_cuda:
        if not _has_cuda():
            raise OpsUnavailableError(
                f'{library_path()} holds CPU kernels only, and a tensor on {tensor.device} was given. Build it where '
                f'the CUDA toolkit is (FORCE_CUDA=1 makes its absence an error). {REBUILD}'
            )
        if not torch.compiler.is_compiling():
            _require_covered(tensor.device.index)


_cuda_kernels: Optional[bool] = None
_covered: Set[int] = set()


def _has_cuda() -> bool:
    global _cuda_kernels
    if _cuda_kernels is None:
        _cuda_kernels = bool(build_info()['cuda'])
    return _cuda_kernels


def _require_covered(index: int) -> None:
    """Raise unless the library holds code for the GPU ``index``; asked once per GPU."""
    if index in _covered:
        return
    archs, (major, minor) = build_info()['archs'], torch.cuda.get_device_capability(index)
    if not covers(archs, (major, minor)):
        raise OpsUnavailableError(
            f'{library_path()} was built for the GPU architectures {archs} and holds no code for cuda:{index} '
            f'({torch.cuda.get_device_name(index)}, compute capability {major}.{minor}). Set '
            f'TORCH_CUDA_ARCH_LIST={major}.{minor}, then build it again. {REBUILD}'
        )
    _covered.add(index)


def covers(archs: str, capability: Tuple[int, int]) -> bool:
    """Whether code for ``archs`` ('8.0 9.0+PTX') runs on a GPU of this compute capability.

    Machine code runs on the same major number and the same or a higher minor one, PTX on anything as new or newer, '9.0a' on 9.0
    alone. A list with other words ('Hopper') counts as fitting: the first launch then says whether it does.
    """
    words = archs.replace(';', ' ').replace(',', ' ').split()
    parts = [re.fullmatch(r'(\d+)\.(\d)(a|\+PTX)?', word) for word in words]
    if not all(parts):
        return True
    for part in parts:
        built, suffix = (int(part[1]), int(part[2])), part[3]
        if suffix == 'a':
            fits = capability == built
        else:
            fits = capability >= built and (capability[0] == built[0] or suffix == '+PTX')
        if fits:
            return True
    return False


def fake(name: str) -> Callable:
    """Decorator: the fake (shape-only) kernel of ``mmdet3d_ext::<name>``."""

    def register(function):
        if available():
            torch.library.register_fake(f'mmdet3d_ext::{name}')(function)
        return function

    return register

