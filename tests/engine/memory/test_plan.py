"""The memory plan: against a real step watched by the same counter, and what must hold for every plan."""
import copy
import gc
import importlib.util
import json

import pytest
import torch
from testing import REPO

import mmdet3d_ext  # noqa: F401
from mmdet3d_ext.config import load_config
from mmdet3d_ext.datasets.synthetic.batch import random_batch
from mmdet3d_ext.engine.launch import UserError
from mmdet3d_ext.engine.memory import report
from mmdet3d_ext.engine.memory.exhausted import advice
from mmdet3d_ext.engine.memory.plan import CUBLAS, MIB, SAME_ON_EVERY_GPU, make_plan, named_parts, read_precision
from mmdet3d_ext.engine.memory.switches import savings, switches, with_values
from mmdet3d_ext.engine.memory.tracker import StorageTracker, rounded
from mmdet3d_ext.engine.parallel import sum_losses
from mmdet3d_ext.engine.run_dir import to_plain
from mmdet3d_ext.engine.train import make_model

TINY = str(REPO / 'configs' / 'synthetic' / 'multitask_tiny.yaml')
POINTS = 2000


def config(*overrides):
    return load_config(TINY, list(overrides))


def plan(*overrides, samples=1, precision='fp32', **options):
    return make_plan(config(*overrides), samples, precision, points=POINTS, **options)


@pytest.fixture(scope='module')
def base():
    return plan()


CAMERA_ONLY = ('--model.encoders.lidar', 'null', '--model.fuser', 'null', '--model.decoder.backbone.in_channels', '32',
               '--input_modality.use_lidar', 'false')


@pytest.mark.parametrize('overrides', [(), ('--model.checkpoint', '[heads.map, decoder]')])
def test_against_a_real_step(overrides, monkeypatch):
    """The same counter around a step on real CPU tensors, where nothing is replaced: a camera model, on one grid with its head.
    Without the workspace that convolutions take on a GPU alone."""
    monkeypatch.setattr('mmdet3d_ext.engine.memory.plan.conv_workspace', lambda *_: 0)
    overrides = [*CAMERA_ONLY, '--model.heads.object', 'null', '--model.encoders.camera.vtransform.downsample', '2', *overrides]
    try:
        cfg = config(*overrides)
        planned = make_plan(cfg, 1, 'fp32')
    except UserError as error:
        pytest.fail(str(error))
    settings = to_plain(cfg)
    model = make_model(settings).train()
    tracker = StorageTracker()
    gc.disable()  # as in a plan
    with tracker:
        for tensor in [*model.parameters(), *model.buffers()]:
            tracker.track(tensor)
        state = [torch.empty_like(p) for p in model.parameters() for _ in range(2)]  # what AdamW keeps
        batch = random_batch(settings, 1, torch.device('cpu'))
        tracker.reset_peak()
        losses = model(**batch)
        total = sum_losses(losses)[0]
        del losses
        total.backward()
    gc.enable()
    assert len(state) == 2 * len(list(model.parameters()))
    assert planned.peak - CUBLAS == pytest.approx(tracker.peak, rel=0.005)


def test_the_parts_make_the_peak(base):
    assert sum(base.parts.values()) == base.peak
    assert sum(base.by_kind().values()) == base.peak
    kinds = base.by_kind()
    model = make_model(to_plain(config()))
    assert kinds['parameters'] == sum(rounded(4 * p.numel()) for p in model.parameters())
    steps = len(list(model.parameters()))
    moments = 2 * sum(rounded(4 * p.numel()) for p in model.parameters())
    assert moments <= kinds['optimizer'] <= moments + steps * rounded(4)
    assert kinds['workspace'] >= CUBLAS
    assert base.phase in ('activations', 'backward', 'optimizer') and base.operator
    assert base.voxels == {'lidar': POINTS}  # never more voxels than points
    names = set(named_parts(model))
    assert {'encoders.camera.backbone', 'heads.map.aspp', 'heads.object', 'fuser', 'decoder.neck'} <= names
    assert all(part in names | {'heads.object.loss'} for part in base.by_part())
    json.dumps(base.to_dict())


