"""The benchmark of predictions: a row per step, latencies of what was run, and its table and files."""
import contextlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from mmdet3d_ext.engine.inference import FoldError, benchmark

REPO = Path(__file__).resolve().parents[3]
TINY = str(REPO / 'configs' / 'synthetic' / 'multitask_tiny.yaml')
CPU = torch.device('cpu')
spec = importlib.util.spec_from_file_location('small_detectors', Path(__file__).with_name('test_predictor.py'))
small = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small)


def test_rows():
    batches = [small.frame('camera', seed=seed) for seed in range(2)]
    model = small.detector('camera')
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = list(benchmark.inference({}, CPU, 2, 'bf16', iterations=2, warmup=0, batches=batches, model=model))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [row['variant'] for row in rows] == ['plain', *(name for name, _ in benchmark.STEPS)]
    for row in rows:
        assert row['mode'] == 'infer' and row['parts']['heads.object.candidates'] > 0
        assert row['latency_ms']['p90'] >= row['latency_ms']['median'] == row['step_ms'] > 0
    assert [row['geometry'] for row in rows[:3]] == [{'hits': 0, 'misses': 0}] * 2 + [{'hits': 2, 'misses': 0}]
    assert 'batch norms folded' in rows[1]['did'] and 'stored as autocast' in rows[3]['did']
    text = benchmark.table(rows, {'runs': [dict(rows[0], step_ms=4 * rows[0]['step_ms'])]})
    assert text.count('\n| 2 | bf16 |') == len(rows) and '| 2 of 2 |' in text and '4.00x |' in text.split('\n')[2]


@pytest.mark.parametrize('values, expected', [(range(1, 11), 9), (range(1, 21), 18), ([5], 5), ([1, 2], 2)])
def test_ninetieth_percentile(values, expected):
    assert benchmark.percentile(list(values), 0.9) == expected


def test_tool(tmp_path, capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location('benchmark_tool_for_inference', REPO / 'tools' / 'benchmark.py')
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    times = []
    monkeypatch.setattr(benchmark, '_times', lambda *args, kept=benchmark._times: times.append(kept(*args)) or times[-1])
    words = ['--mode', 'infer', '--batch', '1', '--plain', '--iterations', '1', '--warmup', '0', '--points', '500']
    assert tool.main([TINY, *words, '--out', str(tmp_path)]) == 0
    content = json.loads((tmp_path / 'benchmark.json').read_text())
    assert [row['variant'] for row in content['runs']] == ['plain']
    assert '| 1 | fp32 | plain |' in capsys.readouterr().out
    assert (tmp_path / 'trace_infer_1_fp32_plain.json.gz').stat().st_size > 1000

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, 'STEPS', (('+ nothing', lambda *_: None),))
    monkeypatch.setattr(benchmark, '_times', lambda *args: times.pop() if times else stopped())
    with contextlib.suppress(KeyboardInterrupt):
        tool.main([TINY, *[word for word in words if word != '--plain'], '--out', str(tmp_path / 'stopped')])
    found = json.loads((tmp_path / 'stopped' / 'benchmark.json').read_text())['runs']
    assert [row['variant'] for row in found] == ['plain'], 'what was measured before a stop is there'


def test_all_rows_are_timed_before_one_is_profiled(monkeypatch):
    """A process that was profiled is slower ever after."""
    order, times, profile = [], benchmark._times, benchmark.profile_step
    monkeypatch.setattr(benchmark, '_times', lambda *args: order.append('times') or times(*args))
    monkeypatch.setattr(benchmark, 'profile_step', lambda *args: order.append('profile') or profile(*args))
    settings = dict(iterations=1, warmup=0, batches=[small.frame('lidar')], model=small.detector('lidar'))
    rows = list(benchmark.inference({}, CPU, 2, 'fp32', **settings))
    assert order == ['times'] * 3 + ['profile'] * 3 and all({'step_ms', 'kernels', 'did'} <= set(row) for row in rows)
    (alone,) = benchmark.inference({}, CPU, 2, 'fp32', plain_only=True, profile=False, **settings)
    (later,) = benchmark.inference({}, CPU, 2, 'fp32', plain_only=True, times=False, **settings)
    assert 'kernels' not in alone and 'step_ms' not in later and set(alone) | set(later) == set(rows[0])


def test_a_step_that_cannot_be_done_is_said_in_its_row(monkeypatch):
    def refuse(predictor, batch):
        raise FoldError('another output')

    monkeypatch.setattr(benchmark, 'STEPS', (('+ norms folded', refuse),))
    rows = list(benchmark.inference({}, CPU, 2, 'fp32', iterations=1, warmup=0, batches=[small.frame('lidar')], model=small.detector('lidar')))
    assert [row['did'] for row in rows] == [None, 'not done: another output']
