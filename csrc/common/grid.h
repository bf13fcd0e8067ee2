// The one place of csrc/ that turns metres into cells.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define MMDET3D_EXT_HD __host__ __device__ __forceinline__
#else
#define MMDET3D_EXT_HD inline
#endif

namespace mmdet3d_ext {

// Axis order x, y, z. Cells are floor((p - lower) / step), every step rounded to float32: the reference's arithmetic.
struct Grid {
  float lower[3];
  float step[3];
  int32_t cells[3];

  static Grid from(c10::ArrayRef<double> lower, c10::ArrayRef<double> step, c10::ArrayRef<int64_t> cells, const char* op) {
    TORCH_CHECK(lower.size() == 3 && step.size() == 3 && cells.size() == 3, "mmdet3d_ext::", op,
                ": 'lower', 'step' and 'cells' must have 3 entries (x, y, z), got ", lower.size(), ", ", step.size(), ", ",
                cells.size());
    Grid grid;
    double total = 1;
    for (int axis = 0; axis < 3; ++axis) {
      TORCH_CHECK(step[axis] > 0 && std::isfinite(step[axis]) && std::isfinite(lower[axis]), "mmdet3d_ext::", op,
                  ": 'step' must be positive and 'lower' finite, got ", step[axis], " and ", lower[axis]);
      TORCH_CHECK(cells[axis] >= 1 && cells[axis] <= INT32_MAX, "mmdet3d_ext::", op,
                  ": 'cells' must be between 1 and 2^31 - 1, got ", cells[axis]);
      total *= static_cast<double>(cells[axis]);
      TORCH_CHECK(total < 4e18, "mmdet3d_ext::", op, ": 'cells' must multiply to less than 4e18, got ", cells);
      grid.lower[axis] = static_cast<float>(lower[axis]);
      grid.step[axis] = static_cast<float>(step[axis]);
      grid.cells[axis] = static_cast<int32_t>(cells[axis]);
    }
    return grid;
  }

  MMDET3D_EXT_HD uint64_t linear(const int32_t cell[3]) const {
    return (static_cast<uint64_t>(cell[2]) * cells[1] + static_cast<uint64_t>(cell[1])) * cells[0] + cell[0];
  }

  uint64_t size() const { return static_cast<uint64_t>(cells[0]) * cells[1] * cells[2]; }

  // False if the point is outside, or not a number. With `truncate`, cell 0 also takes what lies up to one cell below it.
  MMDET3D_EXT_HD bool locate(float x, float y, float z, bool truncate, int32_t out[3]) const {
    const float point[3] = {x, y, z};
    for (int axis = 0; axis < 3; ++axis) {
      float cell = (point[axis] - lower[axis]) / step[axis];
      cell = truncate ? truncf(cell) : floorf(cell);
      // Compared as floats: a far point would overflow an integer, and NaN compares false.
      if (!(cell >= 0.0f && cell < static_cast<float>(cells[axis]))) return false;
      out[axis] = static_cast<int32_t>(cell);
    }
    return true;
  }
};

}  // namespace mmdet3d_ext
