"""Values and names that building would refuse, after the data were read: the check says the same line, for the key that was written."""
import mmcv.runner
import pytest
from testing import REPO

from mmdet3d_ext.checks import check_config
from mmdet3d_ext.checks.types import runner_problem
from mmdet3d_ext.checks.values import FLAGS
from mmdet3d_ext.config import load_config
from mmdet3d_ext.datasets.nuscenes_dataset import NuScenesDataset
from mmdet3d_ext.engine import config_check
from mmdet3d_ext.registry import DATASETS, MODELS, PIPELINES

TINY, PHASE3 = str(REPO / 'configs/synthetic/multitask_tiny.yaml'), str(REPO / 'configs/nuscenes/multitask/phase3_400.yaml')
BACKBONE = 'model.encoders.camera.backbone.type'
REFUSED = [  # words, what the one error says after its place, what it says to write
    (['--optimizer.lr', 'abc'], "must be a number >= 0, got 'abc' (for example 2.0e-4)", {}),
    (['--optimizer.lr', '-1'], 'must be a number >= 0, got -1 (for example 2.0e-4)', {}),
    (['--optimizer.weight_decay', '.inf'], 'must be a number >= 0, got inf (for example 2.0e-4)', {}),
    (['--max_epochs', 'two'], "must be a whole number >= 1, got 'two'", {'max_epochs': 1}),
    (['--max_epochs', '0'], 'must be a whole number >= 1, got 0', {'max_epochs': 1}),
    (['--data.samples_per_gpu', '0'], 'must be a whole number >= 1, got 0', {'data.samples_per_gpu': 1}),
    (['--data.workers_per_gpu', '-1'], 'must be a whole number >= 0, got -1', {'data.workers_per_gpu': 0}),
    (['--log_config.interval', '1.5'], 'must be a whole number >= 1, got 1.5', {'log_config.interval': 1}),
    (['--evaluation.thresholds', '[0.5, 50]'],
     'must be a list of probabilities between 0 and 1, got [0.5, 50] (null: 0.35, 0.40, ... 0.65)', {}),
    (['--optimizer_config.grad_clip', '35'], 'must be a mapping such as {max_norm: 35, norm_type: 2} or null, got 35', {}),
    (['--ema', '0.999'], 'must be a mapping such as {decay: 0.999} or null, got 0.999', {}),
    (['--ema.decay', '2'], 'must be between 0 and 1, got 2', {}),
    (['--fp16', 'true'], 'must be a mapping such as {loss_scale: {growth_interval: 2000}} or null, got True', {}),
    (['--amp', 'fp8'], "'fp8' is not one of fp16, bf16, fp32", {}),
    (['--amp.dtype', 'fp8'], "'fp8' is not one of fp16, bf16, fp32", {}),
    (['--lr_config', 'cosine'], "must be a mapping such as {policy: CosineAnnealing} or null, got 'cosine'", {}),
    (['--lr_config.policy', 'null'], 'is missing: which schedule?', {}),
    (['--checkpoint_config', 'false'], 'must be a mapping such as {interval: 1} or null, got False', {}),
    (['--seed', 'abc'], "must be a whole number >= 0, got 'abc'", {'seed': 0}),
    (['--compat', 'mit'], "must be reference or null, got 'mit'", {}),
    (['--data.train', 'null'], 'must not be null: there would be nothing to train', {}),
    (['--data.train_dataloader.samples_per_gpu', '7'], 'is 7, data.samples_per_gpu is 2: the learning rate, the memory plan and the '
     'monitor go by that one', {'data.samples_per_gpu': 7}),
    (['--dist_params.bucket_cap_mb', '0'], 'must be a number of MiB > 0 or null, got 0 (25 by default)', {}),
    *(([f'--{key}', 'maybe'], "must be true, false or null, got 'maybe'", {}) for key in FLAGS),
    (['--dist_params.compression', 'fp8'], "must be fp16 or bf16, or null (gradients as they are), got 'fp8'", {}),
    (['--object_classes', '[car, truk]'], "NuScenesDataset: object_classes holds the unknown class 'truk'; did you mean 'truck'?", {}),
    (['--object_classes', '[car, car]'], "NuScenesDataset: object_classes names a class twice: ['car', 'car']", {}),
    ([f'--{BACKBONE}', 'ResNett'], "unknown model type 'ResNett'; did you mean 'ResNet'?", {}),
    ([f'--{BACKBONE}', 'VoVNet'], MODELS.problem('VoVNet'), {}),
    (['--model.heads.map.type', 'BEVSegmentationHed'], "unknown model type 'BEVSegmentationHed'; did you mean 'BEVSegmentationHead'?", {}),
    (['--model.heads.object.bbox_coder.type', 'TransFusionBBoxCodr'],
     "unknown box coder type 'TransFusionBBoxCodr'; did you mean 'TransFusionBBoxCoder'?", {}),
    (['--train_pipeline.3.type', 'ImageAg3D'], "unknown pipeline step type 'ImageAg3D'; did you mean 'ImageAug3D'?", {}),
    (['--dataset_type', 'NuScenesDatset'], "unknown data set type 'NuScenesDatset'; did you mean 'NuScenesDataset'?", {}),
    (['--optimizer.type', 'AdamWW'], "'AdamWW' is not known; did you mean 'AdamW'?", {}),
    (['--lr_config.policy', 'CosineAnealing'], "'CosineAnealing' is not known; did you mean 'CosineAnnealing'?", {}),
    (['--runner.type', 'IterBasedRunner'], "'IterBasedRunner' is not an epoch runner of this project; use CustomEpochBasedRunner", {}),
    (['--load_augmented', 'pointpainting'],
     "LoadPointsFromFile: load_augmented='pointpainting' (painted or virtual points) is not supported; write null", {}),
    (['--reduce_beams', '5'], 'LoadPointsFromFile: reduce_beams must divide 32, got 5', {}),
]


