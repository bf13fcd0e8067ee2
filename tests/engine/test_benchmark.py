"""The step benchmark: what it reports is what was run, and its table shows ratios to a baseline."""
import contextlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from mmdet3d_ext.config import load_config
from mmdet3d_ext.engine import benchmark, timing
from mmdet3d_ext.engine.launch import UserError
from mmdet3d_ext.engine.parallel import unpack_batch
from mmdet3d_ext.engine.train import make_model

REPO = Path(__file__).resolve().parents[2]
TINY = str(REPO / 'configs' / 'synthetic' / 'multitask_tiny.yaml')
CPU = torch.device('cpu')


@pytest.fixture(scope='module')
def tiny():
    cfg = load_config(TINY)
    torch.manual_seed(0)
    return cfg, benchmark.make_batches(cfg, 1, CPU, points=2000, count=1)


def test_boxes_of_a_batch_stay_where_the_pipeline_leaves_them(tiny):
    _, (batch,) = tiny
    found = unpack_batch(batch, torch.device('meta'))  # in place of a GPU
    assert found['img'].device.type == 'meta' and [boxes.tensor.device.type for boxes in found['gt_bboxes_3d']] == ['cpu']


def test_training_row_has_every_part_and_they_add_up(tiny):
    cfg, batches = tiny
    model = make_model(cfg)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    row = benchmark.training(cfg, CPU, 1, 'fp32', iterations=2, warmup=1, batches=batches, model=model)
    parts = row['parts']
    names = set(timing.parts_of(model))
    assert {'encoders.camera.backbone', 'encoders.lidar.voxelize', 'fuser', 'heads.object', 'heads.map'} <= names
    assert names | {'heads.object.start_matching', 'heads.object.loss', 'forward', 'backward', 'optimizer'} == set(parts)
    assert min(parts.values()) > 0
    assert sum(parts[name] for name in names) <= parts['forward'] * 1.05
    assert row['step_ms'] == pytest.approx(sum(parts[n] for n in ('forward', 'backward', 'optimizer')), rel=0.8)
    assert row['data_wait_ms'] < 0.2 * row['step_ms'], 'batches in memory are not waited for'
    assert row['samples_per_s'] == pytest.approx(1e3 / row['step_ms']) and row['peak_mib'] is None
    # The real step ran: weights moved, and nothing of the measurement stays in the model.
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in timing.parts_of(model).values())
    assert 'loss' not in vars(model.heads['object'])


def test_parts_of_a_trunk_of_its_own_and_of_decoders_per_task():
    part = torch.nn.Identity
    trunk = torch.nn.ModuleDict({'backbone': part(), 'neck': part()})
    model = torch.nn.Module()
    model.fuser, model.decoder = part(), torch.nn.ModuleDict({'object': trunk, 'map': trunk})
    branch = torch.nn.Module()
    branch.fuser, branch.decoder = None, trunk
    model.branches = torch.nn.ModuleDict({'map': branch})
    assert list(timing.parts_of(model)) == [
        'fuser', 'decoder.object.backbone', 'decoder.object.neck', 'decoder.map.backbone', 'decoder.map.neck',
        'branches.map.decoder.backbone', 'branches.map.decoder.neck']


def test_precisions_are_set_and_put_back():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with timing.precision('fp32', CPU) as dtype:
        assert dtype is None and not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    with timing.precision('torch', CPU):
        assert torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    with timing.precision('tf32', CPU):
        assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32
    assert before == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    for name, words in (('fp8', 'must be among'), ('fp16', 'needs a GPU')):
        with pytest.raises(UserError, match=words):
            with timing.precision(name, CPU):
                pass


def row(mode='train', samples=4, precision='fp32', per_second=13.0, peak=6000.0):
    return dict(mode=mode, samples=samples, precision=precision, step_ms=1e3 * samples / per_second, samples_per_s=per_second,
                data_wait_ms=0.0, peak_mib=peak, host_waits=3, wait_sites={'mmdet3d_ext/x.py:3': 2}, parts={'forward': 1.5})


def test_table_compares_with_the_same_batch_only():
    baseline = {'runs': [row(per_second=3.25, peak=24000.0), row(samples=2, per_second=100.0)]}
    text = benchmark.table([row(), row(precision='fp16', per_second=26.0), row(samples=8)], baseline).split('\n')
    assert '3.25/s (fp32) | 4.00x | 4.00x' in text[2]
    assert '3.25/s (fp32) | 8.00x' in text[3], 'without a baseline of its precision the fp32 one is taken and named'
    assert text[4].endswith('| - | - | - |')
    assert 'mmdet3d_ext/x.py:3 (2)' in text[-1]


