// Launch sizes, vector loads, sorting and scanning shared by the CUDA kernels.
#pragma once

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <utility>

namespace mmdet3d_ext {

// setup.py puts CUB into a namespace of this library: no other library's kernels of the same name are taken for ours.
namespace cub = CUB_NS_QUALIFIER;

constexpr int kThreads = 256;

inline unsigned int blocks(int64_t items, int64_t per_block = kThreads) {
  return static_cast<unsigned int>((items + per_block - 1) / per_block);
}

// Bits needed to write `value`.
inline int bit_width(uint64_t value) {
  int bits = 0;
  for (; value; value >>= 1) ++bits;
  return bits;
}

inline at::Tensor bytes(size_t size, const at::Tensor& like) {
  return at::empty({static_cast<int64_t>(size)}, like.options().dtype(at::kByte));
}

// Stable radix sort of (key, value) by the low `bits` bits of the key, unsigned. The arguments are scratch afterwards.
template <typename Key>
std::pair<at::Tensor, at::Tensor> sort_pairs(at::Tensor keys, at::Tensor values, int bits) {
  static_assert(std::is_unsigned<Key>::value, "keys are compared unsigned");
  const int count = static_cast<int>(keys.numel());
  if (count < 2) return {keys, values};
  at::Tensor other_keys = at::empty_like(keys), other_values = at::empty_like(values);
  cub::DoubleBuffer<Key> key_buffer(static_cast<Key*>(keys.data_ptr()), static_cast<Key*>(other_keys.data_ptr()));
  cub::DoubleBuffer<int32_t> value_buffer(values.data_ptr<int32_t>(), other_values.data_ptr<int32_t>());
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  size_t size = 0;
  C10_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(nullptr, size, key_buffer, value_buffer, count, 0, bits, stream));
  at::Tensor scratch = bytes(size, keys);
  C10_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(scratch.data_ptr(), size, key_buffer, value_buffer, count, 0, bits, stream));
  return {key_buffer.Current() == keys.data_ptr() ? keys : other_keys,
          value_buffer.Current() == values.data_ptr() ? values : other_values};
}

template <typename In, typename Out>
void inclusive_sum(In from, Out to, int64_t count, const at::Tensor& like) {
  if (count == 0) return;
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const int items = static_cast<int>(count);
  size_t size = 0;
  C10_CUDA_CHECK(cub::DeviceScan::InclusiveSum(nullptr, size, from, to, items, stream));
  at::Tensor scratch = bytes(size, like);
  C10_CUDA_CHECK(cub::DeviceScan::InclusiveSum(scratch.data_ptr(), size, from, to, items, stream));
}

template <typename T, int VEC>
struct alignas(sizeof(T) * VEC) Vec {
  T at[VEC];
};

template <typename T, int VEC>
__device__ __forceinline__ Vec<T, VEC> load(const T* from) {
  return *reinterpret_cast<const Vec<T, VEC>*>(from);
}

template <typename T, int VEC>
__device__ __forceinline__ void store(T* to, const Vec<T, VEC>& value) {
  *reinterpret_cast<Vec<T, VEC>*>(to) = value;
}

inline bool aligned(const void* pointer, size_t size) { return reinterpret_cast<uintptr_t>(pointer) % size == 0; }

constexpr int kTransposeTile = 32, kTransposeRows = 8;

// in: `outer` matrices (rows, columns) at batch_stride, rows at row_stride, columns contiguous; out: (outer, columns, rows) contiguous.
// A tile is 32 rows by 32 * VEC columns.
template <typename T, int VEC>
__global__ void transpose_kernel(const T* __restrict__ in, T* __restrict__ out, int64_t rows, int64_t columns, int64_t batch_stride,
                                 int64_t row_stride) {
  // Column 32 * v + lane of the tile holds what lane `lane` read as its v-th value: no bank is hit twice.
  __shared__ T tile[kTransposeTile][kTransposeTile * VEC + 1];
  constexpr int kColumns = kTransposeTile * VEC;
  const int lane = threadIdx.x;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x) * kColumns, row0 = static_cast<int64_t>(blockIdx.y) * kTransposeTile;
  const T* from = in + blockIdx.z * batch_stride;
  T* to = out + blockIdx.z * rows * columns;
  constexpr int kSteps = kTransposeTile / kTransposeRows;
  Vec<T, VEC> value[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t row = row0 + k * kTransposeRows + threadIdx.y;
    if (row < rows && column0 + lane * VEC < columns) value[k] = load<T, VEC>(from + row * row_stride + column0 + lane * VEC);
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int v = 0; v < VEC; ++v) tile[k * kTransposeRows + threadIdx.y][kTransposeTile * v + lane] = value[k].at[v];
  __syncthreads();
  if (row0 + lane >= rows) return;
#pragma unroll
  for (int c = threadIdx.y; c < kColumns; c += kTransposeRows)
    if (column0 + c < columns) to[(column0 + c) * rows + row0 + lane] = tile[lane][kTransposeTile * (c % VEC) + c / VEC];
}

template <typename T>
void transpose(const T* in, T* out, int64_t outer, int64_t rows, int64_t columns, int64_t batch_stride, int64_t row_stride) {
  if (outer * rows * columns == 0) return;
  const dim3 threads(kTransposeTile, kTransposeRows);
  constexpr int kVec = sizeof(T) == 8 ? 2 : 4;
  const bool wide = columns % kVec == 0 && row_stride % kVec == 0 && batch_stride % kVec == 0 && aligned(in, kVec * sizeof(T));
  // The grid's z is limited to 65,535.
  for (int64_t first = 0; first < outer; first += 65535) {
    const unsigned int count = static_cast<unsigned int>(std::min<int64_t>(65535, outer - first));
    const auto launch = [&](auto kernel, int vec) {
      const dim3 grid(blocks(columns, kTransposeTile * vec), blocks(rows, kTransposeTile), count);
      kernel<<<grid, threads, 0, at::cuda::getCurrentCUDAStream()>>>(in + first * batch_stride, out + first * rows * columns, rows, columns,
                                                                    batch_stride, row_stride);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    if (wide)
      launch(&transpose_kernel<T, kVec>, kVec);
    else
      launch(&transpose_kernel<T, 1>, 1);
  }
}

}  // namespace mmdet3d_ext
