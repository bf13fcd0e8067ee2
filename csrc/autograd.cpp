// Derivatives, registered in C++: a Python backward would hold up the autograd thread for longer than most kernels run.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "group_norm/group_norm.h"

namespace mmdet3d_ext {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The operator of this name with the signature F, looked up once.
template <typename F>
c10::TypedOperatorHandle<F> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}

// The gradient of the features, from what GroupReduce and PointToVoxel saved. Neither the features nor the result: what they hold is
// not needed again.
variable_list reduce_backward(AutogradContext* context, const Tensor& grad, size_t inputs) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t)>("mmdet3d_ext::group_reduce_backward");
  variable_list result(inputs);
  if (!grad.defined()) return result;
  const variable_list saved = context->get_saved_variables();
  result[0] = op.call(grad, saved[0], saved[1], saved[2], context->saved_data["reduce"].toInt());
  return result;
}

struct GroupReduce : torch::autograd::Function<GroupReduce> {
  static variable_list forward(AutogradContext* context, const Tensor& feats, const Tensor& point2voxel, const Tensor& counts,
                               const Tensor& order, const Tensor& starts, const Tensor& has_long, int64_t reduce) {
    static const auto op = find<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                           const Tensor&, int64_t)>("mmdet3d_ext::group_reduce");
    at::AutoDispatchBelowADInplaceOrView below;
    auto [out, arg] = op.call(feats, point2voxel, counts, order, starts, has_long, reduce);
    context->mark_non_differentiable({arg});
    context->set_materialize_grads(false);
    context->save_for_backward({point2voxel, counts, arg});
    context->saved_data["reduce"] = reduce;
    return {out, arg};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) { return reduce_backward(context, grads[0], 7); }
};

std::tuple<Tensor, Tensor> group_reduce_autograd(const Tensor& feats, const Tensor& point2voxel, const Tensor& counts, const Tensor& order,
                                                 const Tensor& starts, const Tensor& has_long, int64_t reduce) {
  const variable_list out = GroupReduce::apply(feats, point2voxel, counts, order, starts, has_long, reduce);
  return {out[0], out[1]};
}

struct PointToVoxel : torch::autograd::Function<PointToVoxel> {
  static variable_list forward(AutogradContext* context, const Tensor& feats, const Tensor& coords, int64_t reduce) {
    static const auto op = find<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, int64_t)>(
        "mmdet3d_ext::dynamic_point_to_voxel");
    at::AutoDispatchBelowADInplaceOrView below;
    auto [out, voxel_coords, point2voxel, counts, arg] = op.call(feats, coords, reduce);
    context->mark_non_differentiable({voxel_coords, point2voxel, counts, arg});
    context->set_materialize_grads(false);
    context->save_for_backward({point2voxel, counts, arg});
    context->saved_data["reduce"] = reduce;
    return {out, voxel_coords, point2voxel, counts, arg};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) { return reduce_backward(context, grads[0], 3); }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> dynamic_point_to_voxel_autograd(const Tensor& feats, const Tensor& coords,
                                                                                 int64_t reduce) {
  const variable_list out = PointToVoxel::apply(feats, coords, reduce);
  return {out[0], out[1], out[2], out[3], out[4]};
}

Tensor lift_splat(const Tensor& depth, const Tensor& context, const Tensor& cell, const Tensor& order, const Tensor& sorted_key,
                  const Tensor& tile_starts, at::IntArrayRef cells) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef)>(
          "mmdet3d_ext::lift_splat");
  return op.call(depth, context, cell, order, sorted_key, tile_starts, cells);
}

struct LiftSplat : torch::autograd::Function<LiftSplat> {
  static Tensor forward(AutogradContext* context, const Tensor& depth, const Tensor& features, const Tensor& cell, const Tensor& order,
                        const Tensor& sorted_key, const Tensor& tile_starts, std::vector<int64_t> cells) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({depth, features, cell});
    context->saved_data["cells"] = cells;
    return lift_splat(depth, features, cell, order, sorted_key, tile_starts, cells);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op =
        find<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef)>(
            "mmdet3d_ext::lift_splat_backward");
    const variable_list saved = context->get_saved_variables();
    const std::vector<int64_t> cells = context->saved_data["cells"].toIntVector();
    variable_list result(7);
    std::tie(result[0], result[1]) = op.call(grads[0], saved[0], saved[1], saved[2], cells);
    return result;
  }
};

Tensor lift_splat_autograd(const Tensor& depth, const Tensor& context, const Tensor& cell, const Tensor& order, const Tensor& sorted_key,
                           const Tensor& tile_starts, at::IntArrayRef cells) {
  return LiftSplat::apply(depth, context, cell, order, sorted_key, tile_starts, cells.vec());
}

Tensor bev_pool(const Tensor& feats, const Tensor& cell, const Tensor& order, const Tensor& sorted_key, const Tensor& tile_starts,
                int64_t batch, at::IntArrayRef cells) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, at::IntArrayRef)>("mmdet3d_ext::bev_pool");
  return op.call(feats, cell, order, sorted_key, tile_starts, batch, cells);
}

