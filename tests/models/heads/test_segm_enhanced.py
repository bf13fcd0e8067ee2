"""The enhanced head: structure, independence of samples, losses, targets of every type and size, AMP, checkpointing."""
import copy
import gc
import math
import warnings
from collections import Counter

import pytest
import torch
from testing import rand, randn
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmdet3d_ext.engine.memory.tracker import StorageTracker
from mmdet3d_ext.geometry.grid import GridError
from mmdet3d_ext.models.heads.segm import EnhancedBEVSegmentationHead
from mmdet3d_ext.models.heads.segm.layers import GroupNormReLU
from mmdet3d_ext.models.losses import focal_dice_loss, resample_targets
from mmdet3d_ext.registry import MODELS

CLASSES = ['drivable_area', 'stop_line', 'divider']
SCOPES = dict(input_scope=[[-8, 8, 1], [-6, 6, 1]], output_scope=[[-7, 7, 0.5], [-6, 6, 0.5]])  # 16x12 -> 28x24 cells


def make(**kwargs):
    torch.manual_seed(0)
    settings = dict(in_channels=10, grid_transform=SCOPES, classes=CLASSES, aspp_channels=16, aspp_rates=(1, 2),
                    decoder_channels=[16, 8], deep_supervision=True)
    head = EnhancedBEVSegmentationHead(**{**settings, **kwargs})
    for classifier in (head.classifier, getattr(head, 'aux_classifier', None)):
        if classifier is not None:  # a fresh classifier gives nearly the same everywhere
            nn.init.normal_(classifier.weight, std=0.5)
    return head


def inputs(batch=2, seed=1, size=(28, 24)):
    return randn(seed, (batch, 10, 16, 12)), rand(seed + 50, (batch, 3, *size)) < torch.tensor([0.4, 0.05, 0.1])[:, None, None]


def gradients(head, losses):
    total = sum(v for v in losses.values() if v.requires_grad)
    names, parameters = zip(*head.named_parameters())
    return dict(zip(names, torch.autograd.grad(total, parameters)))


