"""The top-level models."""
from .bevfusion import BEVFusion

__all__ = ['BEVFusion']
