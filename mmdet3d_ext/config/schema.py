"""The root keys that the framework reads, and the keys of the sections that no constructor checks.

The registries check the arguments of everything with a ``type`` when it is built. This file covers the rest, so that a
misspelt key is an error with the nearest known name at load time, not a setting that is silently ignored. A package that
reads a new root key adds it with :func:`declare`, or here.
"""
from __future__ import annotations

import inspect
from typing import Any, Dict, FrozenSet, Mapping, Optional, Set

from .errors import dotted

# Root key (or dotted key of a section) -> keys of its section, or None where the section is free or not a mapping.
KNOWN: Dict[str, Optional[FrozenSet[str]]] = {}

# Old name -> name. The old one is accepted with a warning.
ALIASES = {'total_epochs': 'max_epochs'}

# Root keys of mmdet3d >= 1.1 (mmengine) -> what to write instead; docs/migrating.md has the whole table.
REPLACED = {
    'train_dataloader': 'write data.train, data.samples_per_gpu and data.workers_per_gpu',
    'val_dataloader': 'write data.val', 'test_dataloader': 'write data.test',
    'val_evaluator': 'every task that the model has is evaluated; see evaluation', 'test_evaluator': 'see evaluation',
    'optim_wrapper': 'write optimizer, optimizer_config.grad_clip and fp16 (or amp)',
    'param_scheduler': 'write lr_config and momentum_config',
    'train_cfg': 'write max_epochs and evaluation.interval', 'val_cfg': 'leave it out', 'test_cfg': 'leave it out',
    'default_hooks': 'write checkpoint_config and log_config', 'randomness': 'write seed and deterministic',
    'resume': 'write resume_from (auto: the newest checkpoint of the run folder)', 'env_cfg': 'write dist_params',
    'visualizer': 'write log_config.hooks', 'vis_backends': 'write log_config.hooks', 'log_processor': 'write log_config',
    'custom_imports': 'write a script that imports your package and calls mmdet3d_ext.engine.train.train',
    'data_root': 'called dataset_root here', 'class_names': 'called object_classes here',
    'metainfo': 'write its classes as object_classes', 'backend_args': 'files are read from the local disk; leave it out',
    'file_client_args': 'files are read from the local disk; leave it out', '_base_': 'folders inherit (default.yaml)',
    'default_scope': 'leave it out',
}

_PLAIN = '''
templates seed deterministic cudnn_benchmark allow_tf32 max_epochs max_iters load_from resume_from auto_resume run_dir work_dir compat
dataset_type dataset_root gt_paste_stop_epoch reduce_beams load_dim use_dim load_augmented point_cloud_range
voxel_size image_size augment2d augment3d object_classes map_classes map_labels depth_labels input_modality radar_sweeps
radar_use_dims radar_max_points radar_voxel_size radar_compensate_velocity radar_filtering radar_normalize radar_jitter
train_pipeline test_pipeline model optimizer lr_config
momentum_config runner custom_hooks ema sync_bn group_norm find_unused_parameters dist_backend dist_params
log_level opencv_num_threads amp
'''
# Root keys that configurations of OpenMMLab hold and that mean nothing here -> why; accepted with a warning, never suggested.
IGNORED = {
    'gpu_ids': 'every process has one GPU: tools/launch.py -n and --gpus, or CUDA_VISIBLE_DEVICES, say which',
    'device': 'a GPU is used if one is visible (CUDA_VISIBLE_DEVICES)',
    'workflow': 'training evaluates by itself (evaluation.interval)', 'profiler': 'tools/benchmark.py times a step\'s parts',
    'save_best': 'called evaluation.save_best here', 'mp_start_method': 'loader workers are forked',
    'num_threads': 'OMP_NUM_THREADS and opencv_num_threads set them',
    'launcher': 'it is found out from the environment',
}
_SECTIONS = {
    'data': 'samples_per_gpu workers_per_gpu persistent_workers prefetch_factor pin_memory unreadable train val test '
            'train_dataloader val_dataloader test_dataloader',
    'data.unreadable': 'policy budget',
    **dict.fromkeys(('data.train_dataloader', 'data.val_dataloader'),
                    'samples_per_gpu workers_per_gpu persistent_workers prefetch_factor pin_memory unreadable'),
    'guard': 'max_consecutive action lr_factor max_rollbacks save_batches spike task_gradients',
    'guard.spike': 'factor window keep',
    'checkpoint_config': 'interval by_epoch max_keep_ckpts save_optimizer save_last out_dir create_symlink filename_tmpl '
                         'file_client_args sync_buffer type meta every_iters every_minutes',
    'log_config': 'interval hooks',
    'evaluation': 'interval pipeline start by_epoch save_best rule metric metrics metric_options dynamic_intervals '
                  'amp before_train eval out_dir jsonfile_prefix show gpu_collect less_keys greater_keys thresholds num_samples',
    'bev': 'x y z lidar camera fused map labels',
    'bev.lidar': 'step cells height', 'bev.camera': 'step cells stride', 'bev.fused': 'step cells', 'bev.map': 'step cells stride',
    'bev.labels': 'x y step cells',
    'auto_scale_lr': 'enable base_batch_size',
    'amp': 'dtype loss_scale enabled',
    'ema': 'decay momentum evaluate warm_up type enable enabled',
    'dist_params': 'backend timeout stall_timeout bucket_cap_mb compression',
    'fp16': 'enabled dtype loss_scale growth_interval init_scale',
    'optimizer_config': 'type grad_clip cumulative_iters detect_anomalous_params loss_scale distributed coalesce '
                        'bucket_size_mb',
    'fp16.loss_scale': 'init_scale growth_factor backoff_factor growth_interval enabled',
    'optimizer_config.grad_clip': 'max_norm norm_type',
}