# ---- structure -----------------------------------------------------------------------------------------------------------
def test_built_from_a_configuration_with_the_documented_order():
    head = MODELS.build(dict(type='EnhancedBEVSegmentationHead', in_channels=10, grid_transform=SCOPES, classes=CLASSES,
                             decoder_channels=[256, 256, 128, 128], deep_supervision=True))
    assert [type(m).__name__ for m in head.children()] == ['BEVGridTransform', 'ASPP', 'Sequential', 'Conv2d',
                                                           'Sequential', 'Conv2d']
    assert [name for name, _ in head.attention.named_children()] == ['channel', 'spatial']
    assert [block[0].out_channels for block in head.decoder] == [256, 256, 128, 128]
    assert [block[1].num_groups for block in head.decoder] == [32] * 4
    kinds = [type(b[0]).__name__ + str(b[0].kernel_size) for b in list(head.aspp.branches)[:-1]]
    assert kinds == ['Conv2d(1, 1)'] + ['Conv2d(3, 3)'] * 3
    assert not [m for m in head.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize('off', ['use_aspp', 'use_channel_attention', 'use_spatial_attention', 'deep_supervision',
                                 'use_dice_loss'])
def test_every_part_can_be_switched_off_and_what_is_left_trains(off):
    head = make(**{off: False})
    losses = head(*inputs())
    for name, grad in gradients(head, losses).items():
        assert grad.isfinite().all() and grad.abs().sum() > 0, name
    assert head.eval()(inputs()[0]).shape == (2, 3, 28, 24)


def test_a_decoder_without_layers():
    head = make(decoder_channels=[])
    assert len(head.decoder) == 0 and head.eval()(inputs()[0]).shape == (2, 3, 28, 24)


def test_new_classifiers_start_at_the_prior():
    torch.manual_seed(0)
    head = EnhancedBEVSegmentationHead(10, SCOPES, CLASSES).eval()
    assert 0.03 < head(inputs()[0]).mean() < 0.25


# ---- independence of samples ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize('training', [False, True])
def test_output_for_a_sample_does_not_depend_on_the_batch(training):
    head = make().train(training)
    x, _ = inputs(4)
    x[2] *= 1e4
    with torch.no_grad():
        together = head.decode(head.features(x))
        for index in range(4):
            alone = head.decode(head.features(x[index:index + 1]))
            torch.testing.assert_close(together[index:index + 1], alone, rtol=1e-4, atol=1e-4)
    assert not head.state_dict().keys() & {k for k in head.state_dict() if 'running' in k}


# ---- evaluation ----------------------------------------------------------------------------------------------------------
def test_evaluation_gives_probabilities_without_targets():
    head = make().eval()
    x, target = inputs()
    out = head(x)
    assert out.shape == (2, 3, 28, 24) and out.dtype == torch.float32 and 0 <= out.min() and out.max() <= 1
    assert torch.equal(head([x]), out) and torch.equal(head(x, target), out)
    with torch.autocast('cpu', torch.bfloat16):
        half = head(x)
    assert half.dtype == torch.float32 and (half - out).abs().mean() < 0.05


# ---- losses --------------------------------------------------------------------------------------------------------------
def test_loss_names_and_order():
    losses = make()(*inputs())
    kinds = ['focal', 'dice', 'aux_focal', 'aux_dice', 'dice_score']
    assert list(losses) == [f'{name}/{kind}' for name in CLASSES for kind in kinds]
    for name, value in losses.items():
        assert value.dim() == 0 and value.dtype == torch.float32 and value.requires_grad == ('dice_score' not in name)
    assert list(make(deep_supervision=False,
                     use_dice_loss=False)(*inputs())) == [f'{n}/{k}' for n in CLASSES for k in ('focal', 'dice_score')]
    with pytest.raises(ValueError, match='needs gt_masks_bev'):
        make()(inputs()[0])


@pytest.mark.parametrize('weights', [{'divider': 4.0, 'stop_line': 3}, [1, 3, 4]])
def test_loss_values(weights):
    head = make(class_weights=weights, focal_alpha=0.3, focal_gamma=1.5, focal_weight=2.0, dice_weight=0.5,
                dice_smooth=2.0, aux_weight=0.25)
    x, target = inputs()
    losses = head(x, target)
    features = head.features(x)
    main = focal_dice_loss(head.decode(features), target, 0.3, 1.5, 2.0)
    aux = focal_dice_loss(head.aux_classifier(features), target, 0.3, 1.5, 2.0)
    for index, (name, weight) in enumerate(zip(CLASSES, [1, 3, 4])):
        expected = {'focal': 2 * weight * main.focal[index], 'dice': 0.5 * weight * main.dice[index],
                    'aux_focal': 0.25 * 2 * weight * aux.focal[index], 'aux_dice': 0.25 * 0.5 * weight * aux.dice[index],
                    'dice_score': 1 - main.dice[index]}
        for kind, value in expected.items():
            torch.testing.assert_close(losses[f'{name}/{kind}'], value.detach(), check_stride=False)


def test_losses_without_alpha():
    x, target = inputs()
    expected = focal_dice_loss((h := make()).decode(h.features(x)), target, None, 2.0).focal
    for alpha in (None, -1):
        assert make(focal_alpha=alpha)(x, target)['divider/focal'].item() == pytest.approx(expected[2].item(), rel=1e-5)


@pytest.mark.parametrize('value', [0, 1])
@pytest.mark.parametrize('scale', [0.0, 1.0, 1e3])
@pytest.mark.parametrize('amp', [False, True])
def test_empty_and_full_maps_are_finite(value, scale, amp):
    head = make()
    target = torch.full((2, 3, 28, 24), value, dtype=torch.uint8)
    with torch.autocast('cpu', torch.bfloat16, enabled=amp):
        losses = head(scale * inputs()[0], target)
    assert all(v.isfinite() for v in losses.values()) and len(losses) == 15
    assert all(g.isfinite().all() for g in gradients(head, losses).values())


def test_one_empty_class_and_huge_logits():
    head = make()
    nn.init.normal_(head.classifier.weight, std=1e4)
    x, target = inputs()
    target[:, 1] = False
    losses = head(x, target)
    assert all(v.isfinite() for v in losses.values())
    assert all(g.isfinite().all() for g in gradients(head, losses).values())


def test_it_learns_a_map():
    head = make(aspp_rates=(1,), focal_alpha=0.5)
    x, _ = inputs(1)
    target = torch.zeros(1, 3, 28, 24, dtype=torch.bool)
    target[:, 0, 5:20], target[:, 1, :, 10], target[:, 2, 12] = True, True, True
    optimizer = torch.optim.Adam(head.parameters(), 2e-2)
    first = None
    for _ in range(60):
        losses = head(x, target)
        total = sum(v for k, v in losses.items() if 'score' not in k)
        first = first if first is not None else total.item()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert total.item() < 0.3 * first
    assert all(losses[f'{name}/dice_score'] > 0.7 for name in CLASSES)


# ---- targets -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('dtype', [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32,
                                   torch.float64])
