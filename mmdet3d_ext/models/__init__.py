"""Models: encoders, fuser, decoder and heads, and the detector that assembles them. Importing registers all of them."""
from . import backbones, detectors, fusers, heads, losses, necks, voxel, vtransforms

__all__ = ['backbones', 'detectors', 'fusers', 'heads', 'losses', 'necks', 'voxel', 'vtransforms']
