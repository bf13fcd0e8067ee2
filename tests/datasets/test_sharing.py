"""Room for batches in /dev/shm, and batches that go through files."""
import logging
import os

import numpy as np
import pytest
import torch
from mmcv.parallel import DataContainer
from mmdet3d.core.bbox import LiDARInstance3DBoxes
from torch.utils.data import DataLoader, Dataset

from mmdet3d_ext.datasets import sharing
from mmdet3d_ext.datasets.sharing import FileBatches, SharingPlan, plan_sharing, tensor_bytes

MIB = 2 ** 20


class Large(Dataset):
    """1 MiB per sample; ``broken``: reading fails."""

    def __init__(self, broken=False):
        self.broken, self.read = broken, 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.read += 1
        if self.broken:
            raise OSError('no')
        return {'img': DataContainer(torch.zeros(MIB // 4), stack=True)}


@pytest.fixture(autouse=True)
def unsaid():
    sharing._said.clear()


def test_bytes_of_a_nested_sample():
    sample = {'img': DataContainer(torch.zeros(2, 3)), 'points': [np.zeros(5, np.float64)], 'metas': {'name': 'x', 'a': 3},
              'boxes': DataContainer(LiDARInstance3DBoxes(torch.zeros(2, 9), box_dim=9), cpu_only=True),
              'half': (torch.zeros(4, dtype=torch.float16),)}
    assert tensor_bytes(sample) == 24 + 40 + 72 + 8


@pytest.mark.parametrize('free, expected', [(20 * MIB, 4), (19 * MIB, None)])
def test_enough_room_is_workers_x_prefetch_x_batch_with_a_margin(monkeypatch, free, expected, caplog):
    """4 workers x 2 batches x 2 samples x 1 MiB x 1.25 = 20 MiB."""
    monkeypatch.setattr(sharing, '_same_device', lambda a, b: True)
    plan = plan_sharing(Large(), 2, 4, 2, free=free)
    assert (plan == SharingPlan(4)) == (expected == 4)
    assert bool(caplog.records) == (expected is None)


def test_plenty_is_not_measured_and_what_cannot_be_read_is_left_to_the_loader():
    data = Large()
    assert plan_sharing(data, 1, 2, 2, free=2 ** 40) == SharingPlan(2) and data.read == 0
    assert plan_sharing(Large(broken=True), 1, 2, 2, free=MIB) == SharingPlan(2)


def test_all_processes_of_the_machine_count_and_it_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(sharing, '_same_device', lambda a, b: True)
    with caplog.at_level(logging.WARNING, 'mmdet3d_ext'):
        plans = [plan_sharing(Large(), 2, 4, 2, processes=8, free=50 * MIB) for _ in range(2)]
    assert plans == [SharingPlan(1)] * 2  # 8 processes x 2 batches x 2.5 MiB = 40 MiB per worker
    (record,) = caplog.records
    assert '8 process(es) x 4 workers x 2 batches x 3 MiB need 160 MiB' in record.getMessage()
    assert '1 workers instead of 4' in record.getMessage()
    assert plan_sharing(Large(), 2, 4, 2, processes=8, free=MIB).workers == 0
    assert 'the training process reads by itself' in caplog.records[-1].getMessage()


def test_files_are_used_where_a_disk_has_room(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(sharing.tempfile, 'tempdir', str(tmp_path))
    monkeypatch.setattr(sharing, '_same_device', lambda a, b: False)
    dead = tmp_path / f'{sharing.FOLDER}999999999-x'
    dead.mkdir()
    plan = plan_sharing(Large(), 2, 4, 2, free=MIB)
    assert plan.workers == 4 and os.path.isdir(plan.folder) and not dead.exists()
    assert 'batches go through files' in caplog.text


class Parts(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {'a': torch.full((3, 2), float(index)), 'b': torch.tensor(index), 'c': torch.zeros(0, 4),
                'half': torch.full((2,), index, dtype=torch.bfloat16), 'flag': torch.tensor([index % 2 == 0]),
                'turned': torch.arange(6.0).reshape(2, 3).t() + index}


def identity(samples):
    return samples


def forbid_shared_memory(worker_id):
    def refuse(*_, **__):
        raise RuntimeError('shared memory is not to be used')
    torch.UntypedStorage._share_fd_cpu_ = torch.UntypedStorage._share_filename_cpu_ = refuse
    torch.UntypedStorage._new_using_fd_cpu = torch.UntypedStorage._new_using_filename_cpu = staticmethod(refuse)


@pytest.mark.parametrize('collate', [None, identity])
def test_batches_cross_whole_without_shared_memory_and_leave_no_file(tmp_path, collate):
    from torch.utils.data import default_collate
    make = collate or default_collate
    loader = DataLoader(Parts(), batch_size=2, num_workers=2, collate_fn=FileBatches(make, str(tmp_path)),
                        worker_init_fn=forbid_shared_memory)
    seen = list(loader)
    expected = [make([Parts()[i], Parts()[i + 1]]) for i in (0, 2, 4)]

    def equal(x, y):
        if isinstance(x, torch.Tensor):
            return x.dtype == y.dtype and torch.equal(x, y)
        return all(equal(x[k], y[k]) for k in (x if isinstance(x, dict) else range(len(x))))

    assert all(equal(a, b) for a, b in zip(seen, expected)) and len(seen) == 3 and not os.listdir(tmp_path)
    tensor = seen[0]['a'] if collate is None else seen[0][0]['a']
    tensor += 1  # a private copy
    with pytest.raises(RuntimeError, match='shared memory is not to be used'):
        list(DataLoader(Parts(), batch_size=2, num_workers=1, worker_init_fn=forbid_shared_memory))


def test_a_full_disk_is_the_workers_error(tmp_path):
    gone = FileBatches(torch.utils.data.default_collate, str(tmp_path / 'gone'))
    with pytest.raises(OSError, match='No such file or directory'):
        list(DataLoader(Parts(), batch_size=2, num_workers=1, collate_fn=gone))