def test_targets_of_any_type_and_size(dtype):
    head = make()
    x, target = inputs()
    expected, got = head(x, target), head(x, target.to(dtype))
    assert all(torch.equal(expected[k], got[k]) for k in expected)
    for size in ((14, 12), (56, 48), (30, 17)):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            losses = head(x, inputs(size=size)[1].to(dtype))
        assert all(v.isfinite() for v in losses.values())


def test_other_sizes_resize_the_logits_and_are_reported_once():
    head = make(target_resample='area')
    x, target = inputs(size=(56, 48))
    with pytest.warns(UserWarning,
                      match=r'makes 28x24 cells \(model\.heads\.map\.grid_transform\.output_scope\), the labels have 56x48 '
                                         r'\(xbound/ybound of LoadBEVSegmentation'):
        losses = head(x, target)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        head(x, target)
    features = head.features(x)
    logits = nn.functional.interpolate(head.decode(features), size=(56, 48), mode='bilinear', align_corners=False)
    main = focal_dice_loss(logits, target, 0.25)
    aux = focal_dice_loss(head.aux_classifier(features), resample_targets(target, (28, 24), 'area'), 0.25)
    for index, name in enumerate(CLASSES):
        assert losses[f'{name}/focal'].item() == pytest.approx(main.focal[index].item(), rel=1e-5)
        assert losses[f'{name}/aux_dice'].item() == pytest.approx(0.4 * aux.dice[index].item(), rel=1e-5)


def test_auxiliary_targets_keep_thin_lines_by_default():
    head = make()
    assert head.target_resample == 'max'
    seen = []
    head._loss = lambda logits, target: seen.append(target) or focal_dice_loss(logits, target)
    target = torch.zeros(1, 3, 112, 96, dtype=torch.bool)
    target[:, 2, 41] = True
    with pytest.warns(UserWarning):
        head(inputs(1)[0], target)
    assert seen[1].shape[-2:] == (28, 24) and seen[1].dtype == torch.float32 and torch.equal(seen[1][0, 2, 10], torch.ones(24))


@pytest.mark.parametrize('target, message', [
    (torch.zeros(2, 4, 28, 24), r'gt_masks_bev must be \(B, classes, X, Y\) = \(2, 3, X, Y\).*got \(2, 4, 28, 24\)'),
    (torch.zeros(1, 3, 28, 24), r'got \(1, 3, 28, 24\)'),
    (torch.zeros(3, 28, 24), r'got \(3, 28, 24\)'),
    (torch.full((2, 3, 28, 24), 255, dtype=torch.uint8), r'must hold 0 and 1, got values from 255 to 255'),
    (torch.full((2, 3, 28, 24), float('nan')), r'must hold 0 and 1, got values from nan'),
])
def test_wrong_targets_are_named(target, message):
    with pytest.raises(ValueError, match=message):
        make()(inputs()[0], target)


