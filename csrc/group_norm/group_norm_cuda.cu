// Group normalisation and ReLU on a GPU. Letters: see group_norm.h.
//
// torch gives a group to one block of threads, and a BEV map has 32 groups. Here the cells of every map are divided over many blocks: each
// finds what its chunk adds per channel, a second kernel puts chunks and channels of a group together in a fixed order (nothing is
// atomic, so results repeat), a third goes over the map again. That one begins where the first ended, with what the cache still holds.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <initializer_list>
#include <tuple>
#include <type_traits>

#include "common/cuda_utils.cuh"
#include "group_norm/group_norm.h"

namespace mmdet3d_ext {
namespace {

// Blocks of threads to divide a map over, whatever the GPU, so that results do not depend on which it is: 32 for each of an H200's 132
// multiprocessors, which end evenly. Where each of them leaves sums of all channels behind, fewer.
constexpr int64_t kBlocks = 4224, kBlocksOfRows = kBlocks / 4;
constexpr int kMostThreads = 1024;

// The vectors that a thread goes over. Contiguous maps: blockDim is (1, threads), all on one channel. Channels-last ones: (lanes, cells),
// every thread keeps its VEC channels.
struct Walk {
  int64_t first, stride, steps;  // first value, values from one vector to the next, vectors
  int64_t sample, chunk, channel;
};

template <int VEC, bool ROWS>
__device__ __forceinline__ Walk walk(const NormShape& shape, unsigned int block) {
  Walk way;
  const unsigned int chunks = static_cast<unsigned int>(shape.chunks), channels = static_cast<unsigned int>(shape.channels);
  unsigned int chunk, sample, channel;
  if (ROWS) {
    const unsigned int width = blockDim.x * VEC, tiles = (channels + width - 1) / width;
    channel = block % tiles * width + threadIdx.x * VEC;
    chunk = block / tiles % chunks;
    sample = block / tiles / chunks;
  } else {
    chunk = block % chunks;
    channel = block / chunks % channels;
    sample = block / chunks / channels;
  }
  const int64_t begin = chunk * shape.length, cells = min(shape.length, shape.cells - begin);
  int64_t left;
  if (ROWS) {
    way.first = (sample * shape.cells + begin + threadIdx.y) * shape.channels + channel;
    way.stride = static_cast<int64_t>(blockDim.y) * shape.channels;
    left = channel < channels ? cells - threadIdx.y : 0;
    way.steps = left > 0 ? (left - 1) / blockDim.y + 1 : 0;
  } else {
    way.first = (static_cast<int64_t>(sample) * shape.channels + channel) * shape.cells + begin + threadIdx.y * VEC;
    way.stride = blockDim.y * VEC;
    left = cells - threadIdx.y * VEC;
    way.steps = left > 0 ? (left - 1) / way.stride + 1 : 0;
  }
  way.sample = sample;
  way.chunk = chunk;
  way.channel = channel;
  return way;
}

// Calls body(count, place) for every vector of the way: `count` of them at a time (a constant), from `place` on.
template <int UNROLL, typename F>
__device__ __forceinline__ void along(const Walk& way, const F& body) {
  int64_t step = 0;
  for (; step + UNROLL <= way.steps; step += UNROLL) body(std::integral_constant<int, UNROLL>(), way.first + step * way.stride);
  for (; step < way.steps; ++step) body(std::integral_constant<int, 1>(), way.first + step * way.stride);
}

// Adds up what the threads of one threadIdx.x hold, in a fixed order; threadIdx.y = 0 gets it. `scratch` has N entries per thread.
template <int N, typename Value>
__device__ __forceinline__ void reduce_rows(Value (&mine)[N], Value* scratch) {
  Value* own = scratch + (threadIdx.y * blockDim.x + threadIdx.x) * N;
#pragma unroll
  for (int j = 0; j < N; ++j) own[j] = mine[j];
  for (unsigned int rows = blockDim.y; rows > 1;) {
    const unsigned int half = (rows + 1) / 2;
    __syncthreads();
    if (threadIdx.y + half < rows) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        mine[j].add(own[half * blockDim.x * N + j]);
        own[j] = mine[j];
      }
    }
    rows = half;
  }
}

