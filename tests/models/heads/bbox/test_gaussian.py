"""Target heatmaps against a slow loop."""
import math

import pytest
import torch

from mmdet3d_ext.models.heads.bbox import gaussian
from mmdet3d_ext.models.heads.bbox.gaussian import draw_gaussians, gaussian_radius


def slow_draw(shape, cells, radii, labels, valid):
    """One sample: its (C, X, Y)."""
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


@pytest.mark.parametrize('at_once', [1, 126 * 7, 126 * 150, gaussian._AT_ONCE])
def test_draws_what_the_loop_draws(monkeypatch, at_once):
    """Parts that end inside a sample; of one object, though it alone is more than at once."""
    monkeypatch.setattr(gaussian, '_AT_ONCE', at_once)
    generator = torch.Generator().manual_seed(3)
    shape, batch, n = (3, 9, 14), 4, 50  # a map that is not square, corners included
    cells = torch.stack([torch.randint(0, size, (batch, n), generator=generator) for size in shape[1:]], -1)
    cells[:, :4] = torch.tensor([[0, 0], [8, 13], [0, 13], [8, 0]])
    radii = torch.randint(0, 4, (batch, n), generator=generator)
    labels = torch.randint(0, 3, (batch, n), generator=generator)
    valid = torch.rand((batch, n), generator=generator) < 0.15
    valid[:, :4] = True
    valid[2] = False  # a sample without objects between others
    labels = torch.where(valid, labels, torch.randint(-1, 9, (batch, n), generator=generator))  # must not be read
    expected = torch.stack([slow_draw(shape, *sample) for sample in zip(cells, radii, labels, valid, strict=True)])
    drawn = draw_gaussians(torch.zeros(batch, *shape), cells, radii, labels, valid)
    assert (drawn - expected).abs().max() < 1e-6
    assert torch.equal(drawn > 0, expected > 0)
    for sample in (0, 1, 3):
        used = valid[sample]
        assert (drawn[sample, labels[sample, used], cells[sample, used, 0], cells[sample, used, 1]] == 1).all()


def test_draws_nothing_for_no_object():
    drawn = draw_gaussians(torch.zeros(3, 2, 4, 5), torch.zeros(3, 0, 2).long(), torch.zeros(3, 0).long(), torch.zeros(3, 0).long(),
                           torch.zeros(3, 0).bool())
    assert drawn.shape == (3, 2, 4, 5) and drawn.abs().sum() == 0


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
