// Gradients of lift-splat pooling on a GPU. Letters: see lift_splat.h.
//
// A half-warp owns a few pixels of one image column and walks along their rays. Pixels above each other see the same cell at the same
// depth (the height is pooled away), so one read of the cell's gradient serves them all. Nothing is atomic.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include "common/cuda_utils.cuh"
#include "lift_splat/image_inputs.cuh"
#include "lift_splat/lanes.cuh"
#include "lift_splat/lift_splat.h"

namespace mmdet3d_ext {
namespace {

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
  m.impl("lift_splat_backward", &lift_splat_backward_cuda);
  m.impl("bev_pool_backward", &bev_pool_backward_cuda);
}

}  // namespace mmdet3d_ext
