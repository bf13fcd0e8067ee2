"""A model and a data set of a few numbers, to drive the engine in tests; as a script: ``tools/train.py`` with both known."""
from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from mmcv.parallel import DataContainer  # noqa: E402
from torch import nn  # noqa: E402

import mmdet3d_ext  # noqa: E402,F401
from mmdet3d_ext.metrics.gather import all_reduce_sum  # noqa: E402
from mmdet3d_ext.registry import DATASETS, MODELS  # noqa: E402


class ToyEvaluator:
    """Mean squared error of the first output, summed while running."""

    task = 'object'

    def __init__(self):
        self.sums = torch.zeros(2, dtype=torch.float64)

    def update(self, output, batch, index):
        self.sums += torch.tensor([float((output['value'] - batch['target'][index].cpu()) ** 2), 1.0], dtype=torch.float64)
        return True

    def compute(self):
        total = all_reduce_sum(self.sums)
        return {'toy/mse': float(total[0] / total[1]), 'toy/count': float(total[1]), 'toy/score': -float(total[0] / total[1])}

    def table(self):
        return 'toy table'


@DATASETS.register_module()
class EngineToyDataset(torch.utils.data.Dataset):
    """``size`` samples of 4 numbers and a target; ``noise`` is drawn anew at each access, ``poison`` samples are NaN."""

    def __init__(self, size=8, noise=0.0, poison=(), fail_at=None, test_mode=False):
        self.size, self.noise, self.poison, self.fail_at, self.test_mode = size, noise, set(poison), fail_at, test_mode
        values = np.random.RandomState(7)
        self.inputs = values.randn(size, 4).astype(np.float32)
        self.targets = (self.inputs @ np.array([1.0, -2.0, 0.5, 0.0], np.float32)).astype(np.float32)
        self.epochs = []

    def __len__(self):
        return self.size

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def evaluators(self, out_dir):
        return [ToyEvaluator()]

    def __getitem__(self, index):
        if self.fail_at is not None and index in self.fail_at:
            raise RuntimeError(f'sample {index} cannot be read')
        value = self.inputs[index] + self.noise * np.random.randn(4).astype(np.float32)
        if index in self.poison:
            value = value * np.float32('nan')
        return {'value': DataContainer(torch.from_numpy(value.astype(np.float32)), stack=True, pad_dims=None),
                'target': DataContainer(torch.tensor(self.targets[index]), stack=True, pad_dims=None),
                'points': DataContainer(torch.ones(index % 3, 5), stack=False),
                'metas': DataContainer({'token': f'token-{index}'}, cpu_only=True)}


@MODELS.register_module()
class EngineToyModel(nn.Module):
    """Two layers and two tasks. ``stray``: a parameter that no loss uses."""

    def __init__(self, width=8, dropout=0.0, stray=False):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(dropout))
        self.heads = nn.ModuleDict({'object': nn.Linear(width, 1), 'map': nn.Linear(width, 1)})
        if stray:
            self.stray = nn.Parameter(torch.zeros(3))

    def forward(self, value, target=None, points=None, metas=None):
        assert isinstance(points, list) and len(points) == len(metas) == len(value)
        x = self.trunk(value)
        found = self.heads['object'](x).squeeze(-1)
        if not self.training:
            return [{'value': v.cpu()} for v in found.float()]
        sign = self.heads['map'](x).squeeze(-1)
        label = (target > 0).float()
        focal = nn.functional.binary_cross_entropy_with_logits(sign.float(), label)
        return OrderedDict([('loss/object/l2', ((found.float() - target) ** 2).mean()),
                            ('loss/map/drivable_area/focal', focal),
                            ('stats/object/matched_ious', ((sign > 0) == (label > 0)).float().mean().detach())])


CONFIG = '''
seed: 3
max_epochs: 2
runner: {type: CustomEpochBasedRunner, max_epochs: "${max_epochs}"}
object_classes: [car]
map_classes: [drivable_area]
data:
  samples_per_gpu: 2
  workers_per_gpu: 0
  train: {type: EngineToyDataset, size: 8}
  val: {type: EngineToyDataset, size: 5}
model: {type: EngineToyModel}
optimizer: {type: AdamW, lr: 0.01, weight_decay: 0.01}
optimizer_config: {grad_clip: {max_norm: 35, norm_type: 2}}
lr_config: {policy: CosineAnnealing, warmup: linear, warmup_iters: 2, warmup_ratio: 0.33333333, min_lr_ratio: 1.0e-3}
momentum_config: null
fp16: null
amp: null
ema: null
checkpoint_config: {interval: 1, max_keep_ckpts: 3}
evaluation: {interval: 1}
log_config: {interval: 2, hooks: [{type: TextLoggerHook}, {type: TensorboardLoggerHook}]}
custom_hooks: []
load_from: null
resume_from: null
compat: null
'''


def write_config(folder, name='toy.yaml', **changes):
    """The toy configuration as a file, with whole root keys replaced."""
    import yaml
    content = yaml.safe_load(CONFIG)
    content.update(changes)
    path = Path(folder) / name
    path.write_text(yaml.safe_dump(content))
    return str(path)


if __name__ == '__main__':
    import importlib.util
    spec = importlib.util.spec_from_file_location('train_tool', Path(__file__).resolve().parents[2] / 'tools' / 'train.py')
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    sys.exit(tool.main())
