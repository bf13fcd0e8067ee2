import pytest

from mmdet3d_ext.datasets.synthetic import ground, maps
from mmdet3d_ext.datasets.synthetic.config import resolve
from mmdet3d_ext.datasets.synthetic.world import Scene


@pytest.fixture(scope='session')
def boston():
    """City, ground and configuration of a small map (two blocks along each side)."""
    config = resolve('tiny', samples_per_scene=8)
    city = maps.build_city('boston-seaport', config.seed, config.map_blocks)
    return city, ground.build_ground(city, ground.paint(city), config.seed), config


@pytest.fixture(scope='session')
def scene(boston):
    return Scene('scene-0103', boston[0], boston[2])
