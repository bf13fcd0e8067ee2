"""Training from a configuration: data, model, optimizer, runner, hooks."""
from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist
from mmcv.runner import RUNNERS, build_optimizer
from torch import nn

from ..checks.types import OPTIMIZER_HOOKS, RUNNERS_OF_MMCV, runner_problem
from ..datasets.stream import close
from ..metrics import on_rank_zero
from . import run_dir as run_dirs
from .amp import AmpPlan, choose_kernels, plan_amp
from .building import building, running, where
from .checkpoint import clean_leftovers, keep_optimizer, load_files, newest_checkpoint, path_list, read_checkpoint
from .config_check import refuse_inconsistent
from .evaluate import build_evaluators, evaluate, table
from .hooks import (
    BatchNormSyncHook,
    EpochSetupHook,
    EvaluationHook,
    GuardedOptimizerHook,
    SafeCheckpointHook,
    TaskGradientHook,
    WeightAverageHook,
)
from .hooks.ema import AverageSteps
from .hooks.guard import Guard, NonFiniteError
from .hooks.logging import survive_full_disk
from .hooks.optimizer import make_scaler
from .launch import LOGGER_NAME, Launch, UserError, attach_rank_log, current
from .log_files import LogFile
from .map_labels import check_map_labels, check_object_labels
from .norm_layers import check_norm_layers, use_group_norm, use_sync_bn
from .parallel import StepModel, exchange_settings
from .runner import CustomEpochBasedRunner
from .seeding import agree_on_seed, derive, make_deterministic, seed_all
from .stopping import StopSignals

FUSED = ('Adam', 'AdamW', 'SGD')  # optimizers with a fused form in every torch that is supported


@dataclass
class Options:
    """What the command line adds to the configuration (see ``tools/train.py --help``)."""

    run_dir: Optional[str] = None
    resume_from: Optional[str] = None
    load_from: Optional[str] = None
    validate: bool = True
    deterministic: bool = False
    allow_unsafe_checkpoint: bool = False
    allow_partial_checkpoint: bool = False
    checkpoint_origin: str = 'auto'
    load_weights: str = 'auto'
    load_optimizer: bool = False


@dataclass
class Result:
    """How a training run ended: its folder, the last metrics, why the last checkpoint is not on the disk (None: it is), and what
    asked it to stop before the end (None: nothing)."""

    run_dir: str
    metrics: Dict[str, float]
    save_failed: Optional[str] = None
    stopped: Optional[str] = None


