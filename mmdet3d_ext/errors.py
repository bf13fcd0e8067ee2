"""Which errors a user can correct, and their text as one message."""
from __future__ import annotations

import io
import linecache
import re
import select
from pathlib import Path
from types import FrameType
from typing import Iterator, Optional, Tuple

PACKAGE = str(Path(__file__).resolve().parent)


class RankZeroError(RuntimeError):
    """What rank 0 did alone failed; the other ranks raise this while rank 0 raises the error itself."""


def frames(error: BaseException) -> Iterator[Tuple[FrameType, int]]:
    """(frame, line) from the outermost call to the raise; of an error that was re-raised in an ``except`` (mmcv's builders do
    so) also those of the error inside it."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            yield trace.tb_frame, trace.tb_lineno
            trace = trace.tb_next
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def raised_on_purpose(error: BaseException) -> bool:
    """Whether a ``raise`` statement of this package made the error, with a text for the user (a failing call made the others).

    An error that a worker of ``concurrent.futures`` sent is judged by the traceback that came with it.
    """
    if type(error.__cause__).__name__ == '_RemoteTraceback':
        places = re.findall(r'File "(.+)", line (\d+)', str(error.__cause__))
        return bool(places) and _is_raise(places[-1][0], int(places[-1][1]))
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _is_raise(trace.tb_frame.f_code.co_filename, trace.tb_lineno)


def _is_raise(file: str, line: int) -> bool:
    return file.startswith(PACKAGE) and linecache.getline(file, line).lstrip().startswith('raise')


def _file_in_use(error: OSError) -> Optional[str]:
    """The file that was being written: a failed ``write`` (full disk) does not tell its name."""
    found = None
    for frame, _ in frames(error):
        for value in frame.f_locals.values():
            name = getattr(value, 'name', None) if isinstance(value, io.IOBase) else None
            if isinstance(name, str) and not name.startswith('<'):
                found = name
        path = frame.f_locals.get('path') or frame.f_locals.get('file')
        if isinstance(path, (str, Path)):
            found = str(path)
    return found


def text_of(error: BaseException) -> str:
    """The error's message: without a ``KeyError``'s quotes and the traceback that a loader's worker puts around it; with the
    error's type where the text is not ours."""
    text = str(error.args[0]) if isinstance(error, KeyError) and len(error.args) == 1 else str(error)
    if text.startswith('Caught ') and 'Original Traceback' in text:
        return re.split(rf'\n(?:[\w.]+\.)?{type(error).__name__}: ', text)[-1].strip()
    if raised_on_purpose(error) and not getattr(error, 'errno', None):
        return text
    if isinstance(error, OSError) and text:
        name = error.filename or _file_in_use(error)
        return f'{name}: {error.strerror or text}' if name else text
    return f'{type(error).__name__}: {text}' if text else type(error).__name__


def mistake(error: BaseException) -> Optional[str]:
    """The text of an error that the user can correct, a file's or one raised here on purpose; None of a fault."""
    return text_of(error) if isinstance(error, OSError) or raised_on_purpose(error) else None


def output_gone() -> bool:
    """Whether the program that read this one's stdout or stderr has ended, as ``head`` does when it has enough."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
