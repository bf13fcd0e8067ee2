"""What the tools share: importing parts of the package that need neither torch nor mmcv, types of arguments, how a tool ends.

``import mmdet3d_ext`` applies the version shims and registers every model, which takes seconds and fails where torch or mmcv
do not load: just where the doctor, the launcher and the monitor are needed.
"""
import argparse
import errno
import os
import sys
import types
from pathlib import Path
from typing import Callable, NoReturn, Optional, Union

REPO = Path(__file__).resolve().parents[1]


def use_package(name: str = 'mmdet3d_ext') -> None:
    """Make ``<name>.<part>`` importable without running ``<name>/__init__.py``. Nothing that needs the shims may be imported then."""
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(REPO / name)]
        sys.modules[name] = package


def seconds(text: str) -> float:
    """An argument's value; argparse says what is wrong with another one."""
    value = float(text)
    if not 0 <= value < float('inf'):
        raise argparse.ArgumentTypeError(f'must be a number of seconds >= 0, got {text!r}')
    return value


def end(main: Callable[[], Optional[int]]) -> NoReturn:
    """Run a tool and end the program with its exit code.

    Where nobody reads the output any more (``tool | head``) it ends silently with 141, the shell's code of SIGPIPE; output that
    cannot be written (a full disk) is one line and exit code 1.
    """
    code: Union[int, str, None] = 0
    try:
        try:
            code = main()
        except SystemExit as ended:  # argparse
            code = ended.code
        sys.stdout.flush()  # at the interpreter's end nobody could catch it
    except OSError as error:
        use_package()
        from mmdet3d_ext.errors import output_gone
        if isinstance(error, BrokenPipeError) and output_gone():
            code = 141
        elif error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            print(f'error: the output cannot be written: {error.strerror}', file=sys.stderr)
            code = 1
        else:
            raise
        _discard_output()
    sys.exit(code)


def _discard_output() -> None:
    """What is still in the buffers goes nowhere, so that the interpreter's end does not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
