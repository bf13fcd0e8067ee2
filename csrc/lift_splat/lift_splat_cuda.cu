// Lift-splat pooling on a GPU, never forming depth x context. Letters: see lift_splat.h.
//
// Forward: a block adds up one tile of cells. Its points stand together in the sorted order; they are dealt evenly to the block's warps
// whatever their cells, each lane holding a few channels. The tile's cells share most of their pixels, whose contexts stay in L1.
// Backward: a warp owns a few pixels of one image column and walks along their rays. Pixels above each other see the same cell at the
// same depth (the height is pooled away), so one read of the cell's gradient serves them all. Nothing is atomic.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <type_traits>

#include "common/cuda_utils.cuh"
#include "lift_splat/lift_splat.h"

namespace mmdet3d_ext {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr unsigned int kAll = 0xffffffffu;

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
  require_covered(geometry.device());
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
  require_covered(coords.device());
  const SplatGrid grid = SplatGrid::from(cells, batch, "splat_plan_from_coords");
  const at::Tensor rows = coords.contiguous();
  const int64_t count = rows.size(0);
  return make_plan(rows, count, grid, [&](cudaStream_t stream, int32_t dropped, int32_t* cell, int32_t* key, int32_t* index) {
    coords_kernel<<<blocks(count), kThreads, 0, stream>>>(rows.const_data_ptr<int64_t>(), count, grid, dropped, cell, key, index);
  });
}

// ---- forward

// Shared memory of a block, in floats of the accumulation type A: sums[kTileCells][stride], edges[kWarps][width], then the staged points.
struct SplatShape {
  int64_t channels;
  int width;   // channels of one pass: 32 lanes x VEC, at most `channels` rounded up to VEC
  int stride;  // odd, so that reading one channel of consecutive cells touches different banks
};

template <typename A>
struct alignas(16) Staged {
  A weight;
  int32_t row, cell;
};

