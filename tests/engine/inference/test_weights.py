"""Which weights are stored in the type that autocast casts them to, and that results stay those of autocast."""
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mmdet3d_ext.engine.inference.weights import StoreError, store_cast_weights

BF16 = torch.bfloat16


class Mixed(nn.Module):
    """A layer of every kind of use."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.both = nn.Linear(4, 4)          # once under autocast, once outside it
        self.outside = nn.Linear(4, 4)
        self.parts = nn.Parameter(torch.randn(8, 4))  # read in halves
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.both.weight
        self.unused = nn.Linear(4, 4)
        self.register_buffer('table', torch.randn(4, 4))
        self.register_buffer('shift', torch.randn(4))

    def forward(self, x):
        x = self.norm(self.conv(x)).mean((2, 3))
        x = self.both(x)
        with torch.autocast('cpu', enabled=False):
            x = self.outside(self.both(x.float()))
        first, second = self.parts.chunk(2)
        x = F.linear(F.linear(x, first), second)
        return x @ self.table + self.shift


def test_only_what_nothing_reads_in_float32_is_stored():
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(2, 3, 6, 6)
    plain = copy.deepcopy(model)

    def run(m):
        with torch.no_grad(), torch.autocast('cpu', BF16):
            return m(x)

    report = store_cast_weights(model, lambda: run(model), BF16)
    assert set(report.stored) == {'conv.weight', 'conv.bias', 'parts', 'table'}
    assert {name for name, why in report.kept.items() if why == 'was not read'} == {'unused.weight', 'unused.bias', 'tied.bias'}
    assert report.kept['both.weight'] == report.kept['shift'] == 'is read in float32'
    assert model.conv.weight.dtype == model.table.dtype == BF16 and model.both.weight is model.tied.weight
    assert report.difference == 0 and torch.equal(run(model), run(plain))


def test_weights_beyond_the_range_stay():
    model, x = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).eval(), torch.zeros(2, 3)
    with torch.no_grad():
        model[0].weight[0, 0] = 1e6

    def run():
        with torch.autocast('cpu', torch.float16):
            return torch.nan_to_num(model(x))

    report = store_cast_weights(model, run, torch.float16)
    assert report.stored == ('1.weight',) and 'not finite' in report.kept['0.weight']


def test_a_weight_whose_type_decides_is_found_out_and_put_back():
    class Sneaky(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1 if self.weight.dtype == torch.float32 else 2)

    model, x = Sneaky(3, 3).eval(), torch.randn(2, 3)

    def run():
        with torch.autocast('cpu', BF16):
            return model(x)

    with pytest.raises(StoreError, match='differs by'):
        store_cast_weights(model, run, BF16)
    assert model.weight.dtype == torch.float32 and model.bias.dtype == torch.float32
