"""Samples that cannot be read, loader workers that die, and a /dev/shm that is too small."""
import ctypes
import json
import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from faulty import CHANGES, DATA, content, own_tmpfs, run, same_state, screen, settings  # noqa: E402

PLAIN = {**CHANGES, 'checkpoint_config': {'interval': 1}}


def data(workers=1, samples=2, loader=None, **train):
    return {**DATA, 'samples_per_gpu': samples, 'workers_per_gpu': workers, 'train': {**DATA['train'], **train}, **(loader or {})}


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp('alone')
    assert run(folder, settings(folder, **PLAIN)) == [0]
    return content(folder)


@pytest.mark.parametrize('workers', [0, 1])
def test_unreadable_sample_ends_the_run_by_default(tmp_path, fault_record, workers):
    assert run(tmp_path, settings(tmp_path, **{**PLAIN, 'data': data(workers, broken=[5])})) == [2]
    text = screen(tmp_path)
    assert 'error: sample 5: samples/LIDAR_TOP/5.bin: No such file or directory' in text and 'Traceback' not in text
    fault_record('a sample cannot be read, policy raise', 'the run ends with exit code 2 and one message: the file and the reason')


@pytest.mark.parametrize('workers', [0, 2])
def test_unreadable_samples_are_skipped_within_the_budget(tmp_path, fault_record, workers):
    loader = {'unreadable': {'policy': 'skip', 'budget': 2}}
    config = settings(tmp_path, **{**PLAIN, 'data': data(workers, loader=loader, broken=[5, 7])})
    assert run(tmp_path, config) == [0]
    text = screen(tmp_path)
    for index in (5, 7):
        assert re.search(rf'samples/LIDAR_TOP/{index}.bin: No such file or directory. The sample is left out and a random other one '
                         rf'takes its place \([12] of 24 samples cannot be read, data.unreadable.budget allows 2\)', text)
    assert re.search(r'rank 0, epoch 2: 2 samples could not be read', text)
    assert content(tmp_path)['meta']['iter'] == 24
    other = tmp_path / 'again'  # what takes its place is drawn from the epoch and the place, so it is the same again
    assert run(other, settings(other, **{**PLAIN, 'data': data(2 - workers, loader=loader, broken=[5, 7])})) == [0]
    assert same_state(content(other), content(tmp_path))
    fault_record('two samples cannot be read, policy skip', 'each is reported with its file; random others take their places',
                 'these samples')


def test_the_budget_ends(tmp_path, fault_record):
    loader = {'unreadable': {'policy': 'skip', 'budget': 0.1}}
    config = settings(tmp_path, **{**PLAIN, 'data': data(1, loader=loader, broken=[1, 5, 7])})
    assert run(tmp_path, config) == [2]
    assert re.search(r'error: samples/LIDAR_TOP/\d.bin: .* \(sample 3 of 24 that cannot be read; data.unreadable.budget allows 2\)',
                     screen(tmp_path))
    fault_record('more samples cannot be read than data.unreadable.budget', 'the run ends with exit code 2; the last file and the '
                 'count are named')


def test_evaluation_leaves_no_sample_out(tmp_path):
    broken = {**DATA, 'val': {**DATA['val'], 'broken': [3]}, 'unreadable': {'policy': 'skip', 'budget': 9}}
    assert run(tmp_path, settings(tmp_path, **{**PLAIN, 'data': broken})) == [2]
    assert 'error: sample 3: samples/LIDAR_TOP/3.bin' in screen(tmp_path)


@pytest.mark.parametrize('blow, why', [('SIGKILL', 'for want of memory'), ('SIGSEGV', 'a fault in a compiled library')])
@pytest.mark.parametrize('persistent', [False, True])
def test_a_worker_dies_once(tmp_path, alone, fault_record, blow, why, persistent):
    (tmp_path / 'armed').write_text('')
    loader = {'persistent_workers': persistent}
    config = settings(tmp_path, **{**PLAIN, 'data': data(1, loader=loader, deadly=[5], blow=blow,
                                                         while_there=str(tmp_path / 'armed'))})
    assert run(tmp_path, config) == [0]
    assert re.search(rf'ALARM: loader worker 0 \(pid \d+\) was killed by {blow} \(.*{why}.*\) while it read sample 5. The workers are '
                     r'started again at batch \d+ of the epoch, nothing is lost', screen(tmp_path))
    assert same_state(content(tmp_path), alone)
    fault_record(f'a loader worker dies of {blow}', 'an ALARM names the sample it was reading; workers start again at that batch; '
                 'bitwise the same weights')


def test_a_worker_dies_in_the_evaluation(tmp_path, alone, fault_record):
    (tmp_path / 'armed').write_text('')
    val = {'type': 'FaultyDataset', 'size': 5, 'deadly': [3], 'while_there': str(tmp_path / 'armed')}
    config = settings(tmp_path, **{**PLAIN, 'data': {**data(1), 'val': val}})
    assert run(tmp_path, config) == [0]
    assert re.search(r'ALARM: loader worker 0 .* while it read sample 3. The workers are started again at batch \d', screen(tmp_path))
    scores = [json.loads((tmp_path / 'run' / 'metrics' / f'epoch_{epoch}.json').read_text()) for epoch in (1, 2)]
    assert [score['toy/count'] for score in scores] == [5, 5] and same_state(content(tmp_path), alone)
    fault_record('a loader worker dies while evaluating', 'an ALARM names the sample; every sample is still counted once')


