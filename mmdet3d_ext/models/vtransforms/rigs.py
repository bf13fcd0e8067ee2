"""Where the pixels of a camera rig fall in the BEV grid: worked out once for as long as the matrices stay the same."""
from __future__ import annotations

from collections import OrderedDict
from typing import Any, Callable, Hashable, Mapping, Optional

import torch

# Everything that BaseTransform.geometry depends on besides the configuration.
RIG_MATRICES = ('camera_intrinsics', 'camera2lidar', 'img_aug_matrix', 'lidar_aug_matrix')


def rig_key(inputs: Mapping[str, torch.Tensor]) -> Optional[Hashable]:
    """What tells one set of :data:`RIG_MATRICES` from any other: all their bits. None if a matrix is missing.

    Matrices on a GPU are read in one copy, for which the host waits: take the key before the device gets other work, or from the
    matrices as the loader gave them.
    """
    matrices = [inputs.get(name) for name in RIG_MATRICES]
    if any(m is None for m in matrices):
        return None
    shapes = tuple((tuple(m.shape), m.dtype) for m in matrices)
    flat = torch.cat([m.detach().reshape(-1).double() for m in matrices])  # float64 holds every float32 as it is
    return shapes, flat.cpu().numpy().tobytes()


class RigCache:
    """The results for the rigs seen last.

    Args:
        most: rigs kept. One at 6 x 118 x 32 x 88 points is 24 MB per grid.

    Attributes:
        hits, misses: of :meth:`get`, since the beginning.
    """

    def __init__(self, most: int):
        if isinstance(most, bool) or int(most) != most or most < 1:
            raise ValueError(f'rigs: a cache of geometries keeps at least one, got {most!r}')
        self.most, self.hits, self.misses = int(most), 0, 0
        self._kept: 'OrderedDict[Hashable, Any]' = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of ``key``; made if it is not there, in place of the one that was not used for longest."""
        if key in self._kept:
            self.hits += 1
            self._kept.move_to_end(key)
            return self._kept[key]
        self.misses += 1
        with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be used in a later backward pass
            value = make()
        self._kept[key] = value
        if len(self._kept) > self.most:
            self._kept.popitem(last=False)
        return value

    def __len__(self) -> int:
        return len(self._kept)

    def __deepcopy__(self, memo: dict) -> 'RigCache':
        return RigCache(self.most)  # the copy may get another grid or device

    def __reduce__(self):
        return RigCache, (self.most,)
