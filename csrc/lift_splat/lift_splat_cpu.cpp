// Lift-splat pooling on the CPU, never forming depth x context. Letters: see lift_splat.h.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <vector>

#include "common/cpu_grouping.h"
#include "lift_splat/lift_splat.h"

namespace mmdet3d_ext {
namespace {

// From key (P, or grid.keys() if dropped) to the order by tile.
Plan sort_by_tile(const at::Tensor& cell, const std::vector<int32_t>& key, const SplatGrid& grid) {
  const int64_t count = cell.size(0);
  at::Tensor order = at::empty({count}, cell.options()), sorted_key = at::empty({count}, cell.options());
  at::Tensor tile_starts = at::empty({grid.tiles() + 1}, cell.options());
  std::vector<int32_t> starts(grid.keys() + 1);
  int32_t* point = order.data_ptr<int32_t>();
  int32_t* sorted = sorted_key.data_ptr<int32_t>();
  counting_sort(key.data(), count, grid.keys(), point, starts.data());
  at::parallel_for(0, count, 16384, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sorted[i] = key[point[i]];
  });
  int32_t* tile_start = tile_starts.data_ptr<int32_t>();
  for (int64_t tile = 0; tile <= grid.tiles(); ++tile) tile_start[tile] = starts[tile * kTileCells];
  return {cell, order, sorted_key, tile_starts};
}

Plan splat_plan_cpu(const at::Tensor& geometry, at::ArrayRef<double> lower, at::ArrayRef<double> step, at::IntArrayRef cells,
                    bool truncate) {
  check_geometry(geometry);
  const Grid bounds = Grid::from(lower, step, cells, "splat_plan");
  const int64_t batch = geometry.size(0);
  const SplatGrid grid = SplatGrid::from(cells, batch, "splat_plan");
  const at::Tensor points = geometry.contiguous();
  const int64_t count = points.numel() / 3, per_sample = batch ? count / batch : 1;
  at::Tensor cell = at::empty({count}, points.options().dtype(at::kInt));
  std::vector<int32_t> key(count);
  int32_t* out = cell.data_ptr<int32_t>();
  const float* in = points.const_data_ptr<float>();
  at::parallel_for(0, count, 8192, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      int32_t at[3];
      const bool inside = bounds.locate(in[3 * p], in[3 * p + 1], in[3 * p + 2], truncate, at);
      const int32_t b = static_cast<int32_t>(p / per_sample);
      out[p] = inside ? grid.cell(b, at[0], at[1], at[2]) : -1;
      key[p] = inside ? grid.key(b, at[0], at[1], at[2]) : static_cast<int32_t>(grid.keys());
    }
  });
  return sort_by_tile(cell, key, grid);
}

Plan splat_plan_from_coords_cpu(const at::Tensor& coords, int64_t batch, at::IntArrayRef cells) {
  check_pool_coords(coords);
  const SplatGrid grid = SplatGrid::from(cells, batch, "splat_plan_from_coords");
  const at::Tensor rows = coords.contiguous();
  const int64_t count = rows.size(0);
  at::Tensor cell = at::empty({count}, rows.options().dtype(at::kInt));
  std::vector<int32_t> key(count);
  int32_t* out = cell.data_ptr<int32_t>();
  const int64_t* in = rows.const_data_ptr<int64_t>();
  at::parallel_for(0, count, 8192, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t x = in[4 * p], y = in[4 * p + 1], z = in[4 * p + 2], b = in[4 * p + 3];
      const bool inside = x >= 0 && x < grid.nx && y >= 0 && y < grid.ny && z >= 0 && z < grid.nz && b >= 0 && b < batch;
      out[p] = inside ? grid.cell(b, x, y, z) : -1;
      key[p] = inside ? grid.key(b, x, y, z) : static_cast<int32_t>(grid.keys());
    }
  });
  return sort_by_tile(cell, key, grid);
}

