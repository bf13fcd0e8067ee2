"""What ranks exchange in a training step: gradients of the whole batch, few collectives, beside the backward pass."""
import copy
import sys
import time
import warnings

import pytest
import torch
from ranks import in_ranks
from testing import REPO
from torch import nn

sys.path[:0] = [str(REPO / part) for part in ('benchmarks', 'tests/models/detectors', 'tests/models/vtransforms', 'tests/engine/inference')]

import scaling_rank as scaling  # noqa: E402

from mmdet3d_ext.config import load_config  # noqa: E402
from mmdet3d_ext.datasets.synthetic.batch import random_batch  # noqa: E402
from mmdet3d_ext.engine import benchmark  # noqa: E402
from mmdet3d_ext.engine.amp import AmpPlan  # noqa: E402
from mmdet3d_ext.engine.launch import UserError  # noqa: E402
from mmdet3d_ext.engine.parallel import StepModel, exchange_settings, finish_exchange, sum_losses  # noqa: E402
from mmdet3d_ext.engine.train import make_model  # noqa: E402
from mmdet3d_ext.over_ranks import alone, count_over_ranks  # noqa: E402

CPU = torch.device('cpu')
pytestmark = pytest.mark.usefixtures('one_thread')
TINY = str(REPO / 'configs' / 'synthetic' / 'multitask_tiny.yaml')


# ---- gradients ---------------------------------------------------------------------------------------------------------------

def transfusion(compat=None):
    """The tiny joint model, and one sample per rank with 30 and 3 boxes."""
    cfg = load_config(TINY, ['--compat', compat] if compat else [])
    torch.manual_seed(0)
    parts = [random_batch(cfg, 1, CPU, 7 + rank, points=500) for rank in range(2)]
    for part, count in zip(parts, (30, 3)):
        for key in ('gt_bboxes_3d', 'gt_labels_3d'):
            part[key] = [part[key][0][:count]]
    return make_model(cfg), parts


def centerpoint(head='centerpoint', objects=2):
    """A small joint model; rank 1's sample has no box at all."""
    import test_predictor as ready
    import test_with_real_heads as real
    torch.manual_seed(0)
    model = real.build_model({**real.small.config('camera', 'lidar'), 'heads': {'object': ready.HEADS[head], 'map': real.MAP}})
    model.init_weights()
    whole = {**real.small.batch(2, points=[150, 90]), **real.objects(2), 'gt_masks_bev': (torch.rand(2, 2, 48, 36) < 0.3).long()}
    for key in ('gt_bboxes_3d', 'gt_labels_3d'):
        whole[key] = [value[:objects] for value in whole[key]]
    return model, [{key: value[rank:rank + 1] for key, value in whole.items()} for rank in range(2)]


def small_transfusion():
    return centerpoint('transfusion')


def small_transfusion_without_boxes():
    """Counts of zero on all ranks: the divisor is one over all of them, not one for each."""
    return centerpoint('transfusion', 0)


def centerpoint_without_boxes():
    return centerpoint(objects=0)


def exchanged_gradients(model, parts, tmp_path):
    def work(rank):
        own = copy.deepcopy(model).train()
        wrapped = StepModel(own, CPU)
        with scaling.without_chance(own):
            out = wrapped.train_step(parts[rank])
            out['loss'].backward()
        finish_exchange(out)
        return scaling.gradients(own), dict(zip(out['log_names'], out['log_values'].tolist()))

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return in_ranks(work, tmp_path)


@pytest.mark.parametrize('setup', [transfusion, small_transfusion, small_transfusion_without_boxes, centerpoint, centerpoint_without_boxes])
def test_gradients_are_those_of_one_process_with_all_samples(tmp_path, setup):
    """Also where ranks hold unlike numbers of objects, by which losses are divided."""
    model, parts = setup()
    (first, log), (second, _) = exchanged_gradients(model, parts, tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first), 'ranks differ'
    found = scaling.difference(first, scaling.part_by_part(model, CPU, parts))
    assert found['parameters'] > 50 and found['relative'] < 1e-6 and found['worst_relative'] < 1e-5, found
    # All samples in one forward pass: sums in another order, whose last bits a model with initial statistics enlarges.
    found = scaling.difference(first, scaling.at_once(model, CPU, parts))
    assert found['relative'] < 1e-3, found
    names, values = sum_losses(losses_of(model, scaling.joined(parts)))[1:]
    for name, value in zip(names, values):  # the log's losses are those of the whole batch, too
        if name.startswith('loss'):
            assert log[name] == pytest.approx(float(value), rel=1e-4), name


def losses_of(model, batch):
    model = copy.deepcopy(model).train()
    with scaling.without_chance(model):
        return model(**batch)