def train(cfg: Mapping[str, Any], options: Optional[Options] = None, device: Optional[torch.device] = None) -> Result:
    """Train the configured model to the end of its schedule, on all ranks of the current launch.

    Args:
        cfg: a resolved configuration (:func:`mmdet3d_ext.config.load_config`).
        options: the command line's part.
        device: this rank's device, from :func:`.launch.start`.

    Raises:
        UserError, CheckpointError: for what the user can correct. NonFiniteError: the guard stopped the run, or it ended among
            non-finite steps; its checkpoints are finite. Anything else is a fault.
    """
    options = options or Options()
    device = device or torch.device('cpu')
    launch = current()
    report = refuse_inconsistent(cfg, launch.world_size)
    epochs = cfg.get('max_epochs') or cfg['runner']['max_epochs']
    resume = options.resume_from or cfg.get('resume_from') or ('auto' if cfg.get('auto_resume') else None)
    folder = options.run_dir or cfg.get('run_dir') or cfg.get('work_dir') or run_dirs.default_run_dir(cfg)
    resume, broken = _find_resume(resume, folder)
    load_from = on_rank_zero(lambda: path_list(options.load_from or cfg.get('load_from')))  # before files are moved
    folder, stamp, moved = run_dirs.prepare(folder, cfg, resuming=bool(resume))
    logger = make_logger(folder, stamp, launch, cfg.get('log_level'))
    attach_rank_log(folder, stamp)
    if launch.is_master:
        clean_leftovers(folder)
    for note in launch.notes:
        logger.warning(note)
    for path in broken:
        logger.warning('%s does not read whole, an older checkpoint is used', path)
    if moved:
        logger.warning('%s held an earlier run: its files are in %s now', folder, moved)
    if resume is None and (options.resume_from == 'auto' or cfg.get('auto_resume') or cfg.get('resume_from') == 'auto'):
        logger.info('nothing to resume from in %s: training starts from the beginning', folder)

    seed = agree_on_seed(_seed(cfg, resume, options))
    if options.deterministic or cfg.get('deterministic'):
        make_deterministic()
    choose_kernels(cfg)
    seed_all(derive(seed, 0))  # the same on every rank, so that all build the same model
    meta = run_dirs.build_meta(cfg, seed, launch.world_size)
    _log_start(logger, meta, launch, device)
    for finding in report.warnings:
        if finding.key != 'optimizer.lr':  # make_optimizer says that loudly
            logger.warning('%s', finding)

    loader = make_loader(cfg, cfg['data']['train'], seed, train=True)
    evaluated = options.validate and cfg.get('evaluation', True) is not None  # null switches a part off
    val = cfg['data'].get('val') if evaluated else None
    val_loader = make_loader(cfg, val, seed, train=False) if val else None
    model = make_model(cfg)
    check_object_labels(model, loader.dataset)
    check_map_labels(model, loader.dataset)
    if val_loader is not None:
        check_object_labels(model, val_loader.dataset)
        check_map_labels(model, val_loader.dataset, evaluation=True)
    model, sharing = use_sync_bn(cfg, model, device)
    check_norm_layers(cfg, model.train(), sharing * cfg['data']['samples_per_gpu'], logger)
    logger.info('Model:\n%s\n%s', model, count_parameters(model))
    load_from = [run_dirs.moved_to(path, folder, moved) for path in load_from]
    loaded = []
    if load_from and not resume:
        loaded = load_files(model, load_from, logger, options.allow_unsafe_checkpoint, allow_partial=options.allow_partial_checkpoint,
                            origin=options.checkpoint_origin, prefer=options.load_weights)
    elif options.load_optimizer and not resume:
        raise UserError('--load-optimizer: there is no checkpoint to take it from; give one with --load_from')
    model.to(device)

    amp = plan_amp(cfg, device, logger)
    wrapped = StepModel(model, device, amp.dtype, **exchange_settings(cfg))
    accumulate = int((cfg.get('optimizer_config') or {}).get('cumulative_iters') or 1)
    optimizer = make_optimizer(cfg, model, logger, launch.world_size * cfg['data']['samples_per_gpu'] * accumulate)
    if loaded and options.load_optimizer:
        keep_optimizer(optimizer, model, load_from[0], loaded[0].matched, logger, options.allow_unsafe_checkpoint)
    runner = make_runner(cfg, wrapped, optimizer, folder, stamp, logger, meta, epochs)
    register_hooks(runner, cfg, amp, seed, loader, val_loader, device)
    if resume:
        before = runner.resume(resume, allow_unsafe=options.allow_unsafe_checkpoint, loader=loader)
        run_dirs.warn_about_origin(before, meta, resume, logger)
    _warn_about_warm_up(cfg, logger, epochs * len(loader))
    if runner.epoch >= epochs:
        logger.warning('the checkpoint is at epoch %d and max_epochs is %d: nothing is left to train', runner.epoch, epochs)
    with running(model, cfg), StopSignals(launch.world_size, launch.is_master) as runner.signals:
        runner.run([loader], [('train', 1)])
    close(loader), close(val_loader)
    ends = [runner.save_failed, runner.stopped and runner.stopped.why]
    if dist.is_initialized():
        dist.broadcast_object_list(ends, src=0)
    verdict = getattr(runner.stateful.get('optimizer_hook'), 'verdict', None)  # the same on all ranks
    if verdict and not any(ends):
        raise NonFiniteError(verdict)
    return Result(folder, getattr(runner, 'metrics', {}), *ends)


# --------------------------------------------------------------------------------------------------------------------
# parts, each also used by tests or by tools/test.py

def make_logger(folder: str, stamp: str, launch: Launch, level: Optional[str] = None) -> logging.Logger:
    """The logger ``mmdet3d`` in mmcv's format: rank 0 to the screen and ``<folder>/<stamp>.log``, others only their errors."""
    logger = logging.getLogger(LOGGER_NAME)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    number = logging.getLevelName(str(level or 'INFO').upper())
    if not isinstance(number, int):
        raise UserError(f'key log_level must be DEBUG, INFO, WARNING or ERROR, got {level!r}')
    logger.setLevel(number)
    plain = logging.Formatter('%(asctime)s - %(name)s - %(levelname)s - %(message)s')
    screen = logging.StreamHandler(sys.stderr)
    screen.setFormatter(plain)
    screen.setLevel(logging.NOTSET if launch.is_master else logging.ERROR)
    logger.addHandler(screen)
    if launch.is_master:
        file = LogFile(os.path.join(folder, f'{stamp}.log'))
        file.setFormatter(plain)
        logger.addHandler(file)
    from mmcv.utils.logging import logger_initialized
    logger_initialized[LOGGER_NAME] = True  # mmcv's and mmdet3d's get_logger then return it as it is
    return logger


