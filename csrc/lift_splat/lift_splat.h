// The ordering shared by the CPU and CUDA kernels of lift-splat pooling.
// Letters: B batch, N cameras, D depth bins, H x W pixels, C channels, P = B*N*D*H*W points, X Y Z cells.
#pragma once

#include <ATen/ATen.h>

#include <tuple>

#include "common/grid.h"

namespace mmdet3d_ext {

// Points are ordered by tile of kTileX x kTileY cells of one height bin, then by cell, then by their own index: a block of threads
// (or one CPU task) writes a tile, whose cells share most of their pixels.
constexpr int kTileX = 2, kTileY = 16, kTileCells = kTileX * kTileY;

struct SplatGrid {
  int32_t nx, ny, nz, batch;
  int32_t tiles_x, tiles_y;

  static SplatGrid from(c10::IntArrayRef cells, int64_t batch, const char* op) {
    TORCH_CHECK(cells.size() == 3, "mmdet3d_ext::", op, ": 'cells' must be (nx, ny, nz), got ", cells);
    TORCH_CHECK(batch >= 0 && batch < (int64_t(1) << 31), "mmdet3d_ext::", op, ": 'batch' must be at least 0, got ", batch);
    for (int64_t n : cells)
      TORCH_CHECK(n >= 1 && n < (int64_t(1) << 30), "mmdet3d_ext::", op, ": 'cells' must be between 1 and 2^30, got ", cells);
    SplatGrid grid;
    grid.nx = static_cast<int32_t>(cells[0]);
    grid.ny = static_cast<int32_t>(cells[1]);
    grid.nz = static_cast<int32_t>(cells[2]);
    grid.batch = static_cast<int32_t>(batch);
    grid.tiles_x = (grid.nx + kTileX - 1) / kTileX;
    grid.tiles_y = (grid.ny + kTileY - 1) / kTileY;
    TORCH_CHECK(static_cast<double>(grid.tiles_x) * grid.tiles_y * kTileCells * grid.nz * grid.batch < 2147483647.0, "mmdet3d_ext::", op,
                ": 'batch' x 'cells' must stay below 2^31 cells (in whole tiles of ", kTileX, " x ", kTileY, "), got ", batch, " x ",
                cells);
    return grid;
  }

  int64_t tiles() const { return static_cast<int64_t>(batch) * nz * tiles_x * tiles_y; }
  int64_t keys() const { return tiles() * kTileCells; }
  int64_t cells() const { return static_cast<int64_t>(batch) * nz * nx * ny; }

