// Points of equal coordinates to one voxel, on a GPU. Letters: P points, K coordinate columns, C channels, V voxels.
//
// Coordinates are packed into 32-bit keys whose widths are the columns' maxima, read on the device: no synchronisation before the one
// that the number of voxels needs. A radix sort puts the points of a voxel side by side; every voxel then adds up its own points, so
// nothing is atomic and no index comes from comparing values.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <iterator>
#include <limits>

#include "common/cuda_utils.cuh"
#include "point_to_voxel/point_to_voxel.h"

namespace mmdet3d_ext {
namespace {

constexpr int kMaxColumns = 4;
// A voxel with more points than kLong is added up in chunks of kChunk points by several blocks; kLong >= 2 * kChunk.
constexpr int kLong = 2048, kChunk = 1024;

struct Info {
  int32_t voxels, has_long, overflow;
  int32_t unused;
  unsigned long long largest[kMaxColumns];  // per column, over the rows kept; 0 for columns that are not there
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

template <typename Index>
__global__ void largest_kernel(const Index* __restrict__ coords, int64_t count, int columns, Info* info) {
  __shared__ unsigned long long shared[kMaxColumns];
  if (threadIdx.x < kMaxColumns) shared[threadIdx.x] = 0;
  __syncthreads();
  unsigned long long largest[kMaxColumns] = {0, 0, 0, 0};
  for (int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; p < count; p += static_cast<int64_t>(gridDim.x) * kThreads) {
    unsigned long long row[kMaxColumns];
    if (!read_row(coords, p, columns, row)) continue;
#pragma unroll
    for (int k = 0; k < kMaxColumns; ++k) largest[k] = max(largest[k], row[k]);
  }
#pragma unroll
  for (int k = 0; k < kMaxColumns; ++k) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) largest[k] = max(largest[k], __shfl_xor_sync(0xffffffffu, largest[k], offset));
    if (threadIdx.x % 32 == 0) atomicMax(&shared[k], largest[k]);
  }
  __syncthreads();
  if (threadIdx.x < kMaxColumns) atomicMax(&info->largest[threadIdx.x], shared[threadIdx.x]);
}

template <typename Index>
__global__ void pack_kernel(const Index* __restrict__ coords, int64_t count, int columns, Info* info, uint32_t* __restrict__ keys,
                            int32_t* __restrict__ index) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p >= count) return;
  double cells = 1;
#pragma unroll
  for (int k = 0; k < kMaxColumns; ++k) cells *= static_cast<double>(info->largest[k]) + 1;
  const bool overflow = cells >= 4294967295.0;
  if (overflow && p == 0) info->overflow = 1;
  unsigned long long row[kMaxColumns];
  uint32_t key = UINT32_MAX;
  if (read_row(coords, p, columns, row) && !overflow) {
    key = 0;
#pragma unroll
    for (int k = 0; k < kMaxColumns; ++k) key = key * static_cast<uint32_t>(info->largest[k] + 1) + static_cast<uint32_t>(row[k]);
  }
  keys[p] = key;
  index[p] = static_cast<int32_t>(p);
}

// Whether a new voxel begins at a sorted position: the scan's input.
template <typename Key>
struct IsHead {
  const Key* keys;
  __device__ __forceinline__ int32_t operator()(int64_t i) const { return keys[i] != ~Key(0) && (i == 0 || keys[i - 1] != keys[i]); }
};

// The scan's output: takes the number of heads up to a position, i.e. voxel + 1, and writes all that follows from it. This way the
// numbers themselves never go through memory.
template <typename Key>
struct MapWriter {
  using iterator_category = std::random_access_iterator_tag;
  using value_type = int32_t;
  using difference_type = std::ptrdiff_t;
  using pointer = void;
  struct Position {
    const MapWriter& writer;
    __device__ __forceinline__ void operator=(int32_t rank) const { writer.write(rank); }
  };
  using reference = Position;

  const Key* keys;
  const int32_t* order;
  int64_t count;
  int32_t* point2voxel;
  int32_t* starts;
  Info* info;
  int64_t i;

  __host__ __device__ __forceinline__ MapWriter operator+(difference_type n) const {
    MapWriter moved = *this;
    moved.i += n;
    return moved;
  }
  __host__ __device__ __forceinline__ MapWriter& operator+=(difference_type n) {
    i += n;
    return *this;
  }
  __device__ __forceinline__ Position operator*() const { return Position{*this}; }

  struct Moved {
    MapWriter writer;
    __device__ __forceinline__ void operator=(int32_t rank) const { writer.write(rank); }
  };
  __device__ __forceinline__ Moved operator[](difference_type n) const { return Moved{*this + n}; }

