"""On GPUs: float16 with the scaler, memory in the log, and two ranks over NCCL by every launcher."""
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from testing import REPO

sys.path.insert(0, str(REPO / 'tests' / 'engine'))
from engine_toy import write_config  # noqa: E402

from mmdet3d_ext.config import load_config  # noqa: E402
from mmdet3d_ext.engine import train as training  # noqa: E402
from mmdet3d_ext.engine.checkpoint import read_checkpoint  # noqa: E402

pytestmark = pytest.mark.gpu
SCRIPT = str(REPO / 'tests' / 'engine' / 'engine_toy.py')


def run(folder, *overrides, **changes):
    folder.mkdir(exist_ok=True)
    config = load_config(write_config(folder, **changes), [str(word) for word in overrides])
    return training.train(config, training.Options(run_dir=str(folder / 'run')), torch.device('cuda', 0))


def json_lines(folder):
    (path,) = (folder / 'run').glob('*.log.json')
    return [json.loads(line) for line in open(path)]


def test_float16_searches_its_scale_and_trains_like_float32(tmp_path):
    plain, half = tmp_path / 'a', tmp_path / 'b'
    run(plain, '--max_epochs', 4)
    # 2^40 overflows: the search has to come down to a working scale without harm
    run(half, '--max_epochs', 8, fp16={'loss_scale': {'init_scale': 2.0 ** 40, 'growth_interval': 2000}})
    content = read_checkpoint(str(half / 'run' / 'latest.pth'))
    counts = content['optimizer_hook']['counts']
    assert counts['scaler_skips'] >= 5 and counts['nonfinite_skips'] == 0 and counts['steps'] == 32 - counts['scaler_skips']
    assert content['optimizer_hook']['scaler']['scale'] == 2.0 ** (40 - counts['scaler_skips'])
    assert all(torch.isfinite(v).all() for v in content['state_dict'].values())
    (log,) = (half / 'run').glob('*.log')
    assert "the scaler's normal search" in log.read_text()
    lines = [x for x in json_lines(plain) if x.get('mode') == 'train']
    assert all(x['memory'] >= 0 for x in lines)
    assert re.search(r'data_time: \d\.\d{3}, memory: \d+, loss/object/l2', next((plain / 'run').glob('*.log')).read_text())


def test_bfloat16_and_averages_on_the_gpu(tmp_path):
    run(tmp_path / 'a', '--max_epochs', 2, amp={'dtype': 'bf16'}, ema={'decay': 0.9})
    content = read_checkpoint(str(tmp_path / 'a' / 'run' / 'latest.pth'))
    assert content['ema_info']['steps'] == 8 and content['ema_state_dict']['trunk.0.weight'].device.type == 'cpu'
    config = load_config(write_config(tmp_path / 'a', amp={'dtype': 'bf16'}, ema={'decay': 0.9}), ['--max_epochs', '3'])
    training.train(config, training.Options(run_dir=str(tmp_path / 'a' / 'run'), resume_from='auto'), torch.device('cuda', 0))
    assert read_checkpoint(str(tmp_path / 'a' / 'run' / 'latest.pth'))['ema_info']['steps'] == 12


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs two GPUs')
@pytest.mark.parametrize('launcher', ['torchrun', 'torchpack'])
def test_two_ranks_over_nccl_equal_one(tmp_path, launcher):
    data = {'samples_per_gpu': 2, 'workers_per_gpu': 1, 'train': {'type': 'EngineToyDataset', 'size': 8, 'poison': [5]},
            'val': {'type': 'EngineToyDataset', 'size': 5}}
    run(tmp_path / 'one', '--data.samples_per_gpu', 4, data=data)
    folder = tmp_path / 'two'
    folder.mkdir()
    words = [SCRIPT, write_config(folder, data=data), '--run-dir', str(folder / 'run')]
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', *words]
    if launcher == 'torchpack':
        if not shutil.which('mpirun'):
            pytest.skip('needs mpirun')
        pytest.importorskip('torchpack')
        code = 'import sys; from torchpack.launch import main; sys.argv[0] = "torchpack"; main()'
        command = [sys.executable, '-c', code, 'dist-run', '-np', '2', sys.executable, *words]
    done = subprocess.run(command, cwd=REPO, env=dict(os.environ, OMP_NUM_THREADS='1'), capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    one, two = (read_checkpoint(str(tmp_path / name / 'run' / 'latest.pth')) for name in ('one', 'two'))
    assert two['meta']['world_size'] == 2
    assert all(torch.allclose(v, two['state_dict'][k], atol=1e-5) for k, v in one['state_dict'].items())
    counts = [content['optimizer_hook']['counts'] for content in (one, two)]
    assert counts[0] == counts[1] == {'steps': 2, 'scaler_skips': 0, 'nonfinite_skips': 2}
    (log,) = (folder / 'run').glob('*.log')
    assert 'backend nccl, device cuda:0' in log.read_text()
    assert [x['toy/count'] for x in json_lines(folder) if x.get('mode') == 'val'] == [5.0, 5.0]
