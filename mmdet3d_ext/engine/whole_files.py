"""Small text files that hold the old or the whole new content, whatever happens while they are written."""
from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Mapping, Union


def write_whole(text: str, path: Union[str, os.PathLike]) -> None:
    """Replace the file at once.

    Raises:
        OSError: it cannot be written; it is as it was, and nothing lies beside it.
    """
    temporary = f'{os.fspath(path)}.tmp-{os.getpid()}'
    try:
        with open(temporary, 'w', encoding='utf-8') as stream:
            stream.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(value: Mapping[str, Any], path: Union[str, os.PathLike]) -> None:
    """:func:`write_whole` of a JSON object (NaN as ``NaN``, which Python's json reads)."""
    write_whole(json.dumps(dict(value), indent=2) + '\n', path)