// rows (pixels or points, C) channels-last; depth null: every point is its own row with weight 1.
template <typename depth_t, typename acc_t, typename out_t>
void splat(const depth_t* depth, const acc_t* rows, const Plan& plan, const SplatGrid& grid, int64_t channels, int64_t bins, int64_t pixels,
           out_t* out) {
  const int32_t* order = std::get<1>(plan).const_data_ptr<int32_t>();
  const int32_t* sorted = std::get<2>(plan).const_data_ptr<int32_t>();
  const int32_t* starts = std::get<3>(plan).const_data_ptr<int32_t>();
  at::parallel_for(0, grid.tiles(), 8, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> sums(kTileCells * channels);
    for (int64_t tile = begin; tile < end; ++tile) {
      std::fill(sums.begin(), sums.end(), acc_t(0));
      for (int64_t i = starts[tile]; i < starts[tile + 1]; ++i) {
        const int64_t p = order[i];
        const acc_t weight = depth ? static_cast<acc_t>(depth[p]) : acc_t(1);
        const acc_t* row = rows + (depth ? p / (bins * pixels) * pixels + p % pixels : p) * channels;
        acc_t* sum = sums.data() + (sorted[i] % kTileCells) * channels;
        for (int64_t c = 0; c < channels; ++c) sum[c] += weight * row[c];
      }
      const int64_t tile_y = tile % grid.tiles_y, slab = tile / grid.tiles_y / grid.tiles_x, tile_x = tile / grid.tiles_y % grid.tiles_x;
      const int64_t x0 = tile_x * kTileX, y0 = tile_y * kTileY;
      const int64_t width = std::min<int64_t>(kTileY, grid.ny - y0), height = std::min<int64_t>(kTileX, grid.nx - x0);
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t plane = slab * channels + c;  // slab = b * nz + z
        for (int64_t x = 0; x < height; ++x) {
          out_t* line = out + (plane * grid.nx + x0 + x) * grid.ny + y0;
          for (int64_t y = 0; y < width; ++y) line[y] = static_cast<out_t>(sums[(x * kTileY + y) * channels + c]);
        }
      }
    }
  });
}

// (B, N, C, H, W) -> (B*N*H*W, C) in the accumulation type.
template <typename acc_t>
at::Tensor pixels_last(const at::Tensor& context) {
  return context.to(c10::CppTypeToScalarType<acc_t>::value).permute({0, 1, 3, 4, 2}).contiguous();
}

// (B, C * nz, nx, ny) -> (B * nz * nx * ny, C) in the accumulation type.
template <typename acc_t>
at::Tensor cells_last(const at::Tensor& grad, at::IntArrayRef cells) {
  const int64_t channels = grad.size(1) / cells[2];
  return grad.to(c10::CppTypeToScalarType<acc_t>::value)
      .reshape({grad.size(0), cells[2], channels, cells[0], cells[1]})
      .permute({0, 1, 3, 4, 2})
      .contiguous();
}

at::Tensor lift_splat_cpu(const at::Tensor& depth, const at::Tensor& context, const at::Tensor& cell, const at::Tensor& order,
                          const at::Tensor& sorted_key, const at::Tensor& tile_starts, at::IntArrayRef cells) {
  check_lift(depth, context, "lift_splat");
  const int64_t batch = depth.size(0), bins = depth.size(2), channels = context.size(2), pixels = depth.size(3) * depth.size(4);
  const SplatGrid grid = SplatGrid::from(cells, batch, "lift_splat");
  check_plan(cell, order, sorted_key, tile_starts, depth.numel(), grid, depth.device(), "lift_splat");
  at::Tensor out = at::empty({batch, channels * grid.nz, grid.nx, grid.ny}, context.options());
  const Plan plan{cell, order, sorted_key, tile_starts};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, context.scalar_type(), "lift_splat", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const at::Tensor weights = depth.to(c10::CppTypeToScalarType<acc_t>::value).contiguous(), rows = pixels_last<acc_t>(context);
    splat<acc_t, acc_t, scalar_t>(weights.const_data_ptr<acc_t>(), rows.const_data_ptr<acc_t>(), plan, grid, channels, bins, pixels,
                                  out.data_ptr<scalar_t>());
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> lift_splat_backward_cpu(const at::Tensor& grad, const at::Tensor& depth, const at::Tensor& context,
                                                           const at::Tensor& cell, at::IntArrayRef cells) {
  check_lift(depth, context, "lift_splat_backward");
  check_splat_grad(grad, cell, cells, "lift_splat_backward");
  check_lift_grad(grad, depth, context, cell, cells);
  const int64_t bins = depth.size(2), channels = context.size(2), pixels = depth.size(3) * depth.size(4);
  const int64_t images = depth.size(0) * depth.size(1);
  at::Tensor grad_depth = at::empty(depth.sizes(), depth.options());
  at::Tensor grad_context;
  const int32_t* at = cell.const_data_ptr<int32_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, context.scalar_type(), "lift_splat_backward", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const at::Tensor weights = depth.to(c10::CppTypeToScalarType<acc_t>::value).contiguous();
    const at::Tensor rows = pixels_last<acc_t>(context), grads = cells_last<acc_t>(grad, cells);
    at::Tensor row_grads = at::zeros_like(rows), weight_grads = at::zeros_like(weights);
    const acc_t* weight = weights.const_data_ptr<acc_t>();
    const acc_t* row = rows.const_data_ptr<acc_t>();
    const acc_t* upstream = grads.const_data_ptr<acc_t>();
    acc_t* weight_grad = weight_grads.data_ptr<acc_t>();
    acc_t* row_grad = row_grads.data_ptr<acc_t>();
    at::parallel_for(0, images * pixels, 16, [&](int64_t begin, int64_t end) {
      for (int64_t pixel = begin; pixel < end; ++pixel) {
        const acc_t* values = row + pixel * channels;
        acc_t* result = row_grad + pixel * channels;
        for (int64_t d = 0; d < bins; ++d) {
          const int64_t p = (pixel / pixels * bins + d) * pixels + pixel % pixels;
          if (at[p] < 0) continue;
          const acc_t* from = upstream + static_cast<int64_t>(at[p]) * channels;
          acc_t dot = 0;
          for (int64_t c = 0; c < channels; ++c) {
            dot += from[c] * values[c];
            result[c] += weight[p] * from[c];
          }
          weight_grad[p] = dot;
        }
      }
    });
    grad_depth.copy_(weight_grads);
    grad_context = row_grads.permute({0, 1, 4, 2, 3}).to(context.scalar_type());
  });
  return {grad_depth, grad_context};
}

