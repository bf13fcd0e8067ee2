// Which points share a voxel, on a GPU, found by a bit per cell. Letters: P points, K coordinate columns, V voxels.
//
// The set bits before a cell are its voxel's number. Points take a place in their voxel as they come and are put in order among themselves
// afterwards. Nothing is sorted, and V is known after half of the work: the host wakes up while the rest runs. Launches cost more than what
// they launch, so there are few: sums are taken in two steps, of which the reader of a sum takes the second.
#include <ATen/Dispatch.h>
#include <ATen/cuda/EmptyTensor.h>

#include "common/chunk_sums.cuh"
#include "common/cuda_utils.cuh"
#include "point_to_voxel/grouping.cuh"
#include "point_to_voxel/point_groups.h"
#include "point_to_voxel/point_to_voxel.h"

namespace mmdet3d_ext {
namespace {

// Cells that share a prefix: eight words, one sector of memory.
constexpr int kGroupCells = 256;
// Points of a voxel with more than this many are put in order by a radix sort: the bitmap's way is quadratic in them.
constexpr int kCrowded = 1024;

// cell: kDropped for dropped rows, and for all of them if the bitmap is too small; those then are no voxels to the kernels behind.
template <typename Index>
__global__ void mark_kernel(const Index* __restrict__ coords, int64_t count, int columns, const Largest* __restrict__ found, int64_t bitmap,
                            Largest* __restrict__ largest, uint32_t* bits, uint32_t* __restrict__ cell_of, int32_t* __restrict__ counts) {
  const Largest all = largest_of(found);
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p == 0) *largest = all;
  if (p > count) return;
  counts[p] = 0;
  if (p == count) return;
  unsigned long long row[kMaxColumns];
  uint32_t cell = kDropped;
  if (read_row(coords, p, columns, row) && all.cells() <= static_cast<double>(bitmap)) {
    cell = all.cell(row);
    const uint32_t mask = 1u << (cell % 32);
    // Most points find their bit set; a stale zero only costs the atomic.
    if (!(*static_cast<const volatile uint32_t*>(bits + cell / 32) & mask)) atomicOr(bits + cell / 32, mask);
  }
  cell_of[p] = cell;
}

__device__ __forceinline__ int32_t bits_before(const uint32_t* __restrict__ bits, uint32_t cell) {
  const uint4* group = reinterpret_cast<const uint4*>(bits + cell / kGroupCells * (kGroupCells / 32));
  const uint4 low = group[0], high = group[1];
  const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  const int at = cell % kGroupCells / 32;
  int32_t before = 0;
#pragma unroll
  for (int w = 0; w < 8; ++w) {
    const uint32_t mask = w < at ? UINT32_MAX : w == at ? (1u << (cell % 32)) - 1 : 0u;
    before += __popc(words[w] & mask);
  }
  return before;
}

// Set bits of a group of cells.
struct GroupBits {
  const uint32_t* bits;
  __device__ __forceinline__ int32_t operator()(int32_t group) const {
    const uint4* words = reinterpret_cast<const uint4*>(bits + static_cast<int64_t>(group) * (kGroupCells / 32));
    const uint4 low = words[0], high = words[1];
    return __popc(low.x) + __popc(low.y) + __popc(low.z) + __popc(low.w) + __popc(high.x) + __popc(high.y) + __popc(high.z) + __popc(high.w);
  }
};

struct Count {
  const int32_t* counts;
  __device__ __forceinline__ int32_t operator()(int32_t i) const { return counts[i]; }
};

// point2voxel holds cells before, voxels after. place: how many points of the voxel came before this one, in no particular order.
template <typename Index>
__global__ void number_kernel(const Index* __restrict__ coords, int64_t count, int columns, const Largest* __restrict__ largest,
                              const uint32_t* __restrict__ bits, Chunks groups, int32_t chunks, const int32_t* __restrict__ before,
                              const int32_t* __restrict__ total, int32_t* __restrict__ point2voxel, int32_t* __restrict__ place,
                              int32_t* __restrict__ counts, Index* __restrict__ voxel_coords, Found* __restrict__ found) {
  __shared__ int32_t starts[kMaxChunks];
  const int32_t voxels = chunk_starts(total, chunks, starts);
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p == 0) {
    found->cells = largest->cells();
    found->voxels = voxels;
  }
  if (p >= count) return;
  const uint32_t cell = static_cast<uint32_t>(point2voxel[p]);
  if (cell == kDropped) return;  // which reads -1 already
  const uint32_t group = cell / kGroupCells;
  const int32_t voxel = starts[group >> groups.shift] + before[group] + bits_before(bits, cell);
  const int32_t at = atomicAdd(counts + voxel, 1);
  point2voxel[p] = voxel;
  place[p] = at;
  if (at == 0)
    for (int k = 0; k < columns; ++k) voxel_coords[static_cast<int64_t>(voxel) * columns + k] = coords[p * columns + k];
  if (at == kCrowded) found->crowded = 1;
  if (at == kLong) found->has_long = 1;
}

// Puts the points of a voxel side by side, and ends the sums of counts.
__global__ void gather_kernel(const int32_t* __restrict__ point2voxel, const int32_t* __restrict__ place, int64_t count, Chunks counts,
                              int32_t chunks, const int32_t* __restrict__ before, const int32_t* __restrict__ total,
                              int32_t* __restrict__ starts, int32_t* __restrict__ members) {
  __shared__ int32_t chunk_start[kMaxChunks];
  chunk_starts(total, chunks, chunk_start);
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p <= count) starts[p] = chunk_start[p >> counts.shift] + before[p];
  if (p >= count) return;
  const int32_t voxel = point2voxel[p];
  if (voxel >= 0) members[chunk_start[voxel >> counts.shift] + before[voxel] + place[p]] = static_cast<int32_t>(p);
}

