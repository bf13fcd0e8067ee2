"""Small files: the old or the whole new content, and nothing beside them after a failure."""
import json
import math
import os

import pytest

from mmdet3d_ext.engine import whole_files
from mmdet3d_ext.engine.whole_files import write_json, write_whole


def test_text_and_json(tmp_path):
    path = tmp_path / 'a.txt'
    write_whole('ä\n', path)
    write_whole('new\n', str(path))
    assert path.read_text(encoding='utf-8') == 'new\n'
    write_json({'b': 1.5, 'a': math.nan}, path)
    found = json.loads(path.read_text())
    assert list(found) == ['b', 'a'] and found['b'] == 1.5 and math.isnan(found['a']) and path.read_text().endswith('}\n')
    assert os.listdir(tmp_path) == ['a.txt']


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_alone(tmp_path, monkeypatch, error):
    path = tmp_path / 'a.txt'
    path.write_text('old')

    def fail(*_):
        assert len(os.listdir(tmp_path)) == 2, 'what is new lies beside it until then'
        raise error

    monkeypatch.setattr(whole_files.os, 'replace', fail)
    with pytest.raises(type(error)):
        write_whole('new', path)
    assert path.read_text() == 'old' and os.listdir(tmp_path) == ['a.txt']


def test_values_that_are_no_json_leave_the_old_file_alone(tmp_path):
    path = tmp_path / 'a.json'
    path.write_text('old')
    with pytest.raises(TypeError):
        write_json({'a': object()}, path)
    assert path.read_text() == 'old' and os.listdir(tmp_path) == ['a.json']
