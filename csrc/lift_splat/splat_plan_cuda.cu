// The plan of lift-splat pooling on a GPU: each point's cell, and the points in the order of the cells' tiles. Letters: see lift_splat.h.
//
// It depends on the geometry alone and is reused while that is unchanged.
#include <torch/library.h>

#include "common/cuda_utils.cuh"
#include "lift_splat/lift_splat.h"

namespace mmdet3d_ext {
namespace {

__device__ __forceinline__ void write_point(const SplatGrid& grid, int64_t p, bool inside, int32_t b, const int32_t at[3], int32_t dropped,
                                            int32_t* cell, int32_t* key, int32_t* index) {
  cell[p] = inside ? grid.cell(b, at[0], at[1], at[2]) : -1;
  key[p] = inside ? grid.key(b, at[0], at[1], at[2]) : dropped;
  index[p] = static_cast<int32_t>(p);
}

__global__ void geometry_kernel(const float* __restrict__ geometry, int64_t count, int64_t per_sample, Grid bounds, SplatGrid grid,
                                bool truncate, int32_t dropped, int32_t* __restrict__ cell, int32_t* __restrict__ key,
                                int32_t* __restrict__ index) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p >= count) return;
  int32_t at[3];
  const bool inside = bounds.locate(geometry[3 * p], geometry[3 * p + 1], geometry[3 * p + 2], truncate, at);
  write_point(grid, p, inside, static_cast<int32_t>(p / per_sample), at, dropped, cell, key, index);
}

__global__ void coords_kernel(const int64_t* __restrict__ coords, int64_t count, SplatGrid grid, int32_t dropped, int32_t* __restrict__ cell,
                              int32_t* __restrict__ key, int32_t* __restrict__ index) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p >= count) return;
  const int64_t x = coords[4 * p], y = coords[4 * p + 1], z = coords[4 * p + 2], b = coords[4 * p + 3];
  const bool inside = x >= 0 && x < grid.nx && y >= 0 && y < grid.ny && z >= 0 && z < grid.nz && b >= 0 && b < grid.batch;
  const int32_t at[3] = {static_cast<int32_t>(x), static_cast<int32_t>(y), static_cast<int32_t>(z)};
  write_point(grid, p, inside, static_cast<int32_t>(b), at, dropped, cell, key, index);
}

// starts[t] = first position whose tile is t or later; thread i fills the tiles between the points before and at position i.
__global__ void tile_starts_kernel(const int32_t* __restrict__ key, int64_t count, int32_t tiles, int32_t* __restrict__ starts) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i > count) return;
  const int32_t before = i == 0 ? -1 : key[i - 1] / kTileCells, here = i == count ? tiles : key[i] / kTileCells;
  for (int32_t tile = before + 1; tile <= here; ++tile) starts[tile] = static_cast<int32_t>(i);
}

template <typename Fill>
Plan make_plan(const at::Tensor& like, int64_t count, const SplatGrid& grid, const Fill& fill) {
  const auto ints = like.options().dtype(at::kInt);
  at::Tensor cell = at::empty({count}, ints), order = at::empty({count}, ints), key = at::empty({count}, ints);
  at::Tensor starts = at::empty({grid.tiles() + 1}, ints);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const int32_t dropped = static_cast<int32_t>(grid.keys());
  if (count) {
    fill(stream, dropped, cell.data_ptr<int32_t>(), key.data_ptr<int32_t>(), order.data_ptr<int32_t>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    std::tie(key, order) = sort_pairs<uint32_t>(key, order, bit_width(grid.keys()));
  }
  tile_starts_kernel<<<blocks(count + 1), kThreads, 0, stream>>>(key.const_data_ptr<int32_t>(), count, static_cast<int32_t>(grid.tiles()),
                                                                 starts.data_ptr<int32_t>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {cell, order, key, starts};
}

Plan splat_plan_cuda(const at::Tensor& geometry, at::ArrayRef<double> lower, at::ArrayRef<double> step, at::IntArrayRef cells,
                     bool truncate) {
  check_geometry(geometry);
  const c10::cuda::CUDAGuard guard(geometry.device());
  const Grid bounds = Grid::from(lower, step, cells, "splat_plan");
  const int64_t batch = geometry.size(0);
  const SplatGrid grid = SplatGrid::from(cells, batch, "splat_plan");
  const at::Tensor points = geometry.contiguous();
  const int64_t count = points.numel() / 3;
  return make_plan(points, count, grid, [&](cudaStream_t stream, int32_t dropped, int32_t* cell, int32_t* key, int32_t* index) {
    geometry_kernel<<<blocks(count), kThreads, 0, stream>>>(points.const_data_ptr<float>(), count, count / batch, bounds, grid, truncate,
                                                            dropped, cell, key, index);
  });
}

Plan splat_plan_from_coords_cuda(const at::Tensor& coords, int64_t batch, at::IntArrayRef cells) {
  check_pool_coords(coords);
  const c10::cuda::CUDAGuard guard(coords.device());
  const SplatGrid grid = SplatGrid::from(cells, batch, "splat_plan_from_coords");
  const at::Tensor rows = coords.contiguous();
  const int64_t count = rows.size(0);
  return make_plan(rows, count, grid, [&](cudaStream_t stream, int32_t dropped, int32_t* cell, int32_t* key, int32_t* index) {
    coords_kernel<<<blocks(count), kThreads, 0, stream>>>(rows.const_data_ptr<int64_t>(), count, grid, dropped, cell, key, index);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(mmdet3d_ext, CUDA, m) {
  m.impl("splat_plan", &splat_plan_cuda);
  m.impl("splat_plan_from_coords", &splat_plan_from_coords_cuda);
}

}  // namespace mmdet3d_ext
