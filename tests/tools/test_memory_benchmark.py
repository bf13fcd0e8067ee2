"""The report of benchmarks/memory.py, from rows as a GPU would give them."""
import importlib.util
import json
import subprocess
import sys

import pytest
from testing import REPO

spec = importlib.util.spec_from_file_location('memory_benchmark', REPO / 'benchmarks' / 'memory.py')
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


def content():
    """Every row measured at what was predicted, but for two."""
    rows = []
    for number, item in enumerate(benchmark.ROWS):
        peak = 9000.0 + 100 * number
        measured = dict(peak_mib=peak, reserved_mib=peak * 1.1, context_mib=500.0, step_ms=400.0, seconds=5.0)
        if 'stage' in item['name']:
            measured['head_mib'] = 2000.0 if 'head' in item['switch'] else 6000.0
        rows.append(dict(item, measured=measured, predicted=dict(peak_mib=peak)))
    rows[1]['measured'].update(step_ms=500.0)
    rows[2]['predicted']['peak_mib'] *= 1.2
    next(row for row in rows if row['name'] == 'stage 2, 800' and row['samples'] == 2)['measured'] = {'error': 'out of memory: no'}
    return dict(command='python benchmarks/memory.py', device='a GPU', torch='2', date='2026-01-01', cap_gib=31.7, rows=rows)


def test_report():
    text = benchmark.report(content())
    assert 'Largest deviation of the prediction: 20.0%, median 0.0%.' in text
    assert '| Stage 1, fp16, 1 sample | 10.0 | 9.77 | yes |' in text
    assert '| Stage 2, fp16, 2 samples, within the cap | 31.7 | out of memory: no | no |' in text
    assert '5.86 -> 1.95 (67%) | yes |' in text and '| and costs at most 30% of the step\'s time | - | +25% | yes |' in text
    assert '| stage 2, 800, 1 x fp16, head recomputed | -100 | -100 | 6,000 -> 2,000 | +25% |' in text
    assert 'Beside the allocator: 500 to 500 MiB' in text and '10.0% to 10.0%' in text


def test_every_row_is_a_configuration_of_its_own():
    labels = [benchmark.label(item) for item in benchmark.ROWS]
    assert len(set(labels)) == len(labels)
    for item in benchmark.ROWS:
        cfg = benchmark.settings(item)
        if item['switch']:
            assert cfg['model'].get('checkpoint') or cfg['model'].get('channels_last')
    for _, name, precision, samples, switch, _ in benchmark.GOALS:
        assert benchmark.label(dict(name=name, precision=precision, samples=samples, switch=switch)) in labels


def test_a_worker_that_dies_costs_its_row_only(tmp_path, monkeypatch):
    """The row that ends the process is marked; the others are measured by a new one."""
    script = tmp_path / 'worker.py'
    script.write_text('import json, os, sys\n'
                      'for number, item in json.load(open(sys.argv[2])):\n'
                      '    if item["name"] == "dies":\n'
                      '        os._exit(9)\n'
                      '    open(sys.argv[3], "a").write(json.dumps([number, {"step_ms": 1.0, "seconds": 0.0}]) + "\\n")\n')
    monkeypatch.setattr(benchmark, '__file__', str(script))
    rows = [benchmark.row(name, benchmark.TINY, 1, 'fp32') for name in ('a', 'dies', 'b')]
    arguments = type('Arguments', (), dict(device='cpu', cap=1.0, iterations=1))
    seen = []
    found = benchmark.measure_all(rows, arguments, lambda so_far: seen.append(sorted(so_far)))
    assert seen[0] == [0] and seen[-1] == [0, 1, 2], 'what is there is told as it comes'
    assert found[0] == found[2] == {'step_ms': 1.0, 'seconds': 0.0}
    assert found[1] == {'error': 'the process ended with 9 or was stuck'}


@pytest.mark.parametrize('words, message', [(['--rows', 'stage 3'], "'stage 3' is in no name"), (['--again', 'x.json', '--rows', 'a'],
                                                                                                  'takes all rows')])
def test_mistakes(words, message):
    done = subprocess.run([sys.executable, str(REPO / 'benchmarks' / 'memory.py'), *words], capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize('words', [[], ['--out', 'elsewhere']])
def test_predicting_again_keeps_the_measurements(tmp_path, words):
    earlier = content()
    earlier['rows'] = [dict(benchmark.TINY_ROWS[0], measured=dict(step_ms=1.0, peak_mib=300.0, reserved_mib=310.0, context_mib=1.0),
                            predicted=dict(error='none yet'))]
    path = tmp_path / 'memory.json'
    path.write_text(json.dumps(earlier))
    subprocess.run([sys.executable, str(REPO / 'benchmarks' / 'memory.py'), '--again', str(path), '--planners', '1', *words], check=True,
                   capture_output=True, cwd=tmp_path)
    out = tmp_path / words[-1] if words else tmp_path
    assert (json.loads(path.read_text()) == earlier) == bool(words), 'the file itself is written where no other place is named'
    again = json.loads((out / 'memory.json').read_text())
    assert again['rows'][0]['measured'] == earlier['rows'][0]['measured'] and again['device'] == 'a GPU'
    assert again['rows'][0]['predicted']['peak_mib'] > 100
    assert '| tiny | 1 | fp32 | - | 300 |' in (out / 'memory.md').read_text()
