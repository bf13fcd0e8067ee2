"""A generator of synthetic data sets in the nuScenes v1.0 schema: see :func:`generate`."""
from .config import PRESETS, GeneratorConfig
from .generate import generate

__all__ = ['PRESETS', 'GeneratorConfig', 'generate']