template <typename D, typename T, int VEC, bool LIFT>
__global__ void __launch_bounds__(kThreads)
    splat_kernel(const D* __restrict__ depth, const T* __restrict__ rows, const int32_t* __restrict__ order,
                 const int32_t* __restrict__ sorted_key, const int32_t* __restrict__ tile_starts, SplatGrid grid, SplatShape shape,
                 uint32_t pixels, uint32_t bin_pixels, T* __restrict__ out) {
  using A = at::opmath_type<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  A* sums = reinterpret_cast<A*>(memory);
  A* edges = sums + kTileCells * shape.stride;
  Staged<A>* staged = reinterpret_cast<Staged<A>*>(edges + kWarps * shape.width);
  __shared__ int32_t edge_cell[kWarps];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t channel0 = static_cast<int64_t>(blockIdx.y) * shape.width;
  const int width = static_cast<int>(min(static_cast<int64_t>(shape.width), shape.channels - channel0));
  const int32_t begin = tile_starts[blockIdx.x], end = tile_starts[blockIdx.x + 1];

  for (int i = threadIdx.x; i < kTileCells * shape.stride; i += kThreads) sums[i] = A(0);
  if (lane == 0) edge_cell[warp] = -1;
  __syncthreads();

  // This warp's share. A cell that began in an earlier share goes to `edges`; all others belong to the warp in which they begin.
  const int32_t share = (end - begin + kWarps - 1) / kWarps;
  const int32_t first = min(begin + warp * share, end), last = min(first + share, end);
  int32_t cell = -1, before = -1;
  bool continued = false;
  if (first > begin && first < last) {
    before = sorted_key[first - 1] % kTileCells;
    continued = sorted_key[first] % kTileCells == before;
    if (continued) {
      cell = before;
      if (lane == 0) edge_cell[warp] = cell;
    }
  }
  A sum[VEC];
#pragma unroll
  for (int v = 0; v < VEC; ++v) sum[v] = A(0);
  const bool active = lane * VEC < width;
  const T* lane_rows = rows + channel0 + lane * VEC;
  const auto flush = [&]() {
    if (cell >= 0 && active) {
      A* to = (continued ? edges + warp * shape.width : sums + cell * shape.stride) + lane * VEC;
#pragma unroll
      for (int v = 0; v < VEC; ++v) to[v] = sum[v];
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] = A(0);
  };
  Staged<A>* mine = staged + warp * 32;
  for (int32_t base = first; base < last; base += 32) {
    const int32_t i = base + lane;
    int32_t here = -1;
    __syncwarp();
    if (i < last) {
      here = sorted_key[i] % kTileCells;
      const uint32_t p = static_cast<uint32_t>(order[i]);
      mine[lane] = LIFT ? Staged<A>{static_cast<A>(depth[p]), static_cast<int32_t>(p / bin_pixels * pixels + p % pixels), here}
                        : Staged<A>{A(1), static_cast<int32_t>(p), here};
    }
    int32_t previous = __shfl_up_sync(kAll, here, 1);
    if (lane == 0) previous = before;
    const unsigned int heads = __ballot_sync(kAll, i < last && here != previous);
    before = __shfl_sync(kAll, here, 31);
    __syncwarp();
    const int points = min(32, last - base);
    constexpr int kUnroll = 8;
    for (int j = 0; j < points; j += kUnroll) {
      Vec<T, VEC> row[kUnroll];
      A weight[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (j + u < points) {
          const Staged<A> point = mine[j + u];
          weight[u] = point.weight;
          if (active) row[u] = load<T, VEC>(lane_rows + point.row * shape.channels);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (j + u < points) {
          if (heads >> (j + u) & 1u) {
            flush();
            continued = false;
            cell = mine[j + u].cell;
          }
          if (active) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += weight[u] * static_cast<A>(row[u].at[v]);
          }
        }
      }
    }
  }
  flush();
  __syncthreads();
  // What later shares added to a cell, in their order.
  for (int c = threadIdx.x; c < width; c += kThreads)
    for (int w = 1; w < kWarps; ++w)
      if (edge_cell[w] >= 0) sums[edge_cell[w] * shape.stride + c] += edges[w * shape.width + c];
  __syncthreads();

  const int64_t slab = blockIdx.x / grid.tiles_y / grid.tiles_x;  // b * nz + z
  const int x0 = blockIdx.x / grid.tiles_y % grid.tiles_x * kTileX, y0 = blockIdx.x % grid.tiles_y * kTileY;
  for (int i = threadIdx.x; i < width * kTileCells; i += kThreads) {
    const int c = i / kTileCells, at = i % kTileCells, x = x0 + at / kTileY, y = y0 + at % kTileY;
    if (x < grid.nx && y < grid.ny)
      out[((slab * shape.channels + channel0 + c) * grid.nx + x) * grid.ny + y] = static_cast<T>(sums[at * shape.stride + c]);
  }
}

template <typename D, typename T, int VEC, bool LIFT>
void launch_splat(const D* depth, const T* rows, const Plan& plan, const SplatGrid& grid, int64_t channels, int64_t pixels, int64_t bins,
                  T* out) {
  using A = at::opmath_type<T>;
  SplatShape shape;
  shape.channels = channels;
  shape.width = static_cast<int>(std::min<int64_t>(32 * VEC, channels));
  shape.stride = shape.width | 1;
  const size_t accumulators = (static_cast<size_t>(kTileCells) * shape.stride + kWarps * shape.width) * sizeof(A);
  const size_t padded = (accumulators + 15) / 16 * 16;
  // `staged` follows the accumulators directly; its alignment is that of A, which they keep.
  const size_t shared = padded + kThreads * sizeof(Staged<A>);
  const dim3 tiles(static_cast<unsigned int>(grid.tiles()), blocks(channels, shape.width));
  const auto kernel = &splat_kernel<D, T, VEC, LIFT>;
  if (shared > 48 * 1024) C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  kernel<<<tiles, kThreads, shared, at::cuda::getCurrentCUDAStream()>>>(
      depth, rows, std::get<1>(plan).const_data_ptr<int32_t>(), std::get<2>(plan).const_data_ptr<int32_t>(),
      std::get<3>(plan).const_data_ptr<int32_t>(), grid, shape, static_cast<uint32_t>(pixels), static_cast<uint32_t>(bins * pixels), out);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename D, typename T, bool LIFT>
void splat(const D* depth, const T* rows, const Plan& plan, const SplatGrid& grid, int64_t channels, int64_t pixels, int64_t bins, T* out) {
  if (grid.tiles() == 0 || channels == 0) return;
  if (channels % 4 == 0 && aligned(rows, 4 * sizeof(T)))
    launch_splat<D, T, 4, LIFT>(depth, rows, plan, grid, channels, pixels, bins, out);
  else
    launch_splat<D, T, 1, LIFT>(depth, rows, plan, grid, channels, pixels, bins, out);
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
  require_covered(depth.device());
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
  require_covered(feats.device());
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

constexpr int kPixels = 8;   // pixels of one column per warp
constexpr int kDepths = 16;  // depth bins staged at a time

// Sums v[0..7] over the warp; lane 4 * j (and the three after it) returns the sum of v[j]. Nine shuffles instead of forty.
template <typename A>
__device__ __forceinline__ A reduce8(A (&v)[kPixels], int lane) {
#pragma unroll
  for (int half = 4, bit = 16; half; half /= 2, bit /= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k < half) {
        const A send = upper ? v[k] : v[k + half], keep = upper ? v[k + half] : v[k];
        v[k] = keep + __shfl_xor_sync(kAll, send, bit);
      }
    }
  }
  v[0] += __shfl_xor_sync(kAll, v[0], 2);
  return v[0] + __shfl_xor_sync(kAll, v[0], 1);
}

