"""Inheritance, overrides, schema and provenance of the configuration loader."""
import copy
import os
import pickle

import pytest

from mmdet3d_ext.config import Config, ConfigError, declare, expect, load_config, require, schema
from mmdet3d_ext.config.overrides import typed


@pytest.fixture
def tree(tmp_path):
    """``write({'configs/default.yaml': text, ...})`` makes files and returns the last one's name."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(path)

    return write


# ---- inheritance ---------------------------------------------------------------------------------------------------------
def test_folders_are_merged_from_the_root_down(tree):
    leaf = tree({
        'configs/default.yaml': 'seed: 1\nmax_epochs: 20\noptimizer: {type: AdamW, lr: 0.1, weight_decay: 0.01}\n',
        'configs/a/default.yaml': 'max_epochs: 10\noptimizer: {lr: 0.2}\n',
        'configs/a/b/leaf.yaml': 'optimizer: {lr: 0.3}\n',
    })
    cfg = load_config(leaf)
    assert cfg == {'seed': 1, 'max_epochs': 10, 'optimizer': {'type': 'AdamW', 'lr': 0.3, 'weight_decay': 0.01}}
    assert cfg.optimizer.lr == 0.3
    assert [os.path.relpath(f, os.path.dirname(leaf)) for f in cfg.files] == ['../../default.yaml', '../default.yaml',
                                                                              'leaf.yaml']


def test_relative_and_absolute_names_agree_and_the_working_folder_plays_no_part(tree, tmp_path, monkeypatch):
    leaf = tree({'default.yaml': 'seed: 99\nmax_epochs: 99\n', 'configs/default.yaml': 'seed: 1\n',
                 'configs/leaf.yaml': 'max_epochs: 2\n'})
    monkeypatch.chdir(tmp_path)
    relative, absolute = load_config('configs/leaf.yaml'), load_config(leaf)
    assert relative == absolute == {'seed': 1, 'max_epochs': 2}
    monkeypatch.chdir(tmp_path / 'configs')
    assert load_config('leaf.yaml') == absolute


def test_outside_a_configs_folder_the_chain_ends_at_the_first_folder_without_defaults(tree):
    leaf = tree({'default.yaml': 'seed: 99\n', 'x/gap/y/default.yaml': 'max_epochs: 3\n',
                 'x/gap/y/z/default.yaml': 'load_from: null\n', 'x/gap/y/z/leaf.yaml': 'sync_bn: false\n'})
    assert load_config(leaf) == {'max_epochs': 3, 'load_from': None, 'sync_bn': False}


def test_default_file_itself_is_read_once(tree):
    leaf = tree({'configs/default.yaml': 'seed: 1\n', 'configs/a/default.yaml': 'max_epochs: 1\n'})
    assert len(load_config(leaf).files) == 2


def test_lists_null_and_scalars_replace(tree):
    leaf = tree({
        'configs/default.yaml': 'model: {encoders: {camera: {a: 1}, lidar: {b: 2}}, heads: {object: null}}\n'
                                'voxel_size: [1, 2, 3]\n',
        'configs/leaf.yaml': 'model: {encoders: {camera: null}, heads: {object: {c: 3}}}\nvoxel_size: [4]\n',
    })
    assert load_config(leaf) == {'model': {'encoders': {'camera': None, 'lidar': {'b': 2}}, 'heads': {'object': {'c': 3}}},
                                 'voxel_size': [4]}


def test_yml_files_inherit_from_yml(tree):
    leaf = tree({'configs/default.yaml': 'seed: 1\n', 'configs/default.yml': 'seed: 2\n', 'configs/leaf.yml': ''})
    assert load_config(leaf) == {'seed': 2}


# ---- YAML ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('text, value', [('2e-4', 2e-4), ('1E5', 1e5), ('-3e+2', -300.0), ('2.0e-4', 2e-4), ('.5', 0.5),
                                         ('.inf', float('inf')),
                                         ('7', 7), ('1_000', 1000), ("'2e-4'", '2e-4'), ('2020-01-01', '2020-01-01'),
                                         ('1e', '1e'), ('e5', 'e5'), ('~', None), ('true', True)])
def test_scalars(tree, text, value):
    got = load_config(tree({'leaf.yaml': f'seed: {text}\n'})).seed
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize('text, message', [
    ('seed: [1, 2\nmax_epochs: 3\n', r'leaf\.yaml:2: not valid YAML'),
    ('seed: 1\n\nseed: 2\n', r"leaf\.yaml:3: key 'seed' is written twice \(first in line 1\)"),
    ('model:\n  a: 1\n  a: 2\n', r"leaf\.yaml:3: key 'model\.a' is written twice"),
    ('- 1\n', r'leaf\.yaml:1: a configuration is a mapping'),
    ('seed: !!python/object/apply:os.system [true]\n', r'leaf\.yaml:1: not valid YAML'),
    ('seed: &a [*a]\n', r'leaf\.yaml:1: key .* contains itself'),
    ('? [1, 2]\n: 3\n', r'leaf\.yaml:1: a key must be a name'),
    ('seed: 1\n--- \nseed: 2\n', r'leaf\.yaml:2: not valid YAML'),
    ('seed: \x00\n', r'leaf\.yaml.*not valid YAML'),
])
def test_bad_yaml_names_file_and_line(tree, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(tree({'leaf.yaml': text}))


def test_alias_bomb_is_refused(tree):
    lines = ['_a0: &a0 [x, x, x, x, x, x, x, x, x]'] + [f'_a{i}: &a{i} [{", ".join([f"*a{i - 1}"] * 9)}]' for i in range(1, 12)]
    with pytest.raises(ConfigError, match='more than .* values once aliases are expanded'):
        load_config(tree({'leaf.yaml': '\n'.join(lines)}))


def test_merge_key_and_anchors_work(tree):
    cfg = load_config(tree({'leaf.yaml': '_base: &b {x: 1, y: 2}\nmodel:\n  <<: *b\n  y: 3\n'}))
    assert cfg.model == {'x': 1, 'y': 3}


def test_missing_file_and_binary_file(tree, tmp_path):
    with pytest.raises(ConfigError, match=r'nothere\.yaml: no such configuration file'):
        load_config(str(tmp_path / 'nothere.yaml'))
    (tmp_path / 'bin.yaml').write_bytes(b'\xff\xfe\x80')
    with pytest.raises(ConfigError, match=r'bin\.yaml: '):
        load_config(str(tmp_path / 'bin.yaml'))
    with pytest.raises(ConfigError, match='cannot be read'):
        load_config(str(tmp_path))


# ---- unknown keys --------------------------------------------------------------------------------------------------------
def test_unknown_root_key_in_a_file_names_the_nearest(tree):
    leaf = tree({'configs/default.yaml': 'seed: 1\n', 'configs/leaf.yaml': '\noptimzer: {lr: 1}\n'})
    with pytest.raises(ConfigError, match=r"leaf\.yaml:2: unknown key 'optimzer'; did you mean 'optimizer'"):
        load_config(leaf)


def test_unknown_key_of_a_section_in_a_file(tree):
    with pytest.raises(ConfigError,
                       match=r"leaf\.yaml:2: unknown key 'data\.samples_per_gppu'; did you mean 'data\.samples_per_gpu'"):
        load_config(tree({'leaf.yaml': 'data:\n  samples_per_gppu: 2\n'}))
    with pytest.raises(ConfigError, match=r"did you mean 'optimizer_config\.grad_clip\.max_norm'"):
        load_config(tree({'leaf.yaml': 'optimizer_config: {grad_clip: {max_nrom: 35}}\n'}))


def test_keys_of_mmdet3d_1_1_name_their_replacement(tree, tmp_path):
    leaf = tree({'leaf.yaml': 'optim_wrapper: {optimizer: {lr: 1.0e-4}}\n'})
    with pytest.raises(ConfigError, match=r"leaf\.yaml:1: key 'optim_wrapper' is of mmdet3d >= 1\.1: write optimizer, .*fp16"):
        load_config(leaf)
    with pytest.raises(ConfigError, match=r'command line: --train_cfg\.max_epochs: .*write max_epochs and evaluation\.interval'):
        load_config(tree({'leaf.yaml': 'seed: 0\n'}), ['--train_cfg.max_epochs', '3'])
    cfg = load_config(tree({'leaf.yaml': 'data_root: x/\ndataset_root: "${data_root}"\n'}))
    assert cfg.dataset_root == 'x/', 'a helper of the same name is fine'
    (tmp_path / 'model.py').write_text("model = dict(type='BEVFusion')\n")
    with pytest.raises(ConfigError, match=r'model\.py: Python configurations are not run; .*docs/migrating\.md'):
        load_config(str(tmp_path / 'model.py'))


def test_helper_keys_used_by_an_expression_or_private_are_fine(tree):
    cfg = load_config(tree({'leaf.yaml': 'step: 0.5\n_note: x\nmodel: {n: "${int(100 / step)}"}\n'}))
    assert cfg.model.n == 200
    with pytest.raises(ConfigError, match="unknown key 'step'"):
        load_config(tree({'leaf.yaml': 'step: 0.5\n'}))


def test_declare_makes_a_key_known(tree):
    leaf = tree({'leaf.yaml': 'my_section: {a: 1}\n'})
    with pytest.raises(ConfigError):
        load_config(leaf)
    try:
        declare('my_section', ['a'])
        assert load_config(leaf, ['--my_section.a', '2']).my_section.a == 2
    finally:
        del schema.KNOWN['my_section']


# ---- aliases -------------------------------------------------------------------------------------------------------------
def test_total_epochs_is_max_epochs(tree):
    leaf = tree({'configs/default.yaml': 'max_epochs: 20\n',
                 'configs/leaf.yaml': 'total_epochs: 6\nmodel: {n: "${total_epochs + 1}"}\n'})
    with pytest.warns(UserWarning, match=r"leaf\.yaml:1: 'total_epochs' is called 'max_epochs'"):
        cfg = load_config(leaf)
    assert cfg.max_epochs == 6 and 'total_epochs' not in cfg and cfg.model.n == 7
    with pytest.warns(UserWarning):
        assert load_config(leaf, ['--total_epochs', '3']).max_epochs == 3


def test_both_names_in_one_file(tree):
    with pytest.raises(ConfigError, match=r"'total_epochs' is another name of 'max_epochs', and they differ: 20 and 6"):
        load_config(tree({'leaf.yaml': 'max_epochs: 6\ntotal_epochs: 20\n'}))
    with pytest.warns(UserWarning):
        assert load_config(tree({'leaf.yaml': 'max_epochs: 6\ntotal_epochs: 6\n'})) == {'max_epochs': 6}
    with pytest.raises(ConfigError, match='another name'):
        load_config(tree({'leaf.yaml': ''}), ['--total_epochs', '3', '--max_epochs', '4'])


# ---- overrides -----------------------------------------------------------------------------------------------------------
BASE = '''
seed: 0
load_from: null
voxel_size: [0.1, 0.1, 0.2]
object_classes: [car, truck]
dataset_root: data/
optimizer: {type: AdamW, lr: 2.0e-4}
fp16: null
train_pipeline:
  - {type: LoadA}
  - {type: LoadB, prob: 0.3, size: "${voxel_size[:2]}"}
data:
  samples_per_gpu: 2
  train: {pipeline: "${train_pipeline}"}
  val: {pipeline: "${train_pipeline}"}
'''


@pytest.mark.parametrize('words, path, value', [
    (['--seed', '5'], 'seed', 5),
    (['--seed=5'], 'seed', 5),
    (['seed=5'], 'seed', 5),
    (['--seed', '-5'], 'seed', -5),
    (['--optimizer.lr', '1e-4'], 'optimizer.lr', 1e-4),
    (['--load_from', 'a/b.pth'], 'load_from', 'a/b.pth'),
    (['--load_from=a=b.pth'], 'load_from', 'a=b.pth'),
    (['--load_from', "'5'"], 'load_from', '5'),
    (['--sync_bn', 'true'], 'sync_bn', True),
    (['--sync_bn', 'False'], 'sync_bn', False),
    (['--object_classes', 'null'], 'object_classes', None),
    (['--object_classes', 'None'], 'object_classes', None),
    (['--voxel_size', '[0.2, 0.2, 0.4]'], 'voxel_size', [0.2, 0.2, 0.4]),
    (['--voxel_size', '[0.2,', '0.2,', '4e-1]'], 'voxel_size', [0.2, 0.2, 0.4]),
    (['--voxel_size=[0.2,', '0.2]'], 'voxel_size', [0.2, 0.2]),
    (['--voxel_size', '(0.2, 0.2)'], 'voxel_size', [0.2, 0.2]),
    (['--voxel_size', '0.2', '0.3'], 'voxel_size', [0.2, 0.3]),
    (['--object_classes', '[car,', 'bus]'], 'object_classes', ['car', 'bus']),
    (['--object_classes', "['car', None, true, 1e-3]"], 'object_classes', ['car', None, True, 1e-3]),
    (['--dataset_root', 'my', 'data/'], 'dataset_root', 'my data/'),
    (['--train_pipeline.1.prob', '0.5'], 'train_pipeline.1.prob', 0.5),
    (['--train_pipeline.-1.prob', '0.5'], 'train_pipeline.1.prob', 0.5),
    (['--fp16.loss_scale', '512.0'], 'fp16.loss_scale', 512.0),
    (['--fp16.loss_scale.growth_interval', '100'], 'fp16.loss_scale.growth_interval', 100),
    (['--data', '{samples_per_gpu: 1}'], 'data', {'samples_per_gpu': 1}),
    (['--optimizer.lr', '${seed + 0.5}'], 'optimizer.lr', 0.5),
])
def test_override_values(tree, words, path, value):
    cfg = load_config(tree({'leaf.yaml': BASE}), words)
    got = cfg.select(path)
    assert got == value and isinstance(got, type(value)) and isinstance(got, bool) == isinstance(value, bool)
    assert cfg.source_of(path) == 'command line'


def test_several_overrides_and_propagation_into_expressions(tree):
    cfg = load_config(tree({'leaf.yaml': BASE}),
                      ['--voxel_size', '[0.2,', '0.3,', '4]', '--seed', '3', '--train_pipeline.0.type=X', 'load_from=y'])
    assert cfg.seed == 3 and cfg.load_from == 'y'
    for where in ('train_pipeline', 'data.train.pipeline', 'data.val.pipeline'):
        assert cfg.select(where) == [{'type': 'X'}, {'type': 'LoadB', 'prob': 0.3, 'size': [0.2, 0.3]}]


def test_override_inside_the_result_of_an_expression_stays_there(tree):
    words = ['--data.train.pipeline.1.prob', '0.9', '--voxel_size', '[5, 6, 7]']
    cfg = load_config(tree({'leaf.yaml': BASE}), words)
    assert cfg.data.train.pipeline[1] == {'type': 'LoadB', 'prob': 0.9, 'size': [5, 6]}
    assert cfg.train_pipeline[1].prob == 0.3 and cfg.data.val.pipeline[1].prob == 0.3


@pytest.mark.parametrize('words, message', [
    (['--optimzer.lr', '1'], r"--optimzer\.lr: unknown key 'optimzer' at the top; did you mean 'optimizer'"),
    (['--optimizer.lrr', '1'], r"unknown key 'lrr' in 'optimizer'; did you mean 'optimizer\.lr'"),
    (['--data.samples_per_gppu', '1'], r"did you mean 'data\.samples_per_gpu'"),
    (['--train_pipeline.1.prb', '1'], r"did you mean 'train_pipeline\.1\.prob'"),
    (['--train_pipeline.2.prob', '1'], r'index 2 is outside a list of 2'),
    (['--train_pipeline.first.prob', '1'], r"'first' indexes a list"),
    (['--seed.x', '1'], r"'seed' is 0, it has no keys"),
    (['--seed'], r'--seed has no value'),
    (['--sync_bn', '--seed', '1'], r'--sync_bn has no value'),
    (['--voxel_size', '[1, 2'], r"--voxel_size: '\[1, 2' begins like a list"),
    (['--seed', '1', '2'], r'--seed: several words'),
    (['--', '1'], r"expected --key value"),
    (['--a b', '1'], r"expected --key value"),
    (['--__class__', '1'], r"unknown key '__class__'"),
    (['--fp16.loss_scale.growth_intervall', '1'], r"did you mean 'fp16\.loss_scale\.growth_interval'"),
])
def test_bad_overrides_name_the_key(tree, words, message):
    with pytest.raises(ConfigError, match=message):
        load_config(tree({'leaf.yaml': BASE}), words)


def test_allow_new(tree):
    leaf = tree({'leaf.yaml': BASE})
    words = ['--optimizer.brand.new', '3', '--other', '[]']
    with pytest.raises(ConfigError):
        load_config(leaf, words)
    for cfg in (load_config(leaf, words, allow_new=True), load_config(leaf, ['--allow-new', *words])):
        assert cfg.optimizer.brand == {'new': 3} and cfg.other == []


def test_arguments_of_a_registered_type_may_be_added(tree):
    leaf = tree({'leaf.yaml': BASE + '  test: {type: "${dataset_type}"}\ndataset_type: NuScenesDataset\n'})
    assert load_config(leaf, ['--data.test.load_interval', '10']).data.test.load_interval == 10
    assert load_config(leaf, ['--optimizer.weight_decay', '0.01']).optimizer.weight_decay == 0.01
    with pytest.raises(ConfigError, match=r"unknown key 'weight_decy' in 'optimizer'; did you mean 'optimizer\.weight_decay'"):
        load_config(leaf, ['--optimizer.weight_decy', '0.01'])


@pytest.mark.parametrize('text, value', [('yes', 'yes'), ('12:30', '12:30'), ('007', '007'), ('1_000', 1000),
                                         ('a: b', 'a: b'), ('#x', '#x'), ('', ''),
                                         ('inf', 'inf'), ('TRUE', True), ('{a: 1e-3}', {'a': 1e-3}), ('1+2j', '1+2j'),
                                         ("b'x'", "b'x'"), ('__import__("os")', '__import__("os")')])
def test_typed(text, value):
    assert typed(text) == value and type(typed(text)) is type(value)


# ---- the object ----------------------------------------------------------------------------------------------------------
def test_provenance(tree):
    leaf = tree({'configs/default.yaml': 'seed: 1\nmodel:\n  a: 1\n  b: [1, {c: 2}]\n',
                 'configs/leaf.yaml': '\nmodel:\n  b: 3\n  d: "${model.a}"\n'})
    cfg = load_config(leaf, ['--seed', '4'])
    default = os.path.join(os.path.dirname(leaf), 'default.yaml')
    assert cfg.source_of('model.a') == default and cfg.source_of('model.b') == leaf == cfg.source_of('model.d')
    assert cfg.source_of('seed') == 'command line' and cfg.source_of('nothing') is None
    assert cfg.where('model.b').endswith("leaf.yaml:3: key 'model.b'")
    assert load_config(default).where('model.b.1.c').endswith("default.yaml:4: key 'model.b.1.c'")


def test_dump_round_trip_and_hash(tree, tmp_path):
    cfg = load_config(tree({'configs/leaf.yaml': BASE}), ['--load_from', "'2e-4'", '--optimizer.lr', '1e-05'])
    cfg.dump(str(tmp_path / 'run.yaml'))
    again = load_config(str(tmp_path / 'run.yaml'))
    assert again == cfg and again.load_from == '2e-4' and again.hash == cfg.hash and len(cfg.hash) == 8
    assert again.to_dict() == cfg.to_dict() and type(cfg.to_dict()['data']) is dict
    changed = load_config(str(tmp_path / 'run.yaml'), ['--optimizer.lr', '2e-05'])
    assert changed.hash != cfg.hash
    assert Config({'b': 1, 'a': {1: 2, 'x': 3}}).hash == Config({'a': {'x': 3, 1: 2}, 'b': 1}).hash


def test_dump_refuses_what_yaml_cannot_hold():
    with pytest.raises(ConfigError, match="key 'a.b' holds a object"):
        Config({'a': {'b': object()}}).dump()


def test_copies_pickles_and_attributes(tree):
    cfg = load_config(tree({'leaf.yaml': BASE}))
    for other in (copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg)), cfg.copy()):
        assert other == cfg and type(other) is Config and other.filename == cfg.filename
        assert other.source_of('seed') == cfg.source_of('seed')
    deep = copy.deepcopy(cfg)
    deep.train_pipeline[1].prob = 1
    assert cfg.train_pipeline[1].prob == 0.3
    deep.new = {'x': [{'y': 1}]}
    assert deep['new'].x[0].y == 1 and not hasattr(cfg, 'new') and cfg.get('new') is None
    del deep.new
    assert 'new' not in deep
    with pytest.raises(AttributeError, match=r"no key 'optimizer\.l'; did you mean 'optimizer\.lr'"):
        _ = cfg.optimizer.l
    assert isinstance(cfg.optimizer, dict)


def test_select(tree):
    cfg = load_config(tree({'leaf.yaml': BASE}))
    assert cfg.select('train_pipeline.1.prob') == 0.3 and cfg.select('train_pipeline.7.prob', 'x') == 'x'
    assert cfg.select('seed.a') is None


def test_require_names_every_missing_key(tree):
    cfg = load_config(tree({'leaf.yaml': BASE}))
    require(cfg, ['optimizer.lr', 'data.train'])
    message = (r"leaf\.yaml: required: 'lr_config' is missing; 'optimizer\.typ' is missing; did you mean 'optimizer\.type'\?; "
               r"'load_from' is null \(.*leaf\.yaml:3\)")
    with pytest.raises(ConfigError, match=message):
        require(cfg, ['lr_config', 'optimizer.typ', 'load_from'])
    require(cfg, ['load_from'], allow_null=True)


def test_expect(tree):
    cfg = load_config(tree({'leaf.yaml': 'optimizer: {lr: abc}\nseed: true\nmax_epochs: 3\n'}))
    with pytest.raises(ConfigError, match=r"leaf\.yaml:1: key 'optimizer\.lr': expected float, got 'abc'"):
        expect(cfg, 'optimizer.lr', float)
    with pytest.raises(ConfigError, match='expected int, got True'):
        expect(cfg, 'seed', int)
    assert expect(cfg, 'max_epochs', float) == 3 and expect(cfg, 'load_from', str, optional=True) is None
