"""The nuScenes data set, its info files, its pipelines and the synthetic generator. Importing registers the types."""
from . import pipelines
from .builder import build_dataloader, build_dataset
from .cbgs import CBGSDataset
from .nuscenes_dataset import NuScenesDataset, SampleError
from .samplers import DistributedTrainSampler, EvalSampler

__all__ = ['CBGSDataset', 'DistributedTrainSampler', 'EvalSampler', 'NuScenesDataset', 'SampleError', 'build_dataloader',
           'build_dataset', 'pipelines']
