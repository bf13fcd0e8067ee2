"""Operators with CPU and CUDA kernels (csrc/): voxelisation, point-to-voxel reduction, lift-splat pooling, group norm."""

from ._library import OpsUnavailableError, available, build_info
from .group_norm import group_norm_relu
from .lift_splat import SplatPlan, bev_pool, lift_splat, prepare_bev_pool, prepare_lift_splat
from .mmdet3d_scatter import dynamic_scatter, patch_mmdet3d_scatter
from .point_to_voxel import DynamicScatter, PointGroups, dynamic_point_to_voxel, group_points, reduce_points
from .voxelize import dynamic_voxelize, voxelize

__all__ = [
    'DynamicScatter',
    'OpsUnavailableError',
    'PointGroups',
    'SplatPlan',
    'available',
    'bev_pool',
    'build_info',
    'dynamic_point_to_voxel',
    'dynamic_scatter',
    'dynamic_voxelize',
    'group_norm_relu',
    'group_points',
    'lift_splat',
    'patch_mmdet3d_scatter',
    'prepare_bev_pool',
    'prepare_lift_splat',
    'reduce_points',
    'voxelize',
]
