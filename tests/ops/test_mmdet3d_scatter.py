"""mmdet3d's dynamic encoders run on the operators of this package after one call."""

import subprocess
import sys

import pytest
import torch
from testing import REPO

from mmdet3d_ext import ops

# In a process of its own: the call changes mmcv for everybody.
ENCODER = """
import torch
from mmdet3d_ext import ops
changed = ops.patch_mmdet3d_scatter()
assert ops.patch_mmdet3d_scatter() == [], 'a second call changes nothing'
import mmcv.ops, mmdet3d.ops
from mmdet3d.models.voxel_encoders import DynamicPillarFeatureNet, DynamicSimpleVFE, DynamicVFE
for name in ('mmcv.ops', 'mmcv.ops.scatter_points', 'mmdet3d.ops', 'mmdet3d.models.voxel_encoders.voxel_encoder',
             'mmdet3d.models.voxel_encoders.pillar_encoder'):
    assert name in changed, (name, changed)
assert mmcv.ops.DynamicScatter is mmdet3d.ops.DynamicScatter is ops.DynamicScatter
assert mmcv.ops.dynamic_scatter is ops.dynamic_scatter
torch.manual_seed(0)
size, limits = [.5, .5, .5], [0, -4, -2, 8, 4, 2]
points = torch.rand(600, 4) * torch.tensor([9., 9., 4., 1.]) - torch.tensor([0., 4.5, 2., 0.])
batch = torch.arange(600) // 300
coords = ops.dynamic_voxelize(points, size, limits).flip(1)
coords = torch.cat([batch[:, None].int(), coords], 1)
grid = dict(voxel_size=size, point_cloud_range=limits)
for encoder in (DynamicVFE(4, [8, 8], with_cluster_center=True, with_voxel_center=True, **grid),
                DynamicSimpleVFE(**grid)):
    scatters = [m for m in encoder.modules() if type(m).__name__ == 'DynamicScatter']
    assert scatters and all(isinstance(m, ops.DynamicScatter) for m in scatters)
    feats = points.clone().requires_grad_()
    out, voxels = encoder(feats, coords)
    kept = coords[(coords >= 0).all(1)]
    assert torch.equal(voxels, torch.unique(kept, dim=0)), 'sorted by sample, z, y, x'
    if out.requires_grad:  # mmdet3d's simple encoder detaches
        out.sum().backward()
        assert feats.grad.isfinite().all() and feats.grad.abs().sum() > 0
print('ran')
"""


def test_encoders_of_mmdet3d():
    result = subprocess.run([sys.executable, '-c', ENCODER], cwd=REPO, capture_output=True, text=True)
    assert result.stdout.strip().endswith('ran'), result.stderr[-2000:]


@pytest.mark.parametrize('reduce', ['sum', 'mean', 'max'])
def test_function_form(reduce):
    feats = torch.randn(50, 3)
    coords = torch.randint(0, 3, (50, 4))
    out, voxels = ops.dynamic_scatter(feats, coords, reduce)
    want = ops.dynamic_point_to_voxel(feats, coords, reduce)
    assert torch.equal(out, want[0]) and torch.equal(voxels, want[1])
