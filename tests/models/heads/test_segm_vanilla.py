"""The vanilla head against the golden numbers of the reference, and its contract."""
import pytest
import torch
from testing import Golden, rand, randn, weights_rule

from mmdet3d_ext.geometry.grid import GridError
from mmdet3d_ext.models.heads.segm import BEVSegmentationHead
from mmdet3d_ext.registry import MODELS

CLASSES = ['drivable_area', 'ped_crossing', 'walkway', 'stop_line', 'carpark_area', 'divider']
SCOPES = dict(input_scope=[[-51.2, 51.2, 0.8], [-51.2, 51.2, 0.8]], output_scope=[[-50, 50, 0.5], [-50, 50, 0.5]])
SMALL = dict(input_scope=[[-8, 8, 1], [-6, 6, 1]], output_scope=[[-8, 8, 0.5], [-6, 6, 0.5]])


def golden_head(loss):
    head = BEVSegmentationHead(256, SCOPES, CLASSES, loss)
    head.load_state_dict(weights_rule().ruled_state_dict(head.state_dict()))
    return head


def test_golden_eval_and_train():
    golden = Golden('bev_grid_and_segm_head.npz')
    x = randn(104, (2, 256, 128, 128))
    golden.check('head_in', x)
    shares = torch.tensor([0.4, 0.05, 0.2, 0.02, 0.1, 0.15])
    target = rand(105, (2, 6, 200, 200)) < shares[None, :, None, None]
    golden.check('target_mean_per_class', target.double().mean((0, 2, 3)).numpy())
    head = golden_head('focal')
    logits = []
    head.classifier.register_forward_hook(lambda module, args, out: logits.append(out.detach()))
    with torch.no_grad():
        golden.check('head_eval_sigmoid', head.eval()(x))
        golden.check('head_eval_logits', logits.pop())
        losses = head.train()(x, target.long())
    assert list(losses) == list(golden['train_focal_keys'])
    golden.check('train_focal', torch.stack(list(losses.values())))
    golden.check('train_focal_bn1_running_mean', head.classifier[1].running_mean)
    golden.check('train_focal_bn1_running_var', head.classifier[1].running_var)
    xent = BEVSegmentationHead(256, SCOPES, CLASSES, 'xent').to_target_size
    assert xent(logits[0], (200, 200)) is logits[0]
    head.loss = 'xent'
    head.load_state_dict(golden_head('xent').state_dict())
    with torch.no_grad():
        losses = head(x, target)
    assert list(losses) == list(golden['train_xent_keys'])
    golden.check('train_xent', torch.stack(list(losses.values())))


def test_state_names():
    head = BEVSegmentationHead(8, SMALL, CLASSES)
    norm = ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    names = ['classifier.0.weight', *(f'classifier.1.{n}' for n in norm), 'classifier.3.weight',
             *(f'classifier.4.{n}' for n in norm), 'classifier.6.weight', 'classifier.6.bias']
    assert list(head.state_dict()) == names


def test_contract():
    head = MODELS.build(dict(type='BEVSegmentationHead', in_channels=8, grid_transform=SMALL, classes=CLASSES, loss='xent'))
    x, target = randn(1, (3, 8, 16, 12)), rand(2, (3, 6, 32, 24)) < 0.2
    losses = head([x], target)
    assert list(losses) == [f'{name}/xent' for name in CLASSES]
    assert all(v.dim() == 0 and v.requires_grad and v.isfinite() for v in losses.values())
    sum(losses.values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())
    out = head.eval()(x)
    assert out.shape == (3, 6, 32, 24) and out.dtype == torch.float32 and 0 <= out.min() and out.max() <= 1


def test_errors():
    with pytest.raises(ValueError, match="loss must be one of .* got 'dice'"):
        BEVSegmentationHead(8, SMALL, CLASSES, 'dice')
    with pytest.raises(ValueError, match='classes must be a list of different names'):
        BEVSegmentationHead(8, SMALL, ['a', 'a'])
    with pytest.raises(ValueError, match='grid_transform takes input_scope'):
        BEVSegmentationHead(8, dict(SMALL, scale=2), CLASSES)
    with pytest.raises(GridError, match=r'input_scope is 16x12 cells.*trunk.*10x10'):
        BEVSegmentationHead(8, SMALL, CLASSES, trunk_scope=[[-5, 5, 1], [-5, 5, 1]])
    head = BEVSegmentationHead(8, SMALL, CLASSES)
    with pytest.raises(ValueError, match='needs gt_masks_bev'):
        head(randn(1, (1, 8, 16, 12)))
    with pytest.raises(ValueError, match=r'gt_masks_bev must be \(B, classes, X, Y\).*got \(2, 6, 32, 24\)'):
        head(randn(1, (1, 8, 16, 12)), torch.zeros(2, 6, 32, 24))