def _log_start(logger: logging.Logger, meta: Mapping[str, Any], launch: Launch, device: torch.device) -> None:
    versions = '\n'.join(f'{name}: {version}' for name, version in meta['versions'].items())
    logger.info('Environment info:\n%s\n%s\n%s', '-' * 60, versions, '-' * 60)
    starter = launch.launcher if launch.launcher != 'none' else 'python'
    logger.info('Started by %s: %d process(es), backend %s, device %s', starter, launch.world_size,
                dist.get_backend() if dist.is_initialized() else 'none', device)
    edited = f' with local changes ({meta["code_changes"]})' if meta['code_changes'] else ''
    logger.info('Code version: %s%s', meta['code_version'][:8], edited)
    logger.info('Config:\n%s', meta['config'])
    logger.info('Set random seed to %d, deterministic: %s', meta['seed'], torch.are_deterministic_algorithms_enabled())


def _find_resume(resume: Optional[str], folder: str) -> Tuple[Optional[str], List[str]]:
    """The checkpoint to resume from, and newer ones that are broken; 'auto' is the newest whole one in the run folder."""
    if resume != 'auto':
        return resume, []
    return on_rank_zero(lambda: newest_checkpoint(folder))


def _seed(cfg: Mapping[str, Any], resume: Optional[str], options: Options) -> Optional[int]:
    """The configured seed; a resumed run whose configuration has none keeps the seed that was drawn for it."""
    if cfg.get('seed') is None and resume:
        return (read_checkpoint(resume, options.allow_unsafe_checkpoint).get('meta') or {}).get('seed')
    return cfg.get('seed')


def make_loader(cfg: Mapping[str, Any], dataset_cfg: Any, seed: Optional[int], train: bool,
                key: Optional[str] = None) -> torch.utils.data.DataLoader:
    """A data set with this rank's loader; ``key``: where the configuration has the data set, for messages."""
    from ..datasets.builder import build_dataloader, build_dataset
    from ..registry import profile
    launch = current()
    data = cfg['data']
    special = dict(data.get('train_dataloader' if train else 'val_dataloader') or {})
    key = key or f'data.{"train" if train else "val"}'
    settings = run_dirs.to_plain(dataset_cfg)
    with building(key, cfg, settings), profile(cfg.get('compat')):
        dataset = build_dataset(settings, **({} if train else {'test_mode': True}))
    samples = special.pop('samples_per_gpu', data['samples_per_gpu'] if train else 1)
    workers = special.pop('workers_per_gpu', data.get('workers_per_gpu', 0))
    for name in ('persistent_workers', 'prefetch_factor', 'pin_memory', *(['unreadable'] if train else [])):
        if data.get(name) is not None:
            special.setdefault(name, run_dirs.to_plain(data[name]))
    special.setdefault('persistent_workers', train)  # each would read the maps again in every epoch
    with building(key):
        return build_dataloader(dataset, samples, workers, shuffle=train, seed=seed, num_replicas=launch.world_size,
                                rank=launch.rank, processes=launch.local_world_size, **special)


def make_model(cfg: Mapping[str, Any]) -> nn.Module:
    """The configured model with its initial (or ``init_cfg``) weights and norm layers (``group_norm``), on the CPU."""
    from ..models.builder import build_model
    settings = run_dirs.to_plain(cfg['model'])
    with building('model', cfg, settings):
        model = build_model(settings, cfg.get('compat'))
        if hasattr(model, 'init_weights'):
            model.init_weights()
    use_group_norm(cfg, model)
    return model


def count_parameters(model: nn.Module) -> str:
    """One line per top module: parameters, trainable ones."""
    rows = []
    for name, child in [*model.named_children(), ('total', model)]:
        total = sum(p.numel() for p in child.parameters())
        free = sum(p.numel() for p in child.parameters() if p.requires_grad)
        rows.append(f'  {name:<12} {total / 1e6:>9.3f} M parameters, {free / 1e6:>9.3f} M trainable')
    return '\n'.join(rows)


