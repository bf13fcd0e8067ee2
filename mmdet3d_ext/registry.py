"""The plugin's registries, layered over mmdet3d's, mmdet's and mmcv's.

Several of our types carry the names that BEVFusion users write (``SparseEncoder``, ``CenterHead``, ``NuScenesDataset``), and
mmdet3d registers other classes under the same names. Overwriting those would break mmdet3d's own models, so the plugin
has registries of its own: a name is looked up here first, then in mmdet3d, mmdet and mmcv. Names that are free in
mmdet3d's registries are registered there as well, so that a plain mmdet3d configuration finds them.
"""
from __future__ import annotations

import contextlib
import contextvars
import difflib
import inspect
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

from . import compat

compat.apply()

import mmdet.core.bbox.builder as mmdet_bbox  # noqa: E402
import mmdet.core.bbox.match_costs.builder as mmdet_cost  # noqa: E402
import mmdet.datasets.builder as mmdet_data  # noqa: E402
import mmdet.models.builder as mmdet_models  # noqa: E402
import mmdet3d.datasets  # noqa: E402,F401  (fills the registries)
import mmdet3d.datasets.builder as mmdet3d_data  # noqa: E402
import mmdet3d.models  # noqa: E402,F401  (fills the registries)
import mmdet3d.models.builder as mmdet3d_models  # noqa: E402
from mmcv.utils import Registry  # noqa: E402

_PROFILE: contextvars.ContextVar[Optional[str]] = contextvars.ContextVar('compat_profile', default=None)
PROFILES = (None, 'reference')

_OWN = 'not part of this project; register your own class with mmdet3d_ext.registry, or use '
# Types of the reference and of mmdet3d's BEVFusion project that have another name or no meaning here.
REPLACED = {
    'DLA': _OWN + 'ResNet or SwinTransformer', 'VoVNet': _OWN + 'ResNet or SwinTransformer',
    'DetectronFPN': _OWN + 'GeneralizedLSSFPN',
    'BEVFusionSparseEncoder': 'called SparseEncoder here', 'BEVFusionHead': 'called TransFusionHead here',
    'Det3DDataPreprocessor': 'voxels are made by model.encoders.<sensor>.voxelize, images normalised by ImageNormalize',
    'BEVLoadMultiViewImageFromFiles': 'called LoadMultiViewImageFromFiles here',
    'BEVFusionGlobalRotScaleTrans': 'called GlobalRotScaleTrans here', 'BEVFusionRandomFlip3D': 'called RandomFlip3D here',
    'Pack3DDetInputs': 'write DefaultFormatBundle3D, then Collect3D',
    'NormalizeMultiviewImage': 'write ImageNormalize (mean and std of images in [0, 1])',
    'PadMultiViewImage': 'leave it out, final_dim of ImageAug3D is the size of all images',
    'ImagePad': 'leave it out, final_dim of ImageAug3D is the size of all images',
    'PhotoMetricDistortionMultiViewImage': 'there is no colour augmentation; leave it out',
    'ImageDistort': 'there is no colour augmentation; leave it out',
    'NormalizePointFeatures': 'leave it out, no model here is trained on such points',
    'FrameDropout': 'leave it out, or lower sweeps_num of LoadPointsFromMultiSweeps',
}
_SENSOR = 'called model.encoders.'
# (type, argument) -> what to write instead.
REPLACED_ARGUMENTS = {
    ('TransFusionHead', 'loss_iou'): 'it was never used; leave it out',
    **{(head, name): 'weighting by data equity is not implemented; leave it out'
       for head in ('CenterHead', 'TransFusionHead') for name in ('dequity_eta', 'dequity_gamma')},
    # mmdet3d >= 1.1 and its BEVFusion project
    ('BEVFusion', 'data_preprocessor'): 'write voxelize_cfg as model.encoders.lidar.voxelize, mean and std in ImageNormalize',
    ('BEVFusion', 'pts_voxel_encoder'): 'leave HardSimpleVFE out, voxelize_reduce: true (the default) averages the points',
    ('BEVFusion', 'pts_middle_encoder'): _SENSOR + 'lidar.backbone here',
    ('BEVFusion', 'img_backbone'): _SENSOR + 'camera.backbone here',
    ('BEVFusion', 'img_neck'): _SENSOR + 'camera.neck here',
    **{('BEVFusion', name): _SENSOR + 'camera.vtransform here' for name in ('vtransform', 'view_transform')},
    ('BEVFusion', 'fusion_layer'): 'called model.fuser here',
    ('BEVFusion', 'pts_backbone'): 'called model.decoder.backbone here',
    ('BEVFusion', 'pts_neck'): 'called model.decoder.neck here',
    ('BEVFusion', 'bbox_head'): 'called model.heads.object here',
    ('BEVFusion', 'seg_head'): 'called model.heads.map here',
    ('TransFusionHead', 'decoder_layer'): 'write num_heads, ffn_channel, dropout and activation of the head',
    ('GlobalRotScaleTrans', 'scale_ratio_range'): 'called resize_lim here',
    ('GlobalRotScaleTrans', 'rot_range'): 'called rot_lim here',
    ('GlobalRotScaleTrans', 'translation_std'): 'called trans_lim here',
    ('NuScenesDataset', 'data_root'): 'called dataset_root here',
    ('NuScenesDataset', 'metainfo'): 'write its classes as object_classes',
    ('NuScenesDataset', 'classes'): 'called object_classes here',
    **{(step, name): 'files are read from the local disk; leave it out'
       for step in ('NuScenesDataset', 'LoadPointsFromFile', 'LoadPointsFromMultiSweeps', 'LoadMultiViewImageFromFiles')
       for name in ('backend_args', 'file_client_args')},
}


