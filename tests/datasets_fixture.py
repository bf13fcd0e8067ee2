"""The tiny synthetic data set, generated once for a whole test session."""
import pytest


@pytest.fixture(scope='session')
def synthetic_root(tmp_path_factory):
    """Data root (Path) of the 'tiny' preset, seed 0: three mini scenes (two train, one val) of three key frames."""
    from mmdet3d_ext.datasets.synthetic import generate
    root = tmp_path_factory.mktemp('synthetic_nuscenes')
    generate(root, preset='tiny', seed=0)
    return root