// Per chunk and channel: mean and sum of squared deviations, by sample, chunk, channel.
template <typename T, int VEC, bool ROWS>
__global__ void __launch_bounds__(kThreads)
    moments_kernel(const T* __restrict__ x, NormShape shape, Vec<at::opmath_type<T>, 2>* __restrict__ partial) {
  using A = at::opmath_type<T>;
  constexpr int kChannels = ROWS ? VEC : 1;
  __shared__ Moments<A> scratch[kThreads * kChannels];
  const Walk way = walk<VEC, ROWS>(shape, blockIdx.x);
  Moments<A> mine[kChannels] = {};
  along<4>(way, [&](auto count, int64_t place) {
    constexpr int kCount = decltype(count)::value, kValues = kCount * VEC / kChannels;
    Vec<T, VEC> value[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) value[u] = load<T, VEC>(x + place + u * way.stride);
    const A share = mine[0].share(kValues);
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      A mean = 0, m2 = 0;
#pragma unroll
      for (int u = 0; u < kCount; ++u)
#pragma unroll
        for (int v = j; v < VEC; v += kChannels) mean += static_cast<A>(value[u].at[v]);
      mean *= A(1) / kValues;
#pragma unroll
      for (int u = 0; u < kCount; ++u)
#pragma unroll
        for (int v = j; v < VEC; v += kChannels) {
          const A delta = static_cast<A>(value[u].at[v]) - mean;
          m2 += delta * delta;
        }
      mine[j].add({A(kValues), mean, m2}, share);
    }
  });
  reduce_rows<kChannels>(mine, scratch);
  if (threadIdx.y != 0 || way.channel >= shape.channels) return;
#pragma unroll
  for (int j = 0; j < kChannels; ++j)
    partial[(way.sample * shape.chunks + way.chunk) * shape.channels + way.channel + j] = {mine[j].mean, mine[j].m2};
}

// One block per sample and group.
template <typename A>
__global__ void group_kernel(const Vec<A, 2>* __restrict__ partial, NormShape shape, A eps, A* __restrict__ mean, A* __restrict__ rstd) {
  __shared__ Moments<A> scratch[kMostThreads];
  const int64_t sample = blockIdx.x / shape.groups, group = blockIdx.x % shape.groups;
  const unsigned int width = static_cast<unsigned int>(shape.width());
  const int64_t items = shape.chunks * width;
  Moments<A> mine[1] = {};
  for (int64_t i = threadIdx.y; i < items; i += blockDim.y) {
    const int64_t chunk = i / width, channel = group * width + i % width;
    const Vec<A, 2> part = partial[(sample * shape.chunks + chunk) * shape.channels + channel];
    const int64_t cells = min(shape.length, shape.cells - chunk * shape.length);
    mine[0].add({static_cast<A>(cells), part.at[0], part.at[1]});
  }
  reduce_rows<1>(mine, scratch);
  if (threadIdx.y == 0) {
    mean[blockIdx.x] = mine[0].mean;
    rstd[blockIdx.x] = reciprocal_deviation(mine[0], eps);
  }
}

template <typename A, int N>
__device__ __forceinline__ void load_affine(const NormShape& shape, const Walk& way, const A* __restrict__ mean, const A* __restrict__ rstd,
                                            const A* __restrict__ weight, const A* __restrict__ bias, Affine<A> (&norm)[N]) {
  const unsigned int width = static_cast<unsigned int>(shape.width());
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const unsigned int channel = static_cast<unsigned int>(way.channel) + j;
    const int64_t group = way.sample * shape.groups + channel / width;
    if (channel < shape.channels) norm[j] = {mean[group], rstd[group] * weight[channel], bias[channel]};
  }
}