class LayeredRegistry:
    """Own names first, then each of ``fallbacks`` in order.

    Args:
        name: what is registered, for error messages ("model", "pipeline step").
        fallbacks: mmcv registries that are searched after our own.
        publish: the mmdet3d registry that also receives our class where its name is still free there.
    """

    def __init__(self, name: str, fallbacks: Sequence[Registry], publish: Optional[Registry] = None):
        self.name = name
        self.own: dict = {}
        self.fallbacks = tuple(fallbacks)
        self.publish = publish

    def register_module(self, name: Optional[str] = None) -> Callable[[type], type]:
        """Class decorator; ``name`` defaults to the class name."""

        def register(cls: type) -> type:
            key = name or cls.__name__
            if key in self.own and self.own[key] is not cls:
                raise KeyError(f'{self.name} {key!r} is registered twice: {self.own[key]} and {cls}')
            self.own[key] = cls
            if self.publish is not None and self.publish.get(key) is None:
                self.publish.register_module(name=key, module=cls)
            return cls

        return register

    def get(self, key: str) -> Optional[type]:
        if key in self.own:
            return self.own[key]
        for registry in self.fallbacks:
            found = registry.get(key)
            if found is not None:
                return found
        return None

    def names(self) -> list:
        known = set(self.own)
        for registry in self.fallbacks:
            known.update(registry.module_dict)
        return sorted(known)

    def problem(self, kind: Any) -> Optional[str]:
        """What is wrong with the type ``kind``: None if it is known, else the nearest known one or what to write instead."""
        if self.get(kind) is not None:
            return None
        if kind in REPLACED:
            return f'{self.name} type {kind!r}: {REPLACED[kind]}'
        near = difflib.get_close_matches(str(kind), self.names(), n=1)
        return f'unknown {self.name} type {kind!r}' + (f'; did you mean {near[0]!r}?' if near else '')

    def build(self, cfg: Mapping[str, Any], **defaults: Any) -> Any:
        """Build ``cfg['type']`` with the rest of ``cfg`` as keyword arguments (``defaults`` where absent).

        A class that takes ``compat`` gets the active profile (:func:`profile`) unless ``cfg`` sets it.

        Raises:
            TypeError: if ``cfg`` is not a mapping with ``type``, or the constructor refuses an argument (the message
                names the type and the nearest valid argument).
            KeyError: if the type is unknown; the message names the nearest known one.
        """
        if not isinstance(cfg, Mapping) or 'type' not in cfg:
            got = f'a mapping with the keys {sorted(map(str, cfg))}' if isinstance(cfg, Mapping) else repr(cfg)
            raise TypeError(f'a {self.name} needs a mapping with the key "type", got {got[:300]}')
        args = dict(cfg)
        kind = args.pop('type')
        cls = kind if inspect.isclass(kind) else self.get(kind)
        if cls is None:
            raise KeyError(self.problem(kind))
        parameters = inspect.signature(cls.__init__).parameters
        for key, value in defaults.items():
            args.setdefault(key, value)
        if 'compat' in parameters and _PROFILE.get() is not None:
            args.setdefault('compat', _PROFILE.get())
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            for key in args:
                if (cls.__name__, key) in REPLACED_ARGUMENTS:
                    raise TypeError(f'{self.name} {cls.__name__}: {key!r}: {REPLACED_ARGUMENTS[cls.__name__, key]}')
                if key not in parameters:
                    near = difflib.get_close_matches(key, [p for p in parameters if p != 'self'], n=1)
                    hint = f'; did you mean {near[0]!r}?' if near else ''
                    raise TypeError(f'{self.name} {cls.__name__} takes no argument {key!r}{hint}')
        return cls(**args)


@contextlib.contextmanager
def profile(name: Optional[str]) -> Iterator[None]:
    """Build under a compatibility profile: ``None`` (right by default) or ``'reference'`` (old checkpoints' numbers)."""
    if name not in PROFILES:
        raise ValueError(f'compat: unknown profile {name!r}, expected one of {PROFILES}')
    token = _PROFILE.set(name)
    try:
        yield
    finally:
        _PROFILE.reset(token)


MODELS = LayeredRegistry('model', [mmdet3d_models.BACKBONES, mmdet_models.BACKBONES], publish=mmdet3d_models.BACKBONES)
DATASETS = LayeredRegistry('data set', [mmdet3d_data.DATASETS, mmdet_data.DATASETS], publish=mmdet3d_data.DATASETS)
PIPELINES = LayeredRegistry('pipeline step', [mmdet3d_data.PIPELINES, mmdet_data.PIPELINES],
                            publish=mmdet3d_data.PIPELINES)
BBOX_ASSIGNERS = LayeredRegistry('box assigner', [mmdet_bbox.BBOX_ASSIGNERS], publish=mmdet_bbox.BBOX_ASSIGNERS)
BBOX_CODERS = LayeredRegistry('box coder', [mmdet_bbox.BBOX_CODERS], publish=mmdet_bbox.BBOX_CODERS)
MATCH_COSTS = LayeredRegistry('match cost', [mmdet_cost.MATCH_COST], publish=mmdet_cost.MATCH_COST)
