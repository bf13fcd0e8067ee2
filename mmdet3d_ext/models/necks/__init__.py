"""Necks of the camera encoder and of the BEV decoder (SECONDFPN comes from mmdet3d)."""
from .lss_fpn import LSSFPN, GeneralizedLSSFPN

__all__ = ['GeneralizedLSSFPN', 'LSSFPN']