template <typename T, int VEC, bool ROWS>
__global__ void __launch_bounds__(kThreads)
    normalise_kernel(const T* __restrict__ x, NormShape shape, const at::opmath_type<T>* __restrict__ mean,
                     const at::opmath_type<T>* __restrict__ rstd, const at::opmath_type<T>* __restrict__ weight,
                     const at::opmath_type<T>* __restrict__ bias, bool relu, T* __restrict__ out) {
  using A = at::opmath_type<T>;
  constexpr int kChannels = ROWS ? VEC : 1;
  const Walk way = walk<VEC, ROWS>(shape, gridDim.x - 1 - blockIdx.x);
  Affine<A> norm[kChannels];
  load_affine(shape, way, mean, rstd, weight, bias, norm);
  along<4>(way, [&](auto count, int64_t place) {
    constexpr int kCount = decltype(count)::value;
    Vec<T, VEC> value[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) value[u] = load<T, VEC>(x + place + u * way.stride);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) {
        const A y = norm[v % kChannels](static_cast<A>(value[u].at[v]));
        value[u].at[v] = static_cast<T>(cut(y, relu) ? A(0) : y);
      }
      store<T, VEC>(out + place + u * way.stride, value[u]);
    }
  });
}

// Per chunk and channel: the sums that the derivatives need, by sample, chunk, channel.
template <typename T, int VEC, bool ROWS>
__global__ void __launch_bounds__(kThreads)
    sums_kernel(const T* __restrict__ grad, const T* __restrict__ x, NormShape shape, const at::opmath_type<T>* __restrict__ mean,
                const at::opmath_type<T>* __restrict__ rstd, const at::opmath_type<T>* __restrict__ weight,
                const at::opmath_type<T>* __restrict__ bias, bool relu, Vec<at::opmath_type<T>, 2>* __restrict__ partial) {
  using A = at::opmath_type<T>;
  constexpr int kChannels = ROWS ? VEC : 1;
  __shared__ Sums<A> scratch[kThreads * kChannels];
  const Walk way = walk<VEC, ROWS>(shape, blockIdx.x);
  Affine<A> norm[kChannels];
  load_affine(shape, way, mean, rstd, weight, bias, norm);
  Sums<A> mine[kChannels] = {};
  along<2>(way, [&](auto count, int64_t place) {
    constexpr int kCount = decltype(count)::value;
    Vec<T, VEC> value[kCount], from[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      value[u] = load<T, VEC>(x + place + u * way.stride);
      from[u] = load<T, VEC>(grad + place + u * way.stride);
    }
#pragma unroll
    for (int u = 0; u < kCount; ++u)
#pragma unroll
      for (int v = 0; v < VEC; ++v) {
        const Affine<A>& one = norm[v % kChannels];
        const A at = static_cast<A>(value[u].at[v]);
        const A through = cut(one(at), relu) ? A(0) : static_cast<A>(from[u].at[v]);
        mine[v % kChannels].add({through, through * (at - one.mean)});
      }
  });
  reduce_rows<kChannels>(mine, scratch);
  if (threadIdx.y != 0 || way.channel >= shape.channels) return;
#pragma unroll
  for (int j = 0; j < kChannels; ++j)
    partial[(way.sample * shape.chunks + way.chunk) * shape.channels + way.channel + j] = {mine[j].grad, mine[j].moment};
}

