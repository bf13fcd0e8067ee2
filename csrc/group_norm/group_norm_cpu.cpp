// Group normalisation and ReLU on the CPU. Letters: see group_norm.h.
//
// Contiguous maps are worked on channel by channel, channels-last maps by chunks of cells, all channels of a cell side by side; what is
// found per sample, chunk and channel is then put together per group. Chunks do not depend on the number of threads.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "group_norm/group_norm.h"

namespace mmdet3d_ext {
namespace {

constexpr int64_t kBlock = 512;  // values taken at a time
constexpr int64_t kLanes = 16;   // sums side by side, for vector units

template <typename A, typename F>
A sum_of(int64_t n, const F& value) {
  A lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t k = 0; k < kLanes; ++k) lane[k] += value(i + k);
  for (; i < n; ++i) lane[0] += value(i);
  A sum = 0;
  for (int64_t k = 0; k < kLanes; ++k) sum += lane[k];
  return sum;
}

// Calls body(sample, chunk, first, cells) for every chunk of cells of every sample.
template <typename F>
void for_each_chunk(const NormShape& shape, const F& body) {
  at::parallel_for(0, shape.samples * shape.chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t chunk = task % shape.chunks, first = chunk * shape.length;
      body(task / shape.chunks, chunk, first, std::min(shape.length, shape.cells - first));
    }
  });
}

// Calls body(plane) for every channel of every sample.
template <typename F>
void for_each_plane(const NormShape& shape, const F& body) {
  at::parallel_for(0, shape.samples * shape.channels, std::max<int64_t>(1, 32768 / shape.cells), [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) body(plane);
  });
}

template <typename T, typename A>
Moments<A> plane_moments(const T* x, int64_t count) {
  Moments<A> all{};
  A value[kBlock];
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t n = std::min(kBlock, count - first);
    for (int64_t i = 0; i < n; ++i) value[i] = static_cast<A>(x[first + i]);
    const A mean = sum_of<A>(n, [&](int64_t i) { return value[i]; }) / n;
    all.add({static_cast<A>(n), mean, sum_of<A>(n, [&](int64_t i) { return (value[i] - mean) * (value[i] - mean); })});
  }
  return all;
}

// Moments of every channel over `cells` rows.
template <typename T, typename A>
void row_moments(const T* x, int64_t cells, int64_t channels, Moments<A>* all) {
  const int64_t step = std::max<int64_t>(1, 16384 / channels);
  std::vector<A> value(step * channels), mean(channels), m2(channels);
  for (int64_t first = 0; first < cells; first += step) {
    const int64_t rows = std::min(step, cells - first);
    for (int64_t i = 0; i < rows * channels; ++i) value[i] = static_cast<A>(x[first * channels + i]);
    std::fill(mean.begin(), mean.end(), A(0));
    std::fill(m2.begin(), m2.end(), A(0));
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < channels; ++c) mean[c] += value[r * channels + c];
    for (int64_t c = 0; c < channels; ++c) mean[c] /= rows;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < channels; ++c) m2[c] += (value[r * channels + c] - mean[c]) * (value[r * channels + c] - mean[c]);
    for (int64_t c = 0; c < channels; ++c) all[c].add({static_cast<A>(rows), mean[c], m2[c]});
  }
}

// The norm of every (sample, channel).
template <typename A>
std::vector<Affine<A>> affine_of(const NormShape& shape, const A* mean, const A* rstd, const A* weight, const A* bias) {
  std::vector<Affine<A>> affine(shape.samples * shape.channels);
  for (int64_t b = 0; b < shape.samples; ++b)
    for (int64_t c = 0; c < shape.channels; ++c) {
      const int64_t g = b * shape.groups + c / shape.width();
      affine[b * shape.channels + c] = {mean[g], rstd[g] * weight[c], bias[c]};
    }
  return affine;
}

NormShape divided(const at::Tensor& x, int64_t groups, at::MemoryFormat format) {
  NormShape shape = NormShape::of(x, groups, format);
  if (shape.rows) shape.divide(64, 64, 1);
  return shape;
}

