"""Drawing samples with labels or predictions: what ``tools/visualize.py`` does after it has parsed its words."""
from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np
import torch
from mmcv.parallel import collate
from PIL import Image

from ..errors import text_of
from ..visualization import BevMap, Boxes, Scene, draw_scene
from . import run_dir as run_dirs
from .building import building, running
from .checkpoint import load_weights, read_checkpoint
from .evaluate import forward
from .launch import UserError
from .map_labels import check_object_labels
from .parallel import unpack_batch
from .test import UNTRAINED
from .train import make_model

MODES = ('gt', 'pred')
logger = logging.getLogger('mmdet3d_ext')


@dataclass
class Options:
    """What the command line adds to the configuration (see ``tools/visualize.py --help``)."""

    mode: str = 'gt'
    checkpoint: Optional[str] = None
    split: str = 'val'
    bbox_score: float = 0.1
    map_score: float = 0.5
    out_dir: str = 'viz'
    num: Optional[int] = None
    width: int = 1440
    weights: str = 'auto'
    allow_unsafe_checkpoint: bool = False
    allow_partial_checkpoint: bool = False
    checkpoint_origin: str = 'auto'


def visualize(cfg: Mapping[str, Any], options: Options, device: torch.device) -> List[str]:
    """Write one PNG per sample to ``options.out_dir``; returns their names.

    Samples come through the validation pipeline whatever the split, so that nothing is augmented. ``num`` samples are taken
    at equal distances over the split.

    Raises:
        UserError: for a wrong option, or a configuration without the split.
    """
    if options.mode not in MODES:
        raise UserError(f'--mode must be one of {MODES}, got {options.mode!r}')
    if options.mode == 'pred' and not options.checkpoint:
        raise UserError('--mode pred needs --checkpoint FILE ("none" draws the untrained model)')
    if options.num is not None and options.num < 1:
        raise UserError(f'--num must be at least 1, got {options.num}')
    if options.width < 320:
        raise UserError(f'--width must be at least 320 pixels, got {options.width}')
    dataset = make_dataset(cfg, options.split)
    model = None
    if options.mode == 'pred':
        model = make_model(cfg)
        check_object_labels(model, dataset)
        if options.checkpoint != UNTRAINED:
            content = read_checkpoint(options.checkpoint, options.allow_unsafe_checkpoint)
            load_weights(model, options.checkpoint, options.weights, complete=True,
                         allow_partial=options.allow_partial_checkpoint, logger=logger, content=content,
                         origin=options.checkpoint_origin)
        model.to(device).eval()
    try:
        os.makedirs(options.out_dir, exist_ok=True)
    except OSError as error:
        raise UserError(f'cannot write pictures there: {text_of(error)}; give another --out-dir') from error
    files = []
    for index in _progress(_chosen(len(dataset), options.num)):
        with running(model) if model is not None else contextlib.nullcontext():
            scene = make_scene(cfg, dataset, index, model, device, options.bbox_score)
        file = os.path.join(options.out_dir, f'{index:05d}_{dataset.tokens[index][:8]}.png')
        _save(draw_scene(scene, options.width, options.map_score), file)
        files.append(file)
    return files


def _save(picture: np.ndarray, file: str) -> None:
    """Write a PNG, whole or not at all."""
    try:
        Image.fromarray(picture).save(file)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(file)
        raise


def make_dataset(cfg: Mapping[str, Any], split: str) -> Any:
    """The innermost data set of ``data.<split>`` with the validation pipeline."""
    from ..datasets.builder import build_dataset
    from ..registry import profile
    data = run_dirs.to_plain(cfg.get('data')) or {}
    chosen = data.get(split)
    if not chosen:
        raise UserError(f'the configuration has no data.{split} (--split); it has {[k for k, v in data.items() if v]}')
    key = f'data.{split}'
    if isinstance(chosen, list):
        raise UserError(f'{key} (--split) is a list of data sets, and one at a time is drawn; give one with --{key}')
    while isinstance(chosen.get('dataset'), Mapping):  # CBGSDataset and other wrappers
        chosen, key = chosen['dataset'], f'{key}.dataset'
    reference = data.get('val') or data.get('test') or chosen
    chosen = dict(chosen, pipeline=reference['pipeline'], test_mode=True)
    with building(key, cfg, chosen), profile(cfg.get('compat')):
        return build_dataset(chosen)


