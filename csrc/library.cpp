// Every operator's schema, once. Kernels register themselves in the folder of the operator, derivatives in autograd.cpp,
// fake kernels in mmdet3d_ext/ops/. Grids travel as (lower, step, cells), one entry per axis x, y, z.
#include <torch/library.h>

#include "mmdet3d_ext_build.h"

namespace mmdet3d_ext {
// Found by a byte search before the library is loaded, so that a build for another torch can be named instead of failing on a symbol.
extern const char build_marker[];
__attribute__((used)) const char build_marker[] = "mmdet3d_ext-build{" MMDET3D_EXT_BUILD "}";
}  // namespace mmdet3d_ext

TORCH_LIBRARY(mmdet3d_ext, m) {
  m.def("build_info() -> str", []() {
    // Hidden from the compiler, which else stores the record a second time, in pieces that the byte search would take for it.
    const char* volatile marker = mmdet3d_ext::build_marker;
    return std::string(marker);
  });

  // points (P, F) -> coords (P, 3) int32 xyz, -1 -1 -1 outside the grid
  m.def("voxel_coords(Tensor points, float[] lower, float[] step, int[] cells) -> Tensor");
  // points (P, F) -> voxels (V, M, F), coords (V, 3) int32 xyz, num_points (V,) int32
  m.def(
      "hard_voxelize(Tensor points, float[] lower, float[] step, int[] cells, int max_num_points, int max_voxels)"
      " -> (Tensor, Tensor, Tensor)");

  // coords (P, K) -> voxel_coords (V, K), point2voxel (P,) int32, counts (V,) int32, order (P,) int32 and -1 behind the
  // points kept, starts (V + 1,) int32, has_long (0-dim CPU bool): whether some voxel is so full that several blocks of threads share it
  m.def("point_groups(Tensor coords) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  // feats (P, C) -> reduced (V, C), arg (V, C) int32 for max, else (0,)
  m.def(
      "group_reduce(Tensor feats, Tensor point2voxel, Tensor counts, Tensor order, Tensor starts, Tensor has_long, int reduce)"
      " -> (Tensor, Tensor)");
  // Both in one call -> reduced (V, C), voxel_coords, point2voxel, counts, arg
  m.def("dynamic_point_to_voxel(Tensor feats, Tensor coords, int reduce) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  // The derivative of both
  m.def("group_reduce_backward(Tensor grad, Tensor point2voxel, Tensor counts, Tensor arg, int reduce) -> Tensor");

  // geometry (B, ..., 3) -> cell (P,) int32 or -1, order (P,) int32, sorted_key (P,) int32, tile_starts (T + 1,) int32
  m.def(
      "splat_plan(Tensor geometry, float[] lower, float[] step, int[] cells, bool truncate)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
  // coords (P, 4) long x, y, z, batch -> the same four
  m.def("splat_plan_from_coords(Tensor coords, int batch, int[] cells) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "lift_splat(Tensor depth, Tensor context, Tensor cell, Tensor order, Tensor sorted_key, Tensor tile_starts,"
      " int[] cells) -> Tensor");
  m.def("lift_splat_backward(Tensor grad, Tensor depth, Tensor context, Tensor cell, int[] cells) -> (Tensor, Tensor)");
  m.def(
      "bev_pool(Tensor feats, Tensor cell, Tensor order, Tensor sorted_key, Tensor tile_starts, int batch, int[] cells)"
      " -> Tensor");
  m.def("bev_pool_backward(Tensor grad, Tensor cell, int[] cells) -> Tensor");

  // x (B, C, ...) -> out as x, mean (B, G), rstd (B, G). weight, bias, mean and rstd in float32 (float64 for float64)
  m.def(
      "group_norm_relu(Tensor x, Tensor weight, Tensor bias, int groups, float eps, bool relu) -> (Tensor, Tensor, Tensor)");
  // The derivatives by x, weight and bias
  m.def(
      "group_norm_relu_backward(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor bias, int groups, bool relu)"
      " -> (Tensor, Tensor, Tensor)");
}