template <typename T>
void forward(const NormShape& shape, const T* x, const at::Tensor& weight, const at::Tensor& bias, double eps, bool relu, at::Tensor& mean,
             at::Tensor& rstd, T* out) {
  using A = at::opmath_type<T>;
  const int64_t channels = shape.channels;
  std::vector<Moments<A>> moments(shape.samples * shape.chunks * channels);
  if (shape.rows)
    for_each_chunk(shape, [&](int64_t b, int64_t k, int64_t first, int64_t cells) {
      row_moments<T, A>(x + (b * shape.cells + first) * channels, cells, channels, moments.data() + (b * shape.chunks + k) * channels);
    });
  else
    for_each_plane(shape, [&](int64_t plane) { moments[plane] = plane_moments<T, A>(x + plane * shape.cells, shape.cells); });
  A* means = mean.data_ptr<A>();
  A* rstds = rstd.data_ptr<A>();
  for (int64_t i = 0; i < shape.samples * shape.groups; ++i) {
    const int64_t b = i / shape.groups, g = i % shape.groups;
    Moments<A> all{};
    for (int64_t c = g * shape.width(); c < (g + 1) * shape.width(); ++c)
      for (int64_t k = 0; k < shape.chunks; ++k) all.add(moments[(b * shape.chunks + k) * channels + c]);
    means[i] = all.mean;
    rstds[i] = reciprocal_deviation(all, static_cast<A>(eps));
  }
  const auto affine = affine_of<A>(shape, means, rstds, weight.const_data_ptr<A>(), bias.const_data_ptr<A>());
  const auto one = [relu](T value, const Affine<A>& norm) {
    const A y = norm(static_cast<A>(value));
    return static_cast<T>(cut(y, relu) ? A(0) : y);
  };
  if (shape.rows)
    for_each_chunk(shape, [&](int64_t b, int64_t, int64_t first, int64_t cells) {
      const int64_t start = (b * shape.cells + first) * channels;
      const Affine<A>* norm = affine.data() + b * channels;
      for (int64_t r = 0; r < cells; ++r)
        for (int64_t c = 0; c < channels; ++c) out[start + r * channels + c] = one(x[start + r * channels + c], norm[c]);
    });
  else
    for_each_plane(shape, [&](int64_t plane) {
      const Affine<A> norm = affine[plane];
      for (int64_t i = plane * shape.cells; i < (plane + 1) * shape.cells; ++i) out[i] = one(x[i], norm);
    });
}

template <typename T, typename A>
Sums<A> plane_sums(const T* grad, const T* x, int64_t count, const Affine<A>& norm, bool relu) {
  Sums<A> all{};
  A value[kBlock], through[kBlock];
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t n = std::min(kBlock, count - first);
    for (int64_t i = 0; i < n; ++i) {
      const A from = static_cast<A>(grad[first + i]);  // read in any case: no branch in vector code
      value[i] = static_cast<A>(x[first + i]);
      through[i] = cut(norm(value[i]), relu) ? A(0) : from;
    }
    all.add({sum_of<A>(n, [&](int64_t i) { return through[i]; }), sum_of<A>(n, [&](int64_t i) { return through[i] * (value[i] - norm.mean); })});
  }
  return all;
}

template <typename T, typename A>
void row_sums(const T* grad, const T* x, int64_t cells, int64_t channels, const Affine<A>* norm, bool relu, Sums<A>* all) {
  const int64_t step = 64;
  std::vector<Sums<A>> part(channels);
  for (int64_t first = 0; first < cells; first += step) {
    std::fill(part.begin(), part.end(), Sums<A>{});
    for (int64_t r = first; r < std::min(cells, first + step); ++r)
      for (int64_t c = 0; c < channels; ++c) {
        const A value = static_cast<A>(x[r * channels + c]), from = static_cast<A>(grad[r * channels + c]);
        const A through = cut(norm[c](value), relu) ? A(0) : from;
        part[c].add({through, through * (value - norm[c].mean)});
      }
    for (int64_t c = 0; c < channels; ++c) all[c].add(part[c]);
  }
}