def make_optimizer(cfg: Mapping[str, Any], model: nn.Module, logger: logging.Logger, batch: int) -> torch.optim.Optimizer:
    """The configured optimizer; ``batch``: samples per update over all ranks.

    On a GPU those of :data:`FUSED` update all parameters in a few launches, unless ``optimizer.fused`` or ``foreach`` says how.
    """
    settings = run_dirs.to_plain(cfg['optimizer'])
    scale = run_dirs.to_plain(cfg.get('auto_scale_lr')) or {}
    base = scale.get('base_batch_size')
    if base and batch != base:
        factor = batch / base
        if scale.get('enable'):
            settings['lr'] = settings['lr'] * factor
            logger.warning('auto_scale_lr: the batch is %d, the recipe\'s %d: lr %g becomes %g', batch, base,
                           cfg['optimizer']['lr'], settings['lr'])
        else:
            bar = '!' * 100
            logger.warning('\n%s\nThe effective batch is %d samples (ranks x samples_per_gpu x cumulative_iters), the recipe '
                           'was made for %d.\nIts learning rate %g stays; in proportion it would be %g (--auto_scale_lr.enable '
                           'true).\n%s', bar, batch, base, settings['lr'], settings['lr'] * factor, bar)
    if settings.get('type') in FUSED and not {'fused', 'foreach'} & set(settings) and all(p.is_cuda for p in model.parameters()):
        settings['fused'] = True
    with building('optimizer', cfg, settings):
        optimizer = build_optimizer(model, settings)
    merge_groups(optimizer)
    return optimizer


def merge_groups(optimizer: torch.optim.Optimizer) -> None:
    """Join parameter groups with equal settings: mmcv makes one per parameter, and an optimizer steps group by group."""
    merged: Dict[str, Dict[str, Any]] = {}
    for group in optimizer.param_groups:
        key = json.dumps({k: v for k, v in group.items() if k != 'params'}, sort_keys=True, default=str)
        if key in merged:
            merged[key]['params'] = merged[key]['params'] + group['params']
        else:
            merged[key] = dict(group, params=list(group['params']))
    optimizer.param_groups[:] = list(merged.values())


def make_runner(cfg: Mapping[str, Any], model: StepModel, optimizer: torch.optim.Optimizer, folder: Optional[str], stamp: str,
                logger: logging.Logger, meta: Dict[str, Any], epochs: int) -> CustomEpochBasedRunner:
    """The configured runner; epochs count, both mmcv's and the reference's name give ours."""
    settings = run_dirs.to_plain(cfg.get('runner')) or {}
    kind = settings.pop('type', RUNNERS_OF_MMCV[0])
    settings.pop('max_epochs', None)
    settings.pop('max_iters', None)
    problem = runner_problem(kind)
    if problem:  # of a tool that makes no other check
        raise UserError(f'{where(cfg, "runner.type")}: {problem}')
    cls = CustomEpochBasedRunner if kind in RUNNERS_OF_MMCV else RUNNERS.get(kind)
    runner = cls(model, optimizer=optimizer, work_dir=folder, logger=logger, meta=meta, max_epochs=epochs, **settings)
    runner.timestamp = stamp
    return runner


def register_hooks(runner: CustomEpochBasedRunner, cfg: Mapping[str, Any], amp: AmpPlan, seed: int, loader: Any,
                   val_loader: Any, device: torch.device) -> None:
    """All hooks, in mmcv's order of priorities."""
    runner.register_hook(EpochSetupHook(seed, int(cfg.get('gt_paste_stop_epoch') or -1)), priority='VERY_HIGH')
    with building('lr_config'):
        runner.register_lr_hook(_schedule(cfg.get('lr_config')))
    with building('momentum_config'):
        runner.register_momentum_hook(_schedule(cfg.get('momentum_config')))
    guard = _make_guard(runner, cfg)
    with building('optimizer_config'):
        _register_optimizer_hook(runner, cfg, amp, device, guard)
    ema = _register_ema(runner, cfg)
    runner.register_hook(BatchNormSyncHook(ema), priority='ABOVE_NORMAL')
    settings = run_dirs.to_plain(cfg.get('checkpoint_config'))
    if settings is not None:
        kind = settings.pop('type', 'CheckpointHook')
        for key in ('by_epoch', 'file_client_args', 'sync_buffer', 'meta'):
            settings.pop(key, None)
        if kind not in ('CheckpointHook', 'SafeCheckpointHook'):
            raise UserError(f'key checkpoint_config.type: {kind!r} is not known; leave it out')
        with building('checkpoint_config'):
            runner.register_hook(SafeCheckpointHook(**settings), priority='NORMAL')
    runner.register_timer_hook(dict(type='IterTimerHook'))
    if val_loader is not None:
        _register_evaluation(runner, cfg, val_loader, device, amp, ema)
    with building('log_config'):
        _register_loggers(runner, cfg, len(loader))
    survive_full_disk(runner)
    hooks = run_dirs.to_plain(cfg.get('custom_hooks'))
    with building('custom_hooks', cfg, hooks):
        runner.register_custom_hooks(hooks)


