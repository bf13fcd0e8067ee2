// Lift-splat pooling on a GPU, never forming depth x context. Letters: see lift_splat.h.
//
// Half a warp works on one point at a time: its 16 lanes hold the channels (80 channels are five a lane, none idle).
// Forward: a block adds up one tile of cells. Its points stand together in the sorted order; they are dealt evenly to the block's
// half-warps whatever their cells. The tile's cells share most of their pixels, whose contexts stay in L1.
// Backward: a half-warp owns a few pixels of one image column and walks along their rays. Pixels above each other see the same cell at
// the same depth (the height is pooled away), so one read of the cell's gradient serves them all. Nothing is atomic but a bit mask.
#include <ATen/Dispatch.h>
#include <ATen/cuda/detail/IntegerDivider.cuh>
#include <torch/library.h>

#include <type_traits>

#include "common/cuda_utils.cuh"
#include "lift_splat/lift_splat.h"

namespace mmdet3d_ext {
namespace {

constexpr unsigned int kAll = 0xffffffffu;
constexpr int kHalf = 16;                          // lanes that share a point
constexpr int kBlock = 128;                        // threads of a block, forward and backward
constexpr int kShares = kBlock / kHalf;            // half-warps of a block
constexpr int kStagedStride = kHalf + 1;           // in points: the two halves of a warp read different banks

// How the 16 lanes hold channels: Q times four consecutive ones (one wide load) and R times a single one.
template <int Q, int R>
struct Lanes {
  static constexpr int kCount = 4 * Q + R;
  static constexpr int kWidth = kHalf * kCount;  // channels of one pass

  static __device__ __forceinline__ int channel(int lane, int v) {
    return v < 4 * Q ? 4 * kHalf * (v / 4) + 4 * lane + v % 4 : 4 * kHalf * Q + kHalf * (v - 4 * Q) + lane;
  }

  // row: first channel of this pass; width: how many there are (a multiple of 4 if Q > 0).
  template <typename T>
  static __device__ __forceinline__ void read(const T* __restrict__ row, int lane, int width, T (&out)[kCount]) {
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      const int c = channel(lane, 4 * q);
      if (c < width) {
        const Vec<T, 4> quad = load<T, 4>(row + c);
#pragma unroll
        for (int v = 0; v < 4; ++v) out[4 * q + v] = quad.at[v];
      }
    }
#pragma unroll
    for (int v = 4 * Q; v < kCount; ++v) {
      const int c = channel(lane, v);
      if (c < width) out[v] = row[c];
    }
  }

  template <typename T>
  static __device__ __forceinline__ void write(T* __restrict__ row, int lane, int width, const T (&in)[kCount]) {
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      const int c = channel(lane, 4 * q);
      if (c < width) store<T, 4>(row + c, Vec<T, 4>{in[4 * q], in[4 * q + 1], in[4 * q + 2], in[4 * q + 3]});
    }
#pragma unroll
    for (int v = 4 * Q; v < kCount; ++v) {
      const int c = channel(lane, v);
      if (c < width) row[c] = in[v];
    }
  }
};

// ---- plan

__device__ __forceinline__ void write_point(const SplatGrid& grid, int64_t p, bool inside, int32_t b, const int32_t at[3], int32_t dropped,
                                            int32_t* cell, int32_t* key, int32_t* index) {
  cell[p] = inside ? grid.cell(b, at[0], at[1], at[2]) : -1;
  key[p] = inside ? grid.key(b, at[0], at[1], at[2]) : dropped;
  index[p] = static_cast<int32_t>(p);
}

__global__ void geometry_kernel(const float* __restrict__ geometry, int64_t count, int64_t per_sample, Grid bounds, SplatGrid grid,
                                bool truncate, int32_t dropped, int32_t* __restrict__ cell, int32_t* __restrict__ key,
                                int32_t* __restrict__ index) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p >= count) return;
  int32_t at[3];
  const bool inside = bounds.locate(geometry[3 * p], geometry[3 * p + 1], geometry[3 * p + 2], truncate, at);
  write_point(grid, p, inside, static_cast<int32_t>(p / per_sample), at, dropped, cell, key, index);
}

