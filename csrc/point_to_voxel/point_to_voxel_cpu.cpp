// Points of equal coordinates to one voxel, on the CPU. Letters: P points, K coordinate columns, C channels, V voxels.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "common/cpu_grouping.h"
#include "point_to_voxel/point_to_voxel.h"

namespace mmdet3d_ext {
namespace {

std::vector<uint64_t> keys_of(const at::Tensor& coords) {
  const int64_t count = coords.size(0);
  std::vector<uint64_t> keys(count);
  if (count == 0) return keys;
  const at::Tensor key = ranked_keys(coords);
  const int64_t* value = key.const_data_ptr<int64_t>();
  for (int64_t p = 0; p < count; ++p) keys[p] = value[p] < 0 ? kDroppedKey : static_cast<uint64_t>(value[p]);
  return keys;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> point_groups_cpu(const at::Tensor& coords) {
  check_coords(coords);
  const int64_t count = coords.size(0), columns = coords.size(1);
  const std::vector<uint64_t> keys = keys_of(coords);
  const DistinctKeys distinct(keys.data(), count);

  struct Voxel {
    uint64_t key;
    int32_t part, entry, first;
  };
  std::vector<Voxel> voxels;
  std::vector<int64_t> runs = {0};
  for (int64_t part = 0; part < distinct.parts(); ++part) {
    const auto& list = distinct.entries[part];
    for (size_t k = 0; k < list.size(); ++k)
      voxels.push_back({list[k].key, static_cast<int32_t>(part), static_cast<int32_t>(k), list[k].first});
    runs.push_back(static_cast<int64_t>(voxels.size()));
  }
  const auto before = [](const Voxel& a, const Voxel& b) { return a.key < b.key; };
  for_each_part(distinct.parts(), [&](int64_t part) { std::sort(voxels.begin() + runs[part], voxels.begin() + runs[part + 1], before); });
  for (int64_t part = 1; part < distinct.parts(); ++part)
    std::inplace_merge(voxels.begin(), voxels.begin() + runs[part], voxels.begin() + runs[part + 1], before);
  const int64_t voxel_count = static_cast<int64_t>(voxels.size());

  const auto ints = coords.options().dtype(at::kInt);
  at::Tensor voxel_coords = at::empty({voxel_count, columns}, coords.options());
  at::Tensor point2voxel = at::empty({count}, ints), order = at::empty({count}, ints);
  at::Tensor starts = at::empty({voxel_count + 1}, ints);
  at::Tensor has_long = at::zeros({}, coords.options().dtype(at::kBool));

  std::vector<std::vector<int32_t>> rank(distinct.parts());
  for (int64_t part = 0; part < distinct.parts(); ++part) rank[part].resize(distinct.entries[part].size());
  for (int64_t v = 0; v < voxel_count; ++v) rank[voxels[v].part][voxels[v].entry] = static_cast<int32_t>(v);

  std::vector<int32_t> bin(count);
  int32_t* map = point2voxel.data_ptr<int32_t>();
  at::parallel_for(0, count, 8192, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      map[p] = distinct.entry_of[p] < 0 ? -1 : rank[distinct.part_of(keys[p])][distinct.entry_of[p]];
      bin[p] = map[p] < 0 ? static_cast<int32_t>(voxel_count) : map[p];
    }
  });
  int32_t* points = order.data_ptr<int32_t>();
  counting_sort(bin.data(), count, voxel_count, points, starts.data_ptr<int32_t>());
  std::fill(points + starts.data_ptr<int32_t>()[voxel_count], points + count, -1);

