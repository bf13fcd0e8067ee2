// Which points share a voxel, on a GPU: chooses between the two ways of finding out, which give one result and one order.
//
// - By bitmap, where the cells are few enough for a bit each: nothing is sorted.
// - By radix sort of 32-bit keys otherwise, of 64-bit keys for absurd extents.
// The host waits once, for V; once more if the coordinates outgrow what was tried first.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <atomic>

#include "common/cuda_utils.cuh"
#include "point_to_voxel/grouping.cuh"
#include "point_to_voxel/point_groups.h"
#include "point_to_voxel/point_to_voxel.h"

namespace mmdet3d_ext {
namespace {

constexpr int64_t kMinBitmap = int64_t(1) << 24, kMaxBitmap = int64_t(1) << 27;  // cells

template <typename Index>
__global__ void largest_kernel(const Index* __restrict__ coords, int64_t count, int columns, Largest* __restrict__ found,
                               uint4* __restrict__ clear, int64_t clear_count) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, stride = static_cast<int64_t>(kLargestBlocks) * kThreads;
  for (int64_t i = first; i < clear_count; i += stride) clear[i] = uint4{0, 0, 0, 0};
  Largest mine = {};
  for (int64_t p = first; p < count; p += stride) {
    unsigned long long row[kMaxColumns];
    if (!read_row(coords, p, columns, row)) continue;
#pragma unroll
    for (int k = 0; k < kMaxColumns; ++k) mine.at[k] = max(mine.at[k], row[k]);
  }
  const Largest all = block_largest(mine);
  if (threadIdx.x == 0) found[blockIdx.x] = all;
}

// Ends `order` behind the last point kept, starts[voxels].
__global__ void end_kernel(const int32_t* __restrict__ starts, int64_t voxels, int64_t count, int32_t* __restrict__ order) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count && i >= starts[voxels]) order[i] = -1;
}

// Cells that coordinates spanned lately, which decides what is tried first: speed only, never the result. It forgets slowly, as a
// model may take turns between grids.
std::atomic<double> expected_cells{0};

int64_t bitmap_for(int64_t count) {
  const double wanted = std::max(expected_cells.load(std::memory_order_relaxed), 64.0 * static_cast<double>(count));
  int64_t bitmap = kMinBitmap;
  while (bitmap < kMaxBitmap && static_cast<double>(bitmap) < wanted) bitmap *= 2;
  return bitmap;
}

}  // namespace

void find_largest(const at::Tensor& rows, Largest* found, void* clear, int64_t clear_bytes, cudaStream_t stream) {
  AT_DISPATCH_INDEX_TYPES(rows.scalar_type(), "point_groups", [&] {
    largest_kernel<index_t><<<kLargestBlocks, kThreads, 0, stream>>>(rows.const_data_ptr<index_t>(), rows.size(0),
                                                                    static_cast<int>(rows.size(1)), found, static_cast<uint4*>(clear),
                                                                    clear_bytes / 16);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void end_order(PointGroups& groups, cudaStream_t stream) {
  const int64_t count = groups.order.size(0);
  end_kernel<<<blocks(count), kThreads, 0, stream>>>(groups.starts.const_data_ptr<int32_t>(), groups.starts.size(0) - 1, count,
                                                     groups.order.data_ptr<int32_t>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

PointGroups find_point_groups(const at::Tensor& coords) {
  check_coords(coords);
  const c10::cuda::CUDAGuard guard(coords.device());
  const at::Tensor rows = coords.contiguous();
  const int64_t count = rows.size(0), columns = rows.size(1);
  PointGroups groups;
  if (count == 0) {
    const auto ints = rows.options().dtype(at::kInt);
    groups.voxel_coords = at::empty({0, columns}, rows.options());
    groups.point2voxel = at::empty({0}, ints);
    groups.counts = at::empty({0}, ints);
    groups.order = at::empty({0}, ints);
    groups.starts = at::zeros({1}, ints);
    return groups;
  }
  const double expected = expected_cells.load(std::memory_order_relaxed);
  double cells = 0;
  const bool small = columns <= kMaxColumns && expected <= static_cast<double>(kMaxBitmap) &&
                     group_by_bitmap(rows, bitmap_for(count), groups, cells);
  if (!small) group_by_sorting(rows, groups, cells);
  const double most = 4.0 * kMaxBitmap;  // so that one absurd extent is forgotten soon
  if (cells > 0) expected_cells.store(std::min(std::max(cells, 0.9 * expected), most), std::memory_order_relaxed);
  return groups;
}

namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> point_groups_cuda(const at::Tensor& coords) {
  PointGroups groups = find_point_groups(coords);
  at::Tensor has_long = at::empty({}, at::TensorOptions().dtype(at::kBool));
  *has_long.data_ptr<bool>() = groups.has_long;
  return {groups.voxel_coords, groups.point2voxel, groups.counts, groups.order, groups.starts, has_long};
}

}  // namespace

TORCH_LIBRARY_IMPL(mmdet3d_ext, CUDA, m) { m.impl("point_groups", &point_groups_cuda); }

}  // namespace mmdet3d_ext
