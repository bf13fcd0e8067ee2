#pragma once

#include <ATen/ATen.h>

namespace mmdet3d_ext {

enum Reduce : int64_t { kSum = 0, kMean = 1, kMax = 2 };

inline void check_coords(const at::Tensor& coords) {
  TORCH_CHECK(coords.dim() == 2 && coords.size(1) >= 1, "mmdet3d_ext::point_groups: 'coords' must be (P, K), got ", coords.sizes());
  TORCH_CHECK(coords.scalar_type() == at::kInt || coords.scalar_type() == at::kLong,
              "mmdet3d_ext::point_groups: 'coords' must be int32 or int64, got ", coords.scalar_type());
  TORCH_CHECK(coords.size(0) < INT32_MAX, "mmdet3d_ext::point_groups: 'coords' may have at most 2^31 - 2 rows, got ", coords.size(0));
}

inline void check_reduce(const at::Tensor& feats, const at::Tensor& point2voxel, const at::Tensor& order, const at::Tensor& starts,
                         int64_t reduce) {
  TORCH_CHECK(reduce >= kSum && reduce <= kMax, "mmdet3d_ext::group_reduce: 'reduce' must be 0 (sum), 1 (mean) or 2 (max), got ", reduce);
  TORCH_CHECK(feats.dim() == 2, "mmdet3d_ext::group_reduce: 'feats' must be (P, C), got ", feats.sizes());
  TORCH_CHECK(at::isFloatingType(feats.scalar_type()), "mmdet3d_ext::group_reduce: 'feats' must be floating, got ", feats.scalar_type());
  for (const at::Tensor* map : {&point2voxel, &order, &starts}) {
    TORCH_CHECK(map->dim() == 1 && map->scalar_type() == at::kInt && map->is_contiguous() && map->device() == feats.device(),
                "mmdet3d_ext::group_reduce: the point groups must be contiguous int32 on the device of 'feats', got ", map->sizes(),
                " ", map->scalar_type(), " on ", map->device());
  }
  TORCH_CHECK(point2voxel.size(0) == feats.size(0) && order.size(0) == feats.size(0),
              "mmdet3d_ext::group_reduce: 'feats' has ", feats.size(0), " rows, the groups were made of ", point2voxel.size(0), " points");
  TORCH_CHECK(starts.size(0) >= 1, "mmdet3d_ext::group_reduce: 'starts' must have one entry more than there are voxels, got none");
}

inline void check_reduce_backward(const at::Tensor& grad, const at::Tensor& point2voxel, const at::Tensor& starts, const at::Tensor& arg,
                                  int64_t reduce) {
  TORCH_CHECK(reduce >= kSum && reduce <= kMax, "mmdet3d_ext::group_reduce_backward: 'reduce' must be 0, 1 or 2, got ", reduce);
  TORCH_CHECK(grad.dim() == 2 && grad.size(0) + 1 == starts.size(0),
              "mmdet3d_ext::group_reduce_backward: 'grad' must be (V, C) with V = ", starts.size(0) - 1, ", got ", grad.sizes());
  for (const at::Tensor* map : {&point2voxel, &starts, &arg})
    TORCH_CHECK(map->scalar_type() == at::kInt && map->is_contiguous() && map->device() == grad.device(),
                "mmdet3d_ext::group_reduce_backward: the maps must be contiguous int32 on the device of 'grad'");
  TORCH_CHECK(reduce != kMax || arg.sizes() == grad.sizes(),
              "mmdet3d_ext::group_reduce_backward: 'arg' must have the shape of 'grad' ", grad.sizes(), ", got ", arg.sizes());
}

// One int64 key per row, ordered as the rows are (first column first), for coordinates that a packed key cannot hold: columns
// are replaced by their ranks where needed. Slow, for absurd extents only. Rows with a negative entry get -1.
inline at::Tensor ranked_keys(const at::Tensor& coords) {
  const at::Tensor rows = coords.to(at::kLong);
  const at::Tensor dropped = std::get<0>(rows.min(1)).lt(0);
  const double limit = 4e18;
  at::Tensor key = at::zeros({rows.size(0)}, rows.options());
  double extent = 1;
  const auto ranks = [](const at::Tensor& values) { return std::get<1>(at::_unique(values, /*sorted=*/true, /*return_inverse=*/true)); };
  for (int64_t column = 0; column < rows.size(1); ++column) {
    at::Tensor value = rows.select(1, column).masked_fill(dropped, 0);
    double width = static_cast<double>(value.max().item<int64_t>()) + 1;
    if (width > 4e9) {
      value = ranks(value);
      width = static_cast<double>(value.max().item<int64_t>()) + 1;
    }
    if (extent * width > limit) {
      key = ranks(key);
      extent = static_cast<double>(key.max().item<int64_t>()) + 1;
    }
    key = key * static_cast<int64_t>(width) + value;
    extent *= width;
  }
  return key.masked_fill_(dropped, -1);
}

}  // namespace mmdet3d_ext