def test_a_plan_repeats_and_leaves_nothing_behind(base):
    again = plan()
    assert again.peak == base.peak and again.parts == base.parts
    x = torch.zeros(3, dtype=torch.bfloat16)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert x.exp().dtype == torch.bfloat16
    assert type(torch.zeros(1)) is torch.Tensor


def test_more_samples_cost_more_and_more_gpus_do_not_cost_less(base):
    two = plan(samples=2)
    assert two.peak > base.peak
    assert two.by_kind()['parameters'] == base.by_kind()['parameters']
    many, more = plan(gpus=4), plan(gpus=64)
    trained = base.by_kind()['parameters']
    assert many.peak == more.peak == base.peak + trained
    assert many.by_kind()['buckets'] == trained
    assert SAME_ON_EVERY_GPU in report.table(many)


def test_half_precision_and_averages(base):
    half = plan(precision='fp16')
    assert half.by_kind()['activations'] < base.by_kind()['activations']
    assert plan('--ema', '{decay: 0.99}').by_kind()['average'] >= base.by_kind()['parameters']


def test_given_voxels(base):
    few, many = plan(voxels=500), plan(voxels=20_000)
    assert few.voxels == {'lidar': 500} and many.voxels == {'lidar': 20_000}
    assert few.peak < base.peak < many.peak
    assert plan(voxels=10 ** 9).voxels == {'lidar': 20_000}  # the voxelizer's limit


@pytest.mark.parametrize('names', [['heads.map'], ['decoder'], ['encoders.camera.backbone'], ['encoders.camera.vtransform']])
def test_recomputation_shows_in_the_parts(base, names):
    less = make_plan(with_values(config(), {'model.checkpoint': names}), 1, 'fp32', points=POINTS)
    own = sum(size for part, size in less.by_part().items() if part.startswith(names[0]))
    before = sum(size for part, size in base.by_part().items() if part.startswith(names[0]))
    assert own < before


def test_switches_and_their_order(base):
    cfg = config()
    found = switches(cfg, base)
    assert [s.name for s in found] == ['recompute heads.map', 'recompute decoder', 'recompute encoders.camera.backbone',
                                       'recompute encoders.camera.vtransform', 'recompute all of these', 'mixed precision']
    rows = savings(cfg, base, limit=3)
    assert len(rows) == 3
    peaks = [changed.peak for _, changed in rows]
    assert peaks == sorted(peaks) and peaks[0] < base.peak
    half = plan(precision='fp16', samples=2)
    names = [s.name for s in switches(cfg, half)]
    assert 'mixed precision' not in names and names[-2:] == ['channels-last convolutions', 'one sample at a time']
    done = config('--model.checkpoint', '[decoder]', '--model.heads.map.use_checkpoint', 'true')
    assert [s.name for s in switches(done, base)][:2] == ['recompute encoders.camera.backbone', 'recompute encoders.camera.vtransform']
    assert switches(done, base)[0].values == {'model.checkpoint': ['decoder', 'encoders.camera.backbone']}
    for switch in found:  # what is suggested is what the loader takes
        words = [word.strip('"') for word in switch.words.split(' ', 1)]
        config(*words)


def test_with_values_does_not_change_the_configuration():
    cfg = config()
    before = copy.deepcopy(to_plain(cfg))
    changed = with_values(cfg, {'model.checkpoint': ['decoder'], 'model.new.deep': 1})
    assert changed['model']['checkpoint'] == ['decoder'] and changed['model']['new'] == {'deep': 1}
    assert to_plain(cfg) == before


def test_cards(base):
    larger = plan(samples=2)
    lines = report.cards(base, larger).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ['16', '24', '32', '40', '80', '141']
    assert 'yes' in lines[1] and 'up to' in lines[1]
    counts = [int(line.split()[-1]) for line in lines[1:]]
    assert counts == sorted(counts)
    huge = copy.deepcopy(base)
    huge.peak = 100 * 1024 * MIB
    lines = report.cards(huge).splitlines()
    assert [line.split()[3] for line in lines[1:]] == ['no'] * 5 + ['yes']


