"""Target heatmaps: one Gaussian per object, its radius from the object's size (CornerNet, Law and Deng 2018)."""
from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 2 ** 23  # most numbers in the (objects, X, Y) intermediate, 32 MiB; further objects are drawn after those


def gaussian_radius(length: Tensor, width: Tensor, min_overlap: float) -> Tensor:
    """Radius in cells within which a shifted box of ``length`` x ``width`` cells still overlaps by ``min_overlap``.

    This is CornerNet's published formula *with* its known slip (all three roots are divided by 2, not by 2a). Every
    CenterPoint and TransFusion model was trained with these radii, so it is kept on purpose.
    """
    total, area = length + width, length * width

    def root(a: float, b: Tensor, c: Tensor) -> Tensor:
        return (b + (b * b - 4 * a * c).clamp(min=0).sqrt()) / 2

    touching = root(1.0, total, area * (1 - min_overlap) / (1 + min_overlap))
    inside = root(4.0, 2 * total, (1 - min_overlap) * area)
    outside = root(4 * min_overlap, -2 * min_overlap * total, (min_overlap - 1) * area)
    return torch.minimum(torch.minimum(touching, inside), outside)


def draw_gaussians(heatmap: Tensor, cells: Tensor, radii: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """Draw one Gaussian per object of each sample into ``heatmap`` in place, keeping the larger value where they meet.

    No value is read on the host, so nothing waits for the device.

    Args:
        heatmap: (B, C, X, Y) float.
        cells: (B, G, 2) whole cell (x, y) of each centre; the value there becomes exactly 1.
        radii: (B, G) whole radius in cells; sigma is (2 radius + 1) / 6 and nothing is drawn beyond the radius (a
            square).
        labels: (B, G) class of each object; read only where ``valid``.
        valid: (B, G) bool.

    Returns:
        Tensor: ``heatmap``.
    """
    batch, num_classes, x_cells, y_cells = heatmap.shape
    planes = heatmap.view(batch * num_classes, -1)
    xs = torch.arange(x_cells, device=heatmap.device)
    ys = torch.arange(y_cells, device=heatmap.device)
    samples = torch.arange(batch, device=heatmap.device)[:, None]
    plane = (samples * num_classes + labels.clamp(0, num_classes - 1)).flatten()
    cells, radii, valid = (values.flatten(0, 1) for values in (cells, radii, valid))
    step = max(1, _AT_ONCE // (x_cells * y_cells))
    for start in range(0, len(cells), step):
        part = slice(start, start + step)
        radius = radii[part, None]
        sigma = (2 * radius + 1).float() / 6
        along_x = _bump(xs[None] - cells[part, 0:1], radius, sigma) * valid[part, None]
        along_y = _bump(ys[None] - cells[part, 1:2], radius, sigma)
        drawn = (along_x[:, :, None] * along_y[:, None, :]).flatten(1)
        planes.scatter_reduce_(0, plane[part, None].expand_as(drawn), drawn.to(heatmap.dtype), 'amax', include_self=True)
    return heatmap


def _bump(offset: Tensor, radius: Tensor, sigma: Tensor) -> Tensor:
    return torch.exp(-(offset * offset) / (2 * sigma * sigma)) * (offset.abs() <= radius)