__global__ void coords_kernel(const int64_t* __restrict__ coords, int64_t count, SplatGrid grid, int32_t dropped, int32_t* __restrict__ cell,
                              int32_t* __restrict__ key, int32_t* __restrict__ index) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p >= count) return;
  const int64_t x = coords[4 * p], y = coords[4 * p + 1], z = coords[4 * p + 2], b = coords[4 * p + 3];
  const bool inside = x >= 0 && x < grid.nx && y >= 0 && y < grid.ny && z >= 0 && z < grid.nz && b >= 0 && b < grid.batch;
  const int32_t at[3] = {static_cast<int32_t>(x), static_cast<int32_t>(y), static_cast<int32_t>(z)};
  write_point(grid, p, inside, static_cast<int32_t>(b), at, dropped, cell, key, index);
}

// starts[t] = first position whose tile is t or later; thread i fills the tiles between the points before and at position i.
__global__ void tile_starts_kernel(const int32_t* __restrict__ key, int64_t count, int32_t tiles, int32_t* __restrict__ starts) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i > count) return;
  const int32_t before = i == 0 ? -1 : key[i - 1] / kTileCells, here = i == count ? tiles : key[i] / kTileCells;
  for (int32_t tile = before + 1; tile <= here; ++tile) starts[tile] = static_cast<int32_t>(i);
}

using Plan = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

