"""Writing: plain content, atomic files, the newest whole checkpoint."""
import errno
import os
import resource
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mmdet3d_ext.engine import checkpoint as files
from mmdet3d_ext.engine.checkpoint import CheckpointError, CheckpointWriteError, read_checkpoint


def save(content, path):
    torch.save(content, path)
    return str(path)


def test_plain_refuses_what_a_safe_reader_cannot_read(tmp_path):
    value = files.plain({'a': np.float32(1.5), 3: (1, 2), 'o': OrderedDict(x=np.arange(2)), 'p': nn.Parameter(torch.ones(2))})
    read = read_checkpoint(save(value, tmp_path / 'c.pth'))
    assert read['a'] == 1.5 and read[3] == [1, 2] and read['o']['x'].tolist() == [0, 1] and read['p'].tolist() == [1, 1]
    with pytest.raises(TypeError, match='plain values'):
        files.plain({'a': object()})


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    """The file size limit makes write() fail in the middle, as a full disk does."""
    path = str(tmp_path / 'epoch_1.pth')
    files.write_atomic({'w': torch.zeros(10)}, path)
    before = open(path, 'rb').read()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointWriteError, match=r'cannot write .*epoch_1.pth: .*MiB free'):
            files.write_atomic({'w': torch.zeros(1_000_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert open(path, 'rb').read() == before and os.listdir(tmp_path) == ['epoch_1.pth']


@pytest.mark.parametrize('copies', [True, False])
def test_a_link_that_cannot_be_made(tmp_path, monkeypatch, copies):
    """Without links a copy takes the name; on a full disk the old one stays, and the run hears of it as of any checkpoint."""
    def full(*names, **_):
        Path(names[-1]).write_bytes(b'half')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ('epoch_1.pth', 'epoch_2.pth'):
        (tmp_path / name).write_bytes(name.encode())
    files.link_atomic(str(tmp_path / 'epoch_1.pth'), str(tmp_path / 'latest.pth'))
    monkeypatch.setattr(os, 'symlink', full)
    if copies:
        files.link_atomic(str(tmp_path / 'epoch_2.pth'), str(tmp_path / 'latest.pth'))
        assert (tmp_path / 'latest.pth').read_bytes() == b'epoch_2.pth'
    else:
        monkeypatch.setattr(shutil, 'copyfile', full)
        with pytest.raises(CheckpointWriteError, match=r'cannot write .*latest.pth: No space left on device'):
            files.link_atomic(str(tmp_path / 'epoch_2.pth'), str(tmp_path / 'latest.pth'))
        assert os.readlink(tmp_path / 'latest.pth') == 'epoch_1.pth'
    assert sorted(os.listdir(tmp_path)) == ['epoch_1.pth', 'epoch_2.pth', 'latest.pth']


def test_link_and_leftovers(tmp_path):
    for name in ('epoch_1.pth', 'epoch_2.pth', 'epoch_3.pth.tmp-77'):
        (tmp_path / name).write_bytes(name.encode())
    for name in ('epoch_1.pth', 'epoch_2.pth'):
        files.link_atomic(str(tmp_path / name), str(tmp_path / 'latest.pth'))
    assert (tmp_path / 'latest.pth').read_bytes() == b'epoch_2.pth' and os.readlink(tmp_path / 'latest.pth') == 'epoch_2.pth'
    files.clean_leftovers(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ['epoch_1.pth', 'epoch_2.pth', 'latest.pth']


def test_newest_whole_checkpoint(tmp_path):
    assert files.newest_checkpoint(str(tmp_path)) == (None, [])
    paths = {epoch: save({'state_dict': {'w': torch.ones(1)}}, tmp_path / f'epoch_{epoch}.pth') for epoch in (2, 9, 10)}
    assert files.newest_checkpoint(str(tmp_path)) == (paths[10], [])  # by number, not by name
    os.truncate(paths[10], 200)
    assert files.newest_checkpoint(str(tmp_path)) == (paths[9], [paths[10]])
    os.truncate(paths[9], 0), os.truncate(paths[2], 100)
    with pytest.raises(CheckpointError, match='none of the 3 checkpoints .* can be read .newest: .*epoch_10.pth'):
        files.newest_checkpoint(str(tmp_path))
