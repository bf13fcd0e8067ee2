"""Lift-splat view transforms: what all of them share.

Letters: B batch, N cameras, D depth bins, C context channels, H/W image feature, X/Y BEV cells, Z height bins.
Frames: pixels (u right, v down) of the augmented image; camera (x right, y down, z forward); lidar (x right, y forward,
z up) after the BEV augmentation.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from ... import ops
from ...geometry.grid import Axis, AxisSpec, BevGrid
from ...geometry.on_device import constant
from .depth_map import affine, draw_depth, expand_heights
from .rigs import RIG_MATRICES, RigCache, rig_key

GRID_NAMES = ('dx', 'bx', 'nx', 'frustum')


def make_frustum(image_size: Sequence[int], feature_size: Sequence[int], depths: Axis, compat: Optional[str]) -> torch.Tensor:
    """(D, H, W, 3) pixel positions (u, v) and depth in metres of every feature and depth bin.

    A feature stands for the middle of the pixels that it covers: stride 8 starts at 4, 12, 20 ... Under the
    ``'reference'`` profile positions run from 0 to the last pixel in equal steps instead, which is up to half a feature
    off; trained checkpoints depend on it. A depth bin is represented by its near edge in both.
    """
    sides = []
    for pixels, count in zip(image_size, feature_size, strict=True):
        if compat == 'reference':
            sides.append(torch.linspace(0, pixels - 1, count))
        else:
            sides.append((torch.arange(count) + 0.5) * (pixels / count))
    d = (depths.lo + torch.arange(depths.cells, dtype=torch.float64) * depths.step).float()
    d, v, u = torch.meshgrid(d, sides[0].float(), sides[1].float(), indexing='ij')
    return torch.stack([u, v, d], -1)


def bev_downsample(channels: int, factor: int) -> nn.Module:
    """Three 3x3 convolutions, the middle one with stride ``factor``; nothing for a factor of 1."""
    if factor == 1:
        return nn.Identity()
    layers = []
    for stride in (1, factor, 1):
        layers += [nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(channels),
                   nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _brief(tensor: torch.Tensor) -> list:
    """The three values of a grid constant; of a larger tensor the shape."""
    return tensor.tolist() if tensor.numel() <= 3 else list(tensor.shape)


class VolumePlan(NamedTuple):
    """What :meth:`BaseTransform.pool_volume` works out from positions: rows (P,) of the volume inside the grid, and their order."""

    rows: torch.Tensor
    plan: ops.SplatPlan


class BaseTransform(nn.Module):
    """Geometry, pooling and the grid constants. Subclasses predict depth and context (:meth:`depth_and_context`).

    Args:
        in_channels: channels of the image features.
        out_channels: C; the BEV map has C * Z channels, height bin by height bin.
        image_size: (height, width) of the augmented images in pixels.
        feature_size: (H, W) of the image features.
        xbound, ybound, zbound: pooling grid in metres, lidar frame: ``[lower, upper, step]`` or ``{range, cells}``.
        dbound: depth bins in metres, same form.
        downsample: stride of the convolutions after pooling (1: none). The cell counts must be divisible by it.
        compat: ``'reference'`` for trained BEVFusion checkpoints: cells are truncated toward zero rather than floored,
            and the frustum has that project's pixel positions (:func:`make_frustum`).

    The state dict holds ``dx, bx, nx, frustum`` because published checkpoints do. They are this configuration's and are
    never overwritten on loading. What the last loaded checkpoint said is kept in :attr:`grid_not_loaded`: state-dict
    name -> ``{checkpoint, model, differs}`` (three values, or the shape of a frustum).

    :meth:`add_grid` makes the transform pool on further grids, too; then its result is a mapping of maps.
    :meth:`cache_rigs` makes predictions of a fixed rig work out its geometry once.
    """

    def __init__(self, in_channels: int, out_channels: int, image_size: Sequence[int], feature_size: Sequence[int],
                 xbound: AxisSpec, ybound: AxisSpec, zbound: AxisSpec, dbound: AxisSpec, downsample: int = 1,
                 compat: Optional[str] = None):
        super().__init__()
        name = type(self).__name__
        for key, value in (('image_size', image_size), ('feature_size', feature_size)):
            if len(value) != 2 or min(value) < 1:
                raise ValueError(f'{name}: {key} must be (height, width), got {value!r}')
        if int(downsample) != downsample or downsample < 1:
            raise ValueError(f'{name}: downsample must be a positive whole number, got {downsample!r}')
        self.in_channels, self.C = in_channels, out_channels
        self.image_size, self.feature_size = tuple(image_size), tuple(feature_size)
        self.compat = compat
        self.grid = BevGrid.parse(xbound, ybound, f'{name}.xbound/ybound')
        self.z_axis = Axis.parse(zbound, f'{name}.zbound')
        self.depth_axis = Axis.parse(dbound, f'{name}.dbound')
        self.D = self.depth_axis.cells
        self.bev_grid = self.grid.downsample(downsample, f'{name}.xbound/ybound with downsample {downsample}')
        self.bev_channels = out_channels * self.z_axis.cells
        axes = (self.grid.x, self.grid.y, self.z_axis)
        self.bounds = [list(axis.as_bound()) for axis in axes]
        self.register_buffer('dx', torch.tensor([axis.step for axis in axes]))
        self.register_buffer('bx', torch.tensor([axis.lo + axis.step / 2 for axis in axes]))
        self.register_buffer('nx', torch.tensor([axis.cells for axis in axes]))
        self.register_buffer('frustum', make_frustum(self.image_size, self.feature_size, self.depth_axis, compat))
        self.grid_not_loaded: dict = {}
        self.downsample = bev_downsample(self.bev_channels, downsample)
        self.extra_grids: Dict[str, BevGrid] = {}
        self.extra_downsample = nn.ModuleDict()
        self.rigs: Optional[RigCache] = None

    @property
    def bev_shape(self) -> Tuple[int, int]:
        """(X, Y) cells of the result."""
        return self.bev_grid.shape

    def add_grid(self, name: str, xbound: AxisSpec, ybound: AxisSpec, downsample: int = 1) -> BevGrid:
        """Pool on one more grid, with strided convolutions of its own (``extra_downsample.<name>``).

        Depth and context are predicted once for all grids. A cell's sum grows with its area, so what is pooled here is scaled
        to the area of a cell of the main grid: weights that were trained on the main grid meet maps of the same mean.

        Args:
            xbound, ybound, downsample: as in the constructor.

        Returns:
            The grid of the resulting map.
        """
        own = f'{type(self).__name__}, grid of {name!r}'
        grid = BevGrid.parse(xbound, ybound, f'{own}: xbound/ybound')
        result = grid.downsample(downsample, f'{own}: xbound/ybound with downsample {downsample}')
        self.extra_grids[name] = grid
        self.cache_rigs(self.rigs.most if self.rigs else 0)
        self.extra_downsample[name] = bev_downsample(self.bev_channels, downsample)
        return result

    def cache_rigs(self, most: int) -> None:
        """In evaluation keep the geometry of the last ``most`` sets of matrices, bit by bit; 0 (as after construction): none.

        The results are exactly those without it. It pays where matrices repeat from frame to frame: a rig whose calibration is fixed
        and whose augmentation is that of the test. nuScenes' ``camera2lidar`` holds the car's motion between the exposures and differs
        in every sample.
        """
        self.rigs = RigCache(most) if most else None

    def rig(self, inputs: Mapping[str, Any]) -> Any:
        """:func:`~.rigs.rig_key` of a batch's matrices, None where it is not needed (see :meth:`cache_rigs`)."""
        return None if self.training or self.rigs is None else rig_key(inputs)

    def on_grids(self, pool: Callable[[BevGrid], torch.Tensor]) -> Union[torch.Tensor, Dict[Optional[str], torch.Tensor]]:
        """``pool(grid)`` and the strided convolutions for every grid: the map, or by name with the main one under None."""
        main = self.downsample(pool(self.grid))
        if not self.extra_grids:
            return main
        maps: Dict[Optional[str], torch.Tensor] = {None: main}
        area = self.grid.x.step * self.grid.y.step
        for name, grid in self.extra_grids.items():
            maps[name] = self.extra_downsample[name](pool(grid) * (area / (grid.x.step * grid.y.step)))
        return maps

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # The configuration's grid wins: a checkpoint of another resolution would silently bring its own back.
        self.grid_not_loaded = {}
        for name in GRID_NAMES:
            own, key = getattr(self, name), prefix + name
            if key in state_dict:
                loaded = state_dict[key]
                differs = loaded.shape != own.shape or not torch.allclose(loaded.double().cpu(), own.double().cpu(),
                                                                          rtol=1e-5, atol=1e-5)
                self.grid_not_loaded[key] = {'checkpoint': _brief(loaded), 'model': _brief(own), 'differs': differs}
            state_dict[key] = own
        super()._load_from_state_dict(state_dict, prefix, *args)

    def geometry(self, camera_intrinsics: torch.Tensor, camera2lidar: torch.Tensor, img_aug_matrix: torch.Tensor,
                 lidar_aug_matrix: torch.Tensor) -> torch.Tensor:
        """Position of every feature and depth bin in the augmented lidar frame.

        Args:
            camera_intrinsics, camera2lidar, img_aug_matrix: (B, N, 4, 4).
            lidar_aug_matrix: (B, 4, 4).

        Returns:
            (B, N, D, H, W, 3) metres, float32.
        """
        with torch.autocast(self.frustum.device.type, enabled=False):
            pixel_from_aug = torch.linalg.inv_ex(img_aug_matrix[..., :3, :3].double()).inverse
            shift = -pixel_from_aug @ img_aug_matrix[..., :3, 3:].double()
            undo = torch.cat([pixel_from_aug, shift], -1).float()  # (B, N, 3, 4)
            lidar_from_camera = lidar_aug_matrix[:, None].double() @ camera2lidar.double()
            rays = lidar_from_camera[..., :3, :3] @ torch.linalg.inv_ex(camera_intrinsics[..., :3, :3].double()).inverse
            lidar_from_rays = torch.cat([rays, lidar_from_camera[..., :3, 3:]], -1).float()  # (B, N, 3, 4)
            spread = (slice(None), slice(None), None, None, None)  # (B, N, 1, 1, 1, 3, 4)
            uvd = affine(undo[spread], self.frustum.float())  # (B, N, D, H, W, 3)
            scaled = torch.cat([uvd[..., :2] * uvd[..., 2:], uvd[..., 2:]], -1)
            return affine(lidar_from_rays[spread], scaled)

    def placed(self, inputs: Mapping[str, Any], volume: bool = False) -> Callable[[BevGrid], Any]:
        """By grid, what :meth:`pool` (``volume``: :meth:`pool_volume`) takes as geometry: positions, or plans from the cache.

        Args:
            inputs: the batch's matrices; ``rig``: what :meth:`rig` gave for them, looked up here if it is missing.
        """
        def positions() -> torch.Tensor:
            return self.geometry(*(inputs[name] for name in RIG_MATRICES))

        if self.training or self.rigs is None:
            found = positions()
            return lambda grid: found
        prepare = self.volume_plan if volume else self.plan

        def plans() -> Dict[BevGrid, Any]:
            found = positions()
            return {grid: prepare(found, grid) for grid in (self.grid, *self.extra_grids.values())}

        key = inputs.get('rig')
        key = self.rig(inputs) if key is None else key
        return self.rigs.get((key, volume, self.frustum.device, self.frustum.dtype), plans).__getitem__

    def plan(self, geometry: torch.Tensor, grid: Optional[BevGrid] = None) -> ops.SplatPlan:
        """The plan that :meth:`pool` makes for positions (B, N, D, H, W, 3)."""
        return ops.prepare_lift_splat(geometry, self._bounds(grid), self.compat)

    def pool(self, depth: torch.Tensor, context: torch.Tensor, geometry: Union[torch.Tensor, ops.SplatPlan],
             grid: Optional[BevGrid] = None) -> torch.Tensor:
        """Sum depth-weighted context over the cells.

        Args:
            depth: (B, N, D, H, W) weights.
            context: (B, N, C, H, W).
            geometry: (B, N, D, H, W, 3), or its :meth:`plan` on the grid.
            grid: where to (default: the main grid).

        Returns:
            (B, C * Z, X, Y) float32.
        """
        with torch.autocast(depth.device.type, enabled=False):
            return ops.lift_splat(depth.float(), context.float(), geometry, self._bounds(grid), compat=self.compat)

    def _bounds(self, grid: Optional[BevGrid]) -> List[List[float]]:
        if grid is None or grid is self.grid:
            return self.bounds
        return [list(grid.x.as_bound()), list(grid.y.as_bound()), self.bounds[2]]

    def volume_plan(self, geometry: torch.Tensor, grid: Optional[BevGrid] = None) -> VolumePlan:
        """The plan that :meth:`pool_volume` makes for positions (B, N, D, H, W, 3)."""
        grid = grid or self.grid
        bounds, (nx, ny) = self._bounds(grid), grid.shape
        lower, step = (constant([b[i] for b in bounds], geometry) for i in (0, 2))
        cell = (geometry - lower) / step
        cell = cell.trunc() if self.compat == 'reference' else cell.floor()
        inside = ((cell >= 0) & (cell < constant([nx, ny, self.z_axis.cells], cell))).all(-1)  # NaN is outside
        rows = inside.flatten().nonzero().flatten()
        sample = torch.div(rows, inside[0].numel(), rounding_mode='floor')
        coords = torch.cat([cell.flatten(0, -2)[rows].long(), sample[:, None]], 1)
        return VolumePlan(rows, ops.prepare_bev_pool(coords, len(geometry), self.z_axis.cells, nx, ny))

    def pool_volume(self, volume: torch.Tensor, geometry: Union[torch.Tensor, VolumePlan],
                    grid: Optional[BevGrid] = None) -> torch.Tensor:
        """Sum given features: volume (B, N, D, H, W, C) at geometry (B, N, D, H, W, 3) -> (B, C * Z, X, Y) float32.

        ``geometry`` may be a :meth:`volume_plan` on the grid.
        """
        with torch.autocast(volume.device.type, enabled=False):
            found = geometry if isinstance(geometry, VolumePlan) else self.volume_plan(geometry, grid)
            out = ops.bev_pool(volume.flatten(0, 4)[found.rows].float(), found.plan)  # (B, C, Z, X, Y)
        return out.transpose(1, 2).flatten(1, 2)

    def depth_and_context(self, features: torch.Tensor, inputs: dict) -> Tuple[torch.Tensor, torch.Tensor]:
        """Features (B, N, in_channels, H, W) -> depth (B, N, D, H, W), summing to 1 over D, and context (B, N, C, H, W).

        ``inputs`` holds the batch's matrices and points by the names of :meth:`forward`.
        """
        raise NotImplementedError

    def split(self, x: torch.Tensor, batch: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """(B * N, >= D + C, H, W) -> depth distribution and context."""
        x = x.unflatten(0, (batch, -1))
        return x[:, :, :self.D].softmax(2), x[:, :, self.D:self.D + self.C]

    def forward(self, features: torch.Tensor, points: Optional[List[torch.Tensor]] = None,
                radar: Optional[List[torch.Tensor]] = None, **inputs):
        """Transform one batch.

        Args:
            features: (B, N, in_channels, H, W).
            points, radar: list[B] of (P, F), read by the depth-aware transforms; never changed.
            inputs: ``camera_intrinsics, camera2lidar, img_aug_matrix, camera2ego, lidar2image`` (B, N, 4, 4),
                ``lidar_aug_matrix`` (B, 4, 4), ``depths`` (B, N, image height, image width) if there is a depth loss, ``rig``
                as :meth:`placed` takes it.

        Returns:
            (B, C * Z, X, Y), with further grids a mapping as :meth:`on_grids` gives; or a pair of that and the depth loss
            (training, transforms that have one).
        """
        inputs.update(points=points, radar=radar)
        self.check_inputs(features, inputs)
        placed = self.placed(inputs)
        depth, context = self.depth_and_context(features, inputs)
        return self.on_grids(lambda grid: self.pool(depth, context, placed(grid), grid))

    def check_inputs(self, features: torch.Tensor, inputs: dict) -> None:
        """Raise ValueError if a matrix is missing or the features do not have the configured size."""
        name = type(self).__name__
        if tuple(features.shape[-2:]) != self.feature_size:
            raise ValueError(f'{name}: image features are {tuple(features.shape[-2:])}, feature_size says '
                             f'{self.feature_size} (image_size {self.image_size}); align them with the backbone\'s stride')
        for key in RIG_MATRICES:
            if inputs.get(key) is None:
                raise ValueError(f'{name}: the batch has no {key!r}; collect it in the pipeline (Collect3D meta_keys)')


class BaseDepthTransform(BaseTransform):
    """A transform that also sees a depth map drawn from points.

    Args (besides those of :class:`BaseTransform`):
        use_points: ``lidar`` or ``radar``: which points are drawn.
        depth_input: ``scalar`` (metres) or ``one-hot`` (a channel per depth bin).
        height_expand: draw every point at eight heights (radar points have none of their own).
        add_depth_features: append the point's features to the map.
        compat: ``'reference'``: see also :func:`~.depth_map.draw_depth`.
    """

    def __init__(self, in_channels: int, out_channels: int, image_size: Sequence[int], feature_size: Sequence[int],
                 xbound: AxisSpec, ybound: AxisSpec, zbound: AxisSpec, dbound: AxisSpec, downsample: int = 1,
                 use_points: str = 'lidar', depth_input: str = 'scalar', height_expand: bool = False,
                 add_depth_features: bool = False, compat: Optional[str] = None):
        super().__init__(in_channels, out_channels, image_size, feature_size, xbound, ybound, zbound, dbound, downsample,
                         compat)
        if use_points not in ('lidar', 'radar'):
            raise ValueError(f"{type(self).__name__}: use_points must be 'lidar' or 'radar', got {use_points!r}")
        if depth_input not in ('scalar', 'one-hot'):
            raise ValueError(f"{type(self).__name__}: depth_input must be 'scalar' or 'one-hot', got {depth_input!r}")
        self.use_points, self.depth_input = use_points, depth_input
        self.height_expand, self.add_depth_features = height_expand, add_depth_features

    @torch.no_grad()
    def depth_map(self, inputs: dict) -> torch.Tensor:
        """(B, N, channels, image height, image width) float32."""
        key = 'points' if self.use_points == 'lidar' else 'radar'
        for name in (key, 'lidar2image'):
            if inputs.get(name) is None:
                raise ValueError(f'{type(self).__name__} (use_points: {self.use_points}) needs {name!r} in the batch')
        bins = None
        if self.depth_input == 'one-hot':
            bins = (self.depth_axis.lo, self.depth_axis.step, self.D)
        maps = []
        with torch.autocast(inputs['lidar2image'].device.type, enabled=False):
            for sample, points in enumerate(inputs[key]):
                if self.height_expand:
                    points = expand_heights(points)
                maps.append(draw_depth(points, inputs['lidar2image'][sample], inputs['img_aug_matrix'][sample],
                                       inputs['lidar_aug_matrix'][sample], self.image_size, bins,
                                       self.add_depth_features, self.compat))
        return torch.stack(maps)
