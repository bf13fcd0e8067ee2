#!/usr/bin/env python3
"""Overfit a full-size detection model on one real nuScenes key frame, and check every larger vehicle.

The model is the joint model without its map head (Swin-T at 256 x 704, sparse VoxelNet at 0.075 m, TransFusion). After the
given iterations each car, truck and bus with at least 20 LiDAR points must have a prediction of its class with a score of at
least 0.3 within 0.5 m (in the ground plane). The key frame is an mmdet3d >= 1.1 info file beside its images and cloud.

    python benchmarks/keyframe_overfit.py --key-frame path/to/nuscenes_keyframe --out out/
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from mmdet3d_ext.config import load_config  # noqa: E402
from mmdet3d_ext.datasets.builder import build_dataloader, build_dataset  # noqa: E402
from mmdet3d_ext.datasets.gt_database import points_in_box  # noqa: E402
from mmdet3d_ext.engine.evaluate import forward  # noqa: E402
from mmdet3d_ext.engine.parallel import StepModel, unpack_batch  # noqa: E402
from mmdet3d_ext.engine.run_dir import to_plain  # noqa: E402
from mmdet3d_ext.engine.visualize import make_scene  # noqa: E402
from mmdet3d_ext.models.builder import build_model  # noqa: E402
from mmdet3d_ext.visualization import draw_scene  # noqa: E402

VEHICLES = ('car', 'truck', 'bus')
MAX_DISTANCE, MIN_SCORE, MIN_POINTS = 0.5, 0.3, 20


def settings(key_frame: Path, config: str, overrides) -> dict:
    """The configuration: one sample, no augmentation, no map."""
    info = next(key_frame.glob('*.pkl'))
    cfg = load_config(config, ['--dataset_root', f'{key_frame}/', '--model.heads.map', 'null',
                               '--model.encoders.camera.backbone.init_cfg', 'null', *overrides])
    plain = to_plain(cfg)
    steps = [step for step in plain['test_pipeline'] if step['type'] not in ('LoadBEVSegmentation', 'Collect3D')]
    collect = dict(plain['test_pipeline'][-1], keys=['img', 'points', 'gt_bboxes_3d', 'gt_labels_3d'])
    for step in steps:  # the key frame has no past sweeps: nothing is repeated in their place
        if step['type'] == 'LoadPointsFromMultiSweeps':
            step['pad_empty_sweeps'] = False
    names = {'type': 'ObjectNameFilter', 'classes': plain['object_classes']}
    inside = {'type': 'ObjectRangeFilter', 'point_cloud_range': plain['point_cloud_range']}
    dataset = dict(
        plain['train_dataset'],
        ann_file=str(info),
        map_classes=None,
        use_valid_flag=False,
        pipeline=[*steps[:-1], inside, names, steps[-1], collect],
    )
    return dict(plain, train_dataset=dataset)


def check(boxes, scores, labels, truth, truth_labels, points, classes) -> list:
    """Rows (class, LiDAR points, metres to the nearest scored prediction of the class, its score, met, required)."""
    boxes_from_centre = torch.cat([truth.gravity_center, truth.tensor[:, 3:7]], 1).numpy()
    inside = [int(points_in_box(points[:, :3].numpy(), box).sum()) for box in boxes_from_centre]
    rows = []
    for number, (label, count) in enumerate(zip(truth_labels.tolist(), inside)):
        if classes[label] not in VEHICLES:
            continue
        chosen = (labels == label) & (scores >= MIN_SCORE)
        distance, score = float('inf'), float('nan')
        if chosen.any():
            gaps = (boxes.gravity_center[chosen][:, :2] - truth.gravity_center[number, :2]).norm(dim=1)
            distance, score = float(gaps.min()), float(scores[chosen][gaps.argmin()])
        rows.append((classes[label], count, distance, score, distance <= MAX_DISTANCE, count >= MIN_POINTS))
    return rows


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--key-frame', type=Path, required=True, help='folder of the key frame')
    parser.add_argument('--config', default='configs/nuscenes/multitask/phase3_400.yaml')
    parser.add_argument('--iterations', type=int, default=300)
    parser.add_argument('--lr', type=float, default=4e-4)
    parser.add_argument('--out', type=Path, default=Path('out'), help='folder of the table and the pictures')
    arguments, overrides = parser.parse_known_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    torch.manual_seed(0)
    np.random.seed(0)

    cfg = settings(arguments.key_frame, arguments.config, overrides)
    loader = build_dataloader(build_dataset(cfg['train_dataset']), 1, 0, shuffle=False, seed=0)
    raw = next(iter(loader))
    model = build_model(cfg['model']).to(device)
    for module in model.modules():  # at the usual 0.01 a run of 300 steps keeps 5% of the initial statistics, which is too much
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.1
    step = StepModel(model, device)
    step.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, total_steps=arguments.iterations, pct_start=0.2)
    losses = []
    start = time.monotonic()
    for iteration in range(arguments.iterations):
        output = step.train_step(raw, optimizer)
        optimizer.zero_grad(set_to_none=True)
        output['loss'].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 35, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
        losses.append(output['loss'].detach())
        if iteration % 25 == 0 or iteration == arguments.iterations - 1:
            print(f'iteration {iteration:4d}  loss {float(losses[-1]):.4f}', flush=True)
    seconds = time.monotonic() - start

    batch = unpack_batch(raw, device)
    model.eval()
    with torch.no_grad():
        result = forward(model, batch)[0]
    classes = cfg['object_classes']
    truth, labels = batch['gt_bboxes_3d'][0].to('cpu'), batch['gt_labels_3d'][0].cpu()
    rows = check(result['boxes_3d'], result['scores_3d'], result['labels_3d'], truth, labels, batch['points'][0].cpu(), classes)
    required = [row for row in rows if row[-1]]
    met = sum(row[-2] for row in required)
    where = torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'
    lines = [
        '# Overfitting one real key frame',
        '',
        f'`python benchmarks/keyframe_overfit.py --key-frame {arguments.key_frame.name} --iterations {arguments.iterations} --lr '
        f'{arguments.lr}`, {where}, '
        f'torch {torch.__version__}, float32, {datetime.date.today()}',
        '',
        f'loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f} in {arguments.iterations} iterations ({seconds:.0f} s); '
        f'{met} of {len(required)} cars, trucks and buses with at least {MIN_POINTS} points met',
        '',
        '| class | LiDAR points | distance, m | score | met | required |',
        '|---|---|---|---|---|---|',
    ]
    lines += [
        f'| {name} | {count} | {distance:.3f} | {score:.3f} | {"yes" if ok else "no"} | {"yes" if asked else "no"} |'
        for name, count, distance, score, ok, asked in rows
    ]
    (arguments.out / 'keyframe_overfit.md').write_text('\n'.join(lines) + '\n')
    print('\n'.join(lines))
    scene = make_scene(cfg, loader.dataset, 0, model, device, MIN_SCORE)
    Image.fromarray(draw_scene(scene)).save(arguments.out / 'keyframe_overfit.png')
    return 0 if required and met == len(required) else 1


if __name__ == '__main__':
    sys.exit(main())
