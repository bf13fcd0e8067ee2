"""The one exception of the configuration package, and where a value came from."""
from __future__ import annotations

import difflib
import os
from typing import Iterable, NamedTuple, Optional, Sequence, Tuple, Union

Key = Union[str, int]
Path = Tuple[Key, ...]

COMMAND_LINE = 'command line'


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the file, the line where known, and the key."""


class Source(NamedTuple):
    """Where a value was written: an absolute file name (or :data:`COMMAND_LINE`) and a 1-based line (0 if unknown)."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        name = display(self.file)
        return f'{name}:{self.line}' if self.line else name


def display(file: str) -> str:
    """``file`` relative to the working folder if it lies inside, else as it is."""
    if not os.path.isabs(file):
        return file
    relative = os.path.relpath(file)
    return file if relative.startswith(os.pardir) else relative


def dotted(path: Sequence[Key]) -> str:
    """``('a', 3, 'b')`` as ``'a.3.b'``, the form that overrides are written in."""
    return '.'.join(str(part) for part in path)


def nearest(word: object, known: Iterable[object]) -> Optional[str]:
    """The known name most like ``word``, or None if none is similar."""
    matches = difflib.get_close_matches(str(word), [str(name) for name in known], n=1, cutoff=0.5)
    return matches[0] if matches else None


def hint(word: object, known: Iterable[object], prefix: Sequence[Key] = ()) -> str:
    """``"; did you mean 'a.b'?"`` or an empty string."""
    near = nearest(word, known)
    return f'; did you mean {dotted((*prefix, near))!r}?' if near else ''
