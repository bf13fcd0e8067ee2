"""Models from configurations."""
from __future__ import annotations

from typing import Any, Mapping, Optional

from torch import nn

from ..registry import MODELS, profile


def build_model(cfg: Mapping[str, Any], compat: Optional[str] = None) -> nn.Module:
    """Build the ``model`` section of a configuration.

    Args:
        cfg: mapping with ``type`` and the arguments of that class.
        compat: None, or ``'reference'`` for the behaviours that trained BEVFusion checkpoints depend on; handed to
            every part that takes it.

    Weights are as the constructors leave them; call ``init_weights()`` for pretrained files.
    """
    with profile(compat):
        return MODELS.build(cfg)