  const at::Tensor rows = coords.contiguous();
  AT_DISPATCH_INDEX_TYPES(rows.scalar_type(), "point_groups", [&] {
    const index_t* in = rows.const_data_ptr<index_t>();
    index_t* out = voxel_coords.data_ptr<index_t>();
    for (int64_t v = 0; v < voxel_count; ++v) std::copy_n(in + voxels[v].first * columns, columns, out + v * columns);
  });
  const at::Tensor counts = starts.slice(0, 1) - starts.slice(0, 0, voxel_count);
  // Nothing to the CPU, but groups may be taken to a GPU.
  const int32_t* sizes = counts.const_data_ptr<int32_t>();
  *has_long.data_ptr<bool>() = std::any_of(sizes, sizes + voxel_count, [](int32_t size) { return size > kLong; });
  return {voxel_coords, point2voxel, counts, order, starts, has_long};
}

template <typename T, typename A>
void reduce_voxel(const T* feats, int64_t channels, const int32_t* points, int64_t count, int64_t reduce, A* sum, T* out, int32_t* arg) {
  std::fill_n(sum, channels, A(0));
  for (int64_t k = 0; k < count; ++k) {
    const T* row = feats + points[k] * channels;
    if (reduce != kMax) {
      for (int64_t c = 0; c < channels; ++c) sum[c] += static_cast<A>(row[c]);
      continue;
    }
    for (int64_t c = 0; c < channels; ++c) {
      const A value = static_cast<A>(row[c]);
      // The first maximum, and the first NaN over everything.
      if (k == 0 || value > sum[c] || (std::isnan(value) && !std::isnan(sum[c]))) {
        sum[c] = value;
        arg[c] = points[k];
      }
    }
  }
  for (int64_t c = 0; c < channels; ++c) out[c] = static_cast<T>(reduce == kMean ? sum[c] / static_cast<A>(count) : sum[c]);
}

std::tuple<at::Tensor, at::Tensor> group_reduce_cpu(const at::Tensor& feats, const at::Tensor& point2voxel, const at::Tensor& counts,
                                                    const at::Tensor& order, const at::Tensor& starts, const at::Tensor& has_long,
                                                    int64_t reduce) {
  check_reduce(feats, point2voxel, counts, order, starts, has_long, reduce);
  const at::Tensor rows = feats.contiguous();
  const int64_t channels = rows.size(1), voxel_count = starts.size(0) - 1;
  at::Tensor out = at::empty({voxel_count, channels}, rows.options());
  at::Tensor arg = reduce == kMax ? at::empty({voxel_count, channels}, order.options()) : at::empty({0}, order.options());
  const int32_t* start = starts.const_data_ptr<int32_t>();
  const int32_t* points = order.const_data_ptr<int32_t>();
  int32_t* args = arg.data_ptr<int32_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "group_reduce", [&] {
    const scalar_t* in = rows.const_data_ptr<scalar_t>();
    scalar_t* result = out.data_ptr<scalar_t>();
    at::parallel_for(0, voxel_count, 256, [&](int64_t begin, int64_t end) {
      std::vector<at::opmath_type<scalar_t>> sum(channels);
      for (int64_t v = begin; v < end; ++v)
        reduce_voxel(in, channels, points + start[v], start[v + 1] - start[v], reduce, sum.data(), result + v * channels,
                     reduce == kMax ? args + v * channels : nullptr);
    });
  });
  return {out, arg};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> dynamic_point_to_voxel_cpu(const at::Tensor& feats,
                                                                                                const at::Tensor& coords, int64_t reduce) {
  check_points_and_coords(feats, coords, reduce);
  const auto [voxel_coords, point2voxel, counts, order, starts, has_long] = point_groups_cpu(coords);
  const auto [out, arg] = group_reduce_cpu(feats, point2voxel, counts, order, starts, has_long, reduce);
  return {out, voxel_coords, point2voxel, counts, arg};
}

at::Tensor group_reduce_backward_cpu(const at::Tensor& grad, const at::Tensor& point2voxel, const at::Tensor& counts, const at::Tensor& arg,
                                     int64_t reduce) {
  check_reduce_backward(grad, point2voxel, counts, arg, reduce);
  const at::Tensor rows = grad.contiguous();
  const int64_t count = point2voxel.size(0), channels = rows.size(1);
  at::Tensor out = at::empty({count, channels}, rows.options());
  const int32_t* map = point2voxel.const_data_ptr<int32_t>();
  const int32_t* points = counts.const_data_ptr<int32_t>();
  const int32_t* args = arg.const_data_ptr<int32_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "group_reduce_backward", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const scalar_t* in = rows.const_data_ptr<scalar_t>();
    scalar_t* result = out.data_ptr<scalar_t>();
    // Every point writes its own row and nothing else, so no index can leave the buffer.
    at::parallel_for(0, count, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        scalar_t* row = result + p * channels;
        const int64_t v = map[p];
        if (v < 0) {
          std::fill_n(row, channels, scalar_t(0));
        } else if (reduce == kMax) {
          for (int64_t c = 0; c < channels; ++c) row[c] = args[v * channels + c] == p ? in[v * channels + c] : scalar_t(0);
        } else {
          const acc_t divisor = reduce == kMean ? static_cast<acc_t>(points[v]) : acc_t(1);
          for (int64_t c = 0; c < channels; ++c) row[c] = static_cast<scalar_t>(static_cast<acc_t>(in[v * channels + c]) / divisor);
        }
      }
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(mmdet3d_ext, CPU, m) {
  m.impl("point_groups", &point_groups_cpu);
  m.impl("dynamic_point_to_voxel", &dynamic_point_to_voxel_cpu);
  m.impl("group_reduce", &group_reduce_cpu);
  m.impl("group_reduce_backward", &group_reduce_backward_cpu);
}

}  // namespace mmdet3d_ext
