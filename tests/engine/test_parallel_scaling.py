"""The scaling benchmark: jobs, what a rank measures (gloo, two processes), and the report."""
import argparse
import json
import subprocess
import sys
import warnings

import pytest
import torch
from ranks import clean_env, in_ranks
from testing import REPO

sys.path[:0] = [str(REPO / 'benchmarks'), str(REPO / 'tests' / 'models' / 'detectors')]

import scaling  # noqa: E402
import scaling_rank  # noqa: E402

from mmdet3d_ext.config import load_config  # noqa: E402
from mmdet3d_ext.engine import launch  # noqa: E402

TINY = 'configs/synthetic/multitask_tiny.yaml'


# ---- a rank -------------------------------------------------------------------------------------------------------------------

def bench_of(rank):
    """A bench over the small model of the detector's tests; one sample per rank."""
    import test_with_real_heads as real
    torch.manual_seed(0)
    model = real.build_model({**real.small.config('camera', 'lidar'), 'heads': {'object': real.CENTER, 'map': real.MAP}})
    model.init_weights()
    whole = {**real.small.batch(2, points=[150, 90]), **real.objects(2), 'gt_masks_bev': (torch.rand(2, 2, 48, 36) < 0.3).long()}
    parts = [{key: value[r:r + 1] for key, value in whole.items()} for r in range(2)]
    bench = object.__new__(scaling_rank.Bench)
    bench.cfg, bench.device, bench.ranks, bench.template = dict(load_config(str(REPO / TINY))), torch.device('cpu'), 2, model
    bench.arguments = argparse.Namespace(batch=1, steps=3, warmup=1, points=0, equal_samples=1, short=False)
    bench.batches = parts[rank:rank + 1]
    return bench, parts


def test_what_two_ranks_measure(tmp_path, monkeypatch):
    def work(rank):
        monkeypatch.setattr(launch, '_current', launch.Launch('torchrun', rank, 2, rank, 2, '127.0.0.1', 1))
        bench, parts = bench_of(rank)
        monkeypatch.setattr(scaling_rank, 'random_batch', lambda cfg, samples, device, seed, points: parts[seed - 1000])
        return (scaling_rank.measure_step(bench, 'fp32'), scaling_rank.exchange_alone(bench, 2),
                scaling_rank.sweep(bench, 'fp32', [0.05], []), scaling_rank.compare_gradients(bench))

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        (row, alone, rows, found), (other, *_) = in_ranks(work, tmp_path)
    assert row['step_ms'] == pytest.approx(other['step_ms']), 'the slowest rank counts'
    assert row['samples_per_s'] == pytest.approx(2e3 / row['step_ms']) and row['bare_ms'] > 0 and row['weights_equal'] is True
    assert row['collectives'] == {'allreduce': 3}  # one bucket, the log, the counts
    assert alone['ms'] > 0 and alone['gb_per_s'] > 0
    (small,) = rows
    assert small['allreduces'] > 6 and (small['bucket_cap_mb'], small['compression']) == (0.05, None) and small['step_ms'] > 0
    assert found['gradients_equal_on_ranks'] is True and found['objects'] == [2, 0]
    assert found['difference']['relative'] < 1e-6 and found['again']['relative'] < 1e-6 and found['at_once']['relative'] < 1e-2


def test_unlike_bits_are_seen(tmp_path):
    def work(rank):
        same = [torch.ones(3), torch.tensor(-0.0)]
        return scaling_rank.same_on_all_ranks(same), scaling_rank.same_on_all_ranks([torch.tensor(-0.0 if rank else 0.0)])

    assert in_ranks(work, tmp_path) == [(True, False)] * 2


def test_differences_of_gradients():
    one = {'a': torch.tensor([3.0, 4.0]), 'b': torch.tensor([1e-9])}
    assert scaling_rank.difference(one, one)['relative'] == 0
    found = scaling_rank.difference({**one, 'a': torch.tensor([3.0, 4.5])}, one)
    assert (found['max_abs'], found['worst'], found['largest']) == (0.5, 'a', 4.0) and found['relative'] == pytest.approx(0.1)
    assert "['b']" in scaling_rank.difference({'a': one['a']}, one)['error']


# ---- jobs ---------------------------------------------------------------------------------------------------------------------

