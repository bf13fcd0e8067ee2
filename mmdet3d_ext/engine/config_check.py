"""The configuration's check as training and ``tools/check_config.py`` use it; with what needs more than the configuration."""
from __future__ import annotations

import re
from typing import Any, Iterable, Mapping, Optional, Sequence

from ..checks import Finding, Report, check_config
from ..checks.report import ERROR, WARNING
from . import hooks, runner  # noqa: F401  (registers names that configurations use)
from .launch import UserError

# Groups of the doctor's checks that do not depend on data or on a launcher.
ENVIRONMENT = ('stack', 'libraries', 'system')


def refuse_inconsistent(cfg: Mapping[str, Any], gpus: Optional[int] = None) -> Report:
    """Check ``cfg`` before data and model are built; ``gpus``: processes that will train, where the learning rate matters.

    Returns:
        The report; its warnings are for the log.

    Raises:
        UserError: with all errors, each with its key and the value to write.
    """
    report = check_config(cfg, gpus)
    if report.errors:
        first, *more = map(str, report.errors)
        raise UserError('\n'.join([first, *(f'and {one}' for one in more)]))
    return report


def unbuildable(cfg: Mapping[str, Any]) -> Optional[str]:
    """Why training could not make its model or precision from a configuration that the check accepts, in training's words; None if it can.
    Takes seconds and reads no files."""
    import torch

    from ..models.builder import build_model
    from .amp import plan_amp
    from .building import building
    from .run_dir import to_plain
    settings = to_plain(cfg['model'])
    try:
        with building('model', cfg, settings):
            build_model(settings, cfg.get('compat'))
        plan_amp(cfg, torch.device('meta'))
    except UserError as error:
        return str(error)
    return None


def add_notices(report: Report, texts: Iterable[str]) -> None:
    """What the loader said about values that the reference means differently (:func:`.startup.notices`), as warnings."""
    for text in texts:
        found = re.match(r"(?P<place>.*?key '(?P<key>[^']+)'): (?P<problem>.*)", text, re.DOTALL)
        place, _, problem = text.partition(': ')
        report.findings.append(Finding(WARNING, found['key'], found['place'], found['problem']) if found else
                               Finding(WARNING, '', place, problem))


def add_environment(report: Report, config: str, overrides: Sequence[str]) -> None:
    """The doctor's findings about libraries, Python's cache and limits of the machine, as findings of the report."""
    from ..doctor import Options, examine
    levels = {'problem': ERROR, 'warning': WARNING}
    for one in examine(Options(config=config, overrides=list(overrides)), ENVIRONMENT):
        if one.status in levels:
            report.findings.append(Finding(levels[one.status], f'environment.{one.check}', f'environment: {one.check}',
                                           f'{one.text}. {one.remedy}'))


def add_memory(report: Report, cfg: Mapping[str, Any], limit: float, gpus: Optional[int] = None) -> None:
    """Compare the planned peak with a card of ``limit`` GiB."""
    from .memory.plan import GIB, make_plan
    from .memory.report import headline
    plan = make_plan(cfg, gpus=gpus or 1)
    report.notes.append(headline(plan))
    if plan.on_card > limit * GIB:
        key = 'data.samples_per_gpu'
        place = cfg.where(key) if hasattr(cfg, 'where') else f'key {key!r}'
        report.findings.append(Finding(
            ERROR, key, place, f'{plan.samples} sample(s) per GPU in {plan.precision} need {plan.on_card / GIB:.1f} GiB on the card, it has '
            f'{limit:g} (more GPUs do not change that). tools/plan_memory.py shows what each switch saves',
            {key: plan.samples - 1} if plan.samples > 1 else {'model.checkpoint': ['heads.map', 'decoder']}))
