// Which points share a voxel, as the CUDA kernels keep it. Letters: P points, K coordinate columns, V voxels.
#pragma once

#include <ATen/ATen.h>

namespace mmdet3d_ext {

struct PointGroups {
  at::Tensor voxel_coords;  // (V, K), sorted
  at::Tensor point2voxel;   // (P,) int32, -1 if dropped
  at::Tensor counts;        // (V,) int32
  at::Tensor order;         // (P,) int32: points by voxel, then by index; -1 behind the last of them
  at::Tensor starts;        // (V + 1,) int32: voxel v holds order[starts[v]] ... order[starts[v + 1] - 1]
  bool has_long = false;    // whether some voxel holds more than kLong points
};

// Waits once for the device (for V), or twice in rare cases named in point_groups_cuda.cu.
PointGroups find_point_groups(const at::Tensor& coords);

}  // namespace mmdet3d_ext