template <typename T>
void backward(const NormShape& shape, const T* grad, const T* x, const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& weight,
              const at::Tensor& bias, bool relu, T* to_x, at::Tensor& to_weight, at::Tensor& to_bias) {
  using A = at::opmath_type<T>;
  const int64_t channels = shape.channels, width = shape.width();
  const A* rstds = rstd.const_data_ptr<A>();
  const A* weights = weight.const_data_ptr<A>();
  const auto affine = affine_of<A>(shape, mean.const_data_ptr<A>(), rstds, weights, bias.const_data_ptr<A>());
  std::vector<Sums<A>> sums(shape.samples * shape.chunks * channels);
  if (shape.rows)
    for_each_chunk(shape, [&](int64_t b, int64_t k, int64_t first, int64_t cells) {
      const int64_t start = (b * shape.cells + first) * channels;
      row_sums<T, A>(grad + start, x + start, cells, channels, affine.data() + b * channels, relu,
                     sums.data() + (b * shape.chunks + k) * channels);
    });
  else
    for_each_plane(shape, [&](int64_t plane) {
      sums[plane] = plane_sums<T, A>(grad + plane * shape.cells, x + plane * shape.cells, shape.cells, affine[plane], relu);
    });
  A* by_weight = to_weight.data_ptr<A>();
  A* by_bias = to_bias.data_ptr<A>();
  std::vector<GroupSlope<A>> slopes(shape.samples * channels);
  for (int64_t b = 0; b < shape.samples; ++b)
    for (int64_t g = 0; g < shape.groups; ++g) {
      const A factor = rstds[b * shape.groups + g];
      Sums<A> group{};
      for (int64_t c = g * width; c < (g + 1) * width; ++c) {
        Sums<A> own{};
        for (int64_t k = 0; k < shape.chunks; ++k) own.add(sums[(b * shape.chunks + k) * channels + c]);
        by_weight[c] += own.moment * factor;
        by_bias[c] += own.grad;
        group.add({own.grad * weights[c], own.moment * weights[c]});
      }
      const GroupSlope<A> slope = GroupSlope<A>::of(group.grad, group.moment, factor, static_cast<A>(shape.members()));
      std::fill_n(slopes.begin() + b * channels + g * width, width, slope);
    }
  const auto one = [relu](T g, T value, const Affine<A>& norm, const GroupSlope<A>& slope) {
    const A at = static_cast<A>(value), from = static_cast<A>(g);
    const A through = cut(norm(at), relu) ? A(0) : from;
    return static_cast<T>(norm.scale * through + (slope.slope * (at - norm.mean) + slope.shift));
  };
  if (shape.rows)
    for_each_chunk(shape, [&](int64_t b, int64_t, int64_t first, int64_t cells) {
      const int64_t start = (b * shape.cells + first) * channels;
      const Affine<A>* norm = affine.data() + b * channels;
      const GroupSlope<A>* slope = slopes.data() + b * channels;
      for (int64_t r = 0; r < cells; ++r)
        for (int64_t c = 0; c < channels; ++c) {
          const int64_t i = start + r * channels + c;
          to_x[i] = one(grad[i], x[i], norm[c], slope[c]);
        }
    });
  else
    for_each_plane(shape, [&](int64_t plane) {
      const Affine<A> norm = affine[plane];
      const GroupSlope<A> slope = slopes[plane];
      for (int64_t i = plane * shape.cells; i < (plane + 1) * shape.cells; ++i) to_x[i] = one(grad[i], x[i], norm, slope);
    });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_relu_cpu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                                                   int64_t groups, double eps, bool relu) {
  check_norm(x, weight, bias, groups, "group_norm_relu");
  const at::MemoryFormat format = norm_format(x);
  const at::Tensor in = x.contiguous(format), scale = weight.contiguous(), shift = bias.contiguous();
  at::Tensor out = at::empty_like(in, in.options(), format);
  at::Tensor mean = at::zeros({x.size(0), groups}, scale.options()), rstd = at::zeros_like(mean);
  if (x.numel() == 0) return {out, mean, rstd};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "group_norm_relu", [&] {
    forward<scalar_t>(divided(in, groups, format), in.const_data_ptr<scalar_t>(), scale, shift, eps, relu, mean, rstd,
                      out.data_ptr<scalar_t>());
  });
  return {out, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_relu_backward_cpu(const at::Tensor& grad, const at::Tensor& x,
                                                                            const at::Tensor& mean, const at::Tensor& rstd,
                                                                            const at::Tensor& weight, const at::Tensor& bias, int64_t groups,
                                                                            bool relu) {
  check_norm_backward(grad, x, mean, rstd, weight, bias, groups);
  const at::MemoryFormat format = norm_format(x);
  const at::Tensor in = x.contiguous(format), from = grad.contiguous(format), scale = weight.contiguous(), shift = bias.contiguous();
  at::Tensor to_x = at::empty_like(in, in.options(), format);
  at::Tensor to_weight = at::zeros_like(scale), to_bias = at::zeros_like(scale);
  if (x.numel() == 0) return {to_x, to_weight, to_bias};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "group_norm_relu_backward", [&] {
    backward<scalar_t>(divided(in, groups, format), from.const_data_ptr<scalar_t>(), in.const_data_ptr<scalar_t>(), mean, rstd, scale, shift,
                       relu, to_x.data_ptr<scalar_t>(), to_weight, to_bias);
  });
  return {to_x, to_weight, to_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(mmdet3d_ext, CPU, m) {
  m.impl("group_norm_relu", &group_norm_relu_cpu);
  m.impl("group_norm_relu_backward", &group_norm_relu_backward_cpu);
}

}  // namespace mmdet3d_ext
