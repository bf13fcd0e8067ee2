// What the CPU and CUDA kernels of group normalisation share.
// Letters: B samples, C channels, S cells of a map, G groups of C / G channels each.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "common/grid.h"

namespace mmdet3d_ext {

// The order in memory that the kernels read x (B, C, ...) in: channels-last if it is that and not contiguous, else contiguous.
// The fake kernels in mmdet3d_ext/ops/group_norm.py say the same.
inline at::MemoryFormat norm_format(const at::Tensor& x) {
  if (!x.is_contiguous()) {
    if (x.dim() == 4 && x.is_contiguous(at::MemoryFormat::ChannelsLast)) return at::MemoryFormat::ChannelsLast;
    if (x.dim() == 5 && x.is_contiguous(at::MemoryFormat::ChannelsLast3d)) return at::MemoryFormat::ChannelsLast3d;
  }
  return at::MemoryFormat::Contiguous;
}

// Sizes, and how the cells of every map are divided: chunk k of `chunks` holds cells [k * length, min(S, (k + 1) * length)).
struct NormShape {
  int64_t samples, channels, groups, cells;
  bool rows;  // channels-last: a row of C values per cell
  int64_t chunks = 1, length = 0;

  static NormShape of(const at::Tensor& x, int64_t groups, at::MemoryFormat format) {
    NormShape shape{x.size(0), x.size(1), groups, 1, format != at::MemoryFormat::Contiguous};
    for (int64_t d = 2; d < x.dim(); ++d) shape.cells *= x.size(d);
    shape.length = shape.cells;
    return shape;
  }

  // About `count` chunks, each of at least `least` cells and, but for the last, of a multiple of `step`.
  void divide(int64_t count, int64_t least, int64_t step) {
    length = std::max((cells + std::max<int64_t>(count, 1) - 1) / std::max<int64_t>(count, 1), least);
    length = (length + step - 1) / step * step;
    chunks = (cells + length - 1) / length;
  }

  MMDET3D_EXT_HD int64_t width() const { return channels / groups; }
  MMDET3D_EXT_HD double members() const { return static_cast<double>(width()) * static_cast<double>(cells); }  // values of a group
};

// Number, mean and sum of squared deviations of some values: two of them make that of both without cancellation (Chan, Golub, LeVeque).
template <typename A>
struct Moments {
  A n, mean, m2;

  // The share of `more` values beside those here.
  MMDET3D_EXT_HD A share(A more) const { return more > 0 ? more / (n + more) : A(0); }

  MMDET3D_EXT_HD void add(const Moments& other, A share) {
    const A delta = other.mean - mean;
    m2 += other.m2 + delta * (n * share * delta);  // in this order 0 for n = 0, however large delta is
    mean += share * delta;
    n += other.n;
  }
  MMDET3D_EXT_HD void add(const Moments& other) { add(other, share(other.n)); }
};

// The sums that a channel of a sample adds to the derivatives: of g, and of g * (x - mean), g being the gradient after the ReLU.
template <typename A>
struct Sums {
  A grad, moment;

  MMDET3D_EXT_HD void add(const Sums& other) {
    grad += other.grad;
    moment += other.moment;
  }
};

// One channel's norm. Forward and backward call the same arithmetic, so both see the same sign.
template <typename A>
struct Affine {
  A mean, scale, bias;  // scale = rstd * weight

  MMDET3D_EXT_HD A operator()(A x) const {
#ifdef __CUDA_ARCH__
    return fma(x - mean, scale, bias);
#else
    return (x - mean) * scale + bias;
#endif
  }
};

// As torch's ReLU: NaN stays, and lets the gradient pass.
template <typename A>
MMDET3D_EXT_HD bool cut(A y, bool relu) {
  return relu & (y <= 0);  // not &&: no branch in vector code
}

// With N values in a group, A = sum w g and M = sum w g (x - mean) over it:
// dx = rstd w g - rstd^3 M / N (x - mean) - rstd A / N.
template <typename A>
struct GroupSlope {
  A slope, shift;  // dx = scale g + slope (x - mean) + shift

  MMDET3D_EXT_HD static GroupSlope of(A grad, A moment, A rstd, A members) {
    return {-rstd * rstd * rstd * (moment / members), -rstd * (grad / members)};
  }
};

template <typename A>
MMDET3D_EXT_HD A reciprocal_deviation(const Moments<A>& all, A eps) {
  return A(1) / std::sqrt(all.m2 / all.n + eps);
}

inline void check_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, int64_t groups, const char* op) {
  TORCH_CHECK(x.dim() >= 2, "mmdet3d_ext::", op, ": 'x' must be (B, C, ...), got ", x.sizes());
  const at::ScalarType type = x.scalar_type();
  TORCH_CHECK(type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble, "mmdet3d_ext::", op,
              ": 'x' must be float16, bfloat16, float32 or float64, got ", type);
  TORCH_CHECK(groups >= 1 && x.size(1) % groups == 0, "mmdet3d_ext::", op, ": 'groups' must divide the channels (", x.size(1), "), got ",
              groups);
  const at::ScalarType work = type == at::kDouble ? at::kDouble : at::kFloat;
  for (const at::Tensor* part : {&weight, &bias})
    TORCH_CHECK(part->dim() == 1 && part->size(0) == x.size(1) && part->scalar_type() == work && part->device() == x.device(),
                "mmdet3d_ext::", op, ": 'weight' and 'bias' must be (", x.size(1), ",) ", work, " on ", x.device(), ", got ", part->sizes(),
                " ", part->scalar_type(), " on ", part->device());
}

inline void check_norm_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& mean, const at::Tensor& rstd,
                                const at::Tensor& weight, const at::Tensor& bias, int64_t groups) {
  const char* op = "group_norm_relu_backward";
  check_norm(x, weight, bias, groups, op);
  TORCH_CHECK(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type() && grad.device() == x.device(), "mmdet3d_ext::", op,
              ": 'grad' must be like 'x' ", x.sizes(), " ", x.scalar_type(), ", got ", grad.sizes(), " ", grad.scalar_type(), " on ",
              grad.device());
  for (const at::Tensor* part : {&mean, &rstd})
    TORCH_CHECK(part->dim() == 2 && part->size(0) == x.size(0) && part->size(1) == groups && part->is_contiguous() &&
                    part->scalar_type() == weight.scalar_type() && part->device() == x.device(),
                "mmdet3d_ext::", op, ": 'mean' and 'rstd' must be contiguous (", x.size(0), ", ", groups, ") ", weight.scalar_type(), ", got ",
                part->sizes(), " ", part->scalar_type());
}

}  // namespace mmdet3d_ext
