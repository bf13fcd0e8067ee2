// CPU helpers that group items by an integer key, on all cores, with the same result for any number of threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace mmdet3d_ext {

// Runs body(part) for part in [0, parts), one part a task.
template <typename F>
void for_each_part(int64_t parts, const F& body) {
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) body(part);
  });
}

// Stable counting sort. bin[i] in [0, bins]; items of bin `bins` (dropped ones) come last.
// Writes order (n) and starts (bins + 1): bin k holds order[starts[k]] ... order[starts[k + 1] - 1].
inline void counting_sort(const int32_t* bin, int64_t n, int64_t bins, int32_t* order, int32_t* starts) {
  // Each part keeps a table of all bins: not worth more tables than there are items.
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>({at::get_num_threads(), n / 16384 + 1, 2 * n / (bins + 1) + 1}));
  const int64_t length = (n + parts - 1) / parts;
  std::vector<int32_t> next(parts * (bins + 1), 0);
  for_each_part(parts, [&](int64_t part) {
    int32_t* table = next.data() + part * (bins + 1);
    for (int64_t i = part * length; i < std::min(n, (part + 1) * length); ++i) ++table[bin[i]];
  });
  int32_t total = 0;
  for (int64_t k = 0; k <= bins; ++k) {
    starts[k] = total;
    for (int64_t part = 0; part < parts; ++part) {
      int32_t& slot = next[part * (bins + 1) + k];
      const int32_t count = slot;
      slot = total;
      total += count;
    }
  }
  for_each_part(parts, [&](int64_t part) {
    int32_t* table = next.data() + part * (bins + 1);
    for (int64_t i = part * length; i < std::min(n, (part + 1) * length); ++i) order[table[bin[i]]++] = static_cast<int32_t>(i);
  });
}

constexpr uint64_t kDroppedKey = ~uint64_t(0);

// The distinct values of `keys` (kDroppedKey left out). Keys are split over parts by their hash, each part with its own table.
class DistinctKeys {
 public:
  struct Entry {
    uint64_t key;
    int32_t first;  // first item with this key
    int32_t count;
  };
  std::vector<std::vector<Entry>> entries;  // per part, by first item
  std::vector<int32_t> entry_of;            // per item: index in entries[part_of(key)]; -1 if dropped
  std::vector<int32_t> nth;                 // per item: how many earlier items have its key

  DistinctKeys(const uint64_t* keys, int64_t n) : entry_of(n), nth(n) {
    parts_ = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), n / 4096 + 1));
    entries.resize(parts_);
    for_each_part(parts_, [&](int64_t part) { fill(part, keys, n); });
  }

  int64_t parts() const { return parts_; }
  int64_t part_of(uint64_t key) const { return static_cast<int64_t>((mix(key) >> 32) % static_cast<uint64_t>(parts_)); }

 private:
  static uint64_t mix(uint64_t x) {  // the finaliser of splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
  }

  void fill(int64_t part, const uint64_t* keys, int64_t n) {
    int64_t mine = 0;
    for (int64_t i = 0; i < n; ++i) mine += keys[i] != kDroppedKey && part_of(keys[i]) == part;
    uint64_t size = 16;
    while (size < static_cast<uint64_t>(2 * mine)) size *= 2;
    std::vector<int32_t> table(size, -1);
    std::vector<Entry>& list = entries[part];
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t key = keys[i];
      if (key == kDroppedKey) {
        if (part == 0) entry_of[i] = -1;
        continue;
      }
      if (part_of(key) != part) continue;
      uint64_t slot = mix(key) & (size - 1);
      while (table[slot] >= 0 && list[table[slot]].key != key) slot = (slot + 1) & (size - 1);
      if (table[slot] < 0) {
        table[slot] = static_cast<int32_t>(list.size());
        list.push_back({key, static_cast<int32_t>(i), 0});
      }
      entry_of[i] = table[slot];
      nth[i] = list[table[slot]].count++;
    }
  }

  int64_t parts_;
};

}  // namespace mmdet3d_ext
