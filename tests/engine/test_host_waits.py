"""The training forward and its losses wait for the device at named places only, each a known number of times."""
import sys

import pytest
import torch
from host_waits import host_waits
from testing import REPO

sys.path[:0] = [str(REPO / 'tests' / 'models' / part) for part in ('detectors', 'vtransforms', 'backbones')]

from mmdet3d_ext.config import load_config  # noqa: E402
from mmdet3d_ext.engine import benchmark  # noqa: E402
from mmdet3d_ext.engine.parallel import StepModel  # noqa: E402
from mmdet3d_ext.engine.timing import profile_step  # noqa: E402
from mmdet3d_ext.engine.train import make_model  # noqa: E402
from mmdet3d_ext.geometry.on_device import Arriving  # noqa: E402

TINY = str(REPO / 'configs' / 'synthetic' / 'multitask_tiny.yaml')
CPU = torch.device('cpu')
SAMPLES = 2
MATRIX = [[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 1.0]]


def seen(work):
    """(site, what) -> calls of the second run of ``work``."""
    work()
    with host_waits() as found:
        work()
    return dict(found)


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x.max().item()


KINDS = {
    'item': lambda x: x.sum().item(),
    'bool': lambda x: 1 if x.sum() > 0 else 2,
    'float': lambda x: float(x[0, 0]),
    'tolist': lambda x: x.tolist(),
    'cpu': lambda x: x.cpu(),
    'on its way': lambda x: Arriving(x).wait(),
    'nonzero': lambda x: x.nonzero(),
    'where': lambda x: torch.where(x > 0),
    'mask': lambda x: x[x > 0],
    'mask of rows': lambda x: x[:, x[0] > 0],
    'mask, set': lambda x: x.clone().__setitem__(x > 0, 0.0),
    'list': lambda x: x[:, [0, 2]],
    'new_tensor': lambda x: x * x.new_tensor([1.0, 2.0, 3.0]),
    'tensor': lambda x: x * torch.tensor([1.0, 2.0, 3.0], device=x.device),
    'unique': lambda x: x.unique(),
    'unique rows': lambda x: x.unique(dim=0),
    'inverse': lambda x: torch.linalg.inv(x),
    'repeat': lambda x: x.repeat_interleave(x[0].long(), 0),
    'in C++': lambda x: torch.nn.functional.one_hot(x.long().abs()),
    'in a function of autograd': lambda x: Waits.apply(x),
}
NO_WAIT = {
    'slices': lambda x: x[:, 1:, None][..., 0],
    'an index': lambda x: x[:, torch.arange(2)],
    'where': lambda x: torch.where(x > 0, x, 0.0),
    'inverse': lambda x: torch.linalg.inv_ex(x).inverse,
    'sized': lambda x: x.repeat_interleave(2, 0),
    'one-hot': lambda x: torch.nn.functional.one_hot(x.long(), 4),
    'sent off': lambda x: Arriving(x),
    'detached': lambda x: x.detach().float().max().clamp(min=1),
}


@pytest.mark.parametrize('kind', KINDS)
def test_every_kind_of_wait_is_seen_with_its_place(kind):
    x = torch.tensor(MATRIX)
    found = seen(lambda: KINDS[kind](x))
    assert found and all(site.endswith(('test_host_waits.py: <lambda>', 'test_host_waits.py: forward')) for site, _ in found), found


@pytest.mark.parametrize('kind', NO_WAIT)
def test_what_does_not_wait_is_not_counted(kind):
    x = torch.tensor(MATRIX)
    assert not seen(lambda: NO_WAIT[kind](x))


# ---- the models ------------------------------------------------------------------------------------------------------------------

def tiny(*overrides, device=CPU):
    cfg = load_config(TINY, list(overrides))
    torch.manual_seed(0)
    return make_model(cfg), benchmark.make_batches(cfg, SAMPLES, device, points=2000, count=1)[0]


def vanilla(device=CPU):
    """As vanilla_200 is made: Swin, the plain map head; and a second decoder layer."""
    swin = '{type: SwinTransformer, embed_dims: 16, depths: [2, 2, 2, 2], num_heads: [1, 2, 4, 8], window_size: 7, out_indices: [1, 2, 3]}'
    return tiny('--model.encoders.camera.backbone', swin, '--model.encoders.camera.neck.in_channels', '[32, 64, 128]',
                '--model.heads.object.num_decoder_layers', '2', '--model.heads.object.auxiliary', 'true',
                '--model.heads.map', '{type: BEVSegmentationHead, in_channels: 72, classes: "${map_classes}", '
                                     'grid_transform: "${templates.map_grid}", loss: focal}', device=device)


