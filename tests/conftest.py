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
