"""Backbones of the encoders and of the BEV decoder (ResNet and SECOND come from mmdet and mmdet3d)."""
from .pillars import PillarFeatureNet, PointPillarsEncoder, PointPillarsScatter
from .radar import RadarEncoder, RadarFeatureNet
from .resnet import GeneralizedResNet
from .sparse_encoder import SparseEncoder
from .swin import SwinTransformer

__all__ = ['GeneralizedResNet', 'PillarFeatureNet', 'PointPillarsEncoder', 'PointPillarsScatter', 'RadarEncoder',
           'RadarFeatureNet', 'SparseEncoder', 'SwinTransformer']