# ---- scopes and settings -------------------------------------------------------------------------------------------------
def test_scopes_that_differ_in_metres_are_build_errors():
    make(trunk_scope=[[-8, 8, 2], [-6, 6, 1]], label_scope=[[-7, 7, 0.25], [-6, 6, 0.25]])
    with pytest.raises(GridError, match=r'input_scope is 16x12 cells.*trunk.*cover 18x12.*point_cloud_range'):
        make(trunk_scope=[[-9, 9, 1], [-6, 6, 1]])
    with pytest.raises(GridError, match=r'output_scope is 28x24 cells.*labels cover 32x24.*LoadBEVSegmentation'):
        make(label_scope=[[-8, 8, 0.5], [-6, 6, 0.5]])
    with pytest.warns(UserWarning, match='trunk'):
        make(trunk_scope=[[-9, 9, 1], [-6, 6, 1]], compat='reference')
    with pytest.raises(GridError, match='cell count 600'):
        make(grid_transform=dict(SCOPES, output_scope=[[-50, 50, 0.167]] * 2))


@pytest.mark.parametrize('kwargs, message', [
    (dict(class_weights={'dividr': 2}), "class_weights: unknown class 'dividr'"),
    (dict(class_weights=[1, 2]), 'class_weights: 2 values for 3 classes'),
    (dict(class_weights=[1, 2, 0]), 'positive number, got 0'),
    (dict(class_weights={'divider': 'x'}), "positive number, got 'x'"),
    (dict(focal_alpha=2), 'focal_alpha must be None or a number up to 1, got 2'),
    (dict(focal_gamma=-1), 'focal_gamma must be a number of at least 0, got -1'),
    (dict(dice_smooth=0), 'dice_smooth must be'),
    (dict(aux_weight=float('nan')), 'aux_weight must be'),
    (dict(target_resample='bilinear'), "target_resample must be one of .* got 'bilinear'"),
    (dict(use_checkpoint=['aspp', 'head']), "use_checkpoint: .* got 'head'"),
])
def test_wrong_settings_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**kwargs)


# ---- AMP and checkpointing -----------------------------------------------------------------------------------------------
def test_autocast_losses_are_float32_and_close():
    head = make()
    x, target = inputs()
    exact = head(x, target)
    with torch.autocast('cpu', torch.bfloat16):
        half = head(x, target)
    for name, value in exact.items():
        assert half[name].dtype == torch.float32
        assert half[name].item() == pytest.approx(value.item(), rel=0.1, abs=0.02), name


def test_losses_of_a_large_map_under_autocast():
    """800x800 = 640,000 cells: sums beyond half precision's range."""
    head = make(grid_transform=dict(SCOPES, output_scope=[[-8, 8, 0.02], [-8, 8, 0.02]]), aspp_channels=2,
                aspp_rates=(), decoder_channels=[])
    target = torch.ones(1, 3, 800, 800, dtype=torch.uint8)
    with torch.autocast('cpu', torch.bfloat16):
        losses = head(inputs(1)[0], target)
        with torch.no_grad():
            head.eval()
            p = head(inputs(1)[0]).double()
    expected = 2 * p.sum((0, 2, 3)) / (p.sum((0, 2, 3)) + 640_000)
    for index, name in enumerate(CLASSES):
        assert math.isfinite(losses[f'{name}/focal'].item())
        assert losses[f'{name}/dice_score'].item() == pytest.approx(expected[index].item(), rel=1e-4)


@pytest.mark.parametrize('stages', [True, ['aspp'], ['attention'], ['decoder'], 'decoder'])
@pytest.mark.parametrize('amp', [False, True])
def test_checkpointing_changes_nothing_but_memory(stages, amp):
    plain = make()
    saving = copy.deepcopy(plain)
    saving.checkpointed = make(use_checkpoint=stages).checkpointed
    x, target = inputs()
    results = []
    for head in (plain, saving):
        trunk = x.clone().requires_grad_()
        kept = {}
        with torch.autocast('cpu', torch.bfloat16, enabled=amp), \
                torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.update({t.data_ptr(): t}) or t, lambda t: t):
            losses = head(trunk, target)
        memory = sum(t.numel() * t.element_size() for t in kept.values())
        total = sum(v for v in losses.values() if v.requires_grad)
        grads = torch.autograd.grad(total, [trunk, *head.parameters()])
        results.append((losses, grads, memory))
    (losses, grads, memory), (losses2, grads2, memory2) = results
    assert memory2 < memory
    for name in losses:
        torch.testing.assert_close(losses2[name], losses[name], rtol=1e-6, atol=1e-7)
    for a, b in zip(grads, grads2):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


