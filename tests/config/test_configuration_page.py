"""docs/configuration.md: the keys of its tables are known, and its examples of overrides are accepted."""
import re
import shlex

import pytest
from testing import REPO

from mmdet3d_ext.config import load_config, schema

PAGE = (REPO / 'docs/configuration.md').read_text(encoding='utf-8')
CONFIG = str(REPO / 'configs/nuscenes/multitask/phase3_400.yaml')


def keys():
    """Every key in the first column of a table; one without a dot stands beside the one before it."""
    head = ''
    for line in PAGE.splitlines():
        if line.startswith(('`model.heads.map` of type', '## ')):
            head = '' if line.startswith('#') else 'model.heads.map.'
        if not line.startswith('| `'):
            continue
        beside = head
        for word in re.findall(r'`([^`]+)`', line.split(' | ')[0]):
            key = word.partition(':')[0].replace('<split>', 'test')
            beside = f'{key.rpartition(".")[0]}.' if '.' in key else beside
            yield key if '.' in key else beside + key


@pytest.fixture(scope='module')
def cfg():
    return load_config(CONFIG)


def test_every_key_is_known(cfg):
    found = list(keys())
    assert len(found) > 70 and 'model.heads.map.class_weights' in found and 'checkpoint_config.every_minutes' in found

    def known(key):
        path = tuple(key.split('.'))
        node = cfg.select('.'.join(path[:-1])) if path[1:] else cfg
        return path[-1] in schema.allowed_children(path[:-1], node or {})

    assert not [key for key in found if not known(key)]


def test_the_comparison_itself(cfg):
    assert 'use_asp' not in schema.allowed_children(('model', 'heads', 'map'), cfg.select('model.heads.map'))


def test_the_examples_of_overrides_are_accepted():
    lines = [line.partition('  #')[0] for line in PAGE.splitlines() if re.match(r'    (--|\w+=)', line)]
    assert len(lines) > 4 and any('max_epochs=3' in line for line in lines)
    for line in lines:
        load_config(CONFIG, shlex.split(line))
