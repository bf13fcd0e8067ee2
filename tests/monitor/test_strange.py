"""Logs, configurations and launcher's states with values of any kind in random places: shown or refused, never a failure."""
import json
import math
import random
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from fake_runs import CONFIG, meta, schedule, write_text  # noqa: E402

from mmdet3d_ext.monitor.page import page
from mmdet3d_ext.monitor.records import MonitorError
from mmdet3d_ext.monitor.run import Run
from mmdet3d_ext.monitor.terminal import Style, render

STRANGE = [None, True, '', 'x', -1, 0, 10**400, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, [], [1], {}, {'a': 1}, '\0\x1b[2J',
           '<b>']


def spoil(value, draw, chance=0.5):
    """``value`` with something strange in up to two places."""
    if not isinstance(value, dict) or not value:
        return draw.choice(STRANGE)
    found = dict(value)
    for key in draw.sample(sorted(found), draw.randint(0, min(2, len(found)))):
        found[key] = spoil(found[key], draw) if draw.random() < chance else draw.choice(STRANGE)
    return found


def make(folder, draw):
    folder.mkdir()
    rows = schedule(upto=(draw.randint(1, 4), draw.choice([0, 50, 500, 1000])))
    write_text(folder / 'a.log', rows)
    first = {**meta(), 'config': yaml.safe_dump(spoil(spoil(CONFIG, draw, 0.9), draw, 0.9))}
    lines = [json.dumps(row if draw.random() < 0.9 else spoil(row, draw)) for row in [spoil(first, draw), *rows]]
    data = ('\n'.join(lines) + '\n').encode()
    (folder / 'a.log.json').write_bytes(data if draw.random() < 0.7 else data[:draw.randint(0, len(data))])
    if draw.random() < 0.5:
        (folder / 'launch').mkdir()
        state = {'phase': 'running', 'message': 'm', 'restarts': 1, 'last_crash': 'c', 'history': []}
        (folder / 'launch' / 'state.json').write_text(json.dumps(spoil(state, draw)))
    return str(folder)


@pytest.mark.parametrize('seed', range(4))
def test_nothing_makes_the_monitor_fail(tmp_path, seed):
    draw, shown = random.Random(seed), []
    for number in range(30):
        try:
            shown.append(Run(make(tmp_path / str(number), draw)))
        except MonitorError:
            continue
        assert render(shown[-1], Style())
        assert '</html>' in page(shown[-1], draw.choice(shown))
    assert len(shown) > 20