  __device__ __forceinline__ void write(int32_t rank) const {
    const Key key = keys[i];
    if (i == 0) starts[0] = 0;
    if (key == ~Key(0)) {
      point2voxel[order[i]] = -1;
      return;
    }
    const int32_t voxel = rank - 1;
    point2voxel[order[i]] = voxel;
    if (i > 0 && keys[i - 1] != key) starts[voxel] = static_cast<int32_t>(i);
    if (i + kLong < count && keys[i + kLong] == key) info->has_long = 1;
    if (i + 1 == count || keys[i + 1] == ~Key(0)) {
      starts[voxel + 1] = static_cast<int32_t>(i + 1);
      info->voxels = voxel + 1;
    }
  }
};

template <typename Index>
__global__ void voxel_coords_kernel(const Index* __restrict__ coords, const int32_t* __restrict__ order, const int32_t* __restrict__ starts,
                                    int64_t voxels, int64_t columns, Index* __restrict__ out, int32_t* __restrict__ counts) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= voxels * columns) return;
  const int64_t voxel = i / columns, column = i % columns;
  out[i] = coords[order[starts[voxel]] * columns + column];
  if (column == 0) counts[voxel] = starts[voxel + 1] - starts[voxel];
}

template <typename Key>
void number_voxels(const at::Tensor& keys, const at::Tensor& order, at::Tensor& point2voxel, at::Tensor& starts, Info* info) {
  const int64_t count = keys.numel();
  const Key* key = static_cast<const Key*>(keys.const_data_ptr());
  const auto heads = thrust::make_transform_iterator(thrust::counting_iterator<int64_t>(0), IsHead<Key>{key});
  const MapWriter<Key> writer{key, order.const_data_ptr<int32_t>(), count, point2voxel.data_ptr<int32_t>(), starts.data_ptr<int32_t>(), info, 0};
  inclusive_sum(heads, writer, count, keys);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> point_groups_cuda(const at::Tensor& coords) {
  check_coords(coords);
  const c10::cuda::CUDAGuard guard(coords.device());
  require_covered(coords.device());
  const at::Tensor rows = coords.contiguous();
  const int64_t count = rows.size(0), columns = rows.size(1);
  const auto ints = rows.options().dtype(at::kInt);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  at::Tensor point2voxel = at::empty({count}, ints), order = at::empty({count}, ints);
  at::Tensor has_long = at::zeros({}, at::TensorOptions().dtype(at::kBool));
  if (count == 0) return {at::empty({0, columns}, rows.options()), point2voxel, at::empty({0}, ints), order, at::zeros({1}, ints), has_long};
  at::Tensor starts = at::empty({count + 1}, ints);
  at::Tensor info = at::zeros({static_cast<int64_t>(sizeof(Info))}, rows.options().dtype(at::kByte));
  Info* device_info = static_cast<Info*>(info.data_ptr());
  Info host;
  const auto read_info = [&] {
    const at::Tensor copy = info.cpu();
    host = *static_cast<const Info*>(copy.const_data_ptr());
  };
  if (columns <= kMaxColumns) {
    at::Tensor keys = at::empty({count}, ints);
    AT_DISPATCH_INDEX_TYPES(rows.scalar_type(), "point_groups", [&] {
      const index_t* in = rows.const_data_ptr<index_t>();
      largest_kernel<index_t><<<std::min(blocks(count), 1024u), kThreads, 0, stream>>>(in, count, static_cast<int>(columns), device_info);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      pack_kernel<index_t><<<blocks(count), kThreads, 0, stream>>>(in, count, static_cast<int>(columns), device_info,
                                                                  static_cast<uint32_t*>(keys.data_ptr()), order.data_ptr<int32_t>());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
    std::tie(keys, order) = sort_pairs<uint32_t>(keys, order, 32);
    number_voxels<uint32_t>(keys, order, point2voxel, starts, device_info);
    read_info();  // the one synchronisation: the outputs' size
  }
  if (columns > kMaxColumns || host.overflow) {
    info.zero_();
    order = at::arange(count, ints);
    at::Tensor keys = ranked_keys(rows);  // dropped rows are -1, all bits set
    std::tie(keys, order) = sort_pairs<uint64_t>(keys, order, 64);
    number_voxels<uint64_t>(keys, order, point2voxel, starts, device_info);
    read_info();
  }
  has_long.fill_(host.has_long != 0);
  starts = starts.narrow(0, 0, host.voxels + 1);
  at::Tensor voxel_coords = at::empty({host.voxels, columns}, rows.options()), counts = at::empty({host.voxels}, ints);
  if (host.voxels) {
    AT_DISPATCH_INDEX_TYPES(rows.scalar_type(), "point_groups", [&] {
      voxel_coords_kernel<index_t><<<blocks(voxel_coords.numel()), kThreads, 0, stream>>>(
          rows.const_data_ptr<index_t>(), order.const_data_ptr<int32_t>(), starts.const_data_ptr<int32_t>(), host.voxels, columns,
          voxel_coords.data_ptr<index_t>(), counts.data_ptr<int32_t>());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  return {voxel_coords, point2voxel, counts, order, starts, has_long};
}

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

std::tuple<at::Tensor, at::Tensor> group_reduce_cuda(const at::Tensor& feats, const at::Tensor& point2voxel, const at::Tensor& order,
                                                     const at::Tensor& starts, const at::Tensor& has_long, int64_t reduce) {
  check_reduce(feats, point2voxel, order, starts, reduce);
  const c10::cuda::CUDAGuard guard(feats.device());
  require_covered(feats.device());
  const at::Tensor rows = feats.contiguous();
  at::Tensor out = at::empty({starts.size(0) - 1, rows.size(1)}, rows.options());
  at::Tensor arg = reduce == kMax ? at::empty(out.sizes(), order.options()) : at::empty({0}, order.options());
  if (out.numel() == 0) return {out, arg};
  const bool full = has_long.item<bool>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "group_reduce", [&] {
    if (reduce == kMax)
      reduce_all<scalar_t, true>(rows, point2voxel, order, starts, full, false, out, arg);
    else
      reduce_all<scalar_t, false>(rows, point2voxel, order, starts, full, reduce == kMean, out, arg);
  });
  return {out, arg};
}

// Every point writes its own row and nothing else, so no index can leave the buffer.
template <typename T, int VEC>
__global__ void backward_kernel(const T* __restrict__ grad, const int32_t* __restrict__ point2voxel, const int32_t* __restrict__ starts,
                                const int32_t* __restrict__ arg, int64_t count, int64_t channels, int64_t reduce, T* __restrict__ out) {
  using A = at::opmath_type<T>;
  const int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (p >= count) return;
  const int64_t voxel = point2voxel[p];
  const A divisor = voxel >= 0 && reduce == kMean ? static_cast<A>(starts[voxel + 1] - starts[voxel]) : A(1);
  for (int64_t c = threadIdx.x * VEC; c < channels; c += blockDim.x * VEC) {
    Vec<T, VEC> result;
#pragma unroll
    for (int v = 0; v < VEC; ++v) result.at[v] = static_cast<T>(0.0f);
    if (voxel >= 0) {
      const Vec<T, VEC> from = load<T, VEC>(grad + voxel * channels + c);
      if (reduce == kMax) {
        const Vec<int32_t, VEC> owner = load<int32_t, VEC>(arg + voxel * channels + c);
#pragma unroll
        for (int v = 0; v < VEC; ++v)
          if (owner.at[v] == p) result.at[v] = from.at[v];
      } else {
#pragma unroll
        for (int v = 0; v < VEC; ++v) result.at[v] = static_cast<T>(static_cast<A>(from.at[v]) / divisor);
      }
    }
    store<T, VEC>(out + p * channels + c, result);
  }
}

at::Tensor group_reduce_backward_cuda(const at::Tensor& grad, const at::Tensor& point2voxel, const at::Tensor& starts, const at::Tensor& arg,
                                      int64_t reduce) {
  check_reduce_backward(grad, point2voxel, starts, arg, reduce);
  const c10::cuda::CUDAGuard guard(grad.device());
  require_covered(grad.device());
  const at::Tensor rows = grad.contiguous();
  const int64_t count = point2voxel.size(0), channels = rows.size(1);
  at::Tensor out = at::empty({count, channels}, rows.options());
  if (out.numel() == 0) return out;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "group_reduce_backward", [&] {
    constexpr int kVec = 16 / sizeof(scalar_t);
    const auto launch = [&](auto kernel, int vec) {
      const dim3 threads = row_threads(channels, vec);
      kernel<<<blocks(count, threads.y), threads, 0, at::cuda::getCurrentCUDAStream()>>>(
          rows.const_data_ptr<scalar_t>(), point2voxel.const_data_ptr<int32_t>(), starts.const_data_ptr<int32_t>(),
          arg.const_data_ptr<int32_t>(), count, channels, reduce, out.data_ptr<scalar_t>());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    if (channels % kVec == 0 && aligned(rows.const_data_ptr(), 16) && (reduce != kMax || aligned(arg.const_data_ptr(), 32)))
      launch(&backward_kernel<scalar_t, kVec>, kVec);
    else
      launch(&backward_kernel<scalar_t, 1>, 1);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(mmdet3d_ext, CUDA, m) {
  m.impl("point_groups", &point_groups_cuda);
  m.impl("group_reduce", &group_reduce_cuda);
  m.impl("group_reduce_backward", &group_reduce_backward_cuda);
}

}  // namespace mmdet3d_ext
