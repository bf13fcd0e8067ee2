"""Converting checkpoint files: what ``tools/convert_checkpoint.py`` does after it has parsed its words."""
from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import List, Optional

from .checkpoint import (
    CheckpointError,
    convert,
    load_weights,
    pick_weights,
    plain,
    read_checkpoint,
    strip_wrappers,
    write_atomic,
)
from .launch import UserError
from .startup import load_settings


@dataclass
class Options:
    """The command line (see ``tools/convert_checkpoint.py --help``)."""

    source: str
    target: str
    to: str = 'ours'
    origin: str = 'auto'
    config: Optional[str] = None
    overrides: List[str] = field(default_factory=list)
    weights: str = 'auto'
    force: bool = False
    allow_unsafe_checkpoint: bool = False
    allow_partial_checkpoint: bool = False


def convert_file(options: Options) -> List[str]:
    """Write ``options.target``: the weights of ``options.source`` in the other box convention, with a mark that says so.

    The weights are bit for bit the file's but for the rows that depend on the box convention, so converting there and back gives
    the same bits. Optimizer states are left out: a run cannot be resumed across projects.

    Returns:
        lines that say what was done, with the table of modules if a configuration was given.

    Raises:
        CheckpointError: if the file cannot be read, is in that convention already, or does not fit the configuration.
    """
    source, target = options.source, options.target
    if options.overrides and options.config is None:
        raise UserError(f'{options.overrides[0]} is no option (see --help); it could be a key of a configuration, but there is no '
                        '--config')
    content = read_checkpoint(source, options.allow_unsafe_checkpoint)
    if os.path.exists(target) and (os.path.samefile(source, target) or not options.force):
        remedy = 'give another name' if os.path.samefile(source, target) else '--force replaces it'
        raise CheckpointError(f'{target} exists already; {remedy}')
    state, kind = pick_weights(content, source, options.weights)
    converted, lines = convert(content, strip_wrappers(state), source, options.to, options.origin)
    if kind != 'weights':
        lines.append(f'these are the file\'s {kind}')
    if options.config is not None:
        lines.append(_check(options, converted))
    try:
        converted = plain(converted)
    except TypeError:  # objects that only --allow-unsafe-checkpoint can read
        converted['meta'] = _plain_part(converted['meta'])
        converted = plain(converted)
        lines.append('entries of meta that are no plain values were left out')
    os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
    write_atomic(converted, target)
    return lines + [f'written: {target}']


def _plain_part(meta: dict) -> dict:
    kept = {}
    for key, value in meta.items():
        try:
            kept[key] = plain(value)
        except TypeError:
            pass
    return kept


def _check(options: Options, content: dict) -> str:
    """Load what will be written into the configured model; the table of modules."""
    from ..models.builder import build_model
    cfg = load_settings(options.config, options.overrides)
    model = build_model(cfg.to_dict()['model'], cfg.get('compat'))
    report = load_weights(model, options.target, content=content, allow_partial=options.allow_partial_checkpoint)
    return report.text()