def test_files_that_are_no_baseline_or_cloud(tmp_path):
    for content in ('no json', '[]', '{"runs": 3}'):
        path = tmp_path / 'b.json'
        path.write_text(content)
        with pytest.raises(UserError, match='--baseline'):
            benchmark.read_baseline(str(path))
    path = tmp_path / 'cloud.bin'
    path.write_bytes(b'\0' * 24)
    with pytest.raises(UserError, match='no rows of 5'):
        benchmark.read_cloud(str(path), 1)
    torch.arange(10, dtype=torch.float32).numpy().tofile(path)
    cloud = benchmark.read_cloud(str(path), 3)
    assert cloud.shape == (6, 5) and cloud[4, 1] == pytest.approx(1 - 0.8)


def the_tool():
    spec = importlib.util.spec_from_file_location('benchmark_tool', REPO / 'tools' / 'benchmark.py')
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_tool_writes_its_files(tmp_path, capsys):
    tool = the_tool()
    code = tool.main([TINY, '--batch', '1', '--iterations', '1', '--warmup', '0', '--points', '500', '--out', str(tmp_path)])
    assert code == 0
    content = json.loads((tmp_path / 'benchmark.json').read_text())
    assert content['runs'][0]['samples'] == 1 and content['config'] == TINY
    assert 'encoders.camera.backbone' in (tmp_path / 'benchmark.md').read_text()
    assert (tmp_path / 'trace_train_1_fp32.json.gz').stat().st_size > 1000
    assert '| train | 1 | fp32 |' in capsys.readouterr().out


def test_a_loader_goes_on_epoch_after_epoch():
    class Loader(list):
        sampler = dataset = None

    assert list(benchmark._Endless(Loader('abc'), 7)) == list('abcabca')
    with pytest.raises(UserError, match='gives no batch'):
        list(benchmark._Endless(Loader(), 1))


def test_tool_times_all_runs_before_it_profiles_one(monkeypatch, capsys, tmp_path):
    tool = the_tool()
    done = []

    def training(cfg, device, samples, name, times, profile, **settings):
        done.append((samples, name, times, profile))
        found = row(samples=samples, precision=name)
        late = {key: found.pop(key) for key in ('host_waits', 'wait_sites')}
        return {**(found if times else dict(samples=samples, precision=name)), **(late if profile else {})}

    monkeypatch.setattr(benchmark, 'training', training)
    monkeypatch.setattr(benchmark, 'make_batches', lambda *args: [])
    assert tool.main([TINY, '--batch', '1', '2', '--precision', 'fp32', 'bf16']) == 0
    each = [(samples, name) for samples in (1, 2) for name in ('fp32', 'bf16')]
    assert done == [(*job, True, False) for job in each] + [(*job, False, True) for job in each]
    assert capsys.readouterr().out.count('| 3 | 6,000 |') == 4
    done.clear()
    assert tool.main([TINY, '--batch', '1']) == 0 and done == [(1, 'fp32', True, False), (1, 'fp32', False, True)]

    def interrupted(*args, times, **settings):
        if not times:
            raise KeyboardInterrupt
        return training(*args, times=times, **settings)

    monkeypatch.setattr(benchmark, 'training', interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        tool.main([TINY, '--batch', '1', '2', '--out', str(tmp_path)])
    assert [run['samples'] for run in json.loads((tmp_path / 'benchmark.json').read_text())['runs']] == [1, 2], 'times are not lost'


def test_tool_says_where_it_cannot_write_and_what_it_measured(monkeypatch, capsys, tmp_path):
    tool = the_tool()
    monkeypatch.setattr(benchmark, 'training', lambda *args, **settings: row())
    monkeypatch.setattr(benchmark, 'make_batches', lambda *args: [])
    (tmp_path / 'file').touch()
    (tmp_path / 'folder' / 'benchmark.json').mkdir(parents=True)
    assert tool.main([TINY, '--batch', '1', '--out', str(tmp_path / 'file')]) != 0
    said = capsys.readouterr()
    assert f'--out: cannot write there: {tmp_path / "file"}: File exists' in said.err and '| train |' not in said.out
    assert tool.main([TINY, '--batch', '1', '--out', str(tmp_path / 'folder')]) != 0
    said = capsys.readouterr()
    assert '--out: cannot write there: ' in said.err and '| train |' in said.out and 'Traceback' not in said.err


@pytest.mark.gpu
def test_host_waits_are_counted(tiny):
    cfg, _ = tiny
    device = torch.device('cuda')
    batches = benchmark.make_batches(cfg, 2, device, points=2000, count=1)
    found = benchmark.training(cfg, device, 2, 'fp16', iterations=2, warmup=2, batches=batches)
    # The forward's (test_host_waits.py), one for the log, the gradients' norm and the guard together, one while the scaler searches.
    assert 1 <= found['host_waits'] <= 18 and found['peak_mib'] > 10, (found['host_waits'], found['wait_sites'])
    sites = {site.partition(':')[0] for site in found['wait_sites']} - {'torch/_ops.py', 'torch/amp/grad_scaler.py'}
    assert sites == {'mmdet3d_ext/engine/runner.py'}, found['wait_sites']
