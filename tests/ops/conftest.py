"""Makes ``ops_reference`` importable, and runs each operator test on the CPU and (marked ``gpu``) on a CUDA device."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(params=['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def device(request):
    return request.param
