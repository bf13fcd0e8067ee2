"""Exponential moving average of the weights."""
from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Mapping, Optional

import torch
from mmcv.runner import HOOKS, Hook

MODES = ('ema', 'raw')


@HOOKS.register_module()
class WeightAverageHook(Hook):
    """Keeps ``average = d * average + (1 - d) * weight`` after every optimizer step that really happened.

    ``d = min(decay, (1 + n) / (10 + n))`` at step n, so that the random start is forgotten quickly. Parameters and floating
    buffers (BatchNorm statistics) are averaged, integer buffers copied. The averages live outside the model; checkpoints hold
    them as ``ema_state_dict`` beside the raw weights.

    Args:
        decay: d, in (0, 1). mmcv users write ``momentum`` = 1 - decay.
        evaluate: weights that validation uses, and ``tools/test.py`` by default: 'ema' or 'raw'.
        warm_up: the 10 in the formula above; 0 or null keeps ``decay`` from the start.
    """

    def __init__(self, decay: Optional[float] = None, momentum: Optional[float] = None, evaluate: str = 'ema',
                 warm_up: Optional[int] = 10):
        if decay is not None and momentum is not None:
            raise ValueError('ema: give decay or momentum (= 1 - decay), not both')
        decay = 1.0 - momentum if momentum is not None else 0.999 if decay is None else decay
        if not 0.0 < decay < 1.0:
            raise ValueError(f'ema.decay must be between 0 and 1, got {decay}')
        if evaluate not in MODES:
            raise ValueError(f'ema.evaluate must be one of {MODES}, got {evaluate!r}')
        warm_up = 0 if warm_up is None else warm_up
        if isinstance(warm_up, bool) or not isinstance(warm_up, int) or warm_up < 0:
            raise ValueError(f'ema.warm_up must be a whole number >= 0, got {warm_up!r}')
        self.decay, self.evaluate, self.warm_up = float(decay), evaluate, warm_up
        self.steps = 0
        self.average: Dict[str, torch.Tensor] = {}
        self._loaded: Optional[Dict[str, torch.Tensor]] = None

    def before_run(self, runner: Any) -> None:
        runner.evaluated_weights = self.evaluate
        current = _model(runner).state_dict()
        if self._loaded is None:
            self.average = {k: v.detach().clone() for k, v in current.items()}
            return
        missing = sorted(set(current) - set(self._loaded))
        if missing:
            raise KeyError(f'the resumed averages lack {missing[:5]}')
        self.average = {k: self._loaded[k].to(device=v.device, dtype=v.dtype).clone() for k, v in current.items()}
        self._loaded = None

    def after_train_iter(self, runner: Any) -> None:
        if not getattr(runner, 'stepped', True):
            return
        decay = min(self.decay, (1 + self.steps) / (self.warm_up + self.steps)) if self.warm_up else self.decay
        self.steps += 1
        current = _model(runner).state_dict()
        averaged: List[torch.Tensor] = []
        weights: List[torch.Tensor] = []
        for name, value in current.items():
            if value.is_floating_point():
                averaged.append(self.average[name])
                weights.append(value.detach())
            else:
                self.average[name].copy_(value)
        torch._foreach_lerp_(averaged, weights, 1.0 - decay)

    @contextlib.contextmanager
    def applied(self, runner: Any) -> Iterator[None]:
        """The model with averaged weights inside, with its own again outside."""
        model = _model(runner)
        own = {k: v.detach().clone() for k, v in model.state_dict().items()}
        _copy_into(model, self.average)
        try:
            yield
        finally:
            _copy_into(model, own)

    def state_dict(self) -> Dict[str, Any]:
        return dict(self.average)

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        if self.average:  # in a run that goes back to an earlier checkpoint
            self.replace(state)
        else:
            self._loaded = dict(state)

    @torch.no_grad()
    def replace(self, values: Mapping[str, torch.Tensor]) -> None:
        """Other values for some of the averages, by name; also before the run begins, when they only wait to be taken."""
        if self.average:
            for name, value in values.items():
                self.average[name].copy_(value)
        elif self._loaded is not None:
            self._loaded.update(values)


class AverageSteps:
    """Carries the step count of a :class:`WeightAverageHook` in checkpoints, apart from its tensors."""

    def __init__(self, owner: WeightAverageHook):
        self.owner = owner

    def state_dict(self) -> Dict[str, Any]:
        return {'steps': self.owner.steps, 'decay': self.owner.decay}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.owner.steps = int(state['steps'])


def _model(runner: Any) -> torch.nn.Module:
    return getattr(runner.model, 'module', runner.model)


@torch.no_grad()
def _copy_into(model: torch.nn.Module, state: Dict[str, torch.Tensor]) -> None:
    for name, value in model.state_dict().items():
        value.copy_(state[name])
