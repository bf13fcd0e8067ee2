// The images' depth and context as the pooling kernels read them.
#pragma once

#include <ATen/ATen.h>

#include "common/cuda_utils.cuh"

namespace mmdet3d_ext {

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

}  // namespace mmdet3d_ext