def centerpoint():
    """CenterPoint, radar, and a sample without points or boxes."""
    import test_with_real_heads as real
    model = real.build_model({**real.small.config('camera', 'lidar', 'radar'), 'heads': {'object': real.CENTER, 'map': real.MAP}})
    model.init_weights()
    return model, {**real.small.batch(SAMPLES, points=[150, 0]), **real.objects(SAMPLES),
                   'gt_masks_bev': (torch.rand(SAMPLES, 2, 48, 36) < 0.3).long()}


def bevdepth():
    """Radar in the depth maps, the refined volume, pooled by points inside the grid: their number is asked for."""
    import test_bevdepth as depth
    real_model, inputs = depth.build_model({**depth.RADAR, 'bevdepth_refine': True}), depth.batch(SAMPLES)
    features, radar = torch.randn(SAMPLES, 2, 6, 4, 6), [torch.randn(50, 7) * 4 for _ in range(SAMPLES)]
    return real_model, dict(inputs, features=features, radar=radar)


def few_voxels():
    import test_sparse_encoder as sparse
    features, coords = sparse.voxels(20)
    return sparse.MODELS.build(sparse.SMALL), dict(voxel_features=features, coords=coords, batch_size=2)


def pillars():
    from mmdet3d_ext.models.backbones.pillars import PillarFeatureNet
    return PillarFeatureNet(5), dict(features=torch.randn(9, 4, 5), sizes=torch.randint(1, 5, (9,)), coords=torch.zeros(9, 4).int())


def voxelize(count):
    return {('mmdet3d_ext/ops/voxelize.py: voxelize', 'mmdet3d_ext::hard_voxelize'): count}


MATCH = {('mmdet3d_ext/models/heads/bbox/assigner.py: solve', 'wait'): 1}
SETUPS = {
    'tiny': (tiny, {**voxelize(SAMPLES), **MATCH}),
    'vanilla': (vanilla, {**voxelize(SAMPLES), **MATCH}),
    'centerpoint': (centerpoint, voxelize(2 * SAMPLES)),
}


PARTS = {
    'bevdepth': (bevdepth, {('mmdet3d_ext/models/vtransforms/base.py: volume_plan', 'aten::nonzero'): 1}),
    'few voxels': (few_voxels, {}),
    'pillars': (pillars, {}),
}


@pytest.mark.parametrize('part', PARTS)
def test_waits_of_parts(part):
    make, expected = PARTS[part]
    module, inputs = make()
    module.train()
    assert without_spconv(seen(lambda: module(**inputs))) == expected


def without_spconv(found):
    """It counts the sites of every list of its own; on a GPU twelve waits for eight lists."""
    return {key: n for key, n in found.items() if not key[0].startswith(('spconv/', 'cumm/'))}


@pytest.mark.parametrize('setup', SETUPS)
def test_waits_of_the_training_forward_and_its_losses(setup):
    make, expected = SETUPS[setup]
    model, batch = make()
    step = StepModel(model.train(), CPU)
    assert without_spconv(seen(lambda: step.train_step(batch))) == expected


@pytest.mark.parametrize('setup', ['tiny', 'centerpoint'])
def test_waits_of_a_prediction_until_its_results_are_fetched(setup):
    make, expected = SETUPS[setup]
    model, batch = make()
    model.eval()

    @torch.no_grad()
    def work():
        maps = model.decode(model.extract(batch, SAMPLES)[0])
        model.heads['object'].candidates(model.heads['object'](maps['object'], batch['metas']))
        model.heads['map'](maps['map'])

    found = without_spconv(seen(work))
    assert found == {key: n for key, n in expected.items() if key not in MATCH}


SPCONV = 12  # waits for the sites of the encoder's eight lists, four of them of strided convolutions
PROFILER = 1  # its own, at the end


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [None, torch.float16])
@pytest.mark.parametrize('make', [tiny, vanilla])
def test_waits_of_the_training_forward_on_a_gpu(make, dtype):
    """torch knows of none; the CUDA runtime counts spconv's, our voxels' and the matching's."""
    device = torch.device('cuda')
    model, batch = make(device=device)
    step = StepModel(model.to(device).train(), device, dtype)
    for _ in range(3):
        step.train_step(batch)
    found = profile_step(device, lambda: step.train_step(batch), None)
    sites = {site.partition(':')[0]: n for site, n in found['wait_sites'].items()}
    sites.pop('torch/_ops.py', None)  # voxels, if torch's warning in there reaches Python
    assert not sites, found['wait_sites']
    assert found['host_waits'] <= SPCONV + SAMPLES + 1 + PROFILER, (found['host_waits'], found['wait_sites'])
