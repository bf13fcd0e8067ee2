"""CUDA graphs of parts: what is recorded and held, when a part runs as before, and the same results on a GPU."""
import contextlib
import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from mmdet3d_ext.engine.inference import Predictor
from mmdet3d_ext.engine.inference.graphs import GraphedParts, Outside, _waits_are_errors, capturable
from mmdet3d_ext.engine.timing import parts_of

spec = importlib.util.spec_from_file_location('small_detectors_for_graphs', Path(__file__).with_name('test_predictor.py'))
small = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small)


def test_parts_with_points_and_voxels_are_left_out():
    names = set(capturable(parts_of(small.detector('camera', 'lidar', 'radar'))))
    assert {'encoders.camera.backbone', 'encoders.camera.vtransform.depthnet', 'fuser', 'heads.object', 'heads.map'} <= names
    assert not any(name.startswith(('encoders.lidar', 'encoders.radar')) or name.endswith('vtransform') for name in names)


def test_without_a_gpu_parts_run_as_before():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU()).eval()
    x = torch.randn(4, 2)
    with torch.no_grad():
        want = model(x)
        graphs = GraphedParts({'0': model[0]})
        assert torch.equal(model(x), want) and not graphs.failed
        graphs.remove()
        assert 'forward' not in vars(model[0]) and torch.equal(model(x), want)
    with pytest.raises(ValueError, match='need a GPU'):
        Predictor(model, torch.device('cpu')).record_graphs({})


def test_tables_of_a_cache_are_held():
    table, weight = torch.randn(5, 3), torch.randn(3, 3)
    with Outside() as outside:
        row = table.t()[:, 1]  # a view of it
        torch.mm(weight, (row * 2)[:, None]).relu_()
    assert {t.untyped_storage().data_ptr() for t in outside.tensors()} == {t.untyped_storage().data_ptr() for t in (table, weight)}


@pytest.mark.gpu
@pytest.mark.parametrize('head', small.HEADS)
@pytest.mark.parametrize('dtype', [None, torch.float16])
def test_replays_give_the_same(head, dtype):
    device, model = torch.device('cuda'), small.detector('camera', 'lidar', head=head)
    frames = [small.frame('camera', 'lidar', seed=seed) for seed in range(3)]
    frames += [dict(frames[0], points=[cloud[:count] for cloud, count in zip(frames[0]['points'], counts)])
               for counts in ((70, 200), (1, 0), (0, 0))]  # other numbers of points, for parts of fixed shapes the same recording
    predictor = Predictor(model, device, dtype)
    predictor.prepare(frames[0])
    want = [predictor(x) for x in frames]
    graphs = predictor.record_graphs(frames[0])
    assert not graphs.failed, graphs.failed
    for _ in range(2):
        for x, expected in zip(frames, want, strict=True):
            small.close(predictor(x), expected, atol=1e-3 if dtype is None else 2e-2)
    torch.cuda.empty_cache()
    first = predictor(frames[0])
    kept = [output['masks_bev'].clone() for output in first]
    predictor(frames[1])
    assert all(torch.equal(output['masks_bev'], mask) for output, mask in zip(first, kept, strict=True)), 'results are copies'
    other = {key: value[:1] if isinstance(value, (torch.Tensor, list)) else value for key, value in frames[0].items()}
    assert len(predictor(other)) == 1, 'another batch size runs as before'


def test_waits_are_refused_quietly_and_for_a_while(monkeypatch):
    modes = [1]

    def refuse(mode):
        modes.append(mode)
        warnings.warn('a prototype feature', stacklevel=1)

    monkeypatch.setattr(torch.cuda, 'get_sync_debug_mode', lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, 'set_sync_debug_mode', refuse)
    with pytest.warns(UserWarning) as caught, contextlib.suppress(RuntimeError), _waits_are_errors():
        assert modes == [1, 'error'] and not caught.list
        raise RuntimeError('synchronizing')
    assert modes == [1, 'error', 1]


class Waits(nn.Linear):
    """Asks for a value."""

    def forward(self, x):
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


class Breaks(nn.Linear):
    """Runs anywhere but in a recording."""

    def forward(self, x):
        torch.cuda.synchronize()
        return super().forward(x)


@pytest.mark.gpu
@pytest.mark.parametrize('kind, why', [(Waits, 'synchroniz'), (Breaks, 'captur')])
def test_a_part_that_cannot_be_recorded_is_left_as_it_is(kind, why):
    model = nn.Sequential(nn.Linear(3, 3), kind(3, 3), nn.Linear(3, 3), kind(3, 3), nn.Linear(3, 3)).cuda().eval()
    frames, stream = [torch.full((2, 3), value, device='cuda') for value in (1.0, 2.0)], torch.cuda.current_stream()
    with torch.no_grad():
        want = [model(x) for x in frames]
        torch.manual_seed(5)
        drawn = [torch.rand(3, device='cuda') for _ in range(2)]
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3, device='cuda'), drawn[0])
        graphs = GraphedParts(dict(model.named_children()))
        for _ in range(2):
            for x, expected in zip(frames, want, strict=True):
                torch.testing.assert_close(model(x), expected)
        assert set(graphs.failed) == {'1', '3'} and all(why in text for text in graphs.failed.values()), graphs.failed
    assert torch.equal(torch.rand(3, device='cuda'), drawn[1]), 'random numbers are drawn as if nothing had been recorded'
    assert torch.cuda.current_stream() == stream and torch.cuda.get_sync_debug_mode() == 0
    torch.arange(5.0).pin_memory().cuda(non_blocking=True)
    torch.cuda.empty_cache()