@pytest.mark.parametrize('words, problem, write', REFUSED, ids=[' '.join(words)[:50] for words, *_ in REFUSED])
def test_one_mistake_is_one_error_of_the_key_that_was_written(words, problem, write):
    (error,) = check_config(load_config(TINY, words)).errors
    assert error.key == words[0][2:] and error.place == f'command line: key {error.key!r}'
    assert error.problem == problem and dict(error.write) == write


@pytest.mark.parametrize('words, key, piece', [
    (['--log_config.hooks', '[{type: TextLogerHook}]'], 'log_config.hooks.0', "'TextLogerHook' is not known; did you mean 'TextLoggerHook'?"),
    (['--custom_hooks', '[{type: EMAHok}]'], 'custom_hooks.0', "did you mean 'EMAHook'?"),
    (['--optimizer_config.type', 'GuardedOptimizrHook'], 'optimizer_config.type', "did you mean 'GuardedOptimizerHook'?"),
    (['--map_classes', '[drivable_area, dividr]'], 'map_classes', "unknown map class 'dividr'; did you mean 'divider'?"),
    (['--max_epochs', 'null', '--max_iters', '100'], 'max_iters', 'training is by epochs here; set max_epochs')])
def test_names_inside_lists_and_other_schedules(words, key, piece):
    errors = {one.key: one.problem for one in check_config(load_config(TINY, words)).errors}
    assert piece in errors[key], errors


def test_the_origin_of_a_value_in_a_file_is_its_line(tmp_path):
    (tmp_path / 'configs').mkdir()
    leaf = tmp_path / 'configs/leaf.yaml'
    leaf.write_text('lr_config: null\noptimizer: {type: AdamW, lr: 1.0e-4}\ndata: {samples_per_gpu: 1}\nmax_epochs: 0\n')
    (error,) = check_config(load_config(str(leaf))).errors
    assert error.place.endswith("leaf.yaml:4: key 'max_epochs'")


def test_runner_epochs_of_their_own_keep_their_error():
    errors = check_config(load_config(TINY, ['--runner.max_epochs', 'two'])).errors
    assert [one.key for one in errors] == ['runner.max_epochs']


def test_types_inside_wrapped_data_sets():
    errors = check_config(load_config(PHASE3, ['--data.train.dataset.type', 'NuScenesDatset'])).errors
    assert [one.key for one in errors] == ['data.train.dataset.type']
    errors = check_config(load_config(PHASE3, ['--data.train.type', 'CBGSDatset'])).errors
    assert [one.key for one in errors] == ['data.train.type'] and "did you mean 'CBGSDataset'?" in errors[0].problem


def test_what_a_user_registers_is_known():
    kind = type('ToyNamesBackbone', (), {'__init__': lambda self: None})
    assert MODELS.problem('ToyNamesBackbone').startswith("unknown model type 'ToyNamesBackbone'")
    MODELS.own['ToyNamesBackbone'] = kind
    try:
        assert MODELS.problem('ToyNamesBackbone') is None
    finally:
        del MODELS.own['ToyNamesBackbone']
    for registry in (MODELS, DATASETS, PIPELINES):
        with pytest.raises(KeyError) as caught:
            registry.build({'type': 'Nothing like it'})
        assert caught.value.args[0] == registry.problem('Nothing like it'), 'building and the check say one thing'


def test_classes_and_runners_follow_the_rules_of_what_uses_them():
    assert NuScenesDataset.check_classes(None)[0] == 'car' and NuScenesDataset.check_classes(['animal', 'car']) == ('animal', 'car')
    assert config_check.runner.CustomEpochBasedRunner is mmcv.runner.RUNNERS.get('CustomEpochBasedRunner')
    assert runner_problem('CustomEpochBasedRunner') is None and runner_problem('EpochBasedRunner') is None
    assert 'is not an epoch runner' in runner_problem(None) and 'is not an epoch runner' in runner_problem([1])


def test_only_what_is_never_evaluated_is_warned_about():
    """The last epoch is evaluated whatever the interval."""
    assert not check_config(load_config(TINY, ['--max_epochs', '1', '--evaluation.interval', '5'])).findings
    (warning,) = check_config(load_config(TINY, ['--max_epochs', '3', '--evaluation.start', '4'])).warnings
    assert warning.key == 'evaluation.start' and warning.problem == 'is 4 with max_epochs 3: the model is never evaluated'
