"""Multitask bird's-eye-view perception on mmdet3d: 3-D detection and BEV map segmentation in one BEVFusion-style model.

Importing this package applies the version shims (:mod:`mmdet3d_ext.compat`) and registers the plugin's models, data sets
and pipelines; it does nothing else.
"""
__version__ = '0.1.0'

from . import compat

compat.apply()

from . import datasets, models  # noqa: E402  (registration; needs the shims above)

__all__ = ['__version__', 'compat', 'datasets', 'models']