// One sample. grads: (nz * nx * ny, C). Block: kWarps columns x kPixels rows of one camera.
template <typename D, typename T, int VEC>
__global__ void __launch_bounds__(kThreads, sizeof(at::opmath_type<T>) == 4 ? 2 : 1)
    lift_backward_kernel(const T* __restrict__ grads, const D* __restrict__ depth, const T* __restrict__ rows,
                         const int32_t* __restrict__ cell, int32_t cell0, int bins, int height, int width, int64_t channels,
                         at::opmath_type<T>* __restrict__ grad_depth, T* __restrict__ grad_rows) {
  using A = at::opmath_type<T>;
  __shared__ int32_t cells[kDepths][kPixels][kWarps];
  __shared__ A weights[kDepths][kPixels][kWarps];
  __shared__ A dots[kDepths][kPixels][kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int w0 = blockIdx.x * kWarps, h0 = blockIdx.y * kPixels, camera = blockIdx.z;
  const int64_t image = static_cast<int64_t>(camera) * height * width;
  const int column = w0 + warp;

  for (int64_t channel0 = 0; channel0 < channels; channel0 += 32 * VEC) {
    const bool active = channel0 + lane * VEC < channels;
    A row[kPixels][VEC], row_grad[kPixels][VEC];
#pragma unroll
    for (int j = 0; j < kPixels; ++j) {
      Vec<T, VEC> from;
      const bool read = active && column < width && h0 + j < height;
      if (read) from = load<T, VEC>(rows + (image + (h0 + j) * width + column) * channels + channel0 + lane * VEC);
#pragma unroll
      for (int v = 0; v < VEC; ++v) {
        row[j][v] = read ? static_cast<A>(from.at[v]) : A(0);
        row_grad[j][v] = A(0);
      }
    }
    for (int d0 = 0; d0 < bins; d0 += kDepths) {
      __syncthreads();
      for (int i = threadIdx.x; i < kDepths * kPixels * kWarps; i += kThreads) {
        const int d = d0 + i / (kPixels * kWarps), j = i / kWarps % kPixels, w = i % kWarps;
        int32_t at = -1;
        A weight = A(0);
        if (d < bins && h0 + j < height && w0 + w < width) {
          const int64_t p = ((static_cast<int64_t>(camera) * bins + d) * height + h0 + j) * width + w0 + w;
          at = cell[p];
          if (at >= 0) at -= cell0;
          weight = static_cast<A>(depth[p]);
        }
        (&cells[0][0][0])[i] = at;
        (&weights[0][0][0])[i] = weight;
      }
      __syncthreads();
      for (int d = 0; d < min(kDepths, bins - d0); ++d) {
        A dot[kPixels], grad[VEC];
        int32_t current = -1;
#pragma unroll
        for (int j = 0; j < kPixels; ++j) {
          const int32_t at = cells[d][j][warp];
          dot[j] = A(0);
          if (at < 0) continue;  // uniform in the warp
          if (at != current) {
            current = at;
            Vec<T, VEC> from;
            if (active) from = load<T, VEC>(grads + at * channels + channel0 + lane * VEC);
#pragma unroll
            for (int v = 0; v < VEC; ++v) grad[v] = active ? static_cast<A>(from.at[v]) : A(0);
          }
          const A weight = weights[d][j][warp];
#pragma unroll
          for (int v = 0; v < VEC; ++v) {
            dot[j] += grad[v] * row[j][v];
            row_grad[j][v] += weight * grad[v];
          }
        }
        const A total = reduce8(dot, lane);
        if (lane % 4 == 0) dots[d][lane / 4][warp] = total;
      }
      __syncthreads();
      for (int i = threadIdx.x; i < kDepths * kPixels * kWarps; i += kThreads) {
        const int d = d0 + i / (kPixels * kWarps), j = i / kWarps % kPixels, w = i % kWarps;
        if (d < bins && h0 + j < height && w0 + w < width) {
          const int64_t p = ((static_cast<int64_t>(camera) * bins + d) * height + h0 + j) * width + w0 + w;
          const A total = (&dots[0][0][0])[i];
          grad_depth[p] = channel0 ? grad_depth[p] + total : total;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kPixels; ++j) {
      if (!active || column >= width || h0 + j >= height) continue;
      Vec<T, VEC> to;
#pragma unroll
      for (int v = 0; v < VEC; ++v) to.at[v] = static_cast<T>(row_grad[j][v]);
      store<T, VEC>(grad_rows + (image + (h0 + j) * width + column) * channels + channel0 + lane * VEC, to);
    }
  }
}

// Gradient of the cells with channels last, (nz * nx * ny, C), of one sample; `scratch` is used where it must be written.
template <typename T>
const T* cells_last(const at::Tensor& grad, int64_t sample, at::IntArrayRef cells, bool in_place, at::Tensor& scratch) {
  const int64_t channels = grad.size(1) / cells[2], area = cells[0] * cells[1];
  if (in_place) return grad.const_data_ptr<T>() + sample * grad.stride(0);
  transpose<T>(grad.const_data_ptr<T>() + sample * grad.stride(0), scratch.data_ptr<T>(), cells[2], channels, area, channels * area, area);
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
  require_covered(depth.device());
  const int64_t batch = depth.size(0), cameras = depth.size(1), bins = depth.size(2), height = depth.size(3), width = depth.size(4);
  const int64_t channels = context.size(2), area = cells[0] * cells[1] * cells[2];
  TORCH_CHECK(cameras < 65536 && height < 65536 * kPixels, "mmdet3d_ext::lift_splat_backward: at most 65,535 cameras and ",
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
      // One sample at a time: its transposed gradient stays in the L2 cache, and a quarter of the memory does for a batch of four.
      at::Tensor scratch = at::empty({in_place ? 0 : area * channels}, grad.options());
      dispatch_depth<scalar_t>(weights, [&](auto* type) {
        using depth_t = std::remove_pointer_t<decltype(type)>;
        for (int64_t b = 0; b < batch; ++b) {
          const scalar_t* grads = cells_last<scalar_t>(upstream, b, cells, in_place, scratch);
          const int64_t points = b * cameras * bins * height * width, pixels = b * cameras * height * width;
          const dim3 grid(blocks(width, kWarps), blocks(height, kPixels), static_cast<unsigned int>(cameras));
          const auto launch = [&](auto kernel) {
            kernel<<<grid, kThreads, 0, at::cuda::getCurrentCUDAStream()>>>(
                grads, weights.const_data_ptr<depth_t>() + points, rows.const_data_ptr<scalar_t>() + pixels * channels,
                cell.const_data_ptr<int32_t>() + points, static_cast<int32_t>(b * area), static_cast<int>(bins), static_cast<int>(height),
                static_cast<int>(width), channels, grad_depth.data_ptr<A>() + points, grad_rows.data_ptr<scalar_t>() + pixels * channels);
            C10_CUDA_KERNEL_LAUNCH_CHECK();
          };
          if (channels % 4 == 0 && aligned(grads, 4 * sizeof(scalar_t)) && aligned(rows.const_data_ptr(), 4 * sizeof(scalar_t)))
            launch(&lift_backward_kernel<depth_t, scalar_t, 4>);
          else
            launch(&lift_backward_kernel<depth_t, scalar_t, 1>);
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
  require_covered(grad.device());
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