def test_precision_of_the_configuration():
    assert read_precision(config()) == 'fp32'
    assert read_precision(config('--fp16', '{loss_scale: dynamic}')) == 'fp16'
    assert read_precision(config('--amp.dtype', 'bf16')) == 'bf16'
    with pytest.raises(UserError, match='fp32, fp16, bf16'):
        read_precision(config(), 'fp8')


def test_an_operator_that_cannot_be_followed_is_named(monkeypatch):
    from mmdet3d_ext.models.fusers import ConvFuser

    def forward(self, maps):
        x = torch.cat(maps, 1)
        return x[x.sum((0, 2, 3)).nonzero()[:, 0][None].expand(64, -1)[0]]

    monkeypatch.setattr(ConvFuser, 'forward', forward)
    with pytest.raises(UserError, match=r'cannot be planned: model\.fuser \(ConvFuser\) runs .*nonzero'):
        plan()


def test_a_model_whose_parts_do_not_fit_is_answered_as_in_training():
    with pytest.raises(UserError, match='the parts of the model do not fit'):
        plan('--model.heads.map.in_channels', '3')


def test_heads_with_targets_or_losses_of_their_own(base):
    from mmdet3d_ext.models.heads.bbox.transfusion import TransFusionHead
    from mmdet3d_ext.registry import MODELS

    @MODELS.register_module()
    class OwnTargets(TransFusionHead):
        def get_targets(self, boxes, labels, preds):
            return super().get_targets(boxes, labels, preds)

    @MODELS.register_module()
    class OwnLoss(TransFusionHead):
        def loss(self, boxes, labels, preds, started=None):
            self.get_targets(boxes, labels, preds, started)
            return super().loss(boxes, labels, preds, started)

    for kind in ('OwnTargets', 'OwnLoss'):
        assert plan('--model.heads.object.type', kind).peak == pytest.approx(base.peak, rel=0.01)


def test_advice_names_the_plan_and_three_switches():
    cfg = with_values(config('--data.samples_per_gpu', '1'), {})
    text = advice(cfg)
    lines = text.splitlines()
    assert lines[0].startswith('Planned: peak ')
    assert 'largest parts' in lines[0]
    assert sum(line.startswith('  --') for line in lines) == 3 and all('saves' in line for line in lines[2:5])
    assert SAME_ON_EVERY_GPU in text


def test_advice_without_a_plan_still_has_switches(monkeypatch):
    import mmdet3d_ext.engine.memory.exhausted as module
    monkeypatch.setattr(module, 'make_plan', lambda cfg: 1 / 0)
    text = module.advice(config())
    assert 'No plan could be made' in text and '--model.checkpoint "[heads.map]"' in text and '--amp.dtype fp16' in text


@pytest.mark.parametrize('words, offered', [
    ((), True), (('--model.encoders.camera.backbone.lean', 'mlp'), False), (('--model.encoders.camera.backbone.lean', 'false'), False),
    (('--model.checkpoint', '[encoders.camera.backbone]'), False)])
def test_a_swin_can_keep_less(base, words, offered):
    cfg = load_config(str(REPO / 'configs/nuscenes/multitask/vanilla_200.yaml'), list(words))
    values = [s.values for s in switches(cfg, base) if 'Swin' in s.name]
    assert values == ([{'model.encoders.camera.backbone.lean': 'mlp'}] if offered else [])


@pytest.mark.gpu
def test_against_a_gpu():
    """The joint model at 400 x 400 in half precision, measured as the benchmark does."""
    spec = importlib.util.spec_from_file_location('memory_benchmark', REPO / 'benchmarks' / 'memory.py')
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    item = benchmark.row('joint', benchmark.JOINT, 1, 'fp16')
    measured = benchmark.measure(item, torch.device('cuda'), 2)
    planned = make_plan(benchmark.settings(item), 1, 'fp16')
    assert planned.peak / MIB == pytest.approx(measured['peak_mib'], rel=0.15)
