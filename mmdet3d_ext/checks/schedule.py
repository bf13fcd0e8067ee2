"""Schedule: keys that must be there, two names for one thing, and the batch that the learning rate was chosen for."""
from __future__ import annotations

import math
import os

from .context import Context
from .values import count

REQUIRED = ('optimizer.type', 'optimizer.lr', 'data.samples_per_gpu')
# A learning rate this many times above the one in proportion to the batch is refused. A single GPU that tries an eight-GPU recipe is
# only warned: Adam survives that for a while, and at more the gradients blow up (square-root scaling would be a factor of 2.8).
MAX_FACTOR = 8.0


def check_schedule(c: Context) -> None:
    for key in REQUIRED:
        if c.get(key) is None:
            c.error(key, 'is missing', {key: {'optimizer.type': 'AdamW', 'optimizer.lr': 2e-4, 'data.samples_per_gpu': 1}[key]})
    if not c.has('lr_config'):
        c.error('lr_config', 'is missing: write a schedule, or null for a constant learning rate', {'lr_config': None})
    _epochs(c)
    _batch(c)
    for key in ('load_from', 'resume_from'):
        value = c.get(key)
        for file in value if isinstance(value, list) else [value]:
            if isinstance(file, str) and file not in ('', 'auto') and '://' not in file and not os.path.exists(os.path.expanduser(file)):
                c.error(key, f'checkpoint {file} does not exist')


def _epochs(c: Context) -> None:
    epochs, runner = count(c, 'max_epochs'), count(c, 'runner.max_epochs')
    if c.get('max_epochs') is None and c.get('runner.max_epochs') is None and c.get('max_iters') is not None:
        c.error('max_iters', 'training is by epochs here; set max_epochs', {'max_epochs': 20})
        return
    if c.get('max_epochs') is None and c.get('runner.max_epochs') is None:
        c.error('max_epochs', 'is missing: for how many epochs is trained?', {'max_epochs': 20})
        return
    if epochs is not None and runner is not None and epochs != runner:
        c.error('runner.max_epochs', f'is {runner} ({c.source("runner.max_epochs")}), but max_epochs (total_epochs) is {epochs} '
                f'({c.source("max_epochs")})', {'runner.max_epochs': epochs} if c.rank('max_epochs') >= c.rank('runner.max_epochs')
                else {'max_epochs': runner})
    for name in ('total_epochs', 'epochs'):
        for section in ('runner', 'data', 'evaluation'):
            if c.get(f'{section}.{name}') is not None:
                c.error(f'{section}.{name}', f'has no effect; the number of epochs is max_epochs ({epochs})',
                        {'max_epochs': c.get(f'{section}.{name}')})
    epochs = epochs or runner
    if epochs is None:
        return
    # The last epoch is evaluated and saved whatever the interval; only a later start leaves it out.
    for key, what in (('evaluation.start', 'the model is never evaluated'), ('checkpoint_config.interval', 'only the end is saved')):
        value = c.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > epochs:
            c.warn(key, f'is {value} with max_epochs {epochs}: {what}', {key: 1})
    stop = c.get('gt_paste_stop_epoch')
    if isinstance(stop, int) and stop > epochs:
        c.warn('gt_paste_stop_epoch', f'is {stop} with max_epochs {epochs}: objects are pasted to the end')


def _batch(c: Context) -> None:
    """Samples per update against ``auto_scale_lr.base_batch_size``, for which the learning rate was chosen."""
    base, samples, rate = c.get('auto_scale_lr.base_batch_size'), count(c, 'data.samples_per_gpu'), c.get('optimizer.lr')
    accumulate = count(c, 'optimizer_config.cumulative_iters') or 1
    if not base or samples is None or isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
        return
    per_gpu = samples * accumulate
    if c.gpus is None:
        if base % per_gpu:
            c.error('auto_scale_lr.base_batch_size', f'is {base}, but a GPU has {samples} x {accumulate} samples per update '
                    '(data.samples_per_gpu x optimizer_config.cumulative_iters): no number of GPUs makes that batch',
                    {'auto_scale_lr.base_batch_size': math.ceil(base / per_gpu) * per_gpu})
        else:
            c.report.notes.append(f'learning rate {rate:g} is for {base} samples per update: {base // per_gpu} GPU(s) x {samples} samples'
                                  + (f' x {accumulate} iterations' if accumulate > 1 else ''))
        return
    batch = c.gpus * per_gpu
    if batch == base:
        return
    fitting, text = rate * batch / base, (f'the effective batch is {batch} samples ({c.gpus} GPU(s) x {samples} x {accumulate}), the '
                                          f'recipe\'s learning rate {rate:g} was chosen for {base}')
    if c.get('auto_scale_lr.enable'):
        c.report.notes.append(f'{text}; auto_scale_lr makes it {fitting:g}')
        return
    report = c.error if base / batch > MAX_FACTOR else c.warn
    report('optimizer.lr', f'{text}; in proportion it would be {fitting:g}. To keep it, give the batch as '
           f'--auto_scale_lr.base_batch_size {batch}', {'auto_scale_lr.enable': True})