// One block per sample and group; blockDim.x channels of it at a time. What weight and bias get, by sample, and the group's slope.
template <typename A>
__global__ void slopes_kernel(const Vec<A, 2>* __restrict__ partial, NormShape shape, const A* __restrict__ rstd,
                              const A* __restrict__ weight, A* __restrict__ to_weight, A* __restrict__ to_bias,
                              Vec<A, 2>* __restrict__ slopes) {
  __shared__ Sums<A> scratch[kMostThreads], channels[kMostThreads];
  const int64_t sample = blockIdx.x / shape.groups, group = blockIdx.x % shape.groups, width = shape.width();
  const A factor = rstd[blockIdx.x];
  Sums<A> all{};  // of this threadIdx.x, held by threadIdx.y = 0
  for (int64_t first = 0; first < width; first += blockDim.x) {
    const int64_t channel = group * width + first + threadIdx.x;
    Sums<A> mine[1] = {};
    if (first + threadIdx.x < width)
      for (int64_t chunk = threadIdx.y; chunk < shape.chunks; chunk += blockDim.y) {
        const Vec<A, 2> part = partial[(sample * shape.chunks + chunk) * shape.channels + channel];
        mine[0].add({part.at[0], part.at[1]});
      }
    __syncthreads();  // before the scratch of the last round is written again
    reduce_rows<1>(mine, scratch);
    if (threadIdx.y == 0 && first + threadIdx.x < width) {
      to_weight[sample * shape.channels + channel] = mine[0].moment * factor;
      to_bias[sample * shape.channels + channel] = mine[0].grad;
      all.add({mine[0].grad * weight[channel], mine[0].moment * weight[channel]});
    }
  }
  if (threadIdx.y == 0) channels[threadIdx.x] = all;
  __syncthreads();
  if (threadIdx.x != 0 || threadIdx.y != 0) return;
  for (unsigned int i = 1; i < blockDim.x; ++i) all.add(channels[i]);
  const GroupSlope<A> slope = GroupSlope<A>::of(all.grad, all.moment, factor, static_cast<A>(shape.members()));
  slopes[blockIdx.x] = {slope.slope, slope.shift};
}

template <typename T, int VEC, bool ROWS>
__global__ void __launch_bounds__(kThreads)
    to_x_kernel(const T* __restrict__ grad, const T* __restrict__ x, NormShape shape, const at::opmath_type<T>* __restrict__ mean,
                const at::opmath_type<T>* __restrict__ rstd, const at::opmath_type<T>* __restrict__ weight,
                const at::opmath_type<T>* __restrict__ bias, const Vec<at::opmath_type<T>, 2>* __restrict__ slopes, bool relu,
                T* __restrict__ out) {
  using A = at::opmath_type<T>;
  constexpr int kChannels = ROWS ? VEC : 1;
  const Walk way = walk<VEC, ROWS>(shape, gridDim.x - 1 - blockIdx.x);
  Affine<A> norm[kChannels];
  load_affine(shape, way, mean, rstd, weight, bias, norm);
  Vec<A, 2> slope[kChannels];
#pragma unroll
  for (int j = 0; j < kChannels; ++j)
    if (way.channel + j < shape.channels) slope[j] = slopes[way.sample * shape.groups + (way.channel + j) / shape.width()];
  along<2>(way, [&](auto count, int64_t place) {
    constexpr int kCount = decltype(count)::value;
    Vec<T, VEC> value[kCount], from[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      value[u] = load<T, VEC>(x + place + u * way.stride);
      from[u] = load<T, VEC>(grad + place + u * way.stride);
    }
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) {
        const Affine<A>& one = norm[v % kChannels];
        const Vec<A, 2>& line = slope[v % kChannels];
        const A at = static_cast<A>(value[u].at[v]);
        const A through = cut(one(at), relu) ? A(0) : static_cast<A>(from[u].at[v]);
        from[u].at[v] = static_cast<T>(one.scale * through + (line.at[0] * (at - one.mean) + line.at[1]));
      }
      store<T, VEC>(out + place + u * way.stride, from[u]);
    }
  });
}

// How a kernel over a map is launched: vectors of `vec` values, `shape` divided into chunks, a block of `threads` for each.
struct Launch {
  NormShape shape;
  dim3 threads;
  unsigned int count;

