"""Runs on disk in the form that mmcv's runner leaves, for the monitor's tests."""
import json
import os
import struct
import time
import zlib
from pathlib import Path

import yaml

CLASSES = ['drivable_area', 'ped_crossing', 'walkway', 'stop_line', 'carpark_area', 'divider']
CONFIG = {
    'seed': 0, 'max_epochs': 4, 'map_classes': CLASSES, 'object_classes': ['car', 'truck'],
    'data': {'samples_per_gpu': 2, 'workers_per_gpu': 4}, 'log_config': {'interval': 50}, 'evaluation': {'interval': 1},
    'optimizer': {'type': 'AdamW', 'lr': 2e-4},
    'model': {'type': 'BEVFusion', 'heads': {'map': {'type': 'EnhancedBEVSegmentationHead', 'class_weights': {'divider': 4.0}}}},
}


def train_row(epoch, iteration, fraction, dice=True, ours=True, **more):
    """One training line; ``fraction`` of the schedule: losses fall with it."""
    row = {'mode': 'train', 'epoch': epoch, 'iter': iteration, 'lr': 1e-4, 'memory': 30000, 'data_time': 0.05,
           'loss/object/loss_heatmap': 2.0 - fraction, 'loss/object/layer_-1_loss_cls': 0.3 - 0.1 * fraction,
           'loss/object/layer_-1_loss_bbox': 1.5 - fraction, 'stats/object/matched_ious': 0.3 + 0.3 * fraction}
    for label in CLASSES:
        weight = 4.0 if ours and label == 'divider' else 1.0
        row[f'loss/map/{label}/focal'] = weight * (0.06 - 0.04 * fraction)
        if dice:
            row[f'loss/map/{label}/dice'] = weight * (0.95 - 0.6 * fraction)
            if ours:
                row[f'stats/map/{label}/dice_score'] = 0.05 + 0.6 * fraction
    row['loss'] = sum(value for name, value in row.items() if name.startswith('loss/'))
    return {**row, 'grad_norm': 15.0 - 5 * fraction, 'time': 0.5, **more}


def val_row(epoch, quality=0.5):
    row = {'mode': 'val', 'epoch': epoch, 'iter': 100, 'lr': 1e-4}
    for label in CONFIG['object_classes']:
        row.update({f'object/{label}_ap_dist_{d}': quality + 0.01 * epoch for d in ('0.5', '1.0', '2.0', '4.0')})
        row[f'object/{label}_trans_err'] = 0.3
    row.update({'object/nds': quality + 0.1, 'object/map': quality})
    for label in CLASSES:
        row.update({f'map/{label}/iou@max': quality - 0.1 + 0.01 * epoch, f'map/{label}/iou@0.50': quality - 0.2})
    row['map/mean/iou@max'] = quality
    return row


def schedule(epochs=4, iterations=1000, interval=50, upto=None, **more):
    """Rows of a whole run, or up to the place (epoch, iter)."""
    rows = []
    for epoch in range(1, epochs + 1):
        for iteration in range(interval, iterations + 1, interval):
            if upto is not None and (epoch, iteration) > upto:
                return rows
            fraction = ((epoch - 1) * iterations + iteration) / (epochs * iterations)
            rows.append(train_row(epoch, iteration, fraction, **more))
        if upto is None or (epoch + 1, 0) <= upto:
            rows.append(val_row(epoch, 0.4 + 0.1 * epoch / epochs))
    return rows


def meta(**more):
    return {'exp_name': 'phase3.yaml', 'config': yaml.safe_dump({**CONFIG, **more}), 'code_version': 'abcdef0123456789',
            'code_changes': None, 'world_size': 8, 'seed': 0, 'versions': {'torch': '2.7.1', 'numpy': '1.26.4'}}


def write_json(path, rows, first):
    path.write_text(''.join(json.dumps(row) + '\n' for row in [first, *rows]))


def write_text(path, rows, iterations=1000, extra=()):
    lines = ['2026-11-30 08:00:00,000 - mmdet3d - INFO - Start running']
    for row in rows:
        if row['mode'] == 'train':
            lines.append(f'2026-11-30 08:00:01,000 - mmdet3d - INFO - Epoch [{row["epoch"]}][{row["iter"]}/{iterations}]\t'
                         f'lr: 1.000e-04, eta: 1 day, time: 0.500')
        else:
            lines.append('2026-11-30 08:00:02,000 - mmdet3d - INFO - evaluated in 120.0 s')
    path.write_text('\n'.join([*lines, *extra]) + '\n')


def make_run(folder, rows=None, stamp='20261130_080000', age=0.0, extra=(), first=None, iterations=1000):
    """A folder as a run leaves it; its files are ``age`` seconds old."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = schedule() if rows is None else rows
    write_json(folder / f'{stamp}.log.json', rows, meta() if first is None else first)
    write_text(folder / f'{stamp}.log', rows, iterations, extra)
    (folder / 'configs.yaml').write_text(yaml.safe_dump(CONFIG))
    set_age(folder, age)
    return folder


def set_age(folder, age):
    then = time.time() - age
    for path in Path(folder).rglob('*'):
        os.utime(path, (then, then))


def png(width=32, height=16, colour=(200, 30, 30)):
    """A small valid PNG."""
    def chunk(kind, data):
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
    line = b'\0' + bytes(colour) * width
    return (b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0))
            + chunk(b'IDAT', zlib.compress(line * height)) + chunk(b'IEND', b''))