def _chosen(count: int, wanted: Optional[int]) -> List[int]:
    """Indices at equal distances, the first sample among them."""
    wanted = count if wanted is None else min(wanted, count)
    return [i * count // wanted for i in range(wanted)]


@torch.no_grad()
def make_scene(cfg: Mapping[str, Any], dataset: Any, index: int, model: Optional[torch.nn.Module], device: torch.device,
               bbox_score: float) -> Scene:
    """Everything to draw of sample ``index``: original images, points, labels, and the model's output if there is a model."""
    info = dataset.get_data_info(index)
    batch = unpack_batch(collate([dataset[index]], samples_per_gpu=1), device)
    matrix = batch.get('lidar_aug_matrix')
    if matrix is not None and not torch.allclose(matrix[0].float().cpu(), torch.eye(4), atol=1e-5):
        raise UserError('the validation pipeline turns or scales the scene (lidar_aug_matrix is not the identity); boxes would '
                        'not lie on the images')
    points = batch['points'][0].float().cpu().numpy() if batch.get('points') is not None else np.zeros((0, 3))
    scene = Scene(title=_title(info, dataset, index), points=points, extent=_extent(cfg, dataset), truth=_truth(dataset, index),
                  **_images(info))
    labels = next((step for step in dataset.transforms if type(step).__name__ == 'LoadBEVSegmentation'), None)
    if labels is not None and batch.get('gt_masks_bev') is not None:
        scene.true_map = BevMap(batch['gt_masks_bev'][0].float().cpu().numpy(), labels.classes, labels.grid.extent)
    if model is not None:
        _add_prediction(scene, forward(model, batch)[0], model, dataset, bbox_score)
    return scene


def _add_prediction(scene: Scene, output: Mapping[str, Any], model: torch.nn.Module, dataset: Any, bbox_score: float) -> None:
    if 'boxes_3d' in output:
        boxes, labels = output['boxes_3d'].tensor.cpu().numpy(), output['labels_3d'].tolist()
        names = [dataset.CLASSES[label] if 0 <= label < len(dataset.CLASSES) else str(label) for label in labels]
        scene.prediction = Boxes(boxes, names, output['scores_3d'].float().cpu().numpy()).above(bbox_score)
    if 'masks_bev' in output:
        head = next(head for head in model.heads.values() if hasattr(head, 'transform'))
        scene.predicted_map = BevMap(output['masks_bev'].float().cpu().numpy(), head.classes, head.transform.output_grid.extent)


def _title(info: Mapping[str, Any], dataset: Any, index: int) -> str:
    return f'sample {index} of {len(dataset)}  {info["token"]}  {info.get("location") or ""}'


def _extent(cfg: Mapping[str, Any], dataset: Any) -> Tuple[float, float, float, float]:
    """Bounds (x_lo, y_lo, x_hi, y_hi) of the bird's-eye view: the labels' if there are maps, else the points'."""
    labels = next((step for step in dataset.transforms if type(step).__name__ == 'LoadBEVSegmentation'), None)
    if labels is not None:
        return tuple(labels.grid.extent)
    bounds = cfg.get('point_cloud_range')
    return (bounds[0], bounds[1], bounds[3], bounds[4]) if bounds else (-50.0, -50.0, 50.0, 50.0)


def _truth(dataset: Any, index: int) -> Optional[Boxes]:
    if not dataset.annotated:
        return None
    found = dataset.get_ann_info(index)
    keep = np.flatnonzero(found['gt_labels_3d'] >= 0)
    return Boxes(found['gt_bboxes_3d'].tensor.numpy()[keep], [str(found['gt_names'][i]) for i in keep])


def _images(info: Mapping[str, Any]) -> Dict[str, Any]:
    """Original images with their projection; nothing for a data set without cameras."""
    paths = info.get('image_paths') or []
    from ..datasets.nuscenes_schema import CAMERAS
    images = []
    for path in paths:
        try:
            with Image.open(path) as image:
                images.append(np.asarray(image.convert('RGB')))
        except OSError as error:
            raise UserError(f'{path}: this image cannot be read: {error}') from error
    return {'cameras': list(CAMERAS[:len(paths)]), 'images': images, 'image_from_lidar': list(info.get('lidar2image') or [])}


def _progress(indices: List[int]):
    from tqdm import tqdm
    return tqdm(indices, desc='drawing', unit='sample')
