"""What can be turned to make training fit, and what each saves, found by planning again with it."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ..run_dir import to_plain
from .plan import MemoryPlan, make_plan

# Parts that are worth recomputing; a name stands for those parts of its kind that a model has.
RECOMPUTED = {'heads.map': ('heads.map',), 'decoder': ('decoder', 'branches.map.decoder'),
              'encoders.camera.backbone': ('encoders.camera.backbone',),
              'encoders.camera.vtransform': ('encoders.camera.vtransform',)}
LAYOUT = ('encoders.camera.neck', 'encoders.camera.vtransform', 'fuser', 'decoder', 'branches.map', 'heads.map')


@dataclass
class Switch:
    """One change of a configuration that leaves what is learned as it is.

    Attributes:
        words: what the command line takes.
        values: dotted key -> value. precision, samples: of the plan, where they are what changes.
    """

    name: str
    words: str
    values: Dict[str, Any]
    precision: Optional[str] = None
    samples: Optional[int] = None
    note: str = ''


def _node(cfg: Mapping[str, Any], name: str) -> Any:
    """What ``model.<name>`` says; None if it is not there."""
    node: Any = cfg.get('model')
    for key in name.split('.'):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _has(cfg: Mapping[str, Any], name: str) -> bool:
    return _node(cfg, name) is not None or name == 'branches.map.decoder' and _has(cfg, 'branches.map')


def switches(cfg: Mapping[str, Any], plan: MemoryPlan) -> List[Switch]:
    """Those that this configuration has not turned yet, all of them together last."""
    model = cfg.get('model') or {}
    before = list(model.get('checkpoint') or [])
    found, every = [], list(before)
    for name, parts in RECOMPUTED.items():
        parts = [part for part in parts if _has(cfg, part) and part not in before]
        done = name == 'heads.map' and (model.get('heads', {}).get('map') or {}).get('use_checkpoint') is True
        if not parts or parts[0] != name or done:
            continue
        every += parts
        names = before + parts
        found.append(Switch(f'recompute {name}', f'--model.checkpoint "[{", ".join(names)}]"', {'model.checkpoint': names},
                            note='same result, more time'))
    if len(found) > 1:
        found.append(Switch('recompute all of these', f'--model.checkpoint "[{", ".join(every)}]"', {'model.checkpoint': every},
                            note='same result, more time'))
    backbone = _node(cfg, 'encoders.camera.backbone') or {}
    if backbone.get('type') == 'SwinTransformer' and backbone.get('lean', True) is not False and backbone.get('lean') != 'mlp' \
            and 'encoders.camera.backbone' not in before:
        found.append(Switch('Swin repeats its first linear layers', '--model.encoders.camera.backbone.lean mlp',
                            {'model.encoders.camera.backbone.lean': 'mlp'}, note='same result, a little more time'))
    if plan.precision == 'fp32':
        found.append(Switch('mixed precision', '--amp.dtype fp16', {}, precision='fp16', note='faster; rounding differs'))
    elif not model.get('channels_last'):
        parts = [part for part in LAYOUT if _has(cfg, part)]
        found.append(Switch('channels-last convolutions', f'--model.channels_last "[{", ".join(parts)}]"',
                            {'model.channels_last': parts}, note='same result; usually faster'))
    if plan.samples > 1:
        found.append(Switch('one sample at a time', f'--data.samples_per_gpu 1 --optimizer_config.cumulative_iters {plan.samples}', {},
                            samples=1, note='same effective batch; batch norms see fewer samples'))
    return found


def with_values(cfg: Mapping[str, Any], values: Mapping[str, Any]) -> Dict[str, Any]:
    """The configuration as plain values, with some set."""
    plain = to_plain(cfg)
    for key, value in values.items():
        node = plain
        *parents, last = key.split('.')
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return plain


def savings(cfg: Mapping[str, Any], plan: MemoryPlan, limit: Optional[int] = None, **options: Any) -> List[Tuple[Switch, MemoryPlan]]:
    """Each switch with the plan that it leads to, the largest saving first.

    Args:
        limit: plan at most so many, those that look best by the activations of the parts that they touch.
        options: of :func:`.plan.make_plan`.
    """
    found = switches(cfg, plan)
    if limit is not None:
        held = plan.by_part(('activations', 'backward', 'workspace'))

        def promise(switch: Switch) -> float:
            if switch.samples or switch.precision:
                return float('inf')
            names = switch.values.get('model.checkpoint', ())
            return sum(size for part, size in held.items() if any(part.startswith(name) for name in names)) / (1 + len(names))
        found = sorted(found, key=promise, reverse=True)[:limit]
    rows = []
    for switch in found:
        changed = make_plan(with_values(cfg, switch.values), switch.samples or plan.samples, switch.precision or plan.precision,
                            gpus=plan.gpus, points=plan.points, **options)
        rows.append((switch, changed))
    return sorted(rows, key=lambda row: row[1].peak)