def _register_loggers(runner: CustomEpochBasedRunner, cfg: Mapping[str, Any], iterations: int) -> None:
    """mmcv's loggers; they write nothing in an epoch that is shorter than their interval, so that is shortened to the epoch."""
    settings = run_dirs.to_plain(cfg.get('log_config'))
    if settings:
        settings['interval'] = settings.get('interval') or 10  # mmcv's default
    if settings and settings['interval'] > iterations:
        runner.logger.warning('log_config.interval is %d, an epoch has %d iterations: one line per epoch', settings['interval'],
                              iterations)
        settings['interval'] = iterations
    runner.register_logger_hooks(settings)


def _schedule(settings: Any) -> Any:
    """A schedule's settings; mmcv wants a tuple where YAML has a list."""
    settings = run_dirs.to_plain(settings)
    if settings and isinstance(settings.get('target_ratio'), list):
        settings['target_ratio'] = tuple(settings['target_ratio'])
    return settings


def _make_guard(runner: CustomEpochBasedRunner, cfg: Mapping[str, Any]) -> Guard:
    settings = run_dirs.to_plain(cfg.get('guard')) or {}
    with building('guard', cfg, settings):
        interval = settings.pop('task_gradients', None)
        if interval is not None:
            runner.register_hook(TaskGradientHook(interval), priority='HIGH')  # before the optimizer's hook frees the graph
        return Guard(**settings)


def _register_optimizer_hook(runner: CustomEpochBasedRunner, cfg: Mapping[str, Any], amp: AmpPlan, device: torch.device,
                             guard: Guard) -> None:
    settings = run_dirs.to_plain(cfg.get('optimizer_config')) or {}
    kind = settings.pop('type', None)
    if kind not in OPTIMIZER_HOOKS:
        runner.register_optimizer_hook(dict(settings, type=kind))
        return
    for key in ('distributed', 'coalesce', 'bucket_size_mb', 'detect_anomalous_params'):  # mmcv's; they have no meaning here
        settings.pop(key, None)
    loss_scale = settings.pop('loss_scale', amp.loss_scale)
    scaler = make_scaler(loss_scale, device.type) if amp.dtype == torch.float16 else None
    hook = GuardedOptimizerHook(scaler=scaler, guard=guard, **settings)
    runner.register_hook(hook, priority='ABOVE_NORMAL')
    runner.stateful['optimizer_hook'] = hook
    runner.stateful['guard'] = guard


def _register_ema(runner: CustomEpochBasedRunner, cfg: Mapping[str, Any]) -> Optional[WeightAverageHook]:
    settings = run_dirs.to_plain(cfg.get('ema'))
    if not settings:
        return None
    settings.pop('type', None)
    if settings.pop('enable', settings.pop('enabled', True)) is False:
        return None
    with building('ema'):
        hook = WeightAverageHook(**settings)
    runner.register_hook(hook, priority='ABOVE_NORMAL')
    runner.stateful['ema_state_dict'] = hook
    runner.stateful['ema_info'] = AverageSteps(hook)
    return hook


def _register_evaluation(runner: CustomEpochBasedRunner, cfg: Mapping[str, Any], loader: Any, device: torch.device,
                         amp: AmpPlan, ema: Optional[WeightAverageHook]) -> None:
    settings = run_dirs.to_plain(cfg.get('evaluation')) or {}
    model = runner.model.module
    amp_dtype = amp.dtype if settings.get('amp') else None
    with building('data.val'):  # what cannot be evaluated is found now, not after an epoch
        build_evaluators(cfg, loader.dataset, os.path.join(runner.work_dir, 'eval'))

    def run() -> Dict[str, float]:
        evaluators = build_evaluators(cfg, loader.dataset, os.path.join(runner.work_dir, 'eval'))
        metrics = evaluate(model, loader, evaluators, device, amp_dtype, len(loader.dataset))
        runner.logger.info('Evaluation of %d samples\n%s', len(loader.dataset), table(metrics))
        return metrics

    with building('evaluation'):
        hook = EvaluationHook(run, len(loader), settings.get('interval', 1), settings.get('start'), settings.get('save_best'),
                              settings.get('rule'), bool(settings.get('before_train')), ema)
    runner.register_hook(hook, priority='LOW')


def _warn_about_warm_up(cfg: Mapping[str, Any], logger: logging.Logger, iterations: int) -> None:
    settings = cfg.get('lr_config') or {}
    warm = settings.get('warmup_iters') if settings.get('warmup') and not settings.get('warmup_by_epoch') else None
    if warm and warm * 2 > iterations:
        logger.warning('lr_config.warmup_iters is %d, the whole run has %d iterations: the learning rate spends most of it '
                       'in warm-up', warm, iterations)
