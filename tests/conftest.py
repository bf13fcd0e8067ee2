"""Test set-up: the import path of ``tests/testing.py``, the version shims, and the condition of the ``gpu`` marker."""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import mmdet3d_ext  # noqa: E402,F401  (the shims must be in place before a test imports mmdet3d)

pytest_plugins = ['datasets_fixture']


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if 'gpu' in item.keywords:
            item.add_marker(pytest.mark.skip(reason='needs a CUDA device'))


@pytest.fixture
def one_thread():
    """Torch on one thread: as in the ranks, where sums are made in that order, and cheaper than several on little data."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
