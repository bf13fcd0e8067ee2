"""What a loader reads: draws with their own random numbers, unreadable samples, notes of workers; batches from any step on."""
import logging
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from mmdet3d_ext.datasets.builder import build_dataloader
from mmdet3d_ext.datasets.epoch_state import own_random_numbers, random_state, seed_process, set_random_state
from mmdet3d_ext.datasets.reader import Draw, SampleError, SampleFault, SampleReader, dead_workers, enter_worker, make_notes, note
from mmdet3d_ext.datasets.samplers import DistributedTrainSampler
from mmdet3d_ext.datasets.stream import batches


class Noise(Dataset):
    """Index and a number of each generator."""

    CLASSES = ('car',)

    def __init__(self, size=12, broken=(), error=None):
        self.size, self.broken, self.error = size, set(broken), error or OSError('cannot be read')

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.broken:
            raise self.error
        return {'index': int(index), 'draws': np.array([np.random.rand(), random.random(), float(torch.rand(()))])}


def epoch(loader, number=0, begin=0):
    loader.sampler.set_epoch(number)
    out = {}
    for step, batch in batches(loader, begin, logging.getLogger('reader-test')):
        out[step] = [(int(i), tuple(d.tolist())) for i, d in zip(batch['index'], batch['draws'])]
    return out


# --------------------------------------------------------------------------------------------------------------- draws

def test_a_draw_is_an_index_that_knows_its_place():
    draw = Draw(7, 3, 2)
    assert draw == 7 and [*range(10)][draw] == 7 and (draw.position, draw.epoch) == (3, 2)
    copy = pickle.loads(pickle.dumps(draw))
    assert type(copy) is Draw and (copy, copy.position, copy.epoch) == (7, 3, 2)


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('begin', [0, 1, 2, 3])
def test_an_epoch_from_any_step_on_gives_what_the_whole_one_gave(workers, begin):
    whole = epoch(build_dataloader(Noise(), 4, 0, seed=5, num_replicas=1, rank=0), 1)
    part = epoch(build_dataloader(Noise(), 4, workers, seed=5, num_replicas=1, rank=0), 1, begin)
    assert sorted(part) == list(range(begin, 3)) and all(part[step] == whole[step] for step in part)
    every = [draw for step in whole.values() for _, draws in step for draw in draws]
    assert len(set(every)) == len(every), 'no two draws share a number'


def test_draws_do_not_depend_on_the_number_of_ranks():
    one = epoch(build_dataloader(Noise(), 4, 0, seed=5, num_replicas=1, rank=0))
    two = [epoch(build_dataloader(Noise(), 2, 0, seed=5, num_replicas=2, rank=rank)) for rank in range(2)]
    assert all(one[step] == two[0][step] + two[1][step] for step in one)
    other = epoch(build_dataloader(Noise(), 4, 0, seed=6, num_replicas=1, rank=0))
    again = epoch(build_dataloader(Noise(), 4, 0, seed=5, num_replicas=1, rank=0), 1)
    numbers = [{draws for step in found.values() for _, draws in step} for found in (one, other, again)]
    assert not (numbers[0] & numbers[1] or numbers[0] & numbers[2])


def test_reading_leaves_the_processs_generators_alone():
    seed_process(3)
    before = [np.random.rand(), random.random(), float(torch.rand(()))]
    seed_process(3)
    reader = SampleReader(Noise(), seed=1)
    reader[Draw(2, 0, 0)]
    assert [np.random.rand(), random.random(), float(torch.rand(()))] == before
    assert reader[Draw(2, 0, 0)]['draws'].tolist() == reader[Draw(2, 0, 0)]['draws'].tolist()
    assert reader.CLASSES == ('car',) and len(pickle.loads(pickle.dumps(reader))) == 12


def test_random_state_comes_back():
    seed_process(4)
    state = random_state()
    torch.save(state, '/dev/null')
    first = [np.random.randn(), random.gauss(0, 1), float(torch.randn(()))]  # the gaussians keep a second number back
    set_random_state(state)
    assert [np.random.randn(), random.gauss(0, 1), float(torch.randn(()))] == first
    with own_random_numbers(9):
        inside = np.random.rand()
    with own_random_numbers(9):
        assert np.random.rand() == inside


