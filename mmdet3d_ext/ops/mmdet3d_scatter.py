"""One call that gives mmdet3d's and mmcv's own models the operators of this package.

mmcv's ``DynamicScatter`` (mmcv-full 1.7.2, max reduction) loses NaN in the forward pass and then, for a voxel channel whose points
are all NaN, writes one row behind the gradient's buffer in the backward pass: wherever training diverges, it overwrites other
tensors or faults with an illegal memory access. A lower learning rate, gradient clipping or a longer warm-up avoid the NaN; they do
not cure the fault. The operator here keeps NaN visible in the loss and every gradient inside its buffer.
"""

from __future__ import annotations

import sys
from typing import List, Tuple

import torch

from .point_to_voxel import DynamicScatter, dynamic_point_to_voxel


def dynamic_scatter(feats: torch.Tensor, coors: torch.Tensor, reduce_type: str = 'max') -> Tuple[torch.Tensor, torch.Tensor]:
    """Drop-in for ``mmcv.ops.dynamic_scatter``: (P, C), (P, 3 or 4) -> (V, C), (V, 3 or 4)."""
    return dynamic_point_to_voxel(feats, coors, reduce_type)[:2]


def patch_mmdet3d_scatter() -> List[str]:
    """Replace ``DynamicScatter`` and ``dynamic_scatter`` in mmcv, mmdet3d and every module that has imported them.

    Call it before models are built: models that exist keep the operator they were built with. Calling it again changes nothing.

    Returns:
        The modules in which something was replaced.
    """
    from mmcv.ops import scatter_points

    originals = {
        'DynamicScatter': _original(scatter_points, 'DynamicScatter'),
        'dynamic_scatter': _original(scatter_points, 'dynamic_scatter'),
    }
    replacements = {'DynamicScatter': DynamicScatter, 'dynamic_scatter': dynamic_scatter}
    import mmdet3d.models  # noqa: F401  (its encoders import the class by name)

    changed = []
    for name, module in list(sys.modules.items()):
        names = vars(module) if module is not None and hasattr(module, '__dict__') else {}
        for key, original in originals.items():
            if names.get(key) is original:
                setattr(module, key, replacements[key])
                changed.append(name)
    return sorted(set(changed))


def _original(module, name: str):
    """mmcv's own object, also after a first call has replaced it."""
    kept = f'_mmcv_{name}'
    if not hasattr(module, kept):
        setattr(module, kept, getattr(module, name))
    return getattr(module, kept)
