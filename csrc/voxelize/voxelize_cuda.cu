// Points to voxels on a GPU. Letters: P points, F columns of a point, V voxels, M max_num_points.
//
// Hard voxelisation without a serial pass: points are sorted stably by cell, so a voxel's points stand together in their own order and
// its first point is the first of them. A voxel's number is how many first points lie before it in the cloud: one scan.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include "common/cuda_utils.cuh"
#include "voxelize/voxelize.h"

namespace mmdet3d_ext {
namespace {

template <typename T>
__global__ void coords_kernel(const T* __restrict__ points, int64_t count, int64_t columns, Grid grid, int32_t* __restrict__ coords) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p >= count) return;
  const T* point = points + p * columns;
  int32_t cell[3];
  if (!grid.locate(static_cast<float>(point[0]), static_cast<float>(point[1]), static_cast<float>(point[2]), false, cell))
    cell[0] = cell[1] = cell[2] = -1;
  for (int axis = 0; axis < 3; ++axis) coords[3 * p + axis] = cell[axis];
}

template <typename T, typename Key>
__global__ void keys_kernel(const T* __restrict__ points, int64_t count, int64_t columns, Grid grid, Key outside, Key* __restrict__ keys,
                            int32_t* __restrict__ index) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p >= count) return;
  const T* point = points + p * columns;
  int32_t cell[3];
  const bool inside = grid.locate(static_cast<float>(point[0]), static_cast<float>(point[1]), static_cast<float>(point[2]), false, cell);
  keys[p] = inside ? static_cast<Key>(grid.linear(cell)) : outside;
  index[p] = static_cast<int32_t>(p);
}

template <typename Key>
__global__ void mark_first_kernel(const Key* __restrict__ keys, const int32_t* __restrict__ order, int64_t count, Key outside,
                                  int32_t* __restrict__ first) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  first[order[i]] = keys[i] != outside && (i == 0 || keys[i - 1] != keys[i]);
}

// How many of the positions before (direction -1) or after (+1) `i` hold the same key, at most `limit`. Keys are sorted.
template <typename Key>
__device__ __forceinline__ int64_t run_length(const Key* __restrict__ keys, int64_t count, int64_t i, int direction, int64_t limit) {
  const Key key = keys[i];
  const auto same = [&](int64_t distance) {
    const int64_t at = i + direction * distance;
    return at >= 0 && at < count && keys[at] == key;
  };
  int64_t low = 0, high = 1;  // same(low), and not same(high) once the loop ends
  while (high <= limit && same(high)) {
    low = high;
    high *= 2;
  }
  if (high > limit + 1) high = limit + 1;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (same(middle))
      low = middle;
    else
      high = middle;
  }
  return low;
}

template <typename T, typename Key>
__global__ void fill_kernel(const T* __restrict__ points, int64_t count, int64_t columns, Grid grid, const Key* __restrict__ keys,
                            const int32_t* __restrict__ order, Key outside, const int32_t* __restrict__ number, int64_t max_points,
                            int64_t voxel_count, T* __restrict__ voxels, int32_t* __restrict__ coords, int32_t* __restrict__ num_points) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count || keys[i] == outside) return;
  const int64_t nth = run_length(keys, count, i, -1, max_points);
  if (nth >= max_points) return;
  const int64_t voxel = number[order[i - nth]] - 1;  // an inclusive sum
  if (voxel >= voxel_count) return;
  const T* from = points + static_cast<int64_t>(order[i]) * columns;
  T* to = voxels + (voxel * max_points + nth) * columns;
  for (int64_t f = 0; f < columns; ++f) to[f] = from[f];
  if (nth == 0) {
    num_points[voxel] = static_cast<int32_t>(run_length(keys, count, i, 1, max_points - 1) + 1);
    const uint64_t key = keys[i];
    coords[3 * voxel] = static_cast<int32_t>(key % grid.cells[0]);
    coords[3 * voxel + 1] = static_cast<int32_t>(key / grid.cells[0] % grid.cells[1]);
    coords[3 * voxel + 2] = static_cast<int32_t>(key / grid.cells[0] / grid.cells[1]);
  }
}