template <typename Fill>
Plan make_plan(const at::Tensor& like, int64_t count, const SplatGrid& grid, const Fill& fill) {
  const auto ints = like.options().dtype(at::kInt);
  at::Tensor cell = at::empty({count}, ints), order = at::empty({count}, ints), key = at::empty({count}, ints);
  at::Tensor starts = at::empty({grid.tiles() + 1}, ints);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const int32_t dropped = static_cast<int32_t>(grid.keys());
  if (count) {
    fill(stream, dropped, cell.data_ptr<int32_t>(), key.data_ptr<int32_t>(), order.data_ptr<int32_t>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    std::tie(key, order) = sort_pairs<uint32_t>(key, order, bit_width(grid.keys()));
  }
  tile_starts_kernel<<<blocks(count + 1), kThreads, 0, stream>>>(key.const_data_ptr<int32_t>(), count, static_cast<int32_t>(grid.tiles()),
                                                                 starts.data_ptr<int32_t>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {cell, order, key, starts};
}

Plan splat_plan_cuda(const at::Tensor& geometry, at::ArrayRef<double> lower, at::ArrayRef<double> step, at::IntArrayRef cells,
                     bool truncate) {
  check_geometry(geometry);
  const c10::cuda::CUDAGuard guard(geometry.device());
  const Grid bounds = Grid::from(lower, step, cells, "splat_plan");
  const int64_t batch = geometry.size(0);
  const SplatGrid grid = SplatGrid::from(cells, batch, "splat_plan");
  const at::Tensor points = geometry.contiguous();
  const int64_t count = points.numel() / 3;
  return make_plan(points, count, grid, [&](cudaStream_t stream, int32_t dropped, int32_t* cell, int32_t* key, int32_t* index) {
    geometry_kernel<<<blocks(count), kThreads, 0, stream>>>(points.const_data_ptr<float>(), count, count / batch, bounds, grid, truncate,
                                                            dropped, cell, key, index);
  });
}

Plan splat_plan_from_coords_cuda(const at::Tensor& coords, int64_t batch, at::IntArrayRef cells) {
  check_pool_coords(coords);
  const c10::cuda::CUDAGuard guard(coords.device());
  const SplatGrid grid = SplatGrid::from(cells, batch, "splat_plan_from_coords");
  const at::Tensor rows = coords.contiguous();
  const int64_t count = rows.size(0);
  return make_plan(rows, count, grid, [&](cudaStream_t stream, int32_t dropped, int32_t* cell, int32_t* key, int32_t* index) {
    coords_kernel<<<blocks(count), kThreads, 0, stream>>>(rows.const_data_ptr<int64_t>(), count, grid, dropped, cell, key, index);
  });
}

// ---- forward

template <typename A>
struct alignas(16) Staged {
  A weight;
  int32_t row, cell;
};

// From a point to the row of its pixel.
struct PixelOf {
  at::cuda::detail::IntDivider<uint32_t> ray_bundle, pixels;  // D * H * W, H * W
  __device__ __forceinline__ int32_t operator()(uint32_t p) const {
    return static_cast<int32_t>(ray_bundle.div(p) * pixels.divisor + pixels.mod(p));
  }
};

// Shared memory, in numbers of the accumulation type A: sums[kTileCells][stride], edges[kShares][width], then the staged points.
// stride is odd, so that reading one channel of consecutive cells touches different banks.
template <typename D, typename T, int Q, int R, bool LIFT>
__global__ void __launch_bounds__(kBlock)
    splat_kernel(const D* __restrict__ depth, const T* __restrict__ rows, const int32_t* __restrict__ order,
                 const int32_t* __restrict__ sorted_key, const int32_t* __restrict__ tile_starts, SplatGrid grid, int64_t channels,
                 int stride, PixelOf pixel_of, T* __restrict__ out) {
  using A = at::opmath_type<T>;
  using L = Lanes<Q, R>;
  extern __shared__ __align__(16) unsigned char memory[];
  A* sums = reinterpret_cast<A*>(memory);
  A* edges = sums + kTileCells * stride;
  Staged<A>* staged = reinterpret_cast<Staged<A>*>(edges + kShares * L::kWidth);
  __shared__ int32_t edge_cell[kShares];
  __shared__ unsigned int written;  // bit per cell: its sum is in shared memory

  const int share = threadIdx.x / kHalf, lane = threadIdx.x % kHalf, half = share % 2;
  const int64_t channel0 = static_cast<int64_t>(blockIdx.y) * L::kWidth;
  const int width = static_cast<int>(min(static_cast<int64_t>(L::kWidth), channels - channel0));
  const int32_t begin = tile_starts[blockIdx.x], end = tile_starts[blockIdx.x + 1];
  if (threadIdx.x == 0) written = 0;
  if (lane == 0) edge_cell[share] = -1;
  __syncthreads();

  if (begin < end) {
    // This half-warp's points. A cell that began in an earlier share goes to `edges`; others belong to the share in which they begin.
    const int32_t size = (end - begin + kShares - 1) / kShares;
    const int32_t first = min(begin + share * size, end), last = min(first + size, end);
    int32_t cell = -1, before = -1;
    bool continued = false;
    if (first > begin && first < last) {
      before = sorted_key[first - 1] % kTileCells;
      continued = sorted_key[first] % kTileCells == before;
      if (continued) cell = before;
      if (continued && lane == 0) edge_cell[share] = cell;
    }
    unsigned int touched = 0;
    A sum[L::kCount];
#pragma unroll
    for (int v = 0; v < L::kCount; ++v) sum[v] = A(0);
    const T* pass = rows + channel0;
    const auto flush = [&]() {
      if (cell < 0) return;
      if (!continued) touched |= 1u << cell;
      A* to = continued ? edges + share * L::kWidth : sums + cell * stride;
#pragma unroll
      for (int v = 0; v < L::kCount; ++v) {
        const int c = L::channel(lane, v);
        if (c < width) to[c] = sum[v];
        sum[v] = A(0);
      }
      continued = false;
    };
    // Keys and points are read two batches ahead, depths one: their latencies overlap with the sums.
    Staged<A>* mine = staged + share * kStagedStride;
    const int batches = (size + kHalf - 1) / kHalf;  // the same for all shares: warp-wide votes stay together
    int32_t here = -1, next = -1;
    uint32_t point = 0, next_point = 0;
    A weight = A(1);
    if (first + lane < last) {
      here = sorted_key[first + lane] % kTileCells;
      point = static_cast<uint32_t>(order[first + lane]);
    }
    if (first + kHalf + lane < last) {
      next = sorted_key[first + kHalf + lane] % kTileCells;
      next_point = static_cast<uint32_t>(order[first + kHalf + lane]);
    }
    if (LIFT && here >= 0) weight = static_cast<A>(depth[point]);
    for (int batch = 0; batch < batches; ++batch) {
      const int32_t base = first + batch * kHalf;
      __syncwarp();
      if (here >= 0) mine[lane] = Staged<A>{weight, LIFT ? pixel_of(point) : static_cast<int32_t>(point), here};
      int32_t previous = __shfl_up_sync(kAll, here, 1, kHalf);
      if (lane == 0) previous = before;
      const unsigned int heads = __ballot_sync(kAll, here >= 0 && here != previous) >> (half * kHalf);
      before = __shfl_sync(kAll, here, kHalf - 1, kHalf);
      __syncwarp();
      here = next;
      point = next_point;
      if (LIFT && here >= 0) weight = static_cast<A>(depth[point]);
      next = -1;
      if (base + 2 * kHalf + lane < last) {
        next = sorted_key[base + 2 * kHalf + lane] % kTileCells;
        next_point = static_cast<uint32_t>(order[base + 2 * kHalf + lane]);
      }
      const int points = min(kHalf, last - base);
      constexpr int kUnroll = 4;
      for (int j = 0; j < points; j += kUnroll) {
        T row[kUnroll][L::kCount];
        A weights[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (j + u < points) {
            const Staged<A> from = mine[j + u];
            weights[u] = from.weight;
            L::read(pass + from.row * channels, lane, width, row[u]);
          }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (j + u < points) {
            if (heads >> (j + u) & 1u) {
              flush();
              cell = mine[j + u].cell;
            }
#pragma unroll
            for (int v = 0; v < L::kCount; ++v) sum[v] += weights[u] * static_cast<A>(row[u][v]);
          }
        }
      }
    }
    flush();
    if (lane == 0 && touched) atomicOr(&written, touched);
    __syncthreads();
    // What later shares added to a cell, in their order.
    for (int c = threadIdx.x; c < width; c += kBlock)
      for (int w = 1; w < kShares; ++w)
        if (edge_cell[w] >= 0) sums[edge_cell[w] * stride + c] += edges[w * L::kWidth + c];
    __syncthreads();
  }

  const int64_t slab = blockIdx.x / grid.tiles_y / grid.tiles_x;  // b * nz + z
  const int at = threadIdx.x % kTileCells;
  const int x = static_cast<int>(blockIdx.x / grid.tiles_y % grid.tiles_x) * kTileX + at / kTileY;
  const int y = static_cast<int>(blockIdx.x % grid.tiles_y) * kTileY + at % kTileY;
  if (x >= grid.nx || y >= grid.ny) return;
  const bool filled = written >> at & 1u;
  const int64_t area = static_cast<int64_t>(grid.nx) * grid.ny;
  T* to = out + (slab * channels + channel0) * area + static_cast<int64_t>(x) * grid.ny + y;
  for (int c = threadIdx.x / kTileCells; c < width; c += kBlock / kTileCells)
    to[c * area] = filled ? static_cast<T>(sums[at * stride + c]) : static_cast<T>(0.0f);
}

template <typename D, typename T, int Q, int R, bool LIFT>
void launch_splat(const D* depth, const T* rows, const Plan& plan, const SplatGrid& grid, int64_t channels, int64_t pixels, int64_t bins,
                  T* out) {
  using A = at::opmath_type<T>;
  constexpr int kWidth = Lanes<Q, R>::kWidth, kStride = kWidth + 1;
  constexpr size_t kShared = ((kTileCells * kStride + kShares * kWidth) * sizeof(A) + kShares * kStagedStride * sizeof(Staged<A>));
  static_assert(kShared <= 48 * 1024 && (kTileCells * kStride + kShares * kWidth) * sizeof(A) % 16 == 0, "staged points are aligned");
  const dim3 tiles(static_cast<unsigned int>(grid.tiles()), blocks(channels, kWidth));
  PixelOf pixel_of;
  pixel_of.ray_bundle = at::cuda::detail::IntDivider<uint32_t>(static_cast<uint32_t>(std::max<int64_t>(1, bins * pixels)));
  pixel_of.pixels = at::cuda::detail::IntDivider<uint32_t>(static_cast<uint32_t>(std::max<int64_t>(1, pixels)));
  splat_kernel<D, T, Q, R, LIFT><<<tiles, kBlock, kShared, at::cuda::getCurrentCUDAStream()>>>(
      depth, rows, std::get<1>(plan).const_data_ptr<int32_t>(), std::get<2>(plan).const_data_ptr<int32_t>(),
      std::get<3>(plan).const_data_ptr<int32_t>(), grid, channels, kStride, pixel_of, out);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// The layout of lanes for this many channels: body(Q, R) as compile-time integers.
template <typename F>
void dispatch_lanes(int64_t channels, bool wide, const F& body) {
  using One = std::integral_constant<int, 1>;
  using Zero = std::integral_constant<int, 0>;
  if (!wide || channels % 4)
    body(Zero{}, std::integral_constant<int, 4>{});
  else if (channels % 80 == 0)
    body(One{}, One{});
  else
    body(One{}, Zero{});
}

template <typename D, typename T, bool LIFT>
void splat(const D* depth, const T* rows, const Plan& plan, const SplatGrid& grid, int64_t channels, int64_t pixels, int64_t bins, T* out) {
  if (grid.tiles() == 0 || channels == 0) return;
  dispatch_lanes(channels, aligned(rows, 4 * sizeof(T)), [&](auto quads, auto singles) {
    launch_splat<D, T, decltype(quads)::value, decltype(singles)::value, LIFT>(depth, rows, plan, grid, channels, pixels, bins, out);
  });
}

// (B, N, C, H, W) -> (B, N, H, W, C); a tensor that already lies so in memory is used as it is.
template <typename T>
at::Tensor pixels_last(const at::Tensor& context) {
  const at::Tensor view = context.permute({0, 1, 3, 4, 2});
  if (view.is_contiguous() || context.numel() == 0) return view.contiguous();
  const int64_t channels = context.size(2), pixels = context.size(3) * context.size(4);
  // A slice of channels (the depth net's output) is read in place.
  const bool in_place = context.stride(4) == 1 && context.stride(3) == context.size(4) &&
                        (context.size(0) == 1 || context.stride(0) == context.size(1) * context.stride(1));
  const at::Tensor from = in_place ? context : context.contiguous();
  at::Tensor out = at::empty(view.sizes(), context.options());
  transpose<T>(from.const_data_ptr<T>(), out.data_ptr<T>(), context.size(0) * context.size(1), channels, pixels, from.stride(1), from.stride(2));
  return out;
}

// Calls body with a null pointer of the depth's type: that of the context, or float beside half precision (as autocast leaves them).
template <typename T, typename F>
void dispatch_depth(const at::Tensor& depth, const F& body) {
  if (depth.scalar_type() == c10::CppTypeToScalarType<T>::value) return body(static_cast<T*>(nullptr));
  TORCH_CHECK(depth.scalar_type() == at::kFloat && sizeof(T) == 2,
              "mmdet3d_ext::lift_splat: 'depth' must have the type of 'context', or be float32 beside half precision, got ",
              depth.scalar_type());
  if constexpr (sizeof(T) == 2) body(static_cast<float*>(nullptr));
}

at::Tensor lift_splat_cuda(const at::Tensor& depth, const at::Tensor& context, const at::Tensor& cell, const at::Tensor& order,
                           const at::Tensor& sorted_key, const at::Tensor& tile_starts, at::IntArrayRef cells) {
  check_lift(depth, context, "lift_splat");
  const c10::cuda::CUDAGuard guard(depth.device());
  const int64_t batch = depth.size(0), bins = depth.size(2), channels = context.size(2), pixels = depth.size(3) * depth.size(4);
  const SplatGrid grid = SplatGrid::from(cells, batch, "lift_splat");
  check_plan(cell, order, sorted_key, tile_starts, depth.numel(), grid, depth.device(), "lift_splat");
  at::Tensor out = at::empty({batch, channels * grid.nz, grid.nx, grid.ny}, context.options());
  const at::Tensor weights = depth.contiguous();
  const Plan plan{cell, order, sorted_key, tile_starts};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, context.scalar_type(), "lift_splat", [&] {
    const at::Tensor rows = pixels_last<scalar_t>(context);
    dispatch_depth<scalar_t>(weights, [&](auto* type) {
      using depth_t = std::remove_pointer_t<decltype(type)>;
      splat<depth_t, scalar_t, true>(weights.const_data_ptr<depth_t>(), rows.const_data_ptr<scalar_t>(), plan, grid, channels, pixels, bins,
                                     out.data_ptr<scalar_t>());
    });
  });
  return out;
}

at::Tensor bev_pool_cuda(const at::Tensor& feats, const at::Tensor& cell, const at::Tensor& order, const at::Tensor& sorted_key,
                         const at::Tensor& tile_starts, int64_t batch, at::IntArrayRef cells) {
  check_pool_feats(feats);
  const c10::cuda::CUDAGuard guard(feats.device());
  const SplatGrid grid = SplatGrid::from(cells, batch, "bev_pool");
  check_plan(cell, order, sorted_key, tile_starts, feats.size(0), grid, feats.device(), "bev_pool");
  const at::Tensor rows = feats.contiguous();
  at::Tensor out = at::empty({batch, rows.size(1) * grid.nz, grid.nx, grid.ny}, rows.options());
  const Plan plan{cell, order, sorted_key, tile_starts};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "bev_pool", [&] {
    splat<scalar_t, scalar_t, false>(nullptr, rows.const_data_ptr<scalar_t>(), plan, grid, rows.size(1), 1, 1, out.data_ptr<scalar_t>());
  });
  return out;
}

// ---- backward

constexpr int kPixels = 4;   // pixels of one column per half-warp
constexpr int kDepths = 16;  // depth bins staged at a time
constexpr int64_t kGroupBytes = 48ll << 20;  // transposed gradient of the samples of one launch
constexpr int kAhead = 2;    // depth bins whose gradients are read before they are used

// Sums v[0..3] over 16 lanes: lane 4 * j (and the three after it) returns the sum of v[j]. Five shuffles instead of sixteen.
template <typename A>
__device__ __forceinline__ A reduce4(A (&v)[kPixels], int lane) {
  const bool upper = lane & 8, odd = lane & 4;
  A send0 = upper ? v[0] : v[2], send1 = upper ? v[1] : v[3];
  A keep0 = (upper ? v[2] : v[0]) + __shfl_xor_sync(kAll, send0, 8);
  A keep1 = (upper ? v[3] : v[1]) + __shfl_xor_sync(kAll, send1, 8);
  A sum = (odd ? keep1 : keep0) + __shfl_xor_sync(kAll, odd ? keep0 : keep1, 4);
  sum += __shfl_xor_sync(kAll, sum, 2);
  return sum + __shfl_xor_sync(kAll, sum, 1);
}

// grads: (nz * nx * ny, C) of the samples of this launch. Block: kShares columns x kPixels rows of one camera of one sample.
template <typename D, typename T, int Q, int R>
__global__ void __launch_bounds__(kBlock)
    lift_backward_kernel(const T* __restrict__ grads, const D* __restrict__ depth, const T* __restrict__ rows,
                         const int32_t* __restrict__ cell, int32_t cell0, int bins, int height, int width, int64_t channels,
                         at::opmath_type<T>* __restrict__ grad_depth, T* __restrict__ grad_rows) {
  using A = at::opmath_type<T>;
  using L = Lanes<Q, R>;
  __shared__ int32_t cells[kDepths][kPixels][kShares];
  __shared__ A weights[kDepths][kPixels][kShares];
  __shared__ A dots[kDepths][kPixels][kShares];
  const int share = threadIdx.x / kHalf, lane = threadIdx.x % kHalf;
  const int w0 = blockIdx.x * kShares, h0 = blockIdx.y * kPixels;
  const int64_t camera = blockIdx.z, image = camera * height * width;
  const int column = w0 + share;

  for (int64_t channel0 = 0; channel0 < channels; channel0 += L::kWidth) {
    const int pass = static_cast<int>(min(static_cast<int64_t>(L::kWidth), channels - channel0));
    A row[kPixels][L::kCount], row_grad[kPixels][L::kCount];
#pragma unroll
    for (int j = 0; j < kPixels; ++j) {
      T from[L::kCount];
#pragma unroll
      for (int v = 0; v < L::kCount; ++v) from[v] = static_cast<T>(0.0f);
      if (column < width && h0 + j < height)
        L::read(rows + (image + (h0 + j) * width + column) * channels + channel0, lane, pass, from);
#pragma unroll
      for (int v = 0; v < L::kCount; ++v) {
        row[j][v] = static_cast<A>(from[v]);
        row_grad[j][v] = A(0);
      }
    }
    for (int d0 = 0; d0 < bins; d0 += kDepths) {
      __syncthreads();
      for (int i = threadIdx.x; i < kDepths * kPixels * kShares; i += kBlock) {
        const int d = d0 + i / (kPixels * kShares), j = i / kShares % kPixels, w = i % kShares;
        int32_t at = -1;
        A weight = A(0);
        if (d < bins && h0 + j < height && w0 + w < width) {
          const int64_t p = ((camera * bins + d) * height + h0 + j) * width + w0 + w;
          at = cell[p];
          if (at >= 0) at -= cell0;
          weight = static_cast<A>(depth[p]);
        }
        (&cells[0][0][0])[i] = at;
        (&weights[0][0][0])[i] = weight;
      }
      __syncthreads();
      // Bins past the last are outside every cell: no bound to test.
      for (int d = 0; d < kDepths; d += kAhead) {
        T first[kAhead][L::kCount];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
#pragma unroll
          for (int v = 0; v < L::kCount; ++v) first[a][v] = static_cast<T>(0.0f);
          const int32_t at = cells[d + a][0][share];
          if (at >= 0) L::read(grads + at * channels + channel0, lane, pass, first[a]);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          A dot[kPixels], grad[L::kCount];
          int32_t current = cells[d + a][0][share];
#pragma unroll
          for (int v = 0; v < L::kCount; ++v) grad[v] = static_cast<A>(first[a][v]);
#pragma unroll
          for (int j = 0; j < kPixels; ++j) {
            const int32_t at = cells[d + a][j][share];
            dot[j] = A(0);
            if (at < 0) continue;
            if (j && at != current) {
              current = at;
              T from[L::kCount];
#pragma unroll
              for (int v = 0; v < L::kCount; ++v) from[v] = static_cast<T>(0.0f);
              L::read(grads + at * channels + channel0, lane, pass, from);
#pragma unroll
              for (int v = 0; v < L::kCount; ++v) grad[v] = static_cast<A>(from[v]);
            }
            const A weight = weights[d + a][j][share];
#pragma unroll
            for (int v = 0; v < L::kCount; ++v) {
              dot[j] += grad[v] * row[j][v];
              row_grad[j][v] += weight * grad[v];
            }
          }
          __syncwarp();
          const A total = reduce4(dot, lane);
          if (lane % 4 == 0) dots[d + a][lane / 4][share] = total;
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < kDepths * kPixels * kShares; i += kBlock) {
        const int d = d0 + i / (kPixels * kShares), j = i / kShares % kPixels, w = i % kShares;
        if (d < bins && h0 + j < height && w0 + w < width) {
          const int64_t p = ((camera * bins + d) * height + h0 + j) * width + w0 + w;
          const A total = (&dots[0][0][0])[i];
          grad_depth[p] = channel0 ? grad_depth[p] + total : total;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kPixels; ++j) {
      if (column >= width || h0 + j >= height) continue;
      T to[L::kCount];
#pragma unroll
      for (int v = 0; v < L::kCount; ++v) to[v] = static_cast<T>(row_grad[j][v]);
      L::write(grad_rows + (image + (h0 + j) * width + column) * channels + channel0, lane, pass, to);
    }
  }
}

// Gradient of the cells with channels last, (nz * nx * ny, C), of `samples` samples; `scratch` is used where it must be written.
template <typename T>
const T* cells_last(const at::Tensor& grad, int64_t sample, int64_t samples, at::IntArrayRef cells, bool in_place, at::Tensor& scratch) {
  const int64_t channels = grad.size(1) / cells[2], area = cells[0] * cells[1];
  const T* from = grad.const_data_ptr<T>() + sample * grad.stride(0);
  if (in_place) return from;
  transpose<T>(from, scratch.data_ptr<T>(), samples * cells[2], channels, area, channels * area, area);
  return scratch.const_data_ptr<T>();
}

bool channels_last(const at::Tensor& grad, at::IntArrayRef cells) {
  return cells[2] == 1 && grad.permute({0, 2, 3, 1}).is_contiguous();
}

std::tuple<at::Tensor, at::Tensor> lift_splat_backward_cuda(const at::Tensor& grad, const at::Tensor& depth, const at::Tensor& context,
                                                            const at::Tensor& cell, at::IntArrayRef cells) {
  check_lift(depth, context, "lift_splat_backward");
  check_splat_grad(grad, cell, cells, "lift_splat_backward");
  check_lift_grad(grad, depth, context, cell, cells);
  const c10::cuda::CUDAGuard guard(depth.device());
  const int64_t batch = depth.size(0), cameras = depth.size(1), bins = depth.size(2), height = depth.size(3), width = depth.size(4);
  const int64_t channels = context.size(2), area = cells[0] * cells[1] * cells[2];
  TORCH_CHECK(batch * cameras < 65536 && height < 65536 * kPixels, "mmdet3d_ext::lift_splat_backward: at most 65,535 images and ",
              65535 * kPixels, " rows, got ", depth.sizes());
  at::Tensor grad_depth = at::empty(depth.sizes(), depth.options().dtype(at::toOpMathType(context.scalar_type())));
  at::Tensor grad_rows = at::empty({batch, cameras, height, width, channels}, context.options());
  if (depth.numel() == 0 || channels == 0) {
    grad_depth.zero_();
    grad_rows.zero_();
  } else {
    const bool in_place = channels_last(grad, cells);
    const at::Tensor upstream = in_place ? grad : grad.contiguous();
    const at::Tensor weights = depth.contiguous();
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, context.scalar_type(), "lift_splat_backward", [&] {
      using A = at::opmath_type<scalar_t>;
      const at::Tensor rows = pixels_last<scalar_t>(context);
      // A few samples at a time: their transposed gradient takes less memory, and more of it stays in the L2 cache.
      const int64_t group = std::min<int64_t>(batch, std::max<int64_t>(1, kGroupBytes / std::max<int64_t>(1, area * channels * sizeof(scalar_t))));
      at::Tensor scratch = at::empty({in_place ? 0 : group * area * channels}, grad.options());
      dispatch_depth<scalar_t>(weights, [&](auto* type) {
        using depth_t = std::remove_pointer_t<decltype(type)>;
        for (int64_t b = 0; b < batch; b += group) {
          const int64_t samples = std::min(group, batch - b);
          const scalar_t* grads = cells_last<scalar_t>(upstream, b, samples, cells, in_place, scratch);
          const int64_t points = b * cameras * bins * height * width, pixels = b * cameras * height * width;
          const dim3 grid(blocks(width, kShares), blocks(height, kPixels), static_cast<unsigned int>(samples * cameras));
          const bool wide = aligned(grads, 4 * sizeof(scalar_t)) && aligned(rows.const_data_ptr(), 4 * sizeof(scalar_t));
          dispatch_lanes(channels, wide, [&](auto quads, auto singles) {
            lift_backward_kernel<depth_t, scalar_t, decltype(quads)::value, decltype(singles)::value>
                <<<grid, kBlock, 0, at::cuda::getCurrentCUDAStream()>>>(
                    grads, weights.const_data_ptr<depth_t>() + points, rows.const_data_ptr<scalar_t>() + pixels * channels,
                    cell.const_data_ptr<int32_t>() + points, static_cast<int32_t>(b * area), static_cast<int>(bins), static_cast<int>(height),
                    static_cast<int>(width), channels, grad_depth.data_ptr<A>() + points,
                    grad_rows.data_ptr<scalar_t>() + pixels * channels);
            C10_CUDA_KERNEL_LAUNCH_CHECK();
          });
        }
      });
    });
  }
  return {grad_depth.to(depth.scalar_type()), grad_rows.permute({0, 1, 4, 2, 3})};
}

template <typename T>
__global__ void gather_kernel(const T* __restrict__ grads, const int32_t* __restrict__ cell, int64_t count, int64_t channels, int64_t cells,
                              T* __restrict__ out) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (p >= count) return;
  const int64_t at = cell[p];
  const bool inside = at >= 0 && at < cells;
  for (int64_t c = threadIdx.x; c < channels; c += blockDim.x) out[p * channels + c] = inside ? grads[at * channels + c] : static_cast<T>(0.0f);
}

at::Tensor bev_pool_backward_cuda(const at::Tensor& grad, const at::Tensor& cell, at::IntArrayRef cells) {
  check_splat_grad(grad, cell, cells, "bev_pool_backward");
  const c10::cuda::CUDAGuard guard(grad.device());
  const int64_t count = cell.size(0), channels = grad.size(1) / cells[2], area = cells[0] * cells[1];
  at::Tensor out = at::empty({count, channels}, grad.options());
  if (out.numel() == 0) return out;
  const bool in_place = channels_last(grad, cells);
  const at::Tensor upstream = in_place ? grad : grad.contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "bev_pool_backward", [&] {
    at::Tensor last = in_place ? upstream : at::empty({grad.numel()}, grad.options());
    if (!in_place)
      transpose<scalar_t>(upstream.const_data_ptr<scalar_t>(), last.data_ptr<scalar_t>(), grad.size(0) * cells[2], channels, area,
                          channels * area, area);
    const dim3 threads(32, kThreads / 32);
    gather_kernel<scalar_t><<<blocks(count, threads.y), threads, 0, at::cuda::getCurrentCUDAStream()>>>(
        last.const_data_ptr<scalar_t>(), cell.const_data_ptr<int32_t>(), count, channels, grad.size(0) * cells[2] * area,
        out.data_ptr<scalar_t>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(mmdet3d_ext, CUDA, m) {
  m.impl("splat_plan", &splat_plan_cuda);
  m.impl("splat_plan_from_coords", &splat_plan_from_coords_cuda);
  m.impl("lift_splat", &lift_splat_cuda);
  m.impl("lift_splat_backward", &lift_splat_backward_cuda);
  m.impl("bev_pool", &bev_pool_cuda);
  m.impl("bev_pool_backward", &bev_pool_backward_cuda);
}

}  // namespace mmdet3d_ext
