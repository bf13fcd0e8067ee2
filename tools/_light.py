"""Lets a tool import parts of the package that need neither torch nor mmcv, without the package's own start.

``import mmdet3d_ext`` applies the version shims and registers every model, which takes seconds and fails where torch or mmcv
do not load: just where the doctor, the launcher and the monitor are needed.
"""
import sys
import types
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def use_package(name: str = 'mmdet3d_ext') -> None:
    """Make ``<name>.<part>`` importable without running ``<name>/__init__.py``. Nothing that needs the shims may be imported then."""
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(REPO / name)]
        sys.modules[name] = package
