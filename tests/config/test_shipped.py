"""Every configuration in the repository loads and survives a dump, and one override moves all that depends on it."""
import warnings

import pytest
from testing import REPO

from mmdet3d_ext.config import ConfigError, load_config

ALL = sorted((REPO / 'configs').rglob('*.yaml'))
MODEL_LESS = ('default.yaml', 'nuscenes/default.yaml', 'synthetic/default.yaml')
FILES = [path for path in ALL if str(path.relative_to(REPO / 'configs')) not in MODEL_LESS]


@pytest.mark.parametrize('file', FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_shipped_configuration(file, tmp_path):
    cfg = load_config(str(file))
    assert '${' not in cfg.dump(str(tmp_path / 'resolved.yaml'))
    again = load_config(str(tmp_path / 'resolved.yaml'))
    assert again.hash == cfg.hash and again == cfg
    assert {'model', 'data', 'optimizer', 'max_epochs'} <= set(cfg)
    with pytest.raises(ConfigError, match="did you mean 'optimizer.lr'"):
        load_config(str(file), ['--optimizer.lrr', '1e-4'])


@pytest.mark.parametrize('file', ALL, ids=lambda path: str(path.relative_to(REPO)))
def test_nothing_has_to_be_said_about_a_shipped_configuration(file):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        cfg = load_config(str(file))
    assert 'templates' not in cfg


def test_there_are_shipped_configurations():
    assert sum(path.name != 'default.yaml' for path in FILES) >= 11


def test_one_override_moves_every_grid_that_depends_on_it():
    file = str(REPO / 'configs/nuscenes/multitask/phase3_400.yaml')
    cfg = load_config(file, ['--map_bound', '[[-50, 50, 0.125], [-50, 50, 0.125]]', '--voxel_size', '[0.1, 0.1, 0.2]',
                             '--point_cloud_range',
                             '[-51.2, -51.2, -5, 51.2, 51.2, 3]'])
    assert cfg.model.heads.map.grid_transform.output_scope[0] == [-50, 50, 0.125]
    steps = [step for pipeline in (cfg.train_pipeline, cfg.test_pipeline, cfg.data.val.pipeline, cfg.data.test.pipeline)
             for step in pipeline if step['type'] == 'LoadBEVSegmentation']
    assert len(steps) == 4 and all(step['xbound'] == [-50, 50, 0.125] for step in steps)
    assert cfg.model.encoders.lidar.backbone.sparse_shape == [1024, 1024, 41]
    assert cfg.model.heads.map.grid_transform.input_scope[1] == [-51.2, 51.2, 0.8]
