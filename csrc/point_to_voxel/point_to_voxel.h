#pragma once

#include <ATen/ATen.h>

namespace mmdet3d_ext {

// A voxel with more points than kLong is added up in chunks of kChunk points by several blocks of threads; kLong >= 2 * kChunk.
constexpr int kLong = 2048, kChunk = 1024;

enum Reduce : int64_t { kSum = 0, kMean = 1, kMax = 2 };

inline void check_coords(const at::Tensor& coords) {
  TORCH_CHECK(coords.dim() == 2 && coords.size(1) >= 1, "mmdet3d_ext::point_groups: 'coords' must be (P, K), got ", coords.sizes());
  TORCH_CHECK(coords.scalar_type() == at::kInt || coords.scalar_type() == at::kLong,
              "mmdet3d_ext::point_groups: 'coords' must be int32 or int64, got ", coords.scalar_type());
  TORCH_CHECK(coords.size(0) < INT32_MAX, "mmdet3d_ext::point_groups: 'coords' may have at most 2^31 - 2 rows, got ", coords.size(0));
}

inline void check_feats(const at::Tensor& feats, int64_t reduce, const char* op) {
  TORCH_CHECK(reduce >= kSum && reduce <= kMax, "mmdet3d_ext::", op, ": 'reduce' must be 0 (sum), 1 (mean) or 2 (max), got ", reduce);
  TORCH_CHECK(feats.dim() == 2, "mmdet3d_ext::", op, ": 'feats' must be (P, C), got ", feats.sizes());
  TORCH_CHECK(at::isFloatingType(feats.scalar_type()), "mmdet3d_ext::", op, ": 'feats' must be floating, got ", feats.scalar_type());
}

inline void check_points_and_coords(const at::Tensor& feats, const at::Tensor& coords, int64_t reduce) {
  check_feats(feats, reduce, "dynamic_point_to_voxel");
  TORCH_CHECK(coords.dim() == 2 && coords.size(0) == feats.size(0) && coords.device() == feats.device(),
              "mmdet3d_ext::dynamic_point_to_voxel: 'coords' must be (", feats.size(0), ", K) on ", feats.device(), " as 'feats', got ",
              coords.sizes(), " on ", coords.device());
}

inline void check_reduce(const at::Tensor& feats, const at::Tensor& point2voxel, const at::Tensor& counts, const at::Tensor& order,
                         const at::Tensor& starts, const at::Tensor& has_long, int64_t reduce) {
  check_feats(feats, reduce, "group_reduce");
  for (const at::Tensor* map : {&point2voxel, &counts, &order, &starts}) {
    TORCH_CHECK(map->dim() == 1 && map->scalar_type() == at::kInt && map->is_contiguous() && map->device() == feats.device(),
                "mmdet3d_ext::group_reduce: the point groups must be contiguous int32 on the device of 'feats', got ", map->sizes(),
                " ", map->scalar_type(), " on ", map->device());
  }
  TORCH_CHECK(point2voxel.size(0) == feats.size(0) && order.size(0) == feats.size(0),
              "mmdet3d_ext::group_reduce: 'feats' has ", feats.size(0), " rows, the groups were made of ", point2voxel.size(0), " points");
  TORCH_CHECK(starts.size(0) == counts.size(0) + 1, "mmdet3d_ext::group_reduce: 'starts' must have one entry more than 'counts' (",
              counts.size(0), "), got ", starts.size(0));
  TORCH_CHECK(has_long.device().is_cpu() && has_long.scalar_type() == at::kBool && has_long.numel() == 1,
              "mmdet3d_ext::group_reduce: 'has_long' must be one bool on the CPU, got ", has_long.sizes(), " ", has_long.scalar_type(),
              " on ", has_long.device());
}

inline void check_reduce_backward(const at::Tensor& grad, const at::Tensor& point2voxel, const at::Tensor& counts, const at::Tensor& arg,
                                  int64_t reduce) {
  TORCH_CHECK(reduce >= kSum && reduce <= kMax, "mmdet3d_ext::group_reduce_backward: 'reduce' must be 0, 1 or 2, got ", reduce);
  TORCH_CHECK(grad.dim() == 2 && grad.size(0) == counts.size(0),
              "mmdet3d_ext::group_reduce_backward: 'grad' must be (V, C) with V = ", counts.size(0), ", got ", grad.sizes());
  for (const at::Tensor* map : {&point2voxel, &counts, &arg})
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
