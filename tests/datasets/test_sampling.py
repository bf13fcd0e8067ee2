"""CBGS, samplers, loaders."""
import numpy as np
import pytest
import torch
from mmcv.parallel import DataContainer
from torch.utils.data import Dataset

from mmdet3d_ext.datasets import CBGSDataset, DistributedTrainSampler, EvalSampler, build_dataloader, build_dataset
from mmdet3d_ext.registry import DATASETS


class Toy(Dataset):
    """Sample i holds the labels ``cats[i]``."""

    CLASSES = ('car', 'bus', 'bicycle')

    def __init__(self, cats=((0,),) * 8, test_mode=False):
        self.cats, self.test_mode, self.epoch = [tuple(c) for c in cats], test_mode, None

    def __len__(self):
        return len(self.cats)

    def __getitem__(self, index):
        return {'index': index, 'x': DataContainer(torch.full((2,), float(index)), stack=True, pad_dims=None),
                'boxes': DataContainer(torch.zeros(index % 3, 7))}

    def get_cat_ids(self, index):
        return list(self.cats[index])

    def set_epoch(self, epoch):
        self.epoch = epoch


CATS = [(0,)] * 80 + [(0, 1)] * 15 + [()] * 5


@pytest.fixture
def registered():
    DATASETS.own['ToyDataset'] = Toy
    yield
    del DATASETS.own['ToyDataset']


# --------------------------------------------------------------------------------------------------------------- CBGS

def test_every_present_class_gets_an_equal_share_and_absent_ones_do_not_raise(caplog):
    dataset = CBGSDataset(Toy(CATS))
    assert len(dataset) == 110  # 95 samples hold a car, 15 a bus: 110 draws, 55 for each
    assert any('no sample holds bicycle' in record.message for record in caplog.records)
    with_bus = sum(1 in dataset.get_cat_ids(i) for i in range(len(dataset)))
    assert with_bus >= 55 > 15
    assert all(dataset.get_cat_ids(i) for i in range(len(dataset))), 'samples without any class are never drawn'
    assert dataset[0]['index'] == dataset.sample_indices[0]


def test_draw_depends_on_the_seed_alone():
    np.random.seed(1)
    first = CBGSDataset(Toy(CATS)).sample_indices
    np.random.seed(2)
    second = CBGSDataset(Toy(CATS)).sample_indices
    assert np.array_equal(first, second)
    assert not np.array_equal(first, CBGSDataset(Toy(CATS), seed=1).sample_indices)


def test_nothing_to_balance():
    with pytest.raises(ValueError, match='there is nothing to balance'):
        CBGSDataset(Toy([(), ()]))


# ----------------------------------------------------------------------------------------------------------- samplers

@pytest.mark.parametrize('n, world, batch', [(1, 1, 1), (10, 1, 4), (10, 3, 2), (3, 4, 5), (24, 2, 3)])
def test_train_sampler_covers_everything_in_whole_batches(n, world, batch):
    toy = Toy([(0,)] * n)
    parts = [list(DistributedTrainSampler(toy, batch, world, rank, seed=1)) for rank in range(world)]
    assert len({len(part) for part in parts}) == 1 and len(parts[0]) == len(DistributedTrainSampler(toy, batch, world, 0))
    assert len(parts[0]) % batch == 0 and len(parts[0]) // batch == -(-n // (world * batch))
    everything = np.concatenate(parts)
    assert set(everything) == set(range(n))
    counts = np.bincount(everything, minlength=n)
    assert counts.max() - counts.min() <= 1


def test_order_is_by_seed_and_epoch_and_the_global_batch_does_not_depend_on_the_ranks():
    toy = Toy([(0,)] * 32)

    def batches(world, batch, epoch, seed=7):
        samplers = [DistributedTrainSampler(toy, batch, world, rank, seed=seed) for rank in range(world)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        return [set(step) for step in np.concatenate([np.reshape(list(s), (-1, batch)) for s in samplers], axis=1).tolist()]

    assert batches(1, 8, 0) == batches(2, 4, 0) == batches(8, 1, 0)
    assert batches(1, 8, 0) != batches(1, 8, 1) and batches(1, 8, 0) != batches(1, 8, 0, seed=8)
    assert list(DistributedTrainSampler(toy, 1, 1, 0, shuffle=False)) == list(range(32))
    batches(2, 4, 5)
    assert toy.epoch == 5, 'the data set was told'


@pytest.mark.parametrize('n, world', [(0, 2), (1, 4), (7, 3), (81, 8)])
def test_eval_sampler_gives_each_sample_exactly_once(n, world):
    parts = [list(EvalSampler(Toy([(0,)] * n), world, rank)) for rank in range(world)]
    assert sorted(np.concatenate(parts).astype(int).tolist()) == list(range(n))
    assert [len(part) for part in parts] == [len(EvalSampler(Toy([(0,)] * n), world, rank)) for rank in range(world)]


def test_bad_rank_and_empty_set():
    with pytest.raises(ValueError, match='rank 2 of 2'):
        EvalSampler(Toy(), 2, 2)
    with pytest.raises(ValueError, match='training set is empty'):
        DistributedTrainSampler(Toy([]))


# ------------------------------------------------------------------------------------------------------------ building

def test_build_wrappers_lists_and_defaults(registered):
    plain = build_dataset(dict(type='ToyDataset', cats=CATS), test_mode=True)
    assert isinstance(plain, Toy) and plain.test_mode
    wrapped = build_dataset(dict(type='CBGSDataset', dataset=dict(type='ToyDataset', cats=CATS)))
    assert isinstance(wrapped, CBGSDataset) and isinstance(wrapped.dataset, Toy)
    nested = build_dataset(dict(type='RepeatDataset', times=3, dataset=dict(type='CBGSDataset', dataset=dict(
        type='ToyDataset', cats=CATS))))
    assert len(nested) == 3 * 110
    joined = build_dataset([dict(type='ToyDataset'), dict(type='ToyDataset', cats=CATS)])
    assert len(joined) == 8 + 100
    with pytest.raises(KeyError, match="did you mean 'ToyDataset'"):
        build_dataset(dict(type='ToyDatase'))
    with pytest.raises(TypeError, match="takes no argument 'catz'; did you mean 'cats'"):
        build_dataset(dict(type='ToyDataset', catz=1))


def test_loader_collates_data_containers_in_whole_batches():
    loader = build_dataloader(Toy([(0,)] * 10), 4, 0, seed=0, num_replicas=1, rank=0)
    batches = list(loader)
    assert len(batches) == len(loader) == 3
    for batch in batches:
        assert batch['x'].data[0].shape == (4, 2)
        assert [len(boxes) for boxes in batch['boxes'].data[0]] == [int(i) % 3 for i in batch['index']]
    assert len(set(torch.cat([batch['index'] for batch in batches]).tolist())) == 10


def test_evaluation_loader_does_not_repeat():
    seen = []
    for rank in range(3):
        loader = build_dataloader(Toy([(0,)] * 10), 2, 0, shuffle=False, num_replicas=3, rank=rank)
        seen += [int(i) for batch in loader for i in batch['index']]
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize('samples, workers, message', [(0, 0, 'samples_per_gpu'), (2.0, 0, 'samples_per_gpu'),
                                                       (1, -1, 'workers_per_gpu')])
def test_bad_loader_arguments(samples, workers, message):
    with pytest.raises(ValueError, match=message):
        build_dataloader(Toy(), samples, workers)
