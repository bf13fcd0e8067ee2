"""Parts of a configuration that stand once under ``templates`` and are referred to, extended and overridden."""
import pytest

from mmdet3d_ext.config import ConfigError, load_config

BASE = '''
voxel_size: [0.1, 0.1, 0.2]
templates:
  encoder:
    backbone: {type: A, size: "${voxel_size[:2]}", init_cfg: {type: Pretrained, checkpoint: here.pth}}
    neck: {out: 3}
  unused: {x: "${not_there}"}
model:
  encoders: {lidar: "${templates.encoder}"}
data:
  val: {ann_file: val.pkl, pipeline: [1, 2]}
  test: "${data.val}"
'''


@pytest.fixture
def load(tmp_path):
    def load(leaf, *overrides, base=BASE):
        (tmp_path / 'configs').mkdir(exist_ok=True)
        (tmp_path / 'configs/default.yaml').write_text(base)
        (tmp_path / 'configs/leaf.yaml').write_text(leaf)
        return load_config(str(tmp_path / 'configs/leaf.yaml'), overrides)
    return load


def test_templates_are_not_part_of_the_result(load):
    cfg = load('')
    assert 'templates' not in cfg
    assert cfg.model.encoders.lidar.backbone['size'] == [0.1, 0.1]


def test_a_file_merges_into_what_an_inherited_expression_gives(load):
    cfg = load('model: {encoders: {lidar: {backbone: {type: B, depth: 2}}}}\ndata: {test: {ann_file: test.pkl}}\n')
    assert cfg.model.encoders.lidar == {'backbone': {'type': 'B', 'size': [0.1, 0.1], 'depth': 2,
                                                     'init_cfg': {'type': 'Pretrained', 'checkpoint': 'here.pth'}},
                                        'neck': {'out': 3}}
    assert cfg.data.test == {'ann_file': 'test.pkl', 'pipeline': [1, 2]} and cfg.data.val.ann_file == 'val.pkl'


def test_null_lists_and_expressions_still_replace(load):
    assert load('model: {encoders: {lidar: null}}\n').model.encoders.lidar is None
    assert load('model: {encoders: {lidar: [1]}}\n').model.encoders.lidar == [1]
    cfg = load('model: {encoders: {lidar: {neck: null, backbone: "${templates.encoder.neck}"}}}\n')
    assert cfg.model.encoders.lidar == {'neck': None, 'backbone': {'out': 3}}


def test_a_mapping_replaces_an_expression_that_gives_none(load):
    assert load('model: {encoders: {x: {a: 1}}}\n', base='voxel_size: 1\nmodel: {encoders: {x: "${voxel_size}"}}\n'
                ).model.encoders.x == {'a': 1}


def test_explicit_beginning_drops_what_was_inherited(load):
    cfg = load('model: {encoders: {lidar: {_from: "${templates.encoder.neck}", more: 1}}}\n')
    assert cfg.model.encoders.lidar == {'out': 3, 'more': 1}
    cfg = load('templates: {other: {_from: "${templates.encoder}", neck: {out: 4}}}\n'
               'model: {encoders: {lidar: "${templates.other}", camera: {_from: "${templates.other}", neck: {_from: '
               '"${templates.encoder.backbone.init_cfg}", type: X}}}}\n')
    assert cfg.model.encoders.lidar.neck == {'out': 4} and cfg.model.encoders.lidar.backbone.type == 'A'
    assert cfg.model.encoders.camera.neck == {'type': 'X', 'checkpoint': 'here.pth'}


def test_files_may_change_the_template_and_a_place_of_use(load):
    cfg = load('templates: {encoder: {neck: {out: 5}}}\nmodel: {encoders: {camera: {_from: "${templates.encoder}", a: 1}}}\n')
    assert cfg.model.encoders.camera == {**cfg.model.encoders.lidar, 'a': 1} and cfg.model.encoders.lidar.neck.out == 5


@pytest.mark.parametrize('leaf', ['', 'model: {encoders: {lidar: {neck: {kind: x}}}}\n'])
def test_overrides_reach_inside_and_see_each_other(load, leaf):
    cfg = load(leaf, '--model.encoders.lidar.backbone.init_cfg.checkpoint', 'there.pth', '--voxel_size', '[1, 2, 3]',
               '--model.encoders.lidar.neck.out', '7')
    lidar = cfg.model.encoders.lidar
    assert lidar.backbone.init_cfg.checkpoint == 'there.pth' and lidar.backbone['size'] == [1, 2] and lidar.neck.out == 7
    assert lidar.neck.get('kind') == ('x' if leaf else None)
    with pytest.raises(ConfigError, match="did you mean 'model.encoders.lidar.neck.out'"):
        load(leaf, '--model.encoders.lidar.neck.outt', '7')


def test_an_expression_may_look_inside_an_extended_mapping(load):
    cfg = load('model: {encoders: {lidar: {neck: {out: 9}}}, n: "${model.encoders.lidar.neck.out + 1}"}\n')
    assert cfg.model.n == 10


def test_where_an_extended_key_comes_from(load):
    cfg = load('model:\n  encoders:\n    lidar: {neck: {out: 1}}\n')
    assert cfg.where('model.encoders.lidar.neck.out').endswith("leaf.yaml:3: key 'model.encoders.lidar.neck.out'")


@pytest.mark.parametrize('leaf, message', [
    ('model: {encoders: {lidar: {_from: encoder}}}\n', r'leaf\.yaml:1: key .*_from.*: expected "\$\{\.\.\.\}"'),
    ('model: {encoders: {lidar: {_from: "${templates.nothing}"}}}\n', r"no key 'nothing'"),
    ('templates: {a: {_from: "${templates.a}"}}\nmodel: {a: "${templates.a}"}\n', 'in a circle'),
    ('templates: {a: {_from: "${templates.b}"}, b: {_from: "${templates.a}", x: 1}}\nmodel: {a: "${templates.a}"}\n',
     'in a circle'),
    ('model: {a: {_from: "${templates.encoder}", x: "${model.a.neck.out}"}}\n', 'in a circle'),
])
def test_bad_beginnings_are_named(load, leaf, message):
    with pytest.raises(ConfigError, match=message):
        load(leaf)