def declare(key: str, children: Optional[Any] = None) -> None:
    """Make ``key`` known: a root key, or the dotted key of a section.

    ``children``: the names allowed in it, or None for anything.
    """
    KNOWN[key] = None if children is None else frozenset(children)


for _key in [*_PLAIN.split(), *IGNORED]:
    declare(_key)
for _key, _children in _SECTIONS.items():
    declare(_key, _children.split())


def constructor_arguments(kind: Any) -> Optional[Set[str]]:
    """Arguments that the class registered as ``kind`` takes, ``**kwargs`` followed to the base classes.

    None if no registry (ours, mmdet3d's, mmdet's, mmcv's; optimizers and hooks too) knows the name, or the stack is not
    installed.
    """
    if not isinstance(kind, str):
        return None
    try:
        import mmcv.runner as runner

        import mmdet3d_ext  # noqa: F401  (fills the registries)
        from mmdet3d_ext import registry
        layers = [value for value in vars(registry).values() if isinstance(value, registry.LayeredRegistry)]
        registries = [*layers, runner.HOOKS, runner.RUNNERS, runner.OPTIMIZERS, runner.OPTIMIZER_BUILDERS]
    except ImportError:
        return None
    for known in registries:
        cls = known.get(kind)
        if cls is not None:
            return _arguments(cls)
    return None


def replacement(path: tuple) -> Optional[str]:
    """What to write instead of the root key of another framework, or None."""
    return REPLACED.get(str(path[0])) if len(path) == 1 else None


def _arguments(cls: type) -> Set[str]:
    names: Set[str] = set()
    for base in inspect.getmro(cls) if inspect.isclass(cls) else (cls,):
        call = base.__dict__.get('__init__') if inspect.isclass(base) else base
        if call is None:
            continue
        try:
            parameters = inspect.signature(call).parameters.values()
        except (TypeError, ValueError):
            break
        names.update(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names - {'self'}


def allowed_children(path: tuple, node: Mapping[str, Any]) -> Set[str]:
    """Names that the mapping at ``path`` may hold: those present, its section's, and its ``type``'s constructor arguments."""
    names = {str(key) for key in node}
    if not path:
        return names | {key for key in KNOWN if '.' not in key} | set(ALIASES)
    names |= KNOWN.get(dotted(path)) or frozenset()
    kind = node.get('type')
    if kind is not None:
        names |= constructor_arguments(kind) or set()
    return names
