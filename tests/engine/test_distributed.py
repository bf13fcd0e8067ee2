"""Several ranks on the CPU: every launcher gives the same run, gradients are those of the whole batch, an error ends all."""
import json
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from ranks import clean_env, errors_in_ranks, free_port, in_ranks
from testing import REPO
from torch import nn

sys.path.insert(0, str(REPO / 'tests' / 'engine'))
from engine_toy import write_config  # noqa: E402

from mmdet3d_ext.config import load_config  # noqa: E402
from mmdet3d_ext.engine import train as training  # noqa: E402
from mmdet3d_ext.engine.checkpoint import read_checkpoint  # noqa: E402
from mmdet3d_ext.engine.evaluate import evaluate  # noqa: E402
from mmdet3d_ext.engine.parallel import StepModel, finish_exchange  # noqa: E402

SCRIPT = str(REPO / 'tests' / 'engine' / 'engine_toy.py')
CPU = torch.device('cpu')


def test_gloo_is_left_without_its_destructor(tmp_path):
    """torch 2.7's hangs now and then; the process that :func:`launch.run` drives ends by itself then."""
    from mmdet3d_ext.engine import launch

    def work(rank):
        return launch.stop(), dist.is_initialized()

    assert in_ranks(work, tmp_path) == [(False, True)] * 2


# ---- the wrapper -------------------------------------------------------------------------------------------------------

class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.other = nn.Linear(3, 1)
        self.names = ('loss/a', 'loss/b')

    def forward(self, x, metas=None):
        if not self.training:
            return [{'value': v} for v in self.layer(x)[:, 0]]
        return dict(zip(self.names, (self.layer(x).pow(2).mean(), self.other(x).pow(2).mean())))


def model_and_data():
    generator = torch.Generator().manual_seed(0)
    model = TwoTasks()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model, torch.randn(4, 3, generator=generator)


def test_gradients_and_logged_values_are_those_of_the_whole_batch(tmp_path):
    def work(rank):
        model, data = model_and_data()
        wrapped = StepModel(model, CPU)
        own = data[2 * rank:2 * rank + 2]
        out = wrapped.train_step({'x': own, 'metas': [{}, {}]})
        out['loss'].backward()
        finish_exchange(out)
        first = model.layer.weight.grad.clone()
        with wrapped.no_sync():  # stays local ...
            wrapped.train_step({'x': own, 'metas': [{}, {}]})['loss'].backward()
        local = model.layer.weight.grad - first
        wrapped.eval()
        with torch.no_grad():  # ... and ranks may evaluate different numbers of samples
            for _ in range(rank):
                wrapped({'x': own, 'metas': [{}, {}]})
        return first, local, out['log_values'], out['log_names'], float(out['loss'].detach())

    results = in_ranks(work, tmp_path)
    model, data = model_and_data()
    wrapped = StepModel(model, CPU)
    whole = wrapped.train_step({'x': data, 'metas': [{}] * 4})
    whole['loss'].backward()
    for first, _, values, names, _ in results:
        assert torch.allclose(first, model.layer.weight.grad, atol=1e-6)
        assert torch.allclose(values, whole['log_values'], atol=1e-6) and names == ['loss/a', 'loss/b', 'loss']
    assert not torch.allclose(results[0][1], results[1][1], atol=1e-3)
    assert torch.allclose((results[0][1] + results[1][1]) / 2, model.layer.weight.grad, atol=1e-6)
    assert results[0][4] != results[1][4]


def test_ranks_that_log_different_names_are_told_apart(tmp_path):
    def work(rank):
        model, data = model_and_data()
        model.names = ('loss/a', f'loss/b{rank}')
        StepModel(model, CPU).train_step({'x': data, 'metas': [{}] * 4})

    for error in errors_in_ranks(work, tmp_path):
        assert "rank 1 logs other losses than rank 0: missing ['loss/b0'], additional ['loss/b1']" in error


@pytest.mark.parametrize('size', [1, 5, 6])
def test_evaluation_is_exact_over_ranks(tmp_path, size):
    from engine_toy import EngineToyDataset, EngineToyModel
    torch.manual_seed(0)
    model = EngineToyModel()

    def score(rank, world):
        from mmdet3d_ext.datasets.builder import build_dataloader
        data = EngineToyDataset(size)
        loader = build_dataloader(data, 2, 0, shuffle=False, num_replicas=world, rank=rank)
        return evaluate(model, loader, data.evaluators('.'), CPU, expected=size, progress=False)

    results = in_ranks(lambda rank: score(rank, 2), tmp_path)
    single = score(0, 1)
    assert single['toy/count'] == size
    for found in results:
        assert found == pytest.approx(single, rel=1e-12)


def test_samples_left_out_or_seen_twice_are_an_error(tmp_path):
    from engine_toy import EngineToyDataset, EngineToyModel

    from mmdet3d_ext.datasets.builder import build_dataloader
    data = EngineToyDataset(5)
    loader = build_dataloader(data, 2, 0, shuffle=False, num_replicas=2, rank=0)
    with pytest.raises(RuntimeError, match='3 samples were evaluated, the data set has 5'):
        evaluate(EngineToyModel(), loader, data.evaluators('.'), CPU, expected=5, progress=False)