  // Position in (B, nz, nx, ny): how gradients are looked up.
  MMDET3D_EXT_HD int32_t cell(int32_t b, int32_t x, int32_t y, int32_t z) const { return ((b * nz + z) * nx + x) * ny + y; }
  // Position in the order of tiles: how points are sorted.
  MMDET3D_EXT_HD int32_t key(int32_t b, int32_t x, int32_t y, int32_t z) const {
    const int32_t tile = ((b * nz + z) * tiles_x + x / kTileX) * tiles_y + y / kTileY;
    return tile * kTileCells + (x % kTileX) * kTileY + y % kTileY;
  }
};

// cell, order, sorted_key, tile_starts: see csrc/library.cpp.
using Plan = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline void check_plan(const at::Tensor& cell, const at::Tensor& order, const at::Tensor& sorted_key, const at::Tensor& tile_starts,
                       int64_t points, const SplatGrid& grid, c10::Device device, const char* op) {
  for (const at::Tensor* part : {&cell, &order, &sorted_key, &tile_starts})
    TORCH_CHECK(part->dim() == 1 && part->scalar_type() == at::kInt && part->is_contiguous() && part->device() == device, "mmdet3d_ext::",
                op, ": the plan must be contiguous int32 on ", device, ", got ", part->scalar_type(), " on ", part->device());
  TORCH_CHECK(cell.size(0) == points && order.size(0) == points && sorted_key.size(0) == points, "mmdet3d_ext::", op,
              ": the plan was made for ", cell.size(0), " points, the inputs have ", points);
  TORCH_CHECK(tile_starts.size(0) == grid.tiles() + 1, "mmdet3d_ext::", op, ": the plan was made for ", tile_starts.size(0) - 1,
              " tiles, the grid has ", grid.tiles());
}

inline void check_lift(const at::Tensor& depth, const at::Tensor& context, const char* op) {
  TORCH_CHECK(depth.dim() == 5 && context.dim() == 5 && depth.size(0) == context.size(0) && depth.size(1) == context.size(1) &&
                  depth.size(3) == context.size(3) && depth.size(4) == context.size(4),
              "mmdet3d_ext::", op, ": 'depth' must be (B, N, D, H, W) and 'context' (B, N, C, H, W), got ", depth.sizes(), " and ",
              context.sizes());
  TORCH_CHECK(depth.device() == context.device(), "mmdet3d_ext::", op, ": 'depth' is on ", depth.device(), ", 'context' on ",
              context.device());
  TORCH_CHECK(at::isFloatingType(depth.scalar_type()) && at::isFloatingType(context.scalar_type()), "mmdet3d_ext::", op,
              ": 'depth' and 'context' must be floating, got ", depth.scalar_type(), " and ", context.scalar_type());
  TORCH_CHECK(depth.numel() < INT32_MAX, "mmdet3d_ext::", op, ": 'depth' may have at most 2^31 - 2 entries, got ", depth.numel());
}

inline void check_splat_grad(const at::Tensor& grad, const at::Tensor& cell, c10::IntArrayRef cells, const char* op) {
  TORCH_CHECK(cells.size() == 3, "mmdet3d_ext::", op, ": 'cells' must be (nx, ny, nz), got ", cells);
  TORCH_CHECK(grad.dim() == 4 && grad.size(1) % cells[2] == 0 && grad.size(2) == cells[0] && grad.size(3) == cells[1], "mmdet3d_ext::", op,
              ": 'grad' must be (B, C * nz, nx, ny) with (nx, ny, nz) = ", cells, ", got ", grad.sizes());
  TORCH_CHECK(cell.dim() == 1 && cell.scalar_type() == at::kInt && cell.is_contiguous() && cell.device() == grad.device(), "mmdet3d_ext::",
              op, ": 'cell' must be contiguous int32 on ", grad.device());
}

inline void check_lift_grad(const at::Tensor& grad, const at::Tensor& depth, const at::Tensor& context, const at::Tensor& cell,
                            c10::IntArrayRef cells) {
  TORCH_CHECK(grad.size(0) == depth.size(0) && grad.size(1) == context.size(2) * cells[2] && cell.size(0) == depth.numel() &&
                  grad.device() == depth.device() && grad.scalar_type() == context.scalar_type(),
              "mmdet3d_ext::lift_splat_backward: 'grad' ", grad.sizes(), " ", grad.scalar_type(), " and 'cell' ", cell.sizes(),
              " do not belong to 'depth' ", depth.sizes(), " and 'context' ", context.sizes(), " ", context.scalar_type());
}

inline void check_geometry(const at::Tensor& geometry) {
  TORCH_CHECK(geometry.dim() >= 2 && geometry.size(-1) == 3,
              "mmdet3d_ext::splat_plan: 'geometry' must be (B, ..., 3) metres, got ", geometry.sizes());
  TORCH_CHECK(geometry.scalar_type() == at::kFloat, "mmdet3d_ext::splat_plan: 'geometry' must be float32, got ", geometry.scalar_type());
  TORCH_CHECK(geometry.numel() / 3 < INT32_MAX, "mmdet3d_ext::splat_plan: 'geometry' may have at most 2^31 - 2 points, got ",
              geometry.numel() / 3);
}

inline void check_pool_coords(const at::Tensor& coords) {
  TORCH_CHECK(coords.dim() == 2 && coords.size(1) == 4 && coords.scalar_type() == at::kLong,
              "mmdet3d_ext::splat_plan_from_coords: 'coords' must be (P, 4) int64 (x, y, z, batch), got ", coords.sizes(), " ",
              coords.scalar_type());
  TORCH_CHECK(coords.size(0) < INT32_MAX, "mmdet3d_ext::splat_plan_from_coords: 'coords' may have at most 2^31 - 2 rows, got ",
              coords.size(0));
}

inline void check_pool_feats(const at::Tensor& feats) {
  TORCH_CHECK(feats.dim() == 2 && at::isFloatingType(feats.scalar_type()),
              "mmdet3d_ext::bev_pool: 'feats' must be (P, C) floating, got ", feats.sizes(), " ", feats.scalar_type());
}

}  // namespace mmdet3d_ext