class Count(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('amp', [False, True])
def test_no_convolution_of_a_map_runs_again(amp):
    """What is recomputed are norms and attention (whose own convolution sees two channels)."""
    counts = []
    for use_checkpoint in (False, True):
        head = make(use_checkpoint=use_checkpoint)
        with Count() as count, torch.autocast('cpu', torch.bfloat16, enabled=amp):
            losses = head(*inputs())
            gradients(head, losses)
        counts.append(count.calls)
    plain, saving = counts
    assert plain['convolution_backward'] == saving['convolution_backward'] == plain['convolution']
    assert saving['convolution'] - plain['convolution'] == 1  # the gate of the spatial attention
    # Norms: one per branch, that of the sum, one per layer of the decoder. The pooled branch's is not worth it.
    assert plain['group_norm_relu'] == 3 + 1 + 1 + 2
    assert saving['group_norm_relu'] == 2 * plain['group_norm_relu'] - 1


def test_recomputed_maps_are_gone_without_garbage_collection():
    """The second run is left in the middle by an exception; maps in a cycle of its frames would wait for Python to look."""
    head = make(use_checkpoint=True)
    x, target = inputs()
    sizes = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            tracker = StorageTracker()
            with tracker:
                total = sum(v for v in head(x, target).values() if v.requires_grad)
                total.backward()
                head.zero_grad(set_to_none=True)
                del total
            sizes.append(tracker.total)
    finally:
        gc.enable()
    assert max(sizes) < 16 * 28 * 24 * 4, 'less than one map of the decoder'


@pytest.mark.parametrize('settings', [{}, dict(use_checkpoint=True), dict(use_aspp=False), dict(use_channel_attention=False),
                                      dict(use_spatial_attention=False, use_channel_attention=False)])
def test_channels_last_reaches_every_convolution(settings):
    plain = make(**settings)
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    x, target = inputs()
    seen = {}

    def watch(name):
        return lambda module, args, out: seen.update({name: all(
            t.is_contiguous(memory_format=torch.channels_last) for t in (args[0], out))})

    for name, module in last.named_modules():
        if isinstance(module, (nn.Conv2d, GroupNormReLU)) and 'spatial' not in name:
            module.register_forward_hook(watch(name))
    grads = [gradients(head, head(x, target)) for head in (plain, last)]
    assert len(seen) >= 6 and all(seen.values()), seen
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-5)
    plain.eval(), last.eval()
    torch.testing.assert_close(last(x), plain(x), rtol=1e-5, atol=1e-6)


def test_checkpointing_with_a_trunk_that_needs_no_gradient():
    """A frozen trunk (the reentrant kind of checkpoint would lose all gradients here)."""
    head = make(use_checkpoint=True)
    for name, grad in gradients(head, head(*inputs())).items():
        assert grad.isfinite().all() and grad.abs().sum() > 0, name


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('use_checkpoint', [False, True])
def test_gpu_training_step_at_800x800(dtype, use_checkpoint):
    head = make(grid_transform=dict(SCOPES, output_scope=[[-8, 8, 0.02], [-8, 8, 0.02]]), aspp_channels=64,
                decoder_channels=[64, 32],
                use_checkpoint=use_checkpoint).cuda()
    target = torch.ones(1, 3, 800, 800, dtype=torch.bool, device='cuda')
    with torch.autocast('cuda', dtype):
        losses = head(inputs(1)[0].cuda(), target)
    assert all(v.isfinite() and v.dtype == torch.float32 for v in losses.values())
    assert all(g.isfinite().all() for g in gradients(head, losses).values())
