#!/usr/bin/env python
"""Train mmdet3d's MVXNet (DynamicMVXFasterRCNN) on generated KITTI-like samples at its default learning rate until it diverges, and
watch the memory behind the gradient buffer of mmcv's point-to-voxel op; then the same with the op of this package.

mmdet3d's configuration has AdamW at a peak of 0.003, gradients clipped at 35 and a linear warm-up over 1,000 iterations; users who meet
the fault also lower the peak to 0.0001. Those keep the activations finite; the fault itself stays where it is. Here there is neither
clipping nor warm-up unless asked for, to come to the NaN sooner.

Examples:
    python benchmarks/mvxnet_nan.py --op mmcv --steps 200
    python benchmarks/mvxnet_nan.py --op ours --steps 200
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --padding 4096 --kernel-regex kns=reduce_scatter_grad \\
        python benchmarks/mvxnet_nan.py --op mmcv --no-canaries --lr 1e12 --steps 4
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

import mmdet3d_ext  # noqa: E402,F401
from mmdet3d_ext import ops  # noqa: E402

CANARY = 7.0


def watch_mmcv(overruns: list) -> None:
    """mmcv's backward gets a gradient buffer with 64 rows of canaries behind it; what it changes there is recorded."""
    from mmcv.ops import scatter_points

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        @staticmethod
        def zeros_like(tensor):
            buffer = torch.full((len(tensor) + 64, tensor.shape[1]), CANARY, dtype=tensor.dtype, device=tensor.device)
            buffer[: len(tensor)] = 0
            overruns.append(buffer[len(tensor) :])
            return buffer[: len(tensor)]

    scatter_points.torch = Torch()


def sample(generator: np.random.Generator, device: str, count: int = 18000):
    """Ground, clutter and a few cars in front of a camera: points (P, 4), boxes (K, 7), labels, image and its matrices."""
    from mmdet3d.core.bbox import LiDARInstance3DBoxes

    depth = generator.uniform(2, 69, count) ** 0.9
    points = np.stack([depth, depth * generator.uniform(-0.7, 0.7, count), generator.normal(-1.7, 0.05, count),
                       generator.uniform(0, 1, count)], 1)  # fmt: skip
    boxes, labels = [], []
    for _ in range(generator.integers(3, 9)):
        label = int(generator.integers(0, 3))
        size = [(0.8, 0.6, 1.73), (1.76, 0.6, 1.73), (3.9, 1.6, 1.56)][label]
        x = generator.uniform(6, 50)
        box = np.array([x, generator.uniform(-0.5, 0.5) * x, -1.7, *size, generator.uniform(-3.1, 3.1)])
        inside = generator.uniform(-0.5, 0.5, (200, 3)) * box[3:6] + [0, 0, box[5] / 2]
        c, s = np.cos(box[6]), np.sin(box[6])
        surface = inside @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]]) + box[:3]
        points = np.concatenate([points, np.concatenate([surface, generator.uniform(0, 1, (200, 1))], 1)])
        boxes.append(box)
        labels.append(label)
    focal = 721.5
    camera_from_lidar = np.array([[0, -1, 0, 0], [0, 0, -1, -0.08], [1, 0, 0, -0.27], [0, 0, 0, 1.0]])
    project = np.eye(4)
    project[:3, :3] = [[focal, 0, 609.6], [0, focal, 172.9], [0, 0, 1]]
    meta = dict(lidar2img=project @ camera_from_lidar, img_shape=(375, 1242, 3), pad_shape=(384, 1248, 3), input_shape=(384, 1248),
                scale_factor=np.ones(4, dtype=np.float32), flip=False, box_type_3d=LiDARInstance3DBoxes)  # fmt: skip
    image = torch.from_numpy(generator.normal(0, 50, (3, 384, 1248)).astype(np.float32))
    boxes = LiDARInstance3DBoxes(torch.tensor(np.array(boxes), dtype=torch.float32, device=device))
    return (torch.from_numpy(points.astype(np.float32)).to(device), boxes,
            torch.tensor(labels, device=device), image.to(device), meta)  # fmt: skip


def config(path: Path = None):
    """mmdet3d's MVXNet configuration; some installations leave the folder of configurations out."""
    import mmdet3d
    from mmcv import Config

    folder = Path(mmdet3d.__file__).parent / '.mim' / 'configs' / 'mvxnet'
    path = path or next(folder.glob('dv_mvx*.py'), None)
    if path is None:
        raise SystemExit(f"no MVXNet configuration in {folder}; name it with --config")
    return Config.fromfile(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--op', choices=['mmcv', 'ours'], required=True)
    parser.add_argument('--steps', type=int, default=200)
    parser.add_argument('--device', default='cuda', help="default: cuda. 'cpu' for ours only: mmcv's op has no CPU kernel")
    parser.add_argument('--config', type=Path, help="dv_mvx-fpn_second_secfpn_adamw_2x8_80e_kitti-3d-3class.py; default: mmdet3d's own")
    parser.add_argument('--lr', type=float, default=0.003, help="default: the configuration's peak")
    parser.add_argument('--clip', type=float, default=0, help='largest gradient norm; 0: no clipping (default)')
    parser.add_argument('--canaries', action=argparse.BooleanOptionalAction, default=True,
                        help="watch the memory behind mmcv's gradient buffers (default); off for compute-sanitizer, which watches itself")
    parser.add_argument('--after-nan', type=int, default=5, help='steps to go on once the loss is not finite')
    args = parser.parse_args()
    if args.device == 'cpu' and args.op == 'mmcv':
        parser.error("mmcv's dynamic_scatter has no CPU kernel: --op ours, or a CUDA device")
    overruns: list = []
    if args.op == 'ours':
        print(f'replaced in {len(ops.patch_mmdet3d_scatter())} modules')
    elif args.canaries:
        watch_mmcv(overruns)
    from mmdet3d.models import build_model

    torch.manual_seed(0)
    cfg = config(args.config)
    model = build_model(cfg.model).to(args.device).train()
    names = sorted({f'{type(m).__module__}.{type(m).__name__}' for m in model.modules() if type(m).__name__ == 'DynamicScatter'})
    print(f'scatter in the model: {names}')
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.95, 0.99), weight_decay=0.01)
    generator = np.random.default_rng(0)
    worst, bad = 0, 0
    for step in range(args.steps):
        batch = [sample(generator, args.device) for _ in range(2)]
        points, boxes, labels, images, metas = map(list, zip(*batch))
        losses = model(return_loss=True, points=points, img=torch.stack(images), img_metas=metas, gt_bboxes_3d=boxes, gt_labels_3d=labels)
        total = sum(sum(v) if isinstance(v, (list, tuple)) else v for k, v in losses.items() if 'loss' in k)
        optimizer.zero_grad()
        total.backward()
        if args.device != 'cpu':
            torch.cuda.synchronize()
        hit = sum(int((guard != CANARY).any(1).sum()) for guard in overruns)
        overruns.clear()
        worst = max(worst, hit)
        finite = bool(torch.isfinite(total))
        if step % 20 == 0 or not finite or hit:
            print(f'step {step}: loss {float(total):.4g}' + (f', {hit} rows behind gradient buffers overwritten' if hit else ''))
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        bad += not finite
        if bad > args.after_nan:
            break
    watched = f'rows overwritten behind a gradient buffer: {worst}' if args.op == 'mmcv' and args.canaries else 'no error'
    print(f'RESULT op={args.op} lr={args.lr} clip={args.clip}: {step + 1} steps, diverged: {bad > 0}, {watched}')


if __name__ == '__main__':
    main()