struct BevPool : torch::autograd::Function<BevPool> {
  static Tensor forward(AutogradContext* context, const Tensor& feats, const Tensor& cell, const Tensor& order, const Tensor& sorted_key,
                        const Tensor& tile_starts, int64_t batch, std::vector<int64_t> cells) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({cell});
    context->saved_data["cells"] = cells;
    return bev_pool(feats, cell, order, sorted_key, tile_starts, batch, cells);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op = find<Tensor(const Tensor&, const Tensor&, at::IntArrayRef)>("mmdet3d_ext::bev_pool_backward");
    const std::vector<int64_t> cells = context->saved_data["cells"].toIntVector();
    variable_list result(7);
    result[0] = op.call(grads[0], context->get_saved_variables()[0], cells);
    return result;
  }
};

Tensor bev_pool_autograd(const Tensor& feats, const Tensor& cell, const Tensor& order, const Tensor& sorted_key, const Tensor& tile_starts,
                         int64_t batch, at::IntArrayRef cells) {
  return BevPool::apply(feats, cell, order, sorted_key, tile_starts, batch, cells.vec());
}

using NormBackward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                        const Tensor&, int64_t, bool);

std::tuple<Tensor, Tensor, Tensor> group_norm_relu_backward(const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                                                            const Tensor& weight, const Tensor& bias, int64_t groups, bool relu) {
  static const auto op = find<NormBackward>("mmdet3d_ext::group_norm_relu_backward");
  return op.call(grad, x, mean, rstd, weight, bias, groups, relu);
}

struct GroupNormReLU : torch::autograd::Function<GroupNormReLU> {
  static variable_list forward(AutogradContext* context, const Tensor& input, const Tensor& weight, const Tensor& bias, int64_t groups,
                               double eps, bool relu) {
    static const auto op =
        find<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, int64_t, double, bool)>(
            "mmdet3d_ext::group_norm_relu");
    at::AutoDispatchBelowADInplaceOrView below;
    // Brought into the kernels' order here, so that what is kept for the backward pass is not brought into it again there.
    const Tensor x = input.contiguous(norm_format(input));
    auto [out, mean, rstd] = op.call(x, weight, bias, groups, eps, relu);
    context->mark_non_differentiable({mean, rstd});
    context->set_materialize_grads(false);
    context->save_for_backward({x, mean, rstd, weight, bias});
    context->saved_data["groups"] = groups;
    context->saved_data["relu"] = relu;
    return {out, mean, rstd};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list result(6);
    if (!grads[0].defined()) return result;
    const variable_list saved = context->get_saved_variables();
    std::tie(result[0], result[1], result[2]) =
        group_norm_relu_backward(grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], context->saved_data["groups"].toInt(),
                                 context->saved_data["relu"].toBool());
    return result;
  }
};

std::tuple<Tensor, Tensor, Tensor> group_norm_relu_autograd(const Tensor& x, const Tensor& weight, const Tensor& bias, int64_t groups,
                                                            double eps, bool relu) {
  const variable_list out = GroupNormReLU::apply(x, weight, bias, groups, eps, relu);
  return {out[0], out[1], out[2]};
}

// Recorded only under create_graph=True: a second derivative is an error there, not a silent zero.
struct GroupNormReLUBackward : torch::autograd::Function<GroupNormReLUBackward> {
  static variable_list forward(AutogradContext*, const Tensor& grad, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                               const Tensor& weight, const Tensor& bias, int64_t groups, bool relu) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [to_x, to_weight, to_bias] = group_norm_relu_backward(grad, x, mean, rstd, weight, bias, groups, relu);
    return {to_x, to_weight, to_bias};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false, "mmdet3d_ext::group_norm_relu: second derivatives are not implemented; use torch.nn.functional.group_norm and relu "
                       "where they are needed");
  }
};

std::tuple<Tensor, Tensor, Tensor> group_norm_relu_backward_autograd(const Tensor& grad, const Tensor& x, const Tensor& mean,
                                                                     const Tensor& rstd, const Tensor& weight, const Tensor& bias,
                                                                     int64_t groups, bool relu) {
  const variable_list out = GroupNormReLUBackward::apply(grad, x, mean, rstd, weight, bias, groups, relu);
  return {out[0], out[1], out[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(mmdet3d_ext, Autograd, m) {
  m.impl("group_reduce", &group_reduce_autograd);
  m.impl("dynamic_point_to_voxel", &dynamic_point_to_voxel_autograd);
  m.impl("lift_splat", &lift_splat_autograd);
  m.impl("bev_pool", &bev_pool_autograd);
  m.impl("group_norm_relu", &group_norm_relu_autograd);
  m.impl("group_norm_relu_backward", &group_norm_relu_backward_autograd);
}

}  // namespace mmdet3d_ext
