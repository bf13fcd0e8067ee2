"""Fusers: one BEV map from the maps of several sensors."""
from .fusers import AddFuser, ConvFuser

__all__ = ['AddFuser', 'ConvFuser']
