// What both ways of grouping points on a GPU share (groups_by_bitmap_cuda.cu, groups_by_sorting_cuda.cu): the number of a row's cell,
// made of the columns' maxima on the device, and what the host waits for. Letters: see point_groups.h.
#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>

#include "common/cuda_utils.cuh"
#include "point_to_voxel/point_groups.h"

namespace mmdet3d_ext {

constexpr int kMaxColumns = 4;
constexpr uint32_t kDropped = UINT32_MAX;

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

// First step: the largest entries that each of kLargestBlocks blocks finds in `rows`, (P, K). `clear` is set to zero on the way.
void find_largest(const at::Tensor& rows, Largest* found, void* clear, int64_t clear_bytes, cudaStream_t stream);

// Second step, by every block that needs them.
__device__ __forceinline__ Largest largest_of(const Largest* __restrict__ found) {
  return block_largest(threadIdx.x < kLargestBlocks ? found[threadIdx.x] : Largest{});
}

// Ends groups.order behind the last point kept.
void end_order(PointGroups& groups, cudaStream_t stream);

// Gives a tensor that was allocated for the largest case its size.
inline void shrink(at::Tensor& tensor, at::IntArrayRef sizes) { tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes); }

// Both fill `groups` from rows (P, K), P > 0; `cells` is how many cells the coordinates span. By bitmap, for at most kMaxColumns columns:
// false, with `groups` unfinished, if they span more than `bitmap`. By sorting: `cells` is left alone for more columns.
bool group_by_bitmap(const at::Tensor& rows, int64_t bitmap, PointGroups& groups, double& cells);
void group_by_sorting(const at::Tensor& rows, PointGroups& groups, double& cells);

}  // namespace mmdet3d_ext
