"""Checkpoints: reading safely, loading into a model with a report, writing atomically.

A file that a user downloads must not be able to run code, so files are read with ``weights_only=True``; own files hold plain
types and tensors only. Writing is atomic: a file under its final name is always whole.
"""
from .reading import CheckpointError, is_checkpoint_whole, read_checkpoint
from .weights import LoadReport, check_same_grid, load_state, load_weights, pick_weights
from .writing import CheckpointWriteError, clean_leftovers, link_atomic, newest_checkpoint, plain, write_atomic

__all__ = ['CheckpointError', 'CheckpointWriteError', 'LoadReport', 'check_same_grid', 'clean_leftovers', 'is_checkpoint_whole',
           'link_atomic', 'load_state', 'load_weights', 'newest_checkpoint', 'pick_weights', 'plain', 'read_checkpoint',
           'write_atomic']