at::Tensor bev_pool_cpu(const at::Tensor& feats, const at::Tensor& cell, const at::Tensor& order, const at::Tensor& sorted_key,
                        const at::Tensor& tile_starts, int64_t batch, at::IntArrayRef cells) {
  check_pool_feats(feats);
  const SplatGrid grid = SplatGrid::from(cells, batch, "bev_pool");
  check_plan(cell, order, sorted_key, tile_starts, feats.size(0), grid, feats.device(), "bev_pool");
  const int64_t channels = feats.size(1);
  at::Tensor out = at::empty({batch, channels * grid.nz, grid.nx, grid.ny}, feats.options());
  const Plan plan{cell, order, sorted_key, tile_starts};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, feats.scalar_type(), "bev_pool", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const at::Tensor rows = feats.to(c10::CppTypeToScalarType<acc_t>::value).contiguous();
    splat<acc_t, acc_t, scalar_t>(nullptr, rows.const_data_ptr<acc_t>(), plan, grid, channels, 1, 1, out.data_ptr<scalar_t>());
  });
  return out;
}

at::Tensor bev_pool_backward_cpu(const at::Tensor& grad, const at::Tensor& cell, at::IntArrayRef cells) {
  check_splat_grad(grad, cell, cells, "bev_pool_backward");
  const int64_t count = cell.size(0), channels = grad.size(1) / cells[2], cell_count = grad.size(0) * cells[0] * cells[1] * cells[2];
  at::Tensor out = at::empty({count, channels}, grad.options());
  const int32_t* at = cell.const_data_ptr<int32_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "bev_pool_backward", [&] {
    const at::Tensor rows = cells_last<scalar_t>(grad, cells);
    const scalar_t* in = rows.const_data_ptr<scalar_t>();
    scalar_t* result = out.data_ptr<scalar_t>();
    at::parallel_for(0, count, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        if (at[p] >= 0 && at[p] < cell_count)
          std::copy_n(in + static_cast<int64_t>(at[p]) * channels, channels, result + p * channels);
        else
          std::fill_n(result + p * channels, channels, scalar_t(0));
      }
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(mmdet3d_ext, CPU, m) {
  m.impl("splat_plan", &splat_plan_cpu);
  m.impl("splat_plan_from_coords", &splat_plan_from_coords_cpu);
  m.impl("lift_splat", &lift_splat_cpu);
  m.impl("lift_splat_backward", &lift_splat_backward_cpu);
  m.impl("bev_pool", &bev_pool_cpu);
  m.impl("bev_pool_backward", &bev_pool_backward_cpu);
}

}  // namespace mmdet3d_ext
