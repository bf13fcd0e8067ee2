"""Log files on full disks, and which warnings are for the user's screen."""
from __future__ import annotations

import contextlib
import logging
import os
import re
import sys

from ..errors import PACKAGE


class LogFile(logging.FileHandler):
    """A log file that reports once, in one line, that it cannot be written (a full disk), and goes on."""

    complained = False

    def close(self) -> None:
        with contextlib.suppress(OSError):  # lines that were never written; said when they came
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.complained:
            self.complained = True
            with contextlib.suppress(OSError):  # stderr may be a file on the same full disk
                sys.stderr.write(f'ALARM: cannot write the log {self.baseFilename}: {error.strerror}. '
                                 f'It lacks lines from here on\n')


def is_own_warning(record: logging.LogRecord, is_master: bool) -> bool:
    """Warnings of this package are for the user's screen: about files from every rank, about settings from one."""
    text = record.getMessage()
    return text.startswith(os.path.join(PACKAGE, '') if is_master else os.path.join(PACKAGE, 'datasets', ''))


class OwnWarnings(logging.Formatter):
    """``<file>:<line>: <category>: <text>\n  <source>`` without what is only of use to developers."""

    def format(self, record: logging.LogRecord) -> str:
        text = re.sub(r'^\S+?:\d+: \w+: ', '', record.getMessage()).rstrip()
        text = re.sub(r'\n  [^\n]*$', '', text)
        plain = logging.makeLogRecord(dict(record.__dict__, msg=text, args=()))
        return super().format(plain)
