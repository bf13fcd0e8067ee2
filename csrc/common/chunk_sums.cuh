// Sums over all values before each, in two steps of which the reader of a sum takes the second: one launch, and no block waits for another.
#pragma once

#include <cub/block/block_scan.cuh>

#include "common/cuda_utils.cuh"

namespace mmdet3d_ext {

constexpr int kMaxChunks = 1024, kChunksPerThread = kMaxChunks / kThreads;

// Values in chunks of 1 << shift.
struct Chunks {
  int32_t values, shift;

  static Chunks of(int64_t values) {
    int32_t shift = 8;
    while ((values - 1) >> shift >= kMaxChunks) ++shift;
    return {static_cast<int32_t>(values), shift};
  }
  int32_t count() const { return ((values - 1) >> shift) + 1; }
};

// First step: before[i] is the sum of the values in front of i in its chunk, total[c] that of chunk c. One block per chunk.
template <typename Value>
__global__ void chunk_kernel(Value value, Chunks chunks, int32_t* __restrict__ before, int32_t* __restrict__ total) {
  using Scan = cub::BlockScan<int32_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  const int64_t first = static_cast<int64_t>(blockIdx.x) << chunks.shift;
  int32_t sum = 0;
  for (int32_t step = 0; step < 1 << chunks.shift; step += kThreads) {
    const int64_t i = first + step + threadIdx.x;
    int32_t front, all;
    Scan(storage).ExclusiveSum(i < chunks.values ? value(static_cast<int32_t>(i)) : 0, front, all);
    if (i < chunks.values) before[i] = sum + front;
    sum += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) total[blockIdx.x] = sum;
}

// Second step, by every block that needs it: starts[c] is the sum of the chunks in front of c. Gives the sum of all of them.
__device__ __forceinline__ int32_t chunk_starts(const int32_t* __restrict__ total, int32_t count, int32_t* starts) {
  using Scan = cub::BlockScan<int32_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  int32_t sums[kChunksPerThread], all;
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    const int c = threadIdx.x * kChunksPerThread + k;
    sums[k] = c < count ? total[c] : 0;
  }
  Scan(storage).ExclusiveSum(sums, sums, all);
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) starts[threadIdx.x * kChunksPerThread + k] = sums[k];
  __syncthreads();
  return all;
}

}  // namespace mmdet3d_ext