def test_batch_norm_statistics_become_the_mean_over_ranks(tmp_path):
    from mmdet3d_ext.engine.hooks import BatchNormSyncHook, WeightAverageHook

    def work(rank):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model.register_buffer('grid', torch.full((1,), 0.1 + rank))  # other buffers are left alone
        model[1].running_mean.fill_(rank + 1.0)
        model[1].running_var.fill_(10.0 * rank)
        runner = type('R', (), {'model': model, 'stepped': True})()
        ema = WeightAverageHook()
        ema.before_run(runner)
        ema.average['1.running_mean'].fill_(5.0 + rank)
        BatchNormSyncHook(ema).after_train_epoch(runner)
        return model[1].running_mean, model[1].running_var, ema.average['1.running_mean'], model.grid

    for rank, (mean, var, averaged, grid) in enumerate(in_ranks(work, tmp_path)):
        assert mean.tolist() == [1.5, 1.5] and var.tolist() == [5.0, 5.0] and averaged.tolist() == [5.5, 5.5]
        assert float(grid) == pytest.approx(0.1 + rank)


# ---- whole runs ----------------------------------------------------------------------------------------------------------

# One sample is NaN: the update that holds it is skipped by all ranks, whichever of them reads it.
DATA = {'samples_per_gpu': 1, 'workers_per_gpu': 0, 'train': {'type': 'EngineToyDataset', 'size': 8, 'poison': [5]},
        'val': {'type': 'EngineToyDataset', 'size': 5}}
CHANGES = dict(data=DATA, ema={'decay': 0.9}, lr_config=None)


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
    """The run in one process with the whole batch: (weights, metrics)."""
    folder = tmp_path_factory.mktemp('reference')
    config = load_config(write_config(folder, **CHANGES), ['--data.samples_per_gpu', '4'])
    result = training.train(config, training.Options(run_dir=str(folder / 'run')))
    return read_checkpoint(str(folder / 'run' / 'latest.pth')), result.metrics


def check_run(folder, reference, launcher):
    content = read_checkpoint(str(folder / 'run' / 'latest.pth'))
    expected, metrics = reference
    assert content['meta']['world_size'] == 2
    for key in ('state_dict', 'ema_state_dict'):
        assert all(torch.allclose(v, expected[key][k], atol=1e-6) for k, v in content[key].items())
    assert content['optimizer_hook']['counts'] == expected['optimizer_hook']['counts'] == {
        'steps': 2, 'scaler_skips': 0, 'nonfinite_skips': 2}
    assert json.loads((folder / 'run' / 'metrics.json').read_text()) == pytest.approx(metrics, rel=1e-5)
    (log,) = [path for path in (folder / 'run').glob('*.log')]
    text = log.read_text()
    assert f'Started by {launcher}: 2 process(es), backend gloo, device cpu' in text
    assert len(re.findall(r'Epoch \[[12]\]\[[24]/4\]\t', text)) == 4
    assert len(re.findall(r'Epoch\(val\) \[[12]\]\[3\]\t', text)) == 2
    ranks = sorted((folder / 'run' / 'logging').glob('*.log'))
    assert [path.name[-6:] for path in ranks] == ['_0.log', '_1.log']
    assert any("['token-5']" in path.read_text() for path in ranks)
    assert len(list((folder / 'run').glob('*.log.json'))) == 1
    return content['state_dict']


def test_torchpack_and_torchrun_equal_one_process(tmp_path, reference):
    """Two ranks x one sample x two accumulated steps is the same run as one process with four samples."""
    trained = {}
    for launcher in ('mpi', 'torchrun'):
        folder = tmp_path / launcher
        folder.mkdir()
        # torchpack joins the words and gives them to a second shell: the list arrives in two words
        words = [SCRIPT, write_config(folder, **CHANGES), '--run-dir', str(folder / 'run'), '--data.train.poison', '[5,', '5]',
                 '--optimizer_config.cumulative_iters', '2']
        if launcher == 'mpi':
            if shutil.which('mpirun', path=clean_env()['PATH']) is None:
                pytest.skip('needs mpirun')
            command = ['torchpack', 'dist-run', '-np', '2', sys.executable, *words]
        else:
            command = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', '2', '--master_port',
                       str(free_port()), *words]
        done = subprocess.run(command, env=clean_env(), cwd=REPO, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        trained[launcher] = check_run(folder, reference, launcher)
    assert all(torch.equal(v, trained['torchrun'][k]) for k, v in trained['mpi'].items())


def test_a_rank_that_fails_ends_the_job_without_help_of_a_launcher(tmp_path):
    """srun without --kill-on-bad-exit: nobody kills the other rank, which would wait in its collective for half an hour."""
    from mmdet3d_ext.datasets.samplers import DistributedTrainSampler
    data = dict(DATA, train={'type': 'EngineToyDataset', 'size': 8})
    sampler = DistributedTrainSampler(range(8), 1, 2, 1, seed=3)
    victim = next(iter(sampler))
    config = write_config(tmp_path, data=data)
    base = clean_env(SLURM_NTASKS='2', SLURM_NODELIST='localhost', MASTER_PORT=str(free_port()))
    ranks = [subprocess.Popen([sys.executable, SCRIPT, config, '--run-dir', str(tmp_path / 'run'), '--data.train.fail_at',
                               f'[{victim}]'], env=dict(base, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)), cwd=REPO,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for rank in range(2)]
    begin = time.monotonic()
    shown = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1], shown
    assert f'[rank 1] RuntimeError: sample {victim} cannot be read' in shown[1] and '[rank 1] Traceback' in shown[1]
    assert re.search(rf'\[rank 0\] stops, because rank 1 on \S+ failed: RuntimeError: sample {victim} cannot be read; its traceback '
                     r'is in \S+_1\.log', shown[0]) and 'Traceback' not in shown[0]
    (log,) = (tmp_path / 'run' / 'logging').glob('*_1.log')
    assert f'RuntimeError: sample {victim} cannot be read' in log.read_text()
    assert time.monotonic() - begin < 100  # starting two processes on a busy machine takes most of it