at::Tensor voxel_coords_cuda(const at::Tensor& points, at::ArrayRef<double> lower, at::ArrayRef<double> step, at::IntArrayRef cells) {
  check_points(points, "voxel_coords");
  const Grid grid = Grid::from(lower, step, cells, "voxel_coords");
  const c10::cuda::CUDAGuard guard(points.device());
  const at::Tensor rows = points.contiguous();
  at::Tensor coords = at::empty({rows.size(0), 3}, rows.options().dtype(at::kInt));
  if (rows.size(0) == 0) return coords;
  AT_DISPATCH_FLOATING_TYPES(rows.scalar_type(), "voxel_coords", [&] {
    coords_kernel<scalar_t><<<blocks(rows.size(0)), kThreads, 0, at::cuda::getCurrentCUDAStream()>>>(
        rows.const_data_ptr<scalar_t>(), rows.size(0), rows.size(1), grid, coords.data_ptr<int32_t>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return coords;
}

template <typename T, typename Key>
std::tuple<at::Tensor, at::Tensor, at::Tensor> hard_voxelize_typed(const at::Tensor& rows, const Grid& grid, int64_t max_points,
                                                                   int64_t max_voxels) {
  const int64_t count = rows.size(0), columns = rows.size(1);
  const auto ints = rows.options().dtype(at::kInt);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const Key outside = static_cast<Key>(grid.size());
  at::Tensor keys = at::empty({count}, rows.options().dtype(sizeof(Key) == 4 ? at::kInt : at::kLong)), order = at::empty({count}, ints);
  at::Tensor number = at::empty({count}, ints);
  int64_t voxel_count = 0;
  if (count) {
    keys_kernel<T, Key><<<blocks(count), kThreads, 0, stream>>>(rows.const_data_ptr<T>(), count, columns, grid, outside,
                                                               static_cast<Key*>(keys.data_ptr()), order.data_ptr<int32_t>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    std::tie(keys, order) = sort_pairs<Key>(keys, order, bit_width(grid.size()));
    at::Tensor first = at::empty({count}, ints);
    mark_first_kernel<Key><<<blocks(count), kThreads, 0, stream>>>(static_cast<const Key*>(keys.const_data_ptr()),
                                                                  order.const_data_ptr<int32_t>(), count, outside, first.data_ptr<int32_t>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    inclusive_sum(first.const_data_ptr<int32_t>(), number.data_ptr<int32_t>(), count, rows);
    voxel_count = number[count - 1].item<int32_t>();  // the one synchronisation: the outputs' size
    if (max_voxels >= 0) voxel_count = std::min(voxel_count, max_voxels);
  }
  at::Tensor voxels = at::zeros({voxel_count, max_points, columns}, rows.options());
  at::Tensor coords = at::empty({voxel_count, 3}, ints), num_points = at::empty({voxel_count}, ints);
  if (voxel_count) {
    fill_kernel<T, Key><<<blocks(count), kThreads, 0, stream>>>(
        rows.const_data_ptr<T>(), count, columns, grid, static_cast<const Key*>(keys.const_data_ptr()), order.const_data_ptr<int32_t>(),
        outside, number.const_data_ptr<int32_t>(), max_points, voxel_count, voxels.data_ptr<T>(), coords.data_ptr<int32_t>(),
        num_points.data_ptr<int32_t>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return {voxels, coords, num_points};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> hard_voxelize_cuda(const at::Tensor& points, at::ArrayRef<double> lower,
                                                                  at::ArrayRef<double> step, at::IntArrayRef cells, int64_t max_num_points,
                                                                  int64_t max_voxels) {
  check_points(points, "hard_voxelize");
  check_hard_limits(max_num_points, max_voxels);
  const Grid grid = Grid::from(lower, step, cells, "hard_voxelize");
  const c10::cuda::CUDAGuard guard(points.device());
  const at::Tensor rows = points.contiguous();
  std::tuple<at::Tensor, at::Tensor, at::Tensor> result;
  AT_DISPATCH_FLOATING_TYPES(rows.scalar_type(), "hard_voxelize", [&] {
    result = grid.size() < UINT32_MAX ? hard_voxelize_typed<scalar_t, uint32_t>(rows, grid, max_num_points, max_voxels)
                                      : hard_voxelize_typed<scalar_t, uint64_t>(rows, grid, max_num_points, max_voxels);
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(mmdet3d_ext, CUDA, m) {
  m.impl("voxel_coords", &voxel_coords_cuda);
  m.impl("hard_voxelize", &hard_voxelize_cuda);
}

}  // namespace mmdet3d_ext
