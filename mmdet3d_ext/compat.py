"""Every shim for library versions, in one place, each with its reason and the version that it is for.

:func:`apply` runs once, at ``import mmdet3d_ext``, before mmdet3d is imported. Nothing else in the project patches a library unasked
(:func:`mmdet3d_ext.ops.patch_mmdet3d_scatter` does when it is called).
"""
from __future__ import annotations

import sys
import warnings

_applied = False


def apply() -> None:
    """Apply all shims (idempotent)."""
    global _applied
    if _applied:
        return
    _applied = True
    _numpy_aliases()
    _quiet_mmcv()
    _mmdet3d_accepts_mmcv_172()
    _torch_ops_without_mmcvs_namespace()
    _spconv_without_cuda()
    _spconv_adds_with_one_thread()
    _checkpointing_without_reentrance()
    _descartes_draws_shapely_2()


def _numpy_aliases() -> None:
    """numpy >= 1.24 dropped np.int, np.bool, np.float, np.long...; mmdet3d 1.0.0rc6 and mmdet 2.28.2 still use them."""
    import numpy as np
    for name, value in (('int', int), ('float', float), ('bool', bool), ('object', object), ('long', int)):
        if name not in np.__dict__:
            setattr(np, name, value)


def _quiet_mmcv() -> None:
    """mmcv 1.7.2 warns about the existence of mmcv 2.0 at every import, in every rank and worker."""
    warnings.filterwarnings('ignore', message='On January 1, 2023, MMCV will release v2.0.0', category=UserWarning)


def _mmdet3d_accepts_mmcv_172() -> None:
    """mmdet3d 1.0.0rc6 and mmsegmentation 0.30.0 assert mmcv <= 1.7.0 at import; 1.7.2 is a bug-fix release of the same API.

    mmcv shows the highest version that they accept while they are imported, then its own again.
    """
    if 'mmdet3d' in sys.modules:
        return
    import mmcv
    true_version = mmcv.__version__
    major, minor, *_ = (int(part) for part in true_version.split('.')[:2])
    if (major, minor) != (1, 7):
        raise ImportError(f'mmdet3d_ext needs mmcv-full 1.7.x, found mmcv {true_version}. '
                          f'Install mmcv-full==1.7.2 (make install)')
    mmcv.__version__ = '1.7.0'
    try:
        import mmdet3d  # noqa: F401
    finally:
        mmcv.__version__ = true_version


def _torch_ops_without_mmcvs_namespace() -> None:
    """mmcv 1.7.2 breaks torch.compile: its NPU module sets ``_check_balance`` on every torch module that has one; ``torch.ops``
    answers that it has any name. What results is an operator namespace that is a function; tracing walks all of them.
    """
    import mmcv.device  # noqa: F401  (does it when it is imported, whoever does so first)
    import torch
    if callable(torch.ops.__dict__.get('_check_balance')):
        del torch.ops._check_balance
        torch.ops._dir = [name for name in torch.ops._dir if name != '_check_balance']


def _spconv_without_cuda() -> None:
    """spconv 2.3.8 asks for a CUDA stream in its CPU backward and fails on a machine without a driver.

    The stream handle is not used on the CPU: 0 is returned where the CUDA runtime has no device.
    """
    try:
        import spconv.pytorch.functional as functional
        import spconv.pytorch.ops as ops
    except ImportError:
        return
    import torch
    original = ops.get_current_stream

    def current_stream() -> int:
        return original() if torch.cuda.is_available() else 0

    ops.get_current_stream = current_stream
    if hasattr(functional, 'get_current_stream'):
        functional.get_current_stream = current_stream


def _spconv_adds_with_one_thread() -> None:
    """spconv 2.3.8's ``scatter_add_cpu`` races with itself when OpenMP has several threads: sums are lost, results change from
    run to run (on 2 threads about 1% of a layer's output).

    It is the only one of its CPU kernels that does; it runs on one thread here, the matrix products around it on all.
    """
    try:
        from spconv.core_cc.csrc.sparse.all import SpconvOps
    except ImportError:
        return
    import torch
    original = SpconvOps.scatter_add_cpu

    def scatter_add_cpu(*args, **kwargs):
        threads = torch.get_num_threads()
        if threads == 1:
            return original(*args, **kwargs)
        torch.set_num_threads(1)
        try:
            return original(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    SpconvOps.scatter_add_cpu = staticmethod(scatter_add_cpu)


def _descartes_draws_shapely_2() -> None:
    """descartes 1.1.0, with which nuscenes-devkit 1.2.0 draws map polygons, reads rings as arrays; shapely 2 rings are not.

    ``descartes.PolygonPatch`` is replaced by the same patch made from ``ring.coords``.
    """
    try:
        import descartes
        import shapely
    except ImportError:
        return
    if int(shapely.__version__.split('.')[0]) < 2:
        return
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    def polygon_patch(polygon, **kwargs):
        parts = polygon.geoms if hasattr(polygon, 'geoms') else [polygon]
        rings = [np.asarray(ring.coords)[:, :2] for part in parts for ring in (part.exterior, *part.interiors)]
        codes = [code for ring in rings
                 for code in [Path.MOVETO] + [Path.LINETO] * (len(ring) - 2) + [Path.CLOSEPOLY]]
        return PathPatch(Path(np.concatenate(rings), codes), **kwargs)

    descartes.PolygonPatch = polygon_patch


def _checkpointing_without_reentrance() -> None:
    """mmcv 1.7.2 and mmdet 2.28.2 call torch's activation checkpointing without ``use_reentrant`` (``with_cp: true``).

    torch >= 2.4 warns about it at every block and means to refuse it; the old, reentrant kind also breaks
    DistributedDataParallel's bookkeeping. The backbones that are used here get the other kind.
    """
    import functools
    import importlib
    import types

    from torch.utils.checkpoint import checkpoint
    shim = types.SimpleNamespace(checkpoint=functools.partial(checkpoint, use_reentrant=False))
    for name in ('mmcv.cnn.resnet', 'mmdet.models.backbones.resnet', 'mmdet.models.backbones.swin'):
        importlib.import_module(name).cp = shim
