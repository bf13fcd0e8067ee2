"""Reading: nothing may run code, and every unusable file says why."""
import os
import pickle

import numpy as np
import pytest
import torch

from mmdet3d_ext.engine import checkpoint as files
from mmdet3d_ext.engine.checkpoint import CheckpointError, read_checkpoint


def save(content, path):
    torch.save(content, path)
    return str(path)


class Runs:
    """Pickles into a call that leaves a trace."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    save({'state_dict': {'w': torch.ones(1)}}, tmp_path / 'a.pth')
    assert 'state_dict' in read_checkpoint('~/a.pth')


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path):
    trace = str(tmp_path / 'trace')
    path = save({'state_dict': {'w': torch.ones(1)}, 'meta': Runs(trace)}, tmp_path / 'evil.pth')
    with pytest.raises(CheckpointError, match=r'evil.pth holds more than weights \(.*mkdir.*can run code.*--allow-unsafe-'):
        read_checkpoint(path)
    assert not os.path.exists(trace)
    with open(tmp_path / 'plain.pth', 'wb') as stream:  # not even torch's format
        pickle.dump({'meta': Runs(trace)}, stream)
    with pytest.raises(CheckpointError):
        read_checkpoint(str(tmp_path / 'plain.pth'))
    assert not os.path.exists(trace)
    assert not files.is_checkpoint_whole(path) and not os.path.exists(trace)
    read_checkpoint(path, allow_unsafe=True)  # the deliberate way
    assert os.path.exists(trace)


def test_numpy_scalars_of_mmcv_meta_are_read(tmp_path):
    path = save({'state_dict': {'w': torch.ones(1)}, 'meta': {'score': np.float64(0.5), 'n': np.int64(3), 'a': np.arange(3)}},
                tmp_path / 'np.pth')
    meta = read_checkpoint(path)['meta']
    assert meta['score'] == 0.5 and meta['n'] == 3 and list(meta['a']) == [0, 1, 2]


@pytest.mark.parametrize('damage', ['half', 'empty', 'text', 'bit'])
def test_unreadable_files_are_named(tmp_path, damage):
    path = save({'state_dict': {'w': torch.arange(5000.0)}}, tmp_path / 'c.pth')
    data = bytearray(open(path, 'rb').read())
    if damage == 'bit':
        data[len(data) // 2] ^= 0xFF  # inside the tensor: only a checksum can tell
    content = {'half': data[:len(data) // 2], 'empty': b'', 'text': b'<html>404 not found</html>', 'bit': data}[damage]
    with open(path, 'wb') as stream:
        stream.write(content)
    assert not files.is_checkpoint_whole(path)
    if damage != 'bit':
        with pytest.raises(CheckpointError, match=rf'c.pth \({len(content)} bytes\) is not a readable checkpoint'):
            read_checkpoint(path)


def test_absent_files_and_addresses_are_explained(tmp_path):
    save({}, tmp_path / 'epoch_3.pth')
    with pytest.raises(CheckpointError, match='nope.pth does not exist; there are epoch_3.pth'):
        read_checkpoint(str(tmp_path / 'nope.pth'))
    os.symlink('gone.pth', tmp_path / 'latest.pth')
    with pytest.raises(CheckpointError, match='link to a file that is gone'):
        read_checkpoint(str(tmp_path / 'latest.pth'))
    with pytest.raises(CheckpointError, match='download it first'):
        read_checkpoint('https://example.org/c.pth')
