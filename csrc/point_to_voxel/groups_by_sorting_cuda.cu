// Which points share a voxel, on a GPU, found by sorting the cells' numbers. Letters: P points, K coordinate columns, V voxels.
#include <ATen/Dispatch.h>

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include "common/cuda_utils.cuh"
#include "point_to_voxel/grouping.cuh"
#include "point_to_voxel/point_groups.h"
#include "point_to_voxel/point_to_voxel.h"

namespace mmdet3d_ext {
namespace {

template <typename Index>
__global__ void pack_kernel(const Index* __restrict__ coords, int64_t count, int columns, const Largest* __restrict__ block_largest,
                            Found* __restrict__ found, uint32_t* __restrict__ keys, int32_t* __restrict__ index) {
  const Largest largest = largest_of(block_largest);
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p >= count) return;
  const double cells = largest.cells();
  if (p == 0) found->cells = cells;
  unsigned long long row[kMaxColumns];
  keys[p] = read_row(coords, p, columns, row) && cells <= static_cast<double>(kDropped) ? largest.cell(row) : kDropped;
  index[p] = static_cast<int32_t>(p);
}

// Whether a new voxel begins at a sorted position: the scan's input.
template <typename Key>
struct IsHead {
  const Key* keys;
  __device__ __forceinline__ int32_t operator()(int64_t i) const { return keys[i] != ~Key(0) && (i == 0 || keys[i - 1] != keys[i]); }
};

// What follows from the number of heads up to a position, i.e. voxel + 1.
template <typename Key>
__global__ void map_kernel(const Key* __restrict__ keys, const int32_t* __restrict__ rank, const int32_t* __restrict__ order, int64_t count,
                           int32_t* __restrict__ point2voxel, int32_t* __restrict__ starts, Found* __restrict__ found) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Key key = keys[i];
  const bool kept = key != ~Key(0), head = kept && (i == 0 || keys[i - 1] != key);
  const int32_t voxel = rank[i] - 1;
  point2voxel[order[i]] = kept ? voxel : -1;
  if (head) starts[voxel] = static_cast<int32_t>(i);
  if (head && i + kLong < count && keys[i + kLong] == key) found->has_long = 1;
  if (i + 1 == count) {
    found->voxels = rank[i];
    if (kept) starts[voxel + 1] = static_cast<int32_t>(count);
  }
  // The first position behind the points kept.
  if (!kept && (i == 0 || keys[i - 1] != ~Key(0))) starts[rank[i]] = static_cast<int32_t>(i);
}

template <typename Index>
__global__ void voxel_coords_kernel(const Index* __restrict__ coords, const int32_t* __restrict__ order, const int32_t* __restrict__ starts,
                                    int64_t voxels, int64_t columns, Index* __restrict__ out, int32_t* __restrict__ counts) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= voxels * columns) return;
  const int64_t voxel = i / columns, column = i % columns;
  out[i] = coords[order[starts[voxel]] * columns + column];
  if (column == 0) counts[voxel] = starts[voxel + 1] - starts[voxel];
}

// Numbers the voxels of sorted keys, and gives the outputs that need no size.
template <typename Key>
void number_sorted(const at::Tensor& keys, PointGroups& groups, Found* found, cudaStream_t stream) {
  const int64_t count = keys.size(0);
  const Key* key = static_cast<const Key*>(keys.const_data_ptr());
  at::Tensor rank = at::empty({count}, groups.order.options());
  inclusive_sum(thrust::make_transform_iterator(thrust::counting_iterator<int64_t>(0), IsHead<Key>{key}), rank.data_ptr<int32_t>(), count, keys);
  map_kernel<Key><<<blocks(count), kThreads, 0, stream>>>(key, rank.const_data_ptr<int32_t>(), groups.order.const_data_ptr<int32_t>(), count,
                                                         groups.point2voxel.data_ptr<int32_t>(), groups.starts.data_ptr<int32_t>(), found);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void group_by_sorting(const at::Tensor& rows, PointGroups& groups, double& cells) {
  const int64_t count = rows.size(0), columns = rows.size(1);
  const auto ints = rows.options().dtype(at::kInt);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  groups.point2voxel = at::empty({count}, ints);
  groups.starts = at::empty({count + 1}, ints);
  HostFound found;
  Found host;
  bool packed = columns <= kMaxColumns;
  if (packed) {
    at::Tensor keys = at::empty({count}, ints);
    groups.order = at::empty({count}, ints);
    const at::Tensor largest = bytes(kLargestBlocks * sizeof(Largest), rows);
    Largest* const device_largest = static_cast<Largest*>(largest.data_ptr());
    find_largest(rows, device_largest, nullptr, 0, stream);
    AT_DISPATCH_INDEX_TYPES(rows.scalar_type(), "point_groups", [&] {
      pack_kernel<index_t><<<blocks(count), kThreads, 0, stream>>>(rows.const_data_ptr<index_t>(), count, static_cast<int>(columns),
                                                                  device_largest, found.device(), static_cast<uint32_t*>(keys.data_ptr()),
                                                                  groups.order.data_ptr<int32_t>());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
    std::tie(keys, groups.order) = sort_pairs<uint32_t>(keys, groups.order, 32);
    number_sorted<uint32_t>(keys, groups, found.device(), stream);
    found.record();
    host = found.read();
    cells = host.cells;
    packed = cells <= static_cast<double>(kDropped);
  }
  if (!packed) {
    groups.order = at::arange(count, ints);
    at::Tensor keys = ranked_keys(rows);  // dropped rows are -1, all bits set
    std::tie(keys, groups.order) = sort_pairs<uint64_t>(keys, groups.order, 64);
    HostFound again;
    number_sorted<uint64_t>(keys, groups, again.device(), stream);
    again.record();
    host = again.read();
  }
  groups.has_long = host.has_long;
  shrink(groups.starts, {host.voxels + 1});
  groups.voxel_coords = at::empty({host.voxels, columns}, rows.options());
  groups.counts = at::empty({host.voxels}, ints);
  if (host.voxels) {
    AT_DISPATCH_INDEX_TYPES(rows.scalar_type(), "point_groups", [&] {
      voxel_coords_kernel<index_t><<<blocks(groups.voxel_coords.numel()), kThreads, 0, stream>>>(
          rows.const_data_ptr<index_t>(), groups.order.const_data_ptr<int32_t>(), groups.starts.const_data_ptr<int32_t>(), host.voxels,
          columns, groups.voxel_coords.data_ptr<index_t>(), groups.counts.data_ptr<int32_t>());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  end_order(groups, stream);
}

}  // namespace mmdet3d_ext
