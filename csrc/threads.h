// Work on rows divided among threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <functional>

namespace metselect {

constexpr int64_t kTile = 512;  // rows: 512 x 128 floats stay in the second-level cache

// Returns the number of threads for n rows.
inline int64_t workers(int64_t n) {
  const int64_t tiles = (n + kTile - 1) / kTile;
  return std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), tiles));
}

// Calls body(begin, end, worker) on one contiguous share of [0, n) per thread, so that results
// depend only on the number of threads.
inline void over_shares(int64_t n, int64_t shares,
                        const std::function<void(int64_t, int64_t, int64_t)>& body) {
  const int64_t share = (n + shares - 1) / shares;
  at::parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
    at::AutoDispatchBelowADInplaceOrView guard;  // threads of the pool do not inherit it
    for (int64_t worker = first; worker < last; ++worker) {
      const int64_t begin = std::min(n, worker * share);
      body(begin, std::min(n, begin + share), worker);
    }
  });
}

}  // namespace metselect