def test_sampler_begins_once_where_it_is_told():
    sampler = DistributedTrainSampler(Noise(10), 2, 1, 0, seed=1)
    whole = list(sampler)
    sampler.begin_at(3)
    assert list(sampler) == whole[6:] and list(sampler) == whole
    sampler.begin_at(5)
    assert list(sampler) == []
    with pytest.raises(ValueError, match='batch 6 is not in an epoch of 5'):
        sampler.begin_at(6)


def test_a_sampler_that_cannot_begin_later_is_read_up_to_there():
    loader = torch.utils.data.DataLoader(list(range(6)), batch_size=2)
    assert [(n, b.tolist()) for n, b in batches(loader, 1, None)] == [(1, [2, 3]), (2, [4, 5])]


# ---------------------------------------------------------------------------------------------------- unreadable samples

def test_a_budget_without_a_limit():
    reader = SampleReader(Noise(broken=[0, 1]), seed=1, policy='skip', budget=float('inf'))
    with pytest.warns(UserWarning, match='budget allows 12'):
        reader[0]


def test_what_cannot_be_read_is_replaced_by_a_random_other_one():
    reader = SampleReader(Noise(broken=[3, 4]), seed=1, policy='skip', budget=2)
    with pytest.warns(UserWarning, match=r'cannot be read. The sample is left out .*\(1 of 12 samples cannot be read, '
                                         r'data.unreadable.budget allows 2\)'):
        first = reader[Draw(3, 0, 0)]
    assert first['index'] not in (3, 4) and reader.unreadable() == 1
    with pytest.warns(UserWarning):
        assert reader[Draw(3, 0, 0)]['index'] == first['index'] and reader.unreadable() == 1, 'the same again, counted once'
        reader[Draw(4, 1, 0)]
    assert reader.unreadable() == 2


@pytest.mark.parametrize('error, raised', [(OSError('gone'), 'gone'), (SampleError('sample x'), 'sample x')])
def test_policy_raise_and_spent_budget(error, raised):
    with pytest.raises(SampleError, match=raised):
        SampleReader(Noise(broken=[3], error=error))[3]
    with pytest.raises(SampleError, match=rf'{raised} \(sample 1 of 12 that cannot be read; data.unreadable.budget allows 0\)'):
        SampleReader(Noise(broken=[3], error=error), policy='skip', budget=0.05)[3]


@pytest.mark.parametrize('error', [SampleFault('a bug'), ValueError('a bug')])
def test_faults_of_the_code_are_never_skipped(error):
    with pytest.raises(type(error), match='a bug'):
        SampleReader(Noise(broken=[3], error=error), policy='skip', budget=9)[3]


@pytest.mark.parametrize('unreadable, message', [
    ('ignore', "policy must be one of .* got 'ignore'"), ({'policy': 'skip', 'budget': -1}, 'budget must be a number >= 0'),
    ({'polcy': 'skip'}, "unknown keys \\['polcy'\\]"), ({'policy': 'skip', 'budget': True}, 'budget must be')])
def test_wrong_settings(unreadable, message):
    with pytest.raises(ValueError, match=message):
        build_dataloader(Noise(), 1, 0, unreadable=unreadable)


def test_evaluation_refuses_to_skip():
    with pytest.raises(ValueError, match='in evaluation every sample counts'):
        build_dataloader(Noise(), 1, 0, shuffle=False, unreadable={'policy': 'skip', 'budget': 1})


# ------------------------------------------------------------------------------------------------------------- notes

def test_notes_tell_what_a_dead_worker_read():
    notes = make_notes(2)
    try:
        enter_worker(notes, 1)
        note('sample abc ' + 'x' * 500)
        note('sample dé')
    finally:
        enter_worker(None, 0)
    note('nobody')
    workers = [type('P', (), {'exitcode': code, 'pid': pid})() for code, pid in ((None, 1), (-7, 2))]
    iterator = type('I', (), {'_workers': workers})()
    assert dead_workers(iterator, notes) == ['loader worker 1 (pid 2) was killed by SIGBUS (most often /dev/shm is full) while it '
                                             'read sample dé']
    workers[1].exitcode, workers[0].exitcode = 3, 0
    assert dead_workers(iterator, None) == ['loader worker 1 (pid 2) ended with exit code 3 while it read no sample (it was making '
                                            'or sending a batch)']
    assert dead_workers(iter([]), notes) == []