  Launch(NormShape whole, int vec, int64_t count_wanted) : shape(whole) {
    int64_t per_chunk;  // blocks
    if (shape.rows) {
      const int64_t lanes = std::min<int64_t>(32, (shape.channels + vec - 1) / vec);
      threads = dim3(static_cast<unsigned int>(lanes), static_cast<unsigned int>(kThreads / lanes));
      per_chunk = shape.samples * ((shape.channels + lanes * vec - 1) / (lanes * vec));
      shape.divide((count_wanted + per_chunk - 1) / per_chunk, 4 * threads.y, 1);
    } else {
      per_chunk = shape.samples * shape.channels;
      shape.divide((count_wanted + per_chunk - 1) / per_chunk, 2048, vec);
      const int64_t vectors = (std::min(shape.length, shape.cells) + vec - 1) / vec;
      threads = dim3(1, static_cast<unsigned int>(std::min<int64_t>(kThreads, (vectors + 31) / 32 * 32)));
    }
    TORCH_CHECK(per_chunk * shape.chunks < INT32_MAX, "mmdet3d_ext::group_norm_relu: 'x' has too many channels and samples (",
                shape.samples, " x ", shape.channels, ")");
    count = static_cast<unsigned int>(per_chunk * shape.chunks);
  }
};

// Calls body(vec, rows), two constants, with the widest vectors that all of the maps allow.
template <typename T, typename F>
void with_layout(const NormShape& shape, std::initializer_list<const void*> maps, const F& body) {
  constexpr int kVec = 16 / sizeof(T);
  bool wide = (shape.rows ? shape.channels : shape.cells) % kVec == 0;
  for (const void* map : maps) wide = wide && aligned(map, 16);
  using Wide = std::integral_constant<int, kVec>;
  using Single = std::integral_constant<int, 1>;
  if (shape.rows)
    wide ? body(Wide(), std::true_type()) : body(Single(), std::true_type());
  else
    wide ? body(Wide(), std::false_type()) : body(Single(), std::false_type());
}

at::Tensor pairs(int64_t count, const at::Tensor& like) { return at::empty({count, 2}, like.options()); }

template <typename A>
Vec<A, 2>* as_pairs(const at::Tensor& tensor) {
  return reinterpret_cast<Vec<A, 2>*>(tensor.data_ptr<A>());
}

dim3 column(int64_t items) { return dim3(1, static_cast<unsigned int>(std::min<int64_t>(kMostThreads, (items + 31) / 32 * 32))); }

