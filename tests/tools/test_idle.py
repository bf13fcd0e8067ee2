"""benchmarks/idle.py: gaps of a trace, summed over slices, and what the host did meanwhile."""
import gzip
import importlib.util
import json

import pytest
from testing import REPO

spec = importlib.util.spec_from_file_location('idle_benchmark', REPO / 'benchmarks' / 'idle.py')
idle = importlib.util.module_from_spec(spec)
spec.loader.exec_module(idle)


def event(cat, name, begin_ms, end_ms):
    return {'ph': 'X', 'cat': cat, 'name': name, 'ts': 1e6 + 1e3 * begin_ms, 'dur': 1e3 * (end_ms - begin_ms)}


EVENTS = [event('kernel', 'third', 11, 12), event('kernel', 'first', 0, 2), event('gpu_memcpy', 'beside', 1, 5),
          event('kernel', 'second', 4, 4.5), event('kernel', 'last', 12.5, 13), event('cpu_op', 'aten::match', 4, 12),
          event('cpu_op', 'aten::before', 0, 1), {'ph': 'i', 'name': 'mark', 'ts': 0}]


def write(path, content):
    path.write_bytes(gzip.compress(json.dumps(content).encode()) if path.suffix == '.gz' else json.dumps(content).encode())
    return str(path)


def test_gaps_are_what_no_stream_fills():
    events = [one for one in EVENTS if one['ph'] == 'X']
    found = idle.gaps(events)
    assert [(round(gap.start, 6), round(gap.length, 6), gap.until) for gap in found] == [(5, 6, 'third'), (12, 0.5, 'last')]
    assert idle.gaps(events[:1]) == []


@pytest.mark.parametrize('name', ['trace.json', 'trace.json.gz'])
def test_page(tmp_path, capsys, name):
    path = write(tmp_path / name, {'traceEvents': EVENTS})
    assert idle.main([path, '--slice', '10', '--longest', '1', '--out', str(tmp_path / 'new' / 'page.md')]) == 0
    shown = capsys.readouterr().out
    assert '5 kernels and copies to the end of the last: 13.0 ms, of which the device was idle 6.5 ms in 2 gaps' in shown
    assert '| 0 to 10 | 6.0 |' in shown and '| 10 to 20 | 0.5 |' in shown
    assert '| 5.0 | 6.00 | aten::match | third |' in shown and 'last |' not in shown
    page = (tmp_path / 'new' / 'page.md').read_text()
    assert shown.strip() in page and name in page and str(tmp_path) not in page


def test_files_that_are_no_traces(tmp_path, capsys):
    cut = tmp_path / 'cut.json.gz'
    cut.write_bytes(gzip.compress(json.dumps({'traceEvents': EVENTS}).encode())[:60])
    damaged, whole = tmp_path / 'damaged.json.gz', bytearray(gzip.compress(json.dumps({'traceEvents': EVENTS}).encode()))
    whole[20:40] = bytes(20)
    damaged.write_bytes(whole)
    wrong = tmp_path / 'wrong.json'
    wrong.write_text('{')
    for path in (str(tmp_path / 'nowhere.json'), str(cut), str(damaged), str(wrong), write(tmp_path / 'cpu.json', {'traceEvents': EVENTS[5:]}),
                 write(tmp_path / 'list.json', [1])):
        assert idle.main([path]) == 2
        assert capsys.readouterr().err.startswith(f'error: {path}: ')
    with pytest.raises(SystemExit):
        idle.main(['trace.json', '--slice', '0'])
    capsys.readouterr()
    path = write(tmp_path / 'trace.json', {'traceEvents': EVENTS})
    assert idle.main([path, '--out', str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert 'idle 6.5 ms' in said.out and said.err.startswith(f'error: --out {tmp_path}: ')
