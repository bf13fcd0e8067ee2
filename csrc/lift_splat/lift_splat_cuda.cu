// Lift-splat pooling on a GPU, never forming depth x context. Letters: see lift_splat.h.
//
// Half a warp works on one point at a time: its 16 lanes hold the channels (80 channels are five a lane, none idle). A block adds up one
// tile of cells. Its points stand together in the plan's order; they are dealt evenly to the block's half-warps whatever their cells. The
// tile's cells share most of their pixels, whose contexts stay in L1. Nothing is atomic but a bit mask.
#include <ATen/Dispatch.h>
#include <ATen/cuda/detail/IntegerDivider.cuh>
#include <torch/library.h>

#include "common/cuda_utils.cuh"
#include "lift_splat/image_inputs.cuh"
#include "lift_splat/lanes.cuh"
#include "lift_splat/lift_splat.h"

namespace mmdet3d_ext {
namespace {

constexpr int kStagedStride = kHalf + 1;  // in points: the two halves of a warp read different banks

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

template <typename D, typename T, bool LIFT>
void splat(const D* depth, const T* rows, const Plan& plan, const SplatGrid& grid, int64_t channels, int64_t pixels, int64_t bins, T* out) {
  if (grid.tiles() == 0 || channels == 0) return;
  dispatch_lanes(channels, aligned(rows, 4 * sizeof(T)), [&](auto quads, auto singles) {
    launch_splat<D, T, decltype(quads)::value, decltype(singles)::value, LIFT>(depth, rows, plan, grid, channels, pixels, bins, out);
  });
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

}  // namespace

TORCH_LIBRARY_IMPL(mmdet3d_ext, CUDA, m) {
  m.impl("lift_splat", &lift_splat_cuda);
  m.impl("bev_pool", &bev_pool_cuda);
}

}  // namespace mmdet3d_ext
