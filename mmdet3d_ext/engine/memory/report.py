"""Plans as text."""
from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from .plan import CARDS, CONTEXT, FRAGMENTATION, GIB, MIB, SAME_ON_EVERY_GPU, MemoryPlan
from .switches import Switch

NAMES = {'activations': 'activations, made by the forward pass', 'backward': 'made by the backward pass', 'inputs': 'the batch',
         'workspace': 'workspace of convolutions and matrix products', 'optimizer': 'optimizer state',
         'buckets': 'buckets of the gradient exchange', 'average': 'averaged weights (ema)'}
PHASES = {'activations': 'forward pass', 'backward': 'backward pass', 'optimizer': 'optimizer step', 'inputs': 'start of the step'}


def _gib(size: float) -> str:
    return f'{size / GIB:.2f} GiB'


def moment(plan: MemoryPlan) -> str:
    """Where in the step the peak is: pass, part, operator."""
    place = f' of {plan.where}' if plan.where else ''
    return f'{PHASES.get(plan.phase, plan.phase)}{place} ({plan.operator.removeprefix("aten::")})'


def headline(plan: MemoryPlan) -> str:
    """One line: the peak and for what."""
    return (f'peak {_gib(plan.peak)} (torch.cuda.max_memory_allocated) for {plan.samples} sample(s) per GPU in {plan.precision}, in the '
            f'{moment(plan)}')


def table(plan: MemoryPlan, parts: int = 12) -> str:
    """The plan by kind, and its activations by part."""
    lines = [headline(plan), '', f'{"what":<52}{"MiB":>10}{"share":>8}']
    for kind, size in plan.by_kind().items():
        lines.append(f'{NAMES.get(kind, kind):<52}{size / MIB:>10,.0f}{size / plan.peak:>8.1%}')
    lines += [f'{"total":<52}{plan.peak / MIB:>10,.0f}', '',
              f'{"activations by part":<52}{"MiB":>10}{"share":>8}']
    held = plan.by_part()
    for name, size in list(held.items())[:parts]:
        lines.append(f'{name or "(between parts)":<52}{size / MIB:>10,.0f}{size / plan.peak:>8.1%}')
    if len(held) > parts:
        lines.append(f'{f"{len(held) - parts} others":<52}{sum(list(held.values())[parts:]) / MIB:>10,.0f}')
    assumed = ', '.join(f'{count:,} {sensor} voxels' for sensor, count in plan.voxels.items())
    lines += ['', f'A card needs {_gib(plan.on_card)}: {FRAGMENTATION:.0%} more for what the allocator holds and cannot hand out, and '
                  f'{CONTEXT / MIB:.0f} MiB for the CUDA context (both assumed).',
              f'Assumed per sample: {plan.points:,} LiDAR points' + (f', {assumed}' if assumed else '') + '.', SAME_ON_EVERY_GPU]
    return '\n'.join(lines)


def cards(plan: MemoryPlan, larger: Optional[MemoryPlan] = None) -> str:
    """Which cards it fits on; ``larger``: a plan with one sample more, to say how many samples fit."""
    lines = [f'{"card":<10}{"GiB":>8}  {"fits":<8}samples per GPU']
    for name, capacity in CARDS.items():
        fits = plan.on_card <= capacity * GIB
        most = ''
        if larger is not None:
            each = larger.on_card - plan.on_card
            room = capacity * GIB - plan.on_card
            count = plan.samples + int(room // each) if each > 0 else plan.samples
            most = f'up to {count}' if count >= 1 else 'none'
        lines.append(f'{f"{name} GB":<10}{capacity:>8.2f}  {"yes" if fits else "no":<8}{most}')
    return '\n'.join(lines)


def switch_table(plan: MemoryPlan, rows: Sequence[Tuple[Switch, MemoryPlan]]) -> str:
    """What each switch saves."""
    lines: List[str] = [f'{"switch":<40}{"peak MiB":>10}{"saves MiB":>11}{"":>7}  how']
    for switch, changed in rows:
        saved = plan.peak - changed.peak
        lines.append(f'{switch.name:<40}{changed.peak / MIB:>10,.0f}{saved / MIB:>11,.0f}{saved / plan.peak:>7.0%}  '
                     f'{switch.words}   ({switch.note})')
    return '\n'.join(lines)