std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_relu_cuda(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                                                    int64_t groups, double eps, bool relu) {
  check_norm(x, weight, bias, groups, "group_norm_relu");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::MemoryFormat format = norm_format(x);
  const at::Tensor in = x.contiguous(format), scale = weight.contiguous(), shift = bias.contiguous();
  at::Tensor out = at::empty_like(in, in.options(), format);
  if (x.numel() == 0) return {out, at::zeros({x.size(0), groups}, scale.options()), at::zeros({x.size(0), groups}, scale.options())};
  at::Tensor mean = at::empty({x.size(0), groups}, scale.options()), rstd = at::empty_like(mean);
  const NormShape whole = NormShape::of(in, groups, format);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "group_norm_relu", [&] {
    using A = at::opmath_type<scalar_t>;
    const scalar_t* from = in.const_data_ptr<scalar_t>();
    with_layout<scalar_t>(whole, {from, out.const_data_ptr()}, [&](auto vec, auto rows) {
      constexpr int kVec = decltype(vec)::value;
      constexpr bool kRows = decltype(rows)::value;
      const Launch sums(whole, kVec, kRows ? kBlocksOfRows : kBlocks), map(whole, kVec, kBlocks);
      const at::Tensor partial = pairs(whole.samples * sums.shape.chunks * whole.channels, mean);
      moments_kernel<scalar_t, kVec, kRows><<<sums.count, sums.threads, 0, stream>>>(from, sums.shape, as_pairs<A>(partial));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      group_kernel<A><<<blocks(mean.numel(), 1), column(sums.shape.chunks * whole.width()), 0, stream>>>(
          as_pairs<A>(partial), sums.shape, static_cast<A>(eps), mean.data_ptr<A>(), rstd.data_ptr<A>());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      normalise_kernel<scalar_t, kVec, kRows><<<map.count, map.threads, 0, stream>>>(
          from, map.shape, mean.const_data_ptr<A>(), rstd.const_data_ptr<A>(), scale.const_data_ptr<A>(), shift.const_data_ptr<A>(), relu,
          out.data_ptr<scalar_t>());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
  return {out, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_relu_backward_cuda(const at::Tensor& grad, const at::Tensor& x,
                                                                             const at::Tensor& mean, const at::Tensor& rstd,
                                                                             const at::Tensor& weight, const at::Tensor& bias,
                                                                             int64_t groups, bool relu) {
  check_norm_backward(grad, x, mean, rstd, weight, bias, groups);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::MemoryFormat format = norm_format(x);
  const at::Tensor in = x.contiguous(format), got = grad.contiguous(format), scale = weight.contiguous(), shift = bias.contiguous();
  at::Tensor to_x = at::empty_like(in, in.options(), format);
  if (x.numel() == 0) return {to_x, at::zeros_like(scale), at::zeros_like(scale)};
  const NormShape whole = NormShape::of(in, groups, format);
  at::Tensor to_weight = at::empty({whole.samples, whole.channels}, scale.options()), to_bias = at::empty_like(to_weight);
  const at::Tensor slopes = pairs(mean.numel(), mean);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "group_norm_relu_backward", [&] {
    using A = at::opmath_type<scalar_t>;
    const scalar_t* from = in.const_data_ptr<scalar_t>();
    const scalar_t* gradient = got.const_data_ptr<scalar_t>();
    const A *means = mean.const_data_ptr<A>(), *rstds = rstd.const_data_ptr<A>();
    const A *weights = scale.const_data_ptr<A>(), *biases = shift.const_data_ptr<A>();
    with_layout<scalar_t>(whole, {from, gradient, to_x.const_data_ptr()}, [&](auto vec, auto rows) {
      constexpr int kVec = decltype(vec)::value;
      constexpr bool kRows = decltype(rows)::value;
      const Launch sums(whole, kVec, kRows ? kBlocksOfRows : kBlocks), map(whole, kVec, kBlocks);
      const at::Tensor partial = pairs(whole.samples * sums.shape.chunks * whole.channels, mean);
      sums_kernel<scalar_t, kVec, kRows><<<sums.count, sums.threads, 0, stream>>>(gradient, from, sums.shape, means, rstds, weights,
                                                                                 biases, relu, as_pairs<A>(partial));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      const unsigned int lanes = static_cast<unsigned int>(std::min<int64_t>(whole.width(), kMostThreads));
      const dim3 threads(lanes, static_cast<unsigned int>(std::min<int64_t>(kMostThreads / lanes, sums.shape.chunks)));
      slopes_kernel<A><<<blocks(mean.numel(), 1), threads, 0, stream>>>(as_pairs<A>(partial), sums.shape, rstds, weights,
                                                                        to_weight.data_ptr<A>(), to_bias.data_ptr<A>(),
                                                                        as_pairs<A>(slopes));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      to_x_kernel<scalar_t, kVec, kRows><<<map.count, map.threads, 0, stream>>>(gradient, from, map.shape, means, rstds, weights, biases,
                                                                               as_pairs<A>(slopes), relu, to_x.data_ptr<scalar_t>());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
  if (whole.samples == 1) return {to_x, to_weight.squeeze(0), to_bias.squeeze(0)};
  return {to_x, at::sum(to_weight, at::IntArrayRef({0})), at::sum(to_bias, at::IntArrayRef({0}))};
}

}  // namespace

TORCH_LIBRARY_IMPL(mmdet3d_ext, CUDA, m) {
  m.impl("group_norm_relu", &group_norm_relu_cuda);
  m.impl("group_norm_relu_backward", &group_norm_relu_backward_cuda);
}

}  // namespace mmdet3d_ext
