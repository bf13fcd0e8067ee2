"""What a run that is out of GPU memory says: where, what the plan is, and what to turn."""
from __future__ import annotations

from typing import Any, List, Mapping

from .plan import GIB, SAME_ON_EVERY_GPU, MemoryPlan, make_plan
from .report import headline
from .switches import savings, switches

SUGGESTED = 3


def advice(cfg: Mapping[str, Any]) -> str:
    """The plan of a configuration in a few lines, and the three switches that save most.

    Takes some ten seconds: each switch is planned. A model that cannot be planned gets the switches without figures.
    """
    try:
        plan = make_plan(cfg)
        rows = savings(cfg, plan, limit=SUGGESTED)
    except Exception as error:  # the run's own error must reach the user, whatever happens to the plan
        return '\n'.join([f'(No plan could be made: {error})', 'Try, one after the other:', *_static(cfg)])
    lines = [f'Planned: {headline(plan)}; the largest parts: {_largest(plan)}.', 'Try, the largest saving first:']
    for switch, changed in rows:
        lines.append(f'  {switch.words}    saves {(plan.peak - changed.peak) / GIB:.2f} GiB: {switch.name} ({switch.note})')
    if len(rows) < SUGGESTED:
        lines += _static(cfg)[:SUGGESTED - len(rows)]
    return '\n'.join([*lines, SAME_ON_EVERY_GPU, 'tools/plan_memory.py CONFIG shows the whole plan, and on which cards it fits.'])


def _largest(plan: MemoryPlan) -> str:
    return ', '.join(f'{part or "between parts"} {size / GIB:.2f} GiB' for part, size in list(plan.by_part().items())[:3])


def _static(cfg: Mapping[str, Any]) -> List[str]:
    plan = MemoryPlan(int(cfg['data']['samples_per_gpu']), 'fp32' if not (cfg.get('amp') or cfg.get('fp16')) else 'fp16', 1, 1, {}, '',
                      '', '', 0)
    found = [f'  {switch.words}    {switch.name}' for switch in switches(cfg, plan)]
    if cfg.get('image_size'):
        found.append('  --image_size "[H, W]"    smaller images (another model)')
    if cfg.get('bev'):
        found.append('  --bev.labels.cells N    a coarser map (another model)')
    return [*found, '  --optimizer.type SGD    no second moments (another training)']
