"""Results over ranks."""
import pytest
import torch
from ranks import in_ranks

from mmdet3d_ext.metrics import gather


def _fail():
    raise ValueError('broken')


def _everything(rank):
    mine = {f't{i}': i for i in [*range(7), 0, 1][rank::3]}
    if rank == 2:
        mine['t1'] = -1  # a repeated sample: the lowest rank's result counts
    counts = torch.tensor([2 ** 40 + rank, 1])
    out = {'gathered': gather.gather_results(mine, chunk=2), 'value': gather.on_rank_zero(lambda: 42),
           'sum': gather.all_reduce_sum(counts).tolist(), 'unchanged': counts.tolist(),
           'objects': gather.all_gather_object(rank * 10), 'empty': gather.gather_results({})}
    try:
        gather.on_rank_zero(_fail)
    except Exception as error:
        out['error'] = f'{type(error).__name__}: {error}'
    return out


def test_collectives(tmp_path):
    outcomes = in_ranks(_everything, tmp_path, 3)
    assert outcomes[0]['gathered'] == {f't{i}': i for i in range(7)} and outcomes[0]['empty'] == {}
    assert [outcome['gathered'] for outcome in outcomes[1:]] == [None, None]
    for rank, outcome in enumerate(outcomes):
        assert outcome['value'] == 42 and outcome['objects'] == [0, 10, 20]
        assert outcome['sum'] == [3 * 2 ** 40 + 3, 3] and outcome['unchanged'] == [2 ** 40 + rank, 1]
    assert outcomes[0]['error'] == 'ValueError: broken'
    assert all(outcome['error'] == 'RankZeroError: rank 0 failed: ValueError: broken' for outcome in outcomes[1:])


def test_one_process_without_a_group():
    results = {'a': 1}
    assert gather.gather_results(results) == results and gather.gather_results(results) is not results
    assert gather.on_rank_zero(lambda: 3) == 3 and gather.all_gather_object('x') == ['x']
    assert gather.world_size() == 1 and gather.rank() == 0
    counts = torch.ones(2, dtype=torch.int64)
    total = gather.all_reduce_sum(counts)
    total += 1
    assert counts.tolist() == [1, 1]
    with pytest.raises(ValueError, match='broken'):
        gather.on_rank_zero(_fail)
