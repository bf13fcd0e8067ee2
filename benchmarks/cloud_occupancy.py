#!/usr/bin/env python3
"""Count the occupied cells of a LiDAR cloud at several resolutions: the tables in ``mmdet3d_ext/engine/memory/sparsity.py``.

    python benchmarks/cloud_occupancy.py                      # the real key frame beside the checkout, as ten sweeps
    python benchmarks/cloud_occupancy.py --cloud sweep.bin --repeat 10
"""
from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / 'benchmarks')]

RANGE = (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0)
EDGES = (0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8)
HEIGHT = 0.2


def cells(points: np.ndarray, size) -> np.ndarray:
    """(V, 3) occupied cells in the order of their first point."""
    lower, upper = np.array(RANGE[:3], np.float32), np.array(RANGE[3:], np.float32)
    whole = np.floor((points[:, :3] - lower) / np.array(size, np.float32)).astype(np.int64)
    inside = ((points[:, :3] >= lower) & (points[:, :3] < upper)).all(1)
    found, first = np.unique(whole[inside], axis=0, return_index=True)
    return found[np.argsort(first)]


def convolve(sites: np.ndarray, kernel, stride, padding, shape) -> tuple:
    """Sites of a sparse convolution, and the shape of their grid."""
    out_shape = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(shape, kernel, stride, padding)]
    reached = []
    for tap in itertools.product(*map(range, kernel)):
        moved = sites + np.array(padding) - np.array(tap)
        fits = (moved % np.array(stride) == 0).all(1)
        out = moved[fits] // np.array(stride)
        reached.append(out[((out >= 0) & (out < np.array(out_shape))).all(1)])
    flat = np.ravel_multi_index(np.concatenate(reached).T, out_shape)
    return np.stack(np.unravel_index(np.unique(flat), out_shape), 1), out_shape


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--cloud', help='float32 rows of 5 values (default: the key frame)')
    parser.add_argument('--repeat', type=int, default=10, help='sweeps, each 0.4 m further back')
    parser.add_argument('--limit', type=int, default=120_000, help='voxels at the encoder\'s input, as in training')
    arguments = parser.parse_args(argv)
    if arguments.cloud:
        from mmdet3d_ext.engine.benchmark import read_cloud
        points = read_cloud(arguments.cloud, arguments.repeat).numpy()
    else:
        from inputs import keyframe_cloud
        found = keyframe_cloud('cpu', arguments.repeat)
        if found is None:
            parser.error('no key frame beside this checkout: give --cloud')
        points = found.numpy()
    inside = ((points[:, :3] >= RANGE[:3]) & (points[:, :3] < RANGE[3:])).all(1).sum()
    print(f'{len(points)} points, {inside} inside the range')
    print('OCCUPIED', {edge: len(cells(points, (edge, edge, HEIGHT))) for edge in EDGES})
    print('OCCUPIED_PILLARS', {edge: len(cells(points, (edge, edge, RANGE[5] - RANGE[2]))) for edge in EDGES})
    for edge in (0.05, 0.075, 0.1, 0.2):
        sites = cells(points, (edge, edge, HEIGHT))[:arguments.limit]
        shape = [round((RANGE[3] - RANGE[0]) / edge), round((RANGE[4] - RANGE[1]) / edge), round((RANGE[5] - RANGE[2]) / HEIGHT) + 1]
        counts = [len(sites)]
        for padding in ((1, 1, 1), (1, 1, 1), (1, 1, 0)):
            sites, shape = convolve(sites, (3, 3, 3), (2, 2, 2), padding, shape)
            counts.append(len(sites))
        sites, shape = convolve(sites, (1, 1, 3), (1, 1, 2), (0, 0, 0), shape)
        counts.append(len(sites))
        ratios = [f'{b / a:.3f}' for a, b in zip(counts[:-1], counts[1:])]
        print(f'edge {edge}: sites {counts}, growth {ratios}, grid {shape}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
