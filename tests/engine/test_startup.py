"""What a program says about its configuration before it works with it."""
import pytest

from mmdet3d_ext.engine.launch import UserError
from mmdet3d_ext.engine.startup import load_settings


@pytest.mark.parametrize('local_rank, shown', [(0, True), (1, False)])
def test_differences_to_the_reference_are_one_line_each_by_one_rank(tmp_path, monkeypatch, capsys, local_rank, shown):
    for name, value in dict(RANK=local_rank, WORLD_SIZE=2, LOCAL_RANK=local_rank, MASTER_ADDR='127.0.0.1').items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / 'a.yaml').write_text('total_epochs: 3\nradar_jitter: 0.5\n')
    assert load_settings(str(tmp_path / 'a.yaml'), []).max_epochs == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (2 if shown else 0)
    if shown:
        assert lines[0].startswith('warning: ') and "a.yaml:1: 'total_epochs' is called 'max_epochs' here" in lines[0]
        assert "a.yaml:2: key 'radar_jitter': has no effect" in lines[1]


def test_a_mistake_comes_after_what_was_said_before_it(tmp_path, capsys):
    (tmp_path / 'a.yaml').write_text('total_epochs: 3\noptimzer: {lr: 1}\n')
    with pytest.raises(UserError, match="a.yaml:2: unknown key 'optimzer'; did you mean 'optimizer'"):
        load_settings(str(tmp_path / 'a.yaml'), [])
    assert "warning: " in capsys.readouterr().err
