"""Test set-up: markers' conditions and the import path of ``tests/testing.py``."""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if 'gpu' in item.keywords:
            item.add_marker(pytest.mark.skip(reason='needs a CUDA device'))
