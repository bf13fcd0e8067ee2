// Points to voxels on the CPU. Letters: P points, F columns of a point, V voxels, M max_num_points.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstring>
#include <numeric>
#include <tuple>
#include <vector>

#include "common/cpu_grouping.h"
#include "voxelize/voxelize.h"

namespace mmdet3d_ext {
namespace {

at::Tensor voxel_coords_cpu(const at::Tensor& points, at::ArrayRef<double> lower, at::ArrayRef<double> step,
                            at::IntArrayRef cells) {
  check_points(points, "voxel_coords");
  const Grid grid = Grid::from(lower, step, cells, "voxel_coords");
  const at::Tensor rows = points.contiguous();
  const int64_t count = rows.size(0), columns = rows.size(1);
  at::Tensor coords = at::empty({count, 3}, rows.options().dtype(at::kInt));
  int32_t* out = coords.data_ptr<int32_t>();
  AT_DISPATCH_FLOATING_TYPES(rows.scalar_type(), "voxel_coords", [&] {
    const scalar_t* in = rows.const_data_ptr<scalar_t>();
    at::parallel_for(0, count, 8192, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const scalar_t* point = in + p * columns;
        int32_t* cell = out + p * 3;
        if (!grid.locate(static_cast<float>(point[0]), static_cast<float>(point[1]), static_cast<float>(point[2]), false, cell))
          cell[0] = cell[1] = cell[2] = -1;
      }
    });
  });
  return coords;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> hard_voxelize_cpu(const at::Tensor& points, at::ArrayRef<double> lower,
                                                                 at::ArrayRef<double> step, at::IntArrayRef cells,
                                                                 int64_t max_num_points, int64_t max_voxels) {
  check_hard_limits(max_num_points, max_voxels);
  const Grid grid = Grid::from(lower, step, cells, "hard_voxelize");
  const at::Tensor coords = voxel_coords_cpu(points, lower, step, cells);
  const at::Tensor rows = points.contiguous();
  const int64_t count = rows.size(0), columns = rows.size(1);
  const int32_t* cell = coords.const_data_ptr<int32_t>();

  std::vector<uint64_t> keys(count);
  at::parallel_for(0, count, 8192, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int32_t* at = cell + 3 * p;
      keys[p] = at[0] < 0 ? kDroppedKey : grid.linear(at);
    }
  });
  const DistinctKeys distinct(keys.data(), count);

  // A voxel's number is how many voxels have an earlier first point.
  std::vector<int32_t> number(count, 0);
  for (const auto& list : distinct.entries)
    for (const auto& entry : list) number[entry.first] = 1;
  std::exclusive_scan(number.begin(), number.end(), number.begin(), 0);
  int64_t voxel_count = 0;
  for (const auto& list : distinct.entries) voxel_count += static_cast<int64_t>(list.size());
  if (max_voxels >= 0) voxel_count = std::min(voxel_count, max_voxels);

  at::Tensor voxels = at::zeros({voxel_count, max_num_points, columns}, rows.options());
  at::Tensor voxel_coords = at::empty({voxel_count, 3}, coords.options());
  at::Tensor num_points = at::empty({voxel_count}, coords.options());
  const size_t row_bytes = columns * rows.element_size();
  const char* in = static_cast<const char*>(rows.const_data_ptr());
  char* out = static_cast<char*>(voxels.data_ptr());
  int32_t* out_coords = voxel_coords.data_ptr<int32_t>();
  int32_t* out_counts = num_points.data_ptr<int32_t>();
  at::parallel_for(0, count, 8192, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      if (distinct.entry_of[p] < 0) continue;
      const auto& entry = distinct.entries[distinct.part_of(keys[p])][distinct.entry_of[p]];
      const int64_t voxel = number[entry.first];
      if (voxel >= voxel_count) continue;
      if (distinct.nth[p] == 0) {
        std::memcpy(out_coords + 3 * voxel, cell + 3 * p, 3 * sizeof(int32_t));
        out_counts[voxel] = static_cast<int32_t>(std::min<int64_t>(entry.count, max_num_points));
      }
      if (distinct.nth[p] < max_num_points)
        std::memcpy(out + (voxel * max_num_points + distinct.nth[p]) * row_bytes, in + p * row_bytes, row_bytes);
    }
  });
  return {voxels, voxel_coords, num_points};
}

}  // namespace

TORCH_LIBRARY_IMPL(mmdet3d_ext, CPU, m) {
  m.impl("voxel_coords", &voxel_coords_cpu);
  m.impl("hard_voxelize", &hard_voxelize_cpu);
}

}  // namespace mmdet3d_ext
