"""What every epoch begins with: its random numbers, and its number told to samplers, data sets and transforms."""
from __future__ import annotations

from typing import Any, Iterator

from mmcv.runner import HOOKS, Hook

from ..seeding import derive, seed_all


def epoch_aware(loader: Any) -> Iterator[Any]:
    """Everything under a loader that has ``set_epoch``: samplers, wrapped data sets, and the transforms of their pipelines."""
    queue = [getattr(loader, 'sampler', None), getattr(loader, 'batch_sampler', None), getattr(loader, 'dataset', None)]
    seen = set()
    while queue:
        item = queue.pop(0)
        if item is None or id(item) in seen or isinstance(item, (str, bytes, int, float, dict)):
            continue
        seen.add(id(item))
        if callable(getattr(item, 'set_epoch', None)):
            yield item
        for name in ('sampler', 'dataset', 'datasets', 'pipeline', 'transforms'):
            child = getattr(item, name, None)
            queue += list(child) if isinstance(child, (list, tuple)) else [child]


@HOOKS.register_module()
class EpochSetupHook(Hook):
    """Seeds each epoch from (seed, rank, epoch) and calls ``set_epoch(epoch)`` on whatever has it.

    Args:
        seed: the run's seed.
        paste_stop_epoch: epoch (from 0) at which object paste ends: ``stop_paste`` is told to transforms that know it; -1
            leaves them alone.
    """

    def __init__(self, seed: int, paste_stop_epoch: int = -1):
        self.seed, self.paste_stop_epoch = seed, paste_stop_epoch

    def before_train_epoch(self, runner: Any) -> None:
        seed_all(derive(self.seed, runner.rank, runner.epoch))
        generator = getattr(runner.data_loader, 'generator', None)
        if generator is not None:  # loader workers draw their base seed from it, once per epoch
            generator.manual_seed(derive(self.seed, runner.rank, runner.epoch, 1))
        for item in epoch_aware(runner.data_loader):
            item.set_epoch(runner.epoch)
        if self.paste_stop_epoch >= 0 and runner.epoch == self.paste_stop_epoch:
            runner.logger.info('object paste stops from epoch %d on', runner.epoch + 1)

    def after_train_epoch(self, runner: Any) -> None:
        count = getattr(runner.data_loader.dataset, 'unreadable', int)()
        if count:
            runner.logger.error('rank %d, epoch %d: %d samples could not be read so far and were left out (the warnings above name '
                                'their files)', runner.rank, runner.epoch + 1, count)
