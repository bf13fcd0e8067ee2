// Features of points that share a voxel to one, on a GPU. Letters: P points, C channels, V voxels.
//
// Points stand side by side by voxel (point_groups_cuda.cu); every voxel adds up its own, so nothing is atomic and no index comes from
// comparing values.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <limits>

#include "common/cuda_utils.cuh"
#include "point_to_voxel/point_groups.h"
#include "point_to_voxel/point_to_voxel.h"

namespace mmdet3d_ext {
namespace {

// The running sum or maximum of one channel. The first maximum wins, and the first NaN over everything.
template <typename A, bool MAX>
struct Reducer {
  A value;
  int32_t arg;
  __device__ __forceinline__ void reset() {
    value = MAX ? -std::numeric_limits<A>::infinity() : A(0);
    arg = -1;
  }
  __device__ __forceinline__ void add(A next, int32_t point) {
    if (!MAX) {
      value += next;
    } else if (arg < 0 || next > value || (next != next && value == value)) {
      value = next;
      arg = point;
    }
  }
};

// LANES threads per voxel, VEC channels per thread and step.
template <typename T, int VEC, bool MAX>
__global__ void reduce_kernel(const T* __restrict__ feats, int64_t channels, const int32_t* __restrict__ order,
                              const int32_t* __restrict__ starts, int64_t voxels, bool mean, T* __restrict__ out, int32_t* __restrict__ arg) {
  using A = at::opmath_type<T>;
  const int64_t voxel = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (voxel >= voxels) return;
  const int32_t begin = starts[voxel], end = starts[voxel + 1];
  if (end - begin > kLong) return;
  for (int64_t c = threadIdx.x * VEC; c < channels; c += blockDim.x * VEC) {
    Reducer<A, MAX> sums[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) sums[v].reset();
    constexpr int kUnroll = 4;
    for (int32_t k = begin; k < end; k += kUnroll) {
      int32_t point[kUnroll];
      Vec<T, VEC> row[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (k + u < end) {
          point[u] = order[k + u];
          row[u] = load<T, VEC>(feats + point[u] * channels + c);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (k + u < end) {
#pragma unroll
          for (int v = 0; v < VEC; ++v) sums[v].add(static_cast<A>(row[u].at[v]), point[u]);
        }
      }
    }
    Vec<T, VEC> result;
#pragma unroll
    for (int v = 0; v < VEC; ++v) result.at[v] = static_cast<T>(mean ? sums[v].value / static_cast<A>(end - begin) : sums[v].value);
    store<T, VEC>(out + voxel * channels + c, result);
    if (MAX) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) arg[voxel * channels + c + v] = sums[v].arg;
    }
  }
}

// Full voxels, first step: what chunk blockIdx.x of the sorted points adds to the voxel that covers its first point (slot 0) and to the
// full voxel that begins further inside it (slot 1; there is at most one, as it reaches past the chunk's end).
template <typename T, bool MAX>
__global__ void chunk_kernel(const T* __restrict__ feats, int64_t channels, const int32_t* __restrict__ order,
                             const int32_t* __restrict__ point2voxel, const int32_t* __restrict__ starts, int64_t voxels,
                             at::opmath_type<T>* __restrict__ partial, int32_t* __restrict__ partial_arg) {
  using A = at::opmath_type<T>;
  const int64_t valid = starts[voxels], first = static_cast<int64_t>(blockIdx.x) * kChunk, last = min(first + kChunk, valid) - 1;
  if (first >= valid) return;
  for (int slot = 0; slot < 2; ++slot) {
    const int32_t voxel = point2voxel[order[slot ? last : first]];
    const int64_t begin = starts[voxel], end = starts[voxel + 1];
    if (end - begin <= kLong || (slot && begin <= first)) continue;
    for (int64_t c = threadIdx.x; c < channels; c += blockDim.x) {
      Reducer<A, MAX> sum;
      sum.reset();
#pragma unroll 4
      for (int64_t k = max(begin, first); k < min(end, last + 1); ++k) {
        const int32_t point = order[k];
        sum.add(static_cast<A>(feats[point * channels + c]), point);
      }
      const int64_t at = (static_cast<int64_t>(blockIdx.x) * 2 + slot) * channels + c;
      partial[at] = sum.value;
      if (MAX) partial_arg[at] = sum.arg;
    }
  }
}

// Full voxels, second step: their chunks in order. One block per voxel; those that are not full have nothing to do.
template <typename T, bool MAX>
__global__ void combine_kernel(const at::opmath_type<T>* __restrict__ partial, const int32_t* __restrict__ partial_arg, int64_t channels,
                               const int32_t* __restrict__ starts, bool mean, T* __restrict__ out, int32_t* __restrict__ arg) {
  using A = at::opmath_type<T>;
  const int64_t voxel = blockIdx.x, begin = starts[voxel], end = starts[voxel + 1];
  if (end - begin <= kLong) return;
  for (int64_t c = threadIdx.x; c < channels; c += blockDim.x) {
    Reducer<A, MAX> sum;
    sum.reset();
    for (int64_t chunk = begin / kChunk; chunk <= (end - 1) / kChunk; ++chunk) {
      const int64_t at = (chunk * 2 + (chunk * kChunk < begin)) * channels + c;
      sum.add(partial[at], MAX ? partial_arg[at] : 0);
    }
    out[voxel * channels + c] = static_cast<T>(mean ? sum.value / static_cast<A>(end - begin) : sum.value);
    if (MAX) arg[voxel * channels + c] = sum.arg;
  }
}

// Threads per row for `channels` channels, VEC at a time: a power of two up to a warp.
dim3 row_threads(int64_t channels, int vec) {
  unsigned int lanes = 1;
  while (lanes < 32 && lanes * vec < channels) lanes *= 2;
  return dim3(lanes, kThreads / lanes);
}

template <typename T, int VEC, bool MAX>
void launch_reduce(const at::Tensor& rows, const at::Tensor& order, const at::Tensor& starts, bool mean, at::Tensor& out, at::Tensor& arg) {
  const dim3 threads = row_threads(rows.size(1), VEC);
  reduce_kernel<T, VEC, MAX><<<blocks(out.size(0), threads.y), threads, 0, at::cuda::getCurrentCUDAStream()>>>(
      rows.const_data_ptr<T>(), rows.size(1), order.const_data_ptr<int32_t>(), starts.const_data_ptr<int32_t>(), out.size(0), mean,
      out.data_ptr<T>(), arg.data_ptr<int32_t>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename T, bool MAX>
void reduce_all(const at::Tensor& rows, const at::Tensor& point2voxel, const at::Tensor& order, const at::Tensor& starts, bool has_long,
                bool mean, at::Tensor& out, at::Tensor& arg) {
  constexpr int kVec = 16 / sizeof(T);
  if (rows.size(1) % kVec == 0 && aligned(rows.const_data_ptr(), 16) && aligned(out.const_data_ptr(), 16))
    launch_reduce<T, kVec, MAX>(rows, order, starts, mean, out, arg);
  else
    launch_reduce<T, 1, MAX>(rows, order, starts, mean, out, arg);
  if (!has_long) return;
  const int64_t channels = rows.size(1), chunks = (rows.size(0) + kChunk - 1) / kChunk;
  at::Tensor partial = at::empty({chunks, 2, channels}, rows.options().dtype(at::toOpMathType(rows.scalar_type())));
  at::Tensor partial_arg = at::empty({MAX ? chunks : 0, 2, channels}, order.options());
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  using A = at::opmath_type<T>;
  chunk_kernel<T, MAX><<<static_cast<unsigned int>(chunks), kThreads, 0, stream>>>(
      rows.const_data_ptr<T>(), channels, order.const_data_ptr<int32_t>(), point2voxel.const_data_ptr<int32_t>(),
      starts.const_data_ptr<int32_t>(), out.size(0), partial.data_ptr<A>(), partial_arg.data_ptr<int32_t>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  combine_kernel<T, MAX><<<static_cast<unsigned int>(out.size(0)), kThreads, 0, stream>>>(
      partial.const_data_ptr<A>(), partial_arg.const_data_ptr<int32_t>(), channels, starts.const_data_ptr<int32_t>(), mean,
      out.data_ptr<T>(), arg.data_ptr<int32_t>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// reduced (V, C), and for max the point that each entry came from.
std::tuple<at::Tensor, at::Tensor> reduce_groups(const at::Tensor& feats, const at::Tensor& point2voxel, const at::Tensor& order,
                                                 const at::Tensor& starts, bool has_long, int64_t reduce) {
  const at::Tensor rows = feats.contiguous();
  at::Tensor out = at::empty({starts.size(0) - 1, rows.size(1)}, rows.options());
  at::Tensor arg = reduce == kMax ? at::empty(out.sizes(), order.options()) : at::empty({0}, order.options());
  if (out.numel() == 0) return {out, arg};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "group_reduce", [&] {
    if (reduce == kMax)
      reduce_all<scalar_t, true>(rows, point2voxel, order, starts, has_long, false, out, arg);
    else
      reduce_all<scalar_t, false>(rows, point2voxel, order, starts, has_long, reduce == kMean, out, arg);
  });
  return {out, arg};
}

std::tuple<at::Tensor, at::Tensor> group_reduce_cuda(const at::Tensor& feats, const at::Tensor& point2voxel, const at::Tensor& counts,
                                                     const at::Tensor& order, const at::Tensor& starts, const at::Tensor& has_long,
                                                     int64_t reduce) {
  check_reduce(feats, point2voxel, counts, order, starts, has_long, reduce);
  const c10::cuda::CUDAGuard guard(feats.device());
  return reduce_groups(feats, point2voxel, order, starts, *has_long.const_data_ptr<bool>(), reduce);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> dynamic_point_to_voxel_cuda(const at::Tensor& feats,
                                                                                                 const at::Tensor& coords, int64_t reduce) {
  check_points_and_coords(feats, coords, reduce);
  const c10::cuda::CUDAGuard guard(feats.device());
  const PointGroups groups = find_point_groups(coords);
  auto [out, arg] = reduce_groups(feats, groups.point2voxel, groups.order, groups.starts, groups.has_long, reduce);
  return {out, groups.voxel_coords, groups.point2voxel, groups.counts, arg};
}

// Every point writes its own row and nothing else, so no index can leave the buffer. blockDim.y rows at a time, ROWS times: the chain
// of loads point, voxel, gradient is long, and several of them are under way at once.
template <typename T, int VEC, int ROWS, bool MAX>
__global__ void backward_kernel(const T* __restrict__ grad, const int32_t* __restrict__ point2voxel, const int32_t* __restrict__ counts,
                                const int32_t* __restrict__ arg, int64_t count, int64_t channels, bool mean, T* __restrict__ out) {
  using A = at::opmath_type<T>;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y * ROWS + threadIdx.y;
  int64_t voxel[ROWS];
  A divisor[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int64_t p = first + r * blockDim.y;
    voxel[r] = p < count ? point2voxel[p] : -1;
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) divisor[r] = mean && voxel[r] >= 0 ? static_cast<A>(counts[voxel[r]]) : A(1);
  for (int64_t c = threadIdx.x * VEC; c < channels; c += blockDim.x * VEC) {
    Vec<T, VEC> from[ROWS];
    Vec<int32_t, VEC> owner[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (voxel[r] < 0) continue;
      from[r] = load<T, VEC>(grad + voxel[r] * channels + c);
      if (MAX) owner[r] = load<int32_t, VEC>(arg + voxel[r] * channels + c);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int64_t p = first + r * blockDim.y;
      if (p >= count) continue;
      Vec<T, VEC> result;
#pragma unroll
      for (int v = 0; v < VEC; ++v) {
        result.at[v] = static_cast<T>(0.0f);
        if (voxel[r] < 0) continue;
        if (!MAX)
          result.at[v] = static_cast<T>(static_cast<A>(from[r].at[v]) / divisor[r]);
        else if (owner[r].at[v] == p)
          result.at[v] = from[r].at[v];
      }
      store<T, VEC>(out + p * channels + c, result);
    }
  }
}

at::Tensor group_reduce_backward_cuda(const at::Tensor& grad, const at::Tensor& point2voxel, const at::Tensor& counts, const at::Tensor& arg,
                                      int64_t reduce) {
  check_reduce_backward(grad, point2voxel, counts, arg, reduce);
  const c10::cuda::CUDAGuard guard(grad.device());
  const at::Tensor rows = grad.contiguous();
  const int64_t count = point2voxel.size(0), channels = rows.size(1);
  at::Tensor out = at::empty({count, channels}, rows.options());
  if (out.numel() == 0) return out;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "group_reduce_backward", [&] {
    constexpr int kVec = 16 / sizeof(scalar_t), kRows = 4;
    const auto launch = [&](auto kernel, int vec) {
      const dim3 threads = row_threads(channels, vec);
      kernel<<<blocks(count, threads.y * kRows), threads, 0, at::cuda::getCurrentCUDAStream()>>>(
          rows.const_data_ptr<scalar_t>(), point2voxel.const_data_ptr<int32_t>(), counts.const_data_ptr<int32_t>(),
          arg.const_data_ptr<int32_t>(), count, channels, reduce == kMean, out.data_ptr<scalar_t>());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    const bool wide = channels % kVec == 0 && aligned(rows.const_data_ptr(), 16) && (reduce != kMax || aligned(arg.const_data_ptr(), 32));
    if (reduce == kMax && wide)
      launch(&backward_kernel<scalar_t, kVec, kRows, true>, kVec);
    else if (reduce == kMax)
      launch(&backward_kernel<scalar_t, 1, kRows, true>, 1);
    else if (wide)
      launch(&backward_kernel<scalar_t, kVec, kRows, false>, kVec);
    else
      launch(&backward_kernel<scalar_t, 1, kRows, false>, 1);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(mmdet3d_ext, CUDA, m) {
  m.impl("dynamic_point_to_voxel", &dynamic_point_to_voxel_cuda);
  m.impl("group_reduce", &group_reduce_cuda);
  m.impl("group_reduce_backward", &group_reduce_backward_cuda);
}

}  // namespace mmdet3d_ext