def test_the_reference_divides_by_the_count_of_each_rank(tmp_path):
    """``compat: reference``: the gradient is the mean of the ranks' own, which is another one when their objects differ."""
    model, parts = transfusion('reference')
    (first, _), _ = exchanged_gradients(model, parts, tmp_path)
    own = [scaling.at_once(model, CPU, [part]) for part in parts]
    mean = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
    assert scaling.difference(first, mean)['relative'] < 1e-6
    assert scaling.difference(first, scaling.at_once(model, CPU, parts))['relative'] > 1e-2


def test_the_depth_loss_is_that_of_the_whole_batch(tmp_path):
    from test_bevdepth import CFG, batch
    from test_bevdepth import build_model as build
    torch.manual_seed(0)
    model, inputs = build(CFG), batch(2)
    depths = inputs['depths'].clone()
    depths[1] *= torch.rand(depths.shape[1:]) < 0.2
    depth = torch.rand(2, depths.shape[-3] if depths.dim() == 4 else depths.shape[2], model.D, *model.feature_size).softmax(2)
    whole = float(model.depth_loss(depth, depths))
    shares = in_ranks(lambda rank: float(model.depth_loss(depth[rank:rank + 1], depths[rank:rank + 1])), tmp_path)
    assert sum(shares) / 2 == pytest.approx(whole, rel=1e-5)
    lone = [float(model.depth_loss(depth[rank:rank + 1], depths[rank:rank + 1])) for rank in range(2)]
    assert sum(lone) / 2 != pytest.approx(whole, rel=1e-3)


def test_counts_over_ranks(tmp_path):
    def work(rank):
        counts = torch.tensor([1.0, 10.0]) * (rank + 1)
        with alone():
            by_itself = count_over_ranks(counts)
        return by_itself, count_over_ranks(counts), count_over_ranks(torch.tensor(rank + 5)), counts

    for rank, (by_itself, both, scalar, counts) in enumerate(in_ranks(work, tmp_path)):
        assert by_itself[1] == 1 and by_itself[0].tolist() == [rank + 1, 10 * rank + 10]
        assert both[1] == 2 and both[0].tolist() == [3, 30] and scalar[0].item() == 11 and scalar[0].dtype == torch.float32
        assert counts.tolist() == [rank + 1, 10 * rank + 10], 'the argument was changed'
    assert count_over_ranks(torch.tensor([3]))[0].tolist() == [3.0]


def test_counts_of_any_kind_and_of_nothing(tmp_path):
    """Three ranks, of which some count nothing; whole numbers, truth values' sums, values with a graph; none of them is changed."""
    def work(rank):
        mask = torch.zeros(5, dtype=torch.bool)
        mask[:rank] = True
        weights = torch.full((2,), float(rank), requires_grad=True)
        given = [torch.zeros(3, dtype=torch.int32), mask.sum(), weights * 2, torch.tensor([2 ** 23 + rank])]
        before = [value.detach().clone() for value in given]
        found = [count_over_ranks(value) for value in given]
        assert all(torch.equal(value, old) for value, old in zip(given, before))
        try:
            with alone():
                assert count_over_ranks(mask.sum()) == (rank, 1)
                raise KeyError
        except KeyError:
            after = count_over_ranks(torch.ones(1))  # over all ranks again
        return [(total.tolist(), total.requires_grad, total.dtype, ranks) for total, ranks in [*found, after]]

    for found in in_ranks(work, tmp_path, world=3):
        f32 = torch.float32
        assert found == [([0.0] * 3, False, f32, 3), (3.0, False, f32, 3), ([6.0, 6.0], False, f32, 3),
                         ([3.0 * 2 ** 23 + 4], False, f32, 3), ([3.0], False, f32, 3)]  # beyond 2^24 to the next even number


# ---- how often, and when --------------------------------------------------------------------------------------------------------

def test_collectives_of_a_step_are_few(tmp_path):
    """Buckets, one for the log, one for the head's counts. Clipping, guard and buffers ask for nothing; nothing is sent within a group
    of accumulated steps."""
    cap = 0.05
    cfg = load_config(TINY, ['--dist_params.bucket_cap_mb', str(cap)])
    model, parts = centerpoint()
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)

    def work(rank):
        steps = benchmark.Steps(cfg, model, CPU, 1, AmpPlan(None))
        steps.run(parts[rank:rank + 1], 2)  # the second forward pass puts the buckets in the order of the backward pass
        calls = benchmark.collectives(lambda: steps.run(parts[rank:rank + 1], 1))
        with steps.runner.model.no_sync():
            inner = benchmark.collectives(lambda: steps.run(parts[rank:rank + 1], 1))
        buckets = steps.runner.model._forward[0]._get_ddp_logging_data()['rebuilt_bucket_sizes'].split(',')
        return calls, inner, [int(size) for size in buckets]

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        results = in_ranks(work, tmp_path)
    assert results[0] == results[1], 'ranks run other collectives'
    calls, inner, buckets = results[0]
    assert sum(buckets) == size and 2 <= len(buckets) <= size / (cap * 2 ** 20) + 1
    assert calls == {'allreduce': len(buckets) + 2}
    assert inner == {'allreduce': 2}


