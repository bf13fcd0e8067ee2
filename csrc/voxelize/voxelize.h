#pragma once

#include <ATen/core/Tensor.h>

#include "common/grid.h"

namespace mmdet3d_ext {

inline void check_points(const at::Tensor& points, const char* op) {
  TORCH_CHECK(points.dim() == 2 && points.size(1) >= 3, "mmdet3d_ext::", op,
              ": 'points' must be (P, F) with x, y, z in the first three columns, got ", points.sizes());
  TORCH_CHECK(points.scalar_type() == at::kFloat || points.scalar_type() == at::kDouble, "mmdet3d_ext::", op,
              ": 'points' must be float32 or float64 (half precision moves points by centimetres), got ", points.scalar_type());
  TORCH_CHECK(points.size(0) < INT32_MAX, "mmdet3d_ext::", op, ": 'points' may have at most 2^31 - 2 rows, got ", points.size(0));
}

inline void check_hard_limits(int64_t max_num_points, int64_t max_voxels) {
  TORCH_CHECK(max_num_points >= 1 && max_num_points <= INT32_MAX,
              "mmdet3d_ext::hard_voxelize: 'max_num_points' must be at least 1, got ", max_num_points);
  TORCH_CHECK(max_voxels >= -1, "mmdet3d_ext::hard_voxelize: 'max_voxels' must be -1 (no limit) or more, got ", max_voxels);
}

}  // namespace mmdet3d_ext
