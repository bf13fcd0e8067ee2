"""Command lines: our own options, and ``--any.key value`` words that go to the configuration."""
from __future__ import annotations

import argparse
import math
import os
from typing import List, NoReturn, Sequence, Tuple

from ..config.overrides import starts_key


def split(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Tuple[argparse.Namespace, List[str]]:
    """Parse ``argv``: options that ``parser`` knows, and the rest as overrides.

    A word that begins with ``--`` and is no option of the parser starts an override; every word after it belongs to its value
    until the next word with ``--`` (launchers strip quotes, so a list may arrive as several words). ``a.b=c`` without dashes, as
    torchpack takes it, starts one as well, where it is neither an option's value nor a file. ``--cfg-options a.b=c d=e`` of
    mmdet3d is taken as overrides, too.
    """
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    ours: List[str] = []
    overrides: List[str] = []
    target = ours
    awaited = False  # whether the word is the value of our own option before it
    for word in argv:
        name = word.partition('=')[0]
        if word.startswith('--') and word != '--' or word in known:
            if name in known:
                target = ours
            elif name in ('--cfg-options', '--options', '--cfg_options'):
                target = overrides
                continue
            else:
                target = overrides
        elif target is ours and not awaited and starts_key(word) and not os.path.exists(word):
            target = overrides
        target.append(word)
        awaited = word in known and known[word].nargs != 0
    complain = parser.error

    def error(message: str) -> NoReturn:
        from .launch import quiet_here  # torch: a command line can be read without it
        if quiet_here():
            parser.exit(2)
        complain(message)

    parser.error = error
    return parser.parse_args(ours), overrides


def whole(text: str) -> int:
    """argparse's type of a number of things, at least one."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'must be a whole number >= 1, got {text!r}')
    return int(text)


def positive(text: str) -> float:
    """argparse's type of an amount."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f'must be a number > 0, got {text!r}')
    return value


def list_word(value: str) -> str:
    """``a,b`` as the configuration's list ``[a, b]``; the path of a file that exists, and anything without a comma, as it is."""
    return value if ',' not in value or value.startswith('[') or os.path.exists(value) else f'[{value}]'


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options that both tools take."""
    parser.add_argument('--allow-unsafe-checkpoint', action='store_true',
                        help='also read checkpoint files that can run code (only if you trust their source)')
    parser.add_argument('--allow-partial-checkpoint', action='store_true',
                        help='go on although much of a checkpoint does not match')
    parser.add_argument('--checkpoint-origin', choices=('auto', 'ours', 'reference'), default='auto',
                        help='whose box convention a checkpoint has that does not say it: this project\'s or the BEVFusion '
                             'reference\'s (default: found out)')
    parser.add_argument('--launcher', help='accepted and ignored: the launcher is found out from the environment')
    parser.add_argument('--local_rank', '--local-rank', type=int, help=argparse.SUPPRESS)
    parser.add_argument('--start-timeout', type=float, default=300.0, metavar='S',
                        help='seconds for all processes to meet (default 300)')