class Layers(nn.Module):
    """Four layers of 64 KiB each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(4)])

    def forward(self, x, metas=None):
        return {'loss/a': self.layers(x).pow(2).mean()}


def batch_of(rank):
    return {'x': torch.full((2, 128), 1.0 + rank), 'metas': [{}, {}]}


def test_buckets_leave_while_the_backward_pass_goes_on(tmp_path):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def work(rank):
        torch.manual_seed(0)
        model, seen = Layers(), []
        wrapped = StepModel(model, CPU, bucket_cap_mb=0.1)

        def send(state, bucket):
            seen.append('sent')
            return allreduce_hook(state, bucket)

        wrapped._forward[0].register_comm_hook(None, send)
        for number, layer in enumerate(model.layers):
            layer.weight.register_hook(lambda gradient, number=number: seen.append(number))
        for _ in range(3):
            seen.clear()
            model.zero_grad(set_to_none=True)
            finish_exchange(out := wrapped.train_step(batch_of(rank)))
            out['loss'].backward()
        ddp = wrapped._forward[0]
        views = all(p.grad is not None for p in model.parameters()) and ddp.gradient_as_bucket_view
        return seen, views, ddp.broadcast_buffers, ddp.find_unused_parameters, ddp.static_graph

    for seen, *settings in in_ranks(work, tmp_path):
        assert [entry for entry in seen if entry != 'sent'] == [3, 2, 1, 0] and seen.count('sent') == 2
        assert seen.index('sent') < seen.index(0), f'the first bucket waited for the whole backward pass: {seen}'
        assert settings == [True, False, False, False]


def test_a_rank_does_not_wait_for_the_forward_pass_of_another(tmp_path):
    """Rank 0 is through its ``train_step`` before rank 1 begins its own."""
    def work(rank):
        torch.manual_seed(0)
        wrapped = StepModel(Layers(), CPU)
        for _ in range(2):  # the names of the losses are compared in the first, the buckets laid out anew in the second
            wrapped.train_step(batch_of(rank))['loss'].backward()
        through = tmp_path / 'through'
        begin = time.monotonic()
        while rank == 1 and not through.exists() and time.monotonic() - begin < 30:
            time.sleep(0.01)
        waited = time.monotonic() - begin
        out = wrapped.train_step(batch_of(rank), flags=(rank == 1, False))
        through.touch()
        out['loss'].backward()
        finish_exchange(out)
        finish_exchange(out)  # a second time does nothing
        return waited, float(out['log_values'][0]), float(out['local_values'][0]), (out['flags'] > 0).tolist()

    (_, one, first, flags), (waited, other, second, _) = in_ranks(work, tmp_path)
    assert waited < 25, 'rank 0 stood in its train_step'
    assert one == other == pytest.approx((first + second) / 2, rel=1e-6) and flags == [True, False]


# ---- keys ---------------------------------------------------------------------------------------------------------------------

def test_keys_reach_the_wrapper_and_bad_values_are_named():
    assert exchange_settings({}) == {'find_unused_parameters': False}
    assert exchange_settings({'dist_params': {'bucket_cap_mb': 50, 'compression': 'bf16', 'backend': 'gloo'},
                              'find_unused_parameters': True}) == {'find_unused_parameters': True, 'bucket_cap_mb': 50,
                                                                   'compression': 'bf16'}
    for key, value, words in (('bucket_cap_mb', 0, 'MiB > 0'), ('bucket_cap_mb', '25', 'MiB > 0'), ('bucket_cap_mb', True, 'MiB > 0'),
                              ('compression', 'fp8', 'fp16 or bf16'), ('compression', True, 'fp16 or bf16')):
        cfg = load_config(TINY, [f'--dist_params.{key}', repr(value)])
        with pytest.raises(UserError, match=rf'dist_params\.{key}.*{words}'):
            exchange_settings(cfg)


def test_compression_rounds_what_is_sent(tmp_path):
    def work(rank):
        found = {}
        for name in (None, 'bf16', 'fp16'):
            torch.manual_seed(0)
            model = Layers()
            wrapped = StepModel(model, CPU, compression=name)  # DDP's hooks would be gone with it
            wrapped.train_step(batch_of(rank))['loss'].backward()
            found[name] = model.layers[0].weight.grad.clone()
        return found

    for found in in_ranks(work, tmp_path):
        for name, step in (('bf16', 2.0 ** -8), ('fp16', 2.0 ** -11)):
            apart = (found[name] - found[None]).abs()
            assert 0 < apart.max() and bool((apart <= 4 * step * found[None].abs() + 1e-7).all()), name
            dtype = {'bf16': torch.bfloat16, 'fp16': torch.float16}[name]
            assert torch.equal(found[name].to(dtype).float(), found[name]), 'the sum itself is of that type'