def test_a_worker_dies_of_the_same_sample_again_and_again(tmp_path, fault_record):
    config = settings(tmp_path, **{**PLAIN, 'data': data(2, deadly=[5])})
    assert run(tmp_path, config) == [2]
    text = screen(tmp_path)
    assert 2 <= text.count('The workers are started again') <= 4, 'also at a batch before, while that one was read ahead'
    assert re.search(r'error: loader worker \d \(pid \d+\) was killed by SIGKILL \(.*\) while it read sample 5. This was attempt 3 at '
                     r'batch \d+', text)
    fault_record('a sample kills every worker that reads it', 'after three attempts the run ends with exit code 2 and names the '
                 'sample', 'the steps since the last checkpoint')


def small_shm(size):
    """Give this process and its workers a /dev/shm of ``size`` bytes."""
    own_tmpfs('/dev/shm', size)


def test_a_small_shm_sends_batches_through_files(tmp_path, mounts, fault_record):
    """4 MiB per batch of two, 2 workers x 2 batches, 1 MiB of room; the model checks that every value arrived."""
    config = settings(tmp_path, '--max_epochs', 1, **{**PLAIN, 'data': data(2, extra=2 ** 19)})

    def prepare(rank):
        small_shm(2 ** 20)
        os.environ['TMPDIR'] = str(tmp_path)
        __import__('tempfile').tempdir = None

    assert run(tmp_path, config, prepare=prepare) == [0]
    text = screen(tmp_path)
    assert len(re.findall(r'/dev/shm has 1 MiB free, but 1 process\(es\) x 2 workers x 2 batches x 6 MiB need 21 MiB: batches go '
                          rf'through files in {tmp_path} instead', text)) == 1
    other = tmp_path / 'roomy'
    assert run(other, settings(other, '--max_epochs', 1, **{**PLAIN, 'data': data(2, extra=2 ** 19)})) == [0]
    assert same_state(content(other), content(tmp_path))
    assert not list(tmp_path.glob('mmdet3d_ext-batches-*')), 'nothing is left behind'
    fault_record('/dev/shm of 1 MiB, batches of 4 MiB', 'said once; batches go through files, all workers stay; bitwise the same '
                 'weights')


def test_a_small_shm_and_no_disk_takes_fewer_workers(tmp_path, mounts, fault_record):
    config = settings(tmp_path, '--max_epochs', 1, **{**PLAIN, 'data': data(3, extra=2 ** 18)})

    def prepare(rank):
        small_shm(10 * 2 ** 20)
        __import__('tempfile').tempdir = '/dev/shm'

    assert run(tmp_path, config, prepare=prepare) == [0]
    assert re.search(r'/dev/shm has 10 MiB free, but .* need 16 MiB, and /dev/shm has too little room as well: 1 workers instead of 3',
                     screen(tmp_path))
    fault_record('/dev/shm too small, no disk either', 'said once; as many workers as fit')


@pytest.mark.parametrize('state, reason', [('full', 'No space left on device'), ('read-only', 'Read-only file system'),
                                           ('nearly full', 'less than 64 KiB free')])
def test_a_shm_in_which_nothing_can_be_made(tmp_path, mounts, alone, fault_record, state, reason):
    """The locks of workers lie there, too, and what they share with the training process: an epoch, notes, a count."""
    config = settings(tmp_path, **{**PLAIN, 'data': data(2, loader={'unreadable': {'policy': 'skip', 'budget': 1}})})

    def prepare(rank):
        small_shm(2 ** 20)
        if state == 'read-only':
            assert ctypes.CDLL(None).mount(b'none', b'/dev/shm', None, 0x20 | 0x1, None) == 0  # MS_REMOUNT | MS_RDONLY
            return
        there = os.statvfs('/dev/shm')
        keep = 0 if state == 'full' else 3 * 4096
        with open('/dev/shm/another', 'wb', buffering=0) as stream:
            stream.write(bytes(there.f_bavail * there.f_frsize - keep))

    assert run(tmp_path, config, prepare=prepare) == [0], screen(tmp_path)
    text = screen(tmp_path)
    assert len(re.findall(rf'/dev/shm cannot hold even the locks of loader workers \({reason}\): 0 workers instead of 2', text)) == 1
    assert same_state(content(tmp_path), alone)
    fault_record(f'/dev/shm is {state}', 'said once; the training process reads by itself; bitwise the same weights')


def test_sigbus_without_the_check(tmp_path, mounts, monkeypatch, fault_record):
    """What the check spares: the worker dies of a bus error; even then the run ends with a message that says why."""
    from mmdet3d_ext.datasets import builder
    from mmdet3d_ext.datasets.sharing import SharingPlan
    monkeypatch.setattr(builder, 'plan_sharing', lambda reader, samples, workers, *_: SharingPlan(workers))
    config = settings(tmp_path, '--max_epochs', 1, **{**PLAIN, 'data': data(1, extra=2 ** 19)})
    assert run(tmp_path, config, prepare=lambda rank: small_shm(2 ** 20)) == [2]
    assert re.search(r'error: loader worker 0 \(pid \d+\) was killed by SIGBUS \(most often /dev/shm is full\) while it read no sample '
                     r'\(it was making or sending a batch\)', screen(tmp_path))
    fault_record('/dev/shm fills up while the run goes', 'three attempts, then exit code 2 and a message that names /dev/shm',
                 'the steps since the last checkpoint')
