"""Checkpoints: reading safely, loading into a model with a report, converting from and to the reference, writing atomically.

A file that a user downloads must not be able to run code, so files are read with ``weights_only=True``; own files hold plain
types and tensors only. Writing is atomic: a file under its final name is always whole.
"""
from .optimizer import keep_optimizer, optimizer_info, with_own_kernels
from .reading import CheckpointError, is_checkpoint_whole, read_checkpoint
from .reference import ORIGINS, convert, find_origin, model_meta
from .report import LoadReport
from .weights import check_same_run, load_files, load_state, load_weights, path_list, pick_weights, strip_wrappers
from .writing import CheckpointWriteError, clean_leftovers, link_atomic, list_checkpoints, newest_checkpoint, plain, write_atomic

__all__ = ['CheckpointError', 'CheckpointWriteError', 'LoadReport', 'ORIGINS', 'check_same_run', 'clean_leftovers', 'convert',
           'find_origin', 'is_checkpoint_whole', 'keep_optimizer', 'link_atomic', 'list_checkpoints', 'load_files', 'load_state',
           'load_weights', 'model_meta', 'newest_checkpoint', 'optimizer_info', 'path_list', 'pick_weights', 'plain', 'read_checkpoint',
           'strip_wrappers', 'with_own_kernels', 'write_atomic']
