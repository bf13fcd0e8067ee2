"""Voxelisation of point clouds, the first step of the LiDAR and radar encoders."""
from .voxelizer import DynamicVoxelizer, HardVoxelizer, build_voxelizer

__all__ = ['DynamicVoxelizer', 'HardVoxelizer', 'build_voxelizer']
