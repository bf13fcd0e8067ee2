"""Predictions with as little work per frame as possible."""
from .fold import FoldError, FoldReport, fold_batch_norms
from .predictor import Predictor, fold_model
from .weights import StoreError, StoreReport, store_cast_weights

__all__ = ['FoldError', 'FoldReport', 'Predictor', 'StoreError', 'StoreReport', 'fold_batch_norms', 'fold_model',
           'store_cast_weights']
