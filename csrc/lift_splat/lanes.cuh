// How half a warp holds the channels of one point: shared by the pooling kernels, forward and backward.
#pragma once

#include <type_traits>

#include "common/cuda_utils.cuh"

namespace mmdet3d_ext {

constexpr unsigned int kAll = 0xffffffffu;  // mask of a whole warp
constexpr int kHalf = 16;                // lanes that share a point
constexpr int kBlock = 128;              // threads of a block, forward and backward
constexpr int kShares = kBlock / kHalf;  // half-warps of a block

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

}  // namespace mmdet3d_ext