// Puts the points of each voxel in order: a point's place is the number of smaller ones. starts[count] is how many points are kept.
__global__ void order_kernel(const int32_t* __restrict__ point2voxel, int64_t count, const int32_t* __restrict__ starts,
                             const int32_t* __restrict__ members, int32_t* __restrict__ order) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p >= count) return;
  if (p >= starts[count]) order[p] = -1;
  const int32_t voxel = point2voxel[p];
  if (voxel < 0) return;
  const int32_t begin = starts[voxel], end = starts[voxel + 1];
  if (end - begin > kCrowded) return;  // sorted instead
  int32_t smaller = 0;
#pragma unroll 4
  for (int32_t k = begin; k < end; ++k) smaller += members[k] < p;
  order[begin + smaller] = static_cast<int32_t>(p);
}

// at::empty without a way through the dispatcher.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) { return at::Tensor(at::detail::empty_cuda(sizes, options)); }

// Parts of one allocation, each aligned as an allocation is.
class Layout {
 public:
  int64_t add(int64_t size) {
    const int64_t at = size_;
    size_ += (size + 255) / 256 * 256;
    return at;
  }
  int64_t size() const { return size_; }

 private:
  int64_t size_ = 0;
};

}  // namespace

bool group_by_bitmap(const at::Tensor& rows, int64_t bitmap, PointGroups& groups, double& cells) {
  const int64_t count = rows.size(0), columns = rows.size(1);
  const Chunks bit_chunks = Chunks::of(bitmap / kGroupCells), count_chunks = Chunks::of(count + 1);
  const auto ints = rows.options().dtype(at::kInt);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  // All memory first: no kernel is under way should it not suffice. Voxels are at most as many as points.
  HostFound found;
  groups.point2voxel = empty({count}, ints);
  groups.order = empty({count}, ints);
  groups.counts = empty({count + 1}, ints);
  groups.starts = empty({count + 1}, ints);
  groups.voxel_coords = empty({count, columns}, rows.options());
  Layout layout;
  const int64_t bits_at = layout.add(bitmap / 8), block_largest_at = layout.add(kLargestBlocks * sizeof(Largest)),
                largest_at = layout.add(sizeof(Largest)), bits_before_at = layout.add(4 * bit_chunks.values),
                bits_total_at = layout.add(4 * kMaxChunks), counts_before_at = layout.add(4 * (count + 1)),
                counts_total_at = layout.add(4 * kMaxChunks), place_at = layout.add(4 * count), members_at = layout.add(4 * count);
  const at::Tensor scratch = empty({layout.size()}, rows.options().dtype(at::kByte));
  char* const base = static_cast<char*>(scratch.data_ptr());
  const auto part = [&](int64_t at) { return reinterpret_cast<int32_t*>(base + at); };
  Largest* const block_largest = reinterpret_cast<Largest*>(base + block_largest_at);
  Largest* const largest = reinterpret_cast<Largest*>(base + largest_at);
  uint32_t* const bits = reinterpret_cast<uint32_t*>(base + bits_at);
  int32_t* const point2voxel = groups.point2voxel.data_ptr<int32_t>();
  int32_t* const counts = groups.counts.data_ptr<int32_t>();
  int32_t* const starts = groups.starts.data_ptr<int32_t>();

  find_largest(rows, block_largest, bits, bitmap / 8, stream);
  AT_DISPATCH_INDEX_TYPES(rows.scalar_type(), "point_groups", [&] {
    const index_t* in = rows.const_data_ptr<index_t>();
    mark_kernel<index_t><<<blocks(count + 1), kThreads, 0, stream>>>(in, count, static_cast<int>(columns), block_largest, bitmap, largest,
                                                                    bits, reinterpret_cast<uint32_t*>(point2voxel), counts);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    chunk_kernel<<<bit_chunks.count(), kThreads, 0, stream>>>(GroupBits{bits}, bit_chunks, part(bits_before_at), part(bits_total_at));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    number_kernel<index_t><<<blocks(count), kThreads, 0, stream>>>(
        in, count, static_cast<int>(columns), largest, bits, bit_chunks, bit_chunks.count(), part(bits_before_at), part(bits_total_at),
        point2voxel, part(place_at), counts, groups.voxel_coords.data_ptr<index_t>(), found.device());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  found.record();
  chunk_kernel<<<count_chunks.count(), kThreads, 0, stream>>>(Count{counts}, count_chunks, part(counts_before_at), part(counts_total_at));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  gather_kernel<<<blocks(count + 1), kThreads, 0, stream>>>(point2voxel, part(place_at), count, count_chunks, count_chunks.count(),
                                                           part(counts_before_at), part(counts_total_at), starts, part(members_at));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  order_kernel<<<blocks(count), kThreads, 0, stream>>>(point2voxel, count, starts, part(members_at), groups.order.data_ptr<int32_t>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();

  const Found host = found.read();  // the one synchronisation: the outputs' size
  cells = host.cells;
  if (cells > static_cast<double>(bitmap)) return false;
  shrink(groups.voxel_coords, {host.voxels, columns});
  shrink(groups.counts, {host.voxels});
  shrink(groups.starts, {host.voxels + 1});
  groups.has_long = host.has_long;
  if (host.crowded) {
    groups.order = sort_pairs<uint32_t>(groups.point2voxel.clone(), at::arange(count, ints), bit_width(host.voxels)).second;
    end_order(groups, stream);
  }
  return true;
}

}  // namespace mmdet3d_ext
