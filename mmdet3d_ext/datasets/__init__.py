"""The nuScenes data set, its info files, its pipelines and the synthetic generator. Importing registers the types."""
from . import pipelines

__all__ = ['pipelines']