def test_ranks_and_commands(tmp_path):
    assert [scaling.default_ranks(n) for n in (1, 2, 3, 6, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert scaling.jobs_of([1, 2], str(tmp_path)) == [(1, 'python'), (2, 'torchrun')]
    (tmp_path / 'mpirun').touch(0o755)
    assert len(scaling.jobs_of([1, 2], str(tmp_path))) == 2
    (tmp_path / 'torchpack').touch(0o755)
    assert scaling.jobs_of([1, 2, 4], str(tmp_path))[-2:] == [(4, 'torchrun'), (4, 'torchpack')]
    assert scaling.jobs_of([1], str(tmp_path)) == [(1, 'python')]
    assert '--standalone' in scaling.command(2, 'torchrun', ['x']) and scaling.command(1, 'python', ['x'])[-2:] == [scaling.RANK, 'x']
    assert scaling.command(2, 'torchpack', [])[:4] == ['torchpack', 'dist-run', '-np', '2']


def test_the_environment_keeps_what_it_does_not_know(monkeypatch):
    monkeypatch.setenv('NCCL_NVLS_ENABLE', '0')
    monkeypatch.setenv('RANK', '3')
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    env = scaling.environment(True, 2)
    assert env['NCCL_NVLS_ENABLE'] == '0' and 'RANK' not in env and env['CUDA_VISIBLE_DEVICES'] == ''
    assert int(env['OMP_NUM_THREADS']) >= 1


@pytest.mark.parametrize('script, words', [('import time; time.sleep(60)', 'not done after 1 s'), ('raise SystemExit(3)', 'ended with 3')])
def test_a_job_that_hangs_or_fails_is_a_row_of_the_report(tmp_path, monkeypatch, script, words):
    path = tmp_path / 'rank.py'
    path.write_text('import sys\nopen(sys.argv[sys.argv.index("--result") + 1], "w").write(\'{"ranks": 1, "rows": []}\')\n' + script)
    monkeypatch.setattr(scaling, 'RANK', str(path))
    found = scaling.run_job(1, 'python', [], scaling.environment(True, 1), 1.0 if 'sleep' in script else 30.0)
    assert words in found['error'] and found['rows'] == []
    assert words in scaling.report(dict(command='x', date='d', batch=1, jobs=[found]))


# ---- the report -----------------------------------------------------------------------------------------------------------------

def job(ranks, per_second, launcher='torchrun', **more):
    row = dict(precision='fp16', ranks=ranks, samples=4, step_ms=4e3 * ranks / per_second, spread_ms=1.0, samples_per_s=per_second,
               bare_ms=None if ranks == 1 else 195.0)
    if ranks > 1:
        row.update(weights_equal=True, collectives={'allreduce': 9, 'broadcast': 1})
    return dict(ranks=ranks, started_by=launcher, backend=None if ranks == 1 else 'nccl', rows=[row], device='a GPU', torch='2', nccl='2.1',
                threads=4, parameters=50_000_000, gradient_bytes=200_000_000, **more)


def test_report():
    off = dict(max_abs=1e-6, largest=2.0, relative=1e-7, worst='fuser.0.weight', worst_relative=1e-5, parameters=3)
    last = job(2, 39.0, alone=dict(ms=1.5, gb_per_s=130.0),
               sweep=[dict(precision='fp16', bucket_cap_mb=25, compression=None, step_ms=200.0, allreduces=9)],
               gradients=dict(samples_per_rank=1, objects=[35, 17], difference=off, again=off, at_once={'error': 'none'},
                              gradients_equal_on_ranks=True))
    text = scaling.report(dict(command='x', date='d', batch=4, jobs=[job(1, 20.0, 'python'), last], without_torchpack='No mpirun.'))
    assert '| 1 | python | fp16 | 200.0 | 1.0 | 20.00 | 1.00 | - | - | - | - | - | - |' in text
    assert '| 2 | torchrun | fp16 | 205.1 | 1.0 | 39.00 | 1.95 | 97.5% | 195.0 | +10.13 | 9 | 1 | yes |' in text
    assert 'Goal for two GPUs, fp16: 1.9 times one. Measured 1.95: reached.' in text and 'No mpirun.' in text
    assert '50,000,000 trained parameters, 200.0 MB of gradients' in text and '1.50 ms, 130.0 GB/s a rank (a ring sends 2/2' in text
    assert '| 25 | float32 | fp16 | 200.0 | 9 |' in text and '| ranks, one process | 1.00e-06 | 2.00e+00 | 1.00e-07 |' in text
    worse = scaling.report(dict(command='x', date='d', batch=4, jobs=[job(1, 20.0, 'python'), job(2, 30.0)]))
    assert 'Measured 1.50: missed' in worse


def test_more_ranks_than_gpus_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(scaling, 'gpus', lambda: 1)
    with pytest.raises(SystemExit):
        scaling.main([TINY, '--ranks', '1', '2'])
    assert '--ranks 2: 1 GPU(s) are visible; --device cpu' in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_on_the_cpu(tmp_path):
    done = subprocess.run([sys.executable, str(REPO / 'benchmarks' / 'scaling.py'), TINY, '--device', 'cpu', '--ranks', '2', '--batch', '1',
                           '--precision', 'fp32', '--points', '300', '--steps', '1', '--warmup', '1', '--buckets', '--compression',
                           '--timeout', '280', '--out', str(tmp_path), '--model.encoders.camera.backbone.init_cfg', 'null'],
                          env=dict(clean_env(), PATH='/usr/bin:/bin'), cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    content = json.loads((tmp_path / 'scaling.json').read_text())
    assert content['jobs'][0]['rows'][0]['weights_equal'] and content['jobs'][0]['gradients']['difference']['relative'] < 1e-6
    assert 'All ranks hold the same gradient bit by bit: yes.' in (tmp_path / 'scaling.md').read_text()
