"""Target heatmaps against a slow loop."""
import math

import pytest
import torch

from mmdet3d_ext.models.heads.bbox.gaussian import draw_gaussians, gaussian_radius


def slow_draw(shape, cells, radii, labels, valid):
    heatmap = torch.zeros(shape)
    for (cx, cy), radius, label, use in zip(cells.tolist(), radii.tolist(), labels.tolist(), valid.tolist(), strict=True):
        if not use:
            continue
        sigma = (2 * radius + 1) / 6
        for x in range(max(0, cx - radius), min(shape[1], cx + radius + 1)):
            for y in range(max(0, cy - radius), min(shape[2], cy + radius + 1)):
                value = math.exp(-((x - cx) ** 2 + (y - cy) ** 2) / (2 * sigma ** 2))
                heatmap[label, x, y] = max(heatmap[label, x, y], value)
    return heatmap


def test_draws_what_the_loop_draws():
    generator = torch.Generator().manual_seed(3)
    shape, n = (3, 9, 14), 150  # more objects than are drawn at once, on a map that is not square, corners included
    cells = torch.stack([torch.randint(0, size, (n,), generator=generator) for size in shape[1:]], 1)
    cells[:4] = torch.tensor([[0, 0], [8, 13], [0, 13], [8, 0]])
    radii = torch.randint(0, 4, (n,), generator=generator)
    labels = torch.randint(0, 3, (n,), generator=generator)
    valid = torch.rand(n, generator=generator) < 0.15
    valid[:4] = True
    labels[~valid] = -1  # must not be read
    expected = slow_draw(shape, cells, radii, labels, valid)
    drawn = draw_gaussians(torch.zeros(shape), cells, radii, labels, valid)
    assert (drawn - expected).abs().max() < 1e-6
    assert torch.equal(drawn > 0, expected > 0)
    assert (drawn[labels[valid], cells[valid, 0], cells[valid, 1]] == 1).all()


def test_draws_nothing_for_no_object():
    drawn = draw_gaussians(torch.zeros(2, 4, 5), torch.zeros(0, 2).long(), torch.zeros(0).long(), torch.zeros(0).long(),
                           torch.zeros(0).bool())
    assert drawn.abs().sum() == 0


@pytest.mark.parametrize('length,width', [(2.5, 1.1), (0.4, 0.4), (12.0, 2.0), (1e-3, 5.0)])
@pytest.mark.parametrize('overlap', [0.1, 0.5, 0.7])
def test_radius_is_the_published_formula(length, width, overlap):
    def root(a, b, c):
        return (b + math.sqrt(b * b - 4 * a * c)) / 2
    area, total = length * width, length + width
    expected = min(root(1, total, area * (1 - overlap) / (1 + overlap)), root(4, 2 * total, (1 - overlap) * area),
                   root(4 * overlap, -2 * overlap * total, (overlap - 1) * area))
    found = gaussian_radius(torch.tensor([length, width]), torch.tensor([width, length]), overlap)
    assert found.tolist() == pytest.approx([expected, expected], rel=1e-5, abs=1e-6)
