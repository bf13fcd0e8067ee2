// Which points share a voxel, on a GPU. Letters: P points, K coordinate columns, V voxels.
//
// A cell's number in its grid comes from the columns' maxima, read on the device. Then, with one result and one order for both:
// - By bitmap, where the cells are few enough for a bit each: the set bits before a cell are its voxel's number. Points take a place in
//   their voxel as they come and are put in order among themselves afterwards. Nothing is sorted, and V is known after half of the work:
//   the host wakes up while the rest runs. Launches cost more than what they launch, so there are few: sums are taken in two steps, of
//   which the reader of a sum takes the second.
// - By radix sort of 32-bit keys otherwise, of 64-bit keys for absurd extents.
// The host waits once, for V; once more if the coordinates outgrow what was tried first.
#include <ATen/Dispatch.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/library.h>

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <atomic>

#include "common/chunk_sums.cuh"
#include "common/cuda_utils.cuh"
#include "point_to_voxel/point_groups.h"
#include "point_to_voxel/point_to_voxel.h"

namespace mmdet3d_ext {
namespace {

constexpr int kMaxColumns = 4;
constexpr uint32_t kDropped = UINT32_MAX;
// Cells that share a prefix: eight words, one sector of memory.
constexpr int kGroupCells = 256;
constexpr int64_t kMinBitmap = int64_t(1) << 24, kMaxBitmap = int64_t(1) << 27;
// Points of a voxel with more than this many are put in order by a radix sort: the bitmap's way is quadratic in them.
constexpr int kCrowded = 1024;

// What the host waits for. It lies in pinned memory, where kernels write it themselves: a copy would be one more thing to wait for.
struct Found {
  double cells;
  int32_t voxels, crowded, has_long;
};

class HostFound {
 public:
  HostFound() : memory_(at::empty({static_cast<int64_t>(sizeof(Found))}, at::TensorOptions().dtype(at::kByte).pinned_memory(true))) {
    *host() = Found{};
    C10_CUDA_CHECK(cudaHostGetDevicePointer(reinterpret_cast<void**>(&device_), host(), 0));
  }
  Found* device() const { return device_; }

  // read() waits for what the device was given before this call.
  void record() { event_.record(at::cuda::getCurrentCUDAStream()); }

  Found read() {
    if (c10::cuda::warning_state().get_sync_debug_mode() != c10::cuda::SyncDebugMode::L_DISABLED) c10::cuda::warn_or_error_on_sync();
    event_.synchronize();
    return *host();
  }

 private:
  Found* host() const { return static_cast<Found*>(memory_.data_ptr()); }

  at::Tensor memory_;
  Found* device_ = nullptr;
  at::cuda::CUDAEvent event_{cudaEventDisableTiming};
};

// Largest entry per column over the rows kept; 0 for columns that are not there.
struct Largest {
  unsigned long long at[kMaxColumns];

  __device__ __forceinline__ double cells() const {
    double cells = 1;
#pragma unroll
    for (int k = 0; k < kMaxColumns; ++k) cells *= static_cast<double>(at[k]) + 1;
    return cells;
  }

  // Number of a row's cell; below 2^32 if cells() is.
  __device__ __forceinline__ uint32_t cell(const unsigned long long* row) const {
    uint32_t cell = 0;
#pragma unroll
    for (int k = 0; k < kMaxColumns; ++k) cell = cell * static_cast<uint32_t>(at[k] + 1) + static_cast<uint32_t>(row[k]);
    return cell;
  }
};

template <typename Index>
__device__ __forceinline__ bool read_row(const Index* __restrict__ coords, int64_t p, int columns, unsigned long long* row) {
  bool kept = true;
#pragma unroll
  for (int k = 0; k < kMaxColumns; ++k) {
    const Index value = k < columns ? coords[p * columns + k] : 0;
    kept &= value >= 0;
    row[k] = static_cast<unsigned long long>(value);
  }
  return kept;
}

// The largest of all threads' `mine`, for all threads of the block.
__device__ __forceinline__ Largest block_largest(Largest mine) {
  __shared__ unsigned long long shared[kMaxColumns];
  if (threadIdx.x < kMaxColumns) shared[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kMaxColumns; ++k) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) mine.at[k] = max(mine.at[k], __shfl_xor_sync(0xffffffffu, mine.at[k], offset));
    if (threadIdx.x % 32 == 0) atomicMax(&shared[k], mine.at[k]);
  }
  __syncthreads();
  Largest all;
#pragma unroll
  for (int k = 0; k < kMaxColumns; ++k) all.at[k] = shared[k];
  return all;
}

constexpr int kLargestBlocks = 128;  // at most kThreads: a block reads what they found in one step

// First step: the largest entries that each block finds. `clear` is set to zero on the way.
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

// Second step, by every block that needs them.
__device__ __forceinline__ Largest largest_of(const Largest* __restrict__ found) {
  return block_largest(threadIdx.x < kLargestBlocks ? found[threadIdx.x] : Largest{});
}

template <typename Index>
void find_largest(const at::Tensor& rows, Largest* found, void* clear, int64_t clear_bytes, cudaStream_t stream) {
  largest_kernel<Index><<<kLargestBlocks, kThreads, 0, stream>>>(rows.const_data_ptr<Index>(), rows.size(0), static_cast<int>(rows.size(1)),
                                                                found, static_cast<uint4*>(clear), clear_bytes / 16);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// ---- by bitmap

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

// Ends `order` behind the last point kept, starts[voxels].
__global__ void end_kernel(const int32_t* __restrict__ starts, int64_t voxels, int64_t count, int32_t* __restrict__ order) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count && i >= starts[voxels]) order[i] = -1;
}

void end_order(PointGroups& groups, cudaStream_t stream) {
  const int64_t count = groups.order.size(0);
  end_kernel<<<blocks(count), kThreads, 0, stream>>>(groups.starts.const_data_ptr<int32_t>(), groups.starts.size(0) - 1, count,
                                                     groups.order.data_ptr<int32_t>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// Gives a tensor that was allocated for the largest case its size.
void shrink(at::Tensor& tensor, at::IntArrayRef sizes) { tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes); }

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

// False if the coordinates span more than `bitmap` cells; `cells` is what they span.
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

  AT_DISPATCH_INDEX_TYPES(rows.scalar_type(), "point_groups", [&] {
    const index_t* in = rows.const_data_ptr<index_t>();
    find_largest<index_t>(rows, block_largest, bits, bitmap / 8, stream);
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

// ---- by sorting

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

// `cells` is what the coordinates span, if there are no more than kMaxColumns columns.
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
    AT_DISPATCH_INDEX_TYPES(rows.scalar_type(), "point_groups", [&] {
      find_largest<index_t>(rows, device_largest, nullptr, 0, stream);
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
